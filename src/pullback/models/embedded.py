"""Models that come with the package: folders of config.json, model.safetensors and a model card."""

from __future__ import annotations

from pathlib import Path

_WEIGHTS = Path(__file__).with_name("weights")
EMBEDDED: dict[str, Path] = {name: _WEIGHTS / name for name in ("tiny-scenes", "tiny-views")}
