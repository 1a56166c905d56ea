"""Attention whose keys stand for several tokens, softmax(q k^T / sqrt(d) + log s) v: every way to compute it, timed.

    python benchmarks/attention_sizes.py                         # all of it on a GPU, about four minutes
    python benchmarks/attention_sizes.py --quick                 # two shapes, fewer kernels, about one minute
    python benchmarks/attention_sizes.py --device cpu --quick    # does it run

Tokens that were merged weigh as much as those they stand for, which takes fused attention off its fastest path. The
first rows are plain attention by each backend, without sizes: what there is to reach. Every way reads q, k, v as views
[B, h, N, d] of [B, N, h d] (``--fused``: of one product [B, N, 3 h d]) and ends with [B, N, h d] in one piece. On a GPU
each is captured in a CUDA graph that goes through several sets of inputs, more than L2 holds; the ways take turns.

    library     what the library does: its own kernel on a GPU (`pullback.backbones.attention`)
    masked      SDPA with log s as a mask, which the library does where it has no kernel
    flex        FlexAttention with log s in its score_mod
    channel     SDPA with one more channel in q and k (and in v, which flash attention wants as wide)
    values      cuDNN with s in the values: softmax(q k^T) [s v, s], first part over the last channel
    others      the kernels of attention_kernels.py, of each kind the fastest for the shape: first all are compiled, in
                several processes, and tried. Their sizes are prepared once (`in_powers_of_two`), as after a removal.

A way whose result is further than ``--tolerance`` from float64 is reported as wrong, and one that does not run with
its reason. Widths of 16 to 128, one query, sharp logits (sums that overflow) and views of one product are checked at
the end.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measure import machine, milliseconds, save
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from pullback.backbones import attention

try:
    import attention_kernels as kernels
except ImportError:  # Triton comes with PyTorch for CUDA only
    kernels = None  # type: ignore[assignment]

SHAPES = ["64:12:686:64", "64:12:129:64", "64:6:129:64", "64:12:1370:64", "1:12:686:64", "1:12:129:64", "8:16:1025:64"]
QUICK = {"cuda": ["64:12:686:64", "64:12:129:64"], "cpu": ["2:3:37:32"]}
L2_BYTES = 60e6
PLAIN = {
    "plain flash": SDPBackend.FLASH_ATTENTION,
    "plain cudnn": SDPBackend.CUDNN_ATTENTION,
    "plain efficient": SDPBackend.EFFICIENT_ATTENTION,
}
WAYS = ["library", "masked", "flex", "channel", "values", "online", "steady", "ahead", "short"]
Shape = tuple[int, int, int, int]


@dataclass(frozen=True, eq=False)
class Inputs:
    """One set. ``powers``: the sizes as kernels read them, None: without kernels."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_sizes: Tensor
    powers: Tensor | None

    @classmethod
    def random(cls, shape: Shape, like: Tensor, *, rows: int | None = None, fused: bool = False, sharp: float = 1.0):
        """q, k, v from a normal distribution, q times ``sharp``; sizes from 1 to 20; ``rows``: of q, default all."""
        batch, heads, count, width = shape
        if fused:
            packed = torch.randn(batch, count, 3 * heads * width, device=like.device).to(like)
            parts: Sequence[Tensor] = packed.chunk(3, -1)
        else:
            parts = [torch.randn(batch, count, heads * width, device=like.device).to(like) for _ in range(3)]
        q, k, v = (part.unflatten(-1, (heads, width)).transpose(1, 2) for part in parts)
        if sharp != 1:
            q.mul_(sharp)
        log_sizes = torch.randint(1, 21, (batch, count), device=like.device).float().log()
        powers = kernels.in_powers_of_two(log_sizes) if kernels is not None else None
        return cls(q[:, :, :rows], k, v, log_sizes, powers)


Way = Callable[[Inputs], Tensor]


def in_one_piece(out: Tensor) -> Tensor:
    """[B, h, n, d] -> [B, n, h * d]."""
    return out.transpose(1, 2).flatten(2)


def plain(x: Inputs) -> Tensor:
    return in_one_piece(F.scaled_dot_product_attention(x.q, x.k, x.v))


def forced(backend: SDPBackend, way: Way) -> Way:
    def run(x: Inputs) -> Tensor:
        with sdpa_kernel([backend]):
            return way(x)

    return run


def masked(x: Inputs) -> Tensor:
    return in_one_piece(attention.masked(x.q, x.k, x.v, x.log_sizes))


def library(x: Inputs) -> Tensor:
    return in_one_piece(attention.attend(x.q, x.k, x.v, x.log_sizes))


