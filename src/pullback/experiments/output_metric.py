"""Does the geometry of the camera depend on how its outputs are measured? (Appendix "Choice of output metric".)

The same Jacobian of VGGT's camera is read under two output metrics: Euclidean, and the SO(3)-aware one of
`CameraMetric`, which the paper describes without its units; rows with other units beside it show what they change.
`pullback.experiments.camera_metric` compares the two on folders of views of one's own.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor

from pullback.data.images import find_images
from pullback.experiments.camera_metric import compare_metrics
from pullback.experiments.experiment import Cell, Claim, Column, Experiment, Found, Measured, Place, Verdict, overall
from pullback.experiments.scales import Scale, ScaleName
from pullback.experiments.subjects import RANK, VIEWS, constant, high, low, places, told
from pullback.experiments.workshop import Workshop
from pullback.vggt.camera_metric import FREE, POSE, CameraMetric
from pullback.vggt.views import find_scenes

COUNTS: dict[ScaleName, dict[str, int]] = {
    "tiny": {"scenes": 12, "view size": 56},
    "small": {"scenes": 24, "view size": 112},
    "paper": {"scenes": 50, "view size": 112},
}
TABLE = "two metrics"
KAPPA, KAPPA_SO3, LOW, LOW_SO3 = "κ(20)", "κ(20) under SO(3)", "κ(4)", "κ(4) under SO(3)"
R_EFF, R_EFF_SO3, RHO, RHO_PATCHES = "r_eff", "r_eff under SO(3)", "ρ", "ρ of patches"
AGREE, AGREE_PATCHES, CHANCE = "50 % sets agree", "50 % sets of patches agree", "by chance"
COLUMNS = (KAPPA, KAPPA_SO3, LOW, LOW_SO3, R_EFF, R_EFF_SO3, RHO, RHO_PATCHES, AGREE, AGREE_PATCHES, CHANCE)
_PAIRS = ((LOW, LOW_SO3), (LOW_SO3, LOW))
LOW_RANK = 4
"""A rank that can tell the metrics apart: kappa(20) is 1 for both where there are at most 20 directions."""
PAPERS, OURS = "VGGT camera, L16", "tiny-views camera, L05"
OUR_ROWS = {OURS: 1.0, **{f"{OURS}, translations in units of {unit:g}": unit for unit in (0.5, 2.0)}}
"""Rows of the embedded model, and the length of a translation that weighs as much as a radian."""
NO_CAMERA = "This scale has no camera of a VGGT."
VGGT_WIDTH = 224
_PART = 4


def cells(scale: Scale) -> list[Cell]:
    count, size = (COUNTS[scale.name][name] for name in ("scenes", "view size"))
    products = (POSE + FREE) * VIEWS
    area = (size / 112) ** 2 / 2  # of two views, over the four of the model's usual scene
    return [
        Cell(
            PAPERS, places(TABLE, PAPERS, COLUMNS), partial(measure, row=PAPERS, model="vggt", layer=16), model="vggt",
            data="multiview", forwards=products * count,
        ),
        *(
            Cell(
                row, places(TABLE, row, COLUMNS), partial(measure, row=row, model="tiny-views", layer=5, unit=unit),
                model="tiny-views", data="scenes", forwards=products * count * area,
            )
            for row, unit in OUR_ROWS.items()
        ),
    ]  # fmt: skip


def measure(shop: Workshop, *, row: str, model: str, layer: int, unit: float = 1.0) -> list[Measured]:
    """Compare the metrics on every scene. ``unit``: the length of a translation that weighs as much as a radian."""
    probe, metric = shop.probe(model, "camera", layer), CameraMetric(translation_unit=unit)
    found = [compare_metrics(probe, part, metric, rank=RANK) for part in scenes(shop, model)]
    values = {
        KAPPA: [own.kappa[0] for own in found],
        KAPPA_SO3: [own.kappa[1] for own in found],
        LOW: [own.captured[0][:, LOW_RANK - 1] for own in found],
        LOW_SO3: [own.captured[1][:, LOW_RANK - 1] for own in found],
        R_EFF: [own.effective_rank[0] for own in found],
        R_EFF_SO3: [own.effective_rank[1] for own in found],
        RHO: [own.spearman_all for own in found],
        RHO_PATCHES: [own.spearman_patches for own in found],
        AGREE: [own.agreement_all for own in found],
        AGREE_PATCHES: [own.agreement_patches for own in found],
    }
    least = min(own.captured[1].shape[1] for own in found)
    note = f"1 whatever the weights are: of {least} directions" if least <= RANK else None
    return [
        *(
            shop.mean(Place(TABLE, row, name), torch.cat(parts), over="scenes", note=note if "(20)" in name else None)
            for name, parts in values.items()
        ),
        constant(Place(TABLE, row, CHANCE), 0.5, "two sets of half of the tokens, drawn at random"),
    ]


def scenes(shop: Workshop, model: str) -> Iterable[Tensor]:
    """Return scenes [B, S, 3, H, W] in parts: drawn ones, or of a folder as many as there are, up to what is counted,
    one at a time, since they may differ in size."""
    count = shop.count("scenes")
    if model == "tiny-views":
        return shop.scenes(count, VIEWS, shop.count("view size")).split(_PART)
    folders = find_scenes(shop.scale.data["multiview"])[:count]
    backbone = shop.backbone(model)
    return (backbone.load_views(find_images(own.folder), VGGT_WIDTH).to(shop.device) for own in folders)


def rows_of(found: Found, *columns: str) -> list[str]:
    """Return the row that decides: that of the paper's model, else ours. One that lacks a column decides nothing."""
    there = [row for row in (PAPERS, OURS) if set(columns) <= found.columns(TABLE, row).keys()]
    return there[:1]


