"""How much faster a pruned model really is, against the unpruned one in its best form, in one run.

    python benchmarks/pruning_speed.py --device cuda                  # DINOv2-B, bf16, random weights
    python benchmarks/pruning_speed.py --device cuda --together       # captured forms alone, three minutes
    python benchmarks/pruning_speed.py --device cpu --size small      # DINOv2-S, float32, batches of 1 and 8

Both sides run as they are, compiled, and on a GPU each of these also captured in a CUDA graph; each side's fastest form
counts, and like is compared with like as well (``by_form``: eager with eager, compiled with compiled). Forms take
turns, ``quartiles`` say how far single rounds lie apart. The arithmetic limit is the ratio of the blocks' operations,
24 n D^2 + 4 n^2 D each with n tokens. "stage" is one removal alone (score, selection, matching, moving tokens) in its
fastest form; "attention" is that of one block on the tokens that are left, without and with their sizes. Every head of
``--heads`` (width x rounds) is timed at half of the tokens, the first one also with a quarter left. "unpruned" is the
model of transformers; "nothing removed" the package's own blocks, with the class row alone in the last one.

``--together`` compiles every case in a process of its own, all at the same time; then they are timed one by one.
"""

from __future__ import annotations

import argparse
import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from measure import machine, milliseconds, random_dinov2, save
from torch import Tensor, nn

import pullback as pb
from pullback.backbones.attention import attend, way
from pullback.evaluation.cost import race
from pullback.pruning.forward import after_stage, decide, whole_sequence
from pullback.pruning.scores import ScoreContext


@dataclass(frozen=True)
class Schedule:
    """``size``: the picture is shrunk to so many pixels first. ``cls``: the class token alone in the last block."""

    stages: tuple[int, ...] = ()
    shares: tuple[float, ...] = ()
    size: int | None = None
    cls: bool = False

    def of(self, model: nn.Module, head: nn.Module, preset: str) -> pb.PrunedModel:
        more: dict[str, Any] = {"size": self.size, "output": "cls" if self.cls else "model"}
        if not self.stages:
            return pb.prune(model, preset="none" if self.size is None else "resize", **more)
        return pb.prune(model, head, ratio=self.shares, stages=self.stages, preset=preset, **more)


HALF, QUARTER, NOTHING = "half after block 3", "a quarter left after block 3", "nothing removed"
SCHEDULES = {HALF: Schedule((3,), (0.5,)), QUARTER: Schedule((3,), (0.75,)), NOTHING: Schedule(cls=True)}
# The planner's plan for half of the operations of DINOv2-S (frontier_plans_cpu.json), and smaller pictures.
SMALLER = {
    "182 px, 39% after blocks 4 and 6": Schedule((4, 6), (0.195, 0.195), 182),
    "182 px, 39% after blocks 4 and 6, class row": Schedule((4, 6), (0.195, 0.195), 182, cls=True),
    "168 px, 30% after blocks 4 and 6, class row": Schedule((4, 6), (0.15, 0.15), 168, cls=True),
    "154 px alone": Schedule(size=154),
}
SCHEDULES |= SMALLER
PLANNED = list(SMALLER)
CASES = {"cuda": [(518, 64), (224, 64), (518, 1), (224, 1)], "cpu": [(224, 1), (224, 8)]}
# Of --together: what is measured in each process. Pictures of 224 px in batches of 64 come thrice, to compile in time.
TOGETHER: list[tuple[int, int, list[str]]] = [
    (518, 64, [HALF]), (224, 64, [HALF]), (224, 64, PLANNED[:2]), (224, 64, PLANNED[2:]), (518, 1, [HALF, NOTHING]),
    (224, 1, [HALF, NOTHING]),
]  # fmt: skip


