"""What the paper says of the cost of pruning, judged from the rows of `pullback.experiments.pruning_cost`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from pullback.experiments.experiment import Claim, Found, Verdict, overall

DENSE_OPERATIONS, CLS_OPERATIONS = "operations, dense decoders", "operations, class tokens"
DENSE_TIMES, CLS_TIMES = "wall-clock, dense decoders", "wall-clock, class tokens"
SCORES = "what chooses tokens"
BLOCKS, FUSION, HEAD, TOME_SCORE, D_TASK = "blocks save", "fusion", "head", "ToMe's score", "d_task"
UNPRUNED, OVER_TOME = "unpruned, ms", "over ToMe score"
PARAMETERS, HEAD_TIME, TOME_TIME = "parameters", "head, ms", "ToMe score, ms"
IMPORTANCE, TOME, DROPPED, OURS = "Importance", "ToMe score", "Importance, dropped", "Ours (best)"
UNFUSED = f"{IMPORTANCE} saves, not fused"
SHAPES = "ViT-B/14"
WHO = {
    "DA": "DA V2 depth", "DEPTH_S": "DINOv2-S depth head", "DEPTH_TINY": "tiny-scenes depth", "CLS": "DINOv2 CLS",
    "CLS_TINY": "tiny-scenes CLS",
}  # fmt: skip
"""Models with decoders as the rows call them."""
PAPERS_SIZE: dict[str, Any] = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "patch_size": 14}
SIZES = {"tiny-scenes": (112, 224), "others": (224, 448)}
ONE_TOKEN = "one token"
_SAVED = f"{IMPORTANCE} saves"
_PARAMETERS = 310_000
_SMALL = 0.05
"""A small fraction."""
_ROUNDED = 0.003
"""How far a share may be from a printed one: the paper's last digit, and what is counted as a block."""
_LITTLE = (0.015, 0.035)
"""Two to three per cent."""
_TOO_NOISY = 0.04
"""The width of an interval that says nothing about so little."""
_TIMED = (WHO["DA"], WHO["DEPTH_S"], WHO["DEPTH_TINY"])
_COUNTED = (WHO["DA"], SHAPES)
_NO_TIMES = "No dense decoder was timed on such pictures."


def operations_row(title: str, px: int, stages: Sequence[int], ratio: float) -> str:
    return f"{title}, {px} px, {list(stages)}, η {ratio:.2f}"


def saves(rule: str) -> str:
    """Return the column of the share of operations that a rule saves with all that it takes."""
    return f"{rule} saves"


def time_row(title: str, px: int, batch: int, stages: Sequence[int], ratio: float | str) -> str:
    """Return the name of a row of times. ``ratio``: a share, or `ONE_TOKEN` of a stage."""
    removed = ratio if isinstance(ratio, str) else f"η {ratio:.2f}"
    return f"{title}, {px} px, batch {batch}, {list(stages)}, {removed}"


def score_row(title: str, px: int) -> str:
    return f"{title}, {px} px"


def faster(rule: str) -> str:
    """Return the column of how many times faster than the unpruned model a rule is."""
    return f"{rule}, ×"


# Operations


def counted(found: Found, px: int, stages: Sequence[int]) -> tuple[str, dict[str, float]]:
    """Return who decides about operations, and the shares of its row: the paper's model, or its shapes."""
    for title in _COUNTED:
        values = found.columns(DENSE_OPERATIONS, operations_row(title, px, stages, 0.20))
        if {_SAVED, BLOCKS, FUSION, HEAD, TOME_SCORE} <= values.keys():
            return title, values
    return "", {}


