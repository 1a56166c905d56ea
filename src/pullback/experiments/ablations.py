"""The importance head's choices (appendix E), judged by what pruning with it does to the output.

Every variant of an ablation is one head for each of three seeds. They are judged in the same pipeline, the paper's soft
merge: the tokens that a head scores lowest are merged into their nearest neighbours under d_task, by exact modes, which
are the same for all heads. A row also says how far its errors are from those of the default head on the same pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from pullback.evaluation.ranking import spearman
from pullback.experiments.experiment import (
    Cell,
    Claim,
    Column,
    Experiment,
    Figure,
    Found,
    Measured,
    Place,
    Verdict,
    overall,
)
from pullback.experiments.scales import Scale, ScaleName
from pullback.experiments.soft_merge import RATIOS, Block, counts_of, judged_by, known_of, seeds_change, seeds_mean
from pullback.experiments.workshop import HeadRecipe, Workshop

_SAME = 0.05
"""Errors that differ by no more than this share count as nearly the same."""
_WEAK = 0.3
"""A rho that the paper would call weak: its own are 0.20 and 0.09."""
_SATURATED, _ENOUGH = 2000, 500
"""Training pictures by which the paper finds errors saturated, and of its smallest set: fewer say nothing of it."""
_VAGUE = 0.5
"""An interval around "no change" that is wider than this share decides nothing."""

CLS = Block("DINOv2 CLS, L10", "dinov2", "cls", 10, "photos-train", "photos")
DPT = Block("DPT depth, L4", "depth-anything", "depth", 4, "photos-train", "photos")
DPT_S = Block("DINOv2-S depth head, L4", "dinov2", "depth", 4, "photos-train", "photos", scales=("tiny", "small"))
SCENES_CLS = Block("tiny-scenes CLS, L10", "tiny-scenes", "cls", 10, "scenes-train", "scenes")
SCENES_DEPTH = Block("tiny-scenes depth, L4", "tiny-scenes", "depth-8x8", 4, "scenes-train", "scenes", read="depth")
OF_CLASS_TOKENS, DENSE = (CLS, SCENES_CLS), (DPT, DPT_S, SCENES_DEPTH)

# The variants


@dataclass(frozen=True)
class Variant:
    """A choice of the head: what its row is called, and what it changes of the default recipe."""

    name: str
    changes: Mapping[str, Any] = field(default_factory=dict)


TARGET, RANKING, SIZE, OF_CLS, OF_DENSE = (
    "E.1 target", "E.2 ranking weight", "E.3 size", "E.4 training images, CLS", "E.4 training images, dense",
)  # fmt: skip
IMP, NORMS = Variant("σ²-weighted target"), Variant("block norms", {"target": "block-norm"})
WEIGHTS = {f"{weight:.1f}": Variant(f"w_rank = {weight:.1f}", {"rank_weight": weight}) for weight in (0.0, 0.5, 1.0)}
WIDTHS = {
    128: Variant("H = 128", {"width": 128}),
    256: Variant("H = 256 (default)"),
    512: Variant("H = 512", {"width": 512}),
}
HEADS = {2: Variant("2 heads", {"heads": 2}), 4: Variant("4 heads (default)"), 8: Variant("8 heads", {"heads": 8})}
LISTED: dict[str, tuple[tuple[Block, ...], tuple[Variant, ...]]] = {
    TARGET: ((*DENSE, *OF_CLASS_TOKENS), (IMP, NORMS)),
    RANKING: (OF_CLASS_TOKENS, tuple(WEIGHTS.values())),
    SIZE: (OF_CLASS_TOKENS, (*WIDTHS.values(), *HEADS.values())),
}
"""The blocks and variants of every table but the last, whose training sets depend on the scale (`training_sets`)."""
STATED = (500, 1000, 2000, 4000)
RHO, RHO_OWN, CHANGE, SPREAD, AGREE, PARAMETERS = (
    "ρ", "ρ, own target", "against the default", "spread of the target", "ρ of the two targets", "parameters",
)  # fmt: skip

COUNTS: dict[ScaleName, dict[str, int]] = {
    "tiny": {
        "seeds": 3, "steps": 80, "batch": 8, "size of scenes": 112,
        "scenes: tested": 16, "scenes: trained on": 64, "scenes: most": 128,
        "scenes: tested, dense": 8, "scenes: trained on, dense": 8, "scenes: most, dense": 16,
        "photos: tested": 16, "photos: trained on": 64, "photos: most": 128,
        "photos: tested, dense": 8, "photos: trained on, dense": 8, "photos: most, dense": 16,
    },
    "small": {
        "seeds": 3, "steps": 320, "batch": 32, "size of scenes": 112,
        "scenes: tested": 200, "scenes: trained on": 1000, "scenes: most": 4000,
        "scenes: tested, dense": 64, "scenes: trained on, dense": 256, "scenes: most, dense": 512,
        "photos: tested": 200, "photos: trained on": 1000, "photos: most": 1700,
        "photos: tested, dense": 40, "photos: trained on, dense": 96, "photos: most, dense": 192,
    },
    "paper": {
        "seeds": 3, "steps": 3000, "batch": 32, "size of scenes": 112,
        "scenes: tested": 200, "scenes: trained on": 2000, "scenes: most": 4000,
        "scenes: tested, dense": 200, "scenes: trained on, dense": 2000, "scenes: most, dense": 4000,
        "photos: tested": 200, "photos: trained on": 2000, "photos: most": 4000,
        "photos: tested, dense": 200, "photos: trained on, dense": 2000, "photos: most, dense": 4000,
    },
}  # fmt: skip
"""How many pictures at each scale, "dense" of decoders of maps, whose Jacobians cost more; "most" is the largest
training set that is tried, besides an eighth of it to choose the best step by."""


def training_sets(block: Block, scale: Scale) -> list[int]:
    """Return the sizes of E.4: of the paper's models the paper's, with the largest that the scale has; of others a
    quarter, a half and all of the usual set, and the largest."""
    counts = COUNTS[scale.name]
    usual, most = block.images(counts), block.most(counts)
    if block in (CLS, DPT):
        return sorted({*STATED, *([usual, most] if scale.has(block.model) else [])})
    return [usual // 4, usual // 2, usual, most]


def ablation_cells(scale: Scale) -> list[Cell]:
    cells = [
        _variant_cell(scale, table, block, variant)
        for table, (blocks, variants) in LISTED.items()
        for block in blocks
        for variant in variants
    ]
    for table, blocks in ((OF_CLS, OF_CLASS_TOKENS), (OF_DENSE, DENSE)):
        for block in blocks:
            for images in training_sets(block, scale):
                cells.append(_variant_cell(scale, table, block, Variant(f"n = {images}", {"images": images})))
    return cells


def _variant_cell(scale: Scale, table: str, block: Block, variant: Variant) -> Cell:
    row, counts = row_of(block, variant.name), COUNTS[scale.name]
    columns = [*RATIOS, CHANGE, RHO, *({TARGET: (RHO_OWN, SPREAD, AGREE), SIZE: (PARAMETERS,)}.get(table, ()))]
    images = variant.changes.get("images", block.images(counts))
    forwards = 3 * counts["seeds"] * counts["steps"] * counts["batch"] / 50  # of a head, about a fiftieth of a forward
    forwards = block.share * (forwards + counts["seeds"] * len(RATIOS) * block.tests(counts))
    if images == block.most(counts):  # what the smaller sets are parts of
        forwards += block.forwards(images + block.tests(counts))
    cell = block.cell(
        scale, f"{table}: {row}", [Place(table, row, column) for column in columns],
        partial(_measure_variant, table=table, block=block, variant=variant), forwards,
    )  # fmt: skip
    most = block.most(counts)
    if images > most and cell.absent is None and scale.has(block.model, block.trained):
        return replace(cell, absent=f"of its photographs at most {most} are trained on")
    return cell


def row_of(block: Block, variant: str) -> str:
    return f"{block.title} · {variant}"


# What is measured of a variant


def _measure_variant(shop: Workshop, *, table: str, block: Block, variant: Variant) -> Iterable[Measured]:
    row = row_of(block, variant.name)
    recipes = recipes_of(shop, block, variant)
    usual = recipes_of(shop, block, Variant("", {}))
    heads = [judged_by(shop, block, one) for one in recipes]
    errors, rho, own = (torch.stack([head[name] for head in heads]) for name in ("errors", "rho", "own"))
    base = torch.stack([judged_by(shop, block, one)["errors"] for one in usual])
    told = f"{recipes[0].images} images, {recipes[0].steps} steps of {min(recipes[0].batch, recipes[0].images)}"
    for number, ratio in enumerate(RATIOS):
        yield seeds_mean(shop, (table, row, ratio), errors[:, number], told)
    told_change = "of the mean error over all ratios, on the same pictures"
    yield seeds_change(shop, (table, row, CHANGE), errors.mean(1), base.mean(1), told_change)
    yield seeds_mean(shop, (table, row, RHO), rho, told)
    if table == TARGET:
        known = known_of(shop, block)
        target = known[recipes[0].target]
        patches = target[:, block.probe(shop).backbone.prefix :].double()
        yield seeds_mean(shop, (table, row, RHO_OWN), own, told)
        spread = patches.std(1) / patches.mean(1)
        yield shop.mean((table, row, SPREAD), spread, note="standard deviation over patches, of their mean")
        agree = spearman(known["importance"], target)
        yield shop.mean((table, row, AGREE), agree, note="of the exact importance and what this head learns")
    if table == SIZE:
        size = sum(parameter.numel() for parameter in shop.head(block.probe(shop), recipes[0]).parameters())
        yield Measured(table, row, PARAMETERS, float(size))


def recipes_of(shop: Workshop, block: Block, variant: Variant) -> list[HeadRecipe]:
    """Return the recipe of a variant for each seed."""
    usual = HeadRecipe(
        block.trained, block.images(counts_of(shop)), block.size(shop), shop.count("steps"), shop.count("batch")
    )
    seeds = range(shop.seed, shop.seed + shop.count("seeds"))
    return [replace(usual, **variant.changes, seed=seed) for seed in seeds]


# What the paper says


def by_paper(rows: Mapping[tuple[str, str, str], Sequence[float]]) -> dict[Place, float]:
    """Return the paper's values of whole rows (table, block, variant), one for each ratio."""
    return {
        Place(table, f"{block} · {variant}", ratio): value
        for (table, block, variant), values in rows.items()
        for ratio, value in zip(RATIOS, values, strict=True)
    }


