"""Means over samples, of numbers that have errors of their own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pullback.randnla.estimate import student_quantile


@dataclass(frozen=True)
class Summary:
    """``std`` is between samples (n-1), ``se`` of their mean, from that spread, which contains the estimation error; a
    single sample has neither: NaN. ``estimation_se`` is the part that more products, or a higher precision, would
    remove; NaN if the estimates carry no error of their own."""

    mean: float
    std: float
    se: float
    estimation_se: float
    count: int

    @property
    def interval(self) -> tuple[float, float]:
        """95 % for the mean over such samples; NaN for a single one."""
        half = self.se if self.count == 1 else self.se * student_quantile(0.975, self.count - 1)
        return self.mean - half, self.mean + half

    def __str__(self) -> str:
        return f"{self.mean:.3g}" if self.count == 1 else f"{self.mean:.3g} ± {self.se:.2g}"


def summarize(pairs: Sequence[tuple[float, float]]) -> Summary:
    """Return the mean of (value, standard error) pairs, one per sample."""
    count = len(pairs)
    mean = sum(value for value, _ in pairs) / count
    own = math.sqrt(sum(se**2 for _, se in pairs)) / count
    if count == 1:
        return Summary(mean, math.nan, math.nan, own, 1)
    std = math.sqrt(sum((value - mean) ** 2 for value, _ in pairs) / (count - 1))
    spread = std / math.sqrt(count)
    return Summary(mean, std, spread if math.isnan(own) else max(spread, own), own, count)
