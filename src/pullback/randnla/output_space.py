"""Output directions whose pullback is known: Q [m, k] orthonormal together with J^T Q [n, k].

Projecting the output, unlike projecting the input, leaves the columns of J apart: for any set t of columns

    |J_t|_F^2 = |Q^T J_t|_F^2 + |(I - Q Q^T) J_t|_F^2

so the known part of every block is exact, whatever Q is, and only the rest has to be sampled. Such a Q comes from a
Krylov space (`krylov_outputs`), from any outputs (`pulled_outputs`), or from `output_krylov`: block Krylov with all of
its algebra in output space, where outputs are short and long vectors are only multiplied.

    U_1 = orth(Omega), Omega [m, b] Gaussian;   W_i = J^T U_i,   Z_i = J W_i,   U_{i+1} = orth(Z_i against U_1 ... U_i)

span(W) is the space of `krylov.py` at the same cost, and the products of its vectors are known from short ones:
W^T W = U^T Z and (J W)^T (J W) = Z^T Z. Rayleigh-Ritz in it is the small problem Z^T Z y = sigma^2 U^T Z y, v = W y.
What is given up are digits of singular values far below the largest: their squares are seen through its round-off.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pullback.operators.base import LinearOperator
from pullback.randnla.krylov import truncation_error
from pullback.randnla.orthonormal import gram, orthonormalize
from pullback.randnla.streams import Streams
from pullback.randnla.svd import Svd, check_rank, default_block

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


_ROUND_OFF = 30
"""Directions whose energy is below so many units of round-off of the largest are noise."""


def output_krylov(
    op: LinearOperator,
    rank: int,
    *,
    block: int | None = None,
    depth: int | None = None,
    rtol: float = 1e-3,
    max_depth: int = 40,
    streams: Streams,
) -> tuple[Svd, OutputSpace]:
    """The leading modes, and the output directions whose pullback is known on the way.

    Depth d costs d b VJPs and d b JVPs. Without ``depth`` it grows, sample by sample, until the truncation error of
    every energy sum_{i<=j} sigma_i^2, j <= rank, is below ``rtol``, or to ``max_depth``, or until the outputs are
    exhausted.
    """
    check_rank(op, rank)
    spent = op.products
    block = min(block or default_block(rank), op.rows)
    limit = max(math.ceil(rank / block), max_depth if depth is None else depth)
    basis = back = torch.zeros(op.batch, op.rows, 0, dtype=op.dtype, device=op.device)
    pulled: list[Tensor] = []  # long, so they are joined once
    new = orthonormalize(streams.gaussian(op.rows, block, op.dtype).to(op.device))
    active = torch.ones(op.batch, dtype=torch.bool, device=op.device)
    error = torch.ones(op.batch, rank, dtype=torch.float64, device=op.device)
    closed_at = torch.full_like(error[:, 0], torch.nan)  # the energy in the space when it was last found invariant
    history: list[Tensor] = []
    while True:
        pulled.append(op.T @ new)
        basis, back = torch.cat([basis, new], -1), torch.cat([back, op @ pulled[-1]], -1)
        if basis.shape[-1] >= rank and (depth is None or len(pulled) > limit - 3):  # three energies tell an error
            history.append(_ritz(basis, back, rank)[0].cumsum(-1))
            error = torch.where(active[:, None], truncation_error(history), error)
        left = op.rows - basis.shape[-1]
        if depth is None:
            active = active & ((error.amax(-1) > rtol) | ~closed_at.isnan())
        if left <= 0:
            error = torch.where(active[:, None], 0.0, error)
        if left <= 0 or len(pulled) >= limit or not active.any():
            break
        new = orthonormalize(back[..., -block:][..., :left] * active[:, None, None], basis)
        closed = active & ~(new != 0).any(1).all(-1)
        if closed.any():
            # With multiple singular values an invariant space need not hold all of them: random directions take the
            # place of the missing ones. When these have brought no energy until the space closes again, that was all.
            energy = (basis * back).sum((1, 2)).double()
            complete = closed & (energy <= (1 + _ROUND_OFF * torch.finfo(op.dtype).eps) * closed_at)
            error = torch.where(complete[:, None], 0.0, error)
            active, closed_at = active & ~complete, torch.where(closed, energy, closed_at)
            if not active.any():
                break
            fresh = streams.gaussian(op.rows, new.shape[-1], op.dtype, only=closed & active).to(op.device)
            new = torch.where((new != 0).any(1)[:, None, :], new, fresh) * active[:, None, None]
            new = orthonormalize(new, basis)
    known = OutputSpace(basis, torch.cat(pulled, -1))
    singular_values, right = _modes(known, back, rank)
    return Svd(singular_values, right, error, op.products - spent, len(pulled)), known


def _ritz(basis: Tensor, back: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The leading Ritz values [B, rank] of J^T J in span(W), descending, and their coordinates [B, K, rank] in W."""
    energies, directions = torch.linalg.eigh(_symmetric(gram(basis, back)))
    kept = energies > _ROUND_OFF * torch.finfo(basis.dtype).eps * energies[:, -1:].clamp_min(0)
    scaled = directions * (kept * torch.where(kept, energies, 1.0).rsqrt())[:, None, :]
    theta, turned = torch.linalg.eigh(_symmetric(scaled.mT @ gram(back, back) @ scaled))
    return theta.flip(-1)[:, :rank].clamp_min(0), scaled @ turned.flip(-1)[..., :rank]


def _modes(known: OutputSpace, back: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """(sigma [B, r], V [B, n, r]): W y, orthonormal up to the round-off of U^T Z, which one more small step removes."""
    coordinates = _ritz(known.basis, back, rank)[1].to(back.dtype)
    right, image = known.pulled @ coordinates, back @ coordinates
    overlap, turned = torch.linalg.eigh(_symmetric(gram(right, right)))
    kept = overlap > 0.5  # the others are zero: J has fewer than rank directions
    correct = (turned * (kept * torch.where(kept, overlap, 1.0).rsqrt())[:, None, :]) @ turned.mT
    right, image = right @ correct.to(right.dtype), image @ correct.to(right.dtype)
    values, order = torch.linalg.vector_norm(image, dim=1).sort(descending=True)
    return values, right.gather(2, order[:, None, :].expand(-1, right.shape[1], -1))


def _symmetric(matrix: Tensor) -> Tensor:
    return (matrix + matrix.mT) / 2
