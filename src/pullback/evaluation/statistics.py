"""Means with their errors, and whether one rule is better than another on the same images.

Everything takes one value per image; comparisons take them in the same order for both rules.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pullback.checks import of_kind, shown
from pullback.errors import PullbackError, ShapeError

if TYPE_CHECKING:
    from torch import Tensor

RESAMPLES = 10_000
_DRAWN_AT_ONCE = 4_000_000  # numbers


@dataclass(frozen=True)
class Interval:
    """A mean and a percentile bootstrap interval around it."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class PairedComparison:
    """``difference``: of first - second, so that a negative one speaks for the first where small is good."""

    difference: Interval
    p_value: float  # two-sided Wilcoxon signed-rank test
    count: int


def bootstrap_mean(
    values: Sequence[float] | np.ndarray,
    *,
    generator: np.random.Generator,
    level: float = 0.95,
    resamples: int = RESAMPLES,
) -> Interval:
    """Return the mean of values [n], and the ``level`` middle of the means of n values drawn with replacement."""
    array = _checked("values", values)
    _check_level(level)
    mean = float(array.mean())
    if len(array) == 1:  # every draw is the same, and scipy refuses it
        return Interval(mean, mean, mean)
    from scipy.stats import bootstrap  # half a second

    at_once = max(1, _DRAWN_AT_ONCE // len(array))
    found = bootstrap(
        (array,), np.mean, n_resamples=resamples, batch=at_once, confidence_level=level, method="percentile",
        rng=generator,
    ).confidence_interval  # fmt: skip
    return Interval(mean, float(found.low), float(found.high))


def bootstrap_change(
    first: Sequence[float] | np.ndarray,
    second: Sequence[float] | np.ndarray,
    *,
    generator: np.random.Generator,
    level: float = 0.95,
    resamples: int = RESAMPLES,
) -> Interval:
    """Return mean(first) / mean(second) - 1 of the same images [n], and its interval: both means are of the same draws,
    so that what makes an image hard for both widens nothing."""
    a, b = _checked("first", first), _checked("second", second)
    if a.shape != b.shape:
        raise _unpaired(a, b)
    _check_level(level)
    if not (b > 0).all():
        raise PullbackError("second: expected values above zero, of which first is told as a share.")
    change = float(a.mean() / b.mean() - 1)
    drawn = generator.multinomial(len(a), np.full(len(a), 1 / len(a)), size=resamples)
    tail = (1 - level) / 2
    low, high = np.quantile((drawn @ a) / (drawn @ b) - 1, [tail, 1 - tail])
    return Interval(change, float(low), float(high))


def compare_paired(
    first: Sequence[float] | np.ndarray,
    second: Sequence[float] | np.ndarray,
    *,
    generator: np.random.Generator,
    level: float = 0.95,
    resamples: int = RESAMPLES,
) -> PairedComparison:
    """Compare first [n] with second [n], image by image."""
    of_kind("generator", generator, np.random.Generator, "a generator of numpy, such as numpy.random.default_rng(0)")
    a, b = _checked("first", first), _checked("second", second)
    interval = bootstrap_mean(_differences(a, b), generator=generator, level=level, resamples=resamples)
    return PairedComparison(interval, wilcoxon_p(a, b), len(a))


def wilcoxon_p(first: Sequence[float] | np.ndarray, second: Sequence[float] | np.ndarray) -> float:
    """Return the two-sided p of the Wilcoxon signed-rank test; 1 where no image tells the two apart."""
    differences = _differences(_checked("first", first), _checked("second", second))
    if not differences.any():
        return 1.0
    from scipy.stats import wilcoxon  # half a second

    return float(wilcoxon(differences).pvalue)


def bootstrap_share(hits: Sequence[bool] | np.ndarray, *, level: float = 0.95) -> Interval:
    """Return the share of hits [n] that are true, and its percentile bootstrap interval without drawing: a draw of n
    of them with replacement is binomial."""
    array = _checked_hits("hits", hits)
    _check_level(level)
    share, count = float(array.mean()), len(array)
    from scipy.stats import binom  # half a second

    low, high = binom.ppf([(1 - level) / 2, (1 + level) / 2], count, share) / count
    return Interval(share, float(low), float(high))


def mcnemar_p(first: Sequence[bool] | np.ndarray, second: Sequence[bool] | np.ndarray) -> float:
    """Return the two-sided exact p of McNemar's test: whether ``first`` and ``second`` [n] are right on equally many of
    the images on which one alone is right; 1 where there are none."""
    a, b = _checked_hits("first", first), _checked_hits("second", second)
    if a.shape != b.shape:
        raise _unpaired(a, b)
    one, other = int((a & ~b).sum()), int((b & ~a).sum())
    tail = sum(math.comb(one + other, count) for count in range(min(one, other) + 1))
    return min(1.0, 2 * tail / 2 ** (one + other))  # of whole numbers, so that nothing is lost


def mean_and_error(values: Tensor) -> tuple[float, float]:
    """Return the mean of values [n] and its standard error std / sqrt(n); 0 for a single value, of unknown spread."""
    known = values.detach().double()
    error = float(known.std()) / len(known) ** 0.5 if len(known) > 1 else 0.0
    return float(known.mean()), error


def _differences(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    if first.shape != second.shape:
        raise _unpaired(first, second)
    difference: np.ndarray = first - second
    return difference


def _unpaired(first: np.ndarray, second: np.ndarray) -> ShapeError:
    return ShapeError(
        f"first, second: expected one value per image each, of the same images, got {len(first)} and {len(second)}."
    )


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise PullbackError(f"level: expected a share between 0 and 1 such as 0.95, got {level}.")


def _checked_hits(name: str, values: Sequence[bool] | np.ndarray) -> np.ndarray:
    array = _checked(name, values)
    if not np.isin(array, (0, 1)).all():
        raise PullbackError(f"{name}: expected true or false per image, got {shown(values)}.")
    return array.astype(bool)


def _checked(name: str, values: Sequence[float] | np.ndarray) -> np.ndarray:
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise PullbackError(f"{name}: expected one number per image, got {shown(values)}.") from None
    if array.ndim != 1 or len(array) == 0:
        raise ShapeError(f"{name}: expected one value per image, [n] with n at least 1, got {list(array.shape)}.")
    if not np.isfinite(array).all():
        bad = int((~np.isfinite(array)).sum())
        raise PullbackError(f"{name}: expected finite values, got {bad} of {len(array)} that are not. Leave them out.")
    return array
