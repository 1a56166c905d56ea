"""The depth head that comes for DINOv2-S: found by the weights, it sees, and is what the documents say of it."""

import copy
import json
from pathlib import Path

import pytest
import torch

import pullback as pb
from pullback.backbones import load_backbone
from pullback.backbones.shipped import shipped
from pullback.decoders.dense import DPT_DEPTH, load_depth_head
from pullback.errors import DecoderError
from pullback.models import WEIGHTS
from pullback.runs.provenance import file_hash
from recipes.evaluate_dinov2_depth import ALL, CONSTANT, PIXEL, SCENES, SOURCES, TRAINED, errors, predicted
from recipes.rgbd import read_pairs

ROOT = Path(__file__).resolve().parents[2]
FOLDER = WEIGHTS / "dinov2-small-depth"
MODEL, PAIRS = "models/dinov2-small", "data/rgbd"


def measured() -> dict:
    return json.loads((ROOT / "benchmarks/results/dinov2_depth_evaluation.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def model(shared):
    return load_backbone(shared / MODEL, device="cpu").model


def test_it_is_at_most_6_megabytes_and_names_its_data_and_terms():
    assert 3.5e6 < sum(file.stat().st_size for file in FOLDER.iterdir()) < 3.7e6
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    for word in ("TUM RGB-D CC BY 4.0", "SUN RGB-D and NYUv2 were released for research", "Apache-2.0", "Limits:"):
        assert word in " ".join(card.split())


def test_the_figures_belong_to_the_shipped_weights_which_beat_every_guess():
    found = measured()
    assert found["weights_sha256"][TRAINED] == file_hash(FOLDER / "model.safetensors"), "measure again"
    for place in (ALL, SOURCES):
        for other in (SCENES, CONSTANT, PIXEL):
            gain = found["ahead_of"][other][place]["raw_delta1"]
            assert (gain["mean"] - 2 * gain["se"] if isinstance(gain, dict) else gain) > 0, (place, other)


@pytest.mark.weights(MODEL)
def test_it_is_found_for_dinov2_small_as_it_is_in_float16_and_with_another_mask_token(model):
    half = copy.deepcopy(model).half()
    masked = copy.deepcopy(model)
    masked.embeddings.mask_token.data.normal_(generator=torch.Generator().manual_seed(0))
    for one in (model, half, half.float(), masked):
        assert shipped(DPT_DEPTH, load_backbone(one), fix="") == FOLDER


@pytest.mark.weights(MODEL)
def test_a_fine_tuned_dinov2_is_refused(model):
    tuned = copy.deepcopy(model)
    for layer in tuned.encoder.layer:
        layer.mlp.fc2.weight.data *= 1.01
    with pytest.raises(DecoderError, match=r"dinov2-small-depth is .*other weights.*recipes/dinov2_depth\.py"):
        pb.load_probe(tuned, "depth", 8)


@pytest.mark.weights(MODEL, PAIRS)
def test_its_depth_of_photographs_is_sensible_and_that_of_the_probe(model, shared):
    """Four held-out photographs: in metres nearer to the truth than a constant that knows their median."""
    pairs = read_pairs(shared / PAIRS, "heldout")
    chosen = [0, len(pairs) // 4, len(pairs) // 2, len(pairs) - 1]
    probe = pb.load_probe(model, "depth", 8)
    images = probe.backbone.read_images([str(pairs.paths[index]) for index in chosen]).pixels
    depth = probe(probe.features(images))
    assert depth.shape == (4, 224, 224)
    torch.testing.assert_close(depth, predicted(probe.backbone, load_depth_head(FOLDER), images), rtol=1e-3, atol=1e-3)
    truth = pairs.centred_depth(probe.backbone.pixel_format())[chosen]
    blind = errors(torch.ones(224, 224), truth)["delta1"].mean()
    assert errors(depth, truth)["delta1"].mean() > blind + 0.1
    assert 0.5 < (depth.median() / truth[truth > 0].median()) < 2
    cells = pb.load_probe(model, "depth-8x8", 8)
    assert cells(cells.features(images)).shape == (4, 8, 8)
