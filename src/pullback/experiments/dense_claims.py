"""What the paper says of removing tokens from dense decoders, and how the rows decide it.

The paper's own model decides where there is one, otherwise what stands nearest to it. A difference counts where its
95 % interval over pictures leaves zero out, and is a quarter where the interval reaches that. First the names of tables
and rows, then the claims of each experiment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from pullback.experiments.dense_errors import (
    FUSION,
    IMPORTANCE,
    PHOTOS_DA,
    PHOTOS_S,
    RANDOM,
    REMOVAL,
    ROOMS_DA,
    ROOMS_S,
    SCENES,
    SCORES,
    STALE,
    STALE_FUSED,
    TOME,
    WHOLE,
    Dense,
)
from pullback.experiments.experiment import Claim, Found, Verdict, overall

DIFFERENCES = "One against another on the same pictures, % of the other's error"
AGAINST_TOME, AGAINST_RANDOM = "Importance against ToMe score", "Importance against Random"
DRAWN_AGAINST_TOME = "Random against ToMe score"
FUSED, MERGED = "with Last-Layer Fusion against without", "soft merge against hard pruning"
OURS = "ours against the paper's pipeline"
CHANGE, CHANGED, LOWEST_AT = "From 5 % to 30 % removed", "change, %", "lowest at"
SPREAD, STD = "Over the seeds", "largest std"
EQUAL_SHARE, EQUAL_OPERATIONS = "equal share removed", "equal operations"
ONE, TWO, FOUR = (4,), (4, 8), (1, 4, 7, 10)
"""The paper's schedules: tokens are removed after these blocks."""


def table_of(dense: Dense, kind: str = "") -> str:
    """Return the table of the errors of a subject."""
    return f"{dense.title}{kind and f', {kind}'}: {dense.measure}"


def row_of(score: str, pipeline: str = "paper") -> str:
    """Return the row of a score: the paper's pipeline has the paper's names."""
    return score if pipeline == "paper" else f"{score}, {pipeline}"


def causes_table(dense: Dense) -> str:
    return f"Where the error comes from: {dense.title}"


def cause_row(score: str, cause: str) -> str:
    return f"{score}: {cause}"


def difference(subject: str, what: str) -> str:
    """Return the row of a difference of a subject."""
    return f"{subject}: {what}"


def stages_table(dense: Dense, kind: str = EQUAL_SHARE) -> str:
    return table_of(dense, f"{dense.size} px, {kind}")


def stages_row(stages: Sequence[int], score: str) -> str:
    return f"{list(stages)} · {score}"


def named(dense: Dense, stages: Sequence[int]) -> str:
    """Return how differences name a schedule of a subject at a size."""
    return f"{dense.title}, {dense.size} px, {list(stages)}"


# What judges share

_NOTHING = "None of the models is there."
_FEW = 3
"""So many intervals are told one by one."""


def sign(found: Found, row: str, column: str) -> int | None:
    """Return -1 where a difference is below zero beyond the noise, 1 where above, 0 where neither; None: not there."""
    one = found.row(DIFFERENCES, row, column)
    if one is None:
        return None
    return -1 if one["high"] < 0 else 1 if one["low"] > 0 else 0


def less(found: Found, row: str, column: str) -> bool | None:
    known = sign(found, row, column)
    return None if known is None else known < 0


def deciding(found: Found, groups: Sequence[Sequence[Dense]]) -> list[Dense]:
    """Return the subjects that decide: those with values, of the first group that has any."""
    present = {place.table for place in found}
    there = [[own for own in group if {table_of(own), stages_table(own)} & present] for group in groups]
    return next((group for group in there if group), [])


