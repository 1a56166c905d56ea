"""Several samples, each with its own error, as one number."""

import math
import statistics

import pytest

from pullback.geometry.summary import summarize


def test_mean_and_spread_by_hand():
    values = [1.0, 2.0, 4.0, 5.0]
    summary = summarize([(value, 0.01) for value in values])
    assert summary.mean == 3.0 and summary.count == 4
    assert summary.std == pytest.approx(statistics.stdev(values))
    assert summary.se == pytest.approx(summary.std / 2)
    assert summary.estimation_se == pytest.approx(0.01 / 2)


def test_the_interval_is_student_s():
    low, high = summarize([(0.0, 0.0), (2.0, 0.0)]).interval
    assert (low, high) == (pytest.approx(1 - 12.706, abs=1e-3), pytest.approx(1 + 12.706, abs=1e-3))


def test_a_single_sample_has_no_error_over_samples():
    summary = summarize([(3.0, 0.5)])
    assert (summary.mean, summary.estimation_se, summary.count) == (3.0, 0.5, 1)
    assert all(map(math.isnan, (summary.std, summary.se, *summary.interval)))


def test_samples_that_agree_by_chance_do_not_hide_their_errors():
    summary = summarize([(1.0, 0.4), (1.0, 0.3)])
    assert summary.std == 0 and summary.se == summary.estimation_se == pytest.approx(0.25)


def test_it_reads_as_a_number_with_its_error():
    assert str(summarize([(0.3721, 0.0123)] * 2)) == "0.372 ± 0.0087"
    assert str(summarize([(0.3721, 0.0123)])) == "0.372", "an error of another kind is none over samples"


def test_estimates_without_an_error_leave_only_the_spread_between_them():
    several = summarize([(1.0, math.nan), (3.0, 0.1)])
    assert several.se == pytest.approx(1.0) and math.isnan(several.estimation_se)
    single = summarize([(1.0, math.nan)])
    assert single.mean == 1.0 and math.isnan(single.se) and math.isnan(single.estimation_se)
