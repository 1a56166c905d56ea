"""Figures of a diagnosis and of the demo's scenes, drawn from the files of a folder alone (needs matplotlib)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import MaxNLocator

from pullback.report.canvas import (
    DPI,
    LIGHT,
    PictureGrid,
    Theme,
    beside,
    corner_note,
    energy_bar,
    energy_colours,
    plain_log_ticks,
    png,
    style,
    title,
    title_at_the_top,
)
from pullback.report.heat import lay_over, limits, relative_energy, split_energy
from pullback.report.pareto_figures import draw_pareto
from pullback.report.prune_figures import draw_prune
from pullback.report.run_figures import draw_plan, draw_training
from pullback.report.wording import outside_patches, percent, sample_count, share, short_name, unit
from pullback.runs import documents as files
from pullback.runs.files import write_bytes

MAX_IMAGES = 8  # pictures in a figure of tokens
_VIEWS_IN_A_ROW = 8
_NAME_LENGTH = 24
_DEPTH_COLOURS = "viridis_r"


def draw_all(folder: Path) -> list[str]:
    """Draw the figures of a folder, whichever run it holds, and return their names.

    A diagnosis has `spectrum.png` and a `tokens_*.png` for each layer; figures of an earlier run's layers are removed.
    The demo's scenes have `scenes.png`, a pruning comparison `prune.png` and what goes with it, methods at their
    operating points `pareto.png`, a plan `plan.png`, a training run `training.png`.
    """
    for file, draw in _DRAWN.items():
        if (folder / file).is_file():
            return draw(folder)
    return draw_diagnosis(folder)


def draw_scenes(folder: Path) -> list[str]:
    """Draw `scenes.png`."""
    write_bytes(folder / files.SCENES_FIGURE, scenes_png(files.read_scenes(folder)))
    return [files.SCENES_FIGURE]


def draw_diagnosis(folder: Path) -> list[str]:
    """Draw `spectrum.png` and a `tokens_*.png` for each layer whose tokens have a place in the picture."""
    document = files.read_diagnosis(folder)
    arrays = files.read_importance(folder)
    figures = {files.SPECTRUM: spectrum_png(document)}
    for layer in filter(files.in_picture, document["layers"]):
        figures[files.tokens_figure(layer["layer"])] = tokens_png(layer, arrays)
    for name, content in figures.items():
        write_bytes(folder / name, content)
    for old in folder.glob("tokens_*.png"):
        if old.name not in figures:
            old.unlink()
    return list(figures)


def spectrum_png(document: dict[str, Any], theme: Theme = LIGHT, dpi: int = DPI, narrow: bool = False) -> bytes:
    """Draw the spectra of all layers of a diagnosis, see `spectrum_axes`; ``narrow``: one below the other."""
    layers, words = document["layers"], _averaged(sample_count(document), unit(document))
    with style(theme):
        size = (4.8, 6.6 + 0.2 * len(layers)) if narrow else (9.6, 3.8)
        figure = Figure(figsize=size, layout="constrained")
        spectrum_axes(figure, layers, theme, narrow)
        title(figure, f"{short_name(document['model'])}, {document['decoder']}: {words}")
        return png(figure, dpi)


def overview_figure(layer: dict[str, Any], energy: np.ndarray, name: str, unit: str) -> Figure:
    """Draw the spectrum of one probe, and below it the energies of patches [n, rows, columns] (1 being their mean)."""
    rows, columns = energy.shape[1:]
    width = 9.6
    across = max(len(energy), 4)
    tall = max(1.5, (width - 1.2) / across * rows / columns + 0.5)  # strips leave no room for the bar's label
    with style(LIGHT):
        figure = Figure(figsize=(width, 3.8 + tall), layout="constrained")
        halves: Any = figure.subfigures(2, 1, height_ratios=(3.8, tall))
        above, below = halves
        spectrum_axes(above, [layer], LIGHT)
        scale = limits(energy)
        cells = below.subplots(1, across, squeeze=False)[0]
        for place, axes in enumerate(cells):
            axes.set_axis_off()
            if place < len(energy):
                axes.imshow(energy[place], cmap="inferno", norm=LogNorm(*scale))
        energy_bar(below, scale, "patch" if files.in_picture(layer) else "register", ax=cells, fraction=0.04, pad=0.01)
        title(figure, f"{name}: {_averaged(len(layer['per_image']), unit)}")
        return figure


def spectrum_axes(figure: Figure | SubFigure, layers: list[dict[str, Any]], theme: Theme, narrow: bool = False) -> None:
    """Draw the share of |J|_F^2 in direction j (left) and in the first j directions, kappa(j) (right)."""
    decay, capture = figure.subplots(*((2, 1) if narrow else (1, 2)))
    for layer, colour in zip(layers, _colours(len(layers), theme), strict=True):
        shares, own_error = _shares(layer)
        named = f"{files.layer_name(layer['layer'])}   " if layer["layer"] != "" else ""
        label = f"{named}κ({layer['rank_used']}) = {percent(layer['kappa'])}"
        _curve(decay, 100 * shares, own_error, colour, label)
        _curve(capture, 100 * shares.cumsum(1), own_error, colour, label)
    decay.set_yscale("log")
    plain_log_ticks(decay)
    decay.set(xlabel="direction j", ylabel=r"energy in direction j,  $\sigma_j^2\,/\,\|J\|_F^2$  (%)")
    capture.set(xlabel="rank j", ylabel="energy in the first j,  κ(j)  (%)", ylim=(0, 102))
    capture.axhline(90, color=theme.faint, lw=0.8, ls=(0, (4, 3)), zorder=0)
    capture.annotate(
        "90 %",
        (0.01, 90),
        xycoords=("axes fraction", "data"),
        xytext=(0, 2),
        textcoords="offset points",
        fontsize=8,
        color=theme.faint,
    )
    for axes in (decay, capture):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10], min_n_ticks=2))
        axes.margins(x=0.02)
    handles, labels = decay.get_legend_handles_labels()
    columns = 1 if narrow else min(3, len(labels))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)


def tokens_png(layer: dict[str, Any], arrays: dict[str, np.ndarray], theme: Theme = LIGHT, dpi: int = DPI) -> bytes:
    """Draw each image and its patches coloured by their task energy, with the share of the prefix tokens above it.

    ``arrays`` as `read_importance` gives them; of scenes every view is drawn, see `views_png`.
    """
    if "views" in arrays:
        return views_png(layer, arrays, theme, dpi)
    pictures = arrays["thumbnails"][:MAX_IMAGES]
    name, prefix = files.layer_name(layer["layer"]), int(arrays["prefix"])
    energy = np.square(arrays[name][: len(pictures)].astype(float))
    relative, outside = split_energy(energy, prefix, arrays["grid"])
    with style(theme):
        grid = _energy_grid(2, len(pictures), pictures.shape[1] / pictures.shape[2], left=0.0, top=0.46)
        scale = limits(relative)
        for column, (above, below) in enumerate(zip(*grid.cells, strict=True)):
            above.imshow(pictures[column])
            below.imshow(lay_over(pictures[column], relative[column], scale))
            above.set_title(outside_patches(prefix, outside[column]), fontsize=8.5, pad=4)
        _finish_energies(grid, scale, layer)
        return png(grid.figure, dpi)


def views_png(layer: dict[str, Any], arrays: dict[str, np.ndarray], theme: Theme = LIGHT, dpi: int = DPI) -> bytes:
    """Draw the views of the first scenes, and under each its patches coloured by their task energy.

    Energies are multiples of their mean over the patches of the whole scene, so that views can be compared; in the
    corner stands what share of the scene's energy the tokens of a view outside its patches hold.
    """
    name = files.layer_name(layer["layer"])
    shown = [scene for scene in range(len(arrays["views"])) if files.thumbnails_of(scene) in arrays]
    pictures = [arrays[files.thumbnails_of(scene)] for scene in shown]
    energies = [view_energies(arrays, name, scene) for scene in shown]
    rows = [first for views in pictures for first in range(0, len(views), _VIEWS_IN_A_ROW)]
    columns = min(_VIEWS_IN_A_ROW, max(map(len, pictures)))
    aspect = max(views.shape[1] / views.shape[2] for views in pictures)
    with style(theme):
        grid = _energy_grid(2 * len(rows), columns, aspect, left=0.3, top=0.34)
        scale = limits(np.concatenate([relative.ravel() for relative, _ in energies]))
        place = 0
        for scene, views, (relative, outside) in zip(shown, pictures, energies, strict=True):
            beside(grid.cells[place][0], scene_name(arrays, scene, len(views)), y=0.0)
            for view, picture in enumerate(views):
                row, column = place + 2 * (view // _VIEWS_IN_A_ROW), view % _VIEWS_IN_A_ROW
                above, below = grid.cells[row][column], grid.cells[row + 1][column]
                above.set_anchor("S")  # views that are lower than others stay together
                below.set_anchor("N")
                above.imshow(picture)
                below.imshow(lay_over(picture, relative[view], scale))
                corner_note(above, f"camera, registers {share(outside[view])}")
            place += 2 * -(-len(views) // _VIEWS_IN_A_ROW)
        _finish_energies(grid, scale, layer)
        return png(grid.figure, dpi)


def scenes_png(arrays: dict[str, np.ndarray], theme: Theme = LIGHT, dpi: int = DPI) -> bytes:
    """Draw scenes with known depth, one a row: picture, true and predicted depth, and where each task looks.

    ``arrays`` as `read_scenes` gives them. The sky has no depth and is left blank.
    """
    pictures, tasks = arrays["pictures"], arrays["tasks"]
    height, width = pictures.shape[1:3]
    depths = [np.where(arrays["true_depth"] > 0, arrays[name], np.nan) for name in ("true_depth", "predicted_depth")]
    relative = relative_energy(arrays["energy"].astype(float))
    metres, scale = LogNorm(*np.nanpercentile(depths, [0.5, 99.5])), limits(relative)
    with style(theme):
        grid = PictureGrid(len(pictures), 3 + len(tasks), 1.6, height / width, (0.42, 0.0, 0.48, 0.58))
        heads = ["picture", "true depth", "predicted depth", *(f"energy for {task}" for task in tasks)]
        for axes, text in zip(grid.cells[0], heads, strict=True):
            axes.set_title(text, fontsize=8.5, pad=4)
        for row, (seen, *shown) in enumerate(grid.cells):
            seen.imshow(pictures[row])
            beside(seen, str(arrays["captions"][row]).replace(": ", "\n"))
            for axes, depth in zip(shown[:2], depths, strict=True):
                axes.imshow(depth[row], cmap=_DEPTH_COLOURS, norm=metres)
            corner_note(shown[1], f"AbsRel {arrays['abs_rel'][row]:.3f}")
            for axes, energy in zip(shown[2:], relative, strict=True):
                axes.imshow(lay_over(pictures[row], energy[row], scale))
        _bar_below(grid, 1, 2, ScalarMappable(metres, _DEPTH_COLOURS), "metres")
        _bar_below(grid, 3, len(tasks), energy_colours(scale), "task energy of a patch (1 = their mean)")
        title_at_the_top(grid.figure, f"{arrays['model']} on scenes it has never seen")
        return png(grid.figure, dpi)


def _averaged(count: int, unit: str) -> str:
    if count == 1:
        return f"one {unit}, no error over {unit}s, bands ± 2 errors of the estimate"
    return f"mean of {count} {unit}s, bands ± 2 standard errors"


def _shares(layer: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return sigma_j^2 / |J|_F^2 [B, r], and the relative error of |J|_F^2 [B]."""
    images = layer["per_image"]
    energy = np.array([image["energy"] for image in images])
    error = np.array([image["energy_se"] for image in images]) / energy
    return np.square([image["singular_values"] for image in images]) / energy[:, None], error


