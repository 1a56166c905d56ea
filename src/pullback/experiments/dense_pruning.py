"""Removing tokens of dense decoders: one stage at all ratios, other resolutions and data, several stages.

Every number is an error of the map against the unpruned model's on held-out pictures (`dense_errors`). Whether one way
is better than another is judged by their difference on the same pictures, which has rows of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pullback.experiments.dense_claims import (
    AGAINST_RANDOM,
    AGAINST_TOME,
    CHANGE,
    CHANGED,
    DIFFERENCES,
    DRAWN_AGAINST_TOME,
    EQUAL_OPERATIONS,
    EQUAL_SHARE,
    FOUR,
    FUSED,
    LARGER,
    LOWEST_AT,
    MERGED,
    ONE,
    OURS,
    PRUNING_CLAIMS,
    ROBUSTNESS_CLAIMS,
    ROOM_GROUPS,
    SPREAD,
    STAGES_CLAIMS,
    STAGES_RATIOS,
    STD,
    TWO,
    cause_row,
    causes_table,
    deciding,
    difference,
    named,
    robustness_table,
    row_of,
    stages_row,
    stages_table,
    table_of,
    told,
)
from pullback.experiments.dense_errors import (
    CAUSES,
    COUNTS,
    FLOOR,
    FUSION,
    IMPORTANCE,
    PHOTOS_DA,
    PHOTOS_S,
    RANDOM,
    REMOVAL,
    ROOMS_DA,
    ROOMS_S,
    SALIENCY,
    SCENES,
    SCORES,
    STALE,
    TOME,
    WHOLE,
    Dense,
    Pipeline,
    causes,
    difference_row,
    errors,
    mean_row,
    plan_of,
    seeds_std,
)
from pullback.experiments.experiment import Cell, Column, Experiment, Figure, Found, Measured, Place
from pullback.experiments.scales import Scale
from pullback.experiments.workshop import Workshop
from pullback.pruning.operations import PredictedOperations
from pullback.pruning.search import Ladder, first_within

RATIOS = (0.05, 0.10, 0.15, 0.20, 0.30, 0.40, 0.50)
STAGE = 4
"""The paper's only stage, for one."""


Rows = Iterable[Measured]


def column(ratio: float) -> str:
    return f"{ratio:.2f}"


COLUMNS = tuple(map(column, RATIOS))


def _places(table: str, row: str, columns: Sequence[str] = COLUMNS) -> list[Place]:
    return [Place(table, row, own) for own in columns]


def _rates(shop: Workshop, table: str, row: str, ratios: Sequence[float], values: Tensor) -> Rows:
    """Yield the errors [ratios, seeds, n] of a row."""
    for ratio, own in zip(ratios, values, strict=True):
        yield mean_row(shop, (table, row, column(ratio)), own)


def _differences(
    shop: Workshop, subject: str, what: str, ratios: Sequence[float], first: Tensor, second: Tensor
) -> Rows:
    for ratio, own, other in zip(ratios, first, second, strict=True):
        yield difference_row(shop, (DIFFERENCES, difference(subject, what), column(ratio)), own, other)


# One stage, all ratios

PIPELINES: tuple[tuple[Pipeline, tuple[str, ...]], ...] = (
    ("paper", tuple(SCORES)),
    ("not fused", tuple(SCORES)),
    ("soft merge", (IMPORTANCE,)),
    ("ours", tuple(SCORES)),
)
SUBJECTS = (PHOTOS_DA, PHOTOS_S, ROOMS_S, SALIENCY, SCENES)
EXAMINED = (PHOTOS_DA, PHOTOS_S, SCENES)
"""Whose errors are taken apart."""
_AGAINST: dict[str, tuple[tuple[Pipeline, str], tuple[Pipeline, str]]] = {
    AGAINST_TOME: (("paper", IMPORTANCE), ("paper", TOME)),
    AGAINST_RANDOM: (("paper", IMPORTANCE), ("paper", RANDOM)),
    DRAWN_AGAINST_TOME: (("paper", RANDOM), ("paper", TOME)),
    FUSED: (("paper", IMPORTANCE), ("not fused", IMPORTANCE)),
    MERGED: (("soft merge", IMPORTANCE), ("paper", IMPORTANCE)),
    OURS: (("ours", IMPORTANCE), ("paper", IMPORTANCE)),
}


