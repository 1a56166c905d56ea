"""Distances of features against loops, and energies of straight lines against integrals that are known."""

import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

import pullback as pb
from helpers.families import images_for, model_of
from helpers.toys import bent_probe, jacobians, linear_probe, normal
from pullback.errors import NumericsError, PullbackError, ShapeError
from pullback.retrieval.baselines import KINDS, feature_distances, line_energy
from pullback.tokens import TokenLayout, between

LAYOUT = TokenLayout(2, (2, 2))  # a class token, a register and four patches


def by_loop(first: torch.Tensor, second: torch.Tensor, kind: str) -> torch.Tensor:
    def one(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if kind == "l2":
            return (a - b).norm()
        x, y = (a[0], b[0]) if kind == "cls-cosine" else (a[2:].mean(0), b[2:].mean(0))
        return 1 - F.cosine_similarity(x, y, dim=0)

    return torch.stack([torch.stack([one(a, b) for b in second]) for a in first])


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_those_of_a_loop_over_pairs(kind):
    first, second = normal(5, 6, 8), normal(3, 6, 8, seed=1)
    found = feature_distances(first, second, kind, layout=LAYOUT)
    torch.testing.assert_close(found, by_loop(first, second, kind))
    torch.testing.assert_close(feature_distances(second, first, kind, layout=LAYOUT), found.T)


@pytest.mark.parametrize("kind", KINDS)
def test_near_images_keep_their_digits_and_an_image_is_at_distance_zero_from_itself(kind):
    # mean 100, differences of 1e-4: in float32 a matrix product would see nothing of them
    images = (100 + normal(1, 6, 8) + 1e-4 * normal(4, 6, 8, seed=1)).float()
    found = feature_distances(images, images, kind, layout=LAYOUT)
    assert found.dtype == torch.float32 and found.diagonal().abs().max() == 0
    expected = by_loop(images.double(), images.double(), kind).float()
    off = ~torch.eye(4, dtype=torch.bool)
    torch.testing.assert_close(found[off], expected[off], rtol=1e-3, atol=1e-14)


def test_near_images_among_far_ones_keep_their_digits():
    far = 1e3 * normal(4, 6, 8)
    near = far + 1e-6 * normal(4, 6, 8, seed=1)  # 1e-18 of the squares, which are exact to 1e-16
    found = feature_distances(far, torch.cat([near, far]))
    torch.testing.assert_close(found, by_loop(far, torch.cat([near, far]), "l2"))
    assert found[:, 4:].diagonal().max() == 0


def test_features_may_be_wider_than_one_block_and_stored_in_half_precision():
    first, second = normal(3, 100, 50).half(), normal(2, 100, 50, seed=1).half()
    found = feature_distances(first, second)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, by_loop(first.double(), second.double(), "l2").float())


def test_features_of_a_probe_are_compared_as_plain_numbers():
    probe = pb.load_probe(model_of("depth-v2"), "depth", 2)
    features = probe.features(images_for("depth-v2", (2, 3), batch=3))
    found = feature_distances(features, features, "cls-cosine", layout=probe.token_layout(features))
    assert type(found) is torch.Tensor
    plain = features.as_subclass(torch.Tensor)
    torch.testing.assert_close(found, by_loop(plain, plain, "cls-cosine"))


REFUSED = {
    "kind": (dict(kind="cosine"), PullbackError, "kind: expected one of l2, cls-cosine, mean-cosine, got 'cosine'"),
    "no layout": (
        dict(kind="mean-cosine"),
        ShapeError,
        r"layout: expected probe.token_layout\(features\), which 'mean-cosine' needs, got None",
    ),
    "other layout": (
        dict(kind="mean-cosine", layout=TokenLayout(1, (2, 2))),
        ShapeError,
        "layout: expected one of 6 tokens, got 5",
    ),
    "no class token": (
        dict(kind="cls-cosine", layout=TokenLayout(0, (2, 3))),
        PullbackError,
        "kind: these features have no class token, which 'cls-cosine' compares. Use 'mean-cosine'",
    ),
    "views": (
        dict(kind="cls-cosine", layout=TokenLayout(1, (2, 1), views=2)),
        PullbackError,
        "kind: these features have no class token",
    ),
}


