"""Effective rank exp(H) of J by stochastic Lanczos quadrature.

    H = -sum p_j log p_j = log T - E / T,   p_j = lambda_j / T,   T = tr A,   E = tr A log A

with A = J J^T if m <= n, else J^T J: both have the same nonzero eigenvalues, and on the smaller side the zeros that
every probe would have to average away are not there (Ubaru, Chen & Saad 2017; the paper's Section "SLQ").

Lanczos tridiagonalisation of a symmetric operator, many starts at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pullback.operators.base import LinearOperator
from pullback.randnla.estimate import Estimate, student_scale
from pullback.randnla.orthonormal import gram
from pullback.randnla.streams import Streams
from pullback.randnla.svd import Svd

_Function = Callable[[Tensor], Tensor]
_COARSER = 5
"""The quadrature error is judged by leaving out this many Lanczos steps."""

_CONVERGED = 1e-10
"""A Ritz vector with a smaller share in the outermost block has a residual of about sqrt(this), relative: the error of
f(theta), of the order of the residual squared, is then below round-off."""


@dataclass(frozen=True)
class _Known:
    """An orthonormal basis Q and what it contributes to T and E, so that only its complement is sampled."""

    basis: Tensor  # Q [B, p, k]; columns may be zero
    trace: Tensor  # tr Q^T A Q [B]
    entropy: Tensor  # tr Q^T (A log A) Q [B]
    doubt: Tensor  # estimated error of the entropy [B]


def effective_rank(
    op: LinearOperator,
    *,
    num_probes: int = 16,
    lanczos_steps: int = 30,
    rtol: float | None = None,
    max_probes: int = 256,
    svd: Svd | None = None,
    streams: Streams,
) -> Estimate:
    """exp(H) [B]. A Krylov ``svd`` deflates: its inner subspace is known and only the complement is sampled.

    Probes are uniform on the unit sphere of the complement, of dimension c: c u^T f(A) u is unbiased, and exact for a
    flat spectrum. exp(H) is a function of the means T and E: bias correction and se by the jackknife over probes.
    The change that the last 5 Lanczos steps made is added to the se. Costs 2 lanczos_steps products per probe.
    """
    if svd is not None and svd.spectrum is not None:
        return Estimate.exact(effective_rank_from_spectrum(svd.spectrum), round_off=op.round_off)
    side = op.T if op.rows <= op.cols else op  # A = side^T side
    known = _known(op, svd)
    samples = _sample(side, known, num_probes, lanczos_steps, streams)
    result = _combine(known, samples, op.round_off)
    while rtol is not None and samples.shape[-1] < max_probes and (result.relative_se > rtol).any():
        count = min(num_probes, max_probes - samples.shape[-1])
        samples = torch.cat([samples, _sample(side, known, count, lanczos_steps, streams)], -1)
        result = _combine(known, samples, op.round_off)
    return result


def effective_rank_from_spectrum(singular_values: Tensor) -> Tensor:
    """exp(H) [B] of all singular values [B, p], in float64; 0 for the zero operator."""
    energies = singular_values.double().square()
    total = energies.sum(-1, keepdim=True)
    shares = energies / torch.where(total > 0, total, 1.0)
    return (total[..., 0] > 0) * torch.special.entr(shares).sum(-1).exp()


def _sample(side: LinearOperator, known: _Known, count: int, steps: int, streams: Streams) -> Tensor:
    """Probe values [3, B, count] whose means are the complement's part of T, of E, and of a coarser E."""
    start = streams.gaussian(side.cols, count, side.dtype)
    for _ in range(2):
        start = start - known.basis @ (known.basis.mT @ start)
    alpha, beta = lanczos(lambda columns: side.T @ (side @ columns), start, steps)
    dimension = side.cols - (known.basis != 0).any(1).sum(-1)[:, None]
    fewer = max(1, alpha.shape[-1] - _COARSER) if alpha.shape[-1] < side.cols else alpha.shape[-1]
    trace = alpha[..., 0]
    fine, coarse = (_entropy(alpha[..., :s], beta[..., : s - 1]) for s in (alpha.shape[-1], fewer))
    return dimension * torch.stack([trace, fine, coarse])


