"""Images from disk: what comes out, what is skipped, and what is refused."""

import io
import os
import struct
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from pullback.data import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    SkippedImage,
    find_images,
    iter_images,
    load_images,
    open_source,
    read_images,
)
from pullback.data.images import MAX_PIXELS
from pullback.errors import ImageError, PullbackError

MEAN = torch.tensor(IMAGENET_MEAN).view(3, 1, 1)
STD = torch.tensor(IMAGENET_STD).view(3, 1, 1)


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def save(path: Path, array: np.ndarray, **options: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path, **options)
    return path


def raw(path: Path | list[Path], size: int | tuple[int, int] = 224, **options) -> torch.Tensor:
    """Pixels in [0, 255], without normalisation."""
    return read_images(path, size, mean=(0, 0, 0), std=(1, 1, 1), **options).pixels * 255


def png_with_header(path: Path, width: int, height: int) -> Path:
    """A valid PNG that promises width × height pixels and holds next to none."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + body)
    return path


# What comes out


def test_a_256_pixel_file_is_only_cropped(tmp_path):
    array = noise(256, 256)
    pixels = load_images(save(tmp_path / "a.png", array))
    expected = torch.from_numpy(array[16:240, 16:240]).permute(2, 0, 1).float() / 255
    assert torch.equal(pixels, ((expected - MEAN) / STD)[None])
    assert pixels.dtype == torch.float32
    assert pixels.is_contiguous()


def test_the_short_side_is_resized_as_pillow_does_it(tmp_path):
    array = noise(300, 401)
    pixels = raw(save(tmp_path / "a.png", array))
    resized = np.asarray(Image.fromarray(array).resize((342, 256), Image.Resampling.BICUBIC))
    np.testing.assert_allclose(pixels[0].permute(1, 2, 0), resized[16:240, 59:283], atol=1e-4)


def test_the_interpolation_can_be_chosen(tmp_path):
    array = noise(300, 300)
    pixels = raw(save(tmp_path / "a.png", array), interpolation="nearest")
    resized = np.asarray(Image.fromarray(array).resize((256, 256), Image.Resampling.NEAREST))
    np.testing.assert_allclose(pixels[0].permute(1, 2, 0), resized[16:240, 16:240], atol=1e-4)


@pytest.mark.parametrize("shape", [(10, 10), (100, 300), (300, 100), (256, 999), (1, 40)])
@pytest.mark.parametrize("size", [224, 70, (56, 70), (112, 28)])
def test_every_image_shape_gives_the_asked_size(tmp_path, shape, size):
    pixels = load_images(save(tmp_path / "a.png", noise(*shape)), size=size)
    assert pixels.shape == (1, 3, *((size, size) if isinstance(size, int) else size))


def test_a_height_and_width_scale_the_image_until_it_covers_both(tmp_path):
    array = noise(100, 100)
    pixels = raw(save(tmp_path / "a.png", array), size=(56, 112))  # covers 64 × 128
    resized = np.asarray(Image.fromarray(array).resize((128, 128), Image.Resampling.BICUBIC))
    np.testing.assert_allclose(pixels[0].permute(1, 2, 0), resized[36:92, 8:120], atol=1e-4)


def test_mean_and_std_are_the_callers(tmp_path):
    file = save(tmp_path / "a.png", np.full((256, 256, 3), 255, np.uint8))
    pixels = read_images(file, mean=(0.5, 0.5, 0.0), std=(0.5, 0.25, 1.0)).pixels
    assert pixels[0, :, 0, 0].tolist() == [1.0, 2.0, 1.0]


def test_gray_images_have_three_equal_channels(tmp_path):
    pixels = raw(save(tmp_path / "a.png", noise(256, 256)[..., 0]))
    assert torch.equal(pixels[:, 0], pixels[:, 1])
    assert torch.equal(pixels[:, 0], pixels[:, 2])


def test_sixteen_bit_images_are_scaled_and_not_clipped(tmp_path):
    levels = np.arange(256, dtype=np.uint16)
    array = np.tile(257 * levels, (256, 1))
    for name in ("a.png", "a.tif"):
        np.testing.assert_allclose(raw(save(tmp_path / name, array))[0, 0, 0], levels[16:240], atol=1e-4)


def test_alpha_is_dropped_and_not_blended(tmp_path):
    array = np.full((256, 256, 4), (10, 20, 30, 0), dtype=np.uint8)
    assert raw(save(tmp_path / "a.png", array))[0, :, 0, 0].tolist() == pytest.approx([10, 20, 30])


@pytest.mark.parametrize("options", [{}, {"transparency": b"\x00\x80"}], ids=["opaque", "transparent"])
def test_palette_images_show_their_colours_without_a_warning(tmp_path, options):
    image = Image.new("P", (256, 256), 1)
    image.putpalette([0, 0, 0, 10, 20, 30])
    image.save(tmp_path / "a.png", **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert raw(tmp_path / "a.png")[0, :, 0, 0].tolist() == pytest.approx([10, 20, 30])


def test_the_first_frame_of_an_animation_is_taken(tmp_path):
    frames = [Image.new("RGB", (256, 256), colour) for colour in ("red", "blue")]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    assert raw(tmp_path / "a.gif")[0, :, 0, 0].tolist() == pytest.approx([255, 0, 0])


def test_pictures_are_turned_upright_by_their_exif_orientation(tmp_path):
    array = noise(256, 256)
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: rotate by 90° clockwise to see it upright
    turned = raw(save(tmp_path / "turned.png", array, exif=exif))
    assert torch.equal(turned, raw(save(tmp_path / "upright.png", np.rot90(array, k=-1).copy())))


# Where images come from


def test_folders_are_searched_recursively_in_sorted_order(tmp_path):
    for name in ("b/2.png", "b/1.JPG", "a.webp", "c.bmp", "b/deep/0.tiff", "d.ppm"):
        save(tmp_path / name, noise(32, 32))
    for name in ("notes.txt", ".hidden.png", ".cache/thumbnail.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"no image")
    batch = read_images(tmp_path, size=14)
    names = [path.relative_to(tmp_path).as_posix() for path in batch.paths]
    assert names == ["a.webp", "b/1.JPG", "b/2.png", "b/deep/0.tiff", "c.bmp", "d.ppm"]
    assert batch.skipped == ()
    assert len(batch) == len(batch.pixels) == 6


def test_a_glob_selects_images_in_sorted_order(tmp_path):
    for name in ("x3.png", "y1.png", "x1.png", "x4.png", "x2.png"):
        save(tmp_path / name, noise(32, 32))
    (tmp_path / "x5.txt").write_text("no image")
    assert [path.name for path in find_images(str(tmp_path / "x*"))] == ["x1.png", "x2.png", "x3.png", "x4.png"]


def test_an_existing_file_with_wildcards_in_its_name_is_that_file(tmp_path):
    file = save(tmp_path / "a[1].png", noise(32, 32))
    assert find_images(str(file)) == [file]


def test_a_list_keeps_its_order_and_mixes_files_folders_and_globs(tmp_path):
    for name in ("f/1.png", "f/2.png", "g/3.png", "z.png"):
        save(tmp_path / name, noise(32, 32))
    batch = read_images([tmp_path / "z.png", str(tmp_path / "f"), str(tmp_path / "g" / "*.png")], size=14)
    assert [path.name for path in batch.paths] == ["z.png", "1.png", "2.png", "3.png"]


def test_a_file_named_directly_needs_no_extension(tmp_path):
    save(tmp_path / "a.png", noise(32, 32)).rename(tmp_path / "picture")
    assert load_images(tmp_path / "picture", size=14).shape == (1, 3, 14, 14)


def test_images_are_opened_only_as_the_stream_advances(tmp_path):
    for name in ("1.png", "2.png"):
        save(tmp_path / name, noise(32, 32))
    stream = iter_images(tmp_path, size=14)
    next(stream)
    (tmp_path / "2.png").unlink()
    path, image = next(stream)
    assert path.name == "2.png"
    assert isinstance(image, SkippedImage)


# What is skipped


@pytest.fixture
def mixed(tmp_path):
    """Four good images (0, 2, 5, 9) among files that are empty, no image, truncated and too large."""
    for name in ("0.png", "2.png", "5.jpg", "9.png"):
        save(tmp_path / name, noise(256, 256, seed=int(name[0])))
    jpeg = io.BytesIO()
    Image.fromarray(noise(256, 256)).save(jpeg, "JPEG")
    (tmp_path / "1_empty.png").write_bytes(b"")
    (tmp_path / "3_text.jpg").write_text("this is no image")
    (tmp_path / "4_truncated.jpg").write_bytes(jpeg.getvalue()[: len(jpeg.getvalue()) // 2])
    png_with_header(tmp_path / "6_bomb.png", 60_000, 60_000)
    return tmp_path


def test_bad_files_among_good_ones_are_skipped_and_named(mixed):
    batch = read_images(mixed)
    assert [path.name for path in batch.paths] == ["0.png", "2.png", "5.jpg", "9.png"]
    reasons = {skipped.path.name: skipped.reason for skipped in batch.skipped}
    assert set(reasons) == {"1_empty.png", "3_text.jpg", "4_truncated.jpg", "6_bomb.png"}
    assert "empty file" in reasons["1_empty.png"]
    assert "not a readable image" in reasons["3_text.jpg"]
    assert "truncated" in reasons["4_truncated.jpg"]
    assert "image bomb" in reasons["6_bomb.png"]


def test_the_kept_images_are_the_same_as_without_the_bad_files(mixed):
    good = [mixed / name for name in ("0.png", "2.png", "5.jpg", "9.png")]
    assert torch.equal(read_images(mixed).pixels, read_images(good).pixels)


def test_load_images_names_the_skipped_files_in_one_warning_that_points_here(mixed):
    with pytest.warns(UserWarning, match=r"skipped 4 of 8 image files: .*1_empty\.png.*6_bomb\.png") as caught:
        assert load_images(mixed).shape == (4, 3, 224, 224)
    assert [warning.filename for warning in caught if "skipped" in str(warning.message)] == [__file__]


def test_load_images_is_silent_when_nothing_is_skipped(tmp_path):
    save(tmp_path / "a.png", noise(256, 256))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_images(tmp_path)


def test_the_limit_counts_good_images_only(mixed):
    batch = read_images(mixed, limit=3)
    assert [path.name for path in batch.paths] == ["0.png", "2.png", "5.jpg"]
    assert [skipped.path.name[0] for skipped in batch.skipped] == ["1", "3", "4"]


@pytest.mark.parametrize("policy", ["ignore", "error"])
@pytest.mark.parametrize("pillow_limit", [MAX_PIXELS, None])
def test_a_bomb_is_refused_before_decoding_whatever_pillow_and_warnings_are_set_to(
    tmp_path, monkeypatch, policy, pillow_limit
):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", pillow_limit)
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("the bomb was decoded"))
    png_with_header(tmp_path / "a.png", MAX_PIXELS // 1000 + 1, 1000)  # Pillow itself would only warn
    with warnings.catch_warnings():
        warnings.simplefilter(policy)
        (_, image) = next(iter_images(tmp_path))
    assert isinstance(image, SkippedImage)
    assert "image bomb" in image.reason


def test_a_thread_of_an_image_that_would_explode_when_resized_is_skipped(tmp_path):
    save(tmp_path / "a.png", noise(1, 400_000))  # 256 × 102 400 000 after resizing
    with pytest.raises(ImageError, match="image bomb: would have, once resized"):
        read_images(tmp_path)


def test_floating_point_pixels_are_skipped_because_their_range_is_unknown(tmp_path):
    save(tmp_path / "a.tif", np.ones((256, 256), dtype=np.float32))
    with pytest.raises(ImageError, match="floating-point pixels have no agreed range"):
        read_images(tmp_path)


def test_a_format_outside_the_list_is_not_opened_under_another_name(tmp_path):
    Image.fromarray(noise(256, 256)).save(tmp_path / "a.eps")  # decoding EPS would start Ghostscript
    (tmp_path / "a.eps").rename(tmp_path / "a.jpg")
    with pytest.raises(ImageError, match="not a readable image"):
        read_images(tmp_path)


# Folders that cannot be searched


@pytest.fixture
def closed(tmp_path, monkeypatch):
    """photos/open/a.png beside photos/closed, which the system does not let us list (root may list everything)."""
    save(tmp_path / "photos" / "open" / "a.png", noise(32, 32))
    save(tmp_path / "photos" / "closed" / "b.png", noise(32, 32))
    listed = os.scandir

    def scandir(path="."):
        if os.fspath(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    return tmp_path / "photos"


REASON = "folder that cannot be read: Permission denied"


def test_a_subfolder_that_cannot_be_read_is_skipped_and_named(closed):
    batch = read_images(closed, size=14)
    assert [path.name for path in batch.paths] == ["a.png"]
    assert batch.skipped == (SkippedImage(closed / "closed", REASON),)
    with pytest.warns(UserWarning, match=rf"skipped 1 of 2 image files: .*closed: {REASON}"):
        load_images(closed, size=14)
    with pytest.warns(UserWarning, match=rf"not searched: .*closed: {REASON}"):
        assert find_images(closed) == [closed / "open" / "a.png"]
    with pytest.warns(UserWarning, match=rf"not searched: .*closed: {REASON}"):
        assert find_images(str(closed / "**" / "*.png")) == [closed / "open" / "a.png"]


def test_a_folder_of_which_nothing_can_be_read_is_refused_with_the_reason(closed):
    with pytest.raises(ImageError, match=rf"no image found; .*Not searched: .*closed: {REASON}"):
        load_images(closed / "closed")


def test_a_source_records_the_subfolder_that_cannot_be_read(closed):
    items = list(open_source(closed))
    assert [item.key for item in items] == ["closed", "open/a.png"] and open_source(closed).count == 2
    with pytest.raises(Exception, match=REASON):
        items[0].read()


def test_links_that_lead_back_are_not_followed_and_named(tmp_path):
    save(tmp_path / "photos" / "a" / "x.png", noise(32, 32))
    for name in ("again", "up"):
        (tmp_path / "photos" / "a" / name).symlink_to(tmp_path / "photos", target_is_directory=True)
    for path in (tmp_path / "photos", str(tmp_path / "photos" / "**" / "*.png"), str(tmp_path / "**")):
        batch = read_images(path, size=14)
        assert [file.name for file in batch.paths] == ["x.png"]
        assert [folder.path.name for folder in batch.skipped] == ["again", "up"]
        assert "link to a folder" in batch.skipped[0].reason


def test_a_link_to_a_folder_may_be_named_by_itself(tmp_path):
    save(tmp_path / "elsewhere" / "x.png", noise(32, 32))
    (tmp_path / "photos").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    assert find_images(tmp_path / "photos") == [tmp_path / "photos" / "x.png"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("**/*.png", ["a/b/z.png", "a/y.png", "x.png"]),
        ("**", ["a/b/z.png", "a/y.png", "x.png"]),
        ("a/**/*.png", ["a/b/z.png", "a/y.png"]),
        ("**/b/*", ["a/b/z.png"]),
        ("*/**/z.*", ["a/b/z.png"]),
        ("**/a/**/z.png", ["a/b/z.png"]),
        ("*/*.png", ["a/y.png"]),
    ],
)
def test_globs_of_any_depth(tmp_path, pattern, expected):
    for name in ("x.png", "a/y.png", "a/b/z.png", "a/.hidden/h.png", "a/notes.txt"):
        save(tmp_path / name, noise(8, 8)) if name.endswith("png") else (tmp_path / name).write_text("")
    assert [file.relative_to(tmp_path).as_posix() for file in find_images(str(tmp_path / pattern))] == expected


# What is refused


def test_a_missing_path_is_refused(tmp_path):
    with pytest.raises(ImageError, match=r"nowhere.*no such file or folder.*check the spelling"):
        load_images(tmp_path / "nowhere")


def test_a_missing_path_in_a_list_is_refused(tmp_path):
    save(tmp_path / "a.png", noise(32, 32))
    with pytest.raises(ImageError, match=r"nowhere\.png.*no such file"):
        load_images([tmp_path / "a.png", tmp_path / "nowhere.png"])


def test_a_folder_without_images_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("no image")
    with pytest.raises(
        ImageError, match=r"no image found; looked for \.jpg .*Give a folder that holds images"
    ) as caught:
        load_images(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_a_glob_that_matches_nothing_is_refused(tmp_path):
    with pytest.raises(ImageError, match=r"\*\.png.*no image found"):
        load_images(str(tmp_path / "*.png"))


def test_an_empty_list_is_refused():
    with pytest.raises(ImageError, match=r"path=\[\]: no image found"):
        load_images([])


def test_a_folder_of_only_bad_images_is_refused_with_the_first_reasons(tmp_path):
    for index in range(7):
        (tmp_path / f"{index}.png").write_bytes(b"")
    with pytest.raises(ImageError, match=r"none of the 7 files could be used: .*0\.png: empty file .*and 2 more"):
        load_images(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 0}, "size=0: expected a positive"),
        ({"size": 224.0}, r"size=224\.0: expected a positive"),
        ({"size": (224, 224, 3)}, r"size=\(224, 224, 3\): expected"),
        ({"limit": 0}, "limit=0: expected a positive"),
        ({"interpolation": "cubic"}, "interpolation='cubic': expected one of .*bicubic"),
        ({"std": (1.0, 0.0, 1.0)}, "std positive"),
        ({"mean": (0.5,)}, "expected three numbers"),
    ],
)
def test_wrong_arguments_are_refused_at_the_call(tmp_path, arguments, message):
    save(tmp_path / "a.png", noise(32, 32))
    with pytest.raises(PullbackError, match=message):
        iter_images(tmp_path, **arguments)
