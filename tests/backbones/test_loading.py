"""Loading: folders in transformers' format for every family."""

import json

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

import pullback as pb
from helpers.families import GRIDS, SMALL_MODELS, images_for, model_of, randomized, save
from pullback.backbones import entry_of, load_backbone, resolve_device
from pullback.errors import DecoderError, ModelError
from pullback.models import EMBEDDED

ON_CPU = dict(device="cpu", dtype=torch.float64)


@pytest.fixture
def saved(tmp_path):
    """The small DINOv2 as a folder."""
    model_of("dinov2").save_pretrained(tmp_path)
    return tmp_path


def last_layer(backbone, images):
    return backbone.features(images, [backbone.depth - 1])[backbone.depth - 1]


@pytest.mark.parametrize("name", [name for name, small in SMALL_MODELS.items() if small.folder])
def test_a_saved_model_loads_as_the_same_backbone(name, tmp_path):
    save(model_of(name), tmp_path)
    loaded, original = load_backbone(tmp_path, **ON_CPU), load_backbone(model_of(name))
    assert (loaded.family, loaded.depth, loaded.hook_layers) == (original.family, original.depth, original.hook_layers)
    for grid in GRIDS:
        images = images_for(name, grid)
        torch.testing.assert_close(last_layer(loaded, images), last_layer(original, images), rtol=1e-9, atol=1e-9)
    assert loaded.name == str(tmp_path)
    assert not any(parameter.requires_grad for parameter in loaded.parameters())


DINOV2 = {
    "plain": lambda: model_of("dinov2"),
    "gated": lambda: model_of("dinov2-swiglu"),
    "with registers": lambda: model_of("dinov2-registers"),
    "without biases": lambda: small_dinov2(qkv_bias=False),
    "another activation": lambda: small_dinov2(hidden_act="relu"),
    "another epsilon": lambda: small_dinov2(layer_norm_eps=0.3),
}


def small_dinov2(**changes) -> torch.nn.Module:
    config = tf.Dinov2Config(**(model_of("dinov2").config.to_dict() | changes))
    return randomized(tf.Dinov2Model(config))


