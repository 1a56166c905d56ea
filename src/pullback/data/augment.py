"""Random variations of pictures as tensors, many at a time and on any device.

For targets that are computed anew for every picture there are no wrong variations: whatever is done to a picture, its
geometry is measured on the result. Draws come from the CPU, so that they are the same on every device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pullback.errors import PullbackError


@dataclass(frozen=True)
class Variation:
    """How far pictures are varied. ``area`` of a crop, as a share of the picture; the others are chances per picture,
    ``colour`` also the size of the change."""

    area: tuple[float, float] = (0.35, 1.0)
    colour: float = 0.0
    grey: float = 0.0
    patch: float = 0.0  # a square of another picture pasted in
    mosaic: float = 0.0  # four pictures of half the size

    def __post_init__(self) -> None:
        if not 0 < self.area[0] <= self.area[1] <= 1:
            raise PullbackError(f"area: expected shares 0 < low <= high <= 1, got {self.area}.")


CROPS = Variation()
STRONG = Variation(area=(0.08, 1.0), colour=0.4, grey=0.15, patch=0.35, mosaic=0.15)
"""For early layers, whose heads see too few different pictures otherwise."""


def varied(pictures: Tensor, size: int, variation: Variation, generator: torch.Generator) -> Tensor:
    """Pictures [B, 3, H, W] in [0, 1] -> as many varied ones [B, 3, size, size] in [0, 1]."""
    out = _crops(pictures, size, variation.area, generator)
    if variation.colour:
        out = _coloured(out, variation.colour, generator)
    if variation.grey:
        out = torch.where(_chosen(out, variation.grey, generator), out.mean(1, keepdim=True).expand_as(out), out)
    if variation.patch:
        out = torch.where(_chosen(out, variation.patch, generator), _pasted(out, generator), out)
    if variation.mosaic:
        out = torch.where(_chosen(out, variation.mosaic, generator), _mosaics(out), out)
    return out


def _crops(pictures: Tensor, size: int, area: tuple[float, float], generator: torch.Generator) -> Tensor:
    """Random boxes of aspect 3/4 to 4/3, mirrored every other time, bicubic."""
    count = len(pictures)
    share = area[0] + (area[1] - area[0]) * torch.rand(count, generator=generator)
    aspect = torch.exp(_signed(count, generator) * math.log(4 / 3))
    height, width = (share / aspect).sqrt().clamp(max=1), (share * aspect).sqrt().clamp(max=1)
    mirrored = torch.where(torch.rand(count, generator=generator) < 0.5, -1.0, 1.0)
    boxes = torch.zeros(count, 2, 3)
    boxes[:, 0, 0], boxes[:, 1, 1] = width * mirrored, height
    boxes[:, 0, 2], boxes[:, 1, 2] = _signed(count, generator) * (1 - width), _signed(count, generator) * (1 - height)
    grid = F.affine_grid(boxes.to(pictures), [count, 3, size, size], align_corners=False)
    cut = F.grid_sample(pictures, grid, mode="bicubic", padding_mode="reflection", align_corners=False)
    return cut.clamp(0, 1)


def _coloured(pictures: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Other exposure, white balance, contrast and gamma."""
    count = len(pictures)
    gain = 1 + strength * _signed((count, 1, 1, 1), generator).to(pictures)
    tint = 1 + strength / 2 * _signed((count, 3, 1, 1), generator).to(pictures)
    contrast = 1 + strength * _signed((count, 1, 1, 1), generator).to(pictures)
    gamma = 1 + strength * _signed((count, 1, 1, 1), generator).to(pictures)
    bright = (pictures * gain * tint).clamp(0, 1)
    mean = bright.mean((1, 2, 3), keepdim=True)
    return ((bright - mean) * contrast + mean).clamp(0, 1).clamp_min(1e-6) ** gamma


def _pasted(pictures: Tensor, generator: torch.Generator) -> Tensor:
    """The same square of the next picture in the batch, a quarter to three quarters of the side."""
    size = pictures.shape[-1]
    side = int(size * (0.25 + 0.5 * float(torch.rand((), generator=generator))))
    top, left = (int(torch.randint(size - side + 1, (), generator=generator)) for _ in range(2))
    out = pictures.clone()
    square = (..., slice(top, top + side), slice(left, left + side))
    out[square] = pictures.roll(1, 0)[square]
    return out


def _mosaics(pictures: Tensor) -> Tensor:
    """Each picture and its three neighbours in the batch, at half the size."""
    size = pictures.shape[-1]
    half = F.interpolate(pictures, (size - size // 2, size - size // 2), mode="bilinear", antialias=True)
    upper, lower = (torch.cat([half.roll(k, 0), half.roll(k + 1, 0)], 3) for k in (0, 2))
    return torch.cat([upper, lower], 2)[..., :size, :size]


def _chosen(pictures: Tensor, chance: float, generator: torch.Generator) -> Tensor:
    return (torch.rand(len(pictures), 1, 1, 1, generator=generator) < chance).to(pictures.device)


def _signed(shape: int | tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Uniform in [-1, 1)."""
    return 2 * torch.rand(shape, generator=generator) - 1
