"""Where a low-rank metric exists: the regimes, the sweep over layers and sizes of the output, and probes of several
layers (tab:regime_taxonomy, tab:full_sweep, sec:multi_layer).

Rows of the paper are as the paper has them, at its layers; rows of other models stand beside them.
"""

from __future__ import annotations

from itertools import groupby

from pullback.experiments.diagnosis_rows import (
    COLUMNS,
    COUNTS,
    CV,
    K20,
    K50,
    K_EFF,
    NULL,
    NUMBERS,
    R90,
    R_EFF,
    RATIO,
    REGIME,
    TRUNC,
    beyond_its_outputs,
    diagnosed_cells,
    dinov2_depth,
    embedded,
    null_note,
)
from pullback.experiments.experiment import Claim, Experiment, Figure, Found, Place, Verdict, overall
from pullback.experiments.subjects import RANK, SECOND_RANK, Subject, deciding, high, low, told
from pullback.geometry import classify
from pullback.geometry.regimes import THRESHOLDS, looks_random
from pullback.probes import INPUTS

SPECTRUM = Figure("spectrum", "spectrum", "Singular values over the largest one, by row", log=True)
BEYOND_BUDGET = 10 * RANK
"""The paper calls an effective rank out of reach when it is an order of magnitude above the rank."""

NO_CLASS, NO_DEPTH = "This scale has no such class token.", "This scale has no decoder of depth."
NO_VIEWS = "This scale has no dense head of a VGGT."

# The six rows, and rows of other models

DA_L02 = Subject("DA V2 depth, L02", "depth-anything", "depth", 2, 50_176)
DA_L10 = Subject("DA V2 depth, L10 (1-layer)", "depth-anything", "depth", 10, 50_176)
CLS_L10 = Subject("DINOv2 CLS, L10", "dinov2", "cls", 10, 768)
CAMERA = Subject("VGGT camera, L16", "vggt", "camera", 16, 9)
POINTS = Subject("VGGT pointcloud, L08", "vggt", "points", 8, 192)
DEPTH = Subject("VGGT depth, L16 (full)", "vggt", "depth", 16, 50_176)
POINTS_READ = POINTS.at("VGGT pointcloud, x_vis", INPUTS)
DEPTH_READ = DEPTH.at("VGGT depth, x_vis", INPUTS)
CLIP_L10 = Subject("CLIP CLS, L10", "clip", "cls", 10, 512)
OUR_CLS = (embedded("tiny-scenes CLS, L02", "cls", 2, 192), embedded("tiny-scenes CLS, L10", "cls", 10, 192))
OUR_DEPTH = (
    embedded("tiny-scenes depth 8×8, L02", "depth-8x8", 2, 64),
    embedded("tiny-scenes depth 8×8, L10", "depth-8x8", 10, 64),
    dinov2_depth(16, 2),
    dinov2_depth(16, 10),
    Subject("saliency, L02", "saliency", "saliency", 2, 16_384),
    Subject("saliency, L10", "saliency", "saliency", 10, 16_384),
)
OUR_CAMERA = (embedded("tiny-views camera, L04", "camera-1", 4, 9),)
OUR_POINTS = embedded("tiny-views points, L04", "points", 4, 192)
OUR_VIEWS = (OUR_POINTS, embedded("tiny-views depth 8×8, L04", "depth-8x8", 4, 128))
REGIMES = "regimes"
REGIME_COLUMNS = (K20, CV, NULL, R_EFF, R90, REGIME)


def four_regimes(found: Found) -> Verdict:
    """Judge the paper's six rows alone where all of them were measured, else all rows that there are."""
    papers = [own.row for own in (DA_L02, DA_L10, CLS_L10, CAMERA, POINTS, DEPTH)]
    rows, seen = found.rows(REGIMES), dict[float, str]()
    for row in papers if set(papers) <= set(rows) else rows:
        number = found.value(REGIMES, row, REGIME)
        if number is not None:
            seen.setdefault(number, row)
    if not seen:
        return Verdict("not at this scale", "No row was measured.")
    there = [
        f"({label}) {seen[number]}, κ(20) {low(found, REGIMES, seen[number], K20):.1%} to "
        f"{high(found, REGIMES, seen[number], K20):.1%}"
        for label, number in NUMBERS.items()
        if number in seen
    ]
    missing = [f"({label})" for label, number in NUMBERS.items() if number not in seen]
    why = f"Found {'; '.join(there)}" + (f"; no row is in {' or '.join(missing)}." if missing else ".")
    return overall({label: number in seen for label, number in NUMBERS.items()}, why)


