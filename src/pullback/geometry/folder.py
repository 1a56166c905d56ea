"""What `pullback diagnose` does, without the terminal: a request in, files in a folder out.

Samples of one shape are diagnosed together; samples that differ, such as scenes with different numbers of views, one
after the other, and their diagnoses are joined. The folder is up to date after every layer, so that an interruption or
a failing layer loses nothing before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pullback.backbones import AnyBackbone, Group, Samples, image_samples, load_any_backbone
from pullback.data.images import ImageBatch
from pullback.decoders import build_decoder, task_distance
from pullback.errors import PullbackError
from pullback.geometry import SampleDiagnosis, Tractability, classify, diagnose, layer_multiplicity
from pullback.geometry.diagnosis import join_tables
from pullback.geometry.document import layer_result, multiplicity_result
from pullback.operators import ProductCount
from pullback.probes import HOOKS, INPUTS, ProbeMap
from pullback.randnla import Estimate
from pullback.runs import documents as files
from pullback.runs.files import make_folder, write_arrays, write_json
from pullback.runs.progress import Progress, Silent
from pullback.runs.provenance import provenance, weights_hash

_SEEDS = 3
"""`diagnose` draws from this many seeds in a row; groups must not share them, or their errors would be correlated."""


@dataclass(frozen=True)
class DiagnosisRequest:
    """Everything that decides the numbers.

    No ``decoder``: the model's default, cls or (VGGT) camera. No ``layers``: the last but one; "hooks" is the decoder's
    own input, all layers that it reads side by side.
    """

    model: str
    images: str
    decoder: str | None = None
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


def run_diagnosis(
    request: DiagnosisRequest,
    out: Path,
    progress: Progress | None = None,
    *,
    batch: ImageBatch | None = None,
    on_layer: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Diagnose every layer, writing `diagnosis.json` and `importance.npz` after each; the former is also returned.

    A ``batch`` of images is taken as it is; without one the samples of the request are read, resized and cropped.
    ``on_layer`` is called with the entry of each layer in `diagnosis.json` when it is on disk.
    """
    progress = progress or Silent()
    progress.stage(f"loading {request.model}")
    backbone = load_any_backbone(request.model, device=request.device)
    request = replace(request, decoder=request.decoder or backbone.default_decoder)
    probes = build_probes(request, backbone)  # a wrong layer, decoder or size is found before anything is computed
    backbone.check_size(request.size)
    make_folder(out)
    if batch is None:
        progress.stage(f"reading {backbone.unit} from {request.images}")
        samples = backbone.read(request.images, request.size, request.limit)
    else:
        samples = image_samples(batch, backbone.pixel_format(), backbone.token_layout(batch.pixels))
    progress.work("", len(probes) * len(samples), backbone.unit)
    document: dict[str, Any] = {
        **_settings(request, probes[0], samples),
        "complete": False,
        "failure": None,
        "layers": [],
    }
    arrays = dict(samples.arrays)
    for probe in probes:
        name = files.layer_name(probe.layer)
        progress.describe(name)
        try:
            report, multiplicity = _diagnose_layer(request, probe, samples, progress)
        except BaseException as error:
            _record_failure(out, document, probe.layer, error)
            raise
        result = layer_result(report, samples.names)
        if multiplicity is not None:
            result["k_eff"] = multiplicity_result(multiplicity, probe.layers)
        document["layers"].append(result)
        document["complete"] = len(document["layers"]) == len(probes)
        arrays[name] = report.importance.float().numpy()
        write_arrays(out / files.IMPORTANCE, arrays)
        write_json(out / files.DIAGNOSIS, document)
        if on_layer is not None:
            on_layer(result)
    return document


