"""Decoders behind a bottleneck by name, and the layers of its latent: on the command line, in folders and stores."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import pullback as pb
from helpers.families import images_for, model_of, save
from helpers.pictures import write_pictures
from helpers.vaes import tiny_vae
from helpers.vggt_models import scenes, tiny
from pullback import models
from pullback.backbones.shipped import fingerprint
from pullback.backbones.weights import block_hashes
from pullback.cli import app
from pullback.cli.common import BAD_INPUT
from pullback.errors import DecoderError, ModelError, PullbackError
from pullback.geometry.folder import DiagnosisRequest, run_diagnosis
from pullback.learning.pretrained import Origin
from pullback.learning.s2vae import S2VAE
from pullback.learning.train_head import train_head
from pullback.report.figures import draw_all
from pullback.report.page import write_page_of

SIZE = (28, 42)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """dense/, a model with a depth head; vae/ for it; photos/."""
    folder = tmp_path_factory.mktemp("place")
    save(model_of("depth-v2"), folder / "dense")
    probe = pb.multi_layer_probe(folder / "dense", "depth-2x2", device="cpu")
    tiny_vae(probe).save_pretrained(folder / "vae")
    tiny_vae(probe, posterior="gaussian").save_pretrained(folder / "gaussian")
    write_pictures(folder / "photos", 6, broken=False)
    return folder


def load(place: Path, layer: int | str | None = None, decoder: str = "depth-2x2", vae: str = "vae") -> pb.ProbeMap:
    return pb.load_probe(place / "dense", f"{decoder}@{place / vae}", layer, device="cpu", dtype=torch.float64)


def run(*arguments: object) -> object:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_a_name_is_the_compressed_probe_and_a_layer_the_latent_one(place):
    plain = pb.multi_layer_probe(place / "dense", "depth-2x2", device="cpu", dtype=torch.float64)
    vae, images = S2VAE.from_pretrained(place / "vae"), images_for("depth-v2", (2, 3))
    for layer, expected in (
        ("hooks", pb.compressed_probe(plain, vae)),
        ("latent", pb.latent_probe(plain, vae)),
        ("latent-ambient", pb.latent_probe(plain, vae, space="ambient")),
    ):
        found = load(place, layer)
        assert found.layer == layer and found.decoder.name == f"depth-2x2@{place / 'vae'}"
        assert found.identity == expected.identity
        torch.testing.assert_close(found(found.features(images)), expected(expected.features(images)))
        sizes = [pb.JacobianOperator(probe, probe.features(images)).cols for probe in (found, expected)]
        assert sizes[0] == sizes[1]
    assert load(place, 1).layer == 1


def test_a_layer_of_another_name_is_refused_with_those_there_are(place):
    with pytest.raises(
        ModelError, match=r"layer: .* from 0 to \d+, 'hooks' .* 'latent' or 'latent-ambient', got 'latents'"
    ):
        load(place, "latents")


def test_names_that_lead_nowhere(place):
    with pytest.raises(ModelError, match=r"decoder: '.*nowhere' is neither a folder nor a hub id"):
        load(place, vae="nowhere")
    with pytest.raises(ModelError, match=r"decoder: .*photos has no config\.json"):
        load(place, vae="photos")
    with pytest.raises(DecoderError, match=r"decoder: expected one of cls, .*DECODER@FOLDER, .* got 'nothing'"):
        load(place, decoder="nothing")
    with pytest.raises(DecoderError, match=r"decoder: 'cls' reads the first 1 tokens alone"):
        load(place, decoder="cls")
    with pytest.raises(
        ModelError, match=r"decoder: expected one of the layers \[4\], which decoder 'mean' reads, got one of"
    ):
        load(place, decoder="mean")
    with pytest.raises(
        DecoderError, match=r"layer: only decoders with a bottleneck have a latent, .* depth@FOLDER, got 'depth'"
    ):
        pb.load_probe(place / "dense", "depth", "latent", device="cpu")
    with pytest.raises(ModelError, match=r"layer: .* a gaussian posterior .* layer latent-ambient"):
        load(place, "latent", vae="gaussian")
    assert load(place, "latent-ambient", vae="gaussian").layer == "latent-ambient"


def test_a_vae_that_ships_is_found_by_the_weights(place, tmp_path, monkeypatch):
    monkeypatch.setattr(models, "WEIGHTS", tmp_path)
    probe = pb.multi_layer_probe(place / "dense", "depth-2x2", device="cpu")
    with pytest.raises(
        ModelError, match=r"decoder: no s2vae that comes with the package fits .*pullback train bottleneck"
    ):
        pb.load_probe(place / "dense", "depth-2x2@s2vae", "latent", device="cpu")
    vae, backbone = tiny_vae(probe, registers=3), probe.backbone
    vae.describe(origin=Origin(blocks=block_hashes(backbone), fingerprint=fingerprint(backbone)))
    vae.save_pretrained(tmp_path / "x")
    found = pb.load_probe(place / "dense", "depth-2x2@s2vae", "latent", device="cpu")
    assert found.decoder.name == "depth-2x2@s2vae" and found.features(images_for("depth-v2", (2, 3))).shape == (2, 3, 4)
    stored = copy.deepcopy(model_of("depth-v2")).half().float()
    assert pb.load_probe(stored, "depth-2x2@s2vae", 1).decoder.vae.size == 12
    with pytest.raises(ModelError, match=r"decoder: no s2vae .* x is made for layers \[0, 1, 3, 4\], not \(4,\)"):
        pb.load_probe(place / "dense", "mean@s2vae", device="cpu")


def test_a_diagnosis_of_several_places_with_its_page(place, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    request = DiagnosisRequest(
        str(place / "dense"),
        str(place / "photos"),
        decoder=f"depth-2x2@{place / 'vae'}",
        layers=("latent", 1, "hooks", "latent-ambient"),
        ranks=(2,),
        size=SIZE,
        limit=2,
        device="cpu",
        convergence_samples=1,
    )
    document = run_diagnosis(request, tmp_path)
    assert [layer["layer"] for layer in document["layers"]] == ["latent", 1, "hooks", "latent-ambient"]
    assert [layer["in_picture"] for layer in document["layers"]] == [False, True, True, False]
    assert (document["depth"], document["layers"][0]["tokens"], document["layers"][0]["dim"]) == (5, 2, 4)
    arrays = np.load(tmp_path / "importance.npz")
    assert arrays["latent"].shape == (2, 2) and arrays["L01"].shape == (2, 7)
    assert set(draw_all(tmp_path)) == {"spectrum.png", "tokens_L01.png", "tokens_hooks.png"}
    write_page_of(tmp_path)
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "The tokens at latent are registers of a bottleneck" in page and "Task energy at hooks" in page
    again = run_diagnosis(request, tmp_path)
    assert again["layers"] == document["layers"], "nothing is computed twice"


def test_a_page_of_the_latent_alone(place, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    result = run(
        *("diagnose", place / "dense", "--images", place / "photos", "--decoder", f"depth-2x2@{place / 'vae'}"),
        *(
            "--layer",
            "latent",
            "--rank",
            2,
            "--size",
            "28x42",
            "--limit",
            1,
            "--device",
            "cpu",
            "--out",
            tmp_path / "out",
        ),
    )
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out" / "index.html").is_file() and not list((tmp_path / "out").glob("tokens_*"))


def test_scenes_in_the_latent(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    from PIL import Image

    model = tiny(torch.float32).requires_grad_(False)
    model.save_pretrained(tmp_path / "vggt")
    probe = pb.multi_layer_probe(tmp_path / "vggt", "depth-2x2", device="cpu")
    tiny_vae(probe).save_pretrained(tmp_path / "vae")
    for name, count in (("kitchen", 2), ("hall", 3)):
        (tmp_path / "scenes" / name).mkdir(parents=True)
        for view, pixels in enumerate(scenes(count, 3, 28, 42, seed=count)):
            picture = (255 * pixels).byte().permute(1, 2, 0).numpy()
            Image.fromarray(picture).save(tmp_path / "scenes" / name / f"{view}.png")
    request = DiagnosisRequest(
        str(tmp_path / "vggt"),
        str(tmp_path / "scenes"),
        decoder=f"depth-2x2@{tmp_path / 'vae'}",
        layers=("latent", "hooks"),
        ranks=(2,),
        size=42,
        device="cpu",
        convergence_samples=0,
    )
    document = run_diagnosis(request, tmp_path / "out")
    assert document["layers"][0]["tokens"] == 6, "two registers for each of three views"
    assert set(draw_all(tmp_path / "out")) == {"spectrum.png", "tokens_hooks.png"}
    write_page_of(tmp_path / "out")


@pytest.mark.parametrize("layer", ["latent", "latent-ambient", "hooks", 1])
def test_targets_go_to_a_store_that_heads_are_trained_on(place, tmp_path, layer):
    pytest.importorskip("pyarrow", reason="pyarrow is not installed (the extra pullback[targets])")
    result = run(
        *("targets", place / "dense", "--images", place / "photos", "--decoder", f"depth-2x2@{place / 'vae'}"),
        *("--layer", layer, "--rank", 2, "--size", "28x42", "--method", "exact", "--device", "cpu", "--out", tmp_path),
    )
    assert result.exit_code == 0, result.output
    store = pb.TargetStore.open(tmp_path)
    assert store.config["layer"] == layer and len(store) == 6
    probe = store.load_probe(device="cpu")
    assert probe.layer == layer
    tokens = (7, 2)[isinstance(layer, str) and layer != "hooks"]
    assert store.config["tokens"] == tokens
    config = pb.FitConfig(steps=2, batch=4, validate_every=1)
    head = train_head(probe, [store], 0.34, width=16, heads=2, config=config)
    assert head(probe.features(images_for("depth-v2", (2, 3)).float())).shape == (2, tokens)
    assert head.config.origin.decoder == f"depth-2x2@{place / 'vae'}"


def test_a_store_of_another_vae_is_refused(place, tmp_path):
    pytest.importorskip("pyarrow", reason="pyarrow is not installed (the extra pullback[targets])")
    probe = pb.load_probe(place / "dense", "depth-2x2", "hooks", device="cpu")
    vae = tiny_vae(probe)
    vae.save_pretrained(tmp_path / "vae")
    first = pb.load_probe(place / "dense", f"depth-2x2@{tmp_path / 'vae'}", "latent", device="cpu")
    pb.compute_targets(first, place / "photos", out=tmp_path / "store", rank=2, size=SIZE, limit=1)
    with torch.no_grad():
        vae.expand.bias += 1
    vae.save_pretrained(tmp_path / "vae")
    with pytest.raises(PullbackError, match=r"cannot be loaded by names: decoder 'depth-2x2@.*' of it is not the one"):
        pb.TargetStore.open(tmp_path / "store").load_probe(device="cpu")
    second = pb.load_probe(place / "dense", f"depth-2x2@{tmp_path / 'vae'}", "latent", device="cpu")
    with pytest.raises(PullbackError, match="decoder_identity"):
        pb.compute_targets(second, place / "photos", out=tmp_path / "store", rank=2, size=SIZE, limit=1)


def test_commands_refuse_a_latent_that_they_cannot_show(place, tmp_path):
    decoder = f"depth-2x2@{place / 'vae'}"
    shared = ("--decoder", decoder, "--size", "28x42", "--device", "cpu", "--out", tmp_path / "out")
    look = run("look", place / "dense", place / "photos", "--layer", "latent", *shared)
    assert look.exit_code == BAD_INPUT and "--layer: expected a block index or 'hooks', got 'latent'" in look.output
    looked = run("look", place / "dense", place / "photos", "--layer", 1, "--limit", 1, *shared)
    assert looked.exit_code == 0, looked.output
    assert json.loads((tmp_path / "out" / "look.json").read_text())["maps"][0]["decoder"] == decoder


def test_scores_and_overlays_want_a_probe_at_the_features(place):
    latent, images = load(place, "latent"), images_for("depth-v2", (2, 3))
    importance = pb.token_importance(pb.spectrum(latent, images, rank=2))
    with pytest.raises(PullbackError, match=r"probe: expected one at the features, .* whose tokens are registers"):
        pb.overlay(images[:1], importance[:1], latent)
    with pytest.raises(PullbackError, match=r"probe: expected a ProbeMap at a layer"):
        pb.exact_importance(latent)
    score = pb.exact_importance(load(place, 1), rank=2)
    assert callable(score)
