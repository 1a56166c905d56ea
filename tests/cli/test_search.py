"""`pullback search`: what it finds, writes and shows, and what it refuses."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import Result
from PIL import Image
from typer.testing import CliRunner

import pullback as pb
from helpers.metrics import LAYER, SIDE, scenes, untrained_metric
from pullback.cli import app
from pullback.cli.common import BAD_INPUT
from pullback.data.images import to_pictures
from pullback.retrieval.gallery import Gallery


def pullback(*arguments: object) -> Result:
    return CliRunner(env={"FORCE_COLOR": None, "TTY_COMPATIBLE": None}).invoke(app, [str(a) for a in arguments])


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """photos/, others/ and a gallery/ of the photos."""
    folder = tmp_path_factory.mktemp("place")
    scenes(folder / "photos", range(12))
    scenes(folder / "others", range(50, 53))
    Gallery.create(folder / "gallery", untrained_metric(), device="cpu").add(folder / "photos")
    return folder


def search(place: Path, out: Path, *arguments: object, image: str = "others/scene-00.png") -> Result:
    return pullback("search", place / "gallery", place / image, "--device", "cpu", "--out", out, *arguments)


def matches(out: Path) -> list[dict]:
    return json.loads((out / "matches.json").read_text())["matches"]


def words(result: Result) -> str:
    return " ".join(result.output.replace("│", " ").split())


def test_the_nearest_images_are_listed_by_the_distance_of_the_metric(place, tmp_path):
    result = search(place, tmp_path, "--k", 5)
    assert result.exit_code == 0, result.output
    probe, metric = pb.load_probe("tiny-scenes", "depth", LAYER, device="cpu"), untrained_metric()
    paths = [place / "others" / "scene-00.png", *sorted((place / "photos").glob("*.png"))]
    features = torch.cat([probe.features(probe.load_images(path, size=SIDE)) for path in paths])
    with torch.no_grad():
        distances = metric.distance(features[:1].expand_as(features[1:]), features[1:])
    best = distances.argsort()[:5].tolist()
    found = matches(tmp_path)
    assert [match["key"] for match in found] == [f"scene-{number:02d}.png" for number in best]
    assert [match["rank"] for match in found] == [1, 2, 3, 4, 5]
    # what is stored is rounded to float16
    assert [match["distance"] for match in found] == pytest.approx(distances[best].tolist(), rel=5e-3)
    lines = [line.split() for line in result.output.splitlines()]
    assert ["1", f"{found[0]['distance']:.4f}", found[0]["key"]] in lines
    assert "all 12 images compared in" in result.output


def test_a_picture_finds_itself_first(place, tmp_path):
    assert search(place, tmp_path, "--k", 1, image="photos/scene-07.png").exit_code == 0
    (match,) = matches(tmp_path)
    assert match["key"] == "scene-07.png" and match["distance"] < 1e-3 and match["state"] == "seen"


def test_picture_and_page_are_written_without_matplotlib(place, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # it is an extra
    out = tmp_path / "new" / "search"
    result = search(place, out, "--k", 6)
    assert result.exit_code == 0, result.output
    for text in (f"written to {out}/: matches.json, matches.png", (out / "index.html").as_uri()):
        assert text in result.output
    page = (out / "index.html").read_text(encoding="utf-8")
    assert page.count("data:image/jpeg") == 7 and "scene-00.png" in page and "depth" in page
    stored = np.load(out / "matches.npz")["pictures"]
    probe = pb.load_probe("tiny-scenes", "depth", LAYER, device="cpu")
    seen = probe.pixel_format(SIDE).rgb(probe.load_images(place / "others" / "scene-00.png", size=SIDE))
    assert np.abs(stored[0].astype(int) - to_pictures(seen)[0]).max() <= 1 and stored.shape == (7, SIDE, SIDE, 3)


def test_pictures_that_are_gone_or_have_changed_are_not_shown(place, tmp_path):
    shutil.copytree(place / "photos", tmp_path / "photos")
    Gallery.create(tmp_path / "gallery", untrained_metric(), device="cpu").add(tmp_path / "photos")
    (tmp_path / "photos" / "scene-01.png").unlink()
    shutil.copyfile(place / "others" / "scene-01.png", tmp_path / "photos" / "scene-02.png")
    shutil.copyfile(place / "others" / "scene-00.png", tmp_path / "query.png")
    result = pullback("search", tmp_path / "gallery", tmp_path / "query.png", "--k", 12, "--out", tmp_path / "found")
    assert result.exit_code == 0, result.output
    states = {match["key"]: match["state"] for match in matches(tmp_path / "found")}
    assert (states.pop("scene-01.png"), states.pop("scene-02.png")) == ("gone", "changed")
    assert len(states) == 10 and set(states.values()) == {"seen"}


def test_pictures_without_a_file_are_listed(place, tmp_path):
    gallery = Gallery.create(tmp_path / "gallery", untrained_metric(), device="cpu")
    with Image.open(place / "photos" / "scene-00.png") as picture:
        gallery.add([picture.convert("RGB")], keys=["from memory"])
    result = pullback("search", tmp_path / "gallery", place / "others" / "scene-00.png", "--out", tmp_path / "found")
    assert result.exit_code == 0, result.output
    assert [(match["key"], match["state"]) for match in matches(tmp_path / "found")] == [("from memory", "unknown")]


def test_a_long_list_is_drawn_in_part(place, tmp_path, monkeypatch):
    monkeypatch.setattr("pullback.retrieval.folder.SHOWN", 3)
    assert search(place, tmp_path, "--k", 12).exit_code == 0
    assert [match["state"] for match in matches(tmp_path)] == ["seen"] * 3 + ["not shown"] * 9
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert page.count("data:image/jpeg") == 4 and "3 of 12 images" in page


def test_the_method_may_be_chosen(place, tmp_path):
    for method, said in (("exact", "all 12 images compared in"), ("candidates", "candidates of 12 images compared"),
                         ("transport", "all 12 images compared, by optimal transport, in")):  # fmt: skip
        options = ("--candidates", 7) if method == "candidates" else ()
        result = search(place, tmp_path / method, "--k", 3, "--method", method, *options)
        assert result.exit_code == 0, result.output
        assert said in result.output
    exact, quick, moved = (matches(tmp_path / method) for method in ("exact", "candidates", "transport"))
    known = {match["key"]: match["distance"] for match in exact}
    assert len(quick) == 3 and all(match in exact or match["key"] not in known for match in quick)
    assert moved != exact and len(moved) == 3


def test_the_same_folder_takes_the_next_search(place, tmp_path):
    assert search(place, tmp_path, "--k", 2).exit_code == 0
    assert search(place, tmp_path, "--k", 3, image="others/scene-01.png").exit_code == 0
    assert len(matches(tmp_path)) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("{gallery}", "nowhere.png"), "image='nowhere.png': no such file or folder"),
        (("{gallery}", "{photos}"), "image: expected one image, got '{photos}' with 12 of them"),
        (("{gallery}", "{broken}"), "image: broken.png: not a readable image"),
        (("{photos}", "{photos}/scene-00.png"), "gallery: {photos} holds no gallery, there is no gallery.json"),
        (("{empty}", "{photos}/scene-00.png"), "gallery: {empty} holds no items yet"),
        (("{gallery}", "{photos}/scene-00.png", "--k", "0"), "Invalid value for '--k'"),
        (("{gallery}", "{photos}/scene-00.png", "--candidates", "3"), "--candidates: expected at least as many as"),
        (("{gallery}", "{photos}/scene-00.png", "--method", "magic"), "Invalid value for '--method'"),
        (("{gallery}", "{photos}/scene-00.png", "--out", "{gallery}"), "--out: {gallery} holds a gallery"),
        (("{gallery}", "{photos}/scene-00.png", "--device", "abacus"), "device: 'abacus' cannot be used here"),
        (("{gallery}",), "Missing argument"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_bad_input_gives_one_line_and_writes_nothing(place, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.png").write_bytes(b"not a picture")
    names = {"gallery": place / "gallery", "photos": place / "photos", "broken": tmp_path / "broken.png"}
    names["empty"] = tmp_path / "empty"
    if "{empty}" in arguments:
        Gallery.create(names["empty"], untrained_metric(), device="cpu")
    result = pullback("search", *(part.format(**names) for part in arguments))
    assert result.exit_code == BAD_INPUT, result.output
    assert message.format(**names) in words(result) and "Traceback" not in result.output
    assert not (tmp_path / "search").exists()
