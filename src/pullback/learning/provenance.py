"""What targets were computed from, and how: the configuration that a store carries and that a second run must share."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from pullback import __version__
from pullback.data.crops import RATIO, SCALE
from pullback.data.images import PixelFormat
from pullback.errors import PullbackError
from pullback.learning.targets import Recipe
from pullback.probes import MultiLayerProbe, ProbeMap

FORMAT = 1

NOT_COMPARED = ("model", "pullback")
"""The weights' hash says which model it is, whatever its folder is called; another version may finish a store."""


def weights_hash(module: nn.Module) -> str:
    """sha256 over names, dtypes, shapes and bytes of all parameters and buffers, sorted by name."""
    digest = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def configuration(
    probe: ProbeMap | MultiLayerProbe, recipe: Recipe, pixels: PixelFormat, *, crops: int, seed: int, source: str
) -> dict[str, Any]:
    """Everything that decides the rows, as plain JSON."""
    backbone = probe.backbone
    height, width = pixels.size
    layout = backbone.token_layout(torch.empty(0, 3, height, width))
    layers = probe.layers if isinstance(probe, MultiLayerProbe) else (probe.layer,)
    return {
        "format": FORMAT,
        "pullback": __version__,
        "model": backbone.name,
        "family": backbone.family,
        "weights": weights_hash(backbone.model),
        "dtype": str(backbone.dtype).removeprefix("torch."),
        "decoder": probe.decoder.name,
        "distance": _name(probe.distance),
        "layer": probe.layer,
        **_probe_choices(probe),
        **asdict(recipe),
        "tokens": layout.tokens,
        "dim": backbone.dim * len(layers),
        "grid": list(layout.grid),
        "prefix": layout.prefix,
        "size": [height, width],
        "mean": list(pixels.mean),
        "std": list(pixels.std),
        "interpolation": pixels.interpolation,
        "crops": crops,
        "crop_scale": list(SCALE) if crops else None,
        "crop_ratio": list(RATIO) if crops else None,
        "seed": seed,
        "source": source,
    }


def check_same(stored: Mapping[str, Any], asked: Mapping[str, Any], where: object) -> None:
    """Refuse to add rows of one configuration to a store of another, naming every difference."""
    names = [name for name in {**stored, **asked} if name not in NOT_COMPARED]
    different = [name for name in names if stored.get(name) != asked.get(name)]
    if different:
        listing = "; ".join(f"{name}: {stored.get(name)!r} there, {asked.get(name)!r} asked for" for name in different)
        raise PullbackError(
            f"out: {where} holds targets of another configuration ({listing}). Ask for the same to resume it, or "
            "choose another folder."
        )


def _probe_choices(probe: ProbeMap | MultiLayerProbe) -> dict[str, Any]:
    if isinstance(probe, MultiLayerProbe):
        return {"after_norm": probe.after_norm}
    return {"read_probe_layer": probe.read_probe_layer, "output_metric": _name(probe.output_metric)}


def _name(part: object) -> str | None:
    """Of a task distance or an output metric: a function's name; a fixed matrix by its hash."""
    if part is None or isinstance(part, str):
        return part
    if isinstance(part, torch.Tensor):
        return hashlib.sha256(part.detach().cpu().double().numpy().tobytes()).hexdigest()
    return getattr(part, "__name__", type(part).__name__)
