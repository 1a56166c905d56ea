"""What `pullback look` does, without the terminal: maps of several layers or decoders for a few images, into a folder.

The map is the block norm |J_:,t|_F of each token, how far the output can move when the features of the token change by
one, over all directions of the output. It takes a few dozen VJPs an image and no spectrum: of outputs with fewer
numbers than that it is exact, otherwise an unbiased estimate of its square with a known error. (`token_importance` is
the part of it that the leading modes carry.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from pullback.backbones import AnyBackbone, entry_of, load_any_backbone
from pullback.backbones.backbone import Size
from pullback.checks import whole_number
from pullback.data.images import find_images, to_pictures
from pullback.decoders import build_decoder, task_distance
from pullback.errors import DecoderError, PullbackError
from pullback.geometry.importance import block_norms
from pullback.geometry.overlay import no_single_images
from pullback.geometry.scores import block_energies
from pullback.operators import JacobianOperator, check_sensitive
from pullback.probes import LATENTS, ProbeMap, probe_at
from pullback.randnla import Streams
from pullback.registry import decoders_for
from pullback.runs import documents as files
from pullback.runs.files import write_arrays, write_json
from pullback.runs.folder import check_kind, claim_folder
from pullback.runs.progress import Progress
from pullback.runs.provenance import provenance

PROBES = 32
"""Random output directions; the square of a block norm is then known to about a tenth, which no eye can see."""


@dataclass(frozen=True)
class LookRequest:
    """Everything that decides the maps.

    No ``decoders``: the model's default. No ``layers``: three of them for one decoder (a third, two thirds and nearly
    all of the way up), two for several.
    """

    model: str
    images: tuple[str, ...]
    decoders: tuple[str, ...] = ()
    layers: tuple[int | str, ...] = ()
    limit: int = 8
    size: Size = None
    num_probes: int = PROBES
    distance: str | None = None
    device: str = "auto"
    seed: int = 0


def run_look(request: LookRequest, out: Path, progress: Progress | None = None) -> dict[str, Any]:
    """Write the maps of every image to `look.npz` and what they are to `look.json`, which is also returned."""
    progress = progress or Progress()
    found = _check(request)
    check_kind(out, "look")
    progress.stage(f"loading {request.model}")
    backbone = load_any_backbone(request.model, device=request.device)
    probes = _probes(request, backbone)
    backbone.check_size(request.size)
    claim_folder(out, "look")
    progress.stage("reading images")
    batch = backbone.read_images([str(file) for file in found], request.size, request.limit)
    pixels = batch.pixels
    layout = backbone.token_layout(pixels)
    progress.work("", len(probes) * len(batch), "maps")
    maps: list[dict[str, Any]] = []
    energies: list[np.ndarray] = []
    for probe in probes:
        progress.describe(f"{probe.decoder.name} at {files.layer_name(probe.layer)}")
        measured = []
        for place in range(len(batch)):
            measured.append(_energies(probe, pixels[place : place + 1], request, place))
            progress.advance(1)
        energies.append(np.stack([energy for energy, _, _ in measured]))
        maps.append(
            {
                "decoder": probe.decoder.name,
                "layer": probe.layer,
                "exact": all(exact for _, _, exact in measured),
                "relative_error": round(sum(error for _, error, _ in measured) / len(measured), 4),
            }
        )
    document = {
        "model": request.model,
        "images": [str(path) for path in batch.paths],
        "found": len(found),
        "skipped": [image.record() for image in batch.skipped],
        "size": list(pixels.shape[-2:]),
        "maps": maps,
        "num_probes": request.num_probes,
        "distance": request.distance,
        "seed": request.seed,
        **provenance(backbone.device),
    }
    arrays = {
        "pictures": to_pictures(backbone.pixel_format(request.size).rgb(pixels)),
        "energy": np.stack(energies).astype(np.float32),
        "grid": np.array(layout.grid),
        "prefix": np.array(layout.prefix),
    }
    write_arrays(out / files.LOOK_ARRAYS, arrays)
    write_json(out / files.LOOK, document)
    return document


def _check(request: LookRequest) -> list[Path]:
    """Refuse what can be refused without the model, and return the files of the images."""
    whole_number("probes", request.num_probes, least=2, expected="at least 2, for an error")
    found = find_images(list(request.images))
    entry = entry_of(request.model)
    if entry.views:
        raise no_single_images("model", repr(request.model))
    choices = decoders_for(entry.name)
    for decoder in request.decoders:
        if not any(choice.match(decoder) for choice in choices):
            names = ", ".join(choice.name for choice in choices)
            raise DecoderError(f"decoder: expected one of {names} for {request.model}, got {decoder!r}.")
    for layer in request.layers:
        if layer in LATENTS:
            raise PullbackError(
                f"layer: expected a block index or 'hooks', got {layer!r}: registers have no place in the picture that "
                "a map could show. `pullback diagnose` takes them."
            )
    task_distance(request.distance)
    return found


def _probes(request: LookRequest, backbone: AnyBackbone) -> list[ProbeMap]:
    names = dict.fromkeys(request.decoders or (backbone.default_decoder,))
    decoders = [build_decoder(name, backbone) for name in names]
    layers = dict.fromkeys(request.layers or _default_layers(backbone.depth, len(decoders)))
    distance = task_distance(request.distance)
    return [probe_at(backbone, decoder, layer, distance=distance) for decoder in decoders for layer in layers]


def _default_layers(depth: int, decoders: int) -> Sequence[int]:
    last = max(0, depth - 2)
    wanted = (depth // 3, 2 * depth // 3, last) if decoders == 1 else (depth // 2, last)
    return sorted({min(layer, last) for layer in wanted})


def _energies(probe: ProbeMap, image: Tensor, request: LookRequest, place: int) -> tuple[np.ndarray, float, bool]:
    """Return |J_:,t|_F^2 [N] of one image, its mean relative error, and whether it is exact."""
    features = probe.features(image, normalized=True)
    operator, tokens = JacobianOperator(probe, features), features.shape[1]
    if operator.rows <= request.num_probes:
        energy, error = block_energies(operator, tokens)[0], 0.0
    else:
        streams = Streams.from_seed(request.seed, 1, features.device, place)
        squared = block_norms(operator, tokens, num_probes=request.num_probes, streams=streams).squared
        energy = squared.value[0]
        error = float((squared.se[0] / energy.clamp_min(1e-300)).mean())
    check_sensitive(energy.sum()[None], place)
    return energy.cpu().numpy(), error, operator.rows <= request.num_probes
