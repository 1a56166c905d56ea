"""`pb.overlay`: an importance map over the crop that the probe saw."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import pullback as pb
from pullback.errors import PullbackError
from pullback.probes import ProbeMap
from pullback.scenes.render import render

SIDE = 56  # 4 x 4 patches of 14 pixels


@pytest.fixture(scope="module")
def probe() -> ProbeMap:
    return pb.load_probe("tiny-scenes", decoder="cls", layer=10, device="cpu")


@pytest.fixture(scope="module")
def photo(tmp_path_factory) -> str:
    """A wide picture, of which the probe sees the middle."""
    path = tmp_path_factory.mktemp("photos") / "photo.png"
    scene = render([3], size=96).pictures()[0, 0].numpy()
    Image.fromarray(np.concatenate([scene, scene[:, ::-1]], 1)).save(path)
    return str(path)


def spiked(tokens: int, at: int) -> Tensor:
    importance = torch.full((tokens,), 0.1)
    importance[at] = 5.0
    return importance


def brightest(picture: Image.Image) -> tuple[int, int]:
    light = np.asarray(picture.convert("L"), dtype=float)
    row, column = np.unravel_index(light.argmax(), light.shape)
    return int(row), int(column)


def test_the_hot_patch_is_where_its_token_is_and_the_prefix_is_dropped(probe):
    black = probe.pixel_format(SIDE).tensor(Image.new("RGB", (SIDE, SIDE)))
    laid = pb.overlay(black, spiked(17, 1 + 4 * 2 + 3), probe)  # the class token, then row 2, column 3
    row, column = brightest(laid)
    assert (row // 14, column // 14) == (2, 3)
    loud_class = spiked(17, 0)
    quiet = np.asarray(pb.overlay(black, loud_class, probe)).astype(float)
    assert np.ptp(quiet, axis=(0, 1)).max() < 3, "the class token has no place in the picture"


def test_every_kind_of_image_shows_the_crop_that_the_probe_saw(probe, photo):
    pixels = probe.load_images(photo, SIDE)
    importance = spiked(17, 7)
    shown = np.asarray(pb.overlay(pixels, importance[None], probe))
    assert shown.shape == (SIDE, SIDE, 3)
    with Image.open(photo) as opened:
        for image in (photo, opened, pixels[0], pixels.to(torch.float64)):
            again = np.asarray(pb.overlay(image, importance, probe))
            assert np.abs(again.astype(int) - shown.astype(int)).max() <= 1
    bare = np.asarray(pb.overlay(photo, importance, probe, alpha=0.0))
    seen = (probe.pixel_format().rgb(pixels[0]) * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    assert np.abs(bare.astype(int) - seen.astype(int)).max() <= 1


def test_a_picture_that_is_not_square_takes_its_size_from_the_tensor_or_from_size(probe, photo):
    importance = torch.rand(1 + 4 * 6)
    pixels = probe.load_images(photo, (56, 84))
    assert pb.overlay(pixels, importance, probe).size == (84, 56)
    assert pb.overlay(photo, importance, probe, size=(56, 84)).size == (84, 56)
    with pytest.raises(PullbackError, match=r"size: 25 tokens .* do not make a square .* size=\(height, width\)"):
        pb.overlay(photo, importance, probe)


def test_what_the_library_returns_goes_straight_in(probe, photo):
    pixels = probe.load_images(photo, SIDE)
    importance = pb.token_importance(pb.spectrum(probe, pixels, rank=3))
    assert pb.overlay(photo, importance, probe).size == (SIDE, SIDE)
    assert pb.overlay(photo, importance.numpy(), probe).size == (SIDE, SIDE)


def test_any_form_of_a_picture_gives_the_same_overlay(probe, photo):
    importance = torch.linspace(0, 1, 17)
    expected = np.asarray(pb.overlay(photo, importance, probe))
    with Image.open(photo) as picture:
        array = np.asarray(picture)
        assert np.array_equal(pb.overlay(picture, importance, probe), expected)
    assert np.array_equal(pb.overlay(array, importance, probe), expected)
    rgb = probe.pixel_format().rgb(probe.load_images(photo, SIDE)[0])
    assert np.array_equal(pb.overlay((rgb * 255).round().to(torch.uint8), importance, probe), expected)


@pytest.mark.parametrize(
    ("image", "importance", "message"),
    [
        ("pixels", torch.ones(16), r"importance: expected 17 tokens .* got 16"),
        ("pixels", torch.ones(2, 17), r"importance: expected \[17\] or \[1, 17\] .* got \[2, 17\].*importance\[0\]"),
        ("pixels", torch.full((17,), torch.nan), "importance: expected finite numbers"),
        ("pixels", -torch.ones(17), "importance: expected numbers from 0 up"),
        ("pixels", "a string", "importance: expected a tensor"),
        ("pixels", "spectrum", r"importance: expected a tensor .* pb.token_importance\(spectrum\)"),
        (torch.zeros(2, 3, SIDE, SIDE), torch.ones(17), r"image: expected one image, got 2.*importance\[0\]"),
        (torch.zeros(SIDE, SIDE), torch.ones(17), r"image: expected .*\[3, H, W\].* got \[56, 56\]"),
        (torch.zeros(3, 60, 60), torch.ones(17), "not divisible by the patch size 14"),
        (torch.zeros(3, 112, 112), torch.ones(17), r"importance: expected 65 tokens .* got 17"),
        ("nowhere.png", torch.ones(17), "nowhere.png"),
        (7, torch.ones(17), "image: expected .*PIL images.* got int"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(probe, photo, image, importance, message):
    pixels = probe.load_images(photo, SIDE)
    if isinstance(importance, str) and importance == "spectrum":
        importance = pb.spectrum(probe, pixels, rank=2)
    with pytest.raises(PullbackError, match=message):
        pb.overlay(pixels if isinstance(image, str) and image == "pixels" else image, importance, probe)


@pytest.mark.parametrize("alpha", [-0.1, 1.5, "much"])
def test_an_opacity_outside_of_0_to_1_is_refused(probe, photo, alpha):
    with pytest.raises(PullbackError, match="alpha: expected a number from 0 to 1"):
        pb.overlay(photo, torch.ones(17), probe, alpha=alpha)


def test_scenes_of_several_views_are_refused_with_what_to_use_instead():
    probe = pb.load_probe("tiny-views", device="cpu")
    with pytest.raises(PullbackError, match=r"probe: .*views.*pullback diagnose"):
        pb.overlay(torch.zeros(3, 56, 56), torch.ones(17), probe)
    with pytest.raises(PullbackError, match="probe: expected a ProbeMap"):
        pb.overlay(torch.zeros(3, 56, 56), torch.ones(17), "tiny-scenes")


def test_it_works_without_matplotlib():
    code = (
        "import sys\nsys.modules['matplotlib'] = None\nimport torch, pullback as pb\n"
        "probe = pb.load_probe('tiny-scenes', device='cpu')\n"
        "print(pb.overlay(torch.zeros(3, 56, 56), torch.ones(17), probe).size)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "(56, 56)", done.stderr
