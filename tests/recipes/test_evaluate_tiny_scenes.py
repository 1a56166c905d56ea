"""The scores of tiny-scenes at toy size: what they are made of, and what the command writes."""

import json
import math
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from pullback.errors import PullbackError
from pullback.scenes.render import TRAINING, render
from recipes import evaluate_tiny_scenes as module
from recipes.evaluate_tiny_scenes import (
    HELD_OUT,
    NETWORK,
    PIXEL,
    QUERIES,
    RANGES,
    ROW,
    build_bank,
    evaluate,
    load_network,
    main,
    score,
    table,
)
from recipes.measurement import mean_with_error, weights_sha256

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def network(toy_model):
    return load_network(toy_model, CPU)


@pytest.fixture(scope="module")
def bank(network):
    return build_bank(network, 40, size=56, device=CPU)


def test_the_guesses_are_geometric_means_of_the_bank_without_sky(bank):
    scenes = render(range(HELD_OUT, HELD_OUT + 40), size=56)
    logs = torch.where(scenes.sky[:, 0], torch.nan, scenes.depth[:, 0]).log().double()
    assert torch.allclose(bank.pixel_depth.double().log(), logs.nanmean(0), atol=1e-5)
    assert torch.allclose(bank.row_depth[:, 3].double().log(), logs.transpose(0, 1).flatten(1).nanmean(1), atol=1e-5)
    assert (bank.row_depth == bank.row_depth[:, :1]).all()


def test_a_network_that_knows_the_depth_has_no_error(bank, network):
    class Knowing(torch.nn.Module):
        def forward(self, pixels):
            scenes = render(range(QUERIES, QUERIES + len(pixels)), size=56)
            return replace(network(pixels), predicted_depth=2 * scenes.depth[:, 0])

    depth = score(Knowing(), bank, TRAINING, 6, size=56, device=CPU)["depth"]
    assert depth[NETWORK]["abs_rel"]["mean"] < 1e-6
    assert depth[NETWORK]["delta1"]["mean"] == 1
    assert depth[NETWORK]["raw_abs_rel"]["mean"] == pytest.approx(1)  # twice as far as it is
    assert depth[NETWORK]["log_scale"]["mean"] == pytest.approx(math.log(2), rel=1e-4)
    assert depth[PIXEL]["abs_rel"]["mean"] > 0.05
    assert depth[ROW]["delta1"]["mean"] < 1


def test_the_guesses_do_not_depend_on_the_network(bank, network):
    def guesses(model):
        depth = score(model, bank, TRAINING, 4, size=56, device=CPU)["depth"]
        return depth[PIXEL], depth[ROW]

    other = type(network)(network.config).eval()
    assert guesses(network) == guesses(other)


def test_a_mean_carries_its_standard_error_and_skips_what_is_unknown():
    values = torch.tensor([1.0, 2.0, 3.0, torch.nan])
    assert mean_with_error(values) == {"mean": 2.0, "se": pytest.approx(1 / 3**0.5, rel=1e-5)}


def test_each_shift_leaves_the_training_ranges_in_its_own_way():
    heights, textures = RANGES["camera heights shifted"], RANGES["textures shifted"]
    assert heights.camera_height[0] > TRAINING.camera_height[1]
    assert heights.textures == TRAINING.textures
    assert not set(textures.textures) & set(TRAINING.textures)
    assert textures.camera_height == TRAINING.camera_height


def test_training_prints_four_scores(network):
    scores = evaluate(network, count=6, bank=24, size=56, device=CPU)
    assert set(scores) == {"abs_rel", "delta1", "raw_abs_rel", "knn_top1"}
    assert 0 <= scores["delta1"] <= 1
    assert 0 <= scores["knn_top1"] <= 1
    assert scores["abs_rel"] > 0


def test_the_command_writes_scores_with_seeds_and_origin(toy_model, tmp_path, monkeypatch, capsys):
    out = tmp_path / "new" / "scores.json"
    monkeypatch.setattr(
        sys, "argv", f"evaluate --model {toy_model} --count 3 --bank 24 --device cpu --out {out}".split()
    )
    main()
    result = json.loads(out.read_text())
    assert set(result["ranges"]) == set(RANGES)
    assert result["scenes"] == {"bank": 24, "queries": 3}
    assert result["weights_sha256"] == weights_sha256(toy_model)
    assert result["versions"]["torch"] == torch.__version__
    printed = capsys.readouterr()
    assert printed.out.strip() == table(result)
    assert "both shifted: 3/3 scenes" in printed.err


def test_another_model_is_refused(monkeypatch):
    monkeypatch.setattr(module, "load_backbone", lambda *_, **__: SimpleNamespace(model=torch.nn.Identity()))
    with pytest.raises(PullbackError, match="expected tiny-scenes or a folder that its recipe wrote"):
        load_network("facebook/dinov2-base", CPU)
