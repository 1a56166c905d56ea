"""VGGT with many views on fewer tokens: memory, time, and how far cameras and depth move, at equal token counts.

    python benchmarks/vggt_pruning.py                                                     # a toy on this CPU, seconds
    python benchmarks/vggt_pruning.py --model tiny-views --views 16 --device cuda         # or a folder of your own
    python benchmarks/vggt_pruning.py --model full --views 32 --pixels 224 --device cuda  # 1.2 billion random weights

Rules: our choice (score times distance to the nearest kept token) with the norm, a random score and, with --importance,
the sketched importance of cameras and depth; and strided cosine merging. Scopes are those of `pullback.pruning.vggt`:
"global" merges around global attention alone, across views; "view" removes tokens of each view from all later blocks.
Changes are against the unpruned model: median angles over pairs of views, mean relative change of depth. With trained
weights also the errors against the truth. Memory is what one call needs beside weights and images (GPU alone).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from measure import LAYER_SCALE, machine, milliseconds, random_vggt, save
from torch import Tensor

import pullback as pb
from pullback.data.scenes import render
from pullback.evaluation.poses import pose_errors
from pullback.models.vggt.pose import decode_pose
from pullback.pruning.vggt import Scope, prune_views
from pullback.training.evaluate_tiny_scenes import QUERIES
from pullback.training.evaluate_tiny_views import dense_errors, load_network
from pullback.training.tiny_views_examples import Truth, Views

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
Rule = tuple[str, Any, str, Scope]  # name, score, preset, scope


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


def changes(output: Any, reference: Any, truth: Truth | None) -> dict[str, float]:
    """Of a pruned model against the model, and against the truth where there is one."""
    size = tuple(reference["depth"].shape[2:4])
    cameras = extrinsics_of(output, size)
    moved = pose_errors(cameras, extrinsics_of(reference, size))
    depth = (output["depth"] / reference["depth"] - 1).abs().double()
    points = (output["world_points"] - reference["world_points"]).norm(dim=-1).double()
    row = {
        "rotation change deg": moved.rotation.nanmedian().item(),
        "translation change deg": moved.translation.nanmedian().item(),
        "depth change": depth.mean().item(),
        "point change": (points / reference["world_points"].norm(dim=-1).double().mean()).mean().item(),
    }
    if truth is not None:
        wrong = pose_errors(cameras, truth.extrinsics.double())
        dense = dense_errors(output["depth"][..., 0].float(), output["world_points"].float(), truth)
        row |= {
            "rotation error deg": wrong.rotation.nanmedian().item(),
            "translation error deg": wrong.translation.nanmedian().item(),
            "delta1": dense["delta1"].nanmean().item(),
            "point error": dense["point_error"].nanmean().item(),
        }
    return row


def peak_gigabytes(call: Callable[[], Any], device: torch.device) -> float | None:
    """Beside what was there before the call."""
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 1e9


def line(row: dict[str, Any]) -> str:
    memory = "" if row["peak GB"] is None else f"{row['peak GB']:6.2f} GB  "
    text = (
        f"{row['rule']:24s} {row['ratio']:4.2f} {row['tokens']:6d} tokens {row['ms']:8.1f} ms {row['speedup']:5.2f}x  "
        f"{memory}rotation {row['rotation change deg']:6.2f}°  translation {row['translation change deg']:6.2f}°  "
        f"depth {100 * row['depth change']:5.2f} %"
    )
    if "delta1" in row:
        text += f"  | truth {row['rotation error deg']:.2f}° {row['translation error deg']:.2f}° δ1 {row['delta1']:.3f}"
    return text


@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="small", help="small, full (random weights), tiny-views, or a folder")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--views", type=int, default=4)
    parser.add_argument("--scenes", type=int, default=1, help="timed at once; changes are means over all of them")
    parser.add_argument("--pixels", type=int, default=None, help="default: the model's own size")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.25, 0.5, 0.75, 0.9])
    parser.add_argument("--stage", type=int, default=None, help="removal after this global block (default: a quarter)")
    parser.add_argument("--scopes", nargs="+", default=["global", "view"])
    parser.add_argument("--importance", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=None, help="folder for the JSON (default benchmarks/results)")
    options = parser.parse_args(arguments)
    device, trained = torch.device(options.device), options.model not in RANDOM
    model = load_network(options.model, device) if trained else random_vggt(RANDOM[options.model], device)
    model.requires_grad_(False)
    depth, pixels = model.config.depth, options.pixels or model.config.img_size
    stage = max(0, depth // 4 - 1) if options.stage is None else options.stage
    seeds = range(QUERIES, QUERIES + options.scenes)
    examples = Views.of(render(seeds, size=pixels, views=options.views, device=device))
    images, truth = examples.rgb, examples.truth() if trained else None
    half = device.type == "cuda" and options.model == "full"  # as VGGT-1B is used; tiny-views is measured in float32

    def call(network: Any) -> Any:
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            return network(images)

    rules: list[Rule] = []
    for scope in options.scopes:
        rules += [(f"{score}, {scope}", score, "best", scope) for score in ("norm", "random")]
        if options.importance and scope == "global":
            known = sketched_importance(model, images, stage)
            rules.append((f"importance, {scope}", lambda tokens, context, known=known: known, "best", scope))
        rules.append((f"strided merging, {scope}", "strided", "strided", scope))

    reference = call(model)
    unpruned = milliseconds({"model": lambda: call(model)}, device, options.rounds)["model"]
    layout = model.aggregator.token_layout(images)
    content: dict[str, Any] = {
        "machine": machine(device),
        "model": options.model if trained else f"VGGT {options.model}, random weights, layer scales {LAYER_SCALE}",
        "images": list(images.shape),
        "precision": "bf16 autocast" if half else "float32",
        "stage": stage,
        "tokens": layout.tokens,
        "unpruned": {"ms": unpruned, "peak GB": peak_gigabytes(lambda: call(model), device)},
        "rows": [],
    }
    if truth is not None:
        content["unpruned"] |= changes(reference, reference, truth)
    print(f"{content['model']}: {list(images.shape)}, {layout.tokens} tokens, {unpruned:.1f} ms, {content['unpruned']}")
    name = f"vggt_pruning_{Path(options.model).name}_{options.views}views_{device.type}"
    for ratio in options.ratios:
        for rule, score, preset, scope in rules:
            if (preset, scope) == ("strided", "view") and ratio > 0.7:
                continue  # its grid of one patch in four is all there is to remove from
            pruned = prune_views(model, score, ratio=ratio, stages=[stage], preset=preset, scope=scope)
            with torch.autocast(device.type, torch.bfloat16, enabled=half):
                output, run = pruned.with_record(images)
            # in turns with the model: on a busy machine a time from minutes ago is no reference
            turns = {"model": lambda: call(model), "pruned": lambda pruned=pruned: call(pruned)}
            times = milliseconds(turns, device, options.rounds)
            row = {"rule": rule, "ratio": ratio, "tokens": min(run.tokens)}
            row |= {"ms": times["pruned"], "unpruned ms": times["model"], "speedup": times["model"] / times["pruned"]}
            row["peak GB"] = peak_gigabytes(lambda pruned=pruned: call(pruned), device)
            row |= changes(output, reference, truth)
            content["rows"].append(row)
            print(line(row), flush=True)
            save(name, content, options.out)
    print(f"written: {save(name, content, options.out)}")


if __name__ == "__main__":
    main()
