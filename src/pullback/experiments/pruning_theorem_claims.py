"""What the paper says of its pruning theorem, and how the rows decide it.

The paper's own models decide where they were measured, else what stands nearest: class tokens and dense decoders each
for themselves, since the theorem is about both. First the cases and the names of tables and columns, then the claims.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pullback.experiments.experiment import Claim, Found, Verdict, overall

RATIOS = (0.1, 0.3, 0.5)
IMPORTANCE, PRODUCT, HINDSIGHT = "Importance", "Importance × distance", "Block norm × drift, in hindsight"
RANDOM, TOME = "Random", "ToMe score"
"""How tokens are chosen. The distance is that to the nearest kept token, known where tokens are removed; block norm and
drift are the theorem's own factors, of the unpruned model, known only after all of it has run."""

BOUND, PREMISE, COROLLARY = "the bound", "the premise", "the corollary"
CHOICE_LEADS = "error of importance against another choice, % of the other's"
FIRST_BY_CHOICE = "first-order term by choice"
FIRST_LEADS = "first-order term of importance against another choice, % of the other's"
ERROR, REMOVED, FIRST, SECOND = "error", "of removed tokens", "first term", "second term"
TIMES, HOLDS, SURE = "bound / error", "holds", "holds for a larger β"
MOVED, KEPT_RHO, KEPT_ENERGY = "kept tokens moved", "kept ρ", "kept share of ρ²"
KEPT_FIRST, LINEAR, REMAINDER = "kept share of first order", "first order / error", "remainder / error"
ORDER, CORRECTED = "order of remainder", "bound over all tokens / error"
SPREAD, PROXY, FUSED, ALIKE = "spread of ρ", "ρ of imp* and blocks", "residual / drift", "choices ordered alike"

UNIFORM = 0.25
"""The largest coefficient of variation of residuals that are called roughly uniform."""
PROXIES = 0.5
"""The least rank correlation of what is called a proxy."""
SQUARE = (1.9, 2.1)
"""Orders of a remainder that is like a square."""


@dataclass(frozen=True)
class Case:
    """A decoder whose model is pruned after a block. ``products``: about how many products its modes take; ``exact``:
    block norms of its map are exact, not sampled; ``papers``: the paper's own model and decoder."""

    title: str
    model: str
    decoder: str
    layer: int
    data: str
    products: int
    exact: bool = True
    papers: bool = False
    several: bool = False

    @property
    def dense(self) -> bool:
        return self.decoder != "cls"

    @property
    def counted(self) -> str:
        return "maps" if self.dense else "class tokens"

    @property
    def readings(self) -> tuple[str, ...]:
        """What φ is a function of: the tensor of the last layer, and of a decoder of several layers all of them."""
        return ("final", "all") if self.several else ("final",)

    @property
    def choices(self) -> tuple[str, ...]:
        """Every way to choose tokens, importance first. Class tokens have zero blocks only, so no hindsight."""
        return (IMPORTANCE, PRODUCT, *((HINDSIGHT,) if self.dense else ()), RANDOM, TOME)

    @property
    def choice_table(self) -> str:
        return f"error by choice: {self.title}"

    def ratios(self, reading: str = "final") -> tuple[float, ...]:
        """Return the ratios at which a reading is measured: one is enough to see what the other layers add."""
        return RATIOS if reading == "final" else RATIOS[1:2]

    def rows(self, reading: str = "final") -> list[str]:
        """Return its rows, one for each ratio."""
        what = ", all layers" if reading == "all" else ""
        return [f"{self.title}{what}, η {ratio:.2f}" for ratio in self.ratios(reading)]


CASES = (
    Case("DINOv2 CLS, L06", "dinov2", "cls", 6, "photos", 768, papers=True),
    Case("DINOv2 CLS, L10", "dinov2", "cls", 10, "photos", 768, papers=True),
    Case("DA V2 depth-8x8, L04", "depth-anything", "depth-8x8", 4, "photos", 64, papers=True, several=True),
    Case("Saliency on DINOv2-S, L04", "saliency", "saliency", 4, "photos", 130, exact=False),
    Case("tiny-scenes CLS, L06", "tiny-scenes", "cls", 6, "scenes", 192),
    Case("tiny-scenes CLS, L10", "tiny-scenes", "cls", 10, "scenes", 192),
    Case("tiny-scenes depth-8x8, L04", "tiny-scenes", "depth-8x8", 4, "scenes", 64, several=True),
)


