"""DINOv2 with the parameter names of its published checkpoints, so that their safetensors load as they are.

transformers has the same network, but importing it takes longer (5 to 10 s on a machine without cached byte code) than
diagnosing fifty images; `tests/backbones` checks that both give the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Dinov2Config:
    """The fields of a checkpoint's config.json that shape the network."""

    model_type: str = "dinov2"
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    mlp_ratio: int = 4
    layer_norm_eps: float = 1e-6
    image_size: int = 518
    patch_size: int = 14
    num_channels: int = 3
    qkv_bias: bool = True
    use_swiglu_ffn: bool = False
    num_register_tokens: int = 0
    hidden_act: str = "gelu"
    _commit_hash: ClassVar[None] = None  # pipelines of transformers up to 5.17 ask for it

    @classmethod
    def from_dict(cls, published: dict[str, Any]) -> Dinov2Config:
        known = {field.name for field in fields(cls)}
        values = {name: value for name, value in published.items() if name in known}
        if values.get("model_type") == "dinov2_with_registers":
            values.setdefault("num_register_tokens", 4)
        return cls(**values)


class PatchEmbeddings(nn.Module):
    def __init__(self, config: Dinov2Config) -> None:
        super().__init__()
        patch = config.patch_size
        self.projection = nn.Conv2d(config.num_channels, config.hidden_size, patch, stride=patch)

    def forward(self, images: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, D, h, w]."""
        return self.projection(images)


class Embeddings(nn.Module):
    """Patches plus positions (resized bicubically to the image's grid), class token first, registers after it."""

    def __init__(self, config: Dinov2Config) -> None:
        super().__init__()
        self.config = config
        side, dim = config.image_size // config.patch_size, config.hidden_size
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.mask_token = nn.Parameter(torch.zeros(1, dim))
        self.position_embeddings = nn.Parameter(torch.zeros(1, 1 + side * side, dim))
        if config.num_register_tokens:
            self.register_tokens = nn.Parameter(torch.zeros(1, config.num_register_tokens, dim))
        self.patch_embeddings = PatchEmbeddings(config)

    def forward(self, images: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, 1 + registers + h w, D]."""
        patches = self.patch_embeddings(images)
        tokens = patches.flatten(2).mT + self._patch_positions(patches.shape[2], patches.shape[3])
        batch = images.shape[0]  # len() would fix the batch in an export
        prefix = [(self.cls_token + self.position_embeddings[:, :1]).expand(batch, -1, -1)]
        if self.config.num_register_tokens:
            prefix.append(self.register_tokens.expand(batch, -1, -1))
        return torch.cat([*prefix, tokens], 1)

    def _patch_positions(self, rows: int, columns: int) -> Tensor:
        """[1, h w, D]. Resized in float32; models with registers were trained with antialiasing, others without."""
        stored = self.position_embeddings[:, 1:]
        side = round(stored.shape[1] ** 0.5)
        if rows == columns == side:
            return stored
        grid = stored.unflatten(1, (side, side)).permute(0, 3, 1, 2).float()
        antialias = self.config.num_register_tokens > 0
        resized = F.interpolate(grid, (rows, columns), mode="bicubic", align_corners=False, antialias=antialias)
        return resized.flatten(2).mT.to(stored.dtype)


class LayerScale(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.lambda1 = nn.Parameter(torch.ones(dim))


class SwiGLU(nn.Module):
    """Gate and value in one matrix, two thirds of the plain width, rounded up to a multiple of 8."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        width = (int(hidden * 2 / 3) + 7) // 8 * 8
        self.weights_in = nn.Linear(dim, 2 * width)
        self.weights_out = nn.Linear(width, dim)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.weights_in(x).chunk(2, -1)
        return self.weights_out(F.silu(gate) * value)


class Mlp(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.activation = nn.GELU()
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.activation(self.fc1(x)))


class SelfAttention(nn.Module):
    def __init__(self, dim: int, bias: bool) -> None:
        super().__init__()
        self.query = nn.Linear(dim, dim, bias=bias)
        self.key = nn.Linear(dim, dim, bias=bias)
        self.value = nn.Linear(dim, dim, bias=bias)


class SelfOutput(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dense = nn.Linear(dim, dim)


class Attention(nn.Module):
    def __init__(self, dim: int, bias: bool) -> None:
        super().__init__()
        self.attention = SelfAttention(dim, bias)
        self.output = SelfOutput(dim)

    def forward(self, x: Tensor, heads: int) -> Tensor:
        own = self.attention
        q, k, v = (f(x).unflatten(-1, (heads, -1)).transpose(1, 2) for f in (own.query, own.key, own.value))
        return self.output.dense(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, config: Dinov2Config) -> None:
        super().__init__()
        self.heads = config.num_attention_heads
        dim, hidden = config.hidden_size, int(config.hidden_size * config.mlp_ratio)
        self.norm1 = nn.LayerNorm(dim, eps=config.layer_norm_eps)
        self.attention = Attention(dim, config.qkv_bias)
        self.layer_scale1 = LayerScale(dim)
        self.norm2 = nn.LayerNorm(dim, eps=config.layer_norm_eps)
        self.mlp = SwiGLU(dim, hidden) if config.use_swiglu_ffn else Mlp(dim, hidden)
        self.layer_scale2 = LayerScale(dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.layer_scale1.lambda1 * self.attention(self.norm1(x), self.heads)
        return x + self.layer_scale2.lambda1 * self.mlp(self.norm2(x))


class Encoder(nn.Module):
    def __init__(self, config: Dinov2Config) -> None:
        super().__init__()
        self.layer = nn.ModuleList([Layer(config) for _ in range(config.num_hidden_layers)])


class Dinov2Output(NamedTuple):
    last_hidden_state: Tensor | None  # [B, N, D], after the final norm; None where the class token alone was computed
    pooler_output: Tensor  # [B, D], its class token


class Dinov2(nn.Module):
    def __init__(self, config: Dinov2Config) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.encoder = Encoder(config)
        self.layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, pixel_values: Tensor) -> Dinov2Output:
        x = self.embeddings(pixel_values)
        for layer in self.encoder.layer:
            x = layer(x)
        return self.finish(x)

    def finish(self, tokens: Tensor) -> Dinov2Output:
        """The output from the tokens that leave the last block, all or some of them."""
        hidden = self.layernorm(tokens)
        return Dinov2Output(hidden, hidden[:, 0])