def channel(x: Inputs) -> Tensor:
    """Eight more channels, since widths are multiples of 8; sqrt(d) in q, log s in k, zeros elsewhere."""
    width = x.q.shape[-1]
    more = x.log_sizes.to(x.k.dtype)[:, None, :, None].expand(*x.k.shape[:3], 1)
    q = F.pad(torch.cat([x.q, torch.full_like(x.q[..., :1], math.sqrt(width))], -1), (0, 7))
    k = F.pad(torch.cat([x.k, more], -1), (0, 7))
    out = F.scaled_dot_product_attention(q, k, F.pad(x.v, (0, 8)), scale=1 / math.sqrt(width))
    return in_one_piece(out[..., :width])


def values(x: Inputs) -> Tensor:
    """Sizes in the values, and alone in one more channel; right as long as no size is lost beside the largest."""
    width = x.q.shape[-1]
    sizes = x.log_sizes.exp().to(x.v.dtype)[:, None, :, None]
    wide = F.pad(torch.cat([x.v * sizes, sizes.expand(*x.v.shape[:3], 1)], -1), (0, 7))
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION] if x.q.is_cuda else [SDPBackend.MATH]):
        out = F.scaled_dot_product_attention(x.q, x.k, wide)
    return in_one_piece(out[..., :width] / out[..., width : width + 1])


def flex(x: Inputs) -> Tensor:
    return _flex(x.q, x.k, x.v, x.log_sizes)


