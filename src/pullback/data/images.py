"""Images from disk to one normalised batch: resize the short side, crop the centre, scale to [0, 1], normalise.

The steps are those of the ImageNet evaluation protocol (resize to 256, crop 224) at any size, done with Pillow alone.
A file that cannot be used never stops the others: it is skipped, and the batch names it with a reason. Other readers
of pictures (crops, views of scenes) are built from the same parts: `upright`, `to_rgb`, `to_tensor`, `normalised`.
"""

from __future__ import annotations

import glob
import itertools
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from pullback.checks import of_kind, shown, whole_number
from pullback.errors import ImageError, counted

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
        if not isinstance(interpolation, str) or not hasattr(Image.Resampling, interpolation.upper()):
            names = ", ".join(choice.name.lower() for choice in Image.Resampling)
            raise ImageError(f"interpolation={interpolation!r}: expected one of {names}.")
        if not _three_numbers(mean) or not _three_numbers(std) or min(std) <= 0:
            raise ImageError(f"mean={shown(mean)}, std={shown(std)}: expected three numbers each, std positive.")
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

    def record(self) -> dict[str, str]:
        """Return what a result file says of it."""
        return {"file": str(self.path), "reason": self.reason}


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


@runtime_checkable
class ForNetwork(Protocol):
    """A probe or a backbone, as far as reading is concerned."""

    def pixel_format(self, size: int | tuple[int, int] | None = None) -> PixelFormat: ...


def load_images(
    path: ImageSource,
    probe: ForNetwork | int | tuple[int, int] | None = None,
    limit: int | None = None,
    *,
    size: int | tuple[int, int] | None = None,
) -> Tensor:
    """Read images as one float32 batch [B, 3, H, W]; unusable files are named in one warning.

    With a ``probe`` (or a backbone) they are normalised and sized as its network wants them. Without one they are
    normalised for ImageNet, at ``size`` (a side or (height, width), by default 224; also as the second argument), which
    is right for DINOv2 and wrong for CLIP, SigLIP and others.
    """
    if isinstance(probe, ForNetwork):
        wanted = probe.pixel_format(size)
    elif probe is None or (size is None and isinstance(probe, int | float | tuple | list)):
        given = probe if size is None else size
        wanted = PixelFormat.of(224 if given is None else given)
    else:
        raise ImageError(
            f"probe: expected a probe or a backbone, got {shown(probe)}. Load it first: probe = pb.load_probe(model)."
        )
    batch = _collected(path, wanted, limit)
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
    return _collected(path, PixelFormat.of(size, mean, std, interpolation), limit)


