"""Optimal transport between tokens against linear programming, and what must hold of it."""

import numpy as np
import pytest
import torch
from scipy.optimize import linprog

from helpers.toys import normal, seeded
from pullback.errors import NumericsError, PullbackError, ShapeError
from pullback.learning.distilled_metric import MetricItems, pairwise_distances
from pullback.retrieval.transport import token_spread, transport_distances


def items(count: int = 3, tokens: int = 7, width: int = 3, seed: int = 0) -> MetricItems:
    projected = normal(count, tokens, width, seed=seed)
    weights = 0.5 + torch.rand(count, tokens, generator=seeded(seed), dtype=torch.float64)
    return with_aggregates(projected, weights)


def with_aggregates(projected: torch.Tensor, weights: torch.Tensor) -> MetricItems:
    return MetricItems(projected, weights, torch.einsum("bn,bnk->bk", weights, projected))


def by_linear_programming(first: MetricItems, second: MetricItems) -> torch.Tensor:
    def least_cost(i: int, j: int) -> float:
        a, b = (part.weights[k] / part.weights[k].sum() for part, k in ((first, i), (second, j)))
        cost = torch.cdist(first.projected[i], second.projected[j]).square()
        rows, columns = np.kron(np.eye(len(a)), np.ones(len(b))), np.kron(np.ones(len(a)), np.eye(len(b)))
        return linprog(cost.flatten().numpy(), A_eq=np.vstack([rows, columns]), b_eq=torch.cat([a, b]).numpy()).fun

    def one(i: int, j: int) -> float:
        return float((first.weights[i].sum() + second.weights[j].sum()) / 2) * least_cost(i, j) ** 0.5

    return torch.tensor([[one(i, j) for j in range(len(second))] for i in range(len(first))])


def test_with_little_blur_it_is_exact_transport():
    first, second = items(), items(2, tokens=5, seed=3)
    found = transport_distances(first, second, blur=0.05, iterations=10_000)
    torch.testing.assert_close(found, by_linear_programming(first, second), rtol=5e-3, atol=0)


def test_less_blur_is_nearer_to_exact_transport():
    first, second = items(), items(2, seed=3)
    exact = by_linear_programming(first, second)
    off = [(transport_distances(first, second, blur=blur) / exact - 1).abs().max() for blur in (1.0, 0.3, 0.1)]
    assert off[0] > off[1] > off[2] and off[2] < 0.02


def test_one_set_gives_a_symmetric_matrix_with_zeros_on_the_diagonal():
    images = items(5, tokens=30)
    found = transport_distances(images, images)
    assert found.diagonal().tolist() == [0.0] * 5
    torch.testing.assert_close(found, found.T, rtol=1e-5, atol=0)
    assert (found + torch.eye(5) > 0).all()


def test_it_does_not_see_where_tokens_are_which_the_metric_does():
    images = items(4, tokens=12)
    order = torch.randperm(12, generator=seeded(1))
    moved = with_aggregates(images.projected[:, order], images.weights[:, order])
    assert transport_distances(images, moved).diagonal().max() < 1e-3 * token_spread(images)
    spread = token_spread(images)
    torch.testing.assert_close(
        transport_distances(images, images, spread=spread) + torch.eye(4),
        transport_distances(images, moved, spread=spread) + torch.eye(4),
        rtol=1e-3,
        atol=1e-2,
    )
    assert pairwise_distances(images, moved).diagonal().min() > 0.1


def test_tokens_that_all_move_by_the_same_are_as_far_apart_as_the_metric_says():
    images, shift = items(3), torch.tensor([0.3, -0.2, 0.6], dtype=torch.float64)
    moved = with_aggregates(images.projected + shift, images.weights)
    found = transport_distances(images, moved).diagonal()
    torch.testing.assert_close(found, (images.weights.sum(1) * shift.norm()).float(), rtol=1e-4, atol=0)
    torch.testing.assert_close(found, pairwise_distances(images, moved).diagonal().float(), rtol=1e-4, atol=0)


def test_other_units_change_the_distances_by_their_factor():
    images = items()
    larger = with_aggregates(10 * images.projected, 3 * images.weights)
    found = transport_distances(images, images)
    torch.testing.assert_close(transport_distances(larger, larger), 30 * found)


def test_the_distance_of_a_pair_does_not_depend_on_the_others(monkeypatch):
    first, second = items(3), items(4, seed=5)
    second.projected[1] *= 3  # which takes longer
    found = transport_distances(first, second, spread=1.0)
    one = transport_distances(first[1:2], second[2:3], spread=1.0)
    torch.testing.assert_close(one[0, 0], found[1, 2], rtol=1e-6, atol=0)
    monkeypatch.setattr("pullback.retrieval.transport._AT_ONCE", 50)
    torch.testing.assert_close(transport_distances(first, second, spread=1.0), found, rtol=1e-6, atol=0)


def test_stored_items_can_be_compared():
    images = items()
    stored = MetricItems(images.projected.float(), images.weights.float(), images.aggregates.float()).half()
    torch.testing.assert_close(
        transport_distances(stored, stored), transport_distances(images, images), rtol=1e-2, atol=0
    )


def test_images_whose_tokens_are_all_the_same_are_at_distance_zero():
    same = with_aggregates(torch.ones(2, 3, 2), torch.ones(2, 3))
    assert transport_distances(same, same).tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_it_says_where_it_has_not_converged():
    first, second = items(), items(2, seed=3)
    message = r"iterations: \d of \d pairs did not converge in 30 iterations \(marginals off by .* Raise iterations"
    with pytest.raises(NumericsError, match=message):
        transport_distances(first, second, blur=0.02, iterations=30)


def test_work_without_end_is_refused_before_it_begins():
    with pytest.raises(PullbackError, match=r"first, second: 3 x 2 images of 7 and 7 tokens .* 2.9e\+02 entries, more"):
        transport_distances(items(), items(2), most_entries=100)


def negative(images: MetricItems) -> MetricItems:
    return MetricItems(images.projected, -images.weights, images.aggregates)


def infinite(images: MetricItems) -> MetricItems:
    return MetricItems(images.projected * torch.inf, images.weights, images.aggregates)


BAD = {
    "features": (dict(second=normal(2, 7, 3)), ShapeError, "second: expected what a metric returned of features"),
    "another metric": (dict(second=items(width=4)), ShapeError, "expected items of one metric, .* width 3 and 4"),
    "blur": (dict(blur=0), PullbackError, "blur: expected a number above 0, got 0"),
    "tol": (dict(tol=-1), PullbackError, "tol: expected a number above 0, got -1"),
    "iterations": (dict(iterations=0), PullbackError, "iterations: expected a whole number of at least 1, got 0"),
    "spread": (dict(spread=torch.nan), PullbackError, "spread: expected a length, such as token_spread"),
    "weights": (dict(second=negative(items()), spread=1.0), NumericsError, "second: expected weights that are not neg"),
    "projections": (dict(second=infinite(items()), spread=1.0), NumericsError, "second: expected finite projections"),
}


@pytest.mark.parametrize(("options", "error", "message"), BAD.values(), ids=BAD.keys())
def test_what_cannot_be_transported_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        transport_distances(items(), **({"second": items()} | options))
