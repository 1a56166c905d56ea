"""The law that every family stands on: decoding the probe's features gives the model's own forward."""

import pytest
import torch

import pullback as pb
from helpers.families import DOWNSAMPLED, FROM_FOLDER, GRIDS, SMALL_MODELS, images_for, model_of
from pullback.backbones.registry import FAMILIES
from pullback.models.embedded import EMBEDDED
from pullback.vggt.backbone import is_vggt

LAW = dict(rtol=1e-9, atol=1e-9)


def decoders_of(family: str) -> list[str]:
    listed = next(entry.decoders for entry in FAMILIES if entry.name == family)
    return [DOWNSAMPLED if name == "depth-GxG" else name for name in listed if name not in FROM_FOLDER]


MATRIX = [(name, decoder) for name, small in SMALL_MODELS.items() for decoder in decoders_of(small.family)]


def test_every_registered_family_has_a_small_model():
    assert {small.family for small in SMALL_MODELS.values()} == {family.name for family in FAMILIES}


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: f"{grid[0]}x{grid[1]}")
@pytest.mark.parametrize(("name", "decoder"), MATRIX)
def test_decoding_the_features_of_any_layer_gives_the_models_own_forward(name, decoder, grid):
    model, images = model_of(name), images_for(name, grid)
    with torch.no_grad():
        expected = SMALL_MODELS[name].references[decoder](model, images)
    assert expected.std() > 1e-3, "a constant reference would prove nothing"
    for layer in range(SMALL_MODELS[name].depth):
        probe = pb.load_probe(model, decoder, layer)
        torch.testing.assert_close(probe(probe.features(images)), expected, **LAW, msg=f"layer {layer}")


EMBEDDED_VITS = [name for name in EMBEDDED if not is_vggt(name)]


@pytest.mark.parametrize(
    ("name", "decoder"), [(name, decoder) for name in EMBEDDED_VITS for decoder in decoders_of(name)]
)
def test_the_law_holds_for_the_embedded_models(name, decoder):
    reference = pb.load_probe(name, decoder, 0, dtype=torch.float64, device="cpu").backbone.model
    images = torch.randn(2, 3, 28, 42, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.no_grad():
        expected = SMALL_MODELS[name].references[decoder](reference, images)
    assert expected.std() > 1e-3
    for layer in range(len(pb.load_probe(reference, decoder, 0).backbone.blocks)):
        probe = pb.load_probe(reference, decoder, layer)
        torch.testing.assert_close(probe(probe.features(images)), expected, **LAW, msg=f"layer {layer}")
