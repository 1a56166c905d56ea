"""Budgets on the embedded model: what is promised is what comes."""

import pytest
import torch

import pullback as pb
from families import model_of, random_normal
from pullback.backbones import load_backbone
from pullback.data.scenes import normalised, render
from pullback.errors import PullbackError
from pullback.planning import Calibration, output_degradation, plan_pruning


@pytest.fixture(scope="module")
def model():
    return load_backbone("tiny-scenes", device="cpu").model


@pytest.fixture(scope="module")
def images():
    return normalised(render(range(3), size=112).rgb[:, 0])


def test_a_share_of_the_operations(model, images):
    forecast = plan_pruning(model, {4: "norm"}, images, flops=0.9)
    calibration = Calibration(model, images, 64, output_degradation)
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


def test_degradation_of_known_outputs():
    class Embedding:
        def __init__(self, value):
            self.pooler_output = value

    class Depth:
        def __init__(self, value):
            self.predicted_depth = value

    a = random_normal(2, 5)
    torch.testing.assert_close(output_degradation(Embedding(3 * a), Embedding(a)), torch.zeros(2).double())
    assert output_degradation(Depth(2 * a.abs()), Depth(a.abs())).max() < 1e-6, "a common factor is no error"
    with pytest.raises(PullbackError, match="degrade: int has neither an embedding nor a depth map"):
        output_degradation(1, 2)


def test_bad_budgets(model, images):
    for budgets in ({}, {"flops": 0.5, "degradation": 1.0}):
        with pytest.raises(PullbackError, match="budget: expected one of flops, milliseconds and degradation, got"):
            plan_pruning(model, {4: "norm"}, images, **budgets)
    with pytest.raises(PullbackError, match="heads: expected a score for at least one block"):
        plan_pruning(model, {}, images, flops=0.5)


def test_a_class_token_model():
    images = random_normal(2, 3, 56, 56)
    forecast = plan_pruning(model_of("dinov2"), {0: "norm", 1: "norm"}, images, flops=0.9)
    assert forecast.cost <= 0.9
