"""The transformer block of all of VGGT: its ViT, its aggregator and its camera head.

y = x + g1 * Attention(LayerNorm1(x)),    out = y + g2 * Mlp(LayerNorm2(y))

What a block makes on the way, ten times its input and more, must not exist for hundreds of views at once. Samples do
not see each other, and the second half of a block does not mix tokens, so without gradients, which would keep it all
anyway, both run in parts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pullback.vggt.network.rope import Rope

CHUNK_TOKENS = 1 << 16
"""Tokens that a block takes at once, as far as they can be taken apart: VGGT's widest layer then has 1 GB. A quarter of
it cost 32 unpruned views 2 % of their time on an H200, to save a twentieth of the memory."""


class Mlp(nn.Module):
    def __init__(self, dim: int, hidden: int, out: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class LayerScale(nn.Module):
    def __init__(self, dim: int, start: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((dim,), start))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Attention(nn.Module):
    """Self-attention; with ``qk_norm``, queries and keys are normalised per head before they are turned."""

    def __init__(self, dim: int, heads: int, qk_norm: bool) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.q_norm = nn.LayerNorm(dim // heads) if qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(dim // heads) if qk_norm else nn.Identity()
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, rope: Rope | None = None, log_sizes: Tensor | None = None) -> Tensor:
        """[B, N, D] -> [B, N, D]. ``log_sizes`` [B, N]: a key that stands for s equal tokens weighs as much as they
        did (proportional attention, Bolya et al. 2023)."""
        return self.proj(self._mixed(x, rope, log_sizes))

    def _mixed(self, x: Tensor, rope: Rope | None, log_sizes: Tensor | None) -> Tensor:
        """The values as attention mixes them, [B, N, D]. Queries, keys and values are gone when this returns."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # [B, heads, N, d] each
        # Under autocast norms and turns give float32, which attention would bring back to the type of the values: here
        # that happens to one after the other, so that both are never there at full width.
        q = _turned(self.q_norm(q), rope).to(v.dtype)
        k = _turned(self.k_norm(k), rope).to(v.dtype)
        bias = None if log_sizes is None else _key_bias(log_sizes.to(v.dtype), q.shape[1], q.shape[2])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2)


def _turned(x: Tensor, rope: Rope | None) -> Tensor:
    return x if rope is None else rope.rotate(x)


def _key_bias(log_sizes: Tensor, heads: int, queries: int) -> Tensor:
    """[B, N] -> [B, heads, queries, N] without copies. Fused kernels want rows at multiples of 16 bytes."""
    count = log_sizes.shape[1]
    return F.pad(log_sizes, (0, -count % 8))[:, None, None, :count].expand(-1, heads, queries, -1)


class Block(nn.Module):
    def __init__(
        self, dim: int, heads: int, mlp_ratio: float, *, layer_scale: float, qk_norm: bool = False, eps: float = 1e-5
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=eps)
        self.attn = Attention(dim, heads, qk_norm)
        self.ls1 = LayerScale(dim, layer_scale)
        self.norm2 = nn.LayerNorm(dim, eps=eps)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), dim)
        self.ls2 = LayerScale(dim, layer_scale)

    def forward(self, x: Tensor, rope: Rope | None = None, log_sizes: Tensor | None = None) -> Tensor:
        """[B, N, D] -> [B, N, D]; any choice of tokens, with the ``rope`` of that choice. ``log_sizes`` [B, N]: the
        logarithm of how many tokens each one stands for."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or x.shape[:2].numel() <= CHUNK_TOKENS:
            x = x + self.ls1(self.attn(self.norm1(x), rope, log_sizes))
            return x + self._second_half(x)
        samples = max(1, CHUNK_TOKENS // x.shape[1])
        if samples >= len(x):
            return self._in_parts(x, rope, log_sizes)
        out: Tensor | None = None
        for start in range(0, len(x), samples):
            some = slice(start, start + samples)
            own_rope = None if rope is None else rope.samples(some)
            part = self._in_parts(x[some], own_rope, None if log_sizes is None else log_sizes[some])
            out = part.new_empty(x.shape) if out is None else out  # autocast may have chosen another dtype than x has
            out[some] = part
        assert out is not None
        return out

    def _in_parts(self, x: Tensor, rope: Rope | None, log_sizes: Tensor | None) -> Tensor:
        """Attention over whole sequences, then the rest, some tokens at a time."""
        x = x + self.ls1(self.attn(self.norm1(x), rope, log_sizes))
        for some in x.split(max(1, CHUNK_TOKENS // len(x)), 1):
            some += self._second_half(some)  # in place: this x is ours
        return x

    def _second_half(self, x: Tensor) -> Tensor:
        return self.ls2(self.mlp(self.norm2(x)))
