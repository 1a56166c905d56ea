"""How much faster a pruned model really is, against the unpruned one in its best form, in one run.

    python benchmarks/pruning_speed.py --device cuda                  # DINOv2-B, bf16, random weights
    python benchmarks/pruning_speed.py --device cpu --size small      # DINOv2-S, float32, batch 1

Both sides run as they are, compiled, and on a GPU each of these also captured in a CUDA graph; each side's fastest form
counts. The arithmetic limit is the ratio of the blocks' operations, 24 n D^2 + 4 n^2 D each with n tokens. "stage" is
one removal alone (score, selection, matching, moving tokens) in its fastest form; "attention" is that of one block on
the tokens that are left, without and with their sizes. Every head of ``--heads`` (width x rounds) is timed at half of
the tokens, the first one also with a quarter left.
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
from pullback.backbones.attention import attend
from pullback.pruning.forward import after_stage, decide, whole_sequence
from pullback.pruning.scores import ScoreContext

# name -> (stages, share of the patches removed at each)
HALF, QUARTER = "half after block 3", "a quarter left after block 3"
SCHEDULES = {HALF: ((3,), (0.5,)), QUARTER: ((3,), (0.75,))}
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
        begun = time.perf_counter()
        fused = torch.compile(function, fullgraph=True, dynamic=False)
        fused(example)
        print(f"    compiled in {time.perf_counter() - begun:.0f} s", flush=True)
        found["compiled"] = lambda: fused(example)
        if on_gpu:
            found["compiled, graph"] = graphed(fused, example)
    return found


class Embedding(nn.Module):
    """The class token of a model: what is timed."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images).pooler_output


class Stage(nn.Module):
    """The first removal by itself, as a function of F^l."""

    def __init__(self, pruned: pb.PrunedModel, images: Tensor) -> None:
        super().__init__()
        self.pruned, self.layout = pruned, pruned.backbone.token_layout(images)

    def forward(self, tokens: Tensor) -> Tensor:
        plan, x = self.pruned.plan, whole_sequence(tokens)
        context = ScoreContext(self.pruned.backbone, plan.stages[0], self.layout, x.positions, x.sizes, tokens)
        count = plan.counts(self.layout.patches)[0]
        matching, weights = decide(tokens, context, plan, self.pruned.scores[0], count, (plan.gates[0], plan.fades[0]))
        return after_stage(x, matching, weights, plan).values


def attention_ms(model: nn.Module, batch: int, tokens: int, like: Tensor, rounds: int) -> dict[str, float]:
    """Fused attention of one block on so many tokens, plain and with log sizes."""
    config: Any = model.config
    heads, width = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    q, k, v = (torch.randn(batch, tokens, heads, width).to(like).transpose(1, 2) for _ in range(3))
    sizes = torch.rand(batch, tokens, device=like.device)
    runs = {"plain": lambda: attend(q, k, v), "sizes": lambda: attend(q, k, v, sizes)}
    if like.is_cuda:
        runs = {name: graphed(lambda _, call=call: call(), like) for name, call in runs.items()}
    return milliseconds(runs, like.device, rounds)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", default=None, choices=["small", "base", "large"])
    parser.add_argument("--preset", default="best")
    parser.add_argument("--heads", nargs="+", default=["256x1"], help="importance heads, width x rounds")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--cases", nargs="+", default=None, help="pixels:batch")
    parser.add_argument("--eager", nargs="+", default=[], help="cases that are not compiled, to save time")
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    torch._dynamo.config.recompile_limit = 64  # one wrapper, many models and sizes
    device = torch.device(options.device)
    on_gpu = device.type == "cuda"
    torch.backends.cudnn.benchmark = on_gpu  # the best convolution for each size, for both sides
    size = options.size or ("base" if on_gpu else "small")
    dtype = torch.bfloat16 if on_gpu else torch.float32
    rounds = options.rounds or (7 if on_gpu else 15)
    model = random_dinov2(size).to(device, dtype)
    dim = model.config.hidden_size
    heads = {}
    for name in options.heads:
        width, deep = map(int, name.split("x"))
        heads[name] = pb.ImportanceHead(dim, width, rounds=deep).to(device, dtype).eval()
    cases = [tuple(map(int, case.split(":"))) for case in options.cases] if options.cases else CASES[device.type]
    content: dict[str, Any] = {"machine": machine(device), "model": f"dinov2-{size}, random weights, seed 0"}
    content |= {"dtype": str(dtype), "preset": options.preset, "heads": "random, width x rounds", "cases": []}
    for pixels, batch in cases:
        torch.manual_seed(0)
        images = torch.randn(batch, 3, pixels, pixels, device=device, dtype=dtype)
        compiled = not options.no_compile and f"{pixels}:{batch}" not in options.eager
        names = {f"{HALF}, head {head}": (HALF, head) for head in heads}
        if pixels == cases[0][0]:
            names |= {f"{QUARTER}, head {options.heads[0]}": (QUARTER, options.heads[0])}
        models: dict[str, nn.Module] = {"unpruned": model}
        for name, (schedule, head) in names.items():
            stages, shares = SCHEDULES[schedule]
            models[name] = pb.prune(model, heads[head], ratio=shares, stages=stages, preset=options.preset)
        runs: dict[str, Callable[[], Any]] = {}
        for name, one in models.items():
            print(f"{pixels} px, batch {batch}: {name}", flush=True)
            for form, call in forms(Embedding(one), images, compiled).items():
                runs[f"{name}: {form}"] = call
        times = milliseconds(runs, device, rounds)  # in turns
        best = {name: min(ms for run, ms in times.items() if run.startswith(f"{name}: ")) for name in models}
        for name, (schedule, head) in names.items():
            stages, shares = SCHEDULES[schedule]
            fast: Any = models[name]
            tokens = fast.backbone.features(images, [stages[0]])[stages[0]]
            parts = forms(Stage(fast, images), tokens, compiled)
            parts |= {f"score, {form}": call for form, call in forms(heads[head], tokens, compiled).items()}
            own = milliseconds(parts, device, rounds)
            row = {
                "pixels": pixels,
                "batch": batch,
                "schedule": schedule,
                "head": head,
                "stages": stages,
                "shares": shares,
                "ms": times,
                "speedup": best["unpruned"] / best[name],
                "arithmetic_limit": arithmetic_limit(model, pixels, stages, shares),
                "stage_ms": min(ms for part, ms in own.items() if not part.startswith("score")),
                "score_ms": min(ms for part, ms in own.items() if part.startswith("score")),
            }
            left = 1 + round((1 - sum(shares)) * (pixels // model.config.patch_size) ** 2)
            row["attention_ms"] = attention_ms(model, batch, left, images, rounds)
            row["stage_share"] = row["stage_ms"] / best[name]
            content["cases"].append(row)
            print(
                f"    {name}: {row['speedup']:.2f}x (limit {row['arithmetic_limit']:.2f}x): {best['unpruned']:.2f} -> "
                f"{best[name]:.2f} ms, first stage {row['stage_ms']:.2f} ms, of it the score {row['score_ms']:.2f}",
                flush=True,
            )
            print(f"        attention of one block, ms: {row['attention_ms']}", flush=True)
            save(f"pruning_speed_{device.type}", content, options.out)
    print(f"written: {save(f'pruning_speed_{device.type}', content, options.out)}")


if __name__ == "__main__":
    main()
