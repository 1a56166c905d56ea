"""Decoders by name, by function and by module; and those that a model does not have."""

import pytest
import torch
from torch import nn

import pullback as pb
from helpers.families import (
    DOWNSAMPLED,
    FOR_KNOWN_WEIGHTS,
    ONE_LOGIT,
    SMALL_MODELS,
    images_for,
    model_of,
    random_normal,
    randomized,
)
from pullback.backbones import load_backbone
from pullback.decoders import Decoder, PatchGrid, build_decoder
from pullback.errors import DecoderError, ModelError
from pullback.registry import BACKBONES

NAMES = ("cls", "projection", "pool", "mean", "logits", ONE_LOGIT, "depth", DOWNSAMPLED, "saliency")


def listed(name: str) -> set[str]:
    """The decoders that a small model must have: all that the registry promises for its family, but for those that
    only image classifiers have, or only models without a classifier."""
    return set(SMALL_MODELS[name].references)


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_only_classifiers_lack_decoders_that_the_registry_promises(name):
    places = {"depth-GxG": DOWNSAMPLED, "logit-K": ONE_LOGIT}
    family = SMALL_MODELS[name].family
    shipped = FOR_KNOWN_WEIGHTS.get(family, set())
    promised = {places.get(decoder, decoder) for decoder in BACKBONES[family].decoders if decoder not in shipped}
    missing = promised - listed(name) - {"saliency"}
    classifier = "logits" in listed(name)
    assert listed(name) <= promised
    assert missing <= ({"pool", "projection"} if classifier else {"logits", ONE_LOGIT})


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_a_model_has_the_decoders_that_are_listed_for_it_and_no_others(name):
    backbone = load_backbone(model_of(name))
    for decoder in NAMES:
        if decoder in listed(name):
            assert build_decoder(decoder, backbone).name == decoder
        else:
            with pytest.raises(DecoderError, match="decoder: "):
                build_decoder(decoder, backbone)


MISSING = {
    ("siglip", "cls"): "SiglipVisionModel has no class token, so 'cls' does not exist. Use 'pool' or 'mean'",
    ("dinov2", "projection"): "Dinov2Model has no visual_projection. 'projection' needs a CLIP model",
    ("dinov2", "pool"): r"Dinov2Model \(dinov2\) has no pooling head. Use 'cls' or 'mean'",
    ("clip", "pool"): r"\(clip\) has no pooling head",
    ("depth-v2", "pool"): r"\(depth-anything\) has no pooling head",
    ("dinov2", "depth"): r"'depth' needs a model with a DPT head such as Depth Anything, got Dinov2Model \(dinov2\)",
    ("vit", "depth-8x8"): "'depth' needs a model with a DPT head",
    ("dinov2", "logits"): r"Dinov2Model has no classifier. 'logits' needs a \*ForImageClassification model, or",
    ("vit", "logit-2"): "ViTModel has no classifier",
    ("vit-classifier", "logit-5"): "expected logit-0 to logit-4, because ViTForImageClassification has 5 classes, got",
    ("vit-classifier", "pool"): r"\(vit\) has no pooling head",
    ("dinov2", "saliency"): "'saliency' needs .*decoder.safetensors, which is not there",
}


@pytest.mark.parametrize(("name", "decoder"), MISSING)
def test_a_decoder_that_a_model_lacks_is_named_with_the_reason(name, decoder):
    with pytest.raises(DecoderError, match="decoder: .*" + MISSING[name, decoder]):
        pb.load_probe(model_of(name), decoder, 0)


@pytest.mark.parametrize("choice", ["class", "depth-8", "depth-axb", "depth-8x", "", 5])
def test_an_unknown_decoder_is_refused_with_the_known_ones(choice):
    with pytest.raises(
        DecoderError, match=r"decoder: expected one of cls, projection, pool, mean, logits, logit-K, depth, .* got"
    ):
        pb.load_probe(model_of("depth-v2"), choice, 0)


def test_a_depth_map_has_at_least_one_cell():
    with pytest.raises(DecoderError, match="decoder: expected depth-GxG with G at least 1, got 'depth-0x3'"):
        pb.load_probe(model_of("depth-v2"), "depth-0x3", 0)


def test_a_function_reads_the_last_layers_normalised_tokens():
    def first_patches(tokens):
        return tokens[:, 1:4].exp()

    probe, images = pb.load_probe(model_of("dinov2"), first_patches, 0), images_for("dinov2", (2, 3))
    assert probe.decoder.name == "first_patches"
    with torch.no_grad():
        expected = model_of("dinov2")(images).last_hidden_state[:, 1:4].exp()
    torch.testing.assert_close(probe(probe.features(images)), expected, rtol=1e-9, atol=1e-9)


def test_a_head_on_the_patch_grid_reads_patches_as_a_map():
    head = randomized(nn.Sequential(nn.Conv2d(24, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1)))
    probe, images = pb.load_probe(model_of("deit"), PatchGrid(head, "parts"), 1), images_for("deit", (2, 3))
    assert probe.decoder.name == "parts"
    with torch.no_grad():
        tokens = model_of("deit")(images, interpolate_pos_encoding=True).last_hidden_state[:, 2:]
        expected = head(tokens.unflatten(1, (2, 3)).permute(0, 3, 1, 2))
    assert expected.shape == (2, 2, 2, 3)
    torch.testing.assert_close(probe(probe.features(images)), expected, rtol=1e-9, atol=1e-9)


def test_a_decoder_of_ones_own_is_taken_as_it_is():
    decoder = Decoder("own", (0,), lambda taps, layout: taps[0].mean(1), normed=False)
    backbone = load_backbone(model_of("dinov2"))
    assert build_decoder(decoder, backbone) is decoder
    probe, images = pb.load_probe(model_of("dinov2"), decoder, 0), images_for("dinov2", (3, 3))
    torch.testing.assert_close(probe(probe.features(images)), backbone.features(images, [0])[0].mean(1))


@pytest.mark.parametrize("wrap", [lambda module: module, PatchGrid], ids=["module", "patch grid"])
def test_a_decoder_in_train_mode_is_refused(wrap):
    head = nn.Sequential(nn.Conv2d(24, 4, 1), nn.BatchNorm2d(4))
    with pytest.raises(ModelError, match=r"decoder: expected evaluation mode.*Call decoder.eval\(\) first"):
        pb.load_probe(model_of("dinov2"), wrap(head), 0)


@pytest.mark.parametrize("name", ["dinov2", "clip", "siglip", "vit"])
def test_decoders_that_claim_to_be_linear_are(name):
    backbone = load_backbone(model_of(name))
    layout = backbone.token_layout(images_for(name, (2, 3)))
    a, b = (random_normal(2, layout.tokens, 24, seed=seed) for seed in (0, 1))
    for choice in listed(name):
        decoder = build_decoder(choice, backbone)
        if decoder.linear:
            joined = decoder.decode([2 * a - 3 * b], layout)
            apart = 2 * decoder.decode([a], layout) - 3 * decoder.decode([b], layout)
            torch.testing.assert_close(joined, apart)


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_decoders_that_claim_to_read_few_rows_do(name):
    backbone = load_backbone(model_of(name))
    images = images_for(name, (2, 3))
    layout, tokens = backbone.token_layout(images), backbone.norm(backbone.embed(images))
    for choice in listed(name):
        decoder = build_decoder(choice, backbone)
        if decoder.rows is not None:
            read = decoder.decode([tokens[:, : decoder.rows]], layout)
            torch.testing.assert_close(read, decoder.decode([tokens], layout))
