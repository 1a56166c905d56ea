"""The Distilled Riemannian Metric against dense matrices, and what holds of its distances and what does not."""

import json

import pytest
import torch
from torch import Tensor

import pullback as pb
from helpers.toys import normal, seeded
from pullback.errors import DamagedModelError, ModelError, PullbackError, RankError, ShapeError
from pullback.learning.distilled_metric import DistilledMetric, MetricItems, pairwise_distances
from pullback.learning.pretrained import Origin

TOKENS, DIM, RANK = 6, 8, 3


def metric_of(seed: int = 0, rank: int = RANK, dim: int = DIM) -> DistilledMetric:
    """A random one in float64 whose weights differ much from token to token, and nothing of which is 0 or 1."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        metric = DistilledMetric(dim, rank, 16, 2).double().requires_grad_(False)
    metric.head.second.weight.mul_(20)
    metric.mean.copy_(normal(dim, seed=seed + 1))
    metric.level.fill_(1.7)
    return metric.rescale(2.3).eval()


@pytest.fixture
def metric() -> DistilledMetric:
    return metric_of()


def images(count: int = 4, seed: int = 0) -> Tensor:
    return normal(count, TOKENS, DIM, seed=seed)


def aggregation(metric: DistilledMetric, features: Tensor) -> Tensor:
    """A(F) [B, k, N D] of `eq:drm_seminorm`, as a matrix on vec(change)."""
    return torch.stack([torch.kron(h[None], metric.factor.weight) for h in metric.importance(features)])


def dense(metric: DistilledMetric, features: Tensor) -> Tensor:
    """g(F) = s^2 A(F)^T A(F), [B, N D, N D]."""
    a = aggregation(metric, features)
    return metric.scale**2 * a.mT @ a


# The formulas


def test_the_seminorm_is_the_quadratic_form_of_the_dense_metric(metric):
    features, change = images(), images(seed=1)
    squared = torch.einsum("bi,bij,bj->b", change.flatten(1), dense(metric, features), change.flatten(1))
    torch.testing.assert_close(metric.seminorm(features, change), squared.sqrt())
    torch.testing.assert_close(metric.squared_norm_at(features, change), squared)


def test_the_distance_is_the_mean_of_the_seminorms_at_both_ends(metric):
    first, second = images(), images(seed=1)
    change = (second - first).flatten(1)[..., None]
    ends = [metric.scale * (aggregation(metric, end) @ change).flatten(1).norm(dim=1) for end in (first, second)]
    torch.testing.assert_close(metric.distance(first, second), (ends[0] + ends[1]) / 2)


def test_all_distances_between_two_sets_are_those_of_their_pairs(metric):
    first, second = images(4), images(3, seed=1)
    found = pairwise_distances(metric(first), metric(second))
    pairs = [[metric.distance(first[i : i + 1], second[j : j + 1])[0] for j in range(3)] for i in range(4)]
    torch.testing.assert_close(found, torch.stack([torch.stack(row) for row in pairs]))


def test_the_metric_at_a_point_is_the_dense_one_in_low_rank_form(metric):
    features, change = images(), images(seed=1)
    found = metric.metric(features)
    torch.testing.assert_close(found.squared_norm(change), metric.squared_norm_at(features, change))
    torch.testing.assert_close(found.importance().square().sum(1), dense(metric, features).diagonal(0, 1, 2).sum(1))
    modes = found.modes.flatten(2)
    torch.testing.assert_close(modes @ modes.mT, torch.eye(RANK).double().expand(4, -1, -1))


def test_features_of_a_probe_may_be_given_as_they_are(metric):
    layout = pb.TokenLayout(0, (2, 3))
    plain = [images(), images(seed=1)]
    carrying = [pb.probes.Features.attach(part.clone(), layout, {1: part}) for part in plain]
    assert type(metric.distance(*carrying)) is Tensor
    torch.testing.assert_close(metric.distance(*carrying), metric.distance(*plain))
    torch.testing.assert_close(metric(carrying[0]).aggregates, metric(plain[0]).aggregates)


# What holds of it


def test_distances_are_symmetric_and_zero_on_the_diagonal(metric):
    features = images(20)
    found = pairwise_distances(metric(features), metric(features))
    torch.testing.assert_close(found, found.T)
    assert found.diagonal().max() < 1e-12 * found.max()
    assert (metric.distance(features, features) == 0).all()
    torch.testing.assert_close(
        metric.distance(features[:10], features[10:]), metric.distance(features[10:], features[:10])
    )


def test_moves_that_the_factor_does_not_see_are_free(metric):
    features = images()
    hidden = torch.linalg.svd(metric.factor.weight).Vh[RANK:]  # orthogonal to W
    moved = features + normal(4, TOKENS, DIM - RANK, seed=2) @ hidden
    change = (moved - features).norm(dim=(1, 2))
    assert (metric.seminorm(features, moved - features) < 1e-12 * change).all()


def seeing_one_channel() -> DistilledMetric:
    """A metric whose factor sees channel 0 alone, while its weights depend on all."""
    metric = metric_of(rank=1)
    metric.factor.weight.zero_()
    metric.factor.weight[0, 0] = 1.0
    return metric


def test_the_two_endpoint_distance_breaks_the_triangle_inequality():
    metric = seeing_one_channel()
    generator = seeded(3)
    points = torch.randn(60, 1, DIM, generator=generator, dtype=torch.float64)
    points[:, :, 1:] *= 3
    far = pairwise_distances(metric(points), metric(points))
    detour = far[:, :, None] + far[None]  # [i, j, k], from i over j to k
    excess = far[:, None] / detour.clamp_min(1e-9)
    excess[torch.eye(60, dtype=torch.bool)[:, None].expand(-1, 60, -1)] = 0  # i = k
    i, j, k = (int(number) for number in torch.unravel_index(excess.argmax(), excess.shape))
    assert far[i, k] > 1.2 * (far[i, j] + far[j, k])
    one, over, other = (points[number : number + 1] for number in (i, j, k))
    assert metric.distance(one, other) > 1.2 * (metric.distance(one, over) + metric.distance(over, other))


def test_the_constant_metric_keeps_the_triangle_inequality(metric):
    features = images(300)
    constant = dense(metric, features).mean(0)  # E[g], and not an embedding, which could not do otherwise
    change = (features[:, None] - features).flatten(2)
    far = torch.einsum("ijp,pq,ijq->ij", change, constant, change).clamp_min(0).sqrt()
    i, j, k = torch.randint(300, (3, 10_000), generator=seeded())
    assert (far[i, k] <= (far[i, j] + far[j, k]) * (1 + 1e-9) + 1e-9 * far.max()).all()
    assert (far[i, k] > 0).any()


# The constant metric


def test_the_constant_metric_is_the_mean_of_the_metrics_and_not_the_metric_of_the_mean_weights(metric):
    features = images(50)
    mean = dense(metric, features).mean(0)
    metric.measure_constant([features[:20], features[20:]])
    factor, level = metric.factor.weight, metric.level
    found = metric.scale**2 * torch.kron(metric.second_moment * level**2, factor.mT @ factor)
    torch.testing.assert_close(found, mean)
    weights = metric.importance(features).mean(0)
    other = metric.scale**2 * torch.kron(torch.outer(weights, weights), factor.mT @ factor)
    assert (other - mean).norm() > 0.05 * mean.norm()


def test_embeddings_are_as_far_apart_as_the_constant_metric_says(metric):
    features = images(50)
    metric.measure_constant([features])
    mean = dense(metric, features).mean(0)
    first, second = images(5, seed=1), images(5, seed=2)
    change = (second - first).flatten(1)
    expected = torch.einsum("bi,ij,bj->b", change, mean, change).sqrt()
    apart = (metric.embed(second, share=1.0) - metric.embed(first, share=1.0)).norm(dim=1)
    torch.testing.assert_close(apart, expected)
    torch.testing.assert_close(metric.embed(metric(first)), metric.embed(first))


def test_short_embeddings_keep_the_share_that_was_wanted(metric):
    metric.measure_constant([images(50)])
    moment = metric.second_moment
    values = torch.linalg.eigvalsh(moment).flip(0)
    for share in (0.5, 0.9, 0.99):
        basis = metric.embedding_basis(share)
        columns = basis.shape[1]
        assert values[:columns].sum() >= share * values.sum() > values[: columns - 1].sum()
        torch.testing.assert_close(basis.square().sum(), values[:columns].sum())
    torch.testing.assert_close(metric.embedding_basis(1.0) @ metric.embedding_basis(1.0).T, moment)
    assert metric.embed(images(2), share=0.5).shape == (2, metric.embedding_basis(0.5).shape[1] * RANK)


# The segment


def test_quadrature_converges_to_the_length_of_the_segment(metric):
    first, second = images(), images(seed=1)
    places = (torch.arange(4000).double() + 0.5) / 4000
    change = second - first
    length = torch.stack([metric.seminorm(first + place * change, change) for place in places]).mean(0)
    errors = [(metric.distance(first, second, nodes=nodes) - length).abs().max() for nodes in (1, 4, 16)]
    assert errors[0] > 10 * errors[1] > 10 * errors[2]
    torch.testing.assert_close(metric.distance(first, second, nodes=32), length, rtol=1e-5, atol=0)


def test_without_nodes_it_is_the_trapezoidal_rule_and_with_one_the_midpoint(metric):
    first, second = images(), images(seed=1)
    change = second - first
    ends = metric.seminorm(first, change), metric.seminorm(second, change)
    torch.testing.assert_close(metric.distance(first, second), (ends[0] + ends[1]) / 2)
    middle = metric.seminorm((first + second) / 2, change)
    torch.testing.assert_close(metric.distance(first, second, nodes=1), middle)
    assert (metric.distance(first, second) / middle - 1).abs().max() > 1e-3


# What a gallery stores


def test_an_image_is_at_distance_zero_from_its_stored_self():
    metric = metric_of().float()
    features = images(6).float()
    items = metric(features)
    stored = items.half()
    assert (stored.projected.dtype, stored.weights.dtype, stored.aggregates.dtype) == (
        torch.float16,
        torch.float16,
        torch.float32,
    )
    again = stored.full()
    found, usual = pairwise_distances(again, again), pairwise_distances(items, items)
    off = ~torch.eye(6, dtype=torch.bool)
    assert found.diagonal().max() < 1e-5 * usual.max()
    torch.testing.assert_close(found[off], usual[off], rtol=1e-2, atol=0)
    assert pairwise_distances(again, items).diagonal().max() < 1e-2 * usual[off].min()


def test_items_are_picked_and_joined_by_image(metric):
    items = metric(images(5))
    parts = MetricItems.join([items[:2], items[torch.tensor([2, 3])], items[[4]]])
    assert len(parts) == 5 and len(items[1:3]) == 2
    for name in ("projected", "weights", "aggregates"):
        assert torch.equal(getattr(parts, name), getattr(items, name))


# Training's first step, and changes of scale


def test_a_metric_starts_at_whitened_components_and_the_level_of_the_targets():
    metric = metric_of().float()
    scale = torch.logspace(0, 2, DIM)
    features, target = 5 + images(200).float() * scale, torch.full((200, TOKENS), 0.04)
    metric.start_from(features, target)
    moved = (features - metric.mean).flatten(0, 1) @ metric.factor.weight.T
    torch.testing.assert_close(moved.T @ moved / len(moved), torch.eye(RANK), rtol=1e-3, atol=1e-3)
    leading = torch.linalg.eigh((features - metric.mean).flatten(0, 1).T.cov()).eigenvectors[:, -RANK:]
    inside = leading @ leading.T @ metric.factor.weight.T
    torch.testing.assert_close(inside, metric.factor.weight.T, rtol=1e-3, atol=1e-4)
    weights = metric.importance(features)
    torch.testing.assert_close(metric.level, weights.mean())
    assert 0.2 < weights.log().mean().exp() / 0.04 < 5
    torch.testing.assert_close(metric(features).weights.mean(), torch.tensor(1.0))


def test_a_channel_that_does_not_vary_is_not_magnified():
    metric = metric_of(rank=DIM).float()
    features = images(50).float()
    features[..., 3] = 7.0
    metric.start_from(features)
    assert metric.factor.weight.isfinite().all()
    assert metric.factor.weight.norm() < 1e4


def test_rescaling_multiplies_all_distances(metric):
    first, second = images(), images(seed=1)
    metric.measure_constant([first])
    found, embedded = metric.distance(first, second), metric.embed(first)
    metric.rescale(0.25)
    torch.testing.assert_close(metric.distance(first, second), found / 4)
    torch.testing.assert_close(metric.embed(first), embedded / 4)


def test_the_units_of_weights_and_projections_change_no_distance(metric):
    first, second = images(), images(seed=1)
    found = metric.distance(first, second), metric(first).weights
    metric.level.mul_(10)
    metric.mean.add_(3)
    torch.testing.assert_close(metric.distance(first, second), found[0])
    torch.testing.assert_close(pairwise_distances(metric(first), metric(second)).diagonal(), found[0])
    torch.testing.assert_close(metric(first).weights, found[1] / 10)


# As a folder


def test_a_metric_comes_back_from_its_folder(tmp_path):
    metric = metric_of().float()
    metric.measure_constant([images(10).float()])
    origin = Origin("dinov2", "0123abcd", 8, "saliency", None, ((224, 224),))
    metric.describe(origin=origin, scores={"rho": 0.75, "mae": 1 / 3}, model="dinov2-small", reference="relative_l1")
    metric.save_pretrained(tmp_path)
    again = pb.DistilledMetric.from_pretrained(tmp_path)
    assert again.config == metric.config and again.layer == 8
    first, second = images().float(), images(seed=1).float()
    assert torch.equal(again.distance(first, second), metric.distance(first, second))
    assert torch.equal(again.embed(first), metric.embed(first))
    document = json.loads((tmp_path / "config.json").read_text())
    assert document["kind"] == "distilled-metric" and document["scores"]["rho"] == 0.75
    assert "Distilled Riemannian Metric" in (tmp_path / "README.md").read_text()
    again.check("metric", family="dinov2", layer=8, weights="0123abcd")
    with pytest.raises(ModelError, match="metric: it was trained for layer 8, and is used with layer 4"):
        again.check("metric", family="dinov2", layer=4)


def test_a_metric_that_was_not_measured_comes_back_too_and_a_damaged_one_does_not(tmp_path):
    metric = metric_of().float()
    metric.save_pretrained(tmp_path)
    assert pb.DistilledMetric.from_pretrained(tmp_path).config == metric.config
    document = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(document | {"rank": 5}))
    with pytest.raises(DamagedModelError, match=r"name: the weights in .* do not fit its config.json"):
        pb.DistilledMetric.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(document | {"rank": 99}))
    with pytest.raises(DamagedModelError, match=r"not one of distilled-metric: rank: expected at most .* 8, got 99"):
        pb.DistilledMetric.from_pretrained(tmp_path)


# What is refused


def measured() -> DistilledMetric:
    return metric_of().measure_constant([images(5)])


BAD = {
    "more rank than width": (lambda: DistilledMetric(8, 9), RankError, "rank: expected at most the width .* 8, got 9"),
    "no rank": (lambda: DistilledMetric(8, 0), RankError, "rank: expected a whole number of at least 1, got 0"),
    "another width": (
        lambda: metric_of()(normal(2, TOKENS, 5)),
        ShapeError,
        r"features: expected \[B, N, 8\], got \[2, 6, 5\]",
    ),
    "a change of another shape": (
        lambda: metric_of().seminorm(images(2), images(3)),
        ShapeError,
        r"features, change: expected one shape \[B, N, 8\], got \[2, 6, 8\] and \[3, 6, 8\]",
    ),
    "images of other sizes": (
        lambda: metric_of().distance(images(2), normal(2, 5, DIM)),
        ShapeError,
        r"first, second: expected features of one shape \[B, N, 8\], got \[2, 6, 8\] and \[2, 5, 8\]",
    ),
    "one image against several": (
        lambda: metric_of().distance(images(1), images(3)),
        ShapeError,
        r"first, second: expected features of one shape .* got \[1, 6, 8\] and \[3, 6, 8\]",
    ),
    "sets of other sizes": (
        lambda: pairwise_distances(metric_of()(images(2)), metric_of()(normal(2, 5, DIM))),
        ShapeError,
        r"first, second: expected images with the same number of tokens and the same k, got \[6, 3\] and \[5, 3\]",
    ),
    "no nodes": (
        lambda: metric_of().distance(images(), images(), nodes=0),
        PullbackError,
        "nodes: expected at least 1 node, or None for the two-endpoint rule, got 0",
    ),
    "not measured": (lambda: metric_of().embed(images()), ModelError, "metric: its constant metric was not measured"),
    "measured on nothing": (
        lambda: metric_of().measure_constant([]),
        PullbackError,
        "batches: expected features of at least one image, got none",
    ),
    "measured on several sizes": (
        lambda: metric_of().measure_constant([images(2), normal(2, 5, DIM)]),
        ShapeError,
        "batches: expected images of one size, got 6 and 5 tokens",
    ),
    "other tokens": (
        lambda: measured().embed(normal(2, 5, DIM)),
        ShapeError,
        "images: expected 6 tokens, as many as the constant metric was measured with, got 5",
    ),
    "too large a share": (
        lambda: measured().embed(images(), share=1.1),
        PullbackError,
        r"share: expected a share of the trace between 0 and 1, got 1.1",
    ),
    "nan to half": (
        lambda: metric_of()(images() * torch.nan).half(),
        PullbackError,
        "features: some projections or weights do not fit into float16",
    ),
    "too large for half": (
        lambda: metric_of()(1e8 * images()).half(),
        PullbackError,
        "features: some projections or weights do not fit into float16",
    ),
    "scale zero": (lambda: metric_of().rescale(0), PullbackError, "ratio: expected a positive number, got 0"),
    "scale nan": (lambda: metric_of().rescale(torch.nan), PullbackError, "ratio: expected a positive number, got nan"),
}


@pytest.mark.parametrize(("call", "error", "message"), BAD.values(), ids=BAD.keys())
def test_what_makes_no_sense_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
