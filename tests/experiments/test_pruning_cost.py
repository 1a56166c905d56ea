"""What pruning costs: shares against runs that are counted and against hand-made sums, quotients of times, verdicts."""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from pullback.backbones import load_backbone
from pullback.experiments import pruning_cost as module
from pullback.experiments import pruning_cost_claims as claims
from pullback.experiments.experiment import Found, Verdict
from pullback.experiments.pruning_cost import PRUNING_COST, Counter, networks, quotient
from pullback.experiments.pruning_cost_claims import (
    BLOCKS,
    DENSE_OPERATIONS,
    DENSE_TIMES,
    FUSION,
    HEAD,
    HEAD_TIME,
    IMPORTANCE,
    ONE_TOKEN,
    OVER_TOME,
    SCORES,
    SHAPES,
    TOME,
    TOME_SCORE,
    TOME_TIME,
    faster,
    operations_row,
    saves,
    score_row,
    time_row,
)
from pullback.experiments.run import run_experiments
from pullback.experiments.scales import SCALES, Scale
from pullback.models.dinov2 import Dinov2, Dinov2Config
from pullback.pruning.model import PrunedModel
from pullback.pruning.operations import operations
from pullback.pruning.plan import PrunePlan, preset
from pullback.runs.progress import Progress

DA, TINY = claims.WHO["DA"], claims.WHO["DEPTH_TINY"]


@pytest.mark.parametrize("scale", SCALES.values(), ids=lambda scale: scale.name)
def test_the_cells_of_every_scale_are_valid(scale: Scale) -> None:
    cells = PRUNING_COST.checked_cells(scale)
    assert {cell.key for cell in cells if cell.timed} == {cell.key for cell in cells if cell.key.startswith("time")}
    there = {cell.key for cell in cells if scale.why_absent(cell) is None}
    assert {"operations, ViT-B/14, 224 px", "operations, ViT-B/14, 448 px"} <= there
    assert all(cell.forwards > 0 for cell in cells if cell.model)


# Operations


def small_backbone():
    torch.manual_seed(0)
    config = Dinov2Config(hidden_size=48, num_hidden_layers=12, num_attention_heads=3, patch_size=14, image_size=112)
    return load_backbone(Dinov2(config).eval().requires_grad_(False))


PLANS = {
    "one stage": (preset("paper", 0.2, (4,), dense=True), "head"),
    "two stages": (preset("paper", 0.5, (4, 8), dense=True), "bipartite"),
    "ours": (preset("best", 0.5, (4, 8), dense=True), "head"),
    "class token": (preset("paper", 0.5, (10,)), "head"),
    "dropped": (preset("drop", 0.2, (4, 8)), "head"),
}


@pytest.mark.parametrize("name", PLANS)
def test_what_is_saved_is_what_a_counted_run_lacks(name: str) -> None:
    plan, choice = PLANS[name]
    backbone, image = small_backbone(), torch.randn(1, 3, 84, 84)
    network = networks(backbone)
    found = Counter(backbone, image, plan.stages).shares(plan, network[choice], network["spn"])
    modes = network["spn"] if plan.match == "task" else None
    assert found.saved == pytest.approx(
        1 - operations(PrunedModel(backbone.model, plan, [network[choice]], modes), image)
    )
    assert (found.fusion > 0) == plan.fuse_last
    assert (found.partners > 0) == (plan.match != "none" or plan.reinsert == "drift")


def by_hand(tokens: int, width: int = 768) -> int:
    """Operations of a block."""
    return 24 * tokens * width**2 + 4 * tokens**2 * width


@pytest.mark.parametrize(("px", "tokens", "removed"), [(224, 257, 51), (448, 1025, 205)])
def test_the_shapes_of_the_papers_model_are_counted_as_by_hand(px: int, tokens: int, removed: int) -> None:
    backbone = module.without_weights()
    plan = preset("paper", 0.20, (4,), dense=True)
    image = torch.zeros(1, 3, px, px, device="meta")
    found = Counter(backbone, image, (4,)).shares(plan, networks(backbone)["head"])
    whole, less = 12 * by_hand(tokens), by_hand(tokens) - by_hand(tokens - removed)
    assert found.blocks == pytest.approx(7 * less / whole)
    assert found.fusion == pytest.approx(less / whole)
    linear = 768 * 256 + 4 * 256 * 64 + 256 * 192 + 192  # of a token
    attention = 2 * tokens**2 * 64
    assert found.score == pytest.approx(2 * (tokens * linear + attention) / whole, rel=1e-6)
    assert found.partners == 0


