"""How well predicted distances find what a reference distance finds: queries [Q] against items [n].

Per query, over the items: Spearman's rho, Kendall's tau, recall of the k nearest, and the error of the distances,

    mae, rmse                      |p - r| as it stands, which compares units
    mae_scaled, rmse_scaled        |c p - r| with the best single factor c: for MAE the L1 fit (the median of r / p,
                                   weighted by |p|), for RMSE least squares
    mae_monotone, rmse_monotone    |m(p) - r| with the best increasing function m by least squares, isotonic regression

A fit never sees the values that it is judged by: what half of the queries teach is applied to the other half, or both
come from a calibration set. Items that a query leaves out are taken for pictures of itself, so a fit for one half of
the queries uses no items that these leave out; else d(i, j) of one half would be d(j, i) of the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pullback.checks import of_kind, whole_number
from pullback.errors import NumericsError, PullbackError, ShapeError
from pullback.evaluation.ranking import kendall, spearman
from pullback.evaluation.statistics import RESAMPLES, Interval, PairedComparison, bootstrap_mean, compare_paired
from pullback.runs.rows import finite

NEIGHBOURS = (10,)
ERRORS = ("mae", "rmse", "mae_scaled", "rmse_scaled", "mae_monotone", "rmse_monotone")


@dataclass(frozen=True, eq=False)
class RetrievalScores:
    """What `retrieval_scores` found. All errors are in the units of the reference.

    A query whose reference distances are all equal has no order to find: its rho and tau are NaN, and left out of the
    means. A prediction without order, where the reference has one, counts as 0.
    """

    queries: dict[str, Tensor]  # by measure, one value per query [Q]: spearman, kendall, recall@k and `ERRORS`
    means: dict[str, Interval]  # of these
    spearman_pairs: float  # rho over all pairs at once

    def __len__(self) -> int:
        return len(self.queries["spearman"])

    def __repr__(self) -> str:
        rho = self.means["spearman"]
        return f"RetrievalScores(rho {rho.mean:.3f} [{rho.low:.3f}, {rho.high:.3f}] of {len(self)} queries)"

    def summary(self) -> dict[str, float | int | None]:
        """Return the means with their intervals by name, as JSON holds them: "kendall", "kendall_low", ..."""
        numbers: dict[str, float | int | None] = {"queries": len(self)}
        for name, interval in self.means.items():
            ends = (("", interval.mean), ("_low", interval.low), ("_high", interval.high))
            numbers |= {f"{name}{end}": finite(value) for end, value in ends}
        return numbers | {"spearman_pairs": finite(self.spearman_pairs)}

    def rows(self) -> list[dict[str, float | int | None]]:
        """Return one row for each query; None for what is unknown, since JSON has no NaN."""
        columns = {name: values.tolist() for name, values in self.queries.items()}
        return [
            {"query": number, **{name: finite(values[number]) for name, values in columns.items()}}
            for number in range(len(self))
        ]

    def compared(
        self, other: RetrievalScores, measure: str = "spearman", *, generator: np.random.Generator, **options: Any
    ) -> PairedComparison:
        """Compare with another method's scores of the same queries: the mean of self - other and its Wilcoxon p.

        ``options``: of `compare_paired`.
        """
        of_kind("other", other, RetrievalScores, "what retrieval_scores returned for the same queries")
        for scores in (self, other):
            if measure not in scores.queries:
                raise PullbackError(f"measure: expected one of {', '.join(scores.queries)}, got {measure!r}.")
        first, second = self.queries[measure], other.queries[measure]
        if len(first) == len(second):
            known = ~(first.isnan() | second.isnan())
            first, second = first[known], second[known]
        return compare_paired(first.numpy(), second.numpy(), generator=generator, **options)


def retrieval_scores(
    predicted: Tensor,
    reference: Tensor,
    *,
    generator: np.random.Generator,
    leave_out: Tensor | None = None,
    calibration: tuple[Tensor, Tensor] | None = None,
    neighbours: Sequence[int] = NEIGHBOURS,
    level: float = 0.95,
    resamples: int = RESAMPLES,
) -> RetrievalScores:
    """Compare predicted distances [Q, n] of queries to items with the reference's.

    ``leave_out``: pairs that do not count, bool [Q, n]: ``torch.eye(n, dtype=torch.bool)`` where queries are the items.
    ``calibration``: predicted and reference distances of other pairs, of one shape, that the fits are made on, such as
    those of training images; by default the even queries teach the odd ones and the other way round.
    ``generator``: draws the bootstrap over queries behind the intervals.

    >>> reference = torch.rand(6, 30)
    >>> retrieval_scores(reference**2, reference, generator=np.random.default_rng(0)).means["spearman"].mean
    1.0
    """
    predicted, reference = _checked("predicted, reference", predicted, reference)
    if predicted.ndim != 2:
        raise ShapeError(f"predicted, reference: expected distances [Q, n], got {list(predicted.shape)}.")
    keep = _kept(leave_out, predicted)
    least = int(keep.sum(1).min()) if len(keep) else 0
    if least < 2:
        raise ShapeError(
            "predicted, reference: expected at least one query and two items for each, besides those that it leaves "
            f"out, got distances {list(predicted.shape)} with {least} left for some query."
        )
    queries = {name: _by_query(measure, keep, predicted, reference) for name, measure in _ORDERS.items()}
    for k in neighbours:
        whole_number("neighbours", k)
        if k > least:
            raise PullbackError(f"neighbours: expected at most {least}, the items that each query has, got {k}.")
        queries[f"recall@{k}"] = _recall(predicted, reference, ~keep, k)
    queries |= _errors(predicted, reference, keep, calibration)
    queries = {name: values.cpu() for name, values in queries.items()}
    means = {name: _mean(values, generator, level, resamples) for name, values in queries.items()}
    pairs = spearman(predicted[keep][None], reference[keep][None])
    return RetrievalScores(queries, means, pairs.item())


# Orders


def _order_of(measure: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a rank correlation that is 0 where only the predicted distances have no order."""

    def known(predicted: Tensor, reference: Tensor) -> Tensor:
        found = measure(predicted, reference)
        ordered = (reference != reference[:, :1]).any(1)
        return torch.where(ordered, found.nan_to_num(0.0), found)

    return known


