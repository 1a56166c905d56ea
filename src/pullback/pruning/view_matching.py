"""Matching among the tokens of all views of a scene: many more than one image has, so nothing here is quadratic in
memory.

A group is a kept token and the removed ones that follow it. Sums over groups run over removed tokens sorted by group:
in a fixed order, so that results are the same every time, which adding rows by index is not on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pullback.pruning.matching import ALIGNED, NOBODY, artifacts, lowest, most_similar, ranks, removal_costs, rows
from pullback.pruning.plan import PrunePlan

CHUNK_NUMBERS = 1 << 27  # cosines that exist at a time


@dataclass(frozen=True, eq=False)
class Groups:
    """Of N tokens K are kept and R removed, each of which follows a kept one; ``merged`` says whether its content also
    goes into the group's mean. Places are those of the sequence."""

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
    tokens: Tensor, scores: Tensor, plan: PrunePlan, count: int, order: Tensor, prefix: int, grid: Tensor
) -> Groups:
    """Which ``count`` patches of tokens [B, N, C] with scores [B, N] go, and whom they follow.

    ``order`` [N] are all places, the ``prefix`` that never go first; ``grid`` [N] bool, by place, are the points of a
    strided grid.
    """
    tokens, scores = tokens[:, order], scores[:, order].float()
    allowed = _destinations(tokens, plan, prefix, grid[order])
    if plan.select == "cost":
        scores = removal_costs(scores, residuals(tokens, scores, allowed), plan.trust)
    kept, removed = lowest(scores, count, prefix)
    if not count or (plan.match == "none" and plan.reinsert == "frozen"):
        group, merged = torch.zeros_like(removed), torch.zeros_like(removed, dtype=torch.bool)
    else:
        stays = torch.zeros_like(allowed).scatter(1, kept, True)
        best, partner = nearest(tokens, removed, allowed & stays)
        group = rows(stays.cumsum(1) - 1, partner).clamp_min(0)
        merged = (best > NOBODY) & (plan.match != "none")
    group, sorting = group.sort(dim=1, stable=True)
    lengths = torch.zeros_like(kept).scatter_add(1, group, torch.ones_like(group))
    return Groups(order[kept], order[rows(removed, sorting)], group, rows(merged, sorting), lengths)


def residuals(tokens: Tensor, scores: Tensor, allowed: Tensor) -> Tensor:
    """[B, N]: |F_t - F_u| to the most similar allowed token u with a higher score, which is likely to be kept; at most
    the token's own length."""
    places = torch.arange(tokens.shape[1], device=tokens.device).expand(len(tokens), -1)
    best, partner = nearest(tokens, places, allowed, ranks(scores))
    own = tokens.float().norm(dim=-1)
    away = (tokens - rows(tokens, partner)).float().norm(dim=-1)
    return torch.where(best > NOBODY, torch.minimum(away, own), own)


def nearest(tokens: Tensor, asking: Tensor, allowed: Tensor, place: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """For each token ``asking`` [B, n], the highest cosine to an ``allowed`` one [B, N] bool, and its index, [B, n];
    with ``place`` [B, N], of `ranks`, only to those before it. Below `NOBODY` where there is none."""
    unit = F.normalize(tokens, dim=-1)
    columns = F.pad(unit, (0, 0, 0, -unit.shape[1] % ALIGNED)).mT
    found: list[tuple[Tensor, Tensor]] = []
    for some in _chunks(asking, columns.shape[-1]):
        among = allowed[:, None]
        if place is not None:
            among = among & (place[:, None] < rows(place, some)[..., None])
        found.append(most_similar(rows(unit, some) @ columns, among))
    best, index = (torch.cat(parts, 1) for parts in zip(*found, strict=True))
    return best, index.clamp_max(tokens.shape[1] - 1)


def strided_grid(height: int, width: int, ratio: float) -> Tensor:
    """[h, w] bool: the upper left patch of every s x s cell, with the least s >= 2 for which the others are the share
    ``ratio`` or more."""
    for stride in range(2, max(height, width, 2) + 1):
        row, column = (torch.arange(side) % stride == 0 for side in (height, width))
        points = row[:, None] & column
        if (~points).float().mean() >= ratio:
            break
    return points


def _destinations(tokens: Tensor, plan: PrunePlan, prefix: int, grid: Tensor) -> Tensor:
    """[B, N] bool: who may be followed, if kept; never the prefix."""
    patch = torch.arange(tokens.shape[1], device=tokens.device) >= prefix
    if plan.match == "strided":
        return (patch & grid).expand(tokens.shape[:2])
    return patch & ~artifacts(tokens, prefix) if plan.safe else patch.expand(tokens.shape[:2])


def _chunks(asking: Tensor, columns: int) -> Iterator[Tensor]:
    yield from asking.split(max(1, CHUNK_NUMBERS // (columns * len(asking))), dim=1)
