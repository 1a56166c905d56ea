"""The contract of a backbone: sizes, layers, embeddings, and images that do not fit."""

import re
from dataclasses import replace

import pytest
import torch

from helpers.families import SMALL_MODELS, images_for, model_of
from pullback.backbones import entry_of, list_models, load_backbone
from pullback.backbones.loading import family_of
from pullback.errors import ImageError, ModelError, ShapeError
from pullback.models import EMBEDDED
from pullback.registry import BACKBONES
from pullback.tokens import TokenLayout

PREFIX = {"dinov2-registers": 3, "dinov3": 3, "siglip": 0, "siglip2": 0, "deit": 2, "timm-avg": 3}  # others: 1


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_sizes_are_those_of_the_model(name):
    small, backbone = SMALL_MODELS[name], load_backbone(model_of(name))
    assert backbone.family == small.family
    assert (backbone.depth, backbone.dim, backbone.patch_size) == (small.depth, 24, small.patch_size)
    assert backbone.prefix == PREFIX.get(name, PREFIX.get(small.family, 1))
    assert (backbone.device.type, backbone.dtype) == ("cpu", torch.float64)
    layout = backbone.token_layout(images_for(name, (2, 3)))
    assert layout == TokenLayout(backbone.prefix, (2, 3))
    assert backbone.embed(images_for(name, (2, 3))).shape == (2, layout.tokens, 24)


def test_a_backbone_is_written_in_one_line_without_its_weights():
    written = repr(load_backbone(model_of("dinov2-registers")))
    assert written.startswith("Backbone('Dinov2WithRegistersModel', family dinov2-registers, 3 blocks of width 24")
    assert "\n" not in written and "tensor" not in written


@pytest.mark.parametrize("wrong", [{"prefix": 0}, {"embed_pixels": lambda images: images.flatten(2)}])
def test_an_adapter_whose_tokens_do_not_fit_its_layout_is_refused(wrong):
    backbone, images = replace(load_backbone(model_of("dinov2")), **wrong), images_for("dinov2", (2, 3))
    with pytest.raises(ModelError, match=r"model: embed_pixels of .* returned \[2, .*expected \[B, .*prefix tokens"):
        backbone.features(images, [0])


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_blocks_refer_to_the_models_own_parameters(name):
    backbone = load_backbone(model_of(name))
    storages = {parameter.untyped_storage().data_ptr() for parameter in backbone.parameters()}
    for block in backbone.blocks:
        assert block.query.weight.untyped_storage().data_ptr() in storages
        assert block.mlp.up.weight.untyped_storage().data_ptr() in storages


@pytest.mark.parametrize("name", ["dinov2", "dinov3", "clip"])
def test_several_layers_in_one_pass_equal_the_layers_one_by_one(name):
    backbone, images = load_backbone(model_of(name)), images_for(name, (2, 3))
    together = backbone.features(images, [2, 0, 2])
    assert sorted(together) == [0, 2]
    for layer, tokens in together.items():
        torch.testing.assert_close(tokens, backbone.features(images, [layer])[layer])
    continued = backbone.run(together[0], 1, 3, layout=backbone.token_layout(images))
    torch.testing.assert_close(continued, together[2])


def test_images_are_brought_to_the_models_dtype():
    backbone, images = load_backbone(model_of("dinov2")), images_for("dinov2", (2, 2))
    assert backbone.embed(images.float()).dtype == torch.float64


def test_depth_anything_reads_the_outputs_of_blocks():
    """transformers counts the embedding as stage 0."""
    assert load_backbone(model_of("depth-v1")).hook_layers == (1, 2, 3, 4)
    assert load_backbone(model_of("depth-v2")).hook_layers == (0, 1, 3, 4)
    assert load_backbone(model_of("depth-v2")).hooks_normed
    assert not load_backbone(model_of("depth-raw-hooks")).hooks_normed


@pytest.mark.parametrize(("size", "fits"), [((28, 30), (28, 28)), ((27, 44), (28, 42)), ((5, 5), (14, 14))])
def test_an_image_size_that_the_patches_do_not_divide_is_refused(size, fits):
    backbone = load_backbone(model_of("dinov2"))
    message = f"images: {size[0]}x{size[1]} pixels are not divisible by the patch size 14 of Dinov2Model. Use "
    message = re.escape(f"{message}{fits[0]}x{fits[1]}, for instance load_images(..., size={fits}).")
    for use in (backbone.embed, lambda images: backbone.features(images, [0])):
        with pytest.raises(ImageError, match=message):
            use(torch.zeros(1, 3, *size))


@pytest.mark.parametrize("shape", [(1, 1, 28, 28), (1, 4, 28, 28), (3, 28, 28), (1, 1, 3, 28, 28)])
def test_images_need_a_batch_axis_and_three_channels(shape):
    with pytest.raises(ImageError, match=r"images: expected \[B, 3, H, W\], got"):
        load_backbone(model_of("dinov2")).embed(torch.zeros(*shape))


@pytest.mark.parametrize("layer", [3, 99, -1, True, 1.0, "1", None])
def test_a_layer_is_the_index_of_a_block(layer):
    with pytest.raises(ModelError, match=r"layer: expected a block index from 0 to 2 .* got"):
        load_backbone(model_of("dinov2")).features(images_for("dinov2", (2, 2)), [layer])


def test_a_layout_counts_and_unfolds_its_tokens():
    layout = TokenLayout(prefix=2, grid=(2, 3), views=2)
    assert (layout.patches, layout.tokens) == (6, 16)
    assert layout.patch_mask().tolist() == 2 * ([False] * 2 + [True] * 6)
    numbered = torch.arange(16)[None, :, None]
    unfolded = layout.patch_map(numbered)
    assert unfolded.shape == (1, 2, 2, 3, 1)
    assert unfolded[0, 1, :, :, 0].tolist() == [[10, 11, 12], [13, 14, 15]]
    assert numbered[0, layout.patch_mask(), 0].tolist() == unfolded.flatten().tolist()


def test_a_square_layout_follows_from_the_token_count():
    assert TokenLayout.square(18, prefix=2) == TokenLayout(2, (4, 4))
    for tokens in (19, 1):
        with pytest.raises(
            ShapeError, match=f"features: {tokens} tokens with 2 prefix tokens do not make a square grid"
        ):
            TokenLayout.square(tokens, prefix=2)


def test_the_list_of_models_names_every_family_and_every_embedded_model():
    rows = list_models()
    assert [row[0] for row in rows] == list(BACKBONES)
    assert {entry_of(name).name for name in EMBEDDED} <= {row[0] for row in rows}
    assert all(all(isinstance(cell, str) and cell for cell in row) for row in rows)


def test_a_model_type_belongs_to_one_family():
    types = [kind for entry in BACKBONES.values() for kind in entry.model_types]
    assert len(types) == len(set(types))
    with pytest.raises(ModelError, match="model: no adapter for transformers' model type 'bert'; known are clip"):
        family_of("bert")
