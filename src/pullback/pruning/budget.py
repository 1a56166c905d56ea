"""From a budget to a plan: which stages and which ratio, tried on calibration images, with what to expect of it.

Cost falls and degradation grows with the ratio, so for each choice of stages the ratio that just meets the budget is
found by bisection, and the best of these is taken.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pullback.backbones import AnyBackbone, load_backbone
from pullback.checks import callable_or_none
from pullback.errors import PullbackError, ShapeError, naming
from pullback.evaluation.cost import flops as count_flops
from pullback.evaluation.cost import race
from pullback.evaluation.fidelity import degradation as measured_degradation
from pullback.evaluation.statistics import mean_and_error
from pullback.learning.shipped_heads import own_decoder, shipped_head, shipped_heads
from pullback.pruning.forward import stage_scores
from pullback.pruning.model import PrunedModel, plan_for
from pullback.pruning.plan import PrunePlan, is_number, plain
from pullback.pruning.scores import IMPORTANCE, Choice, check_weights, with_shipped

RATIOS = tuple(step / 40 for step in range(1, 37))  # 0.025 to 0.9

# (output of the pruned model, output of the model) -> how much worse each image is [B]
Degrade = Callable[[Any, Any], Tensor]
# (stages, ratio) -> a model; a model -> its cost; a model -> the degradation of each calibration image [n]
Build = Callable[[tuple[int, ...], float], Any]
Cost = Callable[[Any], float]
Degradations = Callable[[Any], Tensor]
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trial:
    """What was measured of one plan on the way: None where it was not needed."""

    stages: tuple[int, ...]
    ratio: float
    cost: float | None
    degradation: float | None


@dataclass(frozen=True)
class Forecast:
    """What to expect of a plan: ``cost`` is what the search compared, in the unit of its cost function; `plan_pruning`
    also fills in operations and times."""

    plan: PrunePlan
    cost: float
    degradation: float
    degradation_se: float
    measured: int  # how many plans were tried
    flops: float | None = None  # share of the whole model's operations
    milliseconds: float | None = None  # of one batch
    whole_milliseconds: float | None = None  # the same of the whole model
    trials: tuple[Trial, ...] = ()  # all that were tried

    def __str__(self) -> str:
        return (
            f"remove {self.plan.ratio:.1%} of the patch tokens {self._places()}: {self._costs()}, degradation "
            f"{self.degradation:.4g}" + (f" ± {self.degradation_se:.2g}" if math.isfinite(self.degradation_se) else "")
        )

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


def plan_pruning(
    model: nn.Module,
    heads: Mapping[int, Choice] | str,
    images: Tensor,
    *,
    flops: float | None = None,
    milliseconds: float | None = None,
    degradation: float | None = None,
    degrade: Degrade | None = None,
    batch: int = 64,
    stages: int = 2,
    preset: str = "best",
    rounds: int = 20,
    normalized: bool = False,
) -> Forecast:
    """Find the plan for one of three budgets, on calibration images [n, 3, H, W].

    ``images``: normalised floats, or uint8, which are normalised; ``normalized`` as in `ProbeMap.features`.
    ``heads``: the score to use after each block, {3: head, 6: head}; "importance": every head that comes with the
    package for this model, or with {3: "importance", ...} those of some blocks, which takes less time.
    ``flops``: at most this share of the model's operations. ``milliseconds``: at most so many for one batch, as the
    model runs here. ``degradation``: at most so much in the mean over the images, as cheap as possible in operations.
    ``degrade``: (pruned output, full output) -> [B], by default `evaluation.degradation`. ``stages``: at most so many.
    ``rounds`` of each timing. Whatever the budget is, the forecast has the operations, the time and the degradation of
    the plan.
    `prune(model, [heads[s] for s in f.plan.stages], ratio=f.plan.ratio, stages=f.plan.stages)` makes the model, or
    `prune(model, "importance", ...)` with the heads that come with the package.
    """
    name, limit = check_budget(flops=flops, milliseconds=milliseconds, degradation=degradation)
    _check_inputs(heads, images, batch)
    callable_or_none("degrade", degrade)
    backbone = load_backbone(model)
    heads = shipped_choices(backbone) if isinstance(heads, str) else heads
    with naming("heads", "score"):
        heads = dict(zip(heads, with_shipped(list(heads.values()), list(heads), backbone), strict=True))
    check_weights(backbone, [("heads", head) for head in heads.values() if isinstance(head, nn.Module)])
    with naming("heads"):
        for block, head in heads.items():
            stage_scores(backbone, PrunePlan((block,), (0.5,)), [head])
    images = backbone.batch(images, normalized=normalized)
    calibration = Calibration(model, images, batch, degrade, rounds)
    choices = stage_choices(heads, stages)

    def build(chosen: tuple[int, ...], ratio: float) -> PrunedModel:
        return PrunedModel(model, plan_for(model, preset, ratio, chosen), [heads[stage] for stage in chosen])

    if name == "degradation":
        found = cheapest_within_degradation(build, choices, calibration.flops, calibration.degradation, limit)
    else:
        cost = calibration.flops if name == "flops" else calibration.milliseconds
        found = best_within_cost(build, choices, cost, calibration.degradation, limit)
    chosen = build(found.plan.stages, found.plan.ratio)
    for note in found.plan.notes(chosen.backbone.depth):  # of this one alone, not of all that were tried
        logger.warning(note)
    timed = name == "milliseconds"
    return replace(
        found,
        flops=calibration.flops(chosen) if timed else found.cost,
        milliseconds=found.cost if timed else calibration.milliseconds(chosen),
        whole_milliseconds=calibration.whole_milliseconds(),
    )


@dataclass(frozen=True, eq=False)
class Calibration:
    """A model, and images to try its pruned copies on. ``degrade``: a measure of one's own."""

    model: nn.Module
    images: Tensor  # [n, 3, H, W]
    batch: int
    degrade: Degrade | None = None
    rounds: int = 20  # of each timing

    @torch.no_grad()
    def degradation(self, pruned: nn.Module) -> Tensor:
        """Return how much worse the output of each image is, [n]."""
        pairs = ((pruned(images), self.model(images)) for images in self.images.split(self.batch))
        if self.degrade is not None:
            return torch.cat([self.degrade(*pair) for pair in pairs])
        return torch.cat([measured_degradation(*pair).value for pair in pairs])

    def flops(self, pruned: nn.Module) -> float:
        """Return the operations on one image, as a share of the model's."""
        one = self.images[:1]
        return count_flops(lambda: pruned(one)) / count_flops(lambda: self.model(one))

    def milliseconds(self, pruned: nn.Module) -> float:
        """Return the time of one batch, measured in turns with the model itself: a machine that slows down slows down
        both, and what counts is the ratio, times the model's own time."""
        some = self.images[: self.batch]
        own, whole = race([lambda: pruned(some), lambda: self.model(some)], some.device, self.rounds)
        return own.median / whole.median * self.__dict__.setdefault("_whole", whole.median)

    def whole_milliseconds(self) -> float:
        """Return the model's own time of one batch, of which all others are multiples; it is measured once."""
        if "_whole" not in self.__dict__:
            self.milliseconds(self.model)
        return float(self.__dict__["_whole"])