def saves_share(claimed: float, px: int, stages: Sequence[int], found: Found, *, above: int | None = None) -> Verdict:
    """Judge a share of operations. ``above``: also whether it is more than with pictures of that size."""
    title, values = counted(found, px, stages)
    if not values:
        return Verdict("not at this scale", "No operations were counted.")
    parts: dict[str, bool | None] = {
        "with all that it takes": abs(values[_SAVED] - claimed) <= _ROUNDED,
        "by blocks alone": abs(values[BLOCKS] - claimed) <= _ROUNDED,
    }
    why = (
        f"{title} at {px} px, stages {list(stages)}, η 0.20: {values[_SAVED]:.1%} with all that it takes, "
        f"{values[BLOCKS]:.1%} by blocks alone, without Last-Layer Fusion ({values[FUSION]:.1%}) and the head "
        f"({values[HEAD]:.2%}); claimed {claimed:.1%}."
    )
    if above is not None:
        smaller = counted(found, above, stages)[1]
        parts["it rises"] = values[_SAVED] > smaller[_SAVED] if smaller else None
        why += f" At {above} px {smaller[_SAVED]:.1%} with all that it takes." if smaller else ""
    return overall(parts, why)


# Times


def timed(
    found: Found, px: int, batch: int | None, stages: Sequence[int], ratio: float | str = 0.20
) -> tuple[str, str]:
    """Return who decides about times, and its row: the paper's model where it was timed, else ours. ``batch``: None is
    any of several pictures."""
    for title in _TIMED:
        for row in found.rows(DENSE_TIMES):
            batches = [batch] if batch is not None else [many for many in (4, 64)]
            if row in [time_row(title, px, many, stages, ratio) for many in batches]:
                return title, row
    return "", ""


def speed(found: Found, row: str, rule: str = IMPORTANCE) -> Mapping[str, Any] | None:
    return found.row(DENSE_TIMES, row, faster(rule))


def is_slower(row: Mapping[str, Any] | None) -> bool | None:
    return None if row is None else bool(row["high"] < 1)


def is_faster(row: Mapping[str, Any] | None) -> bool | None:
    return None if row is None else bool(row["low"] > 1)


def said(row: Mapping[str, Any] | None, unit: str = "×") -> str:
    if row is None:
        return "–"
    return f"{row['value']:.2f}{unit} [{row['low']:.2f}, {row['high']:.2f}]"


def slower_at(px: int, found: Found) -> Verdict:
    title, row = timed(found, px, 1, (4,))
    own, tome = speed(found, row), speed(found, row, TOME)
    parts = {"importance": is_slower(own), "ToMe's score": is_slower(tome)}
    why = f"{title}, one picture of {px} px, η 0.20: importance {said(own)}, ToMe's score {said(tome)}."
    return overall(parts, why if title else _NO_TIMES)


def faster_at(px: int, found: Found) -> Verdict:
    title, row = timed(found, px, 1, (4,))
    own, tome = speed(found, row), speed(found, row, TOME)
    parts = {"importance": is_faster(own), "ToMe's score": is_faster(tome)}
    why = f"{title}, one picture of {px} px, η 0.20: importance {said(own)}, ToMe's score {said(tome)}."
    return overall(parts, why if title else _NO_TIMES)


def only_when_large(found: Found) -> Verdict:
    """Judge whether nothing is gained at 224 px, also by batches, and something is at 448 px."""
    parts: dict[str, bool | None] = {}
    told, decides = [], ""
    for px, batch in ((224, 1), (224, None), (448, 1)):
        title, row = timed(found, px, batch, (4,))
        decides = decides or title
        gained = is_faster(speed(found, row)) if title == decides else None
        many = "one picture" if batch == 1 else "a batch"
        parts[f"{px} px, {many}"] = gained if px == 448 or gained is None else not gained
        if gained is not None:
            told.append(f"{many} of {px} px {said(speed(found, row))}")
    why = f"{decides}, η 0.20: {', '.join(told)}." if told else _NO_TIMES
    if parts["448 px, one picture"] is None and all(held is not False for held in parts.values()):
        return Verdict("not at this scale", f"{why} Nothing larger was timed.")
    return overall(parts, why)


def fixed_cost(found: Found) -> Verdict:
    title, row = timed(found, 224, 1, (4,))
    one, own = speed(found, timed(found, 224, 1, (4,), ONE_TOKEN)[1]), speed(found, row)
    if one is None or own is None:
        return Verdict("not at this scale", _NO_TIMES)
    parts = {"there is a fixed cost": is_slower(one), "more than is saved": is_slower(own)}
    paid, saved = 1 / one["value"] - 1, 1 / one["value"] - 1 / own["value"]
    why = (
        f"{title}, one picture of 224 px: removing a single token takes {paid:+.1%} of the unpruned model's time "
        f"({said(one)}), removing a fifth of them instead saves {saved:.1%} ({said(own)})."
    )
    return overall(parts, why)


