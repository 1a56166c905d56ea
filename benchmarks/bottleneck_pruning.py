"""Token importance through a bottleneck as a pruning score, against the importance of the original probe.

    python benchmarks/bottleneck_pruning.py --bottlenecks runs/ --cases scenes --device cuda
    python benchmarks/bottleneck_pruning.py --bottlenecks runs/ --cases saliency dinov2 \
        --model saliency=DIR dinov2=DIR --images photos=others/ train=photos/ --device cuda

Dense decoders, one stage after block 4, preset best. Scores: the converged rank-20 importance of both probes, the same
from few products (so that both cost alike), learned heads whose targets come from either probe (block
norms, the same pictures and products), and scores without a Jacobian. For each: error of the output on held-out images
as `pullback prune` measures it, the paired difference to the original importance with a 95 % interval and its p, the
rank correlation with it, and the products and seconds that an image takes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bottleneck import INPUTS, PHOTOS, SCENES, Case, add_places, kept, loaded, pictures, write_result
from measure import machine
from torch import Tensor

import pullback as pb
from pullback.decoders import task_distance
from pullback.evaluation import degradation
from pullback.evaluation.ranking import spearman
from pullback.evaluation.statistics import bootstrap_mean, compare_paired, mean_and_error
from pullback.geometry.importance import block_norms, quick_importance
from pullback.geometry.spectrum import in_batches
from pullback.learning.bottleneck import compressed_probe
from pullback.learning.fit import FitConfig, fit
from pullback.learning.train_head import HeadExamples, HeadTask, new_head
from pullback.operators import JacobianOperator
from pullback.pruning import ScoreContext, preset
from pullback.pruning.rules import Subject
from pullback.randnla import Streams
from pullback.runs.files import make_folder, write_json
from pullback.targets.recipe import targets_of

STAGE, RANK = 4, 20
WIDTH = 32  # columns of the importance from a fixed number of products
CASES = {
    "scenes": Case("tiny-scenes", "depth", INPUTS, "tiny-scenes", SCENES),
    "saliency": Case("saliency", "saliency", INPUTS, "saliency", PHOTOS),
    "dinov2": Case("dinov2", "depth", INPUTS, "dinov2-depth", PHOTOS),
}
TRAIN = {SCENES: SCENES, PHOTOS: "train"}
DISTANCE = {"depth": "log"}
"""The task distance by decoder: errors of depth are errors of its logarithm."""
ORIGINAL, BOTTLENECK = "original", "bottleneck"
NAMED = ("bipartite", "random", "norm", "cls-similarity")
REFERENCE = f"exact, {ORIGINAL}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    add_places(parser)
    parser.add_argument("--held-out", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.1, 0.3, 0.5])
    parser.add_argument("--rounds", nargs="+", type=int, default=[0, 1], help="of importances from few products")
    parser.add_argument("--train-images", type=int, default=2048, help="whose block norms the heads learn; 0: no heads")
    parser.add_argument("--num-probes", type=int, default=8, help="VJPs of each of them")
    parser.add_argument("--steps", type=int, default=1500, help="of the heads")
    parser.add_argument("--width", type=int, default=256, help="of the heads")
    parser.add_argument("--precision", default="tf32", help="of the products")
    options = parser.parse_args(arguments)
    work = make_folder(options.work or (options.out or Path("runs")) / "bottleneck_pruning")
    names = (
        "held_out",
        "train_images",
        "num_probes",
        "steps",
        "width",
        "ratios",
        "rounds",
        "precision",
        "size",
        "seed",
    )
    settings = {name: getattr(options, name) for name in names}
    for name in options.cases:
        path, begun = work / f"{name}.json", time.perf_counter()
        stored = kept(path, settings)
        if "rows" not in stored:
            stored |= measure(CASES[name], options)
            stored |= {"machine": machine(torch.device(options.device)), "seconds": time.perf_counter() - begun}
            write_json(path, stored)
        write_result("bottleneck_pruning", CASES, work, options)


@dataclass(frozen=True)
class Scored:
    """What a score says of the held-out images, and what it took."""

    name: str
    values: Tensor | str  # [n, N], or the name of a score that needs the tokens alone
    products: int | None = None  # of an image
    milliseconds: float | None = None  # of an image
    training: dict[str, float] | None = None  # of a head: what its targets took, and rho on those held out


def measure(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Return the rows of a case, one for each score and ratio."""
    vae, at_inputs = loaded(case, options)
    distance = task_distance(DISTANCE.get(case.decoder))
    original = replace(at_inputs, at=STAGE, distance=distance)
    probes = {ORIGINAL: original, BOTTLENECK: compressed_probe(original, vae)}
    backbone = original.backbone
    subject = Subject(backbone, original.decoder, (STAGE,))
    images = pictures(backbone, case.data, options.held_out, options)
    full = torch.cat([subject.full(part) for part in images.split(options.batch)])
    measured_by = degradation(full, full, depth=subject.depth).measure
    features = original.features(images, normalized=True)
    prefix = original.token_layout(features).prefix
    scores = list(exact_scores(probes, features, options))
    if options.train_images:
        learned = pictures(backbone, TRAIN[case.data], options.train_images, options, first=0)
        scores += head_scores(probes, original.features(learned, normalized=True), features, options)
    scores += [Scored(name, name) for name in NAMED]
    reference = scores[0].values
    assert scores[0].name == REFERENCE and isinstance(reference, Tensor)

    rows: list[dict[str, Any]] = []
    for ratio in options.ratios:
        exact: np.ndarray | None = None
        for score in scores:
            values = errors(subject, score, ratio, images, full, options.batch)
            exact = values if exact is None else exact
            rows.append(row_of(score, ratio, values, exact, reference, prefix))
            print(f"{ratio} {score.name}: {rows[-1]['mean']:.4f}", flush=True)
    about = {"model": case.model, "decoder": case.decoder, "stage": STAGE, "rank": RANK, "size": vae.size}
    return {**about, "images": len(images), "measure": measured_by, "rows": rows}


