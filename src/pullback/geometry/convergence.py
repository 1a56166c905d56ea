"""How fast power iteration finds the task subspace: the paper's convergence table (after Theorem 3).

The paper prints errors of 0.2 to 0.8 at "q = 0". A random subspace of dimension r in R^{N D} has error near 1, so its q
counts the rounds after a first product with J^T J. Both counts are given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pullback.operators import LinearOperator
from pullback.randnla import Streams
from pullback.randnla.orthonormal import qr_basis


@dataclass(frozen=True)
class ConvergenceRow:
    """After ``rounds`` products with J^T J in all; ``paper_q`` = rounds - 1 (None before the first)."""

    rounds: int
    paper_q: int | None
    alignment_error: Tensor  # [B], 1 - |V_hat^T V|_F^2 / r
    gradient_signal_ratio: Tensor  # [B], |J v_1|^2 N D / |J|_F^2: 1 for a random direction (Corollary `cor:gsr`)


def convergence_table(
    op: LinearOperator,
    reference: Tensor,
    total: Tensor,
    *,
    paper_q: tuple[int, ...] = (0, 2, 5),
    streams: Streams,
) -> tuple[ConvergenceRow, ...]:
    """Power iteration from a Gaussian start against reference modes [B, n, r]; total [B] is |J|_F^2.

    Costs (max q + 1) r pairs and one JVP per sample.
    """
    wanted = {0, *(q + 1 for q in paper_q)}
    columns = qr_basis(streams.gaussian(op.cols, reference.shape[-1], op.dtype))
    rows = []
    for rounds in range(max(wanted) + 1):
        last = rounds == max(wanted)
        image = op @ (columns[..., :1] if last else columns)
        if rounds in wanted:
            overlap = (columns.mT @ reference).square().sum((1, 2)) / reference.shape[-1]
            signal = image[..., 0].double().square().sum(1) * op.cols / total
            rows.append(ConvergenceRow(rounds, rounds - 1 if rounds else None, 1 - overlap.double(), signal))
        if not last:
            columns = qr_basis(op.T @ image)
    return tuple(rows)


def join_tables(tables: Sequence[tuple[ConvergenceRow, ...]]) -> tuple[ConvergenceRow, ...]:
    """The tables of several batches as one."""
    return tuple(
        ConvergenceRow(
            rows[0].rounds,
            rows[0].paper_q,
            torch.cat([row.alignment_error for row in rows]),
            torch.cat([row.gradient_signal_ratio for row in rows]),
        )
        for rows in zip(*tables, strict=True)
    )
