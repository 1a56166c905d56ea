"""Rank correlation of scores, row by row."""

from __future__ import annotations

import torch
from torch import Tensor

from pullback.checks import of_kind
from pullback.errors import ShapeError


def spearman(a: Tensor, b: Tensor) -> Tensor:
    """Spearman's rho of each row of a and b [B, N] -> [B]; NaN for a row that is constant or holds a NaN."""
    _check(a, b)
    first, second = ranks(a), ranks(b)
    x, y = _centred(first), _centred(second)
    rho = (x * y).sum(-1) / (x.square().sum(-1) * y.square().sum(-1)).sqrt()
    constant = (first == first[..., :1]).all(-1) | (second == second[..., :1]).all(-1)
    return rho.masked_fill(constant, torch.nan)  # a mean on a GPU is rounded, and what is left of a constant is not 0


def kendall(a: Tensor, b: Tensor) -> Tensor:
    """Kendall's tau-b of each row of a and b [B, N] -> [B]; NaN for a row that is constant or holds a NaN.

    (concordant - discordant pairs) / sqrt(pairs not tied in a * pairs not tied in b), exactly, by Knight's method: with
    the row sorted by a, then by b, the discordant pairs are the inversions of b. In O(N log^2 N) and memory O(N).
    """
    _check(a, b)
    if a.shape[-1] == 0:
        return torch.full(a.shape[:-1], torch.nan, dtype=torch.float64, device=a.device)
    shared = [ranks(values) for values in (a, b)]
    x, y = ((2 * rank.nan_to_num(0)).long() for rank in shared)  # whole numbers from 0 to 2 (N - 1)
    count = a.shape[-1]
    both = (x * (2 * count) + y).sort(dim=-1).values
    tied_x, tied_y, tied_both = (_tied_pairs(values) for values in (x.sort(dim=-1).values, y.sort(dim=-1).values, both))
    pairs = count * (count - 1) // 2
    surplus = pairs - tied_x - tied_y + tied_both - 2 * _inversions(both % (2 * count))
    tau = surplus / ((pairs - tied_x).double() * (pairs - tied_y)).sqrt()
    return tau.masked_fill((shared[0] + shared[1]).isnan().any(-1), torch.nan)


def ranks(values: Tensor) -> Tensor:
    """Ranks from 0 along the last axis, float64; equal values share the mean of their ranks, a NaN leaves no order."""
    ordered, order = values.contiguous().sort(dim=-1)
    starts = torch.searchsorted(ordered, ordered, right=False)
    ends = torch.searchsorted(ordered, ordered, right=True)
    shared = (starts + ends - 1).double() / 2
    unsorted = torch.empty_like(shared).scatter_(-1, order, shared)
    return unsorted.masked_fill(values.isnan().any(-1, keepdim=True), torch.nan)


def _centred(values: Tensor) -> Tensor:
    return values - values.mean(-1, keepdim=True)


def _tied_pairs(ordered: Tensor) -> Tensor:
    """Count the pairs of equal values in each sorted row of [B, N]."""
    last = torch.searchsorted(ordered, ordered, right=True)
    # each value is tied with those of its own that come after it
    return (last - torch.arange(1, ordered.shape[-1] + 1, device=ordered.device)).sum(-1)


def _inversions(values: Tensor) -> Tensor:
    """Count the pairs i < j with values_i > values_j in each row of ranks [B, N], by a merge sort."""
    count = values.shape[-1]
    size = 1 << (count - 1).bit_length()
    blocks = torch.cat([values, values.new_full((*values.shape[:-1], size - count), 2 * count)], -1)  # above all ranks
    found, width = values.new_zeros(values.shape[:-1]), 1
    while width < size:
        left, right = blocks.unflatten(-1, (-1, 2, width)).unbind(-2)  # sorted, both
        found += torch.searchsorted(right.contiguous(), left.contiguous()).sum((-2, -1))
        blocks = blocks.unflatten(-1, (-1, 2 * width)).sort(dim=-1).values.flatten(-2)
        width *= 2
    return found


def _check(a: Tensor, b: Tensor) -> None:
    for values in (a, b):
        of_kind("a, b", values, Tensor, "two tensors of one shape [B, N]", ShapeError)
    if a.shape != b.shape:
        raise ShapeError(f"a, b: expected one shape [B, N], got {list(a.shape)} and {list(b.shape)}.")
