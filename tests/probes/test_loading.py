"""One call from a model to a probe map, and what it must refuse."""

from dataclasses import replace

import pytest
import torch
from PIL import Image
from torch import nn

import pullback as pb
from helpers.families import images_for, model_of, random_normal
from helpers.vggt_models import tiny
from pullback.backbones import Preprocessing
from pullback.data.images import IMAGENET_MEAN as MEAN
from pullback.data.images import IMAGENET_STD as STD
from pullback.data.images import read_images
from pullback.errors import DecoderError, ImageError, ModelError, NumericsError, ShapeError
from pullback.experiments.demo import write_pictures
from pullback.operators import JacobianOperator, check_sensitive
from pullback.scenes.render import render


def test_the_last_layer_but_one_is_probed_by_default():
    assert pb.load_probe(model_of("dinov2")).layer == 1
    assert pb.load_probe(model_of("depth-v2"), "depth").layer == 3


def test_a_model_has_a_decoder_by_default():
    assert (
        pb.load_probe(model_of("dinov2")).decoder.name == pb.load_probe(model_of("dinov2"), None).decoder.name == "cls"
    )
    assert pb.load_probe(tiny()).decoder.name == "camera"


def test_a_probe_is_named_after_its_parts():
    assert pb.load_probe(model_of("dinov2"), "cls", 1).name == "Dinov2Model cls L01"


@pytest.mark.parametrize("layer", [3, -1, True, 1.5])
def test_a_layer_out_of_range_is_refused(layer):
    with pytest.raises(ModelError, match=f"layer: expected a block index from 0 to 2 .*, got {layer}"):
        pb.load_probe(model_of("dinov2"), "cls", layer)


def test_a_model_in_train_mode_is_refused():
    model = type(model_of("dinov2"))(model_of("dinov2").config).train()
    with pytest.raises(ModelError, match=r"model: expected evaluation mode.*Call model.eval\(\) first"):
        pb.load_probe(model)


def test_images_that_do_not_fit_are_refused():
    probe = pb.load_probe(model_of("dinov2"))
    with pytest.raises(ImageError, match="30x28 pixels are not divisible by the patch size 14"):
        probe.features(torch.randn(1, 3, 30, 28))
    with pytest.raises(ImageError, match=r"images: expected 3 channels as \[B, 3, H, W\].* got \[1, 4, 28, 28\]"):
        probe.features(torch.randn(1, 4, 28, 28))


def test_images_are_read_as_the_backbone_wants_them(tmp_path):
    grey = Image.new("RGB", (40, 30), (128, 128, 128))
    grey.save(tmp_path / "grey.png")
    probe = pb.load_probe(model_of("clip"), "cls", 0)
    images = probe.load_images(tmp_path)
    side = probe.backbone.preprocessing.size
    assert images.shape == (1, 3, side, side)
    mean, std = (
        torch.tensor(values) for values in (probe.backbone.preprocessing.mean, probe.backbone.preprocessing.std)
    )
    torch.testing.assert_close(images[0, :, 4, 4].double(), ((128 / 255 - mean) / std).double(), rtol=1e-5, atol=1e-5)
    assert probe.read_images(tmp_path, size=(16, 32)).pixels.shape == (1, 3, 16, 32)


def test_features_that_are_not_finite_are_refused():
    probe = pb.load_probe(model_of("dinov2"))
    features = probe.features(images_for("dinov2", (3, 3)))
    features[0, 2, 3] = float("nan")
    with pytest.raises(NumericsError, match="features: expected finite numbers"):
        JacobianOperator(probe, features)


def test_features_of_another_width_are_refused():
    probe = pb.load_probe(model_of("dinov2"))
    with pytest.raises(ShapeError, match=r"features: expected \[B, N, 24\], got \[2, 10, 23\]"):
        JacobianOperator(probe, random_normal(2, 10, 23))


