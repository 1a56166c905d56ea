"""Algorithm 1 beside the truth: on matrices whose spectra are known, the verdicts on rows made by hand, and one run."""

from pathlib import Path

import pytest
import torch

from helpers.finished import Known, cut_down, finished, judged, lines, rows_file, run
from helpers.spectra import DOUBLE, exponential, matrix, power_law
from pullback.experiments import estimators as module
from pullback.experiments import run as runner
from pullback.experiments.estimators import (
    BIAS,
    COLUMNS,
    CV,
    DEFAULT,
    ESTIMATORS,
    EXACT,
    KAPPA,
    KRYLOV,
    MORE_Q,
    MORE_R,
    NOISE,
    OFF,
    OURS,
    OVER_EXACT,
    PAIRS,
    PAPER,
    R_EFF,
    SLQ_FEW,
    SLQ_MANY,
    SPREAD,
    STD,
    TRACE,
    TRUNC,
    VALUE,
    at_one_picture,
    methods,
    named,
    number,
    operator,
    places_of,
)
from pullback.experiments.experiment import Found, Place
from pullback.experiments.scales import SCALES
from pullback.experiments.subjects import RANK, Subject
from pullback.experiments.workshop import Workshop
from pullback.operators import DenseOperator, JacobianOperator
from pullback.runs.progress import Progress

TOKENS, WIDTH, OUTPUTS = 10, 24, 60
TOY = Subject("toy", "tiny-scenes", "cls", 0, OUTPUTS, "scenes")
CLS, DEPTH = "tiny-scenes CLS, L10", "tiny-scenes depth 8×8, L02"


def effective(energies: torch.Tensor) -> float:
    shares = energies / energies.sum()
    return float((-(shares * shares.log()).sum()).exp())