def told(found: Found, row: str, columns: Sequence[str]) -> str:
    """Say a difference and its interval at some ratios; of many ratios its range, and where it is beyond the noise."""
    known = {column: one for column in columns if (one := found.row(DIFFERENCES, row, column)) is not None}
    if len(known) <= _FEW:
        parts = [f"{one['value']:+.0f} % ({one['low']:+.0f} to {one['high']:+.0f}) at {c}" for c, one in known.items()]
        return ", ".join(parts) or "no rows"
    values = [one["value"] for one in known.values()]
    where: dict[int | None, list[str]] = {}
    for column in known:
        where.setdefault(sign(found, row, column), []).append(column)
    words = {-1: "less", 1: "more", 0: "no clear difference"}
    said = [f"{word} at {', '.join(where[of])}" for of, word in words.items() if of in where]
    return f"{min(values):+.0f} to {max(values):+.0f} % ({'; '.join(said)})"


def values_told(found: Found, table: str, rows: Mapping[str, str], columns: Sequence[str]) -> str:
    """Say values of some rows, which are named, at some ratios."""
    parts = []
    for row, name in rows.items():
        values = [found.value(table, row, column) for column in columns]
        parts.append(f"{name} {' / '.join('–' if value is None else f'{value:.3g}' for value in values)}")
    return f"{', '.join(parts)} at {' / '.join(columns)}"


Look = Callable[[Found, Dense], tuple[dict[str, bool | None], str]]
"""What holds of one subject, by part, and what to say of it."""


def of_subjects(groups: Sequence[Sequence[Dense]], look: Look) -> Callable[[Found], Verdict]:
    """Return a judge that looks at every subject that decides."""

    def judge(found: Found) -> Verdict:
        parts: dict[str, bool | None] = {}
        said = []
        for dense in deciding(found, groups):
            own, why = look(found, dense)
            parts |= {f"{dense.title} {dense.size} {name}": held for name, held in own.items()}
            said.append(f"{dense.title}: {why}.")
        return overall(parts, " ".join(said) or _NOTHING)

    return judge


def differs(what: str, columns: Sequence[str], wanted: Sequence[int]) -> Look:
    """Look whether a difference has one of the ``wanted`` signs at every one of these ratios."""

    def look(found: Found, dense: Dense) -> tuple[dict[str, bool | None], str]:
        row = difference(dense.title, what)
        signs = {column: sign(found, row, column) for column in columns}
        held = {column: None if one is None else one in wanted for column, one in signs.items()}
        return held, f"{what} {told(found, row, columns)}"

    return look


# One stage, all ratios

_PHOTOS = ((PHOTOS_DA,), (PHOTOS_S,), (SCENES,))
_ALL = ((PHOTOS_DA,), (PHOTOS_S, ROOMS_S, SCENES))
"""For what the paper says of dense decoders whatever they see."""
LOW, MIDDLE, HIGH = ("0.05", "0.10"), ("0.15", "0.20"), ("0.30", "0.40", "0.50")


def by_a_quarter(found: Found, row: str, column: str) -> bool | None:
    """Return whether the interval of a difference reaches a quarter less."""
    one = found.row(DIFFERENCES, row, column)
    return None if one is None else bool(one["low"] <= -25)


def _a_quarter(found: Found, dense: Dense) -> tuple[dict[str, bool | None], str]:
    row = difference(dense.title, AGAINST_TOME)
    held = {"less": less(found, row, "0.50"), "a quarter": by_a_quarter(found, row, "0.50")}
    return held, f"{told(found, row, ['0.50'])}, claimed: -25 %"


def _best_of_three(found: Found, dense: Dense) -> tuple[dict[str, bool | None], str]:
    rows = {other: difference(dense.title, what) for other, what in ((TOME, AGAINST_TOME), (RANDOM, AGAINST_RANDOM))}
    held = {f"{other} {column}": less(found, row, column) for other, row in rows.items() for column in HIGH}
    return held, "; ".join(f"against {other} {told(found, row, HIGH)}" for other, row in rows.items())


def _random_best(found: Found, dense: Dense) -> tuple[dict[str, bool | None], str]:
    held: dict[str, bool | None] = {}
    for what, wanted in ((AGAINST_RANDOM, 1), (DRAWN_AGAINST_TOME, -1)):
        signs = {column: sign(found, difference(dense.title, what), column) for column in MIDDLE}
        held |= {f"{what} {column}": None if one is None else one == wanted for column, one in signs.items()}
    return held, values_told(found, table_of(dense), {score: score for score in SCORES}, MIDDLE)


