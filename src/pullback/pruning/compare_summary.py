"""From rows to findings: means with intervals, and paired tests of the rules against each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from pullback.evaluation.statistics import bootstrap_mean, compare_paired
from pullback.pruning.compare_store import RowStore
from pullback.pruning.compare_subject import OWN_SCORE, Combination

Cost = Mapping[Combination, Mapping[str, Any]]


def reference_score(scores: Sequence[str]) -> str:
    """Whom the others are compared with."""
    return "importance" if "importance" in scores else scores[0]


def images_of_all(store: RowStore, wanted: Sequence[Combination], images: Sequence[str]) -> list[str]:
    """The images that every combination has a value of: tests are paired, and means are over the same images."""

    def known(combination: Combination) -> set[str]:
        return {image for image, row in store.of(combination).items() if row["value"] is not None}

    common = set(images).intersection(*(known(combination) for combination in wanted))
    return [image for image in images if image in common]


def summarise(
    store: RowStore, wanted: Sequence[Combination], images: Sequence[str], scores: Sequence[str], seed: int, cost: Cost
) -> list[dict[str, Any]]:
    """One entry per combination. Within a preset scores are tested against the reference score, and across presets
    against the reference score under the first one."""
    usable = images_of_all(store, wanted, images)
    if not usable:
        return []
    rows = {combination: [store.of(combination)[image] for image in usable] for combination in wanted}
    values = {combination: np.array([row["value"] for row in own]) for combination, own in rows.items()}
    reference, first = reference_score(scores), wanted[0].preset
    entries = []
    for combination in wanted:
        others = [
            Combination(name, OWN_SCORE.get(name, reference), combination.ratio)
            for name in dict.fromkeys((combination.preset, first))
        ]
        tests = [_test(values, combination, other, seed) for other in others if other != combination]
        interval = bootstrap_mean(values[combination], generator=np.random.default_rng(seed))
        entries.append(
            {
                **asdict(combination),
                "images": len(usable),
                "mean": interval.mean,
                "interval": [interval.low, interval.high],
                "median": float(np.median(values[combination])),
                **_means(rows[combination]),
                "tests": tests,
                "cost": cost.get(combination),
            }
        )
    return entries


def _test(values: Mapping[Combination, np.ndarray], own: Combination, other: Combination, seed: int) -> dict[str, Any]:
    """This rule against another: a positive difference and a factor above 1 say that the other is better."""
    compared = compare_paired(values[own], values[other], generator=np.random.default_rng(seed))
    against = float(values[other].mean())
    return {
        "preset": other.preset,
        "score": other.score,
        "p_value": compared.p_value,
        "difference": compared.difference.mean,
        "interval": [compared.difference.low, compared.difference.high],
        "factor": float(values[own].mean()) / against if against > 0 else None,
        "worse_on": float((values[own] > values[other]).mean()),
    }


def _means(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of whatever else the rows hold: the other SILog, the share of floored pixels, k-NN hits."""
    extra = [name for name in ("value_085", "floored", "knn") if rows[0].get(name) is not None]
    names = {"value_085": "mean_085", "floored": "floored", "knn": "knn"}
    return {names[name]: float(np.mean([row[name] for row in rows])) for name in extra}
