"""Self-contained pages: Jinja templates that word numbers as everywhere else, and pictures inside the file.

A page is one file that can be mailed or moved. What pages share is in `templates/base.html.j2`, how they look in
`templates/page.css.j2`.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from PIL import Image

from pullback.report import wording
from pullback.report.heat import colours
from pullback.runs import documents as files
from pullback.runs.files import write_text

_FILTERS = (
    *("after_blocks", "counted", "findings", "lower_bound", "missed", "p_value", "percent", "plain", "regime"),
    *("sample_count", "samples", "share", "short_name", "times"),
)
_ESCAPED = {letter: f"\\{letter}" for letter in "\\`*_[]"} | {
    letter: f"&#{ord(letter)};"
    for letter in "&<>|$~"  # dialects of Markdown do not agree on these
}


def write_html(out: Path, template: str, content: Mapping[str, Any], name: str = files.PAGE) -> Path:
    """Fill a template and write it as `index.html`, or ``name``, into ``out``; return its path."""
    page = out / name
    write_text(page, _templates().get_template(template).render(content))
    return page


def write_markdown(out: Path, template: str, content: Mapping[str, Any], name: str) -> Path:
    """Fill a template of Markdown, in which the filter `md` escapes, and write it into ``out``; return its path."""
    page = out / name
    write_text(page, _templates(autoescape=False).get_template(template).render(content))
    return page


def markdown_text(text: object) -> str:
    """Escape what Markdown or a table of it would take for more than letters; line breaks become spaces."""
    return "".join(_ESCAPED.get(letter, letter) for letter in " ".join(str(text).split()))


def data_uri(picture: bytes, kind: str) -> str:
    """Put a picture of a kind, such as "jpeg", into an address."""
    return f"data:image/{kind};base64,{base64.b64encode(picture).decode('ascii')}"


def jpeg_uri(picture: Image.Image) -> str:
    """Put a picture into an address, as a JPEG that looks the same."""
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=90, subsampling=0)
    return data_uri(buffer.getvalue(), "jpeg")


def colour_bar(scale: tuple[float, float]) -> dict[str, str]:
    """Return what the macro `bar` draws: the ends of a scale of energies, and its colours as stops of a gradient."""
    stops = ", ".join(f"rgb{tuple(map(int, colour))}" for colour in colours(np.linspace(0, 1, 9)))
    low, high = scale
    return {"low": f"{low:.2g}", "high": f"{high:.2g}", "stops": stops}


@cache
def _templates(*, autoescape: bool = True) -> Environment:
    """Set Jinja up, once, to escape everything and to refuse missing values."""
    templates = Environment(
        loader=PackageLoader("pullback.report"),
        autoescape=autoescape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters |= {name: getattr(wording, name) for name in _FILTERS}
    templates.filters |= {
        "layer_name": files.layer_name,
        "plus_minus": _plus_minus,
        "md": markdown_text,
        "sentence": _sentence,
    }
    return templates


def _plus_minus(summary: dict[str, Any]) -> str:
    return wording.plus_minus(summary["mean"], summary["se"])


def _sentence(text: str) -> str:
    """Begin with a capital letter, and leave all others as they are."""
    return text[:1].upper() + text[1:]
