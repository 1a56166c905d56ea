"""Images from disk to one normalised batch: resize the short side, crop the centre, scale to [0, 1], normalise.

The steps are those of the ImageNet evaluation protocol (resize to 256, crop 224) at any size, done with Pillow alone.
A file that cannot be used never stops the others: it is skipped, and the batch names it with a reason. Other readers
of pictures (crops, views of scenes) are built from the same parts: `upright`, `to_rgb`, `to_tensor`, `normalised`.
"""

from __future__ import annotations

import glob
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeAlias

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from pullback.errors import ImageError

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".ppm")
MAX_PIXELS = 89_478_485
"""Images with more pixels than this (Pillow's own limit, a quarter of a gigabyte of RGB) are taken for bombs."""

# Only these decoders are tried, whatever the file is called: others start external programs (EPS) or are seldom used.
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "PPM")
_RESIZE_RATIO = (256, 224)
_NAMED_IN_MESSAGES = 5

PathLike: TypeAlias = "str | os.PathLike[str]"
ImageSource: TypeAlias = "PathLike | Sequence[PathLike]"


@dataclass(frozen=True)
class PixelFormat:
    """The pixels that a backbone expects: (height, width), mean and std of RGB in [0, 1], Pillow's resize filter."""

    size: tuple[int, int]
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    interpolation: str = "bicubic"

    @classmethod
    def of(
        cls,
        size: int | tuple[int, int],
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
        interpolation: str = "bicubic",
    ) -> PixelFormat:
        """Check the values and build the format; an int ``size`` is the side of a square."""
        if not hasattr(Image.Resampling, interpolation.upper()):
            names = ", ".join(choice.name.lower() for choice in Image.Resampling)
            raise ImageError(f"interpolation={interpolation!r}: expected one of {names}.")
        if len(mean) != 3 or len(std) != 3 or min(std) <= 0:
            raise ImageError(f"mean={tuple(mean)}, std={tuple(std)}: expected three numbers each, std positive.")
        return cls(checked_size(size), tuple(mean), tuple(std), interpolation)

    @property
    def resample(self) -> Image.Resampling:
        return Image.Resampling[self.interpolation.upper()]

    def tensor(self, rgb: Image.Image) -> Tensor:
        """Convert an RGB picture of the right size to normalised float32 [3, H, W]."""
        return normalised(to_tensor(rgb), self.mean, self.std).contiguous()

    def rgb(self, pixels: Tensor) -> Tensor:
        """Undo the normalisation of pixels [..., 3, H, W]: RGB in [0, 1]."""
        mean, std = (pixels.new_tensor(values).view(3, 1, 1) for values in (self.mean, self.std))
        return (pixels * std + mean).clamp(0, 1)


@dataclass(frozen=True)
class SkippedImage:
    """A file that could not be used, and why."""

    path: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


@dataclass(frozen=True, eq=False)
class ImageBatch:
    """Images read from files: `pixels[i]` is the image at `paths[i]`; `skipped` names the files left out."""

    pixels: Tensor  # [B, 3, H, W]
    paths: tuple[Path, ...]
    skipped: tuple[SkippedImage, ...]

    def __len__(self) -> int:
        return len(self.paths)

    def warn_skipped(self, stacklevel: int = 1) -> None:
        """Name the skipped files, if any, in one warning; `stacklevel` counts from the caller of this method."""
        if self.skipped:
            total = len(self.skipped) + len(self)
            message = f"skipped {len(self.skipped)} of {total} image files: {_listing(self.skipped)}"
            warnings.warn(message, stacklevel=stacklevel + 1)


def load_images(path: ImageSource, size: int | tuple[int, int] = 224, limit: int | None = None) -> Tensor:
    """Read images as one ImageNet-normalised float32 batch [B, 3, H, W]; unusable files are named in one warning."""
    batch = read_images(path, size, limit=limit)
    batch.warn_skipped(stacklevel=2)
    return batch.pixels


