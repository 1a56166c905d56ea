"""One self-contained page from one or several diagnoses: numbers with error bars, figures, and how to read them.

Everything is inside the file, each figure in a light and a dark version, so that it can be mailed or moved.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from pullback.report.canvas import CSS, DARK, LIGHT, Theme
from pullback.report.figures import spectrum_png, tokens_png
from pullback.report.scenes_figure import scenes_png
from pullback.report.wording import lower_bound, percent, plain, plus_minus, samples, short_name, times, unit
from pullback.runs import documents as files
from pullback.runs.files import write_text

TITLE = "How many directions does the task see, and on which tokens?"
SPECTRUM_TEXT = (
    "Each line is the mean over the {unit}s of one layer: on the left the share of the Jacobian’s energy in its j-th "
    "direction, on the right the share κ(j) of the first j together, with bands of two standard errors. A line that "
    "reaches the dashed 90 % within the rank asked for means that a low-rank metric describes the task."
)
SCENES_TEXT = (
    "Both depths in metres on one logarithmic scale, without the sky; AbsRel is the mean relative error. Right: how "
    "much of each task’s energy a patch carries, seen from one of the layers below, where the share of the class token "
    "is given too. Depth is measured in metres, so what is far counts most, and so does the sky, which nobody scores."
)
TOKENS_TEXT = (
    "Brighter patches carry more of the task: moving their features along the leading directions changes the output "
    "most; one scale for all pictures of a figure. The number above a picture is the share that the tokens outside "
    "the patch grid hold."
)
VIEWS_TEXT = (
    "Brighter patches carry more of the task: moving their features along the leading directions changes the output "
    "most; one scale for all pictures of a figure, 1 being the mean over all views of a scene. The number in a view is "
    "the share of the scene’s energy that its camera and register tokens hold."
)

PAGE_DPI = 110
"""About the width of the text column; twice the number would make it four times as long."""

Cell = Callable[[dict[str, Any]], str]
_COLUMNS: dict[str, Cell] = {
    "layer": lambda layer: files.layer_name(layer["layer"]),
    "κ(r), captured energy": lambda layer: f"{percent(layer['kappa'])} <small>r = {layer['rank_used']}</small>",
    "r90": lambda layer: lower_bound(layer["r90"]),
    "effective rank": lambda layer: plus_minus(layer["r_eff_slq"]["mean"], layer["r_eff_slq"]["se"]),
    "CV <small>(null)</small>": lambda layer: _cv(layer["cv"]),
    "regime": lambda layer: f"({layer['regime']}) {escape(layer['regime_title'])}",
    "products per image": lambda layer: f"{layer['products_per_image']:,.0f} <small>{layer['method']}</small>",
    "seconds": lambda layer: f"{layer['seconds']:.1f}",
}


def write_page(out: Path, folders: Sequence[str], note: str = "", scenes: str | None = None) -> Path:
    """`index.html` in ``out`` from the diagnoses in these folders below it, after the figure of its ``scenes``."""
    sections = "\n".join(
        ([] if scenes is None else [_scenes(out / scenes)]) + [_section(out / folder) for folder in folders]
    )
    first = files.read_diagnosis(out / folders[0])
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    warning = f'<p class="note">{escape(note)}</p>' if note else ""
    page = out / files.PAGE
    write_text(
        page,
        f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>pullback: {escape(short_name(first["model"]))}</title>
<style>
{CSS}</style>
</head>
<body>
<header>
<p class="eyebrow">pullback diagnose</p>
<h1>{TITLE}</h1>
<p>A decoder reads the features of a vision transformer. The Jacobian J of its output with respect to the features of
one layer says which changes of the features it notices: the singular values of J how many directions matter, its right
singular vectors on which tokens they live. Every number below is a mean over {unit(first)}s ± its standard error.</p>
{warning}
</header>
{sections}
<footer>{escape(first["machine"])} · seed {first["seed"]} · {escape(versions)} · {escape(first["date"])}</footer>
</body>
</html>
""",
    )
    return page


def _scenes(folder: Path) -> str:
    arrays = files.read_scenes(folder)
    picture = _picture(lambda theme, dpi: scenes_png(arrays, theme, dpi), "Scenes, depths and task energies")
    return f"""<section>
<h2>{escape(str(arrays["model"]))} <span>on {len(arrays["pictures"])} scenes it has never seen</span></h2>
<figure>{picture}<figcaption>{SCENES_TEXT}</figcaption></figure>
</section>"""


