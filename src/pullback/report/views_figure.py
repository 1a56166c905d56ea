"""Where a task looks in the views of scenes: one panel per view, and under it its patches in the colours of energy."""

from __future__ import annotations

from typing import Any

import numpy as np

from pullback.report.canvas import (
    DPI,
    LIGHT,
    PictureGrid,
    Theme,
    corner_note,
    energy_bar,
    energy_scale,
    lay_energy_over,
    png,
    style,
    title_at_the_top,
)
from pullback.report.wording import share
from pullback.runs import documents as files

COLUMNS = 8
_NAME_LENGTH = 24


def views_png(layer: dict[str, Any], arrays: dict[str, np.ndarray], theme: Theme = LIGHT, dpi: int = DPI) -> bytes:
    """The first scenes of ``arrays`` (as `files.read_importance` gives them). Energies are multiples of their mean over
    the patches of the whole scene, so that views can be compared; in the corner stands what share of the scene's energy
    the tokens of a view outside its patches hold."""
    name = files.layer_name(layer["layer"])
    shown = [scene for scene in range(len(arrays["views"])) if files.thumbnails_of(scene) in arrays]
    pictures = [arrays[files.thumbnails_of(scene)] for scene in shown]
    energies = [_energies(arrays, name, scene) for scene in shown]
    rows = [first for views in pictures for first in range(0, len(views), COLUMNS)]
    columns = min(COLUMNS, max(map(len, pictures)))
    aspect = max(views.shape[1] / views.shape[2] for views in pictures)
    with style(theme):
        side, narrowest = (1.5 if columns > 3 else 2.2), 3.9
        right = max(1.0, narrowest - columns * (side + PictureGrid.GAP))
        grid = PictureGrid(2 * len(rows), columns, side, aspect, (0.3, right, 0.34, 0.0))
        scale = energy_scale(np.concatenate([relative.ravel() for relative, _ in energies]))
        place = 0
        for scene, views, (relative, outside) in zip(shown, pictures, energies, strict=True):
            _caption(grid, place, str(arrays["scenes"][scene]), len(views), int(arrays["views"][scene]))
            for view, picture in enumerate(views):
                row, column = place + 2 * (view // COLUMNS), view % COLUMNS
                above, below = grid.cells[row][column], grid.cells[row + 1][column]
                above.set_anchor("S")  # views that are lower than others stay together
                below.set_anchor("N")
                above.imshow(picture)
                lay_energy_over(below, picture, relative[view], scale)
                corner_note(above, f"camera, registers {share(outside[view])}")
            place += 2 * -(-len(views) // COLUMNS)
        x, y = grid.corner(2 * len(rows) - 1, columns)
        tall = min(2 * len(rows), 4) * grid.tall
        energy_bar(grid, grid.place(x + 0.08, y + 0.1, 0.13, tall - 0.2), scale)
        title_at_the_top(grid.figure, f"{name}: task energy of tokens, first {layer['rank_used']} directions")
        return png(grid.figure, dpi)


def _energies(arrays: dict[str, np.ndarray], name: str, scene: int) -> tuple[np.ndarray, np.ndarray]:
    """Of patches [S, rows, columns] as multiples of their mean, of all other tokens [S] as shares of the scene."""
    views, prefix = int(arrays["views"][scene]), int(arrays["prefix"])
    rows, columns = map(int, arrays["grid"][scene])
    tokens = arrays[name][scene, : views * (prefix + rows * columns)]
    energy = np.square(tokens.astype(float)).reshape(views, -1)
    patches = energy[:, prefix:].reshape(views, rows, columns)
    return patches / max(patches.mean(), 1e-300), energy[:, :prefix].sum(1) / max(energy.sum(), 1e-300)


def _caption(grid: PictureGrid, row: int, name: str, shown: int, views: int) -> None:
    """Left of the first views of a scene: its name, and how many views it has where not all are shown."""
    short = name if len(name) <= _NAME_LENGTH else f"{name[: _NAME_LENGTH - 1]}…"
    words = short if shown == views else f"{short} ({shown} of {views} views)"
    axes = grid.cells[row][0]
    axes.text(-0.05, 0.0, words, rotation=90, ha="right", va="center", fontsize=8, transform=axes.transAxes)
