"""From a budget to a plan: the picture's size, stages and shares, tried on calibration images, with what to expect.

Candidates are all combinations of a picture's size, stages and a split of the ratio over them, and a smaller picture
alone. `search` finds for each what just meets the budget, and by successive halving the best of them; what that costs
is known from formulas (`operations`, `Times`), and measured for the last few. Images are split in halves: one chooses,
the other says what to expect, because the best of many on the same images would look a little too good.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pullback.backbones import AnyBackbone, Backbone, load_backbone
from pullback.checks import callable_or_none, whole_number
from pullback.data.images import ImageSource
from pullback.data.sources import Source
from pullback.errors import ModelError, PullbackError, ShapeError, first_line, naming
from pullback.evaluation.statistics import bootstrap_mean, compare_paired, mean_and_error
from pullback.learning.shipped_heads import own_decoder, shipped_head, shipped_heads
from pullback.pruning import resized
from pullback.pruning.contest import (
    CONTESTS,
    SPLIT,
    Calibration,
    Contest,
    Degrade,
    Planner,
    Point,
    WithinDegradation,
    halves,
)
from pullback.pruning.forecast import Alternative, Forecast, Trial, name_of
from pullback.pruning.forward import stage_scores
from pullback.pruning.model import PrunedModel, plan_for
from pullback.pruning.operations import PredictedOperations
from pullback.pruning.plan import Plan, PrunePlan, is_number, plain
from pullback.pruning.scores import IMPORTANCE, Choice, check_weights, with_shipped
from pullback.pruning.search import Ladder, stage_choices, stage_ladders
from pullback.pruning.tune import tune as tuned_by
from pullback.runs.progress import Progress

SIZES = 8
"""At most so many smaller sizes are considered by themselves."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TuneOptions:
    """How the best few plans are tuned before one of them is chosen, as `pb.tune` does it.

    ``images``: unlabelled, to train on. ``best``: so many plans are tuned. ``size``: side of the crops, by default the
    shorter side of the calibration images. The others are those of `pb.tune`.
    """

    images: ImageSource | Source
    best: int = 3
    held_out: ImageSource | Source | float = 0.1
    steps: int = 700
    batch: int = 128
    learning_rate: float = 2e-3
    positions: bool = False
    size: int | None = None
    limit: int | None = None
    validate_every: int = 100
    precision: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        whole_number("best", self.best)


def plan_pruning(
    model: nn.Module,
    heads: Mapping[int, Choice] | str,
    images: Tensor,
    *,
    flops: float | None = None,
    milliseconds: float | None = None,
    degradation: float | None = None,
    sizes: Sequence[int] | None = None,
    stages: int = 2,
    output: str = "model",
    tune: TuneOptions | ImageSource | Source | None = None,
    preset: str = "best",
    degrade: Degrade | None = None,
    batch: int = 64,
    rounds: int = 20,
    normalized: bool = False,
    progress: Progress | None = None,
) -> Forecast:
    """Find the plan for one of three budgets, on calibration images [n, 3, H, W].

    ``heads``: the score to use after each block, {3: head, 6: head}; "importance": every head that comes with the
    package for this model, or with {3: "importance", ...} those of some blocks, which takes less time.
    ``images``: normalised floats, or uint8, which are normalised; ``normalized`` as in `ProbeMap.features`.
    ``flops``: at most this share of the operations, as `pb.operations` counts them: all blocks, and what chooses and
    merges tokens, over the blocks of the whole model; patch embedding and decoder are not counted.
    ``milliseconds``: at most so many for one batch, as the model runs here. ``degradation``: at most so much in the
    mean over the images, as cheap as possible in operations.
    ``sizes``: the picture's shorter sides to consider beside its own, in pixels; by default multiples of the patch down
    to half of it, and () for none. ``stages``: at most so many. ``output``: "cls" as in `pb.prune`.
    ``tune``: unlabelled training images, or `TuneOptions`: the best few plans are tuned, and the best of these is
    taken. ``degrade``: (pruned output, full output) -> [B], by default `evaluation.degradation`.
    ``batch``: images at a time, and in the batch that is timed; ``rounds`` of each timing.

    Whatever the budget is, the forecast has the operations, the time and the degradation of the plan, and what a
    smaller picture alone and ToMe would do within the same budget. Its ``model`` is the pruned model.
    """
    name, limit = check_budget(flops=flops, milliseconds=milliseconds, degradation=degradation)
    _check_inputs(heads, images, batch)
    callable_or_none("degrade", degrade)
    whole_number("rounds", rounds, expected="at least 1")
    options = tune if tune is None or isinstance(tune, TuneOptions) else TuneOptions(tune)
    backbone = load_backbone(model)
    heads = shipped_choices(backbone) if isinstance(heads, str) else heads
    with naming("heads", "score"):
        heads = dict(zip(heads, with_shipped(list(heads.values()), list(heads), backbone), strict=True))
    check_weights(backbone, [("heads", head) for head in heads.values() if isinstance(head, nn.Module)])
    with naming("heads"):
        for block, head in heads.items():
            stage_scores(backbone, PrunePlan((block,), (0.5,)), [head])
    chosen_stages = stage_choices(heads, stages)
    images = backbone.batch(images, normalized=normalized)
    templates = [_template(model, preset, chosen, output) for chosen in chosen_stages]
    pictures, notes = picture_sizes(backbone, images, sizes)
    images, numbers, choosing = halves(images)
    if choosing == len(images):
        notes.append(
            f"with fewer than {SPLIT} images the same ones choose the plan and say what to expect, which is a little "
            "too good"
        )
    planner = Planner(
        Calibration(model, images, batch, degrade, rounds),
        heads,
        PredictedOperations(model, images, heads, templates[0]),
        choosing,
        numbers,
        progress or Progress(),
    )
    bare = plan_for(model, "none", output=output)
    ladders = [
        Ladder(len(pictures), lambda step: replace(bare, size=pictures[step]), stays=True),
        *(ladder for size in pictures for ladder in stage_ladders(size, templates)),
    ]
    rivals = rival_ladders(model, planner.formula.patches(None), bare, pictures[1:], output)
    contest = CONTESTS[name](planner, limit)
    points, others = contest.run(ladders, list(rivals.values()))
    notes += [f"{rival} cannot meet the budget" for rival, own in zip(rivals, others, strict=True) if own is None]
    best, tuned = (points[0], None) if options is None else _tuned(contest, ladders, points, options)
    forecast = _forecast(planner, name, best, tuned, [point for point in others if point is not None])
    assert forecast.model is not None
    for note in forecast.plan.notes(forecast.model.backbone.depth):  # of this one alone, not of all that were tried
        logger.warning(note)
    return replace(forecast, notes=tuple(notes))


