"""Products with the Jacobian of a scene probe by `torch.func`, an output metric, and the memory that they take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pullback.backbones.vggt import SceneBackbone
from pullback.decoders import Decoder, OutputMetric, factor_at
from pullback.layout import TokenLayout
from pullback.operators.linearization import Derivative

MAX_ELEMENTS = 1 << 30
"""Of one tensor inside a product. Memory would hold more, but some kernels (resizing) count with 32 bits."""


@dataclass(frozen=True)
class TangentCost:
    """What one tangent of all scenes of a batch takes inside a product."""

    bytes: int  # at the widest moment
    largest: int  # elements of the largest tensor


class SceneLinearization:
    """A function [B, *input_shape] -> [B, ...] linearised at a point, with L^T of an output metric in front of J."""

    def __init__(
        self, function: Callable[[Tensor], Tensor], point: Tensor, metric: OutputMetric | None, cost: TangentCost
    ) -> None:
        self.input_shape = tuple(point.shape[1:])
        self.bytes_per_tangent = cost.bytes
        self._most = max(1, MAX_ELEMENTS // cost.largest)
        self._derivative = Derivative(function, point)
        output = self._derivative.output  # [B, M]
        self._factor = None if metric is None else factor_at(metric, output)  # [B, M, k]
        self.output = output if self._factor is None else (output[:, None] @ self._factor)[:, 0]

    def pushforward(self, tangents: Tensor) -> Tensor:
        out = torch.cat([self._derivative.jvp(part) for part in tangents.split(self._most, 1)], 1)
        return out if self._factor is None else out @ self._factor

    def pullback(self, cotangents: Tensor) -> Tensor:
        if self._factor is not None:
            cotangents = cotangents @ self._factor.mT
        return torch.cat([self._derivative.vjp(part)[0] for part in cotangents.split(self._most, 1)], 1)


def tangent_cost(backbone: SceneBackbone, decoder: Decoder, layout: TokenLayout, point: Tensor) -> TangentCost:
    """The widest moment is a global block, or the finest maps of a dense head.

    The factors are from peak memory on a CPU, where they are 1.4 to 1.6 times what products took; convolutions on a GPU
    want some room to work in.
    """
    own, tokens = backbone.model.config, layout.tokens
    hidden = int(own.embed_dim * own.mlp_ratio)
    scores = own.num_heads * tokens**2
    block = tokens * (8 * own.embed_dim + 3 * hidden) + 4 * scores
    # 8 x 8 pixels a patch before the last resizing, with all channels, then full resolution with half of them
    pixels = layout.views * layout.patches * own.dpt_features
    finest = pixels * max(64, own.patch_size**2 // 2)
    dense = len(decoder.layers) > 1
    elements = max(block, 8 * finest) if dense else block
    largest = max(scores, finest) if dense else scores
    return TangentCost(len(point) * elements * point.element_size(), len(point) * largest)