def _entropy(alpha: Tensor, beta: Tensor) -> Tensor:
    nodes, weights = gauss_quadrature(alpha, beta)
    return -(weights * torch.special.entr(nodes.clamp_min(0))).sum(-1)


def _combine(known: _Known, samples: Tensor, round_off: float) -> Estimate:
    """Jackknife of T exp(-E / T) over the probes (Efron 1982)."""
    count = samples.shape[-1]
    mean = samples.mean(-1)
    value = _exp_entropy(known.trace + mean[0], known.entropy + mean[1])
    rough = _exp_entropy(known.trace + mean[0], known.entropy + known.doubt + mean[2])
    without = (mean[:2, :, None] * count - samples[:2]) / (count - 1)
    leave_one_out = _exp_entropy(known.trace[:, None] + without[0], known.entropy[:, None] + without[1])
    corrected = count * value - (count - 1) * leave_one_out.mean(-1)
    se = leave_one_out.std(-1, correction=0) * math.sqrt(count - 1)
    return Estimate.of(corrected, torch.hypot(student_scale(count) * se, value - rough), round_off=round_off)


def _exp_entropy(trace: Tensor, entropy: Tensor) -> Tensor:
    """exp(log T - E / T); 0 for the zero operator."""
    safe = torch.where(trace > 0, trace, 1.0)
    return trace * torch.exp(-entropy / safe)


def _known(op: LinearOperator, svd: Svd | None) -> _Known:
    """Deflation by what a Krylov space knows well: its converged Ritz vectors and its inner columns.

    Inner: A^i x stays in span(V) for i <= 2. Then x^T g(J^T J) x = (V^T x)^T g(V^T J^T J V) (V^T x) up to degree 5, a
    block Gauss quadrature whose error is small even where Ritz values have not converged (and is estimated by
    leaving out the outermost blocks). In Ritz coordinates J^T J is diag(theta). On the output side the Ritz vectors are
    J v / |J v|: the coordinates of J x are sqrt(theta) times those of x, and g(t) = t f(t).
    """
    small = min(op.rows, op.cols)
    if svd is None or svd.reach is None:
        none = torch.zeros(op.batch, dtype=torch.float64, device=op.device)
        return _Known(torch.zeros(op.batch, small, 0, dtype=op.dtype, device=op.device), none, none, none)
    output_side = op.rows <= op.cols
    basis, image = svd.deflation()
    products = gram(image, image)
    theta, ritz = torch.linalg.eigh(products)
    metric = products if output_side else torch.eye(products.shape[-1], dtype=products.dtype, device=op.device)
    weak = torch.finfo(op.dtype).eps ** 0.65 * theta[:, -1:]  # mostly round-off once normalised: sampled instead
    in_outermost = (ritz.square() * (svd.reach == 0)[:, :, None]).sum(1)
    converged = ritz * ((in_outermost < _CONVERGED) & (theta > weak))[:, None, :]
    inner = _inner(products, svd.reach, weak, output_side)
    rest = _whiten(inner - converged @ (converged.mT @ inner), metric)
    lengths = theta.clamp_min(weak).sqrt() if output_side else torch.ones_like(theta)
    combination = torch.cat([converged / lengths[:, None, :], rest], -1)  # Q in terms of J V, or of V
    everything = svd.reach >= 0
    return _Known(
        basis=(image if output_side else basis) @ combination.to(op.dtype),
        trace=_projected(products, combination, everything, output_side, lambda theta: theta),
        entropy=_projected(products, combination, everything, output_side, _t_log_t),
        doubt=_quadrature_error(products, inner, svd.reach, output_side),
    )


def _inner(products: Tensor, reach: Tensor, weak: Tensor, output_side: bool) -> Tensor:
    """[B, K, K]: an orthonormal basis of the inner columns of V, or of their images under J, as combinations."""
    part = (reach >= 2).double()
    theta, ritz = torch.linalg.eigh(part[:, :, None] * products * part[:, None, :])
    kept = theta > weak
    lengths = torch.where(kept, theta, 1.0).sqrt() if output_side else torch.ones_like(theta)
    return ritz * (kept / lengths)[:, None, :]


