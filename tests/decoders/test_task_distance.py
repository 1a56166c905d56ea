"""Task distances: after them the Euclidean distance of two outputs is the task's own."""

import math

import pytest
import torch
import torch.nn.functional as F

import pullback as pb
from helpers.families import images_for, model_of, random_normal
from pullback.decoders import DISTANCES, task_distance
from pullback.decoders.distances import LOG_FLOOR
from pullback.errors import DecoderError
from pullback.operators import JacobianOperator

cosine, log, silog = (DISTANCES[name] for name in ("cosine", "log", "silog"))


def positive(*shape: int, seed: int = 0) -> torch.Tensor:
    return random_normal(*shape, seed=seed).exp()


def test_cosine_squared_is_twice_one_minus_the_cosine():
    a, b = random_normal(4, 3, 5), random_normal(4, 3, 5, seed=1)
    expected = 2 * (1 - F.cosine_similarity(a.flatten(1), b.flatten(1)))
    torch.testing.assert_close((cosine(a) - cosine(b)).square().sum(1), expected)
    torch.testing.assert_close(cosine(7 * a), cosine(a))


def test_the_derivative_of_cosine_removes_the_radial_part_and_divides_by_the_length():
    y = random_normal(2, 6)
    unit, length = y / y.norm(dim=1, keepdim=True), y.norm(dim=1)[:, None, None]
    expected = (torch.eye(6, dtype=torch.float64) - unit[:, :, None] * unit[:, None]) / length
    torch.testing.assert_close(JacobianOperator(cosine, y).dense(), expected)


def test_the_derivative_of_log_is_one_over_the_depth():
    y = positive(2, 3, 4)
    torch.testing.assert_close(log(y), y.flatten(1).log())
    torch.testing.assert_close(JacobianOperator(log, y).dense(), torch.diag_embed(1 / y.flatten(1)))


def test_under_the_floor_log_has_no_sensitivity():
    y = torch.tensor([[0.0, 1e-5, 1.0, 2.0, 3.0]], dtype=torch.float64)
    floor = LOG_FLOOR * 1.0  # the median of the image
    torch.testing.assert_close(log(y)[0, :2], torch.full((2,), math.log(floor), dtype=torch.float64))
    slopes = JacobianOperator(log, y).dense()[0].diagonal()
    torch.testing.assert_close(slopes, torch.tensor([0.0, 0.0, 1.0, 1 / 2, 1 / 3], dtype=torch.float64))


def test_the_floor_of_each_image_is_its_own_and_held_constant():
    y = torch.stack([positive(9), 1e-4 * positive(9)])
    torch.testing.assert_close(log(y), y.log())
    dense = JacobianOperator(log, torch.cat([y, torch.zeros(2, 1)], 1)).dense()
    assert dense[:, -1].count_nonzero() == 0 and torch.isfinite(dense).all()


def test_an_image_of_zeros_stays_finite():
    for distance in (log, silog):
        operator = JacobianOperator(distance, torch.zeros(1, 8, dtype=torch.float64))
        assert torch.isfinite(operator.output).all() and torch.isfinite(operator.dense()).all()


def test_silog_is_the_standard_deviation_of_the_log_ratio():
    a, b = positive(3, 4, 5), positive(3, 4, 5, seed=1)
    ratio = (a.log() - b.log()).flatten(1)
    expected = ratio.square().mean(1) - ratio.mean(1).square()
    torch.testing.assert_close((silog(a) - silog(b)).square().sum(1), expected)
    torch.testing.assert_close(silog(5 * a), silog(a))


def test_the_derivative_of_silog_is_that_of_log_without_its_mean():
    y = positive(2, 6)
    centring = torch.eye(6, dtype=torch.float64) - 1 / 6
    expected = centring @ torch.diag_embed(1 / y) / 6**0.5
    torch.testing.assert_close(JacobianOperator(silog, y).dense(), expected)


@pytest.mark.parametrize(("distance", "function"), [*DISTANCES.items(), ("own", lambda y: y.flatten(1)[:, :3] ** 3)])
def test_a_probe_composes_its_decoder_with_the_distance(distance, function):
    choice = function if distance == "own" else distance
    plain = pb.load_probe(model_of("depth-v2-metric"), "depth-2x3", 1)
    probe = pb.load_probe(model_of("depth-v2-metric"), "depth-2x3", 1, distance=choice)
    features = probe.features(images_for("depth-v2-metric", (2, 3)))
    torch.testing.assert_close(probe(features), function(plain(features)))
    outer = JacobianOperator(function, plain(features)).dense()
    inner = JacobianOperator(plain, features).dense()
    torch.testing.assert_close(JacobianOperator(probe, features).dense(), outer @ inner, rtol=1e-9, atol=1e-9)


def test_a_linear_decoder_is_not_linear_after_a_distance():
    probe = pb.load_probe(model_of("dinov2"), "mean", 1, distance="cosine")
    features = probe.features(images_for("dinov2", (2, 3)))
    direction, step = random_normal(*features.shape), 1e-6
    moved = (probe(features + step * direction) - probe(features - step * direction)) / (2 * step)
    product = (JacobianOperator(probe, features) @ direction.flatten(1)[..., None])[..., 0]
    torch.testing.assert_close(product, moved, rtol=1e-6, atol=1e-8)


def test_distances_by_name_function_or_none():
    assert task_distance("silog") is silog and task_distance(None) is None and task_distance(torch.sin) is torch.sin
    with pytest.raises(
        DecoderError, match="distance: expected one of cosine, log, silog, a function or None, got 'l2'"
    ):
        pb.load_probe(model_of("dinov2"), "cls", 0, distance="l2")


def test_the_floor_follows_the_positive_outputs_even_where_most_are_zero():
    output = torch.tensor([[0.0, 0.0, 0.0, 1e-6, 2.0, 4.0]], dtype=torch.float64)  # half of the ReLU is shut
    logs = DISTANCES["log"](output)
    assert logs[0, :4].exp().tolist() == pytest.approx([2e-3] * 4)  # 1e-3 of the median of 1e-6, 2 and 4
    assert logs[0, 4:].exp().tolist() == pytest.approx([2.0, 4.0])
