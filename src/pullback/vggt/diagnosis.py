"""What `pullback diagnose` does with a VGGT, whose samples are scenes of several views.

Scenes are diagnosed one at a time, since they may differ in their number of views and in size, and since the features
of one can already be large.

Diagnoses of samples that differ in shape, one at a time, as the diagnosis of all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pullback.decoders import task_distance
from pullback.errors import ModelError, PullbackError
from pullback.geometry import SampleDiagnosis, Tractability, classify, diagnose, layer_multiplicity
from pullback.geometry.diagnosis import join_tables
from pullback.geometry.folder import DiagnosisRequest, Watcher, settings, thumbnails, write_layers
from pullback.operators import ProductCount
from pullback.randnla import Estimate
from pullback.runs import documents as files
from pullback.runs.files import make_folder
from pullback.vggt.backbone import SceneBackbone, load_scene_backbone
from pullback.vggt.decoders import SCENE_DECODERS, build_scene_decoder
from pullback.vggt.probes import SceneInputProbe, SceneProbe
from pullback.vggt.views import ReadScenes, SceneViews, read_scenes

MODELS_ROW = ("vggt", "none: weights of its own", ", ".join(SCENE_DECODERS), "facebook/VGGT-1B")
"""(family, transformers model types, decoders, example), as `list_models` gives them of single-image models."""

MAX_VIEWS = 24
"""Views in a figure of tokens: all of the first scene, and of scenes after it as long as they fit as a whole."""

_SEEDS = 3
"""`diagnose` draws from this many seeds in a row; scenes must not share them, or their errors would be correlated."""


def run_scene_diagnosis(request: DiagnosisRequest, out: Path, watch: Watcher) -> dict[str, Any]:
    """Diagnose every layer over every scene; files and result are those of `run_diagnosis`, with ``scenes`` besides."""
    width = _checked_width(request)
    _check_precision(request)
    watch.stage(f"loading {request.model}")
    backbone = load_scene_backbone(request.model, device=request.device)
    probes = build_scene_probes(request, backbone)
    make_folder(out)
    watch.stage(f"reading scenes from {request.images}")
    own = backbone.model.config
    size = own.img_size if width is None else width
    found = read_scenes(request.images, size=size, patch_size=own.patch_size, limit=request.limit)
    watch.start([files.layer_name(probe.layer) for probe in probes], len(found.scenes), "scenes")
    return write_layers(
        out,
        watch,
        settings(request, backbone, _samples(found)),
        _pictures(found.scenes, backbone),
        [str(scene.folder) for scene in found.scenes],
        probes,
        lambda probe: _diagnose_scenes(request, probe, found.scenes, watch),
    )


def build_scene_probes(request: DiagnosisRequest, backbone: SceneBackbone) -> list[SceneProbe | SceneInputProbe]:
    """One probe per distinct layer, all on the same backbone and decoder."""
    decoder, distance = build_scene_decoder(request.decoder, backbone), task_distance(request.distance)
    probes: list[SceneProbe | SceneInputProbe] = []
    for layer in dict.fromkeys(request.layers or (backbone.default_layer,)):
        if isinstance(layer, str):
            probes.append(SceneInputProbe(backbone, decoder, distance))
        else:
            _check_layer(layer, backbone)
            probes.append(SceneProbe(backbone, decoder, layer, distance=distance))
    return probes


def _diagnose_scenes(
    request: DiagnosisRequest, probe: SceneProbe | SceneInputProbe, scenes: Sequence[SceneViews], watch: Watcher
) -> tuple[Tractability, Estimate | None]:
    reports: list[Tractability] = []
    for index, scene in enumerate(scenes):
        with _named(scene):
            report = diagnose(
                probe,
                scene.views[None],
                request.ranks,
                request.method,
                seed=request.seed + _SEEDS * index,
                rtol=request.rtol,
                precision=request.precision,
                convergence_samples=int(index < request.convergence_samples),
                on_progress=watch.advance,
            )
        reports.append(report)
    joined = join_reports(reports)
    if not isinstance(probe, SceneInputProbe) or len(probe.layers) == 1:
        return joined, None
    watch.stage("alignment of the layers")
    found = [
        layer_multiplicity(probe, scene.views[None], seed=request.seed + _SEEDS * index)
        for index, scene in enumerate(scenes)
    ]
    return joined, Estimate(torch.cat([one.value for one in found]), torch.cat([one.se for one in found]))


@contextmanager
def _named(scene: SceneViews) -> Iterator[None]:
    """Errors say which scene they are about."""
    try:
        yield
    except PullbackError as error:
        raise type(error)(f"{error} This is about the scene {scene.folder}.") from None


def _samples(found: ReadScenes) -> dict[str, Any]:
    """The part of `diagnosis.json` about the scenes. ``size`` is None where they differ in it."""
    sizes = {tuple(scene.views.shape[-2:]) for scene in found.scenes}
    return {
        "image_files": [str(file) for scene in found.scenes for file in scene.files],
        "scenes": [
            {
                "scene": str(scene.folder),
                "views": len(scene.views),
                "size": list(scene.views.shape[-2:]),
                "note": scene.note,
            }
            for scene in found.scenes
        ],
        "skipped": [{"file": str(scene.path), "reason": scene.reason} for scene in found.skipped],
        "size": list(sizes.pop()) if len(sizes) == 1 else None,
    }


def _pictures(scenes: Sequence[SceneViews], backbone: SceneBackbone) -> dict[str, np.ndarray]:
    """The views of the first scenes, and where the tokens of all of them sit."""
    layouts = [backbone.token_layout(scene.views) for scene in scenes]
    shown = {
        files.thumbnails_of(index): thumbnails(scene.views[:MAX_VIEWS])
        for index, scene in enumerate(scenes[: _scenes_that_fit([layout.views for layout in layouts])])
    }
    return {
        **shown,
        "scenes": np.array([scene.folder.name for scene in scenes]),
        "views": np.array([layout.views for layout in layouts]),
        "grid": np.array([layout.grid for layout in layouts]),
        "prefix": np.array(backbone.prefix),
    }


def _scenes_that_fit(views: Sequence[int]) -> int:
    return max(1, sum(total <= MAX_VIEWS for total in np.cumsum(views).tolist()))


def _checked_width(request: DiagnosisRequest) -> int | None:
    """None: the model's own."""
    if isinstance(request.size, tuple):
        height, width = request.size
        raise PullbackError(
            f"size: expected the width of the views, such as 518, since the height of each follows from its picture; "
            f"got {height}x{width}. Use --size {width}."
        )
    return request.size


