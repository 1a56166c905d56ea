"""Networks of our own, which import only torch, and the models that come with the package."""

from __future__ import annotations

from pathlib import Path

WEIGHTS = Path(__file__).with_name("weights")
"""Folders of all that comes with the package: embedded models, and what was trained for others
(`backbones.shipped`)."""
EMBEDDED: dict[str, Path] = {name: WEIGHTS / name for name in ("tiny-scenes", "tiny-views")}
"""Name -> folder of config.json, model.safetensors and a model card."""
