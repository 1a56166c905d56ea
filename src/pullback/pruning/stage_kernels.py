"""Three steps of a removal as Triton kernels, each of which does what a function of `matching.py` says:

    ranks          of many scores at once, by counting the higher ones: sorting leaves most of a GPU idle
    most_similar   the highest cosine among tokens that a limit allows, without a mask of all pairs
    merge          removed tokens into their partners, each row read once, sums in float32 and in a fixed order

They are operators of PyTorch, `torch.ops.pullback.*`, which torch.compile and CUDA graphs take as they are.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pullback.backbones.attention_kernel import running_on

MERGING_WARPS = 2
TINY = tl.constexpr(1.1754943508222875e-38)  # the smallest normal float32


@torch.library.custom_op("pullback::ranks", mutates_args=())
def ranks(scores: Tensor) -> Tensor:
    """Rank float32 scores [B, N], 0 the highest, equal ones in their order, NaN as infinite: int32 [B, N]."""
    scores = scores.contiguous()
    batch, count = scores.shape
    out = torch.empty(batch, count, dtype=torch.int32, device=scores.device)
    with running_on(scores):
        _ranks[triton.cdiv(count, 16), batch](scores, out, count, BLOCK=16, STEP=128, num_warps=4)
    return out


@ranks.register_fake
def _(scores: Tensor) -> Tensor:
    return scores.new_empty(scores.shape, dtype=torch.int32)


@triton.jit
def _ranks(scores, out, count, BLOCK: tl.constexpr, STEP: tl.constexpr):
    """BLOCK scores of one row; grid (blocks, rows)."""
    row = tl.program_id(1).to(tl.int64) * count
    own = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(scores + row + own, mask=own < count, other=0.0)
    score = tl.where(score != score, float("inf"), score)[:, None]
    higher = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, count, STEP):
        other = start + tl.arange(0, STEP)
        value = tl.load(scores + row + other, mask=other < count, other=float("-inf"))
        value = tl.where(value != value, float("inf"), value)[None, :]
        ahead = (value > score) | ((value == score) & (other[None, :] < own[:, None]))
        higher += tl.sum(ahead.to(tl.int32), 1)
    tl.store(out + row + own, higher, mask=own < count)


@torch.library.custom_op("pullback::most_similar", mutates_args=())
def most_similar(
    cosine: Tensor, reach: Tensor, index: Tensor | None = None, limit: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the highest cosine [B, N, M] of each row among the tokens t < N whose int32 ``reach`` [B, N] is below the
    ``limit`` [B, n] of the row (None: below 1), -2 where there is none, and its place: [B, n] each, n the rows of
    ``index`` (None: all N)."""
    batch, count = reach.shape
    rows = count if index is None else index.shape[1]
    cosine = cosine if cosine.stride(2) == 1 else cosine.contiguous()
    reach, limits = reach.contiguous(), reach if limit is None else limit.contiguous()
    places = reach if index is None else index
    best = torch.empty(batch, rows, dtype=cosine.dtype, device=cosine.device)
    place = torch.empty(batch, rows, dtype=torch.int64, device=cosine.device)
    with running_on(cosine):
        _most_similar[rows, batch](
            cosine, places, reach, limits, best, place, cosine.stride(0), cosine.stride(1), places.stride(0),
            places.stride(1), rows, count, BLOCK=max(16, triton.next_power_of_2(count)), SOME=index is not None,
            LIMITED=limit is not None, num_warps=4 if count > 512 else 1,
        )  # fmt: skip
    return best, place


@most_similar.register_fake
def _(cosine: Tensor, reach: Tensor, index: Tensor | None = None, limit: Tensor | None = None) -> tuple[Tensor, Tensor]:
    shape = reach.shape if index is None else index.shape
    return cosine.new_empty(shape), reach.new_empty(shape, dtype=torch.int64)


