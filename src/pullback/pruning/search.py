"""The search for a plan: ladders of plans from mild to strong, and successive halving over calibration images.

A ladder holds plans of one kind, such as a picture of 196 pixels with two stages of which the first removes a quarter:
from step to step the cost falls and the degradation grows, so that one step of each ladder just meets a budget. Which
ladder is best is tried on images: all of them on a few, the better third on three times as many, and so on until the
last few have seen every image. Nothing is drawn at random, and no image is run twice for a plan.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from pullback.errors import PullbackError
from pullback.pruning.plan import Plan, PrunePlan
from pullback.runs.progress import Progress

RATIOS = tuple(step / 100 for step in range(1, 91))
FINALISTS = 4
"""So many ladders, and those that are never thinned out, are compared at the end."""
THINNED = 3
"""One in so many ladders goes on to the next round, with so many times the images."""
FEWEST = 4
"""Images of the first round, where nothing else is said."""

# plan -> what it costs; (plan, first image, one behind the last) -> the degradation of these images
Cost = Callable[[Plan], float]
Degradations = Callable[[Plan, int, int], Tensor]


@dataclass(frozen=True, eq=False)
class Ladder:
    """Plans of one kind, of which each costs less than the one before and degrades the output more.

    ``size``: of the picture, where all of them have the same. ``stays``: it is compared at the end whatever comes of it
    on few images, because users would ask.
    """

    steps: int
    plan: Callable[[int], Plan]
    size: int | None = None
    stays: bool = False


@dataclass(frozen=True, eq=False)
class Found:
    """A step of a ladder that meets the budget, and its ``value``, which is to be small."""

    ladder: Ladder
    step: int
    value: float

    @property
    def plan(self) -> Plan:
        return self.ladder.plan(self.step)


# Ladders


def stage_choices(layers: Iterable[int], most: int = 2) -> list[tuple[int, ...]]:
    """Return every set of at most ``most`` of these layers."""
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise PullbackError(f"stages: expected how many stages a plan may have, 1 or more, got {most!r}.")
    ordered = sorted(set(layers))
    return [chosen for count in range(1, most + 1) for chosen in itertools.combinations(ordered, count)]


def splits(stages: int) -> list[tuple[float, ...]]:
    """Return ways to split a ratio over so many stages: in quarters, and equally. Of two stages the first has 1/4, 1/2
    or 3/4; of three one has a half, or all have a third; more have equal shares."""
    cuts = itertools.combinations(range(1, 4), stages - 1)
    quarters = [tuple((b - a) / 4 for a, b in itertools.pairwise((0, *cut, 4))) for cut in cuts]
    return list(dict.fromkeys([*quarters, (1 / stages,) * stages]))


def stage_ladders(size: int | None, templates: Sequence[PrunePlan]) -> list[Ladder]:
    """Return the ladders of a picture of this size: for each set of stages, a template, and each split of the ratio."""
    return [
        Ladder(len(RATIOS), partial(_with_ratio, template, size, split), size)
        for template in templates
        for split in splits(len(template.stages))
    ]


def _with_ratio(template: PrunePlan, size: int | None, split: tuple[float, ...], step: int) -> PrunePlan:
    return replace(template, size=size, shares=tuple(RATIOS[step] * part for part in split))


# Trials


class Tries:
    """Degradations of plans on the first so many images, each measured once. ``numbers``: what messages call the
    images, by default their places. ``fewest``: images of the first round."""

    def __init__(
        self, degradations: Degradations, images: int, numbers: Sequence[int] | None = None, fewest: int = FEWEST
    ) -> None:
        self.images, self.fewest, self._degradations = images, fewest, degradations
        self._numbers = range(images) if numbers is None else numbers
        self._known: dict[Plan, Tensor] = {}

    def values(self, plan: Plan, count: int) -> Tensor:
        """Return the degradation of the first ``count`` images, [count]."""
        known = self._known.get(plan)
        done = 0 if known is None else len(known)
        if done < count:
            new = self._degradations(plan, done, count).double()
            check_numbers(new, self._numbers[done:count])
            self._known[plan] = new if known is None else torch.cat([known, new])
        return self._known[plan][:count]

    def mean(self, plan: Plan, count: int) -> float:
        return float(self.values(plan, count).mean())

    def all(self) -> dict[Plan, Tensor]:
        """Return everything that was measured, in order."""
        return dict(self._known)


def check_numbers(values: Tensor, numbers: Sequence[int]) -> None:
    """Raise an error for NaN, which would pass for a small degradation: it is not larger than anything."""
    lost = values.isnan().nonzero().flatten().tolist()
    if lost:
        raise PullbackError(
            f"images: the degradation of {len(lost)} of {len(values)} is not a number (the first is image "
            f"{numbers[lost[0]]}); a depth map that is nowhere positive has none. Leave them out."
        )


# Successive halving


def rounds_of(images: int, ladders: int, fewest: int = FEWEST) -> list[int]:
    """Return on how many images the rounds try their plans: all images in the last, a third of them before, and so on,
    with as many rounds as it takes to thin the ladders out, and a few images in the first."""
    thinnings = max(0, math.ceil(math.log(max(1, ladders) / (THINNED * FINALISTS), THINNED)))
    counts = [max(fewest, images // THINNED**left) for left in range(thinnings, -1, -1)]
    return sorted({min(images, count) for count in counts} | {images})


# (ladder, images, what others have: a larger value is of no use) -> the step that meets the budget; None: no step does
Judge = Callable[[Ladder, int, float], Found | None]


def halved(ladders: Sequence[Ladder], judge: Judge, tries: Tries, progress: Progress) -> list[Found]:
    """Return the ladders that are left when the last few have seen all images, the best first."""
    left, found = list(ladders), list[Found]()
    for count in rounds_of(tries.images, len(ladders), tries.fewest):
        keep = FINALISTS if count == tries.images else max(FINALISTS, math.ceil(len(left) / THINNED))
        progress.work(f"trying plans on {count} image{'s' * (count != 1)}", len(left), "plans")
        found = []
        best: list[float] = []  # a heap of the ``keep`` smallest values, with their signs turned
        for ladder in left:
            beat = math.inf if ladder.stays or len(best) < keep else -best[0]
            one = judge(ladder, count, beat)
            progress.advance(1)
            if one is not None:
                found.append(one)
                (heapq.heappush if len(best) < keep else heapq.heappushpop)(best, -one.value)
        found.sort(key=lambda one: one.value)
        found = [one for place, one in enumerate(found) if place < keep or one.ladder.stays]
        going = {one.ladder for one in found}
        left = [ladder for ladder in left if ladder in going or ladder.stays]
    return found


def best_within_cost(
    ladders: Sequence[Ladder], cost: Cost, tries: Tries, limit: float, progress: Progress
) -> list[Found]:
    """Find the least degradation among plans that cost at most ``limit``, the best first: of each ladder its first step
    within the limit."""
    steps = {ladder: first_within(ladder, cost, limit) for ladder in ladders}

    def judge(ladder: Ladder, count: int, beat: float) -> Found:
        step = steps[ladder]
        assert step is not None
        return Found(ladder, step, tries.mean(ladder.plan(step), count))

    return halved([ladder for ladder in ladders if steps[ladder] is not None], judge, tries, progress)


def cheapest_within_degradation(
    ladders: Sequence[Ladder], cost: Cost, tries: Tries, limit: float, progress: Progress
) -> list[Found]:
    """Find the lowest cost among plans that degrade by at most ``limit`` on average, the best first: of each ladder its
    last step within the limit. One that is beyond the limit where it would cost less than others is not climbed."""

    def judge(ladder: Ladder, count: int, beat: float) -> Found | None:
        first = 0 if math.isinf(beat) else first_within(ladder, cost, math.nextafter(beat, -math.inf))
        if first is None or tries.mean(ladder.plan(first), count) > limit:
            return None
        step = last_within(ladder, lambda plan: tries.mean(plan, count), limit, first)
        return Found(ladder, step, cost(ladder.plan(step)))

    return halved(ladders, judge, tries, progress)


def first_within(ladder: Ladder, cost: Cost, limit: float) -> int | None:
    """Find the first step that costs at most ``limit``, by bisection; None where no step does."""
    if cost(ladder.plan(ladder.steps - 1)) > limit:
        return None
    low, high = -1, ladder.steps - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if cost(ladder.plan(middle)) <= limit else (middle, high)
    return high


def last_within(ladder: Ladder, degradation: Cost, limit: float, first: int = 0) -> int:
    """Find the last step that degrades by at most ``limit``, by bisection from ``first``, which does."""
    low, high = first, ladder.steps
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if degradation(ladder.plan(middle)) <= limit else (low, middle)
    return low
