"""One call from a model's name to a probe map."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import Tensor, nn

from pullback.backbones import load_backbone
from pullback.decoders import Decoder, OutputMetric, TaskDistance, build_decoder, task_distance
from pullback.probes.probe import ProbeMap


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
) -> ProbeMap:
    """A frozen model, a decoder and a probe layer (default: the last but one) as a probe map.

    ``model``: a hub id, a folder, an embedded name or a transformers module in evaluation mode.
    ``decoder``: a name (`cls`, `projection`, `pool`, `mean`, `depth`, `depth-8x8`, `saliency`) or a function of the
    last layer's normalised tokens, [B, N, D] -> [B, ...].
    """
    backbone = load_backbone(model, device=device, dtype=dtype)
    return ProbeMap(
        backbone,
        build_decoder(decoder, backbone),
        backbone.default_layer if layer is None else layer,
        distance=task_distance(distance),
        output_metric=output_metric,
        read_probe_layer=read_probe_layer,
    )
