"""`pullback index`: a gallery is made, filled, described, measured and emptied, and survives what goes wrong."""

import shutil
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from helpers.metrics import scenes, untrained_metric
from pullback.cli import app
from pullback.cli.common import BAD_INPUT, FAILED, INTERRUPTED
from pullback.retrieval import gallery as galleries
from pullback.retrieval.gallery import Gallery


def pullback(*arguments: object) -> Result:
    return CliRunner(env={"FORCE_COLOR": None, "TTY_COMPATIBLE": None}).invoke(app, [str(a) for a in arguments])


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """photos/, others/, metric/ and another/ metric, and a gallery/ of the photos."""
    folder = tmp_path_factory.mktemp("place")
    scenes(folder / "photos", range(12))
    for path in scenes(folder / "others", range(50, 53)).iterdir():
        path.rename(path.with_name(f"other-{path.name}"))
    (folder / "photos" / "broken.png").write_bytes(b"not a picture")
    untrained_metric().save_pretrained(folder / "metric")
    untrained_metric(1).save_pretrained(folder / "another")
    result = add(folder / "gallery", folder / "photos", "--drm", folder / "metric")
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture
def gallery(place, tmp_path) -> Path:
    """A copy that may be changed."""
    return shutil.copytree(place / "gallery", tmp_path / "gallery")


def add(folder: Path, *arguments: object) -> Result:
    return pullback("index", "add", folder, *arguments, "--device", "cpu")


def words(result: Result) -> str:
    return " ".join(result.output.replace("│", " ").split())


def test_a_gallery_is_made_on_first_use_and_says_what_it_left_out(place, tmp_path):
    result = add(tmp_path / "new" / "gallery", place / "photos", "--drm", place / "metric")
    assert result.exit_code == 0, result.output
    assert f"added 12 images; 12 images in {tmp_path / 'new' / 'gallery'}/" in words(result)
    assert "skipped 1 image: broken.png: not a readable image" in words(result)
    keys = [item.key for item in Gallery.open(tmp_path / "new" / "gallery")]
    assert sorted(keys) == [f"scene-{number:02d}.png" for number in range(12)]


def test_more_is_added_without_naming_the_metric_again_and_what_is_there_stays(place, gallery):
    again = add(gallery, place / "photos")
    assert again.exit_code == 0 and "added 0 images, 12 images known already; 12 images in" in words(again)
    one, other = (place / "others" / f"other-scene-{number:02d}.png" for number in (0, 1))
    several = add(gallery, one, other, "--drm", place / "metric")
    assert several.exit_code == 0 and "added 2 images; 14 images in" in words(several)


def test_an_interrupted_command_goes_on(place, gallery, monkeypatch):
    take, taken = galleries._Adding.take, []

    def interrupted(self, batch, **options):
        taken.append(1)
        if len(taken) == 2:
            raise KeyboardInterrupt
        return take(self, batch, **options)

    with monkeypatch.context() as patched:
        patched.setattr(galleries, "_BATCH", 1)
        patched.setattr(galleries._Adding, "take", interrupted)
        stopped = add(gallery, place / "others")
    assert stopped.exit_code == INTERRUPTED, stopped.output
    assert f"kept in {gallery}/: 13 images; the same command goes on from there" in words(stopped)
    again = add(gallery, place / "others")
    assert "added 2 images, 1 image known already; 15 images in" in words(again)


def test_info_says_what_it_holds_and_what_it_is_for(place):
    result = pullback("index", "info", place / "gallery")
    assert result.exit_code == 0, result.output
    told = dict(line.split(None, 1) for line in result.output.splitlines() if len(line.split()) > 1)
    assert told["items"].strip() == "12" and told["model"].strip() == "tiny-scenes"
    assert told["layer"].strip() == "8" and told["decoder"].strip() == "depth" and told["size"].strip() == "56, 56"


def test_images_are_removed_by_their_keys(gallery):
    result = pullback("index", "remove", gallery, "scene-03.png", "scene-05.png")
    assert result.exit_code == 0 and f"removed 2 images; 10 images left in {gallery}/" in words(result)
    unknown = pullback("index", "remove", gallery, "scene-04.png", "scene-05.png")
    assert unknown.exit_code == BAD_INPUT
    assert "keys: expected keys of items in" in words(unknown) and "'scene-05.png'" in words(unknown)
    assert len(Gallery.open(gallery)) == 10 and "scene-04.png" in Gallery.open(gallery)


