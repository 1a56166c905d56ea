"""What `pullback diagnose` does, without the terminal: a request in, files in a folder out.

Samples of one shape are diagnosed together; samples that differ, such as scenes with different numbers of views, one
after the other, and their diagnoses are joined. Every image is on disk as soon as it is done (`images.jsonl`), and the
results after every layer: the same request goes on after the last image, and ends with the same numbers.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pullback.backbones import AnyBackbone, Group, Samples, image_samples, load_any_backbone
from pullback.data.images import ImageBatch
from pullback.decoders import build_decoder, task_distance
from pullback.errors import PullbackError, counted
from pullback.geometry import Part, SampleDiagnosis, Tractability, diagnose, layer_multiplicity
from pullback.geometry.diagnosis import join_tables
from pullback.geometry.document import layer_result, multiplicity_result
from pullback.geometry.duration import announce
from pullback.geometry.parts import FinishedParts
from pullback.geometry.spectrum import Probe, features_of, output_size
from pullback.operators import ProductCount
from pullback.probes import ProbeMap, probe_at
from pullback.randnla import Estimate
from pullback.runs import documents as files
from pullback.runs.files import remove_unfinished, write_arrays, write_json
from pullback.runs.folder import check_kind, claim_folder
from pullback.runs.progress import Progress
from pullback.runs.provenance import provenance, weights_hash
from pullback.runs.settings import check_settings

_SEEDS = 3
"""`diagnose` draws from this many seeds in a row; groups must not share them, or their errors would be correlated."""


@dataclass(frozen=True)
class DiagnosisRequest:
    """Everything that decides the numbers.

    No ``decoder``: the model's default, cls or (VGGT) camera. No ``layers``: the last but one; "hooks" is the decoder's
    own input, all layers that it reads side by side; "latent" and "latent-ambient" are for decoders with a bottleneck.
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
    anew: bool = False,
) -> dict[str, Any]:
    """Diagnose every layer, writing `diagnosis.json` and `importance.npz` after each; the former is also returned.

    A ``batch`` of images is taken as it is; without one the samples of the request are read, resized and cropped.
    ``on_layer`` is called with the entry of each layer in `diagnosis.json` when it is on disk.

    A folder that holds a diagnosis with the same settings is gone on with: finished images and layers are taken from
    it, and layers that are not asked for again stay in it. Other settings or images are refused, or with ``anew`` take
    the place of what is there.
    """
    progress = progress or Progress()
    check_kind(out, "diagnose")
    progress.stage(f"loading {request.model}")
    backbone = load_any_backbone(request.model, device=request.device)
    request = replace(request, decoder=request.decoder or backbone.default_decoder)
    probes = build_probes(request, backbone)  # a wrong layer, decoder or size is found before anything is computed
    backbone.check_size(request.size)
    remove_unfinished(claim_folder(out, "diagnose"))
    if batch is None:
        progress.stage(f"reading {backbone.unit} from {request.images}")
        samples = backbone.read(request.images, request.size, request.limit)
    else:
        samples = image_samples(batch, backbone.pixel_format(), backbone.token_layout(batch.pixels))
    document = _settings(request, backbone, probes[0], samples) | {"complete": False, "failure": None, "layers": []}
    stored = None if anew else _stored(out, document)
    arrays = _arrays(out) if stored else {}
    known = {layer["layer"]: layer for layer in stored["layers"] if _array_of(layer) in arrays} if stored else {}
    missing = [probe.layer for probe in probes if probe.layer not in known]
    if stored and stored["complete"] and not missing:
        document = stored
    else:
        document["layers"] += known.values()
    if stored is None:
        for name in (files.PARTS, files.DIAGNOSIS):
            (out / name).unlink(missing_ok=True)
    parts = FinishedParts(out / files.PARTS)

    def keep(layer: int | str, group: int, part: Part) -> None:
        """Save a part; with the first one, the settings that it was computed with."""
        if not (out / files.DIAGNOSIS).is_file():
            write_json(out / files.DIAGNOSIS, document)
        parts.add(layer, group, part)

    finished = [files.layer_name(probe.layer) for probe in probes if probe.layer in known]
    if finished:
        progress.note(f"finished before, taken from {out}/: {', '.join(finished)}")
    left = {layer: len(samples) - parts.count(layer) for layer in missing}
    if left:
        _look_ahead(request, [probe for probe in probes if probe.layer in left], samples, left, backbone.unit, progress)
    progress.work("", sum(left.values()), backbone.unit)
    for probe in probes:
        progress.describe(files.layer_name(probe.layer))
        result = known.get(probe.layer)
        if result is None:
            try:
                report, multiplicity = _diagnose_layer(request, probe, samples, parts, keep, progress)
            except BaseException as error:
                _record_failure(out, document, probe.layer, error)
                raise
            result = layer_result(report, samples.names)
            if multiplicity is not None:
                result["k_eff"] = multiplicity_result(multiplicity, probe.layers)
            arrays |= {**samples.arrays, _array_of(result): report.importance.float().numpy()}
            write_arrays(out / files.IMPORTANCE, arrays)
            document["layers"].append(result)
            missing.remove(probe.layer)
            document["complete"] = not missing
            write_json(out / files.DIAGNOSIS, document)
        if on_layer is not None:
            on_layer(result)
    return document


