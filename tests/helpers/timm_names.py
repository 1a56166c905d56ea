"""A vision transformer with the attribute names, the positions and the heads of timm, written by hand.

timm itself imports torchvision, which the tests do without.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, PATCH, GRID, CLASSES = 24, 3, 8, (3, 3), 5


class PatchEmbed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch_size, self.grid_size = (PATCH, PATCH), GRID
        self.img_size = tuple(PATCH * side for side in GRID)
        self.proj, self.norm = nn.Conv2d(3, WIDTH, PATCH, stride=PATCH), nn.Identity()


class LayerScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.scale = HEADS, WIDTH // HEADS, (WIDTH // HEADS) ** -0.5
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.q_norm, self.k_norm, self.attn_drop, self.proj_drop = (nn.Identity() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, count, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, count, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        weights = ((self.q_norm(q) * self.scale) @ self.k_norm(k).mT).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(batch, count, width))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act, self.drop1 = nn.Linear(WIDTH, 40), nn.GELU(), nn.Dropout(0.0)
        self.norm, self.fc2, self.drop2 = nn.Identity(), nn.Linear(40, WIDTH), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop2(self.fc2(self.norm(self.drop1(self.act(self.fc1(x))))))


class Block(nn.Module):
    def __init__(self, scaled: bool) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(WIDTH, eps=1e-6), Attention()
        self.ls1, self.drop_path1 = LayerScale() if scaled else nn.Identity(), nn.Identity()
        self.norm2, self.mlp = nn.LayerNorm(WIDTH, eps=1e-6), Mlp()
        self.ls2, self.drop_path2 = LayerScale() if scaled else nn.Identity(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x))))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


class TimmViT(nn.Module):
    """timm's VisionTransformer. With registers, positions are for patches alone (no_embed_class), as in its models."""

    def __init__(
        self,
        global_pool: str,
        registers: int = 0,
        *,
        dynamic: bool = True,
        classes: int = CLASSES,
        fc_norm: bool = True,
    ) -> None:
        super().__init__()
        self.global_pool, self.dynamic_img_size, self.no_embed_class = global_pool, dynamic, registers > 0
        self.num_prefix_tokens = 1 + registers
        after = global_pool == "avg" and fc_norm
        self.patch_embed, self.pos_drop, self.patch_drop = PatchEmbed(), nn.Dropout(0.0), nn.Identity()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.reg_token = nn.Parameter(torch.zeros(1, registers, WIDTH)) if registers else None
        places = GRID[0] * GRID[1] + (0 if self.no_embed_class else self.num_prefix_tokens)
        self.pos_embed = nn.Parameter(torch.zeros(1, places, WIDTH))
        self.norm_pre = nn.LayerNorm(WIDTH) if registers else nn.Identity()
        self.blocks = nn.Sequential(*(Block(scaled=registers > 0) for _ in range(3)))
        self.norm = nn.Identity() if after else nn.LayerNorm(WIDTH, eps=1e-6)
        self.fc_norm = nn.LayerNorm(WIDTH, eps=1e-6) if after else nn.Identity()
        self.head_drop, self.head = nn.Dropout(0.0), nn.Linear(WIDTH, classes) if classes else nn.Identity()

    def forward_features(self, x: Tensor) -> Tensor:
        x = self.patch_embed.proj(x)
        grid = tuple(x.shape[2:])
        x = self.patch_embed.norm(x.flatten(2).transpose(1, 2))
        return self.norm(self.blocks(self.norm_pre(self.patch_drop(self._pos_embed(x, grid)))))

    def _pos_embed(self, x: Tensor, grid: tuple[int, ...]) -> Tensor:
        before = 0 if self.no_embed_class else self.num_prefix_tokens
        positions = self.pos_embed
        if grid != GRID:
            assert self.dynamic_img_size, "Input height and width do not match the model"
            square = positions[:, before:].reshape(1, *GRID, WIDTH).permute(0, 3, 1, 2).float()
            resized = F.interpolate(square, size=grid, mode="bicubic", antialias=True)
            resized = resized.permute(0, 2, 3, 1).reshape(1, -1, WIDTH).to(positions.dtype)
            positions = torch.cat([positions[:, :before], resized], 1)
        prefix = [token.expand(len(x), -1, -1) for token in (self.cls_token, self.reg_token) if token is not None]
        if self.no_embed_class:
            return self.pos_drop(torch.cat([*prefix, x + positions], 1))
        return self.pos_drop(torch.cat([*prefix, x], 1) + positions)

    def forward(self, x: Tensor) -> Tensor:
        x = self.forward_features(x)
        x = x[:, self.num_prefix_tokens :].mean(1) if self.global_pool == "avg" else x[:, 0]
        return self.head(self.head_drop(self.fc_norm(x)))
