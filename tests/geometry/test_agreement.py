"""How far two probes agree: by construction for linear ones, against dense matrices, and with itself."""

import json
import math
from dataclasses import replace

import pytest
import torch

import pullback as pb
from helpers.families import images_for, model_of
from helpers.truth import FunctionProbe, normal, truth_of
from helpers.vaes import tiny_vae
from pullback.errors import PullbackError, RankError
from pullback.geometry.agreement import principal_angles

TOKENS, WIDTH, ROWS = 5, 6, 12


def linear(right: torch.Tensor, sigma: list[float], name: str = "linear") -> FunctionProbe:
    """A probe with these singular values and right vectors, the columns of [n, k]."""
    left = torch.linalg.qr(normal(ROWS, len(sigma), seed=7)).Q
    matrix = (left * torch.tensor(sigma, dtype=torch.float64)) @ right[:, : len(sigma)].T
    return FunctionProbe(lambda x: x.flatten(1) @ matrix.T, name=name)


@pytest.fixture(scope="module")
def basis() -> torch.Tensor:
    return torch.linalg.qr(normal(TOKENS * WIDTH, TOKENS * WIDTH, seed=3)).Q


@pytest.fixture(scope="module")
def features() -> torch.Tensor:
    return normal(3, 1, TOKENS, WIDTH, seed=4)


@pytest.mark.parametrize("method", ["exact", "krylov"])
def test_angles_and_captured_energy_are_those_of_the_construction(basis, features, method):
    """The approximation has the first direction, one that is turned by 0.3 towards nothing, and a foreign one."""
    sigma = [4.0, 3.0, 2.0, 1.0, 0.5]
    turned = math.cos(0.3) * basis[:, 1] + math.sin(0.3) * basis[:, 20]
    other = torch.stack([turned, basis[:, 0], basis[:, 25], basis[:, 3]], 1)
    one, two = linear(basis, sigma, "one"), linear(other, [5.0, 4.0, 3.0, 0.1], "two")
    found = pb.agreement(one, two, features, (3, 5), method)
    angles = torch.tensor([0.0, 0.3, math.pi / 2], dtype=torch.float64).expand(3, 3)
    torch.testing.assert_close(found.angles, angles, rtol=0, atol=1e-6)
    cosine = math.cos(0.3) ** 2
    torch.testing.assert_close(found.alignment, torch.full((3,), (1 + cosine) / 3).double(), rtol=1e-6, atol=0)
    total = 16 + 9 + 4 + 1 + 0.25
    torch.testing.assert_close(
        found.captured.value, torch.full((3,), (16 + 9 * cosine) / total).double(), rtol=1e-6, atol=0
    )
    torch.testing.assert_close(found.share_of_best, found.captured.value * total / 29, rtol=1e-6, atol=0)
    assert found.original.method == found.approximation.method == method
    for row in found.rows():
        kappa = [row["original"]["kappa"][rank]["value"] for rank in ("3", "5")]
        assert kappa == pytest.approx([29 / total, 1], rel=1e-6)
        assert row["original"]["r90"] == {"value": 3, "is_lower_bound": False}
        assert row["approximation"]["r90"]["value"] == 3, "25 + 16 of 50.01 are less than 90 %"
    shares = torch.tensor(sigma, dtype=torch.float64).square() / total
    effective = (-(shares * shares.log()).sum()).exp()
    torch.testing.assert_close(found.original.effective_rank.value, effective.expand(3), rtol=1e-5, atol=0)
    assert (found.captured.se < 1e-5).all()
    again = pb.agreement(one, two, features, 3, method, known=found.original, with_effective_rank=False)
    assert again.original is found.original
    torch.testing.assert_close(again.captured.value, found.captured.value, rtol=1e-6, atol=0)


def test_a_probe_agrees_with_itself(features, basis):
    probe = linear(basis, [0.9**i for i in range(ROWS)])
    found = pb.agreement(probe, probe, features, 4, with_effective_rank=False)
    assert found.angles.abs().max() < 1e-7 and found.original.effective_rank is None
    torch.testing.assert_close(found.alignment, torch.ones(3).double(), rtol=0, atol=1e-9)
    torch.testing.assert_close(found.captured.value, found.original.kappa.value[:, 3], rtol=1e-9, atol=0)
    torch.testing.assert_close(found.correlation, torch.ones(3).double(), rtol=0, atol=1e-9)
    assert found.share_of_best.sub(1).abs().max() < 1e-9
    assert found.products.total == found.original.products.total + found.approximation.products.total + 4


