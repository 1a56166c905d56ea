import pytest
import torch

from pullback.randnla import Estimate


@pytest.mark.parametrize("count", [4, 16, 100])
def test_two_standard_errors_are_a_95_percent_interval_for_any_number_of_samples(count):
    samples = torch.randn(20_000, count, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    estimate = Estimate.from_samples(samples, offset=3.0, round_off=1e-6)
    covered = ((estimate.value - 3).abs() <= 2 * estimate.se).double().mean()
    assert 0.95 <= covered <= 0.98


def test_skewed_samples_such_as_squared_norms_keep_their_coverage():
    normal = torch.randn(4000, 32, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    estimate = Estimate.from_samples(normal.square().sum(-1), round_off=1e-6)
    assert ((estimate.value - 4).abs() <= 2 * estimate.se).double().mean() >= 0.94


@pytest.mark.parametrize("round_off", [1e-13, 1e-6, 5e-3])
def test_no_estimate_claims_less_than_round_off(round_off):
    value = torch.tensor([2.0, 0.0], dtype=torch.float64)
    exact = Estimate.exact(value, round_off=round_off)
    torch.testing.assert_close(exact.se, torch.tensor([2 * round_off, 0.0], dtype=torch.float64), rtol=1e-12, atol=0)
    assert torch.equal(exact.relative_se[1], torch.zeros((), dtype=torch.float64))
    certain = Estimate.from_samples(torch.full((1, 5), 3.0), round_off=round_off)
    torch.testing.assert_close(certain.relative_se.item(), round_off, rtol=1e-12, atol=0)
    noisy = Estimate.of(value, torch.tensor([0.5, 0.5]), round_off=round_off)
    assert noisy.se.tolist() == [0.5, 0.5], "a larger error stays as it is"
