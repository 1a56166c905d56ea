"""Logits of image classifiers: from a module, and from the folder of one."""

import shutil
from pathlib import Path

import pytest
import torch
import transformers as tf

import pullback as pb
from helpers.families import SMALL_MODELS, images_for, model_of
from pullback.errors import DecoderError
from pullback.evaluation import degradation

CLASSIFIERS = [name for name, small in SMALL_MODELS.items() if "logits" in small.references and small.folder]
ON_CPU = dict(device="cpu", dtype=torch.float64)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_the_classifier_of_a_folder_is_found_beside_the_weights(name, tmp_path):
    model, images = model_of(name), images_for(name, (2, 3))
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = SMALL_MODELS[name].references["logits"](model, images)
    probe = pb.load_probe(tmp_path, "logits", 1, **ON_CPU)
    torch.testing.assert_close(probe(probe.features(images)), expected, rtol=1e-9, atol=1e-9)
    one = pb.load_probe(tmp_path, "logit-4", 1, **ON_CPU)
    torch.testing.assert_close(one(one.features(images)), expected[:, 4:], rtol=1e-9, atol=1e-9)
    with pytest.raises(DecoderError, match=r"expected logit-0 to logit-4, because .* has 5 classes, got 'logit-5'"):
        pb.load_probe(tmp_path, "logit-5", 1, **ON_CPU)


def test_other_decoders_load_a_classifier_as_before(tmp_path):
    """The ViT alone, so that stores and heads made of it are still known by its weights."""
    model_of("vit-classifier").save_pretrained(tmp_path)
    for decoder in ("cls", "logits"):
        probe = pb.load_probe(tmp_path, decoder, 1, **ON_CPU)
        assert type(probe.backbone.model) is tf.ViTModel


@pytest.mark.parametrize("relative", [False, True])
def test_a_folder_without_a_classifier(relative, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = Path("one", "two", "three") if relative else tmp_path / "three"
    model_of("dinov2").save_pretrained(folder)
    probe = pb.load_probe(folder, "cls", 1, **ON_CPU)
    with pytest.raises(DecoderError, match=r"has no classifier. 'logits' needs a"):
        pb.load_probe(folder, "logits", 1, **ON_CPU)
    shutil.rmtree(folder)
    with pytest.raises(DecoderError, match=r"has no classifier. 'logits' needs a"):
        pb.load_probe(probe.backbone.model, "logits", 1)


def test_one_logit_is_compared_by_its_value_and_several_by_their_direction():
    full, changed = torch.tensor([[2.0], [4.0]]), torch.tensor([[1.0], [5.0]])
    assert degradation(changed, full).value.tolist() == [50.0, 25.0]
    both = degradation(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]]))
    assert both.measure == "cosine" and both.value.tolist() == [100.0]


@pytest.mark.parametrize("name", ["dinov2-classifier", "vit-classifier"])
def test_the_importance_of_tokens_for_one_class(name):
    probe = pb.load_probe(model_of(name), "logit-1", 1)
    importance = pb.token_importance(pb.spectrum(probe, images_for(name, (3, 3)), rank=1))
    assert importance.shape == (2, 10) and (importance > 0).all()
