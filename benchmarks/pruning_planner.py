"""Does the planner keep its word? Three budgets, planned on calibration images, checked on held-out ones.

    python benchmarks/pruning_planner.py --model facebook/dinov2-small --heads 3=heads/L03 6=heads/L06 10=heads/L10 \
        --calibration train/ --held-out heldout/ --device cuda

Budgets: operations (a share of the unpruned model's), latency (a share of its milliseconds at this batch, uncompiled),
degradation (cosine distance x 100 of the class token). Each forecast says all three, so all three are checked: the
time on held-out images is measured anew, in turns with the unpruned model, as the share of its time.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from measure import machine, save
from torch import nn

import pullback as pb
from pullback.pruning.budget import Calibration, Forecast, plan_pruning

CHECKED = ("flops", "milliseconds", "share_of_time", "degradation")


def promised(forecast: Forecast) -> dict[str, float]:
    assert forecast.flops is not None and forecast.milliseconds is not None and forecast.whole_milliseconds is not None
    return {
        "flops": forecast.flops,
        "milliseconds": forecast.milliseconds,
        "share_of_time": forecast.milliseconds / forecast.whole_milliseconds,
        "degradation": forecast.degradation,
        "se": forecast.degradation_se,
    }


def measured(images: Calibration, chosen: nn.Module) -> dict[str, float]:
    degradation, milliseconds = images.degradation(chosen), images.milliseconds(chosen)
    return {
        "flops": images.flops(chosen),
        "milliseconds": milliseconds,
        "share_of_time": milliseconds / images.whole_milliseconds(),
        "degradation": float(degradation.mean()),
        "se": float(degradation.std() / len(degradation) ** 0.5),
    }


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
    parser.add_argument("--rounds", type=int, default=20, help="of each timing")
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
    known, unseen = (
        Calibration(model, images, options.batch, rounds=options.rounds) for images in (calibration, held_out)
    )
    whole = known.whole_milliseconds()
    budgets = {
        "flops": options.flops,
        "milliseconds": options.latency * whole,
        "degradation": options.degradation,
    }
    rows = []
    for name, limit in budgets.items():
        forecast = plan_pruning(
            model, networks, calibration, batch=options.batch, rounds=options.rounds, **{name: limit}
        )
        stages = forecast.plan.stages
        chosen = pb.prune(model, [networks[stage] for stage in stages], ratio=forecast.plan.ratio, stages=stages)
        expected, found = promised(forecast), measured(unseen, chosen)
        off = {key: found[key] / expected[key] - 1 for key in CHECKED}
        row = {"budget": name, "limit": limit, "stages": stages, "ratio": forecast.plan.ratio}
        rows.append(row | {"tried": forecast.measured, "expected": expected, "held_out": found, "off": off})
        print(f"{name} <= {limit:.4g}: {forecast}; held out {found}, off by {off}", flush=True)
    content = {"machine": machine(device), "model": options.model, "batch": options.batch, "images": options.limit}
    print(f"written: {save(f'pruning_planner_{device.type}', content | {'budgets': rows}, options.out)}")


if __name__ == "__main__":
    main()
