"""Other scores in the same merge (`tab:extra_baselines`), and the paired tests between importance and ToMe's score
(`tab:clip_cls_wilcoxon`): both read what `pullback.experiments.merging` measures."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from pullback.evaluation.statistics import compare_paired, wilcoxon_p
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
from pullback.experiments.merging import (
    CLIP,
    COLUMNS,
    COUNTS,
    DINOV2,
    RULES,
    TINY,
    TINY_EARLY,
    Setting,
    exceeds,
    factor,
    factors,
    judged_on,
    lead_places,
    lead_rows,
    leads,
    measured,
    range_in,
    said,
    trails,
    values_of,
)
from pullback.experiments.scales import Scale
from pullback.experiments.workshop import Workshop

SETTINGS = (DINOV2, CLIP, TINY, TINY_EARLY)
ROWS = ("Importance", "EViT", "Token norm", "CLS similarity", "ToMe score", "Random")
_UNTRAINED = ("Token norm", "CLS similarity")
DELTA, P = "mean Δ", "p"
_NOTHING = "No model of the scale was measured."

_PAPER = {
    "Importance": (0.00, 0.01, 0.02, 0.06, 0.24, 0.82, 2.17),
    "EViT": (0.00, 0.01, 0.03, 0.06, 0.28, 0.88, 2.30),
    "Token norm": (0.04, 0.14, 0.25, 0.38, 0.78, 1.45, 2.59),
    "CLS similarity": (0.02, 0.08, 0.17, 0.42, 0.90, 1.70, 2.91),
    "ToMe score": (0.53, 0.71, 0.97, 0.99, 1.77, 2.28, 3.69),
    "Random": (0.14, 0.36, 0.58, 0.83, 1.29, 2.07, 3.48),
}
_PAPER_TESTS = (
    ("−0.00119 [−0.00145, −0.00095]", 2.9e-92),
    ("−0.00170 [−0.00227, −0.00124]", 9.2e-90),
    ("−0.00199 [−0.00268, −0.00143]", 5.8e-76),
    ("−0.00180 [−0.00240, −0.00129]", 5.5e-57),
    ("−0.00232 [−0.00399, −0.00118]", 5.8e-5),
    ("−0.02110 [−0.02970, −0.01339]", 3.2e-9),
    ("−0.32452 [−0.33672, −0.31222]", 1.5e-95),
)


_Run = Callable[[Setting, Workshop], Iterable[Measured]]


def _cell_of(setting: Setting, places: Sequence[Place], run: _Run, scale: Scale) -> Cell:
    return Cell(
        setting.table, tuple(places), partial(run, setting), setting.model, setting.data, (setting.train,),
        forwards=setting.forwards(scale, setting.kinds[0]),
    )  # fmt: skip


# The table of baselines


def _baseline_cells(scale: Scale) -> list[Cell]:
    return [_cell_of(own, [*_places(own), *lead_places(own, ROWS[1:])], _baselines, scale) for own in SETTINGS]


def _places(setting: Setting) -> list[Place]:
    return [Place(setting.table, rule, column) for rule in ROWS for column in COLUMNS]


def _baselines(setting: Setting, shop: Workshop) -> Iterable[Measured]:
    kind = setting.kinds[0]
    values = measured(shop, setting, kind)["values"].mean(1)  # [rules, ratios, n], each image's mean over seeds
    for rule in ROWS:
        for number, column in enumerate(COLUMNS):
            yield shop.mean((setting.table, rule, column), values[RULES[kind].index(rule), number])
    yield from lead_rows(shop, setting, ROWS[1:])


def _told(found: Found, table: str, columns: Sequence[str]) -> str:
    return "; ".join(
        f"at {column} " + ", ".join(f"{rule} {said(found.value(table, rule, column))}" for rule in ROWS)
        for column in columns
    )


def _best_or_tied(found: Found) -> Verdict:
    """Whether importance is below all but EViT beyond the noise, and not above EViT beyond it."""
    parts: dict[str, bool | None] = {}
    why = []
    for table in judged_on(found, [DINOV2], [TINY, TINY_EARLY]):
        fine = 0
        for column in COLUMNS:
            ahead = [leads(found, table, other, column) for other in ROWS[2:]]
            own = all(ahead) and not trails(found, table, "EViT", column)
            parts[f"{table} {column}"] = own
            fine += own
        why.append(f"{table}: at {fine} of {len(COLUMNS)} ratios; {_told(found, table, ('0.10', '0.50'))}.")
    return overall(parts, " ".join(why) or _NOTHING)


def _beats_evit(found: Found) -> Verdict:
    parts: dict[str, bool | None] = {}
    why = []
    for table in judged_on(found, [DINOV2], [TINY, TINY_EARLY]):
        won = {column: leads(found, table, "EViT", column) for column in COLUMNS}
        parts |= {f"{table} {column}": lead for column, lead in won.items()}
        times = {column: factor(found, table, "Importance", "EViT", column) for column in ("0.05", "0.20", "0.50")}
        told = ", ".join(f"{said(by)}× at {column}" for column, by in times.items())
        why.append(f"{table}: below EViT beyond the noise at {sum(map(bool, won.values()))} of 7 ratios; {told}.")
    return overall(parts, " ".join(why) or _NOTHING)


_CLOSE = {True: "less than twice", False: "twice or more", None: "the intervals do not decide whether that is twice"}


def _evit_is_strongest(found: Found) -> Verdict:
    """Whether EViT is below all other baselines beyond the intervals at some ratio, and none of them below it at any;
    and whether it has less than twice the error of importance at low ratios, wherever in their intervals both lie.
    What the intervals leave open is no support: the claim then holds partly at most."""
    parts: dict[str, bool | None] = {}
    why, undecided = [], False
    for table in judged_on(found, [DINOV2], [TINY, TINY_EARLY]):
        best: dict[str, list[str]] = {}
        ahead, behind = 0, 0
        for column in COLUMNS:
            known = {rule: range_in(found, table, rule, column) for rule in ROWS[1:]}
            own = known.pop("EViT")
            others = [interval for interval in known.values() if interval is not None]
            if own is None or not others:
                continue
            ahead += all(own[1] < low for low, _ in others)
            behind += any(high < own[0] for _, high in others)
            errors = {rule: found.value(table, rule, column) for rule in ROWS[1:]}
            there = {rule: error for rule, error in errors.items() if error is not None}
            best.setdefault(min(there, key=lambda rule: there[rule]), []).append(column)
        twice = [exceeds(factors(found, table, "Importance", "EViT", column), 2.0) for column in COLUMNS[:4]]
        parts[f"{table}: strongest"] = ahead > 0 and not behind if best else None
        parts[f"{table}: close"] = False if True in twice else None if None in twice else True
        undecided |= parts[f"{table}: close"] is None
        told = ", ".join(f"{rule} at {', '.join(columns)}" for rule, columns in best.items())
        spans = ", ".join(said(factor(found, table, "Importance", "EViT", column)) for column in COLUMNS[:4])
        why.append(
            f"{table}: the best baseline is {told}; EViT is below all others beyond the intervals at {ahead} of "
            f"{len(COLUMNS)} ratios, another below EViT at {behind}; EViT has {spans} times the error of importance up "
            f"to 0.20 ({_CLOSE[parts[f'{table}: close']]})."
        )
    verdict = overall(parts, " ".join(why) or _NOTHING)
    return replace(verdict, word="holds partly") if undecided and verdict.word == "holds" else verdict


def _untrained_beat_tome(found: Found) -> Verdict:
    parts: dict[str, bool | None] = {}
    why = []
    for table in judged_on(found, [DINOV2], [TINY, TINY_EARLY]):
        for rule in _UNTRAINED:
            known = [exceeds(factors(found, table, rule, "ToMe score", column), 1.0) for column in COLUMNS]
            below, above = known.count(True), known.count(False)
            there = found.value(table, rule, COLUMNS[0]) is not None
            parts[f"{table}: {rule}"] = below > 0 and not above if there else None
            why.append(
                f"{table}: “{rule}” is below ToMe's score beyond the intervals at {below} of {len(COLUMNS)} ratios, "
                f"above it at {above}."
            )
    return overall(parts, " ".join(why) or _NOTHING)


CLS_BASELINES = Experiment(
    name="cls-baselines",
    title="Scores of a frozen model in the same merge",
    paper_label="tab:extra_baselines",
    about=(
        "100 (1 − cos) between the class token of the pruned and of the whole model, with d_task and weights of the "
        "merge the same for all scores. Differences are of the same pictures: below 0 importance is better. EViT: what "
        "the class token attends to. The paper's table has one seed, ours means over all heads and draws."
    ),
    columns=tuple(Column(column, "lower") for column in COLUMNS),
    cells=_baseline_cells,
    counts=COUNTS,
    paper={
        Place(DINOV2.table, rule, column): value
        for rule, values in _PAPER.items()
        for column, value in zip(COLUMNS, values, strict=True)
    },
    claims=(
        Claim("The head is best at every ratio, or tied with EViT.", "tab:extra_baselines", _best_or_tied),
        Claim("Importance also beats baselines of a frozen backbone such as EViT.", "sec:pruning_results", _beats_evit),
        Claim(
            "EViT is the strongest baseline and comes close at low ratios.", "sec:extra_baselines", _evit_is_strongest
        ),
        Claim(
            "Token norm and similarity to the class token both beat ToMe's score.",
            "sec:extra_baselines",
            _untrained_beat_tome,
        ),
    ),
    figures=tuple(
        Figure(f"curves-{number}", "curves", f"Error by ratio: {own.table}", table=own.table, log=True)
        for number, own in enumerate(SETTINGS)
    ),
)


# The tests


def _test_cells(scale: Scale) -> list[Cell]:
    return [
        _cell_of(own, [Place(own.table, row, column) for row in COLUMNS for column in (DELTA, P)], _tests, scale)
        for own in SETTINGS
    ]


def _tests(setting: Setting, shop: Workshop) -> Iterable[Measured]:
    """Compare picture by picture, each with its mean over the seeds: several seeds of a picture are no further
    pictures. Differences of cosines, not times 100."""
    kind = setting.kinds[0]
    own, other = (values_of(shop, setting, kind, rule).mean(0).cpu().numpy() for rule in ("Importance", "ToMe score"))
    for number, row in enumerate(COLUMNS):
        generator = np.random.default_rng(shop.seed)
        found = compare_paired(own[number] / 100, other[number] / 100, generator=generator)
        delta = found.difference
        yield Measured(setting.table, row, DELTA, delta.mean, delta.low, delta.high, found.count)
        yield Measured(setting.table, row, P, found.p_value, count=found.count)


def smallest_p(count: int) -> float:
    """Return the p of so many pictures that all agree: no test can give less."""
    return wilcoxon_p(np.arange(1.0, count + 1), np.zeros(count))


def _all_significant(found: Found) -> Verdict:
    parts: dict[str, bool | None] = {}
    why = []
    for table in judged_on(found, [CLIP], [TINY, TINY_EARLY]):
        rows = {row: (found.row(table, row, DELTA), found.row(table, row, P)) for row in COLUMNS}
        known = {row: (delta, p) for row, (delta, p) in rows.items() if delta is not None and p is not None}
        if not known:
            continue
        count = next(iter(known.values()))[0]["count"]
        least = smallest_p(count)
        for row, (delta, p) in known.items():
            parts[f"{table} {row}"] = None if least >= 1e-4 else delta["high"] < 0 and p["value"] < 1e-4
            if row not in ("0.30", "0.40"):
                parts[f"{table} {row}, 1e-50"] = None if least >= 1e-50 else p["value"] < 1e-50
        values = [p["value"] for _, p in known.values()]
        better = sum(delta["high"] < 0 for delta, _ in known.values())
        why.append(
            f"{table}: importance is better at {better} of {len(known)} ratios (interval of Δ below 0), p from "
            f"{min(values):.1e} to {max(values):.1e}; {count} pictures cannot give less than {least:.1e}."
        )
    return overall(parts, " ".join(why) or _NOTHING)


_HELD_OUT = 200
"""Pictures on which the paper judges its heads."""


def _counted_often(found: Found) -> str | None:
    if not found.rows(CLIP.table) and not found.rows(TINY.table):
        return None
    smallest = min(p for _, p in _PAPER_TESTS)
    needed = math.ceil(1 - math.log2(smallest))  # n pairs that all agree have an exact p of 2^(1 - n)
    return (
        f"A p of {smallest:.1e} needs at least {needed} pairs, even if all of them agree; of {_HELD_OUT} pictures, the "
        f"paper's held-out set, none is below {2.0 ** (1 - _HELD_OUT):.1e}. So its pairs are pictures times seeds, or "
        "more pictures than it names. Here each picture counts once."
    )


WILCOXON = Experiment(
    name="clip-wilcoxon",
    title="Importance against ToMe's score, picture by picture",
    paper_label="tab:clip_cls_wilcoxon",
    about=(
        "Δ: error with importance less that with ToMe's score, as a difference of cosines (not times 100), over "
        "pictures; below 0 importance is better. p: two-sided Wilcoxon signed-rank test. Rows are ratios. Each picture "
        "counts once, with its mean over the seeds."
    ),
    columns=(Column(DELTA, "lower"), Column(P, "lower", digits=2)),
    cells=_test_cells,
    counts=COUNTS,
    paper={
        **{Place(CLIP.table, row, DELTA): delta for row, (delta, _) in zip(COLUMNS, _PAPER_TESTS, strict=True)},
        **{Place(CLIP.table, row, P): p for row, (_, p) in zip(COLUMNS, _PAPER_TESTS, strict=True)},
    },
    claims=(
        Claim(
            "Importance is better at every ratio with p < 1e-4, and with p < 1e-50 at all but 0.30 and 0.40.",
            "tab:clip_cls_wilcoxon",
            _all_significant,
        ),
    ),
    footnotes=(_counted_often,),
)
