"""Triton kernels for attention whose keys stand for several tokens: softmax(q k^T / sqrt(d) + log s) v, forward only.

`Kernel.form` chooses the way through one sequence:

    online   flash attention 2: a running maximum; sums are rescaled to it at every block of keys. log2 s is added in
             the multiply-add that scales the logits.
    steady   no running maximum: exponents are taken relative to the highest of a query's first 16 logits. A power of
             two that is off by 2^60 costs no digits in float32 or bfloat16, so the result is as exact as with the true
             maximum until a sum passes `_limit`; a program that sees this starts again as "online". The loop has
             neither maxima, nor shuffles between threads, nor rescaling.
    ahead    "steady", and the logits of the next block are started before the exponentials of this one, so that one
             group of warps keeps the matrix units busy meanwhile. Its reference is the first whole block.
    short    all logits of a query at once, for few keys: one plain softmax over one to three pieces of 16 to 256 keys.

What bounds them at d = 64 on an H200, for each pair of query and key (12 heads, 686 tokens, batch 64: 361 million
pairs): 256 matrix operations (0.117 ms at 790 TFLOP/s), one exponential (0.098 ms at 16 a clock and multiprocessor),
and what else is issued: 8 instructions in all with "steady" (0.10 ms at 4 warps a clock), 11 with "online". Device
memory takes 0.06 ms (q, k, v and the result once), but every block of queries reads all keys and values from L2: 1.5 GB
with 64 queries, 0.8 GB with 128. Overlapped, this is 0.15 ms; one after the other, 0.3. Adding log s is one of the 8
instructions; multiplying exponentials by s instead would be one as well, and needs its own mask beyond the last key.
``polynomial`` = 2 or 4 moves every second or fourth exponential from the special function unit to multiply-adds.

Keys after the last whole step form one or two smaller steps (`tail`), so that 129 keys cost 144 and not 192 or 256.
Every tensor may be strided, except that channels of a head are adjacent; the result is [B, n, heads * d], contiguous.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

LOG2E = math.log2(math.e)
MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds a float32 to a whole number
FIRST_KEYS = tl.constexpr(16)  # of the reference of "steady"
SPARE = 128  # the longest step: rows of sizes reach beyond the last key, so that no step asks where it ends


@dataclass(frozen=True)
class Kernel:
    """One compiled form. ``tma``: the copy engine fetches keys and values. ``specialized``: by warps of their own;
    for sm_90, Triton 3.6 refuses that at some sizes and makes the same code as without it at others."""

    form: str = "online"
    queries: int = 128  # of one program
    keys: int = 64  # of one step
    warps: int = 4
    stages: int = 2
    polynomial: int = 0
    tma: bool = False
    specialized: bool = False
    registers: int | None = None  # of one thread, at most: with 128 of them twice as many programs as with 255

    def __str__(self) -> str:
        more = f" poly/{self.polynomial}" * (self.polynomial > 0) + " tma" * self.tma + " ws" * self.specialized
        more += f" r{self.registers}" if self.registers else ""
        keys = "" if self.form == "short" else f"x{self.keys}"
        return f"{self.form}{more} {self.queries}{keys} w{self.warps} s{self.stages}"

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, sizes: Tensor) -> Tensor:
        """Queries [B, h, n, d], keys and values [B, h, N, d], sizes of `in_powers_of_two` -> [B, n, h * d]."""
        batch, heads, rows, width = q.shape
        count = k.shape[2]
        if any(x.stride(-1) != 1 for x in (q, k, v)):
            raise ValueError(f"expected adjacent channels, got strides {[x.stride() for x in (q, k, v)]}")
        if width > 128 or width % 16:
            raise ValueError(f"expected 16, 32, ..., 128 channels of a head, got {width}")
        if self.form == "ahead" and not self.tma and count < self.keys:
            raise ValueError(f"expected at least {self.keys} keys, got {count}")
        out = torch.empty(batch, rows, heads * width, dtype=q.dtype, device=q.device)
        wide = triton.next_power_of_2(width)
        options = {"num_warps": self.warps, "num_stages": self.stages, "maxnreg": self.registers}
        shape = {"D": width, "WIDE": wide, "BLOCK_M": self.queries}
        strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], out.stride(0), sizes.stride(0))
        scale = LOG2E / math.sqrt(width)
        grid = (triton.cdiv(rows, self.queries), heads, batch)
        if self.form == "short":
            one, two, three = pieces(count)
            _short[grid](q, k, v, sizes, out, *strides, rows, count, scale, **shape, ONE=one, TWO=two, THREE=three,
                         **options)  # fmt: skip
        elif self.tma:
            if width != wide:
                raise ValueError(f"expected 16, 32, 64 or 128 channels of a head, got {width}")
            sizes_of = ((q, self.queries), (k, self.keys), (v, self.keys), (k, FIRST_KEYS.value))
            blocks = [descriptor(x, block) for x, block in sizes_of]
            _by_descriptors[grid](*blocks, sizes, out, out.stride(0), sizes.stride(0), rows, count, scale,
                                  **shape, BLOCK_N=self.keys, FORM=self.form, POLYNOMIAL=self.polynomial,
                                  SPECIALIZED=self.specialized, LIMIT=_limit(q.dtype), **options)  # fmt: skip
        else:
            first, second = tail(count, self.keys)
            _by_pointers[grid](q, k, v, sizes, out, *strides, rows, count, scale, **shape, BLOCK_N=self.keys,
                               FIRST=first, SECOND=second, FORM=self.form, POLYNOMIAL=self.polynomial,
                               LIMIT=_limit(q.dtype), **options)  # fmt: skip
        return out

    def fits(self, rows: int, count: int) -> bool:
        """Whether it is worth a trial for so many queries and keys."""
        if self.form == "short":
            return count <= 304
        return self.keys <= count and (self.queries <= 64 or self.queries < 2 * rows)


def in_powers_of_two(log_sizes: Tensor) -> Tensor:
    """Return log2 of the sizes [B, N] as kernels read them: float32, followed by -inf for keys that do not exist.

    Sizes change with a removal of tokens, so that this is done once for all the blocks that follow.
    """
    count = log_sizes.shape[1]
    return F.pad(log_sizes.float() * LOG2E, (0, -count % SPARE + SPARE), value=-math.inf)


def descriptor(x: Tensor, block: int) -> TensorDescriptor:
    """Describe [B, h, n, d] as [B, n, h, d] to the copy engine, ``block`` rows of one head at a time."""
    batch, heads, rows, width = x.shape
    moves = [x.stride(0), x.stride(2), x.stride(1), 1]
    return TensorDescriptor(x, [batch, rows, heads, width], moves, [1, block, 1, width])


def tail(count: int, block: int) -> tuple[int, int]:
    """Return the sizes of the one or two smaller steps after whole blocks: powers of two from 16 up, 0: none."""
    rest = count % block
    if rest == 0:
        return 0, 0
    whole = max(16, triton.next_power_of_2(rest))
    half = whole // 2
    if half < rest and half >= 32 and (left := max(16, triton.next_power_of_2(rest - half))) < half:
        return half, left
    return whole, 0


def pieces(count: int) -> tuple[int, int, int]:
    """Return three powers of two, or 0, whose sum is at least ``count`` and not much above."""
    found: list[int] = []
    left = count
    while left > 0:
        size = max(16, triton.next_power_of_2(left))
        if len(found) < 2 and size > 32 and size - left >= 16:
            size //= 2
        found.append(size)
        left -= size
    return (*found, 0, 0, 0)[:3]


def _limit(dtype: torch.dtype) -> float:
    """Return the highest sum of exponentials that "steady" trusts: one that its numbers, times values, can hold."""
    return 2.0**15 if dtype == torch.float16 else 2.0**64


@triton.jit
def _load(base, stride, start, count, BLOCK: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, RAGGED: tl.constexpr):
    """Rows start, ..., start + BLOCK - 1 of [count, D]; zeros beyond, if ``RAGGED`` says that it may happen."""
    row = start + tl.arange(0, BLOCK)
    column = tl.arange(0, WIDE)
    at = base + row[:, None] * stride + column[None, :]
    if RAGGED and D < WIDE:
        return tl.load(at, mask=(row[:, None] < count) & (column[None, :] < D), other=0.0)
    elif RAGGED:
        return tl.load(at, mask=row[:, None] < count, other=0.0)
    elif D < WIDE:
        return tl.load(at, mask=column[None, :] < D, other=0.0)
    else:
        return tl.load(at)


@triton.jit
def _power(x):
    """2^x by multiply-adds, to 1e-4, for x between -126 and 126; others as the nearest of these."""
    x = tl.minimum(tl.maximum(x, -126.0), 126.0)
    rounded = x + MAGIC
    f = x - (rounded - MAGIC)  # -0.5 to 0.5
    y = 0.0551716436 * f + 0.2426111202
    y = y * f + 0.6932609902
    y = y * f + 0.9999280738
    return ((rounded.to(tl.int32, bitcast=True) << 23) + y.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def _exp2(x, POLYNOMIAL: tl.constexpr):
    """2^x, of which every second or fourth column group by polynomial. The groups are those of one thread."""
    if POLYNOMIAL == 2 and x.shape[1] >= 16:
        parts = tl.permute(tl.reshape(x, [x.shape[0], x.shape[1] // 16, 2, 8]), (0, 1, 3, 2))
        a, b = tl.split(parts)
        return tl.reshape(tl.permute(tl.join(tl.exp2(a), _power(b)), (0, 1, 3, 2)), x.shape)
    elif POLYNOMIAL == 4 and x.shape[1] >= 32:
        parts = tl.permute(tl.reshape(x, [x.shape[0], x.shape[1] // 32, 2, 2, 8]), (0, 1, 4, 2, 3))
        even, odd = tl.split(parts)
        a, b = tl.split(odd)
        whole = tl.join(tl.exp2(even), tl.join(tl.exp2(a), _power(b)))
        return tl.reshape(tl.permute(whole, (0, 1, 3, 4, 2)), x.shape)
    else:
        return tl.exp2(x)


@triton.jit
def _dot(q, k):
    """Products of queries [M, D] and keys [N, D]: [M, N]."""
    return tl.dot(q, tl.trans(k), input_precision="ieee")


@triton.jit
def _by_thread(p):
    """Sums [M, 8] of every eighth column: where one thread has them all, no thread waits for another."""
    return tl.sum(tl.reshape(p, [p.shape[0], p.shape[1] // 8, 8]), 1)


@triton.jit
def _take(logits, v, bias, acc, total, high, scale, FORM: tl.constexpr, POLYNOMIAL: tl.constexpr):
    """Take in one block of keys, whose products with the queries are ``logits``."""
    if FORM == "online":
        x = logits * scale + bias[None, :]
        higher = tl.maximum(high, tl.max(x, 1))
        p = _exp2(x - higher[:, None], POLYNOMIAL)
        shrink = tl.exp2(high - higher)
        acc, total, high = acc * shrink[:, None], total * shrink[:, None], higher
    else:
        p = _exp2(logits * scale + (bias[None, :] - high[:, None]), POLYNOMIAL)
    total += _by_thread(p)
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
    return acc, total, high


@triton.jit
def _rest(
    q, k, v, sizes, k_stride, v_stride, start, count, acc, total, high, scale,
    BLOCK: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Take in the keys from ``start`` on, fewer than BLOCK or as many."""
    keys = _load(k, k_stride, start, count, BLOCK, D, WIDE, True)
    values = _load(v, v_stride, start, count, BLOCK, D, WIDE, True)
    bias = tl.load(sizes + start + tl.arange(0, BLOCK))
    return _take(_dot(q, keys), values, bias, acc, total, high, scale, FORM, 0)