_DEFAULT = (0.001, 0.007, 0.024, 0.060, 0.250, 0.803, 2.089)
PAPER: dict[Place, float | str] = {
    **by_paper(
        {
            (RANKING, CLS.title, "w_rank = 0.0"): (0.001, 0.007, 0.024, 0.058, 0.255, 0.811, 2.142),
            (RANKING, CLS.title, "w_rank = 0.5"): _DEFAULT,
            (RANKING, CLS.title, "w_rank = 1.0"): (0.001, 0.007, 0.024, 0.058, 0.249, 0.793, 2.171),
            (SIZE, CLS.title, "H = 128"): (0.001, 0.007, 0.024, 0.060, 0.260, 0.806, 2.124),
            (SIZE, CLS.title, "H = 256 (default)"): _DEFAULT,
            (SIZE, CLS.title, "H = 512"): (0.001, 0.007, 0.023, 0.057, 0.244, 0.788, 2.105),
            (SIZE, CLS.title, "2 heads"): (0.001, 0.006, 0.020, 0.052, 0.226, 0.741, 2.011),
            (SIZE, CLS.title, "4 heads (default)"): _DEFAULT,
            (SIZE, CLS.title, "8 heads"): (0.001, 0.007, 0.022, 0.055, 0.245, 0.802, 2.124),
            (OF_CLS, CLS.title, "n = 500"): (0.001, 0.007, 0.025, 0.066, 0.270, 0.838, 2.024),
            (OF_CLS, CLS.title, "n = 1000"): (0.001, 0.008, 0.024, 0.058, 0.246, 0.781, 2.131),
            (OF_CLS, CLS.title, "n = 2000"): _DEFAULT,
            (OF_CLS, CLS.title, "n = 4000"): (0.001, 0.007, 0.025, 0.064, 0.273, 0.872, 2.196),
            (OF_DENSE, DPT.title, "n = 500"): (0.997, 1.452, 1.787, 2.130, 2.797, 3.421, 3.927),
            (OF_DENSE, DPT.title, "n = 1000"): (1.018, 1.472, 1.835, 2.193, 2.860, 3.492, 4.020),
            (OF_DENSE, DPT.title, "n = 2000"): (0.992, 1.448, 1.870, 2.244, 2.969, 3.660, 4.243),
            (OF_DENSE, DPT.title, "n = 4000"): (0.953, 1.401, 1.815, 2.181, 2.890, 3.566, 4.117),
        }
    ),
    Place(TARGET, row_of(DPT, IMP.name), RHO_OWN): 0.20,
    Place(TARGET, row_of(DPT, NORMS.name), RHO_OWN): 0.09,
    Place(SIZE, row_of(CLS, WIDTHS[256].name), PARAMETERS): 310_000.0,
    Place(OF_CLS, row_of(CLS, "n = 2000"), RHO): 0.998,
}