_ORDERS = {"spearman": _order_of(spearman), "kendall": _order_of(kendall)}


def _by_query(measure: Callable[..., Tensor], keep: Tensor, *matrices: Tensor) -> Tensor:
    """Apply a measure of rows [q, m] to the pairs kept of each query, those with the same number of them at once."""
    counts = keep.sum(1)
    out = matrices[0].new_empty(len(keep))
    for count in counts.unique().tolist():
        rows = counts == count
        out[rows] = measure(*(matrix[rows][keep[rows]].view(-1, count) for matrix in matrices))
    return out


def _recall(predicted: Tensor, reference: Tensor, left_out: Tensor, k: int) -> Tensor:
    """Return the share of the k nearest items by the reference that are among the k nearest predicted ones."""
    found, wanted = (
        torch.zeros_like(left_out).scatter_(
            1, matrix.masked_fill(left_out, torch.inf).topk(k, largest=False).indices, True
        )
        for matrix in (predicted, reference)
    )
    return (found & wanted).sum(1).double() / k


# Errors and their fits


def _errors(
    predicted: Tensor, reference: Tensor, keep: Tensor, calibration: tuple[Tensor, Tensor] | None
) -> dict[str, Tensor]:
    values = {name: predicted.new_empty(len(keep)) for name in ERRORS}
    for rows, known_p, known_r in _folds(predicted, reference, keep, calibration):
        p, r, kept = predicted[rows], reference[rows], keep[rows]
        curve = monotone_fit(known_p, known_r)
        for name, for_mae, for_rmse in (
            ("", p, p),
            ("_scaled", p * scale_fit(known_p, known_r, power=1), p * scale_fit(known_p, known_r, power=2)),
            ("_monotone", *2 * (curve(p),)),
        ):
            values[f"mae{name}"][rows] = _by_query(lambda e: e.abs().mean(1), kept, for_mae - r)
            values[f"rmse{name}"][rows] = _by_query(lambda e: e.square().mean(1).sqrt(), kept, for_rmse - r)
    return values


