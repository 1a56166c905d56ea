"""Losses against their plain formulas in float64, and what their gradients ask for."""

import math

import pytest
import torch
import torch.nn.functional as F

from pullback.learning.losses import (
    alignment,
    conformal_loss,
    direction_loss,
    distance_loss,
    energy_loss,
    nearly_degenerate,
    order_loss,
    ranking_loss,
    subspace_loss,
)
from pullback.operators import LowRankMetric

BATCH, TOKENS, DIM, RANK = 3, 7, 4, 5


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


def positive(seed: int = 0) -> torch.Tensor:
    return normal(BATCH, TOKENS, seed=seed).exp()


def modes(rank: int = RANK, seed: int = 0) -> torch.Tensor:
    basis = torch.linalg.qr(normal(BATCH, TOKENS * DIM, rank, seed=seed)).Q
    return basis.mT.unflatten(-1, (TOKENS, DIM))


# ---- the importance head


def test_without_the_ranking_term_the_conformal_loss_is_the_mean_squared_log_error():
    scores, target = positive(), positive(1)
    expected = sum(
        math.log(s / t) ** 2 for s, t in zip(scores.flatten().tolist(), target.flatten().tolist(), strict=True)
    )
    loss = conformal_loss(scores, target, rank_weight=0, generator=seeded())
    assert loss.item() == pytest.approx(expected / (BATCH * TOKENS), rel=1e-12)
    assert conformal_loss(target, target, rank_weight=0, generator=seeded()).item() == 0


def test_the_ranking_term_is_that_of_the_logarithms_and_weighs_half_unless_told_otherwise():
    scores, target = positive(), positive(1)
    plain = conformal_loss(scores, target, rank_weight=0, generator=seeded())
    ranking = ranking_loss(scores.log(), target.log(), shifts=8, generator=seeded())
    assert ranking.item() > 0.1
    torch.testing.assert_close(conformal_loss(scores, target, generator=seeded()), plain + 0.5 * ranking)
    torch.testing.assert_close(conformal_loss(scores, target, rank_weight=2, generator=seeded()), plain + 2 * ranking)


def test_scores_and_targets_of_zero_leave_the_conformal_loss_finite():
    scores, target = torch.zeros(1, 4, requires_grad=True), torch.tensor([[0.0, 1e-30, 1.0, 2.0]])
    loss = conformal_loss(scores, target, generator=seeded())
    loss.backward()
    assert loss.isfinite()
    assert scores.grad.isfinite().all()


@pytest.mark.parametrize("shifts", [TOKENS - 1, 100], ids=["as many as there are", "more than there are"])
def test_with_all_shifts_the_ranking_loss_is_the_mean_over_all_pairs_of_tokens(shifts):
    predicted, wanted = normal(BATCH, TOKENS), normal(BATCH, TOKENS, seed=1)
    pairs = [
        math.log1p(math.exp(-math.copysign(1, wanted[b, s] - wanted[b, t]) * (predicted[b, s] - predicted[b, t])))
        for b in range(BATCH)
        for s in range(TOKENS)
        for t in range(TOKENS)
        if s != t
    ]
    loss = ranking_loss(predicted, wanted, shifts=shifts, generator=seeded())
    assert loss.item() == pytest.approx(sum(pairs) / len(pairs), rel=1e-12)


def test_few_shifts_estimate_the_loss_over_all_pairs_without_bias():
    predicted, wanted = normal(1, 30), normal(1, 30, seed=1)
    generator = seeded()
    draws = torch.stack([ranking_loss(predicted, wanted, shifts=3, generator=generator) for _ in range(300)])
    every = ranking_loss(predicted, wanted, shifts=29, generator=generator)
    assert draws.std() > 0
    assert abs(draws.mean() - every) < 4 * draws.std() / len(draws) ** 0.5


@pytest.mark.parametrize("tokens", [2, 3, 50])
def test_one_shift_already_compares_every_token(tokens):
    wanted = normal(BATCH, tokens, seed=1)
    for seed in range(5):
        predicted = normal(BATCH, tokens).requires_grad_()
        ranking_loss(predicted, wanted, shifts=1, generator=seeded(seed)).backward()
        assert (predicted.grad != 0).all()


