import pytest
import torch

from pullback.randnla import Estimate


@pytest.mark.parametrize("count", [4, 16, 100])
def test_two_standard_errors_are_a_95_percent_interval_for_any_number_of_samples(count):
    samples = torch.randn(20_000, count, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    estimate = Estimate.from_samples(samples, offset=3.0)
    covered = ((estimate.value - 3).abs() <= 2 * estimate.se).double().mean()
    assert 0.95 <= covered <= 0.98


def test_skewed_samples_such_as_squared_norms_keep_their_coverage():
    normal = torch.randn(4000, 32, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    estimate = Estimate.from_samples(normal.square().sum(-1))
    assert ((estimate.value - 4).abs() <= 2 * estimate.se).double().mean() >= 0.94


def test_no_estimate_claims_less_than_round_off():
    value = torch.tensor([2.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(Estimate.exact(value).se, torch.tensor([2e-6, 0.0], dtype=torch.float64))
    assert torch.equal(Estimate.exact(value).relative_se[1], torch.zeros((), dtype=torch.float64))
