"""Distances between the outputs of a task for different images: the truth that learned distances are compared with.

    relative_l1   mean |a - b| / ((mean |a| + mean |b|) / 2)     depth, in which near and far pixels count by metres
    relative_l2   |a - b| / ((|a| + |b|) / 2)                     other outputs

Both are symmetric, 0 for equal outputs and at most 2. The error of every pixel relative to itself would explode where
an output such as saliency is near zero.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from pullback.checks import of_kind
from pullback.errors import PullbackError, ShapeError

RELATIVE = {"relative_l1": 1.0, "relative_l2": 2.0}
"""The distances of outputs by name, and their p."""


def default_reference(decoder: str) -> str:
    """Return the distance by which the outputs of a decoder are compared: of depth by absolute differences."""
    return "relative_l1" if re.match(r"depth(-\d+x\d+)?(@|$)", decoder) else "relative_l2"


def output_distances(first: Tensor, second: Tensor, kind: str = "relative_l2") -> Tensor:
    """Return the distance of every output of one set [n, ...] from every one of another [m, ...]: [n, m].

    >>> one, other = torch.tensor([[1.0, 1.0]]), torch.tensor([[1.0, 1.0], [3.0, 3.0]])
    >>> output_distances(one, other, "relative_l1").tolist()
    [[0.0, 1.0]]
    """
    if kind not in RELATIVE:
        raise PullbackError(f"kind: expected one of {', '.join(RELATIVE)}, got {kind!r}.")
    for values in (first, second):
        of_kind("first, second", values, Tensor, "outputs [n, ...] and [m, ...]", ShapeError)
    if first.ndim < 2 or first.shape[1:] != second.shape[1:]:
        raise ShapeError(
            f"first, second: expected outputs [n, ...] and [m, ...] of one size, got {list(first.shape)} and "
            f"{list(second.shape)}."
        )
    p = RELATIVE[kind]
    a, b = (values.float().flatten(1) for values in (first, second))
    # the Gram matrix would lose the digits of near outputs
    apart = torch.cdist(a, b, p=p, compute_mode="donot_use_mm_for_euclid_dist")
    sizes = (torch.linalg.vector_norm(values, p, dim=1) for values in (a, b))
    middle = (next(sizes)[:, None] + next(sizes)) / 2
    return torch.where(apart > 0, apart / middle, apart)  # two outputs that are 0 everywhere are equal
