"""The hash of weights, and which differences between two configurations matter."""

import hashlib
import json
import struct

import pytest
import torch
from torch import nn

import pullback as pb
from helpers.families import model_of
from helpers.pictures import small_probe
from pullback.errors import PullbackError
from pullback.runs.provenance import weights_hash
from pullback.runs.settings import check_settings
from pullback.targets.recipe import Recipe
from pullback.targets.store import NOT_COMPARED, configuration


def layer(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


def test_the_hash_depends_on_every_weight_name_and_dtype_and_on_nothing_else():
    assert weights_hash(layer()) == weights_hash(layer()) != weights_hash(layer(1))
    changed = layer()
    changed[1].running_mean[1] += 1e-6
    assert weights_hash(changed) != weights_hash(layer())
    assert weights_hash(layer().double()) != weights_hash(layer())
    assert weights_hash(nn.ModuleDict({"a": layer()})) != weights_hash(nn.ModuleDict({"b": layer()}))
    assert weights_hash(layer().bfloat16()) == weights_hash(layer().bfloat16())


def test_the_hash_is_that_of_names_dtypes_shapes_and_bytes():
    fixed = nn.Linear(2, 1)
    with torch.no_grad():
        fixed.weight.copy_(torch.tensor([[1.0, -2.0]]))
        fixed.bias.fill_(0.5)
    content = b"bias torch.float32 (1,)\n" + struct.pack("<f", 0.5)
    content += b"weight torch.float32 (1, 2)\n" + struct.pack("<2f", 1.0, -2.0)
    assert weights_hash(fixed) == hashlib.sha256(content).hexdigest()


def check_same(stored: dict, asked: dict) -> None:
    """As `StoreWriter.claim` compares."""
    check_settings(stored, asked, "folder", holds="targets", ignore=NOT_COMPARED)


def config(probe=None, **changes) -> dict:
    options = {"crops": 0, "seed": 0, "source": "photos"} | changes
    probe = probe or small_probe()
    return configuration(probe, Recipe(rank=3), probe.pixel_format((28, 42)), **options)


def test_the_configuration_is_plain_json_and_complete():
    stored = config(crops=2)
    assert json.loads(json.dumps(stored)) == stored
    assert (stored["family"], stored["decoder"], stored["layer"], stored["rank"]) == ("dinov2", "cls", 1, 3)
    assert (stored["tokens"], stored["grid"], stored["prefix"], stored["size"]) == (7, [2, 3], 1, [28, 42])
    assert stored["weights"] == weights_hash(model_of("dinov2")) and stored["crop_scale"] == [0.35, 1.0]


def test_other_weights_layers_distances_and_metrics_are_other_configurations():
    base = config()
    others = {
        "layer": small_probe(layer=0),
        "weights": small_probe("dinov2-swiglu"),
        "distance": pb.load_probe(model_of("dinov2"), "cls", 1, distance="cosine"),
        "output_metric": pb.load_probe(model_of("dinov2"), "cls", 1, output_metric=torch.eye(24)),
        "decoder": pb.load_probe(model_of("dinov2"), "mean", 1),
    }
    for name, probe in others.items():
        assert config(probe)[name] != base[name]
        with pytest.raises(PullbackError, match=rf"{name}: .* there, .* asked for"):
            check_same(base, config(probe))


def test_every_difference_is_named_with_the_fix():
    with pytest.raises(PullbackError) as caught:
        check_same(config(), config(seed=1, source="other"))
    assert str(caught.value) == (
        "out: folder holds targets with other settings (seed: 0 there, 1 asked for; source: 'photos' there, "
        "'other' asked for). Ask for the same settings to go on with it, or choose another folder."
    )


def test_the_models_name_and_the_packages_version_may_differ():
    check_same(config(), config() | {"model": "elsewhere/copy", "pullback": "9.9"})


def test_a_probe_of_several_layers_has_a_configuration_too():
    probe = pb.multi_layer_probe(model_of("depth-v2"), "depth-3x4")
    stored = config(probe)
    assert stored["layer"] == "hooks" and stored["dim"] == 4 * 24 and stored["after_norm"]
