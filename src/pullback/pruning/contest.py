"""What is tried and measured of plans within one budget: operations, milliseconds or degradation.

A `Planner` knows what plans of one model cost and do, each measured once. A `Contest` is one kind of budget: it lets
ladders of plans compete by what formulas say of their costs (`operations`, `WithinTime`), and measures the last few.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pullback.errors import PullbackError
from pullback.evaluation.cost import race
from pullback.evaluation.fidelity import Measure, degradation_by, readable
from pullback.pruning.model import PrunedModel
from pullback.pruning.operations import PredictedOperations, operations
from pullback.pruning.plan import Plan, PrunePlan
from pullback.pruning.scores import Choice
from pullback.pruning.search import (
    FEWEST,
    Found,
    Ladder,
    Tries,
    best_within_cost,
    cheapest_within_degradation,
    check_numbers,
    first_within,
)
from pullback.runs.progress import Progress

SPLIT = 16
"""From so many images on, one half chooses and the other says what to expect."""
RACES = 4
"""So often finalists are timed, and changed where they are too slow, or faster than they have to be."""

# (output of the pruned model, output of the model) -> how much worse each image is [B]
Degrade = Callable[[Any, Any], Tensor]


class Calibration:
    """A model, and images [n, 3, H, W] to try its pruned copies on. ``degrade``: a measure of one's own. ``rounds`` of
    each timing."""

    def __init__(
        self, model: nn.Module, images: Tensor, batch: int, degrade: Degrade | None = None, rounds: int = 20
    ) -> None:
        self.model, self.images, self.batch, self.degrade, self.rounds = model, images, batch, degrade, rounds
        self._read: tuple[Measure, Tensor] | None = None  # what is compared of the model's own outputs
        self._full: dict[tuple[int, int], Any] = {}  # its whole outputs, for a measure of one's own
        self._whole: float | None = None

    @torch.no_grad()
    def degradation(self, pruned: nn.Module, start: int = 0, stop: int | None = None) -> Tensor:
        """Return how much worse the outputs of the images from ``start`` to ``stop`` are, [stop - start]."""
        stop = len(self.images) if stop is None else stop
        places = [(place, min(place + self.batch, stop)) for place in range(start, stop, self.batch)]
        return torch.cat([self._degradation(pruned(self.images[slice(*place)]), place) for place in places])

    def _degradation(self, output: Any, place: tuple[int, int]) -> Tensor:
        """Compare an output with that of the model itself, which runs once."""
        if self.degrade is not None:
            if place not in self._full:
                self._full[place] = self.model(self.images[slice(*place)])
            return self.degrade(output, self._full[place])
        if self._read is None:
            read = [readable(self.model(images)) for images in self.images.split(self.batch)]
            self._read = read[0][0], torch.cat([tensor for _, tensor in read])
        measure, reference = self._read
        return degradation_by(measure, readable(output)[1], reference[slice(*place)]).value

    def operations(self, pruned: PrunedModel) -> float:
        """Return the operations on one image, as a share of those of the model's blocks."""
        return operations(pruned, self.images)

    def milliseconds(self, pruned: nn.Module) -> float:
        """Return the time of one batch."""
        return self.race([pruned])[0]

    def race(self, models: Sequence[nn.Module]) -> list[float]:
        """Return the times of one batch, measured in turns with the model itself: a machine that slows down slows down
        all, and what counts is the ratio, times the model's own time."""
        some = self.images[: self.batch]
        runs = [partial(model, some) for model in (*models, self.model)]
        *own, whole = race(runs, some.device, self.rounds)
        self._whole = whole.median if self._whole is None else self._whole
        return [timing.median / whole.median * self._whole for timing in own]

    def whole_milliseconds(self) -> float:
        """Return the model's own time of one batch, of which all others are multiples; it is measured once."""
        if self._whole is None:
            self.race([])
        assert self._whole is not None
        return self._whole


def halves(images: Tensor) -> tuple[Tensor, list[int], int]:
    """Return the images in the order in which they are used, their numbers, and how many of them choose: every second
    one, because files often lie in the order of their classes; with few images all of them."""
    count = len(images)
    if count < SPLIT:
        return images, list(range(count)), count
    numbers = [*range(0, count, 2), *range(1, count, 2)]
    return images[numbers], numbers, (count + 1) // 2


