"""A small DPT depth decoder (Ranftl, Bochkovskiy & Koltun 2021): four layers of tokens in, one depth map in metres out.

Tokens of each layer become a map, are brought to 4, 2, 1 and 1/2 times the patch grid, and are fused from coarse to
fine. The last convolution predicts log depth, so that depth is positive without a ReLU that could cut pixels off.

`tiny-scenes` has one of its own; `DPTDepth` is one by itself, for a frozen ViT that has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class DPTDepthConfig:
    """The shapes of a `DPTDepth`. ``hooks``: the four layers that it reads, after the final norm."""

    dim: int
    channels: int = 96
    patch_size: int = 14
    hooks: tuple[int, ...] = (2, 5, 8, 11)

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> DPTDepthConfig:
        """Read the fields of a config.json, which holds others beside."""
        known = {field.name for field in fields(cls)}
        values: dict[str, Any] = {name: value for name, value in stored.items() if name in known}
        return cls(**values | {"hooks": tuple(values.get("hooks", cls.hooks))})


class DPTDepth(nn.Module):
    """Four layers of tokens of a frozen ViT, [B, prefix + h w, D] each, to depth in metres [B, patch h, patch w]."""

    def __init__(self, config: DPTDepthConfig) -> None:
        super().__init__()
        self.config = config
        self.neck = DPTNeck(config.dim, config.channels)
        self.head = DepthHead(config.channels, config.patch_size)

    def forward(self, taps: Sequence[Tensor], rows: int, columns: int) -> Tensor:
        return self.head(self.neck(taps, rows, columns), rows, columns)


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