def read_images(
    path: ImageSource,
    size: int | tuple[int, int] = 224,
    *,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
    limit: int | None = None,
    interpolation: str = "bicubic",
) -> ImageBatch:
    """Read images as one batch, together with their paths and the files that had to be skipped.

    Args:
        path: a file, a folder (searched recursively, sorted, hidden files left out), a glob, or a list of these.
        size: side of the square crop, or (height, width). The image is first scaled to cover size · 256/224.
        mean, std: per channel, applied to RGB in [0, 1].
        limit: number of good images to stop at; bad files on the way do not count.
        interpolation: a Pillow filter: nearest, box, bilinear, hamming, bicubic or lanczos.

    Pictures are turned upright by their EXIF orientation. Gray, palette, CMYK and 16-bit images become 8-bit RGB;
    an alpha channel is dropped, not blended; of an animation the first frame is taken.
    """
    pixels: list[Tensor] = []
    paths: list[Path] = []
    skipped: list[SkippedImage] = []
    images = iter_images(path, size, mean=mean, std=std, limit=limit, interpolation=interpolation)
    for file, image in images:
        if isinstance(image, SkippedImage):
            skipped.append(image)
        else:
            pixels.append(image)
            paths.append(file)
    if not pixels:
        raise ImageError(
            f"path={_show(path)}: expected at least one readable image, but none of the {len(skipped)} files "
            f"could be used: {_listing(skipped)}. Replace these files or give another path."
        )
    return ImageBatch(torch.stack(pixels), tuple(paths), tuple(skipped))


def iter_images(
    path: ImageSource,
    size: int | tuple[int, int] = 224,
    *,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
    limit: int | None = None,
    interpolation: str = "bicubic",
) -> Iterator[tuple[Path, Tensor | SkippedImage]]:
    """Stream what `read_images` collects, one file at a time: (path, image [3, H, W] or the reason it was skipped).

    Arguments are checked and files are listed at the call; files are opened as the iterator advances.
    """
    return stream_images(path, PixelFormat.of(size, mean, std, interpolation), limit)


def stream_images(
    path: ImageSource, wanted: PixelFormat, limit: int | None = None
) -> Iterator[tuple[Path, Tensor | SkippedImage]]:
    """Stream images as `iter_images` does, in a pixel format."""
    if limit is not None and limit < 1:
        raise ImageError(f"limit={limit}: expected a positive number of images, or None for all of them.")
    return _stream(find_images(path), wanted, limit)


def find_images(path: ImageSource) -> list[Path]:
    """List the image files behind a file, folder, glob or list of these; raise ImageError when there are none.

    A file named directly is listed whatever its extension; folders and globs are filtered by EXTENSIONS.
    """
    sources = [path] if isinstance(path, str | os.PathLike) else list(path)
    files = [file for source in sources for file in _expand(source)]
    if not files:
        raise ImageError(
            f"path={_show(path)}: no image found; looked for {' '.join(EXTENSIONS)} (folders are searched "
            "recursively). Give a folder that holds images, a single image file, or a glob such as 'photos/*.jpg'."
        )
    return files


def _expand(source: PathLike) -> list[Path]:
    path = Path(source).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        found = [Path(folder, name) for folder, _, names in os.walk(path) for name in names]
        return sorted(f for f in found if _is_image_name(f) and not _is_hidden(f.relative_to(path)))
    if any(wildcard in str(path) for wildcard in "*?["):
        matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
        return [match for match in matches if match.is_file() and _is_image_name(match)]
    raise ImageError(
        f"path={str(source)!r}: no such file or folder (current folder: {Path.cwd()}). "
        "Expected an image file, a folder, a glob or a list of these; check the spelling."
    )


def _is_image_name(path: Path) -> bool:
    return path.suffix.lower() in EXTENSIONS


def _is_hidden(relative: Path) -> bool:
    return any(part.startswith(".") for part in relative.parts)


def _stream(
    files: Sequence[Path], wanted: PixelFormat, limit: int | None
) -> Iterator[tuple[Path, Tensor | SkippedImage]]:
    good = 0
    for file in files:
        try:
            if file.stat().st_size == 0:
                raise Unusable("empty file (0 bytes)")
            rgb = centre_crop(file, wanted)
        except Exception as error:  # on a damaged file Pillow's decoders raise nearly anything
            yield file, SkippedImage(file, reason_of(error))
        else:
            yield file, wanted.tensor(rgb)
            good += 1
            if good == limit:
                return


class Unusable(Exception):
    """Raised when a file is readable but is skipped on purpose; the message is the reason."""


def reason_of(error: Exception) -> str:
    """Describe in words why an image was skipped."""
    if isinstance(error, Unusable):
        return str(error)
    if isinstance(error, Image.DecompressionBombError | Image.DecompressionBombWarning):
        return f"image bomb: {error}"
    if isinstance(error, UnidentifiedImageError):
        return f"not a readable image ({', '.join(_FORMATS)} are tried)"
    return f"cannot be decoded: {error or type(error).__name__}"