class Planner:
    """Plans of one model and what they do: operations and degradations, each measured once.

    ``choosing``: so many of the images choose, ``numbers`` is what they are called.
    """

    def __init__(
        self,
        calibration: Calibration,
        heads: Mapping[int, Choice],
        formula: PredictedOperations,
        choosing: int,
        numbers: Sequence[int],
        progress: Progress,
    ) -> None:
        self.calibration, self.heads, self.formula, self.progress = calibration, heads, formula, progress
        # on a GPU a whole batch takes as long as a few images: most of the time goes into starting the work
        fewest = calibration.batch if calibration.images.is_cuda else FEWEST
        self.tries = Tries(self._degradations, choosing, numbers, fewest)
        self.numbers = numbers
        self._counts: dict[Plan, float] = {}
        self._predictions: dict[Plan, float] = {}

    def build(self, plan: Plan) -> PrunedModel:
        """Return the model that is pruned by a plan."""
        scores = [self.heads[stage] for stage in plan.stages] if isinstance(plan, PrunePlan) else []
        return PrunedModel(self.calibration.model, plan, scores)

    def _degradations(self, plan: Plan, start: int, stop: int) -> Tensor:
        return self.calibration.degradation(self.build(plan), start, stop).cpu()

    def counted(self, plan: Plan) -> float:
        """Return the operations of a plan as torch counts them."""
        if plan not in self._counts:
            self._counts[plan] = self.calibration.operations(self.build(plan))
        return self._counts[plan]

    def predicted(self, plan: Plan) -> float:
        """Return the operations of a plan by formula; those of a published rule are counted."""
        if not isinstance(plan, PrunePlan):
            return self.counted(plan)
        if plan not in self._predictions:
            self._predictions[plan] = self.formula(plan)
        return self._predictions[plan]

    def estimated(self, model: PrunedModel) -> Tensor:
        """Return the degradation of the images that say what to expect of the plan that the others chose: of all, where
        there are few."""
        everything = len(self.calibration.images)
        start = self.tries.images if self.tries.images < everything else 0
        values = self.calibration.degradation(model, start, everything).double().cpu()
        check_numbers(values, self.numbers[start:])
        return values


# Budgets


@dataclass(frozen=True)
class Point:
    """A plan that meets the budget, measured: ``mean`` is its degradation on the images that choose."""

    plan: Plan
    flops: float
    mean: float
    milliseconds: float | None = None


class Contest(ABC):
    """Plans of many ladders within one budget: the search, and the last few measured. Subclasses are the budgets."""

    def __init__(self, planner: Planner, limit: float) -> None:
        self.planner, self.limit = planner, limit

    def run(self, ladders: list[Ladder], rivals: list[list[Ladder]]) -> tuple[list[Point], list[Point | None]]:
        """Return the best plans that meet the budget, the best first, and the best of each group of rivals, None where
        none meets it."""
        planner = self.planner
        found = self.search(self.worthwhile(ladders), planner.progress)
        planner.progress.stage("trying a smaller picture alone, and ToMe")
        against = [[one for ladder in group for one in self.search([ladder], Progress())] for group in rivals]
        planner.progress.stage("measuring the best plans")
        everything = [*found, *(one for group in against for one in group)]
        points = self.measured(everything)
        own = sorted((points[one] for one in found if one in points), key=self.value)
        if not own:
            raise self.impossible(ladders)
        return own, [
            min((points[one] for one in group if one in points), key=self.value, default=None) for group in against
        ]

    @abstractmethod
    def search(self, ladders: list[Ladder], progress: Progress) -> list[Found]:
        """Return the best ladders, each with the step that meets the budget."""

    @abstractmethod
    def worthwhile(self, ladders: list[Ladder]) -> list[Ladder]:
        """Leave out ladders that cannot win, so that less has to be tried."""

    @abstractmethod
    def measured(self, found: list[Found]) -> dict[Found, Point]:
        """Measure what was searched by formulas; those that cannot meet the budget are left out."""

    def value(self, point: Point) -> float:
        """Return what is to be small."""
        return point.mean

    @abstractmethod
    def impossible(self, ladders: list[Ladder]) -> PullbackError:
        """Return the error that says what is the least that would be possible."""

    def mean(self, plan: Plan) -> float:
        """Return the mean degradation over all images that choose."""
        return self.planner.tries.mean(plan, self.planner.tries.images)

    def _without_needless(self, ladders: list[Ladder], cost: Callable[[Plan], float]) -> list[Ladder]:
        """Leave out stages for pictures that, left whole, are within the budget already: they could only do harm."""
        alone = next(ladder for ladder in ladders if ladder.stays)
        plans = [alone.plan(step) for step in range(alone.steps)]
        enough = {plan.size for plan in plans if cost(plan) <= self.limit}
        return [ladder for ladder in ladders if ladder.stays or ladder.size not in enough]


