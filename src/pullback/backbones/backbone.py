"""What the package needs of a frozen network, and the vision transformer that meets it.

`AnyBackbone` is the contract: probes, decoders and diagnoses use nothing else of a network. `Backbone` is a ViT of any
family, taken apart into blocks as data (`families.py`); VGGT is the other network that meets the contract
(`pullback.vggt.backbone`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from pullback.backbones.block import Block, Norm, Rope, TokenMap
from pullback.backbones.samples import Samples, image_samples
from pullback.data.images import ImageBatch, ImageSource, PixelFormat, checked_size, read_images
from pullback.data.pictures import Pictures, as_pixels
from pullback.errors import ImageError, ModelError, ShapeError, naming
from pullback.operators import FunctionLinearization, Linearization
from pullback.tokens import TokenLayout

Size = int | tuple[int, int] | None
"""Pixels: the side of a square, (height, width), or None for the network's own."""


@dataclass(frozen=True)
class Preprocessing:
    """How pixels in [0, 1] become the model's input, and the size it was trained at."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    size: int
    interpolation: str = "bicubic"


class State(NamedTuple):
    """What a layer leaves behind."""

    tokens: Tensor  # F^l [B, N, D]: what a probe perturbs, and what enters the next layer
    beside: Tensor | None = None  # [B, N, E]: what decoders read of the layer in front of F^l; None for ViTs

    def tap(self) -> Tensor:
        """What decoders read of the layer: [B, N, E + D]."""
        return self.tokens if self.beside is None else torch.cat([self.beside, self.tokens], -1)


@dataclass(frozen=True)
class Classifier:
    """How an image classifier reads the tokens that leave the last block.

    ``logits``: (tokens [B, n, D], layout) -> [B, classes], of the tokens after the final norm if ``normed``.
    ``classes``: None where it stops before a linear layer would make classes. ``rows``: it reads the first so many
    tokens alone; None: it averages the patches, so all of them must be there.
    """

    logits: Callable[[Tensor, TokenLayout], Tensor]
    classes: int | None
    normed: bool = True
    rows: int | None = None

    def read(self, tokens: Tensor, layout: TokenLayout, norm: TokenMap) -> Tensor:
        """Return the logits of tokens [B, N, D] before the final ``norm``."""
        seen = tokens[:, : self.rows]
        return self.logits(norm(seen) if self.normed else seen, layout)


@dataclass(frozen=True, kw_only=True, repr=False)
class AnyBackbone(ABC):
    """A frozen network of ``depth`` layers, as probes see it.

    Layer l is the 0-based index of a block, and F^l [B, N, ``dim``] are the tokens after it. ``norm`` stands between
    the layers and decoders that ask for it (`Decoder.normed`). ``model`` is the module that holds the parameters.
    ``hook_layers`` are the layers that the model's own dense decoder reads, if it has one.

    ``blocks`` are the layers as data, of which products with the Jacobian are written by hand (`linearized.py`). A
    network whose layers are no such blocks leaves them out; its products come from `torch.func`.
    """

    default_decoder: ClassVar[str] = "cls"

    name: str
    family: str
    model: nn.Module
    norm: TokenMap
    prefix: int
    patch_size: int
    preprocessing: Preprocessing
    blocks: tuple[Block, ...] = ()
    hook_layers: tuple[int, ...] = ()

    def __repr__(self) -> str:
        size = f"{self.depth} blocks of width {self.dim}, patches of {self.patch_size} pixels"
        kind = f"{str(self.dtype).removeprefix('torch.')} on {self.device}"
        return f"{type(self).__name__}({self.name!r}, family {self.family}, {size}, prefix of {self.prefix}, {kind})"

    # What a network must say

    @property
    @abstractmethod
    def depth(self) -> int: ...

    @property
    @abstractmethod
    def dim(self) -> int: ...

    @property
    @abstractmethod
    def device(self) -> torch.device: ...

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype: ...

    @abstractmethod
    def token_layout(self, images: Tensor) -> TokenLayout:
        """Return where the tokens of these images sit; images that do not fit are refused."""

    @abstractmethod
    def embed(self, images: Tensor) -> Tensor:
        """Images -> the tokens that enter layer 0, [B, N, D]."""

    @abstractmethod
    def tables(self, layout: TokenLayout, like: Tensor) -> Any:
        """What `step` needs to know of a layout, such as rotary tables; made once, in the dtype of ``like``."""

    @abstractmethod
    def step(self, layer: int, tokens: Tensor, layout: TokenLayout, tables: Any, rows: int | None = None) -> State:
        """F^{layer-1} [B, N, D] through layer ``layer``; of ViTs the first ``rows`` tokens alone, if given."""

    @abstractmethod
    def check_size(self, size: Size) -> None:
        """Refuse a size in pixels that the network cannot see."""

    @abstractmethod
    def read(self, path: ImageSource, size: Size = None, limit: int | None = None) -> Samples:
        """Read samples from files, ready for the network."""

    # What follows from it

    @property
    def views(self) -> bool:
        """Whether a sample is several views of a scene, [S, 3, H, W], and not one image."""
        return False

    @property
    def unit(self) -> str:
        """What samples are called."""
        return "scenes" if self.views else "images"

    @property
    def default_layer(self) -> int:
        """The last but one: the last whose features still pass through attention."""
        return max(0, self.depth - 2)

    @property
    def tap_dim(self) -> int:
        """The width of what decoders read of a layer."""
        return self.dim

    def batch(self, images: Pictures, *, normalized: bool = False) -> Tensor:
        """Return images in any usual form as one batch that the network takes: the one entrance of probes.

        ``normalized=True`` vouches for floats whose range looks wrong.
        """
        return as_pixels(images, self.pixel_format(), normalized=normalized)

    def states(self, images: Tensor, layers: Sequence[int]) -> dict[int, State]:
        """Return the states that several layers leave behind, in one pass."""
        for layer in layers:
            self.check_layer(layer)
        layout, tokens = self.token_layout(images), self.embed(images)
        tables, kept = self.tables(layout, tokens), {}
        for layer in range(max(layers, default=-1) + 1):
            state = self.step(layer, tokens, layout, tables)
            tokens = state.tokens
            if layer in layers:
                kept[layer] = state
        return kept

    def features(self, images: Tensor, layers: Sequence[int]) -> dict[int, Tensor]:
        """Return F^l of images for several layers, in one pass."""
        return {layer: state.tokens for layer, state in self.states(images, layers).items()}

    def check_layer(self, layer: int) -> None:
        """Refuse what is not the index of a layer."""
        if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < self.depth:
            raise ModelError(
                f"layer: expected a block index from 0 to {self.depth - 1} ({self.name} has {self.depth} blocks; "
                f"layer l is the output of block l), got {layer!r}."
            )

    def layer_name(self, layer: int) -> int | str:
        """Return what files and the command line call a layer: its index, unless the network has names for them."""
        return layer

    def layout_of(self, features: Tensor) -> TokenLayout:
        """Return where the tokens of features [B, N, D] sit that do not say it themselves: as in a square image."""
        if self.views:  # the number of tokens alone does not tell how many views they are
            raise ShapeError(
                "features: expected what probe.features(scenes) returned (sums, scalings and batch slices of it keep "
                f"the layout of the views), got a plain {type(features).__name__} {list(features.shape)}. Under "
                "torch.func transforms use probe.bind(features)."
            )
        return TokenLayout.square(features.shape[1], self.prefix)

    def gathered(self, positions: Tensor) -> AnyBackbone:
        """Return this backbone for the tokens at ``positions`` [B, n] of the full sequence alone."""
        raise ModelError(f"model: {self.name} runs on all of its tokens only.")

    def arithmetic(self) -> AbstractContextManager[Any]:
        """Return the context in which probe maps and their products compute."""
        return nullcontext()

    def linearize(
        self, function: Callable[[Tensor], Tensor], point: Tensor, layout: TokenLayout, reads: int
    ) -> Linearization:
        """Linearise a probe map [B, N, D] -> [B, ...] by `torch.func`; its decoder ``reads`` so many layers."""
        return FunctionLinearization(function, point)

    def pixel_format(self, size: Size = None) -> PixelFormat:
        """Return the format of single images, at the network's own size or another."""
        wanted = self.preprocessing
        return PixelFormat.of(wanted.size if size is None else size, wanted.mean, wanted.std, wanted.interpolation)

    def read_images(self, path: ImageSource, size: Size = None, limit: int | None = None) -> ImageBatch:
        """Read single images in that format, and which files were skipped."""
        wanted = self.pixel_format(size)
        return read_images(
            path, wanted.size, mean=wanted.mean, std=wanted.std, limit=limit, interpolation=wanted.interpolation
        )

    def load_views(self, path: ImageSource, size: int | None = None) -> Tensor:
        """Read the views of one scene, for networks that take several: [1, S, 3, H, W]."""
        raise ModelError(
            f"model: {self.name} takes single images, and load_views is for models of several views such as VGGT. Use "
            "load_images."
        )

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.model.parameters()