def _pruning_cells(scale: Scale) -> list[Cell]:
    seeds = COUNTS[scale.name]["seeds"]
    cells = []
    for dense in SUBJECTS:
        table = table_of(dense)
        for pipeline, scores in PIPELINES:
            for score in scores:
                row = row_of(score, pipeline)
                run = partial(_ratios, dense=dense, pipeline=pipeline, score=score)
                passes = float(len(RATIOS) * (1 if score == TOME else seeds))
                trains = 1 if (pipeline, score) == ("paper", IMPORTANCE) else 0
                cells.append(
                    dense.cell(
                        scale, f"{table}: {row}", _places(table, row), run, passes=passes, trains=trains,
                        modes=pipeline == "soft merge",
                    )
                )  # fmt: skip
    for dense in SUBJECTS:
        for what in _AGAINST:
            row = difference(dense.title, what)
            run = partial(_against, dense=dense, what=what)
            cells.append(dense.cell(scale, row, _places(DIFFERENCES, row), run))
        for score in SCORES:
            row = difference(dense.title, score)
            places = _places(CHANGE, row, (CHANGED, LOWEST_AT))
            cells.append(dense.cell(scale, f"{CHANGE}: {row}", places, partial(_change, dense=dense, score=score)))
    for dense in EXAMINED:
        for score in SCORES:
            table = causes_table(dense)
            places = [place for cause in CAUSES for place in _places(table, cause_row(score, cause))]
            run = partial(_causes, dense=dense, score=score)
            cells.append(dense.cell(scale, f"{table}, {score}", places, run, passes=5.0 * len(RATIOS)))
    return cells


def _ratios(shop: Workshop, dense: Dense, pipeline: Pipeline, score: str) -> Rows:
    values = errors(shop, dense, pipeline, (STAGE,), RATIOS, score)
    return _rates(shop, table_of(dense), row_of(score, pipeline), RATIOS, values)


def _against(shop: Workshop, dense: Dense, what: str) -> Rows:
    first, second = (errors(shop, dense, pipeline, (STAGE,), RATIOS, score) for pipeline, score in _AGAINST[what])
    return _differences(shop, dense.title, what, RATIOS, first, second)


def _change(shop: Workshop, dense: Dense, score: str) -> Rows:
    values = errors(shop, dense, "paper", (STAGE,), RATIOS, score)
    row = difference(dense.title, score)
    late, early = (values[RATIOS.index(ratio)] for ratio in (0.30, 0.05))
    yield difference_row(shop, (CHANGE, row, CHANGED), late, early)
    lowest = int(values.nanmean((1, 2)).argmin())
    yield Measured(CHANGE, row, LOWEST_AT, RATIOS[lowest], count=values.shape[-1], note="of the mean over pictures")


def _causes(shop: Workshop, dense: Dense, score: str) -> Rows:
    for cause, values in zip(CAUSES, causes(shop, dense, STAGE, RATIOS, score), strict=True):
        yield from _rates(shop, causes_table(dense), cause_row(score, cause), RATIOS, values[:, None])


def _printed(table: str, rows: Mapping[str, Sequence[float]], columns: Sequence[str] = COLUMNS) -> dict[Place, float]:
    return {
        Place(table, row, own): value
        for row, values in rows.items()
        for own, value in zip(columns, values, strict=True)
    }


def _against_of(
    subject: str, rows: Mapping[str, Sequence[float]], what: str, own: str, other: str, columns: Sequence[str] = COLUMNS
) -> dict[Place, float]:
    """Return the differences that follow from the paper's rows."""
    values = [100 * (first - second) / second for first, second in zip(rows[own], rows[other], strict=True)]
    return _printed(DIFFERENCES, {difference(subject, what): [round(value, 1) for value in values]}, columns)


_SINGLE = {
    RANDOM: (4.59, 3.70, 3.31, 3.19, 3.16, 3.20, 3.29),
    TOME: (4.29, 3.66, 3.51, 3.50, 3.52, 3.67, 4.09),
    IMPORTANCE: (4.88, 4.86, 3.85, 3.28, 3.02, 3.01, 3.08),
    row_of(IMPORTANCE, "soft merge"): (0.992, 1.448, 1.870, 2.244, 2.969, 3.660, 4.243),
}
"""tab:dpt_pruning; the soft merge of tab:abl_budget, 2,000 pictures."""
_PRUNING_PAPER = (
    _printed(table_of(PHOTOS_DA), _SINGLE)
    | _against_of(PHOTOS_DA.title, _SINGLE, AGAINST_TOME, IMPORTANCE, TOME)
    | _against_of(PHOTOS_DA.title, _SINGLE, AGAINST_RANDOM, IMPORTANCE, RANDOM)
    | _against_of(PHOTOS_DA.title, _SINGLE, DRAWN_AGAINST_TOME, RANDOM, TOME)
    | _against_of(PHOTOS_DA.title, _SINGLE, MERGED, row_of(IMPORTANCE, "soft merge"), IMPORTANCE)
    | {
        Place(CHANGE, difference(PHOTOS_DA.title, score), name): value
        for score in SCORES
        for name, value in (
            (CHANGED, round(100 * (_SINGLE[score][4] - _SINGLE[score][0]) / _SINGLE[score][0], 1)),
            (LOWEST_AT, RATIOS[min(range(len(RATIOS)), key=lambda at: _SINGLE[score][at])]),
        )
    }
)


