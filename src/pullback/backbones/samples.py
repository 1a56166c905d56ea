"""Samples read from files, ready for a network, with what result files and figures say of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from pullback.data.images import ImageBatch, PixelFormat, to_pictures
from pullback.tokens import TokenLayout

MAX_THUMBNAILS = 8
_THUMBNAIL_SIDE = 224


class Group(NamedTuple):
    """Samples of one shape, which go through the network together."""

    pixels: Tensor  # [B, 3, H, W], or [B, S, 3, H, W] of several views
    about: str = ""  # what error messages call them, such as "the scene photos/kitchen"


@dataclass(frozen=True, eq=False)
class Samples:
    """B samples in one or several groups, in order."""

    groups: tuple[Group, ...]
    names: tuple[str, ...]  # [B], the file or folder of each
    record: dict[str, Any]  # what a result file says of them: image_files, skipped, size
    arrays: dict[str, np.ndarray]  # what figures need: thumbnails, and where the tokens sit (grid, prefix)

    def __len__(self) -> int:
        return len(self.names)


def image_samples(batch: ImageBatch, pixels: PixelFormat, layout: TokenLayout) -> Samples:
    """Single images that were read in a pixel format, as one group."""
    paths = tuple(str(path) for path in batch.paths)
    return Samples(
        groups=(Group(batch.pixels),),
        names=paths,
        record={
            "image_files": list(paths),
            "skipped": [image.record() for image in batch.skipped],
            "size": list(batch.pixels.shape[-2:]),
        },
        arrays={
            "thumbnails": thumbnails(pixels.rgb(batch.pixels[:MAX_THUMBNAILS])),
            "grid": np.array(layout.grid),
            "prefix": np.array(layout.prefix),
        },
    )


def thumbnails(pixels: Tensor) -> np.ndarray:
    """[B, 3, H, W] in [0, 1] -> uint8 [B, h, w, 3], small enough for a figure."""
    longest = max(pixels.shape[-2:])
    if longest > _THUMBNAIL_SIDE:
        pixels = F.interpolate(pixels, scale_factor=_THUMBNAIL_SIDE / longest, mode="bilinear", antialias=True)
    return to_pictures(pixels.clamp(0, 1))
