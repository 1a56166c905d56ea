"""The probe map: from the features of one layer, or from a decoder's own inputs, to the task's output.

    at = l:         psi(F^l) = distance(decoder(norm(taps of the layers it reads)))
    at = "inputs":  psi(x)   = the same of x = [tap | tap | ...], the layers that the decoder reads side by side

At a layer, layers that the decoder reads above it follow a change of F^l, layers below stay what the image made them.
At the inputs no block lies between the probe and the decoder, and each layer may be perturbed on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from pullback.backbones import AnyBackbone, LinearizedBlock, Norm, State, unchanged
from pullback.backbones.backbone import Size
from pullback.checks import of_kind
from pullback.data.images import ImageBatch, ImageSource, PixelFormat
from pullback.data.pictures import Pictures
from pullback.decoders import (
    LOGARITHMIC,
    Decoder,
    OutputMetric,
    TaskDistance,
    check_distance,
    check_metric,
    explained,
    factor_at,
    identity_of,
    name_of,
)
from pullback.errors import DecoderError, ModelError, ShapeError, naming
from pullback.operators import Linearization
from pullback.probes.linearization import DecoderTail, ProbeLinearization, Tap, WeightedLinearization
from pullback.tokens import Features, TokenLayout

INPUTS: Literal["inputs"] = "inputs"
HOOKS = "hooks"
"""What files and the command line call the layer of a probe at the decoder's inputs."""
LATENTS = {"latent": "sphere", "latent-ambient": "ambient"}
"""What they call the latent of a decoder with a bottleneck, and the space that each stands for (`Decoder.latent`)."""
FEATURE_BATCH = 32
"""Images, or views, per forward pass when features are computed."""


def probe_at(backbone: AnyBackbone, decoder: Decoder, layer: Any, **choices: Any) -> ProbeMap:
    """Make a probe by what files and the command line call its layer: an index, "hooks" (the decoder's own inputs),
    "latent" or "latent-ambient" (of a decoder with a bottleneck). `ProbeMap` takes the ``choices``."""
    if isinstance(layer, str) and layer not in (INPUTS, HOOKS, *LATENTS):
        raise ModelError(
            f"layer: expected a block index from 0 to {backbone.depth - 1}, 'hooks' for what the decoder reads, or of "
            f"a decoder with a bottleneck 'latent' or 'latent-ambient', got {layer!r}."
        )
    if isinstance(layer, str) and layer in LATENTS:
        with naming("layer"):
            latent = decoder.latent(backbone, LATENTS[layer])
        return ProbeMap(*latent, 0, **choices)
    return ProbeMap(backbone, decoder, INPUTS if layer == HOOKS else layer, **choices)