def test_the_ranking_loss_pulls_a_wrong_pair_apart_in_the_right_direction():
    predicted = torch.tensor([[0.3, -0.2]], dtype=torch.float64, requires_grad=True)
    ranking_loss(predicted, torch.tensor([[1.0, 2.0]]).double(), shifts=1, generator=seeded()).backward()
    lower, higher = (-predicted.grad[0]).tolist()  # where descent goes
    assert higher > 0 > lower
    assert higher == pytest.approx(-lower)


def test_descent_on_the_ranking_loss_sorts_the_tokens():
    wanted = normal(BATCH, TOKENS)
    predicted = (-wanted).requires_grad_()
    generator = seeded()
    for _ in range(200):
        (gradient,) = torch.autograd.grad(ranking_loss(predicted, wanted, shifts=4, generator=generator), predicted)
        predicted = (predicted - 5 * gradient).detach().requires_grad_()
    assert torch.equal(predicted.argsort(1), wanted.argsort(1))


def test_the_ranking_loss_sees_only_the_order_of_the_targets():
    predicted, wanted = normal(BATCH, TOKENS), normal(BATCH, TOKENS, seed=1)
    losses = [
        ranking_loss(predicted, changed, shifts=3, generator=seeded())
        for changed in (wanted, wanted.exp(), wanted**3, 1e-3 * wanted + 5)
    ]
    assert len({loss.item() for loss in losses}) == 1
    assert ranking_loss(predicted, -wanted, shifts=3, generator=seeded()) != losses[0]


def test_equal_targets_say_nothing_about_their_order():
    predicted = normal(1, 4).requires_grad_()
    wanted = torch.tensor([[1.0, 1.0, 1.0, 2.0]]).double()
    loss = ranking_loss(predicted, wanted, shifts=3, generator=seeded())
    gaps = predicted[0, 3] - predicted[0, :3]
    torch.testing.assert_close(loss, 2 * F.softplus(-gaps).sum() / 12)  # 12 ordered pairs, 6 of them tied
    flat = ranking_loss(predicted, torch.ones_like(wanted), shifts=3, generator=seeded())
    assert flat.item() == 0
    assert torch.autograd.grad(flat, predicted)[0].count_nonzero() == 0


def test_a_single_token_has_nothing_to_be_compared_with():
    assert ranking_loss(normal(BATCH, 1), normal(BATCH, 1, seed=1), shifts=8, generator=seeded()).item() == 0


