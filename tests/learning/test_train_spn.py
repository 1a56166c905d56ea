"""A Spectral Pullback Network from images: every supervision, every kind of decoder, what it says of itself."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import pullback as pb
from helpers.pictures import SIZE, small_probe, write_pictures
from helpers.progress import Heard
from pullback.errors import ImageError, ModelError, PullbackError
from pullback.learning.bottleneck import latent_probe
from pullback.learning.fit import FitConfig
from pullback.learning.s2vae import S2VAE, S2VAEConfig
from pullback.learning.spn import SpectralPullbackNetwork
from pullback.learning.train_spn import (
    SUPERVISIONS,
    DistanceMatching,
    RandNLA,
    RandomDirections,
    Spectral,
    constant_network,
    constant_subspace,
    held_out_modes,
    read_by_network,
    spn_scores,
    supervision_of,
    train_spn,
)
from pullback.runs.provenance import weights_hash
from pullback.targets.recipe import targets_of

CONFIG = FitConfig(steps=60, batch=8, warmup=5, validate_every=20, learning_rate=1e-2, ema=0.9)
SHORT = replace(CONFIG, steps=4, batch=4, validate_every=2)
STILL = replace(SHORT, steps=1, learning_rate=0.0)  # ends as it began
NETWORK = {"rank": 3, "width": 16, "heads": 2}


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    return write_pictures(tmp_path_factory.mktemp("pictures") / "photos", 12)


@pytest.fixture(scope="module")
def others(tmp_path_factory) -> Path:
    """Pictures that are not among the first."""
    folder = write_pictures(tmp_path_factory.mktemp("pictures") / "photos", 16)
    for number in range(12):
        (folder / f"{number:02d}.png").unlink()
    return folder


def trained(photos: Path, others: Path, probe=None, **options) -> SpectralPullbackNetwork:
    known = {"size": SIZE, "config": SHORT, **NETWORK}
    return train_spn(probe or small_probe(), photos, others, **(known | options))


def depth_probe(layer: int = 2):
    from helpers.families import model_of

    return pb.load_probe(model_of("depth-v2"), "depth-2x2", layer)


def moved(one: SpectralPullbackNetwork, other: SpectralPullbackNetwork) -> float:
    return max((a - b).abs().max().item() for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_a_network_learns_the_subspace_and_comes_back_from_its_folder(photos, others, tmp_path):
    network = trained(photos, others, config=CONFIG, out=tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    random = trained(photos, others, config=STILL)
    assert network.config.scores["v1"] > random.config.scores["v1"] + 0.2
    assert network.config.scores["v1"] == max(line["v1"] for line in lines)
    assert all(0 < line["alignment"] < 1 and line["gradient_signal_ratio"] > 1 for line in lines)
    network.save_pretrained(tmp_path / "spn")
    again = SpectralPullbackNetwork.from_pretrained(tmp_path / "spn")
    probe = small_probe()
    features = probe.features(probe.load_images(photos / "00.png", SIZE))
    assert again.config == network.config and not network.training
    torch.testing.assert_close(again(features).modes, network(features).modes)


def test_the_network_knows_what_it_was_made_for_and_how_well_it_does(photos, others):
    network = trained(photos, others)
    origin, scores = network.config.origin, network.config.scores
    assert (origin.family, origin.layer, origin.decoder, origin.rank) == ("dinov2", 1, "cls", 3)
    assert origin.weights == weights_hash(small_probe().backbone.model) and origin.resolutions == (SIZE,)
    assert set(scores) >= {"v1", "v1_se", "v1_patches", "kappa", "sensitivity_ratio", "natural_ratio"}
    assert "score" not in scores and 0 < scores["natural_ratio"] < scores["kappa"] < 1
    assert (network.config.dim, network.config.rank) == (24, 3)


def test_a_dense_decoder_that_reads_layers_below_trains_too(photos, others):
    probe = depth_probe()
    network = trained(photos, others, probe, size=28, config=replace(CONFIG, steps=15, batch=4, validate_every=15))
    random = trained(photos, others, probe, size=28, config=STILL)
    assert network.config.scores["v1"] > random.config.scores["v1"] + 0.05
    assert (network.config.origin.decoder, network.config.origin.layer) == ("depth-2x2", 2)


def test_the_layers_of_a_dense_decoder_side_by_side_train_too(photos, others):
    from helpers.families import model_of

    network = trained(photos, others, pb.multi_layer_probe(model_of("depth-v2"), "depth-2x2"), size=28)
    assert network.config.dim == 4 * 24 and network.config.origin.layer is None


@pytest.mark.parametrize("name", SUPERVISIONS)
@pytest.mark.parametrize("probe", [small_probe, depth_probe], ids=["cls", "depth"])
def test_every_supervision_trains(photos, others, name, probe):
    options = {"size": 28, "limit": 5, "supervision": name}
    network = trained(photos, others, probe(), config=replace(SHORT, validate_every=4), **options)
    assert all(value.isfinite().all() for value in network.state_dict().values())
    assert moved(network, trained(photos, others, probe(), config=STILL, **options)) > 1e-3


def test_supervisions_have_names():
    probe = small_probe()
    options = {"power_iters": 2, "sketch_width": 7, "precision": "float32"}
    found = {name: supervision_of(name, probe, **options) for name in SUPERVISIONS}
    assert [type(found[name]) for name in SUPERVISIONS] == [RandNLA, Spectral, DistanceMatching, RandomDirections]
    assert (found["randnla"].power_iters, found["randnla"].sketch_width) == (2, 7)


def test_an_unknown_supervision_is_refused_before_anything_is_computed(tmp_path):
    message = "supervision: expected one of randnla, spectral, distances, directions, got 'hope'"
    with pytest.raises(PullbackError, match=message):
        trained(tmp_path / "nowhere", tmp_path / "nowhere", supervision="hope")


def test_the_judges_have_the_exact_modes_of_their_own_features(others):
    probe = small_probe()
    judges = held_out_modes(probe, others, 3, size=SIZE)
    features = judges.features(torch.arange(4))
    exact = targets_of(probe, features, 3, "exact", keep_modes=True)
    overlap = judges.modes.double().flatten(2) @ exact.modes.flatten(2).mT
    torch.testing.assert_close(overlap.abs(), torch.eye(3).double().expand(4, 3, 3), atol=5e-3, rtol=0)
    torch.testing.assert_close(judges.singular_values, exact.singular_values.float())
    torch.testing.assert_close(judges.total, exact.total.value)
    assert len(judges) == 4 and judges.prefix == 1  # the broken picture is left out


def test_only_so_many_images_are_trained_on(photos, others):
    heard = Heard()
    trained(photos, others, size=28, limit=5, constant_images=3, progress=heard)
    assert heard.counts["computing features"] == [4]  # one of the five is broken
    assert sum(heard.counts["computing held-out modes"]) == 4
    assert heard.totals["computing the constant subspace"] == 3
    assert heard.counts["training"] == [1, 1, 1, 1]


def test_kept_and_recomputed_features_give_the_same_network_up_to_rounding(photos, others):
    kept, recomputed = (trained(photos, others, size=28, keep_features=keep) for keep in (True, False))
    assert moved(kept, trained(photos, others, size=28)) == 0 < moved(kept, recomputed)
    probe = small_probe()
    features = probe.features(probe.load_images(sorted(others.glob("1?.png")), 28))
    still = trained(photos, others, size=28, config=STILL)
    found, again, before = (network(features).importance().detach() for network in (kept, recomputed, still))
    torch.testing.assert_close(again, found, rtol=1e-2, atol=0)
    assert (before / found - 1).abs().max() > 0.1


def test_another_seed_gives_another_network(photos, others):
    networks = [trained(photos, others, size=28, config=replace(STILL, seed=seed)) for seed in (0, 1)]
    assert moved(*networks) > 1e-2


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"supervision": "spectral"}, "supervision: 'randnla' there, 'spectral' asked for"),
        ({"power_iters": 2, "sketch_width": 5}, "power_iters: 1 there, .*; sketch_width: None there, .*"),
        ({"limit": 6}, "images: .* asked for"),
        ({"layer": 0}, "probe.layer: 1 there, 0 asked for"),
        ({"size": 28}, "probe.tokens: 7 there, .*; probe.grid: .*; probe.size: .*"),
    ],
    ids=["supervision", "sketch", "images", "layer", "size"],
)
def test_a_checkpoint_of_another_run_is_refused(photos, others, tmp_path, changes, named):
    first = trained(photos, others, out=tmp_path)
    assert moved(first, trained(photos, others, out=str(tmp_path))) == 0
    layer = changes.get("layer", 1)
    options = {name: value for name, value in changes.items() if name != "layer"}
    with pytest.raises(
        PullbackError, match=rf"out: .*checkpoint.pt holds a training run with other settings \({named}\)"
    ):
        trained(photos, others, replace(small_probe(), at=layer), out=tmp_path, **options)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"heads": 3}, "width, heads: expected width to be a multiple of heads, got"),
        ({"heads": 0}, "heads: expected a whole number of at least 1, got 0"),
        ({"width": 0}, "width: expected a whole number of at least 1, got 0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(photos, others, sizes, message):
    with pytest.raises(ModelError, match=message):
        trained(photos, others, **sizes)


def test_pictures_that_cannot_be_read_are_an_error(photos, tmp_path):
    (tmp_path / "no.png").write_bytes(b"nothing")
    with pytest.raises(ImageError, match="source: expected at least one readable image, got none"):
        trained(tmp_path, photos)
    with pytest.raises(ImageError, match="expected at least one readable image, but none of the 1 could be used"):
        trained(photos, tmp_path)


def test_training_can_start_at_the_constant_subspace_of_some_images(photos, others, tmp_path):
    network = trained(photos, others, config=STILL, constant_images=6, out=tmp_path)
    probe = small_probe()
    judge = held_out_modes(probe, others, 3, size=SIZE)
    known = held_out_modes(probe, photos, 3, size=SIZE, limit=6)
    constant = spn_scores(constant_network(constant_subspace(known.modes, 3)), judge)
    assert network.config.scores["v1"] == pytest.approx(constant["v1"], abs=1e-4)
    with pytest.raises(PullbackError, match="constant_images"):
        trained(photos, others, config=STILL, constant_images=5, out=tmp_path)


def test_the_constant_subspace_is_of_training_images_alone(photos, others):
    few = trained(photos, others, config=STILL, limit=4, constant_images=9)
    same = trained(photos, others, config=STILL, limit=4, constant_images=4)
    assert torch.equal(few.base, same.base)


# ---- in the latent of a bottleneck


@pytest.fixture(scope="module")
def latent():
    """A latent of 4 registers with 5 numbers, between a small depth model and its head."""
    from helpers.families import model_of

    probe = pb.multi_layer_probe(model_of("depth-v2"), "depth-2x2")
    width = probe.backbone.tap_dim
    sizes = {"registers": 4, "latent": 5, "width": 16, "heads": 2, "blocks": 1}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        vae = S2VAE(S2VAEConfig((width,) * len(probe.layers), probe.layers, **sizes))
    return latent_probe(probe, vae, space="ambient")


def test_in_the_latent_a_network_reads_the_last_layer_as_the_decoder_sees_it(photos, latent):
    images = latent.load_images(sorted(photos.glob("0[01].png")), 28)
    whole = pb.multi_layer_probe(latent.backbone.model, "depth-2x2").features(images)
    read = read_by_network(latent).features(images)
    torch.testing.assert_close(read, whole[..., -latent.backbone.image.dim :])
    assert read_by_network(small_probe()) is small_probe()


def test_in_the_latent_networks_learn_its_modes_and_come_back_from_their_folder(photos, others, latent, tmp_path):
    longer = replace(CONFIG, steps=40, batch=4, validate_every=40)
    network = trained(photos, others, latent, size=28, config=longer, out=tmp_path / "run")
    random = trained(photos, others, latent, size=28, config=STILL)
    assert network.config.latent == (4, 5) and network.config.dim == 24
    assert network.config.scores["v1"] > random.config.scores["v1"] + 0.1
    origin = network.config.origin
    assert (origin.layer, origin.decoder) == (None, "depth-2x2@4x5") and latent.layer == "latent-ambient"
    again = SpectralPullbackNetwork.from_pretrained(network.save_pretrained(tmp_path / "spn"))
    assert again.config == network.config
    judges = held_out_modes(latent, others, 3, size=28)
    assert spn_scores(again, judges)["v1"] == pytest.approx(network.config.scores["v1"], abs=1e-5)
    exact = targets_of(latent, judges.features(torch.arange(4)), 3, "exact", keep_modes=True)
    torch.testing.assert_close(judges.singular_values, exact.singular_values.float(), rtol=1e-3, atol=1e-5)


def test_in_the_latent_exact_modes_are_computed_once_and_looked_up(photos, others, latent, monkeypatch):
    monkeypatch.setattr(Spectral, "__call__", lambda *_: pytest.fail("exact modes in a step"))
    options = {"size": 28, "supervision": "spectral"}
    network = trained(photos, others, latent, config=replace(SHORT, validate_every=4), **options)
    assert moved(network, trained(photos, others, latent, config=STILL, **options)) > 1e-3


def test_in_the_latent_training_can_start_at_the_constant_subspace(photos, others, latent):
    network = trained(photos, others, latent, size=28, config=STILL, constant_images=6)
    known = held_out_modes(latent, photos, 3, size=28, limit=6)
    constant = constant_network(constant_subspace(known.modes, 3))
    expected = spn_scores(constant, held_out_modes(latent, others, 3, size=28))["v1"]
    assert network.config.scores["v1"] == pytest.approx(expected, abs=1e-4) and network.config.tokens == 4
    images = latent.load_images(sorted(photos.glob("0[01].png")), 56)
    assert network(read_by_network(latent).features(images)).modes.shape == (2, 3, 4, 5)


def test_kept_and_recomputed_latents_give_the_same_network_up_to_rounding(photos, others, latent):
    one, other = (trained(photos, others, latent, size=28, keep_features=keep) for keep in (True, False))
    judges = held_out_modes(latent, others, 3, size=28)
    assert spn_scores(one, judges)["v1"] == pytest.approx(spn_scores(other, judges)["v1"], rel=0.05)
