"""What each kind of supervision asks of the network, against the dense Jacobian, and from which it can be learned."""

import math
from dataclasses import replace

import pytest
import torch

import pullback as pb
from helpers.families import DOWNSAMPLED, images_for, model_of
from helpers.toys import (
    DIM,
    RANK,
    TOKENS,
    PlainProbe,
    bent_probe,
    examples_of,
    jacobians,
    leading,
    linear_probe,
    metric_of,
    normal,
    tiny_spn,
    with_singular_values,
)
from pullback.errors import DecoderError, NumericsError, PullbackError
from pullback.learning.fit import FitConfig, fit
from pullback.learning.train_spn import DistanceMatching, RandNLA, RandomDirections, Spectral, SpnTask
from pullback.operators import LowRankMetric
from pullback.randnla import Streams

BATCH = 4
INPUTS = TOKENS * DIM


@pytest.fixture
def features() -> torch.Tensor:
    return normal(BATCH, TOKENS, DIM, seed=11)


def streams(batch: int = BATCH, seed: int = 3) -> Streams:
    return Streams.from_seed(seed, batch)


def spectral_loss(metric: LowRankMetric, modes: list, values: list, weight: float) -> torch.Tensor:
    """Algorithm 2, lines 8 to 10, one image at a time, with matrices [N D, r]; modes whose length is within 5 % of a
    neighbour's are left out of the energies."""
    losses = []
    for i, (v, s) in enumerate(zip(modes, values, strict=True)):
        u = metric.modes[i].flatten(1).T
        subspace = 1 - torch.linalg.matrix_norm(u.T @ v) ** 2 / v.shape[1]
        steps = [math.inf, *(s[:-1] / s[1:]).tolist(), math.inf]
        apart = [j for j in range(len(s)) if min(steps[j : j + 2]) >= 1.05]
        errors = [(metric.energies[i, j].log() - s[j].square().log()).square() for j in apart]
        losses.append(subspace + weight * sum(errors) / max(1, len(errors)))
    return torch.stack(losses)


# ---- RandNLA


@pytest.mark.parametrize("width", [None, RANK + 3], ids=["r0 = r", "r0 > r"])
@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_randnla_is_algorithm_2_with_the_same_sketch(features, rounds, width):
    probe, metric = bent_probe(), metric_of(BATCH)
    found, _ = RandNLA(probe, rounds, width, energy_weight=0.3)(metric, features, streams())
    modes, values = [], []
    sketches = streams().gaussian(INPUTS, width or RANK, torch.float64)
    for jacobian, omega in zip(jacobians(probe, features), sketches, strict=True):
        for _ in range(rounds):
            omega = jacobian.T @ (jacobian @ omega)
            omega = torch.linalg.qr(omega).Q
        leading_columns = omega[:, :RANK]
        lengths = torch.linalg.vector_norm(jacobian @ leading_columns, dim=0)
        modes.append(leading_columns)
        values.append(lengths.sort(descending=True).values)
    torch.testing.assert_close(found, spectral_loss(metric, modes, values, 0.3), rtol=1e-8, atol=1e-10)


def test_with_many_rounds_the_sketch_becomes_the_exact_modes(features):
    metric = metric_of(BATCH)
    exact, _ = Spectral(bent_probe())(metric, features, streams())
    few, many = (RandNLA(bent_probe(), rounds)(metric, features, streams())[0] for rounds in (1, 100))
    torch.testing.assert_close(many, exact, rtol=1e-8, atol=1e-10)
    assert (few - exact).abs().max() > 1e-3


def test_every_image_has_its_own_sketch_and_every_step_another(features):
    same_image, one = features[:1].repeat(BATCH, 1, 1), metric_of(1)
    metric = LowRankMetric(one.modes.repeat(BATCH, 1, 1, 1), one.energies.repeat(BATCH, 1))
    losses = [RandNLA(bent_probe(), 1)(metric, same_image, streams(seed=seed))[0] for seed in (0, 1)]
    assert len({round(value, 9) for value in torch.cat(losses).tolist()}) == 2 * BATCH


def test_nearly_equal_energies_are_left_to_the_subspace_loss(features):
    values = torch.tensor([3.0, 2.97, 1.0, 0.1])
    probe, metric = linear_probe(with_singular_values(values)), metric_of(BATCH)
    found, numbers = RandNLA(probe, 300, 4, energy_weight=1.0)(metric, features, streams())
    subspace = 1 - numbers["alignment"]
    kept = (metric.energies[:, 2].log() - math.log(1.0)).square()  # the other two can swap
    assert found.mean().item() == pytest.approx(subspace + kept.mean().item(), abs=1e-6)