def _folds(
    predicted: Tensor, reference: Tensor, keep: Tensor, calibration: tuple[Tensor, Tensor] | None
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return queries with the predicted and reference distances [m] that may be used to fit for them."""
    numbers = torch.arange(len(keep), device=keep.device)
    if calibration is not None:
        if len(calibration) != 2:
            raise ShapeError("calibration: expected two tensors, predicted and reference distances of the same pairs.")
        known_p, known_r = (values.flatten().to(predicted.device) for values in _checked("calibration", *calibration))
        return [(numbers, known_p, known_r)]
    if len(keep) < 2:
        raise PullbackError(
            "calibration: with a single query there are no others to fit scales on. Give distances of other pairs."
        )
    folds = []
    for half in (0, 1):
        judged = numbers % 2 == half
        theirs = (~keep[judged]).any(0)  # the judged queries themselves, where they are among the items
        usable = keep[~judged] & ~theirs
        if int(usable.sum()) < 2:
            raise PullbackError(
                "leave_out: half of the queries leave out all items of the others, so that no pairs remain to fit "
                "scales on. Leave out fewer, or give calibration=."
            )
        folds.append((numbers[judged], predicted[~judged][usable], reference[~judged][usable]))
    return folds


def scale_fit(predicted: Tensor, reference: Tensor, *, power: int) -> float:
    """Return the factor c with the least sum of |c p - r| (``power`` 1) or (c p - r)^2 (2) over pairs [m]."""
    p, r = predicted.double(), reference.double()
    used = p != 0  # others do not depend on c
    p, r = p[used], r[used]
    if not len(p):
        return 1.0
    if power == 2:
        return float((p * r).sum() / p.square().sum())
    ratios, order = (r / p).sort()
    reached = p.abs()[order].cumsum(0)
    return float(ratios[torch.searchsorted(reached, reached[-1:] / 2)])


def monotone_fit(predicted: Tensor, reference: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the increasing function m with the least sum of (m(p) - r)^2 over pairs [m]: linear between the points of
    the isotonic regression, constant beyond them."""
    from scipy.optimize import isotonic_regression  # a third of a second

    p, r = predicted.double().cpu().numpy(), reference.double().cpu().numpy()
    places, inverse, counts = np.unique(p, return_inverse=True, return_counts=True)
    heights = isotonic_regression(np.bincount(inverse, weights=r) / counts, weights=counts).x

    def curve(values: Tensor) -> Tensor:
        return torch.from_numpy(np.interp(values.double().cpu().numpy(), places, heights)).to(values.device)

    return curve


# Means and checks


def _mean(values: Tensor, generator: np.random.Generator, level: float, resamples: int) -> Interval:
    known = values[~values.isnan()].numpy()
    if not len(known):
        return Interval(np.nan, np.nan, np.nan)
    return bootstrap_mean(known, generator=generator, level=level, resamples=resamples)


def _checked(argument: str, predicted: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    for values in (predicted, reference):
        of_kind(argument, values, Tensor, "tensors of distances of one shape", ShapeError)
    if predicted.shape != reference.shape:
        raise ShapeError(
            f"{argument}: expected distances of the same pairs, got {list(predicted.shape)} and "
            f"{list(reference.shape)}."
        )
    for what, values in (("predicted", predicted), ("reference", reference)):
        bad = int((~values.isfinite()).sum())
        if bad:
            raise NumericsError(f"{argument}: expected finite distances, got {bad} {what} ones that are not.")
    return predicted.detach().double(), reference.detach().double().to(predicted.device)


def _kept(leave_out: Tensor | None, distances: Tensor) -> Tensor:
    if leave_out is None:
        return torch.ones_like(distances, dtype=torch.bool)
    of_kind("leave_out", leave_out, Tensor, "a bool tensor [Q, n], or None", ShapeError)
    if leave_out.dtype != torch.bool or leave_out.shape != distances.shape:
        raise ShapeError(
            f"leave_out: expected bool {list(distances.shape)}, one for each pair, got {leave_out.dtype} "
            f"{list(leave_out.shape)}."
        )
    return ~leave_out.to(distances.device)
