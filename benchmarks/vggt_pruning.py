"""VGGT with many views on fewer tokens: memory, time, and how far cameras and depth move, at equal token counts.

    python benchmarks/vggt_pruning.py                                                     # a toy on this CPU, seconds
    python benchmarks/vggt_pruning.py --model tiny-views --views 16 --device cuda         # or a folder of your own
    python benchmarks/vggt_pruning.py --model full --views 32 --pixels 224 --device cuda  # 1.2 billion random weights

Rules: our choice (score^0.5 times distance to the nearest token of higher score) with a random score, the norm and,
with --importance, the sketched importance of cameras and depth; and strided cosine merging. Scopes are those of
`pullback.vggt.pruning`: "global" merges around global attention alone, across views; "view" removes tokens of each view
from all later blocks. Changes are against the unpruned model: per scene the median angle over pairs of views and the
mean relative change of depth, then mean and standard error over scenes; "more than strided" is the paired difference.
With trained weights also the errors against the truth. Memory is what one call needs beside weights and images.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from measure import LAYER_SCALE, machine, milliseconds, peak_gigabytes, random_vggt, save
from torch import Tensor

import pullback as pb
from pullback.evaluation.poses import pose_errors
from pullback.scenes.render import render
from pullback.scenes.splits import QUERIES
from pullback.vggt.network.model import CHUNK_VIEWS
from pullback.vggt.network.pose import decode_pose
from pullback.vggt.pruning import STRIDED, Scope, prune_views
from recipes.evaluate_tiny_views import dense_errors, load_network
from recipes.measurement import mean_with_error
from recipes.tiny_views import Truth, Views

SMALL: dict[str, Any] = dict(
    img_size=56,
    patch_embed="conv",
    embed_dim=32,
    depth=4,
    num_heads=2,
    camera_trunk_depth=1,
    dpt_features=16,
    dpt_out_channels=(8, 8, 16, 16),
    hook_layers=(0, 1, 2, 3),
)
RANDOM: dict[str, dict[str, Any]] = {"small": SMALL, "full": {}}
SCORES = ("random", "norm")
Rule = tuple[str, Any, str, Scope]  # name, score (None: the known importance), preset, scope


def sketched_importance(model: pb.VGGT, images: Tensor, layer: int, rounds: int = 16) -> Tensor:
    """[B, N]: the length of each token's block of the Jacobian of cameras and log depth at ``layer``, estimated with
    random signs: E (J^T w)_t^2 = |J_t|^2. Both outputs count with their share of the whole. An oracle of what a trained
    head would say, not a fast score."""
    trunk = model.aggregator
    state = trunk.advance(trunk.embed(images), layer)
    tokens = state.tokens.detach().requires_grad_()
    with torch.enable_grad():
        output = model.decode(trunk.taps(replace(state, tokens=tokens)), state.layout)
        outputs = (output.pose_enc, output.depth.log())
    generator = torch.Generator(images.device).manual_seed(0)
    energy = torch.zeros(tokens.shape[:2], device=images.device)
    for value in outputs:
        own = torch.zeros_like(energy)
        for _ in range(rounds):
            signs = torch.randint(0, 2, value.shape, generator=generator, device=value.device) * 2.0 - 1
            (gradient,) = torch.autograd.grad(value, tokens, signs.to(value.dtype), retain_graph=True)
            own += gradient.float().square().sum(-1)
        energy += own / own.sum(1, keepdim=True)
    return energy.sqrt()


def extrinsics_of(output: Any, size: tuple[int, int]) -> Tensor:
    return decode_pose(output["pose_enc"].double(), size)[0]


def changes(output: Any, reference: Any, truth: Truth | None) -> dict[str, Tensor]:
    """[B] each: of a pruned model against the model, and against the truth where there is one."""
    size = tuple(reference["depth"].shape[2:4])
    cameras = extrinsics_of(output, size)
    moved = pose_errors(cameras, extrinsics_of(reference, size))
    depth = (output["depth"] / reference["depth"] - 1).abs().double()
    points = (output["world_points"] - reference["world_points"]).norm(dim=-1).double()
    scale = reference["world_points"].norm(dim=-1).double().flatten(1).mean(1)
    found = {
        "rotation change deg": moved.rotation.nanmedian(1).values,
        "translation change deg": moved.translation.nanmedian(1).values,
        "depth change": depth.flatten(1).mean(1),
        "point change": points.flatten(1).mean(1) / scale,
    }
    if truth is not None:
        wrong = pose_errors(cameras, truth.extrinsics.double())
        dense = dense_errors(output["depth"][..., 0].float(), output["world_points"].float(), truth)
        found |= {
            "rotation error deg": wrong.rotation.nanmedian(1).values,
            "translation error deg": wrong.translation.nanmedian(1).values,
            "delta1": dense["delta1"],
            "point error": dense["point_error"],
        }
    return {name: values.double().cpu() for name, values in found.items()}


def joined(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def summary(values: dict[str, Tensor]) -> dict[str, dict[str, float]]:
    """Mean and standard error over scenes [n]; one scene has no error."""
    found = {name: mean_with_error(own) for name, own in values.items()}
    return {name: {key: v for key, v in own.items() if not math.isnan(v)} for name, own in found.items()}


def line(row: dict[str, Any]) -> str:
    text = (
        f"{row['rule']:24s} {row['ratio']:4.2f} {row['tokens']:6d} tokens {row['ms']:8.1f} ms {row['speedup']:5.2f}x  "
        f"{row['peak GB']:7.3f} GB  rotation {_shown(row, 'rotation change deg')}°  "
        f"translation {_shown(row, 'translation change deg')}°  "
        f"depth {_shown(row, 'depth change', 100)} %"
    )
    if "delta1" in row:
        text += f"  | truth {_shown(row, 'rotation error deg')}° δ1 {row['delta1']['mean']:.3f}"
    return text


def _shown(row: dict[str, Any], name: str, factor: float = 1) -> str:
    error = f" ± {factor * row[name]['se']:.2f}" if "se" in row[name] else ""
    return f"{factor * row[name]['mean']:5.2f}{error}"


@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="small", help="small, full (random weights), tiny-views, or a folder")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--views", type=int, default=4)
    parser.add_argument("--scenes", type=int, default=1)
    parser.add_argument("--batch", type=int, default=8, help="scenes at once; these are what is timed")
    parser.add_argument("--pixels", type=int, default=None, help="default: the model's own size")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.25, 0.5, 0.75, 0.9])
    parser.add_argument("--stage", type=int, default=None, help="removal after this global block (default: a quarter)")
    parser.add_argument("--scopes", nargs="+", default=["global", "view"])
    parser.add_argument("--chunk-views", type=int, default=CHUNK_VIEWS, help="that the dense heads take at once")
    parser.add_argument("--importance", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=None, help="folder for the JSON (default benchmarks/results)")
    options = parser.parse_args(arguments)
    device, trained = torch.device(options.device), options.model not in RANDOM
    model = load_network(options.model, device) if trained else random_vggt(RANDOM[options.model], device)
    model.requires_grad_(False)
    depth, pixels = model.config.depth, options.pixels or model.config.img_size
    stage = max(0, depth // 4 - 1) if options.stage is None else options.stage
    batches = [
        Views.of(render(part, size=pixels, views=options.views, device=device))
        for part in _parts(range(QUERIES, QUERIES + options.scenes), options.batch)
    ]
    truths = [examples.truth() if trained else None for examples in batches]
    half = device.type == "cuda" and options.model == "full"  # as VGGT-1B is used; tiny-views is measured in float32

    def call(network: Any, images: Tensor = batches[0].rgb) -> Any:
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            return network(images, chunk_views=options.chunk_views)

    known = [sketched_importance(model, part.rgb, stage) for part in batches] if options.importance else []
    rules: list[Rule] = []
    for scope in options.scopes:
        rules += [(f"{score}, {scope}", score, "best", scope) for score in SCORES]
        rules += [(f"importance, {scope}", None, "best", scope)] if options.importance else []
        rules.append((f"strided merging, {scope}", STRIDED, STRIDED, scope))

    references = [call(model, part.rgb) for part in batches]
    unpruned = milliseconds({"model": lambda: call(model)}, device, options.rounds)["model"]
    layout = model.aggregator.token_layout(batches[0].rgb)
    content: dict[str, Any] = {
        "machine": machine(device),
        "model": options.model if trained else f"VGGT {options.model}, random weights, layer scales {LAYER_SCALE}",
        "scenes": options.scenes,
        "timed": list(batches[0].rgb.shape),
        "precision": "bf16 autocast" if half else "float32",
        "chunk_views": options.chunk_views,
        "stage": stage,
        "tokens": layout.tokens,
        "unpruned": {"ms": unpruned, "peak GB": peak_gigabytes(lambda: call(model), device)},
        "rows": [],
    }
    if trained:
        content["unpruned"] |= summary(joined([changes(r, r, t) for r, t in zip(references, truths, strict=True)]))
    print(f"{content['model']}: {content['timed']}, {layout.tokens} tokens, {content['unpruned']}")
    size = "" if options.pixels is None else f"_{options.pixels}px"
    name = f"vggt_pruning_{Path(options.model).name}_{options.views}views{size}_{device.type}"
    for ratio in options.ratios:
        values: dict[str, dict[str, Tensor]] = {}
        rows: list[dict[str, Any]] = []
        for rule, score, preset, scope in rules:
            knobs = dict(ratio=ratio, stages=[stage], preset=preset, scope=scope)
            parts = []
            for place, (part, reference, truth) in enumerate(zip(batches, references, truths, strict=True)):
                own = (lambda tokens, _, of=place: known[of].reshape(tokens.shape[:2])) if score is None else score
                pruned = prune_views(model, own, **knobs)
                parts.append(changes(call(pruned, part.rgb), reference, truth))
                if not place:
                    timed = pruned
            # in turns with the model: on a busy machine a time from minutes ago is no reference
            turns = {"model": lambda: call(model), "pruned": lambda timed=timed: call(timed)}
            times = milliseconds(turns, device, options.rounds)
            row = {"rule": rule, "ratio": ratio, "tokens": min(timed.run(batches[0].rgb).tokens)}
            row |= {"ms": times["pruned"], "unpruned ms": times["model"], "speedup": times["model"] / times["pruned"]}
            row["peak GB"] = peak_gigabytes(lambda timed=timed: call(timed), device)
            values[rule] = joined(parts)
            rows.append(row | summary(values[rule]))
            print(line(rows[-1]), flush=True)
        for row in rows:
            rival = values.get(f"strided merging, {row['rule'].split(', ')[1]}")
            if rival is not None:
                gaps = {name: values[row["rule"]][name] - own for name, own in rival.items() if "change" in name}
                row["more than strided"] = summary(gaps)
        content["rows"] += rows
        save(name, content, options.out)
    print(f"written: {save(name, content, options.out)}")


def _parts(seeds: range, size: int) -> list[range]:
    return [seeds[k : k + size] for k in range(0, len(seeds), size)]


if __name__ == "__main__":
    main()
