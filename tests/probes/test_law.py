"""The law that every family stands on: decoding the probe's features gives the model's own forward.

It is tried for every family and every decoder in the registry, at every layer and at the decoder's own inputs.
"""

from functools import lru_cache

import pytest
import torch

import pullback as pb
from helpers.families import (
    DOWNSAMPLED,
    FOR_KNOWN_WEIGHTS,
    FROM_FOLDER,
    GRIDS,
    ONE_LOGIT,
    SMALL_MODELS,
    images_for,
    model_of,
    random_normal,
)
from helpers.vggt_models import REFERENCES, scenes, tiny
from pullback.backbones import entry_of
from pullback.models import EMBEDDED
from pullback.operators import JacobianOperator
from pullback.registry import BACKBONES

LAW = dict(rtol=1e-9, atol=1e-9)
EXAMPLES = {"depth-GxG": DOWNSAMPLED, "logit-K": ONE_LOGIT, "camera-V": "camera-1", "points-K": "points-5"}
VIEWS = {"vggt": {}, "vggt-sparse": {"hook_layers": (0, 2, 2, 3)}}  # networks of several views, by name


@lru_cache
def network(name: str) -> torch.nn.Module:
    return tiny(**VIEWS[name]).requires_grad_(False) if name in VIEWS else model_of(name)


def family(name: str) -> str:
    return "vggt" if name in VIEWS else SMALL_MODELS[name].family


def samples(name: str, grid: tuple[int, int]) -> torch.Tensor:
    if name in VIEWS:
        return scenes(2, 2, 3, 14 * grid[0], 14 * grid[1], seed=1)
    return images_for(name, grid)


def reference(name: str, decoder: str, images: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        if name in VIEWS:
            return REFERENCES[decoder](network(name)(images))
        return SMALL_MODELS[name].references[decoder](network(name), images)


def decoders_of(kind: str) -> list[str]:
    elsewhere = FROM_FOLDER | FOR_KNOWN_WEIGHTS.get(kind, set())
    return [EXAMPLES.get(name, name) for name in BACKBONES[kind].decoders if name not in elsewhere]


NETWORKS = [*SMALL_MODELS, *VIEWS]
MATRIX = [(name, decoder) for name, small in SMALL_MODELS.items() for decoder in small.references]
MATRIX += [(name, decoder) for name in VIEWS for decoder in decoders_of("vggt")]


def test_every_registered_family_has_a_small_model():
    assert {family(name) for name in NETWORKS} == set(BACKBONES)


@pytest.mark.parametrize("kind", BACKBONES)
def test_every_decoder_of_a_family_is_tried_on_one_of_its_models(kind):
    tried = {decoder for name, decoder in MATRIX if family(name) == kind}
    assert tried == set(decoders_of(kind))


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: f"{grid[0]}x{grid[1]}")
@pytest.mark.parametrize(("name", "decoder"), MATRIX)
def test_decoding_the_features_of_any_layer_gives_the_models_own_forward(name, decoder, grid):
    model, images = network(name), samples(name, grid)
    expected = reference(name, decoder, images)
    assert expected.std() > 1e-3, "a constant reference would prove nothing"
    probe = pb.load_probe(model, decoder, 0)
    for layer in range(probe.backbone.depth):
        probe = pb.load_probe(model, decoder, layer)
        features = probe.features(images)
        assert features.shape == (2, probe.backbone.token_layout(images).tokens, probe.backbone.dim)
        torch.testing.assert_close(probe(features), expected, **LAW, msg=f"layer {layer}")
        torch.testing.assert_close(probe(features[1:]), expected[1:], **LAW, msg=f"layer {layer}")


@pytest.mark.parametrize("after_norm", [True, False])
@pytest.mark.parametrize("grid", [(3, 3), (2, 3)], ids=lambda grid: f"{grid[0]}x{grid[1]}")
@pytest.mark.parametrize(("name", "decoder"), MATRIX)
def test_decoding_the_inputs_of_a_decoder_gives_the_models_own_forward(name, decoder, grid, after_norm):
    images = samples(name, grid)
    probe = pb.multi_layer_probe(network(name), decoder, after_norm=after_norm)
    features = probe.features(images)
    assert (probe.at, probe.layer, probe.layers) == ("inputs", "hooks", probe.decoder.layers)
    assert features.shape[2] == len(probe.layers) * probe.backbone.tap_dim
    expected = reference(name, decoder, images)
    torch.testing.assert_close(probe(features), expected, **LAW)
    torch.testing.assert_close(probe(features[1:]), expected[1:], **LAW)


@pytest.mark.parametrize("at", ["a layer", "inputs"])
@pytest.mark.parametrize(("name", "decoder"), MATRIX)
def test_products_are_those_of_plain_backpropagation_and_of_each_other(name, decoder, at):
    """Whatever the linearisation is made of, and with an output metric in front of it."""
    model = network(name)
    probe = pb.load_probe(model, decoder, 1) if at == "a layer" else pb.multi_layer_probe(model, decoder)
    features = probe.features(samples(name, (2, 3)))
    operator = JacobianOperator(probe, features)
    v, w = random_normal(2, operator.cols, 2, seed=1), random_normal(2, operator.rows, 2, seed=2)
    forward, reverse = operator @ v, operator.T @ w
    point = features.as_subclass(torch.Tensor).clone().requires_grad_()
    (expected,) = torch.autograd.grad(probe.bind(features)(point).flatten(1), point, w[..., 0])
    torch.testing.assert_close(reverse[..., 0], expected.flatten(1), rtol=1e-9, atol=1e-9 * float(expected.abs().max()))
    torch.testing.assert_close(w.mT @ forward, reverse.mT @ v, rtol=1e-8, atol=1e-9 * float(forward.norm()))
    factor = random_normal(operator.rows, 3, seed=3)
    weighted = JacobianOperator(pb.ProbeMap(probe.backbone, probe.decoder, probe.at, output_metric=factor), features)
    assert weighted.rows == 3
    torch.testing.assert_close(weighted @ v, factor.mT @ forward)
    torch.testing.assert_close(weighted.T @ random_normal(2, 3, 1), operator.T @ (factor @ random_normal(2, 3, 1)))
    torch.testing.assert_close(weighted.output, operator.output @ factor)


@pytest.mark.parametrize(
    ("name", "decoder"),
    [(name, decoder) for name in EMBEDDED if not entry_of(name).views for decoder in decoders_of(entry_of(name).name)],
)
def test_the_law_holds_for_the_embedded_models(name, decoder):
    model = pb.load_probe(name, decoder, 0, dtype=torch.float64, device="cpu").backbone.model
    images = torch.randn(2, 3, 28, 42, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.no_grad():
        expected = SMALL_MODELS[name].references[decoder](model, images)
    assert expected.std() > 1e-3
    for layer in range(len(pb.load_probe(model, decoder, 0).backbone.blocks)):
        probe = pb.load_probe(model, decoder, layer)
        torch.testing.assert_close(probe(probe.features(images)), expected, **LAW, msg=f"layer {layer}")


def test_the_law_holds_for_the_embedded_vggt():
    backbone = pb.load_probe("tiny-views", dtype=torch.float64, device="cpu").backbone
    model, patch = backbone.model, backbone.patch_size
    views = scenes(1, 3, 3, 2 * patch, 3 * patch, seed=2)
    with torch.no_grad():
        output = model(views)
    for decoder in decoders_of("vggt"):
        for probe in (pb.load_probe(model, decoder), pb.multi_layer_probe(model, decoder)):
            torch.testing.assert_close(probe(probe.features(views)), REFERENCES[decoder](output), rtol=1e-7, atol=1e-7)
