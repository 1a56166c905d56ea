"""pullback: the task-induced geometry of vision-transformer features.

    import pullback as pb

    probe = pb.load_probe("facebook/dinov2-base", decoder="cls", layer=10)
    images = pb.load_images("photos/", probe)
    report = pb.diagnose(probe, images, rank=20)

The public names are listed in `__init__.pyi`, from which type checkers know them. They are imported when they are first
used, so that ``import pullback`` is quick and needs no optional package.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

__version__ = "0.1.0"


def _read_public() -> dict[str, str]:
    """Read the public names, each with its module, from the stub beside this file."""
    stub = ast.parse(Path(__file__).with_name("__init__.pyi").read_text(encoding="utf-8"))
    return {
        name.name: node.module
        for node in stub.body
        if isinstance(node, ast.ImportFrom) and node.module
        for name in node.names
    }


_PUBLIC = _read_public()
__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'pullback' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