# Whether it holds


def judged(found: Found, table: str, blocks: Sequence[Block]) -> list[Block]:
    """Return the blocks that have rows in a table: the paper's alone, where it has some."""
    rows = found.rows(table)
    there = [block for block in blocks if any(row.startswith(f"{block.title} · ") for row in rows)]
    return [block for block in there if block in (CLS, DPT)] or there


def range_of(row: Mapping[str, Any]) -> tuple[float, float, float]:
    """Return a row's value, low and high end."""
    value = row["value"]
    return value, value if row["low"] is None else row["low"], value if row["high"] is None else row["high"]


Change = tuple[float, float, float]


def _changes(found: Found, table: str, rows: Mapping[str, str]) -> dict[str, Change]:
    """Return the change of rows against the default head, with its interval, by what each is called."""
    known = {name: found.row(table, row, CHANGE) for name, row in rows.items()}
    return {name: range_of(row) for name, row in known.items() if row is not None}


def _of_variants(
    found: Found, table: str, blocks: Sequence[Block], variants: Sequence[Variant]
) -> dict[str, Change]:  # fmt: skip
    rows = {
        f"{block.title}, {variant.name}": row_of(block, variant.name)
        for block in judged(found, table, blocks)
        for variant in variants
    }
    return _changes(found, table, rows)


