"""Attention whose keys stand for several tokens, as one Triton kernel: softmax(q k^T / sqrt(d) + log s) v, no backward.

Flash attention 2 (Dao 2023): a program takes some queries of one head through all keys, a block at a time, with a
running maximum, to which earlier sums are rescaled. Logits are kept in powers of two, so that log2 s is added in the
multiply-add that scales them: sizes cost nothing beside it. Keys after the last whole block form one shorter block.

What bounds it at d = 64 on an H200, and forms of it that were tried, are told in benchmarks/attention_kernels.py.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = math.log2(math.e)


class Tiles(NamedTuple):
    """``queries`` of one program, ``keys`` of one step, ``warps`` of a program, ``stages`` of loads under way."""

    queries: int
    keys: int
    warps: int
    stages: int


FULL, SPARSE, SHORT, ROW = Tiles(128, 64, 8, 3), Tiles(64, 64, 4, 3), Tiles(32, 64, 4, 3), Tiles(16, 64, 4, 3)
PROGRAMS = 264  # two for each multiprocessor of an H200: with fewer, programs are made smaller


def tiles(batch: int, heads: int, rows: int, count: int) -> Tiles:
    """Choose for queries [batch, heads, rows, d] and ``count`` keys."""
    if rows <= 16:
        return ROW
    if batch * heads * triton.cdiv(rows, FULL.queries) >= PROGRAMS and count > 160:
        return FULL
    if batch * heads * triton.cdiv(rows, SPARSE.queries) >= PROGRAMS // 2:
        return SPARSE
    return SHORT


@torch.library.custom_op("pullback::attend", mutates_args=())
def attend(q: Tensor, k: Tensor, v: Tensor, log_sizes: Tensor | None) -> Tensor:
    """Queries [B, h, n, d], keys and values [B, h, N, d], log sizes [B, N] or None: no sizes -> [B, n, h, d]."""
    with running_on(q):
        return attention(q, k, v, log_sizes)


@attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, log_sizes: Tensor | None) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], q.shape[3])


def running_on(x: Tensor) -> AbstractContextManager[Any]:
    """Return the context in which kernels start where x is. On a CPU they run in Triton's interpreter."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def attention(q: Tensor, k: Tensor, v: Tensor, log_sizes: Tensor | None, chosen: Tiles | None = None) -> Tensor:
    """Do what `attend` says, with these tiles or those that are best."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    batch, heads, rows, width = q.shape
    count = k.shape[2]
    out = torch.empty(batch, rows, heads, width, dtype=q.dtype, device=q.device)
    own = tiles(batch, heads, rows, count) if chosen is None else chosen
    keys = min(own.keys, max(16, triton.next_power_of_2(count)))
    rest = count % keys
    sizes = q if log_sizes is None else log_sizes.float().contiguous()  # a tensor that is not read, or the sizes
    grid = (triton.cdiv(rows, own.queries), heads, batch)
    _attention[grid](
        q, k, v, sizes, out, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], rows, count,
        LOG2E / math.sqrt(width), LOG2E, D=width, QUERIES=own.queries, KEYS=keys,
        REST=max(16, triton.next_power_of_2(rest)) if rest else 0, SIZES=log_sizes is not None,
        num_warps=own.warps, num_stages=own.stages,
    )  # fmt: skip
    return out


@triton.jit
def _attention(
    q, k, v, sizes, out, qb, qh, qn, kb, kh, kn, vb, vh, vn, rows, count, scale, log2e,
    D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, REST: tl.constexpr, SIZES: tl.constexpr,
):  # fmt: skip
    """One program for some queries of one head of one image; grid (blocks of queries, heads, images)."""
    start = tl.program_id(0) * QUERIES
    head = tl.program_id(1)
    image = tl.program_id(2).to(tl.int64)
    k += image * kb + head * kh
    v += image * vb + head * vh
    if SIZES:
        sizes += image * count
    row = start + tl.arange(0, QUERIES)
    channel = tl.arange(0, D)
    at = q + image * qb + head * qh + row[:, None] * qn + channel[None, :]
    queries = tl.load(at, mask=row[:, None] < rows, other=0.0)
    acc = tl.zeros([QUERIES, D], tl.float32)
    total = tl.zeros([QUERIES, 8], tl.float32)
    high = tl.full([QUERIES], float("-inf"), tl.float32)
    whole = count // KEYS * KEYS
    for first in tl.range(0, whole, KEYS):
        acc, total, high = _step(queries, k, v, sizes, kn, vn, first, count, scale, log2e, acc, total, high,
                                 KEYS, D, SIZES, False)  # fmt: skip
    if REST > 0:
        acc, total, high = _step(queries, k, v, sizes, kn, vn, whole, count, scale, log2e, acc, total, high,
                                 REST, D, SIZES, True)  # fmt: skip
    mean = acc / tl.sum(total, 1)[:, None]
    at = out + ((image * rows + row[:, None]) * tl.num_programs(1) + head) * D + channel[None, :]
    tl.store(at, mean.to(out.dtype.element_ty), mask=row[:, None] < rows)


@triton.jit
def _step(
    queries, k, v, sizes, kn, vn, first, count, scale, log2e, acc, total, high,
    KEYS: tl.constexpr, D: tl.constexpr, SIZES: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """Take in KEYS keys from ``first`` on; RAGGED: fewer of them exist."""
    key = first + tl.arange(0, KEYS)
    channel = tl.arange(0, D)
    at_k = k + key[:, None] * kn + channel[None, :]
    at_v = v + key[:, None] * vn + channel[None, :]
    if RAGGED:
        keys = tl.load(at_k, mask=key[:, None] < count, other=0.0)
        values = tl.load(at_v, mask=key[:, None] < count, other=0.0)
    else:
        keys = tl.load(at_k)
        values = tl.load(at_v)
    logits = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
    if SIZES:
        logits += (tl.load(sizes + key, mask=key < count, other=float("-inf")) * log2e)[None, :]
    elif RAGGED:
        logits = tl.where(key[None, :] < count, logits, float("-inf"))
    higher = tl.maximum(high, tl.max(logits, 1))
    weights = tl.exp2(logits - higher[:, None])
    shrink = tl.exp2(high - higher)
    # Sums of every eighth column: where one thread has them all, no thread waits for another until the end.
    total = total * shrink[:, None] + tl.sum(tl.reshape(weights, [weights.shape[0], KEYS // 8, 8]), 1)
    acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
    return acc, total, higher