def build_probes(request: DiagnosisRequest, backbone: AnyBackbone) -> list[ProbeMap]:
    """Build one probe per distinct layer, all on the same backbone and decoder."""
    decoder = build_decoder(request.decoder or backbone.default_decoder, backbone)
    distance = task_distance(request.distance)
    layers = dict.fromkeys(request.layers or (backbone.default_layer,))
    probes = [ProbeMap(backbone, decoder, _place(layer), distance=distance) for layer in layers]
    for probe in probes:
        if request.precision == "bf16" and not probe.by_hand:
            raise PullbackError(
                f"precision: expected float32 or tf32 for {probe.name}, whose products have no bf16 form, got 'bf16'. "
                "Use --precision tf32."
            )
    return probes


def _place(layer: int | str) -> Any:
    return INPUTS if layer == HOOKS else layer


def _diagnose_layer(
    request: DiagnosisRequest, probe: ProbeMap, samples: Samples, progress: Progress
) -> tuple[Tractability, Estimate | None]:
    """Return the diagnosis of all samples, and K_eff [B] of a probe of several layers."""
    reports: list[Tractability] = []
    done = 0
    for index, group in enumerate(samples.groups):
        with _named(group):
            report = diagnose(
                probe,
                group.pixels,
                request.ranks,
                request.method,
                seed=request.seed + _SEEDS * index,
                rtol=request.rtol,
                precision=request.precision,
                convergence_samples=max(0, request.convergence_samples - done),
                on_progress=progress.advance,
            )
        reports.append(report)
        done += len(group.pixels)
    if len(probe.layers) == 1:
        return join_reports(reports), None
    progress.stage("alignment of the layers")
    found = [
        layer_multiplicity(probe, group.pixels, seed=request.seed + _SEEDS * index)
        for index, group in enumerate(samples.groups)
    ]
    return join_reports(reports), Estimate.join(found)


@contextmanager
def _named(group: Group) -> Iterator[None]:
    """Let errors say which samples they are about."""
    try:
        yield
    except PullbackError as error:
        if not group.about:
            raise
        raise type(error)(f"{error} This is about {group.about}.") from None


def _settings(request: DiagnosisRequest, probe: ProbeMap, samples: Samples) -> Mapping[str, Any]:
    """Return what `diagnosis.json` says besides its layers; ``probe`` is one of them."""
    backbone = probe.backbone
    return {
        "model": request.model,
        "family": backbone.family,
        "weights": weights_hash(backbone.model),
        "decoder": request.decoder,
        "distance": request.distance,
        **probe.identity,
        "images": request.images,
        **samples.record,
        "limit": request.limit,
        "depth": backbone.depth,
        "ranks": list(request.ranks),
        "method_asked": request.method,
        "precision": request.precision,
        "rtol": request.rtol,
        "seed": request.seed,
        **provenance(backbone.device),
    }


def _record_failure(out: Path, document: dict[str, Any], layer: int | str, error: BaseException) -> None:
    """Say in the file why layers are missing; with no layer at all, an earlier result in the folder is left alone."""
    reason = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error) or type(error).__name__
    document["failure"] = {"layer": layer, "reason": reason}
    if document["layers"]:
        write_json(out / files.DIAGNOSIS, document)


# Diagnoses of samples that differ in shape, as the diagnosis of all of them


def join_reports(reports: Sequence[Tractability]) -> Tractability:
    """Join reports into one over all samples, with shape and lowered ranks of the largest Jacobian, seed of the first.

    A smaller Jacobian is one with rows of zeros below: further singular values are 0, and kappa at a rank that it does
    not have is what it is at its own. Importance [B, N] has NaN behind the tokens of samples with fewer of them.
    """
    if len(reports) == 1:
        return reports[0]
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
    """Extend a sample to the ranks and the number of singular values of the largest Jacobian."""
    missing = max(largest.ranks_used) - len(sample.singular_values)
    return replace(
        sample,
        kappa={rank: sample.kappa[used] for rank, used in zip(largest.ranks_used, own.ranks_used, strict=True)},
        singular_values=(*sample.singular_values, *(0.0,) * missing),
    )


def _padded(importance: Sequence[Tensor]) -> list[Tensor]:
    longest = max(part.shape[1] for part in importance)
    return [F.pad(part, (0, longest - part.shape[1]), value=math.nan) for part in importance]
