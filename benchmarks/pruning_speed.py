"""How much faster a pruned model really is, against the unpruned one in its best form, in one run.

    python benchmarks/pruning_speed.py --device cuda                  # DINOv2-B, bf16, random weights
    python benchmarks/pruning_speed.py --device cpu --size small      # DINOv2-S, float32, batch 1

Both sides run as they are, compiled, and on a GPU each of these also captured in a CUDA graph; each side's fastest form
counts. The arithmetic limit is the ratio of the blocks' operations, 24 n D^2 + 4 n^2 D each with n tokens. "stage" is
one removal alone (score, selection, matching, moving tokens) in its fastest form.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import machine, milliseconds, random_dinov2, save
from torch import Tensor, nn

import pullback as pb
from pullback.pruning.context import ScoreContext
from pullback.pruning.run import _after, _whole, decide

# name -> (stages, share of the patches removed at each)
SCHEDULES = {"half after block 3": ((3,), (0.5,)), "a quarter left after block 3": ((3,), (0.75,))}
CASES = {"cuda": [(518, 64), (224, 64), (518, 1), (224, 1)], "cpu": [(224, 1)]}


def arithmetic_limit(model: nn.Module, size: int, stages: tuple[int, ...], shares: tuple[float, ...]) -> float:
    config: Any = model.config
    patches, dim = (size // config.patch_size) ** 2, config.hidden_size

    def operations(tokens: float) -> float:
        return 24 * tokens * dim**2 + 4 * tokens**2 * dim

    left, pruned = 1.0, 0.0
    for layer in range(config.num_hidden_layers):
        pruned += operations(1 + left * patches)
        if layer in stages:
            left -= shares[stages.index(layer)]
    return config.num_hidden_layers * operations(1 + patches) / pruned


def graphed(function: Callable[[Tensor], Any], example: Tensor) -> Callable[[], Any]:
    """The function on this input as one CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            function(example)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function(example)
    return graph.replay


def forms(function: Callable[[Tensor], Any], example: Tensor, compiled: bool) -> dict[str, Callable[[], Any]]:
    """Every way to run it, by name."""
    found: dict[str, Callable[[], Any]] = {"eager": lambda: function(example)}
    on_gpu = example.device.type == "cuda"
    if on_gpu:
        found["eager, graph"] = graphed(function, example)
    if compiled:
        torch._dynamo.reset()
        begun = time.perf_counter()
        fused = torch.compile(function, fullgraph=True, dynamic=False)
        fused(example)
        print(f"    compiled in {time.perf_counter() - begun:.0f} s", flush=True)
        found["compiled"] = lambda: fused(example)
        if on_gpu:
            found["compiled, graph"] = graphed(fused, example)
    return found


def stage_alone(pruned: pb.PrunedModel, pixels: Tensor) -> Callable[[Tensor], Tensor]:
    """The first removal by itself, as a function of F^l."""
    backbone, plan = pruned.backbone, pruned.plan
    layout = backbone.token_layout(pixels)
    count = plan.counts(layout.patches)[0]

    def stage(tokens: Tensor) -> Tensor:
        x = _whole(tokens)
        context = ScoreContext(backbone, plan.stages[0], layout, x.positions, x.sizes, tokens)
        matching, weights = decide(tokens, context, plan, pruned.scores[0], count, plan.gates[0])
        return _after(x, matching, weights, plan).values

    return stage


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", default=None, choices=["small", "base", "large"])
    parser.add_argument("--preset", default="best")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--cases", nargs="+", default=None, help="pixels:batch")
    parser.add_argument("--eager", nargs="+", default=[], help="cases that are not compiled, to save time")
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    device = torch.device(options.device)
    on_gpu = device.type == "cuda"
    size = options.size or ("base" if on_gpu else "small")
    dtype = torch.bfloat16 if on_gpu else torch.float32
    rounds = options.rounds or (7 if on_gpu else 15)
    model = random_dinov2(size).to(device, dtype)
    dim = model.config.hidden_size
    head = pb.ImportanceHead(dim).to(device, dtype).eval()
    cases = [tuple(map(int, case.split(":"))) for case in options.cases] if options.cases else CASES[device.type]
    content: dict[str, Any] = {"machine": machine(device), "model": f"dinov2-{size}, random weights, seed 0"}
    content |= {"dtype": str(dtype), "preset": options.preset, "head": "width 256, random", "cases": []}
    for pixels, batch in cases:
        torch.manual_seed(0)
        images = torch.randn(batch, 3, pixels, pixels, device=device, dtype=dtype)
        print(f"{pixels} px, batch {batch}: unpruned", flush=True)
        compiled = not options.no_compile and f"{pixels}:{batch}" not in options.eager
        whole = milliseconds(forms(lambda x: model(x).pooler_output, images, compiled), device, rounds)
        best = min(whole.values())
        print(f"    {whole}", flush=True)
        for name, (stages, shares) in SCHEDULES.items():
            if name != "half after block 3" and (pixels, batch) != cases[0]:
                continue
            fast = pb.prune(model, head, ratio=shares, stages=stages, preset=options.preset)
            print(f"{pixels} px, batch {batch}: {name}", flush=True)
            times = milliseconds(forms(lambda x: fast(x).pooler_output, images, compiled), device, rounds)  # noqa: B023
            tokens = fast.backbone.features(images, [stages[0]])[stages[0]]
            alone = milliseconds(forms(stage_alone(fast, images), tokens, compiled), device, rounds)
            own = milliseconds(forms(lambda x: head(x), tokens, compiled), device, rounds)
            row = {
                "pixels": pixels,
                "batch": batch,
                "schedule": name,
                "stages": stages,
                "shares": shares,
                "unpruned_ms": whole,
                "pruned_ms": times,
                "speedup": best / min(times.values()),
                "arithmetic_limit": arithmetic_limit(model, pixels, stages, shares),
                "stage_ms": min(alone.values()),
                "score_ms": min(own.values()),
                "stage_share": min(alone.values()) / min(times.values()),
            }
            content["cases"].append(row)
            print(
                f"    {row['speedup']:.2f}x (limit {row['arithmetic_limit']:.2f}x): {best:.2f} -> "
                f"{min(times.values()):.2f} ms, first stage {row['stage_ms']:.2f} ms, its score {row['score_ms']:.2f}",
                flush=True,
            )
            save(f"pruning_speed_{device.type}", content, options.out)
    print(f"written: {save(f'pruning_speed_{device.type}', content, options.out)}")


if __name__ == "__main__":
    main()