def rich(found: Found) -> Verdict:
    parts: dict[str, bool | None] = {}
    rows = [own.row for own in deciding(found, REGIMES, (POINTS, DEPTH), OUR_VIEWS, (K20, R_EFF))]
    for row in rows:
        parts[f"{row} is beyond any budget"] = low(found, REGIMES, row, R_EFF) >= BEYOND_BUDGET
        parts[f"{row} is mostly missed"] = high(found, REGIMES, row, K20) < 0.5
    return overall(parts, told(found, REGIMES, rows, {K20: "{:.1%}", R_EFF: "{:.3g}"}, NO_VIEWS))


def low_rank_spread(found: Found) -> Verdict:
    parts: dict[str, bool | None] = {}
    rows = [own.row for own in deciding(found, REGIMES, (DA_L02, DA_L10), OUR_DEPTH, (K20, R_EFF, CV, NULL))]
    for row in rows:
        parts[f"{row} has a low rank"] = has_low_rank(found, row)
        parts[f"{row} is spread"] = looks_random(high(found, REGIMES, row, CV), found.columns(REGIMES, row)[NULL])
    why = told(
        found,
        REGIMES,
        rows,
        {K20: "{:.1%}", R_EFF: "{:.3g}", CV: "{:.3g}", NULL: "{:.2g}"},
        NO_DEPTH,
    )
    return overall(parts, why)


def misses_but_concentrated(found: Found, papers: tuple[Subject, ...], ours: tuple[Subject, ...]) -> Verdict:
    parts: dict[str, bool | None] = {}
    rows = [own.row for own in deciding(found, REGIMES, papers, ours, (K20, CV))]
    for row in rows:
        parts[f"{row} misses most"] = high(found, REGIMES, row, K20) < 0.5
        parts[f"{row} is concentrated"] = low(found, REGIMES, row, CV) >= THRESHOLDS.concentrated_cv
    return overall(parts, told(found, REGIMES, rows, {K20: "{:.1%}", CV: "{:.3g}"}, NO_CLASS))


def rank_bounded(found: Found) -> Verdict:
    parts: dict[str, bool | None] = {}
    rows = [own.row for own in deciding(found, REGIMES, (CAMERA,), OUR_CAMERA, (K20, R_EFF, REGIME))]
    for row in rows:
        values = found.columns(REGIMES, row)
        parts[f"{row} is captured"] = values[K20] > 0.999
        parts[f"{row} is bounded"] = values[REGIME] == NUMBERS["iv"] and values[R_EFF] <= 9
    return overall(
        parts, told(found, REGIMES, rows, {K20: "{:.1%}", R_EFF: "{:.3g}", R90: "{:.3g}"}, "This scale has no camera.")
    )


def views_concentrated(found: Found) -> Verdict:
    rows = [own.row for own in deciding(found, REGIMES, (DEPTH,), OUR_VIEWS[1:], (K20, CV, NULL, R_EFF))]
    parts: dict[str, bool | None] = {}
    for row in rows:
        parts[f"{row} is not spread"] = not looks_random(
            low(found, REGIMES, row, CV), found.columns(REGIMES, row)[NULL]
        )
        parts[f"{row} lacks rank"] = not has_low_rank(found, row)
    columns = {CV: "{:.3g}", NULL: "{:.2g}", K20: "{:.1%}", R_EFF: "{:.3g}"}
    return overall(parts, told(found, REGIMES, rows, columns, NO_VIEWS))


def has_low_rank(found: Found, row: str) -> bool:
    budget = THRESHOLDS.rank_budget * RANK
    return low(found, REGIMES, row, K20) >= THRESHOLDS.low_rank_kappa and high(found, REGIMES, row, R_EFF) <= budget


