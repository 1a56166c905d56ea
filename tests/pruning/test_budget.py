"""Budgets on the embedded model: what is promised is what comes."""

import numpy as np
import pytest
import torch

import pullback as pb
from helpers.families import model_of, random_normal
from pullback.backbones import load_backbone
from pullback.errors import PullbackError
from pullback.evaluation import degradation
from pullback.evaluation.cost import Timing
from pullback.pruning import budget as planning
from pullback.pruning.budget import Calibration, plan_pruning
from pullback.scenes.render import normalised, render


@pytest.fixture(scope="module")
def model():
    return load_backbone("tiny-scenes", device="cpu").model


@pytest.fixture(scope="module")
def images():
    return normalised(render(range(3), size=112).rgb[:, 0])


def test_a_share_of_the_operations(model, images):
    forecast = plan_pruning(model, {4: "norm"}, images, flops=0.9)
    calibration = Calibration(model, images, 64)
    fast = pb.prune(model, "norm", ratio=forecast.plan.ratio, stages=forecast.plan.stages)
    assert forecast.cost == pytest.approx(calibration.flops(fast)) and forecast.cost <= 0.9
    assert forecast.degradation == pytest.approx(float(calibration.degradation(fast).mean()), rel=1e-4)
    assert forecast.plan == fast.plan


def test_an_allowed_degradation(model, images):
    forecast = plan_pruning(model, {4: "norm", 8: "norm"}, images, degradation=2.0, stages=1)
    assert 0 < forecast.degradation <= 2.0
    assert forecast.plan.stages in ((4,), (8,))


def test_milliseconds(model, images):
    generous = plan_pruning(model, {8: "norm"}, images, milliseconds=1e6, rounds=2)
    assert generous.plan.ratio == pytest.approx(0.025), "the smallest ratio is enough"
    with pytest.raises(PullbackError, match="no plan was found with cost at most 1e-06"):
        plan_pruning(model, {8: "norm"}, images, milliseconds=1e-6, rounds=2)


BUDGETS = {"flops": 0.9, "milliseconds": 1e6, "degradation": 5.0}


@pytest.mark.parametrize("name", BUDGETS)
def test_operations_time_and_degradation_are_forecast_whatever_the_budget_is(model, images, name, monkeypatch):
    """On a clock that counts operations, so that the expected times are known; the whole model takes 10 ms."""
    calibration, races = Calibration(model, images, 64), []

    def clock(functions, device, rounds):
        races.append(rounds)
        times = [10 * planning.count_flops(function) / whole for function in functions]
        return [Timing(time, time, time, rounds) for time in times]

    whole = planning.count_flops(lambda: model(images))
    monkeypatch.setattr(planning, "race", clock)
    forecast = plan_pruning(model, {4: "norm", 8: "norm"}, images, rounds=7, **{name: BUDGETS[name]})
    stages = forecast.plan.stages
    fast = pb.prune(model, "norm", ratio=forecast.plan.ratio, stages=stages)
    assert forecast.flops == pytest.approx(calibration.flops(fast))
    assert forecast.milliseconds == pytest.approx(10 * planning.count_flops(lambda: fast(images)) / whole)
    assert forecast.whole_milliseconds == pytest.approx(10)
    assert forecast.degradation == pytest.approx(float(calibration.degradation(fast).mean()), rel=1e-4)
    assert forecast.cost == (forecast.milliseconds if name == "milliseconds" else forecast.flops)
    assert set(races) == {7}
    if name != "milliseconds":
        assert len(races) == 1, "only the plan that was chosen is timed"


def test_a_measure_of_ones_own(model, images):
    def twice(pruned, full):
        return 2 * degradation(pruned, full).value

    own, usual = (plan_pruning(model, {4: "norm"}, images, flops=0.9, degrade=how, rounds=1) for how in (twice, None))
    assert own.degradation == pytest.approx(2 * usual.degradation)


def test_bad_budgets(model, images):
    for budgets in ({}, {"flops": 0.5, "degradation": 1.0}):
        with pytest.raises(PullbackError, match="budget: expected one of flops, milliseconds and degradation, got"):
            plan_pruning(model, {4: "norm"}, images, **budgets)
    with pytest.raises(PullbackError, match="heads: expected a score for at least one block"):
        plan_pruning(model, {}, images, flops=0.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"flops": float("nan")},
            "flops: expected a share of the model's own operations, above 0 and up to 1, got nan",
        ),
        ({"flops": 1.5}, "flops: expected a share .* got 1.5"),
        ({"flops": 0.0}, "flops: expected a share .* got 0.0"),
        ({"flops": "0.5"}, "flops: expected a share .* got '0.5'"),
        (
            {"milliseconds": float("inf")},
            "milliseconds: expected milliseconds for one batch, a number above 0, got inf",
        ),
        ({"degradation": -1}, "degradation: expected a mean degradation of the output, a number above 0, got -1"),
        ({"batch": 0}, "batch: expected how many images run at a time, 1 or more, got 0"),
        ({"images": torch.zeros(0, 3, 112, 112)}, r"images: expected \[n, 3, H, W\] with at least one image, got \[0"),
        ({"images": "photos"}, r"images: expected a tensor \[n, 3, H, W\] as the model takes it, got str"),
        ({"heads": "norm"}, "heads: expected the score to use after each block, such as .* got 'norm'"),
        ({"stages": 0}, "stages: expected how many stages a plan may have, 1 or more, got 0"),
    ],
)
def test_bad_input_is_named(model, images, options, message):
    budget = {} if {"flops", "milliseconds", "degradation"} & options.keys() else {"flops": 0.9}
    given = {"heads": {4: "norm"}, "images": images} | budget | options
    with pytest.raises(PullbackError, match=message):
        plan_pruning(model, given.pop("heads"), given.pop("images"), **given)


def test_a_share_from_numpy(model, images):
    assert plan_pruning(model, {4: "norm"}, images, flops=np.float32(0.9), rounds=1).cost <= 0.9


def test_only_the_chosen_plan_is_warned_of(model, images, caplog):
    """Block 10 of 12 with Last-Layer Fusion: a stage that changes nothing, in each of the plans that were tried."""
    plan_pruning(model, {4: "norm", 10: "norm"}, images, flops=0.9, stages=1, rounds=1)
    assert "last but one" not in caplog.text, "block 4 was chosen"
    plan_pruning(model, {10: "norm"}, images, milliseconds=1e6, rounds=1)
    assert caplog.text.count("last but one") == 1


def test_a_class_token_model():
    images = random_normal(2, 3, 56, 56)
    forecast = plan_pruning(model_of("dinov2"), {0: "norm", 1: "norm"}, images, flops=0.9)
    assert forecast.cost <= 0.9
