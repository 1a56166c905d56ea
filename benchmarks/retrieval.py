"""How well distances from features alone agree with the decoder's own: the learned metric, baselines, and the ceiling.

    python benchmarks/retrieval.py --cells saliency:4 saliency:8 --model saliency=DIR --images train=DIR heldout=DIR \
        rgbd=DIR sketch=DIR --device cuda --work runs/retrieval
    python benchmarks/retrieval.py --cells scenes:8 --work runs/retrieval --device cuda

A cell is a case (`CASES`) and a layer. For each, a Distilled Riemannian Metric is trained on training pictures and
random crops of them, validated on pictures set aside from these, and judged once on pictures that nothing was trained
or chosen on: of the same data, and across data. The judge is the distance of the decoder's outputs. Beside it: the
constant metric, Frobenius distance, cosines of class tokens and of mean patches; and on a sample of pairs the energy of
the straight line under the true Jacobian at eight points, and optimal transport, with what a pair costs.

Every cell is kept in --work when it is done, its metric in --work/CELL/model, and a training that was stopped goes on;
several processes may do different cells. Each process writes what --work holds by then to the result file; without
--cells nothing is measured.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import machine, save
from torch import Tensor

import pullback as pb
from pullback.data.sources import open_source
from pullback.errors import NumericsError
from pullback.evaluation.distances import RELATIVE, output_distances
from pullback.evaluation.retrieval import RetrievalScores, retrieval_scores
from pullback.learning.distilled_metric import DistilledMetric, MetricItems, pairwise_distances
from pullback.learning.target_streams import FreshCrops
from pullback.learning.train_drm import (
    TRAINING_CELLS,
    MetricExamples,
    MetricOptions,
    averaged_output,
    drm_config,
    examples_of,
    fit_drm,
    items_of,
    varied_features,
)
from pullback.learning.train_head import pictures_to_vary, readable_rows
from pullback.operators.execution import matmul_precision
from pullback.retrieval.baselines import feature_distances, line_energy
from pullback.retrieval.transport import transport_distances
from pullback.runs.files import make_folder, write_json
from pullback.runs.progress import Progress
from pullback.runs.provenance import weights_hash
from pullback.scenes.splits import HELD_OUT, QUERIES, SHIFTED, TRAINING, SceneRange

SCENES = "scenes"
BATCH = 32
BASELINES = ("l2", "cls-cosine", "mean-cosine")


@dataclass(frozen=True)
class Case:
    """``model``: a name that --model turns into a folder; ``sets``: what it is judged on, the first in distribution."""

    model: str
    decoder: str
    sets: tuple[str, ...]


CASES = {
    "saliency": Case("saliency", "saliency", ("heldout", "rgbd", "sketch")),
    "depth": Case("dinov2", "depth", ("heldout", "rgbd", "sketch")),
    SCENES: Case("tiny-scenes", "depth", ("held-out scenes", "shifted scenes")),
}
DRAWN: dict[str, tuple[int, SceneRange]] = {
    "held-out scenes": (QUERIES, TRAINING),
    "shifted scenes": (QUERIES, SHIFTED),
    "validation": (HELD_OUT, TRAINING),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", default=[], metavar="CASE:LAYER", help=f"cases: {', '.join(CASES)}")
    parser.add_argument("--model", nargs="+", default=[], metavar="NAME=MODEL", help="where a model of the cases is")
    parser.add_argument("--images", nargs="+", default=[], metavar="NAME=SOURCE", help="train, heldout, rgbd, sketch")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--train", type=int, default=None, help="training pictures; of scenes 2000 by default")
    parser.add_argument("--validation", type=int, default=150, help="of them set aside, or scenes, for validation")
    parser.add_argument("--test", type=int, default=None, help="pictures of each set; of scenes 200 by default")
    parser.add_argument("--crops", type=int, default=16)
    parser.add_argument("--importance", type=int, default=256, help="crops whose importance is distilled")
    parser.add_argument("--distill-weight", type=float, default=MetricOptions().distill_weight)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--validate-every", type=int, default=500)
    parser.add_argument("--fit", type=int, default=0, help="training pictures on which it is judged as well")
    parser.add_argument("--sample", type=int, nargs=2, default=(10, 100), help="queries and items of the ceiling")
    parser.add_argument("--points", type=int, default=8)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=None, help="folder of what is done so far")
    parser.add_argument("--out", type=Path, default=None, help="folder of the JSON file")
    parser.add_argument("--name", default=None, help="of the JSON file")
    options = parser.parse_args(arguments)
    work = make_folder(options.work or (options.out or Path("runs")) / "retrieval")
    for cell in options.cells:
        path = work / f"{cell.replace(':', '-L')}.json"
        if path.is_file():
            continue
        begun = time.perf_counter()
        with matmul_precision("tf32"):
            found = measure(cell, options, work)
        write_json(path, {**found, "seconds": round(time.perf_counter() - begun, 1)})
        told = found["sets"][CASES[found["case"]].sets[0]]["methods"]
        rho = {name: round(scores["spearman_pairs"], 3) for name, scores in told.items()}
        print(f"{cell}: {time.perf_counter() - begun:.0f} s, {rho}", flush=True)
    cells = [json.loads(path.read_text()) for path in sorted(work.glob("*-L*.json"))]
    if cells:
        place = machine(torch.device(options.device))
        name = options.name or f"retrieval_{torch.device(options.device).type}"
        save(name, {"machine": place, "options": _plain(vars(options)), "cells": cells}, options.out)


def measure(cell: str, options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Train the metric of a cell and judge it."""
    name, layer = cell.split(":")
    case, places = CASES[name], dict(entry.split("=", 1) for entry in options.model)
    probe = pb.load_probe(places.get(case.model, case.model), case.decoder, int(layer), device=options.device)
    metric, training = trained(probe, case, options, work / cell.replace(":", "-L"))
    found: dict[str, Any] = {"case": name, "layer": int(layer), "reference": metric.config.reference}
    found["training"] = training
    if options.fit:
        found["fit"] = fitted(probe, metric, options)
    found["sets"] = {part: judged(probe, metric, part, options, ceiling=part == case.sets[0]) for part in case.sets}
    return found