# ---- the exact modes


def test_spectral_asks_for_the_singular_vectors_of_the_dense_jacobian(features):
    probe, metric = bent_probe(), metric_of(BATCH)
    values, modes = leading(jacobians(probe, features), RANK, features.shape[1:])
    found, numbers = Spectral(probe, energy_weight=0.7)(metric, features, streams())
    expected = spectral_loss(metric, [mode.flatten(1).T for mode in modes], list(values), 0.7)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)
    overlap = metric.modes.flatten(2) @ modes.flatten(2).mT
    assert numbers["alignment"] == pytest.approx((overlap.square().sum((1, 2)) / RANK).mean().item(), rel=1e-8)


def test_the_true_metric_has_no_loss_and_others_are_pulled_towards_it(features):
    probe = bent_probe()
    values, modes = leading(jacobians(probe, features), RANK, features.shape[1:])
    loss, numbers = Spectral(probe)(LowRankMetric(modes, values.square()), features, streams())
    assert loss.abs().max() < 1e-9 and numbers["alignment"] == pytest.approx(1)
    other = metric_of(BATCH)
    mode, energy = other.modes.clone().requires_grad_(), other.energies.clone().requires_grad_()
    Spectral(probe)(LowRankMetric(mode, energy), features, streams())[0].sum().backward()
    overlap_changes = (mode.grad.flatten(2) @ modes.flatten(2).mT) * (other.modes.flatten(2) @ modes.flatten(2).mT)
    assert (overlap_changes.sum((1, 2)) < 0).all()
    assert (energy.grad.sign() == (other.energies - values.square()).sign()).all()


# ---- the naive ways


def test_distance_matching_compares_the_lengths_of_pairs_with_the_distances_of_outputs(features):
    matrix, metric = with_singular_values(torch.tensor([3.0, 2.0, 1.0, 0.5])), metric_of(BATCH, floor=0.01)
    found, _ = DistanceMatching(linear_probe(matrix))(metric, features, streams())
    for i in range(BATCH):
        change = (features[i - 1] - features[i]).flatten()
        u = metric.modes[i].flatten(1).T
        length = change @ (u @ (metric.energies[i] * (u.T @ change)) + 0.01 * change)
        distance = (matrix @ change).square().sum()
        assert found[i].item() == pytest.approx(math.log(length / distance) ** 2, rel=1e-9)


def test_the_true_metric_of_a_linear_map_matches_all_distances(features):
    matrix = with_singular_values(torch.tensor([3.0, 2.0, 1.0]))
    values, modes = leading(matrix.expand(BATCH, -1, -1), 3, features.shape[1:])
    metric = LowRankMetric(modes, values.square())
    for supervision in (DistanceMatching(linear_probe(matrix)), RandomDirections(linear_probe(matrix))):
        assert supervision(metric, features, streams())[0].max() < 1e-12
        assert supervision(metric_of(BATCH), features, streams())[0].min() > 1e-3


def test_a_single_image_has_no_distance(features):
    with pytest.raises(PullbackError, match="batch: distance matching compares pairs, expected at least 2"):
        DistanceMatching(bent_probe())(metric_of(1), features[:1], streams(1))


def test_random_directions_compare_squared_lengths_of_random_unit_vectors(features):
    probe, metric, count = bent_probe(), metric_of(BATCH, floor=0.01), 5
    found, _ = RandomDirections(probe, count)(metric, features, streams())
    columns = streams().gaussian(INPUTS, count, torch.float64)
    for i, jacobian in enumerate(jacobians(probe, features)):
        u = metric.modes[i].flatten(1).T
        expected = 0.0
        for v in columns[i].T:
            v = v / v.norm()
            predicted = (metric.energies[i] * (u.T @ v).square()).sum() + 0.01
            expected += math.log(predicted / (jacobian @ v).square().sum()) ** 2 / count
        assert found[i].item() == pytest.approx(expected, rel=1e-9)


# ---- all of them

EVERY = [RandNLA, Spectral, DistanceMatching, RandomDirections]


@pytest.mark.parametrize("kind", EVERY)
def test_a_float32_network_learns_from_float64_products(features, kind):
    spn = tiny_spn()
    loss, _ = kind(bent_probe())(spn(features), features, streams())
    assert loss.shape == (BATCH,) and loss.isfinite().all()
    loss.mean().backward()
    assert spn.modes.weight.grad.abs().max() > 0 and spn.energies[-1].bias.grad.abs().max() > 0