@dataclass(frozen=True, kw_only=True, repr=False)
class Backbone(AnyBackbone):
    """A frozen ViT: embed the images, run any range of blocks on any tokens, apply the final norm.

    ``model`` is the transformers module (or our own) whose parameters the blocks refer to. ``hooks_normed``: its dense
    decoder reads the hook layers after the final norm. ``classifier``: of an image classifier, how it makes logits.
    """

    norm: Norm
    embed_pixels: Callable[[Tensor], Tensor]
    rope_tables: Callable[[TokenLayout], Rope] | None = None
    hooks_normed: bool = True
    classifier: Classifier | None = None

    @property
    def depth(self) -> int:
        return len(self.blocks)

    @property
    def reads_patches(self) -> bool:
        """Whether the model's own output is made of all patch tokens: a depth map, or the logits of their mean."""
        return bool(self.hook_layers) or (self.classifier is not None and self.classifier.rows is None)

    @property
    def class_rows(self) -> int:
        """How many of the first tokens an output of the class token reads: one, or two of a DeiT with a teacher."""
        return 1 if self.classifier is None else self.classifier.rows or 1

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
        """Return the token layout of images [B, 3, H, W]."""
        if images.ndim != 4 or images.shape[1] != 3:
            raise ImageError(f"images: expected [B, 3, H, W], got {list(images.shape)}.")
        height, width = images.shape[-2:]
        if height % self.patch_size or width % self.patch_size or not height or not width:
            fits = [max(1, round(side / self.patch_size)) * self.patch_size for side in (height, width)]
            raise ImageError(
                f"images: {height}x{width} pixels are not divisible by the patch size {self.patch_size} of "
                f"{self.name}. Use {fits[0]}x{fits[1]}, for instance load_images(..., size=({fits[0]}, {fits[1]}))."
            )
        return TokenLayout(self.prefix, (height // self.patch_size, width // self.patch_size))

    def embed(self, images: Tensor) -> Tensor:
        """Embed images [B, 3, H, W]: the tokens that enter block 0, [B, N, D]."""
        expected = (self.token_layout(images).tokens, self.dim)
        if not images.is_floating_point():
            raise ImageError(
                f"images: expected normalised floats, got {images.dtype}. Pass uint8 images to a probe, which "
                "normalises them, or use pb.normalised(images / 255, mean, std)."
            )
        tokens = self.embed_pixels(images.to(device=self.device, dtype=self.dtype))
        if tokens.shape[1:] != expected:  # the number of images stays a variable where this is exported
            raise ModelError(
                f"model: embed_pixels of {self.name} returned {list(tokens.shape)} for images {list(images.shape)}, "
                f"expected [B, {expected[0]}, {expected[1]}]: {self.prefix} prefix tokens, one for each patch of "
                f"{self.patch_size} pixels, and the width of the final norm. Correct the adapter of its family."
            )
        return tokens

    def rope(self, layout: TokenLayout) -> Rope | None:
        """Return the rotary tables of a layout, None for families without."""
        return None if self.rope_tables is None else self.rope_tables(layout)

    def tables(self, layout: TokenLayout, like: Tensor) -> Rope | None:
        return self.rope(layout)

    def step(
        self, layer: int, tokens: Tensor, layout: TokenLayout, tables: Rope | None, rows: int | None = None
    ) -> State:
        return State(self.blocks[layer](tokens, tables, rows))

    def run(
        self,
        tokens: Tensor,
        start: int,
        stop: int,
        *,
        layout: TokenLayout | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Run blocks start, ..., stop-1 on any subset of the tokens.

        ``positions`` [B, n] are the tokens' places in the full sequence of ``layout``; only families with rotary
        positions need them (and a layout when the grid is not square).
        """
        rope = self.rope_of(tokens, layout, positions)
        for block in self.blocks[start:stop]:
            tokens = block(tokens, rope)
        return tokens

    def rope_of(self, tokens: Tensor, layout: TokenLayout | None, positions: Tensor | None) -> Rope | None:
        """Return the rotary tables of these tokens, None for families without."""
        if self.rope_tables is None:
            return None
        if positions is not None and layout is None:
            raise ShapeError("layout: needed with positions, because rotary positions depend on the patch grid.")
        rope = self.rope_tables(layout or TokenLayout.square(tokens.shape[1], self.prefix))
        return rope if positions is None else rope.gather(positions)

    def gathered(self, positions: Tensor) -> Backbone:
        tables = self.rope_tables
        if tables is None:
            return self
        return replace(self, rope_tables=lambda layout: tables(layout).gather(positions))

    def check_size(self, size: Size) -> None:
        height, width = checked_size(self.preprocessing.size if size is None else size)
        with naming("size"):
            self.token_layout(torch.empty(0, 3, height, width))

    def read(self, path: ImageSource, size: Size = None, limit: int | None = None) -> Samples:
        batch = self.read_images(path, size, limit)
        return image_samples(batch, self.pixel_format(size), self.token_layout(batch.pixels))
