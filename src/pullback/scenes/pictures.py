"""Draw views of procedural scenes as PNG files, a folder for each scene, for commands that read scenes from folders.

    python -m pullback.scenes.pictures --count 8 --views 4 --out scenes
    pullback diagnose tiny-views --images scenes --decoder camera --layer 4

Scenes start at a seed that no embedded model was trained on. Views are rendered in the size in which `tiny-views` sees
them, so that reading the files changes nothing but rounds colours to 8 bits. A folder that holds other pictures is
refused, because a reader would take them for views of the scene.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from PIL import Image

from pullback.data.images import EXTENSIONS, MAX_PIXELS
from pullback.errors import ImageError, PullbackError
from pullback.scenes.render import render
from pullback.scenes.splits import HELD_OUT

SIZE = 112


def write_scene_folders(out: Path, seeds: Sequence[int], *, views: int, size: int = SIZE) -> list[Path]:
    """Write PNG files ``out``/scene-SEED/view-00.png and so on; return the folders."""
    _check_size(size, views)
    names = [f"view-{number:02d}.png" for number in range(views)]
    folders = [out / f"scene-{seed}" for seed in seeds]
    for folder in folders:
        _check_folder(folder, names)
    for seed, folder in zip(seeds, folders, strict=True):  # one at a time: memory does not grow with their number
        folder.mkdir(parents=True, exist_ok=True)
        pictures = render([seed], size=size, views=views).pictures()[0]
        for name, picture in zip(names, pictures.numpy(), strict=True):
            Image.fromarray(picture).save(folder / name)
    return folders


def _check_size(size: int, views: int) -> None:
    if views * size**2 > MAX_PIXELS:
        raise ImageError(
            f"size={size}: expected at most {math.isqrt(MAX_PIXELS // views)} with views={views}, since all views of a "
            "scene are drawn at once. Choose a smaller size or fewer views."
        )


def _check_folder(folder: Path, names: Sequence[str]) -> None:
    """Refuse a folder with pictures other than these, which a reader of scenes would find too."""
    found = folder.iterdir() if folder.is_dir() else ()
    others = sorted(
        file.name
        for file in found
        if file.suffix.lower() in EXTENSIONS and not file.name.startswith(".") and file.name not in names
    )
    if others:
        raise PullbackError(
            f"out: {folder} already holds {others[0]}, which is none of the {len(names)} views to be drawn here and "
            "would be read as one more. Choose another --out, or delete the folder."
        )


def main(
    out: Annotated[Path, typer.Option(help="Folder for the folders of the scenes.")],
    count: Annotated[int, typer.Option(min=1, help="Scenes.")] = 8,
    views: Annotated[int, typer.Option(min=1, max=99, help="Of each scene.")] = 4,
    size: Annotated[int, typer.Option(min=1, help="Side of the views.")] = SIZE,
    first: Annotated[int, typer.Option(help="Seed of the first scene.", show_default="2^40")] = HELD_OUT,
) -> None:
    """Draw scenes as PNG files."""
    try:
        write_scene_folders(out, range(first, first + count), views=views, size=size)
    except (PullbackError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    typer.echo(f"{count} scenes of {views} views in {out}/")


if __name__ == "__main__":
    typer.run(main)