def ratio_column(ratio: float) -> str:
    return f"{ratio:.2f}"


# What judges share


def deciding(found: Found, dense: bool) -> list[Case]:
    """Return the cases of class tokens, or of dense decoders, that decide: the paper's own where any has a value."""
    rows = {table: set(found.rows(table)) for table in (BOUND, PREMISE, COROLLARY)}
    present = {place.table for place in found}

    def there(case: Case) -> bool:
        return case.choice_table in present or any(rows[table] & set(case.rows()) for table in rows)

    cases = [case for case in CASES if case.dense is dense and there(case)]
    return [case for case in cases if case.papers] or cases


def _every(found: Found) -> list[Case]:
    return [*deciding(found, False), *deciding(found, True)]


def _values(found: Found, case: Case, table: str, column: str, end: str = "value") -> dict[str, float]:
    """Return by row of a case what was measured in a column, or an end of its interval."""
    known = {row: found.row(table, row, column) for row in case.rows()}
    return {row: float(one["value"] if one[end] is None else one[end]) for row, one in known.items() if one is not None}


def _span(values: Sequence[float], form: str = "{:.3g}") -> str:
    if not values:
        return "–"
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low} to {high}"


def _by_case(
    cases: Sequence[Case], judge: Callable[[Case], tuple[dict[str, bool | None], str]], otherwise: str
) -> Verdict:
    parts: dict[str, bool | None] = {}
    why = []
    for case in cases:
        own, told = judge(case)
        parts |= own
        if any(held is not None for held in own.values()):
            why.append(f"{case.title}: {told}.")
    return overall(parts, " ".join(why) or otherwise)


_NO_CASE = "No model of the scale was measured."
_NO_MAP = "No dense decoder was measured, and blocks of class tokens are zero for every choice."


# The theorem


def bound_holds(found: Found) -> Verdict:
    """Judge whether the stated bound is above the error on every picture, with the least β and with a larger one."""

    def judge(case: Case) -> tuple[dict[str, bool | None], str]:
        held, sure = (_values(found, case, BOUND, column) for column in (HOLDS, SURE))
        times = list(_values(found, case, BOUND, TIMES).values())
        shares = [_span(list(own.values()), "{:.0%}") for own in (held, sure)]
        told = (
            f"with the β that the remainder needs it is above the error on {shares[0]} of the pictures, {_span(times)} "
            f"times it; with a larger β, which the theorem allows, on {shares[1]}"
        )
        parts: dict[str, bool | None] = {row: share == 1 for row, share in held.items()}
        return parts | {f"{row}, larger β": share == 1 for row, share in sure.items()}, told

    return _by_case(_every(found), judge, _NO_CASE)


def kept_unchanged(found: Found) -> Verdict:
    """Judge whether kept tokens stay as they were, by what moved and by what it carries."""

    def judge(case: Case) -> tuple[dict[str, bool | None], str]:
        moved = _values(found, case, PREMISE, MOVED)
        first = list(_values(found, case, PREMISE, KEPT_FIRST).values())
        shares = [
            removed / error
            for row in case.rows()
            if (error := found.value(BOUND, row, ERROR)) and (removed := found.value(BOUND, row, REMOVED)) is not None
        ]
        told = (
            f"{_span(list(moved.values()), '{:.0%}')} of the kept tokens moved, which are {_span(first, '{:.0%}')} of "
            f"the first-order term over all tokens; with kept tokens put back the error is {_span(shares, '{:.0%}')} "
            "of what it was"
        )
        return {row: share == 0 for row, share in moved.items()}, told

    return _by_case(_every(found), judge, _NO_CASE)


