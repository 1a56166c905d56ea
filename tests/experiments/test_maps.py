"""Maps of importance as an experiment: the scores of maps against known answers, one small run, every verdict."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from helpers.finished import cut_down, finished, judged, rows_file, run
from pullback.experiments.experiment import Found
from pullback.experiments.maps import (
    BY_HALF,
    BY_HEAD,
    BY_TOME,
    DEEP,
    DEPTH,
    DEPTH_ANYTHING,
    DINOV2_DEPTH,
    EDGES,
    EXACT,
    HEAD,
    HIGHEST,
    IMPORTANCE_MAPS,
    LESS,
    LOWEST,
    RHO,
    SHOWN,
    TINY_CLS,
    TINY_DEPTH,
    TOGETHER,
    TOME,
    depth_steps,
    figure_of,
    half_ordered,
    maps_of,
    marks,
    picture,
    redundancy,
    scores_of,
    together,
)
from pullback.experiments.scales import SCALES
from pullback.experiments.workshop import Workshop
from pullback.pruning.scores import NEVER
from pullback.report.panels import QUALITIES, Album, panel_of
from pullback.runs.progress import Progress

FEW = {"images": 5, "size": 56, "cells": 3, "train": 4, "steps": 2, "batch": 2, "width": 16}


# What is listed


@pytest.mark.parametrize("scale", SCALES.values(), ids=lambda scale: scale.name)
def test_the_cells_are_valid_and_hold_the_numbers_of_the_paper(scale):
    cells = IMPORTANCE_MAPS.checked_cells(scale)
    places = {place for cell in cells for place in cell.places}
    assert set(IMPORTANCE_MAPS.paper) <= places
    assert sorted(IMPORTANCE_MAPS.paper.values()) == [-0.14, 0.20, 0.27, 0.87, 0.95]
    measured = [cell.key for cell in cells if scale.why_absent(cell) is None]
    assert {TINY_DEPTH.title, TINY_CLS.title} <= set(measured)
    (small,) = [cell for cell in cells if cell.key == DINOV2_DEPTH.title]
    assert ("DINOv2-S" in (scale.why_absent(small) or "")) == (scale.name == "paper")


# Scores of maps


def test_redundancy_is_one_less_the_highest_cosine_to_another_patch():
    tokens = torch.randn(2, 9, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    tokens[:, 0] = tokens[:, 4]  # the class token is like a patch, and does not count
    found = redundancy(tokens, 1)
    for image in range(2):
        for patch in range(1, 9):
            cosines = [
                float(torch.nn.functional.cosine_similarity(tokens[image, patch], tokens[image, other], dim=0))
                for other in range(1, 9)
                if other != patch
            ]
            assert found[image, patch].item() == pytest.approx(1 - max(cosines), abs=1e-5)


def test_a_quarter_of_the_patches_is_marked_also_among_equals():
    values = torch.arange(16.0).view(1, 4, 4)
    assert marks(values)[0].flatten().nonzero().flatten().tolist() == [12, 13, 14, 15]
    assert marks(torch.zeros(2, 4, 4)).sum((1, 2)).tolist() == [4, 4]


@pytest.mark.parametrize(
    ("places", "share"),
    [
        ([(1, 1), (1, 2), (2, 1), (2, 2)], 8 / 16),  # a block: each has two of its four neighbours
        ([(0, 0), (0, 1), (1, 0), (1, 1)], 8 / 12),  # in the corner there are fewer
        ([(0, 0), (1, 1), (2, 2), (3, 3)], 0.0),
    ],
)
def test_neighbours_are_counted_to_four_sides(places, share):
    marked = torch.zeros(1, 4, 4, dtype=torch.bool)
    for place in places:
        marked[0][place] = True
    assert together(marked).item() == pytest.approx(share)


@pytest.mark.parametrize(("edge", "columns"), [(28, [1, 2]), (20, [0, 1]), (35, [2]), (None, [])])
def test_depth_steps_stand_where_depth_jumps(edge, columns):
    depth = torch.ones(1, 56, 56)
    if edge is not None:
        depth[:, :, edge:] = torch.e
    steps = depth_steps(depth, (4, 4))
    expected = torch.zeros(4, 4)
    expected[:, columns] = 1.0
    torch.testing.assert_close(steps[0], expected)


def test_depth_steps_of_a_map_of_another_size_are_brought_to_the_patches():
    assert depth_steps(torch.rand(2, 30, 30) + 1, (4, 4)).shape == (2, 4, 4)


def maps(**own: torch.Tensor) -> dict[str, torch.Tensor]:
    drawn = torch.rand(5, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    return dict(zip((EXACT, HEAD, DEPTH, TOME, "edges"), drawn, strict=True)) | own


def test_scores_of_a_map_are_those_of_scipy_and_of_sets():
    known = maps()
    found = scores_of(known, HEAD)
    for at in range(3):
        own, exact, depth, edges = (known[name][at].flatten() for name in (HEAD, EXACT, DEPTH, "edges"))
        assert found[RHO][at].item() == pytest.approx(spearmanr(own, exact).statistic)
        assert found[DEEP][at].item() == pytest.approx(spearmanr(own, depth).statistic)
        top, wanted, steep = (set(values.argsort()[-4:].tolist()) for values in (own, exact, edges))
        assert found["top 25 % shared"][at].item() == pytest.approx(len(top & wanted) / 4)
        assert found[EDGES][at].item() == pytest.approx(len(top & steep) / 4)
    assert scores_of(known, EXACT)[RHO].tolist() == pytest.approx([1.0] * 3)


def test_the_half_that_tome_orders_is_scored_alone():
    known = maps()
    half = known[EXACT].clone()
    half[:, :, ::2] = NEVER
    known["half"] = half
    assert half_ordered(known).tolist() == pytest.approx([1.0] * 3)
    half[:, :, 1::2] = -known[EXACT][:, :, 1::2]
    assert half_ordered(known).tolist() == pytest.approx([-1.0] * 3)


# One small run


@pytest.fixture(scope="module")
def cut():
    return cut_down(IMPORTANCE_MAPS, lambda cell: cell.key in (TINY_DEPTH.title, TINY_CLS.title), **FEW)


@pytest.fixture(scope="module")
def out(cut, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("maps")
    run(cut, folder)
    return folder


@pytest.fixture(scope="module")
def rows(cut, out) -> dict[tuple[str, str, str], dict]:
    return {(row["table"], row["row"], row["column"]): row for row in run(cut, out)}  # finished, and read again


@pytest.mark.parametrize("own", [TINY_DEPTH, TINY_CLS], ids=lambda own: own.title)
def test_the_figure_shows_what_the_rows_say(cut, out, rows, own):
    arrays = dict(np.load(out / cut.name / "arrays" / f"{figure_of(own)}.npz"))
    names = arrays["names"].tolist()
    assert names == [EXACT, HEAD, TOME, DEPTH][: 4 if own.dense else 3]
    assert arrays["pictures"].shape == (SHOWN, 56, 56, 3)
    assert arrays["pictures"].std() > 20
    assert arrays["maps"].shape == (len(names), SHOWN, 4, 4)
    for name, column in ((HEAD, BY_HEAD), (TOME, BY_TOME)):
        number = names.index(name)
        for at in range(SHOWN):
            told = rows[own.by_picture, picture(at), column]["value"]
            exact = spearmanr(arrays["maps"][number, at].ravel(), arrays["maps"][0, at].ravel()).statistic
            assert told == pytest.approx(exact, abs=1e-6)
            assert arrays["rho"][number, at] == pytest.approx(told)
        shown = arrays["rho"][number]
        assert rows[own.title, name, LOWEST]["value"] == pytest.approx(shown.min())
        assert rows[own.title, name, HIGHEST]["value"] == pytest.approx(shown.max())
    panel = panel_of("maps", arrays, Album(QUALITIES[0]))
    assert len(panel["pictures"]) == SHOWN
    assert panel["pictures"][0]["maps"][0]["rho"] is None


def test_differences_are_of_the_same_pictures(rows):
    for own in (TINY_DEPTH, TINY_CLS):
        for column in own.measures:
            head, tome, less = (rows[own.title, row, column] for row in (HEAD, TOME, LESS))
            assert less["value"] == pytest.approx(head["value"] - tome["value"])
            assert less["count"] == FEW["images"]


def test_the_head_that_ships_knows_what_matters(rows):
    for own in (TINY_DEPTH, TINY_CLS):
        assert rows[own.title, HEAD, RHO]["value"] > 0.5
        assert "comes with the package" in rows[own.title, HEAD, RHO]["note"]
        assert rows[own.title, EXACT, RHO]["value"] == pytest.approx(1.0)


def test_a_head_is_trained_where_none_ships(cut, tmp_path):
    shop = Workshop(cut, SCALES["tiny"], tmp_path, torch.device("cpu"), Progress())
    found, said, pictures = maps_of(shop, replace(TINY_DEPTH, distance="log"))
    assert said == "a head trained on 4 pictures"
    assert len(list(tmp_path.glob("store/head-*"))) == 1
    assert pictures.shape == (5, 3, 56, 56)
    assert all(values.shape == (5, 4, 4) and values.isfinite().all() for values in found.values())


def test_a_second_run_gives_the_same_bytes(cut, out, tmp_path):
    run(cut, tmp_path)
    assert rows_file(cut, tmp_path).read_bytes() == rows_file(cut, out).read_bytes()
    document = json.loads((out / cut.name / "experiment.json").read_text())
    assert all(claim["word"] != "not at this scale" for claim in document["claims"])
    assert len(document["footnotes"]) == 2


# Verdicts


def shown(head=(0.9,) * 4, tome=(0.1,) * 4, own=TINY_DEPTH, **rows):
    """Return finished rows: rho of each picture, and values of rows by "ROW COLUMN"."""
    values = {}
    for at in range(SHOWN):
        for column, each in ((BY_HEAD, head), (BY_TOME, tome), (BY_HALF, tome)):
            values[own.by_picture, picture(at), column] = each[at]
    values[own.title, HEAD, RHO] = rows.get("mean", (0.2, 0.15, 0.25))
    values[own.title, TOME, RHO] = (0.1, 0.0, 0.2)
    values[own.title, HEAD, LOWEST] = min(head)
    for row in (HEAD, TOME, EXACT):
        for column in (EDGES, DEEP, TOGETHER):
            values[own.title, row, column] = (0.5, 0.4, 0.6)
    values[own.title, HEAD, EDGES] = rows.get("edges", (0.5, 0.4, 0.6))
    for column in (EDGES, TOGETHER):
        values[own.title, LESS, column] = rows.get("less", (0.1, 0.05, 0.2))
    return finished(values)


CLAIMS = ("On the pictures", "The pictures shown", "ToMe's score is", "The head's map", "ToMe's score picks")


@pytest.mark.parametrize(
    ("claim", "found", "word"),
    [
        ("On the pictures", shown(), "holds"),
        ("On the pictures", shown(head=(0.866, 0.9, 0.95, 0.99)), "holds"),  # 0.87, as it is printed
        ("On the pictures", shown(head=(0.5, 0.9, 0.95, 0.99)), "holds partly"),
        ("On the pictures", shown(head=(0.5, 0.6, 0.7, 0.8)), "does not hold"),
        ("The pictures shown", shown(), "holds"),
        ("The pictures shown", shown(mean=(0.5, 0.4, 0.6)), "holds partly"),  # below, and not about 0.2
        ("The pictures shown", shown(mean=(0.88, 0.82, 0.92)), "does not hold"),
        ("ToMe's score is", shown(), "holds"),
        ("ToMe's score is", shown(tome=(-0.3, 0.2, 0.1, 0.0)), "holds partly"),
        ("ToMe's score is", shown(tome=(-0.3, 0.5, 0.8, 0.9)), "does not hold"),
        ("The head's map", shown(), "holds"),
        ("The head's map", shown(less=(0.1, -0.1, 0.2)), "holds partly"),
        ("The head's map", shown(edges=(0.3, 0.2, 0.4), less=(0.1, -0.1, 0.2)), "does not hold"),
        ("ToMe's score picks", shown(), "holds"),
        ("ToMe's score picks", shown(less=(0.0, -0.1, 0.1)), "does not hold"),
        *((claim, finished({}), "not at this scale") for claim in CLAIMS),
    ],
)
def test_verdicts(claim, found, word):
    told = judged(IMPORTANCE_MAPS, found, claim)
    assert told[0] == word, told
    assert told[1].endswith(".")


def test_the_decoder_of_the_paper_decides_where_it_was_measured():
    parts = (shown(), shown(head=(0.1,) * 4, own=DEPTH_ANYTHING))
    both = Found(row for found in parts for place in found if (row := found.row(*place)) is not None)
    word, why = judged(IMPORTANCE_MAPS, both, "On the pictures")
    assert word == "does not hold"
    assert DEPTH_ANYTHING.title in why
    assert TINY_DEPTH.title not in why


def test_footnotes_say_our_measurement_and_nothing_without_one():
    found = shown(head=(0.5, 0.6, 0.7, 0.8), tome=(-0.3, 0.2, 0.1, 0.0))
    chosen, half = (note(found) for note in IMPORTANCE_MAPS.footnotes)
    assert "0.50 to 0.80 beside 0.20 (0.15 to 0.25)" in chosen
    assert "−0.30, 0.20, 0.10, 0.00" in half
    assert [note(finished({})) for note in IMPORTANCE_MAPS.footnotes] == [None, None]
