"""Degradation of outputs whose distance is known by hand."""

import math
from types import SimpleNamespace

import pytest
import torch

from pullback.errors import PullbackError, ShapeError
from pullback.evaluation import cosine_degradation, degradation, measure_of, relative_l2, silog


def test_the_cosine_of_known_angles():
    angles = torch.tensor([0.0, math.pi / 3, math.pi / 2, math.pi], dtype=torch.float64)
    turned = torch.stack([angles.cos(), angles.sin()], 1)
    fixed = torch.tensor([[1.0, 0.0]], dtype=torch.float64).expand(4, 2)
    expected = torch.tensor([0.0, 50.0, 100.0, 200.0], dtype=torch.float64)
    torch.testing.assert_close(cosine_degradation(turned, fixed), expected)
    torch.testing.assert_close(cosine_degradation(7 * turned, 0.1 * fixed), expected)


def test_a_tiny_angle_keeps_its_digits():
    angle = 1e-7  # 1 - cos is 5e-15: in float64 arithmetic of the cosine itself only one digit would be left
    turned = torch.tensor([[math.cos(angle), math.sin(angle)]], dtype=torch.float64)
    measured = cosine_degradation(turned, torch.tensor([[1.0, 0.0]], dtype=torch.float64))
    assert measured.item() == pytest.approx(100 * angle**2 / 2, rel=1e-6)


def test_equal_outputs_have_no_degradation():
    output = torch.rand(3, 4, 5, generator=torch.Generator().manual_seed(0)) + 0.1
    assert cosine_degradation(output.flatten(1), output.flatten(1)).eq(0).all()
    assert relative_l2(output, output).eq(0).all()
    assert silog(output, output).error.eq(0).all() and silog(output, output).floored.eq(0).all()


def test_the_relative_distance_of_a_scaled_output():
    # In float64: rounding 1.25 x to float32 moves it by up to 3e-7 of the difference 0.25 x, and how much it is depends
    # on the random numbers, whose last digit in float32 is not the same for every vector width.
    output = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(relative_l2(1.25 * output, output), torch.full((2,), 25.0, dtype=torch.float64))


def test_silog_forgives_a_common_factor_and_its_weight_says_how_much():
    depth = 1 + torch.rand(2, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scaled = 1.5 * depth
    assert silog(scaled, depth).error.max() < 1e-5
    expected = 100 * math.sqrt(0.15) * math.log(1.5)
    torch.testing.assert_close(silog(scaled, depth, weight=0.85).error, torch.full((2,), expected).double())
    torch.testing.assert_close(silog(scaled, depth, weight=0.0).error, torch.full((2,), 100 * math.log(1.5)).double())


def test_silog_of_known_ratios():
    full = torch.ones(1, 4)
    pruned = torch.tensor([[0.1, 0.1, -0.1, -0.1]]).exp()  # d = ±0.1: mean 0, mean square 0.01
    assert silog(pruned, full).error.item() == pytest.approx(10.0, rel=1e-6)


def test_pixels_under_the_floor_are_lifted_and_counted():
    full = torch.tensor([[2.0, 2.0, 2.0, 0.0]])  # floor 2e-3
    pruned = torch.tensor([[2.0, 0.0, 2.0, 0.0]])
    errors = silog(pruned, full, weight=0.0)
    assert errors.floored.item() == 0.5  # the second pixel of one, the last pixel of both
    assert errors.error.item() == pytest.approx(100 * math.log(1e3) / 2, rel=1e-6)


def test_an_image_mostly_of_zeros_takes_the_median_of_the_rest_and_one_of_nothing_else_has_no_error():
    full = torch.tensor([[0.0, 0.0, 0.0, 4.0], [0.0, 0.0, 0.0, 0.0]])
    errors = silog(full.clone(), full)
    assert errors.error[0] == 0 and errors.floored[0] == 0.75
    assert errors.error[1].isnan()


def test_float32_outputs_are_compared_in_float64():
    output = torch.rand(1, 50, generator=torch.Generator().manual_seed(0)) + 1
    for measure in (cosine_degradation, relative_l2, lambda a, b: silog(a, b).error):
        assert measure(output, output.flip(1)).dtype == torch.float64


@pytest.mark.parametrize("measure", [cosine_degradation, relative_l2, silog])
def test_outputs_of_different_shapes_are_refused(measure):
    with pytest.raises(ShapeError, match=r"pruned, full: expected one shape \[B, ...\], got \[2, 3\] and \[2, 4\]"):
        measure(torch.ones(2, 3), torch.ones(2, 4))


def test_a_weight_outside_of_its_range_is_refused():
    with pytest.raises(PullbackError, match="weight: expected lambda between 0 and 1, got 2"):
        silog(torch.ones(1, 2), torch.ones(1, 2), weight=2.0)


@pytest.mark.parametrize(
    ("shape", "depth", "measure"),
    [((2, 8), False, "cosine"), ((2, 8, 8), True, "silog"), ((2, 9), True, "silog"), ((2, 8, 8), False, "relative_l2")],
)
def test_the_measure_follows_the_output(shape, depth, measure):
    output = torch.rand(shape) + 1
    found = degradation(output, output, depth=depth)
    assert found.measure == measure_of(output, depth=depth) == measure
    assert len(found.rows()) == 2 and all(row["value"] == 0 for row in found.rows())


class Embedding:
    def __init__(self, value):
        self.pooler_output = value


class Depth:
    def __init__(self, value):
        self.predicted_depth = value


def test_degradation_of_the_outputs_of_models():
    a = torch.randn(2, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = degradation(Embedding(3 * a), Embedding(a))
    assert found.measure == "cosine"
    torch.testing.assert_close(found.value, torch.zeros(2).double())
    found = degradation(Depth(2 * a.abs()), Depth(a.abs()))
    assert found.measure == "silog" and found.value.max() < 1e-6, "a common factor is no error"
    torch.testing.assert_close(found.beside["value_085"], silog(2 * a.abs(), a.abs(), weight=0.85).error)
    with pytest.raises(PullbackError, match="degrade: int has neither an embedding nor a depth map"):
        degradation(1, 2)


def test_an_error_that_does_not_exist_is_none():
    assert degradation(torch.ones(1, 2, 2), torch.zeros(1, 2, 2), depth=True).rows()[0]["value"] is None


def test_of_a_model_with_depth_and_logits_the_depth_is_measured():
    output = SimpleNamespace(predicted_depth=torch.ones(2, 4, 4), logits=torch.ones(2, 5))
    assert measure_of(output) == "silog" and measure_of(SimpleNamespace(logits=torch.ones(2, 5))) == "cosine"
