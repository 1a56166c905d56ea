"""`tiny-scenes`: a ViT in the paper's shape, small enough to ship, with a DPT depth decoder and a class embedding.

Patch 14, 224 px, 257 tokens, 12 blocks of width 192 (5.5 M parameters), DPT reading layers 2, 5, 8 and 11 after the
final norm. The class token separates the scene classes; `classifier` is the linear layer that trained it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor, nn

from pullback.models.dinov2 import Dinov2, Dinov2Config
from pullback.models.dpt import DepthHead, DPTNeck


@dataclass(frozen=True)
class TinyScenesConfig:
    model_type: str = "tiny_scenes"
    width: int = 192
    layers: int = 12
    heads: int = 3
    patch_size: int = 14
    image_size: int = 224
    hooks: tuple[int, ...] = (2, 5, 8, 11)
    channels: int = 64
    classes: int = 24

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> TinyScenesConfig:
        known = {field.name for field in fields(cls)}
        values: dict[str, Any] = {name: value for name, value in stored.items() if name in known}
        values["hooks"] = tuple(values.get("hooks", cls.hooks))
        return cls(**values)

    def backbone(self) -> Dinov2Config:
        return Dinov2Config(
            hidden_size=self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            patch_size=self.patch_size,
            image_size=self.image_size,
        )


@dataclass(frozen=True)
class TinyScenesOutput:
    predicted_depth: Tensor  # [B, H, W], metres
    embedding: Tensor  # [B, D], the class token after the final norm
    logits: Tensor  # [B, classes]


class TinyScenes(nn.Module):
    def __init__(self, config: TinyScenesConfig) -> None:
        super().__init__()
        self.config = config
        self.backbone = Dinov2(config.backbone())
        self.neck = DPTNeck(config.width, config.channels)
        self.head = DepthHead(config.channels, config.patch_size)
        self.classifier = nn.Linear(config.width, config.classes)

    def forward(self, pixel_values: Tensor) -> TinyScenesOutput:
        rows, columns = (side // self.config.patch_size for side in pixel_values.shape[-2:])
        x = self.backbone.embeddings(pixel_values)
        taps = []
        for index, layer in enumerate(self.backbone.encoder.layer):
            x = layer(x)
            if index in self.config.hooks:
                taps.append(x)
        return self.finish(taps, x, rows, columns)

    def finish(self, taps: Sequence[Tensor], tokens: Tensor, rows: int, columns: int) -> TinyScenesOutput:
        """The output from the tokens that leave the hooked blocks and the last one."""
        depth = self.head(self.neck([self.backbone.layernorm(tap) for tap in taps], rows, columns), rows, columns)
        embedding = self.backbone.layernorm(tokens)[:, 0]
        return TinyScenesOutput(depth, embedding, self.classifier(embedding))
