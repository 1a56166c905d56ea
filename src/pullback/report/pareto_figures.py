"""The figure of methods at their operating points, drawn from the file of a run alone (needs matplotlib)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from pullback.report.canvas import DPI, LIGHT, Theme, plain_log_ticks, png, style, title
from pullback.report.pareto_console import method_name
from pullback.report.wording import counted, short_name
from pullback.runs import documents as files
from pullback.runs.documents import MEASURES
from pullback.runs.files import write_bytes

# Okabe and Ito's colours, which colour-blind readers tell apart; the strongest is for what removes tokens in stages.
_OURS = "#d55e00"
_COLOURS = ("#0072b2", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7f7f7f", "#8c564b", "#bcbd22")
_MARKERS = "sD^vPX<>"
_ROUNDING = 1e-6
"""Of the largest mean: less is what arithmetic leaves of points that remove nothing, and has no place on a log axis."""

Entry = dict[str, Any]


def draw_pareto(folder: Path) -> list[str]:
    """Draw `pareto.png`; nothing where no point has a value."""
    document = files.read_pareto(folder)
    if not document["points"]:
        return []
    write_bytes(folder / files.PARETO_FIGURE, pareto_png(document))
    return [files.PARETO_FIGURE]


def pareto_png(document: dict[str, Any], theme: Theme = LIGHT, dpi: int = DPI, narrow: bool = False) -> bytes:
    """Draw degradation against operations and, where it was measured, against time, both as shares of the unpruned
    model's. Lines lead through the points of a method that no cheaper one beats, with their intervals; the others are
    faint. Frozen models are hollow, tuned ones filled.

    ``narrow``: the fields stand below each other.
    """
    batch = _largest_batch(document["points"])
    least = _ROUNDING * max(point["mean"] for point in document["points"])
    fields = {"operations": "share of the unpruned model's operations"}
    fields |= {} if batch is None else {"time": f"share of the unpruned model's time, batches of {batch}"}
    with style(theme):
        size = (4.8, 1.6 + 3.0 * len(fields)) if narrow else (1.6 + 4.2 * len(fields), 4.6)
        figure = Figure(figsize=size, layout="constrained")
        shape = (len(fields), 1) if narrow else (1, len(fields))
        grid = figure.subplots(*shape, sharey=True, squeeze=False).flat
        for axes, (name, words) in zip(grid, fields.items(), strict=True):
            for method, (colour, marker) in zip(document["frontiers"], _looks(document["frontiers"]), strict=True):
                own = [
                    p for p in document["points"] if (p["method"], p["tuned"]) == (method["method"], method["tuned"])
                ]
                placed = [(_cost(point, name, batch), point) for point in own if point["mean"] > least]
                _curve(axes, [(cost, p) for cost, p in placed if cost is not None], method, colour, marker)
            axes.set_yscale("log")
            axes.set_xlabel(words)
            axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
            axes.grid(color=theme.faint, alpha=0.25, lw=0.6)
        plain_log_ticks(grid[0])
        for axes in grid if narrow else grid[:1]:
            axes.set_ylabel(MEASURES[document["measure"]])
        handles, labels = grid[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2 if narrow else 4, frameon=False)
        count = counted(document["images_compared"], "image")
        what = f"{short_name(document['model'])}, {document['decoder']}"
        title(figure, f"{what}: mean of {count}, 95 % bootstrap intervals")
        return png(figure, dpi)


def _curve(axes: Axes, placed: list[tuple[float, Entry]], method: dict[str, Any], colour: str, marker: str) -> None:
    """Draw the points of a method, and a line through those that none of its cheaper ones beats."""
    if not placed:
        return
    face = colour if method["tuned"] else "none"
    best = _unbeaten(placed)
    others = [pair for pair in placed if pair not in best]
    if others:
        costs, high = [cost for cost, _ in others], [point["mean"] for _, point in others]
        axes.scatter(costs, high, s=9, marker=marker, facecolors=face, edgecolors=colour, alpha=0.35, lw=0.7)
    means = np.array([point["mean"] for _, point in best])
    bounds = np.array([point["interval"] for _, point in best]).reshape(-1, 2).T
    low = np.minimum(means - bounds[0], 0.999 * means)  # a bar to zero has no place on a logarithmic axis
    axes.errorbar(
        [cost for cost, _ in best], means, yerr=np.clip([low, bounds[1] - means], 0, None), color=colour, marker=marker,
        mfc=face, ms=5, ls="--" if method["tuned"] else "-", lw=2.0 if method["ours"] else 1.2, elinewidth=0.9,
        capsize=2, label=method_name(method),
    )  # fmt: skip


def _unbeaten(placed: list[tuple[float, Entry]]) -> list[tuple[float, Entry]]:
    """Return the points with less degradation than every cheaper one, the cheapest first."""
    kept: list[tuple[float, Entry]] = []
    for cost, point in sorted(placed, key=lambda pair: (pair[0], pair[1]["mean"])):
        if not kept or point["mean"] < kept[-1][1]["mean"]:
            kept.append((cost, point))
    return kept


def _cost(point: Entry, name: str, batch: str | None) -> float | None:
    """Return what a point takes of the unpruned model's operations or time; None where that is not known."""
    if name == "operations":
        return float(point["operations"])
    timing = point["milliseconds"].get(batch)
    return None if timing is None else timing["median"] / timing["unpruned"]


def _largest_batch(points: list[Entry]) -> str | None:
    return max((size for point in points for size in point["milliseconds"]), key=int, default=None)


def _looks(methods: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return a colour and a marker for every method; frozen and tuned points of one method look alike."""
    names = list(dict.fromkeys(method["method"] for method in methods))
    ours = [name for name in names if any(method["ours"] for method in methods if method["method"] == name)]
    others = [name for name in names if name not in ours[:1]]
    looks = {
        name: (_COLOURS[number % len(_COLOURS)], _MARKERS[number % len(_MARKERS)]) for number, name in enumerate(others)
    }
    looks |= dict.fromkeys(ours[:1], (_OURS, "o"))
    return [looks[method["method"]] for method in methods]
