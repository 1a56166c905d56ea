"""Lanczos tridiagonalisation of a symmetric operator, many starts at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def lanczos(apply: Callable[[Tensor], Tensor], start: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Diagonals alpha [B, k, s] and off-diagonals beta [B, k, s - 1] (float64) of Q^T A Q, one Q per column of start.

    apply: A on columns [B, dim, k]; start [B, dim, k]. The k recurrences of a sample are independent and share only the
    block product. Full reorthogonalisation, twice: without it, copies of converged values spoil the quadrature.
    Where beta vanishes the Krylov space is invariant: the column stops, and zeros follow, which carry no weight.
    """
    batch, dim, columns = start.shape
    steps = min(steps, dim)
    basis = start.new_zeros(batch, columns, steps, dim)
    alpha = torch.zeros(batch, columns, steps, dtype=torch.float64, device=start.device)
    beta = torch.zeros(batch, columns, steps - 1, dtype=torch.float64, device=start.device)
    norm = torch.linalg.vector_norm(start, dim=1, keepdim=True)
    current = start / torch.where(norm > 0, norm, 1.0)
    scale = torch.zeros_like(norm)
    for step in range(steps):
        basis[:, :, step] = current.mT
        new = apply(current)
        scale = torch.maximum(scale, torch.linalg.vector_norm(new, dim=1, keepdim=True))
        alpha[:, :, step] = (current.double() * new.double()).sum(1)
        if step + 1 == steps:
            break
        past = basis[:, :, : step + 1]
        for _ in range(2):
            overlap = past @ new.mT[..., None]  # [B, k, step + 1, 1]
            new = new - (overlap.mT @ past)[:, :, 0].mT
        norm = torch.linalg.vector_norm(new, dim=1, keepdim=True)
        alive = norm > 10 * torch.finfo(new.dtype).eps * scale
        beta[:, :, step] = (norm * alive)[:, 0]
        current = new * (alive / torch.where(alive, norm, 1.0))
    return alpha, beta


def gauss_quadrature(alpha: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes and weights [B, k, s]: q^T f(A) q = sum_i weight_i f(node_i), exact up to degree 2 s - 1.

    (Golub & Welsch 1969.)
    """
    tridiagonal = torch.diag_embed(alpha) + torch.diag_embed(beta, 1) + torch.diag_embed(beta, -1)
    nodes, vectors = torch.linalg.eigh(tridiagonal)
    return nodes, vectors[..., 0, :].square()
