"""Products with the Jacobian of a scene probe by `torch.func`, an output metric, and the memory that they take.

Probe maps of VGGT: from the tokens of a scene at one layer, or at the input of its heads, to cameras, points, depth.

A sample is a scene: images [B, S, 3, H, W] (or one scene, [S, 3, H, W]) in [0, 1], features [B, N, D] with the tokens
of all views. What takes a probe and tensors takes these: `JacobianOperator`, `spectrum`, `diagnose`, `targets_of`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from pullback.data.images import ImageSource, PixelFormat
from pullback.decoders import Decoder, OutputMetric, TaskDistance, factor_at, task_distance
from pullback.errors import DecoderError, PullbackError, ShapeError
from pullback.operators.linearization import Derivative
from pullback.probes.following import AtLayer
from pullback.tokens import Features, TokenLayout
from pullback.vggt.backbone import SceneBackbone, Step, as_scenes, load_scene_backbone
from pullback.vggt.camera_metric import CameraMetric
from pullback.vggt.checkpoint import VGGT
from pullback.vggt.decoders import build_scene_decoder
from pullback.vggt.views import load_views

MAX_ELEMENTS = 1 << 30
"""Of one tensor inside a product. Memory would hold more, but some kernels (resizing) count with 32 bits."""


@dataclass(frozen=True)
class TangentCost:
    """What one tangent of all scenes of a batch takes inside a product."""

    bytes: int  # at the widest moment
    largest: int  # elements of the largest tensor


class SceneLinearization:
    """A function [B, *input_shape] -> [B, ...] linearised at a point, with L^T of an output metric in front of J."""

    def __init__(
        self, function: Callable[[Tensor], Tensor], point: Tensor, metric: OutputMetric | None, cost: TangentCost
    ) -> None:
        self.input_shape = tuple(point.shape[1:])
        self.bytes_per_tangent = cost.bytes
        self._most = max(1, MAX_ELEMENTS // cost.largest)
        self._derivative = Derivative(function, point)
        output = self._derivative.output  # [B, M]
        self._factor = None if metric is None else factor_at(metric, output)  # [B, M, k]
        self.output = output if self._factor is None else (output[:, None] @ self._factor)[:, 0]

    def pushforward(self, tangents: Tensor) -> Tensor:
        out = torch.cat([self._derivative.jvp(part) for part in tangents.split(self._most, 1)], 1)
        return out if self._factor is None else out @ self._factor

    def pullback(self, cotangents: Tensor) -> Tensor:
        if self._factor is not None:
            cotangents = cotangents @ self._factor.mT
        return torch.cat([self._derivative.vjp(part)[0] for part in cotangents.split(self._most, 1)], 1)


def tangent_cost(backbone: SceneBackbone, decoder: Decoder, layout: TokenLayout, point: Tensor) -> TangentCost:
    """The widest moment is a global block, or the finest maps of a dense head.

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
    dense = len(decoder.layers) > 1
    elements = max(block, 8 * finest) if dense else block
    largest = max(scores, finest) if dense else scores
    return TangentCost(len(point) * elements * point.element_size(), len(point) * largest)


FEATURE_VIEWS = 32
"""Views per forward pass when features are computed, and at least one scene."""


def refuse_pose_derivative(choice: str) -> None:
    """For loaders that take it for a VGGT and have another model."""
    if choice != "exact":
        raise DecoderError(
            f"pose_derivative: only the cameras of a VGGT have a choice, expected 'exact', got {choice!r}."
        )


def no_autocast(device: torch.device) -> torch.autocast:
    """Probe maps and their products compute in the dtype of the features: these may be made under autocast, but it
    cannot be batched over tangents, and would make J^T another matrix than J."""
    return torch.autocast(device.type, enabled=False)


