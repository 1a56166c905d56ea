"""How much each token can move the output: block norms |J_:,t|_F over all output directions, and a quick imp*.

Squared, block norms are unbiased and add up to |J|_F^2. For random signs u in output space the block of J^T u that
belongs to token t has E |(J^T u)_t|^2 = |J_t|_F^2: VJPs only, and one probe serves every token. With output directions
Q whose pullback is known (`OutputSpace`), that part is exact and only (I - Q Q^T) u is sampled.

`quick_importance` is imp* for training, where thousands of targets a minute matter more than their fourth digit:

    Y <- orth(J J^T Y) ``rounds`` times, Y [m, w] random;   W = J^T Y,   W^T W = Z diag(theta) Z^T
    imp_t^2 = sum_{j <= r} |(W Z)_t,j|^2

This is orthogonal iteration in output space with w > r columns: a fixed number of products, no test of convergence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pullback.checks import whole_number
from pullback.errors import RankError, ShapeError
from pullback.operators import LinearOperator
from pullback.randnla import Estimate, OutputSpace, Streams
from pullback.randnla.orthonormal import gram, orthonormalize


@dataclass(frozen=True)
class BlockNorms:
    """Squared block norms and their sum, from the same probes."""

    squared: Estimate  # [B, N]
    total: Estimate  # [B], |J|_F^2


def block_norms(
    op: LinearOperator,
    tokens: int,
    *,
    num_probes: int = 32,
    known: OutputSpace | None = None,
    streams: Streams,
) -> BlockNorms:
    """Estimate the squared block norms of J from ``num_probes`` VJPs.

    ``known``: output directions whose part is exact; the estimate is unbiased if they do not depend on these probes.
    """
    whole_number("num_probes", num_probes, least=2, expected="at least 2, for an error bar")
    _check_tokens(tokens, op.cols)
    probes = streams.rademacher(op.rows, num_probes, op.dtype).to(op.device)
    pulled = op.T @ probes
    exactly = torch.zeros(op.batch, tokens, dtype=torch.float64, device=op.device)
    if known is not None:
        pulled = pulled - known.pulled @ (known.basis.mT @ probes)
        exactly = _block_energies(known.pulled, tokens).sum(-1)
    samples = _block_energies(pulled, tokens)
    return BlockNorms(
        squared=Estimate.from_samples(samples, exactly, round_off=op.round_off),
        total=Estimate.from_samples(samples.sum(1), exactly.sum(1), round_off=op.round_off),
    )


def exact_block_norms(column_energies: Tensor, tokens: int, *, round_off: float) -> BlockNorms:
    """Return block norms from the squared norms [B, N*D] of all columns of J, which the exact route has at hand.

    ``round_off``: of the operator whose columns these are.
    """
    _check_tokens(tokens, column_energies.shape[-1])
    squared = column_energies.double().unflatten(-1, (tokens, -1)).sum(-1)
    return BlockNorms(
        squared=Estimate.exact(squared, round_off=round_off),
        total=Estimate.exact(squared.sum(-1), round_off=round_off),
    )


def _block_energies(columns: Tensor, tokens: int) -> Tensor:
    """[B, N*D, k] -> [B, N, k], summed in float64 without a float64 copy of the columns."""
    return torch.linalg.vector_norm(columns.unflatten(1, (tokens, -1)), dim=2, dtype=torch.float64).square()


def _check_tokens(tokens: int, cols: int) -> None:
    if tokens < 1 or cols % tokens:
        raise ShapeError(
            f"tokens: expected the N of features [B, N, D] with N * D = {cols} columns, got {tokens}, which does not "
            "divide it. Pass features.shape[1]."
        )


def quick_importance(
    op: LinearOperator, tokens: int, rank: int, *, width: int = 32, rounds: int = 3, streams: Streams
) -> Tensor:
    """Compute imp* [B, N] to a few in a thousand, by (2 rounds + 1) ``width`` products. Leading modes lose least."""
    if not rank <= width <= op.rows:
        raise RankError(f"width: expected rank <= width <= {op.rows} outputs, got {width} at rank {rank}.")
    columns = orthonormalize(streams.gaussian(op.rows, width, op.dtype).to(op.device))
    for _ in range(rounds):
        columns = orthonormalize(op @ (op.T @ columns))
    pulled = op.T @ columns
    turned = torch.linalg.eigh(gram(pulled, pulled)).eigenvectors.flip(-1)[..., :rank].to(pulled.dtype)
    return (pulled @ turned).unflatten(1, (tokens, -1)).square().sum((2, 3)).sqrt()