def _check_layer(layer: int, backbone: SceneBackbone) -> None:
    """The backbone's own check advises in Python."""
    if not 0 <= layer < backbone.depth:
        raise ModelError(
            f"layer: expected a layer of the aggregator from 0 to {backbone.depth - 1} ({backbone.name} has "
            f"{backbone.depth}), got {layer}. The heads' own input is --layer hooks."
        )


def _check_precision(request: DiagnosisRequest) -> None:
    if request.precision == "bf16":
        raise PullbackError(
            "precision: expected float32 or tf32 for a VGGT, whose products have no bf16 form, got 'bf16'. Use "
            "--precision tf32."
        )


def join_reports(reports: Sequence[Tractability]) -> Tractability:
    """One report over all samples, its shape and its lowered ranks those of the largest Jacobian, its seed the first's.

    A smaller Jacobian is one with rows of zeros below: further singular values are 0, and kappa at a rank that it does
    not have is what it is at its own. Importance [B, N] has NaN behind the tokens of samples with fewer of them.
    """
    largest = max(reports, key=lambda report: (_max_rank(report), report.input_shape[0]))
    joined = replace(
        largest,
        seed=reports[0].seed,
        method=", ".join(dict.fromkeys(report.method for report in reports)),
        samples=tuple(_extended(sample, report, largest) for report in reports for sample in report.samples),
        convergence=join_tables([report.convergence for report in reports if report.convergence]),
        importance=torch.cat(_padded([report.importance for report in reports])),
        products=sum((report.products for report in reports), ProductCount()),
        seconds=sum(report.seconds for report in reports),
    )
    regime = classify(
        kappa=joined.kappa.mean,
        effective_rank=joined.r_eff_slq.mean,
        cv=joined.cv.mean,
        rank=joined.rank,
        max_rank=_max_rank(largest),
        thresholds=joined.thresholds,
    )
    return replace(joined, regime=regime)


def _max_rank(report: Tractability) -> int:
    return min(report.output_size, math.prod(report.input_shape))


def _extended(sample: SampleDiagnosis, own: Tractability, largest: Tractability) -> SampleDiagnosis:
    """With the ranks and the number of singular values of the largest."""
    missing = max(largest.ranks_used) - len(sample.singular_values)
    return replace(
        sample,
        kappa={rank: sample.kappa[used] for rank, used in zip(largest.ranks_used, own.ranks_used, strict=True)},
        singular_values=(*sample.singular_values, *(0.0,) * missing),
    )


def _padded(importance: Sequence[Tensor]) -> list[Tensor]:
    longest = max(part.shape[1] for part in importance)
    return [F.pad(part, (0, longest - part.shape[1]), value=math.nan) for part in importance]
