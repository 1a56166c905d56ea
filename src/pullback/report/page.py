"""The page of a run: numbers with error bars, figures, and how to read them, in one file.

Each figure is inside the page in a light and a dark version, and where words would become too small on a phone in a
narrow one as well; pictures of tokens are single pictures that find their own places. What pages say is in
`templates/`.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from pullback.report import wording
from pullback.report.canvas import DARK, LIGHT
from pullback.report.fates import lay_fates_over
from pullback.report.figures import MAX_IMAGES, scene_name, scenes_png, spectrum_png, view_energies
from pullback.report.heat import lay_over, limits, split_energy
from pullback.report.html import colour_bar, data_uri, jpeg_uri, write_html
from pullback.report.pareto_console import BANKS, TESTED, by_method, legend, method_name, sentence
from pullback.report.pareto_console import notes as pareto_notes
from pullback.report.pareto_figures import pareto_png
from pullback.report.prune_console import by_rule, notes
from pullback.report.prune_figures import curves_png, known, output_png, panel_name
from pullback.report.run_figures import plan_png, training_png
from pullback.runs import documents as files

PAGE_DPI = 110
"""About the width of the text column; twice the number would make the file four times as long."""


def write_page_of(folder: Path) -> Path | None:
    """Write the page of a folder, whichever run it holds; None where that has no page of its own (demo scenes)."""
    if (folder / files.PARETO).is_file():
        return write_pareto_page(folder)
    if (folder / files.SUMMARY).is_file():
        return write_prune_page(folder)
    if (folder / files.PLAN).is_file():
        return write_plan_page(folder)
    if (folder / files.METRICS).is_file():
        return write_training_page(folder)
    return write_page(folder, ["."]) if (folder / files.DIAGNOSIS).is_file() else None


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
    return write_html(out, "page.html.j2", content)


def write_prune_page(out: Path) -> Path:
    """Write `index.html` into the folder of a comparison of pruning rules."""
    document, arrays = files.read_summary(out), files.read_examples(out)
    dense = "before" in arrays
    content = {
        "document": document,
        "measure": files.MEASURES[document["measure"]],
        "rules": by_rule(document),
        "notes": notes(document),
        "curves": _figure(partial(curves_png, document), narrow=True) if document["rules"] else None,
        "images": [_fates(arrays, image) for image in range(len(arrays["pictures"]))],
        "output": _figure(partial(output_png, document, arrays)) if dense else None,
    }
    return write_html(out, "prune.html.j2", content)


def write_pareto_page(out: Path) -> Path:
    """Write `index.html` into the folder of methods at their operating points."""
    document = files.read_pareto(out)
    content = {
        "document": document,
        "measure": files.MEASURES[document["measure"]],
        "methods": [(method_name(method), method["points"], points) for method, points in by_method(document)],
        "points": sorted(document["points"], key=lambda point: -point["operations"]),
        "legend": legend(document),
        "tests": [sentence(test) for test in document["tests"]],
        "tested": TESTED,
        "banks": BANKS,
        "notes": pareto_notes(document),
        "sizes": sorted({size for point in document["points"] for size in point["milliseconds"]}, key=int),
        "figure": _figure(partial(pareto_png, document), narrow=True) if document["points"] else None,
    }
    return write_html(out, "pareto.html.j2", content)


def write_plan_page(out: Path) -> Path:
    """Write `index.html` into the folder of a planned model."""
    document = files.read_plan(out)
    figure = _figure(partial(plan_png, document), narrow=True) if document["trials"] else None
    return write_html(out, "plan.html.j2", {"document": document, "figure": figure})


def write_training_page(out: Path) -> Path:
    """Write `index.html` into the folder of a training run."""
    rows, model = files.read_training(out)
    figure = _figure(partial(training_png, rows), narrow=True) if rows else None
    return write_html(out, "train.html.j2", {"folder": out.name, "rows": rows, "model": model, "figure": figure})


# Diagnoses


def _scenes(folder: Path) -> dict[str, Any]:
    """Collect what the section about the demo's scenes shows."""
    arrays = files.read_scenes(folder)
    return {
        "model": str(arrays["model"]),
        "count": len(arrays["pictures"]),
        "figure": _figure(partial(scenes_png, arrays)),
    }


def _tokens(layers: list[dict[str, Any]]) -> str:
    """Write "65 tokens of width 192"; where layers differ, as features and registers do, with their names behind it."""
    names: dict[tuple[int, int], list[str]] = {}
    for layer in layers:
        names.setdefault((layer["tokens"], layer["dim"]), []).append(files.layer_name(layer["layer"]))
    shapes = {f"{tokens} tokens of width {dim}": ", ".join(own) for (tokens, dim), own in names.items()}
    return " · ".join(shape if len(shapes) == 1 else f"{shape} ({own})" for shape, own in shapes.items())


