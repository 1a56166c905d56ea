"""How products with an operator are executed: in which arithmetic, how many at a time, and recorded or not.

Three things that `JacobianOperator` decides for every product, in this order. The precision: float32 means float32,
TF32 is off unless asked for. The number of tangents per pass: as many as half the free memory holds, then half as many
whenever memory runs out. On a GPU, products of a shape that comes back are recorded once as a CUDA graph and replayed
without the cost of launching their kernels.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.backends import cudnn

from pullback.errors import NumericsError, PullbackError

# Arithmetic

PRECISIONS = ("float32", "tf32", "bf16")

ROUND_OFF = {"float64": 1e-10, "float32": 6e-6, "tf32": 3e-4, "bf16": 5e-3}
"""Relative standard error that rounding leaves in |J_t|_F^2, the squared norm of the columns of one token.

Measured against float64 on a GPU and a CPU (`benchmarks/coverage.py`): more than nine of ten blocks of a ViT-S lie
within twice these numbers, also at early layers, where rounding has the most blocks to grow in; at late layers the bars
are wider than they need to be. |J|_F^2, kappa and effective ranks average over more and lie well inside. float64 leaves
room for modes of close singular values: their small eigenproblems are solved in float64 whatever the products are in,
and here that is not a higher precision.
"""


def check_precision(precision: str) -> None:
    """Refuse a precision that does not exist."""
    if precision not in PRECISIONS:
        raise PullbackError(f"precision: expected one of {', '.join(PRECISIONS)}, got {precision!r}.")


def round_off_of(dtype: torch.dtype, precision: str = "float32") -> float:
    """The entry of `ROUND_OFF` for products in ``precision`` with tensors of ``dtype``.

    TF32 stands in for float32 products alone: float64 keeps its own. Tensors of 16 bits count as bf16.
    """
    if precision == "bf16" or dtype.itemsize < 4:
        return ROUND_OFF["bf16"]
    return ROUND_OFF["float64" if dtype == torch.float64 else precision]


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Switch TF32 on or off for matrix products and convolutions inside, and back to what it was on exit."""
    tf32 = precision != "float32"
    matmul = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    try:
        if cudnn.is_available():
            kept = {"enabled": cudnn.enabled, "benchmark": cudnn.benchmark, "deterministic": cudnn.deterministic}
            with cudnn.flags(**kept, allow_tf32=tf32):
                yield
        else:
            yield
    finally:
        torch.set_float32_matmul_precision(matmul)


# Memory


def tangents_that_fit(bytes_per_tangent: int, device: torch.device, share: float = 0.5) -> int:
    """Return how many tangents fit into this share of the free memory, at least one."""
    return max(1, int(share * free_bytes(device) / max(1, bytes_per_tangent)))


def apply_in_chunks(function: Callable[[Tensor], Tensor], stack: Tensor, chunk_size: int) -> tuple[Tensor, int]:
    """Apply a function to [B, K, ...] in slices of K; return the result and the slice size that worked.

    A slice that is too large for the memory is halved; what was computed before memory ran out is kept.
    """
    done: list[Tensor] = []
    start, count = 0, stack.shape[1]
    while start < count:
        stop = min(start + chunk_size, count)
        try:
            # columns arrive transposed; one copy here is cheaper than strided reads in every kernel after
            done.append(function(stack[:, start:stop].contiguous()))
            start = stop
        except (RuntimeError, MemoryError) as error:
            if not is_too_large(error) or stop - start == 1:
                raise
            chunk_size = max(1, (stop - start) // 2)
            if stack.device.type == "cuda":
                torch.cuda.empty_cache()
    return (done[0] if len(done) == 1 else torch.cat(done, 1)), chunk_size


def is_too_large(error: BaseException) -> bool:
    """Return whether memory ran out, or a CUDA kernel refused to start because it cannot count so many elements."""
    refused = (
        "CUDA error: invalid argument",
        "CUDA error: invalid configuration argument",
        "canUse32BitIndexMath",
        "INT_MAX elements",
    )
    return is_out_of_memory(error) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in refused)
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out. CUDA has a class for it; the CPU allocator raises a plain RuntimeError."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and "not enough memory" in str(error)
    )


def free_bytes(device: torch.device) -> int:
    """Return the memory that is free for new tensors on this device."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    try:
        with open("/proc/meminfo") as lines:
            fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


# CUDA graphs


class CapturedFunction:
    """A function on inputs shaped like ``example``, recorded as a CUDA graph. Each call copies its input and output.

    The first replay is compared with an ordinary call, so that nothing the recording may have missed goes unnoticed.
    """

    def __init__(self, function: Callable[[Tensor], Tensor], example: Tensor) -> None:
        self._input = example.clone()
        side = torch.cuda.Stream(example.device)
        side.wait_stream(torch.cuda.current_stream(example.device))
        with torch.cuda.stream(side):  # libraries choose their kernels and workspaces before the recording
            function(self._input)
            expected = function(self._input)
        torch.cuda.current_stream(example.device).wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._output = function(self._input)
        self._check(expected)

    def _check(self, expected: Tensor) -> None:
        """Replay once and raise an error if the result differs from an ordinary call."""
        self._graph.replay()
        error = (self._output - expected).double().norm() / expected.double().norm().clamp_min(1e-300)
        if not error <= 1e-3:
            raise NumericsError(
                f"capture: the recorded product differs from the ordinary one by {error.item():.1e}, relative. "
                "Pass capture=False to JacobianOperator, and please report it."
            )

    def __call__(self, value: Tensor) -> Tensor:
        self._input.copy_(value)
        self._graph.replay()
        return self._output.clone()
