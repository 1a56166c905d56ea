"""The trunk of VGGT: attention within each view and attention over all views take turns.

Layer l is the state after global block l: tokens [B, N, C] of all views, N = S P, view after view, each view being
[camera | registers | patches row by row] (a `TokenLayout`). What the heads read of a layer, its tap [B, S, P, 2C], is
the output of frame block l beside that of global block l.

    state = aggregator.embed(images)                                   # layer -1: what enters block 0
    state = aggregator.advance(state, 16)                              # layer 16, for a probe
    taps = aggregator.taps(dataclasses.replace(state, tokens=tokens))  # as a function of the tokens of layer 16
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from pullback.errors import ImageError, ModelError, ShapeError
from pullback.tokens import TokenLayout
from pullback.vggt.network.block import Block
from pullback.vggt.network.config import VGGTConfig
from pullback.vggt.network.patch_embed import patch_embedding
from pullback.vggt.network.rope import Rope, rope_tables, token_positions

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class AggregatorState:
    """What is known after global block ``layer``; -1 stands before block 0.

    ``frame`` is the other half of this layer's own tap, and ``held`` the taps [B, S, P, 2C] of layers below that heads
    read. A probe that perturbs ``tokens`` leaves both as the images made them.
    """

    layer: int
    tokens: Tensor  # [B, N, C]
    layout: TokenLayout
    frame: Tensor | None = None  # [B, N, C], the output of frame block `layer`
    held: Mapping[int, Tensor] = field(default_factory=dict)

    def tap(self) -> Tensor:
        """This layer as the heads read it: [B, S, P, 2C], frame half first."""
        if self.frame is None:
            raise ModelError("layer: the state before block 0 has no tap. Advance to layer 0 or further first.")
        return torch.cat([self.frame, self.tokens], -1).unflatten(1, (self.layout.views, -1))


class Aggregator(nn.Module):
    def __init__(self, config: VGGTConfig) -> None:
        super().__init__()
        self.config = config
        dim = config.embed_dim
        # index 0 is for the first view of a scene, the reference; index 1 for all others
        self.camera_token = nn.Parameter(1e-6 * torch.randn(1, 2, 1, dim))
        self.register_token = nn.Parameter(1e-6 * torch.randn(1, 2, config.num_register_tokens, dim))
        self.patch_embed = patch_embedding(config)
        self.frame_blocks = nn.ModuleList([self._block() for _ in range(config.depth)])
        self.global_blocks = nn.ModuleList([self._block() for _ in range(config.depth)])

    def _block(self) -> Block:
        own = self.config
        return Block(own.embed_dim, own.num_heads, own.mlp_ratio, layer_scale=own.layer_scale, qk_norm=True)

    def token_layout(self, images: Tensor) -> TokenLayout:
        """Return where the tokens of images [B, S, 3, H, W] sit; images that cannot be embedded are refused here."""
        if images.ndim != 5 or images.shape[2] != 3 or not images.shape[0] or not images.shape[1]:
            raise ImageError(
                "images: expected one scene [S, 3, H, W] or several [B, S, 3, H, W] with at least one view of three "
                f"channels, got {list(images.shape)}."
            )
        if not images.is_floating_point():
            raise ImageError(
                f"images: expected floating-point values in [0, 1], got {images.dtype}. Convert them: "
                "images.float() / 255."
            )
        patch, (height, width) = self.config.patch_size, images.shape[-2:]
        if height % patch or width % patch or not height or not width:
            fits = [max(1, round(side / patch)) * patch for side in (height, width)]
            raise ImageError(
                f"images: {height}x{width} pixels are not divisible by the patch size {patch}. Use {fits[0]}x{fits[1]}."
            )
        return TokenLayout(self.config.prefix, (height // patch, width // patch), images.shape[1])

    def embed(self, images: Tensor) -> AggregatorState:
        """Images [B, S, 3, H, W] in [0, 1] -> the state that enters block 0."""
        layout = self.token_layout(images)
        batch, views = images.shape[:2]
        images = images.to(self.camera_token)
        # Filled in on the device: a copy from the host could not be part of a CUDA graph.
        mean, std = (torch.stack([images.new_full((1, 1), value) for value in values]) for values in (MEAN, STD))
        patches = self.patch_embed(((images - mean) / std).flatten(0, 1)).unflatten(0, (batch, views))
        special = torch.cat([self.camera_token, self.register_token], 2)  # [1, 2, prefix, C]
        special = torch.cat([special[:, :1], special[:, 1:].expand(-1, views - 1, -1, -1)], 1).expand(batch, -1, -1, -1)
        return AggregatorState(-1, torch.cat([special, patches], 2).flatten(1, 2), layout)

    def ropes(self, layout: TokenLayout, like: Tensor) -> tuple[Rope, Rope]:
        """Rotary tables for the tokens of one view and for those of all; `Rope.at` makes those of a choice."""
        own = self.config
        positions = token_positions(layout, like.device)
        one_view = rope_tables(positions, own.embed_dim // own.num_heads, own.rope_base, like.dtype)
        return one_view, one_view.repeat(layout.views)

    def step(self, layer: int, tokens: Tensor, views: int, ropes: tuple[Rope, Rope]) -> tuple[Tensor, Tensor]:
        """Tokens [B, N, C] that enter block ``layer`` -> its frame output and its global output, [B, N, C] both."""
        frame = self.frame_step(layer, tokens, views, ropes[0])
        return frame, self.global_blocks[layer](frame, ropes[1])

    def frame_step(self, layer: int, tokens: Tensor, views: int, rope: Rope, log_sizes: Tensor | None = None) -> Tensor:
        """Frame block ``layer`` alone, [B, N, C] -> [B, N, C]. Views may have lost tokens, equally many each: then
        ``rope`` is that of the tokens that are left, [B S, 1, n, 2, F/2], and ``log_sizes`` [B S, n] what they count.
        """
        per_view = tokens.unflatten(1, (views, -1)).flatten(0, 1)  # [B S, P, C]
        return self.frame_blocks[layer](per_view, rope, log_sizes).unflatten(0, (-1, views)).flatten(1, 2)

    def run(self, tokens: Tensor, start: int, stop: int, layout: TokenLayout) -> Tensor:
        """Blocks start, ..., stop-1: tokens [B, N, C] that enter block start -> those after global block stop-1."""
        self._check_range(start, stop)
        self._check_tokens(tokens, layout)
        ropes = self.ropes(layout, tokens)
        for layer in range(start, stop):
            _, tokens = self.step(layer, tokens, layout.views, ropes)
        return tokens

    def advance(self, state: AggregatorState, layer: int) -> AggregatorState:
        """The state after global block ``layer``, with the taps passed on the way that heads read."""
        self._check_range(state.layer + 1, layer + 1)
        self._check_tokens(state.tokens, state.layout)
        ropes, held = self.ropes(state.layout, state.tokens), dict(state.held)
        while state.layer < layer:
            if state.layer in self.config.read_layers:
                held[state.layer] = state.tap()
            frame, tokens = self.step(state.layer + 1, state.tokens, state.layout.views, ropes)
            state = AggregatorState(state.layer + 1, tokens, state.layout, frame, held)
        return state

    def taps(self, state: AggregatorState) -> dict[int, Tensor]:
        """What the heads read, layer -> [B, S, P, 2C], from any state on."""
        last = self.advance(state, self.config.depth - 1)
        return {**last.held, last.layer: last.tap()}

    def forward(self, images: Tensor) -> dict[int, Tensor]:
        """Images [B, S, 3, H, W] in [0, 1] -> the taps of all layers that heads read."""
        return self.taps(self.embed(images))

    def _check_range(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= self.config.depth:
            raise ModelError(
                f"layer: expected blocks in ascending order from 0 to {self.config.depth - 1}, got {start} to "
                f"{stop - 1}. Layer l is the state after global block l, and blocks run only forwards."
            )

    def _check_tokens(self, tokens: Tensor, layout: TokenLayout) -> None:
        if tokens.ndim != 3 or tokens.shape[1:] != (layout.tokens, self.config.embed_dim):
            raise ShapeError(
                f"tokens: expected [B, {layout.tokens}, {self.config.embed_dim}] ({layout.views} views of "
                f"{layout.prefix} + {layout.patches} tokens), got {list(tokens.shape)}."
            )