DEAD = {
    "detaches": lambda tokens: tokens.detach().mean(1),
    "stops the gradient": torch.no_grad()(lambda tokens: tokens.mean(1)),
    "returns a constant": lambda tokens: torch.ones(len(tokens), 2, dtype=tokens.dtype),
    "rounds": lambda tokens: tokens[:, 0].round(),
}


@pytest.mark.parametrize("decoder", DEAD.values(), ids=DEAD.keys())
@pytest.mark.parametrize("layer", [0, 2])
def test_a_decoder_cut_off_from_the_features_is_named(decoder, layer):
    probe = pb.load_probe(model_of("dinov2"), decoder, layer)
    operator = JacobianOperator(probe, probe.features(images_for("dinov2", (2, 3))))
    pushed = operator @ random_normal(2, operator.cols, 2)
    pulled = operator.T @ random_normal(2, operator.rows, 3)
    assert pushed.shape == (2, operator.rows, 2) and pulled.shape == (2, operator.cols, 3)
    for product in (pushed, pulled):
        with pytest.raises(DecoderError, match=r"decoder: its output does not depend on the features \(zero Jacobian"):
            check_sensitive(product.square().sum((1, 2)))


BROKEN = {
    "NaN": (lambda tokens: tokens[:, 0] * float("nan"), NumericsError, "decoder: its output holds NaN or infinity"),
    "a tuple": (
        lambda tokens: (tokens, tokens),
        DecoderError,
        "decoder: expected it to return one tensor .* got tuple",
    ),
    "no batch axis": (lambda tokens: tokens.sum(), DecoderError, r"batch axis first, \[2, \.\.\.\], got \[\]"),
    "tokens first": (
        lambda tokens: tokens.transpose(0, 1),
        DecoderError,
        r"batch axis first, \[2, \.\.\.\], got \[7, ",
    ),
    "labels": (lambda tokens: tokens.argmax(-1), DecoderError, "decoder: expected a floating-point output"),
}


@pytest.mark.parametrize(("decoder", "error", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_a_decoder_whose_output_cannot_be_differentiated_is_named(decoder, error, message):
    probe = pb.load_probe(model_of("dinov2"), decoder, 1)
    with pytest.raises(error, match=message):
        JacobianOperator(probe, probe.features(images_for("dinov2", (2, 3))))


def test_a_users_module_is_a_decoder_of_the_normalised_tokens():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(24, 5), nn.ReLU(), nn.Flatten()).double().eval()
    probe, images = pb.load_probe(model_of("dinov2"), module, 0), images_for("dinov2", (2, 3))
    features = probe.features(images)
    with torch.no_grad():
        expected = module(model_of("dinov2")(images).last_hidden_state)
    torch.testing.assert_close(probe(features), expected)
    operator = JacobianOperator(probe, features)
    v, step = random_normal(*features.shape), 1e-6
    moved = (probe(features + step * v) - probe(features - step * v)).detach() / (2 * step)
    torch.testing.assert_close((operator @ v.flatten(1)[..., None])[..., 0], moved, rtol=1e-5, atol=1e-6)
    assert not (operator @ v.flatten(1)[..., None]).requires_grad, "the module's parameters have a graph, products none"


def test_images_are_resized_as_the_backbone_wants(tmp_path):
    write_pictures(render([0], size=96), tmp_path)
    probe = pb.load_probe(model_of("dinov2"), "cls", 0)
    nearest = replace(probe, backbone=replace(probe.backbone, preprocessing=Preprocessing(MEAN, STD, 56, "nearest")))
    bicubic = replace(probe, backbone=replace(probe.backbone, preprocessing=Preprocessing(MEAN, STD, 56, "bicubic")))
    for chosen in ("nearest", "bicubic"):
        expected = read_images(tmp_path, 56, mean=MEAN, std=STD, interpolation=chosen).pixels
        own = (nearest if chosen == "nearest" else bicubic).load_images(tmp_path)
        torch.testing.assert_close(own, expected)
    assert not torch.equal(nearest.load_images(tmp_path), bicubic.load_images(tmp_path))
