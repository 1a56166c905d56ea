"""One call from a model's name to a probe map."""

from __future__ import annotations

import os

import torch
from torch import nn

from pullback.backbones import load_any_backbone
from pullback.decoders import DecoderChoice, OutputMetric, TaskDistance, build_decoder, task_distance
from pullback.probes.probe import INPUTS, ProbeMap, probe_at


def load_probe(
    model: str | os.PathLike[str] | nn.Module,
    decoder: DecoderChoice | None = None,
    layer: int | str | None = None,
    *,
    device: str | torch.device = "auto",
    dtype: torch.dtype | None = None,
    distance: str | TaskDistance | None = None,
    output_metric: OutputMetric | None = None,
    read_probe_layer: bool = True,
    pose_derivative: str = "exact",
) -> ProbeMap:
    """Load a frozen model and make a probe map of it, with a decoder and a layer (default: the last but one).

    ``model``: a hub id, a folder, an embedded name or a module in evaluation mode; `pullback ls` lists the families.
    ``device`` and ``dtype`` (default: the GPU where there is one, and float32) are for models that are loaded here; a
    module stays where and as it is, and another device or dtype is refused.
    ``decoder``: a name that fits the model, such as cls (the default), mean, depth or depth-8x8, of a VGGT camera (the
    default), camera-0, points or depth; a function of the last layer's normalised tokens, [B, N, D] -> [B, ...]; or a
    `Decoder`. ``pose_derivative`` is for the cameras of a VGGT alone: "exact", or "official" as in the published code.
    depth@FOLDER is depth behind the bottleneck in FOLDER (`compressed_probe`), depth@s2vae behind the one that comes
    with the package for these weights.
    ``layer``: a block index; "hooks", all layers that the decoder reads, side by side (`multi_layer_probe`); or of a
    decoder with a bottleneck "latent", or "latent-ambient" (`latent_probe`).
    """
    backbone = load_any_backbone(model, device=device, dtype=dtype)
    return probe_at(
        backbone,
        build_decoder(
            backbone.default_decoder if decoder is None else decoder, backbone, pose_derivative=pose_derivative
        ),
        backbone.default_layer if layer is None else layer,
        distance=task_distance(distance),
        output_metric=output_metric,
        read_probe_layer=read_probe_layer,
    )


def multi_layer_probe(
    model: str | os.PathLike[str] | nn.Module,
    decoder: DecoderChoice = "depth",
    *,
    device: str | torch.device = "auto",
    dtype: torch.dtype | None = None,
    distance: str | TaskDistance | None = None,
    after_norm: bool = True,
    output_metric: OutputMetric | None = None,
    pose_derivative: str = "exact",
) -> ProbeMap:
    """Load a frozen model and probe one of its decoders at what that reads: all its layers side by side.

    ``after_norm``: whether that is behind the final norm, as the decoder sees it, or before. No norm lies between the
    blocks of a VGGT and its heads, so it makes no difference there. The other arguments are those of `load_probe`.
    """
    backbone = load_any_backbone(model, device=device, dtype=dtype)
    return ProbeMap(
        backbone,
        build_decoder(decoder, backbone, pose_derivative=pose_derivative),
        INPUTS,
        distance=task_distance(distance),
        output_metric=output_metric,
        after_norm=after_norm,
    )
