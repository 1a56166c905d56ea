"""Numbers and findings in words, the same in the terminal, in figures and on pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pullback.errors import counted as counted
from pullback.runs.documents import layer_name
from pullback.runs.settings import ELSEWHERE

UNKNOWN = "–"
NO_FIGURES = "no figures: they need matplotlib, which is an extra: pip install 'pullback[plot]'"


def plus_minus(value: float | None, se: float | None, *, scale: float = 1.0) -> str:
    """Write "37.2 ± 0.3": the error with its leading digit (two if that is a 1), the value to the same place."""
    if value is None:
        return UNKNOWN
    value = value * scale
    if se is None or se <= 0:
        return f"{value:.4g}"
    se = se * scale
    places = -math.floor(math.log10(se))
    if round(se * 10.0**places) == 1:
        places += 1
    places = min(max(0, places), max(0, 3 - math.floor(math.log10(max(abs(value), 1e-9)))))  # four digits of the value
    shown = f"{se:.{places}f}"
    return f"{value:.{places}f} ± {shown}" if float(shown) > 0 else f"{value:.{places}f} ± <{10.0**-places:.{places}f}"


def percent(summary: dict[str, Any]) -> str:
    """Write a share and its standard error in per cent."""
    return f"{plus_minus(summary['mean'], summary['se'], scale=100)} %"


def share(part: float) -> str:
    """Write "97 %", never rounded to nothing or to all."""
    return "< 1 %" if 0 < part < 0.01 else "> 99 %" if 0.99 < part < 1 else f"{100 * part:.0f} %"


def outside_patches(prefix: int, part: float) -> str:
    """Write "class token 12 %", the share of the energy that the tokens outside the patches hold; nothing where there
    are none."""
    return f"{'class token' if prefix == 1 else 'prefix tokens'} {share(part)}" if prefix else ""


def after_blocks(stages: Sequence[int]) -> str:
    """Write "after block 4", "after blocks 4, 8"."""
    return f"after block{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"


def p_value(p: float) -> str:
    """Write "0.031", "3e-09"."""
    return f"{p:.2g}" if p >= 1e-3 else f"{p:.0e}"


def lower_bound(r90: dict[str, Any]) -> str:
    """Write a rank, with ≥ before it where it is only a lower bound."""
    return f"{'≥ ' if r90['is_lower_bound'] else ''}{r90['value']}"


def plain(value: float | None, digits: int = 3) -> str:
    """Write a number with so many digits, or a dash where there is none."""
    return UNKNOWN if value is None else f"{value:.{digits}g}"


def times(value: float | None) -> str:
    """Write a factor: "0.83×", "4,250×"."""
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}×" if value >= 100 else f"{value:.3g}×"


def missed(error: float | None) -> str:
    """Write the share of a subspace that is missed; rounding may have made a very small one negative."""
    return UNKNOWN if error is None else f"{error:.3f}" if error >= 5e-4 else "<0.001"


def unit(document: dict[str, Any]) -> str:
    """Return what a sample of a diagnosis is called: "image" or "scene"."""
    return "scene" if "scenes" in document else "image"


def sample_count(document: dict[str, Any]) -> int:
    """Return how many samples a diagnosis has."""
    return len(document["scenes"] if "scenes" in document else document["image_files"])


def samples(document: dict[str, Any]) -> str:
    """Write "3 images at 224×224", "2 scenes of 2 to 5 views, 518 wide", "1 image at 224×224, no error over images"."""
    return _samples(document) + no_error(sample_count(document), unit(document))


def no_error(count: int, unit: str) -> str:
    """Write ", no error over images" behind the number of images where it is one, and nothing otherwise."""
    return f", no error over {unit}s" if count == 1 else ""


def _samples(document: dict[str, Any]) -> str:
    words = counted(sample_count(document), unit(document))
    if "scenes" in document:
        views = [scene["views"] for scene in document["scenes"]]
        low, high = min(views), max(views)
        words += f" of {counted(low, 'view')}" if low == high else f" of {low} to {high} views"
    if document["size"] is not None:
        return f"{words} at {document['size'][0]}×{document['size'][1]}"
    widths = sorted({scene["size"][1] for scene in document["scenes"]})
    return f"{words}, {' or '.join(map(str, widths))} wide"


def short_name(model: str) -> str:
    """Return a hub id as it is, and of a folder its last part."""
    parts = [part for part in model.split("/") if part not in ("", ".", "..")]
    return model if len(parts) <= 2 and not model.startswith((".", "/", ELSEWHERE)) else parts[-1] if parts else model


def regime(found: dict[str, Any]) -> str:
    """Write "(i) rich spectrum", "(iii) marginal rank, could be (i)": the regime of a layer or of its patches.

    The label (ii) stands for two of them, low rank spread over tokens or concentrated on them: it never stands alone.
    """
    could_be = found.get("regime_could_be", [])  # files of earlier versions have none
    named = [f"({regime_label(other)})" for other in could_be]
    text = f"({found['regime']}) {found['regime_title']}"
    return f"{text}, could be {' or '.join(named)}" if named else text


def regime_label(found: dict[str, Any]) -> str:
    """Write "i", "ii, spread over tokens", "ii, concentrated on tokens", "iii" or "iv"."""
    label, title = found["regime"], found["regime_title"]
    return f"{label}, {title.rpartition(', ')[2]}" if label == "ii" else label


def findings(layers: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Group layers with the same regime and advice: their names, such as "L06, L08", and the first of them."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for layer in layers:
        groups.setdefault((regime(layer), layer["advice"]), []).append(layer)
    return [(", ".join(layer_name(layer["layer"]) for layer in group), group[0]) for group in groups.values()]