def test_a_compressed_probe_against_dense_matrices():
    probe, images = pb.multi_layer_probe(model_of("depth-v2"), "depth-3x4"), images_for("depth-v2", (2, 3))
    compressed = pb.compressed_probe(probe, tiny_vae(probe))
    heard = []
    found = pb.agreement(probe, compressed, images, 3, on_progress=heard.append, batch_size=1)
    truth, other = truth_of(probe, images), truth_of(compressed, images)
    own, foreign = (side.svd[1][:, :3].flatten(2) for side in (truth, other))
    overlap = (own @ foreign.mT).square().sum((1, 2)) / 3
    torch.testing.assert_close(found.alignment, overlap, rtol=1e-6, atol=1e-9)
    pushed = (truth.jacobian.flatten(2) @ foreign.mT).square().sum((1, 2)) / truth.energies.sum(1)
    torch.testing.assert_close(found.captured.value, pushed, rtol=1e-6, atol=0)
    assert (found.captured.value < found.original.kappa.value[:, 2]).all()
    maps = [(side.energies[:, :3, None] * side.svd[1][:, :3].square().sum(-1)).sum(1).sqrt() for side in (truth, other)]
    torch.testing.assert_close(found.correlation, pb.spearman(maps[0][:, 1:], maps[1][:, 1:]), rtol=1e-9, atol=1e-9)
    assert heard == [1, 1, 1, 1] and len(found) == 2
    rows = json.loads(json.dumps(found.rows()))
    assert len(rows) == 2 and rows[0]["captured"]["value"] == found.captured.value[0].item()
    assert set(rows[0]["original"]["kappa"]) == {"3"} and len(rows[0]["angles_degrees"]) == 3
    assert found.summary("correlation").count == 2
    assert str(found).startswith(f"{compressed.name} for {probe.name}: its first 3 directions hold ")


def test_what_does_not_exist_is_orthogonal_to_everything():
    one = torch.linalg.qr(normal(2, 9, 3)).Q
    other = one.clone()
    other[..., 2] = 0
    expected = torch.tensor([0, 0, math.pi / 2], dtype=torch.float64).expand(2, 3)
    for pair in ((one, other), (other, one)):
        torch.testing.assert_close(principal_angles(*pair), expected, rtol=0, atol=1e-7)


def test_small_angles_keep_their_digits():
    plane = torch.linalg.qr(normal(1, 30, 3)).Q
    turned = torch.stack([plane[0, :, 0] + 1e-6 * plane[0, :, 2], plane[0, :, 1]], 1)[None]
    angles = principal_angles(plane[..., :2], turned)
    torch.testing.assert_close(angles, torch.tensor([[0.0, 1e-6]], dtype=torch.float64), rtol=1e-6, atol=1e-11)


def test_probes_at_different_places_are_refused():
    probe, images = pb.multi_layer_probe(model_of("depth-v2"), "depth-3x4"), images_for("depth-v2", (2, 3))
    with pytest.raises(
        PullbackError, match=r"approximation: expected a probe at the same features as .*, \[2, 7, 96\], got"
    ):
        pb.agreement(probe, pb.latent_probe(probe, tiny_vae(probe)), images, 2)
    with pytest.raises(PullbackError, match=r"approximation: expected a probe at the same features"):
        pb.agreement(replace(probe, at=0), replace(probe, at=1), images, 2)
    with pytest.raises(RankError, match=r"rank: expected at most 12, the smaller side of the Jacobians, got 50"):
        pb.agreement(probe, probe, images, (2, 50))
    with pytest.raises(PullbackError, match=r"^rtol: expected a relative error such as 1e-4, got 'fine'"):
        pb.agreement(probe, probe, images, 2, rtol="fine")
    other = pb.spectrum(probe, images[:1], 2)
    with pytest.raises(
        PullbackError, match=r"known: expected the spectrum of .* at these 2 images, with rank 2 at least"
    ):
        pb.agreement(probe, probe, images, 2, known=other)
    with pytest.raises(PullbackError, match=r"known: expected a Spectrum of the original, got 'before'"):
        pb.agreement(probe, probe, images, 2, known="before")


def test_a_spectrum_of_other_images_is_not_taken_for_that_of_these():
    probe, images = pb.multi_layer_probe(model_of("depth-v2"), "depth-3x4"), images_for("depth-v2", (2, 3))
    known = pb.spectrum(probe, images, 2)
    assert pb.agreement(probe, probe, images, 2, known=known).original is known
    with pytest.raises(PullbackError, match=r"known: .* whose first mode has the energy .* at image 0\. Leave it out"):
        pb.agreement(probe, probe, images.flip(0), 2, known=known)
