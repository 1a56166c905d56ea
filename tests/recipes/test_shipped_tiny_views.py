"""The small VGGT that comes with the package: it loads by its name, sees, and is what the documents say of it."""

import json
from pathlib import Path

import pytest
import torch

import pullback as pb
from pullback.experiments.scene_taxonomy import numerical_ranks
from pullback.models import EMBEDDED
from pullback.scenes.render import render
from pullback.scenes.splits import HELD_OUT
from recipes.evaluate_tiny_views import MEAN, NETWORK, evaluate, missed, table
from recipes.measurement import weights_sha256

ROOT = Path(__file__).resolve().parents[2]
FOLDER = EMBEDDED["tiny-views"]
PAGE = (ROOT / "docs" / "results" / "tiny-views.md").read_text(encoding="utf-8")
CARD = (FOLDER / "README.md").read_text(encoding="utf-8")
FILES = ("tiny_views_evaluation", "tiny_views_evaluation_16views")
CPU = torch.device("cpu")


def measured(name: str) -> dict:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def model():
    return pb.VGGT.from_pretrained("tiny-views").requires_grad_(False)


def test_it_is_small_enough_to_ship():
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= 8e6


def test_it_loads_by_its_name_as_a_network_and_as_a_probe(model):
    assert model.config.depth == 8 and not model.training
    assert pb.load_probe("tiny-views", "depth-8x8", device="cpu").name == "tiny-views depth-8x8 L06"
    probe = pb.load_probe("tiny-views", "camera", 3, device="cpu")
    scenes = render([HELD_OUT], size=112, views=2).rgb
    torch.testing.assert_close(probe(probe.features(scenes)), model(scenes).pose_enc, rtol=1e-4, atol=1e-5)


def test_it_predicts_scenes_that_it_never_saw_much_better_than_a_guess(model):
    scores = evaluate(model, count=8, views=4, device=CPU)
    assert not missed(scores[NETWORK])
    for name in ("rotation", "translation"):
        assert scores[NETWORK][name]["median"] < 0.2 * scores[MEAN][name]["median"]
    assert scores[NETWORK]["point_error"]["mean"] < 0.4 * scores[MEAN]["point_error"]["mean"]


def test_a_camera_has_at_most_nine_directions_a_view():
    scenes = render([HELD_OUT], size=56, views=3).rgb.double()
    for decoder, bound in (("camera-2", 9), ("camera", 27)):
        probe = pb.load_probe("tiny-views", decoder, 4, device="cpu", dtype=torch.float64)
        (found,), _ = numerical_ranks(probe, scenes)
        assert bound - 3 <= found <= bound


@pytest.mark.parametrize("name", FILES)
def test_results_belong_to_the_shipped_weights_and_are_on_the_page(name):
    result = measured(name)
    assert result["weights_sha256"] == weights_sha256("tiny-views"), "measure again: the weights have changed"
    assert all(row in PAGE for row in table(result).splitlines())
    assert not any(missed(scores[NETWORK]) for scores in result["views"].values())


def test_the_card_shows_the_scores_of_the_network():
    rows = [row for name in FILES for row in table(measured(name)).splitlines() if f"| {NETWORK} |" in row]
    assert len(rows) == 4 and all(row in CARD for row in rows)
    assert "Apache-2.0" in CARD