def same_tractability(found: Found) -> Verdict:
    """Judge whether kappa(20) is the paper's under both metrics, and kappa(4), which can tell them apart, differs by
    little, or not beyond the intervals."""
    parts: dict[str, bool | None] = {}
    rows = rows_of(found, KAPPA, KAPPA_SO3, LOW, LOW_SO3)
    for row in rows:
        values = found.columns(TABLE, row)
        overlap = all(high(found, TABLE, row, one) >= low(found, TABLE, row, other) for one, other in _PAIRS)
        parts[f"{row}, κ(20)"] = min(low(found, TABLE, row, name) for name in (KAPPA, KAPPA_SO3)) >= 0.985
        parts[f"{row}, κ(4)"] = overlap or abs(values[LOW] - values[LOW_SO3]) <= 0.02
    columns = dict.fromkeys((KAPPA, KAPPA_SO3, LOW, LOW_SO3), "{:.1%}")
    columns |= dict.fromkeys((R_EFF, R_EFF_SO3), "{:.3g}")
    return overall(parts, told(found, TABLE, rows, columns, NO_CAMERA))


def same_ranking(found: Found) -> Verdict:
    rows = rows_of(found, RHO)
    parts: dict[str, bool | None] = {row: low(found, TABLE, row, RHO) >= 0.98 for row in rows}
    columns = {RHO: "{:.3f}", RHO_PATCHES: "{:.3f}"}
    return overall(parts, told(found, TABLE, rows, columns, NO_CAMERA))


def same_sets(found: Found) -> Verdict:
    """Judge whether at most one token in twenty is treated differently, and the paper's share within the interval."""
    rows = rows_of(found, AGREE)
    parts: dict[str, bool | None] = {
        row: found.columns(TABLE, row)[AGREE] >= 0.95 and high(found, TABLE, row, AGREE) >= 0.965 for row in rows
    }
    columns = {AGREE: "{:.1%}", AGREE_PATCHES: "{:.1%}"}
    return overall(parts, told(found, TABLE, rows, columns, NO_CAMERA))


def bounded_note(found: Found) -> str | None:
    values = found.columns(TABLE, OURS)
    if not {LOW, LOW_SO3} <= values.keys():
        return None
    return (
        f"A camera has {POSE} outputs a view, {FREE} without the length of its quaternion, so κ(20) is 1 for one and "
        "two views whatever the weights are, and says nothing about the metrics. κ(4) can tell them apart: here "
        f"{values[LOW]:.1%} and {values[LOW_SO3]:.1%}."
    )


def units_note(found: Found) -> str | None:
    rows = [row for row in OUR_ROWS if found.value(TABLE, row, RHO) is not None]
    if len(rows) < 2:
        return None
    return (
        'The paper says that its metric rescales to "comparable units" and does not name them. With other units: '
        f"{told(found, TABLE, rows, {RHO: '{:.3f}', AGREE: '{:.1%}'})}."
    )


OUTPUT_METRIC = Experiment(
    name="output-metric",
    title="The camera under an output metric that knows rotations",
    paper_label="sec:pullback_vit",
    about="One Jacobian under the Euclidean metric of nine numbers a view, and under one of rotations in radians.",
    columns=(
        *(Column(name, percent=True) for name in (KAPPA, KAPPA_SO3, LOW, LOW_SO3)), Column(R_EFF), Column(R_EFF_SO3),
        Column(RHO), Column(RHO_PATCHES), Column(AGREE, percent=True), Column(AGREE_PATCHES, percent=True),
        Column(CHANCE, percent=True),
    ),
    cells=cells,
    counts=COUNTS,
    paper={
        Place(TABLE, PAPERS, column): value
        for column, value in {KAPPA: 0.99, KAPPA_SO3: 0.99, RHO: 0.995, AGREE: 0.97}.items()
    },
    claims=(
        Claim(
            "An SO(3)-aware output metric leaves the tractability unchanged: κ is 0.99 under both.", "sec:pullback_vit",
            same_tractability,
        ),
        Claim("Token importances under the two metrics rank alike: ρ = 0.995.", "sec:pullback_vit", same_ranking),
        Claim("The two sets of tokens that a 50 % pruning removes agree on 97 %.", "sec:pullback_vit", same_sets),
    ),
    footnotes=(bounded_note, units_note),
)  # fmt: skip