def fitted(probe: pb.ProbeMap, metric: DistilledMetric, options: argparse.Namespace) -> dict[str, Any]:
    """Score the metric on pictures that it was trained on: what is missing there is missing in its form, and what is
    lost from there to held-out pictures more training pictures could bring."""
    pictures = argparse.Namespace(**{**vars(options), "test": options.fit})
    features, outputs = test_set(probe, "train", pictures)
    items = items_of(metric, MetricExamples.of(features.as_subclass(Tensor), outputs))
    truth = output_distances(outputs, outputs, metric.config.reference)
    scores = compared({"drm": pairwise_distances(items, items)}, truth, options.seed)["drm"]
    return {"images": len(features), **scores.summary()}


# Training


def trained(
    probe: pb.ProbeMap, case: Case, options: argparse.Namespace, folder: Path
) -> tuple[DistilledMetric, dict[str, Any]]:
    """Train a metric, go on with it, or take the one that is there; return it with its scores on the pictures that
    were set aside."""
    if (folder / "model").is_dir():
        metric = DistilledMetric.from_pretrained(folder, device=probe.device)
        metric.check(
            "work", family=probe.backbone.family, layer=int(probe.layer), weights=weights_hash(probe.backbone.model)
        )
        return metric, {**metric.config.scores, "rounds": metric.config.rounds}
    begun = time.perf_counter()
    pictures, validation = training_pictures(probe, case, options)
    crops = varied_features(probe, pictures.to(probe.device), options.size, options.crops, seed=options.seed)
    plain = plain_features(probe, pictures, options.size)
    count = (1 + options.crops) * len(pictures)
    train = examples_of(probe, chained(plain, crops), count, cells=TRAINING_CELLS)
    judge = examples_of(probe, validation, options.validation)
    importance = None
    if options.distill_weight:
        block = {"block": options.importance, "batch": min(16, options.importance), "seed": options.seed}
        stream = FreshCrops(
            probe, pictures, options.size, num_probes=None, rounds=1, rank=20, precision=precision(probe), **block
        )
        importance = stream(0)
    ready = time.perf_counter()
    config = drm_config(
        steps=options.steps, batch=options.batch, validate_every=options.validate_every, seed=options.seed
    )
    chosen = MetricOptions(options.rank, options.width, rounds=options.rounds, distill_weight=options.distill_weight)
    settings = {"crops": options.crops, "pictures": len(pictures), "importance": options.importance}
    metric = fit_drm(probe, train, judge, importance, chosen, config=config, out=folder, settings=settings)
    metric.save_pretrained(folder / "model")
    seconds = {"preparing": round(ready - begun, 1), "training": round(time.perf_counter() - ready, 1)}
    parameters = sum(parameter.numel() for parameter in metric.parameters())
    sizes = {"pictures": len(pictures), "parameters": parameters, "rounds": options.rounds}
    return metric, {**metric.config.scores, "seconds": seconds, **sizes}