def _curve(axes: Axes, values: np.ndarray, own_error: np.ndarray, colour: Any, label: str) -> None:
    """Draw the mean over images of values [B, r] with a band of two standard errors."""
    count, length = values.shape
    mean = values.mean(0)
    se = np.sqrt(np.square(values * own_error[:, None]).sum(0)) / count
    if count > 1:
        se = np.maximum(se, values.std(0, ddof=1) / np.sqrt(count))
    where = np.arange(1, length + 1)
    axes.fill_between(where, np.maximum(mean - 2 * se, mean * 1e-2), mean + 2 * se, color=colour, alpha=0.22, lw=0)
    axes.plot(where, mean, color=colour, lw=1.8, label=label, marker="o" if length < 4 else None, ms=4)


def _colours(count: int, theme: Theme) -> np.ndarray:
    """Choose colours for so many layers."""
    low, high = theme.layers
    return mpl.colormaps["viridis"](np.linspace(low, high, max(count, 2)))[:count]


def _energy_grid(rows: int, columns: int, aspect: float, left: float, top: float) -> PictureGrid:
    """Make a grid of pictures with room for a bar of energies at its right, never too narrow for the title."""
    side, narrowest = (1.5 if columns > 3 else 2.2), 3.9
    right = max(1.0, narrowest - columns * (side + PictureGrid.GAP))
    return PictureGrid(rows, columns, side, aspect, (left, right, top, 0.0))