def _section(folder: Path) -> str:
    document, arrays = files.read_diagnosis(folder), files.read_importance(folder)
    layers = document["layers"]
    of = unit(document)
    spectrum = _picture(lambda theme, dpi: spectrum_png(document, theme, dpi), "Spectrum of the Jacobian by layer")
    tokens = "\n".join(
        _picture(
            lambda theme, dpi, layer=layer: tokens_png(layer, arrays, theme, dpi),  # type: ignore[misc]
            f"Task energy of the tokens at {files.layer_name(layer['layer'])}",
        )
        for layer in layers
    )
    return f"""<section>
<h2>{escape(short_name(document["model"]))} <span>→ {escape(document["decoder"])}</span></h2>
<p class="facts">{samples(document)} · {_most(document)}{layers[0]["tokens"]} tokens of width
{layers[0]["dim"]} · {layers[0]["output_size"]:,} output numbers · {escape(document["precision"])}</p>
<div class="scroll">{_table(layers, of)}</div>
{_advice(layers)}
<figure>{spectrum}<figcaption>{SPECTRUM_TEXT.format(unit=of)}</figcaption></figure>
<figure>{tokens}<figcaption>{VIEWS_TEXT if of == "scene" else TOKENS_TEXT}</figcaption></figure>
{_convergence(layers)}
</section>"""


def _most(document: dict[str, Any]) -> str:
    """Scenes may differ in size; their layers tell the largest."""
    shapes = {(scene["views"], *scene["size"]) for scene in document.get("scenes", [])}
    return "up to " if len(shapes) > 1 else ""


def _table(layers: list[dict[str, Any]], unit: str) -> str:
    head = "".join(f"<th>{title.replace('image', unit)}</th>" for title in _COLUMNS)
    rows = "".join(
        "<tr>" + "".join(f"<td>{cell(layer)}</td>" for cell in _COLUMNS.values()) + "</tr>" for layer in layers
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _cv(cv: dict[str, Any]) -> str:
    mark = " indistinguishable from a random direction" if cv["indistinguishable_from_random"] else ""
    return f"{plus_minus(cv['mean'], cv['se'])} <small>({plain(cv['null'], 2)}){mark}</small>"


def _advice(layers: list[dict[str, Any]]) -> str:
    holders: dict[str, list[str]] = {}
    for layer in layers:
        holders.setdefault(layer["advice"], []).append(files.layer_name(layer["layer"]))
    items = "".join(f"<li><b>{', '.join(names)}</b> {escape(advice)}</li>" for advice, names in holders.items())
    return f'<ul class="advice">{items}</ul>'


def _convergence(layers: list[dict[str, Any]]) -> str:
    measured = [layer for layer in layers if layer["convergence"]]
    if not measured:
        return ""
    head = "".join(f"<th>{files.layer_name(layer['layer'])}</th>" for layer in measured)
    rows = ""
    for row in zip(*(layer["convergence"] for layer in measured), strict=True):
        cells = "".join(
            f"<td>{max(entry['alignment_error'], 0):.3f} <small>{times(entry['gradient_signal_ratio'])}</small></td>"
            for entry in row
        )
        q = "–" if row[0]["paper_q"] is None else row[0]["paper_q"]
        rows += f"<tr><td>{row[0]['rounds']}</td><td>{q}</td>{cells}</tr>"
    return f"""<details><summary>How fast power iteration gets there</summary>
<p>The share of the subspace that it misses after so many products with JᵀJ (the paper’s q counts those after the
first), and beside it how much more of the signal its first direction carries than a random one.</p>
<div class="scroll"><table><thead><tr><th>rounds in all</th><th>the paper’s q</th>{head}</tr></thead>
<tbody>{rows}</tbody></table></div></details>"""


def _picture(draw: Callable[[Theme, int], bytes], alt: str) -> str:
    light, dark = (_data_uri(draw(theme, PAGE_DPI)) for theme in (LIGHT, DARK))
    return (
        f'<picture><source srcset="{dark}" media="(prefers-color-scheme: dark)"><img src="{light}" alt="{escape(alt)}">'
        "</picture>"
    )


def _data_uri(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")