@pytest.fixture(scope="module")
def toy() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The singular values of a matrix, and what eight seeds of every method say of it."""
    values = power_law(OUTPUTS, 0.8)
    dense = matrix(values, OUTPUTS, TOKENS * WIDTH)
    return values, at_one_picture(DenseOperator(dense), TOKENS, TOY, 8, 100)


# The runs


def test_the_truth_is_that_of_the_dense_matrix(toy) -> None:
    values, found = toy
    energies = values.square()
    assert found[KAPPA].item() == pytest.approx(float(energies[:RANK].sum() / energies.sum()))
    assert found[R_EFF].item() == pytest.approx(effective(energies))
    assert found[TRUNC].item() == pytest.approx(effective(energies[:RANK]))
    assert found[TRACE].item() == pytest.approx(float(energies.sum()))
    right = torch.linalg.svd(matrix(values, OUTPUTS, TOKENS * WIDTH)).Vh[:RANK].unflatten(1, (TOKENS, WIDTH))
    norms = right.norm(dim=2)
    assert found[CV].item() == pytest.approx(float((norms.std(1) / norms.mean(1)).mean()), rel=1e-6)


def test_algorithm_1_is_the_paper_s_literally(toy) -> None:
    """Against the pseudocode, written out, for the same law: means over seeds agree within their scatter."""
    values, found = toy
    dense = matrix(values, OUTPUTS, TOKENS * WIDTH)
    kappa, trunc, trace = [], [], []
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        basis = torch.randn(TOKENS * WIDTH, RANK, dtype=DOUBLE, generator=generator)
        for _ in range(2):
            basis = torch.linalg.qr(dense.T @ (dense @ basis)).Q
        energies = (dense @ basis).square().sum(0)
        signs = torch.randint(0, 2, (TOKENS * WIDTH, 100), generator=generator).double() * 2 - 1
        trace.append(float((dense @ signs).square().sum() / 100))
        kappa.append(float(energies.sum()) / trace[-1])
        trunc.append(effective(energies))
    for quantity, known in ((KAPPA, kappa), (TRUNC, trunc), (TRACE, trace)):
        ours, theirs = found[f"{quantity}, {PAPER}"], torch.tensor(known, dtype=DOUBLE)
        error = (ours.var() / len(ours) + theirs.var() / len(theirs)).sqrt()
        assert abs(float(ours.mean() - theirs.mean())) < 4 * float(error), quantity


def test_its_directions_over_the_exact_trace_always_read_low(toy) -> None:
    _, found = toy
    missed = found[KAPPA] - found[f"{KAPPA}, {OVER_EXACT}"]
    assert (missed > 0.003).all()
    assert missed.std() < found[f"{KAPPA}, {PAPER}"].std(), "without the scatter of the trace"


def test_ours_are_nearer_to_the_truth(toy) -> None:
    _, found = toy
    for quantity in (KAPPA, TRUNC, CV, TRACE, R_EFF):
        truth = found[quantity]
        exact = found[f"{quantity}, {DEFAULT}"]
        assert torch.equal(exact, truth.expand(8)), "exact at this size"
        theirs = found[f"{quantity}, {SLQ_MANY if quantity == R_EFF else PAPER}"]
        ours = found[f"{quantity}, {KRYLOV}"]
        assert (ours - truth).square().mean() < (theirs - truth).square().mean()


def test_quadrature_scatters_around_the_truth_and_less_with_more_probes(toy) -> None:
    _, found = toy
    few, many = found[f"{R_EFF}, {SLQ_FEW}"], found[f"{R_EFF}, {SLQ_MANY}"]
    assert abs(float(many.mean() / found[R_EFF]) - 1) < 0.02
    assert float(few.std()) > float(many.std()) > 0


def test_products_are_counted_for_each_quantity(toy) -> None:
    _, found = toy
    assert found[f"{PAIRS} of {KAPPA}, {PAPER}"].unique().tolist() == [(2 * 2 * 20 + 20 + 100) / 2]
    assert found[f"{PAIRS} of {R_EFF}, {SLQ_FEW}"].unique().tolist() == [900]
    assert found[f"{PAIRS} of {R_EFF}, {SLQ_MANY}"].unique().tolist() == [3000]
    assert found[f"{PAIRS} of {KAPPA}, {DEFAULT}"].unique().tolist() == [OUTPUTS / 2]


def test_the_truncated_rank_grows_with_the_rank_of_a_flat_spectrum(toy) -> None:
    values, found = toy
    grown = effective(values[: RANK + 5].square()) / effective(values[:RANK].square()) - 1
    assert float(found[MORE_R].mean()) == pytest.approx(grown, rel=0.25)
    assert 0 < float(found[MORE_Q].mean()) < 0.05
    steep = matrix(exponential(OUTPUTS, 0.3), OUTPUTS, TOKENS * WIDTH)
    settled = at_one_picture(DenseOperator(steep), TOKENS, TOY, 2, 0)
    assert float(settled[MORE_R].mean()) < 1e-3


def test_where_the_jacobian_is_not_formed_the_krylov_space_is_the_default() -> None:
    large = Subject("large", "tiny-scenes", "cls", 0, 50_176)
    assert methods(large, KAPPA) == (PAPER, OVER_EXACT, KRYLOV)
    assert methods(TOY, R_EFF) == (SLQ_FEW, SLQ_MANY, KRYLOV, DEFAULT)
    camera = {place.column for place in places_of(Subject("camera", "vggt", "camera", 16, 9))}
    assert MORE_Q in camera and MORE_R not in camera, "nine outputs have no 25 directions"


# Verdicts


def of(quantity: str, method: str, **rows: dict[str, Known]) -> dict:
    columns = (*COLUMNS[quantity], MORE_Q, MORE_R) if (quantity, method) == (TRUNC, PAPER) else COLUMNS[quantity]
    usual = {column: 1.0 if column in (EXACT, VALUE) else 0.0 for column in columns}
    return lines(quantity, columns, {f"{name} · {method}": tuple((usual | own).values()) for name, own in rows.items()})


def verdict(beginning: str, *tables: dict) -> str:
    return judged(ESTIMATORS, finished({key: value for table in tables for key, value in table.items()}), beginning)[0]


def test_the_scatter_of_kappa_is_judged_over_seeds_and_over_images() -> None:
    beginning = "With 100 probes"

    def with_std(std: Known, spread: float) -> str:
        return verdict(beginning, of(KAPPA, PAPER, **{CLS: {STD: std, SPREAD: spread}}))

    assert with_std(0.01, 0.02) == "holds"
    assert with_std(0.01, 0.05) == with_std((0.015, 0.01, 0.03), 0.01) == "holds partly"
    assert with_std(0.03, 0.05) == "does not hold"
    assert verdict(beginning) == "not at this scale"
    papers = of(KAPPA, PAPER, **{CLS: {STD: 0.5, SPREAD: 0.5}, "DINOv2 CLS, L10": {STD: 0.01, SPREAD: 0.01}})
    assert verdict(beginning, papers) == "holds", "the paper's own models decide"


def test_algorithm_1_is_right_if_all_it_returns_is_within_a_hundredth() -> None:
    beginning = "Algorithm 1 with"

    def with_biases(kappa: Known, trunc: Known, cv: Known) -> str:
        return verdict(
            beginning, of(KAPPA, OVER_EXACT, **{CLS: {BIAS: kappa}}), of(TRUNC, PAPER, **{CLS: {OFF: trunc}}),
            of(CV, PAPER, **{CLS: {EXACT: 5.0, BIAS: cv}}),
        )  # fmt: skip

    assert with_biases(-0.001, 0.001, 0.04) == "holds"
    assert with_biases(-0.001, 0.001, 0.06) == "holds partly"
    assert with_biases(-0.03, (0.005, -0.02, 0.02), -0.06) == "does not hold"
    assert verdict(beginning) == "not at this scale"


def test_the_truncated_rank_of_depth_must_stay_and_be_right() -> None:
    beginning = "r_eff trunc"

    def with_changes(name: str, q: Known, r: Known, off: Known) -> str:
        return verdict(beginning, of(TRUNC, PAPER, **{name: {MORE_Q: q, MORE_R: r, OFF: off}}))

    assert with_changes(DEPTH, 0.005, 0.005, 0.001) == "holds"
    assert with_changes(DEPTH, 0.005, 0.03, 0.001) == "holds partly"
    assert with_changes(DEPTH, (0.009, 0.0, 0.02), 0.03, -0.02) == "does not hold"
    assert with_changes(CLS, 0.005, 0.005, 0.001) == "not at this scale", "the class token has no low rank"


def test_the_trace_is_judged_by_its_scatter() -> None:
    beginning = "100 Rademacher"
    good, bad = {NOISE: 0.04}, {NOISE: (0.045, 0.04, 0.06)}
    assert verdict(beginning, of(TRACE, PAPER, **{CLS: good})) == "holds"
    assert verdict(beginning, of(TRACE, PAPER, **{CLS: good, DEPTH: bad})) == "holds partly"
    assert verdict(beginning, of(TRACE, PAPER, **{DEPTH: bad})) == "does not hold"
    assert verdict(beginning) == "not at this scale"


def test_each_kind_of_decoder_is_judged_on_its_own_rows() -> None:
    """A class token of the paper's does not speak for depth, whose trace scatters more."""
    good, bad = {NOISE: 0.01}, {NOISE: (0.08, 0.07, 0.09)}
    assert verdict("100 Rademacher", of(TRACE, PAPER, **{"DINOv2 CLS, L10": good, DEPTH: bad})) == "holds partly"
    both = of(TRACE, PAPER, **{"DINOv2 CLS, L10": good, CLS: bad, "DA V2 depth, L02": good, DEPTH: bad})
    assert verdict("100 Rademacher", both) == "holds", "the paper's own models decide"


