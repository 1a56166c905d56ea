"""What each choice of preset best is worth on a class token: one changed at a time, on training images.

    python benchmarks/pruning_choices.py --model facebook/dinov2-small --images train/ --heads 3=heads/L03 6=heads/L06

Mean degradation (cosine x 100) of each variant, and its paired difference to the preset with a standard error. The
preset's own gate and trust are among the variants. Choose on images that no table uses.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from measure import machine, save
from torch import Tensor

import pullback as pb
from pullback.evaluation import cosine_degradation
from pullback.pruning import PrunePlan, preset, run_pruned
from pullback.training.measurement import mean_with_error

PRESET = "preset"
VARIANTS: dict[str, dict[str, Any]] = {
    PRESET: {},
    **{f"gate {gate:g}": {"gates": (gate,)} for gate in (-1.0, 0.5, 0.6, 0.7, 0.8)},
    **{f"trust {trust:g}": {"trust": trust} for trust in (0.0, 0.15, 0.3, 0.5, 1.0)},
    "without sizes": {"sizes": False},
    "artifacts may take in others": {"safe": False},
    "weighted by size": {"weighting": "size"},
}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--images", required=True)
    parser.add_argument("--heads", nargs="+", required=True, help="LAYER=FOLDER")
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--batch", type=int, default=25)
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.3, 0.5])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=None, help="folder for the JSON (default benchmarks/results)")
    options = parser.parse_args()
    probe = pb.load_probe(options.model, "cls", device=options.device)
    backbone, last = probe.backbone, probe.backbone.depth - 1
    images = probe.load_images(options.images, 224, limit=options.limit).to(options.device)
    full = torch.cat(
        [backbone.norm(backbone.features(part, [last])[last][:, 0]) for part in images.split(options.batch)]
    )

    def degradation(plan: PrunePlan, head: pb.ImportanceHead) -> Tensor:
        runs = [run_pruned(backbone, part, plan, [head], layers=[last]) for part in images.split(options.batch)]
        return cosine_degradation(torch.cat([backbone.norm(run.taps[0][:, 0]) for run in runs]), full)

    rows: list[dict[str, Any]] = []
    content = {"machine": machine(torch.device(options.device)), "model": options.model, "images": len(images)}
    for entry in options.heads:
        layer, folder = entry.split("=")
        head = pb.ImportanceHead.from_pretrained(folder, device=options.device)
        for ratio in options.ratios:
            best = preset("best", ratio, [int(layer)], depth=backbone.depth)
            reference = degradation(best, head)
            for variant, knobs in VARIANTS.items():
                values = degradation(replace(best, **knobs), head) if knobs else reference
                row = {"layer": int(layer), "ratio": ratio, "variant": variant, **mean_with_error(values)}
                row["more than the preset"] = mean_with_error(values - reference)
                rows.append(row)
                gap = row["more than the preset"]
                print(
                    f"L{layer} {ratio} {variant:28s} {row['mean']:.4f}  {gap['mean']:+.4f} ± {gap['se']:.4f}",
                    flush=True,
                )
            save(f"pruning_choices_{options.device}", content | {"rows": rows}, options.out)


if __name__ == "__main__":
    main()
