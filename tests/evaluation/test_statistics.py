"""The paired test against scipy's own, and intervals that cover as often as they say."""

import numpy as np
import pytest
import torch
from scipy import stats

from pullback.errors import PullbackError, ShapeError
from pullback.evaluation.statistics import (
    Interval,
    bootstrap_change,
    bootstrap_mean,
    bootstrap_share,
    compare_paired,
    mcnemar_p,
    mean_and_error,
    wilcoxon_p,
)


def pairs(count: int, shift: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    level = generator.lognormal(size=count)  # images differ more than rules do: what pairing is for
    return level, level + shift + 0.1 * generator.standard_normal(count)


@pytest.mark.parametrize("count", [12, 200])
@pytest.mark.parametrize("shift", [0.0, 0.05, 0.3])
def test_the_p_value_is_scipys(count, shift):
    first, second = pairs(count, shift)
    assert wilcoxon_p(first, second) == pytest.approx(stats.wilcoxon(first, second).pvalue, rel=1e-12)


def test_rules_that_never_differ_have_p_one():
    assert wilcoxon_p([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]) == 1.0
    assert wilcoxon_p([1.0], [2.0]) == 1.0


def test_the_bootstrap_agrees_with_the_normal_interval_of_many_values():
    values = np.random.default_rng(0).standard_normal(400)
    ours = bootstrap_mean(values, generator=np.random.default_rng(1))
    mean, error = mean_and_error(torch.from_numpy(values))
    assert ours.mean == pytest.approx(mean, rel=1e-12)
    assert [ours.low, ours.high] == pytest.approx([mean - 1.96 * error, mean + 1.96 * error], abs=0.1 * error)


def test_a_mean_has_the_standard_error_of_its_values():
    values = np.random.default_rng(0).lognormal(size=30)
    assert mean_and_error(torch.from_numpy(values)) == pytest.approx((values.mean(), stats.sem(values)))
    assert mean_and_error(torch.tensor([2.0])) == (2.0, 0.0)


def test_one_value_has_no_interval_around_it():
    assert bootstrap_mean([3.0], generator=np.random.default_rng(0)) == Interval(3.0, 3.0, 3.0)


def test_intervals_cover_the_true_mean_as_often_as_they_say():
    generator, covered, trials = np.random.default_rng(0), 0, 400
    for _ in range(trials):
        interval = bootstrap_mean(generator.standard_normal(60), generator=generator, level=0.9, resamples=400)
        covered += interval.low <= 0 <= interval.high
    assert 0.85 < covered / trials < 0.95  # 0.9 within three standard errors


def test_a_comparison_has_the_interval_of_the_differences():
    first, second = pairs(100, 0.05)
    compared = compare_paired(first, second, generator=np.random.default_rng(3))
    alone = bootstrap_mean(first - second, generator=np.random.default_rng(3))
    assert compared.difference == alone and compared.count == 100
    assert compared.p_value == wilcoxon_p(first, second)
    assert alone.low < -0.05 < alone.high < 0, "the shift is inside and zero is not"


def test_a_change_is_told_of_means_that_are_drawn_together():
    first, second = pairs(200, 0.3)
    found = bootstrap_change(second, first, generator=np.random.default_rng(0))
    assert found.mean == pytest.approx(second.mean() / first.mean() - 1)
    residual = second - (1 + found.mean) * first  # the delta method of a ratio of means
    error = residual.std(ddof=1) / len(first) ** 0.5 / first.mean()
    assert [found.low, found.high] == pytest.approx(
        [found.mean - 1.96 * error, found.mean + 1.96 * error], abs=error / 3
    )
    half = bootstrap_change(first / 2, first, generator=np.random.default_rng(0))
    assert [half.mean, half.low, half.high] == pytest.approx([-0.5] * 3)


def test_a_change_needs_pairs_and_something_to_be_a_share_of():
    with pytest.raises(ShapeError, match="one value per image each, of the same images, got 2 and 1"):
        bootstrap_change([1.0, 2.0], [1.0], generator=np.random.default_rng(0))
    with pytest.raises(PullbackError, match="second: expected values above zero"):
        bootstrap_change([1.0], [0.0], generator=np.random.default_rng(0))


def test_the_same_seed_gives_the_same_interval_also_in_blocks(monkeypatch):
    values, _ = pairs(50, 0.0)
    whole = bootstrap_mean(values, generator=np.random.default_rng(0), resamples=200)
    assert whole == bootstrap_mean(values, generator=np.random.default_rng(0), resamples=200)
    monkeypatch.setattr("pullback.evaluation.statistics._DRAWN_AT_ONCE", 500)
    assert whole == bootstrap_mean(values, generator=np.random.default_rng(0), resamples=200)


@pytest.mark.parametrize(("count", "change"), [(20, 0.2), (300, 0.1), (4000, 0.02)])
def test_mcnemars_p_is_the_binomial_test_of_the_discordant_pairs(count, change):
    generator = np.random.default_rng(count)
    first = generator.random(count) < 0.7
    second = first ^ (generator.random(count) < np.where(first, change, change / 3))
    only_first, only_second = int((first & ~second).sum()), int((second & ~first).sum())
    expected = stats.binomtest(only_first, only_first + only_second, 0.5).pvalue
    assert mcnemar_p(first, second) == pytest.approx(expected, rel=1e-10)
    assert mcnemar_p(first, second) == mcnemar_p(second.tolist(), first.tolist())


def test_mcnemars_p_by_hand():
    assert mcnemar_p([True] * 6, [False] * 6) == 2 / 2**6
    assert mcnemar_p([True, False, True], [True, False, True]) == 1.0
    assert mcnemar_p([True, False], [False, True]) == 1.0


def test_the_interval_of_a_share_is_that_of_many_draws():
    hits = np.random.default_rng(0).random(500) < 0.8
    drawn = bootstrap_mean(hits, generator=np.random.default_rng(1), resamples=20_000)
    ours = bootstrap_share(hits)
    assert ours.mean == drawn.mean and [ours.low, ours.high] == pytest.approx([drawn.low, drawn.high], abs=1 / 500)
    assert bootstrap_share([True, True]) == Interval(1.0, 1.0, 1.0)


def test_hits_that_are_none_are_refused():
    with pytest.raises(PullbackError, match=r"hits: expected true or false per image, got \[0.5\]"):
        bootstrap_share([0.5])
    with pytest.raises(ShapeError, match=r"first, second: expected one value per image each, .* got 1 and 2"):
        mcnemar_p([True], [True, False])
    with pytest.raises(PullbackError, match="level: expected a share between 0 and 1"):
        bootstrap_share([True], level=2)


def test_scipy_is_imported_only_for_the_test():
    import subprocess
    import sys

    code = "import sys, pullback.evaluation.statistics; print('scipy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


def test_bad_values_are_refused():
    generator = np.random.default_rng(0)
    with pytest.raises(ShapeError, match=r"first, second: expected one value per image each, .* got 2 and 3"):
        wilcoxon_p([1.0, 2.0], [1.0, 2.0, 3.0])
    with pytest.raises(ShapeError, match=r"values: expected one value per image, .* got \[0\]"):
        bootstrap_mean([], generator=generator)
    with pytest.raises(PullbackError, match="values: expected finite values, got 1 of 2 that are not"):
        bootstrap_mean([1.0, float("nan")], generator=generator)
    with pytest.raises(PullbackError, match="level: expected a share between 0 and 1"):
        bootstrap_mean([1.0], generator=generator, level=95)