def _falls(found: Found, dense: Dense) -> tuple[dict[str, bool | None], str]:
    held, said = {}, []
    for score in SCORES:
        one = found.row(CHANGE, difference(dense.title, score), CHANGED)
        held[score] = None if one is None else bool(one["high"] < 0)
        said += [] if one is None else [f"{score} {one['value']:+.0f} % ({one['low']:+.0f} to {one['high']:+.0f})"]
    rising = [score for score in SCORES if _is_rising(found, table_of(dense), score)]
    why = f"from 0.05 to 0.30 the error changes by {', '.join(said)}"
    why += f"; it grows from each ratio to the next for {', '.join(rising) or 'none'}"
    part = causes_table(dense)
    if found.value(part, cause_row(RANDOM, WHOLE), "0.05") is not None:
        rows = {cause_row(RANDOM, cause): cause for cause in (WHOLE, REMOVAL, STALE, FUSION)}
        why += f"; at random, {values_told(found, part, rows, ('0.05', '0.30'))}"
    return held, why


def _is_rising(found: Found, table: str, row: str) -> bool:
    values = list(found.columns(table, row).values())
    return len(values) > 1 and all(after > before for before, after in pairwise(values))


def _easy_to_recover(found: Found, dense: Dense) -> tuple[dict[str, bool | None], str]:
    table = causes_table(dense)
    stale, removal, tome = (
        cause_row(IMPORTANCE, STALE_FUSED),
        cause_row(IMPORTANCE, REMOVAL),
        cause_row(TOME, STALE_FUSED),
    )
    held = {f"stale first {column}": _apart(found, table, removal, stale, column) for column in LOW}
    held |= {f"ToMe less {column}": _apart(found, table, tome, stale, column) for column in LOW}
    rows = {stale: "stale tokens by importance", tome: "by ToMe score", removal: "removal by importance"}
    return held, values_told(found, table, rows, LOW)


def _apart(found: Found, table: str, lower: str, higher: str, column: str) -> bool | None:
    """Return whether the interval of one row lies below that of another."""
    first, second = found.row(table, lower, column), found.row(table, higher, column)
    return None if first is None or second is None else bool(first["high"] < second["low"])


PRUNING_CLAIMS = (
    Claim(
        "On photographs, importance has a smaller error than ToMe's score from a ratio of 0.20 on.",
        "tab:cls_pruning",
        of_subjects(_PHOTOS, differs(AGAINST_TOME, ("0.20", *HIGH), (-1,))),
    ),
    Claim(
        "Importance reduces the additional depth error of ToMe's score by 25 % at 0.50.",
        "sec:pruning_results",
        of_subjects(_PHOTOS, _a_quarter),
    ),
    Claim(
        "At the lowest ratios ToMe's score is competitive or better: importance does not lead at 0.05 and 0.10.",
        "sec:pruning_details",
        of_subjects(_PHOTOS, differs(AGAINST_TOME, LOW, (0, 1))),
    ),
    Claim(
        "From 0.30 on importance is the best of the three.", "sec:pruning_details", of_subjects(_PHOTOS, _best_of_three)
    ),
    Claim(
        "At 0.15 and 0.20 random selection is the best of the three.",
        "tab:dpt_pruning",
        of_subjects(_PHOTOS, _random_best),
    ),
    Claim(
        "The error is not monotone: it falls from 0.05 to 0.30 for all three, and this is real.",
        "sec:pruning_details",
        of_subjects(_PHOTOS, _falls),
    ),
    Claim(
        "Last-Layer Fusion reduces the drift of removed tokens: the error is smaller with it than without.",
        "sec:hard_prune",
        of_subjects(_ALL, differs(FUSED, (*LOW, *MIDDLE, *HIGH), (-1,))),
    ),
    Claim(
        "Merging corrupts the map of a dense decoder, so that tokens are better removed and put back.",
        "sec:hard_prune",
        of_subjects(_ALL, differs(MERGED, (*LOW, *MIDDLE, *HIGH), (1,))),
    ),
    Claim(
        "A head of the probe of one layer serves the whole decoder: from 0.30 on it beats random selection.",
        "sec:pruning_details",
        of_subjects(_ALL, differs(AGAINST_RANDOM, HIGH, (-1,))),
    ),
    Claim(
        "At low ratios staleness dominates, and ToMe's score picks tokens whose staleness costs less.",
        "sec:pruning_details",
        of_subjects(_PHOTOS, _easy_to_recover),
    ),
)

