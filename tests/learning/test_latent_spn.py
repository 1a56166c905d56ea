"""A Spectral Pullback Network that reads features and predicts modes in a latent space, against dense Jacobians."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from helpers.toys import PlainProbe, jacobians, leading, normal, tiny_spn, with_singular_values
from pullback.learning.fit import FitConfig, fit
from pullback.learning.spn import SpectralPullbackNetwork
from pullback.learning.train_spn import (
    KnownModes,
    RandNLA,
    Spectral,
    SpnExamples,
    SpnTask,
    constant_network,
    constant_subspace,
    example_scores,
    known_modes,
    natural_sensitivity_ratio,
    spn_scores,
)
from pullback.randnla import Streams

IMAGES, HELD_OUT = 40, 12
TOKENS, DIM = 7, 8  # of the features that the network reads
REGISTERS, WIDTH, RANK = 4, 6, 3  # of the latent, and of the metric
LATENT = (REGISTERS, WIDTH)
CONFIG = FitConfig(steps=150, batch=8, learning_rate=5e-3, warmup=10, validate_every=150, ema=0.9)


def rotating_probe(values: torch.Tensor) -> PlainProbe:
    """A map of the latent [B, K, d] whose leading subspace turns with the latent; singular values of about these."""
    matrix = with_singular_values(values, REGISTERS * WIDTH, seed=2)
    mixing = normal(REGISTERS * WIDTH, REGISTERS * WIDTH, seed=8) / (REGISTERS * WIDTH) ** 0.5

    def decode(z: torch.Tensor) -> torch.Tensor:
        flat = z.flatten(1)
        return (flat + 0.5 * torch.sin(2 * flat @ mixing.to(flat).T)) @ matrix.to(flat).T

    return PlainProbe(decode)


@dataclass(frozen=True)
class Toy:
    """Features x, latents z = E(x) on spheres, the map of the latent and its dense modes."""

    probe: PlainProbe
    features: torch.Tensor  # [n, N, D], float32
    latents: torch.Tensor  # [n, K, d], float32
    modes: torch.Tensor  # [n, r, K, d]
    singular_values: torch.Tensor
    total: torch.Tensor

    def examples(self, rows: slice) -> SpnExamples:
        return SpnExamples(
            lambda own: self.latents[rows][own],
            self.modes[rows],
            self.singular_values[rows],
            self.total[rows],
            prefix=0,
            inputs=lambda own: self.features[rows][own],
        )

    def task(self, supervision, held_out: SpnExamples) -> SpnTask:
        return SpnTask(
            lambda rows: self.latents[rows],
            IMAGES,
            supervision,
            held_out,
            inputs=lambda rows: self.features[rows],
        )


@pytest.fixture(scope="module")
def toy() -> Toy:
    probe = rotating_probe(torch.tensor([5.0, 4.0, 3.0, 0.05, 0.03]))
    features = normal(IMAGES + HELD_OUT, TOKENS, DIM, seed=5)
    encoder = normal(DIM, REGISTERS * WIDTH, seed=6)
    latents = torch.tanh(features).mean(1) @ encoder
    latents = torch.nn.functional.normalize(latents.unflatten(1, LATENT), dim=-1)
    dense = jacobians(probe, latents)
    values, modes = leading(dense, RANK, torch.Size(LATENT))
    return Toy(probe, features.float(), latents.float(), modes, values, dense.square().sum((1, 2)))


@pytest.fixture(scope="module")
def held_out(toy) -> SpnExamples:
    return toy.examples(slice(IMAGES, None))


def network(seed: int = 0) -> SpectralPullbackNetwork:
    return tiny_spn(seed, DIM, RANK, 32, latent=LATENT)


def test_from_the_constant_start_it_is_the_constant_at_step_zero(toy, held_out):
    subspace = constant_subspace(toy.modes[:IMAGES], RANK)
    constant = example_scores(constant_network(subspace), held_out)
    started = example_scores(network().start_at(subspace).eval(), held_out)
    torch.testing.assert_close(started.v1.double(), constant.v1.double(), rtol=1e-5, atol=1e-6)
    both = network().start_at(subspace), constant_network(subspace.float())
    ratios = [natural_sensitivity_ratio(own, toy.probe, held_out) for own in both]
    torch.testing.assert_close(*ratios, rtol=1e-4, atol=1e-6)


def test_products_are_taken_at_the_latent_and_the_network_reads_the_features(toy, held_out):
    own, rows = network().eval(), torch.arange(IMAGES, IMAGES + HELD_OUT)
    found = natural_sensitivity_ratio(own, toy.probe, held_out, batch=5)
    with torch.no_grad():
        modes = own(toy.features[rows]).modes.double().flatten(2)
    for i, jacobian in enumerate(jacobians(toy.probe, toy.latents[rows].double())):
        expected = (jacobian @ modes[i].T).square().sum() / jacobian.square().sum()
        assert found[i].item() == pytest.approx(expected.item(), rel=1e-4)


def test_known_modes_ask_for_the_same_as_exact_modes_in_every_step(toy):
    rows = torch.tensor([3, 0, 17])
    metric, streams = network()(toy.features[rows]), Streams.from_seed(0, 3)
    known, numbers = KnownModes(toy.modes, toy.singular_values, energy_weight=0.3)(
        metric, toy.latents[rows], streams, rows
    )
    exact, expected = Spectral(toy.probe, energy_weight=0.3)(metric, toy.latents[rows], streams)
    torch.testing.assert_close(known.float(), exact, rtol=1e-4, atol=1e-5)
    assert numbers["alignment"] == pytest.approx(expected["alignment"], rel=1e-4)
    halved, _ = KnownModes(toy.modes.half(), toy.singular_values, 0.3)(metric, toy.latents[rows], streams, rows)
    torch.testing.assert_close(halved, known, rtol=1e-3, atol=1e-4)


def test_known_modes_are_found_by_the_key_of_their_image(toy):
    table = SimpleNamespace(keys=("b", "c", "a"), modes=toy.modes[:3], singular_values=toy.singular_values[:3])
    found = known_modes(table, ["a", "b", "c"])
    assert torch.equal(found.modes, toy.modes[[2, 0, 1]])
    assert torch.equal(found.singular_values, toy.singular_values[[2, 0, 1]])


@pytest.fixture(scope="module")
def trained(toy, held_out) -> dict[str, float]:
    """V_1 on held-out images after each training."""
    subspace = constant_subspace(toy.modes[:IMAGES], RANK)
    found = {"constant": spn_scores(constant_network(subspace), held_out)["v1"]}
    found["random"] = spn_scores(network().eval(), held_out)["v1"]
    teachers = {"randnla": RandNLA(toy.probe, 1), "spectral": KnownModes(toy.modes, toy.singular_values)}
    for name, teacher in teachers.items():
        for start in ("", " from constant"):
            own = network().start_at(subspace) if start else network()
            found[name + start] = fit(own, toy.task(teacher, held_out), CONFIG).scores["v1"]
    return found


def test_training_leaves_random_behind_and_reaches_the_constant(trained):
    assert trained["random"] < 0.4 and trained["constant"] > 0.5
    for name in ("randnla", "spectral"):
        assert trained[name] > trained["random"] + 0.2
        assert trained[name] > trained["constant"] - 0.05
        assert trained[f"{name} from constant"] > trained["constant"] - 0.01


def test_with_a_large_gap_one_round_of_power_iteration_teaches_as_well_as_exact_modes(trained):
    assert abs(trained["randnla"] - trained["spectral"]) < 0.05
    assert abs(trained["randnla from constant"] - trained["spectral from constant"]) < 0.05
