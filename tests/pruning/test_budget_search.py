"""The planner against a table in which the answer can be looked up."""

import math
from dataclasses import dataclass, replace

import pytest
import torch

from pullback.errors import PullbackError
from pullback.pruning.budget import (
    RATIOS,
    Forecast,
    best_within_cost,
    cheapest_within_degradation,
    stage_choices,
)
from pullback.pruning.plan import PrunePlan, preset


@dataclass
class Model:
    plan: PrunePlan


def build(stages, ratio):
    return Model(preset("best", ratio, stages))


def cost(model):
    """Token-blocks of 12 blocks: early stages save more."""
    return 12 - sum(share * (11 - stage) for stage, share in zip(model.plan.stages, model.plan.shares, strict=True))


def degradation(model):
    """Early stages hurt more."""
    hurt = sum(share**2 * (12 - stage) ** 2 for stage, share in zip(model.plan.stages, model.plan.shares, strict=True))
    return torch.tensor([0.9, 1.1]) * hurt


STAGES = stage_choices([3, 6, 9])


def every_plan():
    models = [build(stages, ratio) for stages in STAGES for ratio in RATIOS]
    return [(model, cost(model), float(degradation(model).mean())) for model in models]


@pytest.mark.parametrize("limit", [11.0, 9.0, 7.0])
def test_the_least_degradation_within_a_cost(limit):
    found = best_within_cost(build, STAGES, cost, degradation, limit)
    assert found.cost <= limit
    assert found.degradation == pytest.approx(min(harm for _, price, harm in every_plan() if price <= limit))
    assert found.degradation_se == pytest.approx(found.degradation * 0.1, rel=1e-3)


@pytest.mark.parametrize("limit", [0.5, 2.0, 8.0])
def test_the_least_cost_within_a_degradation(limit):
    found = cheapest_within_degradation(build, STAGES, cost, degradation, limit)
    assert found.degradation <= limit
    assert found.cost == pytest.approx(min(price for _, price, harm in every_plan() if harm <= limit))


def test_few_plans_are_measured():
    seen = []

    def counting(model):
        seen.append(model.plan)
        return cost(model)

    found = best_within_cost(build, STAGES, counting, degradation, 9.0)
    assert len(seen) <= 7 * len(STAGES)
    assert found.measured == len(seen)


def test_a_budget_that_nothing_meets():
    with pytest.raises(PullbackError, match=r"budget: no plan was found with cost at most 1, .* Allow more"):
        best_within_cost(build, STAGES, cost, degradation, 1.0)
    with pytest.raises(PullbackError, match="budget: no plan was found with a degradation of at most 1e-09"):
        cheapest_within_degradation(build, STAGES, cost, degradation, 1e-9)


def test_stage_choices():
    assert stage_choices([6, 3]) == [(3,), (6,), (3, 6)]
    assert stage_choices([3, 6, 9], most=1) == [(3,), (6,), (9,)]
    for most in (0, -1, 1.5, True):
        with pytest.raises(PullbackError, match="stages: expected how many stages a plan may have, 1 or more, got"):
            stage_choices([3, 6], most)


def test_a_degradation_that_is_no_number_is_not_within_any_limit():
    def lost(model):
        return torch.tensor([1.0, float("nan"), 1.0])

    for search in (best_within_cost, cheapest_within_degradation):
        with pytest.raises(PullbackError, match=r"degradation of 1 of 3 is not a number \(the first is image 1\)"):
            search(build, STAGES, cost, lost, 9.0)


def test_a_forecast_reads_as_a_sentence():
    found = best_within_cost(build, STAGES, cost, degradation, 9.0)
    assert "% of the patch tokens in all, after blocks 3 and 6 (" in str(
        found
    ) and f"cost {found.cost:.4g}, degradation" in str(found)
    measured = replace(found, flops=0.75, milliseconds=8.0, whole_milliseconds=10.0)
    assert "0.75 of the operations, 8 ms instead of 10 ms a batch, degradation" in str(measured)


@pytest.mark.parametrize(
    ("stages", "ratio", "words"),
    [
        ((4,), 0.475, "remove 47.5% of the patch tokens after block 4: "),
        ((3, 6), 0.475, "remove 47.5% of the patch tokens in all, after blocks 3 and 6 (23.75% each): "),
        ((3, 6, 9), 0.3, "remove 30.0% of the patch tokens in all, after blocks 3, 6 and 9 (10% each): "),
        ((3, 6), (0.1, 0.3), "remove 40.0% of the patch tokens in all, after blocks 3 and 6 (10%, 30%): "),
    ],
)
def test_a_forecast_says_whether_the_share_is_of_each_stage_or_of_all(stages, ratio, words):
    assert str(Forecast(preset("best", ratio, stages), 1.0, 0.5, 0.1, 3)).startswith(words)


def test_one_image_says_nothing_of_its_error():
    found = best_within_cost(build, STAGES, cost, lambda model: degradation(model)[:1], 9.0)
    assert math.isnan(found.degradation_se)
