"""Matrices with known singular values: the ground truth of these tests."""

import torch
from torch import Tensor

from pullback.operators import DenseOperator

DOUBLE = torch.float64


def power_law(count: int, exponent: float) -> Tensor:
    """sigma_j^2 = j^-exponent."""
    return torch.arange(1, count + 1, dtype=DOUBLE) ** (-exponent / 2)


def exponential(count: int, scale: float) -> Tensor:
    return torch.exp(-torch.arange(count, dtype=DOUBLE) / scale)


def nearly_flat(count: int) -> Tensor:
    return torch.linspace(1.0, 0.8, count, dtype=DOUBLE)


def rank_bounded(count: int, rank: int) -> Tensor:
    return torch.where(torch.arange(count) < rank, power_law(count, 1.0), 0.0)


def matrix(singular_values: Tensor, rows: int, cols: int, seed: int = 0) -> Tensor:
    """U diag(singular_values) V^T [rows, cols] with random orthogonal factors."""
    generator = torch.Generator().manual_seed(seed)
    small = min(rows, cols)
    left = torch.linalg.qr(torch.randn(rows, small, dtype=DOUBLE, generator=generator)).Q
    right = torch.linalg.qr(torch.randn(cols, small, dtype=DOUBLE, generator=generator)).Q
    return (left * singular_values) @ right.mT


def copies(dense: Tensor, batch: int) -> DenseOperator:
    """One matrix as a batch, without copying it: with one stream per sample this is ``batch`` repetitions."""
    return DenseOperator(dense.expand(batch, *dense.shape))
