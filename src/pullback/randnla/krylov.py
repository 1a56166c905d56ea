"""The block Krylov space of J^T J, grown one block of products at a time.

    V_1 = orth(J^T Omega),   V_{i+1} = orth(J^T J V_i  against  V_1 ... V_i),   Omega [m, b] Gaussian

(Musco & Musco 2015; Golub & Underwood 1977). Starting from the output space puts V_1 into the row space of J. Since
W = J V is kept, Rayleigh-Ritz needs no further products: the Ritz values are the eigenvalues of W^T W.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from pullback.operators.base import LinearOperator
from pullback.randnla.orthonormal import gram, orthonormalize
from pullback.randnla.streams import Streams

ENDLESS = 1 << 30


@dataclass(frozen=True)
class KrylovSpace:
    """Columns are zero where a sample needed no more of them."""

    basis: Tensor  # V [B, n, K], orthonormal
    image: Tensor  # W = J V [B, m, K]
    gram: Tensor  # W^T W [B, K, K], float64
    theta: Tensor  # its eigenvalues [B, K], ascending: the Ritz values of J^T J
    vectors: Tensor  # its eigenvectors [B, K, K]: the Ritz vectors in the basis
    reach: Tensor  # [B, K]: this many products of J^T J with a column stay inside the space
    complete: Tensor  # [B]: the space holds the whole row space of J, so nothing is left to find
    block: int

    @property
    def depth(self) -> int:
        return self.basis.shape[-1] // self.block

    def ritz(self, rank: int) -> tuple[Tensor, Tensor]:
        """Leading Ritz values [B, rank] of J^T J, descending, and their coordinates [B, K, rank] in the basis."""
        values, vectors = self.theta.flip(-1)[:, :rank].clamp_min(0), self.vectors.flip(-1)[..., :rank]
        missing = rank - values.shape[-1]
        pad = torch.nn.functional.pad
        return (pad(values, (0, missing)), pad(vectors, (0, missing))) if missing > 0 else (values, vectors)


def start(op: LinearOperator, block: int, streams: Streams) -> KrylovSpace:
    """The first block: ``block`` VJPs and ``block`` JVPs."""
    batch, rows, cols = op.shape
    empty = KrylovSpace(
        basis=torch.zeros(batch, cols, 0, dtype=op.dtype, device=op.device),
        image=torch.zeros(batch, rows, 0, dtype=op.dtype, device=op.device),
        gram=torch.zeros(batch, 0, 0, dtype=torch.float64, device=op.device),
        theta=torch.zeros(batch, 0, dtype=torch.float64, device=op.device),
        vectors=torch.zeros(batch, 0, 0, dtype=torch.float64, device=op.device),
        reach=torch.zeros(batch, 0, dtype=torch.long, device=op.device),
        complete=torch.zeros(batch, dtype=torch.bool, device=op.device),
        block=block,
    )
    active = ~empty.complete
    return _append(op, empty, op.T @ streams.gaussian(rows, block, op.dtype), active, streams)


def grow(op: LinearOperator, space: KrylovSpace, active: Tensor, streams: Streams) -> KrylovSpace:
    """One more block for the samples in the mask ``active`` [B]: ``block`` VJPs and ``block`` JVPs."""
    return _append(op, space, op.T @ space.image[..., -space.block :], active & ~space.complete, streams)


def grow_until(
    op: LinearOperator,
    rank: int,
    *,
    block: int,
    tolerance: Callable[[KrylovSpace], Tensor],
    max_depth: int,
    margin: int = 0,
    streams: Streams,
) -> tuple[KrylovSpace, Tensor]:
    """Grow until the relative truncation error of the energies is below tolerance(space) [B], sample by sample.

    ``margin`` more blocks follow. An infinite tolerance says that nothing is left to find. A finished sample gets zero
    columns from then on: its result does not depend on the batch it came with.
    Returns the space and the estimated errors [B, rank] of sum_{i<=j} sigma_i^2, j = 1..rank.
    """
    space = start(op, block, streams)
    error = torch.ones(op.batch, rank, dtype=torch.float64, device=op.device)
    active = ~space.complete
    blocks_left = torch.full_like(space.reach[:, 0], ENDLESS)
    history: list[Tensor] = []
    while True:
        if space.depth * block >= rank:  # sums over fewer than rank Ritz values would not follow the same law
            history.append(space.ritz(rank)[0].cumsum(-1))
            error = torch.where(active[:, None], truncation_error(history), error)
        allowed = tolerance(space)
        space = _declare_complete(space, allowed.isinf())
        error = torch.where(space.complete[:, None], 0.0, error)
        accurate = error.amax(-1) <= allowed
        blocks_left = torch.where(accurate, blocks_left.clamp_max(margin + 1) - 1, ENDLESS)
        active = active & ~space.complete & (blocks_left > 0)
        if space.depth >= max_depth or not active.any():
            return space, error
        space = grow(op, space, active, streams)


def truncation_error(history: list[Tensor]) -> Tensor:
    """Relative distance [B, r] of the last of some increasing energies [B, r] from their limit; at most 1.

    An increment that is small by chance must not pass for convergence: no block is believed to have lowered the error
    to less than 0.3 of what it was estimated at before.
    """
    if len(history) < 2:  # a single energy says nothing about its own error
        return torch.ones_like(history[-1])
    missing = _extrapolate(history)
    if len(history) > 2:
        missing = torch.maximum(missing, 0.3 * _extrapolate(history[:-1]))
    return (missing / history[-1].clamp_min(torch.finfo(missing.dtype).tiny)).clamp_max(1)


def _extrapolate(history: list[Tensor]) -> Tensor:
    """What is missing in the last energies (Aitken): d rho / (1 - rho) with the increments d_i, rho = d_i / d_{i-1}.

    Increments fall off geometrically, then faster. The larger of the last two ratios is taken, since a single one is
    noisy; it is kept in [0.1, 0.95], and 1/2 until there are two increments.
    """
    steps = torch.stack([(after - before).abs() for before, after in pairwise(history[-4:])])
    ratio = torch.full_like(steps[-1], 0.5)
    if len(steps) > 1:
        ratio = (steps[1:] / steps[:-1].clamp_min(torch.finfo(steps.dtype).tiny)).amax(0).clamp(0.1, 0.95)
    return steps[-1] * ratio / (1 - ratio)


def _append(op: LinearOperator, space: KrylovSpace, new: Tensor, active: Tensor, streams: Streams) -> KrylovSpace:
    """Orthonormalise the columns ``new`` [B, n, b] against the space, multiply them by J, and add them.

    Round-off lets directions outside the row space creep in when the spectrum is flat (they belong to the eigenvalue
    0, the best separated one). They cost their columns but no accuracy; hence the number of columns is never taken as
    proof that the space is complete.
    """
    new = orthonormalize(new * active[:, None, None], space.basis)
    stuck = active & ~_alive(new).all(-1)
    complete = space.complete
    if stuck.any():
        # The space is invariant, which with multiple singular values does not mean that it holds all of them. Random
        # directions of the row space take the place of the missing columns; when these vanish too, nothing is left.
        fresh = op.T @ streams.gaussian(op.rows, space.block, op.dtype, only=stuck)
        fresh = torch.where(_alive(new)[:, None, :], new, fresh * stuck[:, None, None])
        new = orthonormalize(fresh, space.basis, threshold=0.3 * torch.finfo(op.dtype).eps ** 0.5)
        complete = complete | (stuck & ~_alive(new).all(-1))
    image = op @ new
    across, within = gram(space.image, image), gram(image, image)
    products = torch.cat([torch.cat([space.gram, across], -1), torch.cat([across.mT, within], -1)], 1)
    theta, vectors = torch.linalg.eigh(products)
    reach = torch.cat([space.reach + active[:, None].long(), torch.zeros_like(new[:, 0], dtype=torch.long)], -1)
    larger = KrylovSpace(
        basis=torch.cat([space.basis, new], -1),
        image=torch.cat([space.image, image], -1),
        gram=products,
        theta=theta,
        vectors=vectors,
        reach=reach,
        complete=space.complete,
        block=space.block,
    )
    return _declare_complete(larger, complete)


def _declare_complete(space: KrylovSpace, complete: Tensor) -> KrylovSpace:
    complete = space.complete | complete
    return replace(space, complete=complete, reach=torch.where(complete[:, None], ENDLESS, space.reach))


def _alive(columns: Tensor) -> Tensor:
    """[B, k]: the columns that orthonormalisation has not set to zero."""
    return (columns != 0).any(1)