def _told(changes: Mapping[str, Change]) -> str:
    said = [
        f"{name} {value:+.1%} ({low:+.1%} to {high:+.1%}{', which decides nothing' if _vague(low, high) else ''})"
        for name, (value, low, high) in changes.items()
    ]
    return f"Errors against the default head: {'; '.join(said) or 'none measured'}."


def _vague(low: float, high: float) -> bool:
    return low <= 0 <= high and high - low > _VAGUE


def _decided(changes: Mapping[str, Change], holds: Callable[[Change], bool]) -> dict[str, bool | None]:
    """Return whether something holds of each change; None of those whose interval decides nothing."""
    return {name: None if _vague(*change[1:]) else holds(change) for name, change in changes.items()}


def _higher(change: Change) -> bool:
    return change[1] > 0


def _lower(change: Change) -> bool:
    return change[2] < 0


def _nearly_same(change: Change) -> bool:
    """Whether the errors differ by little, or not beyond the noise."""
    return abs(change[0]) <= _SAME or not (_higher(change) or _lower(change))


def _no_better(change: Change) -> bool:
    """Whether the errors are not lower, or by little, or not beyond the noise."""
    return change[0] >= -_SAME or not _lower(change)


def _norms_lower_rho(found: Found) -> Verdict:
    parts: dict[str, bool | None] = {}
    said = []
    for block in judged(found, TARGET, DENSE):
        rows = [found.row(TARGET, row_of(block, variant.name), RHO_OWN) for variant in (IMP, NORMS)]
        if rows[0] is None or rows[1] is None:
            continue
        ours, norms = range_of(rows[0]), range_of(rows[1])
        parts[f"{block.title}: norms lower"] = norms[2] < ours[1]
        parts[f"{block.title}: both weak"] = ours[1] <= _WEAK
        agree = found.value(TARGET, row_of(block, NORMS.name), AGREE)
        beside = "" if agree is None else f", which agree by {agree:.3f}"
        said.append(f"{block.title}: ρ {ours[0]:.2f} for σ², {norms[0]:.2f} for block norms{beside}")
    return overall(parts, "; ".join(said) + "." if said else "No dense decoder was measured.")


