"""Attention whose keys stand for several tokens, as one Triton kernel: softmax(q k^T / sqrt(d) + log s) v, no backward.

Flash attention 2 (Dao 2023): a program takes some queries of one head through all keys, a block at a time, with a
running maximum, to which earlier sums are rescaled. Logits are kept in powers of two, so that log2 s is added in the
multiply-add that scales them: sizes cost nothing beside it. Keys after the last whole block form one shorter block.

With many keys there is no running maximum (`Tiles.steady`): exponents are relative to the highest of a query's first
16 logits. The true maximum is not below it, and a power of two that is off by 2^60 costs no digits in float32 or
bfloat16, so that the result is as exact until a sum passes `_limit`; a program that sees one starts again with a
running maximum.

What bounds it at d = 64 on an H200, and more forms that were tried, are told in benchmarks/attention_kernels.py; which
tiles are fast where is what benchmarks/kernel_choice.py prints.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

LOG2E = math.log2(math.e)


class Tiles(NamedTuple):
    """``queries`` of one program, ``keys`` of one step, ``warps`` of a program, ``stages`` of loads under way, and
    whether the exponents' reference stays what it is at first."""

    queries: int
    keys: int
    warps: int
    stages: int
    steady: bool = False


LONG, SHORT = Tiles(64, 64, 4, 3, steady=True), Tiles(64, 128, 4, 2)  # many programs; more than 300 keys, and fewer
ALONE, FEW = Tiles(64, 64, 4, 3), Tiles(16, 64, 2, 3)  # fewer programs than fill a GPU, likewise
PROGRAMS = 528  # four for each multiprocessor of an H200
FIRST_KEYS = tl.constexpr(16)  # of the reference
SPARE = 128  # the most keys of a step: rows of sizes reach beyond the last key, so that no step asks where it ends


def tiles(batch: int, heads: int, rows: int, count: int) -> Tiles:
    """Choose for queries [batch, heads, rows, d] and ``count`` keys."""
    if rows <= FEW.queries:
        return FEW
    if batch * heads * triton.cdiv(rows, LONG.queries) >= PROGRAMS:
        return LONG if count > 300 else SHORT
    return ALONE if count > 300 else FEW


def _limit(dtype: torch.dtype) -> float:
    """Return the highest sum of exponentials to trust: one that its numbers, times values, can hold."""
    return 2.0**15 if dtype == torch.float16 else 2.0**64


@torch.library.custom_op("pullback::attend", mutates_args=())
def attend(q: Tensor, k: Tensor, v: Tensor, powers: Tensor | None) -> Tensor:
    """Queries [B, h, n, d], keys and values [B, h, N, d], sizes as `in_powers_of_two` gives them, or None: no sizes ->
    [B, n, h, d]."""
    with running_on(q):
        return attention(q, k, v, powers)


@attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, powers: Tensor | None) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], q.shape[3])


def running_on(x: Tensor) -> AbstractContextManager[Any]:
    """Return the context in which kernels start where x is. On a CPU they run in Triton's interpreter."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def in_powers_of_two(log_sizes: Tensor) -> Tensor:
    """Return log2 of the sizes [B, N] as the kernel reads them: float32, followed by -inf for keys that do not exist.

    A compiler does this once for all the blocks after a removal.
    """
    return F.pad(log_sizes.float() * LOG2E, (0, -log_sizes.shape[1] % SPARE + SPARE), value=-math.inf)


def attention(q: Tensor, k: Tensor, v: Tensor, powers: Tensor | None, chosen: Tiles | None = None) -> Tensor:
    """Do what `attend` says, with these tiles or those that are best."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    batch, heads, rows, width = q.shape
    count = k.shape[2]
    out = torch.empty(batch, rows, heads, width, dtype=q.dtype, device=q.device)
    own = tiles(batch, heads, rows, count) if chosen is None else chosen
    keys = min(own.keys, max(16, triton.next_power_of_2(count)))
    rest = count % keys
    sizes = q if powers is None else powers.contiguous()  # of no sizes a tensor that is not read
    grid = (triton.cdiv(rows, own.queries), heads, batch)
    _attention[grid](
        q, k, v, sizes, out, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], sizes.stride(0), rows, count,
        LOG2E / math.sqrt(width), D=width, QUERIES=own.queries, KEYS=keys,
        REST=max(16, triton.next_power_of_2(rest)) if rest else 0, SIZES=powers is not None,
        STEADY=own.steady, LIMIT=_limit(q.dtype), num_warps=own.warps, num_stages=own.stages,
    )  # fmt: skip
    return out


