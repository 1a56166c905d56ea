"""The tables of names: complete, readable without torch, and open to others."""

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn

import pullback as pb
from helpers.families import images_for, model_of
from pullback import registry
from pullback.backbones import Backbone, load_backbone
from pullback.decoders import Decoder, build_decoder
from pullback.errors import DecoderError, ModelError, PullbackError
from pullback.registry import BACKBONES, DECODERS, BackboneEntry, DecoderEntry, ScoreEntry


@pytest.fixture
def tables(monkeypatch):
    """The tables, to be added to for one test."""
    monkeypatch.setattr(registry, "BACKBONES", dict(BACKBONES))
    monkeypatch.setattr(registry, "DECODERS", list(DECODERS))


def test_the_tables_are_read_without_torch():
    code = (
        "import sys\nfrom pullback.registry import list_models, decoders_for\n"
        "assert len(list_models()) >= 10 and decoders_for('vggt')[0].name == 'camera'\n"
        "print([name for name in ('torch', 'numpy', 'transformers') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.stdout.strip() == "[]", run.stderr


def test_every_entry_leads_to_code():
    places = [entry.adapt for entry in BACKBONES.values()] + [entry.build for entry in DECODERS]
    optional = [(entry.load, entry.assemble, entry.recognise) for entry in BACKBONES.values()]
    places += [place for group in optional for place in group if place is not None]
    assert all(callable(registry.resolve(place)) for place in places)
    assert registry.resolve(len) is len, "code itself is an entry too"
    with pytest.raises(PullbackError, match=r"registry: expected 'package\.module:name', got 'nowhere'"):
        registry.resolve("nowhere")


@pytest.mark.parametrize("entry", BACKBONES.values(), ids=lambda entry: entry.name)
def test_a_family_lists_decoders_that_can_be_asked_for(entry):
    known = {decoder.name for decoder in registry.decoders_for(entry.name)}
    assert set(entry.decoders) <= known and entry.decoders


def test_a_family_of_several_views_has_its_own_decoders_alone():
    assert all(entry.family == "vggt" for entry in registry.decoders_for("vggt"))
    assert all(entry.family is None for entry in registry.decoders_for("dinov2"))


def test_a_former_name_of_a_score_is_never_given_again():
    """Files with it would be read as what it meant, whatever it means now."""
    taken = {*registry.SCORES, *(entry.score for entry in registry.PRESETS.values())}
    assert not taken & set(registry.FORMER_SCORES) and set(registry.FORMER_SCORES.values()) <= taken
    with pytest.raises(PullbackError, match="entry: 'tome' means the score 'bipartite' in files of earlier versions"):
        registry.register_score(ScoreEntry("tome", "my.scores:score", "x"))


def test_names_with_numbers_match_as_a_whole():
    (sized,) = [entry for entry in DECODERS if entry.name == "depth-GxG" and entry.family is None]
    assert sized.match("depth-8x16").groups() == ("8", "16")
    assert sized.match("depth-8") is None and sized.match("xdepth-8x8") is None


def first_patches(backbone: Backbone, count: str) -> Decoder:
    def decode(taps, layout):
        return taps[0][:, layout.prefix : layout.prefix + int(count)]

    return Decoder(f"first-{count}", (backbone.depth - 1,), decode)


def test_a_decoder_of_ones_own_is_found_by_name(tables):
    entry = DecoderEntry("first-K", first_patches, "the first K patches", r"first-([1-9]\d*)")
    assert registry.register_decoder(entry) is entry
    probe, images = pb.load_probe(model_of("dinov2"), "first-3", 0), images_for("dinov2", (2, 3))
    assert probe.decoder.name == "first-3"
    with torch.no_grad():
        expected = model_of("dinov2")(images).last_hidden_state[:, 1:4]
    torch.testing.assert_close(probe(probe.features(images)), expected, rtol=1e-9, atol=1e-9)
    with pytest.raises(
        DecoderError, match=r"expected one of cls, .* first-K, or a function, for Dinov2Model, got 'last-3'"
    ):
        pb.load_probe(model_of("dinov2"), "last-3", 0)


def test_a_decoder_replaces_the_one_of_its_name_and_a_familys_own_comes_first(tables):
    def own(backbone):
        return Decoder("cls", (0,), lambda taps, layout: taps[0][:, 0])

    registry.register_decoder(DecoderEntry("cls", own, "of one family", family="clip"))
    assert build_decoder("cls", load_backbone(model_of("clip"))).layers == (0,)
    assert build_decoder("cls", load_backbone(model_of("dinov2"))).layers == (2,)
    registry.register_decoder(DecoderEntry("cls", own, "of all"))
    assert build_decoder("cls", load_backbone(model_of("dinov2"))).layers == (0,)
    assert sum(entry.name == "cls" for entry in registry.DECODERS) == 2


class Configured(nn.Module):
    """A module whose family no one knows yet."""

    class config:
        model_type = "stranger"


def test_a_backbone_of_ones_own_is_found_by_module_and_by_name(tables):
    def adapt(module, name):
        from pullback.backbones.families import dinov2

        return dinov2(module.inner, name, "stranger")

    def wrapped() -> nn.Module:
        module = Configured()
        module.inner = model_of("dinov2")
        return module.eval()

    with pytest.raises(ModelError, match="no adapter for transformers' model type 'stranger'; known are clip"):
        pb.load_probe(wrapped(), "cls", 1)
    asked = []

    def load(name, device, dtype):
        asked.append((name, device, dtype))
        return wrapped()

    registry.register_backbone(
        BackboneEntry("stranger", ("stranger",), adapt, ("cls", "mean"), "stranger-1", load=load, names=r"stranger-\d")
    )
    images = images_for("dinov2", (3, 3))
    known = pb.load_probe(model_of("dinov2"), "cls", 1)
    for model in (wrapped(), "stranger-1"):
        probe = pb.load_probe(model, "cls", 1, device="cpu", dtype=torch.float64)
        assert probe.backbone.family == "stranger"
        torch.testing.assert_close(probe(probe.features(images)), known(known.features(images)))
    assert asked == [("stranger-1", torch.device("cpu"), torch.float64)]
    assert ("stranger", "stranger", "cls, mean", "stranger-1") in registry.list_models()


def test_what_a_family_loads_is_brought_to_device_and_dtype_frozen_and_in_evaluation_mode(tables):
    def adapt(module, name):
        from pullback.backbones.families import dinov2

        return dinov2(module, name, "stranger")

    def load(name, device, dtype):
        return copy.deepcopy(model_of("dinov2")).double().train()

    registry.register_backbone(BackboneEntry("stranger", (), adapt, ("cls",), "x", load=load, names="stranger"))
    backbone = load_backbone("stranger", device="cpu", dtype=torch.float32)
    assert backbone.dtype == torch.float32 and not backbone.model.training
    assert not any(parameter.requires_grad for parameter in backbone.parameters())


def test_an_adapter_that_returns_something_else_is_named(tables):
    registry.register_backbone(BackboneEntry("stranger", ("stranger",), lambda module, name: module, ("cls",), "x"))
    message = r"model: the adapter of 'stranger' in the registry returned a Configured, expected a pullback\.Backbone"
    with pytest.raises(ModelError, match=message):
        load_backbone(Configured().eval())


def test_a_module_without_a_model_type_is_refused_with_the_way_to_add_one():
    with pytest.raises(ModelError, match=r"got Linear, which has no config .* config\.model_type .*register_backbone"):
        load_backbone(nn.Linear(2, 2))


def test_a_function_that_builds_no_decoder_is_named(tables):
    registry.register_decoder(DecoderEntry("bare", lambda backbone: lambda tokens: tokens[:, 0], "a function"))
    message = r"decoder: the function of 'bare' in the registry returned a function, expected a pullback\.Decoder"
    with pytest.raises(DecoderError, match=message):
        build_decoder("bare", load_backbone(model_of("dinov2")))


@pytest.mark.parametrize("layers", [2, (), [0, 1]])
def test_the_layers_of_a_decoder_are_a_tuple(layers):
    with pytest.raises(DecoderError, match=r"layers: expected a tuple of block indices, such as \(11,\), for .*'mine'"):
        Decoder("mine", layers, lambda taps, layout: taps[0])


def test_an_entry_with_a_mistake_in_it_is_refused_when_it_is_made():
    with pytest.raises(PullbackError, match=r"'mine': model_types: expected a tuple of names, \('my_vit',\), got"):
        BackboneEntry("mine", "my_vit", "my.models:adapt", ("cls",), "me/my-vit")
    with pytest.raises(PullbackError, match=r"'mine': decoders: expected a tuple of names, \('cls',\), got 'cls'"):
        BackboneEntry("mine", ("my_vit",), "my.models:adapt", "cls", "me/my-vit")
    with pytest.raises(PullbackError, match=r"'mine': names: expected a regular expression, got '\*'"):
        BackboneEntry("mine", ("my_vit",), "my.models:adapt", ("cls",), "me/my-vit", names="*")
    with pytest.raises(PullbackError, match=r"'mine-N': pattern: expected a regular expression, got 'mine-\(' \("):
        DecoderEntry("mine-N", "my.heads:build", "x", pattern="mine-(")
    with pytest.raises(PullbackError, match=r"'mine': needs: expected one of '', 'head', 'spn', 'probe', got 'heads'"):
        ScoreEntry("mine", "my.scores:score", "x", needs="heads")