def training_pictures(probe: pb.ProbeMap, case: Case, options: argparse.Namespace) -> tuple[Tensor, Iterator[Tensor]]:
    """Return pictures [n, 3, S, S] uint8 to train on, and features of others to validate with."""
    if case.model == "tiny-scenes":
        count = 2000 if options.train is None else options.train
        pictures = torch.cat([drawn(part, options) for part in parts(range(count))]).mul(255).round().byte()
        first, ranges = DRAWN["validation"]
        held = (drawn(part, options, ranges) for part in parts(range(first, first + options.validation)))
        return pictures, (probe.features(pb.normalised(part), normalized=True) for part in held)
    wanted = probe.pixel_format(options.size)
    rows = readable_rows(images(options, "train"), wanted, options.train)
    rows, others = rows[: -options.validation], rows[-options.validation :]
    pixels = (torch.stack([row.pixels(wanted) for row in part]) for part in parts(others))
    return pictures_to_vary(rows, wanted, Progress()), (probe.features(part, normalized=True) for part in pixels)


def plain_features(probe: pb.ProbeMap, pictures: Tensor, size: int) -> Iterator[Tensor]:
    """Features of the middle of pictures [n, 3, S, S] uint8."""
    margin = (pictures.shape[-1] - size) // 2
    middle = pictures[..., margin : margin + size, margin : margin + size]
    wanted = probe.backbone.preprocessing
    for part in middle.split(BATCH):
        pixels = pb.normalised(part.to(probe.device).float() / 255, wanted.mean, wanted.std)
        yield probe.features(pixels, normalized=True)


# Judging


def judged(
    probe: pb.ProbeMap, metric: DistilledMetric, part: str, options: argparse.Namespace, *, ceiling: bool
) -> dict[str, Any]:
    """Compare all methods with the decoder's distances on one set of pictures, every picture a query for all others."""
    features, outputs = test_set(probe, part, options)
    items = items_of(metric, MetricExamples.of(features.as_subclass(Tensor), outputs))
    layout = probe.token_layout(features)
    predicted = {"drm": pairwise_distances(items, items)}
    embedded = metric.embed(items)
    predicted["constant"] = torch.cdist(embedded, embedded)
    predicted |= {kind: feature_distances(features, features, kind, layout=layout) for kind in BASELINES}
    own = metric.config.reference
    truths = {kind: output_distances(outputs, outputs, kind) for kind in RELATIVE}
    scores = {kind: compared(predicted, truth, options.seed) for kind, truth in truths.items()}
    best = max(BASELINES, key=lambda name: scores[own][name].means["spearman"].mean)
    ahead = scores[own]["drm"].compared(scores[own][best], generator=np.random.default_rng(options.seed))
    found: dict[str, Any] = {
        "images": len(features),
        "methods": {name: each.summary() for name, each in scores[own].items()},
        "other_reference": {
            kind: {name: each.summary() for name, each in of_kind.items()}
            for kind, of_kind in scores.items()
            if kind != own
        },
        "best_baseline": best,
        "ahead_of_it": {
            "difference": ahead.difference.mean,
            "low": ahead.difference.low,
            "high": ahead.difference.high,
            "p": ahead.p_value,
        },
    }
    if ceiling:
        found["sample"] = sampled(probe, metric, features, items, truths[own], predicted, options)
    return found


def compared(
    predicted: dict[str, Tensor], truth: Tensor, seed: int, *, themselves: bool = True
) -> dict[str, RetrievalScores]:
    """Score each method. ``themselves``: whether the queries are the items, so that each leaves itself out."""
    itself = torch.eye(len(truth), dtype=torch.bool, device=truth.device) if themselves else None
    near = [k for k in (10,) if k < truth.shape[1] - 1]
    return {
        name: retrieval_scores(
            distances.to(truth), truth, leave_out=itself, neighbours=near, generator=np.random.default_rng(seed)
        )
        for name, distances in predicted.items()
    }


