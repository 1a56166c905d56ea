"""Output metrics H = L L^T: the pullback J^T H J is the Euclidean one of L^T J.

(The paper writes LJ, which is right only for symmetric L: with H = L L^T, J^T H J = (L^T J)^T (L^T J).)
L is any M x k factor, so H may be semidefinite. It may depend on the output at the base point, is evaluated there once
per sample and held constant.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pullback.errors import DecoderError

# the factor L itself, [M, k] or [B, M, k], or a function of the base output [B, M] that returns one
OutputMetric = Tensor | Callable[[Tensor], Tensor]


def factor_at(metric: OutputMetric, output: Tensor) -> Tensor:
    """L [B, M, k] at the base output [B, M]."""
    factor = metric(output.detach()) if callable(metric) else metric
    if not isinstance(factor, Tensor):
        raise DecoderError(f"output_metric: expected a factor L as a tensor, got {type(factor).__name__}.")
    factor = factor.detach().to(output)
    if factor.ndim == 2:
        factor = factor.expand(len(output), *factor.shape)
    if factor.ndim != 3 or factor.shape[:2] != output.shape:
        raise DecoderError(
            f"output_metric: expected L with shape [{output.shape[1]}, k] or {[*output.shape, 'k']}, "
            f"got {list(factor.shape)}."
        )
    if not torch.isfinite(factor).all():
        raise DecoderError("output_metric: the factor L holds NaN or infinity.")
    return factor
