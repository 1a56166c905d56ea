"""Which arithmetic the products use. Float32 means float32: TF32 is off unless asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.backends import cudnn

from pullback.errors import PullbackError

PRECISIONS = ("float32", "tf32", "bf16")


def check_precision(precision: str) -> None:
    if precision not in PRECISIONS:
        raise PullbackError(f"precision: expected one of {', '.join(PRECISIONS)}, got {precision!r}.")


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """TF32 on or off for matrix products and convolutions inside, as it was before outside."""
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
