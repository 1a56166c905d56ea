"""Spread over tokens, and what factored metrics lose: against dense projections, verdicts on made-up rows, a run."""

from pathlib import Path

import pytest
import torch

from helpers.finished import Known, cut_down, finished, judged, lines, rows_file, run
from helpers.spectra import DOUBLE
from pullback.experiments import delocalization as module
from pullback.experiments import run as runner
from pullback.experiments.delocalization import (
    CONVERGED,
    DELOCALIZATION,
    DEVIATION,
    DRAWN,
    FACTORED,
    FACTORED_COLUMNS,
    FIRST,
    FIRST_DRAWN,
    LOW_RANK,
    MUST,
    NULL,
    OWN,
    SCORES,
    SHARED,
    SIGNAL,
    SPREAD,
    SPREAD_COLUMNS,
    WHOLE,
    ZETA,
    deviations,
    factored,
    least_loss,
    losses,
)
from pullback.experiments.experiment import Found, Place
from pullback.experiments.scales import SCALES
from pullback.experiments.subjects import RANK

TOKENS, WIDTH = 3, 4
CLS, DEPTH = ("tiny-scenes CLS, L02", "tiny-scenes CLS, L10"), "tiny-scenes depth 8×8, L02"


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


def root(metric: torch.Tensor) -> torch.Tensor:
    """A square J with J^T J = metric."""
    return torch.linalg.cholesky(metric).T


def positive(size: int, seed: int) -> torch.Tensor:
    half = drawn(size, size, seed=seed)
    return half @ half.T + torch.eye(size, dtype=DOUBLE)


# What factored metrics lose


def test_zeta_is_zero_for_an_even_direction_and_largest_on_one_token() -> None:
    even = torch.full((TOKENS, WIDTH), 1 / (TOKENS * WIDTH) ** 0.5)
    alone = torch.zeros(TOKENS, WIDTH)
    alone[1, 2] = 1
    assert deviations(torch.stack([even, alone])).tolist() == pytest.approx([0, TOKENS - 1], abs=1e-6)


def test_a_metric_of_a_class_loses_nothing_to_its_class_and_something_to_smaller_ones() -> None:
    shares = torch.tensor([1.0, 2.0, 5.0], dtype=DOUBLE)
    scores = losses(root(torch.diag(shares.repeat_interleave(WIDTH))), TOKENS)
    assert [float(scores[name]) for name in (SCORES, SHARED, OWN)] == pytest.approx([0, 0, 0], abs=1e-12)
    shared = losses(root(torch.kron(torch.diag(shares), positive(WIDTH, 1))), TOKENS)
    assert float(shared[SCORES]) > 0.1
    assert [float(shared[name]) for name in (SHARED, OWN)] == pytest.approx([0, 0], abs=1e-12)
    own = losses(root(torch.block_diag(*(positive(WIDTH, seed) for seed in range(TOKENS)))), TOKENS)
    assert float(own[SCORES]) > float(own[SHARED]) > 0.01
    assert float(own[OWN]) == pytest.approx(0, abs=1e-12)


def test_losses_are_those_of_projections_of_the_dense_metric() -> None:
    jacobian = drawn(5, TOKENS * WIDTH)
    metric = jacobian.T @ jacobian
    whole = metric.square().sum()
    blocks = [metric[at : at + WIDTH, at : at + WIDTH] for at in range(0, TOKENS * WIDTH, WIDTH)]
    scores = torch.block_diag(*(block.trace() / WIDTH * torch.eye(WIDTH, dtype=DOUBLE) for block in blocks))
    rearranged = torch.stack([block.flatten() for block in blocks])
    left, values, right = torch.linalg.svd(rearranged, full_matrices=False)
    shared = torch.kron(torch.diag(left[:, 0] * values[0]), right[0].reshape(WIDTH, WIDTH))
    expected = {SCORES: scores, SHARED: shared, OWN: torch.block_diag(*blocks)}
    found = losses(jacobian, TOKENS)
    for name, nearest in expected.items():
        assert float(found[name]) == pytest.approx(float((metric - nearest).square().sum() / whole), rel=1e-9)
    assert (left[:, 0] * left[0, 0] > 0).all(), "scores of one sign"


