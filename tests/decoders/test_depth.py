"""The depth head that comes with the package for a DINOv2: found by the weights, and the same map as run directly."""

import copy
import json
from dataclasses import asdict

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import pullback as pb
from helpers.families import images_for, model_of, randomized
from pullback import models
from pullback.backbones import load_backbone
from pullback.backbones.shipped import fingerprint
from pullback.decoders import build_decoder
from pullback.decoders.dense import DPT_DEPTH, depth_decoder, load_depth_head
from pullback.errors import DecoderError
from pullback.models.dpt import DPTDepth, DPTDepthConfig
from pullback.operators import JacobianOperator
from pullback.pruning.rules import Rule, Scores, Subject
from pullback.runs.files import write_network

GRIDS = [(3, 3), (2, 3)]


@pytest.fixture(scope="module")
def head() -> DPTDepth:
    """For the small DINOv2 of three blocks; the second is read twice."""
    return randomized(DPTDepth(DPTDepthConfig(24, channels=8, hooks=(0, 1, 1, 2))))


@pytest.fixture
def shipped(tmp_path, monkeypatch, head):
    """The folder of a package that comes with this head, for `model_of("dinov2")` alone."""
    known = fingerprint(load_backbone(model_of("dinov2")))
    write_network(tmp_path / "small-depth", head, {"kind": DPT_DEPTH, **asdict(head.config), "fingerprint": known})
    monkeypatch.setattr(models, "WEIGHTS", tmp_path)
    return tmp_path / "small-depth"


def run_directly(model: torch.nn.Module, head: DPTDepth, images: torch.Tensor) -> torch.Tensor:
    """transformers' own forward, the final norm on its hidden states, and the head."""
    states = model(images, output_hidden_states=True).hidden_states[1:]
    rows, columns = (side // 14 for side in images.shape[-2:])
    return head([model.layernorm(states[layer]) for layer in head.config.hooks], rows, columns)


@pytest.mark.parametrize("grid", GRIDS, ids=["3x3", "2x3"])
def test_decoding_the_features_of_a_probe_is_dinov2_and_the_head_run_directly(shipped, head, grid):
    model, images = model_of("dinov2"), images_for("dinov2", grid)
    with torch.no_grad():
        expected = run_directly(model, head, images)
    assert expected.shape == (2, 14 * grid[0], 14 * grid[1]) and (expected > 0).all() and expected.std() > 1e-3
    probes = [pb.load_probe(model, "depth", layer) for layer in range(3)] + [pb.multi_layer_probe(model, "depth")]
    for probe in probes:
        torch.testing.assert_close(probe(probe.features(images)), expected, rtol=1e-9, atol=1e-9)
    cells = pb.load_probe(model, "depth-3x4", 1)
    wanted = F.adaptive_avg_pool2d(expected, (3, 4))
    torch.testing.assert_close(cells(cells.features(images)), wanted, rtol=1e-9, atol=1e-9)


def test_products_are_those_of_plain_backpropagation(shipped):
    probe = pb.load_probe(model_of("dinov2"), "depth-2x2", 1)
    features = probe.features(images_for("dinov2", (2, 2), batch=1))
    with sdpa_kernel(SDPBackend.MATH):
        dense = torch.func.jacrev(probe.bind(features))(features)
    found = JacobianOperator(probe, features).dense()[0]
    torch.testing.assert_close(found, dense.reshape(found.shape), rtol=1e-8, atol=1e-10)


def test_the_head_is_found_for_copies_of_the_weights(shipped, head):
    half = copy.deepcopy(model_of("dinov2")).half()
    other_mask = copy.deepcopy(model_of("dinov2"))
    other_mask.embeddings.mask_token.data += 1
    for model in (half, other_mask, copy.deepcopy(model_of("dinov2")).float()):
        decoder = build_decoder("depth", load_backbone(model))
        assert decoder.layers == (0, 1, 1, 2) and decoder.normed


def test_the_head_comes_in_the_dtype_of_the_model(shipped):
    model = copy.deepcopy(model_of("dinov2")).float()
    probe = pb.load_probe(model, "depth", 1)
    assert probe(probe.features(images_for("dinov2", (2, 2)).float())).dtype == torch.float32


def test_other_weights_are_refused_with_what_was_expected_and_the_recipe(shipped):
    tuned = copy.deepcopy(model_of("dinov2"))
    for parameter in tuned.encoder.parameters():
        parameter.data *= 1.01
    needs = r"decoder: 'depth' needs a model with a DPT head such as Depth Anything, got Dinov2Model \(dinov2\), or "
    other = r"weights for which the package has one: .*small-depth is .*other weights.*recipes/dinov2_depth\.py"
    with pytest.raises(DecoderError, match=needs + other):
        pb.load_probe(tuned, "depth", 1)
    with pytest.raises(DecoderError, match=r"needs a model with a DPT head .* got ViTModel \(vit\)\.$"):
        pb.load_probe(model_of("vit"), "depth", 1)


def test_another_head_is_another_decoder(head):
    other = randomized(DPTDepth(head.config), seed=1)
    model = model_of("dinov2")
    known = [depth_decoder(one).identity(model) for one in (head, copy.deepcopy(head), other)]
    assert known[0] == known[1] != known[2]


def test_a_pruned_model_is_compared_by_its_depth(shipped):
    backbone = load_backbone(model_of("dinov2"))
    subject = Subject(backbone, build_decoder("depth", backbone), (0,))
    assert subject.depth and subject.dense
    images = images_for("dinov2", (3, 3))
    output, _ = subject.output(Scores(subject).pruned(Rule("drop", "norm", 0.5)), images)
    full = subject.full(images)
    assert output.shape == full.shape == (2, 42, 42) and not torch.equal(output, full)


def test_a_folder_that_is_no_depth_head_is_refused(shipped, tmp_path):
    assert load_depth_head(shipped).config.hooks == (0, 1, 1, 2)
    with pytest.raises(DecoderError, match=r"folder: .*config\.json cannot be read \(.*Expected the folder of a depth"):
        load_depth_head(tmp_path / "nothing")
    config = json.loads((shipped / "config.json").read_text())
    (shipped / "config.json").write_text(json.dumps(config | {"channels": 4}))
    with pytest.raises(DecoderError, match=r"folder: the weights in .* cannot be used: .*Train it again"):
        load_depth_head(shipped)
    (shipped / "config.json").write_text(json.dumps(config | {"kind": "s2vae"}))
    with pytest.raises(DecoderError, match="holds s2vae, expected a dpt-depth"):
        load_depth_head(shipped)
