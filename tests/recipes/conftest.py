"""A random `tiny-scenes` of toy size: what the commands that measure one are tried on."""

from dataclasses import asdict

import pytest

from pullback.runs.files import write_network
from recipes.tiny_scenes import Recipe, build


@pytest.fixture(scope="session")
def toy_model(tmp_path_factory) -> str:
    """The folder of an untrained network: 56 pixels, 16 patches, 4 layers."""
    folder = tmp_path_factory.mktemp("toy")
    recipe = Recipe(size=56, width=24, layers=4, heads=2, hooks=(0, 1, 2, 3), channels=8)
    network = build(recipe).eval()
    write_network(folder, network, asdict(network.config))
    return str(folder)
