"""What a pruned model computes, as a share of what the blocks of the whole model compute: counted, and by formula.

A block with n tokens of width D, of which r rows go on (n, or the class token alone), heads of A numbers together and
an MLP with M weights takes, a multiplication and an addition counted as two,

    queries and projection 4 r D A,   keys and values 4 n D A,   attention 4 r n A,   MLP 2 r M

that is 8nD^2 + 4n^2D + 16nD^2 with r = n, A = D and four times the width. What a stage does to choose and to merge
depends on its score, so it is counted on a few numbers of tokens, and read from a polynomial in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor, nn

from pullback.backbones import Backbone
from pullback.backbones.block import Block
from pullback.evaluation.cost import flops
from pullback.pruning import resized
from pullback.pruning.forward import TokenState, after_stage, decide
from pullback.pruning.matching import ALIGNED
from pullback.pruning.model import PrunedModel
from pullback.pruning.plan import PrunePlan
from pullback.pruning.scores import Choice, ScoreContext
from pullback.tokens import TokenLayout

_TOKENS = (1.0, 0.8, 0.6, 0.4)  # shares of the sequence at which a stage is counted,
_REMOVED = (0.05, 0.25, 0.45, 0.65)  # and of its patches that it then removes


@torch.no_grad()
def operations(pruned: PrunedModel, images: Tensor) -> float:
    """Return the operations of a pruned model over those of the unpruned blocks at the pictures' own size.

    Counted are all blocks with the tokens that they really run (8nD^2 + 4n^2D for attention, 16nD^2 for an MLP of four
    times the width), and what chooses and merges tokens; not counted are patch embedding and decoder. ``images``
    [B, 3, H, W], of which the first is run.
    """
    backbone, one = pruned.backbone, pruned.whole_patches(images[:1])
    last = [backbone.depth - 1]
    seen = one if pruned.plan.size is None else resized.shrunk(one, pruned.plan.size, backbone.patch_size)
    own = flops(lambda: pruned.run(one, last)) - flops(lambda: backbone.embed(seen))
    return own / whole_operations(backbone, backbone.token_layout(one).tokens)


def whole_operations(backbone: Backbone, tokens: int) -> int:
    """Return the operations of all blocks with so many tokens."""
    return sum(block_operations(block, tokens) for block in backbone.blocks)


def block_operations(block: Block, tokens: int, rows: int | None = None) -> int:
    """Return the operations of one block with so many tokens, of which the first ``rows`` go on, by default all."""
    rows = tokens if rows is None else rows
    every = block.key.weight.numel() + block.value.weight.numel()
    own = block.query.weight.numel() + block.project.weight.numel()
    mixed = rows * tokens * (block.query.weight.shape[0] + block.value.weight.shape[0])
    gate = 0 if block.mlp.gate is None else block.mlp.gate.weight.numel()
    mlp = block.mlp.up.weight.numel() + block.mlp.down.weight.numel() + gate
    return 2 * (tokens * every + rows * own + mixed + rows * mlp)


class PredictedOperations:
    """`operations` of plans of stages, without running the model for each: the formula of this file for the blocks, and
    for a stage the polynomial of `StageOperations`.

    ``scores``: by the block after which they rank. ``plan``: one that a stage's way to choose and merge is taken from.
    """

    def __init__(self, model: nn.Module, images: Tensor, scores: Mapping[int, Choice], plan: PrunePlan) -> None:
        self._model, self._scores, self._plan = model, scores, plan
        self._pruned = PrunedModel(model, PrunePlan((), ()), [])
        self.backbone = self._pruned.backbone
        self._image = self._pruned.whole_patches(images[:1])
        self._stages: dict[int, StageOperations] = {}

    def __call__(self, plan: PrunePlan) -> float:
        """Return the share of the operations of the unpruned blocks."""
        backbone, last = self.backbone, self.backbone.depth - 1
        tokens = whole = backbone.prefix + self.patches(plan.size)
        removed = dict(zip(plan.stages, plan.counts(whole - backbone.prefix), strict=True))
        total = 0.0
        for layer, block in enumerate(backbone.blocks):
            if layer == last and plan.fuse_last and plan.stages:
                tokens = whole
            total += block_operations(block, tokens, backbone.class_rows if plan.class_row and layer == last else None)
            if layer in removed:
                total += self.stage(layer)(tokens, removed[layer])
                tokens -= removed[layer]
        return total / whole_operations(backbone, backbone.prefix + self.patches(None))

    def patches(self, size: int | None) -> int:
        """Return how many patches a picture has, shrunk to ``size`` pixels or as it is."""
        height, width = self._image.shape[-2:]
        patch = self.backbone.patch_size
        if size is not None:
            height, width = resized.shrunk_size(height, width, size, patch)
        return (height // patch) * (width // patch)

    def stage(self, layer: int) -> StageOperations:
        """Return what choosing and merging after this block takes."""
        if layer not in self._stages:
            own = self._plan
            gates, fades = own.gates[:1], own.fades[:1]  # of any stage: they decide what is merged, not what it takes
            plan = replace(own, stages=(layer,), shares=(0.5,), gates=gates, fades=fades, size=None)
            pruned = PrunedModel(self._model, plan, [self._scores[layer]])
            layout = self.backbone.token_layout(self._image)
            self._stages[layer] = StageOperations(pruned, layout, self._features)
        return self._stages[layer]

    @cached_property
    def _features(self) -> dict[int, Tensor]:
        """What enters and leaves the blocks with a stage, [1, N, D] each; -1 enters block 0."""
        layers = sorted({near for layer in self._scores for near in (layer - 1, layer)} - {-1})
        with torch.no_grad():
            return {-1: self.backbone.embed(self._image), **self.backbone.features(self._image, layers)}


class StageOperations:
    """Operations of one stage that meets n tokens and removes R of them.

    c(n, R) = c0 + c1 n + c2 R + c3 n^2 + c4 n R + c5 R^2 + c6 n n' + c7 (n - R) R', by least squares from 16 counts:
    scores are linear in n or, with attention of their own, quadratic, and distances by d_task take n R. n' and R' are
    the next multiples of 8, to which matrices are padded: cosines take 2 n n' D, and a merge 2 (n - R) R' D.
    """

    def __init__(self, pruned: PrunedModel, layout: TokenLayout, features: Mapping[int, Tensor]) -> None:
        (layer,) = pruned.plan.stages
        self._tokens = features[layer].shape[1]
        prefix = pruned.backbone.prefix
        points = []
        for share in _TOKENS:
            tokens = prefix + max(2, round(share * (self._tokens - prefix)))
            points += [(tokens, round(part * (tokens - prefix))) for part in _REMOVED]
        points = [(min(tokens, self._tokens), removed) for tokens, removed in points]
        counts = [count_stage(pruned, layout, features[layer - 1], features[layer], *point) for point in points]
        terms = torch.tensor([self._terms(*point) for point in points], dtype=torch.float64)
        target = torch.tensor(counts, dtype=torch.float64)[:, None]
        self._coefficients = torch.linalg.lstsq(terms, target, driver="gelsd").solution[:, 0].tolist()

    def __call__(self, tokens: int, removed: int) -> float:
        """Return the operations of a stage that meets so many tokens, and removes so many."""
        found = sum(own * term for own, term in zip(self._coefficients, self._terms(tokens, removed), strict=True))
        return max(0.0, found)

    def _terms(self, tokens: int, removed: int) -> tuple[float, ...]:
        n, r = tokens / self._tokens, removed / self._tokens
        wide, many = (-(-count // ALIGNED) * ALIGNED / self._tokens for count in (tokens, removed))
        return (1.0, n, r, n * n, n * r, r * r, n * wide, (n - r) * many)


@torch.no_grad()
def count_stage(
    pruned: PrunedModel, layout: TokenLayout, entered: Tensor, left: Tensor, tokens: int, removed: int
) -> int:
    """Count what the only stage of a plan takes with the first so many ``tokens`` of features [1, N, D] that have
    ``entered`` and ``left`` its block, if it removes so many of them: the values do not matter to it."""
    backbone, plan = pruned.backbone, pruned.plan
    (layer,) = plan.stages
    positions = torch.arange(tokens, device=left.device)[None]
    ones = torch.ones_like(positions, dtype=torch.float32)
    x = TokenState(left[:, :tokens], positions, ones, None)
    context = ScoreContext(backbone, layer, layout, positions, ones, entered[:, :tokens])

    def stage() -> None:
        gate = plan.gates[0], plan.fades[0]
        matching, weights = decide(x.values, context, plan, pruned.scores[0], removed, gate, pruned.modes)
        after_stage(x, matching, weights, plan)

    return flops(stage)
