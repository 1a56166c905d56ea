"""SigLIP 2 for images of any shape: its pruned copies take patches, as the model does."""

import numpy as np
import pytest
import torch
import transformers as tf
from PIL import Image

import pullback as pb
from helpers.families import images_for, model_of, patches_for
from pullback.backbones.outputs import as_images, as_patches, attention_pool, own_output, patch_inputs
from pullback.errors import ShapeError

NAMES = ["siglip2", "siglip2-classifier"]


def pruned(name, **options):
    return pb.prune(model_of(name), "norm", **{"ratio": 0.5, "stages": [0], **options})


@pytest.mark.parametrize("grid", [(3, 3), (2, 3), (4, 1)])
def test_images_are_cut_into_patches_and_put_together_again(grid):
    images = images_for("siglip2", grid)
    ours, theirs = patch_inputs(images, 8), patches_for(images, 8)
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert torch.equal(as_images(**_named(ours), patch=8), images)
    padded = _named(ours) | {"patches": torch.nn.functional.pad(ours["pixel_values"], (0, 0, 0, 5)), "mask": None}
    assert torch.equal(as_images(**padded, patch=8), images)


def _named(inputs):
    return {
        "patches": inputs["pixel_values"],
        "mask": inputs["pixel_attention_mask"],
        "shapes": inputs["spatial_shapes"],
    }


def test_patches_are_those_of_the_image_processor():
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 48, 3), dtype=np.uint8))
    inputs = tf.Siglip2ImageProcessorPil(patch_size=8, max_num_patches=24)(picture, return_tensors="pt")
    whole = torch.from_numpy(np.array(picture)).movedim(-1, 0)[None].float() / 127.5 - 1
    assert inputs["spatial_shapes"].tolist() == [[4, 6]]
    torch.testing.assert_close(as_patches(whole, 8), inputs["pixel_values"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_with_nothing_removed_the_output_is_the_models(name):
    model, inputs = model_of(name), patches_for(images_for(name, (2, 3)), 8)
    whole = model(**inputs)
    same = pruned(name, ratio=0.0)(**inputs)
    forced = pruned(name, ratio=0.0).pruned(images_for(name, (2, 3)))
    assert type(forced) is type(whole)
    for key, value in whole.items():
        assert torch.equal(same[key], value)
        torch.testing.assert_close(forced[key], value, rtol=1e-9, atol=1e-9)


def test_pooling_attends_to_what_is_left():
    fast, images = pruned("siglip2"), images_for("siglip2", (3, 3))
    output, run = fast.with_record(images)
    expected = attention_pool(fast.model.head, fast.backbone.norm(run.taps[-1]), run.log_sizes)
    torch.testing.assert_close(fast(**patches_for(images, 8)).pooler_output, expected)
    assert output.last_hidden_state.shape == (2, 5, 24)
    assert pruned("siglip2-classifier")(**patches_for(images, 8)).logits.shape == (2, 5)


def test_patches_that_fill_up_a_batch_are_left_out():
    """They are masked in the model, so its pooled output does not depend on them either."""
    inputs = patches_for(images_for("siglip2", (2, 3)), 8)
    filled = {
        "pixel_values": torch.nn.functional.pad(inputs["pixel_values"], (0, 0, 0, 4), value=7.0),
        "pixel_attention_mask": torch.nn.functional.pad(inputs["pixel_attention_mask"], (0, 4)),
        "spatial_shapes": inputs["spatial_shapes"],
    }
    fast = pruned("siglip2")
    assert torch.equal(fast(**filled).pooler_output, fast(**inputs).pooler_output)
    model = model_of("siglip2")
    torch.testing.assert_close(model(**filled).pooler_output, model(**inputs).pooler_output, rtol=1e-6, atol=1e-6)


def test_images_of_several_shapes_and_images_instead_of_patches_are_refused():
    fast, images = pruned("siglip2"), images_for("siglip2", (2, 3))
    inputs = patches_for(images, 8)
    shapes = torch.tensor([[2, 3], [3, 2]])
    with pytest.raises(ShapeError, match=r"spatial_shapes: a pruned model takes images of one shape .* \[3, 2\]\]"):
        fast(**inputs | {"spatial_shapes": shapes})
    with pytest.raises(ShapeError, match=r"pixel_values: SigLIP 2 takes patches \[B, P, 192\] .* got \[2, 3, 16, 24\]"):
        fast(images)
    with pytest.raises(ShapeError, match=r"pixel_values: SigLIP 2 takes patches"):
        fast(inputs["pixel_values"])


def test_a_model_is_called_on_images_whatever_it_takes():
    for name in ("siglip2", "siglip", "dinov2", "timm-token"):
        model, images = model_of(name), images_for(name, (2, 3))
        backbone = pb.load_backbone(model)
        full, same = own_output(model, backbone, images), own_output(pruned(name, ratio=0.0), backbone, images)
        assert type(full) is type(same)


def test_saved_and_loaded(tmp_path):
    fast, inputs = pruned("siglip2"), patches_for(images_for("siglip2", (3, 3)), 8)
    again = pb.PrunedModel.from_pretrained(fast.save_pretrained(tmp_path)).double()
    torch.testing.assert_close(again(**inputs).pooler_output, fast(**inputs).pooler_output, rtol=1e-3, atol=1e-3)