def sampled(
    probe: pb.ProbeMap,
    metric: DistilledMetric,
    features: Tensor,
    items: MetricItems,
    truth: Tensor,
    predicted: dict[str, Tensor],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Compare all methods, and those that are too slow for all pairs, on a few queries and items; and time them."""
    queries, count = options.sample
    generator = torch.Generator().manual_seed(options.seed)
    order = torch.randperm(len(features), generator=generator).to(features.device)
    rows, columns = order[:queries], order[queries : queries + count]
    first, second = rows.repeat_interleave(len(columns)), columns.repeat(len(rows))
    few = {name: distances[rows][:, columns] for name, distances in predicted.items()}
    small = 64 if features.device.type == "cuda" else BATCH
    line_energy(probe, features[first[:4]], features[second[:4]], points=options.points, chunk_size=small)  # warm-up
    begun = _now(features.device)
    lines = line_energy(probe, features[first], features[second], points=options.points, chunk_size=small)
    energy_seconds = _now(features.device) - begun
    few["energy"] = lines.distances.view(len(rows), -1)
    begun = _now(features.device)
    failed = None
    try:
        few["transport"] = transport_distances(items[rows], items[columns])
    except NumericsError as error:
        failed = str(error)
    transport_seconds = _now(features.device) - begun
    scores = compared(few, truth[rows][:, columns], options.seed, themselves=False)
    asked = features[rows].as_subclass(Tensor)
    query = _milliseconds(lambda: pairwise_distances(metric(asked), items), features.device) / (len(rows) * len(items))
    pairs, tokens = len(first), features.shape[1]
    return {
        "queries": len(rows),
        "items": len(columns),
        "points": options.points,
        "methods": {name: each.summary() for name, each in scores.items()},
        "milliseconds_per_pair": {
            "drm": query,  # with the query's own head, not its features
            "energy": 1e3 * energy_seconds / pairs,
            "transport": 1e3 * transport_seconds / pairs,
        },
        "transport_failed": failed,
        "products_per_pair": {"energy_jvp": lines.products.jvp, "energy_outputs": lines.outputs},
        "multiplications_per_pair": {"drm": 2 * tokens * metric.config.rank},
    }


def test_set(probe: pb.ProbeMap, part: str, options: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Return features and outputs of the pictures of a set."""
    if part in DRAWN:
        first, ranges = DRAWN[part]
        count = 200 if options.test is None else options.test
        pixels = torch.cat([pb.normalised(drawn(p, options, ranges)) for p in parts(range(first, first + count))])
    else:
        wanted = probe.pixel_format(options.size)
        pixels = torch.stack([row.pixels(wanted) for row in readable_rows(images(options, part), wanted, options.test)])
    features = probe.features(pixels.to(probe.device), normalized=True)
    with torch.no_grad():
        outputs = torch.cat(
            [averaged_output(probe(features[k : k + BATCH]), None) for k in range(0, len(features), BATCH)]
        )
    return features, outputs


# Pictures


def images(options: argparse.Namespace, name: str) -> Any:
    places = dict(entry.split("=", 1) for entry in options.images)
    if name not in places:
        raise SystemExit(f"--images {name}=DIR is missing, which this cell needs")
    folder = Path(places[name])
    if not folder.is_dir():
        return open_source(places[name])
    found = (file for file in folder.rglob("*") if file.suffix.lower() in (".jpg", ".jpeg", ".png"))
    return sorted(str(file) for file in found if not file.stem.endswith("_depth"))


def drawn(seeds: range, options: argparse.Namespace, ranges: SceneRange = TRAINING) -> Tensor:
    return pb.render(seeds, size=options.size, ranges=ranges, device=options.device).rgb[:, 0]


def parts(rows: Any) -> Iterator[Any]:
    return (rows[k : k + BATCH] for k in range(0, len(rows), BATCH))


def chained(*streams: Iterator[Tensor]) -> Iterator[Tensor]:
    for stream in streams:
        yield from stream


# Bookkeeping


def precision(probe: pb.ProbeMap) -> str:
    return "tf32" if probe.device.type == "cuda" else "float32"


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _milliseconds(call: Any, device: torch.device, rounds: int = 5) -> float:
    call()
    begun = _now(device)
    for _ in range(rounds):
        call()
    return 1e3 * (_now(device) - begun) / rounds


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


if __name__ == "__main__":
    main()