@triton.jit
def _walk(
    q, k, v, sizes, k_stride, v_stride, high, count, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    D: tl.constexpr, WIDE: tl.constexpr, FORM: tl.constexpr, POLYNOMIAL: tl.constexpr,
):  # fmt: skip
    """All keys in turn: (sum of values [M, D], sums of weights [M, 8])."""
    acc = tl.zeros([BLOCK_M, WIDE], tl.float32)
    total = tl.zeros([BLOCK_M, 8], tl.float32)
    whole = count // BLOCK_N * BLOCK_N
    done = 0
    if FORM == "ahead":
        logits = _dot(q, _load(k, k_stride, 0, count, BLOCK_N, D, WIDE, False))
        high = tl.max(logits * scale + tl.load(sizes + tl.arange(0, BLOCK_N))[None, :], 1)
        done = whole - BLOCK_N
        for start in tl.range(0, done, BLOCK_N):
            keys = _load(k, k_stride, start + BLOCK_N, count, BLOCK_N, D, WIDE, False)
            values = _load(v, v_stride, start, count, BLOCK_N, D, WIDE, False)
            bias = tl.load(sizes + start + tl.arange(0, BLOCK_N))
            following = _dot(q, keys)
            acc, total, high = _take(logits, values, bias, acc, total, high, scale, FORM, POLYNOMIAL)
            logits = following
        values = _load(v, v_stride, done, count, BLOCK_N, D, WIDE, False)
        bias = tl.load(sizes + done + tl.arange(0, BLOCK_N))
        acc, total, high = _take(logits, values, bias, acc, total, high, scale, FORM, POLYNOMIAL)
    else:
        for start in tl.range(0, whole, BLOCK_N):
            keys = _load(k, k_stride, start, count, BLOCK_N, D, WIDE, False)
            values = _load(v, v_stride, start, count, BLOCK_N, D, WIDE, False)
            bias = tl.load(sizes + start + tl.arange(0, BLOCK_N))
            acc, total, high = _take(_dot(q, keys), values, bias, acc, total, high, scale, FORM, POLYNOMIAL)
    if FIRST > 0:
        acc, total, high = _rest(q, k, v, sizes, k_stride, v_stride, whole, count, acc, total, high, scale,
                                 FIRST, D, WIDE, FORM)  # fmt: skip
    if SECOND > 0:
        acc, total, high = _rest(q, k, v, sizes, k_stride, v_stride, whole + FIRST, count, acc, total, high, scale,
                                 SECOND, D, WIDE, FORM)  # fmt: skip
    return acc, total


