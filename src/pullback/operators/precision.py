"""Which arithmetic the products use. Float32 means float32: TF32 is off unless asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.backends import cudnn

from pullback.errors import PullbackError

PRECISIONS = ("float32", "tf32", "bf16")

ROUND_OFF = {"float64": 1e-10, "float32": 1e-6, "tf32": 2e-4, "bf16": 5e-3}
"""Relative standard error that rounding leaves in |J_t|_F^2, the squared norm of the columns of one token.

Measured against float64 (`benchmarks/coverage.py`): more than nine of ten blocks of a ViT lie within twice these
numbers, whatever the depth. The unit round-offs of TF32 and bf16 are 5e-4 and 2e-3: much of it averages out over a
block, but in bf16 every intermediate result is rounded as well. |J|_F^2, kappa and effective ranks average over more
and lie well inside. float64 leaves room for modes of close singular values: their small eigenproblems are solved in
float64 whatever the products are in, and here that is not a higher precision.
"""


def check_precision(precision: str) -> None:
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
