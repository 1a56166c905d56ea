"""Where the tokens of a sample sit: views, prefix tokens, patch grid."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pullback.errors import ShapeError


@dataclass(frozen=True)
class TokenLayout:
    """``views`` times (``prefix`` class or register tokens, then grid[0] x grid[1] patches, row by row)."""

    prefix: int
    grid: tuple[int, int]
    views: int = 1

    @property
    def patches(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def tokens(self) -> int:
        return self.views * (self.prefix + self.patches)

    def patch_mask(self) -> Tensor:
        """[N] bool, true at patch tokens."""
        view = torch.arange(self.prefix + self.patches) >= self.prefix
        return view.repeat(self.views)

    def patch_map(self, per_token: Tensor) -> Tensor:
        """[B, N, ...] -> [B, views, rows, columns, ...], prefix tokens dropped."""
        split = per_token.unflatten(1, (self.views, -1))
        return split[:, :, self.prefix :].unflatten(2, self.grid)

    @staticmethod
    def square(tokens: int, prefix: int) -> TokenLayout:
        """The layout of a square image with this many tokens."""
        side = math.isqrt(max(0, tokens - prefix))
        if side == 0 or side * side != tokens - prefix:
            raise ShapeError(
                f"features: {tokens} tokens with {prefix} prefix tokens do not make a square grid, so the image shape "
                "must come along. Pass what probe.features(images) returned, or slices and sums of it."
            )
        return TokenLayout(prefix, (side, side))
