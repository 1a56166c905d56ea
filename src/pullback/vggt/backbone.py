"""VGGT as probes see it: a backbone whose samples are several views of a scene at once.

Layer l is the state after global block l, F^l [B, N, C] with the tokens of all views. What heads read of a layer, its
tap [B, N, 2C], is the output of frame block l beside F^l; no norm stands in between. Products with the Jacobian come
from `torch.func`: here is what that needs to know, the memory that a tangent takes, and that autocast must be off.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from pullback.backbones import AnyBackbone, Preprocessing, Samples, State, unchanged
from pullback.backbones.backbone import Size
from pullback.data.images import ImageSource, PixelFormat
from pullback.data.pictures import Pictures
from pullback.errors import ModelError, PullbackError
from pullback.operators import FunctionLinearization
from pullback.tokens import TokenLayout
from pullback.vggt.checkpoint import VGGT
from pullback.vggt.network.model import as_scenes
from pullback.vggt.network.rope import Rope
from pullback.vggt.views import as_views, check_width, load_views, read_scenes, view_samples

MAX_ELEMENTS = 1 << 30
"""Of one tensor inside a product. Memory would hold more, but some kernels (resizing) count with 32 bits."""


def adapt(model: VGGT, name: str) -> VGGTBackbone:
    """What `pullback.registry` makes a backbone of a VGGT with."""
    own = model.config
    return VGGTBackbone(
        name=name,
        family=own.model_type,
        model=model,
        norm=unchanged,
        prefix=own.prefix,
        patch_size=own.patch_size,
        # views are handed over in [0, 1], and normalised inside the network
        preprocessing=Preprocessing((0.0, 0.0, 0.0), (1.0, 1.0, 1.0), own.img_size),
        hook_layers=own.hook_layers,
    )


@dataclass(frozen=True, kw_only=True, repr=False)
class VGGTBackbone(AnyBackbone):
    """A frozen VGGT: embed the views of scenes [B, S, 3, H, W] (or of one, [S, 3, H, W]), run any range of layers."""

    default_decoder: ClassVar[str] = "camera"

    model: VGGT

    @property
    def views(self) -> bool:
        return True

    @property
    def depth(self) -> int:
        return self.model.config.depth

    @property
    def dim(self) -> int:
        """C, the width of F^l."""
        return self.model.config.embed_dim

    @property
    def tap_dim(self) -> int:
        """Frame half and global half."""
        return 2 * self.dim

    @property
    def device(self) -> torch.device:
        return self.model.aggregator.camera_token.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.aggregator.camera_token.dtype

    def batch(self, images: Pictures, *, normalized: bool = False) -> Tensor:
        """Return views [S, 3, H, W] of one scene, or of several [B, S, 3, H, W], in [0, 1] with the axis of scenes."""
        return as_scenes(as_views(images, normalized=normalized))

    def token_layout(self, images: Tensor) -> TokenLayout:
        return self.model.aggregator.token_layout(as_scenes(images))

    def embed(self, images: Tensor) -> Tensor:
        return self.model.aggregator.embed(as_scenes(images)).tokens

    def tables(self, layout: TokenLayout, like: Tensor) -> tuple[Rope, Rope]:
        """Rotary tables for one view and for all."""
        return self.model.aggregator.ropes(layout, like)

    def step(
        self, layer: int, tokens: Tensor, layout: TokenLayout, tables: tuple[Rope, Rope], rows: int | None = None
    ) -> State:
        """F^{layer-1} [B, N, C] through frame and global block ``layer``, always all tokens."""
        frame, tokens = self.model.aggregator.step(layer, tokens, layout.views, tables)
        return State(tokens, beside=frame)

    def check_layer(self, layer: int) -> None:
        if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < self.depth:
            raise ModelError(
                f"layer: expected a layer of the aggregator from 0 to {self.depth - 1} ({self.name} has {self.depth}; "
                f"layer l is the state after global block l), got {layer!r}. The heads' own input is "
                "multi_layer_probe(...), on the command line --layer hooks."
            )

    def check_size(self, size: Size) -> None:
        if isinstance(size, tuple):
            raise PullbackError(
                f"size: expected the width of the views, such as 518, since the height of each follows from its "
                f"picture; got {size[0]}x{size[1]}. Use {size[1]}."
            )
        if size is not None:
            check_width(size, self.patch_size)

    def read(self, path: ImageSource, size: Size = None, limit: int | None = None) -> Samples:
        """Read scenes: every folder that holds images is one; ``size`` is the width of its views."""
        self.check_size(size)
        width = size if isinstance(size, int) else self.preprocessing.size
        found = read_scenes(path, size=width, patch_size=self.patch_size, limit=limit)
        return view_samples(found, [self.token_layout(scene.views) for scene in found.scenes])

    def load_views(self, path: ImageSource, size: int | None = None) -> Tensor:
        """The views of one scene as this network wants them, [1, S, 3, H, W]: ``size`` wide, sides whole patches."""
        width = self.preprocessing.size if size is None else size
        return load_views(path, size=width, patch_size=self.patch_size)[None]

    def pixel_format(self, size: Size = None) -> PixelFormat:
        raise PullbackError(
            f"probe: expected one of single images, got {self.name}, whose samples are scenes of several views. Take "
            "targets_of(probe, probe.features(scenes)) instead; probe.load_views(folder) reads a scene."
        )

    def arithmetic(self) -> AbstractContextManager[Any]:
        """Probe maps and their products compute in the dtype of the features: these may be made under autocast, but it
        cannot be batched over tangents, and would make J^T another matrix than J."""
        return torch.autocast(self.device.type, enabled=False)

    def linearize(
        self, function: Callable[[Tensor], Tensor], point: Tensor, layout: TokenLayout, reads: int
    ) -> ViewsLinearization:
        cost = tangent_cost(self, layout, point, dense=reads > 1)
        with self.arithmetic():
            return ViewsLinearization(function, point, cost, self.arithmetic)


@dataclass(frozen=True)
class TangentCost:
    """What one tangent of all samples of a batch takes inside a product."""

    bytes: int  # at the widest moment
    largest: int  # elements of the largest tensor


def tangent_cost(backbone: VGGTBackbone, layout: TokenLayout, point: Tensor, *, dense: bool) -> TangentCost:
    """The widest moment is a global block, or the finest maps of a ``dense`` head.

    The factors are from peak memory on a CPU, where they are 1.4 to 1.6 times what products took; convolutions on a GPU
    want some room to work in.
    """
    own, tokens = backbone.model.config, layout.tokens
    hidden = int(own.embed_dim * own.mlp_ratio)
    scores = own.num_heads * tokens**2
    block = tokens * (8 * own.embed_dim + 3 * hidden) + 4 * scores
    # 8 x 8 pixels a patch before the last resizing, with all channels, then full resolution with half of them
    pixels = layout.views * layout.patches * own.dpt_features
    finest = pixels * max(64, own.patch_size**2 // 2)
    elements = max(block, 8 * finest) if dense else block
    largest = max(scores, finest) if dense else scores
    return TangentCost(len(point) * elements * point.element_size(), len(point) * largest)


class ViewsLinearization(FunctionLinearization):
    """Products in as many pieces as the kernels can count, under the arithmetic of the backbone: the derivative of an
    operation runs under the autocast of the moment, not under that of the operation."""

    def __init__(
        self,
        function: Callable[[Tensor], Tensor],
        point: Tensor,
        cost: TangentCost,
        arithmetic: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        super().__init__(function, point)
        self.bytes_per_tangent = cost.bytes
        self._most, self._arithmetic = max(1, MAX_ELEMENTS // cost.largest), arithmetic

    def pushforward(self, tangents: Tensor) -> Tensor:
        return self._in_pieces(super().pushforward, tangents)

    def pullback(self, cotangents: Tensor) -> Tensor:
        return self._in_pieces(super().pullback, cotangents)

    def _in_pieces(self, product: Callable[[Tensor], Tensor], stack: Tensor) -> Tensor:
        with self._arithmetic():
            return torch.cat([product(part) for part in stack.split(self._most, 1)], 1)