# Resolutions and data

_ON_PHOTOS, _ON_ROOMS, _IN_SCENES = "IN", "NYU", "scenes"
_SIZES: dict[str, tuple[int, ...]] = {
    _ON_PHOTOS: (224, 336, 448),
    _ON_ROOMS: (224, 336, 448),
    _IN_SCENES: (84, 126, 168),
    "shifted": (84, 126, 168),
}
ROBUSTNESS_SUBJECTS = {
    "DA V2 depth": (_ON_PHOTOS, _ON_ROOMS),
    "DINOv2-S depth head": (_ON_PHOTOS, _ON_ROOMS),
    "tiny-scenes depth": (_IN_SCENES, "shifted"),
}
"""By model the data that it was developed for, and the data that stand for another domain."""


def _judged(found: Found, *which: int) -> tuple[str, list[str]]:
    """Return the first model that has these of its data, its own (0) and the other domain (1), with their names."""
    for model, data in ROBUSTNESS_SUBJECTS.items():
        wanted = [data[one] for one in which]
        there = {place.column.partition("@")[0] for place in found if place.table == robustness_table(model)}
        if there.issuperset(wanted):
            return model, wanted
    return "", []


def robustness_table(model: str) -> str:
    return f"{model}, half of the tokens removed: additional SILog × 100"


def _at_sizes(which: int, wanted: Sequence[int], sizes: slice) -> Callable[[Found], Verdict]:
    """Judge by the sign of importance against ToMe's score, on the own data (0) or the other domain (1)."""

    def judge(found: Found) -> Verdict:
        model, data = _judged(found, which)
        columns = [f"{one}@{size}" for one in data for size in _SIZES[one][sizes]]
        row = difference(model, AGAINST_TOME)
        signs = {column: sign(found, row, column) for column in columns}
        held = {column: None if one is None else one in wanted for column, one in signs.items()}
        return overall(held, f"{row} {told(found, row, columns)}." if model else _NOTHING)

    return judge


def _on_rooms(found: Found) -> Verdict:
    model, data = _judged(found, 1)
    table, held, said = robustness_table(model), dict[str, bool | None](), []
    for column in [f"{one}@{size}" for one in data for size in _SIZES[one]]:
        values = {score: found.value(table, score, column) for score in SCORES}
        known = {score: value for score, value in values.items() if value is not None}
        if len(known) < len(SCORES):
            continue
        held[f"within a point {column}"] = max(known.values()) - min(known.values()) <= 1
        held[f"random lowest {column}"] = min(known, key=lambda score: known[score]) == RANDOM
        said.append(f"{column} {', '.join(f'{score} {value:.3g}' for score, value in known.items())}")
    return overall(held, f"{model}: {'; '.join(said)}." if model else _NOTHING)


def _fades_with_size(found: Found) -> Verdict:
    model, data = _judged(found, 0)
    columns = [f"{one}@{size}" for one in data for size in _SIZES[one]]
    row = difference(model, AGAINST_TOME)
    ends = [found.row(DIFFERENCES, row, column) for column in columns[:1] + columns[-1:]]
    first, last = ends or (None, None)
    held = None if first is None or last is None else bool(first["high"] < last["low"])
    return overall({"lead": held}, f"{row} {told(found, row, columns)}." if model else _NOTHING)


