"""Fewer tokens for VGGT when a scene has many views, whose global attention grows with the square of their number.

Two ways, by ``scope``:

"global": patches of all views are matched together, also across views, and only the global blocks run on the groups'
means. Every token then moves as far as the mean of its group did, x_t + (y_b - mean_b), so frame attention and the
heads see all of them. A stage decides groups from the tokens after its block, for the global blocks up to the next one.
"view": each view loses equally many patches, matched within that view, for all later blocks, frame attention too; they
come back, moved as far as their partner, where the heads read. This saves more and sees no repetition across views.

Camera and register tokens are never removed. Outputs are the model's own, with full grids:

    fast = prune_views(model, "random", ratio=0.5, stages=[3], scope="global")
    output = fast(images)
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from pullback.backbones import check_evaluation_mode
from pullback.errors import ModelError, PullbackError
from pullback.pruning.forward import StageRecord, TokenState, scored, stage_record, stage_scores, whole_sequence
from pullback.pruning.matching import Leftover, leftover, reinserted, rows
from pullback.pruning.model import Pruned
from pullback.pruning.plan import PrunePlan, as_blocks, as_shares, preset
from pullback.pruning.scores import Choice, Score, ScoreContext, as_score
from pullback.tokens import TokenLayout
from pullback.vggt.backbone import VGGTBackbone, adapt
from pullback.vggt.checkpoint import VGGT
from pullback.vggt.matching import Groups, grid_points, group_tokens, prune_within_views, strided_score
from pullback.vggt.network.model import as_scenes

Scope = Literal["global", "view"]
STRIDED = "strided"
NAMES = ("random", "norm", STRIDED)
PRESETS = ("best", STRIDED, "drop")
_WITHOUT_CLASS_TOKEN = ("class-attention", "cls-similarity")


@dataclass(frozen=True, eq=False)
class PrunedScenes:
    """What the heads read, {layer: [B, S, P, 2C]}, and what each stage did."""

    taps: dict[int, Tensor]
    layout: TokenLayout
    records: tuple[StageRecord, ...]
    tokens: tuple[int, ...]  # that each global block ran on


class PrunedVGGT(Pruned):
    """A VGGT with its own call and output that runs on fewer tokens; ``model`` is the original, untouched."""

    def __init__(self, model: VGGT, plan: PrunePlan, scores: Sequence[Choice], scope: Scope) -> None:
        super().__init__()
        _check_model(model)
        if plan.fades != plan.gates:
            raise PullbackError(
                f"fades: tokens of views are merged whole or not at all, got {list(plan.fades)}. Leave it out."
            )
        self.model, self.plan, self.scope = model, plan, scope
        self.backbone = adapt(model, type(model).__name__)
        self.scores = stage_scores(self.backbone, plan, scores, lambda choice: _score(choice, plan.ratio))
        self.heads = nn.ModuleList(dict.fromkeys(score for score in self.scores if isinstance(score, nn.Module)))
        self.eval()  # this wrapper and its heads; the model is in evaluation mode already

    def forward(self, images: Tensor, **options: Any) -> Any:
        """Images [S, 3, H, W] or [B, S, 3, H, W] -> a VGGTOutput; ``options`` are those of the model. A plan that
        removes nothing calls it."""
        return self.with_record(images, **options)[0] if self.plan.ratio else self.model(images, **options)

    def with_record(self, images: Tensor, **options: Any) -> tuple[Any, PrunedScenes]:
        """The output by the pruned route, whatever the ratio is, and what each stage did."""
        scenes = as_scenes(images)
        run = self.run(scenes)
        output = self.model.decode(run.taps, run.layout, **options)
        output["images"] = scenes
        return output, run

    def run(self, images: Tensor) -> PrunedScenes:
        """Scenes [B, S, 3, H, W] through the trunk."""
        forward = _merge_globally if self.scope == "global" else _prune_views
        return forward(self.backbone, images, self.plan, self.scores)


def prune_views(
    model: VGGT,
    score: Choice | Sequence[Choice],
    *,
    ratio: float | Sequence[float],
    stages: Sequence[int],
    preset: str = "best",
    scope: Scope = "global",
) -> PrunedVGGT:
    """A VGGT that removes ``ratio`` of its patch tokens after the global blocks ``stages``.

    ``score``: random, norm, strided, an importance head, or a function of the tokens [B, N, C] and the context; one for
    all stages, or one for each. With scope "view" such a function sees single views, [B S, P, C]. ``ratio``: split
    equally over the stages, or a share for each. ``preset``: "best" (score^0.5 times the distance to the nearest token
    of a higher score decides, merged by score), "strided" (its score is "strided": the patches most similar to a
    strided grid go into it), "drop".
    """
    _check_model(model)
    plan = view_plan(preset, ratio, stages, scope=scope, depth=model.config.depth)
    several = isinstance(score, (list, tuple, nn.ModuleList))
    return PrunedVGGT(model, plan, list(cast(Any, score)) if several else [cast(Choice, score)], scope)


def view_plan(
    name: str, ratio: float | Sequence[float], stages: Sequence[int], *, scope: Scope, depth: int
) -> PrunePlan:
    """A named plan. Within a view it is that of an image with a dense decoder, but for "best": tokens that come back
    for the last block disturb the cameras more than they help the maps (docs/results/vggt-pruning.md)."""
    if scope not in get_args(Scope):
        raise PullbackError(f"scope: expected one of {', '.join(get_args(Scope))}, got {scope!r}.")
    if name not in PRESETS:
        raise PullbackError(f"preset: expected one of {', '.join(PRESETS)}, got {name!r}.")
    stages = as_blocks(stages)
    shares = as_shares(ratio, len(stages))
    if name == "best":
        return PrunePlan(stages, shares, select="cost", match="cosine", sizes=True, reinsert="drift", trust=0.5)
    if scope == "view":
        return preset(name, ratio, stages, dense=True, depth=depth)
    if name == STRIDED:
        return PrunePlan(stages, shares, match="strided", weighting="size", sizes=True, reinsert="drift")
    return PrunePlan(stages, shares, match="none", reinsert="frozen")


# Scope "global"


def _merge_globally(backbone: VGGTBackbone, images: Tensor, plan: PrunePlan, scores: Sequence[Score]) -> PrunedScenes:
    trunk = backbone.model.aggregator
    state = trunk.embed(images)
    tokens, layout = state.tokens, state.layout
    del state  # whose tokens would stay to the end
    ropes = trunk.ropes(layout, tokens)
    removed = dict(zip(plan.stages, _running_sums(plan.counts(layout.views * layout.patches)), strict=True))
    choices = dict(zip(plan.stages, scores, strict=True))
    stage: tuple[Groups, Tensor] | None = None
    taps: dict[int, Tensor] = {}
    records: list[StageRecord] = []
    counts: list[int] = []
    for layer, block in enumerate(trunk.global_blocks):
        frame = trunk.frame_step(layer, tokens, layout.views, ropes[0])
        if stage is None:
            tokens = block(frame, ropes[1])
            counts.append(layout.tokens)
        else:
            groups, weights = stage
            mean = groups.mean(frame, weights)
            moved = block(mean, ropes[1].at(groups.kept), groups.log_sizes() if plan.sizes else None) - mean
            tokens = frame + groups.spread(moved, follow=plan.reinsert == "drift")
            counts.append(groups.kept.shape[1])
        if layer in backbone.model.config.read_layers:
            taps[layer] = torch.cat([frame, tokens], -1).unflatten(1, (layout.views, -1))
        if layer in choices:
            stage = decide_groups(tokens, backbone, layer, layout, plan, choices[layer], removed[layer])
            groups = stage[0]
            records.append(
                StageRecord(layer, groups.kept, groups.removed, rows(groups.kept, groups.group), groups.merged)
            )
    return PrunedScenes(taps, layout, tuple(records), tuple(counts))


def decide_groups(
    tokens: Tensor,
    backbone: VGGTBackbone,
    layer: int,
    layout: TokenLayout,
    plan: PrunePlan,
    score: Score,
    count: int,
) -> tuple[Groups, Tensor]:
    """One stage: groups among the tokens [B, N, C] of all views, and the weights [B, N] of their means."""
    context = _context(backbone, layer, layout, whole_sequence(tokens))
    scores = _finite_scores(tokens, context, score)
    patch = layout.patch_mask().to(tokens.device)
    order = torch.cat([(~patch).nonzero().squeeze(1), patch.nonzero().squeeze(1)])
    grid = grid_points(layout, plan.ratio).to(tokens.device)
    groups = group_tokens(tokens, scores, plan, count, order, layout.views * layout.prefix, grid)
    weights = context.sizes if plan.weighting == "size" else scores.float().clamp_min(0)
    return groups, weights


# Scope "view"


def _prune_views(backbone: VGGTBackbone, images: Tensor, plan: PrunePlan, scores: Sequence[Score]) -> PrunedScenes:
    trunk, depth = backbone.model.aggregator, backbone.depth
    state = trunk.embed(images)
    all_views, views = state.layout, state.layout.views
    layout = TokenLayout(all_views.prefix, all_views.grid)
    rope, _ = trunk.ropes(layout, state.tokens)
    settings = zip(scores, plan.counts(layout.patches), plan.gates, strict=True)
    stages = dict(zip(plan.stages, settings, strict=True))
    x = whole_sequence(_apart(state.tokens, views))  # views are the samples
    del state  # whose tokens would stay to the end
    leftovers: list[Leftover] = []
    taps: dict[int, Tensor] = {}
    records: list[StageRecord] = []
    counts: list[int] = []
    for layer, block in enumerate(trunk.global_blocks):
        if plan.fuse_last and layer == depth - 1:
            x, leftovers = whole_sequence(reinserted(x.values, leftovers)), []
        sizes = None if x.log_sizes is None else _together(x.log_sizes, views)
        frame = trunk.frame_step(layer, _together(x.values, views), views, rope.at(x.positions), x.log_sizes)
        tokens = block(frame, rope.at(_together(x.positions, views)), sizes)
        counts.append(tokens.shape[1])
        x = TokenState(_apart(tokens, views), x.positions, x.sizes, x.log_sizes)
        if layer in backbone.model.config.read_layers:
            halves = [reinserted(half, leftovers) for half in (_apart(frame, views), x.values)]
            taps[layer] = torch.cat(halves, -1).unflatten(0, (-1, views))
        if layer in stages:
            score, count, gate = stages[layer]
            context = _context(backbone, layer, layout, x)
            known = _finite_scores(x.values, context, score)
            after, matching = prune_within_views(x, context, plan, known, count, gate)
            records.append(stage_record(layer, x.positions, matching))
            leftovers.append(leftover(plan.reinsert, matching, x.values, after.values))
            x = after
    return PrunedScenes(taps, all_views, tuple(records), tuple(counts))


def _together(per_view: Tensor, views: int) -> Tensor:
    """[B S, n, ...] -> [B, S n, ...]."""
    return per_view.unflatten(0, (-1, views)).flatten(1, 2)


def _apart(tokens: Tensor, views: int) -> Tensor:
    """[B, S n, ...] -> [B S, n, ...]."""
    return tokens.unflatten(1, (views, -1)).flatten(0, 1)


# Both


def _check_model(model: object) -> None:
    if isinstance(model, str | os.PathLike):
        raise ModelError(
            f"model: expected a VGGT, got the name {os.fspath(model)!r}. Load it first: "
            f"pullback.VGGT.from_pretrained({os.fspath(model)!r})."
        )
    if not isinstance(model, VGGT):
        raise ModelError(f"model: expected a VGGT, got {type(model).__name__}. For images: pullback.prune.")
    check_evaluation_mode(model, "model")


def _finite_scores(tokens: Tensor, context: ScoreContext, score: Score) -> Tensor:
    """[B, N], one finite number per token [B, N, C]."""
    scores = scored(tokens, context, score)
    if not torch.compiler.is_compiling() and not scores.isfinite().all():
        bad = int((~scores.isfinite()).sum())
        raise PullbackError(
            f"score: expected finite numbers, got NaN or infinity for {bad} of {scores.numel()} tokens after global "
            f"block {context.layer}. Which of them are the lowest is not defined; check the score, or the images."
        )
    return scores


def _score(choice: Choice, ratio: float) -> Score:
    """Return the score of a name that means something for views, or of what `as_score` takes."""
    if isinstance(choice, str) and choice not in NAMES:
        why = f"VGGT has no class token, which {choice!r} is about. " if choice in _WITHOUT_CLASS_TOKEN else ""
        raise PullbackError(
            f"score: {why}Expected one of {', '.join(NAMES)}, an importance head or a function, got {choice!r}."
        )
    return strided_score(ratio) if choice == STRIDED else as_score(choice)


def _context(backbone: VGGTBackbone, layer: int, layout: TokenLayout, x: TokenState) -> ScoreContext:
    """What a score may know; there is no class token here, so no class attention either."""
    return ScoreContext(backbone, layer, layout, x.positions, x.sizes, x.values, x.log_sizes)


def _running_sums(counts: Sequence[int]) -> list[int]:
    return [sum(counts[: index + 1]) for index in range(len(counts))]