def test_the_pairs_come_from_the_generator_alone():
    predicted, wanted = normal(BATCH, 40), normal(BATCH, 40, seed=1)
    first = ranking_loss(predicted, wanted, shifts=2, generator=seeded(3))
    state = torch.random.get_rng_state()
    again = ranking_loss(predicted, wanted, shifts=2, generator=seeded(3))
    other = ranking_loss(predicted, wanted, shifts=2, generator=seeded(4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.random.get_rng_state(), state)


# ---- the Spectral Pullback Network


def test_the_subspace_loss_is_that_of_the_dense_projectors():
    u, v = modes(), modes(seed=1)
    onto_u, onto_v = (m.flatten(2).mT @ m.flatten(2) for m in (u, v))
    overlap = (onto_u @ onto_v).diagonal(dim1=1, dim2=2).sum(1) / RANK
    assert subspace_loss(u, v).shape == (BATCH,)
    torch.testing.assert_close(subspace_loss(u, v), 1 - overlap)
    torch.testing.assert_close(alignment(u, v), overlap)


def test_the_subspace_loss_does_not_change_when_either_basis_is_rotated():
    u, v = modes(), modes(seed=1)
    rotation = torch.linalg.qr(normal(BATCH, RANK, RANK, seed=2)).Q
    rotated_u, rotated_v = (torch.einsum("brs,bsnd->brnd", rotation, m) for m in (u, v))
    assert (rotated_u - u).abs().max() > 0.1
    torch.testing.assert_close(subspace_loss(rotated_u, v), subspace_loss(u, v))
    torch.testing.assert_close(subspace_loss(u, rotated_v), subspace_loss(u, v))
    torch.testing.assert_close(subspace_loss(u.flip(1), v), subspace_loss(u, v))


def test_the_subspace_loss_is_zero_for_the_same_span_and_one_for_an_orthogonal_one():
    both = modes(2 * RANK)
    u, v = both[:, :RANK], both[:, RANK:]
    nothing = torch.zeros(BATCH, dtype=torch.float64)
    torch.testing.assert_close(subspace_loss(u, -u.flip(1)), nothing)
    torch.testing.assert_close(subspace_loss(u, v), nothing + 1)
    half = torch.cat([u[:, :2], v[:, 2:]], 1)
    torch.testing.assert_close(alignment(half, u), nothing + 2 / RANK)


@pytest.mark.parametrize(
    ("singular_values", "expected"),
    [
        ([4.0, 2.0, 1.0], [False, False, False]),
        ([4.0, 2.0, 1.99, 1.0], [False, True, True, False]),
        ([2.0, 1.99, 1.0, 0.5], [True, True, False, False]),
        ([4.0, 2.0, 1.0, 0.99], [False, False, True, True]),
        ([4.0, 2.0, 1.95, 1.9, 1.0], [False, True, True, True, False]),
        ([1.051, 1.0], [False, False]),
        ([1.049, 1.0], [True, True]),
        ([3.0, 3.0, 3.0], [True, True, True]),
        ([1.0], [False]),
    ],
    ids=str,
)
def test_both_modes_of_a_close_pair_are_nearly_degenerate(singular_values, expected):
    assert nearly_degenerate(torch.tensor([singular_values])).tolist() == [expected]


def test_degeneracy_is_judged_image_by_image_and_with_the_given_ratio():
    singular_values = torch.tensor([[4.0, 2.0, 1.0], [4.0, 3.0, 2.9]])
    assert nearly_degenerate(singular_values).tolist() == [[False] * 3, [False, True, True]]
    assert nearly_degenerate(singular_values, ratio=1.5).tolist() == [[False] * 3, [True, True, True]]
    assert not nearly_degenerate(singular_values, ratio=1.0).any()


def test_the_energy_loss_is_the_mean_squared_log_error_over_the_modes_that_keep_their_order():
    singular_values = torch.tensor([[4.0, 2.0, 1.0], [4.0, 2.0, 1.99]]).double()
    energies = torch.tensor([[10.0, 5.0, 1.0], [8.0, 1e5, 1e-5]]).double().requires_grad_()
    loss = energy_loss(energies, singular_values)
    expected = [(math.log(10 / 16) ** 2 + math.log(5 / 4) ** 2) / 3, math.log(8 / 16) ** 2]
    torch.testing.assert_close(loss, torch.tensor(expected).double())
    loss.sum().backward()
    assert energies.grad[1, 1:].count_nonzero() == 0
    assert energies.grad[0, 0] < 0 < energies.grad[0, 1]
    assert energy_loss(singular_values.square(), singular_values).count_nonzero() == 0


def test_an_image_without_any_usable_energy_costs_nothing():
    singular_values = torch.tensor([[1.0, 1.0, 1.0], [3.0, 0.0, 0.0]]).double()
    energies = torch.tensor([[5.0, 6.0, 7.0], [9.0, 1.0, 1.0]]).double()
    assert energy_loss(energies, singular_values).tolist() == [0.0, 0.0]


@pytest.fixture
def jacobian() -> torch.Tensor:
    """[B, M, N D] of full row rank M = 6."""
    return normal(BATCH, 6, TOKENS * DIM, seed=5)


def metric_of(jacobian: torch.Tensor, rank: int = 6) -> LowRankMetric:
    _, values, right = torch.linalg.svd(jacobian, full_matrices=False)
    return LowRankMetric(right[:, :rank].unflatten(-1, (TOKENS, DIM)), values[:, :rank].square())


def image_of(jacobian: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.einsum("bmk,bk->bm", jacobian, v.flatten(1))


def test_the_true_metric_of_a_linear_map_gives_all_distances(jacobian):
    first, second = normal(BATCH, TOKENS, DIM), normal(BATCH, TOKENS, DIM, seed=1)
    distance = (image_of(jacobian, second) - image_of(jacobian, first)).norm(dim=1)
    loss = distance_loss(metric_of(jacobian), second - first, distance)
    torch.testing.assert_close(loss, torch.zeros(BATCH, dtype=torch.float64))
    assert (distance_loss(metric_of(jacobian, rank=3), second - first, distance) > 1e-3).all()


def test_the_true_metric_of_a_linear_map_gives_the_sensitivity_in_every_direction(jacobian):
    directions = F.normalize(normal(BATCH, TOKENS * DIM), dim=1).unflatten(1, (TOKENS, DIM))
    sensitivities = image_of(jacobian, directions).square().sum(1)
    loss = direction_loss(metric_of(jacobian), directions, sensitivities)
    torch.testing.assert_close(loss, torch.zeros(BATCH, dtype=torch.float64))
    assert (direction_loss(metric_of(jacobian, rank=3), directions, sensitivities) > 1e-3).all()


def test_errors_are_compared_as_logarithms_of_squared_lengths(jacobian):
    metric, change = metric_of(jacobian), normal(BATCH, TOKENS, DIM)
    distance = image_of(jacobian, change).norm(dim=1)
    expected = torch.full((BATCH,), math.log(9.0) ** 2, dtype=torch.float64)
    torch.testing.assert_close(distance_loss(metric, change, 3 * distance), expected)
    torch.testing.assert_close(distance_loss(metric, change, distance / 3), expected)
    torch.testing.assert_close(direction_loss(metric, change, 9 * distance.square()), expected)


def test_directions_without_any_effect_leave_the_losses_finite(jacobian):
    nothing = torch.zeros(BATCH, TOKENS, DIM, dtype=torch.float64)
    zero = torch.zeros(BATCH, dtype=torch.float64)
    assert direction_loss(metric_of(jacobian), nothing, zero).tolist() == [0.0] * BATCH
    assert distance_loss(metric_of(jacobian), nothing, zero + 1).isfinite().all()


def test_the_order_loss_is_its_formula():
    scores, target = normal(BATCH, TOKENS).exp(), normal(BATCH, TOKENS, seed=1).exp()
    expected = []
    for h, t in zip(scores.log(), target.log(), strict=True):
        d, z = h - t, (h - h.mean()) / h.std(correction=0)
        soft = 0.5 * (1 + torch.erf(z / math.sqrt(2)))
        ranks = torch.tensor([float((t < value).sum()) for value in t], dtype=torch.float64)
        correlation = torch.corrcoef(torch.stack([soft, ranks]))[0, 1]
        expected.append((d - d.mean()).square().mean() + 0.1 * d.mean() ** 2 + 2 * (1 - correlation))
    torch.testing.assert_close(order_loss(scores, target), torch.stack(expected).mean())


def test_the_order_loss_hardly_minds_the_level_and_not_at_all_without_its_weight():
    target = normal(BATCH, TOKENS).exp()
    right, wrong = (order_loss(target * factor, target) for factor in (1, 3))
    torch.testing.assert_close(wrong - right, torch.tensor(0.1 * math.log(3) ** 2, dtype=torch.float64))
    assert order_loss(target * 3, target, level_weight=0) == pytest.approx(float(right))
    assert order_loss(target.flip(1), target) > 10 * right


def test_the_order_loss_has_a_gradient_for_equal_scores():
    scores = torch.ones(BATCH, TOKENS, requires_grad=True)
    order_loss(scores, normal(BATCH, TOKENS).float().exp()).backward()
    assert scores.grad.isfinite().all() and (scores.grad != 0).any()
