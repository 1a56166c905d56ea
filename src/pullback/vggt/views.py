"""Views of scenes as VGGT wants them: one width, sides divisible by the patch size, values in [0, 1], not normalised.

One scene (`load_views`): views are told apart by their place in the batch, so a file that cannot be read is an error,
not a gap. Pictures are turned upright by their EXIF orientation, like all images of this package. Without that tag,
pixels are those of the published loader, but for pictures in gray, palette or RGB that have transparency: see
`_on_white`.

Many scenes (`read_scenes`): every folder that holds images itself is one scene, and its images are the views. A scene
of which a view cannot be read never stops the others: it is skipped and named with a reason.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from pullback.backbones import Group, Samples, thumbnails
from pullback.data.images import (
    MAX_PIXELS,
    ImageSource,
    SkippedImage,
    Unusable,
    find_images,
    reason_of,
    search_images,
    to_rgb,
    to_tensor,
    upright,
)
from pullback.data.pictures import check_finite
from pullback.errors import ImageError
from pullback.runs.documents import thumbnails_of
from pullback.tokens import TokenLayout

Fit = Literal["crop", "pad"]
WHITE = 1.0
_BEYOND = 0.5  # how far resizing with overshoot and added noise may leave [0, 1]
MAX_VIEWS = 24
"""Views in a figure of tokens: all of the first scene, and of scenes after it as long as they fit as a whole."""
_T = TypeVar("_T")


def load_views(path: ImageSource, *, mode: Fit = "crop", size: int = 518, patch_size: int = 14) -> Tensor:
    """Views of one scene, [S, 3, H, W] in [0, 1], in the order given (folders: sorted by name).

    "crop" makes every view ``size`` wide and cuts the middle out of those higher than that; lower ones stay lower.
    "pad" makes the longer side ``size`` and fills up to a white-edged square, so that nothing is lost. Views of
    different shapes are filled up with white to the largest, with a warning.
    """
    if mode not in get_args(Fit):
        raise ImageError(f"mode: expected 'crop' or 'pad', got {mode!r}.")
    check_width(size, patch_size)
    views = [_read(file, lambda picture: _fitted(picture, mode, size, patch_size)) for file in find_images(path)]
    height, width = (max(view.shape[axis] for view in views) for axis in (1, 2))
    if any(view.shape[1:] != (height, width) for view in views):
        shapes = sorted({f"{view.shape[1]}x{view.shape[2]}" for view in views})
        warnings.warn(f"views of different shapes ({', '.join(shapes)}) get white edges", stacklevel=2)
    return torch.stack([_with_edges(view, height, width) for view in views])


def as_views(images: Any, *, normalized: bool = False) -> Tensor:
    """Return views in memory as VGGT takes them: in [0, 1], uint8 divided by 255.

    Values far outside [0, 1] are refused unless ``normalized``, which vouches for them.
    """
    if not isinstance(images, Tensor):
        raise ImageError(
            "images: expected views [S, 3, H, W], or several scenes [B, S, 3, H, W], as a tensor, uint8 or in [0, 1], "
            f"got {type(images).__name__}. Files are read by pb.load_views(folder)."
        )
    if images.dtype == torch.uint8:
        return images.float() / 255
    if images.is_floating_point() and images.numel():
        check_finite(images)
        low, high = float(images.min()), float(images.max())
        if not normalized and (low < -_BEYOND or high > 1 + _BEYOND):
            raise ImageError(
                f"images: expected views in [0, 1], got values from {low:.3g} to {high:.3g}. The network normalises "
                "them itself: leave out the mean and the standard deviation; of pixels from 0 to 255 use images / 255."
            )
    return images


def load_square_views(path: ImageSource, *, size: int = 1024) -> tuple[Tensor, Tensor]:
    """Views with black edges to squares, [S, 3, size, size] in [0, 1], and where each picture lies in its square:
    [S, 6], x and y of its first and last corner in pixels of the square, then its own width and height."""
    if not isinstance(size, int) or size < 1:
        raise ImageError(f"size={size!r}: expected a positive whole number of pixels, such as 1024.")
    squares = [_read(file, lambda picture: _squared(picture, size)) for file in find_images(path)]
    boxes = torch.tensor([box for _, box in squares], dtype=torch.float32)
    return torch.stack([pixels for pixels, _ in squares]), boxes


def check_width(size: int, patch_size: int) -> None:
    """Refuse a width of views that is not whole patches."""
    if not isinstance(patch_size, int) or patch_size < 1:
        raise ImageError(f"patch_size={patch_size!r}: expected a positive whole number of pixels, such as 14.")
    if not isinstance(size, int) or size < patch_size or size % patch_size:
        raise ImageError(
            f"size={size!r}: expected a multiple of patch_size={patch_size}, as an int, such as {37 * patch_size}."
        )


@dataclass(frozen=True)
class SceneFolder:
    """A folder and the images in it, not those of folders below."""

    folder: Path
    files: tuple[Path, ...]


@dataclass(frozen=True, eq=False)
class SceneViews:
    """Views [S, 3, H, W] in [0, 1]; ``note`` says what had to be done to fit them together."""

    folder: Path
    files: tuple[Path, ...]
    views: Tensor
    note: str | None


@dataclass(frozen=True, eq=False)
class ReadScenes:
    """What came out of reading. Scenes may differ in their number of views and in size."""

    scenes: tuple[SceneViews, ...]
    skipped: tuple[SkippedImage, ...]


def find_scenes(path: ImageSource) -> list[SceneFolder]:
    """The images behind a file, folder, glob or list of these by the folder they lie in, sorted."""
    scenes: dict[Path, list[Path]] = {}
    for file in find_images(path):
        scenes.setdefault(file.parent, []).append(file)
    return [SceneFolder(folder, tuple(files)) for folder, files in sorted(scenes.items())]


def read_scenes(path: ImageSource, *, size: int = 518, patch_size: int = 14, limit: int | None = None) -> ReadScenes:
    """Scenes as `load_views` reads them, ``size`` pixels wide, until ``limit`` of them are good."""
    check_width(size, patch_size)
    images = search_images(path)
    found = find_scenes(images.files)
    scenes: list[SceneViews] = []
    skipped = list(images.unread)
    for folder in found:
        try:
            scenes.append(_read_scene(folder, size, patch_size))
        except ImageError as error:
            skipped.append(SkippedImage(folder.folder, str(error).removeprefix("path: ")))
        if len(scenes) == limit:
            break
    if not scenes:
        raise ImageError(
            f"path={str(path)!r}: expected at least one readable scene, but none of the {len(found)} could be used; "
            f"the first: {skipped[0]} Replace these files or give another path."
        )
    return ReadScenes(tuple(scenes), tuple(skipped))


def _read_scene(scene: SceneFolder, size: int, patch_size: int) -> SceneViews:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        views = load_views(scene.files, size=size, patch_size=patch_size)
    note = "; ".join(dict.fromkeys(str(warning.message) for warning in heard))
    return SceneViews(scene.folder, scene.files, views, note or None)


def view_samples(found: ReadScenes, layouts: Sequence[TokenLayout]) -> Samples:
    """Scenes, each a group of its own since they may differ in views and size, with their token layouts.

    ``size`` in the record is None where they differ in it. The arrays hold the views of the first scenes.
    """
    sizes = {tuple(scene.views.shape[-2:]) for scene in found.scenes}
    shown = found.scenes[: scenes_that_fit([layout.views for layout in layouts])]
    return Samples(
        groups=tuple(Group(scene.views[None], f"the scene {scene.folder}") for scene in found.scenes),
        names=tuple(str(scene.folder) for scene in found.scenes),
        record={
            "image_files": [str(file) for scene in found.scenes for file in scene.files],
            "scenes": [
                {
                    "scene": str(scene.folder),
                    "views": len(scene.views),
                    "size": list(scene.views.shape[-2:]),
                    "note": scene.note,
                }
                for scene in found.scenes
            ],
            "skipped": [scene.record() for scene in found.skipped],
            "size": list(sizes.pop()) if len(sizes) == 1 else None,
        },
        arrays={
            **{thumbnails_of(n): thumbnails(scene.views[:MAX_VIEWS]) for n, scene in enumerate(shown)},
            "scenes": np.array([scene.folder.name for scene in found.scenes]),
            "views": np.array([layout.views for layout in layouts]),
            "grid": np.array([layout.grid for layout in layouts]),
            "prefix": np.array(layouts[0].prefix),
        },
    )


def scenes_that_fit(views: Sequence[int]) -> int:
    """How many scenes a figure shows: the first, and those after it as long as they fit as a whole."""
    return max(1, sum(total <= MAX_VIEWS for total in np.cumsum(views).tolist()))


# Pictures


def _read(file: Path, use: Callable[[Image.Image], _T]) -> _T:
    """Open a picture as RGB on white, and return what ``use`` makes of it."""
    try:
        with upright(file) as image:
            return use(to_rgb(_on_white(image)))
    except Exception as error:  # on a damaged file Pillow's decoders raise nearly anything
        raise ImageError(f"path: {file}: {reason_of(error)}. A scene needs all of its views.") from None


def _on_white(image: Image.Image) -> Image.Image:
    """Make white what is transparent, by an alpha channel or by a colour that stands for it (GIF, PNG).

    The published loader does so in mode RGBA alone, where pixels are the same; elsewhere it shows the hidden colours,
    mostly black. 16-bit gray, for which Pillow has no alpha, stays opaque.
    """
    transparent = image.getbands()[-1] == "A" or "transparency" in image.info
    if not transparent or image.mode.startswith("I"):
        return image
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))


def _fitted(picture: Image.Image, mode: Fit, size: int, patch: int) -> Tensor:
    """[3, H, W] with both sides divisible by the patch size."""
    width, height = picture.size
    if mode == "crop" or width >= height:
        wanted = (size, _whole_patches(height * (size / width), patch))
    else:
        wanted = (_whole_patches(width * (size / height), patch), size)
    if wanted[0] * wanted[1] > MAX_PIXELS:
        raise Unusable(f"too long: {width}x{height} pixels would become {wanted[0]}x{wanted[1]}; crop it first")
    pixels = to_tensor(picture.resize(wanted, Image.Resampling.BICUBIC))
    if mode == "pad":
        return _with_edges(pixels, size, size)
    top = max(0, (wanted[1] - size) // 2)
    return pixels[:, top : top + size]


def _whole_patches(side: float, patch: int) -> int:
    count = round(side / patch)
    if count < 1:
        raise Unusable(f"too narrow: its short side would not fill one patch of {patch} pixels; crop it first")
    return count * patch


def _with_edges(view: Tensor, height: int, width: int) -> Tensor:
    """Fill a view [3, h, w] up to [3, height, width] with white; the smaller half of an odd number left and on top."""
    down, across = height - view.shape[1], width - view.shape[2]
    top, left = down // 2, across // 2
    return F.pad(view, (left, across - left, top, down - top), value=WHITE)


def _squared(picture: Image.Image, size: int) -> tuple[Tensor, list[float]]:
    """[3, size, size], and the picture's corners and own size."""
    side = max(picture.size)
    if side**2 > MAX_PIXELS:
        raise Unusable(f"too long: {picture.width}x{picture.height} pixels would become {side}x{side}; crop it first")
    left, top = (side - picture.width) // 2, (side - picture.height) // 2
    square = Image.new("RGB", (side, side))
    square.paste(picture, (left, top))
    corners = (left, top, left + picture.width, top + picture.height)
    pixels = to_tensor(square.resize((size, size), Image.Resampling.BICUBIC))
    return pixels, [*(corner * size / side for corner in corners), picture.width, picture.height]
