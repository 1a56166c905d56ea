"""Triton kernels in tests: on a GPU where there is one, otherwise in Triton's interpreter."""

from __future__ import annotations

import os
import sys

import numpy
import torch

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
_TOO_LATE = "triton" in sys.modules  # it reads the variable when it is imported
if not (ON_GPU or _TOO_LATE):
    os.environ["TRITON_INTERPRET"] = "1"


def why_not() -> str | None:
    """Say why kernels cannot run here, or return None. Triton is installed."""
    import triton

    if ON_GPU:
        return None
    if _TOO_LATE:
        return "Triton was imported before it was told to interpret: run these tests alone"
    if tuple(map(int, numpy.__version__.split(".")[:2])) >= (2, 4) and triton.__version__ < "3.7":
        return "the interpreter of Triton 3.6 takes arrays of one element for numbers, NumPy from 2.4 on does not"
    return None
