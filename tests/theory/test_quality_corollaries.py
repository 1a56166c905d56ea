"""Corollaries of Theorem 3: the quality of a metric built on the sketch, and the gradient signal ratio."""

import pytest
import torch

from helpers.known_jacobians import SPECTRA, KnownJacobian, known_jacobian, orthonormal
from pullback.geometry import convergence_table
from pullback.operators import DenseOperator
from pullback.randnla import Streams, power_iteration

ROWS, COLS, RANK = 32, 48, 4


@pytest.fixture(params=SPECTRA, ids=str)
def jacobian(request) -> KnownJacobian:
    return known_jacobian(SPECTRA[request.param], ROWS, COLS)


def share_and_error(jacobian: KnownJacobian, basis: torch.Tensor) -> tuple[float, float]:
    """Share of the total in the natural energies |J u_j|^2, and r times the alignment error."""
    share = (jacobian.matrix @ basis).square().sum() / jacobian.energy
    residual = jacobian.right[:, :RANK] - basis @ (basis.T @ jacobian.right[:, :RANK])
    return share.item(), residual.square().sum().item()


@pytest.mark.parametrize("rounds", [0, 1, 2, 4, 8])
def test_natural_energies_are_as_near_to_kappa_as_the_subspace_is_aligned(jacobian, rounds):
    for seed in range(10):
        svd = power_iteration(
            DenseOperator(jacobian.matrix), RANK, power_iters=rounds, streams=Streams.from_seed(seed, 1)
        )
        share, defect = share_and_error(jacobian, svd.right[0])
        natural = svd.singular_values[0].square().sum() / jacobian.energy
        assert natural.item() == pytest.approx(share, rel=1e-10)
        bound = (jacobian.sigma[0] ** 2 + jacobian.sigma[RANK] ** 2).item() * defect / jacobian.energy.item()
        deficit = jacobian.kappa(RANK).item() - share
        assert abs(deficit) <= bound + 1e-13
        # what Ky Fan adds: always too low, and by at most sigma_1^2 r eps
        assert -1e-13 <= deficit <= jacobian.sigma[0].item() ** 2 * defect / jacobian.energy.item() + 1e-13


def test_a_turned_leading_mode_uses_half_of_the_bound_or_more():
    """v_1 turned into the null space loses sigma_1^2 sin^2: only the term sigma_{r+1}^2 of the bound is slack."""
    jacobian = known_jacobian(SPECTRA["rank-bounded"], ROWS, COLS)
    basis = jacobian.right[:, :RANK].clone()
    basis[:, 0] = 0.8 * jacobian.right[:, 0] + 0.6 * jacobian.right[:, -1]
    share, defect = share_and_error(jacobian, basis)
    deficit = jacobian.kappa(RANK).item() - share
    bound = (jacobian.sigma[0] ** 2 + jacobian.sigma[RANK] ** 2).item() * defect / jacobian.energy.item()
    assert 0.5 * bound < deficit <= bound


def test_the_ratio_converges_to_the_ceiling():
    jacobian = known_jacobian(SPECTRA["step"], ROWS, COLS)
    deficits = []
    for rounds in (0, 1, 2, 4):
        op = DenseOperator(jacobian.matrix)
        svd = power_iteration(op, RANK, power_iters=rounds, streams=Streams.from_seed(0, 1))
        deficits.append(jacobian.kappa(RANK).item() - share_and_error(jacobian, svd.right[0])[0])
    assert deficits[0] > 0.5 and deficits == sorted(deficits, reverse=True) and deficits[-1] < 1e-6


def test_at_convergence_the_gradient_signal_ratio_is_at_least_kappa_n_d_over_r(jacobian):
    ratio = jacobian.sigma[0] ** 2 * COLS / jacobian.energy
    for rank in (1, 2, 3, 5):
        assert ratio >= jacobian.kappa(rank) * COLS / rank - 1e-9
    converged = power_iteration(DenseOperator(jacobian.matrix), 1, power_iters=500, streams=Streams.from_seed(0, 1))
    torch.testing.assert_close(converged.singular_values[0, 0] ** 2 * COLS / jacobian.energy, ratio, rtol=1e-3, atol=0)


def test_equality_of_the_gradient_signal_bound_needs_equal_leading_values():
    flat = known_jacobian(torch.ones(8, dtype=torch.float64), ROWS, COLS)
    assert flat.kappa(3) * COLS / 3 == pytest.approx((flat.sigma[0] ** 2 * COLS / flat.energy).item())


def test_at_zero_rounds_the_gradient_signal_ratio_is_one_on_average(jacobian):
    """v is uniform on the sphere: E |J v|^2 = |J|_F^2 / N D."""
    samples = 4000
    op = DenseOperator(jacobian.matrix.expand(samples, -1, -1))
    total, reference = jacobian.energy.expand(samples), jacobian.right[None, :, :1].expand(samples, -1, -1)
    table = convergence_table(op, reference, total, paper_q=(), streams=Streams.from_seed(0, samples))
    ratios = table[0].gradient_signal_ratio
    assert table[0].rounds == 0
    assert abs(ratios.mean() - 1) < 4 * ratios.std() / samples**0.5 < 0.2


def test_a_random_subspace_captures_its_share_of_dimensions(jacobian):
    """Why zero rounds give an error of 1 - r / N D, near 1, and not the 0.2 to 0.8 that the paper prints at q = 0."""
    defects = torch.tensor([share_and_error(jacobian, orthonormal(COLS, RANK, seed))[1] for seed in range(400)])
    assert (defects.mean() / RANK).item() == pytest.approx(1 - RANK / COLS, abs=0.01)