@triton.jit
def _most_similar(
    cosine, index, reach, limit, best, place, cb, cn, ib, ir, rows, count,
    BLOCK: tl.constexpr, SOME: tl.constexpr, LIMITED: tl.constexpr,
):  # fmt: skip
    """One row; grid (rows, images)."""
    image = tl.program_id(1).to(tl.int64)
    row = image * rows + tl.program_id(0)
    other = tl.arange(0, BLOCK)
    exists = other < count
    line = tl.program_id(0).to(tl.int64)
    if SOME:
        line = tl.load(index + image * ib + line * ir).to(tl.int64)
    value = tl.load(cosine + image * cb + line * cn + other, mask=exists, other=-2.0).to(tl.float32)
    reached = tl.load(reach + image * count + other, mask=exists, other=2147483647)
    highest_allowed = tl.load(limit + row) if LIMITED else 1
    highest, at = tl.max(tl.where(reached < highest_allowed, value, -2.0), 0, return_indices=True)
    tl.store(best + row, highest.to(best.dtype.element_ty))
    tl.store(place + row, at.to(tl.int64))


@torch.library.custom_op("pullback::merge", mutates_args=())
def merge(x: Tensor, weights: Tensor, kept: Tensor, removed: Tensor, destination: Tensor, merged: Tensor) -> Tensor:
    """Do what `Matching.merge` says with x [B, N, D], float32 weights [B, N], and the fields of a matching, of which
    ``destination`` is int32, -1 for what is dropped, and ``merged`` float32: [B, K, D]."""
    x = x if x.stride(2) == 1 else x.contiguous()
    batch, _, width = x.shape
    left, gone = kept.shape[1], removed.shape[1]
    out = torch.empty(batch, left, width, dtype=x.dtype, device=x.device)
    kept, removed, weights, goes, share = (
        part if part.stride(1) == 1 else part.contiguous() for part in (kept, removed, weights, destination, merged)
    )
    with running_on(x):
        _merge[left, batch](
            x, weights, kept, removed, goes, share, out, x.stride(0), x.stride(1), weights.stride(0), kept.stride(0),
            removed.stride(0), goes.stride(0), share.stride(0), left, gone, D=width,
            WIDE=triton.next_power_of_2(width), LIST=max(16, triton.next_power_of_2(gone)), num_warps=MERGING_WARPS,
        )  # fmt: skip
    return out


@merge.register_fake
def _(x: Tensor, weights: Tensor, kept: Tensor, removed: Tensor, destination: Tensor, merged: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], kept.shape[1], x.shape[2])


@triton.jit
def _merge(
    x, weights, kept, removed, destination, merged, out, xb, xn, wb, kb, rb, db, mb, K, R,
    D: tl.constexpr, WIDE: tl.constexpr, LIST: tl.constexpr,
):  # fmt: skip
    """One kept token, moved by what is merged into it; grid (kept tokens, images)."""
    place = tl.program_id(0)
    image = tl.program_id(1).to(tl.int64)
    weights += image * wb
    each = tl.arange(0, LIST)
    mine = tl.load(destination + image * db + each, mask=each < R, other=-1) == place
    own = tl.load(kept + image * kb + place)
    total = tl.load(weights + own)
    channel = tl.arange(0, WIDE)
    base = x + image * xb
    start = tl.load(base + own * xn + channel, mask=channel < D, other=0.0).to(tl.float32)
    gap = tl.zeros([WIDE], tl.float32)
    for _ in range(tl.sum(mine.to(tl.int32), 0)):
        first = tl.min(tl.where(mine, each, LIST), 0)
        row = tl.load(removed + image * rb + first)
        weight = tl.load(weights + row) * tl.load(merged + image * mb + first)
        value = tl.load(base + row * xn + channel, mask=channel < D, other=0.0).to(tl.float32)
        total += weight
        gap += weight * (value - start)
        mine = mine & (each != first)
    mean = start + gap / tl.maximum(total, TINY)
    tl.store(out + (image * K + place) * D + channel, mean.to(out.dtype.element_ty), mask=channel < D)