def _by_data(found: Found) -> Verdict:
    model, data = _judged(found, 0, 1)
    row, columns = difference(model, AGAINST_TOME), [f"{one}@{_SIZES[one][0]}" for one in data]
    signs = [sign(found, row, column) for column in columns] or [None, None]
    held = {
        "on its own": None if signs[0] is None else signs[0] < 0,
        "other": None if signs[1] is None else signs[1] >= 0,
    }
    return overall(held, f"{row} {told(found, row, columns)}." if model else _NOTHING)


ROBUSTNESS_CLAIMS = (
    Claim(
        "At 0.50 on ImageNet, importance beats ToMe's score at 224 and 336 pixels.",
        "tab:dpt_robustness",
        _at_sizes(0, (-1,), slice(0, 2)),
    ),
    Claim(
        "At the largest size (448 pixels) on ImageNet, importance loses to ToMe's score.",
        "tab:dpt_robustness",
        _at_sizes(0, (1,), slice(2, 3)),
    ),
    Claim(
        "On NYU at 0.50 the three are within about one point of each other, and random selection is nominally best at "
        "all sizes.",
        "tab:dpt_robustness",
        _on_rooms,
    ),
    Claim(
        "Larger pictures make the score of a token less informative: the lead of importance shrinks with the size.",
        "sec:pruning_details",
        _fades_with_size,
    ),
    Claim(
        "What a single stage does depends on the data: at 0.50 importance leads on ImageNet and not on NYU.",
        "sec:pruning_details",
        _by_data,
    ),
)

# Stages

STAGES_RATIOS = ("0.05", "0.10", "0.20", "0.30", "0.50")
ROOM_GROUPS = ((ROOMS_DA,), (ROOMS_S,), (SCENES,))
LARGER = {ROOMS_DA.title: (336, 448), ROOMS_S.title: (336, 448), SCENES.title: (126,)}
"""Further sizes of the pictures for two stages."""


def _tome_by_stages(stages: Sequence[int], columns: Sequence[str], wanted: Sequence[int]) -> Look:
    def look(found: Found, dense: Dense) -> tuple[dict[str, bool | None], str]:
        row = difference(named(dense, stages), AGAINST_TOME)
        signs = {column: sign(found, row, column) for column in columns}
        held = {column: None if one is None else one in wanted for column, one in signs.items()}
        return held, f"{list(stages)} against ToMe score {told(found, row, columns)}"

    return look


def _two_stages(found: Found, dense: Dense) -> tuple[dict[str, bool | None], str]:
    row = difference(named(dense, TWO), AGAINST_TOME)
    held = {column: less(found, row, column) for column in STAGES_RATIOS}
    held |= {f"a quarter {column}": by_a_quarter(found, row, column) for column in STAGES_RATIOS}
    reached = [column for column in STAGES_RATIOS if held[f"a quarter {column}"]]
    why = f"at {dense.size} px {told(found, row, STAGES_RATIOS)}"
    return held, f"{why}, the interval reaches a quarter at {', '.join(reached) or 'none'}"


def _larger(found: Found, dense: Dense) -> tuple[dict[str, bool | None], str]:
    held: dict[str, bool | None] = {}
    said = []
    for size in LARGER[dense.title]:
        own, why = _two_stages(found, dense.at(size))
        held |= {f"{size} {name}": one for name, one in own.items()}
        said.append(why)
    return held, "; ".join(said)


def _one_stage(found: Found, dense: Dense) -> tuple[dict[str, bool | None], str]:
    wins, why = _tome_by_stages(ONE, STAGES_RATIOS[:-1], (-1,))(found, dense)
    ties, at_half = _tome_by_stages(ONE, STAGES_RATIOS[-1:], (0,))(found, dense)
    return wins | ties, f"{why}; {at_half}"


def _four_stages(found: Found, dense: Dense) -> tuple[dict[str, bool | None], str]:
    held: dict[str, bool | None] = {}
    said = []
    for other in (ONE, TWO):
        row = difference(named(dense, FOUR), f"against {list(other)}, {EQUAL_SHARE}")
        held |= {f"{other} {column}": less(found, row, column) for column in STAGES_RATIOS[:3]}
        said.append(f"against {list(other)} {told(found, row, STAGES_RATIOS[:3])}")
    return held, "; ".join(said)


