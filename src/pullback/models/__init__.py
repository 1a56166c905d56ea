"""Networks of our own, which import only torch, and the models that come with the package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

WEIGHTS = Path(__file__).with_name("weights")
"""Folders of all that comes with the package: embedded models, and what was trained for others
(`backbones.shipped`)."""
EMBEDDED: dict[str, Path] = {name: WEIGHTS / name for name in ("tiny-scenes", "tiny-views")}
"""Name -> folder of config.json, model.safetensors and a model card."""


def configurations() -> dict[Path, dict[str, Any]]:
    """Return what config.json holds, by folder, of all that comes with the package: one folder for each, or where there
    are several for one model, folders within one."""
    found = sorted([*WEIGHTS.glob("*/config.json"), *WEIGHTS.glob("*/*/config.json")])
    return {path.parent: json.loads(path.read_text(encoding="utf-8")) for path in found}
