"""VGGT as probes see it: a backbone of scenes, whose samples are several views at once.

Layer l is the state after global block l, F^l [B, N, C] with the tokens of all views. What heads read of a layer, its
tap [B, N, 2C], is the output of frame block l beside F^l, so one step of this backbone has two results.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pullback.backbones.loading import check_evaluation_mode, resolve_device
from pullback.errors import ModelError
from pullback.models.embedded import EMBEDDED
from pullback.tokens import TokenLayout
from pullback.vggt.checkpoint import CONFIG, MODEL_TYPE, VGGT
from pullback.vggt.network.rope import Rope


class Step(NamedTuple):
    """What frame block l and global block l return, [B, N, C] both."""

    frame: Tensor
    tokens: Tensor  # F^l

    def tap(self) -> Tensor:
        """[B, N, 2C], frame half first."""
        return torch.cat([self.frame, self.tokens], -1)


@dataclass(frozen=True)
class SceneBackbone:
    """A frozen VGGT: embed the views of scenes, run any range of blocks on their tokens."""

    name: str
    model: VGGT
    family: str = MODEL_TYPE

    @property
    def depth(self) -> int:
        return self.model.config.depth

    @property
    def dim(self) -> int:
        """C, the width of F^l; a tap is twice as wide."""
        return self.model.config.embed_dim

    @property
    def prefix(self) -> int:
        """Tokens of each view before its patches: its camera token and registers."""
        return self.model.config.prefix

    @property
    def hook_layers(self) -> tuple[int, ...]:
        return self.model.config.hook_layers

    @property
    def default_layer(self) -> int:
        return max(0, self.depth - 2)

    @property
    def device(self) -> torch.device:
        return self.model.aggregator.camera_token.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.aggregator.camera_token.dtype

    def token_layout(self, images: Tensor) -> TokenLayout:
        """Of scenes [B, S, 3, H, W], or of one scene [S, 3, H, W]."""
        return self.model.aggregator.token_layout(as_scenes(images))

    def steps(self, images: Tensor, layers: Sequence[int]) -> dict[int, Step]:
        """Both results of several layers of scenes [B, S, 3, H, W], in one pass."""
        trunk = self.model.aggregator
        state = trunk.embed(images)
        tokens, layout = state.tokens, state.layout
        ropes, kept = self.ropes(layout, tokens), {}
        for layer in range(max(layers) + 1):
            step = self.step(layer, tokens, layout, ropes)
            tokens = step.tokens
            if layer in layers:
                kept[layer] = step
        return kept

    def ropes(self, layout: TokenLayout, like: Tensor) -> tuple[Rope, Rope]:
        """Rotary tables for one view and for all; constants of a layout, so they are made once."""
        return self.model.aggregator.ropes(layout, like)

    def step(self, layer: int, tokens: Tensor, layout: TokenLayout, ropes: tuple[Rope, Rope]) -> Step:
        """F^{layer-1} [B, N, C] through frame and global block ``layer``."""
        return Step(*self.model.aggregator.step(layer, tokens, layout.views, ropes))

    def check_layer(self, layer: int) -> None:
        if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < self.depth:
            raise ModelError(
                f"layer: expected a layer of the aggregator from 0 to {self.depth - 1} ({self.name} has {self.depth}; "
                f"layer l is the state after global block l), got {layer!r}. The heads' own input is "
                "multi_layer_probe(...)."
            )


def as_scenes(images: Tensor) -> Tensor:
    """[S, 3, H, W] is one scene, as for the network itself; what else does not fit is refused there."""
    return images[None] if images.ndim == 4 else images


def is_vggt(model: str | os.PathLike[str] | nn.Module) -> bool:
    """A VGGT module; a .safetensors file; a folder (or embedded name) whose config.json says so; or a hub id with VGGT
    in its name. The hub's own config.json has no model_type, and is not fetched to ask."""
    if isinstance(model, nn.Module):
        return isinstance(model, VGGT)
    name = os.fspath(model)
    path = EMBEDDED.get(name, Path(name))
    if path.is_dir():
        return _says_vggt(path / CONFIG)
    return path.suffix == ".safetensors" or "vggt" in name.lower()


def _says_vggt(config: Path) -> bool:
    try:
        return json.loads(config.read_text(encoding="utf-8")).get("model_type") == MODEL_TYPE
    except (OSError, ValueError, AttributeError):
        return False


def load_scene_backbone(
    model: str | os.PathLike[str] | VGGT,
    *,
    device: str | torch.device = "auto",
    dtype: torch.dtype = torch.float32,
) -> SceneBackbone:
    """A frozen VGGT in evaluation mode. A module that is passed in is used as it is, on its device and in its dtype."""
    if isinstance(model, VGGT):
        check_evaluation_mode(model, "model")
        return SceneBackbone(type(model).__name__, model)
    if isinstance(model, nn.Module):
        raise ModelError(f"model: expected a VGGT (pullback.VGGT), a hub id or a folder, got {type(model).__name__}.")
    name = os.fspath(model)
    loaded = VGGT.from_pretrained(name, device=resolve_device(device), dtype=dtype)
    return SceneBackbone(name, loaded.requires_grad_(False))
