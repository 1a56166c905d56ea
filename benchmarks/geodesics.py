"""How far the straight segment between the features of two images is from the geodesic of the pullback.

    python benchmarks/geodesics.py --cases scenes-L03 scenes-L06 scenes-L10 --device cuda --work work/
    python benchmarks/geodesics.py --model dinov2=facebook/dinov2-small saliency=DIR --images photos=DIR --device cuda

A case is a probe and a layer, each with every --floors (eps in units of tr(g) / (N D)). Random distinct pairs of
held-out images; for each the energy and the length of the straight segment and of the path that L-BFGS finds from it,
beside |psi(F_1) - psi(F_2)|, which no path can beat; and over pairs Spearman's rho between these lengths, and with the
feature distance. Lengths are by Jacobian products within the segments, without the floor.

A case and floor is kept in --work as soon as it is done and not measured again, so a stopped run goes on; --seconds
stops it between two of them. What --work holds by then is written to the one result file.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bottleneck import PHOTOS, SCENES, kept, named, pictures, write_result
from measure import machine
from torch import Tensor

import pullback as pb
from pullback.evaluation.ranking import spearman
from pullback.evaluation.statistics import mean_and_error
from pullback.runs.files import make_folder, write_json

LAYERS = (3, 6, 10)
FLOORS = (0.0, 1e-3, 1e-1)


@dataclass(frozen=True)
class Case:
    """``model``: a name that --model turns into a folder; ``data`` one that --images does, or rendered scenes."""

    model: str
    decoder: str
    data: str
    layer: int


_PROBES = {
    "cls": ("dinov2", "cls", PHOTOS),
    "saliency": ("saliency", "saliency", PHOTOS),
    "scenes": ("tiny-scenes", "depth", SCENES),
}
CASES = {f"{name}-L{layer:02d}": Case(*probe, layer) for name, probe in _PROBES.items() for layer in LAYERS}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES), metavar="CASE")
    parser.add_argument("--floors", nargs="+", type=float, default=list(FLOORS))
    parser.add_argument("--model", nargs="+", default=[], metavar="NAME=MODEL", help="where dinov2 and saliency are")
    parser.add_argument("--images", nargs="+", default=[], metavar="photos=FOLDER", help="where pictures are")
    parser.add_argument("--held-out", type=int, default=200, help="pictures, or scenes that are rendered")
    parser.add_argument("--pairs", type=int, default=200, help="of them")
    parser.add_argument("--segments", type=int, default=8)
    parser.add_argument("--steps", type=int, default=200, help="gradients of a pair, at most")
    parser.add_argument("--rtol", type=float, default=1e-3)
    parser.add_argument("--num-probes", type=int, default=16, help="of the trace")
    parser.add_argument("--precision", default="tf32", help="of the steps; what is reported is measured in float32")
    parser.add_argument("--size", type=int, default=None, help="of pictures, in pixels (default: the model's)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which nothing more is begun")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=None, help="folder of what is done so far")
    parser.add_argument("--out", type=Path, default=None, help="folder of the JSON file")
    options = parser.parse_args(arguments)
    begun = time.perf_counter()
    work = make_folder(options.work or (options.out or Path("runs")) / "geodesics")
    settings = _settings(options)
    for name in options.cases:
        left = [floor for floor in options.floors if "lengths" not in kept(_file(work, name, floor), settings)]
        if left and time.perf_counter() - begun < options.seconds:
            measure(name, left, options, work, begun + options.seconds)
    names = [f"{name}, floor {floor:g}" for name in CASES for floor in options.floors]
    write_result("geodesics", names, work, options)


def measure(name: str, floors: Sequence[float], options: argparse.Namespace, work: Path, until: float) -> None:
    """Measure a case with several floors, and write each as soon as it is done."""
    case, device = CASES[name], torch.device(options.device)
    probe = pb.load_probe(named(options.model, case.model, case.model), case.decoder, case.layer, device=device)
    images = pictures(probe.backbone, case.data, options.held_out, options)
    features, pairs = probe.features(images, normalized=True), drawn_pairs(len(images), options.pairs, options.seed)
    first, second = (features[rows.to(device)] for rows in pairs.unbind(1))
    for floor in floors:
        if time.perf_counter() > until:
            return
        begun = time.perf_counter()
        found = pb.geodesic(
            probe,
            first,
            second,
            segments=options.segments,
            floor=floor,
            steps=options.steps,
            rtol=options.rtol,
            num_probes=options.num_probes,
            precision=options.precision,
            seed=options.seed,
        )
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        stored = {"settings": _settings(options), "model": case.model, "decoder": case.decoder, "layer": case.layer}
        stored |= {"floor": floor, "images": len(images), "pixels": list(images.shape[-2:])}
        stored |= {"inputs": features[0].numel(), "outputs": found.outputs[0, 0].numel(), **summary(found)}
        stored |= {"seconds": time.perf_counter() - begun, "machine": machine(device)}
        write_json(_file(work, name, floor), stored)
        print(f"{name}, floor {floor:g}: {stored['seconds']:.1f} s, {found}", flush=True)


def summary(found: pb.Geodesic) -> dict[str, Any]:
    """Return means over pairs, rank correlations, costs, and the values of each pair."""
    straight, path, apart = found.straight, found.found, found.output_distance
    assert apart is not None
    lengths = {
        "straight": straight.length,
        "geodesic": path.length,
        "outputs": apart,
        "features": found.feature_distance,
    }
    energies = {
        "energy": (straight.energy, path.energy),
        "task_energy": (straight.task_energy, path.task_energy),
        "curve_energy": (straight.curve_energy, path.curve_energy),
    }
    known = apart > 0
    shares = {
        "straight": straight.length,
        "straight, chords": straight.chord_length,
        "geodesic": path.length,
        "geodesic, chords": path.chord_length,
    }
    names = list(lengths)
    return {
        "ratio": {key: spread(before / after) for key, (before, after) in energies.items()},
        "over_outputs": {key: spread(value[known] / apart[known]) for key, value in shares.items()},
        "spearman": {
            f"{one}, {other}": float(spearman(lengths[one][None], lengths[other][None]))
            for place, one in enumerate(names)
            for other in names[place + 1 :]
        },
        "converged": float(found.converged.double().mean()),
        "iterations": spread(found.iterations.double()),
        "eps": spread(found.eps),
        "trace": None if found.trace is None else spread(found.trace.value),
        "trace_relative_se": None if found.trace is None else float(found.trace.relative_se.median()),
        "cost": {"forwards": found.forwards, "jvp": found.products.jvp, "vjp": found.products.vjp},
        "lengths": {key: value.tolist() for key, value in lengths.items()},
        "energies": {key: [before.tolist(), after.tolist()] for key, (before, after) in energies.items()},
    }


def spread(values: Tensor) -> dict[str, float]:
    """Return mean, standard error, median and the deciles at both ends."""
    mean, se = mean_and_error(values)
    low, median, high = values.double().quantile(torch.tensor([0.1, 0.5, 0.9]).to(values)).tolist()
    return {"mean": mean, "se": se, "median": median, "low": low, "high": high}


def drawn_pairs(count: int, pairs: int, seed: int) -> Tensor:
    """Return so many different pairs of different images, [pairs, 2]."""
    every = torch.combinations(torch.arange(count))
    if len(every) < pairs:
        raise SystemExit(f"{count} images make {len(every)} pairs, fewer than {pairs}: choose more images.")
    return every[torch.randperm(len(every), generator=torch.Generator().manual_seed(seed))[:pairs]]


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    names = ("held_out", "pairs", "segments", "steps", "rtol", "num_probes", "precision", "size", "seed")
    return {name: getattr(options, name) for name in names}


def _file(work: Path, name: str, floor: float) -> Path:
    return work / f"{name}, floor {floor:g}.json"


if __name__ == "__main__":
    main()
