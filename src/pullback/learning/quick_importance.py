"""Importance for training, where thousands of targets a minute matter more than their fourth digit.

    Y <- orth(J J^T Y) ``rounds`` times, Y [m, w] random;   W = J^T Y,   W^T W = Z diag(theta) Z^T
    imp_t^2 = sum_{j <= r} |(W Z)_t,j|^2

Orthogonal iteration in output space with w > r columns: a fixed number of products and no test of convergence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pullback.errors import RankError
from pullback.operators import LinearOperator
from pullback.randnla import Streams
from pullback.randnla.orthonormal import gram, orthonormalize


def quick_importance(
    op: LinearOperator, tokens: int, rank: int, *, width: int = 32, rounds: int = 3, streams: Streams
) -> Tensor:
    """imp* [B, N] to a few in a thousand, for (2 rounds + 1) ``width`` products. Leading modes lose least."""
    if not rank <= width <= op.rows:
        raise RankError(f"width: expected rank <= width <= {op.rows} outputs, got {width} at rank {rank}.")
    columns = orthonormalize(streams.gaussian(op.rows, width, op.dtype).to(op.device))
    for _ in range(rounds):
        columns = orthonormalize(op @ (op.T @ columns))
    pulled = op.T @ columns
    turned = torch.linalg.eigh(gram(pulled, pulled)).eigenvectors.flip(-1)[..., :rank].to(pulled.dtype)
    return (pulled @ turned).unflatten(1, (tokens, -1)).square().sum((2, 3)).sqrt()