@dataclass(frozen=True)
class ProbeMap:
    """A frozen backbone and a decoder, probed ``at`` a layer or at the decoder's own "inputs".

    ``distance``: a task distance behind the decoder. ``output_metric``: H = L L^T of the output; L^T comes in front of
    the Jacobian, and the map itself stays as it is.

    ``read_probe_layer``: whether the probe layer itself, when the decoder reads it, follows a change of F^l. True is
    the derivative of the output; False is the paper's formula psi_l = phi(F^{l+1}, ...). Where a tap is more than F^l
    (of VGGT: the frame half), only F^l follows.

    ``after_norm``, at the inputs: whether x is what the decoder sees, or the blocks' outputs, with the norm inside the
    probe map.
    """

    backbone: AnyBackbone
    decoder: Decoder
    at: int | Literal["inputs"]
    distance: TaskDistance | None = None
    output_metric: OutputMetric | None = None
    read_probe_layer: bool = True
    after_norm: bool = True

    def __post_init__(self) -> None:
        of_kind("backbone", self.backbone, AnyBackbone, "a backbone; pb.load_probe(model) makes one", ModelError)
        of_kind("decoder", self.decoder, Decoder, "a Decoder; pb.load_probe takes names and functions", DecoderError)
        if self.at != INPUTS:
            self.backbone.check_layer(self.at)
        for layer in self.decoder.layers:
            try:
                self.backbone.check_layer(layer)
            except ModelError as error:  # which speaks of a layer, but not of the one that was asked for
                raise DecoderError(f"decoder: {self.decoder.name!r} reads a layer that is not there. {error}") from None
        if self._layer is not None and not self._following:
            raise DecoderError(
                f"layer: nothing that decoder {self.decoder.name!r} reads (layers {list(self.decoder.layers)}) follows "
                f"a change at layer {self.at}. Probe a lower layer"
                + (", or set read_probe_layer=True." if self.at in self.decoder.layers else ".")
            )
        check_metric(self.output_metric, self.decoder.name, distance=self.distance is not None)

    def __repr__(self) -> str:
        own = f"{self.backbone.name!r}, decoder={self.decoder.name!r}, layer={self.layer!r}"
        set_apart = [
            f"{name}={name_of(value)}"
            for name, value in (("distance", self.distance), ("output_metric", self.output_metric))
            if value is not None
        ]
        set_apart += [f"{name}=False" for name in ("read_probe_layer", "after_norm") if not getattr(self, name)]
        return f"ProbeMap({', '.join([own, *set_apart, f'device={str(self.device)!r}'])})"

    def _repr_html_(self) -> str:
        from pullback.report.notebook import probe_html

        backbone, held = self.backbone, {"decoder": self.decoder.name, "layer": str(self.layer)}
        facts = held | {"width": str(backbone.dim), "patches": f"{backbone.patch_size} pixels", "on": str(self.device)}
        return probe_html(self.name, backbone.depth, self.layers, self.decoder.layers, facts)

    # Where the probe sits

    @property
    def layer(self) -> int | str:
        """The layer, "hooks" at the decoder's inputs, or "latent": as files and the command line call it."""
        return HOOKS if self._layer is None else self.backbone.layer_name(self._layer)

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers whose tokens the features are, side by side."""
        return self.decoder.layers if self._layer is None else (self._layer,)

    @property
    def bottleneck(self) -> bool:
        """Whether the decoder has a bottleneck in front of it (`pullback.learning.bottleneck`)."""
        return self.decoder.bottleneck

    @property
    def name(self) -> str:
        own = f"{self.backbone.name} {self.decoder.name}"
        if self._layer is not None:
            return f"{own} {self.layer if isinstance(self.layer, str) else f'L{self.layer:02d}'}"
        if self.backbone.views:
            return f"{own} taps {list(self.layers)}"
        return f"{own} layers {list(self.layers)} {'after' if self.after_norm else 'before'} the norm"

    @property
    def identity(self) -> dict[str, str | None]:
        """What files know decoder, task distance and output metric by: hashes of code and parameters, or versions.

        Two probes whose identities are equal and whose models have the same weights are the same map.
        """
        return {
            "decoder_identity": self.decoder.identity(self.backbone.model),
            "distance_identity": self._identity_of("distance", self.distance),
            "output_metric_identity": self._identity_of("output_metric", self.output_metric),
        }

    def _identity_of(self, argument: str, part: TaskDistance | OutputMetric | None) -> str | None:
        return None if part is None else identity_of(part, argument=argument, model=self.backbone.model)

    @property
    def device(self) -> torch.device:
        return self.backbone.device

    @property
    def by_hand(self) -> bool:
        """Whether products run through blocks that were linearised by hand, which have a bf16 form."""
        return self._layer is not None and bool(self.backbone.blocks)

    @property
    def _layer(self) -> int | None:
        """The layer, None at the decoder's inputs."""
        return self.at if isinstance(self.at, int) else None

    @cached_property
    def _following(self) -> tuple[int, ...]:
        """The layers that the decoder reads and that follow a change of F^l: those above, and l itself if asked for."""
        if self._layer is None:
            return ()
        first = self._layer if self.read_probe_layer else self._layer + 1
        return tuple(sorted({read for read in self.decoder.layers if read >= first}))

    @cached_property
    def _held(self) -> tuple[int, ...]:
        """The layers of which the decoder reads something that does not follow."""
        if self._layer is None:
            return ()
        below = {read for read in self.decoder.layers if read <= self._layer}
        more = self.backbone.tap_dim > self.backbone.dim  # a tap has a part besides F^l, which stays
        return tuple(sorted(read for read in below if more or read not in self._following))

    # Features

    @torch.no_grad()
    def features(self, images: Pictures, *, normalized: bool = False) -> Tensor:
        """Compute F^l [B, N, D] of images, or x [B, N, K D] at the decoder's inputs.

        ``images``: normalised floats or uint8 [B, 3, H, W], which keep their size; PIL images or uint8 arrays
        [H, W, 3], resized and cropped as files are; a list of one kind; or what an image processor of transformers
        returned. uint8 and PIL images are normalised for the model. Floats without a negative value look as if they
        were not, and are refused unless ``normalized=True``. Of a VGGT: views [S, 3, H, W] or scenes of them
        [B, S, 3, H, W], uint8 or in [0, 1].

        Where the map needs more than these numbers, they carry it (`Features`): the token layout and, by layer, what
        the decoder reads that a change of F^l does not reach.
        """
        samples = self.backbone.batch(images, normalized=normalized)
        layout = self.backbone.token_layout(samples)
        batches = samples.split(max(1, FEATURE_BATCH // layout.views))
        states = [self.backbone.states(batch, (*self._held, *self.layers)) for batch in batches]
        held = {layer: torch.cat([self._constant(state[layer], layer) for state in states]) for layer in self._held}
        own = torch.cat([self._own(state) for state in states])
        square = layout == TokenLayout(layout.prefix, (layout.grid[0], layout.grid[0]))  # and no layout of another kind
        if square and not held and not self.backbone.views:
            return own
        return Features.attach(own, layout, held)

    def _own(self, states: dict[int, State]) -> Tensor:
        if self._layer is not None:
            return states[self._layer].tokens
        taps = [states[layer].tap() for layer in self.layers]
        if self.after_norm and self.decoder.normed:
            taps = [self.backbone.norm(tap) for tap in taps]
        return torch.cat(taps, -1)

    def _constant(self, state: State, layer: int) -> Tensor:
        """Return what stays of a layer: of the probe layer that follows, its part besides F^l, else the whole tap."""
        if layer not in self._following:
            return state.tap()
        assert state.beside is not None  # else the layer is not among those held
        return state.beside

    def token_layout(self, features: Tensor) -> TokenLayout:
        """Return where the tokens of these features sit."""
        known = getattr(features, "token_layout", None)
        if isinstance(known, TokenLayout):
            return known
        return self.backbone.layout_of(features)

    # The map

    def __call__(self, features: Tensor) -> Tensor:
        """Return the decoder's output [B, ...] at these features, after the task distance; differentiable."""
        return self.bind(features)(features.as_subclass(torch.Tensor))

    def bind(self, features: Tensor) -> Callable[[Tensor], Tensor]:
        """Return the map as a pure function of plain tensors, all else held: for torch.func and finite differences."""
        point, layout, held = self._unpack(features)
        run = self._runner(self._layer, point, layout, held)

        def bound(x: Tensor) -> Tensor:
            with self.backbone.arithmetic():
                return self.output(run(x), layout)

        return bound

    def _runner(
        self, start: int | None, point: Tensor, layout: TokenLayout, held: dict[int, Tensor]
    ) -> Callable[[Tensor], Sequence[Tensor]]:
        """Return the function from x to the taps of the decoder's layers, in their order."""
        if start is None:
            return lambda x: x.chunk(len(self.layers), -1)
        tables = self.backbone.tables(layout, point)
        beside = held[start] if start in held and start in self._following else None

        def run(x: Tensor) -> list[Tensor]:
            taps, state = dict(held), State(x, beside)
            for layer in range(start, max(self._following) + 1):
                if layer > start:
                    state = self.backbone.step(layer, state.tokens, layout, tables, self._rows(layer))
                if layer in self._following:
                    taps[layer] = state.tap()
            return [taps[layer] for layer in self.decoder.layers]

        return run

    def output(self, taps: Sequence[Tensor], layout: TokenLayout) -> Tensor:
        """Apply norm, decoder and task distance to the taps of the decoder's layers, in their order.

        At the inputs, with ``after_norm``, the taps are behind the norm already.
        """
        return self._measured(self._decoded(taps, layout))

    def _decoded(self, taps: Sequence[Tensor], layout: TokenLayout) -> Tensor:
        norm = unchanged if self._layer is None and self.after_norm else self.backbone.norm
        return self.decoder.output(taps, layout, norm)

    def _measured(self, output: Tensor) -> Tensor:
        if self.distance is None:
            return output
        with explained(f"distance: {name_of(self.distance)} failed on outputs {list(output.shape)}"):
            return self.distance(output)

    # Its derivative

    def linearize(self, features: Tensor) -> Linearization:
        """Return the `Linearization` at these features that `JacobianOperator` multiplies with."""
        point, layout, held = self._unpack(features)
        self._check_distance(point, layout, held)
        if self._layer is not None and self.by_hand:
            inner: Linearization = self._by_hand(self._layer, point, layout, held)
        else:
            inner = self.backbone.linearize(self.bind(features), point, layout, len(self.decoder.layers))
        if self.output_metric is None:
            return inner
        with self.backbone.arithmetic():
            factor = factor_at(self.output_metric, inner.output)
        return WeightedLinearization(inner, factor, self.backbone.arithmetic)

    @torch.no_grad()
    def _check_distance(self, point: Tensor, layout: TokenLayout, held: dict[int, Tensor]) -> None:
        """Refuse a task distance that the outputs at these features do not fit."""
        if self.distance not in LOGARITHMIC:
            return  # nothing to check, so nothing to compute
        with self.backbone.arithmetic():
            taps = self._runner(self._layer, point, layout, held)(point)
            check_distance(self.distance, self._decoded(taps, layout), self.decoder.name)

    def _by_hand(self, start: int, tokens: Tensor, layout: TokenLayout, held: dict[int, Tensor]) -> ProbeLinearization:
        norm = self.backbone.norm if self.decoder.normed else None
        assert norm is None or isinstance(norm, Norm)  # of every backbone with blocks
        rope = self.backbone.tables(layout, tokens)
        blocks: list[LinearizedBlock] = []
        taps: dict[int, Tap] = {}
        state = tokens
        with torch.no_grad():
            for layer in range(start, max(self._following) + 1):
                if layer > start:
                    blocks.append(LinearizedBlock(self.backbone.blocks[layer], state, rope, self._rows(layer)))
                    state = blocks[-1].output
                if layer in self._following:
                    taps[layer - start] = Tap(state, norm, self.decoder.rows)
        constants = {layer: self.decoder.read(tap, self.backbone.norm) for layer, tap in held.items()}

        def tail(*following: Tensor) -> Tensor:
            """Compute the output from what the decoder sees, behind the norm, of the layers that follow."""
            seen = constants | dict(zip(self._following, following, strict=True))
            read = [seen[layer] for layer in self.decoder.layers]
            return self._measured(self.decoder.output(read, layout, unchanged))

        # with layers held, a linear decoder is affine in those that follow, and no longer its own derivative
        linear = self.decoder.linear and self.distance is None and not held
        end = DecoderTail(tail, [tap.value for tap in taps.values()], linear=linear)
        return ProbeLinearization(tokens, blocks, taps, end, self._bytes_per_tangent(tokens, end))

    def _rows(self, layer: int) -> int | None:
        """Return how many tokens a block must compute (None: all); only of the last are some never read again."""
        return self.decoder.rows if layer == max(self._following) else None

    def _bytes_per_tangent(self, tokens: Tensor, end: DecoderTail) -> int:
        """Estimate the memory of a product where it is widest: a block's hidden layer and attention scores, or the
        decoder's maps."""
        batch, count, dim = tokens.shape
        block = self.backbone.blocks[0]
        hidden = block.mlp.up.weight.shape[0]
        inside = batch * count * (6 * dim + 2 * hidden + 2 * block.heads * count)
        dense = 0 if end.linear else 64 * end.output.numel() + 16 * len(self.decoder.layers) * tokens.numel()
        return max(inside, dense) * tokens.element_size()

    def _unpack(self, features: Tensor) -> tuple[Tensor, TokenLayout, dict[int, Tensor]]:
        """Return the features as a plain tensor, their layout, and what they carry of the layers held."""
        width = self.backbone.tap_dim * len(self.layers) if self._layer is None else self.backbone.dim
        of_kind("features", features, Tensor, f"what probe.features(images) returned, [B, N, {width}]", ShapeError)
        if features.ndim != 3 or features.shape[-1] != width:
            raise ShapeError(f"features: expected [B, N, {width}], got {list(features.shape)}.")
        if features.dtype != self.backbone.dtype:
            raise ShapeError(
                f"features: expected {self.backbone.dtype}, the dtype of {self.backbone.name}, got {features.dtype}. "
                f"Use features.to({self.backbone.dtype}), or load the model in the other one."
            )
        below = getattr(features, "below", {})
        lost = [layer for layer in self._held if layer not in below]
        if lost:
            raise ShapeError(
                f"features: decoder {self.decoder.name!r} also reads layers {lost}, which these features do not carry. "
                "Pass what probe.features(images) returned (sums, scalings and batch slices of it keep them), or use "
                "probe.bind(features) under torch.func transforms."
            )
        layout = self.token_layout(features)
        return features.as_subclass(torch.Tensor), layout, {layer: below[layer] for layer in self._held}

    # Images, as the backbone wants them

    def pixel_format(self, size: Size = None) -> PixelFormat:
        """Return the pixel format that the backbone expects, at its own size or another."""
        return self.backbone.pixel_format(size)

    def read_images(self, path: ImageSource, size: Size = None, limit: int | None = None) -> ImageBatch:
        """Read images with the backbone's normalisation and size, and which files were skipped."""
        return self.backbone.read_images(path, size, limit)

    def load_images(self, path: ImageSource, size: Size = None, limit: int | None = None) -> Tensor:
        """Read images [B, 3, H, W] with the backbone's normalisation; skipped files are named in one warning."""
        batch = self.read_images(path, size, limit)
        batch.warn_skipped(stacklevel=2)
        return batch.pixels

    def load_views(self, path: ImageSource, size: int | None = None) -> Tensor:
        """Read the views of one scene, for a backbone that takes several: [1, S, 3, H, W], ``size`` wide."""
        return self.backbone.load_views(path, size)
