"""What `pullback diagnose` does, without the terminal: a request in, files in a folder out.

The folder is up to date after every layer, so that an interruption or a failing layer loses nothing before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pullback.backbones import Backbone, load_backbone
from pullback.data.images import ImageBatch
from pullback.decoders import build_decoder, task_distance
from pullback.geometry import Tractability, diagnose, layer_multiplicity
from pullback.geometry.document import layer_result, multiplicity_result
from pullback.probes import ProbeMap
from pullback.probes.multi_layer import MultiLayerProbe
from pullback.randnla import Estimate
from pullback.runs import documents as files
from pullback.runs.files import make_folder, write_arrays, write_json
from pullback.runs.provenance import provenance
from pullback.vggt.backbone import SceneBackbone
from pullback.vggt.probes import SceneInputProbe, SceneProbe

MAX_THUMBNAILS = 8
_THUMBNAIL_SIDE = 224

HOOKS = "hooks"
"""The layer that stands for all layers a dense decoder reads, side by side."""

_Probe = TypeVar("_Probe", ProbeMap | MultiLayerProbe, SceneProbe | SceneInputProbe)


@dataclass(frozen=True)
class DiagnosisRequest:
    """Everything that decides the numbers. No ``layers``: the last but one."""

    model: str
    images: str
    decoder: str = "cls"
    layers: tuple[int | str, ...] = ()
    limit: int | None = None
    ranks: tuple[int, ...] = (20,)
    method: str = "auto"
    device: str = "auto"
    seed: int = 0
    size: int | tuple[int, int] | None = None
    precision: str = "float32"
    rtol: float | None = None
    distance: str | None = None
    convergence_samples: int = 1


class Watcher(Protocol):
    """Hears how far the run is."""

    def stage(self, text: str) -> None:
        """Something of unknown length begins."""

    def start(self, layers: Sequence[str], images: int, unit: str = "images") -> None:
        """The work is known: so many images, or other units, at each of these layers."""

    def layer(self, name: str) -> None:
        """This layer begins."""

    def advance(self, images: int) -> None:
        """So many more images are done at this layer."""

    def layer_done(self, result: dict[str, Any]) -> None:
        """This layer is done and on disk."""


def run_diagnosis(
    request: DiagnosisRequest, out: Path, watch: Watcher, batch: ImageBatch | None = None
) -> dict[str, Any]:
    """Diagnose every layer, writing `diagnosis.json` and `importance.npz` after each; the former is also returned.

    A ``batch`` is taken as it is; without one the images of the request are read, resized and cropped.
    """
    watch.stage(f"loading {request.model}")
    backbone = load_backbone(request.model, device=request.device)
    probes = build_probes(request, backbone)  # a wrong layer, decoder or size is found before anything is computed
    size = _checked_size(request.size, backbone)
    make_folder(out)
    if batch is None:
        watch.stage(f"reading images from {request.images}")
        batch = probes[0].read_images(request.images, size, request.limit)
    paths = [str(path) for path in batch.paths]
    samples = {
        "image_files": paths,
        "skipped": [{"file": str(image.path), "reason": image.reason} for image in batch.skipped],
        "size": list(batch.pixels.shape[-2:]),
    }
    watch.start([files.layer_name(probe.layer) for probe in probes], len(batch))
    return write_layers(
        out,
        watch,
        settings(request, backbone, samples),
        _thumbnails(batch, backbone),
        paths,
        probes,
        lambda probe: _diagnose_layer(request, probe, batch, watch),
    )


def write_layers(
    out: Path,
    watch: Watcher,
    settings: Mapping[str, Any],
    pictures: Mapping[str, np.ndarray],
    samples: Sequence[str],
    probes: Sequence[_Probe],
    measure: Callable[[_Probe], tuple[Tractability, Estimate | None]],
) -> dict[str, Any]:
    """`diagnosis.json` and `importance.npz` after every layer; the former is also returned.

    ``measure`` gives the diagnosis of a probe over the ``samples`` (their names), and K_eff [B] if it has several
    layers.
    """
    document: dict[str, Any] = {**settings, "complete": False, "failure": None, "layers": []}
    arrays = dict(pictures)
    for probe in probes:
        name = files.layer_name(probe.layer)
        watch.layer(name)
        try:
            report, multiplicity = measure(probe)
        except BaseException as error:
            _record_failure(out, document, probe.layer, error)
            raise
        result = layer_result(report, samples)
        if multiplicity is not None:
            result["k_eff"] = multiplicity_result(multiplicity, probe.decoder.layers)
        document["layers"].append(result)
        document["complete"] = len(document["layers"]) == len(probes)
        arrays[name] = report.importance.float().numpy()
        write_arrays(out / files.IMPORTANCE, arrays)
        write_json(out / files.DIAGNOSIS, document)
        watch.layer_done(result)
    return document


def build_probes(request: DiagnosisRequest, backbone: Backbone) -> list[ProbeMap | MultiLayerProbe]:
    """One probe per distinct layer, all on the same backbone and decoder."""
    decoder, distance = build_decoder(request.decoder, backbone), task_distance(request.distance)
    layers = dict.fromkeys(request.layers or (backbone.default_layer,))
    probes: list[ProbeMap | MultiLayerProbe] = []
    for layer in layers:
        if isinstance(layer, str):
            probes.append(MultiLayerProbe(backbone, decoder, distance))
        else:
            probes.append(ProbeMap(backbone, decoder, layer, distance=distance))
    return probes


def _diagnose_layer(
    request: DiagnosisRequest, probe: ProbeMap | MultiLayerProbe, batch: ImageBatch, watch: Watcher
) -> tuple[Tractability, Estimate | None]:
    report = diagnose(
        probe,
        batch.pixels,
        request.ranks,
        request.method,
        seed=request.seed,
        rtol=request.rtol,
        precision=request.precision,
        convergence_samples=request.convergence_samples,
        on_progress=watch.advance,
    )
    if not isinstance(probe, MultiLayerProbe):
        return report, None
    watch.stage("alignment of the layers")
    return report, layer_multiplicity(probe, batch.pixels, seed=request.seed)


def settings(
    request: DiagnosisRequest, backbone: Backbone | SceneBackbone, samples: Mapping[str, Any]
) -> dict[str, Any]:
    """What `diagnosis.json` says besides its layers; ``samples`` is the part about the images."""
    return {
        "model": request.model,
        "family": backbone.family,
        "decoder": request.decoder,
        "distance": request.distance,
        "images": request.images,
        **samples,
        "limit": request.limit,
        "depth": backbone.depth,
        "ranks": list(request.ranks),
        "method_asked": request.method,
        "precision": request.precision,
        "rtol": request.rtol,
        "seed": request.seed,
        **provenance(backbone.device),
    }


def _checked_size(size: int | tuple[int, int] | None, backbone: Backbone) -> int | tuple[int, int]:
    size = backbone.preprocessing.size if size is None else size
    height, width = (size, size) if isinstance(size, int) else size
    if min(height, width) > 0:  # the reader of images explains other sizes
        backbone.token_layout(torch.empty(0, 3, height, width))
    return size


def _thumbnails(batch: ImageBatch, backbone: Backbone) -> dict[str, np.ndarray]:
    """The first crops as the model saw them, de-normalised, and where the tokens sit on them."""
    wanted, layout = backbone.preprocessing, backbone.token_layout(batch.pixels)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (wanted.mean, wanted.std))
    return {
        "thumbnails": thumbnails(batch.pixels[:MAX_THUMBNAILS] * std + mean),
        "grid": np.array(layout.grid),
        "prefix": np.array(layout.prefix),
    }


def thumbnails(pixels: Tensor) -> np.ndarray:
    """[B, 3, H, W] in [0, 1] -> uint8 [B, h, w, 3], small enough for a figure."""
    longest = max(pixels.shape[-2:])
    if longest > _THUMBNAIL_SIDE:
        pixels = F.interpolate(pixels, scale_factor=_THUMBNAIL_SIDE / longest, mode="bilinear", antialias=True)
    return (pixels.clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()


def _record_failure(out: Path, document: dict[str, Any], layer: int | str, error: BaseException) -> None:
    """Say in the file why layers are missing; with no layer at all, an earlier result in the folder is left alone."""
    reason = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error) or type(error).__name__
    document["failure"] = {"layer": layer, "reason": reason}
    if document["layers"]:
        write_json(out / files.DIAGNOSIS, document)
