"""Rotary positions on a grid: half of each head turns with the row, the other half with the column (Heo et al. 2024).

With F = head_dim / 2 features per axis and frequencies f_j = base^(-2j/F), feature j of a half and feature j + F/2 are
the two coordinates that turn by the angle position * f_j. Queries and keys then meet in their relative positions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pullback.tokens import TokenLayout


class Rope(NamedTuple):
    """Cosines and sines, [N, 2, F/2] or, for tokens chosen per sample, [B, 1, N, 2, F/2]: token, axis, frequency."""

    cos: Tensor
    sin: Tensor

    def rotate(self, x: Tensor) -> Tensor:
        """Queries or keys [B, heads, N, head_dim] -> the same, turned."""
        first, second = x.unflatten(-1, (2, 2, -1)).unbind(-2)  # [B, heads, N, 2, F/2] each
        turned = (first * self.cos - second * self.sin, second * self.cos + first * self.sin)
        return torch.stack(turned, -2).flatten(-3)

    def repeat(self, views: int) -> Rope:
        """One view's tables -> those of all views after each other; views have no positions of their own."""
        return Rope(self.cos.repeat(views, 1, 1), self.sin.repeat(views, 1, 1))

    def samples(self, some: slice) -> Rope:
        """The tables of some samples of the batch; those that are the same for all samples stay."""
        if self.cos.ndim == 3 or len(self.cos) == 1:
            return self
        return Rope(self.cos[some], self.sin[some])

    def at(self, tokens: Tensor) -> Rope:
        """The tables of a choice of tokens: [B, n] places in the full sequence, per sample."""
        return Rope(self.cos[tokens][:, None], self.sin[tokens][:, None])


def token_positions(layout: TokenLayout, device: torch.device) -> Tensor:
    """(row, column) of the tokens of one view, [P, 2]: patches from (1, 1) on, the tokens before them at (0, 0)."""
    rows, columns = (torch.arange(1, count + 1, device=device) for count in layout.grid)
    patches = torch.cartesian_prod(rows, columns)
    return torch.cat([patches.new_zeros(layout.prefix, 2), patches])


def rope_tables(positions: Tensor, head_dim: int, base: float, dtype: torch.dtype) -> Rope:
    """The tables of tokens at ``positions`` [N, 2]; angles never in less than float32, where they would be coarse."""
    precise = torch.promote_types(dtype, torch.float32)
    quarter = head_dim // 4
    exponents = torch.arange(quarter, device=positions.device, dtype=precise) / quarter
    angles = positions.to(precise)[..., None] * base**-exponents  # [N, 2, F/2]
    return Rope(angles.cos().to(dtype), angles.sin().to(dtype))