# The search


def stage_choices(layers: Iterable[int], most: int = 2) -> list[tuple[int, ...]]:
    """Return every set of at most ``most`` of these layers."""
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise PullbackError(f"stages: expected how many stages a plan may have, 1 or more, got {most!r}.")
    ordered = sorted(set(layers))
    return [chosen for count in range(1, most + 1) for chosen in itertools.combinations(ordered, count)]


def best_within_cost(
    build: Build, stages: Sequence[tuple[int, ...]], cost: Cost, degradation: Degradations, limit: float
) -> Forecast:
    """Find the least degradation among plans that cost at most ``limit``: of each choice of stages its smallest
    ratio."""
    trials = _Trials(build, cost, degradation)
    found = []
    for chosen in stages:
        ratio = _first(RATIOS, partial(trials.cost, chosen), limit)
        if ratio is not None:
            found.append(trials.forecast(chosen, ratio))
    return _chosen(found, lambda forecast: forecast.degradation, trials, f"cost at most {limit:.4g}")


def cheapest_within_degradation(
    build: Build, stages: Sequence[tuple[int, ...]], cost: Cost, degradation: Degradations, limit: float
) -> Forecast:
    """Find the lowest cost among plans that degrade by at most ``limit`` on average: of each choice of stages its
    largest ratio."""
    trials = _Trials(build, cost, degradation)
    found = []
    for chosen in stages:
        ratio = _first(RATIOS[::-1], partial(trials.degradation, chosen), limit)
        if ratio is not None:
            found.append(trials.forecast(chosen, ratio))
    return _chosen(found, lambda forecast: forecast.cost, trials, f"a degradation of at most {limit:.4g}")


