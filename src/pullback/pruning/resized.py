"""A smaller picture: shrunk on the way in, and what a decoder makes of it enlarged again on the way out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pullback.backbones import Remaining
from pullback.errors import ShapeError
from pullback.tokens import TokenLayout

MAPS = ("predicted_depth",)
"""Fields of a model's output that are maps [B, H, W] of the picture."""


def shrunk(images: Tensor, size: int, patch: int) -> Tensor:
    """Shrink images [B, 3, H, W] until the shorter side has ``size`` pixels and the other a whole number of patches,
    bicubic with antialias."""
    height, width = images.shape[-2:]
    short = min(height, width)
    if size > short:
        raise ShapeError(
            f"pixel_values: the plan shrinks pictures to {size} pixels, got {height}x{width}. Pass pictures of at "
            f"least {size} pixels, or plan a smaller size."
        )
    wanted = list(shrunk_size(height, width, size, patch))
    if wanted == [height, width]:
        return images
    # not in half precision, whose antialiased kernels are missing on a CPU
    wide = images.to(torch.promote_types(images.dtype, torch.float32))
    return F.interpolate(wide, size=wanted, mode="bicubic", antialias=True, align_corners=False).to(images.dtype)


def shrunk_size(height: int, width: int, size: int, patch: int) -> tuple[int, int]:
    """Return height and width of a picture whose shorter side becomes ``size``, the other a whole number of patches."""
    short = min(height, width)
    first, second = (size if side == short else round(side * size / short / patch) * patch for side in (height, width))
    return first, second


def tokens_at(left: Remaining, layout: TokenLayout) -> Remaining:
    """Bring patch tokens [B, N, D] to the places of a larger picture, bilinear between those of the smaller one."""
    prefix = layout.prefix
    grid = left.tokens[:, prefix:].unflatten(1, left.layout.grid).movedim(-1, 1)
    patches = enlarged(grid, layout.grid).flatten(2).mT
    return replace(left, tokens=torch.cat([left.tokens[:, :prefix], patches], 1), layout=layout)


def maps_at(output: Any, size: Sequence[int]) -> Any:
    """Enlarge the maps of a model's output to the size of the picture, (height, width)."""
    maps = {name: getattr(output, name) for name in MAPS if getattr(output, name, None) is not None}
    return replace(output, **{name: enlarged(value[:, None], size)[:, 0] for name, value in maps.items()})


def enlarged(maps: Tensor, size: Sequence[int]) -> Tensor:
    """Enlarge maps [B, C, h, w] to [B, C, *size], bilinear."""
    if tuple(maps.shape[-2:]) == tuple(size):
        return maps
    return F.interpolate(maps, size=tuple(size), mode="bilinear", align_corners=False)
