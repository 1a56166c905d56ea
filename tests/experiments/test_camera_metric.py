"""Two output metrics of the camera compared: the numbers against dense matrices, and the command."""

import json

import pytest
import torch
from PIL import Image
from typer import Typer
from typer.testing import CliRunner

import pullback as pb
from helpers.vggt_models import scenes, tiny
from pullback.errors import ImageError, PullbackError
from pullback.experiments import camera_metric as module
from pullback.experiments.camera_metric import compare_metrics, find_scenes, pruning_agreement, table
from pullback.operators import JacobianOperator


@pytest.fixture(scope="module")
def probe():
    return pb.load_probe(tiny().requires_grad_(False), "camera", 1)


def test_the_comparison_is_that_of_the_dense_matrices(probe):
    images = scenes(2, 2, 3, 28, 42)
    found = compare_metrics(probe, images, rank=4)
    features = probe.features(images)
    jacobian = JacobianOperator(probe, features)
    metric = pb.CameraMetric()(jacobian.output)
    for index, dense in enumerate((jacobian.dense(), metric.mT @ jacobian.dense())):
        energies = torch.linalg.svdvals(dense).square()
        torch.testing.assert_close(found.kappa[index], energies[:, :4].sum(1) / energies.sum(1))
        shares = energies / energies.sum(1, keepdim=True)
        expected = torch.special.entr(shares).sum(1).exp()
        torch.testing.assert_close(found.effective_rank[index], expected, rtol=1e-6, atol=1e-6)
    blocks = [
        dense.unflatten(2, features.shape[1:]).square().sum((1, 3)).sqrt()
        for dense in (jacobian.dense(), metric.mT @ jacobian.dense())
    ]
    halves = [set(own[0].argsort()[:9].tolist()) for own in blocks]
    torch.testing.assert_close(found.agreement_all[0], torch.tensor(len(halves[0] & halves[1]) / 9).double())
    assert (found.spearman_all > 0.5).all() and found.rank == 4


def test_ranks_are_lowered_to_the_directions_there_are(probe):
    found = compare_metrics(probe, scenes(1, 2, 3, 28, 28), rank=20)
    assert found.rank == 16, "8 a view"
    torch.testing.assert_close(found.kappa[1], torch.ones(1, dtype=torch.float64))


def test_a_metric_that_is_a_multiple_of_the_other_changes_nothing(probe):
    """Units so small that only translations and fields of view are left, and the same again ten times smaller."""
    images = scenes(1, 2, 3, 28, 42)
    tiny_units, tinier = (compare_metrics(probe, images, pb.CameraMetric(u, u), rank=4) for u in (1e-6, 1e-7))
    torch.testing.assert_close(tiny_units.kappa[1], tinier.kappa[1])
    torch.testing.assert_close(tiny_units.spearman_all, tinier.spearman_all)


def test_agreement_counts_tokens_that_are_treated_alike():
    scores = torch.arange(8.0)[None]
    assert pruning_agreement(scores, scores).item() == 1
    assert pruning_agreement(scores, -scores).item() == 0
    assert pruning_agreement(scores, scores.roll(1, 1)).item() == 0.75
    assert pruning_agreement(scores, -scores, 0.25).item() == 0.5
    with pytest.raises(PullbackError, match="prune_ratio: expected a share between 0 and 1, got 1"):
        pruning_agreement(scores, scores, 1)


def test_where_patches_do_not_count_there_is_no_correlation(probe):
    """After the last block the camera head reads camera tokens alone."""
    last = pb.load_probe(probe.backbone.model, "camera", 3)
    row = compare_metrics(last, scenes(1, 2, 3, 28, 28)).rows()[0]
    assert row["spearman_patches"] is None and row["spearman_all"] is not None
    json.dumps(row, allow_nan=False)
    assert "| Spearman, patches | – | – |" in table([row])


@pytest.fixture
def command(tmp_path):
    """The command on a small model and two scenes in tmp_path/scenes."""
    model = tiny(torch.float32).save_pretrained(tmp_path / "model")
    for scene, views in (("kitchen", 2), ("garden", 3)):
        (tmp_path / "scenes" / scene).mkdir(parents=True)
        for view in range(views):
            picture = Image.effect_noise((56, 42), 40 + 10 * view).convert("RGB")
            picture.save(tmp_path / "scenes" / scene / f"{view}.png")
    app = Typer()
    app.command()(module.main)
    options = ["--model", str(model), "--scenes", str(tmp_path / "scenes"), "--layer", "1", "--size", "28"]
    return lambda *more: CliRunner().invoke(app, [*options, "--device", "cpu", *more])


def test_the_command_compares_every_scene_of_a_folder(command, tmp_path):
    run = command("--out", str(tmp_path / "rows.jsonl"))
    assert run.exit_code == 0, run.output
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [(row["scene"], row["views"]) for row in rows] == [("garden", 3), ("kitchen", 2)]
    assert rows[0]["probe"].endswith("camera L01") and 0 < rows[0]["kappa_so3"] <= 1 + 1e-9
    assert "κ_cap, SO(3)-aware" in run.output and "0.995" in run.output
    assert "skipped" not in run.output
    run = command("--layer", "9")
    assert run.exit_code == 2 and "layer: expected a layer of the aggregator" in run.output


def test_a_scene_that_cannot_be_read_is_skipped_and_named(command, tmp_path):
    (tmp_path / "scenes" / "garden" / "2.png").write_bytes(b"no picture")
    rows = tmp_path / "rows.jsonl"
    run = command("--out", str(rows))
    assert run.exit_code == 0, run.output
    assert [json.loads(line)["scene"] for line in rows.read_text().splitlines()] == ["kitchen"]
    assert f"skipped {tmp_path}/scenes/garden: " in run.stderr and "2.png: not a readable image" in run.stderr
    assert "means over 1 of 2 scenes" in run.stdout and "κ_cap, Euclidean" in run.stdout
    run = command("--views", "2")
    assert run.exit_code == 0 and "skipped" not in run.output, "the damaged view is not asked for"
    (tmp_path / "scenes" / "kitchen" / "0.png").write_bytes(b"no picture")
    run = command("--out", str(rows))
    assert run.exit_code == 2 and "scenes: none of the 2 in" in run.output and "κ_cap" not in run.output
    assert len(rows.read_text().splitlines()) == 1, "without a new row the old ones stay"


def test_a_size_that_fits_no_scene_is_an_error_about_the_size(command):
    run = command("--size", "30")
    assert run.exit_code == 2 and "error: size=30: expected a multiple of patch_size=14" in run.output
    assert "skipped" not in run.output


def test_a_folder_without_images_is_refused(tmp_path):
    with pytest.raises(ImageError, match="no image found"):
        find_scenes(tmp_path)
