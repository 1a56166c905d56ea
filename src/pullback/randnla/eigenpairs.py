"""The leading eigenpairs of small dense matrices without the rest of their spectrum, by nothing that is slow on a GPU.

A GPU takes longer for the full eigenproblem of G = J J^T than for the products that G is made of, and all but r of the
vectors are thrown away. Orthogonal iteration needs matrix products, and eigenproblems of 32 x 32, which GPUs solve by
the batch:

    Y <- orth(G^k Y), Y [p, 32];   Y^T G Y = Z diag(theta) Z^T,   Y <- Y Z

until |G y_j - theta_j y_j| <= tol theta_j for all j <= r. The power k = 2, 4, 8, ... comes from squaring G, and is the
highest for which (theta_1 / theta_r)^k leaves the r-th direction above rounding: flat spectra, which need many rounds,
allow high powers. Samples that do not get there, or have fewer than 32 directions, are left to `torch.linalg.eigh`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pullback.randnla.orthonormal import cholesky_qr

_COLUMNS, _SPARE = 32, 4
_CHECKS, _BETWEEN_CHECKS, _SQUARINGS = 40, 3, 5
_SPREAD = 1e6  # of the r leading eigenvalues of G^k


def leading_eigenpairs(matrices: Tensor, rank: int, *, tol: float = 1e-5) -> tuple[Tensor, Tensor]:
    """Return (theta [B, r] descending, U [B, p, r]) of symmetric positive semidefinite matrices [B, p, p], float64."""
    size = matrices.shape[-1]
    if size < 4 * _COLUMNS or rank + _SPARE > _COLUMNS:
        return all_eigenpairs(matrices, rank)
    values, vectors, converged = _iterate(matrices, rank, tol)
    if not converged.all():
        values[~converged], vectors[~converged] = all_eigenpairs(matrices[~converged], rank)
    return values, vectors


def _iterate(matrices: Tensor, rank: int, tol: float) -> tuple[Tensor, Tensor, Tensor]:
    batch, size, _ = matrices.shape
    trace = matrices.diagonal(dim1=1, dim2=2).sum(1).clamp_min(torch.finfo(torch.float64).tiny)
    scaled = matrices / trace[:, None, None]
    start = torch.randn(size, _COLUMNS, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    columns, power = start.to(matrices.device).expand(batch, -1, -1), scaled
    for done in range(_CHECKS):
        for _ in range(_BETWEEN_CHECKS):
            columns = _orthonormal(power @ columns)
        image = scaled @ columns
        theta, turned = torch.linalg.eigh(torch.nan_to_num(columns.mT @ image))
        theta, turned = theta.flip(-1), turned.flip(-1)
        columns, image = columns @ turned, image @ turned  # nearly eigenvectors: a high power keeps them independent
        missed = torch.linalg.vector_norm(image - theta[:, None] * columns, dim=1)[:, :rank]
        converged = (missed <= tol * theta[:, :rank]).all(-1)  # False for NaN
        if (converged | columns.isnan().any(1).any(1)).all():  # NaN: fewer directions than columns
            break
        if done == 0:
            power = _high_power(scaled, float((theta[:, 0] / theta[:, rank - 1]).nan_to_num(1.0).max()))
    vectors = columns[..., :rank]
    values = (vectors * (matrices @ vectors)).sum(1)
    return values, vectors, converged


def _high_power(matrices: Tensor, ratio: float) -> Tensor:
    """G^k, scaled, with the highest k = 2, 4, 8, ... for which ratio^k stays below `_SPREAD`, and at least 2."""
    spread = math.log(ratio) if 0 < ratio < math.inf else math.inf  # its powers may have no number
    for squarings in range(_SQUARINGS):
        if squarings and 2 ** (squarings + 1) * spread > math.log(_SPREAD):
            break
        matrices = matrices @ matrices
        matrices = matrices / matrices.diagonal(dim1=1, dim2=2).sum(1)[:, None, None].clamp_min(1e-300)
    return matrices


def _orthonormal(columns: Tensor) -> Tensor:
    """Return an orthonormal basis of columns [B, p, 32], NaN where they are too dependent for one.

    The tolerance is far below that of the eigenvectors, and rounding of the basis is mended by the next round.
    """
    basis, trusted = cholesky_qr(columns, tolerance=1e-6)
    return torch.where(trusted[:, None, None], basis, torch.nan)


def all_eigenpairs(matrices: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return the leading pairs by a full decomposition."""
    values, vectors = torch.linalg.eigh(matrices)
    return values.flip(-1)[:, :rank], vectors.flip(-1)[..., :rank]