def _not_monotone(found: Found) -> str | None:
    """Say what becomes of the paper's falling error here, and what it is made of."""
    said = []
    for dense in EXAMINED:
        part = causes_table(dense)
        change = found.row(CHANGE, difference(dense.title, RANDOM), CHANGED)
        shares = [
            found.value(part, cause_row(RANDOM, cause), "0.05") for cause in (WHOLE, REMOVAL, STALE, FUSION, FLOOR)
        ]
        known = [f"{share:.2g}" for share in shares if share is not None]
        if change is None or len(known) < len(shares):
            continue
        whole, removal, stale, fusion, floor = known
        said.append(
            f"{dense.title}: {change['value']:+.0f} % ({change['low']:+.0f} to {change['high']:+.0f}); at 0.05 the "
            f"error is {whole}, with removal alone {removal}, with tokens that are stale where the decoder reads them "
            f"{stale}, with tokens that are stale only before the last block (Last-Layer Fusion) {fusion}, and {floor} "
            "% of the pixels lie at the floor of the logarithm"
        )
    if not said:
        return None
    return (
        "The paper's error falls between 0.05 and 0.30, by 31 % for random selection, and it knows no cause. Random "
        f"selection here: {'. '.join(said)}."
    )


def _merging_by_the_paper(found: Found) -> str | None:
    names = {dense.title: difference(dense.title, MERGED) for dense in SUBJECTS}
    rows = {title: told(found, row, ("0.05", "0.50")) for title, row in names.items() if row in found.rows(DIFFERENCES)}
    if not rows:
        return None
    return (
        "That merging corrupts maps is not what the paper's own ablation E.4 shows: with soft merging it has 0.99 at "
        "0.05, where hard pruning has 4.88, and less up to 0.30; it calls the two not comparable. On the same pictures "
        f"and with the same heads here, soft merging against hard pruning: {'; '.join(map(': '.join, rows.items()))}."
    )


def _frames_of_rooms(found: Found) -> str | None:
    present = {place.table for place in found}
    if not any(table.startswith((ROOMS_DA.title, ROOMS_S.title)) for table in present):
        return None
    return (
        "Of the rooms the first pictures by name are measured, and heads learn from those that follow. Frames of one "
        "sequence resemble each other, so that intervals over them are narrower than for as many rooms."
    )


_RATIO_COLUMNS = tuple(Column(own, better="lower") for own in COLUMNS)

DENSE_PRUNING = Experiment(
    name="dense-pruning",
    title="Removing tokens of dense decoders, one stage",
    paper_label="tab:dpt_pruning",
    about=(
        "Tokens are removed after block 4, by ratio. Rows with the paper's names are its pipeline: removed tokens come "
        "back as they were, and Last-Layer Fusion runs the last block on all of them. Heads learn the importance of "
        "the probe at block 4, at the scales tiny and small that of depth averaged over cells, and choose the tokens "
        "of the whole decoder. Soft merge: into the nearest neighbour under d_task of exact modes, by importance. "
        "Ours: the rule best. Means over pictures of means over seeds, with 95 % intervals over pictures."
    ),
    columns=(*_RATIO_COLUMNS, Column(CHANGED), Column(LOWEST_AT, digits=2)),
    cells=_pruning_cells,
    counts=COUNTS,
    paper=_PRUNING_PAPER,
    claims=PRUNING_CLAIMS,
    figures=(
        *(
            Figure(f"errors-{number}", "curves", table_of(dense), "Against the share of tokens removed.",
                   table=table_of(dense), log=True)
            for number, dense in enumerate(SUBJECTS)
        ),
        *(
            Figure(f"causes-{number}", "curves", causes_table(dense), "Parts of the error of the paper's pipeline.",
                   table=causes_table(dense))
            for number, dense in enumerate(EXAMINED)
        ),
    ),
    footnotes=(_not_monotone, _merging_by_the_paper, _frames_of_rooms),
)  # fmt: skip

