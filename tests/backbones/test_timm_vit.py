"""ViTs with timm's names: known by their parts, and refused where they are not plain. The law is in tests/probes."""

import pytest
import torch
from torch import nn

import pullback as pb
from helpers.families import images_for, model_of, randomized
from helpers.timm_names import TimmViT
from pullback.backbones import load_backbone
from pullback.errors import DecoderError, ImageError, ModelError


def vit(*arguments, **options):
    return randomized(TimmViT(*arguments, **options))


def test_a_module_is_known_by_its_parts_and_may_say_how_images_are_normalised():
    model = vit("token")
    assert load_backbone(model).family == "timm-vit"
    assert load_backbone(model).preprocessing.mean == (0.485, 0.456, 0.406)
    model.pretrained_cfg = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.4, 0.3), "input_size": (3, 24, 24)}
    published = load_backbone(model).preprocessing
    assert (published.mean, published.std, published.size) == ((0.5, 0.5, 0.5), (0.5, 0.4, 0.3), 24)


@pytest.mark.parametrize("pool", ["token", "avg"])
def test_every_place_of_the_last_norm_gives_the_models_own_output(pool):
    for options in ({"fc_norm": False}, {"registers": 2, "fc_norm": False}, {"classes": 0}):
        model, images = vit(pool, **options), images_for("timm-token", (3, 3))
        output = pb.prune(model, "norm", ratio=0.0, stages=[0]).pruned(images)
        torch.testing.assert_close(output, model(images), rtol=1e-9, atol=1e-9)


def test_a_pruned_copy_returns_what_the_model_returns():
    images = images_for("timm-token", (3, 3))
    token, mean = (pb.prune(model_of(name), "norm", ratio=0.5, stages=[0]) for name in ("timm-token", "timm-avg"))
    assert token(images).shape == mean(images).shape == (2, 5)
    assert token.plan.reinsert == "none" and mean.plan.reinsert != "none"
    assert "its output has the shape of the model's" in repr(token)


def test_images_of_another_size_need_a_model_that_is_made_for_them():
    images = images_for("timm-token", (2, 3))
    with pytest.raises(ImageError, match=r"takes 24x24 pixels, got 16x24. Resize .* dynamic_img_size=True"):
        load_backbone(vit("token", dynamic=False)).embed(images)


def test_without_classes_there_are_no_logits():
    with pytest.raises(DecoderError, match="TimmViT has no classifier"):
        pb.load_probe(vit("token", classes=0), "logits", 1)


class AfterNorm(nn.Module):
    """A block with the same names, whose norms come after attention and MLP."""

    def __init__(self, block):
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = block.norm1, block.attn, block.norm2, block.mlp

    def forward(self, x):
        x = x + self.norm1(self.attn(x))
        return x + self.norm2(self.mlp(x))


def changed(change):
    model = vit("token")
    change(model)
    return model.double().eval()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: setattr(m, "rope", nn.Linear(2, 2)), "has the names of a ViT of timm, and rope besides"),
        (lambda m: setattr(m, "dist_token", nn.Parameter(torch.ones(1, 1, 24))), "and dist_token besides"),
        (lambda m: m.blocks.__setitem__(1, AfterNorm(m.blocks[1])), r"block 1 of TimmViT is no plain .*differs by"),
        (
            lambda m: setattr(m.blocks[2].attn, "q_norm", nn.LayerNorm(8)),
            r"block 2 of TimmViT .*differs by",
        ),
        (lambda m: setattr(m.blocks[0].mlp, "fc2", nn.Linear(20, 24)), "block 0 of TimmViT is no plain pre-norm block"),
        (lambda m: setattr(m.blocks[0], "norm1", nn.RMSNorm(24)), "expected a LayerNorm, got RMSNorm"),
        (
            lambda m: setattr(m, "norm", nn.Identity()),
            "expected one final LayerNorm in TimmViT, .* got 0",
        ),
        (lambda m: setattr(m.patch_embed, "proj", nn.Conv2d(3, 24, 8, stride=4)), "expected square ones that do not"),
        (lambda m: delattr(m.patch_embed, "grid_size"), "patch_embed of TimmViT has no grid_size"),
        (lambda m: setattr(m, "cls_token", None), "has no cls_token, but pools by 'token'"),
        (lambda m: delattr(m, "cls_token"), "has no cls_token, but pools by 'token'"),
        (lambda m: delattr(m, "norm"), "expected one final LayerNorm in TimmViT, .* got 0"),
        (
            lambda m: setattr(m, "forward", lambda x: m.head(m.forward_features(x)[:, 1:].mean(1))),
            "its output differs from what such parts give",
        ),
    ],
)
def test_what_is_no_plain_vit_is_refused_with_the_part_that_is_not(change, message):
    with pytest.raises(ModelError, match=message):
        load_backbone(changed(change))


def test_a_pooling_that_is_not_known_can_be_probed_but_not_pruned():
    model, images = changed(lambda m: setattr(m, "global_pool", "map")), images_for("timm-token", (3, 3))
    probe = pb.load_probe(model, "cls", 1)
    torch.testing.assert_close(probe(probe.features(images)), model.forward_features(images)[:, 0])
    with pytest.raises(ModelError, match=r"pools its tokens by 'map'; a pruned copy knows 'token' and 'avg'"):
        pb.prune(model, "norm", ratio=0.5, stages=[0])(images)


@pytest.mark.parametrize("other", [lambda x: {"tokens": x}, lambda x, mask: x], ids=["another output", "another input"])
def test_a_model_that_returns_something_else_can_be_probed_but_not_pruned(other):
    model = changed(lambda m: setattr(m, "forward", other))
    assert pb.load_probe(model, "cls", 1).backbone.classifier is None
    with pytest.raises(ModelError, match="a pruned copy knows 'token' and 'avg'"):
        pb.prune(model, "norm", ratio=0.5, stages=[0])(images_for("timm-token", (3, 3)))


def test_in_half_precision_and_on_a_copy_of_another_dtype():
    fast = pb.prune(vit("avg", registers=2), "norm", ratio=0.5, stages=[0])
    images = images_for("timm-avg", (3, 3))
    wide = fast(images)
    assert (fast.to(torch.float32)(images.float()).double() - wide).abs().max() < 1e-3
    assert fast.to(torch.bfloat16)(images.bfloat16()).dtype == torch.bfloat16
