"""What an experiment would take, without a weight being read: cells, outputs, time and memory.

    time    ~ sum of the cells' forwards · operations of a forward / operations a second of the device
    memory  ~ weights + what is alive at a time: 64 images' features of all blocks, four times over

Operations of a forward of N tokens of width D through L blocks: L (24 N D² + 4 N² D), with MLPs four times as wide as
the tokens. Rates are what such small batches were seen to reach, not what is on the data sheet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pullback.experiments.experiment import Cell, Experiment
from pullback.experiments.scales import Scale
from pullback.runs.files import CONFIG, read_json

RATES = {"cpu": 6e10, "cuda": 3e13}
"""Operations a second: two CPU cores in float32, and an H200 in TF32."""
_AT_ONCE, _COPIES = 64, 4


class Shape(NamedTuple):
    """Of a backbone: blocks, width, tokens of its usual picture."""

    blocks: int
    width: int
    tokens: int

    @property
    def operations(self) -> float:
        return self.blocks * (24 * self.tokens * self.width**2 + 4 * self.tokens**2 * self.width)

    @property
    def parameters(self) -> float:
        return 12.0 * self.blocks * self.width**2


SHAPES = {
    "tiny-scenes": Shape(12, 192, 257),
    "tiny-views": Shape(24, 128, 800),
    "facebook/dinov2-small": Shape(12, 384, 257),
    "facebook/dinov2-base": Shape(12, 768, 257),
    "openai/clip-vit-base-patch16": Shape(12, 768, 197),
    "depth-anything/Depth-Anything-V2-Base-hf": Shape(12, 768, 257),
    "facebook/VGGT-1B": Shape(48, 1024, 1374),
}
"""Of the models that scales name. Another model in a folder is known by its config.json."""


def estimates(experiments: Sequence[Experiment], scale: Scale, device: torch.device) -> dict[str, Any]:
    """Return what the table of `--dry-run` shows: for each experiment its cells and numbers, how many of them are
    absent and why, seconds and bytes (None where a model is not known)."""
    found = []
    for own in experiments:
        cells = own.checked_cells(scale)
        absent = [cell for cell in cells if scale.why_absent(cell)]
        measured = [cell for cell in cells if not scale.why_absent(cell)]
        shapes = {role: shape_of(scale.models[role]) for cell in measured for role in _models(cell, scale)}
        known = [shape for shape in shapes.values() if shape is not None]
        found.append(
            {
                "name": own.name,
                "paper_label": own.paper_label,
                "cells": len(measured),
                "numbers": sum(len(cell.places) for cell in measured),
                "absent": sum(len(cell.places) for cell in absent),
                "why": list(dict.fromkeys(str(scale.why_absent(cell)) for cell in absent)),
                "seconds": _seconds(measured, scale, shapes, device),
                "bytes": max((_bytes(shape) for shape in known), default=0.0),
            }
        )
    return {"scale": scale.name, "device": str(device), "models": dict(scale.models), "experiments": found}


def shape_of(model: str) -> Shape | None:
    """Return the shape of a model by its name or its config.json; None where neither is known."""
    if model in SHAPES:
        return SHAPES[model]
    config = Path(model).expanduser() / CONFIG
    if not config.is_file():
        return None
    found = read_json(config, "model")
    found = found.get("vision_config", found)
    try:
        tokens = (224 // int(found["patch_size"])) ** 2 + 1
        return Shape(int(found["num_hidden_layers"]), int(found["hidden_size"]), tokens)
    except (KeyError, TypeError, ValueError):
        return None


def _models(cell: Cell, scale: Scale) -> list[str]:
    return [role for role in cell.roles if role in scale.models]


def _seconds(
    cells: Sequence[Cell], scale: Scale, shapes: Mapping[str, Shape | None], device: torch.device
) -> float | None:
    total = 0.0
    for cell in cells:
        if not cell.forwards:
            continue
        shape = shapes.get(cell.model)
        if shape is None:
            return None
        total += cell.forwards * shape.operations / RATES[device.type if device.type in RATES else "cpu"]
    return total


def _bytes(shape: Shape) -> float:
    return 4.0 * (shape.parameters + _COPIES * _AT_ONCE * shape.blocks * shape.tokens * shape.width)
