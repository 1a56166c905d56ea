"""The camera under two output metrics as an experiment: units, verdicts on rows made by hand, and one small run."""

import numpy as np
import pytest
import torch

from helpers.finished import Known, cut_down, finished, judged, lines, rows_file, run
from pullback.experiments.camera_metric import compare_metrics
from pullback.experiments.experiment import Found, Place
from pullback.experiments.output_metric import (
    AGREE,
    AGREE_PATCHES,
    CHANCE,
    COLUMNS,
    KAPPA,
    KAPPA_SO3,
    LOW,
    LOW_SO3,
    OUR_ROWS,
    OURS,
    OUTPUT_METRIC,
    PAPERS,
    R_EFF,
    R_EFF_SO3,
    RHO,
    RHO_PATCHES,
    TABLE,
    scenes,
)
from pullback.experiments.scales import SCALES, scale_of
from pullback.experiments.workshop import Workshop
from pullback.runs.progress import Progress
from pullback.vggt.camera_metric import CameraMetric

FEW = {"scenes": 2, "view size": 24}
MINE = cut_down(OUTPUT_METRIC, lambda cell: cell.model == "tiny-views", **FEW)


def shop_of(out) -> Workshop:
    return Workshop(MINE, SCALES["tiny"], out, torch.device("cpu"), Progress())


def test_rows_are_those_of_the_comparison_and_the_same_in_a_second_run(tmp_path) -> None:
    found = {(row["row"], row["column"]): row for row in run(MINE, tmp_path / "one")}
    assert set(found) == {(row, column) for row in OUR_ROWS for column in COLUMNS}
    shop = shop_of(tmp_path)
    images = shop.scenes(2, 2, 24)
    for row, unit in OUR_ROWS.items():
        truth = compare_metrics(shop.probe("tiny-views", "camera", 5), images, CameraMetric(unit), rank=20)
        for column, values in (
            (LOW, truth.captured[0][:, 3]), (LOW_SO3, truth.captured[1][:, 3]), (R_EFF, truth.effective_rank[0]),
            (R_EFF_SO3, truth.effective_rank[1]), (RHO, truth.spearman_all), (RHO_PATCHES, truth.spearman_patches),
            (AGREE, truth.agreement_all), (AGREE_PATCHES, truth.agreement_patches),
        ):  # fmt: skip
            np.testing.assert_allclose(found[row, column]["value"], values.mean(), rtol=1e-5, err_msg=column)
            assert (found[row, column]["count"], found[row, column]["over"]) == (2, "scenes")
        assert all(found[row, column]["value"] == pytest.approx(1, abs=1e-4) for column in (KAPPA, KAPPA_SO3))
        assert "of 16 directions" in found[row, KAPPA]["note"] and found[row, LOW]["note"] is None
        assert found[row, CHANCE]["value"] == 0.5
    first, *others = (found[row, LOW_SO3]["value"] for row in OUR_ROWS)
    assert first not in others, "another unit is another metric"
    assert len({found[row, LOW]["value"] for row in OUR_ROWS}) == 1, "the Euclidean one has no units"
    run(MINE, tmp_path / "two")
    assert rows_file(MINE, tmp_path / "one").read_bytes() == rows_file(MINE, tmp_path / "two").read_bytes()


