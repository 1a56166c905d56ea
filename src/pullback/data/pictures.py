"""Pictures in memory, in any of the usual forms, as one normalised batch [B, 3, H, W].

Two layouts mean two things. Channels last ([H, W, 3], as PIL and OpenCV have it) is a picture of any size: it is
resized and cropped as a file is. Channels first ([3, H, W]) is the layout of a network: it keeps its size. Whole
numbers (uint8) are normalised here; floats are taken as they are, and refused where they look as if nobody had
normalised them, because a network answers wrong pixels with confident numbers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from pullback.data.images import PixelFormat, centre_crop, normalised, reason_of
from pullback.errors import ImageError

Picture: TypeAlias = "Tensor | np.ndarray | Image.Image"
Pictures: TypeAlias = "Picture | Sequence[Picture] | Mapping[str, Any]"

LARGEST = 10.0
"""Normalised pixels stay well below this in size; pixels that were centred but never scaled to [0, 1] do not."""
_FORMS = (
    "normalised floats or uint8 as [B, 3, H, W] or [3, H, W], PIL images, uint8 arrays [H, W, 3], a list of these, or "
    "what an image processor returned"
)


def as_pixels(images: Pictures, wanted: PixelFormat, *, normalized: bool = False) -> Tensor:
    """Return pictures in memory as a network takes them: normalised floats [B, 3, H, W].

    Args:
        images: see the top of this file; a list holds pictures of one size. Of a dictionary, as an image processor of
            transformers returns it, ``pixel_values`` is taken.
        wanted: how the network wants its pixels. Its size is that of pictures with channels last and of PIL images.
        normalized: True vouches for floats that have no negative value, or very large ones.
    """
    if isinstance(images, Mapping):
        images = _pixel_values(images)
    if isinstance(images, list | tuple):
        parts = [_batch(image, wanted, f"images[{number}]") for number, image in enumerate(images)]
        _check_sizes(parts)
    else:
        parts = [_batch(images, wanted, "images")]
    if sum(part.pixels.numel() for part in parts) == 0:
        what = f"images of {_sizes(parts)[0]} pixels" if any(len(part.pixels) for part in parts) else "an empty batch"
        raise ImageError(f"images: expected at least one image, got {what}.")
    given = [part.pixels for part in parts if part.as_given]
    pixels = torch.cat([part.pixels.to(parts[0].pixels.device) for part in parts])
    check_finite(pixels)
    if given and not normalized:
        _check_range(given)
    return pixels


def check_finite(images: Tensor) -> None:
    """Refuse images [B, ...] that hold NaN or infinity."""
    bad = (~torch.isfinite(images).flatten(1).all(1)).nonzero().flatten().tolist()
    if bad:
        raise ImageError(
            f"images: expected finite numbers, got NaN or infinity in image {bad[0]} ({len(bad)} of {len(images)})."
        )


class _Part(NamedTuple):
    pixels: Tensor  # [b, 3, H, W]
    as_given: bool  # floats that came in, not pixels that were normalised here


def _pixel_values(output: Mapping[str, Any]) -> Any:
    if "pixel_values" not in output:
        keys = ", ".join(str(key) for key in list(output)[:5]) or "no keys"
        raise ImageError(
            f"images: expected pixel_values in what an image processor returns, got a dictionary with {keys}."
        )
    return output["pixel_values"]


def _batch(image: Any, wanted: PixelFormat, name: str) -> _Part:
    """Return one picture, or one tensor of several, as [b, 3, H, W]."""
    if isinstance(image, Image.Image):
        return _Part(_cropped(image, wanted, name)[None], False)
    if isinstance(image, np.ndarray):
        image = _from_array(image, name)
    if isinstance(image, str | os.PathLike):
        path = os.fspath(image)
        raise ImageError(
            f"{name}: expected pixels, got the path {path!r}. Read it first: probe.load_images({path!r}), or "
            "pb.load_images(path, probe)."
        )
    if not isinstance(image, Tensor):
        raise ImageError(f"{name}: expected {_FORMS}, got {type(image).__name__}.")
    whole = image.dtype == torch.uint8
    if not whole and not image.is_floating_point():
        raise _wrong_dtype(name, str(image.dtype).removeprefix("torch."))
    last = _channels_last(image, name)
    batch = image if image.ndim == 4 else image[None]
    if last and not whole:
        raise ImageError(
            f"{name}: expected floats as [B, 3, H, W], got {list(image.shape)} with channels last. Use "
            f"images.permute({'0, 3, 1, 2' if image.ndim == 4 else '2, 0, 1'}); pictures [H, W, 3] are taken as uint8."
        )
    if last:
        pictures = [_cropped(Image.fromarray(picture), wanted, name) for picture in batch.cpu().numpy()]
        return _Part(torch.stack(pictures) if pictures else torch.zeros(0, 3, *wanted.size), False)
    return _Part(normalised(batch.float() / 255, wanted.mean, wanted.std), False) if whole else _Part(batch, True)


def _from_array(array: np.ndarray, name: str) -> Tensor:
    try:
        return torch.from_numpy(np.array(array))  # a copy: not every array may be written to, or runs forwards
    except TypeError:
        raise _wrong_dtype(name, str(array.dtype)) from None


def _wrong_dtype(name: str, dtype: str) -> ImageError:
    return ImageError(
        f"{name}: expected uint8 from 0 to 255, or normalised floats, got {dtype}. Of pixels from 0 to 255 use "
        "images.to(torch.uint8), of an array images.astype('uint8')."
    )


def _channels_last(image: Tensor, name: str) -> bool:
    """Whether the three channels come last, not first; refuse other shapes."""
    shape = list(image.shape)
    if image.ndim not in (3, 4):
        raise ImageError(f"{name}: expected {_FORMS}, got {shape}.")
    if image.shape[-3] == 3:
        return False
    if image.shape[-1] == 3:
        return True
    single = "One channel: images.expand(-1, 3, -1, -1). " if image.shape[-3] == 1 else ""
    raise ImageError(
        f"{name}: expected 3 channels as [B, 3, H, W], or pictures [H, W, 3] in uint8, got {shape}. {single}Pictures "
        "in gray or with transparency: Image.fromarray(picture).convert('RGB')."
    )


def _cropped(picture: Image.Image, wanted: PixelFormat, name: str) -> Tensor:
    try:
        return wanted.tensor(centre_crop(picture, wanted))
    except Exception as error:  # Pillow reads the file only now, and on a damaged one raises nearly anything
        raise ImageError(
            f"{name}: {reason_of(error)} (a picture of {picture.width}x{picture.height} pixels)."
        ) from None


def _check_sizes(parts: Sequence[_Part]) -> None:
    sizes = _sizes(parts)
    for number, size in enumerate(sizes):
        if size != sizes[0]:
            raise ImageError(
                f"images[{number}]: expected {sizes[0]} pixels as images[0], got {size}. Images of a batch have one "
                "size: pass PIL images, which are resized and cropped, or run one batch per size."
            )


def _sizes(parts: Sequence[_Part]) -> list[str]:
    return ["{}x{}".format(*part.pixels.shape[-2:]) for part in parts]


def _check_range(given: Sequence[Tensor]) -> None:
    """Refuse floats that nobody seems to have normalised."""
    low, high = min(float(part.min()) for part in given), max(float(part.max()) for part in given)
    if low < 0 and max(-low, high) <= LARGEST:
        return
    why = "without a negative value, as if not normalised" if low >= 0 else f"beyond ±{LARGEST:g}, as if not scaled"
    raise ImageError(
        f"images: expected normalised pixels, got floats from {low:.3g} to {high:.3g} {why}. Pass uint8 or PIL images, "
        "which are normalised for the model; files by probe.load_images(path); of RGB in [0, 1] pb.normalised(images, "
        "mean, std) with those of probe.pixel_format(). If they are right as they are, say normalized=True."
    )
