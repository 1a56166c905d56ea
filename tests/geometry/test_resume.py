"""A diagnosis that was stopped goes on after its last image, and ends as if it had never stopped."""

import json
import re

import numpy as np
import pytest
from PIL import Image

import pullback as pb
import pullback.geometry.folder as workflow
from helpers.truth import random_images, seeded
from pullback.errors import PullbackError
from pullback.geometry.folder import DiagnosisRequest, run_diagnosis
from pullback.geometry.parts import FinishedParts
from pullback.runs.files import read_json, write_json
from pullback.runs.progress import Progress

SMALL = {"decoder": "cls", "layers": (11, 10), "ranks": (3, 2), "size": 28, "device": "cpu"}
IMAGES = 3


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    for number in range(IMAGES):
        noise = np.random.default_rng(number).integers(0, 256, (40, 50, 3), dtype=np.uint8)
        Image.fromarray(noise).save(folder / f"{number}.png")
    return folder


def request_for(photos, **changes) -> DiagnosisRequest:
    return DiagnosisRequest("tiny-scenes", str(photos), **(SMALL | changes))


class Interrupted(Progress):
    """A `Progress` that is interrupted after so many images; it remembers what it was told."""

    def __init__(self, after: int | None = None) -> None:
        self.left, self.images, self.total = after, 0, 0

    def work(self, what: str, total: int, unit: str, done: int = 0) -> None:
        self.total = total

    def advance(self, count: int) -> None:
        self.images += count
        if self.left is not None and self.images >= self.left:
            raise KeyboardInterrupt


def results(folder):
    """Everything in the folder that is not a time or a date, with importance as bytes."""

    def plain(value):
        if isinstance(value, dict):
            return {name: plain(part) for name, part in value.items() if name not in ("seconds", "date", "commit")}
        return [plain(part) for part in value] if isinstance(value, list) else value

    with np.load(folder / "importance.npz") as arrays:
        maps = {name: arrays[name].tobytes() for name in arrays.files}
    return plain(read_json(folder / "diagnosis.json")), maps


@pytest.fixture(scope="module", params=["exact", "krylov", "paper"])
def uninterrupted(request, photos, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole")
    run_diagnosis(request_for(photos, method=request.param), out)
    return request.param, results(out)


@pytest.mark.parametrize("after", [1, 3, 5])
def test_a_run_goes_on_after_its_last_image_with_the_same_results(uninterrupted, photos, tmp_path, after):
    method, expected = uninterrupted
    asked, first, second = request_for(photos, method=method), Interrupted(after), Interrupted()
    with pytest.raises(KeyboardInterrupt):
        run_diagnosis(asked, tmp_path, first)
    document = read_json(tmp_path / "diagnosis.json")
    assert not document["complete"] and document["failure"]["reason"] == "interrupted"
    run_diagnosis(asked, tmp_path, second)
    assert (first.images, second.images, second.total) == (after, 2 * IMAGES - after, 2 * IMAGES - after)
    assert results(tmp_path) == expected


def test_stopped_again_and_again_it_still_ends_the_same(uninterrupted, photos, tmp_path):
    method, expected = uninterrupted
    for _ in range(2 * IMAGES):
        with pytest.raises(KeyboardInterrupt):
            run_diagnosis(request_for(photos, method=method), tmp_path, Interrupted(1))
    run_diagnosis(request_for(photos, method=method), tmp_path)
    assert results(tmp_path) == expected


def test_without_a_finished_image_nothing_binds_the_folder(photos, tmp_path, monkeypatch):
    def refuse(*arguments, **options):
        raise PullbackError("decoder: no.")

    with monkeypatch.context() as patch, pytest.raises(PullbackError, match="decoder: no"):
        patch.setattr(workflow, "diagnose", refuse)
        run_diagnosis(request_for(photos), tmp_path)
    assert not list(tmp_path.iterdir())
    run_diagnosis(request_for(photos, layers=(11,), seed=1), tmp_path)


def test_a_row_that_was_half_written_is_computed_again(photos, tmp_path):
    asked = request_for(photos, layers=(11,))
    run_diagnosis(asked, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run_diagnosis(asked, tmp_path / "cut", Interrupted(2))
    rows = tmp_path / "cut" / "images.jsonl"
    rows.write_bytes(rows.read_bytes()[:-40])
    (tmp_path / "cut" / ".diagnosis.json.abc.tmp").write_text("{")
    second = Interrupted()
    run_diagnosis(asked, tmp_path / "cut", second)
    assert not [path.name for path in (tmp_path / "cut").iterdir() if path.name.startswith(".")]
    assert second.images == IMAGES - 1 and results(tmp_path / "cut") == results(tmp_path / "whole")


def test_a_row_that_two_runs_wrote_counts_once(photos, tmp_path):
    asked = request_for(photos, layers=(11,))
    run_diagnosis(asked, tmp_path)
    rows = (tmp_path / "images.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "images.jsonl").write_text("".join(rows[:2] + rows[1:2] + rows[2:]))
    assert FinishedParts(tmp_path / "images.jsonl").count(11) == IMAGES


def test_a_finished_run_is_not_computed_again(photos, tmp_path, monkeypatch):
    asked, heard = request_for(photos), []
    first = run_diagnosis(asked, tmp_path)
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    monkeypatch.setattr(workflow, "diagnose", None)
    assert run_diagnosis(asked, tmp_path, on_layer=heard.append) == first
    assert [layer["layer"] for layer in heard] == [11, 10]
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


def test_another_layer_is_added_and_the_others_stay(photos, tmp_path):
    run_diagnosis(request_for(photos, layers=(10,)), tmp_path / "out")
    second = Interrupted()
    document = run_diagnosis(request_for(photos, layers=(11, 10)), tmp_path / "out", second)
    assert second.images == IMAGES and document["complete"]
    assert [layer["layer"] for layer in document["layers"]] == [10, 11]
    document = run_diagnosis(request_for(photos, layers=(9,)), tmp_path / "out")
    assert [layer["layer"] for layer in document["layers"]] == [10, 11, 9]
    with np.load(tmp_path / "out" / "importance.npz") as arrays:
        assert {"L09", "L10", "L11", "thumbnails"} <= set(arrays.files)


def test_importance_that_was_deleted_is_made_again_from_the_rows(photos, tmp_path):
    run_diagnosis(request_for(photos), tmp_path)
    expected = results(tmp_path)
    (tmp_path / "importance.npz").unlink()
    second = Interrupted()
    run_diagnosis(request_for(photos), tmp_path, second)
    assert second.images == 0 and results(tmp_path) == expected


@pytest.fixture(scope="module")
def finished(photos, tmp_path_factory):
    out = tmp_path_factory.mktemp("finished")
    run_diagnosis(request_for(photos, layers=(11,)), out)
    return out


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"seed": 1}, "seed: 0 there, 1 asked for"),
        ({"ranks": (4,)}, "ranks: [3, 2] there, [4] asked for"),
        ({"method": "krylov", "rtol": 0.1}, "method_asked: 'auto' there, 'krylov' asked for; rtol: None there, 0.1"),
        ({"decoder": "mean"}, "decoder: 'cls' there, 'mean' asked for"),
        ({"precision": "tf32"}, "precision: 'float32' there, 'tf32' asked for"),
        ({"distance": "cosine"}, "distance: None there, 'cosine' asked for"),
        ({"convergence_samples": 0}, "convergence_samples: 1 there, 0 asked for"),
        ({"limit": 2}, "pixels: '3 images, sha256 "),
    ],
)
def test_other_settings_are_refused_and_nothing_is_touched(photos, finished, changes, difference):
    out = finished
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(PullbackError, match=r"holds a diagnosis with other settings .*" + re.escape(difference)):
        run_diagnosis(request_for(photos, **({"layers": (11,)} | changes)), out)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_an_image_that_changed_under_its_name_is_refused(tmp_path):
    Image.new("RGB", (40, 40), "red").save(tmp_path / "0.png")
    run_diagnosis(request_for(tmp_path, layers=(11,)), tmp_path / "out")
    Image.new("RGB", (40, 40), "blue").save(tmp_path / "0.png")
    with pytest.raises(PullbackError, match=r"pixels: '1 image, sha256 \w+' there, '1 image, sha256"):
        run_diagnosis(request_for(tmp_path, layers=(11,)), tmp_path / "out")


