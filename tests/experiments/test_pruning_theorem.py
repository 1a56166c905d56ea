"""The pruning theorem as an experiment: its numbers against runs made here, verdicts, a small run."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from helpers.finished import cut_down, finished, judged, lines, rows_file, run
from pullback.backbones import Backbone
from pullback.evaluation.ranking import spearman
from pullback.experiments.experiment import Found
from pullback.experiments.pruning_bound import Measured, bound_rows
from pullback.experiments.pruning_theorem import PRUNING_THEOREM, measured, ordered_alike
from pullback.experiments.pruning_theorem_claims import (
    ALIKE,
    BOUND,
    CASES,
    CHOICE_LEADS,
    COROLLARY,
    CORRECTED,
    ERROR,
    FIRST,
    FIRST_LEADS,
    FUSED,
    HINDSIGHT,
    HOLDS,
    IMPORTANCE,
    KEPT_ENERGY,
    KEPT_FIRST,
    LINEAR,
    MOVED,
    ORDER,
    PREMISE,
    PRODUCT,
    PROXY,
    RANDOM,
    RATIOS,
    REMAINDER,
    REMOVED,
    SECOND,
    SPREAD,
    SURE,
    TIMES,
    TOME,
    Case,
    ratio_column,
)
from pullback.experiments.scales import SCALES
from pullback.experiments.workshop import Workshop
from pullback.geometry.scores import block_energies, exact_importance, exact_modes
from pullback.operators import JacobianOperator
from pullback.probes import Features, load_probe
from pullback.pruning import PrunePlan, run_pruned
from pullback.runs.progress import Progress

BY_TITLE = {case.title: case for case in CASES}
CLS = BY_TITLE["tiny-scenes CLS, L10"]
DEPTH = replace(BY_TITLE["tiny-scenes depth-8x8, L04"], decoder="depth-5x5", layer=9)
PAPERS_CLS, PAPERS_DENSE = BY_TITLE["DINOv2 CLS, L10"], BY_TITLE["DA V2 depth-8x8, L04"]
FEW = {"class tokens": 2, "maps": 2, "size": 56, "probes": 4, "probes by choice": 4}
MINE = cut_down(PRUNING_THEOREM, lambda cell: cell.key.startswith(CLS.title), **FEW)
COLUMNS = [ratio_column(ratio) for ratio in RATIOS]


@pytest.fixture(scope="module")
def shop(tmp_path_factory) -> Workshop:
    return Workshop(MINE, SCALES["tiny"], tmp_path_factory.mktemp("shop"), torch.device("cpu"), Progress())


# Numbers


@pytest.mark.parametrize("case", [CLS, DEPTH], ids=["class token", "map"])
def test_the_bound_is_that_of_the_paper_s_pipeline(shop: Workshop, case: Case) -> None:
    """Against the rows of `python -m pullback.experiments.pruning_bound`."""
    found = measured(shop, case)
    runner = shop.probe(case.model, case.decoder, case.layer)
    judge = load_probe(case.model, case.decoder, runner.backbone.depth - 1, dtype=torch.float64)
    images = shop.images("scenes", 2, model=case.model, size=56)
    rows = list(bound_rows(Measured(runner, judge), images, RATIOS, ("paper",)))
    for row in rows:
        length = row["output_norm"]
        if row["ratio"] not in case.ratios(row["tensor"]):
            continue
        place = (case.ratios(row["tensor"]).index(row["ratio"]), row["image"])
        wanted = {
            ERROR: 100 * row["true_error"] / length, REMOVED: 100 * row["removed_error"] / length,
            FIRST: 100 * row["first_term"] / length, SECOND: 100 * row["second_term"] / length,
            TIMES: row["stated"] / row["true_error"], HOLDS: 1 - row["fails"], SURE: float(row["holds_for_sure"]),
            MOVED: row["kept_moved"], KEPT_ENERGY: row["kept_energy"],
            KEPT_FIRST: 1 - row["first_term"] / row["corrected_first_term"],
            LINEAR: row["linear_change"] / row["true_error"], REMAINDER: row["remainder"] / row["true_error"],
            CORRECTED: row["corrected"] / row["true_error"],
        }  # fmt: skip
        for column, value in wanted.items():
            assert float(found[f"{row['tensor']} {column}"][place]) == pytest.approx(value, rel=1e-4, abs=1e-9), column
    assert {row["tensor"] for row in rows} == set(case.readings)


def test_choices_are_runs_that_remove_the_same_number_of_tokens(shop: Workshop) -> None:
    """Class tokens after dropping: by importance, and by the product with the distance, against runs made here."""
    errors = measured(shop, CLS)["error"]
    probe = shop.probe(CLS.model, "cls", CLS.layer)
    backbone = probe.backbone
    assert isinstance(backbone, Backbone)
    images = shop.images("scenes", 2, model=CLS.model, size=56)
    layout = backbone.token_layout(images)
    full = probe.decoder.output([backbone.features(images, [11])[11]], layout, backbone.norm)
    for name, select in ((IMPORTANCE, "score"), (PRODUCT, "cost")):
        for number, ratio in enumerate(RATIOS):
            plan = PrunePlan((CLS.layer,), (ratio,), match="none", select=select, reinsert="frozen")
            score = exact_importance(probe, 20)
            done = run_pruned(backbone, images, plan, [score], layers=[11], modes=exact_modes(probe, 20))
            assert done.records[0].removed.shape[1] == round(ratio * layout.patches)
            error = (probe.decoder.output(list(done.taps), layout, backbone.norm) - full).norm(dim=1)
            expected = (100 * error / full.norm(dim=1)).double()
            torch.testing.assert_close(errors[CLS.choices.index(name), number], expected, rtol=2e-3, atol=1e-5)
    assert len({tuple(row) for row in errors[:, 1].tolist()}) == len(CLS.choices), "two choices are the same"


def test_numbers_of_the_corollary_are_those_of_the_run(shop: Workshop) -> None:
    """Spread, proxy and what fusion leaves, at half of the tokens, against a run made here."""
    found = measured(shop, DEPTH)
    runner = shop.probe(DEPTH.model, DEPTH.decoder, DEPTH.layer)
    backbone = runner.backbone
    assert isinstance(backbone, Backbone)
    images, score = shop.images("scenes", 2, model=DEPTH.model, size=56), exact_importance(runner, 20)
    plan = PrunePlan((DEPTH.layer,), (0.5,), match="none", reinsert="frozen", fuse_last=True)
    done = run_pruned(backbone, images, plan, [score], layers=[11])
    taps, gone = backbone.features(images, [*runner.decoder.layers, DEPTH.layer]), done.records[0].removed
    rho, drift = ((taps[11] - other).norm(dim=2).gather(1, gone) for other in (done.taps[0], taps[DEPTH.layer]))
    torch.testing.assert_close(found[SPREAD][2], (rho.std(1, correction=0) / rho.mean(1)).double(), rtol=1e-3, atol=0)
    torch.testing.assert_close(found[FUSED][2], (rho.mean(1) / drift.mean(1)).double(), rtol=1e-3, atol=0)
    below = {layer: taps[layer] for layer in runner.decoder.layers if layer != 11}
    after = Features.attach(done.taps[0], backbone.token_layout(images), below)
    norms = block_energies(JacobianOperator(replace(runner, at=11), after), after.shape[1]).sqrt()
    start = runner.features(images)
    importance = exact_svd_importance(JacobianOperator(runner, start).dense(), start.shape[1])
    torch.testing.assert_close(found[PROXY][2], spearman(importance[:, 1:], norms[:, 1:]), rtol=0, atol=0.02)
    sampled = found["first"][0, 2] / found[f"final {FIRST}"][2]  # with four probes of block norms, not all of them
    assert ((sampled > 0.5) & (sampled < 2)).all()
    assert measured(shop, CLS)["first"].eq(0).all(), "no decoder of class tokens reads what was removed"


def test_pairs_that_two_numbers_order_alike_are_counted() -> None:
    first, second = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[1.0], [3.0], [2.0]])
    assert ordered_alike(first, second).tolist() == pytest.approx([2 / 3])
    assert ordered_alike(first, -first).tolist() == [0] and ordered_alike(first, first).tolist() == [1]


def test_a_run_gives_all_places_and_the_same_bytes_again(tmp_path) -> None:
    rows = run(MINE, tmp_path / "one")
    wanted = [place for cell in MINE.cells(SCALES["tiny"]) for place in cell.places]
    assert {(row["table"], row["row"], row["column"]) for row in rows} == set(wanted)
    by_place = {(row["table"], row["row"], row["column"]): row for row in rows}
    for row in CLS.rows():
        assert by_place[BOUND, row, FIRST]["value"] == by_place[BOUND, row, REMOVED]["value"] == 0
        assert by_place[PREMISE, row, MOVED]["value"] == 1 and by_place[BOUND, row, ERROR]["count"] == 2
    run(MINE, tmp_path / "two")
    assert rows_file(MINE, tmp_path / "one").read_bytes() == rows_file(MINE, tmp_path / "two").read_bytes()


def exact_svd_importance(jacobian: Tensor, tokens: int) -> Tensor:
    """imp* [B, N] of rank 20 by the whole SVD of J [B, M, N D]."""
    _, values, modes = torch.linalg.svd(jacobian.double(), full_matrices=False)
    scaled = values[:, :20, None] * modes[:, :20]
    return scaled.unflatten(2, (tokens, -1)).square().sum((1, 3)).sqrt()


# Lists


@pytest.mark.parametrize("scale", SCALES)
def test_its_cells_are_listed_at_every_scale(scale) -> None:
    cells = PRUNING_THEOREM.checked_cells(SCALES[scale])
    assert {cell.model for cell in cells} == {case.model for case in CASES}
    assert sum(cell.forwards > 0 for cell in cells) == len(CASES), "what is kept is measured once"
    maps = {cell.key for cell in cells if cell.key.endswith("corollary")}
    assert maps == {f"{case.title}: corollary" for case in CASES if case.dense}


# Verdicts


def of_case(case: Case, table: str, values: dict) -> Found:
    """Rows of a case with the same number at every ratio, by column."""
    return finished(lines(table, values, {row: values.values() for row in case.rows()}))


def word(found: Found, beginning: str) -> str:
    return judged(PRUNING_THEOREM, found, beginning)[0]


def together(*parts: Found) -> Found:
    return Found(part.row(*place) for part in parts for place in part)


@pytest.mark.parametrize(
    ("case", "table", "values", "claim", "expected"),
    [
        (CLS, BOUND, {HOLDS: 1.0, SURE: 1.0, TIMES: 9.0}, "The change", "holds"),
        (CLS, BOUND, {HOLDS: 0.0, SURE: 1.0, TIMES: 0.1}, "The change", "holds partly"),
        (CLS, BOUND, {HOLDS: 0.9, SURE: 0.9, TIMES: 2.0}, "The change", "does not hold"),
        (CLS, PREMISE, {MOVED: 0.0}, "Kept tokens", "holds"),
        (CLS, PREMISE, {MOVED: 0.01}, "Kept tokens", "does not hold"),
        (CLS, PREMISE, {ORDER: 2.0}, "The decoder", "holds"),
        (CLS, PREMISE, {ORDER: 1.6}, "The decoder", "does not hold"),
        (CLS, PREMISE, {REMAINDER: (0.3, 0.2, 0.4)}, "The error", "holds"),
        (CLS, PREMISE, {REMAINDER: (0.4, 0.2, 0.6)}, "The error", "does not hold"),
        (DEPTH, COROLLARY, {SPREAD: (0.1, 0.0, 0.2)}, "Residuals", "holds"),
        (DEPTH, COROLLARY, {SPREAD: (0.2, 0.1, 0.3)}, "Residuals", "does not hold"),
        (DEPTH, COROLLARY, {PROXY: (0.7, 0.6, 0.8)}, "imp*", "holds"),
        (DEPTH, COROLLARY, {PROXY: (0.7, 0.4, 0.9)}, "imp*", "does not hold"),
        (DEPTH, COROLLARY, {FUSED: (0.8, 0.7, 0.9)}, "Last-Layer", "holds"),
        (DEPTH, COROLLARY, {FUSED: (0.9, 0.7, 1.1)}, "Last-Layer", "does not hold"),
        (DEPTH, COROLLARY, {ALIKE: (0.8, 0.6, 0.9)}, "The first-order", "holds"),
        (DEPTH, COROLLARY, {ALIKE: (0.6, 0.4, 0.9)}, "The first-order", "does not hold"),
    ],
)
def test_claims_are_judged_by_intervals_at_every_ratio(case, table, values, claim, expected) -> None:
    found = of_case(case, table, values)
    assert word(found, claim) == expected
    assert case.title in judged(PRUNING_THEOREM, found, claim)[1]


def test_a_claim_that_holds_for_one_decoder_alone_holds_partly() -> None:
    parts = [of_case(CLS, PREMISE, {ORDER: 2.0}), of_case(DEPTH, PREMISE, {ORDER: 1.5})]
    assert word(together(*parts), "The decoder") == "holds partly"


def test_the_paper_s_own_models_decide_each_for_its_kind() -> None:
    ours = [of_case(CLS, PREMISE, {ORDER: 1.5}), of_case(DEPTH, PREMISE, {ORDER: 1.5})]
    papers = [of_case(PAPERS_CLS, PREMISE, {ORDER: 2.0}), of_case(PAPERS_DENSE, PREMISE, {ORDER: 2.0})]
    assert word(together(*ours, *papers), "The decoder") == "holds"
    assert word(together(*ours, papers[0]), "The decoder") == "holds partly", "no dense decoder of the paper is there"


def leads(table: str, case: Case, values: dict) -> Found:
    return finished(lines(table, COLUMNS, {f"{case.title}: {other}": [v] * 3 for other, v in values.items()}))


BELOW, EVEN, ABOVE = (-30.0, -40.0, -20.0), (-5.0, -20.0, 10.0), (30.0, 20.0, 40.0)


@pytest.mark.parametrize(
    ("values", "best", "first"),
    [
        ({RANDOM: BELOW, TOME: BELOW, PRODUCT: EVEN, HINDSIGHT: EVEN}, "holds", "holds"),
        ({RANDOM: BELOW, TOME: EVEN, PRODUCT: EVEN}, "holds partly", "holds partly"),
        ({RANDOM: BELOW, TOME: BELOW, PRODUCT: ABOVE}, "holds partly", "holds"),
        ({RANDOM: EVEN, TOME: ABOVE, PRODUCT: ABOVE, HINDSIGHT: ABOVE}, "does not hold", "does not hold"),
    ],
)
def test_importance_is_best_if_it_beats_the_rivals_and_nothing_beats_it(values, best: str, first: str) -> None:
    there = of_case(DEPTH, BOUND, {HOLDS: 1.0})
    assert word(together(there, leads(CHOICE_LEADS, DEPTH, values)), "The best tokens") == best
    assert word(together(there, leads(FIRST_LEADS, DEPTH, values)), "The first term") == first


def test_nothing_is_said_of_what_was_not_measured() -> None:
    assert {claim.judge(Found([])).word for claim in PRUNING_THEOREM.claims} == {"not at this scale"}
    assert [note(Found([])) for note in PRUNING_THEOREM.footnotes] == [None, None]
    alone = of_case(CLS, BOUND, {TIMES: 0.01, SURE: 1.0})
    assert word(alone, "imp*") == word(alone, "The first term") == "not at this scale", "class tokens have no blocks"


def test_footnotes_tell_the_numbers() -> None:
    cls = of_case(CLS, BOUND, {TIMES: 0.01, SURE: 1.0})
    maps = together(of_case(DEPTH, BOUND, {TIMES: 80.0}), of_case(DEPTH, PREMISE, {LINEAR: 2.0}))
    first, second = (note(together(cls, maps)) for note in PRUNING_THEOREM.footnotes)
    assert first and "is 0.01 times the error" in first and "for 100% of the pictures" in first
    assert second and "is 80 times the error" in second and "is 2 times the error" in second