def centre_crop(file: Path | BinaryIO, wanted: PixelFormat) -> Image.Image:
    """Open an image, turn it upright, convert it to RGB, resize and crop; its size is checked before decoding."""
    with upright(file) as image:
        return crop_picture(image, wanted)


def crop_picture(image: Image.Image, wanted: PixelFormat) -> Image.Image:
    """Convert a picture to RGB, resize it to just cover the wanted size, and crop its centre."""
    scaled = _scaled_size(image.width, image.height, wanted.size)
    _check_pixels(*scaled, "would have, once resized,")
    rgb = to_rgb(image)
    if rgb.size != scaled:
        rgb = rgb.resize(scaled, wanted.resample)
    height, width = wanted.size
    left, top = (rgb.width - width) // 2, (rgb.height - height) // 2
    return rgb.crop((left, top, left + width, top + height))


@contextmanager
def upright(file: Path | BinaryIO) -> Iterator[Image.Image]:
    """Open an image and turn it by its EXIF orientation; one with too many pixels is refused before decoding."""
    with Image.open(file, formats=_FORMATS) as image:
        _check_pixels(image.width, image.height, "has")
        yield ImageOps.exif_transpose(image)


def _check_pixels(width: int, height: int, verb: str) -> None:
    if width * height > MAX_PIXELS:
        raise Unusable(f"image bomb: {verb} {width}×{height} = {width * height} pixels, the limit is {MAX_PIXELS}")


def _scaled_size(width: int, height: int, crop: tuple[int, int]) -> tuple[int, int]:
    """(width, height) that just covers crop · 256/224; the longer side is rounded down as torchvision and HF do."""
    numerator, denominator = _RESIZE_RATIO
    cover_h, cover_w = (round(side * numerator / denominator) for side in crop)
    if cover_h * width >= cover_w * height:  # the height decides
        return cover_h * width // height, cover_h
    return cover_w, cover_w * height // width


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert a picture of any mode to 8-bit RGB; 16-bit gray is scaled, alpha is dropped."""
    if image.mode.startswith("I"):  # 16-bit gray; Pillow's own conversion clips at 255 or depends on its version
        values = np.asarray(image).astype(np.int64).clip(0, 65535)
        image = Image.fromarray(np.rint(values / 257).astype(np.uint8))
    elif image.mode == "F":
        raise Unusable("floating-point pixels have no agreed range; save the image with 8 or 16 bits")
    elif image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # straight to RGB, Pillow warns about the transparency
    return image.convert("RGB")


def to_tensor(rgb: Image.Image) -> Tensor:
    """Convert an RGB picture to float32 [3, H, W] in [0, 1]."""
    return torch.from_numpy(np.array(rgb)).permute(2, 0, 1).float() / 255


def normalised(rgb: Tensor, mean: Sequence[float] = IMAGENET_MEAN, std: Sequence[float] = IMAGENET_STD) -> Tensor:
    """Subtract the mean of pictures [..., 3, H, W] in [0, 1] and divide by std, ImageNet's unless told otherwise."""
    centre, spread = (rgb.new_tensor(values).view(3, 1, 1) for values in (mean, std))
    return (rgb - centre) / spread


def checked_size(size: int | tuple[int, int]) -> tuple[int, int]:
    """Return (height, width) of a side in pixels or a pair of them; refuse anything else."""
    sides = tuple(size) if isinstance(size, tuple | list) else (size, size)
    if len(sides) != 2 or not all(isinstance(side, int) and not isinstance(side, bool) and side > 0 for side in sides):
        raise ImageError(f"size={size!r}: expected a positive number of pixels or (height, width), such as 224.")
    return sides


def _listing(skipped: Sequence[SkippedImage]) -> str:
    named = "; ".join(str(image) for image in skipped[:_NAMED_IN_MESSAGES])
    more = len(skipped) - _NAMED_IN_MESSAGES
    return named + (f"; and {more} more" if more > 0 else "")


def _show(path: ImageSource) -> str:
    if isinstance(path, str | os.PathLike):
        return repr(os.fspath(path))
    shown = ", ".join(repr(os.fspath(p)) for p in list(path)[:_NAMED_IN_MESSAGES])
    return f"[{shown}{', …' if len(path) > _NAMED_IN_MESSAGES else ''}]"