# Resolutions and data, half of the tokens

HALF = 0.50
_ROBUST: dict[str, tuple[tuple[str, Dense, tuple[int, ...]], ...]] = {
    "DA V2 depth": (("IN", PHOTOS_DA, (224, 336, 448, 518)), ("NYU", ROOMS_DA, (224, 336, 448, 518))),
    "DINOv2-S depth head": (("IN", PHOTOS_S, (224, 336, 448, 518)), ("NYU", ROOMS_S, (224, 336, 448, 518))),
    "tiny-scenes depth": (
        ("scenes", SCENES, (84, 126, 168)),
        ("shifted", SCENES.of("scenes-shifted", "scenes-shifted"), (84, 126, 168)),
    ),
}


def _robustness_cells(scale: Scale) -> list[Cell]:
    cells = []
    for model, parts in _ROBUST.items():
        for data, dense, sizes in parts:
            for size in sizes:
                own, name = dense.at(size), f"{data}@{size}"
                places = [Place(robustness_table(model), score, name) for score in SCORES]
                places += [Place(DIFFERENCES, difference(model, what), name) for what in (AGAINST_TOME, AGAINST_RANDOM)]
                run = partial(_robust, model=model, dense=own, name=name)
                passes = 1.0 + 2 * COUNTS[scale.name]["seeds"]
                cells.append(own.cell(scale, f"{model}, {name}", places, run, passes=passes, trains=1))
    return cells


def _robust(shop: Workshop, model: str, dense: Dense, name: str) -> Rows:
    values = {score: errors(shop, dense, "paper", (STAGE,), (HALF,), score)[0] for score in SCORES}
    for score, own in values.items():
        yield mean_row(shop, (robustness_table(model), score, name), own)
    for what, other in ((AGAINST_TOME, TOME), (AGAINST_RANDOM, RANDOM)):
        yield difference_row(shop, (DIFFERENCES, difference(model, what), name), values[IMPORTANCE], values[other])


_SIZES_PRINTED = ("IN@224", "IN@336", "IN@448", "NYU@224", "NYU@336", "NYU@448")
_AT_HALF = {TOME: (4.09, 3.65, 4.70, 6.40, 6.84, 6.98), IMPORTANCE: (3.08, 3.56, 5.11, 6.43, 6.91, 7.38)}

DENSE_ROBUSTNESS = Experiment(
    name="dense-robustness",
    title="Half of the tokens of dense decoders, by resolution and data",
    paper_label="tab:dpt_robustness",
    about=(
        "Half of the patch tokens are removed after block 4 in the paper's pipeline. Heads are trained anew for every "
        "kind of data and size. IN: photographs (ImageNet-val), NYU: pictures of rooms; scenes, shifted: procedural "
        "scenes within and beyond the ranges that tiny-scenes was trained on. The number is the side in pixels."
    ),
    columns=tuple(
        Column(f"{data}@{size}", better="lower")
        for data, sizes in (
            ("IN", (224, 336, 448, 518)), ("NYU", (224, 336, 448, 518)), ("scenes", (84, 126, 168)),
            ("shifted", (84, 126, 168)),
        )
        for size in sizes
    ),
    cells=_robustness_cells,
    counts=COUNTS,
    paper=_printed(robustness_table("DA V2 depth"), _AT_HALF, _SIZES_PRINTED)
    | _against_of("DA V2 depth", _AT_HALF, AGAINST_TOME, IMPORTANCE, TOME, _SIZES_PRINTED),
    claims=ROBUSTNESS_CLAIMS,
    footnotes=(_frames_of_rooms,),
)  # fmt: skip

# Stages

_SCHEDULES: tuple[tuple[int, ...], ...] = (ONE, TWO, FOUR)
_PAIRS: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ((TWO, ONE), (FOUR, ONE), (FOUR, TWO))
_STAGED = (ROOMS_DA, ROOMS_S, SCENES)
_SHARES = tuple(map(float, STAGES_RATIOS))
_MOST, _TOO_MUCH = 0.99, ", and still more operations"


