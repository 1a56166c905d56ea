"""Rank correlation of scores, row by row."""

from __future__ import annotations

import torch
from torch import Tensor

from pullback.checks import of_kind
from pullback.errors import ShapeError


def spearman(a: Tensor, b: Tensor) -> Tensor:
    """Spearman's rho of each row of a and b [B, N] -> [B]; NaN for a row that is constant or holds a NaN."""
    for values in (a, b):
        of_kind("a, b", values, Tensor, "two tensors of one shape [B, N]", ShapeError)
    if a.shape != b.shape:
        raise ShapeError(f"a, b: expected one shape [B, N], got {list(a.shape)} and {list(b.shape)}.")
    x, y = (_centred(ranks(values)) for values in (a, b))
    return (x * y).sum(-1) / (x.square().sum(-1) * y.square().sum(-1)).sqrt()


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
