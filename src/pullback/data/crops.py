"""Random resized crops and flips that anybody can cut out again: drawn from a seed, the image's key and a number.

A `Crop` holds pixels of the source image, so a training job that reads it from a table gets the very same picture.
"""

from __future__ import annotations

import hashlib
import io
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image
from torch import Tensor

from pullback.data.images import PixelFormat, Unusable, centre_crop, to_rgb, upright

SCALE = (0.35, 1.0)
"""Share of the image's area that a crop covers."""
RATIO = (3 / 4, 4 / 3)
_TRIES = 10


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
    """Crop number ``index`` of the image ``key``, whatever else is drawn before or beside it.

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
    """64 bits that depend on all three and on nothing else: not on order, batch, process or machine."""
    digest = hashlib.sha256(f"{seed}\0{index}\0{key}".encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big")


def read_crop(data: bytes, crop: Crop | None, wanted: PixelFormat) -> Tensor:
    """[3, H, W] of an encoded image; without a crop exactly what `read_images` gives."""
    if crop is None:
        return wanted.tensor(centre_crop(_stream(data), wanted))
    with upright(_stream(data)) as image:
        return _cut(to_rgb(image), crop, wanted)


def read_crops(
    data: bytes, wanted: PixelFormat, *, seed: int, key: str, indices: Sequence[int]
) -> list[tuple[Crop | None, Tensor]]:
    """Several crops of one image, which is decoded once. Number 0 is the plain image, without a crop."""
    if list(indices) == [0]:
        return [(None, read_crop(data, None, wanted))]
    with upright(_stream(data)) as image:
        rgb = to_rgb(image)
    crops = [random_crop(rgb.width, rgb.height, seed=seed, key=key, index=i) if i else None for i in indices]
    return [(c, read_crop(data, None, wanted) if c is None else _cut(rgb, c, wanted)) for c in crops]


def _cut(rgb: Image.Image, crop: Crop, wanted: PixelFormat) -> Tensor:
    height, width = wanted.size
    part = rgb.crop(crop.box).resize((width, height), wanted.resample)
    return wanted.tensor(part.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if crop.flip else part)


def _stream(data: bytes) -> io.BytesIO:
    if not data:
        raise Unusable("empty file (0 bytes)")
    return io.BytesIO(data)
