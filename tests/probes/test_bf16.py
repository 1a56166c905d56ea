"""bfloat16 products: close enough to be useful, and nothing else changes."""

import pytest
import torch

import pullback as pb
from helpers.families import DOWNSAMPLED, images_for, model_of, random_normal
from pullback.operators import JacobianOperator

CASES = [
    ("dinov2", "cls", 0),
    ("dinov2-swiglu", "mean", 0),
    ("dinov3-gated", "cls", 1),
    ("siglip", "pool", 0),
    ("depth-v2", DOWNSAMPLED, 0),
    ("depth-v2", DOWNSAMPLED, 4),
]


@pytest.fixture(params=CASES, ids=lambda case: "-".join(map(str, case)))
def case(request):
    name, decoder, layer = request.param
    probe = pb.load_probe(model_of(name), decoder, layer)
    return probe, probe.features(images_for(name, (2, 3)))


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def test_bf16_products_are_within_three_per_cent(case):
    probe, features = case
    low, exact = JacobianOperator(probe, features, precision="bf16"), JacobianOperator(probe, features)
    v, w = random_normal(2, exact.cols, 8), random_normal(2, exact.rows, 8)
    errors = relative(low @ v, exact @ v), relative(low.T @ w, exact.T @ w)
    assert max(errors) < 3e-2
    at_the_last_layer = probe.layer == probe.backbone.depth - 1
    assert (max(errors) < 1e-12) if at_the_last_layer else (min(errors) > 1e-5), "blocks round, the rest does not"


def test_bf16_products_come_back_in_the_features_dtype_and_the_output_is_exact(case):
    probe, features = case
    low, exact = JacobianOperator(probe, features, precision="bf16"), JacobianOperator(probe, features)
    assert torch.equal(low.output, exact.output)
    assert (low @ random_normal(2, low.cols, 1)).dtype == torch.float64
    assert (low.T @ random_normal(2, low.rows, 1)).dtype == torch.float64


def test_asking_for_bf16_changes_no_other_operator(case):
    probe, features = case
    exact = JacobianOperator(probe, features)
    v, w = random_normal(2, exact.cols, 3), random_normal(2, exact.rows, 3)
    before = exact @ v, exact.T @ w
    linearization = exact.linearization.bfloat16()
    linearization.pushforward(v.mT.unflatten(-1, features.shape[1:]))
    assert torch.equal(exact @ v, before[0]) and torch.equal(exact.T @ w, before[1])
    again = JacobianOperator(probe, features)
    assert torch.equal(again @ v, before[0]) and torch.equal(again.T @ w, before[1])
