"""Attention linearised where only a few tokens are read: the last block of a class-token decoder.

With R queries and h heads there are only R h attention rows, so keys and values are never formed for a tangent. With
a_(h,r) = W_K,h^T q_(h,r) and dx_t the normalised tangent of token t,

    q . dk_t = a . dx_t,      sum_t P_t dv_t = W_V,h (sum_t P_t dx_t)                            (forward)
    x'_t = sum_(h,r) P_t W_V,h^T c_h + S'_t a_(h,r)                                              (reverse)

N D (2 R h) multiplications instead of N D (2 D): 32 times fewer for one class token of a ViT-S or ViT-B.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pullback.backbones.block import Block, Rope
from pullback.backbones.linearized_attention import LinearizedAttention


class LinearizedReadout(LinearizedAttention):
    """The same map as `LinearizedAttention` without a rotary embedding, which would turn every key differently."""

    @staticmethod
    def pays(block: Block, rope: Rope | None, rows: int) -> bool:
        """2 R h D multiplications per token against 2 D^2, both without the launches: at least half are saved."""
        return rope is None and 2 * rows <= block.head_dim

    def __init__(self, block: Block, x: Tensor, rope: Rope | None, rows: int) -> None:
        super().__init__(block, x, rope, rows)
        heads = self.heads
        per_head = self.key_value_weight.unflatten(0, (2, heads, -1))  # [2, h, d, D]
        key_weight, self.value_weight = per_head[0], per_head[1].contiguous()
        q, k, v, p, o = (
            t.unflatten(0, (-1, heads)) for t in (self.q, self.k, self.v, self.probabilities, self.attended)
        )
        self.pulled_query = torch.einsum("bhrd,hde->bhre", q, key_weight).flatten(1, 2)  # a: [B, hR, D]
        self.rows_of_attention = p.flatten(1, 2)  # [B, hR, N]
        self.keys, self.values, self.outputs = k, v, o.unsqueeze(2)  # [B, h, N, d] twice, [B, h, 1, R, d]

    def jvp(self, dx: Tensor) -> Tensor:
        """[B, K, N, D] -> [B, K, R, D]."""
        heads, rows = self.heads, self.rows
        dq = self._split(dx[:, :, :rows] @ self.query_weight.mT, 1)[0].permute(0, 3, 1, 2, 4)  # [B, h, K, R, d]
        scores = (self.pulled_query[:, None] @ dx.mT).unflatten(2, (heads, rows)).transpose(1, 2)  # [B, h, K, R, N]
        scores = scores + (dq.flatten(2, 3) @ self.keys.mT).view(scores.shape)
        scores = scores * self.rows_of_attention.unflatten(1, (heads, rows))[:, :, None]
        moved = (scores.flatten(2, 3) @ self.values).view(*scores.shape[:-1], -1)
        moved = moved.addcmul(scores.sum(-1, keepdim=True), self.outputs, value=-1)
        gathered = (self.rows_of_attention[:, None] @ dx).unflatten(2, (heads, rows))  # [B, K, h, R, D]
        moved = moved + torch.einsum("bkhre,hde->bhkrd", gathered, self.value_weight)
        return moved.permute(0, 2, 3, 1, 4).flatten(3) @ self.project_weight.mT

    def vjp(self, c: Tensor) -> Tensor:
        """[B, K, R, D] -> [B, K, N, D]."""
        batch, count = c.shape[:2]
        moved = self._split(c @ self.project_weight, 1)[0].permute(0, 3, 1, 2, 4)  # [B, h, K, R, d]
        drop = (moved * self.outputs).sum(-1, keepdim=True)
        scores = (moved.flatten(2, 3) @ self.values.mT).view(*moved.shape[:-1], self.tokens)
        scores = (scores - drop) * self.rows_of_attention.unflatten(1, (self.heads, self.rows))[:, :, None]
        query = (scores.flatten(2, 3) @ self.keys).view(moved.shape).permute(0, 2, 3, 1, 4)  # [B, K, R, h, d]
        pulled_value = torch.einsum("bhkrd,hde->bkhre", moved, self.value_weight).flatten(2, 3)  # [B, K, hR, D]
        weights = torch.cat(
            [
                self.rows_of_attention[:, None].expand(-1, count, -1, -1),
                scores.transpose(1, 2).flatten(2, 3),
            ],
            2,
        )  # [B, K, 2hR, N]
        vectors = torch.cat([pulled_value, self.pulled_query[:, None].expand(-1, count, -1, -1)], 2)
        out = (weights.flatten(0, 1).mT @ vectors.flatten(0, 1)).unflatten(0, (batch, count))
        out[:, :, : self.rows] += query.flatten(3) @ self.query_weight
        return out
