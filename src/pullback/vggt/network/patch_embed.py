"""From pixels to patch tokens: one convolution, or DINOv2 with registers.

`models/dinov2.py` is the same ViT under the names of transformers' checkpoints; VGGT's checkpoint has the names of the
original release, one matrix for queries, keys and values, and no layer of it is ever probed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pullback.vggt.network.block import Block
from pullback.vggt.network.config import CONVOLUTION, VGGTConfig


class ConvPatches(nn.Module):
    def __init__(self, patch: int, dim: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, dim, patch, stride=patch)

    def forward(self, images: Tensor) -> Tensor:
        """[F, 3, H, W] -> [F, h w, C], row by row."""
        return self.proj(images).flatten(2).mT


class PatchViT(nn.Module):
    """[class | registers | patches] through ``depth`` blocks and a norm; only the patches are passed on."""

    def __init__(
        self,
        img_size: int,
        patch_size: int,
        dim: int,
        depth: int,
        heads: int,
        registers: int,
        mlp_ratio: float = 4.0,
        layer_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.patch_size, self.side = patch_size, img_size // patch_size
        self.cls_token = nn.Parameter(1e-6 * torch.randn(1, 1, dim))
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, 1 + self.side**2, dim))
        self.register_tokens = nn.Parameter(1e-6 * torch.randn(1, registers, dim))
        self.mask_token = nn.Parameter(torch.zeros(1, dim), requires_grad=False)  # in checkpoints, never used here
        self.patch_embed = ConvPatches(patch_size, dim)
        self.blocks = nn.ModuleList(
            [Block(dim, heads, mlp_ratio, layer_scale=layer_scale, eps=1e-6) for _ in range(depth)]
        )
        self.norm = nn.LayerNorm(dim, eps=1e-6)

    def position_embedding(self, rows: int, columns: int) -> Tensor:
        """[1, 1 + h w, C], class token first; the stored grid is resized in float32 unless it fits as it is."""
        if rows == columns == self.side:
            return self.pos_embed
        grid = self.pos_embed[:, 1:].unflatten(1, (self.side, self.side)).permute(0, 3, 1, 2).float()
        # with antialias torch uses another cubic kernel, so it matters even where the grid grows
        resized = F.interpolate(grid, (rows, columns), mode="bicubic", align_corners=False, antialias=True)
        return torch.cat([self.pos_embed[:, :1], resized.flatten(2).mT.to(self.pos_embed.dtype)], 1)

    def embed(self, images: Tensor) -> Tensor:
        """[F, 3, H, W] -> the tokens that enter block 0, [F, 1 + R + h w, C]; registers have no position."""
        frames, (rows, columns) = len(images), (side // self.patch_size for side in images.shape[-2:])
        tokens = torch.cat([self.cls_token.expand(frames, -1, -1), self.patch_embed(images)], 1)
        tokens = tokens + self.position_embedding(rows, columns)
        registers = self.register_tokens.expand(frames, -1, -1)
        return torch.cat([tokens[:, :1], registers, tokens[:, 1:]], 1)

    def encode(self, images: Tensor) -> Tensor:
        """[F, 3, H, W] -> all tokens after the last block, before the norm."""
        tokens = self.embed(images)
        for block in self.blocks:
            tokens = block(tokens)
        return tokens

    def forward(self, images: Tensor) -> Tensor:
        """[F, 3, H, W] -> normalised patch tokens [F, h w, C]."""
        return self.norm(self.encode(images)[:, 1 + self.register_tokens.shape[1] :])


def patch_embedding(config: VGGTConfig) -> nn.Module:
    """[F, 3, H, W], normalised pixels -> [F, h w, C]."""
    if config.patch_embed == CONVOLUTION:
        return ConvPatches(config.patch_size, config.embed_dim)
    return PatchViT(
        config.img_size,
        config.patch_size,
        config.embed_dim,
        config.vit_depth,
        config.num_heads,
        config.num_register_tokens,
        config.mlp_ratio,
    )
