"""One, two and four stages at equal operations, dense decoder, preset best and paper.

    python benchmarks/pruning_schedules.py --images scenes/ --device cuda                        # tiny-scenes depth
    python benchmarks/pruning_schedules.py --model DIR --decoder saliency --score cls-similarity --images photos/
    python benchmarks/pruning_schedules.py --heads 1=h1 4=h4 7=h7 8=h8 10=h10 --images scenes/   # with a head per stage

The one-stage plan sets the operations; the others get the smallest ratio that stays within them. Without heads or a
named score the score of a stage is the exact importance at its layer on the unpruned image (a Jacobian of a dense
decoder needs all tokens), taken at the places of the tokens that are left: what a perfect head would say of a token
before anything was removed.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from measure import machine, save
from torch import Tensor

import pullback as pb
from pullback.evaluation import degradation
from pullback.evaluation.cost import flops
from pullback.pruning import PrunePlan, ScoreContext, preset
from pullback.pruning.rules import Subject

SCHEDULES = ((4,), (4, 8), (1, 4, 7, 10))


def exact_scores(model: str, layers: set[int], images: Tensor, device: str, batch: int) -> dict[int, Tensor]:
    """imp* [B, N] of each layer, of log depth on 8 x 8 cells."""
    found = {}
    for layer in sorted(layers):
        probe = pb.load_probe(model, "depth-8x8", layer, device=device, distance="log")
        spectra = [pb.spectrum(probe, part, rank=20) for part in images.split(batch)]
        found[layer] = torch.cat([pb.token_importance(spectrum) for spectrum in spectra])
    return found


class Looked:
    """A score that is known for every place of every image."""

    def __init__(self, scores: Tensor) -> None:
        self.scores = scores

    def __call__(self, tokens: Tensor, context: ScoreContext) -> Tensor:
        return self.scores[: len(tokens)].gather(1, context.positions)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-scenes")
    parser.add_argument("--decoder", default="depth")
    parser.add_argument("--images", required=True)
    parser.add_argument("--limit", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--heads", nargs="*", default=[], help="LAYER=FOLDER")
    parser.add_argument("--score", default=None, help="by name, at every stage")
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.1, 0.2, 0.3, 0.5])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    if options.decoder != "depth" and not (options.heads or options.score):
        parser.error(f"--decoder {options.decoder}: the exact importance is that of depth. Give --heads or --score.")
    probe = pb.load_probe(options.model, options.decoder, device=options.device)
    subject = Subject(probe.backbone, probe.decoder, ())
    images = probe.load_images(options.images, 224, limit=options.limit).to(options.device)
    layers = {stage for stages in SCHEDULES for stage in stages}
    scores: dict[int, Any]
    if options.score:
        scores = dict.fromkeys(layers, options.score)
    elif options.heads:
        folders = dict(entry.split("=") for entry in options.heads)
        scores = {
            int(layer): pb.ImportanceHead.from_pretrained(folder, device=options.device)
            for layer, folder in folders.items()
        }
    else:
        exact = exact_scores(options.model, layers, images, options.device, options.batch)
        scores = {layer: Looked(value) for layer, value in exact.items()}

    def output(plan: PrunePlan, some: Tensor) -> Tensor:
        return subject.output(subject.pruned(plan, [scores[stage] for stage in plan.stages]), some)[0]

    full = torch.cat([subject.full(part) for part in images.split(options.batch)])
    measure = degradation(full, full, depth=subject.depth).measure
    with torch.no_grad():
        whole = flops(lambda: probe.backbone.features(images[:1], [probe.backbone.depth - 1]))
    decoding = flops(lambda: output(preset("paper", 0.0, [4], dense=True), images[:1])) - whole

    def share(plan: PrunePlan) -> float:
        """Of the backbone's operations; the decoder's are the same for all."""
        return (flops(lambda: output(plan, images[:1])) - decoding) / whole

    rows = []
    for name in ("best", "paper"):
        for ratio in options.ratios:
            budget = share(preset(name, ratio, SCHEDULES[0], dense=True))
            for stages in SCHEDULES:
                own = ratio
                if stages != SCHEDULES[0]:
                    own = smallest(lambda r, s=stages, n=name: share(preset(n, r, s, dense=True)), budget)  # type: ignore[misc]
                    if own is None:
                        print(f"{name} {stages}: never as cheap as {ratio} after block 4", flush=True)
                        continue
                plan = preset(name, own, stages, dense=True)
                errors = degradation(output(plan, images), full, depth=subject.depth).value
                row = {"preset": name, "stages": stages, "ratio": own, "operations": share(plan), "of": ratio}
                row |= {measure: float(errors.mean()), "se": float(errors.std() / len(errors) ** 0.5)}
                rows.append(row)
                print(row, flush=True)
    content = {"machine": machine(torch.device(options.device)), "model": options.model, "images": len(images)}
    score = options.score or ("heads" if options.heads else "exact importance of the unpruned image")
    content |= {"decoder": options.decoder, "measure": measure, "score": score, "rows": rows}
    name = "pruning_schedules" if options.decoder == "depth" else f"pruning_schedules_{options.decoder}"
    print(f"written: {save(name, content, options.out)}")


def smallest(cost: Any, budget: float) -> float | None:
    """The smallest ratio, in hundredths, that costs no more than the budget."""
    low, high = 0, 99
    if cost(high / 100) > budget:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if cost(middle / 100) <= budget else (middle, high)
    return high / 100


if __name__ == "__main__":
    main()
