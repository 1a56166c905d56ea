"""Published rules as their authors run them: ToMe, PiToMe and EViT remove tokens between the attention and the MLP of a
block.

All three look at what the attention of a block has just computed, and hand fewer tokens to its MLP:

- ToMe (Bolya et al. 2023, arXiv 2210.09461), in every block. Tokens are dealt to two sets in turn; each of the first
  proposes its most similar one of the second, by the cosine of its keys, and the r most similar pairs are merged. Later
  attention counts a token as often as the tokens that it stands for.
- PiToMe (Tran et al. 2024, arXiv 2405.16148), in every block. The energy of a token says how many others are like it;
  the most redundant are merged first, and in the second half of the network all others are protected.
- EViT (Liang et al. 2022, arXiv 2202.07800), in three blocks. The patches that the class token attends to most stay,
  and all others become one token, their sum weighted by that attention.

A rule says what becomes of the tokens of a block, as a `Step`; `forward` runs blocks and steps, and knows at any time
in which token each of the original ones is, so that patch tokens can be read as copies of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pullback.backbones import Backbone
from pullback.backbones.block import Attended
from pullback.errors import ModelError
from pullback.pruning.forward import PrunedRun, StageRecord, TokenState, stage_record, whole_sequence
from pullback.pruning.matching import Matching, lowest, rows
from pullback.pruning.plan import BlockPlan


@dataclass(frozen=True, eq=False)
class Step:
    """What a rule made of the tokens inside a block, and ``place`` [B, n]: where each of them is now."""

    after: TokenState
    place: Tensor
    record: StageRecord


# (block index, the state before the block, what its attention computed) -> a step, None: nothing is removed
Rule = Callable[[int, TokenState, Attended], Step | None]


def forward(backbone: Backbone, images: Tensor, plan: BlockPlan, *, layers: Sequence[int]) -> PrunedRun:
    """Run the backbone on images [B, 3, H, W] with the plan's rule inside its blocks."""
    layout = backbone.token_layout(images)
    rule = rule_of(plan, backbone)
    x = whole_sequence(backbone.embed(images))
    place = x.positions  # of every original token in the current sequence
    taps: dict[int, Tensor] = {}
    records: list[StageRecord] = []
    for layer, block in enumerate(backbone.blocks[: 1 + max(*layers, 0)]):
        rope = backbone.rope_of(x.values, layout, x.positions if records else None)
        row = plan.class_row and layer == backbone.depth - 1
        half = block.attention(x.values, rope, backbone.class_rows if row else None, x.log_sizes)
        x = TokenState(half.tokens, x.positions, x.sizes, x.log_sizes)
        step = None if row else rule(layer, x, half)  # what goes on beside the class token is of no use then
        if step is not None:
            x, place = step.after, rows(step.place, place)
            records.append(step.record)
        x = TokenState(block.after_attention(x.values), x.positions, x.sizes, x.log_sizes)
        if layer in layers:
            taps[layer] = rows(x.values, place) if plan.comes_back else x.values
    log_sizes = None if plan.comes_back else x.log_sizes
    return PrunedRun(tuple(taps[layer] for layer in layers), tuple(records), log_sizes, layout)


def rule_of(plan: BlockPlan, backbone: Backbone) -> Rule:
    """Return the rule that a plan names."""
    if plan.rule == "tome":
        return ToMe(plan.merged, backbone.prefix)
    if plan.rule == "pitome":
        return PiToMe(plan.keep, backbone.depth, backbone.prefix)
    if not backbone.prefix:
        raise ModelError(f"preset: 'evit' ranks by class attention, and {backbone.name} has no class token.")
    return EViT(plan.keep, plan.stages, backbone.prefix)