def _whiten(combination: Tensor, metric: Tensor) -> Tensor:
    """C S with (C S)^T M (C S) = I. What the converged vectors already cover has length near 0 and is left out."""
    values, vectors = torch.linalg.eigh(combination.mT @ metric @ combination)
    kept = values > 1e-4
    return combination @ (vectors * (kept * torch.where(kept, values, 1.0).rsqrt())[:, None, :])


def _quadrature_error(products: Tensor, inner: Tensor, reach: Tensor, output_side: bool) -> Tensor:
    """Error [B] of the entropy in the inner columns, extrapolated from leaving out the outermost block, then two."""
    levels = [_projected(products, inner, reach >= cut, output_side, _t_log_t) for cut in (2, 1, 0)]
    previous, last = (levels[1] - levels[0]).abs(), (levels[2] - levels[1]).abs()
    ratio = (last / previous.clamp_min(torch.finfo(last.dtype).tiny)).clamp(0.01, 0.5)
    return last * ratio / (1 - ratio)


def _projected(products: Tensor, combination: Tensor, part: Tensor, output_side: bool, function: _Function) -> Tensor:
    """tr C^T g(G) C [B], C = combination [B, K, k], G = products [B, K, K] cut down to ``part`` [B, K] of the space.

    g(t) = f(t) for vectors V C, t f(t) for vectors J V C.
    """
    theta, ritz = torch.linalg.eigh(part[:, :, None] * products * part[:, None, :])
    theta = theta.clamp_min(0)
    weights = (ritz.mT @ combination).square().sum(-1)
    return (weights * function(theta) * (theta if output_side else 1.0)).sum(-1)


def _t_log_t(theta: Tensor) -> Tensor:
    return -torch.special.entr(theta)


def lanczos(apply: Callable[[Tensor], Tensor], start: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Diagonals alpha [B, k, s] and off-diagonals beta [B, k, s - 1] (float64) of Q^T A Q, one Q per column of start.

    apply: A on columns [B, dim, k]; start [B, dim, k]. The k recurrences of a sample are independent and share only the
    block product. Full reorthogonalisation, twice: without it, copies of converged values spoil the quadrature.
    Where beta vanishes the Krylov space is invariant: the column stops, and zeros follow, which carry no weight.
    """
    batch, dim, columns = start.shape
    steps = min(steps, dim)
    basis = start.new_zeros(batch, columns, steps, dim)
    alpha = torch.zeros(batch, columns, steps, dtype=torch.float64, device=start.device)
    beta = torch.zeros(batch, columns, steps - 1, dtype=torch.float64, device=start.device)
    norm = torch.linalg.vector_norm(start, dim=1, keepdim=True)
    current = start / torch.where(norm > 0, norm, 1.0)
    scale = torch.zeros_like(norm)
    for step in range(steps):
        basis[:, :, step] = current.mT
        new = apply(current)
        scale = torch.maximum(scale, torch.linalg.vector_norm(new, dim=1, keepdim=True))
        alpha[:, :, step] = (current.double() * new.double()).sum(1)
        if step + 1 == steps:
            break
        past = basis[:, :, : step + 1]
        for _ in range(2):
            overlap = past @ new.mT[..., None]  # [B, k, step + 1, 1]
            new = new - (overlap.mT @ past)[:, :, 0].mT
        norm = torch.linalg.vector_norm(new, dim=1, keepdim=True)
        alive = norm > 10 * torch.finfo(new.dtype).eps * scale
        beta[:, :, step] = (norm * alive)[:, 0]
        current = new * (alive / torch.where(alive, norm, 1.0))
    return alpha, beta


def gauss_quadrature(alpha: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes and weights [B, k, s]: q^T f(A) q = sum_i weight_i f(node_i), exact up to degree 2 s - 1.

    (Golub & Welsch 1969.)
    """
    tridiagonal = torch.diag_embed(alpha) + torch.diag_embed(beta, 1) + torch.diag_embed(beta, -1)
    nodes, vectors = torch.linalg.eigh(tridiagonal)
    return nodes, vectors[..., 0, :].square()
