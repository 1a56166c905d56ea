"""Drawn pictures."""

import numpy as np
import pytest
from PIL import Image

from pullback.data.synthetic import SCENES, draw_pictures
from pullback.errors import ImageError


def pixels(path) -> np.ndarray:
    return np.asarray(Image.open(path))


def test_the_same_seed_draws_the_same_pictures(tmp_path):
    first, again, other = (draw_pictures(tmp_path / n, 2, 32, seed) for n, seed in (("a", 1), ("b", 1), ("c", 2)))
    for one, two, three in zip(first, again, other, strict=True):
        assert np.array_equal(pixels(one), pixels(two)) and not np.array_equal(pixels(one), pixels(three))


def test_every_scene_is_a_picture_with_something_in_it(tmp_path):
    paths = draw_pictures(tmp_path, len(SCENES) + 1, 48)
    assert [path.stem.split("-")[1] for path in paths] == [*SCENES, next(iter(SCENES))]
    for path in paths:
        picture = pixels(path)
        assert picture.shape == (48, 48, 3) and picture.dtype == np.uint8
        assert picture.std() > 20, path.name


@pytest.mark.parametrize("wrong", [{"count": 0}, {"side": 8}])
def test_nothing_to_draw_is_refused(tmp_path, wrong):
    with pytest.raises(ImageError, match="expected at least one picture"):
        draw_pictures(tmp_path, **wrong)
