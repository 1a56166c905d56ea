"""Views of procedural scenes as files: a folder for each scene, for whatever reads scenes from folders.

    python -m pullback.data.scene_pictures --count 8 --views 4 --out scenes
    pullback diagnose tiny-views --images scenes --decoder camera --layer 4

Scenes start at a seed that no embedded model was trained on. Views are rendered in the size in which `tiny-views` sees
them, so that reading the files changes nothing but rounds colours to 8 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from PIL import Image

from pullback.data.scenes import render
from pullback.errors import PullbackError

FIRST = 1 << 40
SIZE = 112


def write_scene_folders(out: Path, seeds: Sequence[int], *, views: int, size: int = SIZE) -> list[Path]:
    """PNG files ``out``/scene-SEED/view-00.png and so on; the folders."""
    folders = []
    for seed in seeds:  # one at a time: memory does not grow with their number
        folder = out / f"scene-{seed}"
        folder.mkdir(parents=True, exist_ok=True)
        pictures = (render([seed], size=size, views=views).rgb[0] * 255).round().byte().permute(0, 2, 3, 1).numpy()
        for number, picture in enumerate(pictures):
            Image.fromarray(picture).save(folder / f"view-{number:02d}.png")
        folders.append(folder)
    return folders


def main(
    out: Annotated[Path, typer.Option(help="Folder for the folders of the scenes.")],
    count: Annotated[int, typer.Option(min=1, help="Scenes.")] = 8,
    views: Annotated[int, typer.Option(min=1, max=99, help="Of each scene.")] = 4,
    size: Annotated[int, typer.Option(min=1, help="Side of the views.")] = SIZE,
    first: Annotated[int, typer.Option(help="Seed of the first scene.", show_default="2^40")] = FIRST,
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
