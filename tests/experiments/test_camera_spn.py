"""The Spectral Pullback Network on cameras of scenes: its judges are dense matrices, its rows survive a stop."""

import json
from dataclasses import replace

import pytest
import torch
from typer import Typer
from typer.testing import CliRunner

from helpers.vggt_models import tiny
from pullback.errors import DecoderError, PullbackError, RankError
from pullback.experiments import camera_spn as module
from pullback.experiments.camera_spn import (
    CONSTANT,
    UNTRAINED,
    CameraSpn,
    Settings,
    camera_probe,
    rank_of,
    run,
    supervision_of,
)
from pullback.learning.train_spn import example_scores
from pullback.operators import JacobianOperator, LowRankMetric

TOY = Settings(
    decoder="camera-1", layer=1, size=28, train_scenes=6, held_out=3, rank=5, width=16, steps=8, batch=2, seed=0
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny(torch.float32).save_pretrained(tmp_path_factory.mktemp("models") / "toy"))


@pytest.fixture(scope="module")
def experiment(model):
    return CameraSpn(camera_probe(model, TOY, "cpu"), TOY)


def test_the_judges_are_the_dense_jacobians_of_held_out_scenes(experiment):
    own = experiment.held_out
    matrices = JacobianOperator(experiment.probe, own.features).dense().double()
    assert matrices.shape[:2] == (3, 9) and (torch.linalg.matrix_rank(matrices) <= 9).all()
    values = torch.linalg.svdvals(matrices)
    torch.testing.assert_close(own.examples.singular_values.double(), values[:, :5], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(own.examples.total, values.square().sum(1), rtol=1e-4, atol=1e-6)
    right = torch.linalg.svd(matrices, full_matrices=False)[2][:, :5]
    exact = {len(rows): right[rows] for rows in (torch.arange(3),)}
    found = example_scores(
        lambda features: LowRankMetric(exact[len(features)].unflatten(-1, features.shape[1:]), torch.ones(3, 5)),
        own.examples,
    )
    assert found.v1.tolist() == pytest.approx([1] * 3, abs=1e-3)
    assert found.v1_patches.tolist() == pytest.approx([1] * 3, abs=1e-2)


def test_patches_are_those_of_every_view(experiment):
    facts = experiment.facts()
    assert (experiment.held_out.examples.prefix, experiment.held_out.examples.views) == (3, 2)
    assert (facts["tokens"], facts["patch_tokens"]) == (14, 8), "2 views of a camera, 2 registers and 2 x 2 patches"
    assert facts["v1_ceiling"] == pytest.approx(1, abs=1e-4) and facts["kappa"] < 1
    assert facts["relative_singular_values"][0] == 1 and len(facts["relative_singular_values"]) == 5


def test_rows_lead_over_the_constant_subspace_and_never_exceed_kappa(experiment):
    constant, untrained, trained = (experiment.row(name) for name in (CONSTANT, UNTRAINED, "Spectral"))
    kappa = experiment.facts()["kappa"]
    assert constant["v1_lead"] == 0 and constant["v1"] > untrained["v1"]
    assert trained["v1"] > untrained["v1"] and trained["v1"] - constant["v1"] == pytest.approx(trained["v1_lead"])
    for row in (constant, untrained, trained):
        assert 0 < row["natural_ratio"] <= kappa + 1e-6
    assert (untrained["paper_v1_of_compressed_depth"], constant["paper_v1_of_compressed_depth"]) == (0.005, None)


def test_every_supervision_starts_from_the_same_weights(experiment):
    first, second = (experiment.new_network().state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_rank_is_that_of_the_cameras_and_at_most_twenty(model):
    for views, expected in ((1, 9), (2, 18), (3, 20)):
        settings = replace(TOY, decoder="camera", views=views, rank=None)
        probe = camera_probe(model, settings, "cpu")
        assert rank_of(probe, torch.rand(1, views, 3, 28, 28), None) == expected
    with pytest.raises(RankError, match=r"rank: expected 1 to 27, the rows of J .*, got 28"):
        rank_of(probe, torch.rand(1, 3, 3, 28, 28), 28)


@pytest.fixture
def quick_rows(monkeypatch, experiment):
    made = []

    def row(self, name):
        made.append(name)
        return {**ROW, "network": name}

    monkeypatch.setattr(module, "CameraSpn", lambda probe, settings: experiment)
    monkeypatch.setattr(CameraSpn, "row", row)
    return made


ROW = {
    **{"v1": 0.5, "v1_lead": 0.1, "v1_lead_half_width": 0.01},
    **{"v1_patches": 0.4, "v1_patches_lead": 0.1, "v1_patches_lead_half_width": None},
    **{"natural_ratio": 0.7, "natural_ratio_se": 0.1, "paper_v1_of_compressed_depth": None, "seconds": 1.0},
}


def test_a_second_run_makes_only_the_rows_that_are_missing(model, tmp_path, quick_rows):
    out = tmp_path / "deep" / "spn.json"
    stopped = run(model, TOY, device="cpu", out=out)
    assert [next(stopped)["network"] for _ in range(3)] == [CONSTANT, UNTRAINED, "RandNLA q=1"]
    stopped.close()
    assert [row["network"] for row in json.loads(out.read_text())["rows"]] == quick_rows
    list(run(model, TOY, device="cpu", out=out))
    assert quick_rows == [CONSTANT, UNTRAINED, "RandNLA q=1", "RandNLA q=2", "Spectral"], "each once"
    stored = json.loads(out.read_text())
    assert stored["probe"] == "toy camera-1 L01" and len(stored["settings"]["weights"]) == 64
    assert stored["device"] == "cpu" and {"machine", "commit", "date", "versions"} <= set(stored)
    with pytest.raises(PullbackError, match=r"out: .* holds rows with other settings \(steps: 8 there, 9 asked for\)"):
        next(run(model, replace(TOY, steps=9), device="cpu", out=out))
    out.write_text("{}")
    with pytest.raises(PullbackError, match=r"out: .* is no result of this experiment"):
        next(run(model, TOY, device="cpu", out=out))
    out.write_text("[]")
    with pytest.raises(PullbackError, match=r"out: .* holds list, expected a JSON object"):
        next(run(model, TOY, device="cpu", out=out))


def test_unknown_supervisions_are_refused_before_anything_is_drawn(model, quick_rows):
    with pytest.raises(PullbackError, match=r"runs: expected some of RandNLA q=1, .*Spectral, .* got 'none'"):
        next(run(model, TOY, runs=["none"], device="cpu"))
    assert quick_rows == []


@pytest.mark.parametrize("decoder", ["depth", "depth-8x8", "points", "camera-", "camera-x"])
def test_what_is_no_camera_is_refused_before_the_model_is_loaded(decoder):
    with pytest.raises(DecoderError, match=rf"decoder: expected 'camera' .* got '{decoder}'"):
        next(run("no/model", replace(TOY, decoder=decoder), device="cpu"))


def test_a_network_that_starts_at_the_constant_subspace_begins_level_with_it(model):
    still = replace(TOY, learning_rate=0.0)
    rows = {row["network"]: row for row in run(model, still, runs=["Spectral from constant"], device="cpu")}
    assert rows["Spectral from constant"]["v1_lead"] == pytest.approx(0, abs=1e-4)
    assert rows[CONSTANT]["v1"] > rows[UNTRAINED]["v1"]


def test_supervisions_are_those_of_the_paper(experiment):
    one, two = (supervision_of(f"RandNLA q={q}", experiment.probe, "float32") for q in (1, 2))
    assert (one.power_iters, two.power_iters) == (1, 2)


def test_the_command(model, tmp_path):
    app = Typer()
    app.command()(module.main)
    options = ["--model", model, "--layer", "1", "--size", "28", "--decoder", "camera-1", "--rank", "3", "--width", "8"]
    sizes = ["--train-scenes", "3", "--held-out", "2", "--steps", "2", "--batch", "2", "--device", "cpu"]
    out = tmp_path / "spn.json"
    found = CliRunner().invoke(app, [*options, *sizes, "--runs", "RandNLA q=1", "--out", str(out)])
    assert found.exit_code == 0, found.output
    for text in ("best constant subspace", "random init", "RandNLA q=1", "0.713", "natural ratio"):
        assert text in found.output
    rows = json.loads(out.read_text())["rows"]
    assert [row["network"] for row in rows] == [CONSTANT, UNTRAINED, "RandNLA q=1"]
    wrong = CliRunner().invoke(app, [*options, *sizes, "--rank", "10"])
    assert wrong.exit_code == 2 and "rank: expected 1 to 9" in wrong.output
