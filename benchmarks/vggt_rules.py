"""What each choice of `prune_views(preset="best")` is worth: one changed at a time, on scenes that no table uses.

    python benchmarks/vggt_rules.py                                        # 16 scenes of 16 views, minutes on a CPU
    python benchmarks/vggt_rules.py --ratio 0.75 --scores norm --device cuda

Changes are those of `vggt_pruning.py`, with the paired difference to the preset.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from measure import machine, save
from torch import Tensor
from vggt_pruning import changes, joined, summary

from pullback.scenes.render import render
from pullback.scenes.splits import QUERIES
from pullback.vggt.pruning import STRIDED, PrunedVGGT, view_plan
from recipes.evaluate_tiny_views import load_network
from recipes.tiny_views import Views

FIRST = QUERIES + 5000  # behind the scenes of every table
PRESET = "preset"
VARIANTS: dict[str, dict[str, Any]] = {
    PRESET: {},
    "trust 1": {"trust": 1.0},
    "trust 0.2": {"trust": 0.2},
    "weighted by size": {"weighting": "size"},
    "unusual tokens protected": {"safe": True},
    "without sizes": {"sizes": False},
    "fused before the last block": {"fuse_last": True},  # within views alone
}
NAMES = ("rotation change deg", "translation change deg", "depth change", "point change")


def line(row: dict[str, Any]) -> str:
    cells = []
    for name in NAMES:
        factor = 1 if "deg" in name else 100
        cells.append(f"{name.split(' change')[0]} {factor * row[name]['mean']:.2f} ± {factor * row[name]['se']:.2f}")
    return f"{row['scope']:6s} {row['score']:8s} {row['variant']:28s} {'  '.join(cells)}"


@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-views", help="or a folder")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--views", type=int, default=16)
    parser.add_argument("--scenes", type=int, default=16)
    parser.add_argument("--ratio", type=float, default=0.5)
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--scores", nargs="+", default=["random", "norm"])
    parser.add_argument("--scopes", nargs="+", default=["global", "view"])
    parser.add_argument("--out", type=Path, default=None, help="folder for the JSON (default benchmarks/results)")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    model = load_network(options.model, device).requires_grad_(False)
    scenes = [
        Views.of(render([seed], size=model.config.img_size, views=options.views, device=device)).rgb
        for seed in range(FIRST, FIRST + options.scenes)
    ]
    references = [model(scene) for scene in scenes]
    rows: list[dict[str, Any]] = []
    content = {"machine": machine(device), "model": options.model, "ratio": options.ratio, "stage": options.stage}
    content |= {"views": options.views, "scenes": options.scenes, "rows": rows}
    name = f"vggt_rules_{Path(options.model).name}_{device.type}"

    def measured(plan: Any, score: str, scope: Any) -> dict[str, Tensor]:
        pruned = PrunedVGGT(model, plan, [score], scope)
        return joined([changes(pruned(x), reference, None) for x, reference in zip(scenes, references, strict=True)])

    for scope in options.scopes:
        best, strided = (
            view_plan(preset, options.ratio, [options.stage], scope=scope, depth=model.config.depth)
            for preset in ("best", STRIDED)
        )
        runs = [
            (score, variant, replace(best, **knobs)) for score in options.scores for variant, knobs in VARIANTS.items()
        ]
        known: dict[str, dict[str, Tensor]] = {}
        for score, variant, plan in [*runs, (STRIDED, PRESET, strided)]:
            if plan.fuse_last and scope == "global":
                continue
            values = measured(plan, score, scope)
            known.setdefault(score, values)
            row = {"scope": scope, "score": score, "variant": variant, **summary(values)}
            row["more than the preset"] = summary({key: values[key] - known[score][key] for key in NAMES})
            rows.append(row)
            print(line(row), flush=True)
            save(name, content, options.out)
    print(f"written: {save(name, content, options.out)}")


if __name__ == "__main__":
    main()
