"""Theorem 3: block power iteration finds the task subspace at a geometric rate.

With q products with J^T J and Omega = V_r A + V_rest B, the subspace holds V_r + V_rest T with
T = Sigma_rest^{2q} B A^+ Sigma_r^{-2q}, hence for the alignment error, a mean squared sine,

    eps(q) = 1 - |Q^T V_r|_F^2 / r  <=  |T|_F^2 / r  <=  |B|_F^2 / (sigma_min(A)^2 r) (sigma_{r+1} / sigma_r)^{4q}.

The paper prints the exponent 2q: it bounds the tangent by (sigma_{r+1} / sigma_r)^{2q} and squares the constant but not
the ratio. Its inequality is true, a fortiori, and not sharp: observed is 4q for r0 = r. When the whole sketch of r0 > r
columns is kept, the rate is (sigma_{r0+1} / sigma_r)^{4q}. Its leading r columns, which the paper's Algorithm 2 takes,
are those of a sketch of r columns: they gain nothing from oversampling.
"""

import math

import pytest
import torch
from torch import Tensor

from helpers.known_jacobians import KnownJacobian, known_jacobian, with_gap
from pullback.geometry import convergence_table
from pullback.operators import DenseOperator
from pullback.randnla import Streams, block_krylov, power_iteration

ROWS, COLS, RANK = 40, 60, 5


def jacobian_with_gap(ratio: float) -> KnownJacobian:
    return known_jacobian(with_gap(RANK, ROWS, ratio), ROWS, COLS)


def sketch_subspace(jacobian: KnownJacobian, width: int, rounds: int, seed: int) -> Tensor:
    """All ``width`` columns of the paper's sketch [n, width], orthonormal."""
    streams = Streams.from_seed(seed, 1)
    op = DenseOperator(jacobian.matrix)
    return power_iteration(op, width, power_iters=rounds, sketch_width=width, streams=streams).right[0]


def alignment_error(subspace: Tensor, truth: Tensor) -> float:
    """Mean squared sine between span(truth) and the subspace; from the residual, to be right far below 1e-16."""
    residual = truth - subspace @ (subspace.T @ truth)
    return (residual.square().sum() / truth.shape[1]).item()


def constant(jacobian: KnownJacobian, width: int, seed: int) -> float:
    """|B|_F^2 / (sigma_min(A)^2 r) for the very Omega that the sketch starts from."""
    omega = Streams.from_seed(seed, 1).gaussian(COLS, width, torch.float64)[0]
    omega = omega / omega.norm(dim=0)
    coordinates = jacobian.right.T @ omega
    signal, noise = coordinates[:RANK], coordinates[RANK:]
    return (noise.square().sum() / (torch.linalg.svdvals(signal)[-1] ** 2 * RANK)).item()


def errors(jacobian: KnownJacobian, width: int, seed: int, rounds: range) -> list[float]:
    truth = jacobian.right[:, :RANK]
    return [alignment_error(sketch_subspace(jacobian, width, q, seed), truth) for q in rounds]


def decay_per_round(errors: list[float]) -> float:
    """exp of the slope of log error against the rounds."""
    logs = torch.tensor(errors, dtype=torch.float64).log()
    steps = torch.arange(len(logs), dtype=torch.float64)
    steps = steps - steps.mean()
    return math.exp((steps @ logs / (steps @ steps)).item())


@pytest.mark.parametrize("width", [RANK, RANK + 1, RANK + 5])
@pytest.mark.parametrize("ratio", [0.3, 0.6, 0.9])
def test_the_bound_holds_on_the_whole_sketch_subspace(ratio, width):
    jacobian = jacobian_with_gap(ratio)
    for seed in range(5):
        scale = constant(jacobian, width, seed)
        for q, error in enumerate(errors(jacobian, width, seed, range(0, 9))):
            assert error <= scale * ratio ** (4 * q) + 1e-28, "the sharp form"
            assert error <= scale * ratio ** (2 * q) + 1e-28, "the paper's form"


def test_the_bound_would_fail_with_a_larger_exponent():
    """4q is the largest multiple of q that the inequality allows."""
    jacobian = jacobian_with_gap(0.6)
    scale = constant(jacobian, RANK, seed=0)
    assert errors(jacobian, RANK, 0, range(20, 21))[0] > scale * 0.6 ** (5 * 20)


