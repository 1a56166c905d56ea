"""Views for VGGT: the published loader's pixels, and what is refused."""

import numpy as np
import pytest
import torch
from PIL import Image

from pullback.errors import ImageError
from pullback.vggt.views import load_square_views, load_views

FIXTURE = "specs/preprocess_parity_visible.safetensors"


@pytest.fixture(scope="module")
def reference(shared):
    from safetensors.torch import load_file

    return load_file(shared / FIXTURE)


@pytest.fixture(scope="module")
def files(reference, tmp_path_factory):
    folder = tmp_path_factory.mktemp("views")
    for name in "abcdef":
        Image.fromarray(reference[f"in_{name}"].numpy()).save(folder / f"{name}.png")
    return folder


def sampled(views):
    return views[..., 3::7, 3::7]


def relative_error(got, expected):
    return ((got - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.weights(FIXTURE)
@pytest.mark.parametrize("mode", ["crop", "pad"])
@pytest.mark.parametrize("name", list("abcdef"))
def test_single_views_are_those_of_the_published_loader(reference, files, mode, name):
    views = load_views(files / f"{name}.png", mode=mode)
    assert list(views.shape) == reference[f"{mode}_{name}_shape"].tolist()
    assert relative_error(sampled(views), reference[f"{mode}_{name}_sub7"]) < 2e-5


@pytest.mark.weights(FIXTURE)
def test_views_of_different_heights_are_filled_up_as_in_the_published_loader(reference, files):
    with pytest.warns(UserWarning, match=r"different shapes \(294x518, 392x518, 518x518\) get white edges"):
        views = load_views([files / f"{name}.png" for name in "abc"])
    assert list(views.shape) == reference["crop_abc_shape"].tolist()
    assert relative_error(sampled(views), reference["crop_abc_sub7"]) < 2e-5


@pytest.mark.weights(FIXTURE)
def test_square_views_and_their_boxes_are_those_of_the_published_loader(reference, files):
    views, boxes = load_square_views([files / "a.png", files / "c.png"], size=518)
    assert relative_error(sampled(views), reference["square518_ac_sub7"]) < 2e-5
    torch.testing.assert_close(boxes, reference["square518_ac_coords"])


def saved(folder, name, height, width, colour=(10, 20, 30), mode="RGB"):
    path = folder / name
    Image.new(mode, (width, height), colour).save(path)
    return path


@pytest.mark.parametrize(
    ("height", "width", "mode", "expected"),
    [
        (60, 80, "crop", (392, 518)),
        (45, 80, "crop", (294, 518)),
        (61, 83, "crop", (378, 518)),
        (100, 40, "crop", (518, 518)),
        (60, 80, "pad", (518, 518)),
        (100, 40, "pad", (518, 518)),
    ],
)
def test_sizes_are_those_of_the_facts(tmp_path, height, width, mode, expected):
    views = load_views(saved(tmp_path, "view.png", height, width), mode=mode)
    assert views.shape == (1, 3, *expected) and views.dtype == torch.float32


def test_a_small_network_gets_small_views_in_the_order_of_their_names(tmp_path):
    for index, name in enumerate(("b.png", "a.png", "c.png")):
        saved(tmp_path, name, 50, 100, (index, 0, 0))
    views = load_views(tmp_path, size=56, patch_size=14)
    assert views.shape == (3, 3, 28, 56)
    assert (views[:, 0, 0, 0] * 255).round().tolist() == [1, 0, 2]


def test_a_tall_view_loses_as_much_above_as_below(tmp_path):
    pixels = np.zeros((140, 70, 3), np.uint8)
    pixels[:35] = pixels[-35:] = 255  # what a crop to the middle square cuts off
    Image.fromarray(pixels).save(tmp_path / "tall.png")
    views = load_views(tmp_path / "tall.png", size=70)
    assert views.shape == (1, 3, 70, 70)
    assert views[..., 4:-4, :].max() == 0


def test_padding_and_transparency_are_white_and_squares_have_black_edges(tmp_path):
    wide = saved(tmp_path, "wide.png", 20, 40)
    padded = load_views(wide, mode="pad", size=56)
    assert padded.shape == (1, 3, 56, 56)
    assert (padded[..., :14, :] == 1).all() and (padded[..., -14:, :] == 1).all() and padded[..., 14:-14, :].max() < 0.2
    squares, boxes = load_square_views(wide, size=56)
    assert (squares[..., :10, :] == 0).all() and boxes.tolist() == [[0, 14, 56, 42, 40, 20]]
    clear = saved(tmp_path, "clear.png", 20, 40, (255, 0, 0, 0), "RGBA")
    assert (load_views(clear, size=56) == 1).all()


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "RGB", "L"])
def test_what_is_transparent_is_white_in_every_mode(tmp_path, mode):
    """The left half is transparent, by an alpha channel or by a colour that stands for it, the right half is not."""
    seen, hidden = {"RGBA": ((9, 9, 9, 255), (8, 8, 8, 0)), "LA": ((9, 255), (8, 0))}.get(mode, (9, 8))
    picture = Image.new("L" if mode in ("P", "RGB") else mode, (40, 20), seen)
    picture.paste(hidden, (0, 0, 20, 20))
    picture = picture.convert(mode)
    colour = {"P": 8, "L": 8, "RGB": (8, 8, 8)}.get(mode)
    picture.save(tmp_path / "view.png", **({} if colour is None else {"transparency": colour}))
    assert Image.open(tmp_path / "view.png").mode == mode
    views = load_views(tmp_path / "view.png", size=56)
    assert (views[..., :24] == 1).all() and ((views[..., 32:] * 255).round() == 9).all()
    squares, _ = load_square_views(tmp_path / "view.png", size=40)
    assert (squares[..., 10:30, :18] > 0.99).all()