def _template(model: nn.Module, preset: str, stages: tuple[int, ...], output: str) -> PrunePlan:
    plan = plan_for(model, preset, 0.5, stages, output=output)
    assert isinstance(plan, PrunePlan)  # a published rule takes no ratio and stages, and was refused
    return plan


# Candidates


def picture_sizes(
    backbone: Backbone, images: Tensor, sizes: Sequence[int] | None
) -> tuple[list[int | None], list[str]]:
    """Return the sizes of the shorter side to consider, from the largest, None for the pictures' own, and notes.

    ``sizes``: those that are asked for; None: multiples of the patch down to half the pictures' own size, at most eight
    of them, if the model takes them.
    """
    patch, (height, width) = backbone.patch_size, images.shape[-2:]
    own = min(height, width)
    if sizes is not None:
        wanted = _checked_sizes(sizes, patch, own, backbone.name)
    else:
        every = list(range((own - 1) // patch * patch, 0, -patch))
        every = [size for size in every if 2 * size >= own]
        wanted = every[:: math.ceil(len(every) / SIZES)] if every else []
    one = images[:1, :, : height // patch * patch, : width // patch * patch]
    for size in wanted:
        try:
            with torch.no_grad():
                backbone.embed(resized.shrunk(one, size, patch))
        except Exception as error:  # an adapter of one's own can raise anything here
            reason = f"{backbone.name} takes no pictures of another size than {height}x{width} ({first_line(error)})"
            if sizes is None:
                return [None], [f"smaller pictures were not tried: {reason}"]
            raise ModelError(f"sizes: {reason}. Plan with sizes=().") from None
    return [None, *wanted], []


def _checked_sizes(sizes: Any, patch: int, own: int, name: str) -> list[int]:
    """Return the sizes that are smaller than the pictures, from the largest, or raise an error."""
    if isinstance(sizes, (str, bytes)) or not isinstance(sizes, Sequence):
        raise PullbackError(f"sizes: expected a list of pixels such as [210, 196], () or None, got {sizes!r}.")
    wanted = [whole_number("sizes", plain(size), expected="pixels such as 210") for size in sizes]
    for size in wanted:
        if size > own:
            raise PullbackError(
                f"sizes: expected at most the {own} pixels of the pictures' shorter side, got {size}. Leave it out, or "
                "pass larger pictures."
            )
        if size % patch and size != own:
            near = max(1, round(size / patch)) * patch
            raise PullbackError(
                f"sizes: expected multiples of the patch size {patch} of {name}, got {size}. The nearest is {near}."
            )
    return sorted({size for size in wanted if size != own}, reverse=True)


def rival_ladders(
    model: nn.Module, patches: int, bare: Plan, sizes: Sequence[int | None], output: str
) -> dict[str, list[Ladder]]:
    """Return what users would try first: a smaller picture alone, and ToMe with as many tokens in every block, or
    decreasing. Of each list the best ladder speaks for it."""
    most = max(1, patches // 2)

    def tome(inflection: int, step: int) -> Plan:
        merged = step + 1 if inflection == 0 else (step + 1, inflection)
        return plan_for(model, "tome", r=merged, output=output)

    rivals = {"ToMe": [Ladder(most, partial(tome, inflection)) for inflection in (0, -1)]}
    if not sizes:
        return rivals
    return {"a smaller picture alone": [Ladder(len(sizes), lambda step: replace(bare, size=sizes[step]))], **rivals}


# Tuning


def _tuned(
    contest: Contest, ladders: list[Ladder], points: list[Point], options: TuneOptions
) -> tuple[Point, PrunedModel]:
    """Tune the best few plans, and return the best of them, by the images that choose.

    Under a limit of the degradation, plans that are beyond it before they are tuned, up to twice, have their chance,
    and the cheapest that is within the limit afterwards is taken.
    """
    planner, limited = contest.planner, isinstance(contest, WithinDegradation)
    some = points[: options.best]
    if limited:
        wider = [WithinDegradation(planner, contest.limit * (1 + more / options.best)) for more in range(options.best)]
        some = [points[0], *(one.run(ladders, [])[0][0] for one in wider[1:])]
    some = [point for point in dict.fromkeys(some) if not point.plan.idle]
    if not some:
        raise PullbackError(
            "tune: the budget allows the model as it is, and nothing is left to tune. Lower the budget, or leave tune "
            "out."
        )
    side = min(planner.calibration.images.shape[-2:])
    given = {name: value for name, value in vars(options).items() if name not in ("images", "best", "size")}
    tried = []
    for number, point in enumerate(some):
        planner.progress.stage(f"tuning plan {number + 1} of {len(some)}")
        with naming("tune", "images"):
            model = tuned_by(
                planner.build(point.plan),
                options.images,
                size=options.size or side,
                progress=planner.progress,
                **given,
            )
        mean = float(planner.calibration.degradation(model, 0, planner.tries.images).double().mean())
        tried.append((replace(point, mean=mean), model))
    if limited:
        within = [one for one in tried if one[0].mean <= contest.limit]
        if not within:
            raise PullbackError(
                f"tune: no tuned plan degrades by at most {contest.limit:.4g} on the calibration images "
                f"({tried[0][0].mean:.4g}), though it did before. Give more images or steps, or leave tune out."
            )
        return min(within, key=lambda one: one[0].flops)
    return min(tried, key=lambda one: one[0].mean)


# What to expect


def _forecast(
    planner: Planner, budget: str, best: Point, tuned: PrunedModel | None, others: Sequence[Point]
) -> Forecast:
    """Measure the chosen plan, and the alternatives, on the images that did not choose."""
    plan = best.plan
    assert isinstance(plan, PrunePlan)
    planner.progress.stage("measuring what to expect")
    model = planner.build(plan) if tuned is None else tuned
    values = planner.estimated(model)
    mean, error = mean_and_error(values)
    interval = bootstrap_mean(values.numpy(), generator=np.random.default_rng(0))
    timed = best.milliseconds
    time = timed if timed is not None else planner.calibration.milliseconds(model)
    trials = tuple(
        Trial(own.stages, own.ratio, planner.predicted(own), float(seen.mean()), own.size, own.shares, len(seen))
        for own, seen in planner.tries.all().items()
        if isinstance(own, PrunePlan)
    )
    return Forecast(
        plan=plan,
        cost=best.flops if timed is None else timed,
        degradation=mean,
        degradation_se=error if len(values) > 1 else math.nan,
        measured=len(trials),
        flops=best.flops,
        milliseconds=time,
        whole_milliseconds=planner.calibration.whole_milliseconds(),
        trials=trials,
        budget=budget,  # type: ignore[arg-type]
        interval=(interval.low, interval.high),
        alternatives=tuple(
            _alternative(planner, other, values, tuned is not None)
            for other in others
            if tuned is not None or other.plan != plan
        ),
        tuning=model.tuning,
        model=model,
    )


def _alternative(planner: Planner, point: Point, values: Tensor, tuned: bool) -> Alternative:
    """Compare an alternative with the plan's degradations ``values`` of the same images."""
    own = planner.estimated(planner.build(point.plan)).numpy()
    return Alternative(
        name_of(point.plan) + (", not tuned" if tuned else ""),
        point.plan,
        point.flops,
        bootstrap_mean(own, generator=np.random.default_rng(0)),
        compare_paired(own, values.numpy(), generator=np.random.default_rng(0)).difference,
        point.milliseconds,
    )


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
