"""Folders of scenes: every folder that holds images itself is one scene, and its images are the views.

A scene of which a view cannot be read never stops the others: it is skipped and named with a reason.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from pullback.data.images import ImageSource, SkippedImage, find_images
from pullback.data.vggt_images import load_views
from pullback.errors import ImageError


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
    if patch_size < 1 or size < patch_size or size % patch_size:
        raise ImageError(
            f"size={size}: expected a width of whole patches of {patch_size} pixels, such as {37 * patch_size}."
        )
    found = find_scenes(path)
    scenes: list[SceneViews] = []
    skipped: list[SkippedImage] = []
    for folder in found:
        try:
            scenes.append(_read(folder, size, patch_size))
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


def _read(scene: SceneFolder, size: int, patch_size: int) -> SceneViews:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        views = load_views(scene.files, size=size, patch_size=patch_size)
    note = "; ".join(dict.fromkeys(str(warning.message) for warning in heard))
    return SceneViews(scene.folder, scene.files, views, note or None)
