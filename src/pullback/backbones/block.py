"""The pre-norm transformer block that every supported ViT family shares, as data plus one forward.

    y = x + s1 * Attention(LayerNorm1(x)),    out = y + s2 * Mlp(LayerNorm2(y))

Adapters (`families.py`) take a transformers layer apart into this form, so that the forward, its linearisation
(`linearized.py`) and token pruning are written once. The tensors are the model's own parameters, not copies;
`tests/backbones` checks for every family that nothing was lost on the way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pullback.backbones.attention import attend


class Affine(NamedTuple):
    """x -> weight x + bias."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class TokenMap(Protocol):
    """Tokens [..., D] -> tokens of the same shape, each by itself: a norm, or `unchanged`."""

    def __call__(self, x: Tensor, /) -> Tensor: ...


class Norm(NamedTuple):
    """Layer normalisation over the last axis."""

    weight: Tensor
    bias: Tensor | None
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


def unchanged(x: Tensor) -> Tensor:
    """The norm of networks without one, and of tokens that have passed it already."""
    return x


class Rope(NamedTuple):
    """Rotary position embedding, [B or 1, 1, N, head_dim]; prefix tokens carry cos = 1, sin = 0."""

    cos: Tensor
    sin: Tensor

    def rotate(self, x: Tensor, rows: int) -> Tensor:
        """[B, heads, rows, d] -> the same, rotated by the first ``rows`` positions."""
        return x * self.cos[..., :rows, :] + _rotate_half(x) * self.sin[..., :rows, :]

    def rotate_tangents(self, x: Tensor, rows: int) -> Tensor:
        """Rotate tangents [B, K, rows, heads, d] likewise."""
        cos, sin = (table[:, :, :rows, None] for table in self)
        return x * cos + _rotate_half(x) * sin

    def rotate_cotangents(self, x: Tensor, rows: int) -> Tensor:
        """Its adjoint, on [B, K, rows, heads, d]."""
        cos, sin = (table[:, :, :rows, None] for table in self)
        return x * cos - _rotate_half(x * sin)

    def gather(self, positions: Tensor) -> Rope:
        """The rows of a token subset; positions [B, n] index the full sequence."""
        width = self.cos.shape[-1]
        index = positions[:, None, :, None].expand(-1, -1, -1, width)
        return Rope(*(table.expand(positions.shape[0], -1, -1, -1).gather(2, index) for table in self))


def _rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


@dataclass(frozen=True)
class Mlp:
    """down(activation(up(x))), or with a gate down(activation(gate(x)) * up(x))."""

    up: Affine
    down: Affine
    activation: Callable[[Tensor], Tensor]
    gate: Affine | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(self.activation(self.up(x)))
        return self.down(self.activation(self.gate(x)) * self.up(x))


@dataclass(frozen=True)
class Block:
    """A pre-norm layer: x + scale1 * project(attention(norm1(x))), and of that y, y + scale2 * mlp(norm2(y)).

    ``query``, ``key``, ``value`` are [heads * d, D], ``project`` is [D, heads * d]. ``scale1`` and ``scale2`` [D] are
    layer scale, None: there is none. Rotary positions come from the backbone (`Backbone.rope_tables`).
    """

    norm1: Norm
    query: Affine
    key: Affine
    value: Affine
    project: Affine
    norm2: Norm
    mlp: Mlp
    heads: int
    scale1: Tensor | None = None
    scale2: Tensor | None = None

    @property
    def head_dim(self) -> int:
        return self.query.weight.shape[0] // self.heads

    def heads_first(self, x: Tensor) -> Tensor:
        """[B, n, heads*d] -> [B, heads, n, d]."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def attention_inputs(self, x: Tensor, rope: Rope | None, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of the first ``rows`` tokens, keys and values of all, from normalised tokens."""
        q, k, v = (self.heads_first(t) for t in (self.query(x[:, :rows]), self.key(x), self.value(x)))
        if rope is not None:
            q, k = rope.rotate(q, rows), rope.rotate(k, x.shape[1])
        return q, k, v

    def __call__(
        self, x: Tensor, rope: Rope | None = None, rows: int | None = None, log_sizes: Tensor | None = None
    ) -> Tensor:
        """[B, N, D] -> [B, rows, D]: the output of the first ``rows`` tokens (default all), attending to all N.

        A decoder that reads only the class token needs one query in the last block, but every key and value.
        ``log_sizes`` [B, N]: token t stands for exp(log_sizes_t) equal ones.
        """
        return self.after_attention(self.attention(x, rope, rows, log_sizes).tokens)

    def attention(
        self, x: Tensor, rope: Rope | None = None, rows: int | None = None, log_sizes: Tensor | None = None
    ) -> Attended:
        """The first half of the block, with what published merging rules look at before the second."""
        rows = x.shape[1] if rows is None else rows
        q, k, v = self.attention_inputs(self.norm1(x), rope, rows)
        attended = attend(q, k, v, log_sizes).transpose(1, 2).flatten(2)
        return Attended(x[:, :rows] + _scaled(self.project(attended), self.scale1), q, k)

    def after_attention(self, y: Tensor) -> Tensor:
        """The second half, [B, n, D] -> [B, n, D]: each token by itself."""
        return y + _scaled(self.mlp(self.norm2(y)), self.scale2)


class Attended(NamedTuple):
    """Tokens between the attention and the MLP of a block."""

    tokens: Tensor  # [B, rows, D]
    queries: Tensor  # [B, heads, rows, d]
    keys: Tensor  # [B, heads, N, d]


def _scaled(x: Tensor, scale: Tensor | None) -> Tensor:
    return x if scale is None else x * scale