class _Trials:
    """Measurements, each made once."""

    def __init__(self, build: Build, cost: Cost, degradation: Degradations) -> None:
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
            mean, error = mean_and_error(values)
            self._degradations[stages, ratio] = mean, error if len(values) > 1 else math.nan
        return self._degradations[stages, ratio]

    def forecast(self, stages: tuple[int, ...], ratio: float) -> Forecast:
        mean, error = self.degradation_and_error(stages, ratio)
        return Forecast(self._build(stages, ratio).plan, self.cost(stages, ratio), mean, error, 0)

    def all(self) -> tuple[Trial, ...]:
        tried = sorted(self._costs.keys() | self._degradations.keys())
        return tuple(
            Trial(*plan, self._costs.get(plan), self._degradations.get(plan, (None, None))[0]) for plan in tried
        )


def _check_numbers(values: Tensor) -> None:
    """Raise an error for NaN, which would pass for a small degradation: it is not larger than anything."""
    lost = values.isnan().nonzero().flatten().tolist()
    if lost:
        raise PullbackError(
            f"images: the degradation of {len(lost)} of {len(values)} is not a number (the first is image {lost[0]}); "
            "a depth map that is nowhere positive has none. Leave them out."
        )


def _first(ratios: Sequence[float], measure: Callable[[float], float], limit: float) -> float | None:
    """Find the first ratio with measure <= limit, in an order in which the measure falls; None where none has."""
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
    tried = trials.all()
    return replace(min(found, key=key), measured=len(tried), trials=tried)


# What was asked for


def check_budget(**budgets: Any) -> tuple[str, float]:
    """Return the name and value of the one budget that was given, or raise an error that says what is wrong."""
    given = {name: plain(value) for name, value in budgets.items() if value is not None}
    if len(given) != 1:
        names = ", ".join(given) or "none"
        raise PullbackError(f"budget: expected one of flops, milliseconds and degradation, got {names}.")
    ((name, limit),) = given.items()
    finite = is_number(limit) and math.isfinite(limit)
    if name == "flops" and not (finite and 0 < limit <= 1):
        raise PullbackError(
            f"flops: expected a share of the model's own operations, above 0 and up to 1, got {limit!r}. For three "
            "quarters of them: flops=0.75."
        )
    if not (finite and limit > 0):
        unit = "milliseconds for one batch" if name == "milliseconds" else "a mean degradation of the output"
        raise PullbackError(f"{name}: expected {unit}, a number above 0, got {limit!r}.")
    return name, float(limit)


def shipped_choices(backbone: AnyBackbone) -> dict[int, Choice]:
    """Return the name "importance" for every layer for which a head ships; none is an error."""
    decoder = own_decoder(backbone)
    layers = shipped_heads(backbone, decoder)
    if not layers:  # whose error says what ships
        shipped_head(backbone, decoder, backbone.depth // 3, argument="heads")
    return dict.fromkeys(layers, IMPORTANCE)


def _check_inputs(heads: Any, images: Any, batch: Any) -> None:
    if not isinstance(heads, Mapping) and heads != IMPORTANCE:
        raise PullbackError(
            "heads: expected the score to use after each block, such as {3: head, 6: 'norm'}, or 'importance', got "
            f"{heads!r:.80}."
        )
    if not heads:
        raise PullbackError("heads: expected a score for at least one block, such as {3: head}, got none.")
    if not isinstance(images, Tensor):
        raise PullbackError(
            f"images: expected a tensor [n, 3, H, W] as the model takes it, got {type(images).__name__}. "
            "probe.load_images(folder) makes one."
        )
    if images.ndim != 4 or len(images) == 0:
        raise ShapeError(f"images: expected [n, 3, H, W] with at least one image, got {list(images.shape)}.")
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        raise PullbackError(f"batch: expected how many images run at a time, 1 or more, got {batch!r}.")