def test_a_head_of_the_papers_width_has_as_many_parameters_as_it_says() -> None:
    head = networks(module.without_weights())["head"]
    assert sum(part.numel() for part in head.parameters()) == 313_409


# Times


def test_a_quotient_of_times_is_that_of_medians() -> None:
    own = np.array([10.0, 11.0, 12.0, 13.0, 100.0])
    exact = quotient(("t", "r", "c"), 2 * own, own)
    assert (exact.value, exact.low, exact.high, exact.count, exact.over) == (2, 2, 2, 5, "rounds")
    one = quotient(("t", "r", "c"), np.full(5, 24.0), own, less=1.0)
    assert one.value == 1.0  # 24 / 12 - 1, whatever the slowest round
    assert one.low is not None and one.high is not None and one.low < 1 < one.high <= 1.4


def test_milliseconds_are_a_median_with_its_interval() -> None:
    times = np.random.default_rng(1).normal(50, 5, 400)
    found = module.milliseconds(("t", "r", "c"), times)
    assert found.value == np.median(times)
    error = 1.2533 * 5 / 20  # of the median of 400 normal numbers
    assert found.low is not None and found.high is not None
    assert 2 * 1.96 * error == pytest.approx(found.high - found.low, rel=0.4)


# Verdicts


def row(table: str, name: str, column: str, value: float, width: float = 0.0) -> dict:
    return {"table": table, "row": name, "column": column, "value": value, "low": value - width, "high": value + width}


def shares(title: str, px: int, stages: tuple[int, ...], values: Mapping[str, float]) -> list[dict]:
    name = operations_row(title, px, stages, 0.20)
    usual = {BLOCKS: 0.12, FUSION: 0.017, HEAD: 0.004, TOME_SCORE: 0.002, saves(IMPORTANCE): 0.10}
    return [row(DENSE_OPERATIONS, name, column, value) for column, value in {**usual, **values}.items()]


def times(
    title: str, px: int, importance: float, tome: float = 1.0, *, stages: tuple[int, ...] = (4,), batch: int = 1,
    ratio: float | str = 0.20, width: float = 0.01, over: float = 0.025,
) -> list[dict]:  # fmt: skip
    name = time_row(title, px, batch, stages, ratio)
    return [
        row(DENSE_TIMES, name, faster(IMPORTANCE), importance, width),
        row(DENSE_TIMES, name, faster(TOME), tome, width),
        row(DENSE_TIMES, name, OVER_TOME, over, width),
    ]


def judged(judge, *rows: list[dict]) -> Verdict:
    return judge(Found([one for part in rows for one in part]))


def test_a_share_may_be_that_of_the_blocks_alone() -> None:
    judge = partial(claims.saves_share, 0.121, 224, (4,))
    assert judged(judge).word == "not at this scale"
    partly = judged(judge, shares(SHAPES, 224, (4,), {}))
    assert partly.word == "holds partly" and "10.0%" in partly.why and "12.0%" in partly.why
    assert judged(judge, shares(SHAPES, 224, (4,), {saves(IMPORTANCE): 0.122})).word == "holds"
    assert judged(judge, shares(SHAPES, 224, (4,), {BLOCKS: 0.14})).word == "does not hold"
    own = judged(judge, shares(SHAPES, 224, (4,), {}), shares(DA, 224, (4,), {BLOCKS: 0.14}))
    assert own.word == "does not hold" and own.why.startswith(DA)


