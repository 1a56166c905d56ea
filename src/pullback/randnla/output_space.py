"""Output directions whose pullback is known: Q [m, k] orthonormal together with J^T Q [n, k].

Projecting the output, unlike projecting the input, leaves the columns of J apart: for any set t of columns

    |J_t|_F^2 = |Q^T J_t|_F^2 + |(I - Q Q^T) J_t|_F^2

so the known part of every block is exact, whatever Q is, and only the rest has to be sampled.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pullback.operators.base import LinearOperator
from pullback.randnla.orthonormal import gram, orthonormalize
from pullback.randnla.svd import Svd

_WEAK = 0.65
"""Directions with less than eps^0.65 of the largest energy are mostly round-off once normalised; they are sampled."""


@dataclass(frozen=True)
class OutputSpace:
    """Columns may be zero."""

    basis: Tensor  # Q [B, m, k], orthonormal
    pulled: Tensor  # J^T Q [B, n, k]


def krylov_outputs(svd: Svd) -> OutputSpace:
    """The images of the inner columns of a Krylov space V, without a further product.

    J^T J maps an inner column (reach >= 1) into the space again, so J^T J V_i = V G_i with G = (J V)^T (J V). With an
    orthonormal basis Q = J V C of their images, C supported on the inner columns, J^T Q = V G C.
    """
    basis, image = svd.deflation()
    assert svd.reach is not None
    inner = (svd.reach >= 1).double()
    products = gram(image, image)
    theta, ritz = torch.linalg.eigh(inner[:, :, None] * products * inner[:, None, :])
    kept = theta > torch.finfo(image.dtype).eps ** _WEAK * theta[:, -1:]
    combination = ritz * (kept * torch.where(kept, theta, 1.0).rsqrt())[:, None, :]
    return OutputSpace(image @ combination.to(image.dtype), basis @ (products @ combination).to(basis.dtype))


def pulled_outputs(op: LinearOperator, images: Tensor) -> OutputSpace:
    """The span of some outputs [B, m, k], at k VJPs."""
    basis = orthonormalize(images)
    return OutputSpace(basis, op.T @ basis)
