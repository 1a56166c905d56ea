"""Does the planner keep its word? Three budgets, planned on calibration images, checked on held-out ones.

    python benchmarks/pruning_planner.py --model facebook/dinov2-small --heads 3=heads/L03 6=heads/L06 10=heads/L10 \
        --calibration train/ --held-out heldout/ --device cuda

Budgets: operations (a share of those of the unpruned blocks), latency (a share of the model's milliseconds at this
batch, uncompiled), degradation (cosine distance x 100 of the class token). Each forecast says all three, so all three
are checked: the time on held-out images is measured anew, in turns with the unpruned model, as the share of its time.
Whether the plan beats a smaller picture alone and ToMe there as it was said to is checked as well.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import machine, save

import pullback as pb
from pullback.evaluation.statistics import compare_paired
from pullback.pruning.contest import Calibration
from pullback.pruning.forecast import Forecast
from pullback.pruning.model import PrunedModel
from pullback.runs.progress import Lines

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


def alternatives(forecast: Forecast, images: Calibration, chosen: PrunedModel) -> list[dict[str, Any]]:
    """Compare the plan with its alternatives on held-out images, beside what was expected."""
    own, rows = images.degradation(chosen).cpu(), []
    for other in forecast.alternatives:
        values = images.degradation(PrunedModel(chosen.model, other.plan, [])).cpu()
        found = compare_paired(values.tolist(), own.tolist(), generator=np.random.default_rng(0)).difference
        rows.append(
            {"name": other.name, "flops": other.flops, "expected": asdict(other.difference), "held_out": asdict(found)}
        )
    return rows


def measured(images: Calibration, chosen: PrunedModel) -> dict[str, float]:
    degradation, milliseconds = images.degradation(chosen), images.milliseconds(chosen)
    return {
        "flops": images.operations(chosen),
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
    parser.add_argument("--output", choices=["model", "cls"], default="model")
    parser.add_argument("--own-size", action="store_true", help="do not consider smaller pictures")
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
        forecast = pb.plan_pruning(
            model,
            networks,
            calibration,
            sizes=() if options.own_size else None,
            output=options.output,
            batch=options.batch,
            rounds=options.rounds,
            progress=Lines(),
            **{name: limit},
        )
        plan, chosen = forecast.plan, forecast.model
        assert chosen is not None
        expected, found = promised(forecast), measured(unseen, chosen)
        off = {key: found[key] / expected[key] - 1 if expected[key] else None for key in CHECKED}
        row = {"budget": name, "limit": limit, "size": plan.size, "stages": plan.stages, "ratio": plan.ratio}
        row |= {"shares": plan.shares, "tried": forecast.measured, "interval": forecast.interval}
        others = alternatives(forecast, unseen, chosen)
        rows.append(row | {"expected": expected, "held_out": found, "off": off, "alternatives": others})
        print(f"{name} <= {limit:.4g}: {forecast}; held out {found}, off by {off}", flush=True)
    content = {"machine": machine(device), "model": options.model, "batch": options.batch, "images": options.limit}
    print(f"written: {save(f'pruning_planner_{device.type}', content | {'budgets': rows}, options.out)}")


if __name__ == "__main__":
    main()
