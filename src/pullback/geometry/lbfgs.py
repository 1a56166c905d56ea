"""L-BFGS for many small problems at once, each at its own pace: no problem waits for another or disturbs it.

With the last steps s of a problem and the changes y of its gradient, a direction is d = -H grad, by the two-loop
recursion (Nocedal & Wright 2006, algorithm 7.4) from H = (s^T y / y^T y) I. A step t d is taken if

    f(z + t d) <= f(z) + 1e-4 t grad^T d                                          (Armijo)

and shortened otherwise, so that values never increase. In every round all problems that are not done evaluate their own
next point, be it a new step or a shortened one, together in one batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Evaluate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(points [b, n], their problems [b]) -> values [b] in float64 and gradients [b, n]."""

WINDOW = 5
"""Steps over which a relative decrease is judged: one step alone may be short by accident."""
_ARMIJO = 1e-4
_SHORTEST = 1e-6  # share of a step below which a direction is given up


@dataclass(frozen=True)
class Minimum:
    """Where B problems ended."""

    point: Tensor  # [B, n]
    value: Tensor  # [B], float64
    converged: Tensor  # [B], bool
    iterations: Tensor  # [B], steps taken
    evaluations: Tensor  # [B], of value and gradient


def minimise(
    evaluate: Evaluate, start: Tensor, *, radius: Tensor, least: Tensor, rtol: float, steps: int, history: int
) -> Minimum:
    """Minimise B functions of n numbers from ``start`` [B, n], with at most 1 + ``steps`` evaluations of each.

    A problem has converged when its value can, or does, fall by no more than ``rtol`` of it: by |grad| ``radius``,
    what a move of that length gains to first order; by the distance to ``least``, a lower bound of the value; or in its
    last `WINDOW` steps together. ``radius`` and ``least`` are [B].
    """
    point = start.clone()
    value, gradient = evaluate(point, torch.arange(len(start), device=start.device))
    memory, mark = _History(start, history), value.clone()
    iterations, evaluations = (torch.full_like(value, number, dtype=torch.long) for number in (0, 1))

    def near(rows: Tensor) -> Tensor:
        """Return whether so little can be gained."""
        gain = _norm(gradient[rows]) * radius[rows]
        return torch.minimum(gain, value[rows] - least[rows]) <= rtol * value[rows]

    def descent(rows: Tensor) -> Tensor:
        """Return the step along the gradient that would reach the bound if the function were linear."""
        squared = _norm(gradient[rows]).square()
        length = (value[rows] - least[rows]) / torch.where(squared > 0, squared, 1.0)
        return -length.to(start)[:, None] * gradient[rows]

    everyone = torch.arange(len(start), device=start.device)
    converged, stuck = near(everyone), torch.zeros_like(value, dtype=torch.bool)
    direction, share = descent(everyone), torch.ones_like(value)
    while len(rows := (~converged & ~stuck & (evaluations <= steps)).nonzero()[:, 0]):
        trial = point[rows] + share[rows].to(start)[:, None] * direction[rows]
        found, slopes = evaluate(trial, rows)
        evaluations[rows] += 1
        slope = _dot(gradient[rows], direction[rows])
        fine = found <= value[rows] + _ARMIJO * share[rows] * slope  # not so for NaN

        short = rows[~fine]
        share[short] *= _shortening(found[~fine], value[short], share[short] * slope[~fine])
        lost = short[share[short] < _SHORTEST]
        stuck[lost] = ~memory.known(lost)  # not even along the gradient
        memory.forget(lost)
        direction[lost], share[lost] = descent(lost), 1.0

        taken = rows[fine]
        memory.add(taken, trial[fine] - point[taken], slopes[fine] - gradient[taken])
        point[taken], value[taken], gradient[taken] = trial[fine], found[fine], slopes[fine]
        iterations[taken] += 1
        judged = taken[iterations[taken] % WINDOW == 0]
        converged[judged] = mark[judged] - value[judged] <= rtol * value[judged]
        mark[judged] = value[judged]
        converged[taken] |= near(taken)
        direction[taken], share[taken] = -memory.times_inverse_hessian(taken, gradient[taken]), 1.0
        useless = taken[~memory.known(taken) | ~(_dot(gradient[taken], direction[taken]) < 0)]
        memory.forget(useless)
        direction[useless] = descent(useless)
    return Minimum(point, value, converged, iterations, evaluations)


