"""Class tokens under pruning as an experiment: one small run, every verdict on rows made by hand, and the paper's
numbers at their places."""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.finished import Known, cut_down, finished, judged, rows_file, run
from pullback.experiments.cls_pruning import (
    CLS_PRUNING,
    COST,
    LEARNED,
    SHOWN,
    SPREAD,
)
from pullback.experiments.experiment import Place
from pullback.experiments.merging import (
    CLIP,
    COLUMNS,
    DINOV2,
    DROPPED,
    LEADS,
    OURS,
    RULES,
    SETTINGS,
    SKETCHES,
    TINY,
    TINY_EARLY,
    TINY_SHIFTED,
    Setting,
    exactly,
    measured,
)
from pullback.experiments.scales import SCALES
from pullback.experiments.workshop import Workshop
from pullback.runs.progress import Progress

FEW = {
    "images": 3, "train": 8, "early images": 2, "early train": 8, "seeds": 2, "steps": 4, "width": 16,
    "spn images": 8, "spn steps": 2, "spn batch": 2, "spn width": 16, "scene size": 56,
}  # fmt: skip
BETTER, WORSE, ALIKE = (-1.0, -2.0, -0.5), (1.0, 0.5, 2.0), (-0.1, -0.5, 0.5)
"""Differences of importance from another rule, and their intervals."""


# One small run


SIZES = (84, 56, 28)
"""Sides in place of 112, of which half are whole patches."""


@pytest.fixture(scope="module", autouse=True)
def sizes() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pullback.experiments.cls_pruning._SIZES", SIZES)
        yield


@pytest.fixture(scope="module")
def cut():
    return cut_down(CLS_PRUNING, lambda cell: cell.key.startswith(TINY.table + ": ") or cell.key == "operations", **FEW)


