"""Fused attention in which a key may stand for several tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, log_sizes: Tensor | None = None) -> Tensor:
    """softmax(q k^T / sqrt(d) + log_sizes) v: queries [B, h, n, d], keys and values [B, h, N, d], log_sizes [B, N].

    A key that stands for s equal tokens weighs as much as they did (proportional attention, Bolya et al. 2023).
    """
    if log_sizes is None:
        return F.scaled_dot_product_attention(q, k, v)
    if q.device.type == "cpu":
        return F.scaled_dot_product_attention(q, k, v, attn_mask=log_sizes[:, None, None].to(q.dtype))
    return _attend_with_channel(q, k, v, log_sizes)


def _attend_with_channel(q: Tensor, k: Tensor, v: Tensor, log_sizes: Tensor) -> Tensor:
    """The same with one more channel, sqrt(d) in each query and log s in each key: a mask would keep GPUs off their
    fastest kernel. Head sizes must be multiples of 8 there, so zeros fill up; values get them too, and lose them."""
    dim = q.shape[-1]
    spare = -(dim + 1) % 8
    ones = torch.full_like(q[..., :1], dim**0.5)
    sizes = log_sizes.to(k.dtype)[:, None, :, None].expand(-1, k.shape[1], -1, -1)
    q = F.pad(torch.cat([q, ones], -1), (0, spare))
    k = F.pad(torch.cat([k, sizes], -1), (0, spare))
    v = F.pad(v, (0, spare + 1))
    return F.scaled_dot_product_attention(q, k, v, scale=dim**-0.5)[..., :dim]
