"""Removing tokens of dense decoders as experiments: what is listed, the paper's numbers, and small runs of each."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pullback.experiments import dense_pruning as module
from pullback.experiments.dense_claims import (
    AGAINST_RANDOM,
    AGAINST_TOME,
    CHANGE,
    CHANGED,
    DIFFERENCES,
    DRAWN_AGAINST_TOME,
    EQUAL_OPERATIONS,
    EQUAL_SHARE,
    FOUR,
    LOWEST_AT,
    MERGED,
    ONE,
    SPREAD,
    STAGES_RATIOS,
    STD,
    TWO,
    cause_row,
    causes_table,
    difference,
    named,
    robustness_table,
    stages_row,
    stages_table,
    table_of,
)
from pullback.experiments.dense_errors import (
    CAUSES,
    COUNTS,
    IMPORTANCE,
    PHOTOS_DA,
    PHOTOS_S,
    RANDOM,
    ROOMS_DA,
    SCENES,
    SCORES,
    TOME,
    WHOLE,
    errors,
    plan_of,
)
from pullback.experiments.dense_pruning import COLUMNS, DENSE_PRUNING, DENSE_ROBUSTNESS, DENSE_STAGES, HALF
from pullback.experiments.experiment import Experiment, Found, Place
from pullback.experiments.run import run_experiments
from pullback.experiments.scales import DATA, MODELS, SCALES
from pullback.experiments.workshop import Workshop
from pullback.pruning.operations import operations
from pullback.runs.progress import Progress

EXPERIMENTS = (DENSE_PRUNING, DENSE_ROBUSTNESS, DENSE_STAGES)
TINY, CPU = SCALES["tiny"], torch.device("cpu")
SMALL = SCENES.at(56)
"""16 patches."""
FEW = {"scenes": 2, "scenes to train": 4, "larger scenes to train": 4, "seeds": 2, "steps": 4, "batch": 4, "width": 32}


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setitem(COUNTS, "tiny", {**COUNTS["tiny"], **FEW})


def run(experiment: Experiment, out: Path) -> list[dict]:
    """Rows of an experiment without what the paper has, as its models are left out."""
    run_experiments([replace(experiment, paper={}, figures=())], TINY, out, CPU, Progress())
    return [json.loads(line) for line in (out / experiment.name / "rows.jsonl").read_text().splitlines()]


def by_place(rows: list[dict]) -> Mapping[Place, dict]:
    return {Place(row["table"], row["row"], row["column"]): row for row in rows}


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda own: own.name)
def test_cells_are_valid_and_say_why_they_are_absent(experiment, scale):
    cells = experiment.checked_cells(scale)
    assert all(cell.forwards > 0 for cell in cells if cell.needs)
    measured = {cell.model for cell in cells if not scale.why_absent(cell)}
    assert measured == {"tiny-scenes"} and all(cell.places for cell in cells)
    everything = replace(scale, models={role: role for role in MODELS}, data={role: role for role in DATA})
    models = {cell.model for cell in cells if not everything.why_absent(cell)}
    assert ("dinov2" in models) is (scale.name != "paper"), "the depth head that ships is of DINOv2-S"
    assert {"depth-anything", "tiny-scenes"} <= models


def test_numbers_of_the_paper_stand_at_their_places():
    paper = DENSE_PRUNING.paper
    table = table_of(PHOTOS_DA)
    assert [paper[Place(table, score, "0.05")] for score in SCORES] == [4.59, 4.29, 4.88]
    assert [paper[Place(table, score, "0.50")] for score in SCORES] == [3.29, 4.09, 3.08]
    assert paper[Place(table, f"{IMPORTANCE}, soft merge", "0.30")] == 2.969
    assert sum(place.table == table for place in paper) == 4 * len(COLUMNS)

    def change(what: str, column: str = "0.50") -> float | str:
        return paper[Place(DIFFERENCES, difference(PHOTOS_DA.title, what), column)]

    assert (change(AGAINST_TOME), change(AGAINST_RANDOM, "0.20")) == (-24.7, 2.8), "its 25 %"
    assert change(DRAWN_AGAINST_TOME, "0.05") == 7.0 and change(MERGED, "0.05") == -79.7
    row = difference(PHOTOS_DA.title, RANDOM)
    assert paper[Place(CHANGE, row, CHANGED)] == -31.2 and paper[Place(CHANGE, row, LOWEST_AT)] == 0.30
    half, of = DENSE_ROBUSTNESS.paper, robustness_table("DA V2 depth")
    assert half[Place(of, TOME, "IN@448")] == 4.70 and half[Place(of, IMPORTANCE, "NYU@448")] == 7.38
    assert half[Place(DIFFERENCES, difference("DA V2 depth", AGAINST_TOME), "IN@224")] == -24.7
    assert sum(place.table == of for place in half) == 12
    stages = DENSE_STAGES.paper
    assert stages[Place(stages_table(ROOMS_DA), stages_row(FOUR, IMPORTANCE), "0.05")] == 1.03
    assert stages[Place(stages_table(ROOMS_DA.at(448)), stages_row(TWO, TOME), "0.50")] == 6.13
    assert sum(place.table.startswith(ROOMS_DA.title) for place in stages) == 30 + 20


def test_one_stage_end_to_end(few, monkeypatch, tmp_path):
    monkeypatch.setattr(module, "SUBJECTS", (SMALL,))
    monkeypatch.setattr(module, "EXAMINED", (SMALL,))
    rows = run(DENSE_PRUNING, tmp_path)
    found = by_place(rows)
    table = table_of(SMALL)
    for score in SCORES:
        for ratio in ("0.20", "0.50"):
            row = found[Place(table, score, ratio)]
            assert 0 < row["low"] <= row["value"] <= row["high"] and row["count"] == 2
            assert (row["note"] is None) is (score == TOME)
    whole = found[Place(causes_table(SMALL), cause_row(TOME, WHOLE), "0.50")]["value"]
    assert whole == pytest.approx(found[Place(table, TOME, "0.50")]["value"], rel=1e-6)
    values = {score: found[Place(table, score, "0.50")]["value"] for score in SCORES}
    row = found[Place(DIFFERENCES, difference(SMALL.title, AGAINST_TOME), "0.50")]
    assert row["value"] == pytest.approx(100 * (values[IMPORTANCE] / values[TOME] - 1), rel=1e-6)
    lowest = found[Place(CHANGE, difference(SMALL.title, RANDOM), LOWEST_AT)]["value"]
    drawn = {ratio: found[Place(table, RANDOM, f"{ratio:.2f}")]["value"] for ratio in module.RATIOS}
    assert lowest == min(module.RATIOS, key=lambda ratio: drawn[ratio])
    assert sum(row["table"] == causes_table(SMALL) for row in rows) == len(CAUSES) * 3 * 7
    document = json.loads((tmp_path / "dense-pruning" / "experiment.json").read_text())
    assert len(document["claims"]) == 10 and all("tiny-scenes depth" in own["why"] for own in document["claims"])
    merging = found[Place(DIFFERENCES, difference(SMALL.title, MERGED), "0.50")]["value"]
    assert f"{merging:+.0f} %" in next(note for note in document["footnotes"] if note.startswith("That merging"))


def test_half_of_the_tokens_by_size_and_data(few, monkeypatch, tmp_path):
    trained = []
    head = Workshop.head

    def spy(self, probe, recipe, *rest):
        trained.append((recipe.data, recipe.size, recipe.skip))
        return head(self, probe, recipe, *rest)

    monkeypatch.setattr(Workshop, "head", spy)
    monkeypatch.setattr("pullback.experiments.run.commit", lambda: "the same")
    parts = (("scenes", SMALL, (42, 56)), ("shifted", SMALL.of("scenes-shifted", "scenes-shifted"), (42,)))
    monkeypatch.setattr(module, "_ROBUST", {"tiny-scenes depth": parts})
    names = ("scenes@42", "scenes@56", "shifted@42")
    columns = tuple(replace(DENSE_ROBUSTNESS.columns[0], name=name) for name in names)
    found = by_place(run(replace(DENSE_ROBUSTNESS, columns=columns), tmp_path / "first"))
    values = [found[Place(robustness_table("tiny-scenes depth"), RANDOM, name)]["value"] for name in names]
    assert len(set(values)) == 3 and min(values) > 0
    assert set(trained) == {("scenes-train", 42, 0), ("scenes-train", 56, 0), ("scenes-shifted", 42, 2)}
    run(replace(DENSE_ROBUSTNESS, columns=columns), tmp_path / "second")
    first, second = (tmp_path / name / "dense-robustness" / "rows.jsonl" for name in ("first", "second"))
    assert first.read_bytes() == second.read_bytes()


def test_schedules_at_equal_shares_and_at_equal_operations(few, monkeypatch, tmp_path):
    monkeypatch.setattr(module, "_STAGED", (SMALL,))
    monkeypatch.setattr(module, "LARGER", {SMALL.title: ()})
    rows = run(DENSE_STAGES, tmp_path)
    found = by_place(rows)
    shares, equal = (stages_table(SMALL, kind) for kind in (EQUAL_SHARE, EQUAL_OPERATIONS))
    for score in (TOME, IMPORTANCE):
        row = stages_row(ONE, score)
        for column in STAGES_RATIOS:
            assert found[Place(shares, row, column)]["value"] == found[Place(equal, row, column)]["value"]
    assert found[Place(SPREAD, difference(named(SMALL, TWO), IMPORTANCE), STD)]["value"] > 0
    row = difference(named(SMALL, TWO), f"against {list(ONE)}, {EQUAL_OPERATIONS}")
    two, one = (found[Place(equal, stages_row(stages, IMPORTANCE), "0.50")] for stages in (TWO, ONE))
    change = 100 * (two["value"] / one["value"] - 1)
    assert found[Place(DIFFERENCES, row, "0.50")]["value"] == pytest.approx(change, rel=1e-5)
    removed = float(two["note"].partition(" ")[0])
    assert removed > 0.5 and one["note"].startswith("0.50 removed"), "later stages must remove more"
    shop = Workshop(DENSE_STAGES, TINY, tmp_path, CPU, Progress())

    def cost(stages: tuple[int, ...], ratio: float) -> float:
        subject = SMALL.subject(shop, stages)
        heads = SMALL.heads(shop, stages, shop.seed)
        return operations(subject.pruned(plan_of("paper", ratio, stages), heads), SMALL.images(shop))

    limit = cost(ONE, HALF)
    assert cost(TWO, removed) <= limit + 1e-6 < cost(TWO, removed - 0.07), "a token of 16 is 0.06"


def test_a_ratio_that_cannot_be_met_is_said(few, monkeypatch, tmp_path):
    monkeypatch.setattr(module, "first_within", lambda *_: None)
    shop = Workshop(DENSE_STAGES, TINY, tmp_path, CPU, Progress())
    assert module._ratios_of(shop, SMALL, TWO, EQUAL_OPERATIONS) == (0.99,) * 5
    assert module._ratios_of(shop, SMALL, TWO, EQUAL_SHARE) == (0.05, 0.1, 0.2, 0.3, 0.5)
    monkeypatch.setattr(module, "errors", lambda *_: torch.ones(5, 2, 2))
    rows = list(module._staged(shop, SMALL, TWO, EQUAL_OPERATIONS))
    assert all(row.note.startswith("0.99 removed, and still more operations") for row in rows)


def test_errors_of_a_schedule_are_of_its_stages(few, tmp_path):
    shop = Workshop(DENSE_STAGES, TINY, tmp_path, CPU, Progress())
    one, two = (errors(shop, SMALL, "paper", stages, (HALF,), TOME) for stages in (ONE, TWO))
    assert one.shape == two.shape == (1, 1, 2) and not torch.equal(one, two)


def numbers(values: Mapping[Place, float]) -> Found:
    return Found([{**p._asdict(), "value": v, "low": v - 1, "high": v + 1} for p, v in values.items()])


def test_footnotes_say_what_the_papers_tables_cannot_have_right():
    change = {Place(CHANGE, difference(PHOTOS_S.title, RANDOM), CHANGED): 50.0}
    parts = {
        Place(causes_table(PHOTOS_S), cause_row(RANDOM, cause), "0.05"): value
        for cause, value in zip(CAUSES, (3.0, 0.5, 2.5, 2.6, 1.0, 1.5, 0.0), strict=True)
    }
    note = module._not_monotone(numbers(change | parts))
    assert note is not None and "by 31 % for random selection" in note
    assert "+50 % (+49 to +51); at 0.05 the error is 3, with removal alone 0.5, with tokens that are stale" in note
    assert "the decoder reads them 2.6, with tokens that are stale only before the last block" in note
    assert "(Last-Layer Fusion) 1, and 0 % of the pixels" in note
    assert module._not_monotone(numbers(change)) is module._not_monotone(numbers({})) is None
    merged = {Place(DIFFERENCES, difference(PHOTOS_S.title, MERGED), column): 40.0 for column in COLUMNS}
    note = module._merging_by_the_paper(numbers(merged))
    assert note is not None and note.endswith("+40 % (+39 to +41) at 0.05, +40 % (+39 to +41) at 0.50.")
    assert module._merging_by_the_paper(numbers({})) is None
    rooms = {Place(stages_table(ROOMS_DA), stages_row(TWO, TOME), "0.05"): 3.0}
    note = module._own_numbers(numbers(rooms))
    assert note is not None and "31 / 31 / 26 / 19 / 8 % at 224 px; 29 / 26 / 18 / 13 / 10 % at 336 px" in note
    assert "38 / 36 / 28 / 19 / 10 % at 448 px" in note and module._own_numbers(numbers({})) is None
    assert module._frames_of_rooms(numbers(rooms)) and not module._frames_of_rooms(numbers(merged))
