"""Heat maps over pictures, by numpy and Pillow alone."""

import subprocess
import sys

import numpy as np
import pytest

from pullback.report.heat import colours, lay_over, limits, relative_energy


def luminance(rgb: np.ndarray) -> np.ndarray:
    return rgb.astype(float) @ np.array([0.2126, 0.7152, 0.0722])


def test_colours_grow_lighter_from_the_lowest_value_to_the_highest():
    light = luminance(colours(np.linspace(0, 1, 200)))
    assert (np.diff(light) >= -1).all(), "a larger value never looks darker"
    assert light[0] < 10 and light[-1] > 220
    assert np.array_equal(colours(np.array([-1.0, 2.0])), colours(np.array([0.0, 1.0])))


@pytest.mark.parametrize("shape", [(40, 40), (30, 60)])
def test_the_map_lies_over_the_picture_where_its_patches_are(shape):
    picture = np.full((*shape, 3), 128, dtype=np.uint8)
    patches = np.ones((5, 5))
    patches[1, 3] = 50.0
    relative = relative_energy(patches[None])[0]
    laid = lay_over(picture, relative, limits(relative))
    assert laid.mode == "RGB" and laid.size == (shape[1], shape[0])
    row, column = np.unravel_index(luminance(np.asarray(laid)).argmax(), shape)
    assert row * 5 // shape[0] == 1 and column * 5 // shape[1] == 3


def test_the_picture_stays_legible_under_the_map():
    stripes = np.zeros((32, 32, 3), dtype=np.uint8)
    stripes[:, ::2] = 255
    for level in (0.01, 1.0, 100.0):
        laid = np.asarray(lay_over(stripes, np.full((4, 4), level), (0.1, 10.0)))
        assert abs(luminance(laid)[:, ::2].mean() - luminance(laid)[:, 1::2].mean()) > 40, level


def test_no_opacity_gives_the_picture_back():
    picture = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    assert np.array_equal(np.asarray(lay_over(picture, np.ones((2, 2)), (0.5, 2.0), alpha=0.0)), picture)


@pytest.mark.parametrize("patches", [np.zeros((3, 3)), np.ones((3, 3)), np.eye(3), np.full((1, 1), 7.0)])
def test_maps_without_contrast_and_with_zeros_can_be_shown(patches):
    relative = relative_energy(patches[None])[0]
    low, high = limits(relative)
    assert 0 < low < high and high / low <= 300.01
    assert lay_over(np.zeros((6, 6, 3), dtype=np.uint8), relative, (low, high)).size == (6, 6)


def test_neither_matplotlib_nor_torch_is_imported():
    code = (
        "import sys\nfor name in ('torch', 'matplotlib', 'scipy'): sys.modules[name] = None\n"
        "import numpy as np\nfrom pullback.report.heat import lay_over\n"
        "print(lay_over(np.zeros((4, 4, 3), np.uint8), np.ones((2, 2)), (0.5, 2.0)).size)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "(4, 4)", done.stderr