def test_recall_compares_candidates_with_the_truth(place):
    result = pullback("index", "recall", place / "gallery", "--k", 3, "--queries", 5, "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "recall@3: 1 over 5 images searched for" in words(result)  # more candidates than images
    few = pullback("index", "recall", place / "gallery", "--k", 3, "--queries", 5, "--candidates", 4, "--device", "cpu")
    assert few.exit_code == 0 and "ms a query with 4 candidates" in words(few) and "ms exactly" in words(few)


def test_a_damaged_gallery_is_the_machines_fault(place, gallery):
    shard = next(gallery.glob("tokens-*.f16"))
    shard.write_bytes(shard.read_bytes()[:100])
    for result in (pullback("index", "info", gallery), add(gallery, place / "others")):
        assert result.exit_code == FAILED, result.output
        assert "gallery: " in words(result) and "truncated" in words(result) and "Traceback" not in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("add", "{new}", "{photos}"), "--drm: there is no gallery in {new} yet, expected the folder of a metric"),
        (("add", "{new}", "{photos}", "--drm", "nowhere"), "--drm: 'nowhere' is neither a folder nor a hub id"),
        (("add", "{new}", "{photos}", "--drm", "{photos}"), "--drm: {photos} has no config.json"),
        (("add", "{new}", "nowhere", "--drm", "{metric}"), "images='nowhere': no such file or folder"),
        (("add", "{photos}", "{photos}", "--drm", "{metric}"), "gallery: {photos} is in use, expected a new"),
        (("add", "{photos}/scene-00.png", "{photos}", "--drm", "{metric}"), "gallery: cannot make the folder"),
        (("add", "{gallery}", "{photos}", "--drm", "{another}"), "--drm: {gallery} was made with another metric"),
        (("add", "{gallery}"), "Missing argument"),
        (("info", "{new}"), "gallery: {new} holds no gallery, there is no gallery.json"),
        (("remove", "{new}", "a"), "gallery: {new} holds no gallery, there is no gallery.json"),
        (("recall", "{gallery}", "--k", "12"), "--k: expected fewer than the 12 items of {gallery}, each of"),
        (("recall", "{gallery}", "--queries", "1"), "Invalid value for '--queries'"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_bad_input_gives_one_line_and_changes_nothing(place, tmp_path, monkeypatch, arguments, message):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    names = {name: place / name for name in ("photos", "metric", "another", "gallery")} | {"new": tmp_path / "new"}
    before = sorted(path.name for path in (place / "photos").iterdir())
    result = pullback("index", *(part.format(**names) for part in arguments))
    assert result.exit_code == BAD_INPUT, result.output
    assert message.format(**names) in words(result) and "Traceback" not in result.output
    assert not (tmp_path / "new").exists() and sorted(path.name for path in (place / "photos").iterdir()) == before
    assert len(Gallery.open(place / "gallery")) == 12


def test_bytes_that_changed_on_the_disk_are_found_and_taken_out(place, gallery):
    sound = pullback("index", "verify", gallery)
    assert sound.exit_code == 0 and f"12 images in {gallery}/, all as they were written" in words(sound)
    shard = next(gallery.glob("tokens-*.f16"))
    content = bytearray(shard.read_bytes())
    content[100] ^= 255
    shard.write_bytes(content)
    damaged = pullback("index", "verify", gallery)
    assert damaged.exit_code == FAILED and shard.name in words(damaged).replace(" ", "")
    repaired = pullback("index", "repair", gallery)
    assert repaired.exit_code == 0 and "took out 12 images" in words(repaired)  # all of one group
    assert "scene-00.png" in words(repaired) and "and 2 more" in words(repaired)
    assert pullback("index", "verify", gallery).exit_code == 0 and len(Gallery.open(gallery)) == 0
    again = add(gallery, place / "photos")
    assert again.exit_code == 0 and "added 12 images" in words(again)
