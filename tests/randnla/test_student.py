"""Our t quantiles against scipy's."""

import pytest
from scipy.stats import t

from pullback.randnla.student import student_quantile


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 7, 10, 15, 31, 100, 1000])
@pytest.mark.parametrize("p", [0.9, 0.975, 0.985, 0.99])
def test_it_agrees_with_scipy_to_half_a_percent(p, freedom):
    assert student_quantile(p, freedom) == pytest.approx(t.ppf(p, freedom), rel=5e-3)


@pytest.mark.parametrize("freedom", [1, 2, 4, 9])
def test_it_is_odd_around_the_median(freedom):
    assert student_quantile(0.5, freedom) == pytest.approx(0, abs=1e-12)
    assert student_quantile(0.1, freedom) == pytest.approx(-student_quantile(0.9, freedom))
