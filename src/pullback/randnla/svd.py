"""Leading singular values and right singular vectors of J: the paper's power iteration, block Krylov, and exactly."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pullback.checks import whole_number
from pullback.errors import PullbackError, RankError
from pullback.operators.base import LinearOperator, ProductCount
from pullback.operators.execution import matmul_precision
from pullback.randnla.eigenpairs import all_eigenpairs, leading_eigenpairs
from pullback.randnla.krylov import KrylovSpace, grow_until, truncation_error
from pullback.randnla.orthonormal import gram, qr_basis
from pullback.randnla.streams import Streams


@dataclass(frozen=True)
class Svd:
    """The leading part of an SVD, and how far its energies sum_{i<=j} sigma_i^2 are from the truth."""

    singular_values: Tensor  # [B, r], descending
    right: Tensor  # [B, n, r]; columns of singular values that are numerically zero may be zero
    relative_error: Tensor  # [B, r]: estimated truncation error of the sum of the first j squared values, relative
    products: ProductCount
    iterations: int
    basis: Tensor | None = None  # V [B, n, K], orthonormal, for deflation
    image: Tensor | None = None  # J V [B, m, K]
    reach: Tensor | None = None  # [B, K]: see KrylovSpace; None when the basis is no Krylov space
    spectrum: Tensor | None = None  # [B, p]: all p = min(m, n) singular values, when known exactly
    column_energies: Tensor | None = None  # [B, n], float64: squared norms of J's columns, when known exactly

    def deflation(self) -> tuple[Tensor, Tensor]:
        """Basis and image, for the estimators that deflate by them."""
        if self.basis is None or self.image is None:
            raise PullbackError("svd: expected one with a basis (block_krylov or power_iteration), got an exact one.")
        return self.basis, self.image


def power_iteration(
    op: LinearOperator,
    rank: int,
    *,
    power_iters: int = 2,
    sketch_width: int | None = None,
    rayleigh_ritz: bool = False,
    streams: Streams,
) -> Svd:
    """The paper's Algorithm 2: Omega <- QR(J^T J Omega) ``power_iters`` times, S_j = |J v_j| (Halko et al. 2011).

    As in the paper the leading r of the r0 = ``sketch_width`` columns are taken as they are, neither rotated nor
    converged; here they are sorted by S_j. With ``rayleigh_ritz`` all r0 columns are rotated by the eigenvectors of
    (J Omega)^T (J Omega) first, which is what makes oversampling worth its products.
    Costs q r0 pairs and r JVPs (r0 with Rayleigh-Ritz).
    """
    check_rank(op, rank)
    whole_number("power_iters", power_iters, least=0)
    width = rank if sketch_width is None else whole_number("sketch_width", sketch_width, error=RankError)
    if not rank <= width <= op.cols:
        raise RankError(f"sketch_width: expected rank <= width <= {op.cols}, got {width} at rank {rank}.")
    spent = op.products
    omega = streams.gaussian(op.cols, width, op.dtype)
    history: list[Tensor] = []  # the energies that each round's columns had, which its products give for free
    norms = torch.linalg.vector_norm(omega, dim=1, keepdim=True)
    omega = omega / norms if power_iters else qr_basis(omega)
    for _ in range(power_iters):
        image = op @ omega
        history.append(_column_energies(image, rank, rayleigh_ritz and bool(history)))
        omega = qr_basis(op.T @ image)
    right = omega if rayleigh_ritz else omega[..., :rank]
    image = op @ right
    history.append(_column_energies(image, rank, rayleigh_ritz))
    if rayleigh_ritz:
        rotation = torch.linalg.eigh(gram(image, image)).eigenvectors.flip(-1)[..., :rank].to(op.dtype)
        right, image = right @ rotation, image @ rotation
    values, order = torch.linalg.vector_norm(image, dim=1).sort(descending=True)
    right, image = (x.gather(2, order[:, None, :].expand(-1, x.shape[1], -1)) for x in (right, image))
    return Svd(values, right, _power_error(history), op.products - spent, power_iters, basis=right, image=image)


def block_krylov(
    op: LinearOperator,
    rank: int,
    *,
    block: int | None = None,
    depth: int | None = None,
    rtol: float | Callable[[KrylovSpace], Tensor] = 1e-3,
    max_depth: int = 40,
    margin: int = 0,
    streams: Streams,
) -> Svd:
    """Rayleigh-Ritz in the block Krylov space of J^T J (Musco & Musco 2015; see krylov.py).

    Depth d costs d b VJPs and d b JVPs. Without ``depth`` it grows until the truncation error of every energy
    sum_{i<=j} sigma_i^2, j <= rank, is below ``rtol``, then by ``margin`` more blocks; or until the row space is
    exhausted and the result exact; or to ``max_depth``. ``rtol`` may be a function of the space.
    """
    check_rank(op, rank)
    spent = op.products
    block = min(block or default_block(rank), op.rows, op.cols)
    needed = math.ceil(rank / block)
    if depth is not None and depth < needed:
        raise RankError(
            f"depth: rank {rank} needs depth >= {needed} with block {block}, got {depth}; raise depth or block."
        )
    tolerance = rtol if callable(rtol) else _constant(rtol)
    if depth is not None:
        tolerance = _constant(-1.0)
    limit = max(max_depth, needed) if depth is None else depth
    space, error = grow_until(
        op, rank, block=block, tolerance=tolerance, max_depth=limit, margin=margin, streams=streams
    )
    return _from_space(space, rank, error, op.products - spent, min(op.rows, op.cols))


def exact_svd(
    op: LinearOperator, rank: int, *, full: bool = True, precision: str = "float32", chunk: int = 8192
) -> Svd:
    """The leading modes and all column energies from the dense J, formed by min(m, n) products.

    The eigenproblem of the small Gram matrix is solved in float64. ``full``: for all singular values; without them a
    GPU is several times faster. ``precision`` "tf32" or "bf16": the Gram matrix is added up from TF32 products, whose
    independent rounding averages out over the long side of J.
    """
    check_rank(op, rank)
    spent = op.products
    dense = op.dense()
    wide = op.rows <= op.cols
    thin = dense.mT if wide else dense  # the long side first: [B, max(m, n), p]
    small, squares = gram_and_rows(thin, precision, chunk)
    if full:
        values, vectors = all_eigenpairs(small, small.shape[-1])
        vectors = vectors[..., :rank]
    else:
        values, vectors = (leading_eigenpairs if small.is_cuda else all_eigenpairs)(small, rank)
    right = vectors.to(op.dtype)
    if wide:  # v = J^T u / sigma, with zeros where sigma vanishes
        right = thin @ right
        norms = torch.linalg.vector_norm(right, dim=1, keepdim=True, dtype=torch.float64)  # float32 loses 3e-4 here
        kept = norms > torch.finfo(op.dtype).eps * norms[..., :1]
        right = right * (kept / torch.where(kept, norms, 1.0)).to(op.dtype)
    sigma = values.clamp_min(0).sqrt().to(op.dtype)
    return Svd(
        sigma[:, :rank],
        right,
        torch.zeros_like(sigma[:, :rank]),
        op.products - spent,
        1,
        spectrum=sigma if full else None,
        column_energies=squares if wide else small.diagonal(dim1=1, dim2=2),
    )


def gram_and_rows(thin: Tensor, precision: str = "float32", chunk: int = 8192) -> tuple[Tensor, Tensor]:
    """X^T X [B, p, p] and the squared norms [B, q] of the rows of X [B, q, p], both float64.

    Only pieces of X are copied to float64: X itself may fill the memory.
    """
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


def default_block(rank: int) -> int:
    return max(4, math.ceil(rank / 2))


def check_rank(op: LinearOperator, rank: int) -> None:
    limit = min(op.rows, op.cols)
    whole_number("rank", rank, least=None, expected=f"a whole number from 1 to {limit}", error=RankError)
    if not 1 <= rank <= limit:
        raise RankError(
            f"rank: expected 1 <= rank <= {limit}, the smaller side of this {op.rows} x {op.cols} operator, "
            f"got {rank}. Ask for rank={max(1, min(rank, limit))}."
        )


def _from_space(space: KrylovSpace, rank: int, error: Tensor, products: ProductCount, small: int) -> Svd:
    energies, rotation = space.ritz(rank)
    dtype = space.basis.dtype
    spectrum = space.ritz(small)[0].sqrt().to(dtype) if space.complete.all() else None
    return Svd(
        singular_values=energies.sqrt().to(dtype),
        right=space.basis @ rotation.to(dtype),
        relative_error=error,
        products=products,
        iterations=space.depth,
        basis=space.basis,
        image=space.image,
        reach=space.reach,
        spectrum=spectrum,
    )


def _constant(value: float) -> Callable[[KrylovSpace], Tensor]:
    return lambda space: torch.full_like(space.gram[:, 0, 0], value)


def _column_energies(image: Tensor, rank: int, rotated: bool) -> Tensor:
    """Cumulative energies [B, rank] of the columns as they are, or of their best rotation."""
    if rotated:
        return torch.linalg.eigvalsh(gram(image, image)).flip(-1)[:, :rank].cumsum(-1)
    return image[..., :rank].double().square().sum(1).sort(descending=True).values.cumsum(-1)


def _power_error(history: list[Tensor]) -> Tensor:
    """Extrapolated from the rounds there were; without the random start where possible, which follows another law."""
    return truncation_error(history[1:] if len(history) > 2 else history)
