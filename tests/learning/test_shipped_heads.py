"""Heads that come with the package are found by the weights, the decoder and the layer."""

import copy
import json
from dataclasses import replace

import pytest
import torch

import pullback as pb
from helpers.families import model_of, seeded_vit
from pullback import models
from pullback.backbones import load_backbone, shipped
from pullback.backbones.shipped import fingerprint
from pullback.errors import ModelError
from pullback.evaluation import cosine_degradation
from pullback.learning.head import ImportanceHead
from pullback.learning.pretrained import Origin
from pullback.learning.shipped_heads import own_decoder, shipped_head, shipped_heads

CLIP, PHOTOGRAPHS = "models/clip-vit-base-patch16", "data/imagenet_val/diag"


@pytest.fixture
def dinov2():
    return copy.deepcopy(model_of("dinov2")).float()


@pytest.fixture
def weights(tmp_path, monkeypatch, dinov2):
    """The folder in which things ship: heads of the small DINOv2 for blocks 0 and 1, and one for its depth."""
    monkeypatch.setattr(models, "WEIGHTS", tmp_path)
    backbone = load_backbone(dinov2)
    for decoder, layer in (("cls", 0), ("cls", 1), ("depth", 1)):
        origin = Origin(backbone.family, layer=layer, decoder=decoder, fingerprint=fingerprint(backbone))
        head = ImportanceHead(backbone.dim, 16).describe(origin=origin).half()
        head.save_pretrained(tmp_path / "small-heads" / f"{decoder}-L{layer:02d}")
    return tmp_path


def test_a_head_is_found_by_weights_decoder_and_layer(weights, dinov2):
    backbone = load_backbone(dinov2)
    known = shipped_heads(backbone, "cls")
    assert known == {layer: weights / "small-heads" / f"cls-L{layer:02d}" for layer in (0, 1)}
    assert list(shipped_heads(backbone, "depth-8x8")) == [1]  # the same decoder, averaged down to cells
    assert not shipped_heads(backbone, "mean")
    head = shipped_head(backbone, "cls", 1)
    assert head.layer == 1 and not any(parameter.requires_grad for parameter in head.parameters())
    assert head.project.weight.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_copy_in_another_dtype_is_the_same_model(weights, dinov2, dtype):
    assert list(shipped_heads(load_backbone(dinov2.to(dtype)), "cls")) == [0, 1]


def test_other_weights_find_nothing(weights, dinov2):
    with torch.no_grad():
        for parameter in dinov2.parameters():
            parameter.mul_(1.05)
    backbone = load_backbone(dinov2)
    assert not shipped_heads(backbone, "cls")
    with pytest.raises(ModelError, match=r"for these weights there is none.*pullback train heads MODEL --decoder cls"):
        shipped_head(backbone, "cls", 1)


def test_the_error_says_what_ships_and_how_to_train(weights, dinov2):
    message = r"score: no importance head.*'cls', L02; .*are cls L00, L01; depth L01.*pullback train heads"
    with pytest.raises(ModelError, match=message):
        shipped_head(load_backbone(dinov2), "cls", 2)


def test_one_fingerprint_is_computed_however_many_heads_there_are(weights, dinov2, monkeypatch):
    calls, compared = [], []
    own, difference = shipped.fingerprint, shipped.difference
    monkeypatch.setattr(shipped, "fingerprint", lambda backbone: calls.append(1) or own(backbone))
    monkeypatch.setattr(shipped, "difference", lambda *both: compared.append(1) or difference(*both))
    assert len(shipped_heads(load_backbone(dinov2), "cls")) == 2
    assert len(calls) == len(compared) == 1


def test_they_have_names(weights):
    assert ImportanceHead.from_pretrained("small-heads/cls-L01").layer == 1


@pytest.mark.parametrize(
    ("name", "decoder"),
    [("dinov2", "cls"), ("clip", "projection"), ("siglip", "pool"), ("vit-classifier", "logits")],
)
def test_the_decoder_is_what_the_models_own_output_reads(name, decoder):
    assert own_decoder(load_backbone(model_of(name))) == decoder


def test_of_a_dense_model_it_is_the_depth():
    assert own_decoder(load_backbone(seeded_vit())) == "depth"


def test_importance_is_a_score_by_name(weights, dinov2, tmp_path):
    images = torch.randn(2, 3, 56, 56)
    pruned = pb.prune(dinov2, "importance", ratio=0.5, stages=[0, 1])
    assert [score.head.layer for score in pruned.scores] == [0, 1]
    mixed = pb.prune(dinov2, ["norm", "importance"], ratio=0.5, stages=[0, 1])
    assert mixed.scores[1].head.layer == 1 and not hasattr(mixed.scores[0], "head")
    pruned.save_pretrained(tmp_path / "fast")
    loaded = pb.PrunedModel.from_pretrained(tmp_path / "fast")
    with torch.no_grad():
        assert torch.equal(loaded(images).pooler_output, pruned(images).pooler_output)


def test_without_a_head_for_a_stage_it_says_so(weights, dinov2):
    with pytest.raises(ModelError, match=r"score: no importance head that comes with the package .*L02"):
        pb.prune(dinov2, "importance", ratio=0.5, stages=[1, 2])


def test_plans_are_made_with_all_that_ship(weights, dinov2):
    images = torch.randn(2, 3, 56, 56)
    found = pb.plan_pruning(dinov2, "importance", images, flops=0.95, stages=1, rounds=1)
    assert found.plan.stages[0] in (0, 1)
    assert pb.plan_pruning(dinov2, {1: "importance"}, images, flops=0.95, rounds=1).plan.stages == (1,)
    with pytest.raises(ModelError, match="heads: no importance head"):
        pb.plan_pruning(dinov2, {2: "importance"}, images, flops=0.95, rounds=1)


def test_a_head_of_other_weights_is_refused_by_its_fingerprint(weights, dinov2):
    head = ImportanceHead.from_pretrained("small-heads/cls-L01")
    known = json.loads(json.dumps(head.config.origin.fingerprint))
    known["weights"]["block 0"] = known["weights"]["block 1"]
    head.describe(origin=replace(head.config.origin, fingerprint=known))
    with pytest.raises(ModelError, match="head: it was trained for other weights"):
        pb.prune(dinov2, head, ratio=0.5, stages=[1])


@pytest.mark.weights(CLIP, PHOTOGRAPHS)
def test_clip_is_pruned_out_of_the_box(shared):
    probe = pb.load_probe(shared / CLIP, "projection", device="cpu")
    model, images = probe.backbone.model, probe.load_images(shared / PHOTOGRAPHS, limit=8)
    lost = {}
    with torch.no_grad():
        whole = model(images).image_embeds
        for score in ("importance", "norm"):
            fast = pb.prune(model, score, ratio=0.5, stages=[8], output="cls")
            lost[score] = cosine_degradation(fast(images).image_embeds, whole).mean().item()
    assert list(shipped_heads(probe.backbone, "projection")) == list(range(2, 11))
    assert lost["importance"] < 0.7 * lost["norm"]
    with pytest.raises(ModelError, match=r"'projection', L01; .*are projection L02, .*L10.*pullback train heads"):
        pb.prune(model, "importance", ratio=0.5, stages=[1])
    with torch.no_grad():
        other = copy.deepcopy(model)
        for parameter in other.parameters():
            parameter.mul_(1.05)
    with pytest.raises(ModelError, match="for these weights there is none"):
        pb.prune(other, "importance", ratio=0.5, stages=[3])
