"""Rendered scenes as a whole: values, determinism, and what is refused."""

from dataclasses import fields
from importlib import import_module

import pytest
import torch

from pullback.errors import ImageError, PullbackError
from pullback.scenes import SHIFTED, TRAINING, SceneBatch, normalised, render

SEEDS = range(200)
RENDERER = import_module("pullback.scenes.render")  # `pullback.scenes.render` itself is the function
IMAGES = ("rgb", "depth", "sky", "normals", "instance")


def same(left: SceneBatch, right: SceneBatch) -> bool:
    return all(torch.equal(getattr(left, field.name), getattr(right, field.name)) for field in fields(SceneBatch))


@pytest.mark.parametrize("ranges", [TRAINING, SHIFTED], ids=["training", "shifted"])
def test_values_are_finite_and_in_range(ranges):
    batch = render(SEEDS, size=32, ranges=ranges)
    for name in ("rgb", "depth", "normals", "pose", "intrinsics"):
        assert getattr(batch, name).isfinite().all()
    assert batch.rgb.min() >= 0
    assert batch.rgb.max() <= 1
    seen = batch.depth[~batch.sky]
    assert seen.min() > 0.4
    assert seen.max() < 40
    main = (batch.instance >= 10) & (batch.instance < 18)
    assert (main.float().mean((1, 2, 3)) > 0.01).float().mean() > 0.97
    brightness = batch.rgb.mean((1, 2, 3, 4))
    assert brightness.min() > 0.12
    assert brightness.max() < 0.9
    contrast = batch.rgb.std((1, 3, 4)).mean(1)
    assert (contrast > 0.03).float().mean() > 0.97


def test_different_seeds_give_different_pictures():
    batch = render(SEEDS, size=16)
    pictures = batch.rgb.flatten(1)
    distance = torch.cdist(pictures, pictures, p=1) / pictures.shape[1]
    distance.fill_diagonal_(1)
    assert distance.min() > 0.02


def test_a_scene_depends_on_its_seed_alone():
    together = render([11, -5, 2**40, 11], size=32, views=2)
    alone = render(torch.tensor([2**40]), size=32, views=2)
    for name in IMAGES:
        assert torch.equal(getattr(together, name)[2], getattr(alone, name)[0]), name
        assert torch.equal(getattr(together, name)[0], getattr(together, name)[3]), name
    assert same(together, render([11, -5, 2**40, 11], size=32, views=2))
    first = together.first_view()
    assert same(first, render([11, -5, 2**40, 11], size=32))


def test_chunks_do_not_show(monkeypatch):
    whole = render(range(5), size=(24, 32), views=2)
    for rays in (7 * 32, 24 * 32, 3 * 24 * 32):  # some lines, one image, some images at a time
        monkeypatch.setitem(RENDERER._CHUNK_BYTES, "cpu", 4 * RENDERER._FLOATS_PER_RAY * rays)
        assert same(whole, render(range(5), size=(24, 32), views=2))


def test_other_default_devices_and_types_change_nothing():
    plain = render([4], size=16)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            assert same(plain, render([4], size=16))
    finally:
        torch.set_default_dtype(torch.float32)


def test_normalised_takes_out_the_imagenet_mean():
    gray = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1).expand(2, 3, 4, 4)
    assert normalised(gray).abs().max() < 1e-6
    torch.testing.assert_close(normalised(gray + 0.229)[0, 0], torch.ones(4, 4))


# What is refused


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"size": 0}, ImageError, "size=0: expected a positive number of pixels"),
        ({"size": (32, 32, 3)}, ImageError, "size=.*height, width"),
        ({"size": 22.5}, ImageError, "size=22.5"),
        ({"views": 0}, PullbackError, "views=0: expected a positive number of cameras"),
        ({"views": 1.5}, PullbackError, "views=1.5"),
        ({"seeds": []}, PullbackError, "seeds: expected at least one seed"),
        ({"seeds": torch.zeros(2, 2, dtype=torch.long)}, PullbackError, r"seeds: .*shape \(2, 2\)"),
        ({"seeds": [0.5]}, PullbackError, "seeds: expected whole numbers; got dtype torch.float32"),
        ({"seeds": ["a"]}, PullbackError, "seeds: expected a list of whole numbers"),
        ({"seeds": [2**64]}, PullbackError, "seeds: expected a list of whole numbers"),
        ({"device": "toaster"}, PullbackError, "device='toaster': expected a device that works here"),
        ({"ranges": "training"}, PullbackError, "ranges='training': expected a SceneRange"),
    ],
)
def test_bad_arguments_are_named(arguments, error, message):
    seeds = arguments.pop("seeds", [0])
    with pytest.raises(error, match=message):
        render(seeds, **{"size": 16, **arguments})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_missing_gpu_is_named():
    with pytest.raises(PullbackError, match="device='cuda'"):
        render([0], size=16, device="cuda")


def test_nothing_is_left_on_the_cpu():
    """The meta device computes nothing, but refuses tensors of two devices in one expression."""
    assert render(range(6), size=16, views=2, device="meta").rgb.shape == (6, 2, 3, 16, 16)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cpu_and_gpu_draw_the_same_scenes():
    on_cpu, on_gpu = render(range(16), size=64, views=2), render(range(16), size=64, views=2, device="cuda").to("cpu")
    assert torch.equal(on_cpu.pose, on_gpu.pose)
    assert torch.equal(on_cpu.label, on_gpu.label)
    assert (on_cpu.instance == on_gpu.instance).float().mean() > 0.999
    assert ((on_cpu.rgb - on_gpu.rgb).abs() < 0.02).float().mean() > 0.995