def two_places(found: Found) -> str | None:
    rows = [own.row for own in (POINTS, *OUR_VIEWS) if found.value(REGIMES, own.row, R_EFF) is not None]
    if not rows:
        return None
    return (
        "The paper's rows of VGGT points and depth take κ(20) and r_eff at two different places. At one place a κ(20) "
        "of 96.6 % of 192 directions leaves an effective rank of at most 25. Measured here: "
        f"{told(found, REGIMES, rows, {K20: '{:.1%}', R_EFF: '{:.3g}'})}."
    )


TAXONOMY = Experiment(
    name="taxonomy",
    title="The regimes of six decoders, and of ours",
    paper_label="tab:regime_taxonomy",
    about="How much 20 directions capture, how unevenly they lie on tokens, and the effective rank of all of them.",
    columns=tuple(COLUMNS[name] for name in REGIME_COLUMNS),
    cells=lambda scale: diagnosed_cells(
        REGIMES,
        (DA_L02, DA_L10, CLS_L10, CAMERA, POINTS, DEPTH, CLIP_L10, *OUR_CLS, *OUR_DEPTH, *OUR_CAMERA, *OUR_VIEWS),
        lambda subject: REGIME_COLUMNS,
        scale,
        ranked_at={POINTS.row: POINTS_READ, DEPTH.row: DEPTH_READ},
    ),
    counts=COUNTS,
    paper={
        Place(REGIMES, own.row, column): value
        for own, values in (
            (DA_L02, (0.956, 0.026, 34, "≈ 15", "(ii)")),
            (DA_L10, (0.966, 0.026, 20, None, "(ii)")),
            (CLS_L10, (0.334, 4.06, 270, None, "(iii)")),
            (CAMERA, ("≈ 100 %", "N/A", 9, "≤ 9", "(iv)")),
            (POINTS, (0.966, 0.59, 212, "≫ 100", "(i)")),
            (DEPTH, (0.762, 0.63, 282, "≫ 100", "(i)")),
        )
        for column, value in zip((K20, CV, R_EFF, R90, REGIME), values, strict=True)
        if value is not None
    },
    claims=(
        Claim("The rows fall into four distinct regimes.", "sec:regime_taxonomy", four_regimes),
        Claim(
            "(i) VGGT's points and depth: effective ranks of 212 and 282 exceed any rank budget by an order of "
            "magnitude, and no rank-r metric captures most of the task.",
            "sec:regime_taxonomy",
            rich,
        ),
        Claim(
            "(ii) Depth Anything at L02 and L10 fits the rank budget (κ(20) of 96 and 97 %), with directions spread "
            "evenly over tokens (CV 0.026).",
            "sec:regime_taxonomy",
            low_rank_spread,
        ),
        Claim(
            "(iii) 20 directions capture only a third of DINOv2's class token at L10, but few tokens carry it "
            "(CV 4.06).",
            "sec:regime_taxonomy",
            lambda found: misses_but_concentrated(found, (CLS_L10,), (CLIP_L10, OUR_CLS[1])),
        ),
        Claim(
            "CLIP's class token behaves like DINOv2's.",
            "sec:regime_taxonomy",
            lambda found: misses_but_concentrated(found, (CLIP_L10,), ()),
        ),
        Claim(
            "(iv) VGGT's camera has nine outputs, so κ(20) is 100 % by the bound on the rank alone.",
            "sec:regime_taxonomy",
            rank_bounded,
        ),
        Claim(
            "VGGT's depth has a high CV (0.63) and not one near zero: its obstacle is rank, not delocalization.",
            "sec:full_sweep_results",
            views_concentrated,
        ),
    ),
    figures=(SPECTRUM,),
    footnotes=(
        null_note(REGIMES, (DA_L02, DA_L10, *OUR_DEPTH)),
        two_places,
        beyond_its_outputs(REGIMES, (POINTS, OUR_POINTS)),
    ),
)

# The sweep over layers and sizes of the output