def first_order_error(found: Found) -> Verdict:
    """Judge whether the first-order change describes the error: what it leaves out is less than half of the error."""

    def judge(case: Case) -> tuple[dict[str, bool | None], str]:
        highest = _values(found, case, PREMISE, REMAINDER, "high")
        linear, left = (list(_values(found, case, PREMISE, name).values()) for name in (LINEAR, REMAINDER))
        times = list(_values(found, case, PREMISE, CORRECTED).values())
        told = (
            f"|J(F − F̂)| is {_span(linear)} times the error and the remainder {_span(left)} times; token by token, "
            f"over all tokens, the bound is {_span(times)} times it"
        )
        return {row: high < 0.5 for row, high in highest.items()}, told

    return _by_case(_every(found), judge, _NO_CASE)


def smooth(found: Found) -> Verdict:
    def judge(case: Case) -> tuple[dict[str, bool | None], str]:
        orders = _values(found, case, PREMISE, ORDER)
        told = f"the remainder is of order {_span(list(orders.values()), '{:.2f}')}"
        return {row: SQUARE[0] <= order <= SQUARE[1] for row, order in orders.items()}, told

    return _by_case(_every(found), judge, _NO_CASE)


# The corollary


def importance_lowers_first(found: Found) -> Verdict:
    """Judge whether importance has a smaller first-order term than random and than ToMe's score, beyond the noise."""

    def judge(case: Case) -> tuple[dict[str, bool | None], str]:
        parts: dict[str, bool | None] = {}
        told = []
        for other in (RANDOM, TOME):
            leads = [found.row(FIRST_LEADS, f"{case.title}: {other}", ratio_column(ratio)) for ratio in RATIOS]
            parts |= {f"{case.title} {other} {n}": lead["high"] < 0 for n, lead in enumerate(leads) if lead}
            told.append(f"{_span([lead['value'] for lead in leads if lead], '{:+.0f}%')} against {other}")
        return parts, f"the first-order term of importance is {', '.join(told)}"

    return _by_case(deciding(found, True), judge, _NO_MAP)


def uniform_residuals(found: Found) -> Verdict:
    def judge(case: Case) -> tuple[dict[str, bool | None], str]:
        highest = _values(found, case, COROLLARY, SPREAD, "high")
        spread = list(_values(found, case, COROLLARY, SPREAD).values())
        return {row: high < UNIFORM for row, high in highest.items()}, (
            f"residuals of removed tokens spread by {_span(spread, '{:.0%}')} of their mean "
            f"(roughly uniform: less than {UNIFORM:.0%})"
        )

    return _by_case(deciding(found, True), judge, "No dense decoder was measured.")


def proxy(found: Found) -> Verdict:
    def judge(case: Case) -> tuple[dict[str, bool | None], str]:
        lowest = _values(found, case, COROLLARY, PROXY, "low")
        known = list(_values(found, case, COROLLARY, PROXY).values())
        return {row: low > PROXIES for row, low in lowest.items()}, (
            f"over patches Spearman's ρ is {_span(known, '{:.2f}')} (a proxy: above {PROXIES:g})"
        )

    return _by_case(deciding(found, True), judge, _NO_MAP)


def best_choice(found: Found) -> Verdict:
    """Judge whether importance beats random and ToMe's score beyond the noise, and no other choice beats it so."""

    def judge(case: Case) -> tuple[dict[str, bool | None], str]:
        parts: dict[str, bool | None] = {}
        told = []
        for other in case.choices[1:]:
            leads = [found.row(CHOICE_LEADS, f"{case.title}: {other}", ratio_column(ratio)) for ratio in RATIOS]
            for number, lead in enumerate(leads):
                if lead is not None:
                    held = lead["high"] < 0 if other in (RANDOM, TOME) else lead["low"] <= 0
                    parts[f"{case.title} {other} {number}"] = held
            values = [lead["value"] for lead in leads if lead]
            if values:
                told.append(f"{_span(values, '{:+.0f}%')} against “{other}”")
        return parts, f"the error of importance is {'; '.join(told)}"

    return _by_case(_every(found), judge, _NO_CASE)


