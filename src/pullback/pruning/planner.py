"""From a budget to a plan: which stages and which ratio, measured on a calibration set.

What a plan costs and what it does to the output are functions that are handed in (FLOPs, milliseconds; cosine, SILog).
Both grow with the ratio in opposite directions, so for each choice of stages the ratio that just meets the budget is
found by bisection, and the best of these is taken.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from pullback.errors import PullbackError
from pullback.pruning.plan import PrunePlan

RATIOS = tuple(step / 40 for step in range(1, 37))  # 0.025 to 0.9

# (stages, ratio) -> a model; a model -> its cost; a model -> the degradation of each calibration image [n]
Build = Callable[[tuple[int, ...], float], Any]
Cost = Callable[[Any], float]
Degradation = Callable[[Any], Tensor]


@dataclass(frozen=True)
class Forecast:
    """What the planner expects of its choice. ``cost`` is what the search compared, in the unit of its cost function;
    operations and times are known whatever that was, where somebody measured them (`pullback.planning` does)."""

    plan: PrunePlan
    cost: float
    degradation: float
    degradation_se: float
    measured: int  # how many plans were tried
    flops: float | None = None  # share of the whole model's operations
    milliseconds: float | None = None  # of one batch
    whole_milliseconds: float | None = None  # the same of the whole model

    def __str__(self) -> str:
        stages = ", ".join(str(stage) for stage in self.plan.stages)
        return (
            f"remove {self.plan.ratio:.1%} of the patch tokens after block {stages}: {self._costs()}, degradation "
            f"{self.degradation:.4g} ± {self.degradation_se:.2g}"
        )

    def _costs(self) -> str:
        if self.flops is None or self.milliseconds is None or self.whole_milliseconds is None:
            return f"cost {self.cost:.4g}"
        return (
            f"{self.flops:.4g} of the operations, {self.milliseconds:.4g} ms instead of {self.whole_milliseconds:.4g} "
            "ms a batch"
        )


def stage_choices(layers: Iterable[int], most: int = 2) -> list[tuple[int, ...]]:
    """Every set of at most ``most`` of these layers."""
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise PullbackError(f"stages: expected how many stages a plan may have, 1 or more, got {most!r}.")
    ordered = sorted(set(layers))
    return [chosen for count in range(1, most + 1) for chosen in itertools.combinations(ordered, count)]


def best_within_cost(
    build: Build, stages: Sequence[tuple[int, ...]], cost: Cost, degradation: Degradation, limit: float
) -> Forecast:
    """The least degradation among plans that cost at most ``limit``: for each choice of stages its smallest ratio."""
    trials = _Trials(build, cost, degradation)
    found = []
    for chosen in stages:
        ratio = _first(RATIOS, partial(trials.cost, chosen), limit)
        if ratio is not None:
            found.append(trials.forecast(chosen, ratio))
    return _chosen(found, lambda forecast: forecast.degradation, trials, f"cost at most {limit:.4g}")


def cheapest_within_degradation(
    build: Build, stages: Sequence[tuple[int, ...]], cost: Cost, degradation: Degradation, limit: float
) -> Forecast:
    """The lowest cost among plans that degrade by at most ``limit`` on average: for each choice of stages its largest
    ratio."""
    trials = _Trials(build, cost, degradation)
    found = []
    for chosen in stages:
        ratio = _first(RATIOS[::-1], partial(trials.degradation, chosen), limit)
        if ratio is not None:
            found.append(trials.forecast(chosen, ratio))
    return _chosen(found, lambda forecast: forecast.cost, trials, f"a degradation of at most {limit:.4g}")


class _Trials:
    """Measurements, each made once."""

    def __init__(self, build: Build, cost: Cost, degradation: Degradation) -> None:
        self._build, self._cost, self._degradation = build, cost, degradation
        self._costs: dict[tuple[tuple[int, ...], float], float] = {}
        self._degradations: dict[tuple[tuple[int, ...], float], tuple[float, float]] = {}

    def cost(self, stages: tuple[int, ...], ratio: float) -> float:
        if (stages, ratio) not in self._costs:
            self._costs[stages, ratio] = self._cost(self._build(stages, ratio))
        return self._costs[stages, ratio]

    def degradation(self, stages: tuple[int, ...], ratio: float) -> float:
        return self.degradation_and_error(stages, ratio)[0]

    def degradation_and_error(self, stages: tuple[int, ...], ratio: float) -> tuple[float, float]:
        """Mean and standard error over the calibration images."""
        if (stages, ratio) not in self._degradations:
            values = self._degradation(self._build(stages, ratio)).double()
            _check_numbers(values)
            error = float(values.std() / len(values) ** 0.5) if len(values) > 1 else float("nan")
            self._degradations[stages, ratio] = float(values.mean()), error
        return self._degradations[stages, ratio]

    def forecast(self, stages: tuple[int, ...], ratio: float) -> Forecast:
        mean, error = self.degradation_and_error(stages, ratio)
        return Forecast(self._build(stages, ratio).plan, self.cost(stages, ratio), mean, error, 0)

    def count(self) -> int:
        return len(self._costs.keys() | self._degradations.keys())


def _check_numbers(values: Tensor) -> None:
    """NaN would pass for a degradation that is small enough: it is not larger than anything."""
    lost = values.isnan().nonzero().flatten().tolist()
    if lost:
        raise PullbackError(
            f"images: the degradation of {len(lost)} of {len(values)} is not a number (the first is image {lost[0]}); "
            "a depth map that is nowhere positive has none. Leave them out."
        )


def _first(ratios: Sequence[float], measure: Callable[[float], float], limit: float) -> float | None:
    """The first ratio with measure <= limit, in an order in which the measure falls; None where none has."""
    if measure(ratios[-1]) > limit:
        return None
    low, high = -1, len(ratios) - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if measure(ratios[middle]) <= limit else (middle, high)
    return ratios[high]


def _chosen(found: list[Forecast], key: Callable[[Forecast], float], trials: _Trials, wanted: str) -> Forecast:
    if not found:
        raise PullbackError(
            f"budget: no plan was found with {wanted}, with ratios from {RATIOS[0]} to {RATIOS[-1]}. Allow more, or "
            "offer heads for earlier layers."
        )
    return replace(min(found, key=key), measured=trials.count())