@dataclass(frozen=True)
class ToMe:
    """``merged``: tokens that each block merges. The ``prefix`` takes no part."""

    merged: tuple[int, ...]
    prefix: int

    def __call__(self, layer: int, x: TokenState, half: Attended) -> Step | None:
        count = x.values.shape[1]
        going = min(self.merged[layer], (count - self.prefix) // 2)
        if going <= 0:
            return None
        order = torch.arange(count, device=x.values.device).expand(x.values.shape[0], -1)
        unit = F.normalize(half.keys.mean(1), dim=-1)  # [B, n, d]
        even, odd = self.prefix + self.prefix % 2, self.prefix + (self.prefix + 1) % 2
        return merged(layer, x, most_similar_pairs(unit, order[:, even::2], order[:, odd::2], going), count_sizes=True)


@dataclass(frozen=True)
class PiToMe:
    """``keep``: share of the patch tokens that stays in every block."""

    keep: float
    depth: int
    prefix: int

    def __call__(self, layer: int, x: TokenState, half: Attended) -> Step | None:
        patches = x.values.shape[1] - self.prefix
        going = min(math.floor(patches - patches * self.keep), patches // 2)
        if going <= 0:
            return None
        unit = F.normalize(half.keys.mean(1), dim=-1)
        energy = F.elu(_cosine(unit[:, self.prefix :]) - 0.75 * (1 - layer / self.depth)).mean(-1)  # [B, T]
        order = energy.argsort(dim=1, descending=True) + self.prefix
        if layer >= math.ceil(self.depth / 2):  # all but the most redundant are protected
            order = order[:, : 2 * going]
        return merged(layer, x, most_similar_pairs(unit, order[:, ::2], order[:, 1::2], going), count_sizes=False)


@dataclass(frozen=True)
class EViT:
    """``keep``: share of the patch tokens that stays in each of the blocks ``stages``."""

    keep: float
    stages: tuple[int, ...]
    prefix: int

    def __call__(self, layer: int, x: TokenState, half: Attended) -> Step | None:
        patches = x.values.shape[1] - self.prefix
        going = patches - math.ceil(self.keep * patches)
        if layer not in self.stages or going <= 0:
            return None
        logits = (half.queries[:, :, :1] @ half.keys.mT).float() * half.queries.shape[-1] ** -0.5
        attention = logits.softmax(-1).mean((1, 2))  # [B, n]
        kept, removed = lowest(attention, going, self.prefix)
        share = rows(attention, removed)[:, None].to(x.values.dtype)
        fused = share @ rows(x.values, removed)  # [B, 1, D], a sum and not a mean
        matching = Matching(kept, removed, torch.zeros_like(removed), torch.zeros_like(removed, dtype=torch.bool))
        last = kept.shape[1]
        place = matching.place(torch.arange(last, device=kept.device).expand_as(kept), torch.full_like(removed, last))
        positions = torch.cat([matching.keep(x.positions), x.positions[:, :1]], 1)  # the fused one has no place
        sizes = torch.cat([matching.keep(x.sizes), matching.take(x.sizes).sum(1, keepdim=True)], 1)
        after = TokenState(torch.cat([matching.keep(x.values), fused], 1), positions, sizes, None)
        return Step(after, place, stage_record(layer, x.positions, matching))


def most_similar_pairs(unit: Tensor, first: Tensor, second: Tensor, count: int) -> Matching:
    """Merge the ``count`` most similar pairs: each token of the first set [B, a] with its most similar one of the
    second [B, b], by unit vectors [B, n, d]. What is in neither set stays.

    The new sequence holds all that is left but the second set, in its order, and then the second set.
    """
    best, partner = (rows(unit, first) @ rows(unit, second).mT).max(-1)  # [B, a]
    order = best.argsort(dim=1, descending=True)[:, :count]
    removed = rows(first, order)
    others = torch.ones(unit.shape[:2], dtype=torch.bool, device=unit.device).scatter(1, second, False)
    others = others.scatter(1, removed, False)
    stays = unit.shape[1] - second.shape[1] - count
    kept = torch.cat([_places(others, stays), second], 1)
    return Matching(kept, removed, stays + rows(partner, order), torch.ones_like(removed, dtype=torch.bool))


def merged(layer: int, x: TokenState, matching: Matching, *, count_sizes: bool) -> Step:
    """Merge the tokens of a state by means weighted by size; later attention counts sizes, or does not."""
    kept = torch.arange(matching.kept.shape[1], device=matching.kept.device).expand_as(matching.kept)
    sizes = matching.add(x.sizes)
    after = TokenState(
        matching.merge(x.values, x.sizes), matching.keep(x.positions), sizes, sizes.log() if count_sizes else None
    )
    place = matching.place(kept, matching.destination)
    return Step(after, place, stage_record(layer, x.positions, matching))


def _cosine(unit: Tensor) -> Tensor:
    return unit @ unit.mT


def _places(mask: Tensor, count: int) -> Tensor:
    """Return the places [B, count] at which a mask [B, n] is true, ascending; every row has ``count`` of them."""
    here = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
    return torch.where(mask, here, mask.shape[1]).sort(dim=1).values[:, :count]