def _shortening(found: Tensor, value: Tensor, expected: Tensor) -> Tensor:
    """Return the factor that leads to the minimum of the parabola through what is known, within 0.1 and 0.5."""
    factor = -expected / (2 * (found - value - expected))
    return torch.where(factor.isfinite(), factor, 0.1).clamp(0.1, 0.5)


class _History:
    """The last steps s and changes of the gradient y of every problem, in a ring of its own, with their inner products.

    All vectors of the two-loop recursion are combinations of these 2m and of the gradient, so that it runs on their
    coefficients (Chen et al. 2014), and passes over the long vectors are few: they cost more than their arithmetic.
    """

    def __init__(self, like: Tensor, history: int) -> None:
        self.size = history
        self.basis = like.new_zeros(len(like), 2 * history, like.shape[1])  # the steps, then the changes
        self.products = like.new_zeros(len(like), 2 * history, 2 * history, dtype=torch.float64)
        self.curvature = like.new_zeros(len(like), history, dtype=torch.float64)  # s^T y, 0: nothing is known
        self.next = torch.zeros(len(like), dtype=torch.long, device=like.device)

    def known(self, rows: Tensor) -> Tensor:
        """Return whether anything is known of these problems."""
        return (self.curvature[rows] > 0).any(1)

    def forget(self, rows: Tensor) -> None:
        self.curvature[rows] = 0

    def add(self, rows: Tensor, step: Tensor, change: Tensor) -> None:
        """Remember steps along which the gradient grew, as it does where a function is convex."""
        curvature = _dot(step, change)
        grew = curvature > torch.finfo(step.dtype).eps * _norm(step) * _norm(change)
        rows, place = rows[grew], self.next[rows[grew]]
        for where, vector in ((place, step[grew]), (place + self.size, change[grew])):
            self.basis[rows, where] = vector
            products = self._times(rows, vector)
            self.products[rows, where] = products
            self.products[rows, :, where] = products
        self.curvature[rows, place] = curvature[grew]
        self.next[rows] = (place + 1) % self.size

    def times_inverse_hessian(self, rows: Tensor, gradient: Tensor) -> Tensor:
        """Return H grad [b, n]."""
        every = torch.arange(len(rows), device=rows.device)
        places = [(self.next[rows] - back) % self.size for back in range(1, self.size + 1)]  # the latest first
        known = [self.curvature[rows, place] for place in places]
        inverse = [torch.where(curvature > 0, 1 / curvature, 0.0) for curvature in known]
        with_gradient, products = self._times(rows, gradient), self.products[rows]
        shares, of_gradient = torch.zeros_like(with_gradient), torch.ones_like(known[0])  # what the vector is made of

        def times(place: Tensor) -> Tensor:
            """Return the inner product of the vector with one of the basis."""
            return of_gradient * with_gradient[every, place] + (shares * products[every, place]).sum(1)

        removed = []
        for place, weight in zip(places, inverse, strict=True):
            removed.append(weight * times(place))
            shares[every, place + self.size] -= removed[-1]
        latest = places[0] + self.size
        scale = torch.where(known[0] > 0, known[0] / products[every, latest, latest], 1.0)
        shares, of_gradient = shares * scale[:, None], of_gradient * scale
        for place, weight, share in zip(reversed(places), reversed(inverse), reversed(removed), strict=True):
            shares[every, place] += share - weight * times(place + self.size)
        combined = (shares.to(gradient)[:, None] @ self._of(rows))[:, 0]
        return combined.addcmul_(of_gradient.to(gradient)[:, None], gradient)

    def _times(self, rows: Tensor, vector: Tensor) -> Tensor:
        """Return the inner products of vectors [b, n] with the basis, [b, 2m]."""
        return (self._of(rows) @ vector[..., None])[..., 0].double()

    def _of(self, rows: Tensor) -> Tensor:
        return self.basis if len(rows) == len(self.basis) else self.basis[rows]  # rows are ascending


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1).double()


def _norm(a: Tensor) -> Tensor:
    return torch.linalg.vector_norm(a, dim=-1).double()
