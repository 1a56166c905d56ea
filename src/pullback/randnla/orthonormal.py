"""Orthonormal bases of batches of tall blocks.

QR of a batch of tall, thin blocks is slow on GPUs (one launch per column and sample); everything here is a matrix
product or a small symmetric eigenproblem.
"""

from __future__ import annotations

import torch
from torch import Tensor


def orthonormalize(columns: Tensor, against: Tensor | None = None, *, threshold: float | None = None) -> Tensor:
    """Return an orthonormal basis of what columns [B, n, b] have outside of ``against``, orthonormal [B, n, K].

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
    """Return the Q of a QR of columns [B, n, b] with a positive diagonal of R, in order: the first j columns of Q span
    what the first j of ``columns`` do, to the round-off of their dtype (1e-12 in float64).

    By `cholesky_qr`, or by Householder reflections if the columns of any sample depend on each other too much for it.
    """
    basis, trusted = cholesky_qr(columns, tolerance=max(torch.finfo(columns.dtype).eps, 1e-12))
    return basis.to(columns.dtype) if bool(trusted.all()) else _householder(columns)


def cholesky_qr(columns: Tensor, *, tolerance: float) -> tuple[Tensor, Tensor]:
    """Compute Q = X R^-1 with X^T X = R^T R for columns X [B, n, b], twice for its last digits.

    Returns Q [B, n, b] in float64, and whether it can be trusted [B]: Q^T Q = I to round-off, and the j-th column of X
    lies in the span of the first j of Q, to about ``tolerance`` of its length.

    R^-1 is formed, since a triangular solve with long columns is slow on a GPU. Trust follows from R^-1 alone, not from
    which matrices LAPACK refuses: that differs between machines, and nearly dependent columns get a factor of noise.
    Any triangular R^-1 keeps the order of the spans, even a wrong one, so two things remain that can go wrong:
    - with columns of length 1, X R^-1 is rounded by up to eps sum_i |R^-1_ij| in column j, which moves the spans;
    - the first round may leave columns that are still too dependent for the second to make them orthonormal.
    """
    basis = columns.double()
    eye = torch.eye(basis.shape[-1], dtype=basis.dtype, device=basis.device)
    rounded = torch.zeros_like(basis[:, :1])  # [B, 1, b]: the length of what rounding may have added to each column
    for _ in range(2):
        lengths = torch.linalg.vector_norm(basis, dim=1, keepdim=True)
        lengths = torch.where(lengths > 0, lengths, 1.0)
        basis = basis / lengths
        lower = torch.linalg.cholesky_ex(basis.mT @ basis).L
        inverse = torch.linalg.solve_triangular(lower, eye.expand_as(lower), upper=False).mT
        basis = basis @ inverse
        rounded = (rounded / lengths + torch.finfo(basis.dtype).eps) @ inverse.abs()
    orthonormal = torch.linalg.matrix_norm(inverse, ord=1) <= 10  # the second round's, which is near I
    return basis, (rounded.amax((1, 2)) <= tolerance) & orthonormal  # both are False for NaN


def _householder(columns: Tensor) -> Tensor:
    basis, upper = torch.linalg.qr(columns)
    signs = upper.diagonal(dim1=1, dim2=2).sign()
    return basis * torch.where(signs == 0, 1.0, signs)[:, None, :]


def gram(left: Tensor, right: Tensor) -> Tensor:
    """Return left^T right [B, j, k], accumulated in float64: in float32 it loses the tail of the spectrum."""
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
    """Return 1 / values on the mask, 0 elsewhere."""
    return where / torch.where(where, values, 1.0)
