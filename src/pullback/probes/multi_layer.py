"""The probe of a decoder that reads several layers, at the decoder's own input: the layers' tokens side by side.

x = [F^{h1} | F^{h2} | ...] in R^{N x K D}, so no block lies between the probe and the decoder, and each layer may be
perturbed on its own. Depth Anything reads its layers after the final norm: ``after_norm`` says whether x is what the
decoder sees (default) or the raw block outputs, with the norm inside the probe map.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor, nn

from pullback.backbones import Backbone, load_backbone
from pullback.decoders import Decoder, OutputMetric, TaskDistance, build_decoder, task_distance
from pullback.errors import DecoderError, ShapeError
from pullback.operators import FunctionLinearization
from pullback.probes.probe import FEATURE_BATCH, WithImages
from pullback.tokens import Features, TokenLayout
from pullback.vggt.backbone import is_vggt
from pullback.vggt.checkpoint import VGGT
from pullback.vggt.probes import SceneInputProbe, refuse_pose_derivative, scene_input_probe


@dataclass(frozen=True)
class MultiLayerProbe(WithImages):
    """psi(x) = distance(decoder(x split into its layers))."""

    backbone: Backbone
    decoder: Decoder
    distance: TaskDistance | None = None
    after_norm: bool = True

    @property
    def layers(self) -> tuple[int, ...]:
        return self.decoder.layers

    @property
    def layer(self) -> str:
        return "hooks"

    @property
    def name(self) -> str:
        place = "after" if self.after_norm else "before"
        return f"{self.backbone.name} {self.decoder.name} layers {list(self.layers)} {place} the norm"

    @torch.no_grad()
    def features(self, images: Tensor) -> Tensor:
        """x of images [B, 3, H, W]: [B, N, K*D]."""
        layout = self.backbone.token_layout(images)
        parts = []
        for batch in images.split(FEATURE_BATCH):
            tokens = self.backbone.features(batch, self.layers)
            read = [tokens[layer] for layer in self.layers]
            if self.after_norm and self.decoder.normed:
                read = [self.backbone.norm(part) for part in read]
            parts.append(torch.cat(read, -1))
        joined = torch.cat(parts)
        return joined if layout.grid[0] == layout.grid[1] else Features.attach(joined, layout, {})

    def token_layout(self, features: Tensor) -> TokenLayout:
        known = getattr(features, "token_layout", None)
        return known if isinstance(known, TokenLayout) else TokenLayout.square(features.shape[1], self.backbone.prefix)

    def __call__(self, features: Tensor) -> Tensor:
        """The decoder's output (after the task distance) at x, differentiable: [B, ...]."""
        return self.bind(features)(features.as_subclass(torch.Tensor))

    def bind(self, features: Tensor) -> Callable[[Tensor], Tensor]:
        """psi as a pure function of plain tensors."""
        width = len(self.layers) * self.backbone.dim
        if features.ndim != 3 or features.shape[-1] != width:
            raise ShapeError(f"features: expected [B, N, {width}], got {list(features.shape)}.")
        layout = self.token_layout(features)

        def bound(joined: Tensor) -> Tensor:
            taps = list(joined.chunk(len(self.layers), -1))
            if self.decoder.normed and not self.after_norm:
                taps = [self.backbone.norm(tap) for tap in taps]
            output = self.decoder.decode([tap[:, : self.decoder.rows] for tap in taps], layout)
            return output if self.distance is None else self.distance(output)

        return bound

    def linearize(self, features: Tensor) -> FunctionLinearization:
        """The `Linearization` at these features that `JacobianOperator` multiplies with."""
        return FunctionLinearization(self.bind(features), features.as_subclass(torch.Tensor))


@overload
def multi_layer_probe(  # type: ignore[overload-overlap]  # a VGGT is a module too
    model: VGGT,
    decoder: str | Decoder = ...,
    *,
    device: str | torch.device = ...,
    dtype: torch.dtype = ...,
    distance: str | TaskDistance | None = ...,
    after_norm: bool = ...,
    output_metric: OutputMetric | None = ...,
    pose_derivative: str = ...,
) -> SceneInputProbe: ...


@overload
def multi_layer_probe(
    model: str | os.PathLike[str] | nn.Module,
    decoder: str | Decoder = ...,
    *,
    device: str | torch.device = ...,
    dtype: torch.dtype = ...,
    distance: str | TaskDistance | None = ...,
    after_norm: bool = ...,
    output_metric: OutputMetric | None = ...,
    pose_derivative: str = ...,
) -> MultiLayerProbe: ...


def multi_layer_probe(
    model: str | os.PathLike[str] | nn.Module,
    decoder: str | Decoder = "depth",
    *,
    device: str | torch.device = "auto",
    dtype: torch.dtype = torch.float32,
    distance: str | TaskDistance | None = None,
    after_norm: bool = True,
    output_metric: OutputMetric | None = None,
    pose_derivative: str = "exact",
) -> MultiLayerProbe | SceneInputProbe:
    """The multi-layer probe of a frozen model and one of its dense decoders.

    A VGGT gives the `SceneInputProbe` of `scene_input_probe`; ``output_metric`` and ``pose_derivative`` are for it
    alone. No norm lies between its blocks and its heads, so ``after_norm`` makes no difference there.
    """
    if is_vggt(model):
        return scene_input_probe(
            model,  # type: ignore[arg-type]  # is_vggt has looked
            decoder,
            device=device,
            dtype=dtype,
            distance=distance,
            output_metric=output_metric,
            pose_derivative=pose_derivative,
        )
    refuse_pose_derivative(pose_derivative)
    if output_metric is not None:
        raise DecoderError(
            f"output_metric: of the probes of several layers only those of a VGGT take one, expected None, got "
            f"{getattr(output_metric, '__name__', type(output_metric).__name__)}. load_probe takes one for any model."
        )
    backbone = load_backbone(model, device=device, dtype=dtype)
    return MultiLayerProbe(backbone, build_decoder(decoder, backbone), task_distance(distance), after_norm)
