"""Random variations of pictures, in two forms.

`random_crop` draws a box and a flip from a seed, the image's key and a number. The `Crop` is stored with what was
computed from it, and `read_crop` cuts the very same pixels out of the file again.

`varied` changes many pictures at once, as tensors on any device: crops, colours, patches of other pictures. It keeps
no record, so it is for targets that are computed anew from the varied picture. Its draws come from the CPU, so that
they are the same on every device.
"""

from __future__ import annotations

import hashlib
import io
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from pullback.checks import of_kind
from pullback.data.images import PixelFormat, Unusable, centre_crop, reason_of, to_rgb, upright
from pullback.errors import ImageError, PullbackError

SCALE = (0.35, 1.0)
"""Share of the picture's area that a crop covers."""
RATIO = (3 / 4, 4 / 3)
"""Width over height of a crop."""
_TRIES = 10


# Crops of files, which can be cut out again


@dataclass(frozen=True)
class Crop:
    """``box`` = (x0, y0, x1, y1) in pixels of the upright image, x1 and y1 excluded; ``flip``: mirrored afterwards."""

    box: tuple[int, int, int, int]
    flip: bool = False


def random_crop(
    width: int,
    height: int,
    *,
    seed: int,
    key: str,
    index: int,
    scale: tuple[float, float] = SCALE,
    ratio: tuple[float, float] = RATIO,
) -> Crop:
    """Draw crop number ``index`` of the image ``key``; what is drawn before or beside it makes no difference.

    The usual recipe (Szegedy et al. 2015): area uniform in ``scale``, aspect log-uniform in ``ratio``, ten tries to fit
    it in, then the largest centred box of an allowed aspect; mirrored every other time.
    """
    draw = random.Random(item_seed(seed, key, index)).random
    flip = draw() < 0.5
    for _ in range(_TRIES):
        area = width * height * (scale[0] + (scale[1] - scale[0]) * draw())
        aspect = math.exp(math.log(ratio[0]) + math.log(ratio[1] / ratio[0]) * draw())
        w, h = max(1, round(math.sqrt(area * aspect))), max(1, round(math.sqrt(area / aspect)))
        if w <= width and h <= height:
            x, y = int(draw() * (width - w + 1)), int(draw() * (height - h + 1))
            return Crop((x, y, x + w, y + h), flip)
    w, h = min(width, max(1, round(height * ratio[1]))), min(height, max(1, round(width / ratio[0])))
    x, y = (width - w) // 2, (height - h) // 2
    return Crop((x, y, x + w, y + h), flip)