def test_that_a_share_rises_counts_for_something() -> None:
    judge = partial(claims.saves_share, 0.167, 448, (4,), above=224)
    large = shares(SHAPES, 448, (4,), {saves(IMPORTANCE): 0.11})
    assert judged(judge, large, shares(SHAPES, 224, (4,), {})).word == "holds partly"
    assert judged(judge, large, shares(SHAPES, 224, (4,), {saves(IMPORTANCE): 0.12})).word == "does not hold"


def test_slower_and_faster_are_judged_by_intervals() -> None:
    slower, faster_one = partial(claims.slower_at, 224), partial(claims.faster_at, 448)
    assert judged(slower).word == judged(faster_one).word == "not at this scale"
    assert judged(slower, times(TINY, 224, 0.96, 0.98)).word == "holds"
    assert judged(slower, times(TINY, 224, 0.96, 0.995)).word == "holds partly"
    assert judged(slower, times(TINY, 224, 0.96, 0.98, width=0.05)).word == "does not hold"
    assert judged(slower, times(TINY, 224, 0.9, 0.9), times(DA, 224, 1.2, 1.2)).word == "does not hold"
    assert judged(faster_one, times(DA, 448, 1.12, 1.15)).word == "holds"
    assert judged(faster_one, times(DA, 448, 0.99, 1.15)).word == "holds partly"
    assert judged(faster_one, times(TINY, 224, 1.12, 1.15)).word == "not at this scale"


def test_a_speedup_at_any_smaller_size_refutes_that_it_takes_larger_pictures() -> None:
    judge = claims.only_when_large
    small, large = times(DA, 224, 0.96), times(DA, 448, 1.12)
    assert judged(judge).word == "not at this scale"
    assert judged(judge, small).word == "not at this scale"
    assert judged(judge, small, large).word == "holds"
    assert judged(judge, small, large, times(DA, 224, 1.3, batch=64)).word == "holds partly"
    assert judged(judge, times(DA, 224, 1.1), times(DA, 448, 0.9)).word == "does not hold"
    assert judged(judge, times(TINY, 224, 1.1, batch=4)).word == "does not hold"


def test_the_fixed_cost_is_that_of_removing_one_token() -> None:
    judge = claims.fixed_cost
    one = times(DA, 224, 0.8, ratio=ONE_TOKEN)
    assert judged(judge, times(DA, 224, 0.9)).word == "not at this scale"
    holds = judged(judge, one, times(DA, 224, 0.9))
    assert holds.word == "holds" and "+25.0%" in holds.why and "13.9%" in holds.why  # 1 / 0.8 - 1 / 0.9
    assert judged(judge, one, times(DA, 224, 1.1)).word == "holds partly"
    assert judged(judge, times(DA, 224, 1.0, ratio=ONE_TOKEN), times(DA, 224, 1.1)).word == "does not hold"


def test_two_to_three_per_cent_of_operations_and_of_time() -> None:
    judge = claims.little_more_than_tome
    counted = shares(SHAPES, 224, (4,), {FUSION: 0.017, HEAD: 0.004})
    assert judged(judge).word == "not at this scale"
    assert judged(judge, counted, times(DA, 224, 1, over=0.025)).word == "holds"
    assert judged(judge, counted, times(DA, 224, 1, over=0.09)).word == "holds partly"
    assert judged(judge, counted, times(DA, 224, 1, over=0.09, width=0.2)).word == "holds"  # too noisy to count
    much = shares(SHAPES, 224, (4,), {HEAD: 0.04})
    assert judged(judge, much, times(DA, 224, 1, over=0.09)).word == "does not hold"


def test_two_stages_against_one_and_none() -> None:
    judge = claims.two_stages_are_slower
    one = times(DA, 224, 0.96)
    assert judged(judge, one).word == "not at this scale"
    assert judged(judge, one, times(DA, 224, 0.88, stages=(4, 8))).word == "holds"
    assert judged(judge, one, times(DA, 224, 0.96, stages=(4, 8))).word == "holds partly"
    assert judged(judge, one, times(DA, 224, 1.10, stages=(4, 8))).word == "does not hold"


