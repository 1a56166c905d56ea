"""A network that is no ViT meets the contract with a few methods, and probes, diagnoses and products work on it."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

import pullback as pb
from helpers.families import images_for, model_of, random_normal
from helpers.vggt_models import scenes, tiny
from pullback import registry
from pullback.backbones import AnyBackbone, Preprocessing, State, load_any_backbone, load_backbone, unchanged
from pullback.decoders import Decoder, build_decoder
from pullback.errors import DecoderError, ModelError, PullbackError
from pullback.operators import JacobianOperator
from pullback.registry import BackboneEntry
from pullback.tokens import TokenLayout

PATCH, DIM, DEPTH = 2, 5, 3


class Mixer(nn.Module):
    """Patches -> tokens, then layers that mix channels and, by a mean, tokens."""

    class config:
        model_type = "mixer"

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Parameter(random_normal(3 * PATCH**2, DIM, seed=1) / 3)
        self.mixes = nn.ParameterList([nn.Parameter(random_normal(DIM, DIM, seed=7 + n) / 2) for n in range(DEPTH)])

    def layer(self, number: int, x: Tensor) -> Tensor:
        return x + torch.tanh((x + x.mean(1, keepdim=True)) @ self.mixes[number])


@dataclass(frozen=True, kw_only=True)
class MixerBackbone(AnyBackbone):
    default_decoder: ClassVar[str] = "mean"

    model: Mixer

    @property
    def depth(self) -> int:
        return DEPTH

    @property
    def dim(self) -> int:
        return DIM

    @property
    def device(self) -> torch.device:
        return self.model.embed.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.embed.dtype

    def token_layout(self, images):
        return TokenLayout(0, (images.shape[-2] // PATCH, images.shape[-1] // PATCH))

    def embed(self, images):
        patches = images.unfold(2, PATCH, PATCH).unfold(3, PATCH, PATCH)  # [B, 3, h, w, p, p]
        return patches.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2) @ self.model.embed

    def tables(self, layout, like):
        return None

    def step(self, layer, tokens, layout, tables, rows=None):
        return State(self.model.layer(layer, tokens))

    def check_size(self, size): ...

    def read(self, path, size=None, limit=None):
        raise PullbackError("images: this network reads no files.")


def adapt(model: Mixer, name: str) -> MixerBackbone:
    return MixerBackbone(
        name=name,
        family="mixer",
        model=model,
        norm=unchanged,
        prefix=0,
        patch_size=PATCH,
        preprocessing=Preprocessing((0.5, 0.5, 0.5), (1.0, 1.0, 1.0), 8),
    )


@pytest.fixture
def mixer(monkeypatch) -> Mixer:
    monkeypatch.setattr(registry, "BACKBONES", dict(registry.BACKBONES))
    registry.register_backbone(BackboneEntry("mixer", ("mixer",), adapt, ("mean",), "mixer"))
    return Mixer().eval().requires_grad_(False)


def forward(model: Mixer, images: Tensor) -> list[Tensor]:
    tokens, states = adapt(model, "").embed(images), []
    for number in range(DEPTH):
        tokens = model.layer(number, tokens)
        states.append(tokens)
    return states


def test_decoding_its_features_is_its_forward_and_products_are_derivatives(mixer):
    images = random_normal(2, 3, 4, 6)
    expected = forward(mixer, images)
    both = Decoder("two layers", (0, 2), lambda taps, layout: torch.cat([tap.sin().mean(1) for tap in taps], -1))
    for decoder, output in ((None, expected[2].mean(1)), (both, both.decode([expected[0], expected[2]], None))):
        for layer in (0, 1, 2):
            probe = pb.load_probe(mixer, decoder, layer)
            features = probe.features(images)
            torch.testing.assert_close(features.as_subclass(Tensor), expected[layer])
            torch.testing.assert_close(probe(features), output)
            operator = JacobianOperator(probe, features)
            v, step = random_normal(2, operator.cols, 1), 1e-6 * random_normal(2, operator.cols, 1).view(features.shape)
            difference = (probe(features + step) - probe(features - step)).flatten(1) / 2e-6
            torch.testing.assert_close((operator @ v)[..., 0], difference, rtol=1e-6, atol=1e-7)
    inputs = pb.multi_layer_probe(mixer, both)
    torch.testing.assert_close(inputs(inputs.features(images)), output)
    assert inputs.features(images).shape == (2, 6, 2 * DIM)


def test_it_is_diagnosed_like_any_other(mixer):
    report = pb.diagnose(pb.load_probe(mixer), random_normal(2, 3, 8, 8), rank=2)
    assert report.probe == "Mixer mean L01" and report.output_size == DIM and 0 < report.kappa.mean <= 1


def test_what_needs_blocks_says_so(mixer):
    with pytest.raises(ModelError, match="model: expected a ViT, whose blocks are known, got Mixer, a MixerBackbone"):
        load_backbone(mixer)
    probe = pb.load_probe(mixer)
    assert not probe.by_hand and pb.load_probe(model_of("dinov2")).by_hand
    with pytest.raises(PullbackError, match="precision: 'bf16' needs a probe with its own linearisation"):
        JacobianOperator(probe, probe.features(random_normal(1, 3, 4, 4)), precision="bf16")
    for backbone in (probe.backbone, load_any_backbone(tiny())):
        with pytest.raises(ModelError, match="runs on all of its tokens only"):
            backbone.gathered(torch.zeros(1, 3, dtype=torch.long))


def test_a_backbone_of_single_images_has_no_views_and_one_of_views_no_single_images():
    with pytest.raises(ModelError, match=r"Dinov2Model takes single images, .* Use load_images"):
        pb.load_probe(model_of("dinov2")).load_views(".")
    probe = pb.load_probe(tiny())
    for use in (probe.load_images, probe.read_images):
        with pytest.raises(PullbackError, match="expected one of single images, got VGGT"):
            use(".")
    with pytest.raises(DecoderError, match="or a Decoder of the taps, for VGGT, got <function"):
        build_decoder(lambda tokens: tokens, probe.backbone)


def test_states_of_several_layers_are_those_of_steps():
    for backbone, images in (
        (load_any_backbone(model_of("dinov3")), images_for("dinov3", (2, 3))),
        (load_any_backbone(tiny().requires_grad_(False)), scenes(1, 2, 3, 28, 42)),
    ):
        layout, tokens = backbone.token_layout(images), backbone.embed(images)
        tables, kept = backbone.tables(layout, tokens), backbone.states(images, [2, 0])
        assert sorted(kept) == [0, 2] and kept[0].tap().shape[-1] == backbone.tap_dim
        for layer in range(3):
            state = backbone.step(layer, tokens, layout, tables)
            tokens = state.tokens
            if layer in kept:
                torch.testing.assert_close(kept[layer].tap(), state.tap())
                torch.testing.assert_close(backbone.features(images, [layer])[layer], tokens)