def test_images_and_model_may_be_spelled_in_another_way(photos, tmp_path, monkeypatch):
    run_diagnosis(request_for(photos, layers=(11,)), tmp_path)
    monkeypatch.chdir(photos.parent)
    second = Interrupted()
    run_diagnosis(DiagnosisRequest("tiny-scenes", photos.name, **(SMALL | {"layers": (11,)})), tmp_path, second)
    assert second.images == 0


def test_a_diagnosis_of_an_earlier_version_is_read_but_not_gone_on_with(photos, tmp_path):
    run_diagnosis(request_for(photos, layers=(11,)), tmp_path)
    document = read_json(tmp_path / "diagnosis.json")
    write_json(tmp_path / "diagnosis.json", {name: value for name, value in document.items() if name != "pixels"})
    with pytest.raises(PullbackError, match="of an earlier version of pullback, which can be read but not gone on"):
        run_diagnosis(request_for(photos, layers=(11,)), tmp_path)


def test_anew_takes_the_place_of_what_is_there(photos, tmp_path):
    run_diagnosis(request_for(photos), tmp_path)
    document = run_diagnosis(request_for(photos, seed=5, layers=(9,)), tmp_path, anew=True)
    assert [layer["layer"] for layer in document["layers"]] == [9]
    assert {json.loads(row)["layer"] for row in (tmp_path / "images.jsonl").read_text().splitlines()} == {9}
    with np.load(tmp_path / "importance.npz") as arrays:
        assert "L11" not in arrays.files


def test_parts_of_one_call_are_where_the_next_one_starts():
    probe, images, parts, counted = seeded("cls", 4), random_images(5), [], []
    options = {"rank": 4, "method": "krylov", "slq_probes": 2, "convergence_samples": 3}

    def stop(part):
        parts.append(part)
        raise KeyboardInterrupt

    whole = pb.diagnose(probe, images, batch_size=2, **options)
    with pytest.raises(KeyboardInterrupt):
        pb.diagnose(probe, images, batch_size=2, on_part=stop, **options)
    again = pb.diagnose(probe, images, parts=parts, on_progress=counted.append, **options)
    assert counted == [2, 1], "in batches of the same size"
    assert again.samples == whole.samples and again.importance.equal(whole.importance)
    assert again.products == whole.products and again.verdict == whole.verdict
