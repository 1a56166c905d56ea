"""Random crops: always the same, always inside, and cut out again to the very pixel."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from pullback.data import read_images
from pullback.data.crops import RATIO, SCALE, Crop, item_seed, random_crop, read_crop, read_crops
from pullback.data.images import PixelFormat

WANTED = PixelFormat.of((28, 42), interpolation="bilinear")


def picture(height: int, width: int, seed: int = 0, **options: object) -> bytes:
    array = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(array).save(file, "PNG", **options)
    return file.getvalue()


def drawn(count: int, width: int = 400, height: int = 300, **options) -> list[Crop]:
    return [random_crop(width, height, seed=0, key="a.jpg", index=i, **options) for i in range(1, count + 1)]


@pytest.mark.parametrize(("width", "height"), [(400, 300), (300, 400), (50, 50), (1000, 10), (3, 700), (1, 1)])
def test_a_crop_lies_inside_the_image(width, height):
    for crop in drawn(50, width, height):
        x0, y0, x1, y1 = crop.box
        assert 0 <= x0 < x1 <= width and 0 <= y0 < y1 <= height


def test_areas_and_aspects_fill_their_ranges():
    crops = drawn(2000)
    sides = np.array([(c.box[2] - c.box[0], c.box[3] - c.box[1]) for c in crops])
    area, aspect = sides.prod(1) / (400 * 300), sides[:, 0] / sides[:, 1]
    assert SCALE[0] - 0.01 <= area.min() < SCALE[0] + 0.05 and area.max() > 0.9
    assert RATIO[0] - 0.01 <= aspect.min() < 0.8 and 1.25 < aspect.max() <= RATIO[1] + 0.01
    assert 0.45 < np.mean([c.flip for c in crops]) < 0.55


def test_a_crop_depends_on_seed_key_and_number_alone():
    first = random_crop(400, 300, seed=1, key="a", index=1)
    assert first == random_crop(400, 300, seed=1, key="a", index=1)
    others = [dict(seed=2, key="a", index=1), dict(seed=1, key="b", index=1), dict(seed=1, key="a", index=2)]
    assert all(first != random_crop(400, 300, **other) for other in others)


def test_the_draw_is_the_same_everywhere_and_for_ever():
    """A store on disk was made with these numbers: they may not change between versions."""
    assert item_seed(0, "a.jpg", 1) == 16854599979857340030
    assert random_crop(400, 300, seed=0, key="a.jpg", index=1) == Crop((30, 85, 238, 300), True)


def test_without_a_crop_the_pixels_are_those_of_read_images(tmp_path):
    data = picture(60, 90)
    (tmp_path / "a.png").write_bytes(data)
    expected = read_images(tmp_path, WANTED.size, interpolation="bilinear").pixels[0]
    assert torch.equal(read_crop(data, None, WANTED), expected)
    assert torch.equal(read_crops(data, WANTED, seed=0, key="a", indices=[0])[0][1], expected)


def test_a_crop_is_cut_resized_and_mirrored():
    data, crop = picture(60, 90), Crop((10, 5, 70, 45), flip=True)
    rgb = Image.open(io.BytesIO(data)).crop(crop.box).resize((42, 28), Image.Resampling.BILINEAR)
    array = torch.from_numpy(np.array(rgb)[:, ::-1].copy()).permute(2, 0, 1).float() / 255
    raw = PixelFormat.of((28, 42), (0, 0, 0), (1, 1, 1), "bilinear")
    assert torch.equal(read_crop(data, crop, raw), array)
    plain = read_crop(data, Crop(crop.box), raw)
    assert torch.equal(plain, array.flip(-1))


def test_the_recorded_crop_gives_the_same_pixels_again():
    data = picture(200, 300)
    several = read_crops(data, WANTED, seed=4, key="x/y.png", indices=[0, 1, 2, 3])
    assert several[0][0] is None and len({crop for crop, _ in several}) == 4
    for crop, pixels in several:
        assert torch.equal(read_crop(data, crop, WANTED), pixels)
    (alone,) = read_crops(data, WANTED, seed=4, key="x/y.png", indices=[2])
    assert alone[0] == several[2][0] and torch.equal(alone[1], several[2][1])


def test_boxes_count_pixels_of_the_upright_image():
    """Orientation 6: stored lying on its side, so width and height change places."""
    exif = Image.Exif()
    exif[0x0112] = 6
    data = picture(30, 90, exif=exif)
    (crop, pixels), *_ = read_crops(data, WANTED, seed=0, key="a", indices=[1])
    assert crop == random_crop(30, 90, seed=0, key="a", index=1)
    turned = Image.open(io.BytesIO(data)).transpose(Image.Transpose.ROTATE_270)
    file = io.BytesIO()
    turned.save(file, "PNG")
    assert torch.equal(read_crop(file.getvalue(), crop, WANTED), pixels)


def test_what_cannot_be_decoded_says_why():
    with pytest.raises(Exception, match=r"empty file \(0 bytes\)"):
        read_crop(b"", None, WANTED)
    with pytest.raises(Exception, match="cannot identify image"):
        read_crops(b"not a picture", WANTED, seed=0, key="a", indices=[1])
