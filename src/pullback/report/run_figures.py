"""Figures of a training run and of a search for a plan, drawn from their files alone (needs matplotlib)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from pullback.report.canvas import DPI, LIGHT, Theme, png, style, title
from pullback.report.wording import counted, short_name
from pullback.runs import documents as files
from pullback.runs.files import write_bytes

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
_MARKERS = "osD^vP"
_LOSS, _SCORE = "loss", "score"
_POSTERIOR = ("kl", "log10_concentration")  # of a bottleneck, in units of their own


def draw_training(folder: Path) -> list[str]:
    """Draw `training.png`; nothing where no validation has been written."""
    rows, _ = files.read_training(folder)
    if not rows:
        return []
    write_bytes(folder / files.TRAINING_FIGURE, training_png(rows))
    return [files.TRAINING_FIGURE]


def draw_plan(folder: Path) -> list[str]:
    """Draw `plan.png`; nothing where no trials are known."""
    document = files.read_plan(folder)
    if not document["trials"]:
        return []
    write_bytes(folder / files.PLAN_FIGURE, plan_png(document))
    return [files.PLAN_FIGURE]


def training_png(rows: list[dict[str, Any]], theme: Theme = LIGHT, dpi: int = DPI, narrow: bool = False) -> bytes:
    """Draw the losses of a run, then the scores on held-out images, then what a posterior is like, against the steps.

    The score that decides which weights are kept, which the title tells, is left out beside others; errors become
    bands.
    """
    series = _series(rows)
    fields: dict[str, list[str]] = {}
    for label in ("training loss", "on held-out images", "posterior on held-out images"):
        fields |= {label: names} if (names := [name for name in series if _panel(name) == label]) else {}
    with style(theme):
        size = (4.8, 2.9 * len(fields) + 0.5) if narrow else (4.8 * max(2, len(fields)), 3.4)
        figure = Figure(figsize=size, layout="constrained")
        shape = (len(fields), 1) if narrow else (1, len(fields))
        for axes, (label, names) in zip(figure.subplots(*shape, squeeze=False).flat, fields.items(), strict=True):
            for place, name in enumerate(names):
                again, own = divmod(place, len(_COLOURS))
                colour, look = _COLOURS[own], {"marker": _MARKERS[own - again], "ls": ":" if again else "-"}
                steps, values = zip(*series[name].items(), strict=True)
                axes.plot(steps, values, color=colour, ms=4, label=name.replace("_", " "), **look)
                errors = [2 * (row.get(f"{name}_se") or 0.0) for row in rows if row["step"] in series[name]]
                low, high = ([v + sign * e for v, e in zip(values, errors, strict=True)] for sign in (-1, 1))
                axes.fill_between(steps, low, high, color=colour, alpha=0.15, lw=0)
            axes.set(xlabel="step", ylabel=label)
            axes.grid(axis="y", color=theme.faint, alpha=0.25, lw=0.6)
            beside = {"bbox_to_anchor": (1, 1), "loc": "upper left"} if len(names) > len(_COLOURS) else {}
            axes.legend(frameon=False, fontsize=8, **beside)
        best = max((row for row in rows if row.get(_SCORE) is not None), key=lambda row: row[_SCORE], default=None)
        words = "" if best is None else f", best score {best[_SCORE]:.4g} at step {best['step']:,}"
        title(figure, f"{counted(rows[-1]['step'], 'step')}{words}")
        return png(figure, dpi)


def _series(rows: list[dict[str, Any]]) -> dict[str, dict[int, float]]:
    """Return what was written at each step, by name, without errors, and without the score where there are others."""
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name != "step"]
    series = {name: {row["step"]: row[name] for row in rows if row.get(name) is not None} for name in names}
    series = {name: values for name, values in series.items() if values and not name.endswith("_se")}
    if _SCORE in series and any(_LOSS not in name for name in series if name != _SCORE):
        del series[_SCORE]
    return series


def _panel(name: str) -> str:
    if _LOSS in name:
        return "training loss"
    return "posterior on held-out images" if name in _POSTERIOR else "on held-out images"


def plan_png(document: dict[str, Any], theme: Theme = LIGHT, dpi: int = DPI, narrow: bool = False) -> bytes:
    """Draw degradation against operations for every plan that was tried, in the colour of its picture's size, with the
    budget, the choice and the alternatives."""
    name, limit = document["budget"]["name"], document["budget"]["limit"]
    known = [trial for trial in document["trials"] if trial["cost"] is not None and trial["degradation"] is not None]
    sizes = sorted({trial["size"] for trial in known} - {None}, reverse=True)
    with style(theme):
        figure = Figure(figsize=(4.8, 4.8) if narrow else (7.6, 4.4), layout="constrained")
        axes = figure.subplots()
        for place, size in enumerate([None, *sizes]):
            own = [trial for trial in known if trial["size"] == size]
            axes.plot(
                [trial["cost"] for trial in own],
                [trial["degradation"] for trial in own],
                color=_COLOURS[place % len(_COLOURS)],
                marker=_MARKERS[place % len(_MARKERS)],
                ms=4,
                ls="",
                alpha=0.8,
                label="pictures as they come" if size is None else f"{size} px",
            )
        for other in document["alternatives"]:
            axes.plot([other["flops"]], [other["degradation"]["mean"]], "*", ms=11, color=theme.faint)
            axes.annotate(
                other["name"], (other["flops"], other["degradation"]["mean"]), (6, 4), textcoords="offset points",
                fontsize=8, color=theme.ink,
            )  # fmt: skip
        line: dict[str, Any] = {"color": theme.faint, "lw": 0.9, "ls": (0, (4, 3)), "label": "the budget"}
        if name == "flops":
            axes.axvline(limit, **line)
        elif name == "degradation":
            axes.axhline(limit, **line)
        chosen = document["flops"], document["degradation"]
        axes.plot(*([value] for value in chosen), "o", ms=13, mfc="none", mec=theme.ink, label="the plan")
        axes.set_xlabel("share of the operations")
        axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set_ylabel("degradation of the output")
        axes.grid(color=theme.faint, alpha=0.25, lw=0.6)
        beside = {"bbox_to_anchor": (1, 1), "loc": "upper left"} if not narrow else {}
        axes.legend(frameon=False, fontsize=8, **beside)
        title(figure, f"{short_name(document['model'])}: {counted(document['measured'], 'plan')} tried")
        return png(figure, dpi)
