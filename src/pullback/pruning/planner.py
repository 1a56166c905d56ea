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
    """What the planner expects of its choice. ``cost`` is in the unit of the cost function."""

    plan: PrunePlan
    cost: float
    degradation: float
    degradation_se: float
    measured: int  # how many plans were tried

    def __str__(self) -> str:
        stages = ", ".join(str(stage) for stage in self.plan.stages)
        return (
            f"remove {self.plan.ratio:.1%} of the patch tokens after block {stages}: cost {self.cost:.4g}, degradation "
            f"{self.degradation:.4g} ± {self.degradation_se:.2g}"
        )


def stage_choices(layers: Iterable[int], most: int = 2) -> list[tuple[int, ...]]:
    """Every set of at most ``most`` of these layers."""
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
            error = float(values.std() / len(values) ** 0.5) if len(values) > 1 else float("nan")
            self._degradations[stages, ratio] = float(values.mean()), error
        return self._degradations[stages, ratio]

    def forecast(self, stages: tuple[int, ...], ratio: float) -> Forecast:
        mean, error = self.degradation_and_error(stages, ratio)
        return Forecast(self._build(stages, ratio).plan, self.cost(stages, ratio), mean, error, 0)

    def count(self) -> int:
        return len(self._costs.keys() | self._degradations.keys())


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
