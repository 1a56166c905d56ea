"""Quantiles of Student's t against scipy's distribution."""

import pytest
from scipy.stats import t

from pullback.randnla.student import student_quantile


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 7, 10, 15, 31, 100, 1000])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9, 0.975, 0.985, 0.99])
def test_it_is_the_quantile_of_the_distribution(p, freedom):
    assert t.cdf(student_quantile(p, freedom), freedom) == pytest.approx(p, rel=1e-9)


@pytest.mark.parametrize("freedom", [1, 2, 4, 9])
def test_it_is_odd_around_the_median(freedom):
    assert student_quantile(0.5, freedom) == pytest.approx(0, abs=1e-12)
    assert student_quantile(0.1, freedom) == pytest.approx(-student_quantile(0.9, freedom))
