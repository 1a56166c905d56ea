"""Matching among the tokens of all views of a scene: many more than one image has, so nothing here is quadratic in
memory.

A group is a kept token and the removed ones that follow it. Sums over groups run over removed tokens sorted by group:
in a fixed order, so that results are the same every time, which adding rows by index is not on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pullback.pruning.forward import TokenState, after_stage, decide
from pullback.pruning.matching import ALIGNED, NOBODY, Matching, artifacts, gaps, lowest, ranks, removal_costs, rows
from pullback.pruning.plan import PrunePlan
from pullback.pruning.scores import NEVER, Score, ScoreContext
from pullback.tokens import TokenLayout

CHUNK_NUMBERS = 1 << 22
"""Cosines that exist at a time; as many as the tokens themselves have numbers, where these are more. A stage then takes
no more than a block does."""
_NONE = -2.0  # below `NOBODY`


@dataclass(frozen=True, eq=False)
class Groups:
    """A split of N tokens into K kept and R removed ones, each of which follows a kept one; ``merged`` says whether its
    content also goes into the group's mean. Places are those of the sequence."""

    kept: Tensor  # [B, K]
    removed: Tensor  # [B, R], group by group
    group: Tensor  # [B, R], indices into `kept`, ascending
    merged: Tensor  # [B, R] bool
    lengths: Tensor  # [B, K], removed tokens of each group

    def mean(self, x: Tensor, weights: Tensor) -> Tensor:
        """x_b + sum_a w_a / (w_b + sum_a w_a) (x_a - x_b): x [B, N, C], weights [B, N] -> [B, K, C].

        The weighted mean, written so that a token that stays alone, or among its equals, does not change.
        """
        kept = rows(x, self.kept)
        if not self.removed.shape[1]:
            return kept
        own, others = rows(weights, self.kept), rows(weights, self.removed) * self.merged
        total = own + self._sums(others[..., None])[..., 0]
        shares = others / rows(total, self.group).clamp_min(torch.finfo(torch.float32).tiny)
        gaps = rows(x, self.removed) - rows(kept, self.group)
        return kept + self._sums(shares.to(x.dtype)[..., None] * gaps)

    def log_sizes(self) -> Tensor:
        """[B, K]: the logarithm of how many tokens each group's mean stands for."""
        return self._sums(self.merged[..., None].float())[..., 0].log1p()

    def spread(self, values: Tensor, *, follow: bool) -> Tensor:
        """[B, K, C] -> [B, N, C]: every token of a group gets its value, or, without ``follow``, the kept one alone."""
        batch, count = self.kept.shape[0], self.kept.shape[1] + self.removed.shape[1]
        full = values.new_zeros(batch, count, values.shape[-1])
        full.scatter_(1, self.kept[..., None].expand_as(values), values)
        if follow:
            full.scatter_(1, self.removed[..., None].expand(-1, -1, values.shape[-1]), rows(values, self.group))
        return full

    def _sums(self, values: Tensor) -> Tensor:
        """[B, R, c] -> [B, K, c], over the members of each group."""
        flat = torch.segment_reduce(
            values.flatten(0, 1).contiguous(), "sum", lengths=self.lengths.flatten(), axis=0, initial=0, unsafe=True
        )
        return flat.unflatten(0, self.lengths.shape)


def group_tokens(
    tokens: Tensor,
    scores: Tensor,
    plan: PrunePlan,
    count: int,
    order: Tensor,
    prefix: int,
    grid: Tensor,
    gate: float = NOBODY,
) -> Groups:
    """Choose ``count`` patches of tokens [B, N, C] with scores [B, N] to remove, and the token that each one follows.

    ``order`` [N] are all places, the ``prefix`` that never go first; ``grid`` [N] or [B, N] bool, by place, are the
    points of a strided grid. With a cosine under ``gate`` a token follows and is not merged.
    """
    tokens, scores = tokens[:, order], scores[:, order].float()
    allowed = _destinations(tokens, plan, prefix, grid[..., order])
    if plan.select == "cost":
        scores = removal_costs(scores, residuals(tokens, scores, allowed), plan.trust)
    kept, removed = lowest(scores, count, prefix)
    if not count or (plan.match == "none" and plan.reinsert == "frozen"):
        group, merged = torch.zeros_like(removed), torch.zeros_like(removed, dtype=torch.bool)
    else:
        stays = torch.zeros_like(allowed).scatter(1, kept, True)
        best, partner = nearest(tokens, removed, allowed & stays)
        group = rows(stays.cumsum(1) - 1, partner).clamp_min(0)
        merged = (best > max(gate, NOBODY)) & (plan.match != "none")
    group, sorting = group.sort(dim=1, stable=True)
    lengths = torch.zeros_like(kept).scatter_add(1, group, torch.ones_like(group))
    return Groups(order[kept], order[rows(removed, sorting)], group, rows(merged, sorting), lengths)


def residuals(tokens: Tensor, scores: Tensor, allowed: Tensor) -> Tensor:
    """[B, N]: |F_t - F_u| to the most similar allowed token u with a higher score, which is likely to be kept; at most
    the token's own length."""
    places = torch.arange(tokens.shape[1], device=tokens.device).expand(len(tokens), -1)
    return gaps(tokens, *nearest(tokens, places, allowed, ranks(scores)))