def test_half_transparent_pixels_are_mixed_with_white(tmp_path):
    Image.new("LA", (40, 20), (0, 51)).save(tmp_path / "view.png")
    assert ((load_views(tmp_path / "view.png", size=56) * 255).round() == 204).all()


def test_sixteen_bit_gray_is_read_whatever_its_transparency(tmp_path):
    Image.fromarray(np.full((20, 40), 257 * 9, np.uint16)).save(tmp_path / "view.png", transparency=7)
    assert ((load_views(tmp_path / "view.png", size=56) * 255).round() == 9).all()


def test_a_view_that_cannot_be_read_is_an_error_because_views_are_told_apart_by_their_place(tmp_path):
    saved(tmp_path, "a.png", 20, 40)
    (tmp_path / "b.png").write_bytes(b"no picture")
    with pytest.raises(ImageError, match=r"b\.png: not a readable image .* A scene needs all of its views"):
        load_views(tmp_path)
    with pytest.raises(ImageError, match="no image found"):
        load_views(str(tmp_path / "*.jpg"))


def test_pictures_that_would_vanish_or_explode_are_refused(tmp_path):
    thin = saved(tmp_path, "thin.png", 1, 200)
    with pytest.raises(ImageError, match=r"thin\.png: too narrow: its short side would not fill one patch"):
        load_views(thin)
    long = saved(tmp_path, "long.png", 10_000, 2)
    with pytest.raises(ImageError, match=r"long\.png: too long: 2x10000 pixels would become 518x2590000"):
        load_views(long)
    with pytest.raises(ImageError, match="too long: 2x10000 pixels would become 10000x10000"):
        load_square_views(long)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(mode="stretch"), "mode: expected 'crop' or 'pad', got 'stretch'"),
        (dict(size=500), "size=500: expected a multiple of patch_size=14"),
        (dict(size=0), "size=0: expected a multiple"),
        (dict(size=56.0), r"size=56\.0: expected a multiple of patch_size=14, as an int, such as 518"),
        (dict(size="56"), "size='56': expected a multiple"),
        (dict(patch_size=14.0), r"patch_size=14\.0: expected a positive whole number"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path, arguments, message):
    with pytest.raises(ImageError, match=message):
        load_views(saved(tmp_path, "view.png", 20, 40), **arguments)
    for wrong in (0, 56.0):
        with pytest.raises(ImageError, match=f"size={wrong}: expected a positive whole number of pixels"):
            load_square_views(tmp_path, size=wrong)