class WithinOperations(Contest):
    """The least degradation with at most a share of the operations."""

    def search(self, ladders: list[Ladder], progress: Progress) -> list[Found]:
        planner = self.planner
        return best_within_cost(ladders, planner.predicted, planner.tries, self.limit, progress)

    def worthwhile(self, ladders: list[Ladder]) -> list[Ladder]:
        return self._without_needless(ladders, self.planner.predicted)

    def measured(self, found: list[Found]) -> dict[Found, Point]:
        """Count the operations, and go on along the ladder until they just fit."""
        points = {}
        for one in found:
            step = self._fitting(one)
            if step is not None:
                plan = one.ladder.plan(step)
                points[one] = Point(plan, self.planner.counted(plan), self.mean(plan))
        return points

    def _fitting(self, one: Found) -> int | None:
        counted, plan = self.planner.counted, one.ladder.plan
        step = one.step
        if counted(plan(step)) <= self.limit:
            while step > 0 and counted(plan(step - 1)) <= self.limit:
                step -= 1
            return step
        return next((more for more in range(step + 1, one.ladder.steps) if counted(plan(more)) <= self.limit), None)

    def impossible(self, ladders: list[Ladder]) -> PullbackError:
        least = min((ladder.plan(ladder.steps - 1) for ladder in ladders), key=self.planner.predicted)
        return _impossible(
            f"at most {self.limit:.4g} of the operations", f"{self.planner.counted(least):.4g} of them", least
        )


class WithinDegradation(Contest):
    """The fewest operations with a mean degradation of at most the limit."""

    def search(self, ladders: list[Ladder], progress: Progress) -> list[Found]:
        planner = self.planner
        return cheapest_within_degradation(ladders, planner.predicted, planner.tries, self.limit, progress)

    def worthwhile(self, ladders: list[Ladder]) -> list[Ladder]:
        """Leave out stages for pictures that are too small even if they are left whole."""
        alone = next(ladder for ladder in ladders if ladder.stays)
        plans = [alone.plan(step) for step in range(alone.steps)]
        harmed = {plan.size for plan in plans if self.mean(plan) > self.limit}
        return [ladder for ladder in ladders if ladder.stays or ladder.size not in harmed]

    def measured(self, found: list[Found]) -> dict[Found, Point]:
        return {one: Point(one.plan, self.planner.counted(one.plan), self.mean(one.plan)) for one in found}

    def value(self, point: Point) -> float:
        return point.flops

    def impossible(self, ladders: list[Ladder]) -> PullbackError:
        least = min((ladder.plan(0) for ladder in ladders), key=self.mean)
        return _impossible(f"a degradation of at most {self.limit:.4g}", f"{self.mean(least):.4g}", least)


