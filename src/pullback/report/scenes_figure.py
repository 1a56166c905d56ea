"""Scenes with a known truth, one a row: the picture, its depth, the model's depth, and where each task looks."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm

from pullback.report.canvas import (
    DPI,
    LIGHT,
    PictureGrid,
    Theme,
    corner_note,
    energy_scale,
    lay_energy_over,
    plain_log_ticks,
    png,
    relative_energy,
    style,
    title_at_the_top,
)

_DEPTH_COLOURS = "viridis_r"
_SIDE, _MARGINS = 1.6, (0.42, 0.0, 0.48, 0.58)  # inches


def scenes_png(arrays: dict[str, np.ndarray], theme: Theme = LIGHT, dpi: int = DPI) -> bytes:
    """``arrays`` as `files.read_scenes` gives them. Sky has no depth and is left blank."""
    pictures, tasks = arrays["pictures"], arrays["tasks"]
    height, width = pictures.shape[1:3]
    depths = [np.where(arrays["true_depth"] > 0, arrays[name], np.nan) for name in ("true_depth", "predicted_depth")]
    relative = [relative_energy(energy.astype(float)) for energy in arrays["energy"]]
    metres, scale = LogNorm(*np.nanpercentile(depths, [0.5, 99.5])), energy_scale(np.stack(relative))
    with style(theme):
        grid = PictureGrid(len(pictures), 3 + len(tasks), _SIDE, height / width, _MARGINS)
        heads = ["picture", "true depth", "predicted depth", *(f"energy for {task}" for task in tasks)]
        for axes, text in zip(grid.cells[0], heads, strict=True):
            axes.set_title(text, fontsize=8.5, pad=4)
        for row, (seen, *shown) in enumerate(grid.cells):
            seen.imshow(pictures[row])
            _caption(seen, str(arrays["captions"][row]))
            for axes, depth in zip(shown[:2], depths, strict=True):
                axes.imshow(depth[row], cmap=_DEPTH_COLOURS, norm=metres)
            corner_note(shown[1], f"AbsRel {arrays['abs_rel'][row]:.3f}")
            for axes, energy in zip(shown[2:], relative, strict=True):
                lay_energy_over(axes, pictures[row], energy[row], scale)
        _bar(grid, 1, 2, ScalarMappable(metres, _DEPTH_COLOURS), "metres")
        _bar(grid, 3, len(tasks), ScalarMappable(scale, "inferno"), "task energy of a patch (1 = their mean)")
        title_at_the_top(grid.figure, f"{arrays['model']} on scenes it has never seen")
        return png(grid.figure, dpi)


def _caption(axes: Axes, text: str) -> None:
    """Beside the picture, in two lines where there is a colon."""
    words = text.replace(": ", "\n")
    axes.text(-0.03, 0.5, words, rotation=90, ha="right", va="center", fontsize=8, transform=axes.transAxes)


def _bar(grid: PictureGrid, first: int, columns: int, colours: ScalarMappable, label: str) -> None:
    """A colour bar under some columns."""
    left, bottom = grid.corner(len(grid.cells) - 1, first)
    length = columns * (grid.side + grid.GAP) - grid.GAP
    axes = grid.place(left + 0.1, bottom - 0.2, length - 0.2, 0.11)
    bar = grid.figure.colorbar(colours, cax=axes, orientation="horizontal", extend="both")
    plain_log_ticks(axes, "x")
    bar.outline.set_visible(False)
    bar.set_label(label, fontsize=8, labelpad=1)
    axes.tick_params(labelsize=7.5, pad=1)