@triton.jit
def _attention(
    q, k, v, sizes, out, qb, qh, qn, kb, kh, kn, vb, vh, vn, sb, rows, count, scale,
    D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, REST: tl.constexpr, SIZES: tl.constexpr,
    STEADY: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """One program for some queries of one head of one image; grid (blocks of queries, heads, images)."""
    start = tl.program_id(0) * QUERIES
    head = tl.program_id(1)
    image = tl.program_id(2).to(tl.int64)
    k += image * kb + head * kh
    v += image * vb + head * vh
    if SIZES:
        sizes += image * sb
    row = start + tl.arange(0, QUERIES)
    channel = tl.arange(0, D)
    at = q + image * qb + head * qh + row[:, None] * qn + channel[None, :]
    queries = tl.load(at, mask=row[:, None] < rows, other=0.0)
    lowest = tl.full([QUERIES], float("-inf"), tl.float32)
    high = lowest
    if STEADY:
        first = _products(queries, k, kn, 0, count, FIRST_KEYS, D, True) * scale
        high = tl.max(first + _bias(sizes, 0, count, FIRST_KEYS, SIZES)[None, :], 1)
    acc, total = _all_keys(queries, k, v, sizes, kn, vn, count, scale, high, QUERIES, KEYS, REST, D, SIZES,
                           STEADY)  # fmt: skip
    if STEADY:  # noqa: SIM102 - a constant of the compiler
        if not (tl.max(tl.sum(total, 1), 0) < LIMIT):  # nor is NaN
            acc, total = _all_keys(queries, k, v, sizes, kn, vn, count, scale, lowest, QUERIES, KEYS, REST, D,
                                   SIZES, False)  # fmt: skip
    mean = acc / tl.sum(total, 1)[:, None]
    at = out + ((image * rows + row[:, None]) * tl.num_programs(1) + head) * D + channel[None, :]
    tl.store(at, mean.to(out.dtype.element_ty), mask=row[:, None] < rows)


@triton.jit
def _all_keys(
    queries, k, v, sizes, kn, vn, count, scale, high,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, REST: tl.constexpr, D: tl.constexpr, SIZES: tl.constexpr,
    STEADY: tl.constexpr,
):  # fmt: skip
    """All keys in turn: (sum of weighted values [M, D], sums of weights [M, 8])."""
    acc = tl.zeros([QUERIES, D], tl.float32)
    total = tl.zeros([QUERIES, 8], tl.float32)
    whole = count // KEYS * KEYS
    for first in tl.range(0, whole, KEYS):
        acc, total, high = _step(queries, k, v, sizes, kn, vn, first, count, scale, acc, total, high,
                                 KEYS, D, SIZES, STEADY, False)  # fmt: skip
    if REST > 0:
        acc, total, high = _step(queries, k, v, sizes, kn, vn, whole, count, scale, acc, total, high,
                                 REST, D, SIZES, STEADY, True)  # fmt: skip
    return acc, total


@triton.jit
def _products(queries, k, kn, first, count, KEYS: tl.constexpr, D: tl.constexpr, RAGGED: tl.constexpr):
    """Products [M, KEYS] with the keys from ``first`` on; RAGGED: fewer of them exist."""
    key = first + tl.arange(0, KEYS)
    at = k + key[:, None] * kn + tl.arange(0, D)[None, :]
    if RAGGED:
        keys = tl.load(at, mask=key[:, None] < count, other=0.0)
    else:
        keys = tl.load(at)
    return tl.dot(queries, tl.trans(keys), input_precision="ieee")


@triton.jit
def _bias(sizes, first, count, KEYS: tl.constexpr, SIZES: tl.constexpr):
    """What the sizes add [KEYS], -inf where there is no key."""
    key = first + tl.arange(0, KEYS)
    if SIZES:
        return tl.load(sizes + key)
    else:
        return tl.where(key < count, 0.0, float("-inf"))


@triton.jit
def _step(
    queries, k, v, sizes, kn, vn, first, count, scale, acc, total, high,
    KEYS: tl.constexpr, D: tl.constexpr, SIZES: tl.constexpr, STEADY: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """Take in KEYS keys from ``first`` on."""
    products = _products(queries, k, kn, first, count, KEYS, D, RAGGED)
    key = first + tl.arange(0, KEYS)
    at = v + key[:, None] * vn + tl.arange(0, D)[None, :]
    if RAGGED:
        values = tl.load(at, mask=key[:, None] < count, other=0.0)
    else:
        values = tl.load(at)
    if STEADY:
        shift = -high[:, None]
        if SIZES or RAGGED:
            shift = _bias(sizes, first, count, KEYS, SIZES)[None, :] - high[:, None]
        weights = tl.exp2(products * scale + shift)
    else:
        logits = products * scale
        if SIZES or RAGGED:
            logits += _bias(sizes, first, count, KEYS, SIZES)[None, :]
        higher = tl.maximum(high, tl.max(logits, 1))
        weights = tl.exp2(logits - higher[:, None])
        shrink = tl.exp2(high - higher)
        acc, total, high = acc * shrink[:, None], total * shrink[:, None], higher
    # Sums of every eighth column: where one thread has them all, no thread waits for another until the end.
    total += tl.sum(tl.reshape(weights, [weights.shape[0], KEYS // 8, 8]), 1)
    acc = tl.dot(weights.to(values.dtype), values, acc, input_precision="ieee")
    return acc, total, high
