"""The probe map psi_l: from the features of one layer through the remaining blocks and a decoder to the task output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pullback.backbones import Backbone, LinearizedBlock
from pullback.data.images import ImageBatch, ImageSource, PixelFormat, read_images
from pullback.decoders import Decoder, OutputMetric, TaskDistance, factor_at
from pullback.errors import ShapeError
from pullback.probes.following import AtLayer
from pullback.probes.linearization import DecoderTail, ProbeLinearization, Tap
from pullback.tokens import Features, TokenLayout

# images per forward pass when features are computed
FEATURE_BATCH = 32


class WithImages:
    """What every probe map takes from its backbone: device, and images read the way the backbone wants them."""

    backbone: Backbone

    @property
    def device(self) -> torch.device:
        return self.backbone.device

    def read_images(
        self, path: ImageSource, size: int | tuple[int, int] | None = None, limit: int | None = None
    ) -> ImageBatch:
        """Images with this backbone's normalisation and size, and which files were skipped."""
        wanted = self.pixel_format(size)
        return read_images(
            path, wanted.size, mean=wanted.mean, std=wanted.std, limit=limit, interpolation=wanted.interpolation
        )

    def pixel_format(self, size: int | tuple[int, int] | None = None) -> PixelFormat:
        """What this backbone wants to see, at its own size or another."""
        wanted = self.backbone.preprocessing
        return PixelFormat.of(wanted.size if size is None else size, wanted.mean, wanted.std, wanted.interpolation)

    def load_images(
        self, path: ImageSource, size: int | tuple[int, int] | None = None, limit: int | None = None
    ) -> Tensor:
        """[B, 3, H, W] with this backbone's normalisation; skipped files are named in one warning."""
        batch = self.read_images(path, size, limit)
        batch.warn_skipped(stacklevel=2)
        return batch.pixels