def item_seed(seed: int, key: str, index: int) -> int:
    """Hash the three into 64 bits: the same in any order, batch, process or machine."""
    digest = hashlib.sha256(f"{seed}\0{index}\0{key}".encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big")


def read_crop(data: bytes, crop: Crop | None, wanted: PixelFormat) -> Tensor:
    """Decode an image and cut ``crop`` out of it, [3, H, W]; None gives the centre crop of `read_images`."""
    of_kind("data", data, (bytes, bytearray, memoryview), "the bytes of an image file", ImageError)
    try:
        if crop is None:
            return _centre(data, wanted)
        with upright(_stream(data)) as image:
            return _cut(to_rgb(image), crop, wanted)
    except Exception as error:  # on a damaged file Pillow's decoders raise nearly anything
        raise ImageError(f"data: {reason_of(error)}.") from None


def _centre(data: bytes, wanted: PixelFormat) -> Tensor:
    return wanted.tensor(centre_crop(_stream(data), wanted))


def read_crops(
    data: bytes, wanted: PixelFormat, *, seed: int, key: str, indices: Sequence[int]
) -> list[tuple[Crop | None, Tensor]]:
    """Draw and cut several crops of one image, which is decoded once. Number 0 is the plain image, without a crop."""
    if list(indices) == [0]:
        return [(None, _centre(data, wanted))]
    with upright(_stream(data)) as image:
        rgb = to_rgb(image)
    crops = [random_crop(rgb.width, rgb.height, seed=seed, key=key, index=i) if i else None for i in indices]
    return [(c, _centre(data, wanted) if c is None else _cut(rgb, c, wanted)) for c in crops]


def _cut(rgb: Image.Image, crop: Crop, wanted: PixelFormat) -> Tensor:
    height, width = wanted.size
    part = rgb.crop(crop.box).resize((width, height), wanted.resample)
    return wanted.tensor(part.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if crop.flip else part)


def _stream(data: bytes) -> io.BytesIO:
    if not data:
        raise Unusable("empty file (0 bytes)")
    return io.BytesIO(data)


# Variations of tensors, which leave no record


@dataclass(frozen=True)
class Variation:
    """How far pictures are varied. ``area``: share of the picture that a crop covers. The others are chances per
    picture; ``colour`` is also the size of the change."""

    area: tuple[float, float] = SCALE
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
    """Vary pictures [B, 3, H, W] in [0, 1], each once: [B, 3, size, size] in [0, 1]."""
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
    """Cut out a random box of each picture, bicubic, mirrored every other time."""
    count = len(pictures)
    share = area[0] + (area[1] - area[0]) * torch.rand(count, generator=generator)
    aspect = torch.exp(_signed(count, generator) * math.log(RATIO[1]))
    height, width = (share / aspect).sqrt().clamp(max=1), (share * aspect).sqrt().clamp(max=1)
    mirrored = torch.where(torch.rand(count, generator=generator) < 0.5, -1.0, 1.0)
    boxes = torch.zeros(count, 2, 3)
    boxes[:, 0, 0], boxes[:, 1, 1] = width * mirrored, height
    boxes[:, 0, 2], boxes[:, 1, 2] = _signed(count, generator) * (1 - width), _signed(count, generator) * (1 - height)
    grid = F.affine_grid(boxes.to(pictures), [count, 3, size, size], align_corners=False)
    cut = F.grid_sample(pictures, grid, mode="bicubic", padding_mode="reflection", align_corners=False)
    return cut.clamp(0, 1)


def _coloured(pictures: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Change exposure, white balance, contrast and gamma of each picture."""
    count = len(pictures)
    gain = 1 + strength * _signed((count, 1, 1, 1), generator).to(pictures)
    tint = 1 + strength / 2 * _signed((count, 3, 1, 1), generator).to(pictures)
    contrast = 1 + strength * _signed((count, 1, 1, 1), generator).to(pictures)
    gamma = 1 + strength * _signed((count, 1, 1, 1), generator).to(pictures)
    bright = (pictures * gain * tint).clamp(0, 1)
    mean = bright.mean((1, 2, 3), keepdim=True)
    return ((bright - mean) * contrast + mean).clamp(0, 1).clamp_min(1e-6) ** gamma


def _pasted(pictures: Tensor, generator: torch.Generator) -> Tensor:
    """Paste a square of the next picture in the batch into each, a quarter to three quarters of the side long."""
    size = pictures.shape[-1]
    side = int(size * (0.25 + 0.5 * float(torch.rand((), generator=generator))))
    top, left = (int(torch.randint(size - side + 1, (), generator=generator)) for _ in range(2))
    out = pictures.clone()
    square = (..., slice(top, top + side), slice(left, left + side))
    out[square] = pictures.roll(1, 0)[square]
    return out


def _mosaics(pictures: Tensor) -> Tensor:
    """Tile each picture and its three neighbours in the batch, at half the size."""
    size = pictures.shape[-1]
    half = F.interpolate(pictures, (size - size // 2, size - size // 2), mode="bilinear", antialias=True)
    upper, lower = (torch.cat([half.roll(k, 0), half.roll(k + 1, 0)], 3) for k in (0, 2))
    return torch.cat([upper, lower], 2)[..., :size, :size]


def _chosen(pictures: Tensor, chance: float, generator: torch.Generator) -> Tensor:
    """Choose pictures at random, [B, 1, 1, 1] bool."""
    return (torch.rand(len(pictures), 1, 1, 1, generator=generator) < chance).to(pictures.device)


def _signed(shape: int | tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw uniformly from [-1, 1)."""
    return 2 * torch.rand(shape, generator=generator) - 1
