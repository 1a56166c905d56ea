"""Are the kernels of the package right on this GPU, and which form of each is the fastest?

    python benchmarks/kernel_choice.py                   # an H200 with 16 cores: under two minutes
    python benchmarks/kernel_choice.py --no-stage        # attention alone

    python benchmarks/kernel_choice.py --check           # what the package does, against float64, on a CPU too

First everything is compiled, in several processes, and nothing is timed. Then, one after the other:

    right   every form of attention with sizes at every shape, what the library does also at odd numbers of queries
            and keys, against float64 on inputs drawn anew; the steps of a removal against `matching.py`
    times   plain attention by each backend, the masked way, and every form, through several sets of inputs, more than
            L2 holds, as a CUDA graph. "library" is what `attend` does as it is.
    stage   one removal (preset "best", half of the patches) with and without each kernel, compiled and captured, and
            the parts of it as the profiler has them

What does not compile, fails or is wrong is said, and stops nothing else.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from attention_sizes import L2_BYTES, PLAIN, Inputs, Shape, error, forced, in_one_piece, plain, reason, through
from measure import machine, milliseconds, save
from torch import Tensor

from pullback.backbones import attention

try:
    import attention_kernels as drafts

    from pullback.backbones.attention_kernel import Tiles
    from pullback.backbones.attention_kernel import attention as kernel
except ImportError:  # Triton comes with PyTorch for CUDA only; without it there is nothing but --check
    drafts = Tiles = kernel = None  # type: ignore[assignment, misc]

SHAPES: list[Shape] = [(64, 12, 686, 64), (64, 12, 1370, 64), (64, 12, 129, 64), (64, 12, 257, 64)]
SHAPES += [(1, 12, 686, 64), (1, 12, 1370, 64), (1, 12, 129, 64), (1, 12, 257, 64)]
HEADS: list[Shape] = [(64, 4, 1370, 16), (1, 4, 257, 16)]  # of importance heads, without sizes
ODD: list[tuple[Shape, dict[str, Any]]] = [
    ((2, 3, 197, 16), {}), ((2, 3, 197, 32), {}), ((2, 3, 197, 128), {}), ((3, 2, 300, 64), {"rows": 1}),
    ((2, 6, 257, 64), {"sharp": 60.0}), ((3, 6, 61, 64), {}), ((3, 6, 64, 64), {}), ((1, 2, 1409, 64), {}),
    ((2, 2, 7, 64), {}), ((5, 12, 129, 64), {}), ((2, 12, 686, 64), {}),
]  # fmt: skip
TOLERANCE = 1.5e-2
TILES: list[Any] = [] if kernel is None else [
    Tiles(64, 64, 4, 3), Tiles(64, 128, 4, 2), Tiles(64, 128, 4, 3), Tiles(64, 64, 4, 3, True),
    Tiles(64, 64, 4, 2, True), Tiles(64, 64, 4, 4, True), Tiles(64, 128, 4, 2, True), Tiles(64, 128, 4, 3, True),
    Tiles(128, 64, 4, 3, True), Tiles(128, 128, 8, 2, True), Tiles(64, 32, 4, 4, True), Tiles(32, 64, 2, 3),
    Tiles(16, 64, 2, 3), Tiles(16, 128, 4, 2), Tiles(16, 64, 1, 3), Tiles(16, 128, 2, 2),
]  # fmt: skip
DRAFTS: list[Any] = [] if drafts is None else [
    drafts.Kernel("steady", 128, 64, 8, 2), drafts.Kernel("steady", 64, 64, 4, 3),
    drafts.Kernel("ahead", 128, 64, 8, 2), drafts.Kernel("ahead", 64, 64, 4, 2),
    drafts.Kernel("online", 128, 64, 8, 2, tma=True),
    drafts.Kernel("steady", 128, 64, 8, 2, tma=True), drafts.Kernel("ahead", 128, 64, 8, 2, tma=True),
    drafts.Kernel("short", 64, warps=4), drafts.Kernel("short", 32, warps=2),
]  # fmt: skip
STAGES = ["library", "no kernels", "without ranks", "without most_similar", "without merge", "plain head"]
STAGE_CASES = [(64, 1370, 768), (64, 257, 768), (1, 257, 768)]
PROFILED = ("library", "no kernels")
Way = Callable[[Inputs], Tensor]


def way_of(form: Any) -> Way:
    if isinstance(form, Tiles):
        return lambda x: kernel(x.q, x.k, x.v, x.powers, form).flatten(2)
    return lambda x: form(x.q, x.k, x.v, x.powers)


def name_of(form: Any) -> str:
    return f"tiles {tuple(form)}".replace(" ", "") if isinstance(form, Tiles) else f"draft {form}"


def fits(form: Any, shape: Shape) -> bool:
    batch, heads, count, _ = shape
    if isinstance(form, Tiles):  # small programs where there would be few, large ones where there are many
        large = batch * heads * count > 50_000
        some = form.queries >= 64 or (form.queries == 32 and count < 300)
        return some if large else form.queries <= 64
    return form.fits(count, count)


def library(x: Inputs) -> Tensor:
    return in_one_piece(attention.attend(x.q, x.k, x.v, x.log_sizes))


def build(form: Any, shapes: Sequence[Shape]) -> dict[str, str]:
    """Compile a form for shapes into the cache on disk, in a process of its own; return where it does not work, or is
    further than TOLERANCE from float64."""
    like = torch.empty(0, dtype=torch.bfloat16, device="cuda")
    for shape in shapes:
        if not fits(form, shape):
            continue
        off = error(way_of(form), Inputs.random((2, *shape[1:]), like, fused=True))
        if not off < TOLERANCE:
            return {name_of(form): f"WRONG at {shape}: error {off:.1e}"}
    return {}


def wrong_library(device: str = "cuda") -> dict[str, str]:
    """Return where `attend` goes another way than its kernel, or is further than TOLERANCE from float64."""
    found, like = {}, torch.empty(0, dtype=torch.bfloat16, device=device)
    for shape, options in ODD:
        for fused in (False, True):
            x = Inputs.random(shape, like, fused=fused, **options)
            went = attention.way(x.q, x.k, x.v, x.log_sizes)
            off = error(library, x)
            if not off < TOLERANCE or went != ("kernel" if like.is_cuda else "masked"):
                found[f"library, {shape} {options} fused={fused}"] = f"error {off:.1e}, way {went}"
    return found


def build_all(shapes: Sequence[Shape], until: float) -> dict[str, str]:
    """Compile in two pools: a compiler that never ends, or takes its process with it, stops the drafts alone."""
    failed: dict[str, str] = {}
    context = get_context("spawn")
    one, two = ProcessPoolExecutor(7, mp_context=context), ProcessPoolExecutor(4, mp_context=context)
    tasks: list[tuple[str, Any]] = [("library", one.submit(wrong_library))]
    tasks += [(name_of(form), one.submit(build, form, shapes)) for form in TILES]
    tasks += [(name_of(form), two.submit(build, form, shapes)) for form in DRAFTS]
    for name, task in tasks:
        try:
            failed |= task.result(timeout=max(0.1, until - time.monotonic()))
        except Exception as broken:
            failed[name] = reason(broken)
    for pool in (one, two):
        left = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for process in left:
            process.terminate()
    return failed


# Right?


def wrong_stage(device: torch.device) -> dict[str, str]:
    """Compare the steps of a removal with the functions that they stand for, at odd sizes and two dtypes."""
    from pullback.pruning import matching

    found: dict[str, str] = {}

    def both(call: Callable[[], Any]) -> tuple[Any, Any]:
        """Return what the kernels give, and what is given without them."""
        own = call()
        kept, matching.KERNELS = matching.KERNELS, frozenset()
        try:
            return own, call()
        finally:
            matching.KERNELS = kept

    def check(name: str, right: bool | Tensor) -> None:
        if not bool(right):
            found[name] = "differs from matching.py"

    for batch, count, width in ((3, 50, 24), (2, 257, 384), (5, 1370, 768)):
        for dtype in (torch.float32, torch.bfloat16):
            tokens = (torch.randn(batch, count, width) + torch.randn(batch, 1, width)).to(device, dtype)
            scores = (torch.rand(batch, count).argsort(1) / count).to(device)  # no two are equal
            case = f"{batch}:{count}:{width} {dtype}"
            try:
                own, wanted = both(lambda: matching.ranks(scores))  # noqa: B023
                check(f"ranks {case}", torch.equal(own, wanted))
                own, wanted = both(lambda: matching.artifacts(tokens, 1))  # noqa: B023
                check(f"artifacts {case}", torch.equal(own, wanted))
                cosine = matching.cosines(tokens)
                allowed = torch.rand(batch, count, device=device) < 0.8
                own, wanted = both(lambda: matching.residuals(tokens, scores, allowed, cosine))  # noqa: B023
                check(f"residuals {case}", (own - wanted).norm() <= 5e-2 * wanted.norm())
                kept, removed = matching.lowest(scores, count // 2, 1)
                own, wanted = both(lambda: matching.match_by_cosine(cosine, kept, removed, allowed, 0.7))  # noqa: B023
                check(f"most_similar {case}", torch.equal(own[1], wanted[1]))
                same = (own[0] == wanted[0]).float().mean()  # equal cosines, of which bfloat16 has many
                check(f"most_similar {case}: {same:.3f}", same > (0.999 if dtype == torch.float32 else 0.5))
                for shares in (own[1], torch.rand_like(own[0], dtype=torch.float32)):
                    split = matching.Matching(kept, removed, own[0], shares)
                    fast, slow = both(lambda: split.merge(tokens, scores))  # noqa: B023
                    rounding = 2e-6 if dtype == torch.float32 else 1e-2
                    check(f"merge {case}", (fast - slow).norm() <= rounding * slow.norm())
            except Exception as problem:
                found[f"stage {case}"] = reason(problem)
    print("right: ranks, artifacts, residuals, partners and merges, 6 inputs")
    return found


# Times


def compared(shape: Shape, like: Tensor, forms: Sequence[Any], rounds: int, usual: bool = True) -> dict[str, Any]:
    """Time plain attention, the masked way (unless not ``usual``) and every form that fits, and print the best."""
    batch, heads, count, width = shape
    bytes_of_one = 4 * batch * heads * count * width * like.element_size()
    copies = min(8, max(2, math.ceil(2 * L2_BYTES / bytes_of_one)))
    sets = [Inputs.random(shape, like, fused=True) for _ in range(copies)]
    ways: dict[str, Way] = {name: forced(backend, plain) for name, backend in PLAIN.items()}
    if shape in HEADS:
        ways["library, no sizes"] = lambda x: in_one_piece(attention.attend(x.q, x.k, x.v))
    else:
        ways |= {"masked": masked_way, "library": library} if usual else {}
        ways |= {name_of(form): way_of(form) for form in forms if fits(form, shape)}
    runs, failed = {}, {}
    for name, way in ways.items():
        try:
            runs[name] = through(way, sets)
        except Exception as problem:
            failed[name] = reason(problem)
    times = {name: ms / copies for name, ms in milliseconds(runs, like.device, rounds).items()}
    goal = min(ms for name, ms in times.items() if name.startswith("plain"))
    best = sorted(times, key=lambda name: times[name])
    shown = [name for name in best if not name.startswith(("tiles", "draft"))]
    shown += [name for name in best if name.startswith("tiles")][:4] + [n for n in best if n.startswith("draft")][:3]
    print(f"{batch} x {heads} heads x {count} tokens x {width}: " + ", ".join(
        f"{name} {times[name]:.4f} ({times[name] / goal:.2f})" for name in sorted(shown, key=lambda n: times[n])
    ), flush=True)  # fmt: skip
    torch.cuda.empty_cache()
    return {"shape": shape, "ms": times, "fastest_plain_ms": goal, "failed": failed}


def masked_way(x: Inputs) -> Tensor:
    return in_one_piece(attention.masked(x.q, x.k, x.v, x.log_sizes))


# Stage


def merges(device: torch.device, rounds: int) -> dict[str, float]:
    """Time the merge alone, by the warps of a program."""
    from pullback.pruning import stage_kernels

    batch, count, width = STAGE_CASES[0]
    x = torch.randn(batch, count, width, device=device, dtype=torch.bfloat16)
    order = torch.rand(batch, count, device=device).argsort(1)
    kept, removed = order[:, : count // 2].sort(1).values, order[:, count // 2 :].sort(1).values
    goes = torch.randint(0, count // 2, removed.shape, device=device, dtype=torch.int32)
    weights, share, runs = torch.rand(batch, count, device=device), torch.ones(removed.shape, device=device), {}
    own = stage_kernels.MERGING_WARPS
    for warps in (1, 2, 4):
        stage_kernels.MERGING_WARPS = warps
        call = lambda _: torch.ops.pullback.merge(x, weights, kept, removed, goes, share)  # noqa: E731
        runs[f"{warps} warps"] = captured(call, x)
    stage_kernels.MERGING_WARPS = own
    return milliseconds(runs, device, rounds)


def stage_process(name: str, pipe: Any, rounds: int) -> None:
    """Compile and capture a stage in one form, say so, wait for the turn, and send its milliseconds."""
    try:
        runs = stage_runs(name)
        pipe.send("ready")
        pipe.recv()
        pipe.send({"ms": milliseconds(runs, torch.device("cuda"), rounds)})
        if name in PROFILED:
            pipe.send({case: parts_of(runs[case]) for case in ("64:1370", "1:257")})
    except Exception:
        pipe.send({"failed": traceback.format_exc()[-800:]})


@torch.no_grad()
def stage_runs(name: str, cases: Sequence[tuple[int, int, int]] = STAGE_CASES, device: str = "cuda") -> dict[str, Any]:
    """Return a removal by preset "best" as it runs in one form, captured, for each case."""
    import pullback as pb
    from pullback.pruning import matching
    from pullback.pruning.forward import TokenState, after_stage, decide
    from pullback.pruning.plan import preset
    from pullback.pruning.scores import ScoreContext
    from pullback.tokens import TokenLayout

    torch._dynamo.config.recompile_limit = 64
    if name in ("no kernels", "plain head"):
        attention.NARROW = ()
    if name == "no kernels":
        matching.KERNELS = frozenset()
    if name.startswith("without "):
        matching.KERNELS = matching.KERNELS - {name.removeprefix("without ")}
    plan, runs = preset("best", 0.5, (3,), dense=False, depth=12), {}
    gate = plan.gates[0], plan.fades[0]
    for batch, count, width in cases:
        torch.manual_seed(0)
        tokens = (torch.randn(batch, count, width) + torch.randn(batch, 1, width)).to(device, torch.bfloat16)
        head = pb.ImportanceHead(width).to(device, torch.bfloat16).eval().requires_grad_(False)
        layout, going = TokenLayout(1, (1, count - 1)), plan.counts(count - 1)[0]
        positions = torch.arange(count, device=device).expand(batch, -1)
        sizes = torch.ones(batch, count, device=device)

        def stage(x: Tensor, head=head, layout=layout, going=going, positions=positions, sizes=sizes) -> Any:
            nothing: Any = None  # no backbone: the score does not ask for one
            context = ScoreContext(nothing, 3, layout, positions, sizes, x)
            matched, weights = decide(x, context, plan, lambda y, _: head(y), going, gate)
            after = after_stage(TokenState(x, positions, sizes, None), matched, weights, plan)
            return after.values, after.log_sizes

        runs[f"{batch}:{count}"] = captured(torch.compile(stage, fullgraph=True, dynamic=False), tokens)
    return runs


def captured(function: Callable[[Tensor], Any], example: Tensor) -> Callable[[], Any]:
    from pruning_speed import graphed

    return graphed(function, example) if example.is_cuda else lambda: function(example)


def parts_of(replay: Callable[[], Any]) -> list[tuple[str, float]]:
    """Return the kernels of one replay with their microseconds, the longest first."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(5):
            replay()
        torch.cuda.synchronize()
    events = [(event.key[:60], event.self_device_time_total / 5) for event in found.key_averages()]
    return sorted(((name, us) for name, us in events if us > 0), key=lambda one: -one[1])[:18]


