"""Figures of a pruning comparison, drawn from the files in its folder and nothing else (needs matplotlib)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
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
    title_room,
)
from pullback.report.fates import DROPPED_TINT, MERGED_TINT, lay_fates_over
from pullback.report.wording import after_blocks, counted, plain, short_name
from pullback.runs import documents as prune_files
from pullback.runs.documents import MEASURES
from pullback.runs.files import write_bytes

# Okabe and Ito's colours, which colour-blind readers tell apart; the reference score takes the strongest.
_REFERENCE = "#d55e00"
_COLOURS = ("#0072b2", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7f7f7f", "#8c564b", "#bcbd22")
_MARKERS = "sD^vPX<>"
_SIDE = 1.6  # inches
_IMAGES, _PANELS = 3, 5  # of a figure of pictures, so that its words can be read where it is shown small


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


def curves_png(document: dict[str, Any], theme: Theme = LIGHT, dpi: int = DPI, narrow: bool = False) -> bytes:
    """Degradation against the ratio. One field for each preset; presets with a score of their own are dashed in all.

    ``narrow``: the fields stand below each other.
    """
    lines: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for rule in document["rules"]:
        lines.setdefault((rule["preset"], rule["score"]), []).append(rule)
    scores = list(dict.fromkeys(rule["score"] for rule in document["rules"] if rule["score"] in document["scores"]))
    looks = _looks(scores, document["reference"])
    own = [name for name, entry in PRESETS.items() if entry.score]
    literature = {name: rules for name, rules in lines.items() if name[0] in own}
    fields = [name for name in document["presets"] if name not in own] or [""]
    with style(theme):
        size = (4.8, 1.3 + 2.9 * len(fields)) if narrow else (1.2 + 3.6 * max(len(fields), 1.4), 3.9)
        figure = Figure(figsize=size, layout="constrained")
        shape = (len(fields), 1) if narrow else (1, len(fields))
        row = figure.subplots(*shape, sharey=True, squeeze=False).flat
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
        for axes in row if narrow else row[:1]:
            axes.set_ylabel(MEASURES[document["measure"]])
        handles = {
            label: handle for axes in row for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(
            handles.values(),
            handles.keys(),
            loc="outside lower center",
            ncols=min(len(handles), 2 if narrow else 4),
            frameon=False,
        )
        count = document["images_compared"]
        title(figure, f"{_subject(document)}: mean of {counted(count, 'image')}, 95 % bootstrap intervals")
        return png(figure, dpi)


def tokens_png(document: dict[str, Any], arrays: dict[str, np.ndarray], theme: Theme = LIGHT, dpi: int = DPI) -> bytes:
    """A few images, and what became of their patches under several rules: kept, merged into another, dropped."""
    pictures, panels = arrays["pictures"][:_IMAGES], chosen_panels(arrays["ratios"])
    count, (height, width) = len(pictures), pictures.shape[1:3]
    words = f"{_subject(document)}: what became of the patches, {MEASURES[document['measure']]}"
    with style(theme):
        room = title_room(words, (1 + len(panels)) * (_SIDE + PictureGrid.GAP) + PictureGrid.GAP)
        grid = PictureGrid(count, 1 + len(panels), _SIDE, height / width, (0.0, 0.0, 0.66 + room, 0.3))
        grid.cells[0][0].set_title("picture", fontsize=9, pad=4)
        for panel, axes in zip(panels, grid.cells[0][1:], strict=True):
            axes.set_title(panel_name(arrays, panel), fontsize=9, pad=4)
        for image, (seen, *shown) in enumerate(grid.cells):
            seen.imshow(pictures[image])
            for panel, axes in zip(panels, shown, strict=True):
                axes.imshow(
                    lay_fates_over(pictures[image], arrays["fates"][panel, image], arrays["partners"][panel, image])
                )
                corner_note(axes, plain(known(arrays["values"][panel, image])))
        swatches = [
            Patch(facecolor=theme.faint, label="kept: the picture itself"),
            Patch(facecolor=_tint(MERGED_TINT), label="merged along the line"),
            Patch(facecolor=_tint(DROPPED_TINT), edgecolor=theme.faint, label="dropped"),
        ]
        grid.figure.legend(
            handles=swatches, loc="lower left", ncols=3, frameon=False, fontsize=9, handlelength=1.2,
            bbox_to_anchor=(0, 0), borderaxespad=0.3,
        )  # fmt: skip
        title_at_the_top(grid.figure, words)
        return png(grid.figure, dpi)


def chosen_panels(ratios: np.ndarray) -> list[int]:
    """Choose at most `_PANELS` of the stored panels for a figure: ratios between the lowest and the highest go first.

    The panels begin with one rule at growing ratios; what follows is at the highest.
    """
    lowest, highest = ratios.min(), ratios.max()
    between = [panel for panel, ratio in enumerate(ratios) if lowest < ratio < highest]
    too_many = max(0, len(ratios) - _PANELS)
    left_out = set(between[:too_many])
    return [panel for panel in range(len(ratios)) if panel not in left_out][:_PANELS]


def output_png(document: dict[str, Any], arrays: dict[str, np.ndarray], theme: Theme = LIGHT, dpi: int = DPI) -> bytes:
    """Each image, its output by the unpruned model, and by the pruned ones."""
    pictures, before, after = arrays["pictures"][:_IMAGES], arrays["before"], arrays["after"]
    count, (height, width) = len(pictures), pictures.shape[1:3]
    colours = "viridis_r" if document["measure"] == "silog" else "magma"
    words = f"{_subject(document)}: output before and after, and {MEASURES[document['measure']]}"
    panels = chosen_panels(arrays["ratios"])
    with style(theme):
        room = title_room(words, (2 + len(panels)) * (_SIDE + PictureGrid.GAP) + PictureGrid.GAP + 0.7)
        grid = PictureGrid(count, 2 + len(panels), _SIDE, height / width, (0.0, 0.7, 0.66 + room, 0.0))
        heads = ["picture", "unpruned", *(panel_name(arrays, panel) for panel in panels)]
        for axes, text in zip(grid.cells[0], heads, strict=True):
            axes.set_title(text, fontsize=9, pad=4)
        for image, (seen, first, *shown) in enumerate(grid.cells):
            scale = _scale(before[image], document["measure"])
            seen.imshow(pictures[image])
            first.imshow(before[image], cmap=colours, norm=scale)
            for panel, axes in zip(panels, shown, strict=True):
                axes.imshow(after[panel, image], cmap=colours, norm=scale)
                corner_note(axes, plain(known(arrays["values"][panel, image])))
            _bar(grid, image, len(heads), ScalarMappable(scale, colours))
        title_at_the_top(grid.figure, words)
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


def _tint(colour: tuple[int, int, int]) -> tuple[float, ...]:
    return tuple(part / 255 for part in colour)


def panel_name(arrays: dict[str, np.ndarray], panel: int) -> str:
    """Write which rule a panel shows."""
    preset, score = str(arrays["presets"][panel]), str(arrays["scores"][panel])
    rule = preset if preset in PRESETS and PRESETS[preset].score == score else f"{preset}, {score}"
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


def known(value: float) -> float | None:
    """Return None for NaN, which stands for a value that does not exist."""
    return None if np.isnan(value) else float(value)


def _subject(document: dict[str, Any]) -> str:
    return f"{short_name(document['model'])}, {document['decoder']}, {after_blocks(document['stages'])}"
