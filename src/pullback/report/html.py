"""Self-contained pages: Jinja templates that word numbers as everywhere else, and pictures inside the file.

A page is one file that can be mailed or moved. What pages share is in `templates/base.html.j2`, how they look in
`templates/page.css.j2`.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from pullback.report import wording
from pullback.runs import documents as files
from pullback.runs.files import write_text

_FILTERS = (
    "counted", "findings", "lower_bound", "missed", "percent", "plain", "samples", "share", "short_name", "times",
)  # fmt: skip


def write_html(out: Path, template: str, content: Mapping[str, Any]) -> Path:
    """Fill a template and write it as `index.html` into ``out``; return its path."""
    page = out / files.PAGE
    write_text(page, _templates().get_template(template).render(content))
    return page


def data_uri(picture: bytes, kind: str) -> str:
    """Put a picture of a kind, such as "jpeg", into an address."""
    return f"data:image/{kind};base64,{base64.b64encode(picture).decode('ascii')}"


def _templates() -> Environment:
    """Set Jinja up to escape everything and to refuse missing values."""
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
