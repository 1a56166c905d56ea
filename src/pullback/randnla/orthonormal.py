"""Orthonormal bases of batches of tall blocks.

QR of a batch of tall, thin blocks is slow on GPUs (one launch per column and sample); everything here is a matrix
product or a small symmetric eigenproblem.
"""

from __future__ import annotations

import torch
from torch import Tensor


def orthonormalize(columns: Tensor, against: Tensor | None = None, *, threshold: float | None = None) -> Tensor:
    """An orthonormal basis of the part of columns [B, n, b] outside span(against), against [B, n, K] orthonormal.

    Numerically dependent directions come back as exact zeros, so the block keeps its shape [B, n, b]. "Dependent" means
    that less than ``threshold`` of a column is left, by default 20 units of round-off.
    Block Gram-Schmidt twice ("twice is enough"), then SVQB, and both once more, since the first SVQB magnifies
    what little of ``against`` was left.
    """
    if threshold is None:
        threshold = 20 * torch.finfo(columns.dtype).eps
    before = torch.linalg.vector_norm(columns, dim=1)
    columns = _project_out(_project_out(columns, against), against)
    after = torch.linalg.vector_norm(columns, dim=1)
    kept = after > threshold * before
    columns = _svqb(columns * kept[:, None, :], threshold * before / torch.where(kept, after, 1.0))
    return _svqb(_project_out(columns, against), torch.full_like(before, threshold))


def qr_basis(columns: Tensor) -> Tensor:
    """The Q of a QR of columns [B, n, b] with a positive diagonal of R, in order: the first j span what the first j of
    ``columns`` do. By Householder reflections where columns depend on each other too much for `cholesky_qr`."""
    basis, trusted = cholesky_qr(columns)
    return basis.to(columns.dtype) if bool(trusted.all()) else _householder(columns)


def cholesky_qr(columns: Tensor) -> tuple[Tensor, Tensor]:
    """(Q [B, n, b] in float64, whether it can be trusted [B]): Q = X R^-1 with X^T X = R^T R, twice for its last
    digits. The small factor is inverted, since a triangular solve with long columns is slow on a GPU too."""
    basis = columns.double()
    trusted = torch.ones(len(columns), dtype=torch.bool, device=columns.device)
    for _ in range(2):
        lengths = torch.linalg.vector_norm(basis, dim=1, keepdim=True)
        basis = basis / torch.where(lengths > 0, lengths, 1.0)
        lower, failed = torch.linalg.cholesky_ex(basis.mT @ basis)
        trusted = trusted & (failed == 0)
        eye = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
        basis = basis @ torch.linalg.solve_triangular(lower, eye.expand_as(lower), upper=False).mT
    return basis, trusted


def _householder(columns: Tensor) -> Tensor:
    basis, upper = torch.linalg.qr(columns)
    signs = upper.diagonal(dim1=1, dim2=2).sign()
    return basis * torch.where(signs == 0, 1.0, signs)[:, None, :]


def gram(left: Tensor, right: Tensor) -> Tensor:
    """left^T right [B, j, k], accumulated in float64: in float32 it loses the tail of the spectrum."""
    return left.double().mT @ right.double()


def _project_out(columns: Tensor, against: Tensor | None) -> Tensor:
    return columns if against is None else columns - against @ (against.mT @ columns)


def _svqb(columns: Tensor, noise: Tensor) -> Tensor:
    """X <- X D Z L^{-1/2} with D^2 = diag(X^T X)^{-1} and D X^T X D = Z L Z^T (Stathopoulos & Wu 2002).

    noise [B, b]: how much of each column, relative to its length, is not to be trusted. A direction that combines the
    columns to something shorter than their noise is dropped.
    """
    products = gram(columns, columns)
    norms = products.diagonal(dim1=1, dim2=2).sqrt()
    scale = _reciprocal(norms, norms > 0)
    values, vectors = torch.linalg.eigh(scale[:, :, None] * products * scale[:, None, :])
    untrusted = (vectors.square() * noise.double().square()[:, :, None]).sum(1)
    resolution = 1e-14 * values[:, -1:]  # of a float64 Gram matrix
    shrink = _reciprocal(values.clamp_min(0).sqrt(), values > torch.maximum(untrusted, resolution))
    return columns @ (scale[:, :, None] * vectors * shrink[:, None, :]).to(columns.dtype)


def _reciprocal(values: Tensor, where: Tensor) -> Tensor:
    """1 / values on the mask, 0 elsewhere."""
    return where / torch.where(where, values, 1.0)
