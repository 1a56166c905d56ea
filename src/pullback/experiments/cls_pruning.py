"""Class tokens under pruning (`tab:cls_pruning`, `tab:clip_cls_pruning`, ImageNet-Sketch): the paper's protocol, and
beside it dropping and the rule `best` with the same heads.

How it is measured: `pullback.experiments.merging`. The rows "Random", "ToMe score" and "Importance" have d_task of a
trained Spectral Pullback Network, as the paper has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from pullback.backbones import Backbone
from pullback.evaluation.fidelity import degradation
from pullback.experiments.experiment import Cell, Claim, Column, Experiment, Figure, Found, Measured, Place, Verdict
from pullback.experiments.experiment import overall as together
from pullback.experiments.merging import (
    CLIP,
    COLUMNS,
    COUNTS,
    DINOV2,
    DROPPED,
    EXACT,
    OURS,
    RATIOS,
    RULES,
    SETTINGS,
    SKETCHES,
    TINY,
    TINY_EARLY,
    TINY_SHIFTED,
    Setting,
    exactly,
    exceeds,
    factor,
    factors,
    heads_of,
    judged_on,
    lead_places,
    lead_rows,
    leads,
    measured,
    probe_of,
    rule_in,
    said,
    trails,
)
from pullback.experiments.scales import Scale
from pullback.experiments.workshop import Workshop
from pullback.pruning.model import PrunedModel
from pullback.pruning.operations import operations
from pullback.pruning.plan import Plan, preset, published
from pullback.pruning.rules import Subject

_THREE = ("Random", "ToMe score", "Importance")
SHOWN = {"spn": _THREE, "exact": (*_THREE, EXACT, DROPPED, OURS)}
LEARNED, SPREAD, COST = "what was learned", "spread over seeds", "operations of tiny-scenes CLS, L06"
COMPARED = ("ToMe score", "Random", DROPPED, OURS)
_SIZES = (98, 84, 70)
"""Sides in pixels of smaller pictures, in place of 112: the whole model on fewer patches."""

_PAPER = {
    DINOV2: {
        "Random": (0.17, 0.36, 0.60, 0.86, 1.49, 2.31, 3.44),
        "ToMe score": (0.67, 0.78, 0.95, 1.12, 1.75, 2.56, 3.82),
        "Importance": (0.001, 0.007, 0.024, 0.060, 0.25, 0.80, 2.09),
    },
    CLIP: {
        "Random": (3.10, 7.03, 13.31, 13.55, 23.73, 30.10, 36.31),
        "ToMe score": (0.12, 0.17, 0.21, 0.21, 0.33, 2.40, 33.21),
        "Importance": (0.001, 0.004, 0.012, 0.026, 0.094, 0.29, 0.76),
    },
    SKETCHES: {
        "ToMe score": (0.519, 0.662, 0.665, 0.942, 1.072, 1.661, 2.171),
        "Importance": (0.001, 0.005, 0.018, 0.048, 0.216, 0.777, 2.169),
    },
}
_PAPER_SPREAD = {
    (DINOV2, "Random"): (0.03, 0.05, 0.08, 0.09, 0.14, 0.22, 0.31),
    (DINOV2, "ToMe score"): (0.11, 0.07, 0.07, 0.11, 0.13, 0.25, 0.42),
    (DINOV2, "Importance"): (0.000, 0.001, 0.002, 0.005, 0.03, 0.09, 0.13),
    (CLIP, "Random"): (0.44, 1.48, 1.30, 2.00, 2.41, 1.09, 0.69),
    (CLIP, "ToMe score"): (0.01, 0.04, 0.03, 0.05, 0.04, 0.38, 1.09),
    (CLIP, "Importance"): (0.000, 0.000, 0.001, 0.002, 0.009, 0.01, 0.03),
}


def row_of(rule: str, kind: str) -> str:
    return exactly(rule) if kind == "exact" else rule


def cells(scale: Scale) -> list[Cell]:
    found = []
    for own in SETTINGS:
        of_own = partial(Cell, model=own.model, data=own.data, needs=(own.train,))
        for kind in own.kinds:
            places = tuple(Place(own.table, row_of(rule, kind), column) for rule in SHOWN[kind] for column in COLUMNS)
            run, forwards = partial(_degradations, own, kind), own.forwards(scale, kind)
            found.append(of_own(f"{own.table}: {kind}", places, run, forwards=forwards))
        learned = tuple(Place(LEARNED, own.table, column) for column in _learned(own))
        found.append(of_own(f"{own.table}: learned", learned, partial(_what_was_learned, own)))
        spread = tuple(Place(SPREAD, f"{own.table}: {rule}", column) for rule in _THREE for column in COLUMNS)
        found.append(of_own(f"{own.table}: spread", spread, partial(_spread, own)))
        compared = tuple(lead_places(own, COMPARED))
        found.append(of_own(f"{own.table}: leads", compared, partial(lead_rows, setting=own, others=COMPARED)))
    points = tuple(Place(COST, point, column) for point in _points() for column in ("operations", "error"))
    own = TINY_EARLY
    forwards = COUNTS[scale.name]["early images"] * len(_points()) * own.size_of(scale)
    return [*found, Cell("operations", points, _cost, own.model, own.data, (own.train,), forwards=forwards)]


def _degradations(setting: Setting, kind: str, shop: Workshop) -> Iterable[Measured]:
    values = measured(shop, setting, kind)["values"].mean(1)  # [rules, ratios, n], each image's mean over seeds
    for rule in SHOWN[kind]:
        for number, column in enumerate(COLUMNS):
            own = values[RULES[kind].index(rule), number]
            yield shop.mean((setting.table, row_of(rule, kind), column), own)


def _learned(setting: Setting) -> tuple[str, ...]:
    heads = ("ρ", "ρ, patches", "ρ, std over seeds")
    return heads if setting.early else (*heads, "V₁", "V₁, patches")


def _what_was_learned(setting: Setting, shop: Workshop) -> Iterable[Measured]:
    found = measured(shop, setting, "exact")
    note = f"heads that were trained on {setting.count(shop, 'train')} pictures"
    for column, name in (("ρ", "rho"), ("ρ, patches", "rho-patches")):
        yield shop.mean((LEARNED, setting.table, column), found[name].mean(0), note=note)
    spread = float(found["rho"].mean(1).std())
    yield Measured(LEARNED, setting.table, "ρ, std over seeds", spread, count=shop.count("seeds"), over="heads")
    if not setting.early:
        yield shop.mean((LEARNED, setting.table, "V₁"), found["v1"])
        yield shop.mean((LEARNED, setting.table, "V₁, patches"), found["v1-patches"])


def _spread(setting: Setting, shop: Workshop) -> Iterable[Measured]:
    kind = setting.kinds[0]
    values = measured(shop, setting, kind)["values"].mean(-1)  # [rules, seeds, ratios]
    for rule in _THREE:
        for number, column in enumerate(COLUMNS):
            over = values[RULES[kind].index(rule), :, number]
            row = f"{setting.table}: {rule}"
            yield Measured(SPREAD, row, column, float(over.std()), count=len(over), over="seeds")


def _points() -> list[str]:
    lines = [f"{line} · {column}" for line in (OURS, DROPPED, "ToMe's merge") for column in COLUMNS]
    return lines + [f"Smaller picture · {size}" for size in _SIZES]


def _cost(shop: Workshop) -> Iterable[Measured]:
    """Run whole pruned models on one head's scores; operations are those of the blocks, the last of which computes the
    class token alone in every row."""
    setting = TINY_EARLY
    probe, (head,) = probe_of(shop, setting), heads_of(shop, setting, 1)
    backbone, stages = probe.backbone, (setting.layer,)
    assert isinstance(backbone, Backbone)
    subject = Subject(backbone, probe.decoder, stages)
    count, size = setting.count(shop, "images"), shop.count("scene size")
    pixels = shop.images(setting.data, count, model=setting.model, size=size)
    full = subject.full(pixels)
    rules = {OURS: ("best", head), DROPPED: ("drop", head), "ToMe's merge": ("bipartite", "bipartite")}
    plans: list[tuple[Plan, list]] = [
        (preset(name, ratio, stages, depth=backbone.depth), [score])
        for name, score in rules.values()
        for ratio in RATIOS
    ]
    plans += [(published("resize", {"size": size * side // 112}, depth=backbone.depth), []) for side in _SIZES]
    for point, (plan, scores) in zip(_points(), plans, strict=True):
        pruned = PrunedModel(backbone.model, replace(plan, class_row=True), scores)
        yield Measured(COST, point, "operations", operations(pruned, pixels))
        yield shop.mean((COST, point, "error"), degradation(subject.output(pruned, pixels)[0], full).value)


# What the paper says

_LOW = COLUMNS[:4]
_NOTHING = "No model of the scale was measured."


def _listed(found: Found, table: str, rules: Sequence[str], column: str) -> str:
    return f"at {column} " + ", ".join(f"{rule} {said(found.value(table, rule, column))}" for rule in rules)


def _lowest(others: Sequence[str], wanted: Sequence[Setting], or_else: Sequence[Setting], found: Found) -> Verdict:
    """Whether importance is below all others at every ratio, beyond the noise."""
    parts: dict[str, bool | None] = {}
    why = []
    for table in judged_on(found, wanted, or_else):
        shown = [rule_in(found, table, rule) for rule in ("Importance", *others)]
        won = {column: all(leads(found, table, other, column) for other in others) for column in COLUMNS}
        parts |= {f"{table} {column}": lead for column, lead in won.items()}
        why.append(
            f"{table}: lowest beyond the noise at {sum(won.values())} of {len(COLUMNS)} ratios; "
            f"{_listed(found, table, shown, '0.05')}; {_listed(found, table, shown, '0.50')}."
        )
    return together(parts, " ".join(why) or _NOTHING)


def _times(
    columns: Sequence[str], least: float, wanted: Sequence[Setting], or_else: Sequence[Setting], found: Found
) -> Verdict:
    """Whether importance is so many times below ToMe's score at these ratios, wherever in their intervals both lie; a
    ratio at which that depends on where says nothing."""
    parts: dict[str, bool | None] = {}
    why = []
    for table in judged_on(found, wanted, or_else):
        own, other = (rule_in(found, table, rule) for rule in ("Importance", "ToMe score"))
        told = []
        for column in columns:
            by = factors(found, table, own, other, column)
            held = parts[f"{table} {column}"] = exceeds(by, least)
            span = "" if by is None else f" ({said(by[0])} to {said(by[1])}{_vague(held)})"
            told.append(f"{said(factor(found, table, own, other, column))}×{span} at {column}")
        why.append(f"{table}: {', '.join(told)}; claimed: more than {least:g}×.")
    return together(parts, " ".join(why) or _NOTHING)


def _vague(held: bool | None) -> str:
    return ", which decides nothing" if held is None else ""


def _clip_at_half(found: Found) -> Verdict:
    random, tome, own = (found.row(CLIP.table, rule, "0.50") for rule in _THREE)
    before = found.row(CLIP.table, "ToMe score", "0.40")
    if random is None or tome is None or own is None or before is None:
        return Verdict("not at this scale", "The claim is about CLIP, which was not measured.")
    parts = {
        "sharp": tome["low"] > 3 * before["high"],
        "near random": tome["high"] > 0.8 * random["low"],
        "44 times": round(tome["high"] / max(own["low"], 1e-12)) >= 44,  # within reach of both intervals
    }
    times = said(factor(found, CLIP.table, "Importance", "ToMe score", "0.50"))
    why = (
        f"CLIP at 0.50: random {said(random['value'])}, ToMe's score {said(tome['value'])} (at 0.40 "
        f"{said(before['value'])}), importance {said(own['value'])}, {times}× less than ToMe's score."
    )
    return together(parts, why)


def _gap_closes(found: Found) -> Verdict:
    parts: dict[str, bool | None] = {}
    why = []
    for table in judged_on(found, [SKETCHES], [TINY_SHIFTED]):
        own, other = (rule_in(found, table, rule) for rule in ("Importance", "ToMe score"))
        first, last = (factor(found, table, own, other, column) for column in (COLUMNS[0], "0.50"))
        ahead = leads(found, table, "ToMe score", "0.50")
        there = leads(found, table, "ToMe score", COLUMNS[0])  # without a gap none can close
        parts[table] = None if last is None or there is None else there and (not ahead or last < 1.25)
        told = "beyond" if ahead else "within"
        why.append(f"{table}: {said(first)}× at {COLUMNS[0]}, {said(last)}× at 0.50, a lead {told} the noise.")
    return together(parts, " ".join(why) or "No shifted pictures were measured.")


def _shift_costs_little(found: Found) -> Verdict:
    pairs = [(DINOV2.table, SKETCHES.table), (TINY.table, TINY_SHIFTED.table)]
    present = {place.table for place in found}
    pair = next((pair for pair in pairs if set(pair) <= present), None)
    if pair is None:
        return Verdict("not at this scale", "No shifted pictures were measured.")
    parts: dict[str, bool | None] = {}
    why = []
    for rule in ("Importance", "ToMe score"):
        quotients = []
        for column in COLUMNS:
            usual, shifted = (found.value(table, rule_in(found, table, rule), column) for table in pair)
            if usual and shifted is not None:
                quotients.append(shifted / usual)
        parts[rule] = max(quotients) < 1.5 if quotients else None
        if quotients:
            why.append(f"{rule}: {said(min(quotients))} to {said(max(quotients))} times the error without the shift.")
    return together(parts, " ".join([f"{pair[1]} against {pair[0]}.", *why]))


def _head_agrees(found: Found) -> Verdict:
    (table, *_) = judged_on(found, [DINOV2], [TINY]) or ("",)
    row = found.row(LEARNED, table, "ρ")
    if row is None:
        return Verdict("not at this scale", "No head was measured.")
    parts = {"above 0.95": row["value"] > 0.95, "0.998 within the interval": row["high"] >= 0.997}
    why = (
        f"{table}: ρ {row['value']:.3f} [{row['low']:.3f}, {row['high']:.3f}] over {row['count']} held-out pictures, "
        f"of {row['note']}; over patches alone {said(found.value(LEARNED, table, 'ρ, patches'))}."
    )
    return together(parts, why)


def _only_selection_matters(found: Found) -> Verdict:
    """Whether the merge matters little once the tokens are chosen: dropping, and our merge, with the same head."""
    parts: dict[str, bool | None] = {}
    why = []
    for table in judged_on(found, [DINOV2, CLIP], [TINY, TINY_EARLY]):
        own = rule_in(found, table, "Importance")
        for other in (DROPPED, OURS):
            known = {c: factor(found, table, other, own, c) for c in COLUMNS}
            spans = [by for by in known.values() if by is not None]
            parts[f"{table} {other}"] = all(2 / 3 < by < 1.5 for by in spans) if spans else None
            told = f"{said(min(spans))} to {said(max(spans))}" if spans else "–"
            why.append(f"{table}: the paper's merge has {told} times the error of “{other}” with the same head.")
    return together(parts, " ".join(why) or _NOTHING)


def _merging_is_recommended(found: Found) -> Verdict:
    parts: dict[str, bool | None] = {}
    why = []
    for table in judged_on(found, [DINOV2, CLIP], [TINY, TINY_EARLY]):
        for other in (DROPPED, OURS):
            won, lost = (sum(bool(beyond(found, table, other, c)) for c in COLUMNS) for beyond in (leads, trails))
            parts[f"{table} {other}"] = won > lost
            why.append(f"{table}: better than “{other}” beyond the noise at {won} ratios, worse at {lost}.")
    return together(parts, " ".join(why) or _NOTHING)


def _predicted_modes(found: Found) -> str | None:
    known = [(table, found.value(LEARNED, table, "V₁, patches")) for table in found.rows(LEARNED)]
    told = [f"{table} {said(share)}" for table, share in known if share is not None]
    if not told:
        return None
    return (
        "How much of the exact modes' subspace the trained network finds over patches, V₁ (1 would be all of it): "
        f"{', '.join(told)}. Where it is near 0, d_task of the network chooses partners nearly at random."
    )


def _whose_intervals(found: Found) -> str | None:
    if not found.rows(SPREAD):
        return None
    return (
        "Intervals are over pictures, of each picture's mean over the seeds. The paper's ± are standard deviations "
        "over three seeds; ours stand in the table “spread over seeds”. ToMe's score has no seed: what spreads there "
        "are the weights of the merge, which come from the head."
    )


_CLAIMS = (
    Claim(
        "Importance outperforms ToMe's score at every ratio for the class token of DINOv2.",
        "tab:cls_pruning",
        partial(_lowest, ("ToMe score",), [DINOV2], [TINY, TINY_EARLY]),
    ),
    Claim(
        "Importance-guided merging has the lowest degradation at every ratio.",
        "sec:pruning_results",
        partial(_lowest, ("ToMe score", "Random"), [DINOV2], [TINY, TINY_EARLY]),
    ),
    Claim(
        "At low ratios (0.05 to 0.20) importance is more than an order of magnitude below ToMe's score.",
        "sec:pruning_results",
        partial(_times, _LOW, 10.0, [DINOV2], [TINY, TINY_EARLY]),
    ),
    Claim(
        "The result carries over to CLIP: importance is best at every ratio on both backbones.",
        "tab:clip_cls_pruning",
        partial(_lowest, ("ToMe score", "Random"), [CLIP], []),
    ),
    Claim(
        "On CLIP, ToMe's score degrades sharply at 0.50 and comes near random, and importance degrades 44 times less.",
        "tab:clip_cls_pruning",
        _clip_at_half,
    ),
    Claim(
        "On drawings, which the head never saw, importance keeps more than 100 times less error at low ratios "
        "(0.05 and 0.10).",
        "sec:clip_cls_results",
        partial(_times, COLUMNS[:2], 100.0, [SKETCHES], [TINY_SHIFTED]),
    ),
    Claim("On drawings the gap to ToMe's score closes at 0.50.", "sec:clip_cls_results", _gap_closes),
    Claim(
        "On drawings neither method is much worse than on pictures of the kind that was trained on.",
        "sec:clip_cls_results",
        _shift_costs_little,
    ),
    Claim(
        "The importance head reaches ρ = 0.998 ± 0.001 against imp* on held-out pictures.",
        "sec:empirical_validation",
        _head_agrees,
    ),
    Claim(
        "Soft merging leaves little drift on class tokens, so only the choice of tokens matters.",
        "sec:pruning_details",
        _only_selection_matters,
    ),
    Claim(
        "Importance-weighted soft merging is what to use for decoders of the class token.",
        "sec:pruning_details",
        _merging_is_recommended,
    ),
)

CLS_PRUNING = Experiment(
    name="cls-pruning",
    title="Pruning for class tokens",
    paper_label="tab:cls_pruning",
    about=(
        "100 (1 − cos) between the class token of the pruned and of the whole model. The tokens that a score ranks "
        "lowest are merged into their nearest kept neighbour under d_task, by means weighted with the head's "
        "importance; matching and weights are the same for every score. Rows without a remark have d_task of a trained "
        "Spectral Pullback Network, as in the paper. Dropped: the same tokens removed without a merge. Ours: the rule "
        "`best` with the same head. Differences are of the same pictures: below 0 importance is better."
    ),
    columns=(
        *(Column(column, "lower") for column in COLUMNS),
        Column("ρ", "higher"),
        Column("ρ, patches", "higher"),
        Column("ρ, std over seeds", "lower"),
        Column("V₁", "higher"),
        Column("V₁, patches", "higher"),
        Column("operations", "lower"),
        Column("error", "lower"),
    ),
    cells=cells,
    counts=COUNTS,
    paper={
        **{
            Place(own.table, rule, column): value
            for own, rules in _PAPER.items()
            for rule, values in rules.items()
            for column, value in zip(COLUMNS, values, strict=True)
        },
        **{
            Place(SPREAD, f"{own.table}: {rule}", column): value
            for (own, rule), values in _PAPER_SPREAD.items()
            for column, value in zip(COLUMNS, values, strict=True)
        },
        Place(LEARNED, DINOV2.table, "ρ"): "0.998 ± 0.001",
    },
    claims=_CLAIMS,
    figures=(
        *(
            Figure(f"curves-{number}", "curves", f"Error by ratio: {own.table}", table=own.table, log=True)
            for number, own in enumerate(SETTINGS)
        ),
        Figure(
            "operations",
            "scatter",
            "Error against operations, tiny-scenes pruned after block 6",
            about="Operations of all blocks, with what chooses and merges tokens, over those of the whole model.",
            table=COST,
            x="operations",
            y="error",
            log=True,
        ),
    ),
    footnotes=(_whose_intervals, _predicted_modes),
)
