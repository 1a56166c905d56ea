"""The Jacobians with and without a bottleneck, on changes that pictures really make."""

from __future__ import annotations

from typing import Any

from .bottleneck import CASES, SIZES, cases, origin
from .common import joined, pm, said, span, table


def changes() -> str:
    titles = CASES | {name: f"`tiny-scenes` depth at 112 pixels, M' = {size}" for name, size in SIZES.items()}
    found = {name: case for name, case in cases(titles).items() if "changes" in case}
    kinds = list(next(iter(found.values()))["changes"])
    rows = [[titles[name], *cells(case["changes"], kinds)] for name, case in found.items()]
    cosines = {
        name: [case["changes"][kind]["cosine"]["mean"] for kind in kinds]
        for name, case in found.items()
        if name in CASES
    }
    sizes = [mean_cosine(found[name]["changes"], kinds) for name in SIZES]
    lowest = min(cosines, key=lambda name: min(cosines[name]))
    every = [value for values in cosines.values() for value in values]
    own = next(iter(found.values()))["settings"]
    return joined(
        table(["probe", *kinds], rows),
        origin(found, titles),
        "cos(Jδ, J̃δ) and, in brackets, |J̃δ| / |Jδ|, with δ what the change does to the features: 10 % more contrast, "
        "a 3 × 3 blur, one pixel to the right, and another picture altogether. Mean ± standard error over "
        f"{own['samples']} held-out images, or scenes of {own['views']} views.",
        [
            said(
                min(every) > 0,
                f"Of real changes the two Jacobians say alike: the cosines are {span(every)}, lowest for "
                f"{titles[lowest]}.",
            ),
            said(
                sizes[-1] > sizes[0],
                f"On `tiny-scenes` the mean cosine is {sizes[0]:.2f} at the smallest size and {sizes[-1]:.2f} at the "
                "largest.",
            ),
        ],
    )


def cells(found: dict[str, Any], kinds: list[str]) -> list[str]:
    return [f"{pm(found[kind]['cosine'], 2)} ({found[kind]['ratio']['mean']:.2f})" for kind in kinds]


def mean_cosine(found: dict[str, Any], kinds: list[str]) -> float:
    return float(sum(found[kind]["cosine"]["mean"] for kind in kinds) / len(kinds))


BLOCKS = {"bottleneck-changes": changes}
