"""The demo without the terminal: which scenes it shows, and that what it stores of them is true."""

import numpy as np
import pytest
import torch
from PIL import Image

import pullback as pb
from pullback.data.images import IMAGENET_MEAN, IMAGENET_STD
from pullback.experiments import demo
from pullback.runs import documents as files
from pullback.runs.progress import Progress
from pullback.scenes.render import CLASSES, render
from pullback.scenes.splits import HELD_OUT

SIZE, COUNT = 56, 2


@pytest.fixture
def small(monkeypatch) -> None:
    monkeypatch.setattr(demo, "SIZE", SIZE)
    monkeypatch.setattr(demo, "COUNT", COUNT)
    monkeypatch.setattr(demo, "DECODERS", ("cls", "depth-2x2"))
    monkeypatch.setattr(demo, "LAYERS", (9, 10))


def test_pictures_on_disk_and_in_the_batch_are_the_rendered_ones(tmp_path):
    scenes = render([3, 4], size=32)
    batch = demo.write_pictures(scenes, tmp_path / "new" / "folder")
    assert [path.name for path in batch.paths] == ["scene-00.png", "scene-01.png"]
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
    torch.testing.assert_close(batch.pixels * std + mean, scenes.rgb[:, 0])
    for path, picture in zip(batch.paths, scenes.rgb[:, 0], strict=True):
        stored = torch.from_numpy(np.array(Image.open(path))).permute(2, 0, 1) / 255
        assert (stored - picture).abs().max() <= 0.51 / 255


def test_scenes_are_held_out_and_another_seed_shows_others(small, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(demo, "render", lambda seeds, size: seen.append(seeds) or render(seeds, size=size))
    monkeypatch.setattr(demo, "run_diagnosis", lambda *arguments, **options: {})
    monkeypatch.setattr(demo, "write_scenes", lambda *arguments: None)
    for seed in (0, 1):
        demo.run_demo(tmp_path, Progress(), seed)
    first, second = map(set, seen)
    assert len(first) == len(second) == COUNT and not first & second
    assert min(first | second) >= HELD_OUT


def test_what_is_stored_of_the_scenes_is_true(small, tmp_path):
    documents = demo.run_demo(tmp_path, Progress())
    scenes = render(range(HELD_OUT, HELD_OUT + COUNT), size=SIZE)
    stored = files.read_scenes(tmp_path / "scenes")
    assert list(stored["captions"]) == [CLASSES[label] for label in scenes.label]
    assert np.array_equal(stored["true_depth"], scenes.depth[:, 0].numpy())
    model = pb.load_probe("tiny-scenes", "depth").backbone.model
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
    with torch.no_grad():
        expected = model((scenes.rgb[:, 0] - mean) / std).predicted_depth
    torch.testing.assert_close(torch.from_numpy(stored["predicted_depth"]), expected, rtol=1e-4, atol=1e-4)
    for image in range(COUNT):
        valid = ~scenes.sky[image, 0]
        truth = scenes.depth[image, 0][valid]
        error = ((expected[image][valid] - truth).abs() / truth).mean()
        assert stored["abs_rel"][image] == pytest.approx(error.item(), rel=1e-3)
    assert list(stored["tasks"]) == ["cls, L10", "depth-2x2, L10"]
    for task, decoder in enumerate(documents):
        found = files.read_importance(tmp_path / decoder)
        np.testing.assert_allclose(stored["energy"][task].reshape(COUNT, -1), found["L10"][:, 1:] ** 2)
        assert np.array_equal(found["thumbnails"], stored["pictures"]), (
            "the model saw them whole, not resized or cropped"
        )
        assert all(layer["convergence"] == [] for layer in documents[decoder]["layers"])