def little_more_than_tome(found: Found) -> Verdict:
    low, high = _LITTLE
    parts: dict[str, bool | None] = {}
    why = []
    for px in (224, 448):
        title, values = counted(found, px, (4,))
        if values:
            share = values[HEAD] + values[FUSION]
            parts[f"operations, {px} px"] = low <= share <= high
            why.append(
                f"{title}, {px} px: head {values[HEAD]:.2%} and fusion {values[FUSION]:.2%} of the blocks' operations."
            )
    for px in (224, 448):
        title, row = timed(found, px, 1, (4,))
        time = found.row(DENSE_TIMES, row, OVER_TOME)
        if time is not None:
            noisy = time["high"] - time["low"] > _TOO_NOISY
            parts[f"time, {px} px"] = None if noisy else bool(time["low"] <= high and time["high"] >= low)
            span = f"[{time['low']:+.1%}, {time['high']:+.1%}]"
            why.append(f"{title}, one picture of {px} px: {time['value']:+.1%} {span} of the time with ToMe's score.")
    return overall(parts, " ".join([*why, "Fusion runs with either score."]))


def two_stages_are_slower(found: Found) -> Verdict:
    title, row = timed(found, 224, 1, (4, 8))
    two, one = speed(found, row), speed(found, timed(found, 224, 1, (4,))[1])
    parts = {
        "slower than unpruned": is_slower(two),
        "slower than one stage": None if two is None or one is None else bool(two["high"] < one["low"]),
    }
    why = f"{title}, one picture of 224 px, η 0.20: two stages {said(two)}, one stage {said(one)}."
    return overall(parts, why if title else _NO_TIMES)


def tome_is_cheaper(found: Found) -> Verdict:
    parts: dict[str, bool | None] = {}
    why = []
    for px in (224, 448):
        title, values = counted(found, px, (4,))
        if values:
            parts[f"operations, {px} px"] = values[TOME_SCORE] < values[HEAD]
            why.append(
                f"{title}, {px} px: ToMe's score {values[TOME_SCORE]:.2%} of the blocks, the head {values[HEAD]:.2%}."
            )
    decides = ""
    for px in (224, 448):
        title = next((own for own in _TIMED if f"{score_row(own, px)}, batch 1" in found.rows(SCORES)), "")
        head, tome_time = (
            found.row(SCORES, f"{score_row(title, px)}, batch 1", name) for name in (HEAD_TIME, TOME_TIME)
        )
        decides = decides or title
        if head is not None and tome_time is not None and title == decides:
            parts[f"time, {px} px"] = bool(tome_time["high"] < head["low"])
            why.append(f"{title}, one picture of {px} px: {said(tome_time, ' ms')} against {said(head, ' ms')}.")
    return overall(parts, " ".join(why) or _NO_TIMES)


def small_head(found: Found) -> Verdict:
    """Judge the size by the shapes of the paper's model, and what the head takes against all blocks: under 5 %."""
    title, values = counted(found, 224, (4,))
    size = found.value(SCORES, score_row(title, 224), PARAMETERS) if title else None
    parts: dict[str, bool | None] = {
        "size": None if size is None else abs(size / _PARAMETERS - 1) <= 0.05,
        "operations": values[HEAD] < _SMALL if values else None,
    }
    why = (
        f"{title} at 224 px: {size or 0:,.0f} parameters, {values[HEAD]:.2%} of the blocks' operations."
        if values
        else ""
    )
    timed_by, row = timed(found, 224, 1, (4,))
    head = found.row(SCORES, f"{score_row(timed_by, 224)}, batch 1", HEAD_TIME) if timed_by else None
    whole = found.row(DENSE_TIMES, row, UNPRUNED) if timed_by else None
    if head is not None and whole is not None:
        parts["time"] = bool(head["high"] < _SMALL * whole["low"])
        share = head["value"] / whole["value"]
        why += f" {timed_by}, one picture of 224 px: {said(head, ' ms')} of {said(whole, ' ms')} ({share:.1%})."
    return overall(parts, why.strip() or "No operations were counted.")


