"""Power iteration round by round: against powers of dense matrices, the verdicts on rows made by hand, and one run."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from helpers.finished import Known, cut_down, finished, judged, lines, rows_file, run
from helpers.spectra import DOUBLE, copies, matrix, power_law
from pullback.experiments import convergence as module
from pullback.experiments import run as runner
from pullback.experiments.convergence import (
    ADAPTIVE,
    ADAPTIVE_COLUMNS,
    BOUND,
    CONVERGENCE,
    MISALIGNMENT,
    Q_COLUMNS,
    RANK,
    RATE,
    RATE_COLUMNS,
    SEEN,
    SHARP,
    WIDE,
    Course,
    constant_of,
    course,
    joined,
    misaligned,
    twin,
)
from pullback.experiments.experiment import Found, Place
from pullback.experiments.scales import SCALES
from pullback.operators import DenseOperator
from pullback.randnla import Streams

CLS, DEPTH = ("tiny-scenes CLS, L02", "tiny-scenes CLS, L10"), "tiny-scenes depth 8×8, L02"


def leading(dense: torch.Tensor, rank: int = RANK) -> tuple[torch.Tensor, torch.Tensor]:
    """The true leading directions [n, r] and their energy."""
    _, values, right = torch.linalg.svd(dense, full_matrices=False)
    return right[:rank].T, values[:rank].square().sum()


# Courses


def test_misalignment_is_that_of_the_spans() -> None:
    basis = torch.linalg.qr(torch.randn(50, 8, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))).Q
    turned = torch.linalg.qr(torch.randn(4, 4, dtype=DOUBLE, generator=torch.Generator().manual_seed(1))).Q
    first, second = basis[None, :, :4], basis[None, :, 4:]
    assert misaligned(first @ turned, first).item() == pytest.approx(0, abs=1e-12)
    assert misaligned(second, first).item() == pytest.approx(1)
    half = torch.cat([first[..., :2], second[..., :2]], -1)
    assert misaligned(half, first).item() == pytest.approx(0.5)


def test_a_round_is_one_product_with_the_gram_matrix() -> None:
    """The first number is after one product, and every later one after one more: against explicit powers."""
    dense = matrix(power_law(40, 1.0), 40, 90)
    reference, best = leading(dense)
    own = course(DenseOperator(dense), reference[None], best[None], RANK, 4, Streams.from_seed(3, 1))
    start = Streams.from_seed(3, 1).gaussian(90, RANK, DOUBLE)[0]
    gram, spans = dense.T @ dense, []
    for power in range(1, 5):
        spans.append(torch.linalg.qr(torch.linalg.matrix_power(gram, power) @ start).Q[None])
    expected = [misaligned(span, reference[None]).item() for span in spans]
    assert own.misalignment[0].tolist() == pytest.approx(expected, rel=1e-6)
    turned = [misaligned(after, before).item() for before, after in pairwise(spans)]
    assert own.turned[0].tolist() == pytest.approx([1.0, *turned], rel=1e-6)
    lost = [1 - float((dense @ span[0]).square().sum() / best) for span in spans]
    assert own.lost[0].tolist() == pytest.approx(lost, rel=1e-6)
    assert expected == sorted(expected, reverse=True)


def test_the_twin_takes_the_best_directions_of_its_columns() -> None:
    dense = matrix(power_law(60, 1.0), 60, 120)
    reference, best = leading(dense)
    own = course(DenseOperator(dense), reference[None], best[None], WIDE, 2, Streams.from_seed(5, 1))
    start = Streams.from_seed(5, 1).gaussian(120, WIDE, DOUBLE)[0]
    span = torch.linalg.qr(dense.T @ dense @ start).Q
    kept = torch.linalg.svdvals(dense @ span)[:RANK].square().sum()
    assert own.lost[0, 0].item() == pytest.approx(float(1 - kept / best), rel=1e-6)
    narrow = course(DenseOperator(dense), reference[None], best[None], RANK, 2, Streams.from_seed(5, 1))
    assert (own.misalignment < narrow.misalignment).all()


def test_in_coordinates_of_the_modes_the_law_is_the_same() -> None:
    """What is measured from singular values alone: the same mean course as with the matrix."""
    values, sketches = power_law(40, 0.7), 200
    dense = matrix(values, 40, 70)
    reference, best = leading(dense)
    many = (sketches, -1, -1)
    whole = course(
        copies(dense, sketches), reference.expand(many), best.expand(sketches), RANK, 3, Streams.from_seed(0, sketches)
    )
    eye = torch.eye(40, dtype=DOUBLE)[:, :RANK]
    small = course(
        copies(torch.diag(values), sketches), eye.expand(many), best.expand(sketches), RANK, 3,
        Streams.from_seed(1, sketches),
    )  # fmt: skip
    for name in ("misalignment", "lost"):
        one, other = getattr(whole, name), getattr(small, name)
        error = (one.var(0) / sketches + other.var(0) / sketches).sqrt()
        assert ((one.mean(0) - other.mean(0)).abs() < 4 * error).all()


def test_the_error_falls_with_the_fourth_power_of_the_gap() -> None:
    values = torch.cat([torch.ones(RANK, dtype=DOUBLE), torch.full((30,), 0.8, dtype=DOUBLE)])
    reference = torch.eye(50, dtype=DOUBLE)[:, :RANK]
    best = torch.tensor([float(RANK)], dtype=DOUBLE)
    own = course(DenseOperator(torch.diag(values)), reference[None], best, RANK, 30, Streams.from_seed(0, 1))
    assert (own.misalignment[0, -1] / own.misalignment[0, -2]).item() == pytest.approx(0.8**4, rel=0.02)


def test_rounds_stop_when_one_changes_little_or_at_the_last() -> None:
    turned = torch.tensor([[1.0, 0.1, 5e-4, 0.1], [1.0, 0.5, 0.4, 0.3]])
    own = Course(turned, turned, turned)
    assert own.chosen().tolist() == [2, 3]
    assert turned[1, -1] == 0.3, "what was measured is left as it is"


def test_numbers_of_a_picture_are_means_over_its_sketches() -> None:
    parts = [Course(torch.full((2, 3), value), torch.ones(2, 3), torch.ones(2, 3)) for value in (1.0, 3.0)]
    both = joined(parts, 2)
    assert both.of_pictures(both.misalignment[:, 0]).tolist() == [1.0, 3.0]


def test_the_constant_is_the_theorem_s() -> None:
    """|B|^2 / (sigma_min(A)^2 r) of a drawn sketch has the same typical size."""
    inputs, generator = 400, torch.Generator().manual_seed(0)
    drawn = sorted(constant_of(torch.Generator().manual_seed(seed), inputs) for seed in range(60))
    exact = []
    for _ in range(60):
        sketch = torch.randn(inputs, RANK, dtype=DOUBLE, generator=generator)
        exact.append(float(sketch[RANK:].square().sum() / torch.linalg.svdvals(sketch[:RANK])[-1] ** 2 / RANK))
    assert 0.3 < drawn[30] / sorted(exact)[30] < 3
    assert constant_of(torch.Generator().manual_seed(1), 10 * inputs) > 9 * constant_of(
        torch.Generator().manual_seed(1), inputs
    )


# Verdicts


def of(misalignments: dict[str, tuple[Known, ...]], rates: dict | None = None, choices: dict | None = None) -> Found:
    """Rows by name: errors at q = 0, 1, 2, 5, 15; gap, theorem, sharp, measured, C, bound; q, error, pairs, lost, error
    and lost at q = 2."""
    return finished(
        lines(MISALIGNMENT, Q_COLUMNS, misalignments)
        | lines(RATE, RATE_COLUMNS, rates or {})
        | lines(ADAPTIVE, ADAPTIVE_COLUMNS, choices or {})
    )


STEEP, FLAT = (0.2, 0.1, 0.01, 0.002, 0.001), (0.6, 0.4, 0.25, 0.08, 0.01)


def test_the_bound_is_judged_by_rate_and_size() -> None:
    rate = (0.95, 0.9, 0.81, 0.85, 1e7, 1e6)
    slow = (0.95, 0.9, 0.81, (0.95, 0.94, 0.96), 1e7, 1e-3)
    beginning = "Convergence is geometric"
    assert judged(CONVERGENCE, of({CLS[0]: FLAT}, {CLS[0]: rate}), beginning)[0] == "holds"
    assert judged(CONVERGENCE, of({CLS[0]: FLAT}, {CLS[0]: slow}), beginning)[0] == "does not hold"
    found = of({CLS[0]: FLAT, CLS[1]: FLAT}, {CLS[0]: rate, CLS[1]: slow})
    word, why = judged(CONVERGENCE, found, beginning)
    assert word == "holds partly" and "measured 0.950, theorem 0.900" in why
    papers = of({CLS[0]: FLAT, "CLIP CLS, L10": FLAT}, {CLS[0]: slow, "CLIP CLS, L10": rate})
    assert judged(CONVERGENCE, papers, beginning)[0] == "holds", "the paper's own models decide"
    assert judged(CONVERGENCE, of({}), beginning) == (
        "not at this scale", "This scale has no Jacobian that can be formed.",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("error", "lost", "word"),
    [(0.01, 0.001, "holds"), ((0.04, 0.01, 0.06), 0.001, "holds partly"), (0.3, 0.1, "does not hold")],
)
def test_two_steps_suffice_if_the_directions_and_their_energy_are_found(error: Known, lost: Known, word: str) -> None:
    found = of({DEPTH: (0.2, 0.1, error, 0.0, 0.0)}, choices={DEPTH: (5, 0.01, 120, 0.0, error, lost)})
    assert judged(CONVERGENCE, found, "Two steps suffice")[0] == word


def test_flat_spectra_need_more_than_two_and_at_most_fifteen() -> None:
    beginning = "Flat spectra need"
    assert judged(CONVERGENCE, of({CLS[1]: FLAT}), beginning)[0] == "holds"
    assert judged(CONVERGENCE, of({CLS[1]: (0.6, 0.4, 0.3, 0.2, 0.06)}), beginning)[0] == "holds partly"
    assert judged(CONVERGENCE, of({CLS[1]: STEEP[:4] + (0.06,)}), beginning)[0] == "does not hold"
    assert judged(CONVERGENCE, of({DEPTH: FLAT}), beginning)[0] == "not at this scale"


def test_the_order_of_gaps_is_compared_with_that_of_errors() -> None:
    beginning = "Flatter spectra"

    def with_errors(*errors: Known) -> Found:
        names, gaps = (DEPTH, *CLS), (0.9, 0.95, 0.99)
        return of(
            {name: (0.9, 0.5, error, 0.0, 0.0) for name, error in zip(names, errors, strict=True)},
            {name: (gap, 0.9, 0.8, 0.8, 1e7, 1e6) for name, gap in zip(names, gaps, strict=True)},
        )

    assert judged(CONVERGENCE, with_errors(0.1, 0.2, 0.3), beginning)[0] == "holds"
    assert judged(CONVERGENCE, with_errors(0.1, 0.3, 0.2), beginning)[0] == "holds partly"
    overlapping = ((0.1, 0.0, 0.4), (0.2, 0.1, 0.4), (0.3, 0.1, 0.4))
    assert judged(CONVERGENCE, with_errors(*overlapping), beginning)[0] == "does not hold", "intervals decide"
    assert judged(CONVERGENCE, of({}), beginning)[0] == "not at this scale"


def test_a_bound_above_one_says_nothing() -> None:
    beginning = "The constant grows"
    above, below = (0.95, 0.9, 0.81, 0.85, 1e7, 1e6), (0.5, 0.25, 0.06, 0.06, 1e2, 0.5)
    assert judged(CONVERGENCE, of({}, {CLS[0]: above}), beginning)[0] == "holds"
    assert judged(CONVERGENCE, of({}, {CLS[0]: above, CLS[1]: below}), beginning)[0] == "holds partly"
    assert judged(CONVERGENCE, of({}, {CLS[0]: below}), beginning)[0] == "does not hold"
    assert judged(CONVERGENCE, of({}), beginning)[0] == "not at this scale"


@pytest.mark.parametrize(
    ("truth", "lost", "word"),
    [(0.02, 0.001, "holds"), (0.09, 0.001, "holds partly"), ((0.09, 0.01, 0.2), (0.02, 0.0, 0.03), "does not hold")],
)
def test_stability_is_held_against_the_truth(truth: Known, lost: Known, word: str) -> None:
    found = of({}, choices={CLS[1]: (9, truth, 200, lost, 0.3, 0.1)})
    assert judged(CONVERGENCE, found, "Raising q")[0] == word
    assert judged(CONVERGENCE, of({}), "Raising q")[0] == "not at this scale"


@pytest.mark.parametrize(
    ("lost", "at_two", "word"),
    [(0.002, 0.05, "holds"), ((0.04, 0.03, 0.05), (0.04, 0.03, 0.05), "holds partly"), (0.5, 0.5, "does not hold")],
)
def test_the_ratio_reaches_kappa_within_the_misalignment(lost: Known, at_two: Known, word: str) -> None:
    found = of({}, choices={CLS[1]: (9, 0.05, 200, lost, 0.2, at_two)})
    said, why = judged(CONVERGENCE, found, "With the subspace")
    assert said == word and why.startswith(f"{CLS[1]}: κ lost, q = 2 ")
    theirs = of({}, choices={CLS[1]: (9, 0.05, 200, 0.5, 0.2, 0.5), "CLIP CLS, L10": (9, 0.05, 200, 0.002, 0.2, 0.05)})
    verdict = judged(CONVERGENCE, theirs, "With the subspace")
    assert verdict[0] == "holds" and CLS[1] not in verdict[1], "the paper's own models decide alone"


def test_footnotes_say_how_q_is_counted_and_which_rate_is_sharp() -> None:
    counted, sharper = CONVERGENCE.footnotes
    found = of({CLS[0]: FLAT}, {CLS[0]: (0.95, 0.9, 0.81, 0.85, 1e7, 1e6)})
    assert "error of the column q − 1" in (counted(found) or "")
    assert f"{SEEN} 0.850, {SHARP} 0.810" in (sharper(found) or "")
    assert counted(of({})) is None and sharper(of({})) is None


# The paper's numbers, and a run


def test_the_paper_s_nine_errors_stand_at_their_q() -> None:
    assert len(CONVERGENCE.paper) == 9
    assert CONVERGENCE.paper[Place(MISALIGNMENT, "DPT depth, L02", "2")] == 0.011
    assert CONVERGENCE.paper[Place(MISALIGNMENT, "DINOv2 CLS, L10", "5")] == 0.083
    assert CONVERGENCE.paper[Place(MISALIGNMENT, "CLIP CLS, L10", "0")] == 0.802
    for scale in SCALES.values():
        CONVERGENCE.checked_cells(scale)


def test_a_run_measures_every_place_twice_alike(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(runner, "commit", lambda: "the same")  # which rows name, and work in the checkout changes
    few = cut_down(CONVERGENCE, lambda cell: cell.key == CLS[1], images=2, size=56, sketches=2)
    rows = run(few, tmp_path / "one")
    values = {(row["table"], row["row"], row["column"]): row["value"] for row in rows}
    errors = [values[MISALIGNMENT, CLS[1], q] for q in Q_COLUMNS]
    assert errors == sorted(errors, reverse=True) and 0 < errors[-1] < errors[0] < 1
    assert values[MISALIGNMENT, twin(CLS[1]), "2"] < errors[2]
    assert values[ADAPTIVE, CLS[1], "error, q = 2"] == errors[2]
    assert values[ADAPTIVE, CLS[1], "pairs"] == pytest.approx(RANK * (values[ADAPTIVE, CLS[1], "q"] + 1))
    assert values[RATE, CLS[1], BOUND] > 1 > values[RATE, CLS[1], SEEN] > 0
    run(few, tmp_path / "other")
    assert rows_file(few, tmp_path / "one").read_bytes() == rows_file(few, tmp_path / "other").read_bytes()


def test_products_with_a_jacobian_that_is_not_formed_follow_the_same_course(tmp_path: Path, monkeypatch) -> None:
    few = cut_down(CONVERGENCE, lambda cell: cell.key == CLS[1], images=1, size=56, sketches=8)
    formed = {(row["table"], row["row"], row["column"]): row["value"] for row in run(few, tmp_path / "formed")}
    monkeypatch.setattr(module, "LARGEST", 100)
    monkeypatch.setattr(module, "MOST_ROUNDS", 16)
    multiplied = {(row["table"], row["row"], row["column"]): row["value"] for row in run(few, tmp_path / "products")}
    assert not any(table == RATE for table, _, _ in multiplied), "it needs the whole spectrum"
    for name in (CLS[1], twin(CLS[1])):
        for q in Q_COLUMNS:
            place = (MISALIGNMENT, name, q)
            assert multiplied[place] == pytest.approx(formed[place], rel=0.35, abs=0.02), place