def test_our_default_is_called_exact_only_where_it_is(tmp_path: Path) -> None:
    shop = Workshop(ESTIMATORS, SCALES["tiny"], tmp_path, torch.device("cpu"), Progress())
    truth = torch.tensor([[0.5], [0.4]], dtype=torch.float64)
    place = Place(KAPPA, named(OURS[-1], DEFAULT), VALUE)
    for off, exact in ((0.0, True), (1e-4, False)):
        known = (truth + torch.tensor([[0.0], [off]])).expand(2, 3)
        note = number(shop, place, {KAPPA: truth, f"{KAPPA}, {DEFAULT}": known}, DEFAULT).note
        assert (note is not None and note.startswith("exact")) == exact


def test_quadrature_is_judged_by_a_bias_that_can_be_seen_and_by_its_scatter() -> None:
    beginning = "100 probes with 30"

    def with_error(off: Known, noise: Known) -> str:
        return verdict(beginning, of(R_EFF, SLQ_MANY, **{CLS: {OFF: off, NOISE: noise}}))

    assert with_error((0.02, -0.01, 0.05), 0.03) == "holds", "an interval that holds zero shows no bias"
    assert with_error((0.03, 0.02, 0.05), 0.03) == with_error(0.0, 0.08) == "holds partly"
    assert with_error((-0.03, -0.05, -0.02), 0.08) == "does not hold"
    assert verdict(beginning) == "not at this scale"


def test_the_cost_is_judged_without_and_with_the_effective_rank() -> None:
    beginning = "The diagnosis costs"

    def with_pairs(alone: float, rank: float) -> str:
        return verdict(
            beginning, of(KAPPA, PAPER, **{CLS: {PAIRS: alone}}), of(R_EFF, SLQ_MANY, **{CLS: {PAIRS: rank}})
        )

    assert with_pairs(100, 30) == "holds"
    assert with_pairs(100, 3000) == "holds partly"
    assert with_pairs(200, 3000) == "does not hold"
    assert verdict(beginning, of(KAPPA, PAPER, **{CLS: {}})) == "not at this scale"