SWEEP = "sweep"
SWEEP_COLUMNS = (K20, TRUNC, R_EFF, RATIO, CV, NULL)
LAYERS = (2, 5, 8, 10)
DA_SWEEP = tuple(
    Subject(f"DA, L{layer:02d}, {cells}×{cells}", "depth-anything", f"depth-{cells}x{cells}", layer, cells**2)
    for layer, cells in ((5, 16), (5, 8), (5, 32), (8, 16), (10, 16), (10, 8), (10, 32))
)
DINOV2_SWEEP = tuple(Subject(f"DINOv2 CLS, L{layer:02d}", "dinov2", "cls", layer, 768) for layer in LAYERS)
CLS_SWEEP = (
    *(Subject(f"CLIP CLS, L{layer:02d}", "clip", "cls", layer, 512) for layer in LAYERS),
    *(embedded(f"tiny-scenes CLS, L{layer:02d}", "cls", layer, 192) for layer in LAYERS),
)
DENSE_SWEEP = (
    *(embedded(f"tiny-scenes depth 8×8, L{layer:02d}", "depth-8x8", layer, 64) for layer in LAYERS),
    *(embedded(f"tiny-scenes depth 16×16, L{layer:02d}", "depth-16x16", layer, 256) for layer in (2, 10)),
    *(dinov2_depth(cells, layer) for layer, cells in ((2, 16), (5, 16), (5, 8), (8, 16), (10, 16), (10, 8))),
    *(Subject(f"saliency, L{layer:02d}", "saliency", "saliency", layer, 16_384) for layer in (2, 10)),
)


def falls_with_depth(found: Found) -> Verdict:
    parts: dict[str, bool | None] = {}
    subjects = deciding(found, SWEEP, DINOV2_SWEEP, CLS_SWEEP, (K20,))
    for model, group in groupby(subjects, lambda own: own.model):
        rows = [found.row(SWEEP, own.row, K20) for own in group]
        first, last = rows[0], rows[-1]
        if first is not None and last is not None and len(rows) > 1:
            parts[model] = first["low"] > last["high"]
    return overall(parts, told(found, SWEEP, [own.row for own in subjects], {K20: "{:.1%}"}, NO_CLASS))


def cls_is_marginal(found: Found) -> Verdict:
    rows = [own.row for own in deciding(found, SWEEP, DINOV2_SWEEP, CLS_SWEEP, (K20, R_EFF, CV))]
    parts: dict[str, bool | None] = {row: label_of(found, row) == "iii" for row in rows}
    why = told(found, SWEEP, rows, {K20: "{:.1%}", R_EFF: "{:.3g}", CV: "{:.3g}"}, NO_CLASS)
    return overall(parts, why)


def label_of(found: Found, row: str) -> str:
    """Return the regime of a row of the sweep; all of them have more than 20 outputs."""
    values = found.columns(SWEEP, row)
    return classify(kappa=values[K20], effective_rank=values[R_EFF], cv=values[CV], rank=RANK, max_rank=RANK + 1).label


def dense_is_low_rank(found: Found) -> Verdict:
    rows = [own.row for own in deciding(found, SWEEP, DA_SWEEP, DENSE_SWEEP, (K20, R_EFF, RATIO))]
    parts: dict[str, bool | None] = {}
    for row in rows:
        values = found.columns(SWEEP, row)
        parts[f"{row} is captured"] = values[K20] >= 0.96
        parts[f"{row} has a low rank"] = values[R_EFF] <= 6  # "about 4"
        parts[f"{row} has no tail"] = values[RATIO] <= 1.4  # "about 1.2"
    why = told(found, SWEEP, rows, {K20: "{:.1%}", R_EFF: "{:.3g}", RATIO: "{:.2g}"}, NO_DEPTH)
    return overall(parts, why)


def truncated_note(found: Found) -> str | None:
    rows = [row for row in found.rows(SWEEP) if found.value(SWEEP, row, TRUNC) is not None]
    if not rows:
        return None
    most = max(rows, key=lambda row: found.columns(SWEEP, row)[TRUNC])
    cls = [own.row for own in (*DINOV2_SWEEP, *CLS_SWEEP) if own.row in rows]
    return (
        "The effective rank of 20 singular values is at most 20, so the paper's r_eff trunc of 46 to 64 for the class "
        f"token cannot be of r = 20. Measured here: {told(found, SWEEP, cls, {TRUNC: '{:.1f}'})}; the largest of all "
        f"rows is {found.columns(SWEEP, most)[TRUNC]:.1f} ({most})."
    )