def stopped_in(out: Path) -> tuple[str, int]:
    """Return the layer that the run in a folder was stopped in, such as "L04", and how many of its samples are kept."""
    failure = files.read_diagnosis(out).get("failure") if (out / files.DIAGNOSIS).is_file() else None
    if failure is None:
        return "", 0
    return files.layer_name(failure["layer"]), FinishedParts(out / files.PARTS).count(failure["layer"])


def _look_ahead(
    request: DiagnosisRequest,
    probes: Sequence[ProbeMap],
    samples: Samples,
    left: Mapping[int | str, int],
    unit: str,
    progress: Progress,
) -> None:
    """Find samples that the decoder refuses before anything is computed, and say how long the others will take."""
    first, *others = samples.groups
    for group in others:
        with _named(group):
            output_size(probes[0], features_of(probes[0], group.pixels[:1], normalized=True))
    work: dict[str, tuple[Probe, int]] = {files.layer_name(probe.layer): (probe, left[probe.layer]) for probe in probes}
    with _named(first):
        announce(
            progress,
            work,
            first.pixels,
            max(request.ranks),
            request.method,
            unit=unit.removesuffix("s"),
            precision=request.precision,
        )


def _stored(out: Path, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the diagnosis in the folder after a check that its settings are these; None if there is none."""
    if not (out / files.DIAGNOSIS).is_file():
        return None
    stored = files.read_diagnosis(out)
    if "pixels" not in stored:
        raise PullbackError(
            f"out: {out} holds a diagnosis of an earlier version of pullback, which can be read but not gone on with. "
            "Choose another folder."
        )
    there, asked = ({name: document.get(name) for name in _DECISIVE} for document in (stored, settings))
    check_settings(there, asked, out, holds="a diagnosis")
    return stored


def _arrays(out: Path) -> dict[str, Any]:
    return files.read_importance(out) if (out / files.IMPORTANCE).is_file() else {}


def _array_of(layer: Mapping[str, Any]) -> str:
    return files.layer_name(layer["layer"])


def build_probes(request: DiagnosisRequest, backbone: AnyBackbone) -> list[ProbeMap]:
    """Build one probe per distinct layer, all on the same backbone and decoder."""
    decoder = build_decoder(request.decoder or backbone.default_decoder, backbone)
    distance = task_distance(request.distance)
    layers = dict.fromkeys(request.layers or (backbone.default_layer,))
    probes = [probe_at(backbone, decoder, layer, distance=distance) for layer in layers]
    for probe in probes:
        if request.precision == "bf16" and not probe.by_hand:
            raise PullbackError(
                f"precision: expected float32 or tf32 for {probe.name}, whose products have no bf16 form, got 'bf16'. "
                "Use --precision tf32."
            )
    return probes


def _diagnose_layer(
    request: DiagnosisRequest,
    probe: ProbeMap,
    samples: Samples,
    parts: FinishedParts,
    keep: Callable[[int | str, int, Part], None],
    progress: Progress,
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
                normalized=True,
                seed=request.seed + _SEEDS * index,
                rtol=request.rtol,
                precision=request.precision,
                batch_size=1 if probe.device.type == "cpu" else None,  # where an image takes long, one is lost at most
                convergence_samples=max(0, request.convergence_samples - done),
                on_progress=progress.advance,
                parts=parts.of(probe.layer, index),
                on_part=partial(keep, probe.layer, index),
            )
        reports.append(report)
        done += len(group.pixels)
    if len(probe.layers) == 1:
        return join_reports(reports), None
    progress.stage("alignment of the layers")
    found = [
        layer_multiplicity(probe, group.pixels, seed=request.seed + _SEEDS * index, normalized=True)
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


_DECISIVE = (
    *("family", "weights", "decoder", "decoder_identity", "distance", "distance_identity", "size", "pixels"),
    *("ranks", "method_asked", "precision", "rtol", "seed", "convergence_samples", "device"),
)
"""The settings that decide the numbers, wherever model and images lie: they must agree when a run goes on."""


def _settings(request: DiagnosisRequest, backbone: AnyBackbone, probe: ProbeMap, samples: Samples) -> dict[str, Any]:
    """Return what `diagnosis.json` says besides its layers; ``probe`` is that of any of them."""
    return {
        "model": request.model,
        "family": backbone.family,
        "weights": weights_hash(backbone.model),
        "decoder": request.decoder,
        "distance": request.distance,
        **probe.identity,
        "images": request.images,
        **samples.record,
        "pixels": _fingerprint(samples, backbone.unit),
        "limit": request.limit,
        "depth": backbone.depth,
        "ranks": list(request.ranks),
        "method_asked": request.method,
        "precision": request.precision,
        "rtol": request.rtol,
        "seed": request.seed,
        "convergence_samples": request.convergence_samples,
        **provenance(backbone.device),
    }


def _fingerprint(samples: Samples, unit: str) -> str:
    """Return what tells these pixels from others, short enough for a message: "2 images, sha256 0123456789ab"."""
    digest = hashlib.sha256()
    for group in samples.groups:
        digest.update(f"{tuple(group.pixels.shape)}".encode())
        digest.update(group.pixels.detach().cpu().contiguous().numpy().data)
    return f"{counted(len(samples), unit.removesuffix('s'))}, sha256 {digest.hexdigest()[:12]}"


def _record_failure(out: Path, document: dict[str, Any], layer: int | str, error: BaseException) -> None:
    """Say in the file why layers are missing; without a finished image there is no file, and none is made."""
    reason = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error) or type(error).__name__
    document["failure"] = {"layer": layer, "reason": reason}
    if (out / files.DIAGNOSIS).is_file():
        write_json(out / files.DIAGNOSIS, document)


# Diagnoses of samples that differ in shape, as the diagnosis of all of them


def join_reports(reports: Sequence[Tractability]) -> Tractability:
    """Join reports into one over all samples, with shape and lowered ranks of the largest Jacobian, seed of the first.

    A smaller Jacobian is one with rows of zeros below: further singular values are 0, and kappa at a rank that it does
    not have is what it is at its own. Importance [B, N] has NaN behind the tokens of samples with fewer of them.
    """
    if len(reports) == 1:
        return reports[0]
    largest = max(reports, key=lambda report: (report.max_rank, report.input_shape[0]))
    return replace(
        largest,
        seed=reports[0].seed,
        method=", ".join(dict.fromkeys(report.method for report in reports)),
        samples=tuple(_extended(sample, report, largest) for report in reports for sample in report.samples),
        convergence=join_tables([report.convergence for report in reports if report.convergence]),
        importance=torch.cat(_padded([report.importance for report in reports])),
        products=sum((report.products for report in reports), ProductCount()),
        seconds=sum(report.seconds for report in reports),
    )


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
