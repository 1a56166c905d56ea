"""Where a removal stage spends its time, operation by operation, beside the least that each could take.

    python benchmarks/stage_kernel.py                              # a GPU: 64 images, 1,370 tokens, 768 channels
    python benchmarks/stage_kernel.py --device cpu --case 1:257:384

Every operation of `decide` and `after_stage` (preset "best", half of the patches) runs by itself, compiled, on a GPU as
a CUDA graph. "floor" is the longer of its bytes at 4.3 TB/s (each tensor read and written once) and its operations at
788 TFLOP/s, as measured on an H200. "merge, one kernel" is a draft in Triton, checked against `Matching.merge`.

Since then the library has kernels for three of these (`pullback.pruning.stage_kernels`: ranks by counting, partners
without a mask of all pairs, merges) and for the head's attention; benchmarks/kernel_choice.py takes each away in turn.
What follows is the account from before them.

The stage took 2.33 of 34.7 ms, 6.7 %, at 64 images, 1,370 tokens and 768 channels in bfloat16; the aim is 4 %, 1.4 ms.
The tokens T are 135 MB (0.031 ms a pass), the cosines C 241 MB (0.056 ms). Counted, not measured one by one:

    operation                    MB  GFLOP  floor ms  remark
    importance head, 256 x 1    270     85      0.11  took 0.60. 480 million exponentials at 16 channels a head: 0.12 ms
                                                      more, which plain attention does not overlap
    unit tokens                 269      -      0.06  T read and written; compiled, it also feeds `artifacts`
    cosines                     376    185      0.24  T read, C written
    ranks: four sorts             2      -         -  64 rows of 1,369: 64 of 132 multiprocessors, 0.03 ms each or so
    partners above in rank      241      -      0.06  C read
    gaps to them                270      -      0.06  T read, and once more in another order
    partners among the kept     121      -      0.03  half of C read. Where the rows are first copied, 362 MB, 0.08
    merge: shares               121      -      0.03  [K, R] written and read
    merge: rows                 404      -      0.09  kept, removed and partner gathered, gaps written and padded
    merge: product              269     46      0.06  and its sum with the kept rows

That is 0.75 ms of floors, and 1.0 to 1.2 ms at the usual distance from them, beside the head's 0.6 and some 25
launches. What would bring it under 4 %:

    1. The head's attention by a kernel of attention_kernels.py ("ahead", sizes of one, every second exponential by
       polynomial): 480 million exponentials in 0.1 to 0.15 ms instead of near 0.35. Saves 0.2 to 0.25 ms.
    2. Merge, sizes and kept rows in one kernel, as in `merge_in_one` here: one program for each kept token finds its
       own among the removed, and reads every row once. T read, half of T written: 0.047 ms instead of near 0.25 to 0.3.
       Neither shares nor gaps are stored; sums are in float32 and in a fixed order.
    3. Partners above in rank: of t and u only the lower-ranked looks at the other. With tokens gathered in the order of
       rank (0.06 ms) only the lower triangle of C is needed, in blocks of 128: 92 GFLOP instead of 185, and with the
       maximum taken in the kernel that multiplies, no C at all. Those who are kept are known later, and again only
       removed x kept is needed: 685 x 685, 46 GFLOP. In all 138 GFLOP, 0.18 ms, and no pass over C: instead of
       0.24 + 0.06 + 0.06 to 0.14. Saves 0.15 to 0.25 ms, if the kernel comes near cuBLAS; the riskiest of the three.
    4. Medians for `artifacts` need no order of all norms: counting (`_ranks_by_pairs`) in blocks, 0.12 billion
       comparisons each, 0.01 ms instead of a sort. Saves 0.05 ms.

Expected, not measured: 1 and 2 alone make 1.85 ms of it, 5.3 %; with 3 and 4, 1.5 to 1.6 ms, 4.5 %. Under 4 % takes all
of them at their best. Faster attention (8 of the 12 blocks save up to 0.17 ms each) makes the whole shorter, and so
the share of the stage larger.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import machine, milliseconds, save
from pruning_speed import graphed
from torch import Tensor

import pullback as pb
from pullback.pruning import matching as stages
from pullback.pruning.forward import TokenState, after_stage, decide
from pullback.pruning.scores import ScoreContext
from pullback.tokens import TokenLayout

try:
    import triton
    import triton.language as tl
except ImportError:  # Triton comes with PyTorch for CUDA only
    triton = None

BANDWIDTH, RATE = 4.3e12, 788e12
GATE, TRUST = 0.7, 0.3  # of the preset
PLAN = pb.PrunePlan(
    (3,), (0.5,), select="cost", match="cosine", gates=(GATE,), sizes=True, safe=True, trust=TRUST
)  # fmt: skip

if triton is not None:

    @triton.jit
    def _merge(
        x, weights, sizes, kept, removed, destination, merged, out, out_sizes, xb, xn, ob, on, N, K, R,
        D: tl.constexpr, WIDE: tl.constexpr, LIST: tl.constexpr,
    ):  # fmt: skip
        """One kept token: its row moved by what is merged into it, and the sum of the sizes. Grid (K, images)."""
        place = tl.program_id(0)
        image = tl.program_id(1).to(tl.int64)
        each = tl.arange(0, LIST)
        goes = tl.load(destination + image * R + each, mask=each < R, other=-1)
        mine = (goes == place) & (tl.load(merged + image * R + each, mask=each < R, other=0) != 0)
        row = tl.load(removed + image * R + each, mask=mine, other=0)
        weight = tl.load(weights + image * N + row, mask=mine, other=0.0)
        size = tl.load(sizes + image * N + row, mask=mine, other=0.0)
        own = tl.load(kept + image * K + place)
        total = tl.maximum(tl.load(weights + image * N + own) + tl.sum(weight, 0), 1.1754943508222875e-38)
        tl.store(out_sizes + image * K + place, tl.load(sizes + image * N + own) + tl.sum(size, 0))
        channel = tl.arange(0, WIDE)
        base = x + image * xb
        start = tl.load(base + own * xn + channel, mask=channel < D, other=0.0).to(tl.float32)
        mean = start
        for _ in range(tl.sum(mine.to(tl.int32), 0)):
            first = tl.min(tl.where(mine, each, LIST), 0)
            source = tl.sum(tl.where(each == first, row, 0), 0)
            share = tl.sum(tl.where(each == first, weight, 0.0), 0) / total
            mean += share * (tl.load(base + source * xn + channel, mask=channel < D, other=0.0).to(tl.float32) - start)
            mine = mine & (each != first)
        at = out + image * ob + place * on + channel
        tl.store(at, mean.to(out.dtype.element_ty), mask=channel < D)


def merge_in_one(matching: stages.Matching, x: Tensor, weights: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Do what `Matching.merge` and `Matching.add` do: x [B, N, D], weights and sizes [B, N] -> [B, K, D], [B, K]."""
    batch, count, width = x.shape
    kept, removed = matching.kept.shape[1], matching.removed.shape[1]
    out, out_sizes = x.new_empty(batch, kept, width), sizes.new_empty(batch, kept)
    lists = [part.contiguous() for part in (matching.kept, matching.removed, matching.destination, matching.merged)]
    _merge[kept, batch](
        x, weights.contiguous(), sizes.contiguous(), *lists, out, out_sizes, *x.stride()[:2], *out.stride()[:2],
        count, kept, removed, D=width, WIDE=triton.next_power_of_2(width),
        LIST=max(16, triton.next_power_of_2(removed)), num_warps=1,
    )  # fmt: skip
    return out, out_sizes