FULL_SWEEP = Experiment(
    name="full-sweep",
    title="The diagnosis over layers and sizes of the output",
    paper_label="tab:full_sweep",
    about="Depth averaged to few cells, and the class token, layer by layer.",
    columns=tuple(COLUMNS[name] for name in SWEEP_COLUMNS),
    cells=lambda scale: diagnosed_cells(
        SWEEP, (*DA_SWEEP, *DINOV2_SWEEP, *CLS_SWEEP, *DENSE_SWEEP), lambda subject: SWEEP_COLUMNS, scale
    ),
    counts=COUNTS,
    paper={
        Place(SWEEP, own.row, column): value
        for own, values in zip(
            (*DA_SWEEP, *DINOV2_SWEEP),
            (
                (0.9630, 3.54, 4.3, 1.2, 1.06),
                (0.9636, 3.18, 4.2, 1.3, 1.17),
                (0.9677, 3.67, 4.4, 1.2, 0.82),
                (0.9753, 2.95, 3.6, 1.2, 1.16),
                (0.9713, 3.45, 3.9, 1.1, 1.26),
                (0.9759, 3.19, 4.2, 1.3, 1.44),
                (0.9621, 3.53, 4.2, 1.2, 0.98),
                (0.5829, 46.46, 90.8, 2.0, 0.83),
                (0.5141, 52.91, 122.1, 2.3, 1.12),
                (0.4188, 59.58, 189.9, 3.2, 2.03),
                (0.3336, 63.68, 270.2, 4.2, 4.06),
            ),
            strict=True,
        )
        for column, value in zip(SWEEP_COLUMNS[:5], values, strict=True)
    },
    claims=(
        Claim(
            "κ(20) of DINOv2's class token falls from 58 % at L02 to 33 % at L10.",
            "sec:full_sweep_results",
            falls_with_depth,
        ),
        Claim("DINOv2's class token is in regime (iii) at every layer.", "sec:full_sweep_results", cls_is_marginal),
        Claim(
            "Depth Anything at a single layer has a low rank: κ(20) ≥ 96 %, r_eff ≈ 4, no tail (ratio ≈ 1.2).",
            "sec:full_sweep_results",
            dense_is_low_rank,
        ),
    ),
    figures=(SPECTRUM,),
    footnotes=(truncated_note, null_note(SWEEP, (*DA_SWEEP, *DENSE_SWEEP))),
)

# Probes of several layers: what the decoder reads

PROBED = "probes"
DA_READ = Subject("DA V2, x_dpt", "depth-anything", "depth", INPUTS, 50_176)
OUR_READ = (embedded("tiny-scenes depth 16×16, x_dpt", "depth-16x16", INPUTS, 256), dinov2_depth(16, INPUTS))
OUR_SINGLE = (embedded("tiny-scenes depth 16×16, L02", "depth-16x16", 2, 256), dinov2_depth(16, 2))
POINTS_VIS = embedded("tiny-views points, x_vis", "points", INPUTS, 192)
OUR_VIS = (POINTS_VIS, embedded("tiny-views depth 8×8, x_vis", "depth-8x8", INPUTS, 128))


def probed_columns(subject: Subject) -> tuple[str, ...]:
    several = (K_EFF,) if subject.layer == INPUTS else ()
    return (K20, K50, R_EFF, R90, *several, CV, NULL)


def tractable_at_50(found: Found) -> Verdict:
    rows = [own.row for own in deciding(found, PROBED, (DA_READ,), OUR_READ, (K50, R_EFF))]
    parts: dict[str, bool | None] = {}
    for row in rows:
        parts[f"{row} is captured by 50"] = high(found, PROBED, row, K50) >= 0.9  # the paper's own value
        parts[f"{row} has a rank below 50"] = high(found, PROBED, row, R_EFF) <= SECOND_RANK
    return overall(parts, told(found, PROBED, rows, {K50: "{:.1%}", R_EFF: "{:.3g}"}, NO_DEPTH))