@pytest.mark.parametrize("kind", EVERY)
def test_features_of_a_real_probe_keep_what_its_decoder_reads_below(kind):
    probe = pb.load_probe(model_of("depth-v2"), DOWNSAMPLED, 2)
    features = probe.features(images_for("depth-v2", (2, 3)))
    assert features.below
    spn = tiny_spn(dim=features.shape[-1])
    loss, _ = kind(probe)(spn(features), features, streams(2))
    assert loss.shape == (2,) and loss.isfinite().all()


def test_a_decoder_that_does_not_depend_on_the_features_is_named(features):
    dead = PlainProbe(lambda x: 0 * x.flatten(1)[:, :RANK])
    for supervision in (RandNLA(dead), Spectral(dead)):
        with pytest.raises(DecoderError, match="decoder: its output does not depend on the features"):
            supervision(metric_of(BATCH), features, streams())


def test_products_that_are_nan_are_an_error(features):
    steep = PlainProbe(lambda x: (0 * x.flatten(1)[:, :RANK]).sqrt())
    with pytest.raises(NumericsError, match="J: its products hold NaN"):
        RandNLA(steep)(metric_of(BATCH), features, streams())


# ---- the gradient signal ratio


def signal(probe, features, rounds: int, rank: int = RANK, **options) -> float:
    metric = metric_of(len(features), rank)
    return RandNLA(probe, rounds, **options)(metric, features, streams(len(features)))[1]["gradient_signal_ratio"]


def test_at_convergence_the_signal_ratio_is_that_of_the_leading_singular_value(features):
    values = torch.tensor([3.0, 2.0, 1.0])
    expected = 9.0 * INPUTS / 14.0
    probe = linear_probe(with_singular_values(values))
    assert signal(probe, features, 100, signal_probes=1) == pytest.approx(expected, rel=1e-9)
    assert expected >= 1.0 * INPUTS / RANK  # kappa N D / r, here with kappa = 1


def test_of_a_tail_that_is_not_found_the_signal_ratio_has_an_estimate(features):
    values = 0.9 ** torch.arange(12)
    expected = values[0] ** 2 * INPUTS / values.square().sum()
    probe, many = linear_probe(with_singular_values(values)), features.repeat(25, 1, 1)
    assert signal(probe, many, 200) == pytest.approx(expected.item(), rel=0.1)
    assert signal(probe, many, 200, signal_probes=200) == pytest.approx(expected.item(), rel=0.01)


def test_a_random_direction_has_signal_ratio_one_and_power_iteration_raises_it(features):
    probe = linear_probe(with_singular_values(torch.ones(40)))
    assert signal(probe, features.repeat(50, 1, 1), 0, rank=1, signal_probes=50) == pytest.approx(1, abs=0.05)
    rounds = [signal(bent_probe(), features, count) for count in (0, 1, 3)]
    assert rounds == sorted(rounds) and rounds[2] > 3 * rounds[0]


def test_the_signal_ratio_may_be_left_out_and_changes_nothing(features):
    metric, supervision = metric_of(BATCH), RandNLA(bent_probe())
    with_it, numbers = supervision(metric, features, streams())
    without, fewer = replace(supervision, signal_probes=0)(metric, features, streams())
    assert torch.equal(with_it, without)
    assert set(numbers) - set(fewer) == {"gradient_signal_ratio"}


# ---- the paper's claim, at the size of a toy


def test_the_subspace_is_learned_from_modes_and_from_sketches_but_not_from_random_directions_or_distances():
    tokens, dim, rank = 9, 16, 4
    probe = bent_probe(12, tokens, dim)
    features = normal(8, tokens, dim, seed=3, dtype=torch.float32)
    held_out = replace(examples_of(probe, features[:1].double(), rank), features=lambda rows: features[rows])
    alignment = {}
    for supervision in (Spectral(probe), RandNLA(probe, 2), RandomDirections(probe), DistanceMatching(probe)):
        images = 8 if isinstance(supervision, DistanceMatching) else 1
        spn = tiny_spn(dim=dim, rank=rank, width=32)
        task = SpnTask(lambda rows: features[rows], images, supervision, held_out)
        config = FitConfig(steps=100, batch=min(images, 2), learning_rate=5e-3, warmup=10, validate_every=100)
        alignment[type(supervision)] = fit(spn, task, config).scores["v1"]
    assert alignment[Spectral] > 0.95 and alignment[RandNLA] > 0.9
    chance = rank / (tokens * dim)
    assert alignment[RandomDirections] < 4 * chance and alignment[DistanceMatching] < 4 * chance