def test_a_score_is_cheaper_by_operations_and_by_time() -> None:
    judge = claims.tome_is_cheaper

    def clock(tome: float) -> list[dict]:
        name = f"{score_row(DA, 224)}, batch 1"
        return [row(SCORES, name, HEAD_TIME, 2.0, 0.1), row(SCORES, name, TOME_TIME, tome, 0.1)]

    counted = shares(SHAPES, 224, (4,), {})
    assert judged(judge).word == "not at this scale"
    assert judged(judge, counted, clock(1.0)).word == "holds"
    assert judged(judge, counted, clock(1.9)).word == "holds partly"
    assert judged(judge, shares(SHAPES, 224, (4,), {TOME_SCORE: 0.01}), clock(3.0)).word == "does not hold"


def test_a_head_is_small_by_parameters_operations_and_time() -> None:
    judge = claims.small_head

    def known(parameters: float, share: float = 0.004, clock: float = 2.0) -> list[dict]:
        name = time_row(DA, 224, 1, (4,), 0.20)
        return [
            *shares(SHAPES, 224, (4,), {HEAD: share}),
            row(SCORES, score_row(SHAPES, 224), claims.PARAMETERS, parameters),
            row(DENSE_TIMES, name, claims.UNPRUNED, 100.0, 1.0),
            row(SCORES, f"{score_row(DA, 224)}, batch 1", HEAD_TIME, clock, 0.1),
        ]  # fmt: skip

    assert judged(judge).word == "not at this scale"
    verdict = judged(judge, known(313_409))
    assert verdict.word == "holds" and "313,409 parameters" in verdict.why and "(2.0%)" in verdict.why
    assert judged(judge, known(313_409, clock=9.0)).word == "holds partly"
    assert judged(judge, known(600_000, 0.1, 9.0)).word == "does not hold"


# A run


def cut_down(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "PROFILED", (module.DEPTH_TINY, module.CLS_TINY))
    monkeypatch.setattr(module, "BY_SHAPES", module.BY_SHAPES[:1])
    monkeypatch.setattr(module, "RATIOS", (0.20,))
    monkeypatch.setitem(module.SIZES, "tiny-scenes", (56,))
    monkeypatch.setitem(module.COUNTS, "tiny", {"rounds": 2, "few rounds": 1, "batch": 2})
    return replace(PRUNING_COST, paper={})


def test_what_is_counted_is_the_same_twice_and_times_lie_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = cut_down(monkeypatch)
    counted = replace(experiment, cells=lambda scale: [cell for cell in module.cells(scale) if not cell.timed])
    written = []
    for own, out in ((counted, tmp_path / "counted"), (experiment, tmp_path / "all")):
        document = run_experiments([own], SCALES["tiny"], out, torch.device("cpu"), Progress())[0]
        written.append((out / "pruning-cost" / "rows.jsonl").read_bytes())
    assert written[0] == written[1]
    rows = [json.loads(line) for line in written[0].splitlines()]
    timed = [json.loads(line) for line in (out / "pruning-cost" / "times.jsonl").read_text().splitlines()]
    assert all(one["value"] is not None for one in rows + timed)
    assert not {one["table"] for one in rows} & {DENSE_TIMES, claims.CLS_TIMES}
    assert all(one["value"] > 0 and one["count"] for one in timed if one["column"] != OVER_TOME)
    whole = {one["value"] for one in timed if one["row"].startswith(f"{TINY}, 56 px, batch 1, [4],")
             and one["column"] == claims.UNPRUNED}  # fmt: skip
    assert len(whole) == 1  # all of a cell are timed against the same
    words = [claim["word"] for claim in document["claims"]]
    assert words[:3] == ["holds partly"] * 3 and len(words) == 11
    assert len(document["footnotes"]) == 2  # no class token without weights here
    assert "12.1%" in document["footnotes"][0] and "10.0%" in document["footnotes"][0]


def test_a_plan_of_one_token_removes_one_a_stage() -> None:
    for stages in ((4,), (4, 8)):
        for patches in (64, 256, 1024):
            plan: PrunePlan = preset("paper", len(stages) / patches, stages, dense=True)
            assert plan.counts(patches) == (1,) * len(stages)
