"""Figures of a diagnosis, drawn from the files in its folder and nothing else (needs matplotlib)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from pullback.report.canvas import (
    DPI,
    LIGHT,
    PictureGrid,
    Theme,
    energy_bar,
    energy_scale,
    lay_energy_over,
    plain_log_ticks,
    png,
    relative_energy,
    style,
    title,
    title_at_the_top,
)
from pullback.report.prune_figures import draw_prune
from pullback.report.scenes_figure import scenes_png
from pullback.report.views_figure import views_png
from pullback.report.wording import percent, sample_count, share, short_name, unit
from pullback.runs import documents as files
from pullback.runs import documents as prune_files
from pullback.runs.files import write_bytes

MAX_IMAGES = 8


def draw_all(folder: Path) -> list[str]:
    """Of a diagnosis `spectrum.png` and one `tokens_*.png` per layer, of the demo's scenes `scenes.png`, of a pruning
    comparison `prune.png` and what goes with it.

    Figures of an earlier run's layers are removed.
    """
    if (folder / prune_files.SUMMARY).is_file():
        return draw_prune(folder)
    if (folder / files.SCENES).is_file():
        write_bytes(folder / files.SCENES_FIGURE, scenes_png(files.read_scenes(folder)))
        return [files.SCENES_FIGURE]
    document = files.read_diagnosis(folder)
    arrays = files.read_importance(folder)
    figures = {files.SPECTRUM: spectrum_png(document)}
    for layer in document["layers"]:
        figures[files.tokens_figure(layer["layer"])] = tokens_png(layer, arrays)
    for name, content in figures.items():
        write_bytes(folder / name, content)
    for old in folder.glob("tokens_*.png"):
        if old.name not in figures:
            old.unlink()
    return list(figures)


def spectrum_png(document: dict[str, Any], theme: Theme = LIGHT, dpi: int = DPI) -> bytes:
    """Left: the share of |J|_F^2 in direction j. Right: in the first j directions, kappa(j)."""
    layers, count = document["layers"], sample_count(document)
    with style(theme):
        figure = Figure(figsize=(9.6, 3.8), layout="constrained")
        decay, capture = figure.subplots(1, 2)
        for layer, colour in zip(layers, _colours(len(layers), theme), strict=True):
            shares, own_error = _shares(layer)
            label = f"{files.layer_name(layer['layer'])}   κ({layer['rank_used']}) = {percent(layer['kappa'])}"
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
        figure.legend(handles, labels, loc="outside lower center", ncols=min(3, len(labels)), frameon=False)
        mean = f"mean of {count} {unit(document)}s" if count > 1 else f"one {unit(document)}"
        title(figure, f"{short_name(document['model'])}, {document['decoder']}: {mean}, bands ± 2 standard errors")
        return png(figure, dpi)


def tokens_png(layer: dict[str, Any], arrays: dict[str, np.ndarray], theme: Theme = LIGHT, dpi: int = DPI) -> bytes:
    """Each image, and its patches coloured by their task energy; above, what share the prefix tokens hold. Of scenes,
    each view."""
    if "views" in arrays:
        return views_png(layer, arrays, theme, dpi)
    pictures = arrays["thumbnails"][:MAX_IMAGES]
    name, prefix = files.layer_name(layer["layer"]), int(arrays["prefix"])
    energy = np.square(arrays[name][: len(pictures)].astype(float))
    relative = relative_energy(energy[:, prefix:].reshape(-1, *arrays["grid"]))
    prefix_share = energy[:, :prefix].sum(1) / np.maximum(energy.sum(1), 1e-300)
    count, (height, width) = len(pictures), pictures.shape[1:3]
    whose = "class token" if prefix == 1 else "prefix tokens"
    with style(theme):
        side, narrowest = (1.5 if count > 3 else 2.2), 3.9
        right = max(1.0, narrowest - count * (side + PictureGrid.GAP))
        grid = PictureGrid(2, count, side, height / width, (0.0, right, 0.46, 0.0))
        scale = energy_scale(relative)
        for column, (above, below) in enumerate(zip(*grid.cells, strict=True)):
            above.imshow(pictures[column])
            lay_energy_over(below, pictures[column], relative[column], scale)
            if prefix:
                above.set_title(f"{whose} {share(prefix_share[column])}", fontsize=8.5, pad=4)
        x, y = grid.corner(1, count)
        energy_bar(grid, grid.place(x + 0.08, y + 0.1, 0.13, 2 * grid.tall - 0.2), scale)
        title_at_the_top(grid.figure, f"{name}: task energy of tokens, first {layer['rank_used']} directions")
        return png(grid.figure, dpi)


def _shares(layer: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """sigma_j^2 / |J|_F^2 [B, r], and the relative error of |J|_F^2 [B]."""
    images = layer["per_image"]
    energy = np.array([image["energy"] for image in images])
    error = np.array([image["energy_se"] for image in images]) / energy
    return np.square([image["singular_values"] for image in images]) / energy[:, None], error


def _curve(axes: Axes, values: np.ndarray, own_error: np.ndarray, colour: Any, label: str) -> None:
    """The mean over images of values [B, r] with a band of two standard errors."""
    count, length = values.shape
    mean = values.mean(0)
    se = np.sqrt(np.square(values * own_error[:, None]).sum(0)) / count
    if count > 1:
        se = np.maximum(se, values.std(0, ddof=1) / np.sqrt(count))
    where = np.arange(1, length + 1)
    axes.fill_between(where, np.maximum(mean - 2 * se, mean * 1e-2), mean + 2 * se, color=colour, alpha=0.22, lw=0)
    axes.plot(where, mean, color=colour, lw=1.8, label=label, marker="o" if length < 4 else None, ms=4)


def _colours(count: int, theme: Theme) -> np.ndarray:
    low, high = theme.layers
    return mpl.colormaps["viridis"](np.linspace(low, high, max(count, 2)))[:count]
