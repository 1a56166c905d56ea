"""The evaluation of depth heads on photographs, against numbers worked out by hand."""

import json
import math
import sys
from dataclasses import asdict

import pytest
import torch

from helpers.rgbd import write_pairs
from pullback.backbones import load_backbone
from pullback.decoders.dense import DPT_DEPTH, load_depth_head
from pullback.errors import PullbackError
from pullback.models.dinov2 import Dinov2, Dinov2Config
from pullback.models.dpt import DPTDepth, DPTDepthConfig
from pullback.runs.files import write_network
from recipes import evaluate_dinov2_depth
from recipes.evaluate_dinov2_depth import (
    ALL,
    CONSTANT,
    OWN,
    PIXEL,
    SCENES,
    SOURCES,
    TRAINED,
    errors,
    guesses,
    measure,
    predicted,
    summarised,
    table,
)
from recipes.rgbd import read_pairs
from recipes.scene_run import draw_weights

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """dinov2/, head/, other/ (random, toy size) and rgbd/."""
    folder = tmp_path_factory.mktemp("evaluation")
    model = Dinov2(Dinov2Config(hidden_size=24, num_hidden_layers=4, num_attention_heads=2, image_size=28))
    draw_weights(model, 0)
    write_network(folder / "dinov2", model, asdict(model.config))
    for seed, name in enumerate(("head", "other")):
        head = DPTDepth(DPTDepthConfig(24, channels=8, hooks=(0, 1, 2, 3)))
        draw_weights(head, seed)
        write_network(folder / name, head.half(), {"kind": DPT_DEPTH, **asdict(head.config)})
    write_pairs(folder / "rgbd", count=10)
    return folder


def test_errors_are_in_metres_and_after_median_scaling():
    truth = torch.tensor([[[2.0, 2.0], [4.0, 0.0]], [[1.0, 1.0], [1.0, 1.0]]])  # one pixel was not measured
    guess = torch.tensor([[[1.0, 1.0], [3.0, 9.0]], [[1.0, 1.1], [1.0, 1.4]]])
    found = errors(guess, truth)
    assert found["raw_delta1"].tolist() == [0, 0.75]
    torch.testing.assert_close(found["raw_abs_rel"], torch.tensor([(0.5 + 0.5 + 0.25) / 3, 0.5 / 4]))
    # scaled by 2 / 1: 2, 2, 6 against 2, 2, 4; and by 1 / 1, the lower of the two middle ones
    torch.testing.assert_close(found["delta1"], torch.tensor([2 / 3, 0.75]))
    torch.testing.assert_close(found["abs_rel"], torch.tensor([0.5 / 3, 0.5 / 4]))
    torch.testing.assert_close(found["log_scale"], torch.tensor([-math.log(2), 0.0]))


def test_guesses_are_geometric_means_of_measured_pixels():
    depth = torch.tensor([[[1.0, 4.0], [0.0, 0.0]], [[4.0, 0.0], [0.0, 2.0]]])
    found = guesses(depth)
    torch.testing.assert_close(found[CONSTANT], torch.full((2, 2), 32 ** (1 / 4)))
    torch.testing.assert_close(found[PIXEL], torch.tensor([[2.0, 4.0], [32 ** (1 / 4), 2.0]]))


def test_every_source_counts_once_in_the_mean_of_sources():
    found = summarised({"delta1": torch.tensor([0.0, 0.2, 1.0])}, ("room", "room", "shop"))
    assert found["room"]["delta1"] == pytest.approx({"mean": 0.1, "se": 0.1})
    assert found["shop"]["delta1"]["mean"] == 1 and math.isnan(found["shop"]["delta1"]["se"])
    assert found[ALL]["delta1"]["mean"] == pytest.approx(0.4) and found[SOURCES]["delta1"] == pytest.approx(0.55)


def test_the_measurement_is_of_the_head_on_the_pictures_as_the_package_reads_them(folder):
    backbone = load_backbone(folder / "dinov2", device="cpu")
    training, held_out = (read_pairs(folder / "rgbd", split) for split in ("train", "heldout"))
    heads = {TRAINED: folder / "head", SCENES: folder / "other"}
    found = measure(backbone, heads, training, held_out, size=28)
    images = backbone.read_images([str(path) for path in held_out.paths], 28).pixels
    depth = predicted(backbone, load_depth_head(folder / "head", CPU), images)
    assert depth.shape == (5, 28, 28)
    wanted = errors(depth, held_out.centred_depth(backbone.pixel_format(28)))
    rows = found["depth"][TRAINED]
    assert rows[ALL]["raw_abs_rel"]["mean"] == pytest.approx(float(wanted["raw_abs_rel"].mean()), rel=1e-5)
    assert set(found["depth"]) == {TRAINED, SCENES, CONSTANT, PIXEL} and OWN in rows
    gap = rows[ALL]["delta1"]["mean"] - found["depth"][SCENES][ALL]["delta1"]["mean"]
    assert found["ahead_of"][SCENES][ALL]["delta1"]["mean"] == pytest.approx(gap, abs=1e-5)
    assert found["images"] == {name: held_out.sequence.count(name) for name in held_out.sequence}
    assert table(found).count("\n") == 1 + 2 * 6 + 2 * 5


def test_the_command_writes_a_result_with_its_origin(folder, monkeypatch, tmp_path, capsys):
    command = ["--model", "dinov2", "--rgbd", "rgbd", "--head", "head", "--scenes-head", "other"]
    paths = [str(folder / word) if not word.startswith("--") else word for word in command]
    monkeypatch.setattr(sys, "argv", ["evaluate", *paths, "--device", "cpu", "--out", str(tmp_path / "found.json")])
    evaluate_dinov2_depth.main()
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["model"] == "dinov2" and len(found["weights_sha256"]) == 2 and found["training_pairs"] == 5
    assert "commit" in json.dumps(found) and "NaN" not in (tmp_path / "found.json").read_text()
    assert "| mean depth |" in capsys.readouterr().out


def test_a_folder_that_is_no_head_is_refused(folder, tmp_path):
    with pytest.raises(
        PullbackError, match=r"folder: .*config\.json cannot be read \(.*Expected the folder of a depth"
    ):
        load_depth_head(tmp_path, CPU)
    with pytest.raises(PullbackError, match="holds no part of this package, expected a dpt-depth"):
        load_depth_head(folder / "dinov2", CPU)