def _section(folder: Path) -> dict[str, Any]:
    """Collect what the section about one diagnosis shows."""
    document, arrays = files.read_diagnosis(folder), files.read_importance(folder)
    layers = document["layers"]
    measured = [layer for layer in layers if layer["convergence"]]
    shapes = {(scene["views"], *scene["size"]) for scene in document.get("scenes", [])}
    names = [files.layer_name(layer["layer"]) for layer in layers if files.in_picture(layer)]
    return {
        "document": document,
        "unit": wording.unit(document),
        "sizes_differ": len(shapes) > 1,
        "tokens_of": _tokens(layers),
        "spectrum": _figure(partial(spectrum_png, document), narrow=True),
        "tokens": [] if not names else _views(arrays, names) if "views" in arrays else [_images(arrays, names)],
        "registers": [files.layer_name(layer["layer"]) for layer in layers if not files.in_picture(layer)],
        "measured": measured,
        "rounds": list(zip(*(layer["convergence"] for layer in measured), strict=True)),
    }


def _images(arrays: Mapping[str, np.ndarray], names: Sequence[str]) -> dict[str, Any]:
    """Collect the pictures of images and, for each layer, their patches in the colours of task energy."""
    pictures, prefix = arrays["thumbnails"][:MAX_IMAGES], int(arrays["prefix"])
    layers = []
    for name in names:
        energy = np.square(arrays[name][: len(pictures)].astype(float))
        relative, outside = split_energy(energy, prefix, arrays["grid"])
        layers.append(_layer(name, pictures, relative, [wording.outside_patches(prefix, part) for part in outside]))
    return {"name": "", "seen": _seen(pictures), "layers": layers}


def _views(arrays: dict[str, np.ndarray], names: Sequence[str]) -> list[dict[str, Any]]:
    """Collect the views of the first scenes in the same way."""
    groups = []
    for scene in range(len(arrays["views"])):
        if files.thumbnails_of(scene) not in arrays:
            continue
        pictures, layers = arrays[files.thumbnails_of(scene)], []
        for name in names:
            relative, outside = view_energies(arrays, name, scene)
            said = [f"camera, registers {wording.share(part)}" for part in outside]
            layers.append(_layer(name, pictures, relative[: len(pictures)], said[: len(pictures)]))
        named = scene_name(arrays, scene, len(pictures))
        groups.append({"name": named, "seen": _seen(pictures), "layers": layers})
    return groups


def _layer(name: str, pictures: np.ndarray, relative: np.ndarray, said: Sequence[str]) -> dict[str, Any]:
    scale = limits(relative)
    cells = [
        {"picture": jpeg_uri(lay_over(picture, own, scale)), "note": note, "alt": f"Task energy at {name}"}
        for picture, own, note in zip(pictures, relative, said, strict=True)
    ]
    return {"name": name, "bar": colour_bar(scale), "cells": cells}


def _seen(pictures: np.ndarray) -> list[dict[str, str]]:
    return [{"picture": jpeg_uri(Image.fromarray(picture)), "note": "", "alt": "Picture"} for picture in pictures]


# Pruning


def _fates(arrays: dict[str, np.ndarray], image: int) -> dict[str, Any]:
    """Collect a picture and what became of its patches under every stored rule."""
    picture = arrays["pictures"][image]
    cells = [{"picture": jpeg_uri(Image.fromarray(picture)), "note": "picture", "alt": "Picture"}]
    for panel in range(len(arrays["ratios"])):
        value = wording.plain(known(arrays["values"][panel, image]))
        laid = lay_fates_over(picture, arrays["fates"][panel, image], arrays["partners"][panel, image])
        name = panel_name(arrays, panel).replace("\n", ", ")
        cells.append({"picture": jpeg_uri(laid), "note": f"{name}: {value}", "alt": name})
    return {"name": str(arrays["names"][image]), "cells": cells}


# Figures


def _figure(draw: Callable[..., bytes], narrow: bool = False) -> dict[str, str]:
    """Draw a figure in both themes, and in both widths where there is a ``narrow`` one, as addresses."""
    drawn = {"light": _webp(draw(theme=LIGHT, dpi=PAGE_DPI)), "dark": _webp(draw(theme=DARK, dpi=PAGE_DPI))}
    if narrow:
        drawn["narrow_light"] = _webp(draw(theme=LIGHT, dpi=PAGE_DPI, narrow=True))
        drawn["narrow_dark"] = _webp(draw(theme=DARK, dpi=PAGE_DPI, narrow=True))
    return {"narrow_light": "", "narrow_dark": "", **drawn}


def _webp(png: bytes) -> str:
    """Make a picture several times smaller than a PNG of it, which words in it survive."""
    buffer = io.BytesIO()
    Image.open(io.BytesIO(png)).convert("RGB").save(buffer, "WEBP", quality=90, method=3)
    return data_uri(buffer.getvalue(), "webp")