@pytest.mark.parametrize("make", DINOV2.values(), ids=DINOV2.keys())
def test_dinov2_read_without_transformers_is_transformers_dinov2(make, tmp_path):
    model = make()
    model.save_pretrained(tmp_path)
    own = load_backbone(tmp_path, **ON_CPU).model
    for grid in GRIDS:
        images = images_for("dinov2", grid)
        with torch.no_grad():
            got, expected = own(images), model(images)
        torch.testing.assert_close(got.last_hidden_state, expected.last_hidden_state, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(got.pooler_output, expected.pooler_output, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["dinov2", "vit"])
def test_a_checkpoint_in_several_files_loads(name, tmp_path):
    model_of(name).save_pretrained(tmp_path, max_shard_size="30KB")
    assert (tmp_path / "model.safetensors.index.json").is_file() and not (tmp_path / "model.safetensors").exists()
    images = images_for(name, (2, 3))
    loaded, original = load_backbone(tmp_path, **ON_CPU), load_backbone(model_of(name))
    torch.testing.assert_close(last_layer(loaded, images), last_layer(original, images), rtol=1e-9, atol=1e-9)
    next(path for path in tmp_path.glob("model-*.safetensors")).unlink()
    with pytest.raises(ModelError, match=r"has no model-.*\.safetensors|could not be loaded"):
        load_backbone(tmp_path, **ON_CPU)


@pytest.mark.parametrize(
    ("name", "classifier"),
    [
        ("dinov2", tf.Dinov2ForImageClassification),
        ("dinov2-registers", tf.Dinov2WithRegistersForImageClassification),
        ("vit", tf.ViTForImageClassification),
    ],
)
def test_a_classifier_loads_as_its_backbone(name, classifier, tmp_path):
    model = randomized(classifier(model_of(name).config))
    model.save_pretrained(tmp_path)
    images = images_for(name, (2, 3))
    loaded, original = load_backbone(tmp_path, **ON_CPU), load_backbone(model.base_model)
    torch.testing.assert_close(last_layer(loaded, images), last_layer(original, images), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", [name for name in EMBEDDED if not entry_of(name).views])
def test_an_embedded_model_is_the_same_every_time(name):
    first, second = load_backbone(name, **ON_CPU), load_backbone(name, **ON_CPU)
    images = torch.ones(1, 3, 2 * first.patch_size, 3 * first.patch_size)
    assert torch.equal(last_layer(first, images), last_layer(second, images))


def test_the_embedded_vggt_is_no_backbone_of_single_images():
    with pytest.raises(ModelError, match="model: a vggt takes scenes of several views, not single images"):
        load_backbone("tiny-views", **ON_CPU)


def test_float32_is_the_default(saved):
    assert load_backbone(saved).dtype == torch.float32


def test_a_module_is_used_as_it_is():
    model = model_of("dinov2")
    assert load_backbone(model).model is model


def test_both_towers_of_clip_may_be_given():
    text = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=20)
    vision = model_of("clip").config.to_dict()
    config = tf.CLIPConfig(text_config=text | {"projection_dim": 10}, vision_config=vision, projection_dim=10)
    model, images = randomized(tf.CLIPModel(config)), images_for("clip", (2, 3))
    probe = pb.load_probe(model, "projection", 0)
    with torch.no_grad():
        expected = model.get_image_features(images, interpolate_pos_encoding=True)
    expected = getattr(expected, "pooler_output", expected)
    torch.testing.assert_close(probe(probe.features(images)), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("towers", [1, 2])
def test_a_clip_folder_loads_with_one_tower_or_two(towers, tmp_path):
    text = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=20)
    vision = model_of("clip").config.to_dict()
    config = tf.CLIPConfig(text_config=text | {"projection_dim": 10}, vision_config=vision, projection_dim=10)
    whole = randomized(tf.CLIPModel(config))
    if towers == 2:
        whole.save_pretrained(tmp_path)
    else:
        part = tf.CLIPVisionModelWithProjection(whole.config.vision_config).double()
        part.vision_model.load_state_dict(whole.vision_model.state_dict())
        part.visual_projection.load_state_dict(whole.visual_projection.state_dict())
        part.save_pretrained(tmp_path)
    images = images_for("clip", (3, 3))
    expected, probe = pb.load_probe(whole, "projection", 1), pb.load_probe(tmp_path, "projection", 1, **ON_CPU)
    torch.testing.assert_close(probe(probe.features(images)), expected(expected.features(images)), rtol=1e-9, atol=1e-9)


def test_a_clip_checkpoint_without_projection_has_no_projection_decoder(tmp_path):
    """transformers would fill the missing matrix with random numbers."""
    model_of("clip").save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    del state["visual_projection.weight"]
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert pb.load_probe(tmp_path, "cls", 0, **ON_CPU)
    with pytest.raises(DecoderError, match=r"has no visual_projection. 'projection' needs a CLIP model with one"):
        pb.load_probe(tmp_path, "projection", 0, **ON_CPU)


@pytest.mark.parametrize("name", ["vit", "deit"])
def test_a_checkpoint_without_pooler_has_no_pool_decoder(name, tmp_path):
    make = {"vit": tf.ViTModel, "deit": tf.DeiTModel}[name]
    randomized(make(model_of(name).config, add_pooling_layer=False)).save_pretrained(tmp_path)
    assert pb.load_probe(tmp_path, "cls", 0, **ON_CPU)
    with pytest.raises(DecoderError, match=r"has no pooling head. Use 'cls' or 'mean'"):
        pb.load_probe(tmp_path, "pool", 0, **ON_CPU)


def test_published_normalisation_is_honoured(saved):
    default = load_backbone(saved, **ON_CPU).preprocessing
    assert default.mean == (0.485, 0.456, 0.406)
    published = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], "size": {"height": 42, "width": 42}}
    (saved / "preprocessor_config.json").write_text(json.dumps(published))
    loaded = load_backbone(saved, **ON_CPU).preprocessing
    assert (loaded.mean, loaded.std, loaded.size) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6), default.size)


@pytest.mark.parametrize(
    "published", [{}, {"image_mean": 0.5, "image_std": 0.5}, {"image_mean": [0.5], "image_std": [1]}]
)
def test_other_preprocessing_files_leave_the_familys_normalisation(saved, published):
    default = load_backbone(saved, **ON_CPU).preprocessing
    (saved / "preprocessor_config.json").write_text(json.dumps(published))
    assert load_backbone(saved, **ON_CPU).preprocessing == default


def test_auto_is_a_device_that_works():
    assert resolve_device("auto").type in ("cpu", "cuda")
    assert resolve_device(torch.device("cpu")) == torch.device("cpu")