def _stages_cells(scale: Scale) -> list[Cell]:
    cells = []
    for dense in _STAGED:
        for stages in _SCHEDULES:
            cells.append(_schedule(scale, dense, stages))
        for size in LARGER[dense.title]:
            cells.append(_schedule(scale, dense.at(size), TWO))
        for stages in _SCHEDULES:
            cells.append(_schedule(scale, dense, stages, EQUAL_OPERATIONS))
        for stages, other in _PAIRS:
            for kind in (EQUAL_SHARE, EQUAL_OPERATIONS):
                row = difference(named(dense, stages), f"against {list(other)}, {kind}")
                run = partial(_against_schedule, dense=dense, stages=stages, other=other, kind=kind)
                cells.append(dense.cell(scale, row, _places(DIFFERENCES, row, STAGES_RATIOS), run))
    return cells


def _schedule(scale: Scale, dense: Dense, stages: tuple[int, ...], kind: str = EQUAL_SHARE) -> Cell:
    """The cell of ToMe's score and importance with a schedule, and of their difference."""
    table, rows = stages_table(dense, kind), [stages_row(stages, score) for score in (TOME, IMPORTANCE)]
    places = [place for row in rows for place in _places(table, row, STAGES_RATIOS)]
    about = named(dense, stages)
    if kind == EQUAL_SHARE:
        places += _places(DIFFERENCES, difference(about, AGAINST_TOME), STAGES_RATIOS)
        places.append(Place(SPREAD, difference(about, IMPORTANCE), STD))
    passes = len(STAGES_RATIOS) * (1.0 + COUNTS[scale.name]["seeds"])
    trains = len(stages) if kind == EQUAL_SHARE else 0
    run = partial(_staged, dense=dense, stages=stages, kind=kind)
    return dense.cell(scale, f"{about}, {kind}", places, run, passes=passes, trains=trains)


def _staged(shop: Workshop, dense: Dense, stages: tuple[int, ...], kind: str) -> Rows:
    table, ratios = stages_table(dense, kind), _ratios_of(shop, dense, stages, kind)
    values = {score: errors(shop, dense, "paper", stages, ratios, score) for score in (TOME, IMPORTANCE)}
    for score, own in values.items():
        for name, ratio, one in zip(STAGES_RATIOS, ratios, own, strict=True):
            found = mean_row(shop, (table, stages_row(stages, score), name), one)
            if kind == EQUAL_OPERATIONS:
                removed = f"{ratio:.2f} removed{_TOO_MUCH if ratio == _MOST else ''}"
                found = replace(found, note="; ".join(filter(None, (removed, found.note))))
            yield found
    if kind == EQUAL_SHARE:
        about = named(dense, stages)
        yield from _differences(shop, about, AGAINST_TOME, ratios, values[IMPORTANCE], values[TOME])
        spread = max(map(seeds_std, values[IMPORTANCE]))
        yield Measured(SPREAD, difference(about, IMPORTANCE), STD, spread, count=shop.count("seeds"), over="seeds")


def _against_schedule(shop: Workshop, dense: Dense, stages: tuple[int, ...], other: tuple[int, ...], kind: str) -> Rows:
    first, second = (
        errors(shop, dense, "paper", own, _ratios_of(shop, dense, own, kind), IMPORTANCE) for own in (stages, other)
    )
    what = f"against {list(other)}, {kind}"
    return _differences(shop, named(dense, stages), what, _SHARES, first, second)


def _ratios_of(shop: Workshop, dense: Dense, stages: tuple[int, ...], kind: str) -> tuple[float, ...]:
    """Return the ratios of a schedule: those of one stage, or the smallest with which it takes no more operations than
    one stage does, in hundredths. Counted with the head and Last-Layer Fusion, of the blocks alone."""
    if kind == EQUAL_SHARE or stages == ONE:
        return _SHARES
    key = {
        "what": "equal-operations", **shop.identity(dense.probe(shop, stages[0])), "size": dense.size,
        "stages": list(stages), "width": shop.count("width"), "ratios": list(_SHARES),
    }  # fmt: skip

    def compute() -> dict[str, Tensor]:
        layers = sorted({*ONE, *stages})
        heads = dict(zip(layers, dense.heads(shop, layers, shop.seed), strict=True))
        model = dense.subject(shop, stages).backbone.model
        cost: Any = PredictedOperations(model, dense.images(shop)[:1], heads, plan_of("paper", HALF, ONE))
        ladder = Ladder(100, lambda step: plan_of("paper", step / 100, stages))
        limits = [cost(plan_of("paper", ratio, ONE)) for ratio in _SHARES]
        steps = [first_within(ladder, cost, limit) for limit in limits]
        return {"steps": torch.tensor([round(100 * _MOST) if step is None else step for step in steps])}

    return tuple(step / 100 for step in shop.kept(key, compute)["steps"].tolist())


