"""Where a pixel of a feature map lies, as sines and cosines added to its channels; the image's aspect counts."""

from __future__ import annotations

import math

import torch
from torch import Tensor

STRENGTH, BASE = 0.1, 100.0


def with_positions(maps: Tensor, aspect: float) -> Tensor:
    """[F, D, h, w] plus the embedding of its grid; ``aspect`` is the image's width over its height."""
    columns, rows = pixel_centres(maps, aspect)
    half = maps.shape[1] // 2
    across, down = waves(columns, half), waves(rows, half)  # [D/2, w], [D/2, h]
    height, width = maps.shape[-2:]
    embedding = torch.cat([across[:, None].expand(-1, height, -1), down[:, :, None].expand(-1, -1, width)])
    return maps + STRENGTH * embedding.to(maps.dtype)


def pixel_centres(maps: Tensor, aspect: float) -> tuple[Tensor, Tensor]:
    """x [w] and y [h] of the pixel centres of an image whose half diagonal is 1, (0, 0) in the middle."""
    diagonal = math.hypot(aspect, 1)
    height, width = maps.shape[-2:]
    precise = torch.promote_types(maps.dtype, torch.float32)

    def centres(span: float, count: int) -> Tensor:
        end = span * (count - 1) / count
        return torch.linspace(-end, end, count, dtype=precise, device=maps.device)

    return centres(aspect / diagonal, width), centres(1 / diagonal, height)


def waves(positions: Tensor, channels: int) -> Tensor:
    """[n] -> [channels, n]: sines, then cosines, of positions times the frequencies base^(-2d/channels)."""
    pairs = channels // 2
    frequencies = BASE ** (-torch.arange(pairs, device=positions.device, dtype=positions.dtype) / pairs)
    angles = frequencies[:, None] * positions
    return torch.cat([angles.sin(), angles.cos()])
