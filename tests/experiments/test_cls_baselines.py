"""Baselines in the same merge and the paired tests: rows against their definition, every verdict on rows made by hand,
and the paper's numbers at their places."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import wilcoxon

from helpers.finished import Known, cut_down, finished, judged, rows_file, run
from pullback.experiments.cls_baselines import CLS_BASELINES, DELTA, ROWS, WILCOXON, P, smallest_p
from pullback.experiments.experiment import Place
from pullback.experiments.merging import (
    CLIP,
    COLUMNS,
    DINOV2,
    LEADS,
    RULES,
    TINY,
    TINY_EARLY,
    Setting,
    measured,
    values_of,
)
from pullback.experiments.scales import SCALES
from pullback.experiments.workshop import Workshop
from pullback.runs.progress import Progress

FEW = {
    "images": 3, "train": 8, "early images": 6, "early train": 8, "seeds": 2, "steps": 4, "width": 16,
    "spn images": 8, "spn steps": 2, "spn batch": 2, "spn width": 16, "scene size": 56,
}  # fmt: skip
BETTER, WORSE, ALIKE = (-1.0, -2.0, -0.5), (1.0, 0.5, 2.0), (-0.1, -0.5, 0.5)
"""Differences of importance from another rule, and their intervals."""


# One small run of both


def early_alone(experiment):
    return cut_down(experiment, lambda cell: cell.key == TINY_EARLY.table, **FEW)


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cls-baselines")


@pytest.fixture(scope="module")
def shop(out) -> Workshop:
    return Workshop(early_alone(CLS_BASELINES), SCALES["tiny"], out, torch.device("cpu"), Progress())


def placed(rows: list[dict]) -> dict[Place, dict]:
    return {Place(row["table"], row["row"], row["column"]): row for row in rows}


def test_rows_of_baselines_are_means_of_what_was_measured(out, shop) -> None:
    rows = placed(run(early_alone(CLS_BASELINES), out))
    values = measured(shop, TINY_EARLY, "exact")["values"]
    for rule in ROWS:
        own = values[RULES["exact"].index(rule)].mean(0)  # [ratios, n]
        for number, column in enumerate(COLUMNS):
            row = rows[Place(TINY_EARLY.table, rule, column)]
            assert row["value"] == pytest.approx(float(own[number].mean()), rel=1e-5) and row["count"] == 6
    assert {place.row for place in rows if place.table == LEADS} == {f"{TINY_EARLY.table}: {rule}" for rule in ROWS[1:]}


def test_paired_tests_take_each_picture_once_in_cosines(out, shop) -> None:
    rows = placed(run(early_alone(WILCOXON), out))
    own, other = (
        values_of(shop, TINY_EARLY, "exact", rule).mean(0).numpy() / 100 for rule in ("Importance", "ToMe score")
    )
    for number, column in enumerate(COLUMNS):
        delta, p = (rows[Place(TINY_EARLY.table, column, name)] for name in (DELTA, P))
        assert delta["value"] == pytest.approx((own[number] - other[number]).mean(), rel=1e-4)
        assert delta["low"] <= delta["value"] <= delta["high"] and delta["count"] == p["count"] == 6
        assert p["value"] == pytest.approx(wilcoxon(own[number], other[number]).pvalue, rel=1e-6)


def test_both_read_what_was_measured_once_and_come_to_the_same_bytes(out, tmp_path, monkeypatch) -> None:
    shutil.copytree(out / "store", tmp_path / "store")

    def refuse(*arguments: object) -> None:
        raise AssertionError("measured anew")

    monkeypatch.setattr("pullback.experiments.merging._measure", refuse)
    for experiment in (WILCOXON, CLS_BASELINES):
        run(early_alone(experiment), tmp_path)
        again, before = (rows_file(experiment, folder).read_bytes() for folder in (tmp_path, out))
        assert again == before


@pytest.mark.parametrize("count", [3, 5, 8, 12])
def test_the_smallest_p_is_that_of_signs_that_all_agree(count: int) -> None:
    assert smallest_p(count) == pytest.approx(2.0 ** (1 - count))


# Verdicts on baselines


def table(own: Setting, **by_rule: Known | list[Known]) -> dict[tuple[str, str, str], Known]:
    """Errors by rule, one for all ratios or one for each; "_" stands for a blank."""
    return {
        (own.table, rule.replace("_", " "), column): known[at] if isinstance(known, list) else known
        for rule, known in by_rule.items()
        for at, column in enumerate(COLUMNS)
    }


def ahead(own: Setting, default: Known = BETTER, **by_rule: Known | list[Known]) -> dict[tuple[str, str, str], Known]:
    """Differences of importance from every other rule."""
    found: dict[tuple[str, str, str], Known] = {}
    for rule in ROWS[1:]:
        known = by_rule.get(rule.replace(" ", "_"), default)
        for at, column in enumerate(COLUMNS):
            found[LEADS, f"{own.table}: {rule}", column] = known[at] if isinstance(known, list) else known
    return found


PAPERS = {"Importance": 1.0, "EViT": 1.1, "Token_norm": 3.0, "CLS_similarity": 2.0, "ToMe_score": 9.0, "Random": 5.0}


def verdict(beginning: str, *parts: dict) -> tuple[str, str]:
    return judged(CLS_BASELINES, finished({place: known for part in parts for place, known in part.items()}), beginning)


def test_the_head_may_tie_with_evit_and_with_no_other() -> None:
    claim, rows = "The head is best", table(DINOV2, **PAPERS)
    assert verdict(claim, rows, ahead(DINOV2, EViT=ALIKE))[0] == "holds"
    word, why = verdict(claim, rows, ahead(DINOV2, EViT=[WORSE] + [ALIKE] * 6))
    assert (
        word == "holds partly" and "at 6 of 7 ratios" in why and "at 0.10 Importance 1, EViT 1.1, Token norm 3" in why
    )
    assert verdict(claim, rows, ahead(DINOV2, Token_norm=ALIKE))[0] == "does not hold"
    assert verdict(claim, table(CLIP, **PAPERS), ahead(CLIP))[0] == "not at this scale"


def test_evit_is_beaten_where_the_lead_is_beyond_the_noise() -> None:
    claim, rows = "Importance also beats", table(TINY, **PAPERS)
    word, why = verdict(claim, rows, ahead(TINY))
    assert word == "holds" and "at 7 of 7 ratios; 1.1× at 0.05" in why
    assert verdict(claim, rows, ahead(TINY, EViT=[ALIKE] + [BETTER] * 6))[0] == "holds partly"
    assert verdict(claim, rows, ahead(TINY, EViT=ALIKE))[0] == "does not hold"
    assert verdict(claim, rows, ahead(TINY), table(DINOV2, **PAPERS), ahead(DINOV2, EViT=ALIKE))[0] == "does not hold"


def test_evit_is_the_strongest_where_no_other_rule_has_less_error_at_any_ratio() -> None:
    claim = "EViT is the strongest"
    assert verdict(claim, table(DINOV2, **PAPERS))[0] == "holds"
    once = table(DINOV2, **{**PAPERS, "Random": [5.0, 0.5] + [5.0] * 5})
    word, why = verdict(claim, once)
    assert word == "holds partly" and "EViT at 0.05, 0.15, 0.20, 0.30, 0.40, 0.50, Random at 0.10;" in why
    far = table(DINOV2, **{**PAPERS, "EViT": 2.1, "Random": 0.5})
    assert verdict(claim, far)[0] == "does not hold"
    only_late = table(DINOV2, **{**PAPERS, "EViT": [1.9] * 4 + [20.0] * 3})
    assert verdict(claim, only_late)[0] == "holds partly", "close at low ratios, and not the strongest at high ones"


def test_evit_is_no_longer_the_strongest_where_another_is_below_it_beyond_the_intervals() -> None:
    claim, near = "EViT is the strongest", (1.1, 1.0, 1.2)

    def found(**others: Known | list[Known]) -> tuple[str, str]:
        return verdict(claim, table(DINOV2, **{**PAPERS, "EViT": near, **others}))

    word, why = found(CLS_similarity=(1.05, 0.95, 1.15))
    assert word == "holds partly" and "below all others beyond the intervals at 0 of 7 ratios" in why, "as good as it"
    assert found(CLS_similarity=[(1.05, 0.95, 1.15)] * 6 + [2.0])[0] == "holds", "ahead once, and never behind"
    word, why = found(CLS_similarity=[0.9] + [2.0] * 6)
    assert word == "holds partly" and "another below EViT at 1;" in why
    assert found(EViT=(2.4, 2.1, 2.7), CLS_similarity=3.0)[0] == "holds partly", "more than twice the error"
    word, why = found(EViT=(1.9, 1.5, 2.3), CLS_similarity=3.0)
    assert word == "holds partly" and why.endswith("(the intervals do not decide whether that is twice).")


def test_untrained_rules_beat_tome_where_both_are_below_it_at_all_ratios() -> None:
    claim = "Token norm and"
    assert verdict(claim, table(DINOV2, **PAPERS))[0] == "holds"
    word, why = verdict(claim, table(DINOV2, **{**PAPERS, "Token_norm": [9.5] + [3.0] * 6}))
    assert (
        word == "holds partly"
        and "“Token norm” is below ToMe's score beyond the intervals at 6 of 7 ratios, above it at 1." in why
    )
    assert verdict(claim, table(DINOV2, **{**PAPERS, "ToMe_score": 0.5}))[0] == "does not hold"
    assert verdict(claim, table(DINOV2, **{**PAPERS, "ToMe_score": (9.0, 2.5, 15.0)}))[0] == "holds partly"
    seldom = table(DINOV2, **{**PAPERS, "ToMe_score": [(9.0, 2.5, 15.0)] * 6 + [9.0]})
    assert verdict(claim, seldom)[0] == "holds", "beyond the intervals once, and never the other way"


# Verdicts on the tests


def paired(own: Setting, delta: Known, p: list[float], count: int) -> tuple[str, str]:
    known: dict[tuple[str, str, str], Known] = {(own.table, row, DELTA): delta for row in COLUMNS}
    known |= {(own.table, row, P): value for row, value in zip(COLUMNS, p, strict=True)}
    return judged(WILCOXON, finished(known, count=count), "Importance")


PAPERS_P = [2.9e-92, 9.2e-90, 5.8e-76, 5.5e-57, 5.8e-5, 3.2e-9, 1.5e-95]


def test_all_ratios_are_significant_on_the_paper_s_own_numbers() -> None:
    below = (-0.001, -0.002, -0.0001)
    word, why = paired(CLIP, below, PAPERS_P, 600)
    assert word == "holds" and "better at 7 of 7 ratios" in why and "p from 1.5e-95 to 5.8e-05; 600 pictures" in why
    assert paired(CLIP, below, [1e-40] * 7, 600)[0] == "holds partly"
    assert paired(CLIP, (-0.001, -0.002, 0.001), [1e-3] * 7, 600)[0] == "does not hold"


def test_what_so_few_pictures_could_never_show_is_not_held_against_the_claim() -> None:
    below = (-0.001, -0.002, -0.0001)
    assert smallest_p(32) > 1e-50
    assert paired(TINY, below, [1e-8] * 7, 32)[0] == "holds", "no p below 1e-50 can be had"
    assert paired(TINY, below, [1e-8] * 6 + [1e-3], 32)[0] == "holds partly"
    word, why = paired(TINY_EARLY, below, [2**-7] * 7, 8)
    assert word == "not at this scale" and "8 pictures cannot give less than 7.8e-03" in why
    assert paired(DINOV2, below, PAPERS_P, 600)[0] == "not at this scale", "the claim is about CLIP"


def test_the_footnote_counts_the_pairs_that_the_papers_p_needs() -> None:
    (note,) = WILCOXON.footnotes
    said = note(finished({(TINY.table, "0.05", DELTA): -0.1})) or ""
    assert 2.0 ** (1 - 316) <= 1.5e-95 < 2.0 ** (1 - 315)
    assert "1.5e-95 needs at least 316 pairs" in said and "none is below 1.2e-60" in said
    assert note(finished({})) is None


# The paper's numbers

BASELINES = """
    Importance     & 0.00 & 0.01 & 0.02 & 0.06 & 0.24 & 0.82 & 2.17
    EViT           & 0.00 & 0.01 & 0.03 & 0.06 & 0.28 & 0.88 & 2.30
    Token norm     & 0.04 & 0.14 & 0.25 & 0.38 & 0.78 & 1.45 & 2.59
    CLS similarity & 0.02 & 0.08 & 0.17 & 0.42 & 0.90 & 1.70 & 2.91
    ToMe score     & 0.53 & 0.71 & 0.97 & 0.99 & 1.77 & 2.28 & 3.69
    Random         & 0.14 & 0.36 & 0.58 & 0.83 & 1.29 & 2.07 & 3.48
    """
TESTS = """
    0.05 & -0.00119 & [-0.00145, -0.00095] & 2.9e-92
    0.10 & -0.00170 & [-0.00227, -0.00124] & 9.2e-90
    0.15 & -0.00199 & [-0.00268, -0.00143] & 5.8e-76
    0.20 & -0.00180 & [-0.00240, -0.00129] & 5.5e-57
    0.30 & -0.00232 & [-0.00399, -0.00118] & 5.8e-5
    0.40 & -0.02110 & [-0.02970, -0.01339] & 3.2e-9
    0.50 & -0.32452 & [-0.33672, -0.31222] & 1.5e-95
    """


def printed(text: str) -> dict[str, list[str]]:
    cells = [[cell.strip() for cell in line.split("&")] for line in text.strip().splitlines()]
    return {row: values for row, *values in cells}


def test_every_number_of_the_papers_tables_stands_at_its_place() -> None:
    wanted = {
        Place(DINOV2.table, rule, column): float(value)
        for rule, values in printed(BASELINES).items()
        for column, value in zip(COLUMNS, values, strict=True)
    }
    assert CLS_BASELINES.paper == wanted and tuple(printed(BASELINES)) == ROWS
    tests: dict[Place, float | str] = {}
    for ratio, (delta, interval, p) in printed(TESTS).items():
        tests[Place(CLIP.table, ratio, DELTA)] = f"{delta} {interval}".replace("-", "−")
        tests[Place(CLIP.table, ratio, P)] = float(p)
    assert WILCOXON.paper == tests and tuple(printed(TESTS)) == COLUMNS


@pytest.mark.weights("paper/task_induced_metrics.tex")
@pytest.mark.parametrize(
    ("label", "text"),
    [("tab:extra_baselines", BASELINES), ("tab:clip_cls_wilcoxon", TESTS)],
    ids=["baselines", "tests"],
)
def test_the_tables_are_those_of_the_paper(shared: Path, label: str, text: str) -> None:
    paper = (shared / "paper" / "task_induced_metrics.tex").read_text(encoding="utf-8")
    body = paper[paper.index(rf"\label{{{label}}}") :]
    plain = re.sub(r"\\textbf\{([^}]*)\}", r"\1", body[: body.index(r"\end{tabular}")])
    plain = re.sub(r" \\times 10\^\{(-\d+)\}", r"e\1", plain).replace("$", "")
    lines = [
        [cell.strip().splitlines()[-1].strip() for cell in line.split("&")]
        for line in plain.split(r"\\")
        if "&" in line
    ]
    assert printed(text).items() <= {row: values for row, *values in lines}.items()


def test_delta_is_the_difference_of_the_means_in_the_table_of_clip() -> None:
    """0.76 - 33.21 of `tab:clip_cls_pruning` is -32.45, a hundred times the paper's last Δ."""
    assert np.isclose((0.76 - 33.21) / 100, -0.32452, atol=1e-4)
