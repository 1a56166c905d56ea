"""Optimal transport between the tokens of two images, with the distances of a task as the ground cost.

The tokens of an image are masses h_t at places x_t = s W^T F_t (`MetricItems`). Moving the mass of one image onto the
other's costs c(s, t) = |x_s - x_t|^2, and the least cost under marginals a = h / |h|_1 and b, made smooth by entropy,

    OT(a, b) = min_P sum_st P_st c(s, t) + eps KL(P | a b^T),   P 1 = a,  P^T 1 = b        (Cuturi 2013)
    S(a, b)  = OT(a, b) - OT(a, a) / 2 - OT(b, b) / 2 >= 0, and 0 for a = b                (Feydy et al. 2019)

    d(F_1, F_2) = (|h_1|_1 + |h_2|_1) / 2 * sqrt(S)

The mass in front gives it the metric's units: if all tokens move by the same v, `eq:drm_sym` and this are |h|_1 |v|.
Unlike `eq:drm_sym`, which compares each token with the one at its own place, this does not see where tokens are: two
images with the same tokens in another order are at distance 0. It costs N^2 k per pair and N^2 per iteration, against
N k for `eq:drm_sym`, so it is for small galleries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pullback.checks import finite_number, of_kind, whole_number
from pullback.errors import NumericsError, PullbackError, ShapeError
from pullback.learning.distilled_metric import MetricItems
from pullback.operators.execution import apply_in_chunks, tangents_that_fit

BLUR = 0.2
ITERATIONS = 2000
TOLERANCE = 1e-3
MOST_ENTRIES = 10_000_000_000
"""Entries of all cost matrices together; more is refused, since each is read at every iteration."""
_COPIES = 6  # of a cost matrix that an iteration holds
_AT_ONCE = 64_000_000  # entries
_AVERAGED = 32  # of the iterations
_CHECKED_EVERY = 8
_RELAXED = 1.8
_COOLING = 0.7  # of eps, from step to step


@torch.no_grad()
def token_spread(*items: MetricItems) -> float:
    """Return the root mean squared distance of the projected tokens of all images from their mean: the unit of
    ``blur``."""
    tokens = torch.cat([part.projected.double().flatten(0, 1) for part in items])
    return float((tokens - tokens.mean(0)).square().sum(1).mean().sqrt())


@torch.no_grad()
def transport_distances(
    first: MetricItems,
    second: MetricItems,
    *,
    blur: float = BLUR,
    iterations: int = ITERATIONS,
    tol: float = TOLERANCE,
    spread: float | None = None,
    most_entries: float = MOST_ENTRIES,
) -> Tensor:
    """Return the distances by optimal transport of every image of one set [n] from every one of another [m]: [n, m].

    ``blur``: sqrt(eps) in units of ``spread``, by default `token_spread` of both sets; give the same ``spread`` to
    calls whose distances are compared. Smaller is nearer to exact transport, and slower.
    ``iterations``: of Sinkhorn's algorithm, for each pair, at most; a pair is done when its plan's marginals are right
    within ``tol`` of its mass, and an error says where one is not.
    ``most_entries``: work beyond n m N^2 of this is refused.
    """
    for name, items in (("first", first), ("second", second)):
        of_kind(name, items, MetricItems, "what a metric returned of features, MetricItems", ShapeError)
    if first.projected.shape[2] != second.projected.shape[2]:
        raise ShapeError(
            f"first, second: expected items of one metric, got projections of width {first.projected.shape[2]} and "
            f"{second.projected.shape[2]}."
        )
    whole_number("iterations", iterations)
    for name, value in (("blur", blur), ("tol", tol)):
        if finite_number(name, value, least=0, expected="a number above 0") == 0:
            raise PullbackError(f"{name}: expected a number above 0, got 0.")
    if spread is None:
        spread = token_spread(first, second)
    finite_number("spread", spread, least=0, expected="a length, such as token_spread(items), or None")
    entries = len(first) * len(second) * first.weights.shape[1] * second.weights.shape[1]
    if entries > most_entries:
        raise PullbackError(
            f"first, second: {len(first)} x {len(second)} images of {first.weights.shape[1]} and "
            f"{second.weights.shape[1]} tokens need cost matrices of {entries:.1e} entries, more than "
            f"{most_entries:.1e}. Compare the nearest by pairwise_distances alone, or raise most_entries."
        )
    epsilon = (blur * spread) ** 2
    if epsilon == 0:  # all tokens of all images are the same
        return first.weights.new_zeros(len(first), len(second), dtype=torch.float32)
    masses = [_masses(name, items) for name, items in (("first", first), ("second", second))]
    own = [
        _least_costs(items, items, *2 * (torch.arange(len(items)),), epsilon, iterations, tol)
        for items in (first, second)
    ]
    rows, columns = torch.cartesian_prod(torch.arange(len(first)), torch.arange(len(second))).unbind(1)
    apart = _least_costs(first, second, rows, columns, epsilon, iterations, tol).view(len(first), len(second))
    divergence = (apart - own[0][:, None] / 2 - own[1] / 2).clamp_min(0)
    return ((masses[0][:, None] + masses[1]) / 2 * divergence.sqrt()).float()


def _masses(argument: str, items: MetricItems) -> Tensor:
    total = items.weights.double().sum(1)
    if not ((items.weights >= 0).all() and (total > 0).all() and total.isfinite().all()):
        raise NumericsError(f"{argument}: expected weights that are not negative, and some above 0 in every image.")
    if not items.projected.isfinite().all():
        raise NumericsError(f"{argument}: expected finite projections, got NaN or infinity.")
    return total


def _least_costs(
    first: MetricItems, second: MetricItems, rows: Tensor, columns: Tensor, epsilon: float, iterations: int, tol: float
) -> Tensor:
    """Return OT for the pairs (rows, columns) [P] of images: [P], in float64."""
    device = first.weights.device

    def of_pairs(numbers: Tensor) -> Tensor:
        one, other = first[rows[numbers[0]].to(device)], second[columns[numbers[0]].to(device)]
        cost = torch.cdist(
            one.projected.double(), other.projected.double(), compute_mode="donot_use_mm_for_euclid_dist"
        ).square()
        return _sinkhorn(cost, _shares(one), _shares(other), epsilon, iterations, tol)[None]

    entries = first.weights.shape[1] * second.weights.shape[1]
    at_once = min(max(1, _AT_ONCE // entries), tangents_that_fit(8 * _COPIES * entries, device))
    return apply_in_chunks(of_pairs, torch.arange(len(rows))[None], at_once)[0][0]


def _shares(items: MetricItems) -> Tensor:
    weights = items.weights.double()
    return weights / weights.sum(1, keepdim=True)


def _sinkhorn(cost: Tensor, a: Tensor, b: Tensor, epsilon: float, iterations: int, tol: float) -> Tensor:
    """Return OT [P] for costs [P, N, M] and marginals a [P, N] and b [P, M], by Sinkhorn's algorithm on log scales.

    The first updates of the potentials f and g are averaged, which settles at once what is the same on both sides, all
    of it for an image and itself. The rest are done in turn and over-relaxed (Thibault et al. 2021), several times as
    fast as plain ones. eps cools from the largest cost of each pair to what was asked for. A pair that has converged is
    left alone, so that its value does not depend on the pairs computed with it.
    """
    found, waiting = cost.new_empty(len(cost)), torch.arange(len(cost), device=cost.device)
    off = cost.new_full((len(cost),), torch.inf)
    f, g, log_a, log_b = torch.zeros_like(a), torch.zeros_like(b), a.log(), b.log()
    eps = cost.amax((1, 2))[:, None].clamp_min(epsilon)
    for step in range(iterations):
        eps = (eps * _COOLING).clamp_min(epsilon)
        next_f = _best(g, log_b, cost, eps)
        if step % _CHECKED_EVERY == 0:
            rows = a * ((f - next_f) / eps).exp()  # the plan's marginals
            columns = b * ((g - _best(f, log_a, cost.mT, eps)) / eps).exp()
            off = torch.maximum((rows - a).abs().sum(1), (columns - b).abs().sum(1))
            done = (off <= tol) & (eps[:, 0] == epsilon)
            dual = (a * f).sum(1) + (b * g).sum(1) - epsilon * (rows.sum(1) - 1)
            found[waiting[done]] = dual[done]
            if done.all():
                return found
            waiting, off, cost, a, b, log_a, log_b, f, g, next_f, eps = (
                part if not done.any() else part[~done]
                for part in (waiting, off, cost, a, b, log_a, log_b, f, g, next_f, eps)
            )
        if step < _AVERAGED:
            f, g = torch.lerp(f, next_f, 0.5), torch.lerp(g, _best(f, log_a, cost.mT, eps), 0.5)
        else:
            f = torch.lerp(f, next_f, _RELAXED)
            g = torch.lerp(g, _best(f, log_a, cost.mT, eps), _RELAXED)
    raise NumericsError(
        f"iterations: {len(waiting)} of {len(found)} pairs did not converge in {iterations} iterations (marginals off "
        f"by up to {float(off.max()):.1e} of the mass, tol is {tol:.1e}). Raise iterations or blur."
    )


def _best(potential: Tensor, log_mass: Tensor, cost: Tensor, eps: Tensor) -> Tensor:
    """Return the best potential of one side, given that of the other, its masses and the costs [P, own, other]."""
    return -eps * torch.logsumexp((log_mass + potential / eps)[:, None] - cost / eps[..., None], 2)
