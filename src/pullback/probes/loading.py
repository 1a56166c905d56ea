"""One call from a model's name to a probe map."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import overload

import torch
from torch import Tensor, nn

from pullback.backbones import load_backbone
from pullback.decoders import Decoder, OutputMetric, TaskDistance, build_decoder, task_distance
from pullback.probes.probe import ProbeMap
from pullback.vggt.backbone import is_vggt
from pullback.vggt.checkpoint import VGGT
from pullback.vggt.probes import SceneProbe, refuse_pose_derivative, scene_probe


@overload
def load_probe(  # type: ignore[overload-overlap]  # a VGGT is a module too
    model: VGGT,
    decoder: str | Decoder = ...,
    layer: int | None = ...,
    *,
    device: str | torch.device = ...,
    dtype: torch.dtype = ...,
    distance: str | TaskDistance | None = ...,
    output_metric: OutputMetric | None = ...,
    read_probe_layer: bool = ...,
    pose_derivative: str = ...,
) -> SceneProbe: ...


@overload
def load_probe(
    model: str | os.PathLike[str] | nn.Module,
    decoder: str | Callable[[Tensor], Tensor] | Decoder = ...,
    layer: int | None = ...,
    *,
    device: str | torch.device = ...,
    dtype: torch.dtype = ...,
    distance: str | TaskDistance | None = ...,
    output_metric: OutputMetric | None = ...,
    read_probe_layer: bool = ...,
    pose_derivative: str = ...,
) -> ProbeMap: ...


def load_probe(
    model: str | os.PathLike[str] | nn.Module,
    decoder: str | Callable[[Tensor], Tensor] | Decoder = "cls",
    layer: int | None = None,
    *,
    device: str | torch.device = "auto",
    dtype: torch.dtype = torch.float32,
    distance: str | TaskDistance | None = None,
    output_metric: OutputMetric | None = None,
    read_probe_layer: bool = True,
    pose_derivative: str = "exact",
) -> ProbeMap | SceneProbe:
    """A frozen model, a decoder and a probe layer (default: the last but one) as a probe map.

    ``model``: a hub id, a folder, an embedded name or a transformers module in evaluation mode.
    ``decoder``: a name (`cls`, `projection`, `pool`, `mean`, `depth`, `depth-8x8`, `saliency`) or a function of the
    last layer's normalised tokens, [B, N, D] -> [B, ...].

    A VGGT (module, folder, file or hub id) gives the `SceneProbe` of `scene_probe`, with the decoders `camera`,
    `camera-0`, `points`, `depth` and `depth-8x8`; ``pose_derivative`` is for its cameras alone.
    """
    if is_vggt(model):
        return scene_probe(
            model,  # type: ignore[arg-type]  # is_vggt has looked
            decoder,  # type: ignore[arg-type]  # a function is refused by name
            layer,
            device=device,
            dtype=dtype,
            distance=distance,
            output_metric=output_metric,
            read_probe_layer=read_probe_layer,
            pose_derivative=pose_derivative,
        )
    refuse_pose_derivative(pose_derivative)
    backbone = load_backbone(model, device=device, dtype=dtype)
    return ProbeMap(
        backbone,
        build_decoder(decoder, backbone),
        backbone.default_layer if layer is None else layer,
        distance=task_distance(distance),
        output_metric=output_metric,
        read_probe_layer=read_probe_layer,
    )
