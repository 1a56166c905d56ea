"""RGB-D pairs: millimetres become metres, 0 stays "not measured", and a folder that is not whole is refused."""

import numpy as np
import pytest
import torch
from PIL import Image

from helpers.rgbd import write_pairs
from pullback.data.images import PixelFormat, centre_crop
from pullback.errors import PullbackError
from recipes.rgbd import LABELS, read_pairs


def test_depth_is_in_metres_and_zero_where_nothing_was_measured(tmp_path):
    folder = write_pairs(tmp_path)
    values = np.full((30, 40), 1500, dtype=np.uint16)
    values[3, 4], values[0, 0] = 0, 65535
    Image.fromarray(values).save(folder / "s0/0_depth.png")
    with Image.open(folder / "s0/0_depth.png") as written:
        assert written.mode == "I;16"
    pairs = read_pairs(folder, "train")
    assert len(pairs) == 3 and pairs.rgb.shape == (3, 3, 30, 40) and pairs.rgb.dtype == torch.uint8
    assert pairs.depth[0, 3, 4] == 0 and pairs.depth[0, 0, 0] == pytest.approx(65.535)
    assert pairs.depth[0, 10, 10] == 1.5
    assert pairs.sequence == ("sequence0", "sequence2", "sequence1")
    assert pairs.infilled.tolist() == [True, False, False]


def test_the_digest_knows_pixels_depths_and_scenes(tmp_path):
    folder = write_pairs(tmp_path)
    known = read_pairs(folder, "train").digest()
    assert read_pairs(folder, "train").digest() == known != read_pairs(folder, "heldout").digest()
    labels = (folder / LABELS).read_text()
    (folder / LABELS).write_text(labels.replace("scene2", "scene1"))
    assert read_pairs(folder, "train").digest() != known


def test_centred_depth_shows_the_pixels_that_the_picture_shows(tmp_path):
    folder = write_pairs(tmp_path, size=(46, 32))
    wanted = PixelFormat.of((28, 28), interpolation="nearest")
    pairs = read_pairs(folder, "train")
    for path, depth, seen in zip(pairs.paths, pairs.depth, pairs.centred_depth(wanted), strict=True):
        grey = (depth * 50).to(torch.uint8).numpy()  # the same map, sent the way of a picture
        picture = centre_crop(Image.fromarray(grey), wanted)
        assert np.array_equal(np.asarray(picture)[..., 0], (seen * 50).to(torch.uint8).numpy()), path


def test_a_folder_that_is_not_whole_is_refused(tmp_path):
    with pytest.raises(PullbackError, match=r"rgbd: .*labels\.csv cannot be read \(No such file"):
        read_pairs(tmp_path, "train")
    folder = write_pairs(tmp_path)
    with pytest.raises(PullbackError, match=r"no pair of the split 'test'. Expected train and heldout"):
        read_pairs(folder, "test")
    (folder / "s1/1_depth.png").unlink()
    with pytest.raises(PullbackError, match=r"1_depth\.png, which labels\.csv names, cannot be read"):
        read_pairs(folder, "heldout")
    Image.new("L", (40, 30)).save(folder / "s1/1_depth.png")
    with pytest.raises(PullbackError, match=r"has the mode L, expected 16-bit gray in millimetres"):
        read_pairs(folder, "heldout")
    Image.fromarray(np.ones((15, 20), np.uint16)).save(folder / "s1/1_depth.png")
    with pytest.raises(PullbackError, match=r"s1/1\.jpg is 40x30 and s1/1_depth\.png 20x15, expected 40x30"):
        read_pairs(folder, "heldout")
    (folder / LABELS).write_text("rgb,depth,split\n")
    with pytest.raises(PullbackError, match=r"has no column sequence, scene, depth_kind"):
        read_pairs(folder, "train")
