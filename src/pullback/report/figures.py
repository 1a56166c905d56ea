"""Figures of a diagnosis, drawn from the files in its folder and nothing else (needs matplotlib)."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from pullback.report import files
from pullback.report.wording import percent, share, short_name

MAX_IMAGES = 8
DPI = 150


@dataclass(frozen=True)
class Theme:
    ink: str
    faint: str
    paper: str
    layers: tuple[float, float]  # the part of viridis that stands out from the paper


LIGHT = Theme(ink="#1f2328", faint="#8b949e", paper="#ffffff", layers=(0.05, 0.82))
DARK = Theme(ink="#e6edf3", faint="#7d8590", paper="#161b22", layers=(0.38, 0.98))


def draw_all(folder: Path) -> list[str]:
    """`spectrum.png` and one `tokens_*.png` per layer; those of an earlier run's layers are removed."""
    document = files.read_diagnosis(folder)
    arrays = files.read_importance(folder)
    figures = {files.SPECTRUM: spectrum_png(document)}
    for layer in document["layers"]:
        figures[files.tokens_figure(layer["layer"])] = tokens_png(layer, arrays)
    for name, content in figures.items():
        files.write_bytes(folder / name, content)
    for old in folder.glob("tokens_*.png"):
        if old.name not in figures:
            old.unlink()
    return list(figures)


def spectrum_png(document: dict[str, Any], theme: Theme = LIGHT, dpi: int = DPI) -> bytes:
    """Left: the share of |J|_F^2 in direction j. Right: in the first j directions, kappa(j)."""
    layers, count = document["layers"], len(document["image_files"])
    with _style(theme):
        figure = Figure(figsize=(9.6, 3.8), layout="constrained")
        decay, capture = figure.subplots(1, 2)
        for layer, colour in zip(layers, _colours(len(layers), theme), strict=True):
            shares, own_error = _shares(layer)
            label = f"{files.layer_name(layer['layer'])}   κ({layer['rank_used']}) = {percent(layer['kappa'])}"
            _curve(decay, 100 * shares, own_error, colour, label)
            _curve(capture, 100 * shares.cumsum(1), own_error, colour, label)
        decay.set_yscale("log")
        _plain_log_ticks(decay)
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
        mean = f"mean of {count} images" if count > 1 else "one image"
        _title(figure, f"{short_name(document['model'])}, {document['decoder']}: {mean}, bands ± 2 standard errors")
        return _png(figure, dpi)


def tokens_png(layer: dict[str, Any], arrays: dict[str, np.ndarray], theme: Theme = LIGHT, dpi: int = DPI) -> bytes:
    """Each image, and its patches coloured by their task energy; above, what share the prefix tokens hold."""
    pictures = arrays["thumbnails"][:MAX_IMAGES]
    name, prefix = files.layer_name(layer["layer"]), int(arrays["prefix"])
    energy = np.square(arrays[name][: len(pictures)].astype(float))
    patches = energy[:, prefix:].reshape(-1, *arrays["grid"])
    relative = patches / np.maximum(patches.mean((1, 2), keepdims=True), 1e-300)
    prefix_share = energy[:, :prefix].sum(1) / np.maximum(energy.sum(1), 1e-300)
    count, (height, width) = len(pictures), pictures.shape[1:3]
    whose = "class token" if prefix == 1 else "prefix tokens"
    with _style(theme):
        figure, cells, bar_axes = _token_grid(count, height / width)
        norm = _token_norm(relative)
        for column, (above, below) in enumerate(cells):
            above.imshow(pictures[column])
            below.imshow(_gray(pictures[column]), cmap="gray", vmin=-0.2, vmax=1.2)
            below.imshow(
                relative[column],
                cmap="inferno",
                norm=norm,
                alpha=0.75,
                interpolation="nearest",
                extent=(-0.5, width - 0.5, height - 0.5, -0.5),
            )
            if prefix:
                above.set_title(f"{whose} {share(prefix_share[column])}", fontsize=8.5, pad=4)
        bar = figure.colorbar(ScalarMappable(norm, "inferno"), cax=bar_axes, extend="both")
        _plain_log_ticks(bar_axes)
        bar.outline.set_visible(False)
        bar.set_label("energy of a patch\n(1 = their mean)", fontsize=8)
        _title(
            figure,
            f"{name}: task energy of tokens, first {layer['rank_used']} directions",
            y=1 - 0.07 / figure.get_figheight(),
            va="top",
        )
        return _png(figure, dpi)


def _token_grid(count: int, aspect: float) -> tuple[Figure, list[tuple[Axes, Axes]], Axes]:
    """Two rows of pictures without gaps and a colour bar, placed by hand in inches: layouts leave holes here."""
    side, gap, top, right = (1.5 if count > 3 else 2.2), 0.06, 0.52, 1.05
    width = max(count * (side + gap) + right, 3.9)
    height = 2 * (side * aspect + gap) + top
    figure = Figure(figsize=(width, height))

    def place(x: float, y: float, w: float, h: float) -> Axes:
        return figure.add_axes((x / width, y / height, w / width, h / height))

    cells = []
    for column in range(count):
        left = gap + column * (side + gap)
        pair = tuple(place(left, gap + row * (side * aspect + gap), side, side * aspect) for row in (1, 0))
        for axes in pair:
            axes.set_axis_off()
        cells.append((pair[0], pair[1]))
    bar = place(gap + count * (side + gap) + 0.08, gap + 0.1, 0.13, 2 * side * aspect - 0.2)
    return figure, cells, bar


def _token_norm(relative: np.ndarray) -> LogNorm:
    """One scale for all images of the figure, at most two and a half decades: less than that is as good as nothing."""
    low, high = np.percentile(relative, [5, 99.5])
    high = max(float(high), 1.5)
    return LogNorm(min(max(float(low), high / 300), 0.7), high)


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


def _plain_log_ticks(axes: Axes) -> None:
    """0.5, 1, 2, 5 rather than powers of ten, the fewer the more decades there are."""
    low, high = sorted(axes.get_ylim())
    span = high / low
    subs = (1.0, 2.0, 3.0, 5.0, 7.0) if span < 8 else (1.0, 2.0, 5.0) if span < 200 else (1.0,)
    axes.yaxis.set_major_locator(LogLocator(subs=subs, numticks=12))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _title(figure: Figure, text: str, **where: Any) -> None:
    figure.suptitle(text, x=0.06 / figure.get_figwidth(), ha="left", fontsize=10, **where)


def _colours(count: int, theme: Theme) -> np.ndarray:
    low, high = theme.layers
    return mpl.colormaps["viridis"](np.linspace(low, high, max(count, 2)))[:count]


def _gray(picture: np.ndarray) -> np.ndarray:
    return (picture.astype(float) @ np.array([0.299, 0.587, 0.114])) / 255


@contextmanager
def _style(theme: Theme) -> Iterator[None]:
    with mpl.rc_context(
        {
            "font.size": 9,
            "figure.facecolor": theme.paper,
            "axes.facecolor": theme.paper,
            "text.color": theme.ink,
            "axes.labelcolor": theme.ink,
            "axes.edgecolor": theme.faint,
            "xtick.color": theme.faint,
            "ytick.color": theme.faint,
            "xtick.labelcolor": theme.ink,
            "ytick.labelcolor": theme.ink,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.linewidth": 0.8,
        }
    ):
        yield


def _png(figure: Figure, dpi: int) -> bytes:
    FigureCanvasAgg(figure)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, pil_kwargs={"compress_level": 4})  # half the time, 5 % larger
    return buffer.getvalue()
