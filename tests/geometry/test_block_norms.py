"""Block norms against the dense matrix: exact, unbiased, and with error bars that hold."""

import pytest
import torch

from helpers.spectra import copies, exponential, matrix, power_law, rank_bounded
from helpers.truth import normal
from pullback.errors import PullbackError, ShapeError
from pullback.geometry import block_norms, exact_block_norms
from pullback.operators import DenseOperator
from pullback.randnla import Streams, block_krylov, exact_svd, krylov_outputs, power_iteration, pulled_outputs

TOKENS, WIDTH, RANK = 12, 20, 6
COLS = TOKENS * WIDTH
REPETITIONS = 200
SPECTRA = {
    "power law": power_law(60, 1.0),
    "fast power law": power_law(60, 2.0),
    "exponential": exponential(60, 10.0),
    "flat": torch.ones(60, dtype=torch.float64),
    "rank 12": rank_bounded(60, 12),
}


def uneven(sigma: torch.Tensor, seed: int = 3) -> torch.Tensor:
    """A matrix whose tokens carry energies that differ by 1e4, as those of a class-token decoder do."""
    scale = torch.logspace(0, -2, TOKENS, dtype=torch.float64).repeat_interleave(WIDTH)
    return matrix(sigma, 60, COLS, seed=seed) * scale


def truth(dense: torch.Tensor) -> torch.Tensor:
    return dense.square().sum(-2).unflatten(-1, (TOKENS, WIDTH)).sum(-1)


def streams(count: int, seed: int = 5) -> Streams:
    return Streams.from_seed(seed, count, "cpu")


@pytest.fixture(params=SPECTRA)
def dense(request) -> torch.Tensor:
    return uneven(SPECTRA[request.param])


@pytest.mark.parametrize("shape", [(30, COLS), (COLS + 10, COLS)], ids=["wide", "tall"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_one_dense_jacobian_gives_spectrum_and_block_norms(shape, dtype):
    dense = normal(2, *shape).to(dtype)
    op = DenseOperator(dense)
    svd = exact_svd(op, RANK)
    found = exact_block_norms(svd.column_energies, TOKENS, round_off=op.round_off)
    torch.testing.assert_close(found.squared.value, truth(dense.double()), rtol=1e-6, atol=0)
    torch.testing.assert_close(found.total.value, dense.double().square().sum((1, 2)), rtol=1e-6, atol=0)
    assert (found.squared.relative_se <= 1.01 * op.round_off).all(), "nothing was sampled"
    assert op.products.total == min(shape)


def known_outputs(op: DenseOperator, how: str, samples: Streams):
    if how == "nothing":
        return None
    if how == "krylov":
        return krylov_outputs(block_krylov(op, RANK, rtol=1e-2, streams=samples))
    if how == "power":
        return pulled_outputs(op, power_iteration(op, RANK, streams=samples).deflation()[1])
    return pulled_outputs(op, samples.gaussian(op.rows, 5, op.dtype))


@pytest.mark.parametrize("how", ["nothing", "krylov", "power", "random"])
def test_the_mean_over_many_probes_is_the_truth_whatever_is_deflated(dense, how):
    """200 repetitions of 16 probes: their mean is within four of its own errors, token by token."""
    op = copies(dense, REPETITIONS)
    samples = streams(REPETITIONS)
    found = block_norms(op, TOKENS, num_probes=16, known=known_outputs(op, how, samples), streams=samples)
    spread = found.squared.value.std(0) / REPETITIONS**0.5
    bias = (found.squared.value.mean(0) - truth(dense)).abs()
    assert (bias <= 4 * spread + 1e-9 * truth(dense)).all()
    torch.testing.assert_close(found.total.value, found.squared.value.sum(1))


@pytest.mark.parametrize("how", ["nothing", "krylov"])
def test_the_truth_lies_within_two_standard_errors_in_nine_of_ten_repetitions(dense, how):
    op = copies(dense, REPETITIONS)
    samples = streams(REPETITIONS)
    found = block_norms(op, TOKENS, known=known_outputs(op, how, samples), streams=samples)
    for estimate, right in ((found.squared, truth(dense)), (found.total, truth(dense).sum())):
        hits = ((estimate.value - right).abs() <= 2 * estimate.se).double().mean(0)
        assert (hits >= 0.9).all()
        spread = estimate.value.std(0).clamp_min(1e-6 * right)
        assert (estimate.se.mean(0) <= 1.5 * spread).all(), "the printed error is not much larger than the real one"


def test_a_converged_space_keeps_at_least_the_importance_exactly():
    """J^T Q holds the leading modes: its block energies are not below imp*^2, which is their rank-r part."""
    dense = uneven(SPECTRA["exponential"])
    op = DenseOperator(dense)
    svd = block_krylov(op, RANK, rtol=1e-8, streams=streams(1))
    importance = (svd.right * svd.singular_values[:, None, :]).square().unflatten(1, (TOKENS, WIDTH)).sum((2, 3))
    known = krylov_outputs(svd).pulled.square().unflatten(1, (TOKENS, WIDTH)).sum((2, 3))
    assert (known >= importance * (1 - 1e-6)).all()
    assert (known <= truth(dense) * (1 + 1e-9)).all()


def test_deflation_makes_the_errors_smaller_at_equal_probes():
    op = copies(uneven(SPECTRA["fast power law"]), 20)
    samples = streams(20)
    known = known_outputs(op, "krylov", samples)
    plain, deflated = (block_norms(op, TOKENS, known=k, streams=samples).squared.se.mean() for k in (None, known))
    assert deflated < 0.2 * plain


def test_float32_products_are_as_good_as_they_can_be():
    dense = uneven(SPECTRA["fast power law"])
    op = DenseOperator(dense.float())
    samples = streams(1)
    known = krylov_outputs(block_krylov(op, RANK, rtol=1e-4, streams=samples))
    found = block_norms(op, TOKENS, num_probes=2000, known=known, streams=samples)
    assert ((found.squared.value - truth(dense)).abs() <= 4 * found.squared.se + 1e-4 * truth(dense)).all()


def test_bad_arguments_are_named():
    op = DenseOperator(normal(5, 12))
    with pytest.raises(PullbackError, match="num_probes: expected at least 2, for an error bar, got 1"):
        block_norms(op, 3, num_probes=1, streams=streams(1))
    with pytest.raises(
        ShapeError, match=r"tokens: .* N \* D = 12 columns, got 5, which does not divide it\. Pass feat"
    ):
        block_norms(op, 5, streams=streams(1))
    with pytest.raises(ShapeError, match=r"tokens: .* got 0"):
        exact_block_norms(torch.ones(1, 12), 0, round_off=1e-6)
