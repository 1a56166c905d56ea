"""The leading modes of a dense J without the rest of its spectrum: what targets need, and nothing slow on a GPU.

A symmetric eigenproblem of 768 x 768 takes an H200 8 ms, the 768 products behind it 3 ms, and all but r of its vectors
are thrown away. Orthogonal iteration on G = J J^T needs matrix products, and eigenproblems of 32 x 32, which GPUs solve
by the batch:

    Y <- orth(G^k Y), Y [p, 32];   Y^T G Y = Z diag(theta) Z^T,   Y <- Y Z

until |G y_j - theta_j y_j| <= tol theta_j for all j <= r. The power k = 2, 4, 8, ... comes from squaring G, and is the
highest for which (theta_1 / theta_r)^k leaves the r-th direction above rounding: flat spectra, which need many rounds,
allow high powers. Samples that do not get there, or have fewer than 32 directions, are left to `torch.linalg.eigh`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pullback.operators import LinearOperator
from pullback.operators.execution import matmul_precision
from pullback.randnla import Svd
from pullback.randnla.orthonormal import cholesky_qr
from pullback.randnla.svd import check_rank

_COLUMNS, _SPARE = 32, 4
_CHECKS, _BETWEEN_CHECKS, _SQUARINGS = 40, 3, 5
_SPREAD = 1e6  # of the r leading eigenvalues of G^k


def exact_modes(op: LinearOperator, rank: int, *, precision: str = "float32", chunk: int = 8192) -> Svd:
    """The leading modes and all column energies from the dense J, formed by min(m, n) products. No full spectrum.

    ``precision`` "tf32" or "bf16": G is added up from TF32 products, whose independent rounding averages out over the
    long side of J.
    """
    check_rank(op, rank)
    spent = op.products
    dense = op.dense()
    wide = op.rows <= op.cols
    thin = dense.mT if wide else dense  # the long side first: [B, max(m, n), p]
    small, squares = gram_and_rows(thin, precision, chunk)
    values, vectors = (leading_eigenpairs if small.is_cuda else all_eigenpairs)(small, rank)  # LAPACK is quick enough
    right = vectors.to(op.dtype)
    if wide:  # v = J^T u / sigma, with zeros where sigma vanishes
        right = thin @ right
        norms = torch.linalg.vector_norm(right, dim=1, keepdim=True, dtype=torch.float64)
        kept = norms > torch.finfo(op.dtype).eps * norms[..., :1]
        right = right * (kept / torch.where(kept, norms, 1.0)).to(op.dtype)
    sigma = values.clamp_min(0).sqrt().to(op.dtype)
    energies = squares if wide else small.diagonal(dim1=1, dim2=2)
    return Svd(sigma, right, torch.zeros_like(sigma), op.products - spent, 1, column_energies=energies)


def gram_and_rows(thin: Tensor, precision: str, chunk: int = 8192) -> tuple[Tensor, Tensor]:
    """X^T X [B, p, p] and the squared norms [B, q] of the rows of X [B, q, p], both float64, piece by piece."""
    small = thin.new_zeros(len(thin), thin.shape[2], thin.shape[2], dtype=torch.float64)
    squares = []
    for part in thin.split(chunk, dim=1):
        if precision == "float32":
            part = part.double()
            small += part.mT @ part
        else:
            with matmul_precision("tf32"):
                small += part.mT @ part
        squares.append(torch.linalg.vector_norm(part, dim=2, dtype=torch.float64).square())
    return small, torch.cat(squares, 1)


def leading_eigenpairs(matrices: Tensor, rank: int, *, tol: float = 1e-5) -> tuple[Tensor, Tensor]:
    """(theta [B, r] descending, U [B, p, r]) of symmetric positive semidefinite matrices [B, p, p], float64."""
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
    """An orthonormal basis of columns [B, p, 32], NaN where they are too dependent for one.

    The tolerance is far below that of the eigenvectors, and rounding of the basis is mended by the next round.
    """
    basis, trusted = cholesky_qr(columns, tolerance=1e-6)
    return torch.where(trusted[:, None, None], basis, torch.nan)


def all_eigenpairs(matrices: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The same, of which ``rank`` are returned, by a full decomposition."""
    values, vectors = torch.linalg.eigh(matrices)
    return values.flip(-1)[:, :rank], vectors.flip(-1)[..., :rank]
