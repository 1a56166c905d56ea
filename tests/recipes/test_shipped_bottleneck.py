"""The bottleneck of tiny-scenes that comes with the package: found by the weights, small, and as good as it says."""

import json
from copy import deepcopy
from pathlib import Path

import pytest
import torch

import pullback as pb
from pullback.errors import ModelError
from pullback.evaluation.fidelity import depth_errors
from pullback.learning.bottleneck import encoder_probe
from pullback.learning.s2vae import S2VAE
from pullback.models import WEIGHTS
from pullback.scenes import HELD_OUT, normalised, render

FOLDER = WEIGHTS / "tiny-scenes-s2vae"
TRAINING = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "bottleneck_training_cpu.json"


@pytest.fixture(scope="module")
def probe() -> pb.ProbeMap:
    return pb.multi_layer_probe("tiny-scenes", "depth", device="cpu")


@pytest.fixture(scope="module")
def compressed(probe) -> pb.ProbeMap:
    return pb.multi_layer_probe("tiny-scenes", "depth@s2vae", device="cpu")


@torch.no_grad()
def test_depth_of_scenes_that_it_never_saw_passes_through_4096_numbers(probe, compressed):
    images = normalised(render(range(HELD_OUT, HELD_OUT + 4), size=224).rgb[:, 0])
    x = probe.features(images, normalized=True)
    full, seen = probe(x), compressed(x)
    errors = depth_errors(seen, full, full > 0, median_scaling=False)
    assert errors.delta1.mean() > 0.97 and errors.abs_rel.mean() < 0.06
    vae = compressed.decoder.vae
    z = vae.encode(x, probe.token_layout(x))
    assert z.shape == (4, 32, 128) and vae.size == 4096
    torch.testing.assert_close(z.norm(dim=-1), torch.ones(4, 32))
    latent = pb.latent_probe(probe, vae)
    torch.testing.assert_close(latent(latent.features(images, normalized=True)), seen, rtol=1e-3, atol=1e-3)


def test_it_is_small_and_its_scores_are_those_of_training():
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 6e6
    own = S2VAE.from_pretrained(FOLDER).config
    assert own.origin.resolutions == ((224, 224),) and own.origin.decoder == "depth"
    assert own.scores["delta1"] > 0.97
    training = json.loads(TRAINING.read_text(encoding="utf-8"))["runs"]["tiny-scenes"]
    assert training["scores"] == pytest.approx(dict(own.scores), rel=1e-5)  # the card is written from this file
    assert training["ships"] and training["command"] in " ".join(
        (FOLDER / "README.md").read_text(encoding="utf-8").split()
    )


def test_it_is_found_for_copies_of_the_model_and_for_no_other_weights(probe):
    half = deepcopy(probe.backbone.model).half().float()
    assert pb.multi_layer_probe(half, "depth@s2vae").decoder.vae.size == 4096
    tuned = deepcopy(probe.backbone.model)
    with torch.no_grad():
        for value in tuned.parameters():
            value.mul_(1.01)
    with pytest.raises(ModelError, match=r"decoder: no s2vae .* but for other weights, as before fine-tuning"):
        pb.multi_layer_probe(tuned, "depth@s2vae")
    with pytest.raises(ModelError, match=r"vae: it was trained for other weights than those of"):
        pb.compressed_probe(pb.multi_layer_probe(tuned, "depth"), S2VAE.from_pretrained(FOLDER))


def test_everything_passes_along_its_spheres(compressed):
    """J~ = J_latent J_encoder, of rank R (d - 1) at most, since registers move along their spheres alone."""
    probe, vae = pb.multi_layer_probe("tiny-scenes", "depth-4x4", device="cpu"), compressed.decoder.vae
    images = normalised(render([HELD_OUT], size=56).rgb[:, 0])
    features = probe.features(images, normalized=True)
    latent = pb.latent_probe(probe, vae)
    z = latent.features(images, normalized=True)
    directions = torch.randn(1, features[0].numel(), 3, generator=torch.Generator().manual_seed(0))
    moved = pb.JacobianOperator(encoder_probe(probe, vae), features) @ directions  # [1, R d, 3]
    radial = (moved.view(1, 32, 128, 3) * z.as_subclass(torch.Tensor)[..., None]).sum(2)
    assert radial.abs().max() < 1e-4 * moved.abs().max()
    through = pb.JacobianOperator(pb.compressed_probe(probe, vae), features) @ directions
    expected = pb.JacobianOperator(latent, z) @ moved
    torch.testing.assert_close(through, expected, rtol=1e-3, atol=float(1e-3 * through.abs().max()))
