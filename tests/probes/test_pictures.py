"""Which images may be passed to a probe, and what is refused because its numbers would be wrong."""

import re

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

import pullback as pb
from helpers.families import images_for, model_of
from helpers.pictures import small_probe, write_pictures
from helpers.vggt_models import scenes, tiny
from pullback.data import normalised
from pullback.data.images import centre_crop
from pullback.errors import ImageError, PullbackError

ANY_FORM = r"expected .*\[B, 3, H, W\].* PIL"


def noise(height: int = 28, width: int = 42, count: int = 2, seed: int = 0) -> torch.Tensor:
    """uint8 pictures [B, 3, H, W], none of them black."""
    return torch.randint(1, 256, (count, 3, height, width), dtype=torch.uint8, generator=generator(seed))


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pictures_of(pixels: torch.Tensor) -> list[Image.Image]:
    return [Image.fromarray(array) for array in pixels.permute(0, 2, 3, 1).numpy()]


def family_probe(name: str) -> pb.ProbeMap:
    return pb.load_probe(model_of(name), "mean", 1)


# What is accepted


@pytest.mark.parametrize("name", ["dinov2", "clip", "siglip", "tiny-scenes"])
def test_uint8_tensors_are_normalised_for_the_model_and_keep_their_size(name):
    probe = family_probe(name)
    patch, wanted = probe.backbone.patch_size, probe.pixel_format()
    pixels = noise(2 * patch, 3 * patch)
    expected = probe.features(normalised(pixels.float() / 255, wanted.mean, wanted.std))
    torch.testing.assert_close(probe.features(pixels), expected)
    torch.testing.assert_close(probe.features(pixels.numpy()), expected)
    torch.testing.assert_close(probe.features(list(pixels)), expected)
    torch.testing.assert_close(probe.features(pixels[0]), expected[:1])


def test_pictures_in_memory_are_read_as_files_are(tmp_path):
    probe, folder = small_probe(), write_pictures(tmp_path / "photos", 3, broken=False)
    files = sorted(folder.iterdir())
    expected = probe.features(probe.load_images(folder))
    opened = [Image.open(file) for file in files]
    arrays = [np.asarray(picture) for picture in opened]
    for given_as in (opened, tuple(opened), arrays, np.stack(arrays), torch.from_numpy(np.stack(arrays))):
        assert torch.equal(probe.features(given_as), expected)
    torch.testing.assert_close(probe.features(opened[1]), expected[1:2])
    torch.testing.assert_close(probe.features(arrays[1]), expected[1:2])
    torch.testing.assert_close(probe.features([opened[0], arrays[1]]), expected[:2])


def test_a_picture_in_memory_is_turned_upright_and_converted_as_a_file_is(tmp_path):
    gray = Image.fromarray(noise(30, 50)[0, 0].numpy())
    exif = gray.getexif()
    exif[0x0112] = 6  # turned by 90 degrees
    gray.save(tmp_path / "turned.png", exif=exif)
    probe = small_probe()
    with Image.open(tmp_path / "turned.png") as turned:
        assert torch.equal(probe.features(turned), probe.features(probe.load_images(tmp_path / "turned.png")))


def test_the_output_of_an_image_processor_is_taken_as_it_is():
    import transformers as tf

    probe, pixels = small_probe(), noise(50, 60)
    processor = tf.BitImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    output = processor(pictures_of(pixels), return_tensors="pt")
    expected = probe.features(output["pixel_values"])
    assert torch.equal(probe.features(output), expected)
    assert torch.equal(probe.features(dict(output)), expected)
    as_arrays = processor(pictures_of(pixels))
    assert torch.equal(probe.features(as_arrays), expected)


def test_one_image_may_come_without_the_batch_axis():
    probe, images = small_probe(), images_for("dinov2", (2, 3))
    assert torch.equal(probe.features(images[0]), probe.features(images[:1]))
    assert torch.equal(probe.features(list(images)), probe.features(images))
    assert torch.equal(probe.features(images.numpy()), probe.features(images))


def test_a_white_picture_is_as_good_as_any():
    """It has no negative value once normalised; only floats that are passed in are suspected."""
    white = torch.full((1, 3, 28, 28), 255, dtype=torch.uint8)
    probe = small_probe()
    expected = probe.features(normalised(white.float() / 255), normalized=True)
    assert torch.equal(probe.features(white), expected)
    assert len(probe.features(Image.new("RGB", (60, 60), "white"))) == 1


