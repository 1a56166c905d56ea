"""Networks of our own, which import only torch, and the models that come with the package."""

from __future__ import annotations

from pathlib import Path

_WEIGHTS = Path(__file__).with_name("weights")
EMBEDDED: dict[str, Path] = {name: _WEIGHTS / name for name in ("tiny-scenes", "tiny-views")}
"""Name -> folder of config.json, model.safetensors and a model card."""