@pytest.mark.parametrize("seed", range(5))
def test_no_metric_of_scores_loses_less_than_the_theorem_says(seed: int) -> None:
    jacobian = drawn(5, TOKENS * WIDTH, seed=seed) * torch.linspace(0.1, 2, TOKENS * WIDTH, dtype=DOUBLE)
    _, values, right = torch.linalg.svd(jacobian, full_matrices=False)
    zeta = deviations(right.unflatten(1, (TOKENS, WIDTH)))
    assert float(least_loss(values.square(), zeta, TOKENS * WIDTH)) <= float(losses(jacobian, TOKENS)[SCORES])


def test_the_bound_is_met_by_directions_that_are_spread_evenly() -> None:
    """Columns of a Hadamard matrix: each has the same energy at every token."""
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=DOUBLE)
    modes = torch.kron(torch.kron(two, two), two)[:3] / 8**0.5  # 4 tokens of width 2
    values = torch.tensor([3.0, 2.0, 1.0], dtype=DOUBLE)
    zeta = deviations(modes.unflatten(1, (4, 2)))
    assert zeta.tolist() == pytest.approx([0, 0, 0], abs=1e-12)
    expected = 1 - (9 + 4 + 1) ** 2 / (8 * (81 + 16 + 1))
    assert float(least_loss(values.square(), zeta, 8)) == pytest.approx(expected)
    assert float(losses(values[:, None] * modes, 4)[SCORES]) == pytest.approx(expected)


def test_the_numbers_of_a_row_are_those_of_the_dense_metric() -> None:
    tokens, width, outputs = 6, 5, 24
    jacobian = drawn(outputs, tokens * width) * torch.linspace(0.2, 3, tokens * width, dtype=DOUBLE)
    metric = jacobian.T @ jacobian
    random = torch.nn.functional.normalize(drawn(RANK, tokens * width, seed=9), dim=1).unflatten(1, (tokens, width))
    found = {name: float(value) for name, value in factored(jacobian, tokens, random).items()}
    assert found.keys() == set(FACTORED_COLUMNS)
    values, vectors = torch.linalg.eigh(metric)
    modes = vectors.flip(1)[:, :RANK].T
    scores = metric.diagonal().unflatten(0, (tokens, width)).mean(1).repeat_interleave(width)
    ratios = (modes.square() @ scores) / scores.mean()  # v^T g_F v over its mean on the sphere
    zeta = deviations(modes.unflatten(1, (tokens, width)))
    assert found[SIGNAL] == pytest.approx(float(ratios.mean()), rel=1e-5)
    assert found[DEVIATION] == pytest.approx(float(((ratios - 1).abs() / zeta).amax()), rel=1e-4)
    assert found[DEVIATION] <= 1
    assert found[ZETA] == pytest.approx(float(zeta.mean()), rel=1e-5)
    rayleigh = (modes @ metric * modes).sum(1) / (metric.trace() / (tokens * width))
    assert found[WHOLE] == pytest.approx(float(rayleigh.mean()), rel=1e-5)
    assert found[FIRST] == pytest.approx(float(rayleigh[0]), rel=1e-5)
    flat = random.flatten(1)
    by_chance = ((flat @ metric * flat).sum(1) / (metric.trace() / (tokens * width))).mean()
    assert found[FIRST_DRAWN] == pytest.approx(float(by_chance), rel=1e-5)
    rest = values.flip(0)[RANK:].square().sum() / values.square().sum()
    assert found[LOW_RANK] == pytest.approx(float(rest), abs=1e-9)
    assert found[MUST] <= found[SCORES] and found[SCORES] > found[SHARED] > found[OWN] > 0


# Verdicts


def spread(**rows: Known) -> dict:
    """CV of converged modes by row, with the null 0.05."""
    return lines(SPREAD, SPREAD_COLUMNS, {name: (0.05, 0.3, 0.4, cv, 0.05, 0.05) for name, cv in rows.items()})


def lost(**rows: dict[str, Known]) -> dict:
    usual = dict.fromkeys(FACTORED_COLUMNS, 0.5) | {ZETA: 7.0, SIGNAL: 2.0, WHOLE: 600.0}
    return lines(FACTORED, FACTORED_COLUMNS, {name: tuple({**usual, **own}.values()) for name, own in rows.items()})