def test_white_files_go_through_everything_that_reads_files(tmp_path):
    for number in range(2):
        Image.new("RGB", (40, 40), (250, 250, 250 - number)).save(tmp_path / f"{number}.png")
    probe = small_probe()
    table, skipped = pb.compute_table(probe, tmp_path, rank=2, size=28)
    assert len(table) == 2 and not skipped


# What is refused


def raw(low: float = 0.0, high: float = 1.0) -> torch.Tensor:
    return low + (high - low) * torch.rand(2, 3, 28, 28, generator=generator(1))


@pytest.mark.parametrize("images", [raw(), raw(0, 255), raw(0.2, 0.9), torch.zeros(1, 3, 28, 28)])
def test_floats_without_a_negative_value_are_refused_unless_vouched_for(images):
    probe = small_probe()
    message = r"images: expected normalised pixels, got floats from .* without a negative value.*normalized=True"
    several = pb.multi_layer_probe(model_of("depth-v2"), "depth-2x2")
    for use in (
        probe.features,
        lambda x: probe.features(list(x)),
        lambda x: probe.features(x.numpy()),
        lambda x: probe.features({"pixel_values": x}),
        lambda x: pb.spectrum(probe, x, rank=1),
        lambda x: pb.diagnose(probe, x, rank=1),
        lambda x: pb.layer_multiplicity(several, x),
    ):
        with pytest.raises(ImageError, match=message):
            use(images)
    assert torch.equal(
        probe.features(images, normalized=True), probe.backbone.features(images, [1])[1].as_subclass(torch.Tensor)
    )


def test_each_function_of_images_can_be_told_that_they_are_normalised():
    probe, bright = small_probe(), raw()
    several = pb.multi_layer_probe(model_of("depth-v2"), "depth-2x2")
    assert pb.spectrum(probe, bright, rank=1, normalized=True).rank == 1
    assert pb.diagnose(probe, bright, rank=1, normalized=True, convergence_samples=0).rank == 1
    assert len(pb.layer_multiplicity(several, bright, normalized=True, num_probes=2).value) == 2


def test_pixels_that_were_centred_but_not_scaled_are_refused():
    with pytest.raises(ImageError, match=r"images: expected normalised pixels, got floats from -1\d\d"):
        small_probe().features(raw(-120, 130))


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ("photos/", r"images: .* got the path 'photos/'.*probe\.load_images"),
        (None, f"images: {ANY_FORM}.* got NoneType"),
        (5, f"images: {ANY_FORM}.* got int"),
        ((x for x in ()), f"images: {ANY_FORM}.* got generator"),
        ([], "images: expected at least one image, got an empty"),
        (torch.zeros(0, 3, 28, 28), "images: expected at least one image, got an empty"),
        (torch.zeros(0, 28, 28, 3, dtype=torch.uint8), "images: expected at least one image, got an empty"),
        ({}, "images: expected pixel_values .* got a dictionary with no keys"),
        ({"images": raw()}, "images: expected pixel_values .* got a dictionary with images"),
        (torch.randn(28, 28), r"images: .*\[28, 28\]"),
        (torch.randn(1, 2, 3, 28, 28), r"images: .*\[1, 2, 3, 28, 28\]"),
        (torch.randn(2, 4, 28, 28), r"images: expected 3 channels .* \[2, 4, 28, 28\]"),
        (torch.randn(2, 1, 28, 28), r"images: expected 3 channels .* \[2, 1, 28, 28\].*expand"),
        (np.zeros((28, 28, 4), np.uint8), r"images: expected 3 channels .*convert\('RGB'\)"),
        (np.zeros((28, 28), np.uint8), r"images: .*\[28, 28\]"),
        (torch.randn(2, 28, 28, 3), r"images: .*channels last.*permute\(0, 3, 1, 2\)"),
        (np.random.default_rng(0).normal(size=(28, 28, 3)), r"images: .*channels last"),
        (torch.randint(0, 255, (2, 3, 28, 28)), r"images: expected uint8 .* got int64.*\.to\(torch\.uint8\)"),
        (torch.zeros(2, 3, 28, 28, dtype=torch.bool), "images: expected uint8 .* got bool"),
        (torch.zeros(2, 3, 28, 28, dtype=torch.complex64), "images: expected uint8 .* got complex64"),
        (np.array([["a"]], dtype=object), "images: expected uint8 .* got object"),
        (torch.randn(2, 3, 30, 28), "images: 30x28 pixels are not divisible by the patch size 14"),
        (torch.zeros(2, 3, 0, 0), "images: .*0x0"),
        (noise(30, 28), "images: 30x28 pixels are not divisible by the patch size 14"),
        ([raw(-1)[0], raw(-1)[0, :, :14]], r"images\[1\]: expected 28x28 pixels as images\[0\], got 14x28"),
        ([raw(-1)[0], "b.png"], r"images\[1\]: .*got the path 'b.png'"),
        ([Image.new("RGB", (30, 30)), None], rf"images\[1\]: {ANY_FORM}.* got NoneType"),
        ([[1.0, 2.0]], rf"images\[0\]: {ANY_FORM}.* got list"),
        (Image.new("F", (30, 30)), "images: floating-point pixels have no agreed range"),
        (Image.new("RGB", (0, 30)), "images: .*pixels"),
        (torch.full((1, 3, 28, 28), torch.nan), "images: expected finite numbers, got NaN or infinity in image 0"),
        (torch.cat([raw(-1), raw(-1) / 0]), "images: expected finite numbers, got NaN or infinity in image 2"),
    ],
    ids=lambda value: re.sub(r"\W+", "-", str(value))[:40] if isinstance(value, str) else "",
)
def test_what_is_no_image_is_refused_with_the_way_to_make_it_one(images, message):
    with pytest.raises(ImageError, match=message):
        small_probe().features(images)


