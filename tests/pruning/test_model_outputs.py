"""Which outputs of a pruned model can be read as those of the model, and what heads that read patch tokens get."""

import logging
from dataclasses import replace

import pytest
import torch

import pullback as pb
from helpers.families import images_for, model_of, random_normal
from helpers.registry import kept_tables
from pullback.backbones import load_backbone
from pullback.backbones.outputs import attention_pool, pooling_head
from pullback.errors import ModelError, PullbackError
from pullback.pruning.model import PrunedModel, _say_once
from pullback.pruning.plan import preset
from pullback.registry import BACKBONES

AVERAGING = ["dinov2-classifier", "dinov2-registers-classifier", "clip-classifier", "siglip-classifier"]
CLASS_TOKEN = ["vit-classifier", "deit-classifier", "deit-two-classifiers"]


def pruned(name, **options):
    return pb.prune(model_of(name), "norm", **{"ratio": 0.5, "stages": [0], **options})


@pytest.mark.parametrize("name", AVERAGING)
def test_a_classifier_that_averages_patches_gets_all_of_them_back(name):
    fast, images = pruned(name), images_for(name, (3, 3))
    output, run = fast.with_record(images)
    assert fast.plan.reinsert != "none" and run.records[0].removed.shape == (2, 4)
    assert run.taps[-1].shape == (2, fast.backbone.prefix + 9, 24) and output.logits.shape == (2, 5)
    assert torch.equal(fast(images).logits, output.logits)
    with pytest.raises(
        PullbackError, match=r"dense: the classifier of .*ForImageClassification reads all patch tokens"
    ):
        pruned(name, dense=False)
    plan = preset("best", 0.5, [0], depth=3)
    with pytest.raises(PullbackError, match=r"plan: the classifier of .* reads all patch tokens"):
        PrunedModel(model_of(name), plan, ["norm"])(images)


@pytest.mark.parametrize("name", CLASS_TOKEN)
def test_a_classifier_that_reads_the_class_token_needs_no_patches_back(name):
    fast, images = pruned(name), images_for(name, (3, 3))
    output, run = fast.with_record(images)
    assert fast.plan.reinsert == "none" and run.taps[-1].shape[1] == fast.backbone.prefix + 5
    hidden = fast.backbone.norm(run.taps[-1])
    heads = [module for name, module in fast.model.named_children() if name.endswith("classifier")]
    expected = sum(head(hidden[:, place]) for place, head in enumerate(heads)) / len(heads)
    torch.testing.assert_close(output.logits, expected, rtol=1e-9, atol=1e-9)


def test_tokens_that_are_missing_are_announced_once_and_written_in_the_repr(caplog):
    _say_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        fast = pruned("dinov2")
        pruned("clip")
    said = (
        "has fewer of them than the model's: pooled outputs and the class token are safe to read, patch tokens are not"
    )
    assert caplog.text.count(said) == 1 and "prune with dense=True" in caplog.text
    written = repr(fast)
    assert written.startswith("PrunedModel(Dinov2Model, share of the patch tokens removed: 0.5 after block 0; last_")
    assert said in written and "\n" not in written


@pytest.mark.parametrize(
    ("name", "options"),
    [("dinov2", {"dense": True}), ("dinov2", {"ratio": 0.0}), ("vit-classifier", {}), ("depth-v2", {})],
)
def test_nothing_is_said_where_the_output_has_the_shape_of_the_models(name, options, caplog):
    _say_once.cache_clear()
    fast, images = pruned(name, **options), images_for(name, (3, 3))
    assert "has fewer of them" not in caplog.text
    assert "its output has the shape of the model's" in repr(fast)
    ours, theirs = fast(images), model_of(name)(images)
    assert [value.shape for value in ours.to_tuple()] == [value.shape for value in theirs.to_tuple()]


def test_dense_brings_the_patches_back_to_their_places():
    """Patches that stay come back at their own places, in the model's order."""
    images = images_for("dinov2", (3, 3))
    fast = pruned("dinov2", dense=True, preset="drop")
    output, run = fast.with_record(images)
    kept = run.records[0].kept
    assert output.last_hidden_state.shape == model_of("dinov2")(images).last_hidden_state.shape
    short = pruned("dinov2", preset="drop")(images).last_hidden_state
    back = output.last_hidden_state.gather(1, kept[..., None].expand(-1, -1, 24))
    torch.testing.assert_close(back, short, rtol=1e-9, atol=1e-9)


def test_attention_pooling_counts_a_merged_token_as_often_as_what_it_stands_for():
    backbone = load_backbone(model_of("siglip"))
    head, tokens = pooling_head(backbone), random_normal(2, 4, 24)
    repeated = tokens.repeat_interleave(torch.tensor([1, 3, 2, 1]), 1)
    sizes = torch.tensor([1.0, 3.0, 2.0, 1.0], dtype=torch.float64).expand(2, -1)
    ours = attention_pool(head, tokens, sizes.log())
    torch.testing.assert_close(ours, head(repeated), rtol=1e-9, atol=1e-9)
    assert not torch.allclose(ours, head(tokens))


def test_siglip_pools_what_is_left_with_its_sizes():
    fast, images = pruned("siglip", ratio=0.4), images_for("siglip", (3, 3))
    output, run = fast.with_record(images)
    hidden = fast.backbone.norm(run.taps[-1])
    assert run.log_sizes.shape == hidden.shape[:2] == (2, 5) and run.log_sizes.max() > 0
    expected = attention_pool(fast.model.head, hidden, run.log_sizes)
    torch.testing.assert_close(output.pooler_output, expected)
    torch.testing.assert_close(output.last_hidden_state, hidden)
    assert pruned("siglip", preset="drop").with_record(images)[1].log_sizes is None
    assert pruned("siglip", dense=True).with_record(images)[1].log_sizes is None


def test_a_family_without_an_assembler_is_refused_and_its_tokens_are_still_to_be_had():
    model, images = model_of("dinov2"), images_for("dinov2", (3, 3))
    with kept_tables():
        pb.register_backbone(replace(BACKBONES["dinov2"], assemble=None))
        with pytest.raises(
            ModelError, match=r"dinov2 models cannot be pruned in place; known are .*assemble=.*run_pruned"
        ):
            pb.prune(model, "norm", ratio=0.5, stages=[1])
        fast = PrunedModel(model, preset("best", 0.5, [0], depth=3), ["norm"])
        assert not fast.has_output and fast.run(images, [2]).taps[0].shape == (2, 6, 24)
        with pytest.raises(ModelError, match="dinov2 models cannot be pruned in place"):
            fast(images)
