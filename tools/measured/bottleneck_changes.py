"""The Jacobians with and without a bottleneck, on changes that pictures really make."""

from __future__ import annotations

from typing import Any

from .bottleneck import CASES, CHANGES, SIZES
from .common import joined, pm, read, said, source, span, table


def changes() -> str:
    found = read(CHANGES)["cases"]
    titles = CASES | {name: f"`tiny-scenes` depth at 112 pixels, M' = {size}" for name, size in SIZES.items()}
    kinds = list(found["saliency-L11"]["changes"])
    rows = [[title, *cells(found[name]["changes"], kinds)] for name, title in titles.items() if name in found]
    saliency = [
        found[f"saliency-L{layer}"]["changes"][kind]["cosine"]["mean"] for layer in ("08", "10", "11") for kind in kinds
    ]
    samples = {case["settings"]["samples"] for case in found.values()}
    sizes = [mean_cosine(found[name]["changes"], kinds) for name in SIZES]
    depth = [found["scenes-depth"]["changes"][kind]["cosine"]["mean"] for kind in kinds]
    poor = mean_cosine(found["views-depth"]["changes"], kinds)
    return joined(
        table(["probe", *kinds], rows),
        source(CHANGES),
        "cos(Jδ, J̃δ) and, in brackets, |J̃δ| / |Jδ|, with δ what the change does to the features: 10 % more contrast, "
        "a 3 × 3 blur, one pixel to the right, and another picture altogether. Mean ± standard error over "
        f"{', '.join(map(str, sorted(samples)))} held-out images, or scenes of 2 views.",
        [
            said(
                min(saliency) > 0.8,
                f"Saliency: the compressed Jacobian says of real changes what the original says (cosines "
                f"{span(saliency)}), at L11 as well, where their leading directions have next to nothing in common. "
                "What made the spectrum rich there is directions in which pictures do not move.",
            ),
            said(
                sizes == sorted(sizes),
                f"On `tiny-scenes` the mean cosine rises with the size, from {sizes[0]:.2f} to {sizes[-1]:.2f}.",
            ),
            said(
                max(depth) < 0.7,
                f"Depth of `tiny-scenes` at its own size is kept well, and yet the cosines are only {span(depth)}: the "
                "same output does not make the same derivative.",
            ),
            said(
                poor < 0.5,
                "Where the output itself is kept badly, the changes are too: `tiny-views` has a mean cosine of "
                f"{poor:.2f}.",
            ),
        ],
    )


def cells(found: dict[str, Any], kinds: list[str]) -> list[str]:
    return [f"{pm(found[kind]['cosine'], 2)} ({found[kind]['ratio']['mean']:.2f})" for kind in kinds]


def mean_cosine(found: dict[str, Any], kinds: list[str]) -> float:
    return float(sum(found[kind]["cosine"]["mean"] for kind in kinds) / len(kinds))


BLOCKS = {"bottleneck-changes": changes}
