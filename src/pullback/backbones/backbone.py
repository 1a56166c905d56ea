"""The one contract behind which every ViT family stands."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from pullback.backbones.block import Block, Norm, Rope
from pullback.errors import ImageError, ModelError, ShapeError
from pullback.tokens import TokenLayout


@dataclass(frozen=True)
class Preprocessing:
    """How pixels in [0, 1] become the model's input, and the size it was trained at."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    size: int
    interpolation: str = "bicubic"


@dataclass(frozen=True)
class Backbone:
    """A frozen ViT: embed the images, run any range of blocks on any tokens, apply the final norm.

    Layer l is the 0-based index of a block and F^l the output of block l. ``model`` is the transformers module whose
    parameters the blocks refer to. ``hook_layers`` are those that the model's own dense decoder reads, if it has one.
    """

    name: str
    family: str
    model: nn.Module
    blocks: tuple[Block, ...]
    norm: Norm
    prefix: int
    patch_size: int
    preprocessing: Preprocessing
    embed_pixels: Callable[[Tensor], Tensor] = field(repr=False)
    rope_tables: Callable[[TokenLayout], Rope] | None = field(default=None, repr=False)
    hook_layers: tuple[int, ...] = ()
    hooks_normed: bool = True

    @property
    def depth(self) -> int:
        return len(self.blocks)

    @property
    def default_layer(self) -> int:
        """The last but one block: the last whose features still pass through attention."""
        return max(0, self.depth - 2)

    @property
    def dim(self) -> int:
        return self.norm.weight.shape[0]

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.weight.dtype

    def token_layout(self, images: Tensor) -> TokenLayout:
        """The token layout of images [B, 3, H, W]."""
        if images.ndim != 4 or images.shape[1] != 3:
            raise ImageError(f"images: expected [B, 3, H, W], got {list(images.shape)}.")
        height, width = images.shape[-2:]
        if height % self.patch_size or width % self.patch_size:
            fits = [max(1, round(side / self.patch_size)) * self.patch_size for side in (height, width)]
            raise ImageError(
                f"images: {height}x{width} pixels are not divisible by the patch size {self.patch_size} of "
                f"{self.name}. Use {fits[0]}x{fits[1]}, for instance load_images(..., size={fits[0]})."
            )
        return TokenLayout(self.prefix, (height // self.patch_size, width // self.patch_size))

    def embed(self, images: Tensor) -> Tensor:
        """[B, 3, H, W] -> the tokens that enter block 0, [B, N, D]."""
        self.token_layout(images)
        return self.embed_pixels(images.to(device=self.device, dtype=self.dtype))

    def rope(self, layout: TokenLayout) -> Rope | None:
        return None if self.rope_tables is None else self.rope_tables(layout)

    def run(
        self,
        tokens: Tensor,
        start: int,
        stop: int,
        *,
        layout: TokenLayout | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Blocks start, ..., stop-1 on any subset of the tokens.

        ``positions`` [B, n] are the tokens' places in the full sequence of ``layout``; only families with rotary
        positions need them (and a layout when the grid is not square).
        """
        rope = self.rope_of(tokens, layout, positions)
        for block in self.blocks[start:stop]:
            tokens = block(tokens, rope)
        return tokens

    def rope_of(self, tokens: Tensor, layout: TokenLayout | None, positions: Tensor | None) -> Rope | None:
        """The rotary tables of these tokens, None for families without."""
        if self.rope_tables is None:
            return None
        if positions is not None and layout is None:
            raise ShapeError("layout: needed with positions, because rotary positions depend on the patch grid.")
        rope = self.rope_tables(layout or TokenLayout.square(tokens.shape[1], self.prefix))
        return rope if positions is None else rope.gather(positions)

    def features(self, images: Tensor, layers: Sequence[int]) -> dict[int, Tensor]:
        """F^l of images for several layers in one pass."""
        for layer in layers:
            self.check_layer(layer)
        layout, tokens, kept = self.token_layout(images), self.embed(images), {}
        start = 0
        for layer in sorted(set(layers)):
            tokens = self.run(tokens, start, layer + 1, layout=layout)
            kept[layer], start = tokens, layer + 1
        return kept

    def check_layer(self, layer: int) -> None:
        if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < self.depth:
            raise ModelError(
                f"layer: expected a block index from 0 to {self.depth - 1} ({self.name} has {self.depth} blocks; "
                f"layer l is the output of block l), got {layer!r}."
            )

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.model.parameters()