def nearest(tokens: Tensor, asking: Tensor, allowed: Tensor, place: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Find for tokens ``asking`` [B, n] the highest cosine to an ``allowed`` one [B, N] bool, and its index, [B, n];
    with ``place`` [B, N], of `ranks`, only to those before it. Below `NOBODY` where there is none."""
    unit = F.pad(F.normalize(tokens, dim=-1), (0, 0, 0, -tokens.shape[1] % ALIGNED))
    chunk = max(1, max(CHUNK_NUMBERS, tokens.numel()) // unit.shape[:2].numel())
    found = [_nearest(unit, some, allowed, place) for some in asking.split(chunk, 1)]
    best, index = (torch.cat(parts, 1) for parts in zip(*found, strict=True))
    return best, index


def _nearest(unit: Tensor, some: Tensor, allowed: Tensor, place: Tensor | None) -> tuple[Tensor, Tensor]:
    """`nearest` for ``some`` of the tokens, of which units [B, N + padding, C] are given. Cosines are most of the
    memory of a stage: conditions are applied to them in place, and they are gone before the next ones come."""
    cosine = (rows(unit, some) @ unit.mT)[..., : allowed.shape[1]]
    cosine.masked_fill_(~allowed[:, None], _NONE)
    if place is not None:
        cosine.masked_fill_(place[:, None] >= rows(place, some)[..., None], _NONE)
    best, index = cosine.max(-1)
    return best, index


def strided_grid(height: int, width: int, ratio: float) -> Tensor:
    """[h, w] bool: the upper left patch of every s x s cell, with the least s >= 2 for which the others are the share
    ``ratio`` or more."""
    for stride in range(2, max(height, width, 2) + 1):
        row, column = (torch.arange(side) % stride == 0 for side in (height, width))
        points = row[:, None] & column
        if (~points).float().mean() >= ratio:
            break
    return points


def prune_within_views(
    x: TokenState, context: ScoreContext, plan: PrunePlan, scores: Tensor, count: int, gate: float
) -> tuple[TokenState, Matching]:
    """A stage of views [B S, n, C] that do not see each other: what is left of them, and what was done. What is
    compared grows with the square of a view's tokens, so some views are taken at a time."""
    views = max(1, CHUNK_NUMBERS // x.positions.shape[1] ** 2)
    after, matchings = [], []
    for start in range(0, len(x.values), views):
        some = slice(start, start + views)
        log_sizes = None if x.log_sizes is None else x.log_sizes[some]
        own = TokenState(x.values[some], x.positions[some], x.sizes[some], log_sizes)
        seen = replace(context, positions=own.positions, sizes=own.sizes, block_input=own.values, log_sizes=log_sizes)
        matching, weights = _decide_within_views(own.values, seen, plan, scores[some], count, gate)
        after.append(after_stage(own, matching, weights, plan))
        matchings.append(matching)
    counted = None if after[0].log_sizes is None else _joined(after, "log_sizes")
    left = TokenState(_joined(after, "values"), _joined(after, "positions"), _joined(after, "sizes"), counted)
    return left, Matching(*(_joined(matchings, name) for name in ("kept", "removed", "destination", "merged")))


def _decide_within_views(
    tokens: Tensor, context: ScoreContext, plan: PrunePlan, scores: Tensor, count: int, gate: float
) -> tuple[Matching, Tensor]:
    """Decide as for images, but for the strided grid: it widens with the ratio, so that enough is left to remove."""
    if plan.match != "strided":
        return decide(tokens, context, plan, lambda *_: scores, count, (gate, gate))
    grid = grid_points(context.layout, plan.ratio).to(tokens.device)[context.positions]
    order = torch.arange(tokens.shape[1], device=tokens.device)
    groups = group_tokens(tokens, scores, plan, count, order, context.prefix, grid, gate)
    weights = context.sizes if plan.weighting == "size" else scores.float().clamp_min(0)
    return Matching(groups.kept, groups.removed, groups.group, groups.merged), weights


def _joined(parts: Sequence[Any], name: str) -> Tensor:
    return torch.cat([getattr(part, name) for part in parts])


def grid_points(layout: TokenLayout, ratio: float) -> Tensor:
    """[N] bool, by place: the strided grid in every view."""
    points = strided_grid(*layout.grid, ratio).flatten()
    return torch.cat([points.new_zeros(layout.prefix), points]).repeat(layout.views)


def strided_score(ratio: float) -> Score:
    """1 - the highest cosine to a point of the strided grids; these points and the prefix never go first."""

    def score(tokens: Tensor, context: ScoreContext) -> Tensor:
        grid, patch = (
            known.to(tokens.device)[context.positions]
            for known in (grid_points(context.layout, ratio), context.layout.patch_mask())
        )
        places = torch.arange(tokens.shape[1], device=tokens.device).expand(len(tokens), -1)
        best, _ = nearest(tokens, places, grid)
        return torch.where(grid | ~patch, NEVER, 1 - best)

    return score


def _destinations(tokens: Tensor, plan: PrunePlan, prefix: int, grid: Tensor) -> Tensor:
    """Return which tokens [B, N] may be followed, if they are kept; never the prefix."""
    patch = torch.arange(tokens.shape[1], device=tokens.device) >= prefix
    if plan.match == "strided":
        return (patch & grid).expand(tokens.shape[:2])
    return patch & ~artifacts(tokens, prefix) if plan.safe else patch.expand(tokens.shape[:2])