@triton.jit
def _beyond(total, LIMIT: tl.constexpr):
    """Whether a sum of weights is too high to be trusted, or not a number."""
    return not (tl.max(tl.sum(total, 1), 0) < LIMIT)


@triton.jit
def _write(out, acc, total, row, head, rows, D: tl.constexpr, WIDE: tl.constexpr):
    """The mean of the values, at the places of this head in [rows, heads * D]."""
    column = tl.arange(0, WIDE)
    mean = acc / tl.sum(total, 1)[:, None]
    at = out + row[:, None] * (tl.num_programs(1) * D) + head * D + column[None, :]
    tl.store(at, mean.to(out.dtype.element_ty), mask=(row[:, None] < rows) & (column[None, :] < D))


@triton.jit
def _by_pointers(
    q, k, v, sizes, out, qb, qh, qn, kb, kh, kn, vb, vh, vn, ob, sb, rows, count, scale,
    D: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr, FORM: tl.constexpr, POLYNOMIAL: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """One program for BLOCK_M queries of one head of one image; grid (blocks of queries, heads, images)."""
    start = tl.program_id(0) * BLOCK_M
    head = tl.program_id(1)
    image = tl.program_id(2).to(tl.int64)
    k += image * kb + head * kh
    v += image * vb + head * vh
    sizes += image * sb
    block = _load(q + image * qb + head * qh, qn, start, rows, BLOCK_M, D, WIDE, True)
    lowest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    high = lowest
    if FORM == "steady":
        keys = _load(k, kn, 0, count, FIRST_KEYS, D, WIDE, True)
        high = tl.max(_dot(block, keys) * scale + tl.load(sizes + tl.arange(0, FIRST_KEYS))[None, :], 1)
    acc, total = _walk(block, k, v, sizes, kn, vn, high, count, scale, BLOCK_M, BLOCK_N, FIRST, SECOND,
                       D, WIDE, FORM, POLYNOMIAL)  # fmt: skip
    if FORM != "online":  # noqa: SIM102 - a constant of the compiler
        if _beyond(total, LIMIT):
            acc, total = _walk(block, k, v, sizes, kn, vn, lowest, count, scale, BLOCK_M, BLOCK_N, FIRST, SECOND,
                               D, WIDE, "online", 0)  # fmt: skip
    _write(out + image * ob, acc, total, start + tl.arange(0, BLOCK_M), head, rows, D, WIDE)


@triton.jit
def _fetch(x, image, start, head, BLOCK: tl.constexpr, D: tl.constexpr):
    """Rows [BLOCK, D] of one head, zeros beyond the last."""
    return tl.reshape(x.load([image, start, head, 0]), [BLOCK, D])


@triton.jit
def _walk_descriptors(
    q, k, v, sizes, image, head, high, count, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr,
    FORM: tl.constexpr, POLYNOMIAL: tl.constexpr, SPECIALIZED: tl.constexpr,
):  # fmt: skip
    """`_walk` with the copy engine."""
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    total = tl.zeros([BLOCK_M, 8], tl.float32)
    if FORM == "ahead":
        logits = _dot(q, _fetch(k, image, 0, head, BLOCK_N, D))
        high = tl.max(logits * scale + tl.load(sizes + tl.arange(0, BLOCK_N))[None, :], 1)
        last = (count - 1) // BLOCK_N * BLOCK_N
        for start in tl.range(0, last, BLOCK_N, warp_specialize=SPECIALIZED):
            keys = _fetch(k, image, start + BLOCK_N, head, BLOCK_N, D)
            values = _fetch(v, image, start, head, BLOCK_N, D)
            bias = tl.load(sizes + start + tl.arange(0, BLOCK_N))
            following = _dot(q, keys)
            acc, total, high = _take(logits, values, bias, acc, total, high, scale, FORM, POLYNOMIAL)
            logits = following
        values = _fetch(v, image, last, head, BLOCK_N, D)
        bias = tl.load(sizes + last + tl.arange(0, BLOCK_N))
        acc, total, high = _take(logits, values, bias, acc, total, high, scale, FORM, POLYNOMIAL)
    else:
        for start in tl.range(0, count, BLOCK_N, warp_specialize=SPECIALIZED):
            keys = _fetch(k, image, start, head, BLOCK_N, D)
            values = _fetch(v, image, start, head, BLOCK_N, D)
            bias = tl.load(sizes + start + tl.arange(0, BLOCK_N))
            acc, total, high = _take(_dot(q, keys), values, bias, acc, total, high, scale, FORM, POLYNOMIAL)
    return acc, total


@triton.jit
def _by_descriptors(
    q, k, v, few, sizes, out, ob, sb, rows, count, scale,
    D: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    FORM: tl.constexpr, POLYNOMIAL: tl.constexpr, SPECIALIZED: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """`_by_pointers` with descriptors of [B, n, heads, D], blocks [1, BLOCK, 1, D]. ``few``: keys, 16 at a time."""
    start = tl.program_id(0) * BLOCK_M
    head = tl.program_id(1)
    image = tl.program_id(2)
    sizes += image.to(tl.int64) * sb
    block = _fetch(q, image, start, head, BLOCK_M, D)
    lowest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    high = lowest
    if FORM == "steady":
        keys = _fetch(few, image, 0, head, FIRST_KEYS, D)
        high = tl.max(_dot(block, keys) * scale + tl.load(sizes + tl.arange(0, FIRST_KEYS))[None, :], 1)
    acc, total = _walk_descriptors(block, k, v, sizes, image, head, high, count, scale, BLOCK_M, BLOCK_N, D,
                                   FORM, POLYNOMIAL, SPECIALIZED)  # fmt: skip
    if FORM != "online":  # noqa: SIM102 - a constant of the compiler
        if _beyond(total, LIMIT):
            acc, total = _walk_descriptors(block, k, v, sizes, image, head, lowest, count, scale, BLOCK_M, BLOCK_N, D,
                                           "online", 0, False)  # fmt: skip
    _write(out + image.to(tl.int64) * ob, acc, total, start + tl.arange(0, BLOCK_M), head, rows, D, WIDE)


@triton.jit
def _short(
    q, k, v, sizes, out, qb, qh, qn, kb, kh, kn, vb, vh, vn, ob, sb, rows, count, scale,
    D: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr,
    ONE: tl.constexpr, TWO: tl.constexpr, THREE: tl.constexpr,
):  # fmt: skip
    """All logits at once: keys 0 to ONE - 1, then TWO, then THREE of them, the last piece ragged."""
    start = tl.program_id(0) * BLOCK_M
    head = tl.program_id(1)
    image = tl.program_id(2).to(tl.int64)
    k += image * kb + head * kh
    v += image * vb + head * vh
    sizes += image * sb
    block = _load(q + image * qb + head * qh, qn, start, rows, BLOCK_M, D, WIDE, True)
    one = _load(k, kn, 0, count, ONE, D, WIDE, TWO == 0)
    x1 = _dot(block, one) * scale + tl.load(sizes + tl.arange(0, ONE))[None, :]
    high = tl.max(x1, 1)
    if TWO > 0:
        two = _load(k, kn, ONE, count, TWO, D, WIDE, THREE == 0)
        x2 = _dot(block, two) * scale
        x2 += tl.load(sizes + ONE + tl.arange(0, TWO))[None, :]
        high = tl.maximum(high, tl.max(x2, 1))
    if THREE > 0:
        three = _load(k, kn, ONE + TWO, count, THREE, D, WIDE, True)
        x3 = _dot(block, three) * scale
        x3 += tl.load(sizes + ONE + TWO + tl.arange(0, THREE))[None, :]
        high = tl.maximum(high, tl.max(x3, 1))
    p1 = tl.exp2(x1 - high[:, None])
    total = _by_thread(p1)
    values = _load(v, vn, 0, count, ONE, D, WIDE, TWO == 0)
    acc = tl.dot(p1.to(values.dtype), values, input_precision="ieee")
    if TWO > 0:
        p2 = tl.exp2(x2 - high[:, None])
        total += _by_thread(p2)
        values = _load(v, vn, ONE, count, TWO, D, WIDE, THREE == 0)
        acc = tl.dot(p2.to(values.dtype), values, acc, input_precision="ieee")
    if THREE > 0:
        p3 = tl.exp2(x3 - high[:, None])
        total += _by_thread(p3)
        values = _load(v, vn, ONE + TWO, count, THREE, D, WIDE, True)
        acc = tl.dot(p3.to(values.dtype), values, acc, input_precision="ieee")
    _write(out + image * ob, acc, total, start + tl.arange(0, BLOCK_M), head, rows, D, WIDE)