def close_to_single(found: Found) -> Verdict:
    """Judge each probe of several layers against the same decoder at L02; "close" is within a factor of two."""
    reads = deciding(found, PROBED, (DA_READ,), OUR_READ, (R_EFF,))
    parts: dict[str, bool | None] = {}
    singles = []
    for own in reads:
        single = next(row for row in (DA_L02, *OUR_SINGLE) if (row.model, row.decoder) == (own.model, own.decoder))
        alone = found.value(PROBED, single.row, R_EFF)
        if alone is not None:
            singles.append(single)
            parts[own.row] = 0.5 * alone <= found.columns(PROBED, own.row)[R_EFF] <= 2 * alone
    rows = [own.row for own in (*reads, *singles)]
    return overall(parts, told(found, PROBED, rows, {R_EFF: "{:.3g}"}, NO_DEPTH))


def views_are_rich(found: Found) -> Verdict:
    rows = [own.row for own in deciding(found, PROBED, (POINTS_READ, DEPTH_READ), OUR_VIS, (K50, R_EFF, R90))]
    parts: dict[str, bool | None] = {}
    for row in rows:
        parts[f"{row} is rich"] = low(found, PROBED, row, R_EFF) >= BEYOND_BUDGET
        parts[f"{row} needs more than 100"] = low(found, PROBED, row, R90) > 100
        parts[f"{row} is missed by 50"] = high(found, PROBED, row, K50) < 0.9
    why = told(found, PROBED, rows, {K50: "{:.1%}", R_EFF: "{:.3g}", R90: "{:.3g}"}, NO_VIEWS)
    return overall(parts, why)


def pairs_of_families(found: Found) -> tuple[list[Subject], list[Subject]]:
    """Return the probes of closely and of widely spaced layers that are compared."""
    close = deciding(found, PROBED, (DA_READ,), OUR_READ, (R_EFF, K_EFF))
    wide = deciding(found, PROBED, (DEPTH_READ,), OUR_VIS[1:], (R_EFF, K_EFF))
    return (close, wide) if close and wide else ([], [])


def orthogonal_layers(found: Found) -> Verdict:
    close, wide = pairs_of_families(found)
    parts: dict[str, bool | None] = {
        **{own.row: high(found, PROBED, own.row, K_EFF) <= 1.5 for own in close},
        **{own.row: low(found, PROBED, own.row, K_EFF) >= 3 for own in wide},
    }
    rows = [own.row for own in (*close, *wide)]
    return overall(parts, told(found, PROBED, rows, {K_EFF: "{:.2f}"}, "This scale has not both kinds of decoders."))


def gap_of_ranks(found: Found) -> Verdict:
    """Judge whether more rank goes with more independent layers, beyond what pictures differ by."""
    close, wide = pairs_of_families(found)
    parts: dict[str, bool | None] = {}
    for one in close:
        for other in wide:
            for column, what in ((R_EFF, "rank"), (K_EFF, "independent layers")):
                near, far = found.row(PROBED, one.row, column), found.row(PROBED, other.row, column)
                assert near is not None and far is not None  # of those that decide
                parts[f"{other.row} has more {what} than {one.row}"] = far["low"] > near["high"]
    rows = [own.row for own in (*close, *wide)]
    why = told(found, PROBED, rows, {R_EFF: "{:.3g}", K_EFF: "{:.2f}"}, "This scale has not both kinds of decoders.")
    return overall(parts, why)


def reversal(found: Found) -> Verdict:
    """Judge whether the CV is that of chance at L02 and high at what the decoder reads."""
    reads = deciding(found, PROBED, (DA_READ,), OUR_READ, (CV,))
    parts: dict[str, bool | None] = {}
    rows = []
    for own in reads:
        single = next(row for row in (DA_L02, *OUR_SINGLE) if (row.model, row.decoder) == (own.model, own.decoder))
        alone = found.columns(PROBED, single.row)
        if CV in alone and NULL in alone:
            rows += [single.row, own.row]
            parts[f"{single.row} is spread"] = looks_random(high(found, PROBED, single.row, CV), alone[NULL])
            parts[f"{own.row} is concentrated"] = low(found, PROBED, own.row, CV) >= THRESHOLDS.concentrated_cv
    return overall(parts, told(found, PROBED, rows, {CV: "{:.3g}", NULL: "{:.2g}"}, NO_DEPTH))


