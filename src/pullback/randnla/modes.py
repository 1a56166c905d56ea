"""The leading modes of J and what they capture, by one of three methods: the one place where the method is chosen.

    exact    min(m, n) products form J; no sampling
    krylov   block Krylov until the energies are accurate enough; the rest of J is sampled
    paper    the paper's Algorithms 1 and 2 literally
    auto     exact where that takes fewer products and J is not too large, otherwise krylov

`leading_modes` gives the modes alone, for targets and scores; `sketch` also the captured energy and the effective rank,
for the diagnosis.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from pullback.checks import finite_number, whole_number
from pullback.errors import PullbackError
from pullback.operators.base import LinearOperator, ProductCount
from pullback.randnla.estimate import Estimate
from pullback.randnla.krylov import KrylovSpace
from pullback.randnla.orthonormal import gram
from pullback.randnla.output_space import OutputSpace, krylov_outputs, output_krylov, pulled_outputs
from pullback.randnla.slq import effective_rank
from pullback.randnla.streams import Streams
from pullback.randnla.svd import Svd, block_krylov, check_rank, default_block, exact_svd, power_iteration
from pullback.randnla.trace import deflated_hutchinson, draw_probes, energy, hutchinson, tail_energies

METHODS = ("auto", "krylov", "paper", "exact")
MAX_DENSE_BYTES = 2e9
"""Of the dense J of one sample, for "auto". A constant, not a share of the memory: every machine must choose alike."""
USUAL_DEPTH = 8
"""Blocks that a Krylov space usually grows to."""
_TRUNCATION_SHARE = 0.2
"""The Krylov space grows until its truncation error is this fraction of the trace noise: the se then covers both."""
_MARGIN = 2
"""Blocks beyond that for the effective rank: deflation knows the trace of all of the space but the entropy of its inner
part only, and two blocks are cheap beside the Lanczos runs whose noise they lower."""
_NOTHING = 1e-3
"""A tail with a smaller share than this times the round-off counts as none: energies miss at most the tail."""
_FINEST = 1e-6
"""Without ``rtol`` no space is grown for the sake of a relative error below this, whatever the precision."""
_MAX_TRACE_PROBES = 1024
_TRACE_PROBES, _PAPER_PROBES = 32, 100
_POWER_ITERS, _LANCZOS_STEPS, _SLQ_PROBES = 2, 30, 16


def choose_method(method: str, rows: int, cols: int, rank: int, *, sampled: int = 0, itemsize: int = 4) -> str:
    """Return what "auto" means for a J of rows x cols; other methods as they are.

    ``sampled``: products that the Krylov route needs besides those of its space, for what it cannot know exactly.
    Sizes alone decide, so that every machine and every batch size decides alike.
    """
    if not isinstance(method, str) or method not in METHODS:
        raise PullbackError(f"method: expected one of {', '.join(METHODS)}, got {method!r}.")
    if method != "auto":
        return method
    cheaper = min(rows, cols) <= 2 * default_block(rank) * USUAL_DEPTH + sampled
    return "exact" if cheaper and rows * cols * itemsize <= MAX_DENSE_BYTES else "krylov"


def planned_products(
    method: str, rows: int, cols: int, rank: int, *, itemsize: int = 4, with_effective_rank: bool = True
) -> ProductCount:
    """Return about how many products per sample `sketch`, or without the effective rank `leading_modes` and the block
    norms, will take: exactly for "exact", for the others what they usually take."""
    lanczos = _LANCZOS_STEPS * _SLQ_PROBES if with_effective_rank else 0
    rank = min(rank, rows, cols)
    method = choose_method(method, rows, cols, rank, sampled=_TRACE_PROBES + 2 * lanczos, itemsize=itemsize)
    if method == "exact":
        return ProductCount(vjp=rows) if rows <= cols else ProductCount(jvp=cols)
    if method == "paper":
        pairs = (_POWER_ITERS + 1) * rank
        return ProductCount(pairs + rank + _PAPER_PROBES + lanczos, pairs + lanczos)
    pairs, most = default_block(rank) * USUAL_DEPTH, min(rows, cols)
    if pairs >= most:  # the space is all there is, and nothing is left to be sampled
        return ProductCount(most + _TRACE_PROBES, most)
    return ProductCount(pairs + _TRACE_PROBES + lanczos, pairs + lanczos)


@dataclass(frozen=True)
class LeadingModes:
    """The modes, and what was learned about the output space on the way."""

    svd: Svd
    known: OutputSpace | None  # None: J is known exactly
    captured: Tensor | None  # [B], the energy in the space that the modes were found in, where it is known
    method: str


def leading_modes(
    op: LinearOperator,
    rank: int,
    *,
    method: str = "auto",
    rtol: float = 1e-3,
    precision: str = "float32",
    streams: Streams,
) -> LeadingModes:
    """Compute the leading ``rank`` modes of J, their energies accurate to ``rtol`` (krylov).

    The Krylov space is built on the shorter side of J, where its algebra is cheap.
    """
    check_rank(op, rank)
    finite_number("rtol", rtol, least=0, expected="a relative error such as 1e-3")
    method = choose_method(method, op.rows, op.cols, rank, itemsize=op.dtype.itemsize)
    if method == "exact":
        return LeadingModes(exact_svd(op, rank, full=False, precision=precision), None, None, method)
    if method == "paper":
        svd = power_iteration(op, rank, streams=streams)
        return LeadingModes(svd, pulled_outputs(op, svd.deflation()[1]), None, method)
    if op.rows <= op.cols:
        svd, known = output_krylov(op, rank, rtol=rtol, streams=streams)
        return LeadingModes(svd, known, known.pulled.square().sum((1, 2)).double(), method)
    svd = block_krylov(op, rank, rtol=rtol, streams=streams)
    return LeadingModes(svd, krylov_outputs(svd), energy(svd.deflation()[1]), method)


@dataclass(frozen=True)
class Sketch:
    """What is known of J, with error bars. p = min(m, n)."""

    singular_values: Tensor  # [B, r], descending
    right: Tensor  # [B, n, r]
    spectrum: Tensor | None  # [B, p], all singular values when known exactly
    total: Estimate  # [B], squared Frobenius norm
    kappa: Estimate  # [B, r], kappa_cap(1..r): share of the total in the first j modes
    effective_rank: Estimate | None  # [B]
    method: str  # what was used: "krylov", "paper" or "exact"
    products: ProductCount
    iterations: int
    round_off: float  # of the operator
    earlier: tuple[Tensor, Tensor] | None = None  # singular values and right before the last Krylov block


def sketch(
    op: LinearOperator,
    rank: int,
    *,
    method: str = "auto",
    with_effective_rank: bool = True,
    with_earlier: bool = False,
    power_iters: int = _POWER_ITERS,
    sketch_width: int | None = None,
    rayleigh_ritz: bool = False,
    num_probes: int | None = None,
    rtol: float | None = None,
    modes_rtol: float | None = None,
    lanczos_steps: int = _LANCZOS_STEPS,
    slq_probes: int = _SLQ_PROBES,
    max_depth: int = 40,
    streams: Streams,
) -> Sketch:
    """Compute the leading ``rank`` modes, kappa_cap(1..rank) = sum_{i<=j} sigma_i^2 / |J|_F^2, and the effective rank.

    "krylov": block Krylov + Hutchinson and SLQ deflated by its basis; ``rtol`` bounds the relative se of kappa and of
    the effective rank. "paper": Algorithms 1 and 2, plain Hutchinson and SLQ, with ``rayleigh_ritz`` rotated into
    singular vectors, which the leading QR columns are not. "exact": min(m, n) products, no sampling.
    "auto": see `choose_method`.
    ``num_probes``: trace probes, by default 32 (krylov) or the paper's 100. With ``rtol`` the most difficult sample of
    the batch decides how many are drawn; without it, a sample's numbers do not depend on its batch.
    ``modes_rtol``: "krylov" grows its space until the energies of the modes are at least this accurate, whatever the
    noise of the trace; where the modes themselves are wanted.
    ``with_earlier``: also what the Krylov space knew before its last block, to judge by the change how far singular
    values and modes are to be trusted.
    """
    check_rank(op, rank)
    for name, count in (("num_probes", num_probes), ("lanczos_steps", lanczos_steps), ("slq_probes", slq_probes)):
        if count is not None:
            whole_number(name, count)
    if modes_rtol is not None:
        finite_number("modes_rtol", modes_rtol, least=0, expected="a relative error such as 1e-4")
    if rtol is not None and finite_number("rtol", rtol, expected="a relative error such as 1e-3") < 2 * op.round_off:
        raise PullbackError(
            f"rtol: expected at least {2 * op.round_off:.1e}, since products in this precision leave a relative error "
            f"of {op.round_off:.0e}, got {rtol:g}. Raise it, or choose a higher precision."
        )
    sampled = (num_probes or _TRACE_PROBES) + (2 * lanczos_steps * slq_probes if with_effective_rank else 0)
    method = choose_method(method, op.rows, op.cols, rank, sampled=sampled, itemsize=op.dtype.itemsize)
    spent = op.products
    if method == "exact":
        svd = exact_svd(op, rank)
        total = Estimate.exact(cast(Tensor, svd.spectrum).double().square().sum(-1), round_off=op.round_off)
    elif method == "paper":
        svd = power_iteration(
            op, rank, power_iters=power_iters, sketch_width=sketch_width, rayleigh_ritz=rayleigh_ritz, streams=streams
        )
        total = hutchinson(op, num_probes=num_probes or _PAPER_PROBES, streams=streams)
    else:
        margin = _MARGIN * with_effective_rank
        svd, total = _krylov(op, rank, num_probes or _TRACE_PROBES, rtol, modes_rtol, max_depth, margin, streams)
    effective = None
    if with_effective_rank:
        deflation = None if method == "paper" else svd
        effective = effective_rank(
            op, num_probes=slq_probes, lanczos_steps=lanczos_steps, rtol=rtol, svd=deflation, streams=streams
        )
    return Sketch(
        singular_values=svd.singular_values,
        right=svd.right,
        spectrum=svd.spectrum,
        total=total,
        kappa=capture_ratio(svd, total, energy(svd.deflation()[1]) if method == "krylov" else None),
        effective_rank=effective,
        method=method,
        products=op.products - spent,
        iterations=svd.iterations,
        round_off=op.round_off,
        earlier=_before_the_last_block(svd) if with_earlier and method == "krylov" else None,
    )


def _krylov(
    op: LinearOperator,
    rank: int,
    num_probes: int,
    rtol: float | None,
    modes_rtol: float | None,
    max_depth: int,
    margin: int,
    streams: Streams,
) -> tuple[Svd, Estimate]:
    """Grow the Krylov space after the trace probes are multiplied: whatever basis it reaches, they tell its tail."""
    first = draw_probes(op, num_probes, streams)
    tolerance = _trace_noise(*first, rtol, modes_rtol, op.round_off)
    svd = block_krylov(op, rank, rtol=tolerance, max_depth=max_depth, margin=margin, streams=streams)
    total = deflated_hutchinson(
        op,
        *svd.deflation(),
        num_probes=num_probes,
        rtol=None if rtol is None else 0.95 * rtol,  # leaves room for the truncation error
        max_probes=_MAX_TRACE_PROBES,
        first=first,
        streams=streams,
    )
    return svd, total


def _trace_noise(
    probes: Tensor, probe_images: Tensor, rtol: float | None, modes_rtol: float | None, round_off: float
) -> Callable[[KrylovSpace], Tensor]:
    """The truncation error worth reaching for a space: a fraction of the noise that its deflated trace has."""

    def tolerance(space: KrylovSpace) -> Tensor:
        tail = tail_energies(probes, probe_images, space.basis, space.image)
        captured = energy(space.image)
        noise = Estimate.from_samples(tail, captured, round_off=round_off).relative_se
        nothing_left = tail.mean(-1) <= _NOTHING * round_off * captured
        worth = _TRUNCATION_SHARE * noise.clamp_min(_FINEST)
        if rtol is not None:
            # Too far from rtol for more probes to bridge: let the space grow, which takes the tail's variance away.
            reachable = probes.shape[-1] * (noise / rtol).square() <= _MAX_TRACE_PROBES
            worth = torch.where(reachable, worth.clamp_max(_TRUNCATION_SHARE * rtol), -1.0)
        if modes_rtol is not None:
            worth = worth.clamp_max(modes_rtol)
        return torch.where(nothing_left, torch.inf, worth)

    return tolerance


def capture_ratio(svd: Svd, total: Estimate, captured: Tensor | None) -> Estimate:
    """kappa_j = a_j / T. Given the basis, a_j is a constant, also where T = captured + tail contains it: the relative
    noise of T, with its round-off, is that of kappa. The truncation error of a_j adds to it, which is at most the tail
    (Ky Fan); twice the estimated tail is beyond its noise. ``captured`` [B]: the energy in the space that the modes
    were found in, if T was deflated by it.
    """
    energies = svd.singular_values.double().square().cumsum(-1)
    missing = svd.relative_error * energies
    if captured is not None:
        missing = torch.minimum(missing, 2 * (total.value - captured).clamp_min(0)[:, None])
    whole = torch.where(total.value > 0, total.value, 1.0)[:, None]
    kappa = energies / whole
    return Estimate(kappa, torch.hypot(kappa * total.relative_se[:, None], missing / whole))


def _before_the_last_block(svd: Svd) -> tuple[Tensor, Tensor]:
    """Return singular values [B, r] and modes [B, n, r] that each sample's Krylov space had one block earlier.

    Where nothing was left to find, there is no last block and they are those that were found.
    """
    basis, image = svd.deflation()
    rank = svd.singular_values.shape[-1]
    inner = cast(Tensor, svd.reach) >= 1
    theta, vectors = torch.linalg.eigh(inner[:, :, None] * gram(image, image) * inner[:, None, :])
    missing = max(0, rank - theta.shape[-1])  # columns of zeros, as in the modes themselves
    values = F.pad(theta.flip(-1)[:, :rank].clamp_min(0).sqrt(), (0, missing))
    return values.to(basis.dtype), basis @ F.pad(vectors.flip(-1)[..., :rank], (0, missing)).to(basis.dtype)