# Reading files as a probe wants them


@pytest.mark.parametrize("name", ["dinov2", "siglip"])
def test_load_images_with_a_probe_reads_as_the_probe_does(tmp_path, name):
    probe = family_probe(name)
    folder = write_pictures(tmp_path, 2, broken=False)
    expected = probe.load_images(folder)
    assert torch.equal(pb.load_images(folder, probe), expected)
    assert torch.equal(pb.load_images(folder, probe=probe.backbone), expected)
    patch = probe.backbone.patch_size
    assert torch.equal(pb.load_images(folder, probe, size=2 * patch, limit=1), probe.load_images(folder, 2 * patch, 1))


def test_load_images_without_a_probe_keeps_its_meaning(tmp_path):
    folder = write_pictures(tmp_path, 2, broken=False)
    assert pb.load_images(folder).shape == (2, 3, 224, 224)
    for same in (pb.load_images(folder, size=28), pb.load_images(folder, 28), pb.load_images(folder, 28, 2)):
        assert torch.equal(same, small_probe().load_images(folder, 28))  # ImageNet's mean and std, as DINOv2's
    assert len(pb.load_images(folder, 28, 1)) == 1
    assert pb.load_images(folder, (14, 28)).shape == (2, 3, 14, 28)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"probe": "tiny-scenes"}, r"probe: expected a probe .* got 'tiny-scenes'.*load_probe"),
        ({"probe": 28, "size": 28}, r"probe: expected a probe or a backbone, got 28"),
        ({"probe": 2.5}, r"size=2.5: expected a positive number of pixels"),
        ({"limit": 1.5}, "limit=1.5: expected a positive number of images"),
        ({"limit": "3"}, "limit='3': expected a positive number of images"),
    ],
)
def test_load_images_names_the_argument_that_is_wrong(tmp_path, arguments, message):
    with pytest.raises(PullbackError, match=message):
        pb.load_images(write_pictures(tmp_path, 1), **arguments)


def test_load_images_for_a_network_of_views_names_load_views(tmp_path):
    with pytest.raises(PullbackError, match="load_views"):
        pb.load_images(write_pictures(tmp_path, 1), pb.load_probe(tiny()))


# Views of scenes, which are in [0, 1]


def test_views_may_be_uint8():
    probe = pb.load_probe(tiny(), layer=1)
    views = torch.randint(0, 256, (2, 3, 28, 28), dtype=torch.uint8, generator=generator(0))
    assert torch.equal(probe.features(views), probe.features(views.float() / 255))
    assert torch.equal(probe.features(views[None]), probe.features(views))


@pytest.mark.parametrize(
    ("views", "message"),
    [
        (normalised(scenes(2, 3, 28, 28)), r"images: expected views in \[0, 1\], got values from -.*normalises them"),
        (255 * scenes(2, 3, 28, 28), r"images: expected views in \[0, 1\], got values from .* to 2\d\d.*/ 255"),
        (scenes(2, 3, 28, 28) / 0, "images: expected finite numbers"),
        (Image.new("RGB", (28, 28)), r"images: expected .*\[S, 3, H, W\].* got Image.*load_views"),
        ([scenes(3, 28, 28)], r"images: expected .*\[S, 3, H, W\].* got list.*load_views"),
        ("photos", r"images: expected .*\[S, 3, H, W\].* got str.*load_views"),
        (scenes(2, 4, 28, 28), "three channels"),
        (torch.zeros(2, 3, 28, 28, dtype=torch.int64), "floating-point"),
    ],
)
def test_views_that_are_not_in_their_range_are_refused(views, message):
    with pytest.raises(ImageError, match=message):
        pb.load_probe(tiny(), layer=1).features(views)