class WithinTime(Contest):
    """The least degradation with at most so many milliseconds for one batch.

    Times are predicted as t = t_whole (a + b operations + c stages), with a, b, c not negative, from a few plans that
    were timed; the last few plans are timed themselves.
    """

    def __init__(self, planner: Planner, limit: float) -> None:
        super().__init__(planner, limit)
        self._coefficients: np.ndarray | None = None

    def search(self, ladders: list[Ladder], progress: Progress) -> list[Found]:
        planner = self.planner
        found = best_within_cost(ladders, self.predicted, planner.tries, self.limit, progress)
        if found:
            return found
        ladder = min(ladders, key=lambda ladder: self.predicted(ladder.plan(ladder.steps - 1)))
        step = ladder.steps - 1  # predictions are not certain, so the strongest plan is timed before all is given up
        return [Found(ladder, step, self.mean(ladder.plan(step)))]

    def worthwhile(self, ladders: list[Ladder]) -> list[Ladder]:
        self._time(ladders)
        return self._without_needless(ladders, self.predicted)

    def predicted(self, plan: Plan) -> float:
        """Return the milliseconds that a plan should take."""
        assert self._coefficients is not None
        share = float(self._coefficients @ np.array(self._terms(plan)))
        return share * self.planner.calibration.whole_milliseconds()

    def _terms(self, plan: Plan) -> tuple[float, float, float]:
        stages = len(plan.stages) if isinstance(plan, PrunePlan) else 0  # races correct what a published rule takes
        return 1.0, self.planner.predicted(plan), float(stages)

    def _time(self, ladders: list[Ladder]) -> None:
        """Time the ends of some ladders: pictures of all sizes, and few and many tokens removed from some."""
        from scipy.optimize import nnls

        self.planner.progress.stage("timing some plans")
        alone = next(ladder for ladder in ladders if ladder.stays)
        staged = [ladder for ladder in ladders if not ladder.stays]
        some = [staged[0], staged[len(staged) // 2], staged[-1]]
        plans = [alone.plan(step) for step in sorted({0, alone.steps // 2, alone.steps - 1})]
        plans += [ladder.plan(round(part * (ladder.steps - 1))) for ladder in some for part in (0.2, 0.8)]
        plans = list(dict.fromkeys(plans))
        times = self.planner.calibration.race([self.planner.build(plan) for plan in plans])
        terms = np.array([self._terms(plan) for plan in plans])
        self._coefficients = nnls(terms, np.array(times) / self.planner.calibration.whole_milliseconds())[0]

    def measured(self, found: list[Found]) -> dict[Found, Point]:
        """Time them all in turns; where one is too slow, or too fast, take the step that its prediction, corrected by
        what was measured, says. What counts is the mildest step of each that was measured within the limit."""
        steps, known = {one: one.step for one in found}, {one: dict[int, float]() for one in found}
        for _ in range(RACES):
            racing = [one for one in found if steps[one] not in known[one]]
            if not racing:
                break
            models = [self.planner.build(one.ladder.plan(steps[one])) for one in racing]
            for one, time in zip(racing, self.planner.calibration.race(models), strict=True):
                known[one][steps[one]] = time
                steps[one] = self._corrected(one.ladder, steps[one], time)
        points = {}
        for one in found:
            within = [step for step, time in known[one].items() if time <= self.limit]
            if within:
                plan = one.ladder.plan(min(within))
                points[one] = Point(plan, self.planner.counted(plan), self.mean(plan), known[one][min(within)])
        return points

    def _corrected(self, ladder: Ladder, step: int, time: float) -> int:
        """Return the step that should just be within the limit, if a step took this time; the same one if none is."""
        predicted = self.predicted(ladder.plan(step))
        factor = time / predicted if predicted > 0 else 1.0
        better = first_within(ladder, lambda plan: factor * self.predicted(plan), self.limit)
        return step if better is None else better

    def impossible(self, ladders: list[Ladder]) -> PullbackError:
        least = min((ladder.plan(ladder.steps - 1) for ladder in ladders), key=self.predicted)
        time = self.planner.calibration.milliseconds(self.planner.build(least))
        return _impossible(f"at most {self.limit:.4g} milliseconds a batch", f"{time:.4g} milliseconds", least)


CONTESTS: dict[str, type[Contest]] = {
    "flops": WithinOperations,
    "milliseconds": WithinTime,
    "degradation": WithinDegradation,
}


def _impossible(wanted: str, least: str, plan: Plan) -> PullbackError:
    told = [] if plan.size is None else [f"pictures of {plan.size} pixels"]
    if isinstance(plan, PrunePlan) and plan.stages:
        told.append(f"{plan.ratio:.0%} of the patch tokens removed after blocks {', '.join(map(str, plan.stages))}")
    return PullbackError(
        f"budget: no plan was found with {wanted}; the least that is possible here is {least} "
        f"({' and '.join(told) or 'nothing removed'}). Allow more, or offer heads for earlier layers, or smaller sizes."
    )
