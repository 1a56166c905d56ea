"""A head belongs to the weights and the decoder that it was trained for: others are refused, copies are not."""

import copy
import logging

import pytest
import torch

import pullback as pb
from helpers.families import SMALL_MODELS, model_of, randomized, save
from helpers.toys import tiny_head, tiny_spn
from pullback.backbones.weights import block_hashes, same_weights
from pullback.decoders import build_decoder
from pullback.errors import ModelError
from pullback.learning.head import ImportanceHead
from pullback.learning.pretrained import Origin
from pullback.learning.train_head import origin_of
from pullback.pruning.rules import Subject, load_networks

PLAN = {"ratio": 0.4, "stages": [1]}


def float32() -> torch.nn.Module:
    return copy.deepcopy(model_of("dinov2")).float()


def other() -> torch.nn.Module:
    return randomized(SMALL_MODELS["dinov2"].make(), seed=1).float()


def trained_on(model: torch.nn.Module, **changes) -> ImportanceHead:
    """A head that says it was, as `train_head` does."""
    origin = origin_of(pb.load_probe(model, "cls", 1), 3, (28, 42))
    return tiny_head(dim=24).describe(origin=Origin(**(vars(origin) | changes))).eval()


def test_the_model_itself_is_accepted(caplog):
    pb.prune(float32(), trained_on(float32()), **PLAN)
    assert "cannot tell" not in caplog.text


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_so_is_a_copy_of_it_in_another_dtype(dtype, caplog):
    pb.prune(float32().to(dtype), trained_on(float32()), **PLAN)
    pb.prune(float32(), trained_on(float32().to(dtype)), **PLAN)
    assert "cannot tell" not in caplog.text


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_other_weights_are_refused_in_every_dtype(dtype):
    with pytest.raises(ModelError, match=r"head: it was trained for other weights than those of Dinov2Model\. Train"):
        pb.prune(other().to(dtype), trained_on(float32()), **PLAN)
    with pytest.raises(ModelError, match="head: it was trained for other weights"):
        pb.prune(other(), trained_on(float32().to(dtype)), **PLAN)


def test_one_number_in_one_block_is_enough():
    changed = float32()
    with torch.no_grad():
        next(iter(changed.encoder.parameters() if hasattr(changed, "encoder") else changed.parameters())).view(-1)[
            0
        ] += 1
    hashes = block_hashes(pb.load_backbone(float32()))
    assert same_weights(hashes, pb.load_backbone(float32())) is True
    changed = pb.load_backbone(float32())
    with torch.no_grad():
        changed.blocks[-1].mlp.up.weight.view(-1)[0] += 1
    assert same_weights(hashes, changed) is False


def test_the_class_that_holds_the_weights_does_not_matter(tmp_path, caplog):
    """Ours, as `load_probe` reads a folder, and the one of transformers."""
    save(float32(), tmp_path)
    ours = pb.load_probe(tmp_path, "cls", 1, device="cpu").backbone.model
    assert type(ours) is not type(float32())
    pb.prune(float32(), trained_on(ours), **PLAN)
    assert "cannot tell" not in caplog.text


def test_where_it_cannot_be_told_a_warning_says_so(caplog):
    with caplog.at_level(logging.WARNING):
        pb.prune(float32().half(), trained_on(float32().bfloat16()), **PLAN)
    assert (
        "head: cannot tell whether it was trained for the weights of Dinov2Model: it was trained on bfloat16"
        in caplog.text
    )


def test_a_head_of_an_older_version_is_accepted_with_its_own_model_and_doubted_with_others(caplog):
    old = trained_on(float32(), blocks={})
    pb.prune(float32(), old, **PLAN)
    assert "cannot tell" not in caplog.text
    with caplog.at_level(logging.WARNING):
        pb.prune(other(), old, **PLAN)
    assert "head: cannot tell" in caplog.text and "older version" in caplog.text


def test_a_metric_network_and_a_saved_model_are_checked_too(tmp_path):
    spn = tiny_spn(dim=24).describe(origin=trained_on(float32()).config.origin).eval()
    with pytest.raises(ModelError, match="head: it was trained for other weights"):
        pb.prune(other(), spn, **PLAN)
    with pytest.raises(ModelError, match="modes: it was trained for other weights"):
        pb.prune(other(), "norm", modes=spn, preset="paper", **PLAN)
    pb.prune(float32(), trained_on(float32()), **PLAN).save_pretrained(tmp_path)
    again = pb.PrunedModel.from_pretrained(tmp_path)
    assert again.scores[0].head.config.origin.decoder_identity == "layers 2, version pullback-1"
    with pytest.raises(ModelError, match="head: it was trained for other weights"):
        pb.PrunedModel.from_pretrained(tmp_path, model=other())


def test_a_plan_for_a_budget_is_refused_before_anything_is_tried():
    images = torch.randn(2, 3, 28, 42)
    with pytest.raises(ModelError, match="heads: it was trained for other weights"):
        pb.plan_pruning(other(), {1: trained_on(float32())}, images, flops=0.9)


def subject(decoder) -> Subject:
    backbone = pb.load_backbone(float32())
    return Subject(backbone, build_decoder(decoder, backbone), (1,))


def load(folder, chosen: Subject) -> list:
    identity = chosen.decoder.identity(chosen.backbone.model)
    return load_networks(ImportanceHead, "head", [folder], chosen, identity)


def test_a_comparison_refuses_a_head_for_another_decoder(tmp_path):
    folder = trained_on(float32()).save_pretrained(tmp_path)
    assert len(load(folder, subject("cls"))) == 1
    with pytest.raises(ModelError, match="head: it was trained for decoder cls, and is used with decoder mean"):
        load(folder, subject("mean"))

    def cls(tokens):
        return tokens[:, 0] * 2

    with pytest.raises(ModelError, match=r"trained for decoder .*pullback-1, and is used with decoder .*code"):
        load(folder, subject(cls))


def test_cells_of_a_depth_map_are_no_other_decoder():
    origin = Origin(decoder="depth-8x8", decoder_identity="layers 1 2, version 1")
    origin.check("head", family="depth-anything", layer=1, decoder="depth", decoder_identity="layers 1 2, version 1")
    with pytest.raises(ModelError, match="trained for decoder depth, and is used with decoder cls"):
        origin.check("head", family="depth-anything", layer=1, decoder="cls")