def verdict(beginning: str, cv: dict[str, Known], factors: dict[str, dict[str, Known]] | None = None) -> str:
    return judged(DELOCALIZATION, finished(spread(**cv) | lost(**(factors or {}))), beginning)[0]


def test_depth_is_spread_if_its_cv_is_that_of_chance() -> None:
    other = "tiny-scenes depth 8×8, L10"
    beginning = "The leading directions"
    assert verdict(beginning, {DEPTH: 0.055}) == "holds"
    assert verdict(beginning, {DEPTH: (0.07, 0.06, 0.08)}) == "does not hold"
    assert verdict(beginning, {DEPTH: 0.055, other: 0.6}) == "holds partly"
    assert verdict(beginning, {DEPTH: 0.6, "DA V2 depth, L02": 0.03}) == "holds", "the paper's own model decides"
    assert verdict(beginning, {CLS[0]: 0.6}) == "not at this scale"


def test_the_class_token_is_concentrated_by_its_whole_interval() -> None:
    beginning = "DINOv2's class token has"
    assert verdict(beginning, {CLS[1]: 4.0}) == "holds"
    assert verdict(beginning, {CLS[1]: (0.9, 0.7, 1.1)}) == "does not hold"
    assert verdict(beginning, {CLS[0]: 4.0}) == "not at this scale"


def test_the_inequality_is_judged_at_every_row() -> None:
    beginning = "A factored metric"
    cv = {DEPTH: 0.6, CLS[0]: 2.0}
    assert verdict(beginning, cv, {DEPTH: {DEVIATION: 0.3}, CLS[0]: {DEVIATION: 1.0}}) == "holds"
    assert verdict(beginning, cv, {DEPTH: {DEVIATION: 0.3}, CLS[0]: {DEVIATION: 1.2}}) == "holds partly"
    assert verdict(beginning, cv, {CLS[0]: {DEVIATION: 1.2}}) == "does not hold"
    assert verdict(beginning, cv) == "not at this scale"


def test_depth_is_beyond_scores_by_the_theorem_and_by_measurement() -> None:
    beginning = "By Theorem 2"
    assert verdict(beginning, {DEPTH: 0.6}, {DEPTH: {MUST: 0.9, SCORES: 0.99}}) == "holds"
    assert verdict(beginning, {DEPTH: 0.6}, {DEPTH: {MUST: 0.1, SCORES: 0.99}}) == "holds partly"
    assert verdict(beginning, {DEPTH: 0.6}, {DEPTH: {MUST: 0.1, SCORES: (0.6, 0.4, 0.8)}}) == "does not hold"
    assert verdict(beginning, {CLS[0]: 0.6}, {CLS[0]: {MUST: 0.9}}) == "not at this scale"


def test_the_signal_is_that_of_the_first_direction_and_one_by_chance() -> None:
    beginning, usual = "The gradient signal ratio", {FIRST: 900.0, WHOLE: 600.0, FIRST_DRAWN: (1.0, 0.8, 1.2)}
    assert verdict(beginning, {DEPTH: 0.6}, {DEPTH: usual}) == "holds"
    assert verdict(beginning, {DEPTH: 0.6}, {DEPTH: {**usual, FIRST_DRAWN: 3.0}}) == "holds partly"
    assert verdict(beginning, {DEPTH: 0.6}, {DEPTH: {**usual, FIRST: 500.0, FIRST_DRAWN: 3.0}}) == "does not hold"
    assert verdict(beginning, {DEPTH: 0.6}) == "not at this scale"


def test_the_order_of_cvs_is_compared_with_that_of_losses() -> None:
    beginning, cv = "The CV predicts", {DEPTH: 0.6, CLS[0]: 2.0, CLS[1]: 5.0}

    def of(*pairs: tuple[Known, Known]) -> str:
        return verdict(beginning, cv, {name: {SCORES: s, OWN: o} for name, (s, o) in zip(cv, pairs, strict=True)})

    assert of((0.9, 0.8), (0.7, 0.6), (0.5, 0.4)) == "holds"
    assert of((0.9, 0.8), (0.7, 0.6), (0.8, 0.7)) == "holds partly"
    assert of((0.5, 0.4), (0.7, 0.6), (0.9, 0.8)) == "does not hold"
    wide = (0.5, 0.0, 1.0)
    assert of((wide, wide), (wide, wide), (wide, wide)) == "does not hold"
    assert verdict(beginning, {}) == verdict(beginning, {DEPTH: 0.6}, {DEPTH: {}}) == "not at this scale"