# Scores


def exact_scores(probes: dict[str, pb.ProbeMap], features: Tensor, options: argparse.Namespace) -> Iterator[Scored]:
    """Yield the importance of each probe: converged, then from (2 rounds + 1) `WIDTH` products."""
    for name, probe in probes.items():
        targets_of(probe, features[:1], RANK, precision=options.precision)  # warms up
        begun = time.perf_counter()
        found = targets_of(probe, features, RANK, precision=options.precision, num_probes=2, seed=options.seed)
        spent = found.products.jvp + found.products.vjp
        yield Scored(f"exact, {name}", found.importance, spent, _milliseconds(begun, features))
    for rounds, (name, probe) in product(options.rounds, probes.items()):
        begun = time.perf_counter()
        parts = list(in_batches(partial(few_products, probe, rounds, options), features, options.batch))
        spent = (2 * rounds + 1) * WIDTH
        yield Scored(f"{spent} products, {name}", torch.cat(parts), spent, _milliseconds(begun, features))


def few_products(probe: pb.ProbeMap, rounds: int, options: argparse.Namespace, part: Tensor, first: int) -> Tensor:
    """Compute the importance [b, N] from (2 rounds + 1) `WIDTH` products, which does not converge."""
    op = JacobianOperator(probe, part, precision=options.precision)
    streams = Streams.from_seed(options.seed, len(part), part.device, first)
    return quick_importance(op, part.shape[1], RANK, width=WIDTH, rounds=rounds, streams=streams)


