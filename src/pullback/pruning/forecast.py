"""What to expect of a plan: costs, degradation with its interval, and the simpler alternatives that it beats or not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pullback.evaluation.statistics import Interval
from pullback.pruning.model import PrunedModel
from pullback.pruning.plan import BlockPlan, Plan, PrunePlan


@dataclass(frozen=True)
class Trial:
    """What was seen of one plan on the way: its operations by formula as ``cost``, and its mean degradation on so many
    ``images``."""

    stages: tuple[int, ...]
    ratio: float
    cost: float | None
    degradation: float | None
    size: int | None = None
    shares: tuple[float, ...] = ()
    images: int = 0


@dataclass(frozen=True)
class Alternative:
    """The best that a simpler method does within the same budget, such as a smaller picture alone, or ToMe.

    ``degradation``: its mean with a 95 % interval. ``difference``: its degradation less that of the plan, image by
    image, with the interval, so that a positive one speaks for the plan.
    """

    name: str
    plan: Plan
    flops: float
    degradation: Interval
    difference: Interval
    milliseconds: float | None = None

    @property
    def verdict(self) -> Literal["worse", "equal", "better"]:
        """Whether it degrades the output more than the plan, less, or the images do not tell."""
        return "worse" if self.difference.low > 0 else "better" if self.difference.high < 0 else "equal"


@dataclass(frozen=True)
class Forecast:
    """What to expect of a plan: ``cost`` is what the search compared, in the unit of the budget; `plan_pruning` also
    fills in operations and times.

    ``degradation`` is the mean over images on which the plan was not chosen, if there were 16 or more, with its
    standard error and a 95 % bootstrap ``interval``. ``flops``: as `pb.operations` counts. ``alternatives``: what a
    simpler method does within the same ``budget``. ``tuning``: how the model was tuned, None where it was not.
    ``model``: the pruned model, ready to use.
    """

    plan: PrunePlan
    cost: float
    degradation: float
    degradation_se: float
    measured: int  # how many plans were tried
    flops: float | None = None  # share of the operations of the whole model's blocks
    milliseconds: float | None = None  # of one batch
    whole_milliseconds: float | None = None  # the same of the whole model
    trials: tuple[Trial, ...] = ()  # all that were tried
    budget: Literal["flops", "milliseconds", "degradation"] = "flops"
    interval: tuple[float, float] | None = None
    alternatives: tuple[Alternative, ...] = ()
    notes: tuple[str, ...] = ()
    tuning: Mapping[str, Any] | None = None
    model: PrunedModel | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        parts = [f"{self._what()}: {self._costs()}, degradation {self._expected()}", *self._compared(), *self.notes]
        return "; ".join(part for part in parts if part)

    def _what(self) -> str:
        """Write what is done to a picture: shrunk, tokens removed, both or nothing."""
        parts = [] if self.plan.size is None else [f"shrink pictures to {self.plan.size} px"]
        if self.plan.stages:
            parts.append(f"remove {self.plan.ratio:.1%} of the patch tokens {self._places()}")
        told = " and ".join(parts) or "remove nothing"
        if self.plan.class_row and not parts:
            told += " but the patches of the last block"
        return told + (", tuned" if self.tuning is not None else "")

    def _places(self) -> str:
        """Write where, and with several stages how much at each: the ratio is that of all of them together."""
        stages, shares = self.plan.stages, self.plan.shares
        if len(stages) == 1:
            return f"after block {stages[0]}"
        parts = [f"{share:.4g}" for share in (100 * share for share in shares)]
        listed = f"{parts[0]}% each" if len(set(parts)) == 1 else ", ".join(f"{part}%" for part in parts)
        blocks = f"{', '.join(map(str, stages[:-1]))} and {stages[-1]}"
        return f"in all, after blocks {blocks} ({listed})"

    def _costs(self) -> str:
        if self.flops is None or self.milliseconds is None or self.whole_milliseconds is None:
            return f"cost {self.cost:.4g}"
        return (
            f"{self.flops:.4g} of the operations, {self.milliseconds:.4g} ms instead of {self.whole_milliseconds:.4g} "
            "ms a batch"
        )

    def _expected(self) -> str:
        error = f" ± {self.degradation_se:.2g}" if math.isfinite(self.degradation_se) else ""
        known = f" (95 %: {_range(*self.interval)})" if self.interval is not None else ""
        return f"{self.degradation:.4g}{error}{known}"

    def _compared(self) -> list[str]:
        """Write one part of the sentence for all alternatives that the plan beats, and one for each of the others."""
        beaten = [other for other in self.alternatives if self._verdict(other) == "worse"]
        listed = " and ".join(f"{other.name} by {self._by(other)}" for other in beaten)
        others = [other for other in self.alternatives if other not in beaten]
        return ([f"beats {listed}"] if listed else []) + [self._not_beaten(other) for other in others]

    def _verdict(self, other: Alternative) -> str:
        """Compare by what is to be small: operations under a limit of the degradation, otherwise the degradation."""
        if self.budget != "degradation" or self.flops is None:
            return other.verdict
        return "worse" if other.flops > self.flops else "better" if other.flops < self.flops else "equal"

    def _by(self, other: Alternative) -> str:
        if self.budget == "degradation" and self.flops is not None:
            return f"{abs(other.flops - self.flops):.3g} of the operations"
        low, high = sorted((abs(other.difference.low), abs(other.difference.high)))
        return f"{abs(other.difference.mean):.3g} (95 %: {_range(low, high)})"

    def _not_beaten(self, other: Alternative) -> str:
        if self._verdict(other) == "better":
            return f"{other.name} is better by {self._by(other)}"
        if self.budget == "degradation":
            return f"{other.name} costs the same"
        return (
            f"{other.name} is as good within the error (difference {other.difference.mean:.2g}, 95 %: "
            f"{_range(other.difference.low, other.difference.high)})"
        )


def name_of(plan: Plan) -> str:
    """Name a simple plan for a reader: "a smaller picture (182 px)", "ToMe (r = 14)", "ToMe (r = 28 to 0)"."""
    if isinstance(plan, BlockPlan):
        first, last = plan.merged[0], plan.merged[-1]
        return f"ToMe (r = {first})" if first == last else f"ToMe (r = {first} to {last})"
    return "nothing removed" if plan.size is None else f"a smaller picture ({plan.size} px)"


def _range(low: float, high: float) -> str:
    return f"{low:.3g} to {high:.3g}"