def guides(found: Found) -> Verdict:
    """Judge whether, of two choices, that with the smaller first-order term has the smaller error."""

    def judge(case: Case) -> tuple[dict[str, bool | None], str]:
        lowest = _values(found, case, COROLLARY, ALIKE, "low")
        known = list(_values(found, case, COROLLARY, ALIKE).values())
        return {row: low > 0.5 for row, low in lowest.items()}, (
            f"of two choices, that with the smaller first-order term has the smaller error in {_span(known, '{:.0%}')} "
            "of the pairs (chance: 50%)"
        )

    return _by_case(deciding(found, True), judge, _NO_MAP)


def fusion_shrinks(found: Found) -> Verdict:
    def judge(case: Case) -> tuple[dict[str, bool | None], str]:
        highest = _values(found, case, COROLLARY, FUSED, "high")
        known = list(_values(found, case, COROLLARY, FUSED).values())
        return {row: high < 1 for row, high in highest.items()}, (
            f"what is left after Last-Layer Fusion is {_span(known, '{:.2f}')} times the drift of frozen tokens"
        )

    return _by_case(deciding(found, True), judge, "No dense decoder was measured.")


# Footnotes


def class_token_note(found: Found) -> str | None:
    cases = deciding(found, False)
    times = [value for case in cases for value in _values(found, case, BOUND, TIMES).values()]
    sure = [value for case in cases for value in _values(found, case, BOUND, SURE).values()]
    if not times or not sure:
        return None
    return (
        "A class-token decoder reads no removed token at the last layer: their blocks are zero, so the first term is "
        f"zero whatever is removed, and the bound with the measured β is {_span(times)} times the error. A larger β "
        f"saves it (known to be large enough for {_span(sure, '{:.0%}')} of the pictures), but the removed rows of F̂ "
        "are free to choose there, so what it then says is not about pruning."
    )


def tightness_note(found: Found) -> str | None:
    cases = deciding(found, True)
    times = [value for case in cases for value in _values(found, case, BOUND, TIMES).values()]
    linear = [value for case in cases for value in _values(found, case, PREMISE, LINEAR).values()]
    if not times or not linear:
        return None
    return (
        f"For dense decoders the bound is {_span(times)} times the error, nearly all of it because norms are added up "
        f"token by token: before that, the first-order change is {_span(linear)} times the error. So it also holds "
        "where its premise fails, by slack and not by the proof."
    )


NOTES = (class_token_note, tightness_note)
CLAIMS = (
    Claim(
        "The change of the output is at most the sum over removed tokens of block norm times residual, and β/2 times "
        "the sum of the squared residuals.",
        "eq:pruning_bound",
        bound_holds,
    ),
    Claim(
        "Kept tokens are exactly what they are without pruning, so only removed tokens contribute.",
        "thm:pruning",
        kept_unchanged,
    ),
    Claim(
        "The decoder is twice continuously differentiable, so that what is left after the first order is like a "
        "square.",
        "thm:pruning_formal",
        smooth,
    ),
    Claim(
        "The error of pruning is one of first order: a Taylor expansion around the pruned features describes it.",
        "sec:token_pruning",
        first_order_error,
    ),
    Claim(
        "The first term is small where the removed tokens have low task sensitivity, which is what importance targets.",
        "eq:pruning_formal",
        importance_lowers_first,
    ),
    Claim("The first-order error bound guides the choice of tokens.", "sec:pruning_details", guides),
    Claim("Residuals are roughly uniform over the removed tokens.", "cor:opt_prune", uniform_residuals),
    Claim(
        "imp* at the prune layer is a computable proxy for the block norms of the decoder's Jacobian after pruning.",
        "cor:opt_prune",
        proxy,
    ),
    Claim("The best tokens to drop are those with the smallest importance.", "cor:opt_prune", best_choice),
    Claim(
        "Last-Layer Fusion shrinks the residuals of the removed tokens.",
        "sec:hard_prune",
        fusion_shrinks,
    ),
)