def head_scores(
    probes: dict[str, pb.ProbeMap], learned: Tensor, features: Tensor, options: argparse.Namespace
) -> list[Scored]:
    """Train a head on block norms of each probe, from the same pictures and as many products."""
    found = []
    prefix = probes[ORIGINAL].token_layout(features).prefix
    plain, tests = (tokens.as_subclass(Tensor) for tokens in (learned, features))
    held = max(1, len(plain) // 16)  # of the training pictures, on which the checkpoint is chosen
    for name, probe in probes.items():
        begun = time.perf_counter()
        targets = norms_of(probe, learned, options)
        training = {
            "images": len(learned),
            "products": options.num_probes,
            "milliseconds": _milliseconds(begun, learned),
        }
        train, judge = (
            HeadExamples.kept(plain[part], targets[part], prefix) for part in (slice(held, None), slice(held))
        )
        config = FitConfig(
            steps=options.steps,
            validate_every=max(1, options.steps // 5),
            precision="bf16" if options.device == "cuda" else "float32",
            seed=options.seed,
        )
        head = new_head(train, options.width, target="block-norm", seed=options.seed)
        training["rho"] = fit(head, HeadTask([train], judge), config).scores["rho"]
        print(f"head, {name}: {training}", flush=True)
        with torch.no_grad():
            values = torch.cat([head(part).float() for part in tests.split(options.batch)])
        found.append(Scored(f"head, {name}", values, 0, training=training))
    return found


def norms_of(probe: pb.ProbeMap, features: Tensor, options: argparse.Namespace) -> Tensor:
    """Estimate the block norms [n, N] of each image from a few VJPs."""

    def work(part: Tensor, first: int) -> Tensor:
        op = JacobianOperator(probe, part, precision=options.precision)
        streams = Streams.from_seed(options.seed, len(part), part.device, first)
        energies = block_norms(op, part.shape[1], num_probes=options.num_probes, streams=streams).squared.value
        return energies.clamp_min(0).sqrt().float()

    return torch.cat(list(in_batches(work, features, 4 * options.batch)))


def _milliseconds(begun: float, features: Tensor) -> float:
    if features.is_cuda:
        torch.cuda.synchronize(features.device)
    return 1e3 * (time.perf_counter() - begun) / len(features)


# What they are worth


def errors(subject: Subject, score: Scored, ratio: float, images: Tensor, full: Tensor, batch: int) -> np.ndarray:
    """Return the degradation of each held-out image [n] when so many of its patches go."""
    plan = preset("best", ratio, [STAGE], dense=subject.dense, depth=subject.backbone.depth)
    values = []
    for first in range(0, len(images), batch):
        part = slice(first, first + batch)
        choice: str | Callable[[Tensor, ScoreContext], Tensor] = (
            score.values if isinstance(score.values, str) else _known(score.values[part])
        )
        output = subject.output(subject.pruned(plan, [choice]), images[part])[0]
        values.append(degradation(output, full[part], depth=subject.depth).value)
    return torch.cat(values).double().cpu().numpy()


def _known(values: Tensor) -> Callable[[Tensor, ScoreContext], Tensor]:
    return lambda tokens, context: values.to(tokens.device).gather(1, context.positions)


def row_of(
    score: Scored, ratio: float, values: np.ndarray, exact: np.ndarray, reference: Tensor, prefix: int
) -> dict[str, Any]:
    interval = bootstrap_mean(values, generator=np.random.default_rng(0))
    row: dict[str, Any] = {"score": score.name, "ratio": ratio, "mean": interval.mean}
    row |= {"interval": [interval.low, interval.high], "products": score.products, "milliseconds": score.milliseconds}
    if score.training is not None:
        row["training"] = score.training
    if score.name != REFERENCE:
        compared = compare_paired(values, exact, generator=np.random.default_rng(0))
        gap = compared.difference
        row["more than exact"] = {"mean": gap.mean, "low": gap.low, "high": gap.high, "p": compared.p_value}
        if isinstance(score.values, Tensor):
            rho = spearman(score.values[:, prefix:].double().cpu(), reference[:, prefix:].double().cpu())
            row["spearman"] = dict(zip(("mean", "se"), mean_and_error(rho), strict=True))
    return row


if __name__ == "__main__":
    main()
