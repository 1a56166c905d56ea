"""Output metrics H = L L^T: the operator's Gram matrix is J^T H J, formed densely."""

import pytest
import torch

import pullback as pb
from helpers.families import images_for, model_of, random_normal
from pullback.decoders import factor_at
from pullback.errors import DecoderError
from pullback.operators import JacobianOperator

ROWS = 10  # CLIP's projection


def rank_deficient() -> torch.Tensor:
    return random_normal(ROWS, 2, seed=1) @ random_normal(2, 5, seed=2)


FACTORS = {
    "tall": random_normal(ROWS, 3, seed=1),
    "square": random_normal(ROWS, ROWS, seed=1),
    "wide": random_normal(ROWS, 17, seed=1),
    "rank-deficient": rank_deficient(),
    "one per sample": random_normal(2, ROWS, 4, seed=1),
    "of the base output": lambda output: torch.diag_embed(output.abs().sqrt()),
    "one direction of the base output": lambda output: output[..., None],
}


@pytest.fixture
def plain():
    probe = pb.load_probe(model_of("clip"), "projection", 0)
    features = probe.features(images_for("clip", (2, 3)))
    return features, JacobianOperator(probe, features)


def probe_with(metric):
    return pb.load_probe(model_of("clip"), "projection", 0, output_metric=metric)


@pytest.mark.parametrize("metric", FACTORS.values(), ids=FACTORS.keys())
def test_the_pullback_metric_is_j_transposed_h_j(plain, metric):
    features, jacobian = plain
    factor = metric(jacobian.output) if callable(metric) else metric
    h = factor @ factor.mT
    dense = jacobian.dense()
    operator = JacobianOperator(probe_with(metric), features)
    assert operator.shape == (2, factor.shape[-1], jacobian.cols)
    gram = operator.dense().mT @ operator.dense()
    torch.testing.assert_close(gram, dense.mT @ h @ dense, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(operator.output, (factor.mT @ jacobian.output[..., None])[..., 0])
    v = random_normal(2, operator.cols, 2)
    torch.testing.assert_close((operator.T @ operator) @ v, dense.mT @ h @ dense @ v, rtol=1e-9, atol=1e-9)


def test_l_not_its_transpose_multiplies_from_the_left(plain):
    """With H = L L^T it is L^T J; the paper's L J would differ for this L."""
    features, jacobian = plain
    factor = FACTORS["square"]
    operator = JacobianOperator(probe_with(factor), features)
    torch.testing.assert_close(operator.dense(), factor.mT @ jacobian.dense(), rtol=1e-9, atol=1e-9)


def test_a_factor_of_the_output_is_evaluated_once_and_held_constant(plain):
    features, jacobian = plain
    calls = []

    def metric(output: torch.Tensor) -> torch.Tensor:
        calls.append(output)
        return torch.diag_embed(1 + output.square())

    operator = JacobianOperator(probe_with(metric), features)
    held = torch.diag_embed(1 + jacobian.output.square())
    torch.testing.assert_close(operator.dense(), held @ jacobian.dense(), rtol=1e-9, atol=1e-9)
    assert len(calls) == 1 and calls[0].shape == (2, ROWS) and not calls[0].requires_grad


def test_it_comes_after_the_task_distance():
    factor = random_normal(ROWS, 3, seed=1)
    options = dict(decoder="projection", layer=0, distance="cosine")
    probe = pb.load_probe(model_of("clip"), **options)
    features = probe.features(images_for("clip", (2, 3)))
    alone = JacobianOperator(probe, features)
    both = JacobianOperator(pb.load_probe(model_of("clip"), output_metric=factor, **options), features)
    torch.testing.assert_close(both.dense(), factor.mT @ alone.dense(), rtol=1e-9, atol=1e-9)


BAD = {
    "too few rows": (
        random_normal(ROWS - 1, 3),
        rf"expected L with shape \[{ROWS}, k\] or .* got \[2, {ROWS - 1}, 3\]",
    ),
    "a vector": (random_normal(ROWS), rf"expected L with shape \[{ROWS}, k\] or"),
    "another batch": (random_normal(3, ROWS, 2), rf"expected L with shape .* got \[3, {ROWS}, 2\]"),
    "a list": (lambda output: [1.0], "expected a factor L as a tensor, got list"),
    "a number": (3.0, "expected a factor L as a tensor, got float"),
    "NaN": (torch.full((ROWS, 2), float("nan")), "the factor L holds NaN or infinity"),
}


@pytest.mark.parametrize(("metric", "message"), BAD.values(), ids=BAD.keys())
def test_a_factor_that_does_not_fit_is_refused(plain, metric, message):
    with pytest.raises(DecoderError, match="output_metric: .*" + message):
        JacobianOperator(probe_with(metric), plain[0])


def test_a_factor_is_brought_to_the_outputs_dtype():
    assert factor_at(torch.ones(4, 2), random_normal(3, 4)).dtype == torch.float64
    assert factor_at(torch.ones(4, 2), random_normal(3, 4)).shape == (3, 4, 2)