def test_scenes_are_drawn_in_parts_or_read_from_folders_one_at_a_time(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("pullback.experiments.output_metric._PART", 1)
    assert [part.shape for part in scenes(shop_of(tmp_path), "tiny-views")] == [(1, 2, 3, 24, 24)] * 2
    for name in ("a", "b", "c"):
        (tmp_path / "views" / name).mkdir(parents=True)
        from PIL import Image

        for view in range(2):
            Image.new("RGB", (40, 40), (view, 9, 9)).save(tmp_path / "views" / name / f"{view}.png")
    monkeypatch.setattr("pullback.experiments.output_metric.VGGT_WIDTH", 24)
    scale = scale_of("tiny", {"vggt": "tiny-views"}, {"multiview": str(tmp_path / "views")})
    shop = Workshop(MINE, scale, tmp_path, torch.device("cpu"), Progress())
    found = list(scenes(shop, "vggt"))
    assert len(found) == 2, "as many as are counted"
    assert all(part.shape[-4:] == (2, 3, 24, 24) for part in found)


# Verdicts


def rows(**values: tuple[float, ...]) -> Found:
    columns = (KAPPA, KAPPA_SO3, LOW, LOW_SO3, RHO, AGREE)
    names = {"papers": PAPERS, "ours": OURS}
    return finished(lines(TABLE, columns, {names[name]: own for name, own in values.items()}))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ((1.0, 0.99, 0.9, 0.89, 0.995, 0.97), ("holds", "holds", "holds")),
        ((1.0, 0.99, 0.9, 0.8, 0.995, 0.94), ("holds partly", "holds", "does not hold")),
        ((1.0, 0.97, 0.9, 0.8, 0.97, 0.94), ("does not hold", "does not hold", "does not hold")),
    ],
)
def test_claims_are_judged_by_the_paper_s_model_or_else_by_ours(values: tuple[float, ...], words: tuple) -> None:
    for found in (rows(ours=values), rows(papers=values, ours=(0.0,) * 6)):
        sentences = [claim.sentence for claim in OUTPUT_METRIC.claims]
        assert tuple(judged(OUTPUT_METRIC, found, sentence)[0] for sentence in sentences) == words
    assert OURS in judged(OUTPUT_METRIC, rows(ours=values), "Token")[1]


def test_little_and_what_lies_within_the_intervals_is_no_change() -> None:
    def word(first: Known, second: Known, agree: Known = 0.97) -> tuple[str, ...]:
        values = {KAPPA: 1.0, KAPPA_SO3: 1.0, LOW: first, LOW_SO3: second, RHO: 0.995, AGREE: agree}
        found = finished({(TABLE, OURS, column): known for column, known in values.items()})
        return tuple(judged(OUTPUT_METRIC, found, sentence)[0] for sentence in ("An SO(3)", "The two sets"))

    assert word((0.90, 0.85, 0.95), (0.86, 0.82, 0.90))[0] == "holds", "the intervals overlap"
    assert word((0.90, 0.89, 0.91), (0.86, 0.85, 0.87))[0] == "holds partly"
    assert word((0.900, 0.899, 0.901), (0.885, 0.884, 0.886))[0] == "holds", "beyond the noise, and little"
    assert word(0.9, 0.9, (0.958, 0.944, 0.971))[1] == "holds", "97 % lie within the interval"
    assert word(0.9, 0.9, (0.955, 0.950, 0.960))[1] == "does not hold"


def test_other_units_decide_nothing_and_stand_in_the_footnote() -> None:
    other = next(row for row in OUR_ROWS if row != OURS)
    alone = finished(lines(TABLE, (RHO, AGREE), {other: (0.98, 0.95)}))
    assert {claim.judge(alone).word for claim in OUTPUT_METRIC.claims} == {"not at this scale"}
    both = finished(lines(TABLE, (LOW, LOW_SO3, RHO, AGREE), {OURS: (0.9, 0.8, 1, 1), other: (0.9, 0.8, 0.98, 0.95)}))
    bounded, units = (note(both) for note in OUTPUT_METRIC.footnotes)
    assert bounded and bounded.endswith("here 90.0% and 80.0%.")
    assert units and f"{other}: ρ 0.980, 50 % sets agree 95.0%." in units
    assert OUTPUT_METRIC.footnotes[1](alone) is None, "nothing to compare with"


def test_the_papers_numbers_stand_at_their_places() -> None:
    wanted = {KAPPA: 0.99, KAPPA_SO3: 0.99, RHO: 0.995, AGREE: 0.97}
    assert OUTPUT_METRIC.paper == {Place(TABLE, PAPERS, column): value for column, value in wanted.items()}