# Footnotes


def without_fusion(found: Found) -> str | None:
    (title, one), (_, two), (_, large) = (counted(found, *own) for own in ((224, (4,)), (224, (4, 8)), (448, (4,))))
    if not (one and two and large):
        return None
    return (
        "The paper's 12.1 % and 8.6 % are what the blocks save if Last-Layer Fusion does not run and the head costs "
        f"nothing: {one[BLOCKS]:.1%} and {two[BLOCKS]:.1%} by the shapes of {title}. Its pipeline has both, and saves "
        f"{one[_SAVED]:.1%} and {two[_SAVED]:.1%}. Its 16.7 % at 448 px follow from neither: the blocks alone save "
        f"{large[BLOCKS]:.1%}, all in all it is {large[_SAVED]:.1%}."
    )


def too_late_for_class_tokens(found: Found) -> str | None:
    row = operations_row(f"{SHAPES}, class token", 224, (10,), 0.50)
    values = found.columns(CLS_OPERATIONS, row)
    if not {BLOCKS, HEAD, D_TASK, _SAVED} <= values.keys():
        return None
    return (
        "Class tokens are pruned after block 10 of 12 in the paper, which leaves one block to save in. With half of "
        f"the tokens gone it saves {values[BLOCKS]:.1%} of the blocks' operations, and the head ({values[HEAD]:.2%}) "
        f"and d_task by a Spectral Pullback Network ({values[D_TASK]:.1%}) are paid for it: {values[_SAVED]:+.1%} all "
        "in all."
    )


def pairs_compared(found: Found) -> str | None:
    small, large = (counted(found, px, (4,))[1] for px in (224, 448))
    if not (small and large):
        return None
    return (
        f"Our ToMe score compares all tokens with all: {small[TOME_SCORE]:.2%} of the blocks at 224 px, "
        f"{large[TOME_SCORE]:.2%} at 448 px. Its two sets alone would need a quarter of that."
    )


_TEXT = "sec:pruning_details"
CLAIMS = (
    Claim("At 224 × 224 and η = 0.20, pruning removes 12.1 % of the backbone's FLOPs.", _TEXT,
          partial(saves_share, 0.121, 224, (4,))),
    Claim("At 448 × 448 the FLOP saving at η = 0.20 rises to 16.7 %.", _TEXT,
          partial(saves_share, 0.167, 448, (4,), above=224)),
    Claim("The two-stage [4, 8] schedule saves 8.6 % of FLOPs at η = 0.20.", _TEXT,
          partial(saves_share, 0.086, 224, (4, 8))),
    Claim("At 224 × 224 the pruned model is slightly slower than the unpruned one (0.96×, 0.98× with ToMe scoring).",
          _TEXT, partial(slower_at, 224)),
    Claim("At 448 × 448 the pruned model is faster (1.12×, 1.15× with ToMe scoring).", _TEXT, partial(faster_at, 448)),
    Claim("A speedup appears only at higher resolution.", "sec:limitations", only_when_large),
    Claim("With 257 tokens, what is saved is less than the fixed cost of scoring, removing and re-inserting tokens.",
          _TEXT, fixed_cost),
    Claim("The importance head and Last-Layer Fusion together cost about 2–3 % more than ToMe scoring.", _TEXT,
          little_more_than_tome),
    Claim("The two-stage schedule is slower still than one stage (0.88× at 224 × 224).", _TEXT, two_stages_are_slower),
    Claim("The importance head has about 310,000 parameters, and costs a small fraction of a forward pass.",
          "sec:empirical_validation", small_head),
    Claim("The ToMe score is cheaper to compute than the head.", _TEXT, tome_is_cheaper),
)  # fmt: skip
FOOTNOTES = (without_fusion, too_late_for_class_tokens, pairs_compared)
