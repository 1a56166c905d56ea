"""Which points of the methods count at a budget, and whether ours are better than the rivals' there.

An entry describes a point: its key (method, point, tuned), whether it is ``ours``, its ``operations`` as a share of the
unpruned model's, and the ``mean`` degradation over the images.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from pullback.evaluation.statistics import compare_paired
from pullback.pruning.operating_points import Key

Row = dict[str, Any]


def best_within(entries: Iterable[Row], budget: float) -> Row | None:
    """Return the entry with the least mean among those with at most so many operations; None where there is none."""
    within = [entry for entry in entries if entry["operations"] <= budget]
    return min(within, key=lambda entry: entry["mean"], default=None)


def frontiers(entries: Sequence[Row], budgets: Sequence[float]) -> list[Row]:
    """Return of every method, frozen and tuned apart, the points that no cheaper one beats, the most expensive first,
    and the one that counts at each budget."""
    groups: dict[tuple[str, bool], list[Row]] = {}
    for entry in entries:
        groups.setdefault((entry["method"], entry["tuned"]), []).append(entry)
    return [
        {
            "method": method,
            "tuned": tuned,
            "ours": all(entry["ours"] for entry in own),
            "points": len(own),
            "frontier": [entry["point"] for entry in _frontier(own)],
            "budgets": [(best_within(own, budget) or {"point": None})["point"] for budget in budgets],
        }
        for (method, tuned), own in groups.items()
    ]


def _frontier(entries: Sequence[Row]) -> list[Row]:
    kept: list[Row] = []
    for entry in sorted(entries, key=lambda entry: (entry["operations"], entry["mean"])):
        if not kept or entry["mean"] < kept[-1]["mean"]:
            kept.append(entry)
    return kept[::-1]


def compare_at(
    entries: Sequence[Row], values: Mapping[Key, np.ndarray], budget: float, tuned: bool, seed: int
) -> Row | None:
    """Test our best point within a budget against the best of the rivals, both frozen or both tuned: a negative
    difference and a factor below 1 say that ours is better."""
    alike = [entry for entry in entries if entry["tuned"] == tuned]
    ours, rival = (best_within((e for e in alike if e["ours"] == side), budget) for side in (True, False))
    if ours is None or rival is None:
        return None
    one, other = values[Key.of(ours)], values[Key.of(rival)]
    compared = compare_paired(one, other, generator=np.random.default_rng(seed))
    return {
        "budget": budget,
        "tuned": tuned,
        "ours": {name: ours[name] for name in ("method", "point")},
        "rival": {name: rival[name] for name in ("method", "point")},
        "p_value": compared.p_value,
        "difference": compared.difference.mean,
        "interval": [compared.difference.low, compared.difference.high],
        "factor": float(one.mean() / other.mean()) if other.mean() > 0 else None,
        "better_on": float((one < other).mean()),
    }
