"""What each choice of preset best is worth: one changed at a time, on training images.

    python benchmarks/pruning_choices.py --model facebook/dinov2-small --images train/ --heads 3=heads/L03 6=heads/L06
    python benchmarks/pruning_choices.py --model tiny-scenes --decoder depth --images scenes/ --heads 4=heads/L04

Mean degradation of each variant, as `pullback prune` measures it, and its paired difference to the preset with a
standard error. The preset's own gate and trust are among the variants. Choose on images that no table uses.
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
from pullback.evaluation import degradation
from pullback.pruning import PrunePlan, preset
from pullback.pruning.rules import Subject
from recipes.measurement import mean_with_error

PRESET = "preset"
FADES = ((0.0, 0.8), (0.3, 0.9), (0.3, 1.0), (0.5, 0.9), (0.6, 0.95))
VARIANTS: dict[str, dict[str, Any]] = {
    PRESET: {},
    **{f"gate {gate:g}": {"gates": (gate,), "fades": (gate,)} for gate in (-1.0, 0.5, 0.6, 0.7, 0.8)},
    **{f"in part {low:g} to {high:g}": {"gates": (low,), "fades": (high,)} for low, high in FADES},
    **{f"trust {trust:g}": {"trust": trust} for trust in (0.0, 0.15, 0.3, 0.5, 0.7, 1.0)},
    "without sizes": {"sizes": False},
    "artifacts may take in others": {"safe": False},
    "weighted by size": {"weighting": "size"},
}
DENSE: dict[str, dict[str, Any]] = {
    "not fused before the last block": {"fuse_last": False},
    "as they were": {"reinsert": "frozen"},
    "copies of their partners": {"reinsert": "copy"},
}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--decoder", default="cls")
    parser.add_argument("--images", required=True)
    parser.add_argument("--heads", nargs="+", required=True, help="LAYER=FOLDER")
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--batch", type=int, default=25)
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.3, 0.5])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=None, help="folder for the JSON (default benchmarks/results)")
    options = parser.parse_args()
    probe = pb.load_probe(options.model, options.decoder, device=options.device)
    subject = Subject(probe.backbone, probe.decoder, ())
    images = probe.load_images(options.images, 224, limit=options.limit).to(options.device)
    full = torch.cat([subject.full(part) for part in images.split(options.batch)])
    measure = degradation(full, full, depth=subject.depth).measure

    def values_of(plan: PrunePlan, head: pb.ImportanceHead) -> Tensor:
        pruned = subject.pruned(plan, [head])
        parts = [subject.output(pruned, part)[0] for part in images.split(options.batch)]
        return degradation(torch.cat(parts), full, depth=subject.depth).value

    name = "pruning_choices" if options.decoder == "cls" else f"pruning_choices_{options.decoder}"
    variants = VARIANTS | DENSE if subject.dense else VARIANTS
    rows: list[dict[str, Any]] = []
    content = {"machine": machine(torch.device(options.device)), "model": options.model, "images": len(images)}
    content |= {"decoder": options.decoder, "measure": measure}
    for entry in options.heads:
        layer, folder = entry.split("=")
        head = pb.ImportanceHead.from_pretrained(folder, device=options.device)
        for ratio in options.ratios:
            best = preset("best", ratio, [int(layer)], dense=subject.dense, depth=probe.backbone.depth)
            reference = values_of(best, head)
            for variant, knobs in variants.items():
                values = values_of(replace(best, **knobs), head) if knobs else reference
                row = {"layer": int(layer), "ratio": ratio, "variant": variant, **mean_with_error(values)}
                row["more than the preset"] = mean_with_error(values - reference)
                rows.append(row)
                gap = row["more than the preset"]
                print(
                    f"L{layer} {ratio} {variant:28s} {row['mean']:.4f}  {gap['mean']:+.4f} ± {gap['se']:.4f}",
                    flush=True,
                )
            save(f"{name}_{options.device}", content | {"rows": rows}, options.out)


if __name__ == "__main__":
    main()