def few_directions(found: Found) -> Verdict:
    rows = [own.row for own in deciding(found, PROBED, (DA_L02,), OUR_SINGLE, (R90,))]
    cameras = [own.row for own in deciding(found, PROBED, (CAMERA,), OUR_CAMERA, (R90,))]
    parts: dict[str, bool | None] = {row: high(found, PROBED, row, R90) <= RANK for row in rows}
    parts |= {row: high(found, PROBED, row, R90) <= 9 for row in cameras}
    return overall(parts, told(found, PROBED, [*rows, *cameras], {R90: "{:.3g}"}, "This scale has neither."))


MULTI_LAYER = Experiment(
    name="multi-layer",
    title="Decoders that read several layers",
    paper_label="sec:multi_layer",
    about="x_dpt and x_vis are the layers that a decoder reads, side by side; K_eff says how many of them count.",
    columns=tuple(COLUMNS[name] for name in (K20, K50, R_EFF, R90, K_EFF, CV, NULL)),
    cells=lambda scale: diagnosed_cells(
        PROBED,
        (DA_READ, DA_L02, POINTS_READ, DEPTH_READ, CAMERA, *OUR_READ, *OUR_SINGLE, *OUR_VIS, *OUR_CAMERA),
        probed_columns,
        scale,
    ),
    counts=COUNTS,
    paper={
        Place(PROBED, DA_READ.row, K50): 0.900,
        Place(PROBED, DA_READ.row, R_EFF): 36.0,
        Place(PROBED, DA_READ.row, K_EFF): 1.1,
        Place(PROBED, DA_READ.row, CV): 2.381,
        Place(PROBED, DA_L02.row, R_EFF): "20 to 34",
        Place(PROBED, DA_L02.row, R90): "≈ 15",
        Place(PROBED, DA_L02.row, CV): 0.026,
        Place(PROBED, POINTS_READ.row, R_EFF): 212,
        Place(PROBED, POINTS_READ.row, R90): "≫ 100",
        Place(PROBED, DEPTH_READ.row, K50): 0.578,
        Place(PROBED, DEPTH_READ.row, R_EFF): 282.6,
        Place(PROBED, DEPTH_READ.row, R90): "≫ 100",
        Place(PROBED, DEPTH_READ.row, K_EFF): 4,
        Place(PROBED, CAMERA.row, R_EFF): "≤ 9",
        Place(PROBED, CAMERA.row, R90): "≤ 9",
    },
    claims=(
        Claim(
            "Depth Anything at the four layers that it reads is tractable at r = 50: κ(50) is 0.900, r_eff 36.",
            "sec:multi_layer",
            tractable_at_50,
        ),
        Claim(
            "Reading four layers costs Depth Anything little rank: r_eff 36 against 20 to 34 at L02.",
            "sec:multi_layer",
            close_to_single,
        ),
        Claim(
            "VGGT's points and depth at x_vis are intractable: r_eff 212 and 282.6, κ(50) 0.578, r_0.90 ≫ 100.",
            "sec:multi_layer",
            views_are_rich,
        ),
        Claim(
            "Layers close together are aligned (Depth Anything: K_eff 1.1 of 4), layers far apart orthogonal "
            "(VGGT: 4 of 4).",
            "sec:multi_layer",
            orthogonal_layers,
        ),
        Claim(
            "It is orthogonal layers that make the rank, 7.8 times more in VGGT than in Depth Anything, not the "
            "reading of several.",
            "sec:multi_layer",
            gap_of_ranks,
        ),
        Claim(
            "The CV of Depth Anything turns from 0.026 at L02 (spread evenly) to 2.381 at x_dpt (concentrated).",
            "sec:multi_layer",
            reversal,
        ),
        Claim(
            "90 % of the energy takes about 15 directions for Depth Anything at L02 and at most 9 for the camera.",
            "sec:multi_layer",
            few_directions,
        ),
    ),
    figures=(SPECTRUM,),
    footnotes=(
        null_note(PROBED, (DA_L02, DA_READ, *OUR_SINGLE, *OUR_READ)),
        beyond_its_outputs(PROBED, (POINTS_READ, POINTS_VIS)),
    ),
)