def _essential(found: Found) -> Verdict:
    changes = _of_variants(found, TARGET, DENSE, (NORMS,))
    return overall(_decided(changes, _higher), _told(changes))


def _norms_constant(found: Found) -> Verdict:
    parts: dict[str, bool | None] = {}
    said = []
    for block in judged(found, TARGET, DENSE):
        spread = [found.row(TARGET, row_of(block, variant.name), SPREAD) for variant in (IMP, NORMS)]
        if spread[0] is not None and spread[1] is not None:
            ours, norms = range_of(spread[0]), range_of(spread[1])
            parts[block.title] = norms[2] < 0.1
            said.append(f"{block.title}: block norms spread by {norms[0]:.2f} of their mean, imp* by {ours[0]:.2f}")
    return overall(parts, "; ".join(said) + "." if said else "No dense decoder was measured.")


def _rank_weight_does_little(found: Found) -> Verdict:
    changes = _of_variants(found, RANKING, OF_CLASS_TOKENS, (WEIGHTS["0.0"], WEIGHTS["1.0"]))
    return overall(_decided(changes, _nearly_same), _told(changes))


def _plateau(found: Found) -> Verdict:
    changes = _of_variants(found, SIZE, OF_CLASS_TOKENS, (WIDTHS[512], HEADS[8]))
    return overall(_decided(changes, _no_better), _told(changes))


def _two_heads(found: Found) -> Verdict:
    changes = _of_variants(found, SIZE, OF_CLASS_TOKENS, (HEADS[2],))
    parts, said = _decided(changes, _lower), ""
    for block in judged(found, SIZE, OF_CLASS_TOKENS):
        two, four = (found.columns(SIZE, row_of(block, HEADS[count].name)) for count in (2, 4))
        if set(RATIOS) <= two.keys() & four.keys():
            better = [ratio for ratio in RATIOS if two[ratio] < four[ratio]]
            whole = f"{block.title}, {HEADS[2].name}"
            parts[f"{whole}, each ratio"] = None if parts.get(whole) is None else set(RATIOS[1:]) <= set(better)
            said += f" {block.title}: the mean is lower at {', '.join(better) or 'no ratio'}."
    return overall(parts, _told(changes) + said)


def _sets(found: Found, table: str, block: Block) -> list[tuple[int, str]]:
    """Return the sizes of the training sets that were measured, with their rows."""
    rows = [row for row in found.rows(table) if row.startswith(f"{block.title} · n = ")]
    return sorted((int(row.split("= ")[1]), row) for row in rows)


