"""What is published of a run: all its numbers, the scenes that we drew, and no photograph."""

import json
import sys

import numpy as np
import pytest

import publish_results
from publish_results import SHOWN, WITHHELD, data_of, publish, publishable, scale_of_run
from pullback.errors import PullbackError
from pullback.experiments import maps

SETTINGS = {
    "scale": "small", "seed": 0, "tiny-scenes": "tiny-scenes", "tiny-views": "tiny-views", "dinov2": "elsewhere/dinov2",
    "clip": None, "photos": "elsewhere/photos", "photos-train": "elsewhere/train", "scenes": "drawn",
    "scenes-train": "drawn",
}  # fmt: skip


def arrays_of_maps() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {
        "pictures": random.integers(0, 255, (6, 28, 28, 3), dtype=np.uint8),
        "names": np.array(["Exact importance", "Head"]),
        "maps": random.random((2, 6, 2, 2), dtype=np.float32),
        "rho": random.random((2, 6)),
    }


@pytest.fixture
def run(tmp_path):
    """The folder of a run with one figure of photographs, one of scenes and one of neither."""
    folder = tmp_path / "run"
    (folder / "store").mkdir(parents=True)
    (folder / "store" / "large.bin").write_bytes(b"0")
    (folder / "reproduce.json").write_text(json.dumps(SETTINGS))
    for name in ("importance-maps", "taxonomy"):
        (folder / name / "arrays").mkdir(parents=True)
        (folder / name / "rows.jsonl").write_text('{"value": 1}\n')
    (folder / "taxonomy" / "experiment.json").write_text("{}")
    for own in (maps.DINOV2_CLS, maps.TINY_CLS):
        np.savez(folder / "importance-maps" / "arrays" / f"{maps.figure_of(own)}.npz", **arrays_of_maps())
    np.savez(folder / "taxonomy" / "arrays" / "spectrum.npz", a=np.ones((24, 50)))
    return folder


def read(folder, path):
    with np.load(folder / path) as arrays:
        return dict(arrays)


def test_photographs_become_grey_and_scenes_stay(run, tmp_path):
    photos, scenes = (f"importance-maps/arrays/{maps.figure_of(own)}.npz" for own in (maps.DINOV2_CLS, maps.TINY_CLS))
    assert publish(run, tmp_path / "to") == [f"importance-maps/{maps.figure_of(maps.DINOV2_CLS)}"]
    withheld, shown = (read(tmp_path / "to", path) for path in (photos, scenes))
    assert np.ptp(withheld["pictures"]) == 0 and str(withheld["withheld"]) == WITHHELD
    np.testing.assert_array_equal(shown["pictures"], arrays_of_maps()["pictures"][:SHOWN])
    assert "withheld" not in shown
    for found in (withheld, shown):  # the maps are results, and are published
        np.testing.assert_array_equal(found["maps"], arrays_of_maps()["maps"][:, :SHOWN])
        np.testing.assert_array_equal(found["rho"], arrays_of_maps()["rho"][:, :SHOWN])


def test_numbers_are_copied_as_they_are_and_the_store_is_left_behind(run, tmp_path):
    publish(run, tmp_path / "to")
    assert json.loads((tmp_path / "to" / "reproduce.json").read_text(encoding="utf-8")) == SETTINGS
    for path in ("taxonomy/rows.jsonl", "taxonomy/experiment.json", "importance-maps/rows.jsonl"):
        assert (tmp_path / "to" / path).read_bytes() == (run / path).read_bytes()
    np.testing.assert_array_equal(read(tmp_path / "to", "taxonomy/arrays/spectrum.npz")["a"], np.ones((24, 50)))
    assert not (tmp_path / "to" / "store").exists()
    assert not (tmp_path / "to" / "importance-maps" / "experiment.json").exists(), "it is not finished"


def test_of_folders_on_this_machine_the_names_are_published(run, tmp_path):
    here = {"photos": "/somebody/pictures/heldout", "rooms": "~/rooms"}
    (run / "reproduce.json").write_text(json.dumps({**SETTINGS, **here}))
    publish(run, tmp_path / "published")
    found = json.loads((tmp_path / "published" / "reproduce.json").read_text(encoding="utf-8"))
    assert found == {**SETTINGS, "photos": "…/heldout", "rooms": "…/rooms"}


def test_publishing_again_replaces_what_was_there(run, tmp_path):
    publish(run, tmp_path / "to")
    (run / "taxonomy" / "experiment.json").unlink()
    (run / "taxonomy" / "arrays" / "spectrum.npz").unlink()
    publish(run, tmp_path / "to")
    assert not (tmp_path / "to" / "taxonomy" / "experiment.json").exists()
    assert not (tmp_path / "to" / "taxonomy" / "arrays").exists()


def test_a_picture_of_which_nothing_says_where_it_is_from_is_withheld():
    scale = scale_of_run(SETTINGS)
    assert data_of(scale, "overview", "maps") == "photos"
    assert data_of(scale, "some-other", "maps") is None
    assert np.ptp(publishable(arrays_of_maps(), drawn=False)["pictures"]) == 0


def test_outputs_that_half_precision_cannot_hold_are_refused():
    arrays = {
        "pictures": np.zeros((1, 2, 2, 3), np.uint8),
        "before": np.full((1, 2, 2), 1e6),
        "after": np.ones((1, 2, 2)),
    }
    with pytest.raises(PullbackError, match="before has values beyond float16"):
        publishable(arrays, drawn=True)


def test_a_folder_is_not_published_onto_itself(run, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["publish_results.py", str(run), str(run)])
    with pytest.raises(SystemExit, match="TO is FROM"):
        publish_results.main()