_NYU = {
    224: {
        stages_row(ONE, TOME): (4.12, 4.89, 5.17, 5.32, 6.40),
        stages_row(ONE, IMPORTANCE): (3.07, 3.82, 4.58, 5.00, 6.43),
        stages_row(TWO, TOME): (3.52, 4.44, 5.19, 5.37, 5.58),
        stages_row(TWO, IMPORTANCE): (2.42, 3.07, 3.86, 4.34, 5.12),
        stages_row(FOUR, TOME): (2.16, 2.51, 3.08, 3.59, 4.90),
        stages_row(FOUR, IMPORTANCE): (1.03, 1.56, 2.72, 4.16, 6.43),
    },
    336: {
        stages_row(TWO, TOME): (3.50, 4.33, 5.00, 5.29, 5.99),
        stages_row(TWO, IMPORTANCE): (2.50, 3.22, 4.09, 4.59, 5.39),
    },
    448: {
        stages_row(TWO, TOME): (3.72, 4.70, 5.46, 5.58, 6.13),
        stages_row(TWO, IMPORTANCE): (2.29, 2.99, 3.93, 4.53, 5.51),
    },
}
"""tab:dpt_nyu_matched, tab:dpt_nyu_2stage_336_448."""


def _stages_paper() -> dict[Place, float]:
    found: dict[Place, float] = {}
    for size, rows in _NYU.items():
        dense = ROOMS_DA.at(size)
        found |= _printed(stages_table(dense), rows, STAGES_RATIOS)
        for stages in _SCHEDULES if size == 224 else (TWO,):
            own, other = (stages_row(stages, score) for score in (IMPORTANCE, TOME))
            found |= _against_of(named(dense, stages), rows, AGAINST_TOME, own, other, STAGES_RATIOS)
    for stages, fewer in _PAIRS:
        own, other = (stages_row(one, IMPORTANCE) for one in (stages, fewer))
        what = f"against {list(fewer)}, {EQUAL_SHARE}"
        found |= _against_of(named(ROOMS_DA, stages), _NYU[224], what, own, other, STAGES_RATIOS)
    return found


def _own_numbers(found: Found) -> str | None:
    """Say by how much two stages lead in the paper's own tables, beside its words."""
    own = deciding(found, ROOM_GROUPS)
    if not own:
        return None
    printed, said = _stages_paper(), []
    for size in _NYU:
        row = difference(named(ROOMS_DA.at(size), TWO), AGAINST_TOME)
        leads = (printed[Place(DIFFERENCES, row, name)] for name in STAGES_RATIOS)
        said.append(f"{' / '.join(f'{-lead:.0f}' for lead in leads)} % at {size} px")
    here = told(found, difference(named(own[0], TWO), AGAINST_TOME), STAGES_RATIOS)
    return (
        "The paper says that two stages have 25 to 35 % less error than ToMe's score at every ratio. By its own tables "
        f"it is, at the ratios {' / '.join(STAGES_RATIOS)}: {'; '.join(said)}. Here {named(own[0], TWO)}: {here}."
    )


DENSE_STAGES = Experiment(
    name="dense-stages",
    title="Dense decoders pruned in one, two and four stages",
    paper_label="tab:dpt_nyu_matched",
    about=(
        "The paper's pipeline with removal after blocks [4], [4, 8] and [1, 4, 7, 10], the ratio split equally over "
        "the stages. At equal shares a schedule with later stages saves less; at equal operations a column stands for "
        "what one stage takes with this ratio, and the others remove as much as meets that (the note says how much). "
        "Heads are trained on the kind of data that is measured, one for each stage."
    ),
    columns=(*(Column(name, better="lower") for name in STAGES_RATIOS), Column(STD, better="lower", digits=2)),
    cells=_stages_cells,
    counts=COUNTS,
    paper=_stages_paper(),
    claims=STAGES_CLAIMS,
    footnotes=(_own_numbers, _frames_of_rooms),
    figures=tuple(
        Figure(f"stages-{number}-{index}", "curves", stages_table(dense, kind), f"At {kind}.",
               table=stages_table(dense, kind))
        for number, dense in enumerate(_STAGED)
        for index, kind in enumerate((EQUAL_SHARE, EQUAL_OPERATIONS))
    ),
)  # fmt: skip
