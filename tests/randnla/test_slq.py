import pytest
import torch

from helpers.spectra import copies, exponential, matrix, nearly_flat, power_law, rank_bounded
from pullback.operators import ProductCount
from pullback.randnla import Streams, block_krylov, effective_rank, effective_rank_from_spectrum

SPECTRA = {"power": power_law(60, 1.0), "exponential": exponential(60, 8.0), "nearly flat": nearly_flat(60)}


def test_the_effective_rank_of_a_known_spectrum_counts_equal_values_and_ignores_zeros():
    sigma = torch.tensor([[2.0, 2.0, 2.0, 0.0], [5.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    expected = torch.tensor([3.0, 1.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(effective_rank_from_spectrum(sigma), expected)


@pytest.mark.parametrize("shape", [(60, 150), (150, 60)], ids=["wide", "tall"])
@pytest.mark.parametrize("deflated", [False, True], ids=["plain", "deflated"])
@pytest.mark.parametrize("sigma", SPECTRA.values(), ids=SPECTRA)
def test_the_estimate_is_unbiased_and_its_error_honest(sigma, deflated, shape):
    op, streams = copies(matrix(sigma, *shape), 60), Streams.from_seed(0, 60, "cpu")
    svd = block_krylov(op, 10, depth=6, streams=streams) if deflated else None
    estimate = effective_rank(op, svd=svd, streams=streams)
    truth = effective_rank_from_spectrum(sigma[None])
    spread = estimate.value.std().clamp_min(1e-6 * truth[0])
    assert (estimate.value.mean() - truth).abs() < 3.5 * spread / 60**0.5 + 0.2 * estimate.se.mean()
    assert ((estimate.value - truth).abs() <= 2 * estimate.se).double().mean() >= 0.9
    assert estimate.se.mean() <= 1.5 * spread


def test_deflation_lowers_the_noise_many_times():
    op, streams = copies(matrix(SPECTRA["power"], 60, 150), 40), Streams.from_seed(0, 40, "cpu")
    plain = effective_rank(op, streams=streams)
    deflated = effective_rank(op, svd=block_krylov(op, 10, depth=6, streams=streams), streams=streams)
    assert deflated.value.std() < plain.value.std() / 4


def test_a_flat_spectrum_is_known_without_noise():
    op = copies(matrix(torch.ones(40, dtype=torch.float64), 40, 90), 3)
    estimate = effective_rank(op, num_probes=4, streams=Streams.from_seed(0, 3, "cpu"))
    torch.testing.assert_close(estimate.value, torch.full((3,), 40.0, dtype=torch.float64))


def test_each_probe_costs_one_pair_per_lanczos_step():
    op = copies(matrix(SPECTRA["power"], 60, 150), 2)
    effective_rank(op, num_probes=5, lanczos_steps=10, streams=Streams.from_seed(0, 2, "cpu"))
    assert op.products == ProductCount(jvp=50, vjp=50)


def test_few_lanczos_steps_are_part_of_the_error_bar():
    op, streams = copies(matrix(power_law(60, 2.0), 60, 150), 20), Streams.from_seed(0, 20, "cpu")
    rough = effective_rank(op, num_probes=200, lanczos_steps=6, streams=streams)
    truth = effective_rank_from_spectrum(power_law(60, 2.0)[None])
    assert ((rough.value - truth).abs() <= 2 * rough.se).all()


def test_rtol_draws_probes_until_every_sample_is_that_accurate():
    op, streams = copies(matrix(SPECTRA["power"], 60, 150), 3), Streams.from_seed(0, 3, "cpu")
    svd = block_krylov(op, 10, depth=4, streams=streams)
    assert (effective_rank(op, num_probes=8, svd=svd, streams=streams).relative_se > 0.02).any()
    assert (effective_rank(op, num_probes=8, rtol=0.02, svd=svd, streams=streams).relative_se <= 0.02).all()


def test_a_spent_row_space_needs_no_probes():
    sigma = rank_bounded(60, 12)
    op, streams = copies(matrix(sigma, 60, 150), 2), Streams.from_seed(0, 2, "cpu")
    svd = block_krylov(op, 12, streams=streams)
    spent = op.products
    estimate = effective_rank(op, svd=svd, streams=streams)
    assert op.products == spent
    torch.testing.assert_close(estimate.value, effective_rank_from_spectrum(sigma[None]).expand(2))
