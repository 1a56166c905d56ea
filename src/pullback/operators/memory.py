"""How many tangents fit, and what to do when the guess was wrong."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import Tensor


def free_bytes(device: torch.device) -> int:
    """Memory that a new allocation may hope for on this device."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    try:
        with open("/proc/meminfo") as lines:
            fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def tangents_that_fit(bytes_per_tangent: int, device: torch.device, share: float = 0.5) -> int:
    return max(1, int(share * free_bytes(device) / max(1, bytes_per_tangent)))


def is_out_of_memory(error: BaseException) -> bool:
    """CUDA has a class for it; the CPU allocator raises a plain RuntimeError."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and "not enough memory" in str(error)
    )


def is_too_large(error: BaseException) -> bool:
    """Out of memory, or so large that a CUDA kernel cannot count its elements and refuses to start."""
    refused = ("CUDA error: invalid argument", "CUDA error: invalid configuration argument", "canUse32BitIndexMath")
    return is_out_of_memory(error) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in refused)
    )


def apply_in_chunks(function: Callable[[Tensor], Tensor], stack: Tensor, chunk_size: int) -> tuple[Tensor, int]:
    """function on [B, K, ...] in slices of K, halving the slice when it was too large; also the slice size that worked.

    What was computed before memory ran out is kept.
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
