"""Theorem 1: the best rank-r metric captures exactly kappa_cap(r) of the expected sensitivity, and nothing beats it."""

import pytest
import torch
from torch import Tensor

from helpers.known_jacobians import SPECTRA, KnownJacobian, known_jacobian, normal, orthonormal
from pullback.operators import LowRankMetric

TOKENS, WIDTH, OUTPUTS = 8, 5, 32
RANK = 4


@pytest.fixture(params=SPECTRA, ids=str)
def jacobian(request) -> KnownJacobian:
    return known_jacobian(SPECTRA[request.param], OUTPUTS, TOKENS * WIDTH)


def truncated(jacobian: KnownJacobian, rank: int, floor: float = 0.0) -> LowRankMetric:
    """g_r of the theorem."""
    modes = jacobian.right[:, :rank].T.reshape(1, rank, TOKENS, WIDTH)
    return LowRankMetric(modes, jacobian.sigma[None, :rank].square(), floor)


def dense(metric: LowRankMetric) -> Tensor:
    columns = torch.eye(TOKENS * WIDTH, dtype=torch.float64).reshape(-1, 1, TOKENS, WIDTH)
    return torch.stack([(metric @ column).flatten() for column in columns], 1)


def trace(matrix: Tensor) -> Tensor:
    return matrix.diagonal().sum()


def best_error(jacobian: KnownJacobian, modes: Tensor, floor: float) -> Tensor:
    """min over Lambda >= 0 (diagonal) of |g - (U Lambda U^T + eps I)|_F for orthonormal U [n, r].

    The rank-r terms u_j u_j^T are orthonormal in the Frobenius product, so each energy is fitted on its own.
    """
    target = jacobian.metric - floor * torch.eye(len(jacobian.right), dtype=torch.float64)
    energies = (modes * (target @ modes)).sum(0).clamp_min(0)
    return (target - (modes * energies) @ modes.T).norm()


@pytest.mark.parametrize("rank", [1, 3, 5])
def test_the_captured_share_is_kappa_by_traces(jacobian, rank):
    """E_v[v^T A v] = tr(A) / N D on the unit sphere, so the ratio of expectations is a ratio of traces."""
    ratio = trace(dense(truncated(jacobian, rank))) / trace(jacobian.metric)
    torch.testing.assert_close(ratio, jacobian.kappa(rank), rtol=1e-12, atol=0)


def test_the_captured_share_is_kappa_by_sampling(jacobian):
    directions = normal(20_000, TOKENS * WIDTH, seed=7)
    directions /= directions.norm(dim=1, keepdim=True)
    maps = directions.reshape(-1, TOKENS, WIDTH)
    metric = truncated(jacobian, RANK)
    everywhere = LowRankMetric(
        metric.modes.expand(len(maps), -1, -1, -1), metric.energies.expand(len(maps), -1)
    ).squared_norm(maps)
    full = (directions @ jacobian.matrix.T).square().sum(1)
    ratio = everywhere.mean() / full.mean()
    se = (everywhere - ratio * full).std() / full.mean() / len(maps) ** 0.5  # delta method for a ratio of means
    assert se < 0.01
    assert abs(ratio - jacobian.kappa(RANK)) < 4 * se + 1e-12


def test_a_floor_adds_its_own_trace_and_vanishes_with_it(jacobian):
    for floor in (1e-2, 1e-4, 1e-6):
        ratio = trace(dense(truncated(jacobian, RANK, floor))) / trace(jacobian.metric)
        excess = floor * TOKENS * WIDTH / jacobian.energy
        torch.testing.assert_close(ratio - excess, jacobian.kappa(RANK), rtol=1e-10, atol=0)


# With floor 0.2 the tail's eigenvalues -eps of g - eps I are larger in size than some sigma_j^2 - eps that are kept:
# Eckart-Young without the sign would take them; the theorem asks for Lambda > 0 and so keeps the top modes.
@pytest.mark.parametrize("floor", [0.0, 1e-3, 0.2])
def test_no_other_subspace_has_a_smaller_frobenius_error(jacobian, floor):
    assert jacobian.sigma[RANK - 1] ** 2 > floor, "the theorem needs positive energies"
    own = best_error(jacobian, jacobian.right[:, :RANK], floor)
    for seed in range(50):
        assert best_error(jacobian, orthonormal(TOKENS * WIDTH, RANK, seed), floor) > own
    for step in (1e-3, 1e-2, 0.1, 1.0):
        for seed in range(20):
            moved = jacobian.right[:, :RANK] + step * normal(TOKENS * WIDTH, RANK, seed=100 + seed)
            assert best_error(jacobian, torch.linalg.qr(moved).Q, floor) > own
    swapped = torch.cat([jacobian.right[:, : RANK - 1], jacobian.right[:, RANK : RANK + 1]], 1)
    assert best_error(jacobian, swapped, floor) > own


@pytest.mark.parametrize("floor", [0.0, 0.05])
def test_with_a_floor_the_best_energies_are_smaller_by_the_floor(jacobian, floor):
    top, target = jacobian.right[:, :RANK], jacobian.sigma[:RANK].square() - floor
    identity = torch.eye(TOKENS * WIDTH, dtype=torch.float64)

    def error(energies: Tensor) -> Tensor:
        return (jacobian.metric - (top * energies) @ top.T - floor * identity).norm()

    own = error(target)
    torch.testing.assert_close(own, best_error(jacobian, top, floor), rtol=1e-12, atol=1e-12)
    for seed in range(20):
        assert error(target * (1 + 0.05 * normal(RANK, seed=seed))) > own
    if floor > 0:
        assert error(target + floor) > own  # sigma_j^2 itself, the limit eps -> 0, is not the best at eps > 0


def test_without_a_gap_the_best_subspace_is_not_unique():
    """sigma_r = sigma_{r+1}: the theorem promises uniqueness only with a gap, and without one it fails."""
    flat = known_jacobian(torch.ones(10, dtype=torch.float64), OUTPUTS, TOKENS * WIDTH)
    first, second = best_error(flat, flat.right[:, :4], 0.0), best_error(flat, flat.right[:, 3:7], 0.0)
    torch.testing.assert_close(first, second, rtol=1e-12, atol=0)


def test_ky_fan_no_projector_keeps_more_than_the_leading_energies(jacobian):
    ceiling = jacobian.sigma[:RANK].square().sum()

    def kept(basis: Tensor) -> Tensor:
        projector = basis @ basis.T
        return trace(projector @ jacobian.metric @ projector)

    torch.testing.assert_close(kept(jacobian.right[:, :RANK]), ceiling, rtol=1e-12, atol=0)
    for seed in range(100):
        assert kept(orthonormal(TOKENS * WIDTH, RANK, seed)) < ceiling
        moved = jacobian.right[:, :RANK] + 1e-2 * normal(TOKENS * WIDTH, RANK, seed=seed)
        assert kept(torch.linalg.qr(moved).Q) < ceiling


def test_without_the_restriction_the_ratio_is_unbounded(jacobian):
    """Any rank-r metric may be scaled up: kappa bounds restrictions of g, not all metrics of rank r."""
    metric = truncated(jacobian, RANK)
    scaled = LowRankMetric(metric.modes, 10 / jacobian.kappa(RANK) * metric.energies)
    assert trace(dense(scaled)) / trace(jacobian.metric) > 9.99