Operation = tuple[Callable[..., Any], tuple[Any, ...], float, float]  # with its inputs, bytes and operations


def operations(tokens: Tensor, head: pb.ImportanceHead) -> dict[str, Operation]:
    """Every operation of a stage with one class token, and the stage itself."""
    batch, count, width = tokens.shape
    layout = TokenLayout(1, (1, count - 1))
    going = PLAN.counts(count - 1)[0]
    positions = torch.arange(count, device=tokens.device).expand(batch, -1)
    sizes = torch.ones(batch, count, device=tokens.device)

    def stage(tokens: Tensor) -> Tensor:
        nothing: Any = None  # no backbone: the score does not ask for one
        context = ScoreContext(nothing, 3, layout, positions, sizes, tokens)
        matching, weights = decide(tokens, context, PLAN, score, going, (GATE, GATE))
        return after_stage(TokenState(tokens, positions, sizes, None), matching, weights, PLAN).values

    def score(tokens: Tensor, context: ScoreContext) -> Tensor:
        return head(tokens)

    scores = head(tokens)
    patch = torch.arange(count, device=tokens.device) >= 1
    allowed = patch & ~stages.artifacts(tokens, 1)
    cosine = stages.cosines(tokens)
    place = stages.ranks(scores)
    reach = torch.where(allowed, place, count)
    best, partner = stages.most_similar(cosine, reach[:, None] < place[..., None])
    ranking = stages.removal_costs(scores, stages.gaps(tokens, best, partner), TRUST)
    kept, removed = stages.lowest(ranking, going, 1)
    destination, merged = stages.match_by_cosine(cosine, kept, removed, allowed, GATE)
    matching = stages.Matching(kept, removed, destination, merged)
    t, c = tokens.nbytes, cosine.nbytes
    hidden = head.config.width
    score_flops = 2 * batch * count * (width * hidden + hidden * hidden * 2 + 2 * count * hidden // 4)
    found: dict[str, Operation] = {
        "the whole stage": (stage, (tokens,), 0, 0),
        "importance head": (head, (tokens,), t, score_flops),
        "artifacts": (lambda x: stages.artifacts(x, 1), (tokens,), t, 0),
        "cosines": (stages.cosines, (tokens,), t + c, 2 * cosine.numel() * width),
        "ranks": (stages.ranks, (scores,), 0, 0),
        "partners above in rank": (
            lambda c, r, p: stages.most_similar(c, r[:, None] < p[..., None]), (cosine, reach, place), c, 0,
        ),
        "gaps": (stages.gaps, (tokens, best, partner), 2 * t, 0),
        "lowest": (lambda s: stages.lowest(s, going, 1), (ranking,), 0, 0),
        "partners among the kept": (
            lambda c, k, r, a: stages.match_by_cosine(c, k, r, a, GATE), (cosine, kept, removed, allowed), c / 2, 0,
        ),
        "merge": (
            lambda k, r, d, m, x, w: stages.Matching(k, r, d, m).merge(x, w),
            (kept, removed, destination, merged, tokens, scores), 1.5 * t, 0,
        ),
        "sizes": (
            lambda k, r, d, m, s: stages.Matching(k, r, d, m).add(s), (kept, removed, destination, merged, sizes), 0, 0,
        ),
    }  # fmt: skip
    if triton is not None and tokens.is_cuda:
        wanted = matching.merge(tokens.float(), scores), matching.add(sizes)
        mean, total = merge_in_one(matching, tokens, scores, sizes)
        off = ((mean.float() - wanted[0]).norm() / wanted[0].norm()).item()
        print(f"merge in one kernel: error {off:.1e}, sizes {'equal' if torch.equal(total, wanted[1]) else 'WRONG'}")
        found["merge, one kernel"] = (lambda: merge_in_one(matching, tokens, scores, sizes), (), 1.5 * t, 0)
    return found


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--case", default="64:1370:768", help="images:tokens:channels")
    parser.add_argument("--no-compile", action="store_true", help="on a CPU nothing is compiled")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    device = torch.device(options.device)
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    torch.manual_seed(0)
    batch, count, width = map(int, options.case.split(":"))
    common = torch.randn(batch, 1, width)  # so that cosines are high, as those of real tokens
    tokens = (torch.randn(batch, count, width) + common).to(device, dtype)
    head = pb.ImportanceHead(width).to(device, dtype).eval()
    torch._dynamo.config.recompile_limit = 64
    runs: dict[str, Callable[[], Any]] = {}
    floors = {}
    for name, (function, inputs, moved, done) in operations(tokens, head).items():
        call = function
        if on_gpu and not options.no_compile and inputs:
            call = torch.compile(function, fullgraph=True, dynamic=False)
        run = lambda _=None, call=call, inputs=inputs: call(*inputs)  # noqa: E731
        runs[name] = graphed(run, tokens) if on_gpu else run
        floors[name] = 1e3 * max(moved / BANDWIDTH, done / RATE)
    times = milliseconds(runs, device, options.rounds)
    print(f"{batch} images, {count} tokens, {width} channels, {dtype}")
    for name, ms in times.items():
        floor = f"   floor {floors[name]:.3f}" if on_gpu and floors[name] else ""
        print(f"  {name:26} {ms:8.3f} ms{floor}")
    content = {"machine": machine(device), "case": options.case, "dtype": str(dtype), "ms": times}
    content |= {"floor_ms": floors} if on_gpu else {}
    print(f"written: {save(f'stage_kernel_{device.type}', content, options.out)}")


if __name__ == "__main__":
    main()
