"""A pruned model in transformers' pipelines, with its image processor, and in a folder from which both come back."""

import json
import logging

import numpy as np
import pytest
import torch
import transformers as tf
from PIL import Image
from torch import nn

import pullback as pb
from helpers.families import model_of
from pullback.errors import ModelError
from pullback.models.dinov2 import Dinov2, Dinov2Config

MEAN = [0.1, 0.2, 0.3]
FAMILIES = {
    "dinov2": (tf.BitImageProcessorPil, 42),
    "clip": (tf.CLIPImageProcessorPil, 24),
    "siglip": (tf.SiglipImageProcessorPil, 24),
    "vit": (tf.ViTImageProcessorPil, 24),
}


def processor_of(name):
    kind, side = FAMILIES[name.removesuffix("-classifier")]
    square = {"height": side, "width": side}
    size = {"shortest_edge": side} if kind in (tf.BitImageProcessorPil, tf.CLIPImageProcessorPil) else square
    return kind(size=size, crop_size=square, image_mean=MEAN)


def pruned(model, **options):
    return pb.prune(model, "norm", **{"ratio": 0.5, "stages": [0], **options})


def picture():
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 60, 3), dtype=np.uint8))


@pytest.mark.parametrize("name", FAMILIES)
def test_features_by_a_pipeline_are_the_outputs_of_the_model(name):
    fast, processor = pruned(model_of(name)), processor_of(name)
    extract = tf.pipeline("image-feature-extraction", model=fast, image_processor=processor, device="cpu")
    images = processor(picture(), return_tensors="pt").pixel_values.double()
    with torch.no_grad():
        output = fast(images)
    assert np.shape(extract(picture())) == tuple(output[0].shape)
    np.testing.assert_allclose(extract(picture()), output[0], rtol=1e-9, atol=1e-9)
    if "pooler_output" in output:
        np.testing.assert_allclose(extract(picture(), pool=True), output.pooler_output, rtol=1e-9, atol=1e-9)
    written = repr(extract)
    assert "'model': 'PrunedModel'" in written and "'input_modalities': ('image',)" in written


@pytest.mark.parametrize("name", ["vit-classifier", "dinov2-classifier"])
def test_classes_by_a_pipeline_are_those_of_the_model(name):
    model, processor = model_of(name), processor_of(name)
    whole = tf.pipeline("image-classification", model=model, image_processor=processor, device="cpu")(picture())
    classify = tf.pipeline(
        "image-classification", model=pruned(model, ratio=0.0), image_processor=processor, device="cpu"
    )
    assert classify(picture()) == whole
    fewer = tf.pipeline("image-classification", model=pruned(model), image_processor=processor, device="cpu")
    images = processor(picture(), return_tensors="pt").pixel_values.double()
    with torch.no_grad():
        expected = pruned(model)(images).logits.softmax(-1)[0]
    found = {row["label"]: row["score"] for row in fewer(picture())}
    np.testing.assert_allclose([found[f"LABEL_{i}"] for i in range(5)], expected, rtol=1e-9)


def test_a_network_of_ours_in_a_pipeline():
    torch.manual_seed(0)
    model = Dinov2(Dinov2Config(hidden_size=24, num_hidden_layers=3, num_attention_heads=3, image_size=42)).eval()
    extract = tf.pipeline(
        "image-feature-extraction", model=pruned(model), image_processor=processor_of("dinov2"), device="cpu"
    )
    assert np.shape(extract(picture())) == (1, 6, 24) and "PrunedModel" in repr(extract)


def test_what_pipelines_ask_of_a_model():
    fast = pruned(model_of("dinov2"))
    assert fast.input_modalities == model_of("dinov2").input_modalities and fast.can_generate() is False


def means_in(folder):
    return list(tf.AutoImageProcessor.from_pretrained(folder).image_mean)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_processor_that_is_given_is_saved_with_the_model(name, tmp_path):
    folder = pruned(model_of(name)).save_pretrained(tmp_path / "fast", processor=processor_of(name))
    assert means_in(folder) == means_in(folder / "model") == MEAN
    again = pb.PrunedModel.from_pretrained(folder)
    extract = tf.pipeline("image-feature-extraction", model=again, image_processor=str(folder), device="cpu")
    assert np.shape(extract(picture()))[0] == 1


@pytest.mark.parametrize("reader", ["pullback", "transformers"])
def test_a_processor_beside_the_weights_is_found(reader, tmp_path):
    model_of("dinov2").save_pretrained(tmp_path / "model")
    processor_of("dinov2").save_pretrained(tmp_path / "model")
    if reader == "pullback":
        model = pb.load_probe(tmp_path / "model", "cls", 1, device="cpu").backbone.model
    else:
        model = tf.AutoModel.from_pretrained(tmp_path / "model").eval()
    folder = pruned(model).save_pretrained(tmp_path / "fast")
    assert means_in(folder) == MEAN
    assert pb.load_probe(folder / "model", "cls", 1, device="cpu").backbone.preprocessing.mean == tuple(MEAN)
    once_more = pb.PrunedModel.from_pretrained(folder).save_pretrained(tmp_path / "again")
    assert means_in(once_more) == MEAN
    assert means_in(pb.PrunedModel.from_pretrained(once_more).save_pretrained(once_more)) == MEAN


def test_a_pipeline_saves_both(tmp_path):
    extract = tf.pipeline(
        "image-feature-extraction",
        model=pruned(model_of("dinov2")),
        image_processor=processor_of("dinov2"),
        device="cpu",
    )
    extract.save_pretrained(tmp_path)
    assert means_in(tmp_path) == MEAN and pb.PrunedModel.from_pretrained(tmp_path).plan == extract.model.plan


def test_without_a_processor_none_is_written(tmp_path):
    folder = pruned(model_of("dinov2")).save_pretrained(tmp_path)
    assert not list(folder.rglob("*processor*"))


@pytest.mark.parametrize("wrong", ["facebook/dinov2-base", {"image_mean": MEAN}])
def test_what_is_no_processor_is_refused_before_anything_is_written(wrong, tmp_path):
    with pytest.raises(ModelError, match=r"processor: expected an image processor of transformers, got (str|dict)"):
        pruned(model_of("dinov2")).save_pretrained(tmp_path / "fast", processor=wrong)
    assert not (tmp_path / "fast").exists()


class Stranger(nn.Module):
    """A network of someone else, that cannot save itself."""

    def __init__(self):
        super().__init__()
        self.inner, self.config = model_of("dinov2"), model_of("dinov2").config

    def forward(self, pixel_values):
        return self.inner(pixel_values)


def test_a_model_that_cannot_be_saved_is_left_out_and_named(tmp_path, caplog):
    fast = pruned(model_of("dinov2"))
    fast.save_pretrained(tmp_path)  # whose model must not be taken for the next one
    fast.model = Stranger().eval()
    with caplog.at_level(logging.WARNING):
        fast.save_pretrained(tmp_path)
    assert "Stranger has no save_pretrained" in caplog.text and "from_pretrained(folder, model=model)" in caplog.text
    assert json.loads((tmp_path / "pruned.json").read_text())["plan"]["stages"] == [0]
    with pytest.raises(ModelError, match=r"has no model/.*from_pretrained\(folder, model=model\)"):
        pb.PrunedModel.from_pretrained(tmp_path)
    assert pb.PrunedModel.from_pretrained(tmp_path, model=model_of("dinov2")).plan == fast.plan