@pytest.mark.parametrize("ratio", [0.5, 0.7, 0.85])
def test_without_oversampling_the_error_falls_by_the_fourth_power_of_the_gap(ratio):
    """Not by its square, which is what the paper's exponent 2q would say."""
    sigma = torch.cat([torch.linspace(2, 1, RANK), ratio * 0.5 ** torch.arange(20)]).double()
    jacobian = known_jacobian(sigma, ROWS, COLS)
    observed = decay_per_round(errors(jacobian, RANK, 1, range(15, 19)))  # past the transient, above round-off
    assert observed == pytest.approx(ratio**4, rel=0.02)


def test_oversampling_moves_the_gap_to_the_end_of_the_sketch():
    """The whole sketch of r0 columns converges at (sigma_{r0+1} / sigma_r)^4, however small the gap after r is."""
    sigma = torch.tensor([3.0, 2.5, 2.0, 1.5, 1.0, 0.99, 0.98, 0.6, 0.3, 0.2, 0.1], dtype=torch.float64)
    jacobian = known_jacobian(sigma, ROWS, COLS)
    wide = decay_per_round(errors(jacobian, RANK + 2, 2, range(6, 12)))
    narrow = decay_per_round(errors(jacobian, RANK, 2, range(6, 12)))
    assert wide == pytest.approx(0.6**4, rel=0.02)
    assert narrow > 0.9


@pytest.mark.parametrize("rounds", [1, 3])
def test_the_leading_columns_gain_nothing_from_oversampling(rounds):
    """The r leading columns of a QR span the first r columns of what was factorised: the rest was computed in vain.

    A Rayleigh-Ritz rotation of all r0 columns is what makes use of them.
    """
    jacobian, width = jacobian_with_gap(0.8), RANK + 10
    op, truth = DenseOperator(jacobian.matrix), jacobian.right[:, :RANK]
    whole = sketch_subspace(jacobian, width, rounds, seed=3)
    omega = Streams.from_seed(3, 1).gaussian(COLS, width, torch.float64)[0]
    narrow = torch.linalg.qr(torch.linalg.matrix_power(jacobian.metric, rounds) @ omega[:, :RANK]).Q
    streams = Streams.from_seed(3, 1)
    literal = power_iteration(op, RANK, power_iters=rounds, sketch_width=width, streams=streams).right[0]
    torch.testing.assert_close(literal @ literal.T, narrow @ narrow.T, rtol=0, atol=1e-9)
    ritz = power_iteration(
        op, RANK, power_iters=rounds, sketch_width=width, rayleigh_ritz=True, streams=Streams.from_seed(3, 1)
    ).right[0]
    assert alignment_error(whole, truth) < alignment_error(ritz, truth) < 0.5 * alignment_error(literal, truth)


def test_nothing_converges_without_a_gap():
    jacobian = known_jacobian(torch.ones(ROWS, dtype=torch.float64), ROWS, COLS)
    assert errors(jacobian, RANK, 0, range(20, 21))[0] > 0.5


def test_block_krylov_needs_fewer_products_than_the_theorem_allows_power_iteration():
    jacobian = jacobian_with_gap(0.85)
    krylov = block_krylov(DenseOperator(jacobian.matrix), RANK, block=RANK, depth=5, streams=Streams.from_seed(0, 1))
    assert krylov.products.pairs <= 5 * RANK
    power = sketch_subspace(jacobian, RANK, 5, seed=0)
    truth = jacobian.right[:, :RANK]
    assert alignment_error(krylov.right[0], truth) < 0.2 * alignment_error(power, truth)


def test_the_convergence_table_measures_this_error():
    """`convergence_table` counts rounds as this file does; the paper's q is one less."""
    jacobian = jacobian_with_gap(0.6)
    table = convergence_table(
        DenseOperator(jacobian.matrix),
        jacobian.right[None, :, :RANK],
        jacobian.energy[None],
        paper_q=(0, 2, 5),
        streams=Streams.from_seed(4, 1),
    )
    assert [(row.rounds, row.paper_q) for row in table] == [(0, None), (1, 0), (3, 2), (6, 5)]
    for row in table:
        expected = alignment_error(sketch_subspace(jacobian, RANK, row.rounds, seed=4), jacobian.right[:, :RANK])
        assert row.alignment_error.item() == pytest.approx(expected, abs=1e-12)
