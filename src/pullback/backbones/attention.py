"""Fused attention in which a key may stand for several tokens."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, log_sizes: Tensor | None = None) -> Tensor:
    """softmax(q k^T / sqrt(d) + log_sizes) v: queries [B, h, n, d], keys and values [B, h, N, d], log_sizes [B, N].

    A key that stands for s equal tokens weighs as much as they did (proportional attention, Bolya et al. 2023).
    """
    if log_sizes is None:
        return F.scaled_dot_product_attention(q, k, v)
    # Fused kernels want rows of the bias at multiples of 16 bytes, and read one row again and again if it is a view.
    # Measured on an H200 with 685 keys: 0.47 ms, without this 0.89 ms, as one more channel of q and k 0.55 ms, with no
    # sizes at all 0.31 ms.
    count = k.shape[2]
    row = F.pad(log_sizes.to(q.dtype), (0, -count % 8))[:, None, None, :count]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=row.expand(-1, q.shape[1], q.shape[2], -1))
