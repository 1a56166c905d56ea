"""Explicit Jacobians with a prescribed spectrum, and the truth about them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def orthonormal(rows: int, columns: int, seed: int) -> Tensor:
    """Columns that span a uniformly random subspace."""
    return torch.linalg.qr(normal(rows, columns, seed=seed)).Q


@dataclass(frozen=True)
class KnownJacobian:
    """J = U diag(sigma) V^T with every singular vector known; V is square, so it also holds the null space."""

    matrix: Tensor  # [m, n]
    sigma: Tensor  # [n], descending, padded with zeros
    right: Tensor  # [n, n]

    @property
    def metric(self) -> Tensor:
        return self.matrix.T @ self.matrix

    @property
    def energy(self) -> Tensor:
        return self.sigma.square().sum()

    def kappa(self, rank: int) -> Tensor:
        return self.sigma[:rank].square().sum() / self.energy


def known_jacobian(sigma: Tensor, rows: int, cols: int, seed: int = 0) -> KnownJacobian:
    count = len(sigma)
    left, right = orthonormal(rows, count, seed), orthonormal(cols, cols, seed + 1)
    padded = torch.cat([sigma, sigma.new_zeros(cols - count)])
    return KnownJacobian((left * sigma) @ right[:, :count].T, padded, right)


def with_gap(rank: int, count: int, ratio: float) -> Tensor:
    """sigma_1 = 2 down to sigma_r = 1, then sigma_{r+1} = ratio and further down: one gap, of known size."""
    head = torch.linspace(2, 1, rank, dtype=torch.float64)
    return torch.cat([head, ratio * 0.97 ** torch.arange(count - rank, dtype=torch.float64)])


SPECTRA = {
    "decaying": 0.8 ** torch.arange(30, dtype=torch.float64),
    "step": with_gap(4, 30, 0.1),
    "nearly flat": torch.linspace(1, 0.8, 30, dtype=torch.float64),
    "rank-bounded": torch.tensor([3.0, 2.0, 1.5, 1.0, 0.5], dtype=torch.float64),
}
