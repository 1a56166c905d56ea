"""The transformer block of all of VGGT: its ViT, its aggregator and its camera head.

y = x + g1 * Attention(LayerNorm1(x)),    out = y + g2 * Mlp(LayerNorm2(y))
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pullback.models.vggt.rope import Rope


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
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # [B, heads, N, d] each
        q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = rope.rotate(q), rope.rotate(k)
        bias = None if log_sizes is None else _key_bias(log_sizes.to(v.dtype), q.shape[1], q.shape[2])
        return self.proj(F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2))


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
        x = x + self.ls1(self.attn(self.norm1(x), rope, log_sizes))
        return x + self.ls2(self.mlp(self.norm2(x)))