def test_attention_is_needed_for_what_lies_between_tokens() -> None:
    beginning, other = "Depth needs attention", "tiny-scenes depth 8×8, L10"
    cv = {DEPTH: 0.6, other: 0.6}
    assert verdict(beginning, cv, {DEPTH: {OWN: 0.9}}) == "holds"
    assert verdict(beginning, cv, {DEPTH: {OWN: 0.9}, other: {OWN: 0.1}}) == "holds partly"
    assert verdict(beginning, cv, {DEPTH: {OWN: (0.6, 0.4, 0.8)}}) == "does not hold"
    assert verdict(beginning, cv) == "not at this scale"


def test_footnotes_name_the_null_and_what_scores_miss() -> None:
    null, identity = DELOCALIZATION.footnotes
    found = finished(spread(**{DEPTH: 0.6}) | lost(**{DEPTH: {SCORES: 0.999, OWN: 0.9}}))
    assert f"{DEPTH}: q = 0 0.050, q = 1 0.3, converged 0.6" in (null(found) or "")
    assert "scores lose 99.90%, D×D per token lose 90.0%" in (identity(found) or "")
    assert null(Found([])) is None and identity(Found([])) is None


# The paper's numbers, and a run


def test_the_paper_s_cvs_stand_where_it_measured_them() -> None:
    assert DELOCALIZATION.paper[Place(SPREAD, "DA V2 depth, L02", "q = 2")] == 0.026
    assert DELOCALIZATION.paper[Place(SPREAD, "DA V2 depth 16×16, L05", "q = 2")] == 1.06
    assert DELOCALIZATION.paper[Place(SPREAD, "DINOv2 CLS, L10", "q = 2")] == 4.06
    for scale in SCALES.values():
        cells = {cell.key: cell for cell in DELOCALIZATION.checked_cells(scale)}
        assert len(cells["saliency, L02"].places) == len(SPREAD_COLUMNS), "its Jacobian is not formed"


def test_a_run_measures_every_place_twice_alike(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(runner, "commit", lambda: "the same")  # which rows name, and work in the checkout changes
    names = (CLS[1], "tiny-scenes depth 8×8, L10")
    few = cut_down(DELOCALIZATION, lambda cell: cell.key in names, images=1, dense=1, size=56)
    rows = run(few, tmp_path / "one")
    assert all(row["value"] is not None for row in rows)
    values = {(row["row"], row["column"]): row["value"] for row in rows}
    for name in names:
        null = values[name, NULL]
        assert null == pytest.approx(1 / (2 * 192) ** 0.5, rel=0.01)
        assert values[name, "q = 0"] == pytest.approx(null, rel=0.15), "a sketch before its first product"
        assert values[name, DRAWN] == pytest.approx(null, rel=0.15)
        assert values[name, CONVERGED] > 3 * null and values[name, "q = 2"] > 3 * null
        assert 0 <= values[name, MUST] <= values[name, SCORES] <= 1
        assert values[name, SCORES] > values[name, SHARED] > values[name, OWN] > 0
    assert values[names[0], CONVERGED] > values[names[1], CONVERGED]
    run(few, tmp_path / "other")
    assert rows_file(few, tmp_path / "one").read_bytes() == rows_file(few, tmp_path / "other").read_bytes()


def test_a_jacobian_that_is_not_formed_has_the_same_cv(tmp_path: Path, monkeypatch) -> None:
    few = cut_down(DELOCALIZATION, lambda cell: cell.key == CLS[1], images=1, size=56)
    formed = {(row["table"], row["column"]): row["value"] for row in run(few, tmp_path / "formed")}
    monkeypatch.setattr(module, "LARGEST", 100)
    multiplied = {(row["table"], row["column"]): row["value"] for row in run(few, tmp_path / "products")}
    assert {table for table, _ in multiplied} == {SPREAD}
    for column in SPREAD_COLUMNS:
        assert multiplied[SPREAD, column] == pytest.approx(formed[SPREAD, column], rel=0.01), column
