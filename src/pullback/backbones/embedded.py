"""Models that come with the package: folders of config.json, model.safetensors and a model card."""

from __future__ import annotations

from pathlib import Path

EMBEDDED: dict[str, Path] = {"tiny-scenes": Path(__file__).with_name("weights") / "tiny-scenes"}