def _finish_energies(grid: PictureGrid, scale: tuple[float, float], layer: dict[str, Any]) -> None:
    """Draw the bar of energies and the title."""
    rows, columns = len(grid.cells), len(grid.cells[0])
    x, y = grid.corner(rows - 1, columns)
    energy_bar(grid.figure, scale, cax=grid.place(x + 0.08, y + 0.1, 0.13, min(rows, 4) * grid.tall - 0.2))
    words = f"task energy of tokens, first {layer['rank_used']} directions"
    title_at_the_top(grid.figure, f"{files.layer_name(layer['layer'])}: {words}")


def view_energies(arrays: dict[str, np.ndarray], name: str, scene: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the energies of patches [S, rows, columns] as multiples of their mean, and of all other tokens [S] as
    shares of the scene."""
    views, prefix = int(arrays["views"][scene]), int(arrays["prefix"])
    rows, columns = map(int, arrays["grid"][scene])
    tokens = arrays[name][scene, : views * (prefix + rows * columns)]
    energy = np.square(tokens.astype(float)).reshape(views, -1)
    patches = energy[:, prefix:].reshape(views, rows, columns)
    return patches / max(patches.mean(), 1e-300), energy[:, :prefix].sum(1) / max(energy.sum(), 1e-300)


def scene_name(arrays: dict[str, np.ndarray], scene: int, shown: int) -> str:
    """Return the name of a scene, shortened, and how many views it has where not all are shown."""
    name, views = str(arrays["scenes"][scene]), int(arrays["views"][scene])
    short = name if len(name) <= _NAME_LENGTH else f"{name[: _NAME_LENGTH - 1]}…"
    return short if shown == views else f"{short} ({shown} of {views} views)"


def _bar_below(grid: PictureGrid, first: int, columns: int, colours: ScalarMappable, label: str) -> None:
    """Draw a colour bar under some columns."""
    left, bottom = grid.corner(len(grid.cells) - 1, first)
    length = columns * (grid.side + grid.GAP) - grid.GAP
    axes = grid.place(left + 0.1, bottom - 0.2, length - 0.2, 0.11)
    bar = grid.figure.colorbar(colours, cax=axes, orientation="horizontal", extend="both")
    plain_log_ticks(axes, "x")
    bar.outline.set_visible(False)
    bar.set_label(label, fontsize=8, labelpad=1)
    axes.tick_params(labelsize=7.5, pad=1)


_DRAWN = {
    files.PARETO: draw_pareto,
    files.SUMMARY: draw_prune,
    files.SCENES: draw_scenes,
    files.PLAN: draw_plan,
    files.METRICS: draw_training,
}
"""The file by which a run is known: what draws its figures."""
