"""Theorem 2: a factored metric cannot tell a delocalised direction from a random one, up to the delocalisation zeta."""

import pytest
import torch
from torch import Tensor

from helpers.known_jacobians import normal
from pullback.geometry import coefficient_of_variation
from pullback.operators import LowRankMetric

TOKENS, WIDTH, FEATURES = 12, 4, 40  # F is uniform on FEATURES points, so every expectation over F is a plain mean


def scores(seed: int) -> Tensor:
    """phi_t(F) >= 0 for every F and t: [F, N], heavy-tailed, zero for some."""
    return normal(FEATURES, TOKENS, seed=seed).mul(1.5).exp() * (normal(FEATURES, TOKENS, seed=seed + 1) > -0.5)


def sensitivity(phi: Tensor, direction: Tensor) -> Tensor:
    """E_F sum_t phi_t(F) |v_t|^2 for v [N, D], or v(F) [F, N, D]."""
    return (phi * direction.square().sum(-1)).sum(-1).mean()


def of_a_random_direction(phi: Tensor) -> Tensor:
    """E_F E_v: every block of a uniformly random unit vector has expected squared norm 1/N."""
    return phi.mean()


def delocalized(offsets: Tensor, seed: int = 0) -> Tensor:
    """Unit v [..., N, D] with |v_t|^2 = (1 + offset_t) / N; the offsets [..., N] sum to zero."""
    blocks = normal(*offsets.shape, WIDTH, seed=seed)
    blocks = blocks / blocks.norm(dim=-1, keepdim=True)
    return blocks * ((1 + offsets) / offsets.shape[-1]).sqrt()[..., None]


def random_offsets(*shape: int, zeta: float, seed: int) -> Tensor:
    """In [-zeta, zeta], zero-sum, and touching the bound."""
    raw = normal(*shape, seed=seed)
    raw = raw - raw.mean(-1, keepdim=True)
    return zeta * raw / raw.abs().amax(-1, keepdim=True)


def half_up_half_down(phi: Tensor, zeta: float) -> Tensor:
    """The offsets that flatter phi most: +zeta on the higher half of the tokens, -zeta on the lower."""
    ranks = phi.argsort(-1).argsort(-1)
    return zeta * torch.where(ranks >= phi.shape[-1] // 2, 1.0, -1.0).double()


def test_a_random_direction_sees_the_mean_score():
    phi = scores(0)
    directions = normal(20_000, TOKENS, WIDTH, seed=3)
    directions /= directions.flatten(1).norm(dim=1)[:, None, None]
    samples = (directions.square().sum(-1) * phi.mean(0)).sum(1)
    se = samples.std() / len(samples) ** 0.5
    assert se < 0.01 * samples.mean()
    assert abs(samples.mean() - of_a_random_direction(phi)) < 4 * se


@pytest.mark.parametrize("zeta", [0.0, 0.01, 0.1, 0.5, 1.0])
def test_a_delocalized_direction_looks_random_to_every_factored_metric(zeta):
    for seed in range(100):
        phi = scores(seed)
        direction = delocalized(random_offsets(TOKENS, zeta=zeta, seed=seed))
        torch.testing.assert_close(direction.norm(), torch.ones(()).double(), rtol=1e-12, atol=0)
        ratio = sensitivity(phi, direction) / of_a_random_direction(phi)
        assert abs(ratio - 1) <= zeta + 1e-12


@pytest.mark.parametrize("zeta", [0.01, 0.1, 0.5])
def test_the_bound_also_holds_when_the_direction_depends_on_the_features(zeta):
    for seed in range(100):
        phi = scores(seed)
        for offsets in (random_offsets(FEATURES, TOKENS, zeta=zeta, seed=seed), half_up_half_down(phi, zeta)):
            ratio = sensitivity(phi, delocalized(offsets, seed)) / of_a_random_direction(phi)
            assert abs(ratio - 1) <= zeta + 1e-12


def test_a_direction_that_follows_the_scores_uses_most_of_the_bound():
    """Were the bound much smaller than zeta, this would break it."""
    phi, zeta = scores(0), 0.1
    ratio = sensitivity(phi, delocalized(half_up_half_down(phi, zeta))) / of_a_random_direction(phi)
    assert 0.7 * zeta < ratio - 1 <= zeta


@pytest.mark.parametrize("zeta", [0.01, 0.3, 1.0])
def test_the_bound_is_tight(zeta):
    """The paper's example: two tokens, and a metric that scores only the first."""
    phi = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    ratio = sensitivity(phi, delocalized(torch.tensor([zeta, -zeta]).double())) / of_a_random_direction(phi)
    torch.testing.assert_close(ratio - 1, torch.tensor(zeta).double(), rtol=1e-6, atol=0)


def test_a_localized_direction_is_told_from_a_random_one():
    """The premise is needed: all mass on the token with the highest score gives a ratio far above 1 + zeta."""
    phi = scores(0)
    direction = torch.zeros(TOKENS, WIDTH, dtype=torch.float64)
    direction[phi.mean(0).argmax()] = 0.5
    assert sensitivity(phi, direction) / of_a_random_direction(phi) > 1.5


def test_the_token_scores_of_a_task_metric_are_such_a_metric():
    """phi_t = imp*_t^2 with random modes: what an importance head would have to work with."""
    modes = torch.linalg.qr(normal(FEATURES, TOKENS * WIDTH, 3, seed=5)).Q.mT.reshape(FEATURES, 3, TOKENS, WIDTH)
    phi = LowRankMetric(modes, normal(FEATURES, 3, seed=6).square()).importance().square()
    for seed in range(20):
        direction = delocalized(random_offsets(TOKENS, zeta=0.05, seed=seed))
        assert abs(sensitivity(phi, direction) / of_a_random_direction(phi) - 1) <= 0.05


@pytest.mark.parametrize("zeta", [0.01, 0.1, 0.5])
def test_delocalized_means_a_small_cv(zeta):
    """Norms in sqrt((1 +- zeta)/N) vary by at most zeta or so: CV is what the diagnostic measures of the premise."""
    for offsets in (random_offsets(TOKENS, zeta=zeta, seed=1), half_up_half_down(normal(TOKENS, seed=2), zeta)):
        cv = coefficient_of_variation(delocalized(offsets)[None, None])
        assert 0 < cv.item() < 0.6 * zeta
    localized = torch.zeros(1, 1, TOKENS, WIDTH, dtype=torch.float64)
    localized[..., 0, :] = 0.5
    assert coefficient_of_variation(localized).item() == pytest.approx(TOKENS**0.5)