def exactly(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def exact(features: Tensor) -> Tensor:
        with no_autocast(features.device):
            return function(features)

    return exact


class ExactLinearization(SceneLinearization):
    """The derivative of an operation runs under the autocast of the moment, not under that of the operation."""

    def pushforward(self, tangents: Tensor) -> Tensor:
        with no_autocast(tangents.device):
            return super().pushforward(tangents)

    def pullback(self, cotangents: Tensor) -> Tensor:
        with no_autocast(cotangents.device):
            return super().pullback(cotangents)


class OfScenes:
    """What the probes of one layer and of the heads' input have in common."""

    backbone: SceneBackbone
    decoder: Decoder
    distance: TaskDistance | None
    output_metric: OutputMetric | None

    @property
    def name(self) -> str:
        raise TypeError(f"{type(self).__name__} must define name")

    @property
    def device(self) -> torch.device:
        return self.backbone.device

    def _check_metric(self) -> None:
        if isinstance(self.output_metric, CameraMetric):
            self.output_metric.check(self.decoder.name, distance=self.distance is not None)

    def load_views(self, path: ImageSource, size: int | None = None) -> Tensor:
        """The views of one scene as this network wants them, [1, S, 3, H, W]: ``size`` wide, sides whole patches."""
        own = self.backbone.model.config
        return load_views(path, size=own.img_size if size is None else size, patch_size=own.patch_size)[None]

    def pixel_format(self, size: int | tuple[int, int] | None = None) -> PixelFormat:
        """What collections of single images are asked for, which scenes are not."""
        raise PullbackError(
            f"probe: expected one of single images, got {self.name}, whose samples are scenes of several views. Take "
            "targets_of(probe, probe.features(scenes)) instead."
        )

    def token_layout(self, features: Tensor) -> TokenLayout:
        """Where the tokens of these features sit. Their number alone does not tell how many views they are."""
        known = getattr(features, "token_layout", None)
        if not isinstance(known, TokenLayout):
            raise ShapeError(
                "features: expected what probe.features(scenes) returned (sums, scalings and batch slices of it keep "
                f"the layout of the views), got a plain {type(features).__name__} {list(features.shape)}. Under "
                "torch.func transforms use probe.bind(features)."
            )
        return known

    def bind(self, features: Tensor) -> Callable[[Tensor], Tensor]:
        """The probe map as a pure function of plain tensors, all else held: for torch.func and finite differences."""
        raise TypeError(f"{type(self).__name__} must define bind")

    def __call__(self, features: Tensor) -> Tensor:
        """The decoder's output (after the task distance) at these features, differentiable: [B, ...]."""
        return self.bind(features)(features.as_subclass(torch.Tensor))

    def linearize(self, features: Tensor) -> SceneLinearization:
        """The `Linearization` at these features that `JacobianOperator` multiplies with."""
        layout, point = self.token_layout(features), features.as_subclass(torch.Tensor)
        cost = tangent_cost(self.backbone, self.decoder, layout, point)
        with no_autocast(point.device):
            return ExactLinearization(self.bind(features), point, self.output_metric, cost)

    def _decode(self, taps: Sequence[Tensor], layout: TokenLayout) -> Tensor:
        output = self.decoder.decode(taps, layout)
        return output if self.distance is None else self.distance(output)

    def _steps(self, images: Tensor, layers: Sequence[int]) -> tuple[list[dict[int, Step]], TokenLayout]:
        """Of batches of scenes, together with the layout that all of them have."""
        scenes = as_scenes(images)
        layout = self.backbone.token_layout(scenes)
        batches = scenes.split(max(1, FEATURE_VIEWS // layout.views))
        return [self.backbone.steps(batch, layers) for batch in batches], layout

    def _check_width(self, features: Tensor, width: int) -> None:
        if features.ndim != 3 or features.shape[-1] != width:
            raise ShapeError(f"features: expected [B, N, {width}], got {list(features.shape)}.")


@dataclass(frozen=True)
class SceneProbe(AtLayer, OfScenes):
    """psi_l = distance(decoder(blocks l+1, ..., L-1 (F^l))), F^l [B, N, C] the tokens after global block l.

    Taps above l follow a change of F^l, taps below stay what the images made them. When the decoder reads layer l
    itself, its tap is [frame_l | F^l]: the frame half was made before F^l and stays, the other half follows. With
    ``read_probe_layer=False`` that tap stays as a whole (the paper's formula).
    """

    backbone: SceneBackbone
    decoder: Decoder
    layer: int
    distance: TaskDistance | None = None
    output_metric: OutputMetric | None = None
    read_probe_layer: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_metric()

    @cached_property
    def _held(self) -> tuple[int, ...]:
        """Layers of which the decoder reads something that does not follow."""
        return tuple(sorted({layer for layer in self.decoder.layers if layer <= self.layer}))

    @torch.no_grad()
    def features(self, images: Tensor) -> Tensor:
        """F^l of scenes [B, S, 3, H, W]: [B, N, C]. Attached are the layout and, by layer, what the decoder reads of
        layers up to l and a change of F^l does not reach: taps [B, N, 2C], and of layer l the frame half [B, N, C]."""
        batches, layout = self._steps(images, (*self._held, self.layer))
        tokens = torch.cat([batch[self.layer].tokens for batch in batches])
        below = {layer: torch.cat([self._constant(batch[layer], layer) for batch in batches]) for layer in self._held}
        return Features.attach(tokens, layout, below)

    def _constant(self, step: Step, layer: int) -> Tensor:
        return step.frame if layer in self._following else step.tap()

    def bind(self, features: Tensor) -> Callable[[Tensor], Tensor]:
        self._check_width(features, self.backbone.dim)
        layout, below = self.token_layout(features), dict(getattr(features, "below", {}))
        lost = [layer for layer in self._held if layer not in below]
        if lost:
            raise ShapeError(
                f"features: decoder {self.decoder.name!r} also reads layers {lost}, which these features do not carry. "
                "Pass what features(scenes) of this probe returned."
            )
        ropes = self.backbone.ropes(layout, features.as_subclass(torch.Tensor))

        def bound(tokens: Tensor) -> Tensor:
            taps = {layer: below[layer] for layer in self._held}
            if self.layer in self._following:
                taps[self.layer] = Step(below[self.layer], tokens).tap()
            for layer in range(self.layer + 1, max(self._following) + 1):
                step = self.backbone.step(layer, tokens, layout, ropes)
                tokens = step.tokens
                if layer in self._following:
                    taps[layer] = step.tap()
            return self._decode([taps[layer] for layer in self.decoder.layers], layout)

        return exactly(bound)


@dataclass(frozen=True)
class SceneInputProbe(OfScenes):
    """The probe at x_vis, the heads' own input: psi(x) = distance(decoder(x split into its taps)).

    x [B, N, K 2C] has the taps that the decoder reads side by side, K = 4 for points and depth (hook layers), K = 1 for
    the camera (last layer), so no block lies between the probe and the head.
    """

    backbone: SceneBackbone
    decoder: Decoder
    distance: TaskDistance | None = None
    output_metric: OutputMetric | None = None

    def __post_init__(self) -> None:
        self._check_metric()

    @property
    def layers(self) -> tuple[int, ...]:
        return self.decoder.layers

    @property
    def layer(self) -> str:
        return "hooks"

    @property
    def name(self) -> str:
        return f"{self.backbone.name} {self.decoder.name} taps {list(self.layers)}"

    @torch.no_grad()
    def features(self, images: Tensor) -> Tensor:
        """x of scenes [B, S, 3, H, W]: [B, N, K 2C], with their layout."""
        batches, layout = self._steps(images, self.layers)
        joined = [torch.cat([batch[layer].tap() for layer in self.layers], -1) for batch in batches]
        return Features.attach(torch.cat(joined), layout, {})

    def bind(self, features: Tensor) -> Callable[[Tensor], Tensor]:
        self._check_width(features, 2 * self.backbone.dim * len(self.layers))
        layout = self.token_layout(features)
        return exactly(lambda joined: self._decode(joined.chunk(len(self.layers), -1), layout))


def scene_probe(
    model: str | os.PathLike[str] | VGGT,
    decoder: str | Decoder = "camera",
    layer: int | None = None,
    *,
    device: str | torch.device = "auto",
    dtype: torch.dtype = torch.float32,
    distance: str | TaskDistance | None = None,
    output_metric: OutputMetric | None = None,
    read_probe_layer: bool = True,
    pose_derivative: str = "exact",
) -> SceneProbe:
    """A VGGT, one of its heads (`decoders/scene.py`) and an aggregator layer (default: the last but one)."""
    backbone = load_scene_backbone(model, device=device, dtype=dtype)
    return SceneProbe(
        backbone,
        build_scene_decoder(decoder, backbone, pose_derivative=pose_derivative),
        backbone.default_layer if layer is None else layer,
        distance=task_distance(distance),
        output_metric=output_metric,
        read_probe_layer=read_probe_layer,
    )


def scene_input_probe(
    model: str | os.PathLike[str] | VGGT,
    decoder: str | Decoder = "depth",
    *,
    device: str | torch.device = "auto",
    dtype: torch.dtype = torch.float32,
    distance: str | TaskDistance | None = None,
    output_metric: OutputMetric | None = None,
    pose_derivative: str = "exact",
) -> SceneInputProbe:
    """A VGGT and one of its heads, probed at what the head reads."""
    backbone = load_scene_backbone(model, device=device, dtype=dtype)
    own = build_scene_decoder(decoder, backbone, pose_derivative=pose_derivative)
    return SceneInputProbe(backbone, own, task_distance(distance), output_metric)
