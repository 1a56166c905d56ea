"""Does the planner keep its word? Three budgets, planned on calibration images, checked on held-out ones.

    python benchmarks/pruning_planner.py --model facebook/dinov2-small --heads 3=heads/L03 6=heads/L06 10=heads/L10 \
        --calibration train/ --held-out heldout/ --device cuda

Budgets: operations (a share of the unpruned model's), latency (a share of its milliseconds at this batch, uncompiled),
degradation (cosine distance x 100 of the class token).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from measure import machine, save
from torch import Tensor, nn

import pullback as pb
from pullback.evaluation.cost import flops, race
from pullback.evaluation.fidelity import cosine_degradation
from pullback.pruning.planner import best_within_cost, cheapest_within_degradation, stage_choices


def embeddings(model: nn.Module, images: Tensor, batch: int) -> Tensor:
    return torch.cat([model(part).pooler_output.float() for part in images.split(batch)])


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--heads", nargs="+", required=True, help="LAYER=FOLDER")
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--held-out", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=200)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--flops", type=float, default=0.75)
    parser.add_argument("--latency", type=float, default=0.85)
    parser.add_argument("--degradation", type=float, default=0.5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    device = torch.device(options.device)
    probe = pb.load_probe(options.model, "cls", device=options.device)
    model = probe.backbone.model
    heads = {int(layer): folder for layer, folder in (entry.split("=") for entry in options.heads)}
    networks = {layer: pb.ImportanceHead.from_pretrained(folder, device=device) for layer, folder in heads.items()}
    calibration, held_out = (
        probe.load_images(folder, 224, limit=options.limit).to(device)
        for folder in (options.calibration, options.held_out)
    )
    wanted = {id(images): embeddings(model, images, options.batch) for images in (calibration, held_out)}

    def build(stages: tuple[int, ...], ratio: float) -> pb.PrunedModel:
        return pb.prune(model, [networks[stage] for stage in stages], ratio=ratio, stages=stages)

    def degradation(pruned: nn.Module, images: Tensor = calibration) -> Tensor:
        return cosine_degradation(embeddings(pruned, images, options.batch), wanted[id(images)])

    def operations(pruned: nn.Module, images: Tensor = calibration) -> float:
        return flops(lambda: pruned(images[:1])) / whole

    def latency(pruned: nn.Module, images: Tensor = calibration) -> float:
        """Milliseconds of a batch as a share of the unpruned model's, in turns with it."""
        some = images[: options.batch]
        unpruned, own = race([lambda: model(some), lambda: pruned(some)], device)
        return own.median / unpruned.median

    whole = flops(lambda: model(calibration[:1]))
    stages = stage_choices(networks)
    budgets: dict[str, tuple[Any, Any, float]] = {
        "operations": (best_within_cost, operations, options.flops),
        "latency": (best_within_cost, latency, options.latency),
        "degradation": (cheapest_within_degradation, operations, options.degradation),
    }
    rows = []
    for name, (search, cost, limit) in budgets.items():
        forecast = search(build, stages, cost, degradation, limit)
        chosen = build(forecast.plan.stages, forecast.plan.ratio)
        seen = degradation(chosen, held_out)
        row = {
            "budget": name,
            "limit": limit,
            "stages": forecast.plan.stages,
            "ratio": forecast.plan.ratio,
            "plans_tried": forecast.measured,
            "expected": {"cost": forecast.cost, "degradation": forecast.degradation, "se": forecast.degradation_se},
            "held_out": {
                "cost": cost(chosen, held_out),
                "degradation": float(seen.mean()),
                "se": float(seen.std() / len(seen) ** 0.5),
            },
        }
        off = {key: row["held_out"][key] / row["expected"][key] - 1 for key in ("cost", "degradation")}  # type: ignore[index]
        rows.append(row | {"off": off})
        print(f"{name} <= {limit}: {forecast}; held out {row['held_out']}, off by {off}", flush=True)
    content = {"machine": machine(device), "model": options.model, "batch": options.batch, "images": options.limit}
    print(f"written: {save(f'pruning_planner_{device.type}', content | {'budgets': rows}, options.out)}")


if __name__ == "__main__":
    main()