# Any picture at all


@st.composite
def pixel_arrays(draw: st.DrawFn) -> np.ndarray:
    """An array of any shape that a picture might have, and of many that it cannot, in any common dtype."""
    sides = st.sampled_from([0, 1, 2, 3, 4, 13, 14, 28])
    shape = tuple(draw(st.lists(sides, min_size=0, max_size=5)))
    kind = draw(st.sampled_from(["uint8", "float32", "float64", "int64", "bool", "uint16"]))
    values = np.random.default_rng(draw(st.integers(0, 3))).normal(size=shape)
    scale, shift = draw(st.sampled_from([(1, 0), (0.1, 5), (100, 0), (np.nan, 0), (0, 0), (60, 128)]))
    with np.errstate(invalid="ignore"):
        return (values * scale + shift).astype(kind)


def as_tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.copy())


FORMS = {
    "array": lambda array: array,
    "tensor": as_tensor,
    "list of arrays": list,
    "list of tensors": lambda array: list(as_tensor(array)) if array.ndim else [as_tensor(array)],
    "processor": lambda array: {"pixel_values": as_tensor(array)},
    "nested": lambda array: array.tolist(),
}


@settings(derandomize=True, max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(array=pixel_arrays(), form=st.sampled_from(sorted(FORMS)), normalized=st.booleans())
def test_any_array_is_read_rightly_or_refused_in_words(array, form, normalized):
    """Whatever comes in: finite features of whole images, the same as through the plain route, or an ImageError."""
    probe = small_probe()
    try:
        images = FORMS[form](array)
    except TypeError:  # a list of a number
        return
    try:
        found = probe.backbone.batch(images, normalized=normalized)
        features = probe.features(images, normalized=normalized)
    except ImageError as error:
        assert re.match(r"images(\[\d+\])?: ", str(error)) and len(str(error)) < 700
        return
    assert found.ndim == 4 and found.shape[1] == 3 and found.is_floating_point()
    assert torch.isfinite(features).all() and len(features) == len(found)
    if array.dtype != np.uint8:
        assert normalized or (found < 0).any()
        assert torch.equal(found.double().flatten(), torch.from_numpy(array).double().flatten())
        return
    assert found.min() >= -2.2 and found.max() <= 2.7  # what ImageNet's mean and std make of 0 and 255
    if array.shape[-3] == 3:
        torch.testing.assert_close(found, normalised(torch.from_numpy(array).reshape(found.shape).float() / 255))


@settings(derandomize=True, max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    count=st.integers(1, 3),
    grid=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    single=st.booleans(),
    form=st.sampled_from(["array", "list of arrays", "list of tensors", "processor", "tensor"]),
    seed=st.integers(0, 9),
)
def test_usual_pictures_are_normalised_whatever_they_come_in(count, grid, single, form, seed):
    """uint8 of whole patches, channels first or last, and floats that were normalised by hand all mean the same."""
    batch, rgb = small_probe().backbone.batch, noise(14 * grid[0], 14 * grid[1], count, seed)
    expected = normalised(rgb.float() / 255)
    taken = slice(0, 1) if single else slice(None)
    inner = (0,) if single and "list" not in form else taken
    for pixels in (rgb, expected):
        torch.testing.assert_close(batch(FORMS[form](pixels[inner].numpy())), expected[taken])
    files = [
        small_probe().pixel_format().tensor(centre_crop(picture, small_probe().pixel_format()))
        for picture in pictures_of(rgb[taken])
    ]
    assert torch.equal(batch(FORMS[form](rgb.permute(0, 2, 3, 1)[inner].numpy())), torch.stack(files))


@settings(derandomize=True, max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    mode=st.sampled_from(["RGB", "L", "RGBA", "P", "CMYK", "1", "LA", "I;16", "F", "HSV"]),
    width=st.integers(1, 70),
    height=st.integers(1, 70),
    seed=st.integers(0, 9),
)
def test_any_pil_image_becomes_one_image_of_the_models_size_or_is_refused(mode, width, height, seed):
    rgb = Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))
    probe = small_probe()
    try:
        picture = rgb.convert(mode)
    except ValueError:  # not a conversion that Pillow has
        picture = Image.new(mode, (width, height))
    try:
        pixels = probe.backbone.batch(picture)
    except ImageError as error:
        assert mode == "F" or "pixels" in str(error)
        return
    assert pixels.shape == (1, 3, *probe.pixel_format().size) and torch.isfinite(pixels).all()