@pytest.fixture(scope="module")
def out(cut, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("cls-pruning")
    run(cut, folder)
    return folder


@pytest.fixture(scope="module")
def rows(cut, out) -> dict[Place, dict]:
    return {Place(row["table"], row["row"], row["column"]): row for row in run(cut, out)}  # finished, and read again


@pytest.mark.usefixtures("rows")
def test_rows_are_means_of_what_was_measured(cut, out, rows) -> None:
    shop = Workshop(cut, SCALES["tiny"], out, torch.device("cpu"), Progress())
    for kind in ("spn", "exact"):
        values = measured(shop, TINY, kind)["values"]
        for rule in SHOWN[kind]:
            name = exactly(rule) if kind == "exact" else rule
            for number, column in enumerate(COLUMNS):
                own = values[RULES[kind].index(rule), :, number]  # [seeds, n]
                row = rows[Place(TINY.table, name, column)]
                assert row["value"] == pytest.approx(float(own.mean()), rel=1e-5, abs=1e-9)
                assert (row["count"], row["over"]) == (3, "images"), "each picture once"
                assert row["low"] <= row["value"] <= row["high"]
                if kind == "spn":
                    spread = rows[Place(SPREAD, f"{TINY.table}: {rule}", column)]
                    assert spread["value"] == pytest.approx(np.std(own.mean(1).numpy(), ddof=1), rel=1e-4, abs=1e-9)
                    assert (spread["count"], spread["over"]) == (2, "seeds")
    assert {place.row for place in rows if place.table == LEADS} == {
        f"{TINY.table}: {rule}" for rule in ("ToMe score", "Random", DROPPED, OURS)
    }


def test_what_was_learned_has_its_correlations_and_its_subspace(rows) -> None:
    found = {place.column: row for place, row in rows.items() if place.table == LEARNED}
    assert list(found) == ["ρ", "ρ, patches", "ρ, std over seeds", "V₁", "V₁, patches"]
    assert found["ρ"]["note"] == "heads that were trained on 8 pictures"
    assert all(-1 <= found[column]["value"] <= 1 for column in ("ρ", "ρ, patches", "V₁", "V₁, patches"))
    assert found["ρ, std over seeds"]["count"] == 2


def test_operations_fall_with_the_ratio_and_the_picture(rows) -> None:
    points = {place.row: row["value"] for place, row in rows.items() if place == (COST, place.row, "operations")}
    for line in (OURS, DROPPED, "ToMe's merge"):
        known = [points[f"{line} · {column}"] for column in COLUMNS]
        assert known == sorted(known, reverse=True) and 0.5 < known[-1] < known[0] < 1
    smaller = [points[f"Smaller picture · {size}"] for size in SIZES]
    assert smaller == sorted(smaller, reverse=True) and smaller[0] < 1
    errors = [row["value"] for place, row in rows.items() if place == (COST, place.row, "error")]
    assert len(errors) == len(points) and min(errors) >= -1e-6


def test_a_second_run_gives_the_same_bytes(cut, out, tmp_path) -> None:
    part = cut_down(cut, lambda cell: cell.key == f"{TINY.table}: spn")
    run(part, tmp_path)
    again, before = (rows_file(part, folder).read_text().splitlines() for folder in (tmp_path, out))
    assert again == before[: len(again)]


# Verdicts


def errors(own: Setting, **by_rule: Known | list[Known]) -> dict[tuple[str, str, str], Known]:
    """Errors of rules, one for all ratios or one for each; "_" stands for a blank."""
    return {
        (own.table, rule.replace("_", " "), column): known[at] if isinstance(known, list) else known
        for rule, known in by_rule.items()
        for at, column in enumerate(COLUMNS)
    }


def ahead(own: Setting, **by_rule: Known | list[Known]) -> dict[tuple[str, str, str], Known]:
    """Differences of importance from rules."""
    named = {"ToMe": "ToMe score", "Random": "Random", "dropped": DROPPED, "best": OURS}
    return {
        (LEADS, f"{own.table}: {named[rule]}", column): known[at] if isinstance(known, list) else known
        for rule, known in by_rule.items()
        for at, column in enumerate(COLUMNS)
    }


def three(own: Setting, importance: Known | list = 1.0, tome: Known | list = 20.0, random: Known | list = 9.0) -> dict:
    return errors(own, Importance=importance, ToMe_score=tome, Random=random)


def verdict(beginning: str, *parts: dict) -> tuple[str, str]:
    joined = {place: known for part in parts for place, known in part.items()}
    return judged(CLS_PRUNING, finished(joined), beginning)


def test_importance_wins_where_its_lead_over_each_rule_is_beyond_the_noise() -> None:
    both = "Importance-guided"
    assert verdict(both, three(DINOV2), ahead(DINOV2, ToMe=BETTER, Random=BETTER))[0] == "holds"
    late = [BETTER] * 6 + [ALIKE]
    word, why = verdict(both, three(DINOV2), ahead(DINOV2, ToMe=BETTER, Random=late))
    assert word == "holds partly" and "6 of 7 ratios" in why and "at 0.05 Importance 1, ToMe score 20, Random 9;" in why
    assert verdict("Importance outperforms", three(DINOV2), ahead(DINOV2, ToMe=BETTER, Random=WORSE))[0] == "holds"
    assert verdict(both, three(DINOV2), ahead(DINOV2, ToMe=BETTER, Random=ALIKE))[0] == "does not hold"
    assert verdict(both, three(SKETCHES), ahead(SKETCHES, ToMe=BETTER, Random=BETTER))[0] == "not at this scale"


def test_embedded_models_decide_where_the_paper_s_is_missing() -> None:
    early = {(own, exactly(rule), at): known for (own, rule, at), known in three(TINY_EARLY).items()}
    leads = ahead(TINY, ToMe=BETTER, Random=BETTER) | ahead(TINY_EARLY, ToMe=WORSE, Random=WORSE)
    word, why = verdict("Importance-guided", three(TINY), early, leads)
    assert word == "holds partly" and "ToMe score, exact d_task 20" in why
    theirs = ahead(DINOV2, ToMe=BETTER, Random=BETTER)
    assert verdict("Importance-guided", three(TINY), early, leads, three(DINOV2), theirs)[0] == "holds"
    clip = three(CLIP), ahead(CLIP, ToMe=BETTER, Random=BETTER)
    assert (
        verdict("The result carries over", *clip, three(DINOV2), ahead(DINOV2, ToMe=WORSE, Random=WORSE))[0] == "holds"
    )


def test_orders_of_magnitude_are_counted_at_low_ratios_alone() -> None:
    claim = "At low ratios"
    assert verdict(claim, three(DINOV2, 1.0, [11.0] * 4 + [2.0] * 3))[0] == "holds"
    word, why = verdict(claim, three(DINOV2, 1.0, [11.0, 9.0] + [11.0] * 5))
    assert word == "holds partly" and "11× (11 to 11) at 0.05, 9× (9 to 9) at 0.10" in why
    assert verdict(claim, three(DINOV2, 1.0, 9.0))[0] == "does not hold"
    word, why = verdict(claim, three(DINOV2, (1.0, 0.8, 1.2), (14.0, 13.0, 15.0)))
    assert word == "holds" and "14× (10.8 to 18.8) at 0.05" in why
    word, why = verdict(claim, three(DINOV2, (1.0, 0.8, 1.2), (14.0, 11.0, 17.0)))
    assert word == "not at this scale" and "14× (9.17 to 21.2, which decides nothing) at 0.05" in why
    assert verdict(claim, three(DINOV2, (1.0, 0.8, 1.2), (7.0, 6.0, 7.9)))[0] == "does not hold"


def test_clip_s_claim_is_about_clip_alone() -> None:
    claim = "On CLIP"
    paper = three(CLIP, 0.76, [2.4] * 6 + [33.21], 36.31)
    word, why = verdict(claim, paper, three(TINY))
    assert word == "holds" and "43.7×" in why, "33.21 / 0.76 is 43.7, which rounds to 44"
    assert verdict(claim, three(CLIP, 0.80, [2.4] * 6 + [33.21], 36.31))[0] == "holds partly"
    within = (0.80, 0.70, 0.90)
    assert verdict(claim, three(CLIP, within, [2.4] * 6 + [33.21], 36.31))[0] == "holds"
    vague = [(2.4, 1.0, 20.0)] * 6 + [(33.21, 30.0, 36.0)]
    assert verdict(claim, three(CLIP, 0.75, vague, 36.31))[0] == "holds partly", "a rise within the noise"
    assert verdict(claim, three(CLIP, 0.9, [30.0] * 6 + [33.0], 60.0))[0] == "does not hold"
    assert verdict(claim, three(TINY))[0] == "not at this scale"


def test_drawings_need_a_hundredfold_lead_at_the_two_lowest_ratios() -> None:
    claim = "On drawings, which"
    assert verdict(claim, three(SKETCHES, 1.0, [101.0, 101.0] + [1.0] * 5))[0] == "holds"
    assert verdict(claim, three(TINY_SHIFTED, 1.0, [253.0, 71.0] + [1.0] * 5))[0] == "holds partly"
    assert verdict(claim, three(TINY, 1.0, 200.0))[0] == "not at this scale"


@pytest.mark.parametrize(
    ("lead", "last", "word"),
    [(ALIKE, 2.0, "holds"), (BETTER, 1.2, "holds"), (BETTER, 1.3, "does not hold"), (WORSE, 0.9, "holds")],
)
def test_a_gap_is_closed_by_the_noise_or_by_a_small_factor(lead: Known, last: float, word: str) -> None:
    rows = three(SKETCHES, 1.0, [100.0] * 6 + [last])
    assert verdict("On drawings the gap", rows, ahead(SKETCHES, ToMe=ALIKE))[0] == "does not hold", "there is none"
    found, why = verdict("On drawings the gap", rows, ahead(SKETCHES, ToMe=[BETTER] * 6 + [lead]))
    assert found == word and why.startswith(f"{SKETCHES.table}: 100× at 0.05, {last:g}× at 0.50, a lead ")


def test_a_shift_costs_little_where_no_ratio_is_half_as_bad_again() -> None:
    claim = "On drawings neither"
    assert verdict(claim, three(DINOV2), three(SKETCHES, 1.4, 25.0))[0] == "holds"
    assert verdict(claim, three(DINOV2), three(SKETCHES, [1.0] * 6 + [1.6], 25.0))[0] == "holds partly"
    word, why = verdict(claim, three(TINY), three(TINY_SHIFTED, 2.0, 40.0))
    assert word == "does not hold" and why.endswith("ToMe score: 2 to 2 times the error without the shift.")
    assert verdict(claim, three(DINOV2), three(TINY_SHIFTED))[0] == "not at this scale"


@pytest.mark.parametrize(
    ("rho", "word"),
    [((0.998, 0.996, 0.999), "holds"), ((0.97, 0.96, 0.98), "holds partly"), ((0.74, 0.71, 0.77), "does not hold")],
)
def test_the_head_is_compared_with_0998(rho: Known, word: str) -> None:
    known = {(LEARNED, TINY.table, "ρ"): rho} | three(TINY)
    found = finished(known, note="heads that were trained on 160 pictures", count=32)
    said, why = judged(CLS_PRUNING, found, "The importance head")
    assert said == word and "over 32 held-out pictures, of heads that were trained on 160 pictures" in why


def merges(own: Setting, importance: float, dropped: float, best: float) -> dict:
    return errors(own, Importance=importance) | {
        (own.table, rule, column): known for rule, known in ((DROPPED, dropped), (OURS, best)) for column in COLUMNS
    }


def test_the_merge_matters_little_where_dropping_costs_about_the_same() -> None:
    claim = "Soft merging leaves"
    assert verdict(claim, merges(DINOV2, 1.0, 0.9, 1.2))[0] == "holds"
    word, why = verdict(claim, merges(DINOV2, 1.0, 0.9, 0.1))
    assert word == "holds partly" and "has 10 to 10 times the error of “Ours (best)”" in why
    assert verdict(claim, merges(TINY, 1.0, 0.5, 2.0))[0] == "does not hold"


def test_a_merge_is_recommended_where_it_wins_more_often_than_it_loses() -> None:
    claim = "Importance-weighted soft merging"
    rows = merges(CLIP, 1.0, 1.0, 1.0)
    assert verdict(claim, rows, ahead(CLIP, dropped=BETTER, best=[BETTER] * 4 + [WORSE] * 3))[0] == "holds"
    word, why = verdict(claim, rows, ahead(CLIP, dropped=BETTER, best=[ALIKE] * 6 + [WORSE]))
    assert word == "holds partly" and why.endswith("“Ours (best)” beyond the noise at 0 ratios, worse at 1.")
    assert verdict(claim, rows, ahead(CLIP, dropped=WORSE, best=WORSE))[0] == "does not hold"


def test_footnotes_say_whose_intervals_they_are_and_what_the_network_finds() -> None:
    found = finished({(LEARNED, TINY.table, "V₁, patches"): 0.0127, (SPREAD, f"{TINY.table}: Random", "0.05"): 0.1})
    intervals, modes = (note(found) for note in CLS_PRUNING.footnotes)
    assert intervals and "each picture's mean over the seeds" in intervals
    assert modes and f"{TINY.table} 0.0127" in modes
    early = finished({(LEARNED, TINY_EARLY.table, "ρ"): 0.9})
    assert [note(early) for note in CLS_PRUNING.footnotes] == [None, None], "no network was trained there"


# The paper's numbers

TABLES = {
    DINOV2: """
        Random     & 0.17±0.03 & 0.36±0.05 & 0.60±0.08 & 0.86±0.09 & 1.49±0.14 & 2.31±0.22 & 3.44±0.31
        ToMe score & 0.67±0.11 & 0.78±0.07 & 0.95±0.07 & 1.12±0.11 & 1.75±0.13 & 2.56±0.25 & 3.82±0.42
        Importance & 0.001±0.000 & 0.007±0.001 & 0.024±0.002 & 0.060±0.005 & 0.25±0.03 & 0.80±0.09 & 2.09±0.13
        """,
    CLIP: """
        Random     & 3.10±0.44 & 7.03±1.48 & 13.31±1.30 & 13.55±2.00 & 23.73±2.41 & 30.10±1.09 & 36.31±0.69
        ToMe score & 0.12±0.01 & 0.17±0.04 & 0.21±0.03 & 0.21±0.05 & 0.33±0.04 & 2.40±0.38 & 33.21±1.09
        Importance & 0.001±0.000 & 0.004±0.000 & 0.012±0.001 & 0.026±0.002 & 0.094±0.009 & 0.29±0.01 & 0.76±0.03
        """,
}
LABELS = {DINOV2: "tab:cls_pruning", CLIP: "tab:clip_cls_pruning"}
DRAWINGS = {
    "Importance": "0.001 / 0.005 / 0.018 / 0.048 / 0.216 / 0.777 / 2.169",
    "ToMe score": "0.519 / 0.662 / 0.665 / 0.942 / 1.072 / 1.661 / 2.171",
}


def printed(text: str) -> dict[str, list[str]]:
    cells = [[cell.strip() for cell in line.split("&")] for line in text.strip().splitlines()]
    return {row: values for row, *values in cells}


def test_every_number_of_the_papers_tables_stands_at_its_place() -> None:
    wanted: dict[Place, float | str] = {Place(LEARNED, DINOV2.table, "ρ"): "0.998 ± 0.001"}
    for own, text in TABLES.items():
        for rule, values in printed(text).items():
            for column, value in zip(COLUMNS, values, strict=True):
                mean, spread = value.split("±")
                wanted[Place(own.table, rule, column)] = float(mean)
                wanted[Place(SPREAD, f"{own.table}: {rule}", column)] = float(spread)
    for rule, values in DRAWINGS.items():
        for column, value in zip(COLUMNS, values.split(" / "), strict=True):
            wanted[Place(SKETCHES.table, rule, column)] = float(value)
    assert CLS_PRUNING.paper == wanted


@pytest.mark.weights("paper/task_induced_metrics.tex")
def test_the_tables_are_those_of_the_paper(shared: Path) -> None:
    text = (shared / "paper" / "task_induced_metrics.tex").read_text(encoding="utf-8")
    for own, label in LABELS.items():
        body = text[text.index(rf"\label{{{label}}}") :]
        plain = re.sub(r"\\textbf\{([^}]*)\}", r"\1", body[: body.index(r"\end{tabular}")])
        plain = plain.replace(r"\,\scriptsize$\pm$", "±")
        lines = [
            [cell.strip().splitlines()[-1] for cell in line.split("&")] for line in plain.split(r"\\") if "&" in line
        ]
        first = {row: values for row, *values in reversed(lines)}  # the table has rows of depth below
        assert printed(TABLES[own]).items() <= first.items()
    for values in DRAWINGS.values():
        assert values in text


def test_settings_without_numbers_of_the_paper_are_our_own() -> None:
    assert {place.table for place in CLS_PRUNING.paper} - {SPREAD, LEARNED} == {
        own.table for own in SETTINGS if own.model != "tiny-scenes"
    }
    assert not any("tiny" in place.row for place in CLS_PRUNING.paper)
