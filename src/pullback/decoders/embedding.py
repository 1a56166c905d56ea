"""Decoders that give one vector per image: class token, projection, pooling head, mean of the patches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pullback.backbones import Backbone
from pullback.decoders.decoder import Decoder
from pullback.errors import DecoderError
from pullback.tokens import TokenLayout


def class_token(backbone: Backbone) -> Decoder:
    """The class token after the final norm."""
    if backbone.prefix == 0:
        raise DecoderError(
            f"decoder: {backbone.name} has no class token, so 'cls' does not exist. Use 'pool' or 'mean'."
        )

    def decode(taps: Sequence[Tensor], layout: TokenLayout) -> Tensor:
        return taps[0][:, 0]

    return Decoder("cls", (backbone.depth - 1,), decode, rows=1, linear=True)


def projection(backbone: Backbone) -> Decoder:
    """CLIP's embedding in the space that it shares with text: a matrix on the normalised class token."""
    project = getattr(backbone.model, "visual_projection", None)
    if project is None:
        raise DecoderError(
            f"decoder: {backbone.name} has no visual_projection. 'projection' needs a CLIP model with one."
        )

    def decode(taps: Sequence[Tensor], layout: TokenLayout) -> Tensor:
        return project(taps[0][:, 0])

    return Decoder("projection", (backbone.depth - 1,), decode, rows=1, linear=project.bias is None)


def patch_mean(backbone: Backbone) -> Decoder:
    """The mean of the patch tokens after the final norm."""

    def decode(taps: Sequence[Tensor], layout: TokenLayout) -> Tensor:
        return layout.patch_map(taps[0]).mean((1, 2, 3))

    return Decoder("mean", (backbone.depth - 1,), decode, linear=True)


def pool(backbone: Backbone) -> Decoder:
    """The model's own pooling head: attention pooling (SigLIP) or a dense layer on the class token (ViT, DeiT)."""
    tower = getattr(backbone.model, "vision_model", None) or backbone.model
    last = (backbone.depth - 1,)
    head = getattr(tower, "head", None)
    if backbone.family == "siglip" and head is not None:
        return Decoder("pool", last, lambda taps, layout: attention_pool(head, taps[0]))
    pooler = getattr(backbone.model, "pooler", None)
    if pooler is None:
        raise DecoderError(f"decoder: {backbone.name} ({backbone.family}) has no pooling head. Use 'cls' or 'mean'.")
    return Decoder("pool", last, lambda taps, layout: pooler(taps[0]), rows=1)


def attention_pool(head: Any, tokens: Tensor) -> Tensor:
    """SigLIP's pooling head, [B, N, D] -> [B, D], written out: `nn.MultiheadAttention` has no forward mode."""
    attention = head.attention
    heads = attention.num_heads
    wq, wk, wv = attention.in_proj_weight.chunk(3)
    bq, bk, bv = attention.in_proj_bias.chunk(3)
    q = F.linear(head.probe[0], wq, bq).unflatten(-1, (heads, -1)).transpose(0, 1)  # [h, 1, d]
    k = F.linear(tokens, wk, bk).unflatten(-1, (heads, -1)).transpose(1, 2)  # [B, h, N, d]
    v = F.linear(tokens, wv, bv).unflatten(-1, (heads, -1)).transpose(1, 2)
    weights = torch.softmax((q * q.shape[-1] ** -0.5) @ k.mT, -1)
    pooled = attention.out_proj((weights @ v).transpose(1, 2).flatten(2))  # [B, 1, D]
    return (pooled + head.mlp(head.layernorm(pooled)))[:, 0]