@torch.compile(fullgraph=True, dynamic=False)
def _flex(q: Tensor, k: Tensor, v: Tensor, log_sizes: Tensor) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    def heavier(score: Tensor, image: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score + log_sizes[image, key]

    return in_one_piece(flex_attention(q, k, v, score_mod=heavier))


def by(kernel: Any) -> Way:
    return lambda x: kernel(x.q, x.k, x.v, x.powers)


def trials(names: Sequence[str], quick: bool) -> list[Any]:
    """The kernels to try: block sizes, warps, stages, and registers. A multiprocessor has 65,536 registers: with 128
    for each thread it holds 16 warps, enough to multiply for one while another takes exponentials."""
    make = kernels.Kernel
    found = []
    for form in ("online", "steady", "ahead"):
        found += [make(form, 64, 64, 4, 2), make(form, 128, 64, 8, 2), make(form, 64, 64, 4, 2, tma=True)]
        found += [make(form, 128, 64, 8, 2, tma=True), make(form, 128, 64, 8, 2, registers=128)]
        if quick:
            continue
        found += [make(form, 64, 64, 4, 3), make(form, 64, 32, 4, 3), make(form, 128, 64, 8, 3)]
        found += [make(form, 128, 32, 8, 3), make(form, 128, 128, 8, 2), make(form, 64, 128, 4, 2)]
        narrow = None if form == "ahead" else 128  # without a limit 130 and 133, one program instead of two
        found += [make(form, 128, 64, 8, 3, tma=True, registers=narrow), make(form, 128, 128, 8, 2, tma=True)]
        found += [make(form, 64, 64, 4, 3, tma=True), make(form, 64, 32, 4, 4, tma=True)]
        found += [make(form, 128, 64, 8, 2, tma=True, specialized=True)]
        if form != "ahead":  # which would spill registers
            found += [make(form, 128, 64, 4, 2), make(form, 128, 64, 4, 2, tma=True), make(form, 128, 32, 4, 3)]
            found += [make(form, 64, 64, 4, 3, tma=True, registers=128)]
            found += [make(form, 256, 64, 8, 2, tma=True)]
        if form != "online":
            found += [make(form, 64, 64, 4, 2, 4), make(form, 128, 64, 8, 2, 4), make(form, 128, 64, 8, 2, 4, tma=True)]
            found += [make(form, 64, 64, 4, 2, 2, tma=True), make(form, 64, 64, 4, 2, registers=168)]
            found += [make(form, 64, 64, 4, 2, 4, tma=True), make(form, 128, 64, 8, 2, tma=True, registers=128)]
    found += [make("short", 64, warps=4), make("short", 128, warps=8), make("short", 32, warps=2)]
    if not quick:
        found += [make("short", 32, warps=4), make("short", 128, warps=4)]
        found += [make("short", 64, warps=4, registers=168), make("short", 64, warps=8)]
    return [kernel for kernel in found if kernel.form in names]


def build(kernel: Any, shape: Shape, dtype: torch.dtype) -> str | None:
    """Compile a kernel, in a process of its own, into the cache on disk; return why it does not work, or None."""
    try:
        like = torch.empty(0, dtype=dtype, device="cuda")
        by(kernel)(Inputs.random((1, *shape[1:]), like))
        torch.cuda.synchronize()
    except Exception as problem:
        return reason(problem)
    return None


def build_all(chosen: Sequence[Any], shapes: Sequence[Shape], dtype: torch.dtype) -> dict[Any, str]:
    """Compile what the shapes need, in parallel; return the kernels that do not work, with the reason. Those with warps
    of their own come last and alone, since a compiler that gives up may take its process with it."""
    jobs: dict[tuple[Any, ...], tuple[Any, Shape]] = {}
    for kernel in chosen:
        for shape in shapes:
            if kernel.fits(shape[2], shape[2]):
                parts = kernels.pieces(shape[2]) if kernel.form == "short" else kernels.tail(shape[2], kernel.keys)
                jobs[kernel, shape[3], () if kernel.tma else parts] = kernel, shape
    failed: dict[Any, str] = {}
    for specialized in (False, True):
        some = [job for job in jobs.values() if job[0].specialized == specialized]
        if not some:
            continue
        workers = min(len(some), 12, os.cpu_count() or 1)
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            tasks = [(kernel, pool.submit(build, kernel, shape, dtype)) for kernel, shape in some]
            for kernel, task in tasks:
                try:
                    problem = task.result()
                except Exception as broken:
                    problem = reason(broken)
                if problem:
                    failed[kernel] = problem
    return failed


def reason(problem: BaseException) -> str:
    lines = str(problem).strip().splitlines()
    return f"{type(problem).__name__}: {lines[0][:160] if lines else ''}"


def exact(x: Inputs, image: int) -> Tensor:
    """One image in float64: [n, h * d]."""
    q, k, v = (part[image].double() for part in (x.q, x.k, x.v))
    logits = q @ k.mT / math.sqrt(q.shape[-1]) + x.log_sizes[image].double()
    return (logits.softmax(-1) @ v).transpose(0, 1).flatten(1)


def error(way: Way, x: Inputs) -> float:
    """The relative error on the first and the last image; memory that the result may get is filled with NaN before."""
    batch, heads, rows, width = x.q.shape
    poison = torch.full((batch, rows, heads * width), math.nan, dtype=x.q.dtype, device=x.q.device)
    del poison
    out = way(x)
    if out.shape != (batch, rows, heads * width) or not out.isfinite().all():
        return math.inf
    found = []
    for image in {0, batch - 1}:
        reference = exact(x, image)
        found.append(((out[image].double() - reference).norm() / reference.norm()).item())
    return max(found)


def through(way: Way, sets: Sequence[Inputs]) -> Callable[[], Any]:
    """Run through all sets, on a GPU as one CUDA graph."""

    def run() -> None:
        for x in sets:
            way(x)

    if not sets[0].q.is_cuda:
        return run
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            way(sets[0])
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def timed(ways: dict[str, Way], sets: Sequence[Inputs], rounds: int, failed: dict[str, str]) -> dict[str, float]:
    """Milliseconds of one call, of the ways that run; ``failed`` takes up the others."""
    runs = {}
    for name, way in ways.items():
        try:
            runs[name] = through(way, sets)
        except Exception as problem:
            failed[name] = reason(problem)
    times = milliseconds(runs, sets[0].q.device, rounds)
    return {name: ms / len(sets) for name, ms in times.items()}


def kind(kernel: Any) -> str:
    return kernel.form + " poly" * (kernel.polynomial > 0) + " tma" * kernel.tma + " ws" * kernel.specialized


def compared(shape: Shape, like: Tensor, chosen: Sequence[Any], options: argparse.Namespace) -> dict[str, Any]:
    """Time and check all ways at one shape, and print them."""
    batch, heads, count, width = shape
    device = like.device
    bytes_of_one = 4 * batch * heads * count * width * like.element_size()
    copies = min(16, max(2, math.ceil(3 * L2_BYTES / bytes_of_one))) if like.is_cuda else 1
    sets = [Inputs.random(shape, like, fused=options.fused) for _ in range(copies)]
    ways: dict[str, Way] = {"plain": plain}
    if like.is_cuda:
        ways |= {name: forced(backend, plain) for name, backend in PLAIN.items()}
    simple = {"library": library, "masked": masked, "flex": flex, "channel": channel, "values": values}
    ways |= {name: simple[name] for name in options.ways if name in simple}
    failed: dict[str, str] = {}
    fitting = {str(kernel): kernel for kernel in chosen if kernel.fits(count, count)}
    tried = timed({name: by(kernel) for name, kernel in fitting.items()}, sets, 3, failed) if fitting else {}
    best: dict[str, str] = {}
    for name in sorted(tried, key=lambda name: tried[name]):
        best.setdefault(kind(fitting[name]), name)
    ways |= {name: by(fitting[name]) for name in best.values()}
    errors = {}
    for name, way in ways.items():
        if name.startswith("plain"):
            continue
        try:
            errors[name] = error(way, sets[0])
        except Exception as problem:
            failed[name] = reason(problem)
    again = {"masked, again": ways["masked"]} if "masked" in ways else {}
    ms = timed({name: way for name, way in (ways | again).items() if name not in failed}, sets, options.rounds, failed)
    goal = min(value for name, value in ms.items() if name.startswith("plain"))
    print(f"\n{batch} images, {heads} heads, {count} tokens, {width} channels; {copies} sets of inputs", flush=True)
    for name, value in sorted(ms.items(), key=lambda item: item[1]):
        wrong = "  WRONG" if errors.get(name, 0) > options.tolerance else ""
        off = f"  error {errors[name]:.1e}" if name in errors else ""
        print(f"  {name:34} {value:8.4f} ms  {value / goal:5.2f}x{off}{wrong}")
    for name, why in failed.items():
        print(f"  {name:34} failed: {why}")
    row = {"batch": batch, "heads": heads, "tokens": count, "width": width, "sets": copies, "ms": ms, "errors": errors}
    row |= {"fastest_plain_ms": goal, "over_plain": {name: value / goal for name, value in ms.items()}}
    row |= {"tried_ms": tried, "failed": failed, "device_memory_gb": bytes_of_one / 1e9}
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return row


def unusual(like: Tensor, names: Sequence[str]) -> dict[str, float | str]:
    """The errors of one kernel of each kind at other widths, with one query, sharp logits, and views of one product."""
    cases: dict[str, tuple[Shape, dict[str, Any]]] = {
        f"{width} channels": ((2, 3, 197, width), {}) for width in (16, 32, 80, 96, 128)
    }
    cases |= {
        "one query": ((3, 2, 300, 64), {"rows": 1}),
        "fused product": ((2, 6, 257, 64), {"fused": True}),
        "sharp logits": ((2, 6, 257, 64), {"sharp": 60.0}),
        "61 tokens": ((3, 6, 61, 64), {}),
        "64 tokens": ((3, 6, 64, 64), {}),
        "1,409 tokens": ((1, 2, 1409, 64), {}),
    }
    found: dict[str, float | str] = {}
    make = kernels.Kernel
    forms = [make("online", 64, 32, 4), make("steady", 64, 32, 4), make("ahead", 64, 32, 4), make("short", 64)]
    forms += [make(form, 128, 64, 8, tma=True) for form in ("online", "steady", "ahead")]
    for case, (shape, options) in cases.items():
        x = Inputs.random(shape, like, **options)
        for kernel in forms:
            refused = kernel.tma and shape[3] not in (16, 32, 64, 128)  # 80 and 96 channels go by pointers
            if kernel.form in names and not refused and (kernel.form != "short" or shape[2] <= 304):
                try:
                    found[f"{case}, {kernel}"] = error(by(kernel), x)
                except Exception as problem:
                    found[f"{case}, {kernel}"] = reason(problem)
    return found


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    parser.add_argument("--shapes", nargs="+", default=None, help="batch:heads:tokens:channels")
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--fused", action="store_true", help="q, k, v are views of one product")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tolerance", type=float, default=1.5e-2)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    torch._dynamo.config.recompile_limit = 64
    device = torch.device(options.device)
    like = torch.empty(0, device=device, dtype=getattr(torch, options.dtype))
    names = options.shapes or (QUICK[device.type] if options.quick else SHAPES)
    shapes: list[Shape] = [tuple(map(int, name.split(":"))) for name in names]  # type: ignore[misc]
    if not like.is_cuda:
        options.ways = [way for way in options.ways if way in ("library", "masked", "channel", "values")]
    torch.manual_seed(0)
    content: dict[str, Any] = {"machine": machine(device), "dtype": options.dtype, "fused": options.fused, "cases": []}
    chosen: list[Any] = []
    if like.is_cuda and kernels is not None:
        content["triton"] = kernels.triton.__version__
        chosen = trials(options.ways, options.quick)
        begun = time.perf_counter()
        broken = build_all(chosen, shapes, like.dtype)
        print(f"{len(chosen)} kernels compiled in {time.perf_counter() - begun:.0f} s", flush=True)
        for kernel, why in broken.items():
            print(f"  {kernel} failed: {why}", flush=True)
        content["broken"] = {str(kernel): why for kernel, why in broken.items()}
        chosen = [kernel for kernel in chosen if kernel not in broken]
    for shape in shapes:
        content["cases"].append(compared(shape, like, chosen, options))
        path = save(f"attention_sizes_{device.type}", content, options.out)
    if chosen:
        content["unusual"] = unusual(like, options.ways)
        bad = {name: off for name, off in content["unusual"].items() if isinstance(off, str) or off > options.tolerance}
        print(f"\n{len(content['unusual'])} unusual cases, of which wrong or refused: {bad or 'none'}")
        path = save(f"attention_sizes_{device.type}", content, options.out)
    print(f"written: {path}")


if __name__ == "__main__":
    main()
