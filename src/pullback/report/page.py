"""A self-contained page from one or several diagnoses: numbers with error bars, figures, and how to read them.

Everything is inside the file, each figure in a light and a dark version, so that it can be mailed or moved. What the
page says is in `templates/page.html.j2`, how it looks in `templates/page.css.j2`.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from pullback.report import wording
from pullback.report.canvas import DARK, LIGHT
from pullback.report.figures import scenes_png, spectrum_png, tokens_png
from pullback.runs import documents as files
from pullback.runs.files import write_text

PAGE_DPI = 110
"""About the width of the text column; twice the number would make the file four times as long."""
_FILTERS = (
    *("counted", "findings", "lower_bound", "missed", "percent", "plain", "regime", "sample_count", "samples"),
    *("short_name", "times"),
)


def write_page(out: Path, folders: Sequence[str], note: str = "", scenes: str | None = None) -> Path:
    """Write `index.html` into ``out`` from the diagnoses in these folders below it, after the figure of ``scenes``."""
    sections = [_section(out / folder) for folder in folders]
    content = {
        "first": sections[0]["document"],
        "unit": sections[0]["unit"],
        "note": note,
        "scenes": None if scenes is None else _scenes(out / scenes),
        "sections": sections,
    }
    page = out / files.PAGE
    write_text(page, _templates().get_template("page.html.j2").render(content))
    return page


def _templates() -> Environment:
    """Set Jinja up to escape everything, to refuse missing values, and to word numbers as everywhere else."""
    templates = Environment(
        loader=PackageLoader("pullback.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters |= {name: getattr(wording, name) for name in _FILTERS}
    templates.filters |= {"layer_name": files.layer_name, "plus_minus": _plus_minus}
    return templates


def _plus_minus(summary: dict[str, Any]) -> str:
    return wording.plus_minus(summary["mean"], summary["se"])


def _scenes(folder: Path) -> dict[str, Any]:
    """Collect what the section about the demo's scenes shows."""
    arrays = files.read_scenes(folder)
    return {
        "model": str(arrays["model"]),
        "count": len(arrays["pictures"]),
        "figure": _figure(partial(scenes_png, arrays)),
    }


def _section(folder: Path) -> dict[str, Any]:
    """Collect what the section about one diagnosis shows."""
    document, arrays = files.read_diagnosis(folder), files.read_importance(folder)
    layers = document["layers"]
    measured = [layer for layer in layers if layer["convergence"]]
    shapes = {(scene["views"], *scene["size"]) for scene in document.get("scenes", [])}
    return {
        "document": document,
        "unit": wording.unit(document),
        "sizes_differ": len(shapes) > 1,
        "spectrum": _figure(partial(spectrum_png, document)),
        "tokens": [(layer["layer"], _figure(partial(tokens_png, layer, arrays))) for layer in layers],
        "measured": measured,
        "rounds": list(zip(*(layer["convergence"] for layer in measured), strict=True)),
    }


def _figure(draw: Callable[..., bytes]) -> dict[str, str]:
    """Draw a figure in both themes, as data URIs."""
    drawn = {"light": draw(theme=LIGHT, dpi=PAGE_DPI), "dark": draw(theme=DARK, dpi=PAGE_DPI)}
    return {name: f"data:image/png;base64,{base64.b64encode(png).decode('ascii')}" for name, png in drawn.items()}