def _grows(found: Found, dense: Dense) -> tuple[dict[str, bool | None], str]:
    table, rows = stages_table(dense), [stages_row(ONE, score) for score in (TOME, IMPORTANCE)]
    there = [row for row in rows if found.columns(table, row)]
    return {row: _is_rising(found, table, row) for row in there}, values_told(
        found, table, {row: row for row in rows}, STAGES_RATIOS
    )


def _spread_removal(found: Found, dense: Dense) -> tuple[dict[str, bool | None], str]:
    held: dict[str, bool | None] = {}
    said = []
    for kind in (EQUAL_SHARE, EQUAL_OPERATIONS):
        row = difference(named(dense, TWO), f"against {list(ONE)}, {kind}")
        held |= {f"{kind} {column}": less(found, row, column) for column in STAGES_RATIOS}
        said.append(f"{kind} {told(found, row, STAGES_RATIOS)}")
    return held, f"{list(TWO)} against {list(ONE)}: {'; '.join(said)}"


def _only_two(found: Found, dense: Dense) -> tuple[dict[str, bool | None], str]:
    held: dict[str, bool | None] = {}
    said = []
    for stages in (ONE, TWO, FOUR):
        row = difference(named(dense, stages), AGAINST_TOME)
        leads = [less(found, row, column) for column in STAGES_RATIOS]
        everywhere = None if None in leads else all(leads)
        held[str(stages)] = None if everywhere is None else everywhere is (stages == TWO)
        said.append(f"{list(stages)} leads at {sum(map(bool, leads))} of {len(leads)} ratios")
    return held, ", ".join(said)


def _steady(found: Found, dense: Dense) -> tuple[dict[str, bool | None], str]:
    rows = [row for row in found.rows(SPREAD) if row.startswith(dense.title)]
    worst = max((found.value(SPREAD, row, STD) or 0.0 for row in rows), default=None)
    if worst is None:
        return {}, "no seeds"
    return {"variance": worst**2 <= 0.12}, f"the largest standard deviation is {worst:.2g}, variance {worst**2:.2g}"


STAGES_CLAIMS = (
    Claim(
        "On NYU at 224 pixels two stages beat ToMe's score at every ratio, by 25 to 35 %.",
        "tab:dpt_nyu_matched",
        of_subjects(ROOM_GROUPS, _two_stages),
    ),
    Claim(
        "They do at 336 and 448 pixels, too, by as much.",
        "tab:dpt_nyu_2stage_336_448",
        of_subjects(ROOM_GROUPS, _larger),
    ),
    Claim(
        "With one stage importance wins on NYU up to 0.30, and ties at 0.50.",
        "tab:dpt_nyu_matched",
        of_subjects(ROOM_GROUPS, _one_stage),
    ),
    Claim(
        "Four stages have the smallest error at ratios up to 0.20.",
        "tab:dpt_nyu_matched",
        of_subjects(ROOM_GROUPS, _four_stages),
    ),
    Claim(
        "Four stages fail from 0.30 on: importance is worse than ToMe's score.",
        "tab:dpt_nyu_matched",
        of_subjects(ROOM_GROUPS, _tome_by_stages(FOUR, STAGES_RATIOS[3:], (1,))),
    ),
    Claim(
        "On NYU the error of one stage grows monotonically with the ratio.",
        "sec:pruning_details",
        of_subjects(ROOM_GROUPS, _grows),
    ),
    Claim(
        "Removal that is spread over two stages has a smaller error than one stage. (The paper compares equal ratios, "
        "of which two stages save less; judged at equal operations as well.)",
        "sec:pruning_details",
        of_subjects(ROOM_GROUPS, _spread_removal),
    ),
    Claim(
        "Two stages are the only schedule that beats ToMe's score at every ratio.",
        "sec:pruning_details",
        of_subjects(ROOM_GROUPS, _only_two),
    ),
    Claim("The variance over three seeds is at most 0.12.", "tab:dpt_nyu_matched", of_subjects(ROOM_GROUPS, _steady)),
)
