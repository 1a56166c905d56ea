"""The pruned forward: blocks, stages, and the tokens that a decoder reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pullback.backbones import AnyBackbone, Backbone
from pullback.checks import of_kind
from pullback.errors import PullbackError
from pullback.pruning.matching import (
    Leftover,
    Matching,
    artifacts,
    cosines,
    leftover,
    lowest,
    match_by_cosine,
    match_by_task,
    reinserted,
    removal_costs,
    residuals,
    rows,
    stored,
)
from pullback.pruning.plan import PrunePlan
from pullback.pruning.scores import (
    Checked,
    Choice,
    Modes,
    Score,
    ScoreContext,
    StageModes,
    alternate,
    as_modes,
    as_score,
    strided,
)
from pullback.tokens import TokenLayout

ENDLESS = 1e30  # an infinite weight, of which a sum is still a number


@dataclass(frozen=True, eq=False)
class StageRecord:
    """What a stage did; the numbers are places in the full sequence."""

    layer: int
    kept: Tensor  # [B, K]
    removed: Tensor  # [B, R]
    partner: Tensor  # [B, R]
    merged: Tensor  # [B, R] bool


@dataclass(frozen=True, eq=False)
class PrunedRun:
    """``taps``: F^l, before the final norm, of the layers that were asked for. Whole sequences [B, N, D] where the plan
    re-inserts (and before its first stage), otherwise the tokens that are left [B, K, D]. ``log_sizes`` [B, K]: what
    attention adds for the tokens that are left in the end and stand for several, None: nothing. ``layout``: of the
    picture that the blocks saw, which a plan may have shrunk."""

    taps: tuple[Tensor, ...]
    records: tuple[StageRecord, ...]
    log_sizes: Tensor | None
    layout: TokenLayout


@dataclass(frozen=True, eq=False)
class TokenState:
    """The sequence between two blocks."""

    values: Tensor  # [B, n, D]
    positions: Tensor  # [B, n]
    sizes: Tensor  # [B, n]
    log_sizes: Tensor | None  # [B, n], None before anything was merged


def run_pruned(
    backbone: Backbone,
    images: Tensor,
    plan: PrunePlan,
    scores: Sequence[Choice],
    *,
    layers: Sequence[int],
    modes: Modes | nn.Module | None = None,
    generator: torch.Generator | None = None,
) -> PrunedRun:
    """Run the backbone on images [B, 3, H, W] and remove the plan's tokens on the way.

    ``scores``: one for each stage, or one for all. ``modes``: for the matching by d_task, a function or an SPN; an SPN
    that scores provides its own.
    """
    ready, known = prepared(backbone, plan, scores, modes)
    return forward(backbone, images, plan, ready, layers=layers, modes=known, generator=generator)


def forward(
    backbone: Backbone,
    images: Tensor,
    plan: PrunePlan,
    scores: Sequence[Score],
    *,
    layers: Sequence[int],
    modes: Modes | None = None,
    generator: torch.Generator | None = None,
) -> PrunedRun:
    """Do what `run_pruned` does, with scores and modes that `prepared` returned."""
    layout = backbone.token_layout(images)
    counts = dict(zip(plan.stages, plan.counts(layout.patches), strict=True))
    choices = dict(zip(plan.stages, scores, strict=True))
    gates = dict(zip(plan.stages, zip(plan.gates, plan.fades, strict=True), strict=True))
    x = whole_sequence(backbone.embed(images))
    taps: dict[int, Tensor] = {}
    leftovers: list[Leftover] = []
    records: list[StageRecord] = []
    rope = backbone.rope_of(x.values, layout, None)
    last = backbone.depth - 1
    for layer, block in enumerate(backbone.blocks[: 1 + max([*layers, *(s + 1 for s in plan.stages)])]):
        if plan.fuse_last and layer == last and leftovers:
            x, leftovers = whole_sequence(reinserted(x.values, leftovers)), []
            rope = backbone.rope_of(x.values, layout, None)
        entered = x.values
        seen = backbone.class_rows if plan.class_row and layer == last else None
        x = TokenState(block(entered, rope, seen, x.log_sizes), x.positions, x.sizes, x.log_sizes)
        if layer in layers or layer in backbone.hook_layers:
            back = plan.reinsert != "none" and leftovers
            taps[layer] = reinserted(x.values, leftovers) if back else x.values
        if layer in choices:
            known = {tap: value for tap, value in taps.items() if value.shape[1] == layout.tokens}
            context = ScoreContext(
                backbone, layer, layout, x.positions, x.sizes, entered, x.log_sizes, known, generator
            )
            matching, weights = decide(x.values, context, plan, choices[layer], counts[layer], gates[layer], modes)
            after = after_stage(x, matching, weights, plan)
            records.append(stage_record(layer, x.positions, matching))
            if plan.reinsert != "none":
                leftovers.append(leftover(plan.reinsert, matching, x.values, after.values))
            x = after
            rope = backbone.rope_of(x.values, layout, x.positions)
    sizes = x.log_sizes if plan.reinsert == "none" else None
    return PrunedRun(tuple(taps[layer] for layer in layers), tuple(records), sizes, layout)


def decide(
    tokens: Tensor,
    context: ScoreContext,
    plan: PrunePlan,
    score: Score,
    count: int,
    gate: tuple[float, float],
    modes: Modes | None = None,
) -> tuple[Matching, Tensor]:
    """Decide one stage: return the matching of tokens [B, N, D], and the weights [B, N] of a merge.

    ``gate``: the cosine from which on tokens are merged, and that from which on they are merged whole.
    """
    scores = stored(scored(tokens, context, score))
    if plan.match == "none" and plan.reinsert in ("none", "frozen") and plan.select == "score":
        kept, removed = lowest(scores, count, context.prefix)
        nobody = torch.zeros_like(removed)  # nothing is merged, nothing follows
        return Matching(kept, removed, nobody, nobody.bool()), context.sizes
    allowed, cosine = _destinations(tokens, context, plan), cosines(tokens)
    ranking = scores
    if plan.select == "cost":
        ranking = removal_costs(scores, residuals(tokens, scores, allowed, cosine), plan.trust)
    kept, removed = lowest(ranking, count, context.prefix)
    if plan.match == "task":
        assert modes is not None
        destination, merged = match_by_task(tokens, modes(tokens, context), kept, removed, context.prefix)
    else:
        destination, merged = match_by_cosine(cosine, kept, removed, allowed, *gate)
        merged = torch.zeros_like(merged) if plan.match == "none" else merged
    weights = context.sizes
    if plan.weighting == "importance":
        weights = scores.clamp_min(0).to(torch.promote_types(scores.dtype, torch.float32))
        weights = weights.nan_to_num(0.0, posinf=ENDLESS)  # one NaN would spread to the mean, and from it to all tokens
    return Matching(kept, removed, destination, merged), weights


def scored(tokens: Tensor, context: ScoreContext, score: Score) -> Tensor:
    """Score tokens [B, N, D]; raise an error unless that gives one number for each, [B, N]."""
    scores = score(tokens, context)
    if not isinstance(scores, Tensor) or scores.shape != tokens.shape[:2]:
        got = list(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise PullbackError(f"score: expected one number per token, {list(tokens.shape[:2])}, got {got}.")
    return scores


def _destinations(tokens: Tensor, context: ScoreContext, plan: PrunePlan) -> Tensor:
    """Return which tokens [B, N] may take in a removed one, if they are kept; never the prefix."""
    if plan.match == "bipartite":
        return alternate(context)
    if plan.match == "strided":
        return strided(context)
    patch = torch.arange(tokens.shape[1], device=tokens.device) >= context.prefix
    return patch & ~artifacts(tokens, context.prefix) if plan.safe else patch.expand(tokens.shape[:2])


def after_stage(x: TokenState, matching: Matching, weights: Tensor, plan: PrunePlan) -> TokenState:
    """Return what is left of a sequence: removed tokens are merged with these weights [B, N], or dropped."""
    if plan.match == "none":
        sizes = matching.keep(x.sizes)
        return TokenState(matching.keep(x.values), matching.keep(x.positions), sizes, None)
    sizes = matching.add(x.sizes)
    log_sizes = sizes.log() if plan.sizes else None
    return TokenState(matching.merge(x.values, weights), matching.keep(x.positions), sizes, log_sizes)


def whole_sequence(tokens: Tensor) -> TokenState:
    """Return the state of a full sequence [B, N, D]: every token is at its place and stands for itself."""
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape[0], -1)
    return TokenState(tokens, positions, torch.ones_like(positions, dtype=torch.float32), None)


def stage_record(layer: int, positions: Tensor, matching: Matching) -> StageRecord:
    """Translate a matching into places of the full sequence, with the ``positions`` [B, N] before the stage."""
    kept = matching.keep(positions)
    return StageRecord(layer, kept, matching.take(positions), rows(kept, matching.destination), matching.merged > 0)


def prepared(
    backbone: Backbone,
    plan: PrunePlan,
    scores: Sequence[Choice],
    modes: Modes | nn.Module | None,
) -> tuple[list[Score], Modes | None]:
    """Return one score per stage, each checked against the backbone and its stage, and the modes for d_task."""
    ready = stage_scores(backbone, plan, scores)
    if plan.match != "task":
        return ready, None
    known = as_modes(modes, plan.stages, ready)
    if known is None:
        raise PullbackError(
            "modes: matching by d_task (preset 'paper') needs the modes of J: score with a SpectralPullbackNetwork, or "
            "pass one as modes, or exact_modes(probe) of pullback.geometry.scores."
        )
    if isinstance(known, StageModes):
        known.check(backbone.family, backbone.dim)
    return ready, known


def stage_scores(
    backbone: AnyBackbone, plan: PrunePlan, scores: Sequence[Choice], named: Callable[[Choice], Score] = as_score
) -> list[Score]:
    """Return one score per stage, each checked against the backbone and its stage; ``named`` makes one of a choice."""
    of_kind("plan", plan, PrunePlan, "a PrunePlan; pb.prune makes one of a ratio and stages")
    plan.check_depth(backbone.depth)
    if not plan.stages:
        return []
    if isinstance(scores, str):  # whose letters would be taken for scores
        raise PullbackError(f"scores: expected a list with one for each stage or one for all, [{scores!r}].")
    if len(scores) not in (1, len(plan.stages)):
        raise PullbackError(
            f"scores: expected one, or one for each of the {len(plan.stages)} stages, got {len(scores)}."
        )
    ready = [named(choice) for choice in scores] * (len(plan.stages) if len(scores) == 1 else 1)
    for stage, score in zip(plan.stages, ready, strict=True):
        if isinstance(score, Checked):
            score.check(backbone.family, backbone.dim, stage)
    return ready
