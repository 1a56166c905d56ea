"""K_eff: how many independent layers a multi-layer decoder reads."""

import pytest
import torch
from torch import Tensor

import pullback as pb
from helpers.families import seeded_vit
from helpers.truth import FunctionProbe, normal, random_images, truth_of
from pullback.errors import DecoderError, ImageError, PullbackError

TOKENS, WIDTH, OUTPUTS = 4, 3, 12


def layered(maps: list[Tensor]) -> FunctionProbe:
    """Output sum_k A_k vec(F_k) of x = [F_1 | ... | F_K] [B, N, K*D]."""

    def function(x: Tensor) -> Tensor:
        parts = x.chunk(len(maps), -1)
        return sum(part.flatten(1) @ matrix.T for part, matrix in zip(parts, maps, strict=True))

    return FunctionProbe(function, layers=tuple(range(len(maps))))


def features(layers: int, batch: int = 1) -> Tensor:
    return normal(batch, 1, TOKENS, layers * WIDTH, seed=9)


def dense_k_eff(jacobian: Tensor, layers: int) -> float:
    """K^2 / sum of the cosines between J_k J_k^T, by definition, for J [M, N, K*D]."""
    blocks = [part.flatten(1) for part in jacobian.chunk(layers, -1)]
    grams = [block @ block.T for block in blocks]
    cosines = [[((a * b).sum() / (a.norm() * b.norm())).item() for b in grams] for a in grams]
    return layers**2 / sum(map(sum, cosines))


def random_map(seed: int) -> Tensor:
    return normal(OUTPUTS, TOKENS * WIDTH, seed=seed)


@pytest.mark.parametrize("layers", [1, 2, 4])
def test_aligned_layers_count_as_one(layers):
    """Different gains and different inputs, the same J_k J_k^T up to scale."""
    shared = random_map(0)
    turned = [torch.linalg.qr(normal(TOKENS * WIDTH, TOKENS * WIDTH, seed=k)).Q for k in range(layers)]
    probe = layered([(k + 1) * shared @ turn for k, turn in enumerate(turned)])
    found = pb.layer_multiplicity(probe, features(layers))
    assert found.value.item() == pytest.approx(1, abs=1e-9)
    assert found.se.item() <= 1e-5


@pytest.mark.parametrize("layers", [2, 3, 4])
def test_layers_on_orthogonal_outputs_count_fully(layers):
    maps = []
    for k in range(layers):
        matrix = torch.zeros(OUTPUTS, TOKENS * WIDTH, dtype=torch.float64)
        matrix[3 * k : 3 * k + 3] = (k + 1) * normal(3, TOKENS * WIDTH, seed=k)
        maps.append(matrix)
    found = pb.layer_multiplicity(layered(maps), features(layers))
    assert found.value.item() == pytest.approx(layers, abs=1e-9)


def partly_aligned() -> FunctionProbe:
    common = random_map(0)
    decay = torch.linspace(1, 0.1, OUTPUTS, dtype=torch.float64)[:, None]
    return layered([decay * common, decay * (common + random_map(1)), decay.flip(0) * random_map(2)])


def test_anything_between_is_found_within_its_error_bars():
    probe, x = partly_aligned(), features(3)
    truth = dense_k_eff(truth_of(probe, x).jacobian[0], 3)
    assert 1.2 < truth < 2.8
    found = [pb.layer_multiplicity(probe, x, seed=seed) for seed in range(60)]
    values, errors = torch.cat([f.value for f in found]), torch.cat([f.se for f in found])
    inside = ((values - truth).abs() <= 2 * errors).double().mean()
    assert inside >= 0.9
    assert errors.mean() <= 1.5 * values.std()
    many = pb.layer_multiplicity(probe, x, num_probes=2000)
    assert many.se.item() < 0.02 and many.value.item() == pytest.approx(truth, abs=3 * many.se.item())


def test_a_layer_without_effect_does_not_count():
    maps = [random_map(0), torch.zeros(OUTPUTS, TOKENS * WIDTH, dtype=torch.float64), 2 * random_map(0)]
    assert pb.layer_multiplicity(layered(maps), features(3)).value.item() == pytest.approx(1, abs=1e-9)


def test_every_sample_has_its_own_value_and_stream():
    matrix = normal(OUTPUTS, TOKENS * 2 * WIDTH)
    probe = FunctionProbe(lambda x: torch.sin(x).flatten(1) @ matrix.T, layers=(0, 1))
    x = features(2, batch=3)
    found = pb.layer_multiplicity(probe, x, num_probes=400)
    truth = [dense_k_eff(jacobian, 2) for jacobian in truth_of(probe, x).jacobian]
    assert found.value.shape == found.se.shape == (3,)
    for value, se, expected in zip(found.value.tolist(), found.se.tolist(), truth, strict=True):
        assert abs(value - expected) <= 3 * se < 0.2
    again = pb.layer_multiplicity(probe, x[:1], num_probes=400)
    assert torch.equal(again.value, found.value[:1])


@pytest.mark.parametrize("size", [(56, 56), (28, 42)], ids=["square", "oblong"])
@pytest.mark.parametrize("after_norm", [True, False])
def test_the_multi_layer_probe_of_a_dense_model(size, after_norm):
    probe = pb.multi_layer_probe(seeded_vit(), "depth-4x4", after_norm=after_norm)
    images = random_images(1, size)
    features = probe.features(images)
    jacobian = pb.JacobianOperator(probe, features).dense()[0].unflatten(1, features.shape[1:])
    truth = dense_k_eff(jacobian, len(probe.layers))
    found = pb.layer_multiplicity(probe, images)
    assert 1 <= truth <= 4 and abs(found.value.item() - truth) <= 3 * found.se.item() < 1


def test_bad_arguments_are_named():
    probe = partly_aligned()
    with pytest.raises(ImageError, match="got an empty batch"):
        pb.layer_multiplicity(probe, features(3)[:0])
    with pytest.raises(PullbackError, match="num_probes: expected at least 2"):
        pb.layer_multiplicity(probe, features(3), num_probes=1)
    dead = FunctionProbe(lambda x: (0 * x).flatten(1), layers=(0, 1))
    with pytest.raises(DecoderError, match="zero Jacobian"):
        pb.layer_multiplicity(dead, features(2))
