"""The low-rank metric against the dense matrix that it stands for."""

import pytest
import torch

from helpers.families import random_normal
from pullback.errors import PullbackError, ShapeError
from pullback.operators import LowRankMetric

BATCH, RANK, TOKENS, DIM = 2, 3, 5, 4
FLOOR = 0.3


@pytest.fixture
def metric() -> LowRankMetric:
    basis = torch.linalg.qr(random_normal(BATCH, TOKENS * DIM, RANK)).Q
    energies = random_normal(BATCH, RANK, seed=1).square()
    return LowRankMetric(basis.mT.unflatten(-1, (TOKENS, DIM)), energies, FLOOR)


@pytest.fixture
def dense(metric) -> torch.Tensor:
    basis = metric.modes.flatten(2)
    eye = torch.eye(TOKENS * DIM, dtype=torch.float64)
    return torch.einsum("br,brm,brn->bmn", metric.energies, basis, basis) + FLOOR * eye


def feature_map(seed: int = 2) -> torch.Tensor:
    return random_normal(BATCH, TOKENS, DIM, seed=seed)


def flat(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(1)[..., None]


def test_its_product_is_that_of_the_dense_matrix(metric, dense):
    v = feature_map()
    torch.testing.assert_close(flat(metric @ v), dense @ flat(v))


def test_woodbury_solves_with_the_dense_matrix(metric, dense):
    w = feature_map()
    torch.testing.assert_close(flat(metric.solve(w)), torch.linalg.solve(dense, flat(w)))
    torch.testing.assert_close(metric @ metric.solve(w), w)


def test_norm_and_distance_are_those_of_the_dense_matrix(metric, dense):
    a, b = feature_map(), feature_map(3)
    expected = (flat(a - b).mT @ dense @ flat(a - b)).flatten()
    torch.testing.assert_close(metric.squared_norm(a - b), expected)
    torch.testing.assert_close(metric.distance(a, b), expected.sqrt())
    assert metric.distance(a, a).count_nonzero() == 0


def test_coordinates_are_inner_products_with_the_modes(metric):
    v = feature_map()
    torch.testing.assert_close(metric.coordinates(v), (metric.modes.flatten(2) @ flat(v))[..., 0])


def test_token_blocks_are_the_diagonal_blocks_of_the_dense_matrix(metric, dense):
    blocks = dense.unflatten(1, (TOKENS, DIM)).unflatten(3, (TOKENS, DIM))
    for token in range(TOKENS):
        torch.testing.assert_close(metric.token_blocks()[:, token], blocks[:, token, :, token])


def test_importance_is_the_root_of_the_trace_of_a_tokens_block_without_the_floor(metric):
    traces = metric.token_blocks().diagonal(dim1=-2, dim2=-1).sum(-1) - FLOOR * DIM
    torch.testing.assert_close(metric.importance(), traces.sqrt())
    factors = metric.token_factors()
    assert factors.shape == (BATCH, TOKENS, RANK, DIM)
    torch.testing.assert_close(factors.square().sum((2, 3)), traces)


def test_without_a_floor_it_multiplies_but_cannot_be_solved_with(metric, dense):
    bare = LowRankMetric(metric.modes, metric.energies)
    v = feature_map()
    torch.testing.assert_close(flat(bare @ v), dense @ flat(v) - FLOOR * flat(v))
    with pytest.raises(PullbackError, match="floor: solve needs floor > 0, without it g is singular"):
        bare.solve(v)


def test_modes_and_energies_must_match(metric):
    for modes, energies in ((metric.modes[0], metric.energies), (metric.modes, metric.energies[:, 1:])):
        with pytest.raises(ShapeError, match=r"modes, energies: expected \[B, r, N, D\] and \[B, r\], got"):
            LowRankMetric(modes, energies)


def test_a_negative_floor_is_refused(metric):
    with pytest.raises(PullbackError, match=r"floor: expected a number >= 0, got -1.0"):
        LowRankMetric(metric.modes, metric.energies, -1.0)


def test_feature_maps_of_another_shape_are_refused(metric):
    for wrong in (feature_map()[:, 1:], feature_map()[0], feature_map()[:1]):
        for use in (metric.__matmul__, metric.solve, metric.squared_norm, metric.coordinates):
            with pytest.raises(ShapeError, match=r"v: expected a feature map \[2, 5, 4\], got"):
                use(wrong)
