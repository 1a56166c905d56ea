"""Models that come with the package. So far one small ViT with seeded random weights, for the demo and the tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Embedded:
    model_type: str
    decoders: tuple[str, ...]
    build: Callable[[], nn.Module]


def _seeded_depth_model() -> nn.Module:
    """A small Depth Anything: 6 blocks of width 64 and a DPT head, random but the same everywhere."""
    from transformers import DepthAnythingConfig, DepthAnythingForDepthEstimation, Dinov2Config

    backbone = Dinov2Config(
        hidden_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        patch_size=14,
        image_size=224,
        out_indices=[2, 3, 5, 6],
        apply_layernorm=True,
        reshape_hidden_states=False,
    )
    config = DepthAnythingConfig(
        backbone_config=backbone,
        reassemble_hidden_size=64,
        neck_hidden_sizes=[16, 16, 32, 32],
        fusion_hidden_size=16,
        head_hidden_size=8,
        patch_size=14,
    )
    model = DepthAnythingForDepthEstimation(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.ndim > 1:
                fan_in = parameter[0].numel() if "token" not in name and "position" not in name else 1
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * fan_in**-0.5)
        model.head.conv3.bias.fill_(1.0)  # keep the final ReLU open
    return model


EMBEDDED: dict[str, Embedded] = {
    "seeded-vit": Embedded("depth_anything", ("cls", "mean", "depth", "depth-GxG"), _seeded_depth_model),
}


def build_embedded(name: str) -> nn.Module:
    return EMBEDDED[name].build()