def stages_begun(rounds: int) -> dict[str, tuple[Any, Any]]:
    context, begun = get_context("spawn"), {}
    for name in STAGES:
        ours, theirs = context.Pipe()
        process = context.Process(target=stage_process, args=(name, theirs, rounds), daemon=True)
        process.start()
        begun[name] = process, ours
    return begun


def answer(pipe: Any, process: Any, until: float) -> Any:
    """Return what a process sends, or what happened instead."""
    while time.monotonic() < until:
        try:
            if pipe.poll(0.2):
                return pipe.recv()
        except (EOFError, OSError):
            break
        if not process.is_alive() and not pipe.poll(0.2):
            break
    return {"failed": f"no answer in time, process {'alive' if process.is_alive() else process.exitcode}"}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-stage", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit", type=float, default=150.0, help="seconds after which nothing more is waited for")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    if options.check:
        place = "cuda" if torch.cuda.is_available() else "cpu"
        found = attempted(lambda: wrong_library(place)) | attempted(lambda: wrong_stage(torch.device(place)))
        print(f"WRONG on {place}: {found or 'nothing'}")
        raise SystemExit(1 if found else 0)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "2"  # of each process
    begun, like = time.monotonic(), torch.empty(0, dtype=torch.bfloat16, device="cuda")
    until = begun + options.limit
    content: dict[str, Any] = {"machine": machine(like.device), "attention": [], "drafts": [], "stage": {}}
    workers = {} if options.no_stage else stages_begun(options.rounds)
    broken = build_all(SHAPES, begun + 80)
    content["broken"] = broken
    print(
        f"attention compiled after {time.monotonic() - begun:.0f} s; WRONG or broken: {broken or 'nothing'}", flush=True
    )
    tiles, others = ([form for form in some if name_of(form) not in broken] for some in (TILES, DRAFTS))
    content["wrong"] = attempted(lambda: wrong_stage(like.device))
    print(f"steps of a removal, WRONG: {content['wrong'] or 'nothing'}", flush=True)
    ready = {name: answer(pipe, process, until - 40) for name, (process, pipe) in workers.items()}
    print(f"stages compiled after {time.monotonic() - begun:.0f} s", flush=True)
    gc.collect()
    gc.freeze()  # every capture collects garbage
    for shape in [*SHAPES, *HEADS]:
        content["attention"].append(attempted(lambda: compared(shape, like, tiles, options.rounds)))  # noqa: B023
    save("kernel_choice_cuda", content, options.out)
    content["merge"] = attempted(lambda: merges(like.device, options.rounds))
    print(f"merge alone: {content['merge']}", flush=True)
    for name, (process, pipe) in workers.items():
        if ready[name] == "ready":
            pipe.send("go")
            content["stage"][name] = answer(pipe, process, until)
        else:
            content["stage"][name] = ready[name]
        print(f"stage, {name}: {short(content['stage'][name])}", flush=True)
        if name in PROFILED and "ms" in content["stage"][name]:
            parts = answer(pipe, process, until)
            content["stage"][name]["parts"] = parts
            for case, found in parts.items():
                print(f"    {case}: {found if isinstance(found, str) else short_parts(found)}", flush=True)
        process.terminate()
    save("kernel_choice_cuda", content, options.out)
    # The drafts come last: one that reads where nothing is ends everything after it.
    for shape in SHAPES[:4]:
        content["drafts"].append(attempted(lambda: compared(shape, like, others, options.rounds, False)))  # noqa: B023
    path = save("kernel_choice_cuda", content, options.out)
    print(f"written after {time.monotonic() - begun:.0f} s: {path}")


def attempted(call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what a call returns, or print and return how it failed."""
    try:
        return call()
    except Exception as problem:
        print(f"FAILED: {reason(problem)}\n{traceback.format_exc()[-600:]}", flush=True)
        return {"failed": reason(problem)}


def short(found: dict[str, Any]) -> Any:
    return {case: round(ms, 4) for case, ms in found["ms"].items()} if "ms" in found else found


def short_parts(found: Sequence[tuple[str, float]]) -> str:
    return ", ".join(f"{name} {us:.1f}" for name, us in found)


if __name__ == "__main__":
    main()
