"""Error bars mean what they say: 100 repetitions on spectra that are known, as the samples of one batch."""

import pytest
import torch

from helpers.spectra import copies, exponential, matrix, nearly_flat, power_law, rank_bounded
from pullback.randnla import Estimate, Streams, effective_rank_from_spectrum, sketch

REPETITIONS = 100
# name: singular values, rows, columns, rank
CASES = {
    "slow power law": (power_law(100, 0.8), 100, 400, 20),
    "power law": (power_law(60, 2.0), 60, 500, 8),
    "exponential": (exponential(80, 10.0), 80, 400, 16),
    "slow exponential": (exponential(60, 30.0), 60, 400, 8),
    "flat": (torch.ones(100, dtype=torch.float64), 100, 1000, 20),
    "nearly flat": (nearly_flat(60), 60, 400, 8),
    "rank 12": (rank_bounded(60, 12), 60, 400, 12),
    "nearly flat, rank 30": (torch.cat([nearly_flat(30), torch.zeros(30, dtype=torch.float64)]), 60, 400, 8),
    "tall": (power_law(60, 1.0), 400, 60, 8),
}


@pytest.fixture(scope="module", params=CASES)
def repeated(request):
    """name -> (estimate [100], truth) for the three numbers of the diagnostic."""
    sigma, rows, cols, rank = CASES[request.param]
    op = copies(matrix(sigma, rows, cols, seed=7), REPETITIONS)
    result = sketch(op, rank, method="krylov", streams=Streams.from_seed(11, REPETITIONS, "cpu"))
    total = sigma.square().sum()
    return {
        "total": (result.total, total),
        "kappa": (
            Estimate(result.kappa.value[:, -1], result.kappa.se[:, -1]),
            sigma[:rank].square().sum() / total,
        ),
        "effective rank": (result.effective_rank, effective_rank_from_spectrum(sigma[None])[0]),
    }


@pytest.mark.parametrize("quantity", ["total", "kappa", "effective rank"])
def test_the_truth_lies_within_two_standard_errors_in_nine_of_ten_repetitions(repeated, quantity):
    estimate, truth = repeated[quantity]
    assert ((estimate.value - truth).abs() <= 2 * estimate.se).double().mean() >= 0.9


@pytest.mark.parametrize("quantity", ["total", "kappa", "effective rank"])
def test_the_printed_error_is_not_much_larger_than_the_real_one(repeated, quantity):
    estimate, truth = repeated[quantity]
    assert estimate.se.mean() <= 1.5 * estimate.value.std().clamp_min(1e-6 * truth)


def test_the_same_check_catches_the_bias_of_the_papers_default():
    sigma = power_law(100, 0.8)
    op = copies(matrix(sigma, 100, 400, seed=7), REPETITIONS)
    result = sketch(op, 20, method="paper", with_effective_rank=False, streams=Streams.from_seed(11, 100, "cpu"))
    truth = sigma[:20].square().sum() / sigma.square().sum()
    kappa, noise = result.kappa.value[:, -1], result.total.relative_se
    assert kappa.mean() < 0.96 * truth
    assert ((kappa - truth).abs() <= 2 * noise * kappa).double().mean() < 0.5