def _saturates(found: Found) -> Verdict:
    """Judge whether the largest set is no better than the usual one, the one before it. Where that has too few pictures
    nothing is said, and where it has fewer than the paper's, a gain beyond it is no gain beyond 2,000."""
    parts: dict[str, bool | None] = {}
    every: dict[str, Change] = {}
    for block in judged(found, OF_CLS, OF_CLASS_TOKENS):
        *_, (usual, _), (most, row) = [(0, ""), *_sets(found, OF_CLS, block)]
        name = f"{block.title}, {most} images and not {usual}"
        changes = _changes(found, OF_CLS, {name: row})
        held = _decided(changes, _no_better).get(name)
        parts[name] = None if usual < _ENOUGH or (held is False and usual < _SATURATED) else held
        every |= changes
    return overall(parts, _told(every))


def _no_trend(found: Found) -> Verdict:
    """Judge whether errors neither fall nor rise with every larger set, or not beyond the noise."""
    parts: dict[str, bool | None] = {}
    said = []
    for block in judged(found, OF_DENSE, DENSE):
        sets = _sets(found, OF_DENSE, block)
        changes = _changes(found, OF_DENSE, {row: row for _, row in sets})
        if len(sets) < 3 or len(changes) < len(sets):
            continue
        first, *_, last = changes.values()
        steps = np.diff([value for value, _, _ in changes.values()])
        one_way = bool(all(steps < 0) or all(steps > 0))
        apart = last[2] < first[1] or first[2] < last[1]
        vague = one_way and not apart and max(high - low for _, low, high in (first, last)) > _VAGUE
        parts[block.title] = None if vague or sets[-1][0] < _ENOUGH else not (one_way and apart)
        best = [_best(found, [row for _, row in sets], ratio) for ratio in RATIOS]
        each = ", ".join(f"{value:+.1%} ({low:+.1%} to {high:+.1%})" for value, low, high in changes.values())
        said.append(
            f"{block.title}: errors against the default head {each} with {', '.join(str(n) for n, _ in sets)} images; "
            f"lowest with {', '.join(best)} of them, ratio by ratio"
        )
    return overall(parts, "; ".join(said) + "." if said else "No dense decoder was measured.")


def _best(found: Found, rows: Sequence[str], ratio: str) -> str:
    """Return the number of images of the row with the lowest error at a ratio."""
    errors = {row: found.value(OF_DENSE, row, ratio) or 0.0 for row in rows}
    return min(errors, key=lambda row: errors[row]).split("= ")[1]


def _weak_where_spread(found: Found) -> Verdict:
    """Judge whether the same head is worse at its target for depth than for the class token, beyond the noise."""
    parts: dict[str, bool | None] = {}
    known, said = dict[Block, tuple[float, float, float]](), list[str]()
    for block in (*judged(found, TARGET, DENSE), *judged(found, TARGET, OF_CLASS_TOKENS)):
        row = found.row(TARGET, row_of(block, IMP.name), RHO)
        if row is not None:
            known[block] = range_of(row)
            by = row.get("note")
            said.append(
                "{}: ρ {:.3f} ({:.3f} to {:.3f})".format(block.title, *known[block]) + (f", {by}" if by else "")
            )
    for dense, one in known.items():
        for other, token in known.items():
            if dense.dense and not other.dense and dense.drawn == other.drawn:
                parts[f"{dense.title} below {other.title}"] = one[2] < token[1]
    return overall(parts, "; ".join(said) or "No head was measured.")


def _reaches_0998(found: Found) -> Verdict:
    parts: dict[str, bool | None] = {}
    said = []
    for block in judged(found, OF_CLS, OF_CLASS_TOKENS):
        rows = {images: found.row(OF_CLS, row, RHO) for images, row in _sets(found, OF_CLS, block)}
        known = {images: range_of(row) for images, row in rows.items() if row is not None}
        if known:
            best = max(known, key=lambda images: known[images][0])
            rho, low, high = known[best]
            parts |= {f"{block.title}, above 0.95": low > 0.95, f"{block.title}, 0.998": high >= 0.997}
            said.append(f"{block.title}: at best ρ {rho:.3f} ({low:.3f} to {high:.3f}), with {best} images")
    return overall(parts, "; ".join(said) + "." if said else "No class token was measured.")


