"""`tiny-scenes`: a ViT in the paper's shape, small enough to ship, with a DPT depth decoder and a class embedding.

Patch 14, 224 px, 257 tokens, 12 blocks of width 192 (5.5 M parameters), DPT reading layers 2, 5, 8 and 11 after the
final norm. The class token separates the scene classes; `classifier` is the linear layer that trained it.

The decoder is a small DPT (Ranftl, Bochkovskiy & Koltun 2021): four layers of tokens in, one depth map in metres out.
Tokens of each layer become a map, are brought to 4, 2, 1 and 1/2 times the patch grid, and are fused from coarse to
fine. The last convolution predicts log depth, so that depth is positive without a ReLU that could cut pixels off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pullback.models.dinov2 import Dinov2, Dinov2Config


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


class DPTNeck(nn.Module):
    """Four layers of tokens -> one map [B, C, 8h, 8w]."""

    def __init__(self, dim: int, channels: int) -> None:
        super().__init__()
        self.project = nn.ModuleList([nn.Conv2d(dim, channels, 1) for _ in range(4)])
        self.resize = nn.ModuleList(
            [
                nn.ConvTranspose2d(channels, channels, 4, stride=4),
                nn.ConvTranspose2d(channels, channels, 2, stride=2),
                nn.Identity(),
                nn.Conv2d(channels, channels, 3, stride=2, padding=1),
            ]
        )
        self.refine = nn.ModuleList([Residual(channels) for _ in range(4)])
        self.fuse = nn.ModuleList([Residual(channels) for _ in range(4)])

    def forward(self, taps: Sequence[Tensor], rows: int, columns: int) -> Tensor:
        """taps: [B, prefix + h w, D] each; the tokens before the last h w are not patches."""
        maps = []
        for tokens, project, resize in zip(taps, self.project, self.resize, strict=True):
            grid = tokens[:, -rows * columns :].unflatten(1, (rows, columns)).permute(0, 3, 1, 2)
            maps.append(resize(project(grid)))
        fused: Tensor | None = None
        for level in (3, 2, 1, 0):
            own = self.refine[level](maps[level])
            if fused is not None:
                own = own + F.interpolate(fused, own.shape[-2:], mode="bilinear", align_corners=False)
            fused = self.fuse[level](own)
        assert fused is not None
        return F.interpolate(fused, scale_factor=2, mode="bilinear", align_corners=False)


class Residual(nn.Module):
    """x + conv(relu(conv(relu(x))))."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.relu(self.first(F.relu(x))))


class DepthHead(nn.Module):
    """[B, C, 8h, 8w] -> depth in metres [B, patch h, patch w]."""

    def __init__(self, channels: int, patch_size: int) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.first = nn.Conv2d(channels, channels // 2, 3, padding=1)
        self.second = nn.Conv2d(channels // 2, 1, 3, padding=1)

    def forward(self, maps: Tensor, rows: int, columns: int) -> Tensor:
        x = F.relu(self.first(maps))
        size = (rows * self.patch_size, columns * self.patch_size)
        log_depth = F.interpolate(self.second(x), size, mode="bilinear", align_corners=False)
        return torch.exp(log_depth[:, 0])
