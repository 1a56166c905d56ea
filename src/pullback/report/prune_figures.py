"""Figures of a pruning comparison, drawn from the files in its folder and nothing else (needs matplotlib)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from pullback.registry import PRESETS
from pullback.report.canvas import (
    DPI,
    LIGHT,
    PictureGrid,
    Theme,
    corner_note,
    plain_log_ticks,
    png,
    style,
    title,
    title_at_the_top,
)
from pullback.report.wording import plain, short_name
from pullback.runs import documents as prune_files
from pullback.runs.documents import DROPPED, MEASURES, MERGED
from pullback.runs.files import write_bytes

# Okabe and Ito's colours, which colour-blind readers tell apart; the reference score takes the strongest.
_REFERENCE = "#d55e00"
_COLOURS = ("#0072b2", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7f7f7f", "#8c564b", "#bcbd22")
_MARKERS = "sD^vPX<>"
_MERGED_TINT, _DROPPED_TINT = (0.0, 0.45, 0.70), (1.0, 1.0, 1.0)
_SIDE = 1.6  # inches


def draw_prune(folder: Path) -> list[str]:
    """Draw `prune.png`, `tokens.png` and, of dense decoders, `output.png`; return their names."""
    document, arrays = prune_files.read_summary(folder), prune_files.read_examples(folder)
    figures = {prune_files.TOKENS_FIGURE: tokens_png(document, arrays)}
    if document["rules"]:
        figures = {prune_files.CURVES_FIGURE: curves_png(document), **figures}
    if "before" in arrays:
        figures[prune_files.OUTPUT_FIGURE] = output_png(document, arrays)
    for name, content in figures.items():
        write_bytes(folder / name, content)
    return list(figures)


def curves_png(document: dict[str, Any], theme: Theme = LIGHT, dpi: int = DPI) -> bytes:
    """Degradation against the ratio. One field for each preset; presets with a score of their own are dashed in all."""
    lines: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for rule in document["rules"]:
        lines.setdefault((rule["preset"], rule["score"]), []).append(rule)
    scores = list(dict.fromkeys(rule["score"] for rule in document["rules"] if rule["score"] in document["scores"]))
    looks = _looks(scores, document["reference"])
    own = [name for name, entry in PRESETS.items() if entry.score]
    literature = {name: rules for name, rules in lines.items() if name[0] in own}
    fields = [name for name in document["presets"] if name not in own] or [""]
    with style(theme):
        figure = Figure(figsize=(1.2 + 3.6 * len(fields), 3.9), layout="constrained")
        row = figure.subplots(1, len(fields), sharey=True, squeeze=False)[0]
        for axes, preset in zip(row, fields, strict=True):
            for (name, score), rules in lines.items():
                if name == preset:
                    colour, marker = looks[score]
                    _curve(axes, rules, score, colour, marker, "-", 2.2 if score == document["reference"] else 1.3)
            for number, ((name, _), rules) in enumerate(literature.items()):
                _curve(axes, rules, f"preset {name}", theme.faint, "odv"[number % 3], (0, (4, 2)), 1.2)
            axes.set_yscale("log")
            axes.set_xlabel("share of the patch tokens removed, η")
            axes.set_title(f"preset {preset}" if preset else "presets", fontsize=9)
            axes.set_xticks(sorted({rule["ratio"] for rule in document["rules"]}))
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.grid(axis="y", color=theme.faint, alpha=0.25, lw=0.6)
        plain_log_ticks(row[0])
        row[0].set_ylabel(MEASURES[document["measure"]])
        handles = {
            label: handle for axes in row for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(
            handles.values(), handles.keys(), loc="outside lower center", ncols=min(len(handles), 4), frameon=False
        )
        count = document["images_compared"]
        title(figure, f"{_subject(document)}: mean of {count} images, 95 % bootstrap intervals")
        return png(figure, dpi)


def tokens_png(document: dict[str, Any], arrays: dict[str, np.ndarray], theme: Theme = LIGHT, dpi: int = DPI) -> bytes:
    """Each image, and what became of its patches under several rules: kept, merged into another, dropped."""
    pictures, fates, partners = arrays["pictures"], arrays["fates"], arrays["partners"]
    count, (height, width) = len(pictures), pictures.shape[1:3]
    with style(theme):
        grid = PictureGrid(count, 1 + len(fates), _SIDE, height / width, (0.0, 0.0, 0.66, 0.3))
        grid.cells[0][0].set_title("picture", fontsize=8, pad=4)
        for panel, axes in enumerate(grid.cells[0][1:]):
            axes.set_title(_panel_name(arrays, panel), fontsize=8, pad=4)
        for image, (seen, *shown) in enumerate(grid.cells):
            seen.imshow(pictures[image])
            for panel, axes in enumerate(shown):
                _lay_fates_over(axes, pictures[image], fates[panel, image], partners[panel, image])
                corner_note(axes, plain(_known(arrays["values"][panel, image])))
        swatches = [
            Patch(facecolor=theme.faint, label="kept: the picture itself"),
            Patch(facecolor=_MERGED_TINT, label="merged along the line"),
            Patch(facecolor=_DROPPED_TINT, edgecolor=theme.faint, label="dropped"),
        ]
        grid.figure.legend(
            handles=swatches, loc="lower left", ncols=3, frameon=False, fontsize=8, handlelength=1.2,
            bbox_to_anchor=(0, 0), borderaxespad=0.3,
        )  # fmt: skip
        title_at_the_top(
            grid.figure, f"{_subject(document)}: what became of the patches, {MEASURES[document['measure']]}"
        )
        return png(grid.figure, dpi)


def output_png(document: dict[str, Any], arrays: dict[str, np.ndarray], theme: Theme = LIGHT, dpi: int = DPI) -> bytes:
    """Each image, its output by the unpruned model, and by the pruned ones."""
    pictures, before, after = arrays["pictures"], arrays["before"], arrays["after"]
    count, (height, width) = len(pictures), pictures.shape[1:3]
    colours = "viridis_r" if document["measure"] == "silog" else "magma"
    with style(theme):
        grid = PictureGrid(count, 2 + len(after), _SIDE, height / width, (0.0, 0.7, 0.66, 0.0))
        heads = ["picture", "unpruned", *(_panel_name(arrays, panel) for panel in range(len(after)))]
        for axes, text in zip(grid.cells[0], heads, strict=True):
            axes.set_title(text, fontsize=8, pad=4)
        for image, (seen, first, *shown) in enumerate(grid.cells):
            scale = _scale(before[image], document["measure"])
            seen.imshow(pictures[image])
            first.imshow(before[image], cmap=colours, norm=scale)
            for panel, axes in enumerate(shown):
                axes.imshow(after[panel, image], cmap=colours, norm=scale)
                corner_note(axes, plain(_known(arrays["values"][panel, image])))
            _bar(grid, image, len(heads), ScalarMappable(scale, colours))
        what = f"output before and after, and {MEASURES[document['measure']]}"
        title_at_the_top(grid.figure, f"{_subject(document)}: {what}")
        return png(grid.figure, dpi)


def _curve(
    axes: Axes, rules: list[dict[str, Any]], label: str, colour: str, marker: str, dashes: Any, width: float
) -> None:
    """Draw one curve; a mean of exactly 0 has no place on a logarithmic axis and is left out."""
    shown = sorted((rule for rule in rules if rule["mean"] > 0), key=lambda rule: rule["ratio"])
    ratios, means = ([rule[name] for rule in shown] for name in ("ratio", "mean"))
    bounds = np.array([rule["interval"] for rule in shown]).reshape(-1, 2).T
    if len(shown):
        low = np.maximum(bounds[0], 1e-3 * np.array(means))
        axes.fill_between(ratios, low, bounds[1], color=colour, alpha=0.12, lw=0)
    axes.plot(ratios, means, color=colour, ls=dashes, lw=width, marker=marker, ms=4, label=label)


def _looks(scores: list[str], reference: str) -> dict[str, tuple[str, str]]:
    """Colour and marker of every score."""
    others = [score for score in scores if score != reference]
    looks = {
        score: (_COLOURS[number % len(_COLOURS)], _MARKERS[number % len(_MARKERS)])
        for number, score in enumerate(others)
    }
    return {reference: (_REFERENCE, "o"), **looks}


def _lay_fates_over(axes: Axes, picture: np.ndarray, fates: np.ndarray, partners: np.ndarray) -> None:
    """Tint merged patches and join them to their partners; dropped ones become nearly white."""
    height, width = picture.shape[:2]
    rows, columns = fates.shape
    overlay = np.zeros((rows, columns, 4))
    overlay[fates == MERGED] = (*_MERGED_TINT, 0.45)
    overlay[fates == DROPPED] = (*_DROPPED_TINT, 0.88)
    axes.imshow(picture)
    axes.imshow(overlay, interpolation="nearest", extent=(-0.5, width - 0.5, height - 0.5, -0.5))
    row, column = np.nonzero(fates == MERGED)
    onto = partners[row, column]
    inside = onto >= 0  # a partner that is no patch has no place in the picture
    centres = [np.stack([(c + 0.5) * width / columns, (r + 0.5) * height / rows], 1) - 0.5
               for r, c in ((row, column), (onto // columns, onto % columns))]  # fmt: skip
    segments = np.stack(centres, 1)[inside]
    axes.add_collection(LineCollection(list(segments), colors="white", linewidths=0.45, alpha=0.75))
    axes.set_xlim(-0.5, width - 0.5)
    axes.set_ylim(height - 0.5, -0.5)


def _panel_name(arrays: dict[str, np.ndarray], panel: int) -> str:
    preset, score = str(arrays["presets"][panel]), str(arrays["scores"][panel])
    rule = preset if preset == score else f"{preset}, {score}"
    return f"{rule}\nη = {arrays['ratios'][panel]:g}"


def _scale(values: np.ndarray, measure: str) -> Normalize:
    """Return the colour scale of the unpruned output, so that a pruned one which leaves it is seen."""
    positive = values[values > 0]
    if measure == "silog" and positive.size:
        low, high = np.percentile(positive, [0.5, 99.5])
        return LogNorm(float(low), float(max(high, 1.001 * low)))
    low, high = np.percentile(values, [0.5, 99.5])
    return Normalize(float(low), float(max(high, low + 1e-12)))


def _bar(grid: PictureGrid, row: int, column: int, colours: ScalarMappable) -> None:
    """Draw the colour bar of one row, at its right."""
    x, y = grid.corner(row, column)
    axes = grid.place(x + 0.05, y + 0.1, 0.09, grid.tall - 0.2)
    bar = grid.figure.colorbar(colours, cax=axes, extend="both")
    if isinstance(colours.norm, LogNorm):
        plain_log_ticks(axes)
    bar.outline.set_visible(False)
    axes.tick_params(labelsize=7, pad=1)


def _known(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def _subject(document: dict[str, Any]) -> str:
    stages = "+".join(map(str, document["stages"]))
    return f"{short_name(document['model'])}, {document['decoder']}, after block {stages}"
