"""The tiny-scenes network: its shape, and that every layer it is said to read reaches its depth."""

import torch

from pullback.models.tiny_scenes import TinyScenes, TinyScenesConfig


def test_it_has_the_papers_shape_and_fits_into_the_package():
    model = TinyScenes(TinyScenesConfig())
    assert model.config.hooks == (2, 5, 8, 11)
    assert model.backbone.embeddings.position_embeddings.shape[1] == 257
    assert 2 * sum(p.numel() for p in model.parameters()) < 16e6  # bytes in float16


def test_depth_depends_on_each_of_the_four_layers_and_is_positive():
    model = TinyScenes(TinyScenesConfig(width=24, layers=4, heads=2, channels=8, image_size=28, hooks=(0, 1, 2, 3)))
    taps = [torch.randn(2, 5, 24, requires_grad=True) for _ in range(4)]
    depth = model.head(model.neck(taps, 2, 2), 2, 2)
    assert depth.shape == (2, 28, 28)
    assert (depth > 0).all()
    depth.sum().backward()
    for tap in taps:
        assert (tap.grad[:, 1:] != 0).any(-1).all(), "every patch token of every layer reaches the depth"
        assert (tap.grad[:, :1] == 0).all(), "the class token is not part of the map"