@pytest.mark.parametrize(("options", "error", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_has_no_such_distance_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        feature_distances(normal(2, 6, 8), normal(2, 6, 8), **options)


def test_other_sizes_and_tokens_without_direction_are_refused():
    with pytest.raises(ShapeError, match=r"first, second: expected features .* got \[2, 6, 8\] and \[2, 5, 8\]"):
        feature_distances(normal(2, 6, 8), normal(2, 5, 8))
    with pytest.raises(NumericsError, match="second: some of its vectors are 0, which have no direction"):
        feature_distances(normal(2, 6, 8), torch.zeros(2, 6, 8).double(), "cls-cosine", layout=LAYOUT)


# Energies


@pytest.mark.parametrize("rule", ["jacobian", "chord"])
@pytest.mark.parametrize("points", [1, 2, 8])
def test_a_linear_map_has_the_same_energy_at_any_number_of_points(rule, points):
    matrix, (first, second) = normal(5, 48), normal(2, 3, 6, 8, seed=1)
    found = line_energy(linear_probe(matrix), first, second, points=points, rule=rule)
    moved = (second - first).flatten(1) @ matrix.T
    torch.testing.assert_close(found.energies, moved.square().sum(1))
    torch.testing.assert_close(found.lengths, moved.norm(dim=1))
    torch.testing.assert_close(found.distances, found.lengths)


def test_a_quadratic_map_has_the_known_energy_from_two_nodes_on():
    def square(features: torch.Tensor) -> torch.Tensor:
        return features.flatten(1).square()

    first, second = normal(2, 4, 6, 8)
    a, delta = first.flatten(1), (second - first).flatten(1)
    # d/dt (a + t delta)^2 = 2 (a + t delta) delta, squared and integrated over t
    known = (4 * delta.square() * (a.square() + a * delta + delta.square() / 3)).sum(1)
    for points in (2, 5):
        torch.testing.assert_close(line_energy(square, first, second, points=points).energies, known)
    assert not torch.allclose(line_energy(square, first, second, points=1).energies, known, rtol=1e-3)
    errors = [(line_energy(square, first, second, points=p, rule="chord").energies - known).abs() for p in (2, 4, 8)]
    for coarse, fine in pairwise(errors):  # chords are of second order in the step
        torch.testing.assert_close(fine, coarse / 4)


def test_at_its_nodes_it_is_the_pullback_norm_of_the_dense_jacobian():
    probe, (first, second) = bent_probe(), normal(2, 2, 6, 8, seed=3)
    change = second - first
    total = torch.zeros(2, dtype=torch.float64)
    for node in (0.5 - 0.5 / math.sqrt(3), 0.5 + 0.5 / math.sqrt(3)):
        dense = jacobians(probe, between(first, second, node))
        total += torch.einsum("bmc,bc->bm", dense.flatten(2), change.flatten(1)).square().sum(1) / 2
    torch.testing.assert_close(line_energy(probe, first, second, points=2).energies, total)


@pytest.mark.parametrize(("decoder", "tolerance"), [("cls", 0.02), ("depth", 0.1)])
def test_rules_agree_on_a_real_network_at_many_points(decoder, tolerance):
    probe = pb.load_probe("tiny-scenes", decoder, 8, device="cpu")
    features = probe.features(pb.normalised(pb.render([0, 1], size=112).rgb[:, 0]))
    first, second = features[:1], features[1:]
    smooth = line_energy(probe, first, second, points=32)
    chords = [line_energy(probe, first, second, points=steps, rule="chord") for steps in (1, 4, 32)]
    torch.testing.assert_close(smooth.lengths, chords[-1].lengths, rtol=tolerance, atol=0)
    with torch.no_grad():
        apart = (probe(second) - probe(first)).flatten(1).norm(dim=1)
    torch.testing.assert_close(chords[0].lengths, apart)
    # more chords are longer, none is longer than the line, and no length squared exceeds its energy
    assert apart < chords[1].lengths < chords[2].lengths < smooth.lengths < smooth.distances
    assert (smooth.outputs, smooth.products) == (32, pb.ProductCount(jvp=32))
    assert (chords[2].outputs, chords[2].products) == (33, pb.ProductCount())


@pytest.fixture(scope="module")
def depth() -> tuple[pb.ProbeMap, torch.Tensor, torch.Tensor]:
    """A small probe whose decoder also reads layers below it, with features of two images each."""
    probe = pb.load_probe(model_of("depth-v2"), "depth", 2)
    return probe, *(probe.features(images_for("depth-v2", (2, 3), batch=2, seed=seed)) for seed in (0, 1))


def test_layers_held_move_along_the_line(depth):
    probe, first, second = depth
    found = line_energy(probe, first, second, points=1)
    step = 1e-6
    with torch.no_grad():
        ahead, behind = (probe(between(first, second, 0.5 + sign * step)) for sign in (1, -1))
    slope = ((ahead - behind) / (2 * step)).flatten(1)
    torch.testing.assert_close(found.energies, slope.square().sum(1), rtol=1e-6, atol=0)
    # the derivative by F^l alone misses a part
    operator = pb.JacobianOperator(probe, between(first, second, 0.5))
    alone = operator.matmat((second - first).as_subclass(torch.Tensor).flatten(1)[..., None])[..., 0]
    assert (alone.square().sum(1) / found.energies - 1).abs().min() > 0.01


def test_without_layers_held_it_is_a_product_with_the_jacobian(depth):
    probe = pb.load_probe(model_of("depth-v2"), "cls", 1)
    first, second = (probe.features(images_for("depth-v2", (2, 3), batch=2, seed=seed)) for seed in (0, 1))
    operator = pb.JacobianOperator(probe, between(first, second, 0.5))
    moved = operator.matmat((second - first).as_subclass(torch.Tensor).flatten(1)[..., None])[..., 0]
    torch.testing.assert_close(line_energy(probe, first, second, points=1).energies, moved.square().sum(1))


def test_an_output_metric_weighs_the_derivative():
    network = model_of("depth-v2")
    factor = normal(24, 2)
    plain, weighed = (pb.load_probe(network, "cls", 1, output_metric=metric) for metric in (None, factor))
    first, second = (plain.features(images_for("depth-v2", (2, 3), batch=2, seed=seed)) for seed in (0, 1))
    operator = pb.JacobianOperator(plain, between(first, second, 0.5))
    moved = operator.matmat((second - first).as_subclass(torch.Tensor).flatten(1)[..., None])[..., 0] @ factor
    torch.testing.assert_close(line_energy(weighed, first, second, points=1).energies, moved.square().sum(1))
    with pytest.raises(PullbackError, match="rule: 'chord' compares outputs and has no output metric"):
        line_energy(weighed, first, second, rule="chord")


@pytest.mark.parametrize("rule", ["jacobian", "chord"])
def test_chunks_change_nothing(rule):
    probe, (first, second) = bent_probe(), normal(2, 5, 6, 8)
    whole = line_energy(probe, first, second, points=3, rule=rule)
    for chunk_size in (1, 4):
        parts = line_energy(probe, first, second, points=3, rule=rule, chunk_size=chunk_size)
        torch.testing.assert_close(parts.energies, whole.energies)


def test_lines_that_cannot_be_measured_are_refused():
    probe, (first, second) = bent_probe(), normal(2, 2, 6, 8)
    with pytest.raises(PullbackError, match="probe: expected a probe map or a function of features, got 'depth'"):
        line_energy("depth", first, second)
    with pytest.raises(PullbackError, match="points: expected a whole number of at least 1, got 0"):
        line_energy(probe, first, second, points=0)
    with pytest.raises(PullbackError, match="rule: expected one of jacobian, chord, got 'midpoint'"):
        line_energy(probe, first, second, rule="midpoint")
    with pytest.raises(ShapeError, match=r"first, second: expected features .* got \[2, 6, 8\] and \[1, 6, 8\]"):
        line_energy(probe, first, second[:1])
    with pytest.raises(NumericsError, match="probe: its output or derivative along the line holds NaN or infinity"):
        line_energy(lambda x: x.flatten(1).sqrt(), first, second)