def arithmetic_limit(model: nn.Module, size: int, schedule: Schedule) -> float:
    """The ratio of the blocks' operations. (That of a class row alone in the last block is not counted.)"""
    config: Any = model.config
    patches, dim = (size // config.patch_size) ** 2, config.hidden_size
    fewer = patches if schedule.size is None else (schedule.size // config.patch_size) ** 2

    def operations(tokens: float) -> float:
        return 24 * tokens * dim**2 + 4 * tokens**2 * dim

    left, pruned = 1.0, 0.0
    for layer in range(config.num_hidden_layers):
        pruned += operations(1 + left * fewer)
        if layer in schedule.stages:
            left -= schedule.shares[schedule.stages.index(layer)]
    return config.num_hidden_layers * operations(1 + patches) / pruned


def graphed(function: Callable[[Tensor], Any], example: Tensor) -> Callable[[], Any]:
    """The function on this input as one CUDA graph, with all that the graph reads: it refers to memory, not tensors."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            function(example)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = function(example)
    kept = function, example, output

    def replay() -> Any:
        graph.replay()
        return kept[-1]

    return replay


def forms(
    function: Callable[[Tensor], Any], example: Tensor, compiled: bool, captured: bool = False
) -> dict[str, Callable[[], Any]]:
    """Every way to run it, by name; ``captured``: compiled and in a CUDA graph alone."""
    on_gpu = example.device.type == "cuda"
    if captured:
        fused = torch.compile(function, fullgraph=True, dynamic=False)
        fused(example)
        return {"compiled, graph": graphed(fused, example)} if on_gpu else {"compiled": lambda: fused(example)}
    found: dict[str, Callable[[], Any]] = {"eager": lambda: function(example)}
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
    print(f"    attention with sizes goes the way {way(q, k, v, sizes)!r}", flush=True)
    runs = {"plain": lambda: attend(q, k, v), "sizes": lambda: attend(q, k, v, sizes)}
    if like.is_cuda:
        runs = {name: graphed(lambda _, call=call: call(), like) for name, call in runs.items()}
    return milliseconds(runs, like.device, rounds)


class Case:
    """One size of pictures and batches: everything compiled and ready, to be timed by `rows`."""

    @torch.no_grad()
    def __init__(self, pixels: int, batch: int, wanted: Sequence[str], options: argparse.Namespace) -> None:
        device = torch.device(options.device)
        torch._dynamo.config.recompile_limit = 64  # one wrapper, many models and sizes
        torch.backends.cudnn.benchmark = device.type == "cuda"  # the best convolution for each size, for both sides
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.pixels, self.batch, self.rounds = pixels, batch, options.rounds
        self.model: Any = random_dinov2(options.size).to(device, dtype)
        heads = {}
        for name in options.heads:
            width, deep = map(int, name.split("x"))
            head = pb.ImportanceHead(self.model.config.hidden_size, width, rounds=deep)
            heads[name] = head.to(device, dtype).eval().requires_grad_(False)
        torch.manual_seed(0)
        self.images = torch.randn(batch, 3, pixels, pixels, device=device, dtype=dtype)
        compiled = not options.no_compile and f"{pixels}:{batch}" not in options.eager
        self.names = {}
        for schedule in wanted:
            with_head = bool(SCHEDULES[schedule].stages)
            for head in options.heads if schedule == HALF else options.heads[:1]:
                self.names[f"{schedule}, head {head}" if with_head else schedule] = (
                    schedule,
                    head if with_head else None,
                )
        self.models: dict[str, Any] = {"unpruned": self.model}
        for name, (schedule, head) in self.names.items():
            self.models[name] = SCHEDULES[schedule].of(self.model, heads[head or options.heads[0]], options.preset)
        self.runs: dict[str, Callable[[], Any]] = {}
        self.parts: dict[str, dict[str, Callable[[], Any]]] = {}
        for name, one in self.models.items():
            print(f"{pixels} px, batch {batch}: {name}", flush=True)
            for form, call in forms(Embedding(one), self.images, compiled, options.together).items():
                self.runs[f"{name}: {form}"] = call
        for name, (schedule, head) in self.names.items():
            if head is None or schedule in PLANNED:
                continue
            fast, stages = self.models[name], SCHEDULES[schedule].stages
            tokens = fast.backbone.features(self.images, [stages[0]])[stages[0]]
            self.parts[name] = forms(Stage(fast, self.images), tokens, compiled, options.together)
            scoring = forms(heads[head], tokens, compiled, options.together)
            self.parts[name] |= {f"score, {form}": call for form, call in scoring.items()}

    @torch.no_grad()
    def rows(self) -> list[dict[str, Any]]:
        """Time everything in turns and say what came of it."""
        device = self.images.device
        found = race(list(self.runs.values()), device, self.rounds)
        timings = dict(zip(self.runs, found, strict=True))
        # On a GPU several calls in a row, between events: a clock on the CPU would also time their launch.
        times = milliseconds(self.runs, device, self.rounds) if device.type == "cuda" else {
            name: timing.median for name, timing in timings.items()
        }  # fmt: skip
        quartiles = {name: (timing.low, timing.high) for name, timing in timings.items()}
        best = {name: min(ms for run, ms in times.items() if run.startswith(f"{name}: ")) for name in self.models}
        rows = []
        for name, (schedule, head) in self.names.items():
            plan = SCHEDULES[schedule]
            row = {
                "pixels": self.pixels,
                "batch": self.batch,
                "schedule": schedule,
                "head": head,
                "stages": plan.stages,
                "shares": plan.shares,
                "size": plan.size,
                "class_row": plan.cls,
                "ms": times,
                "quartiles": quartiles,
                "speedup": best["unpruned"] / best[name],
                "by_form": {
                    form: times[f"unpruned: {form}"] / ms
                    for run, ms in times.items()
                    for form in [run.removeprefix(f"{name}: ")]
                    if run.startswith(f"{name}: ")
                },
                "arithmetic_limit": arithmetic_limit(self.model, self.pixels, plan),
            }
            line = (
                f"    {name}: {row['speedup']:.3f}x (limit {row['arithmetic_limit']:.2f}x): {best['unpruned']:.3f} -> "
            )
            line += f"{best[name]:.3f} ms; by form " + ", ".join(f"{f} {x:.2f}x" for f, x in row["by_form"].items())
            if name in self.parts:
                own = milliseconds(self.parts[name], device, self.rounds)
                row["stage_ms"] = min(ms for part, ms in own.items() if not part.startswith("score"))
                row["score_ms"] = min(ms for part, ms in own.items() if part.startswith("score"))
                left = 1 + round((1 - sum(plan.shares)) * (self.pixels // self.model.config.patch_size) ** 2)
                row["attention_ms"] = attention_ms(self.model, self.batch, left, self.images, self.rounds)
                row["stage_share"] = row["stage_ms"] / best[name]
                line += f"; first stage {row['stage_ms']:.3f} ms, {row['stage_share']:.1%}, of it the score "
                line += f"{row['score_ms']:.3f}; attention of one block {row['attention_ms']}"
            rows.append(row)
            print(line, flush=True)
        return rows


def in_process(case: tuple[int, int, list[str]], options: argparse.Namespace, pipe: Any) -> None:
    """Make a case ready, say so, wait for the turn, and send its rows."""
    try:
        begun = time.perf_counter()
        ready = Case(*case, options)
        pipe.send(f"ready after {time.perf_counter() - begun:.0f} s")
        pipe.recv()
        pipe.send(ready.rows())
    except Exception:
        pipe.send(traceback.format_exc()[-1500:])


def together(
    cases: Sequence[tuple[int, int, list[str]]], options: argparse.Namespace, add: Callable[..., None]
) -> None:
    """Compile all cases at the same time, then time one after the other. One that fails, or is not ready in time, is
    said and stops none of the others."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "3")  # of each process
    context, workers, until = get_context("spawn"), [], time.monotonic() + options.limit
    for case in cases:
        ours, theirs = context.Pipe()
        process = context.Process(target=in_process, args=(case, options, theirs), daemon=True)
        process.start()
        theirs.close()
        workers.append((case, process, ours))
    said = [answer(pipe, until - 25) for _, _, pipe in workers]
    for (case, process, pipe), message in zip(workers, said, strict=True):
        print(f"{case[0]} px, batch {case[1]}: {message}", flush=True)
        if message.startswith("ready"):
            pipe.send("go")
            rows = answer(pipe, max(until, time.monotonic() + 20))
            if isinstance(rows, str):
                print(rows, flush=True)
            else:
                add(rows)
        process.terminate()


def answer(pipe: Any, until: float) -> Any:
    """Return what a process sends, or that it sent nothing."""
    try:
        return pipe.recv() if pipe.poll(max(0.0, until - time.monotonic())) else "no answer in time"
    except (EOFError, OSError):
        return "the process ended without an answer"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", default=None, choices=["small", "base", "large"])
    parser.add_argument("--preset", default="best")
    parser.add_argument("--heads", nargs="+", default=["256x1"], help="importance heads, width x rounds")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--cases", nargs="+", default=None, help="pixels:batch")
    parser.add_argument("--schedules", nargs="+", default=None, choices=list(SCHEDULES), help="of every case")
    parser.add_argument("--eager", nargs="+", default=[], help="cases that are not compiled, to save time")
    parser.add_argument("--together", action="store_true", help="on a GPU: see above")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds that --together waits")
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    device = torch.device(options.device)
    on_gpu = device.type == "cuda"
    options.size = options.size or ("base" if on_gpu else "small")
    options.rounds = options.rounds or (7 if on_gpu else 15)
    cases = [tuple(map(int, case.split(":"))) for case in options.cases] if options.cases else CASES[device.type]
    content: dict[str, Any] = {"machine": machine(device), "model": f"dinov2-{options.size}, random weights, seed 0"}
    content |= {"dtype": str(torch.bfloat16 if on_gpu else torch.float32), "preset": options.preset}
    content |= {"heads": "random, width x rounds", "rounds": options.rounds, "cases": []}

    def add(rows: list[dict[str, Any]]) -> None:
        content["cases"] += rows
        save(f"pruning_speed_{device.type}", content, options.out)

    if options.together:
        together([case for case in TOGETHER if options.cases is None or case[:2] in cases], options, add)
    else:
        for pixels, batch in cases:
            both = [HALF, QUARTER] if (pixels, batch) == cases[0] else [HALF]
            add(Case(pixels, batch, options.schedules or both, options).rows())
    print(f"written: {save(f'pruning_speed_{device.type}', content, options.out)}")


if __name__ == "__main__":
    main()