def _orders_alike(found: Found) -> str | None:
    """Say how alike the two targets of E.1 are."""
    said = [
        f"{agree:.3f} ({block.title})"
        for block in (*DENSE, *OF_CLASS_TOKENS)
        if (agree := found.value(TARGET, row_of(block, NORMS.name), AGREE)) is not None
    ]
    if not said:
        return None
    return (
        f"E.1: exact block norms and imp* order the tokens of a picture alike, with ρ {', '.join(said)}: where that is "
        "near 1, which of them a head learns cannot decide what is pruned. The paper does not say against which of "
        "the two its ρ is; here both stand."
    )


HEAD_ABLATIONS = Experiment(
    name="head-ablations",
    title="Ablations of the importance head",
    paper_label="sec:conformal_head_ablations",
    about=(
        "Target, ranking weight, size and training set of the head, by the errors of the paper's soft merge: 100 (1 − "
        "cos) of class tokens, 100 SILog of depth. Matching is by exact modes, the same for all heads, so that the "
        "score alone differs. Dense decoders get merged tokens back as copies, without Last-Layer Fusion."
    ),
    columns=(
        *(Column(ratio, "lower") for ratio in RATIOS),
        Column(CHANGE, "lower", percent=True),
        Column(RHO, "higher"),
        Column(RHO_OWN, "higher"),
        Column(SPREAD),
        Column(AGREE),
        Column(PARAMETERS, digits=6),
    ),
    cells=ablation_cells,
    counts=COUNTS,
    paper=PAPER,
    claims=(
        Claim(
            "On DPT depth at layer 4 the σ²-weighted target gives ρ ≈ 0.20, plain block norms only ρ ≈ 0.09.",
            "sec:conformal_head_ablations", _norms_lower_rho,
        ),
        Claim(
            "The head that predicts the class token's importance almost perfectly is weak for depth "
            "(ρ ≈ 0.20).", "sec:structural", _weak_where_spread,
        ),
        Claim(
            "The σ²-weighted target is essential: plain block norms prune a dense decoder worse.",
            "sec:empirical_validation", _essential,
        ),
        Claim(
            "Of a dense decoder the block-norm signal is approximately constant across tokens.",
            "sec:conformal_head_ablations", _norms_constant,
        ),
        Claim(
            "Pruning quality is nearly the same for the ranking weights 0, 0.5 and 1.", "tab:abl_rw",
            _rank_weight_does_little,
        ),
        Claim(
            "Pruning quality plateaus at width 256 and 4 heads; larger heads give no measurable improvement.",
            "tab:abl_arch", _plateau,
        ),
        Claim(
            "Two heads are slightly better than four at every ratio except 0.05, where they tie.", "tab:abl_arch",
            _two_heads,
        ),
        Claim("Pruning quality saturates by 2,000 training images on DINOv2.", "tab:abl_budget", _saturates),
        Claim("On DPT there is no consistent trend with the number of training images.", "tab:abl_budget", _no_trend),
        Claim(
            "On DINOv2 CLS L10 a head trained on 2,000 images reaches ρ = 0.998 ± 0.001 against imp*.",
            "sec:empirical_validation", _reaches_0998,
        ),
    ),
    figures=tuple(
        Figure(name, "curves", title, table=table, log=log)
        for name, title, table, log in (
            ("target", "What the head learns", TARGET, True),
            ("ranking-weight", "Weight of the ranking term", RANKING, True),
            ("size", "Size of the head", SIZE, True),
            ("images-cls", "Training images, class token", OF_CLS, True),
            ("images-dense", "Training images, dense decoders", OF_DENSE, False),
        )
    ),
    footnotes=(_orders_alike,),
)  # fmt: skip
