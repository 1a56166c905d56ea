"""Shortest paths: where they are known, under maps, learned metrics and probes, and what every one of them obeys."""

import math

import pytest
import torch
from torch import Tensor

import pullback as pb
from helpers.toys import metric_of
from helpers.truth import load_seeded, normal, random_images
from pullback.errors import DecoderError, NumericsError, PullbackError, ShapeError
from pullback.geometry.lbfgs import minimise
from pullback.learning.distilled_metric import DistilledMetric
from pullback.scenes.splits import QUERIES


def sphere(x: Tensor) -> Tensor:
    theta, phi = x.unbind(1)
    return torch.stack([theta.sin() * phi.cos(), theta.sin() * phi.sin(), theta.cos()], 1)


def paraboloid(x: Tensor) -> Tensor:
    return torch.cat([x, x.square().sum(1, keepdim=True) / 2], 1)


def points(*rows: tuple[float, ...]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def bent(seed: int = 0, tokens: int = 3, width: int = 4, outputs: int = 7):
    """A smooth map of features [B, tokens, width] that is far from linear."""
    inner, outer = normal(tokens * width, 9, seed=seed), normal(9, outputs, seed=seed + 1)
    return lambda x: (x.flatten(1) @ inner / 3).tanh() @ outer


# Where the truth is known


def test_on_a_sphere_it_is_the_great_circle():
    first, second = points((0.6, 0.0), (1.0, 0.3), (1.5, -1.0)), points((0.7, 2.4), (2.0, 2.0), (1.5, 1.0))
    angle = (sphere(first) * sphere(second)).sum(1).acos()
    found = pb.geodesic(sphere, first, second, segments=32, rtol=1e-7, steps=400)
    assert found.converged.all()
    torch.testing.assert_close(found.chord_length, angle, rtol=1e-3, atol=0)
    torch.testing.assert_close(found.length, angle, rtol=5e-3, atol=0)
    torch.testing.assert_close(found.energy, angle.square(), rtol=2e-3, atol=0)
    torch.testing.assert_close(found.output_distance, 2 * (angle / 2).sin())
    assert (found.straight_length[:2] > 1.004 * angle[:2]).all(), "lines of the chart are no great circles"
    normals = torch.linalg.cross(sphere(first), sphere(second))
    off = torch.einsum("bkc,bc->bk", found.outputs, torch.nn.functional.normalize(normals, dim=1))
    assert off.abs().max() < 5e-3, "the path lies in the plane of the great circle"


def test_along_the_axis_of_a_paraboloid_it_is_the_straight_segment_of_the_chart():
    def primitive(r: float) -> float:  # of sqrt(1 + r^2)
        return (r * math.sqrt(1 + r * r) + math.asinh(r)) / 2

    found = pb.geodesic(paraboloid, points((-1.0, 0.0)), points((2.0, 0.0)), segments=32, rtol=1e-8, steps=400)
    assert found.length.item() == pytest.approx(primitive(1.0) + primitive(2.0), rel=1e-5)
    assert found.path[..., 1].abs().max() < 1e-6
    assert found.straight_length.item() == pytest.approx(found.length.item(), rel=1e-5)
    assert found.energy.item() < found.straight_energy.item(), "at constant speed it takes less energy"


def test_around_a_paraboloid_it_is_what_clairaut_says():
    """r^2 dphi/ds = c along a geodesic: with r^2 = c^2 + u^2 its angle and its length are smooth integrals of u."""
    radius, half = 2.0, 1.3

    def integrals(c: float) -> tuple[float, float]:
        u = torch.linspace(0, math.sqrt(radius**2 - c**2), 20_001, dtype=torch.float64)
        slope = (1 + c**2 + u.square()).sqrt()
        angle, length = c * slope / (c**2 + u.square()), slope
        return torch.trapezoid(angle, u).item(), 2 * torch.trapezoid(length, u).item()

    low, high = 1e-3, radius - 1e-9  # the angle falls from pi / 2 to 0 as c grows
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if integrals(middle)[0] > half else (low, middle)
    _, expected = integrals(low)
    ends = [points((radius * math.cos(half), sign * radius * math.sin(half))) for sign in (-1, 1)]
    found = pb.geodesic(paraboloid, *ends, segments=48, rtol=1e-9, steps=800)
    assert found.length.item() == pytest.approx(expected, rel=1e-3)
    assert found.straight_length.item() > 1.02 * expected
    closest = found.path.norm(dim=-1).min().item()
    assert closest == pytest.approx(low, rel=2e-2), "c is the least distance from the axis"


def test_under_a_linear_map_the_straight_segment_is_the_geodesic():
    matrix = normal(7, 12)
    first, second = normal(2, 3, 3, 4, seed=1)
    for floor in (0.0, 0.1):
        found = pb.geodesic(lambda x: x.flatten(1) @ matrix.T, first, second, floor=floor)
        assert found.converged.all() and not found.iterations.any()
        torch.testing.assert_close(found.ratio, torch.ones(3).double())
        for length in (found.length, found.chord_length, found.straight_length):
            torch.testing.assert_close(length, found.output_distance)
        torch.testing.assert_close(found.path[:, 4], (first + second) / 2)


def test_moves_in_the_kernel_are_free_unless_there_is_a_floor():
    """psi = (x, 4 y (1 - x^2)) from x = -1 to 1: y moves freely at the ends alone, and between them y = 0 is short."""

    def map_(x: Tensor) -> Tensor:
        return torch.stack([x[:, 0], 4 * x[:, 1] * (1 - x[:, 0].square())], 1)

    ends = points((-1.0, 1.0)), points((1.0, 1.0))
    free, dear = (pb.geodesic(map_, *ends, floor=floor, segments=16, steps=800, rtol=1e-6) for floor in (0.0, 3.0))
    assert free.output_distance.item() == pytest.approx(2)
    assert free.chord_length.item() < 1.1 * 2 < free.straight_length.item()
    assert free.path[0, 4:13, 1].abs().max() < 0.2 < dear.path[0, 8, 1].item(), "with the floor it stays nearer"
    assert dear.length.item() > free.length.item() and dear.trace is not None and free.trace is None
    extra = dear.energy - dear.found.task_energy
    moved = 16 * dear.path.diff(dim=1).square().sum((1, 2))
    torch.testing.assert_close(extra, dear.eps * moved)


def test_the_trace_behind_the_floor_is_that_of_the_jacobian():
    matrix = normal(7, 12)
    first, second = normal(2, 3, 3, 4, seed=1)
    found = pb.geodesic(lambda x: x.flatten(1) @ matrix.T, first, second, floor=0.5, num_probes=400, steps=0)
    expected = matrix.square().sum()
    assert ((found.trace.value - expected).abs() < 5 * found.trace.se).all()
    torch.testing.assert_close(found.eps, 0.5 * found.trace.value / 12)
    assert (found.trace.se < 0.1 * expected).all()


# What every path obeys


@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_lengths_and_energies_are_in_the_order_that_they_must_be(floor):
    first, second = normal(2, 5, 3, 4, seed=2)
    found = pb.geodesic(bent(), first, second, floor=floor, rtol=1e-5)
    assert found.converged.all() and (found.ratio > 1.02).all(), "or the map is too straight for this test"
    assert (found.energy <= found.straight_energy).all()
    assert (found.output_distance <= found.chord_length * (1 + 1e-12)).all()
    assert (found.chord_length <= found.length * (1 + 1e-3)).all()
    assert (found.chord_length.square() <= found.found.task_energy * (1 + 1e-12)).all(), "Cauchy and Schwarz"
    assert (found.length.square() <= found.found.curve_energy * (1 + 1e-12)).all()
    fine = torch.stack([bent()(torch.lerp(first, second, t)) for t in torch.linspace(0, 1, 2001).tolist()], 1)
    torch.testing.assert_close(found.straight_length, fine.diff(dim=1).norm(dim=2).sum(1), rtol=1e-4, atol=0)
    torch.testing.assert_close(found.outputs[:, 0], bent()(first))
    torch.testing.assert_close(found.outputs[:, 3], bent()(found.path[:, 3]))


def test_more_steps_never_raise_the_energy():
    first, second = normal(2, 4, 3, 4, seed=3)
    energies = [pb.geodesic(bent(1), first, second, steps=steps, rtol=1e-9).energy for steps in (0, 1, 2, 5, 20, 60)]
    assert (torch.stack(energies).diff(dim=0) <= 0).all()
    assert (energies[-1] < 0.95 * energies[0]).all()


def test_a_pair_in_a_batch_is_solved_as_it_is_alone():
    first, second = normal(2, 5, 3, 4, seed=4)
    options = {"floor": 0.01, "rtol": 1e-6}
    together = pb.geodesic(bent(), first, second, batch_size=5, **options)
    parts = pb.geodesic(bent(), first, second, batch_size=2, **options)
    for row in range(5):
        alone = pb.geodesic(bent(), first[row : row + 1], second[row : row + 1], **options)
        for found in (together, parts):
            torch.testing.assert_close(found.energy[row], alone.energy[0], rtol=1e-6, atol=0)
            torch.testing.assert_close(found.eps[row], alone.eps[0])
    assert parts.products.jvp == together.products.jvp and len(parts) == 5


def test_there_and_back_are_equally_far():
    first, second = normal(2, 3, 3, 4, seed=5)
    there, back = (pb.geodesic(bent(), *ends, floor=0.1, rtol=1e-8) for ends in ((first, second), (second, first)))
    torch.testing.assert_close(there.energy, back.energy, rtol=1e-5, atol=0)
    torch.testing.assert_close(there.straight_length, back.straight_length)


def test_the_same_seed_gives_the_same_numbers_and_another_other_traces():
    first, second = normal(2, 2, 3, 4, seed=6)
    one, two, other = (pb.geodesic(bent(), first, second, floor=0.1, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(one.energy, two.energy) and torch.equal(one.path, two.path)
    assert not torch.equal(one.trace.value, other.trace.value)


def test_an_image_is_at_no_distance_from_itself():
    first = normal(2, 3, 4)
    found = pb.geodesic(bent(), first, first)
    assert found.converged.all() and (found.energy < 1e-24).all() and (found.length < 1e-12).all()
    assert (found.ratio == 1).all()


def test_products_are_counted():
    first, second = normal(2, 2, 3, 4, seed=7)
    found = pb.geodesic(bent(), first, second, segments=4, steps=3, rtol=1e-12, floor=0.1, num_probes=5, batch_size=2)
    gradients = 2 * 4 * 3  # pairs, at the start and 3 steps, inner nodes
    assert found.products.vjp == gradients
    assert found.products.jvp == 2 * 2 * 5 + 2 * 2 * 4 * 3, "both traces, and two paths at three nodes a segment"
    assert found.forwards == 2 * 2 + gradients + 3 * 2 * 3, "ends, steps, and two paths with their outputs"


def test_the_minimiser_finds_the_minimum_of_each_problem_at_its_own_pace():
    """Quadratics of very different conditioning, in one batch."""
    spread = torch.tensor([1.0, 10.0, 300.0], dtype=torch.float64)
    weights = torch.stack([torch.logspace(0, math.log10(s), 20, dtype=torch.float64) for s in spread.tolist()])
    target = normal(3, 20)
    calls: list[list[int]] = []

    def evaluate(z: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(rows.tolist())
        off = z - target[rows]
        return (weights[rows] * off.square()).sum(1) + 1, 2 * weights[rows] * off

    one, zero = torch.ones(3).double(), torch.zeros(3).double()
    found = minimise(evaluate, torch.zeros(3, 20).double(), radius=one, least=zero, rtol=1e-8, steps=300, history=8)
    assert found.converged.all()
    torch.testing.assert_close(found.value, one, rtol=1e-6, atol=0)
    assert found.iterations[0] < found.iterations[2] and calls[-1] == [2], "those that are done are left alone"


# Learned and constant metrics


@pytest.fixture
def learned() -> DistilledMetric:
    torch.manual_seed(0)
    metric = DistilledMetric(4, rank=3, width=16, heads=2).double()
    with torch.no_grad():
        for parameter in metric.head.parameters():
            parameter += 0.5 * torch.randn_like(parameter)
    return metric


def test_under_a_learned_metric_it_is_shorter_than_the_straight_segment(learned):
    first, second = normal(2, 3, 5, 4, seed=8)
    found = pb.geodesic(learned, first, second, rtol=1e-4, segments=12, floor=1.0)
    assert found.converged.all() and (found.ratio > 1.01).all()
    torch.testing.assert_close(found.straight_length, learned.distance(first, second, nodes=40), rtol=1e-3, atol=0)
    assert (found.length < found.straight_length).all()
    assert found.outputs is None and found.output_distance is None
    assert not any(parameter.grad is not None for parameter in learned.parameters())
    traces = torch.stack([learned.metric(end).energies.sum(1) for end in (first, second)]).mean(0)
    torch.testing.assert_close(found.eps, traces / 20, check_dtype=False)


def test_the_free_moves_of_a_learned_metric_lead_everywhere(learned):
    """Its kernel turns from point to point, unlike that of a pullback: without a floor the infimum is 0."""
    first, second = normal(2, 3, 5, 4, seed=8)
    found = pb.geodesic(learned, first, second, segments=12)
    assert (found.energy < 1e-3 * found.straight_energy).all()
    assert (found.found.curve_energy < 0.1 * found.straight_energy).all()


def test_the_trace_of_a_metric_that_says_only_its_squares_is_estimated(learned):
    class Squares:
        squared_norm_at = staticmethod(learned.squared_norm_at)

    first, second = normal(2, 3, 5, 4, seed=8)
    exact = pb.geodesic(learned, first, second, floor=0.1, steps=0)
    found = pb.geodesic(Squares(), first, second, floor=0.1, steps=0, num_probes=300)
    assert ((found.trace.value - exact.trace.value).abs() < 5 * found.trace.se).all()
    assert (found.trace.se < 0.2 * exact.trace.value).all()


def test_under_a_constant_metric_the_straight_segment_is_the_geodesic():
    metric = metric_of(3, floor=0.2)
    first, second = normal(2, 3, *metric.modes.shape[2:], seed=9)
    found = pb.geodesic(metric, first, second, batch_size=2, floor=0.1)
    assert found.converged.all() and not found.iterations.any()
    torch.testing.assert_close(found.length, metric.distance(first, second))
    torch.testing.assert_close(found.trace.value, metric.energies.sum(1) + 0.2 * first[0].numel())


# Probes


@pytest.fixture(scope="module")
def scenes() -> Tensor:
    return pb.normalised(pb.render(range(QUERIES, QUERIES + 4), size=112).rgb[:, 0])


@pytest.mark.parametrize("decoder", ["cls", "depth-8x8"])
def test_between_two_rooms(scenes, decoder):
    """Depth reads layers below the probe, too, which go from one image to the other."""
    probe = pb.load_probe("tiny-scenes", decoder, 10, device="cpu")
    features = probe.features(scenes, normalized=True)
    found = pb.geodesic(probe, features[:2], features[2:], segments=4, steps=12)
    outputs = probe(features)
    torch.testing.assert_close(found.outputs[:, 0], outputs[:2], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.outputs[:, -1], outputs[2:], rtol=1e-4, atol=1e-4)
    apart = (outputs[2:] - outputs[:2]).flatten(1).norm(dim=1).double()
    torch.testing.assert_close(found.output_distance, apart, rtol=1e-4, atol=0)
    assert (found.ratio > 1.01).all() and (found.iterations > 3).all()
    assert (found.output_distance <= found.chord_length * (1 + 1e-5)).all()
    assert (found.chord_length <= 1.05 * found.length).all()
    assert repr(found).startswith("Geodesic(2 pairs, 4 segments, floor 0, ") and len(repr(found)) <= 200


def test_what_is_held_moves_with_the_path_and_counts_in_its_length():
    """Against outputs on a fine grid: without what layers below contribute, the length would be too short."""
    probe = load_seeded("cls", 0)
    two = pb.ProbeMap(probe.backbone, pb.Decoder("both", (0, 2), lambda taps, layout: taps[0][:, 1] + taps[1][:, 0]), 1)
    features = two.features(random_images(4))
    assert 0 in features.below
    found = pb.geodesic(two, features[:2], features[2:], segments=4, steps=0)
    grid = [two(pb.probes.between(features[:2], features[2:], k / 400)) for k in range(401)]
    expected = torch.stack(grid, 1).diff(dim=1).norm(dim=2).sum(1)
    torch.testing.assert_close(found.straight_length, expected, rtol=1e-3, atol=0)


# Bad input


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"second": normal(2, 3, 5)}, r"first, second: expected pairs of one shape, .* got \[2, 3, 4\] .* \[2, 3, 5\]"),
        ({"second": normal(2, 3, 4).float()}, r"first, second: expected pairs of one shape, dtype .* torch\.float32"),
        ({"second": None}, r"second: expected features \[B, N, D\], .* got None"),
        ({"first": normal(2, 3, 4).long()}, r"first: expected floating-point features .* got torch\.int64"),
        ({"first": normal(0, 3, 4)}, r"first: expected .* of at least one image"),
        ({"first": torch.full((2, 3, 4), math.nan).double()}, r"first: expected finite numbers, got NaN"),
        ({"segments": 1}, r"segments: expected at least 2 segments, got 1"),
        ({"floor": -0.1}, r"floor: expected a number >= 0, .* got -0\.1"),
        ({"steps": -1}, r"steps: expected a number of steps, .* got -1"),
        ({"rtol": 0.0}, r"rtol: expected a number between 1e-12 and 1, got 0\.0"),
        ({"num_probes": 1}, r"num_probes: expected at least 2"),
        ({"precision": "bf16"}, r"precision: expected 'float32' or 'tf32', got 'bf16'"),
        ({"batch_size": 0}, r"batch_size: expected at least 1"),
        ({"seed": "x"}, r"seed: expected a whole number, got 'x'"),
        ({"metric_or_probe": 3}, r"metric_or_probe: expected a probe map, a function .* got 3"),
        ({"metric_or_probe": metric_of(3)}, r"metric_or_probe: expected a metric for each of 2 pairs .* LowRankMetric"),
        ({"metric_or_probe": lambda x: x.detach().flatten(1)}, r"metric_or_probe: expected a differentiable function"),
        ({"metric_or_probe": lambda x: x.flatten(1) / 0}, r"decoder: its output holds NaN or infinity"),
        ({"metric_or_probe": lambda x: x.flatten(1) - x.mean()}, r"decoder: what it gives for a sample must not"),
        ({"metric_or_probe": lambda x: x.sum()}, r"decoder: expected an output with the batch axis first"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_with_what_was_expected(change, message):
    given = {"metric_or_probe": bent(), "first": normal(2, 3, 4), "second": normal(2, 3, 4, seed=1), "floor": 0.1}
    with pytest.raises(PullbackError, match=message) as caught:
        pb.geodesic(**given | change)
    assert isinstance(caught.value, (ShapeError, NumericsError, DecoderError, PullbackError))


def test_a_metric_that_returns_no_squares_and_one_of_outputs_are_refused():
    class Wrong:
        def squared_norm_at(self, features: Tensor, change: Tensor) -> Tensor:
            return change

    first, second = normal(2, 2, 3, 4)
    with pytest.raises(PullbackError, match=r"metric_or_probe: expected squared_norm_at to return \[\d+\], one number"):
        pb.geodesic(Wrong(), first, second)
    weighted = load_seeded("cls", 1, output_metric=lambda y: torch.eye(y.shape[1], dtype=y.dtype))
    features = weighted.features(random_images(2))
    with pytest.raises(PullbackError, match=r"metric_or_probe: expected a probe without an output metric"):
        pb.geodesic(weighted, features[:1], features[1:])