def test_footnotes_name_the_largest_truncated_rank_the_bias_and_the_count() -> None:
    above, biased, counted = ESTIMATORS.footnotes
    found = finished(
        of(TRUNC, PAPER, **{CLS: {VALUE: 18.9}, DEPTH: {VALUE: 3.0}})
        | of(KAPPA, OVER_EXACT, **{CLS: {BIAS: -0.03, STD: 0.001, PAIRS: 100}})
        | of(TRACE, PAPER, **{CLS: {}})
    )
    assert f"largest one here is 18.9 ({CLS} · {PAPER})" in (above(found) or "")
    assert f"{CLS} · {OVER_EXACT}: bias -0.0300, std 0.0010, pairs 100" in (biased(found) or "")
    assert "3,000 pairs" in (counted(found) or "")
    assert [note(Found([])) for note in ESTIMATORS.footnotes] == [None, None, None]


# The paper's numbers, and a run


def test_the_paper_s_numbers_stand_at_their_places() -> None:
    paper = ESTIMATORS.paper
    assert paper[Place(TRUNC, "DINOv2 CLS, L10 · Algorithm 1", VALUE)] == 63.68
    assert paper[Place(R_EFF, "DINOv2 CLS, L02 · SLQ, 100 probes", VALUE)] == 90.8
    assert paper[Place(CV, "DA V2 depth, L02 · Algorithm 1", VALUE)] == 0.026
    assert [value for value in paper.values()].count("≤ 0.02") == 6
    for scale in SCALES.values():
        ESTIMATORS.checked_cells(scale)


def test_a_run_measures_every_place_twice_alike(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(runner, "commit", lambda: "the same")  # which rows name, and work in the checkout changes
    few = cut_down(ESTIMATORS, lambda cell: cell.key == CLS, images=2, size=56, seeds=2)
    rows = run(few, tmp_path / "one")
    assert all(row["value"] is not None for row in rows)
    values = {(row["table"], row["row"], row["column"]): row["value"] for row in rows}
    paper, known = f"{CLS} · {PAPER}", f"{CLS} · {OVER_EXACT}"
    assert values[KAPPA, paper, BIAS] == pytest.approx(values[KAPPA, paper, VALUE] - values[KAPPA, paper, EXACT])
    assert values[KAPPA, known, BIAS] < -0.01, "two rounds are too few for a flat spectrum"
    assert abs(values[KAPPA, f"{CLS} · {KRYLOV}", BIAS]) < 0.01
    assert values[KAPPA, f"{CLS} · {DEFAULT}", STD] == values[KAPPA, f"{CLS} · {DEFAULT}", BIAS] == 0
    assert values[TRUNC, paper, VALUE] <= RANK
    assert values[KAPPA, f"{CLS} · {DEFAULT}", PAIRS] == 192 / 2
    assert named(OURS[-1], PAPER) == paper
    (remark,) = {row["note"] for row in rows if row["column"] in (STD, NOISE)}
    assert remark == "2 seeds a picture"
    run(few, tmp_path / "other")
    assert rows_file(few, tmp_path / "one").read_bytes() == rows_file(few, tmp_path / "other").read_bytes()


def test_a_jacobian_that_is_not_formed_has_nearly_the_same_truth(tmp_path: Path, monkeypatch) -> None:
    few = cut_down(ESTIMATORS, lambda cell: cell.key == CLS, images=1, size=28)
    shop = Workshop(few, SCALES["tiny"], tmp_path, torch.device("cpu"), Progress())
    formed = at_one_picture(*operator(shop, OURS[-1], 0, 1), OURS[-1], 1, 0)
    monkeypatch.setattr(module, "LARGEST", 100)
    op, tokens = operator(shop, OURS[-1], 0, 1)
    assert isinstance(op, JacobianOperator)
    multiplied = at_one_picture(op, tokens, OURS[-1], 1, 0)
    for quantity in (KAPPA, R_EFF, TRUNC, CV):
        assert multiplied[quantity].item() == pytest.approx(formed[quantity].item(), rel=0.01), quantity
    ours = f"{KAPPA}, {OVER_EXACT}"
    assert multiplied[ours].item() == pytest.approx(formed[ours].item(), rel=0.01), "directions of the same seed"
    several = {name: torch.stack([value.repeat(2), value.repeat(2)]) for name, value in multiplied.items()}
    for place in places_of(OURS[-1]):
        measured = number(shop, place, several, place.row.removeprefix(f"{CLS} · "))
        assert measured.place == place and torch.tensor(measured.value).isfinite()