def _collected(path: ImageSource, wanted: PixelFormat, limit: int | None) -> ImageBatch:
    pixels: list[Tensor] = []
    paths: list[Path] = []
    skipped: list[SkippedImage] = []
    for file, image in stream_images(path, wanted, limit):
        if isinstance(image, SkippedImage):
            skipped.append(image)
        else:
            pixels.append(image)
            paths.append(file)
    if not pixels:
        files = f"{'the ' * (len(skipped) > 1)}{counted(len(skipped), 'file')}"
        raise ImageError(
            f"path={_show(path)}: expected at least one readable image, but none of {files} could be used: "
            f"{_listing(skipped)}. Replace these files or give another path."
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
    if limit is not None:
        wish = "a positive number of images, or None for all of them"
        limit = whole_number(f"limit={shown(limit)}", limit, expected=wish, error=ImageError)
    return _stream(search_images(path), wanted, limit)


@dataclass(frozen=True)
class FoundImages:
    """Image files, and the folders on the way that were not entered."""

    files: tuple[Path, ...]
    unread: tuple[SkippedImage, ...] = ()


def find_images(path: ImageSource) -> list[Path]:
    """List the image files behind a file, folder, glob or list of these; raise ImageError when there are none.

    A file named directly is listed whatever its extension; folders and globs are filtered by EXTENSIONS. Folders that
    cannot be read are named in one warning.
    """
    found = search_images(path)
    if found.unread:
        warnings.warn(f"not searched: {_listing(found.unread)}", stacklevel=2)
    return list(found.files)


def search_images(path: ImageSource) -> FoundImages:
    """List image files as `find_images` does, together with the folders that could not be searched."""
    path = as_paths(path)
    found = [_expand(source) for source in path]
    files = tuple(file for part in found for file in part.files)
    unread = tuple(dict.fromkeys(folder for part in found for folder in part.unread))
    if not files:
        closed = f" Not searched: {_listing(unread)}." if unread else ""
        raise ImageError(
            f"path={_show(path)}: no image found; looked for {' '.join(EXTENSIONS)} (folders are searched "
            f"recursively).{closed} Give a folder that holds images, a single image file, or a glob such as "
            "'photos/*.jpg'."
        )
    return FoundImages(files, unread)


def as_paths(path: ImageSource) -> list[PathLike]:
    """Return one path, or several, as a list; refuse what is no path."""
    one = isinstance(path, str | os.PathLike) or not isinstance(path, Iterable)
    paths: list[Any] = [path] if one else list(path)  # type: ignore[arg-type]
    wrong = [part for part in paths if not isinstance(part, str | os.PathLike) or os.fspath(part) == ""]
    if wrong:
        raise ImageError(f"path: expected a file, a folder, a glob or a list of these, got {shown(wrong[0])}.")
    return paths


def _expand(source: PathLike) -> FoundImages:
    try:
        path = Path(source).expanduser()
        if path.is_file():
            return FoundImages((path,))
        if path.is_dir():
            return _walk(path)
    except (OSError, ValueError, RuntimeError) as error:  # a name too long, with a null byte, of an unknown user
        raise ImageError(f"path={str(source)!r:.200}: {error}. Expected an image file, a folder or a glob.") from None
    if "**" in path.parts:
        fixed = Path(*itertools.takewhile(lambda part: not _has_wildcard(part), path.parts))
        pattern = path.parts[len(fixed.parts) :]
        found = _walk(fixed) if fixed.is_dir() else FoundImages(())
        matching = (file for file in found.files if _matches(file.relative_to(fixed).parts, pattern))
        return FoundImages(tuple(matching), found.unread)
    if _has_wildcard(str(path)):
        matches = [Path(match) for match in sorted(glob.glob(str(path)))]
        return FoundImages(tuple(match for match in matches if match.is_file() and _is_image_name(match)))
    raise ImageError(
        f"path={str(source)!r}: no such file or folder (current folder: {Path.cwd()}). "
        "Expected an image file, a folder, a glob or a list of these; check the spelling."
    )


def _walk(root: Path) -> FoundImages:
    """List the images in a folder and below, sorted; links to folders are not entered, so that none can lead back."""
    files: list[Path] = []
    unread: list[SkippedImage] = []

    def closed(error: OSError) -> None:
        unread.append(SkippedImage(Path(error.filename), f"folder that cannot be read: {error.strerror or error}"))

    for folder, inside, names in os.walk(root, onerror=closed):
        files += [Path(folder, name) for name in names]
        links = [Path(folder, name) for name in inside if Path(folder, name).is_symlink()]
        unread += [SkippedImage(link, "link to a folder, not entered; name it by itself") for link in links]
    visible = (file for file in files if _is_image_name(file) and not _is_hidden(file.relative_to(root)))
    named = (folder for folder in unread if not _is_hidden(folder.path.relative_to(root)))
    return FoundImages(tuple(sorted(visible)), tuple(sorted(named, key=lambda folder: folder.path)))


def _has_wildcard(part: str) -> bool:
    return any(wildcard in part for wildcard in "*?[")


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether the parts of a path match those of a glob, in which ** stands for any number of folders."""
    if not pattern or not parts:
        return not parts and all(part == "**" for part in pattern)
    if pattern[0] == "**":
        return _matches(parts, pattern[1:]) or _matches(parts[1:], pattern)
    return fnmatch(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])


def _is_image_name(path: Path) -> bool:
    return path.suffix.lower() in EXTENSIONS


def _is_hidden(relative: Path) -> bool:
    return any(part.startswith(".") for part in relative.parts)


def _stream(found: FoundImages, wanted: PixelFormat, limit: int | None) -> Iterator[tuple[Path, Tensor | SkippedImage]]:
    yield from ((folder.path, folder) for folder in found.unread)
    good = 0
    for file in found.files:
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
    if isinstance(error, Unusable | ImageError):
        return str(error)
    if isinstance(error, Image.DecompressionBombError | Image.DecompressionBombWarning):
        return f"image bomb: {error}"
    if isinstance(error, UnidentifiedImageError):
        return f"not a readable image ({', '.join(_FORMATS)} are tried)"
    return f"cannot be decoded: {error or type(error).__name__}"


def centre_crop(file: Path | BinaryIO | Image.Image, wanted: PixelFormat) -> Image.Image:
    """Open an image, turn it upright, convert it to RGB, resize and crop; its size is checked before decoding."""
    with upright(file) as image:
        scaled = scaled_size(image.width, image.height, wanted.size)
        _check_pixels(*scaled, "would have, once resized,")
        rgb = to_rgb(image)
    if rgb.size != scaled:
        rgb = rgb.resize(scaled, wanted.resample)
    height, width = wanted.size
    left, top = (rgb.width - width) // 2, (rgb.height - height) // 2
    return rgb.crop((left, top, left + width, top + height))


@contextmanager
def upright(file: Path | BinaryIO | Image.Image) -> Iterator[Image.Image]:
    """Open an image and turn it by its EXIF orientation; one with too many pixels is refused before decoding.

    An image that is open already stays open.
    """
    opened = nullcontext(file) if isinstance(file, Image.Image) else Image.open(file, formats=_FORMATS)
    with opened as image:
        _check_pixels(image.width, image.height, "has")
        yield ImageOps.exif_transpose(image)


def _check_pixels(width: int, height: int, verb: str) -> None:
    if not width or not height:
        raise Unusable(f"{verb} {width}×{height} pixels")
    if width * height > MAX_PIXELS:
        raise Unusable(f"image bomb: {verb} {width}×{height} = {width * height} pixels, the limit is {MAX_PIXELS}")


def scaled_size(width: int, height: int, crop: tuple[int, int]) -> tuple[int, int]:
    """Return (width, height) that covers crop · 256/224; the longer one is rounded down as torchvision and HF do."""
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


def to_pictures(rgb: Tensor) -> np.ndarray:
    """Convert RGB [..., 3, H, W] in [0, 1] to pictures, uint8 [..., H, W, 3]."""
    return (rgb * 255).round().to(torch.uint8).movedim(-3, -1).cpu().numpy()


def normalised(rgb: Tensor, mean: Sequence[float] = IMAGENET_MEAN, std: Sequence[float] = IMAGENET_STD) -> Tensor:
    """Subtract the mean of pictures [..., 3, H, W] in [0, 1] and divide by std, ImageNet's unless told otherwise."""
    of_kind("rgb", rgb, Tensor, "pictures [..., 3, H, W] in [0, 1] as a tensor", ImageError)
    if not rgb.is_floating_point():
        raise ImageError(f"rgb: expected floats in [0, 1], got {rgb.dtype}. Of uint8 use rgb / 255.")
    if rgb.ndim < 3 or rgb.shape[-3] != 3:
        raise ImageError(f"rgb: expected [..., 3, H, W], got {list(rgb.shape)}.")
    if not _three_numbers(mean) or not _three_numbers(std):
        raise ImageError(f"mean={shown(mean)}, std={shown(std)}: expected three numbers each.")
    centre, spread = (rgb.new_tensor(values).view(3, 1, 1) for values in (mean, std))
    return (rgb - centre) / spread


def _three_numbers(values: object) -> bool:
    return isinstance(values, Sequence) and len(values) == 3 and all(isinstance(v, int | float) for v in values)


def checked_size(size: int | tuple[int, int]) -> tuple[int, int]:
    """Return (height, width) of a side in pixels or a pair of them; refuse anything else."""
    sides = tuple(size) if isinstance(size, tuple | list) else (size, size)
    if len(sides) != 2 or not all(isinstance(side, int) and not isinstance(side, bool) and side > 0 for side in sides):
        raise ImageError(f"size={shown(size)}: expected a positive number of pixels or (height, width), such as 224.")
    return sides


def _listing(skipped: Sequence[SkippedImage]) -> str:
    named = "; ".join(str(image) for image in skipped[:_NAMED_IN_MESSAGES])
    more = len(skipped) - _NAMED_IN_MESSAGES
    return named + (f"; and {more} more" if more > 0 else "")


def _show(path: ImageSource) -> str:
    if isinstance(path, str | os.PathLike):
        return repr(os.fspath(path))
    parts = list(path)
    if len(parts) == 1:
        return repr(os.fspath(parts[0]))
    named = ", ".join(repr(os.fspath(part)) for part in parts[:_NAMED_IN_MESSAGES])
    return f"[{named}{', …' if len(parts) > _NAMED_IN_MESSAGES else ''}]"
