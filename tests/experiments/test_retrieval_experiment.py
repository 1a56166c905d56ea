"""Retrieval as an experiment: scores against known distances, one small run beside float64, every verdict by hand."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import kendalltau, spearmanr

from helpers.finished import Known, cut_down, finished, judged, rows_file, run
from pullback.errors import ModelError
from pullback.experiments.experiment import Found, Place
from pullback.experiments.retrieval import (
    BASELINES,
    COMPARED,
    CONSTANT,
    COSINE,
    DINOV2,
    DRM,
    L2,
    MAE,
    MAE_SCALED,
    MEASURES,
    NOTHING,
    REFERENCE,
    RETRIEVAL,
    RHO,
    RMSE_SCALED,
    ROWS,
    SHIPPED,
    TAU,
    TRAINED,
    ahead,
    metric_of,
    scored,
)
from pullback.experiments.scales import SCALES
from pullback.experiments.workshop import Workshop
from pullback.learning.distilled_metric import DistilledMetric
from pullback.learning.train_drm import MetricTask
from pullback.runs.progress import Progress

FEW = {
    "images": 8, "scenes to train": 12, "validation": 4, "importance": 4, "cells": 2, "steps": 6, "batch": 4, "rank": 4,
    "width": 16, "trained size": 56,
}  # fmt: skip


# What is listed


@pytest.mark.parametrize("scale", SCALES.values(), ids=lambda scale: scale.name)
def test_the_cells_are_valid_and_hold_every_number_of_the_paper(scale):
    cells = RETRIEVAL.checked_cells(scale)
    printed = {place: value for place, value in RETRIEVAL.paper.items() if not place.table.endswith("another")}
    assert len(printed) == 16 + 12
    assert printed[Place("DINOv2 depth, L10, photographs", DRM, RHO)] == 0.783
    assert printed[Place("DINOv2 depth, L10, rooms", L2, "RMSE")] == 7.90
    measured = [cell.key for cell in cells if scale.why_absent(cell) is None]
    assert set(measured) == {own.table(title) for own in (SHIPPED, TRAINED) for title, _ in own.sets}
    absent = next(scale.why_absent(cell) for cell in cells if cell.key == DINOV2.own)
    assert ("ViT-B/14 is published" in absent) == (scale.name == "paper")


def test_differences_of_the_paper_follow_from_its_rows():
    assert RETRIEVAL.paper[Place(ahead(DINOV2.own), L2, RHO)] == pytest.approx(0.783 - 0.223)
    assert RETRIEVAL.paper[Place(ahead(DINOV2.own), COSINE, MAE)] == pytest.approx(0.233 - 0.677)


# Scores


def test_a_distance_in_other_units_has_a_large_error_until_it_is_scaled():
    points = torch.rand(12, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    truth = torch.cdist(points, points)
    found = scored({L2: 1000 * truth, NOTHING: torch.ones(12, 12), REFERENCE: truth})
    assert found[L2].queries["spearman"].tolist() == pytest.approx([1.0] * 12)
    assert found[L2].queries["mae"].mean() > 100
    assert found[L2].queries["mae_scaled"].max() < 1e-9
    assert found[REFERENCE].queries["rmse"].abs().max() == 0
    assert found[NOTHING].queries["spearman"].tolist() == [0.0] * 12
    for half in (0, 1):  # the constant is the median of the pairs that the other half of the queries knows
        others = truth[1 - half :: 2][:, 1 - half :: 2]
        known = others[~torch.eye(6, dtype=torch.bool)].numpy()
        for query in range(half, 12, 2):
            own = np.delete(truth[query].numpy(), query)
            told = found[NOTHING].queries["mae_scaled"][query].item()
            low, high = np.quantile(known, 0.5, method="lower"), np.quantile(known, 0.5, method="higher")
            assert any(told == pytest.approx(np.abs(own - middle).mean()) for middle in (low, high))


# The metric that ships


@pytest.fixture
def shop(tmp_path) -> Workshop:
    return Workshop(RETRIEVAL, SCALES["tiny"], tmp_path, torch.device("cpu"), Progress())


def test_the_metric_that_ships_is_named(shop):
    metric, said = metric_of(shop, SHIPPED)
    assert metric.layer == SHIPPED.layer
    assert said == "tiny-scenes-drm, which comes with the package, trained on 8,000 pictures"
    assert SHIPPED.size(RETRIEVAL.counts["tiny"]) == 224


def test_the_metric_that_ships_is_refused_at_another_layer(shop):
    with pytest.raises(ModelError, match="shipped: it was trained for layer 8"):
        metric_of(shop, replace(SHIPPED, layer=10))


# One small run


@pytest.fixture(scope="module")
def cut():
    return cut_down(RETRIEVAL, lambda cell: cell.key.startswith(TRAINED.title), **FEW)


@pytest.fixture(scope="module")
def out(cut, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("retrieval")
    run(cut, folder)
    return folder


@pytest.fixture(scope="module")
def rows(cut, out) -> dict[Place, dict]:
    return {Place(row["table"], row["row"], row["column"]): row for row in run(cut, out)}  # finished, and read again


@pytest.fixture(scope="module")
def known(cut, out) -> dict[str, torch.Tensor]:
    """Distances of the shifted scenes in float64, picture by picture."""
    shop = Workshop(cut, SCALES["tiny"], out, torch.device("cpu"), Progress())
    (folder,) = out.glob("store/drm-*")
    metric = DistilledMetric.from_pretrained(folder).double()
    probe = TRAINED.probe(shop)
    features = probe.features(shop.images("scenes-shifted", 8, model="tiny-scenes", size=56))
    with torch.no_grad():
        depth, plain = probe(features).double(), features.as_subclass(torch.Tensor).double()
        pairs = [(i, j) for i in range(8) for j in range(8)]
        found = {name: torch.zeros(8, 8, dtype=torch.float64) for name in (DRM, L2, COSINE, REFERENCE)}
        for i, j in pairs:
            found[DRM][i, j] = metric.distance(plain[i : i + 1], plain[j : j + 1])[0]
            found[L2][i, j] = (plain[i] - plain[j]).norm()
            found[COSINE][i, j] = 1 - torch.nn.functional.cosine_similarity(plain[i, 0], plain[j, 0], dim=0)
            apart = (depth[i] - depth[j]).abs().mean()
            found[REFERENCE][i, j] = apart / ((depth[i].abs().mean() + depth[j].abs().mean()) / 2)
    return found


@pytest.mark.parametrize("row", [DRM, L2, COSINE])
def test_rows_are_what_float64_gives_picture_by_picture(rows, known, row):
    others = ~np.eye(8, dtype=bool)
    own, truth = (known[name].numpy() for name in (row, REFERENCE))
    by_query = [(own[at][others[at]], truth[at][others[at]]) for at in range(8)]
    expected = {
        RHO: [spearmanr(*pair).statistic for pair in by_query],
        TAU: [kendalltau(*pair).statistic for pair in by_query],
        MAE: [np.abs(one - other).mean() for one, other in by_query],
        "RMSE": [np.sqrt(np.square(one - other).mean()) for one, other in by_query],
    }
    for column, values in expected.items():
        told = rows[Place(TRAINED.across[0], row, column)]
        assert told["value"] == pytest.approx(np.mean(values), rel=1e-3, abs=1e-4)
        assert (told["count"], told["over"]) == (8, "queries")


def test_differences_are_of_the_same_queries(rows):
    for table in (TRAINED.own, *TRAINED.across):
        for row in COMPARED:
            for column in MEASURES:
                drm, other = (rows[Place(table, name, column)]["value"] for name in (DRM, row))
                assert rows[Place(ahead(table), row, column)]["value"] == pytest.approx(drm - other, abs=1e-6)


def test_every_row_says_what_it_is(cut, out, rows):
    assert {place.row for place in rows if place.table == TRAINED.own} == {*ROWS, *BASELINES}
    assert rows[Place(TRAINED.own, DRM, RHO)]["note"] == "trained on 12 scenes and a crop of each"
    assert "fitted" in rows[Place(TRAINED.own, NOTHING, MAE)]["note"]
    assert rows[Place(TRAINED.own, REFERENCE, TAU)]["value"] == pytest.approx(1.0)
    document = json.loads((out / cut.name / "experiment.json").read_text())
    assert all(claim["word"] != "not at this scale" for claim in document["claims"])
    assert len(document["footnotes"]) == 3
    assert len(list(out.glob("store/drm-*"))) == 1  # and no folder of the training


def test_a_second_run_gives_the_same_bytes(cut, out, tmp_path):
    run(cut, tmp_path)
    assert rows_file(cut, tmp_path).read_bytes() == rows_file(cut, out).read_bytes()


def test_a_training_that_was_stopped_goes_on_to_the_same_bytes(cut, out, tmp_path, monkeypatch):
    calls: list[int] = []
    validate = MetricTask.validate

    def stopped(task: MetricTask, network: torch.nn.Module) -> object:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return validate(task, network)

    monkeypatch.setattr(MetricTask, "validate", stopped)
    with pytest.raises(KeyboardInterrupt):
        run(cut, tmp_path)
    (training,) = tmp_path.glob("store/drm-*")
    assert training.name.endswith("-training")
    assert any(training.iterdir())
    run(cut, tmp_path)
    assert len(calls) < 4 + FEW["steps"]  # not from the beginning
    assert rows_file(cut, tmp_path).read_bytes() == rows_file(cut, out).read_bytes()


# Verdicts

BEST, TIMES = "In distribution the learned", "DRM has 3.5 times"
DROPS, ACROSS, NARROWS = "MAE drops", "Across data", "The gap narrows"


def known_rows(
    own=TRAINED, *, drm: Known = (0.8, 0.75, 0.85), base: Known = (0.2, 0.15, 0.25),
    lead: Known = (0.5, 0.4, 0.6), raw: Known = (-5.0, -6.0, -4.0), scaled: Known = (-0.1, -0.2, -0.05),
    beyond: Known = (0.2, 0.1, 0.3), beyond_scaled: Known = (-0.1, -0.2, -0.05),
) -> Found:  # fmt: skip
    """Return rows of a decoder; ``beyond``: differences across data."""
    values: dict[tuple[str, str, str], Known] = {}
    for table in (own.own, *own.across):
        within = table == own.own
        for row in (*ROWS, *BASELINES):
            orders = drm if row == DRM else base
            values |= {(table, row, column): orders if column in (RHO, TAU) else 0.1 for column in MEASURES}
        for row in COMPARED:
            values |= {(ahead(table), row, column): lead if within else beyond for column in (RHO, TAU)}
            values |= {(ahead(table), row, column): raw for column in (MAE, "RMSE")}
            values |= {
                (ahead(table), row, column): scaled if within else beyond_scaled for column in (MAE_SCALED, RMSE_SCALED)
            }
    return finished(values)


@pytest.mark.parametrize(
    ("claim", "found", "word"),
    [
        (BEST, known_rows(), "holds"),
        (BEST, known_rows(lead=(0.1, -0.1, 0.3)), "does not hold"),
        (TIMES, known_rows(), "holds"),
        (TIMES, known_rows(drm=(0.6, 0.5, 0.65)), "holds"),  # 3 times, and 3.5 times is within the intervals
        (TIMES, known_rows(base=(0.5, 0.4, 0.6)), "does not hold"),
        (TIMES, known_rows(base=(0.0, -0.1, 0.1)), "holds"),
        (TIMES, known_rows(drm=(-0.1, -0.2, 0.0), base=(0.0, -0.1, 0.1)), "does not hold"),
        (DROPS, known_rows(), "holds"),
        (DROPS, known_rows(scaled=(0.0, -0.1, 0.1)), "holds partly"),  # in other units alone
        (DROPS, known_rows(raw=(1.0, 0.5, 2.0), scaled=(0.0, -0.1, 0.1)), "does not hold"),
        (ACROSS, known_rows(), "holds"),
        (ACROSS, known_rows(beyond_scaled=(0.0, -0.1, 0.1)), "holds partly"),
        (ACROSS, known_rows(beyond=(0.0, -0.1, 0.1), beyond_scaled=(0.0, -0.1, 0.1)), "does not hold"),
        (NARROWS, known_rows(), "holds"),
        (NARROWS, known_rows(beyond=(0.45, 0.35, 0.55)), "holds partly"),  # not beyond the noise
        (NARROWS, known_rows(lead=(0.1, 0.05, 0.15), beyond=(0.0, -0.1, 0.1)), "does not hold"),
        *((claim, finished({}), "not at this scale") for claim in (BEST, TIMES, DROPS, ACROSS, NARROWS)),
    ],
)
def test_verdicts(claim, found, word):
    told, why = judged(RETRIEVAL, found, claim)
    assert told == word, why
    assert why.endswith(".")


def test_the_verdict_across_data_names_what_is_lost():
    _, why = judged(RETRIEVAL, known_rows(beyond_scaled=(0.0, -0.1, 0.1)), ACROSS)
    assert f"not beyond the noise: {MAE_SCALED} of {L2}" in why


def test_the_decoder_of_the_paper_decides_where_it_was_measured():
    both = (known_rows(), known_rows(DINOV2, lead=(0.0, -0.1, 0.1)))
    found = Found(row for own in both for place in own if (row := own.row(*place)) is not None)
    word, why = judged(RETRIEVAL, found, BEST)
    assert word == "does not hold"
    assert DINOV2.own in why
    assert TRAINED.own not in why


def test_footnotes_say_our_measurement_and_nothing_without_one():
    units, intervals, constant = (note(known_rows()) for note in RETRIEVAL.footnotes)
    assert "L₂ has an MAE of 0.1" in units
    assert "somewhat too narrow" in intervals
    assert f"+0.200 (+0.100 to +0.300) ({TRAINED.across[0]})" in constant
    assert [note(finished({})) for note in RETRIEVAL.footnotes] == [None, None, None]
    assert CONSTANT in COMPARED