@dataclass(frozen=True)
class ProbeMap(AtLayer, WithImages):
    """psi_l = distance(decoder(blocks l+1, ..., L-1 (F^l))), and L^T of an output metric in front of its Jacobian.

    Layers that the decoder reads above l follow a change of F^l, layers below stay what the image made them. Whether
    the probe layer itself, when the decoder reads it, follows too is ``read_probe_layer``: true by default, the honest
    derivative of the output; the paper's formula psi_l = phi(F^{l+1}, ...) is the other choice.
    """

    backbone: Backbone
    decoder: Decoder
    layer: int
    distance: TaskDistance | None = None
    output_metric: OutputMetric | None = None
    read_probe_layer: bool = True

    def token_layout(self, features: Tensor) -> TokenLayout:
        """Where the tokens of these features sit."""
        known = getattr(features, "token_layout", None)
        return known if isinstance(known, TokenLayout) else TokenLayout.square(features.shape[1], self.backbone.prefix)

    @torch.no_grad()
    def features(self, images: Tensor) -> Tensor:
        """F^l of images [B, 3, H, W]: [B, N, D], with what the decoder reads below attached."""
        layout = self.backbone.token_layout(images)
        below = tuple(layer for layer in self.decoder.layers if layer not in self._following)
        parts = [self.backbone.features(part, (*below, self.layer)) for part in images.split(FEATURE_BATCH)]
        tokens = {layer: torch.cat([part[layer] for part in parts]) for layer in parts[0]}
        return self._attach(tokens.pop(self.layer), layout, tokens if below else {}, below)

    def _attach(self, own: Tensor, layout: TokenLayout, tokens: dict[int, Tensor], below: Sequence[int]) -> Tensor:
        constants = {layer: tokens.get(layer, own) for layer in below}
        if not constants and layout.grid[0] == layout.grid[1]:
            return own
        return Features.attach(own, layout, constants)

    def __call__(self, features: Tensor) -> Tensor:
        """The decoder's output (after the task distance) at these features, differentiable: [B, ...]."""
        return self.bind(features)(features.as_subclass(torch.Tensor))

    def bind(self, features: Tensor) -> Callable[[Tensor], Tensor]:
        """psi_l as a pure function of plain tensors, the layers below held: for torch.func and finite differences."""
        _, layout, below = self._unpack(features)
        rope, tail = self.backbone.rope(layout), self._tail(layout, below)

        def bound(tokens: Tensor) -> Tensor:
            states = {self.layer: tokens}
            for layer in range(self.layer + 1, max(self._following) + 1):
                states[layer] = self.backbone.blocks[layer](states[layer - 1], rope, self._rows(layer))
            return tail(*(self._read(states[layer]) for layer in self._following))

        return bound

    def linearize(self, features: Tensor) -> ProbeLinearization:
        """The `Linearization` at these features that `JacobianOperator` multiplies with."""
        tokens, layout, below = self._unpack(features)
        norm = self.backbone.norm if self.decoder.normed else None
        rope = self.backbone.rope(layout)
        blocks: list[LinearizedBlock] = []
        taps: dict[int, Tap] = {}
        state = tokens
        with torch.no_grad():
            for layer in range(self.layer, max(self._following) + 1):
                if layer > self.layer:
                    blocks.append(LinearizedBlock(self.backbone.blocks[layer], state, rope, self._rows(layer)))
                    state = blocks[-1].output
                if layer in self._following:
                    taps[layer - self.layer] = Tap(state, norm, self.decoder.rows)
        linear = self.decoder.linear and self.distance is None
        tail = DecoderTail(self._tail(layout, below), [tap.value for tap in taps.values()], linear=linear)
        factor = None if self.output_metric is None else factor_at(self.output_metric, tail.output)
        return ProbeLinearization(tokens, blocks, taps, tail, factor, self._bytes_per_tangent(tokens, tail.output))

    def _rows(self, layer: int) -> int | None:
        """Only the last block may compute fewer tokens: the others' outputs are keys and values of the next."""
        return self.decoder.rows if layer == max(self._following) else None

    def _read(self, state: Tensor) -> Tensor:
        read = state[:, : self.decoder.rows]
        return self.backbone.norm(read) if self.decoder.normed else read

    def _tail(self, layout: TokenLayout, below: dict[int, Tensor]) -> Callable[..., Tensor]:
        """(taps that follow the perturbation) -> output, with the constant layers below filled in."""
        constants = {layer: self._read(tokens) for layer, tokens in below.items()}

        def tail(*following: Tensor) -> Tensor:
            taps = constants | dict(zip(self._following, following, strict=True))
            output = self.decoder.decode([taps[layer] for layer in self.decoder.layers], layout)
            return output if self.distance is None else self.distance(output)

        return tail

    def _unpack(self, features: Tensor) -> tuple[Tensor, TokenLayout, dict[int, Tensor]]:
        if features.ndim != 3 or features.shape[-1] != self.backbone.dim:
            raise ShapeError(f"features: expected [B, N, {self.backbone.dim}], got {list(features.shape)}.")
        needed = [layer for layer in self.decoder.layers if layer not in self._following]
        below = getattr(features, "below", {})
        lost = [layer for layer in needed if layer not in below]
        if lost:
            raise ShapeError(
                f"features: decoder {self.decoder.name!r} also reads layers {lost}, which these features do not carry. "
                "Pass what probe.features(images) returned (sums, scalings and batch slices of it keep them), or use "
                "probe.bind(features) under torch.func transforms."
            )
        layout = self.token_layout(features)
        return features.as_subclass(torch.Tensor), layout, {layer: below[layer] for layer in needed}

    def _bytes_per_tangent(self, tokens: Tensor, output: Tensor) -> int:
        """The widest moment of a product: a block's hidden layer and attention scores, or the decoder's maps."""
        batch, count, dim = tokens.shape
        block = self.backbone.blocks[0]
        hidden = block.mlp.up.weight.shape[0]
        inside = batch * count * (6 * dim + 2 * hidden + 2 * block.heads * count)
        dense = 0 if self.decoder.linear else 64 * output.numel() + 16 * len(self.decoder.layers) * tokens.numel()
        return max(inside, dense) * tokens.element_size()
