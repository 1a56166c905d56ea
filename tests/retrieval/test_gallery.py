"""What a user holds: making, filling, opening and emptying a gallery, with images and with features."""

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

import pullback as pb
from helpers.galleries import (
    DIM,
    RANK,
    SIZE,
    TOKENS,
    filled,
    metric_of_scenes,
    names,
    random_features,
    small_metric,
)
from helpers.pictures import encoded, write_pictures
from pullback.errors import FileError, ImageError, ModelError, NumericsError, PullbackError, ShapeError
from pullback.learning.distilled_metric import DistilledMetric
from pullback.learning.pretrained import Origin
from pullback.retrieval.gallery import KEY_TAKEN, Added, Gallery, GalleryItem
from pullback.runs.progress import Progress


@pytest.fixture(scope="module")
def metric():
    return small_metric()


@pytest.fixture(scope="module")
def of_scenes():
    return metric_of_scenes()


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    return write_pictures(tmp_path_factory.mktemp("photos"), 6)


def test_items_come_back_in_the_order_of_adding(tmp_path, metric):
    gallery = filled(tmp_path / "g", 5, metric)
    for own in (gallery, Gallery.open(tmp_path / "g", device="cpu")):
        assert len(own) == 5 and [item.key for item in own] == names(5)
        assert "item-003" in own and "item-009" not in own
        assert isinstance(next(iter(own)), GalleryItem) and next(iter(own)).place is None
        assert "5 items of features" in repr(own)


def test_nothing_is_there_twice(tmp_path, metric):
    gallery = filled(tmp_path / "g", 5, metric)
    features = random_features(8)
    assert gallery.add_features(names(5), features[:5]) == Added(0, 5, [])
    assert gallery.add_features(["another-name"], features[2:3]) == Added(0, 1, [])
    taken = gallery.add_features(["item-002", "new", "new", "newer"], features[[6, 7, 6, 7]])
    assert (taken.added, taken.known) == (1, 1)
    assert [key for key, _ in taken.skipped] == ["item-002", "new"]
    assert "another image has this key already" in taken.skipped[0][1]
    assert [item.key for item in gallery] == [*names(5), "new"]


def test_removed_items_are_not_found_and_can_be_added_again(tmp_path, metric):
    gallery, features = filled(tmp_path / "g", 5, metric), random_features(5)
    assert gallery.remove(["item-001", "item-003", "item-001"]) == 2
    for own in (gallery, Gallery.open(tmp_path / "g", device="cpu")):
        assert [item.key for item in own] == ["item-000", "item-002", "item-004"]
        assert "item-001" not in own and own.info()["removed"] == 2 and own.info()["items"] == 3
        assert own.search(features[1:2], k=1).keys != [["item-001"]]
    assert gallery.add_features(names(5), features).added == 2
    assert [item.key for item in gallery] == ["item-000", "item-002", "item-004", "item-001", "item-003"]
    assert gallery.search(features[1:2], k=1).keys == [["item-001"]]


def test_unknown_keys_are_not_removed_and_nothing_else_is(tmp_path, metric):
    gallery = filled(tmp_path / "g", 3, metric)
    with pytest.raises(PullbackError, match=r"keys: expected keys of items .* but 1 of 2 are not, such as 'item-009'"):
        gallery.remove(["item-001", "item-009"])
    assert len(gallery) == 3 and gallery.remove([]) == 0


def test_images_are_added_with_their_names_and_what_cannot_be_read_is_skipped(tmp_path, of_scenes, photos):
    class Told(Progress):
        count, total = 0, None

        def work(self, what, total, unit, done=0):
            self.total = total

        def advance(self, count):
            self.count += count

    gallery, told = Gallery.create(tmp_path / "g", of_scenes, device="cpu"), Told()
    added = gallery.add(photos, progress=told)
    assert (added.added, added.known, told.count, told.total) == (6, 0, 7, 7)
    assert [key for key, _ in added.skipped] == ["02-broken.png"] and "not a readable image" in added.skipped[0][1]
    assert {item.key for item in gallery} == {f"{number:02d}.png" for number in range(6)}
    assert gallery.add(str(photos)).known == 6
    found = gallery.search(photos / "03.png", k=2)
    assert found.keys[0][0] == "03.png" and found.places[0][0] == str(photos / "03.png")
    assert found.distances[0, 0] == pytest.approx(0, abs=1e-2 * float(found.distances[0, 1]))


def test_one_query_in_any_form_finds_the_same(tmp_path, of_scenes, photos):
    gallery = Gallery.create(tmp_path / "g", of_scenes, device="cpu")
    gallery.add(photos)
    probe = pb.load_probe("tiny-scenes", layer=6, device="cpu")
    pixels = probe.load_images(str(photos / "01.png"), SIZE)
    with Image.open(photos / "01.png") as picture:
        queries = [photos / "01.png", [photos / "01.png"], pixels, pixels[0], picture.copy(), [picture.copy()]]
    queries.append(probe.features(pixels))
    for query in queries:
        found = gallery.search(query, k=3)
        assert found.keys == gallery.search(queries[0], k=3).keys and found.keys[0][0] == "01.png"
    several = gallery.search([photos / "04.png", photos / "01.png"], k=1)
    assert several.keys == [["04.png"], ["01.png"]]


def test_pictures_in_memory_are_added_with_keys(tmp_path, of_scenes, photos):
    gallery = Gallery.create(tmp_path / "g", of_scenes, device="cpu")
    pixels = pb.normalised(pb.render([0, 1, 2], size=SIZE).rgb[:, 0])
    assert gallery.add(pixels, keys=["a", "b", "c"]).added == 3
    with Image.open(photos / "00.png") as picture:
        assert gallery.add(picture, keys=["d"]).added == 1
    assert gallery.search(pixels[1:2], k=1).keys == [["b"]]
    with pytest.raises(PullbackError, match="keys: expected a name for each of 3 images"):
        gallery.add(pixels)
    with pytest.raises(PullbackError, match="keys: expected with pictures in memory alone"):
        gallery.add(photos, keys=["a"])


def test_the_model_is_not_needed_for_images_that_are_known(tmp_path, of_scenes, photos, monkeypatch):
    gallery = Gallery.create(tmp_path / "g", of_scenes, device="cpu")
    good = sorted(path for path in photos.iterdir() if "broken" not in path.name)
    gallery.add(good)
    monkeypatch.setattr("pullback.retrieval.reading.load_any_backbone", lambda *args, **more: pytest.fail("loaded"))
    assert Gallery.open(tmp_path / "g", device="cpu").add(good).known == 6


def test_a_changed_file_is_not_taken_for_the_old_one(tmp_path, of_scenes):
    photos = write_pictures(tmp_path / "photos", 2, broken=False)
    gallery = Gallery.create(tmp_path / "g", of_scenes, device="cpu")
    gallery.add(photos)
    (photos / "01.png").write_bytes(encoded(77))
    changed = gallery.add(photos)
    assert changed == Added(0, 1, [("01.png", KEY_TAKEN)])


def test_a_folder_in_use_is_refused(tmp_path, metric):
    filled(tmp_path / "g", 1, metric)
    with pytest.raises(PullbackError, match=r"folder: .*g is in use, .* It holds a gallery: use Gallery.open"):
        Gallery.create(tmp_path / "g", metric)
    (tmp_path / "file").write_text("x")
    with pytest.raises(PullbackError, match="file is in use, expected a new or an empty one"):
        Gallery.create(tmp_path / "file", metric)
    (tmp_path / "empty").mkdir()
    assert len(Gallery.create(tmp_path / "empty", metric, device="cpu")) == 0
    assert not list(tmp_path.glob(".*.tmp"))


def test_only_galleries_are_opened(tmp_path, metric):
    with pytest.raises(PullbackError, match=r"holds no gallery, there is no gallery.json"):
        Gallery.open(tmp_path)
    filled(tmp_path / "g", 1, metric)
    manifest = json.loads((tmp_path / "g" / "gallery.json").read_text())
    (tmp_path / "g" / "gallery.json").write_text(json.dumps(manifest | {"format": 99}))
    with pytest.raises(FileError, match="has format 99, this version reads 1"):
        Gallery.open(tmp_path / "g")


def test_another_metric_is_refused(tmp_path, metric):
    filled(tmp_path / "g", 1, metric)
    assert len(Gallery.open(tmp_path / "g", drm=metric, device="cpu")) == 1
    assert len(Gallery.open(tmp_path / "g", drm=tmp_path / "g" / "metric", device="cpu")) == 1
    with pytest.raises(ModelError, match=r"drm: .* was made with another metric"):
        Gallery.open(tmp_path / "g", drm=small_metric(seed=1))
    shutil.rmtree(tmp_path / "g" / "metric")
    small_metric(seed=1).save_pretrained(tmp_path / "g" / "metric")
    with pytest.raises(FileError, match=r"metric is not the metric that .* was made with"):
        Gallery.open(tmp_path / "g")


def test_a_metric_without_its_constant_case_is_refused(tmp_path):
    with pytest.raises(ModelError, match="drm: its constant metric was not measured"):
        Gallery.create(tmp_path / "g", DistilledMetric(DIM, RANK, width=8, heads=2))
    with pytest.raises(ModelError, match="drm: expected a DistilledMetric, or the folder of one, got 3"):
        Gallery.create(tmp_path / "g", 3)
    assert not (tmp_path / "g").exists()


def test_the_size_of_images_is_that_of_the_training_unless_told_otherwise(tmp_path, of_scenes, metric):
    assert Gallery.create(tmp_path / "a", of_scenes, device="cpu").info()["size"] == [SIZE, SIZE]
    assert Gallery.create(tmp_path / "b", of_scenes, size=28, device="cpu").info()["size"] == [28, 28]
    several = small_metric().describe(origin=Origin(resolutions=((28, 28), (56, 56))))
    with pytest.raises(PullbackError, match="size: the metric was trained on images of several sizes"):
        Gallery.create(tmp_path / "c", several)


def test_images_of_another_size_are_refused(tmp_path, of_scenes, photos):
    gallery = Gallery.create(tmp_path / "a", of_scenes, device="cpu")
    gallery.add(photos)
    with pytest.raises(ImageError, match="expected 56x56 pixels, as all items of the gallery have, got 28x28"):
        gallery.search(pb.normalised(torch.rand(1, 3, 28, 28)))
    other = Gallery.create(tmp_path / "b", of_scenes, size=28, device="cpu")
    with pytest.raises(ShapeError, match=r"expected features \[B, \d+, \d+\] at layer 6 of tiny-scenes"):
        other.add(photos)
    assert len(other) == 0


def test_another_model_is_refused(tmp_path, of_scenes, photos):
    gallery = Gallery.create(tmp_path / "g", of_scenes, device="cpu")
    changed = pb.load_backbone("tiny-scenes", device="cpu").model
    with torch.no_grad():
        next(changed.parameters()).mul_(1.5)
    with pytest.raises(ModelError, match=r"backbone: it was trained for weights .*, and is used with weights"):
        gallery.add(photos, backbone=changed)
    with pytest.raises(ModelError, match="backbone: it was trained for weights"):
        Gallery.open(tmp_path / "g", backbone=changed, device="cpu")
    assert gallery.add(photos, backbone=pb.load_probe("tiny-scenes", device="cpu")).added == 6


def test_a_metric_of_nothing_in_particular_takes_features_alone(tmp_path, metric, photos):
    gallery = Gallery.create(tmp_path / "g", metric, device="cpu")
    with pytest.raises(ModelError, match="backbone: the metric does not say what model it is for"):
        gallery.add(photos)
    with pytest.raises(ModelError, match="backbone: the metric does not say which layer it is for"):
        gallery.add(photos, backbone="tiny-scenes")


NEW = names(2, start=50)
BAD = {
    "width": (lambda: random_features(2, dim=DIM + 1), NEW, ShapeError, r"got \[2, 10, 13\]"),
    "tokens": (
        lambda: random_features(2, tokens=TOKENS + 1),
        NEW,
        ShapeError,
        r"features \[B, 10, 12\]",
    ),
    "nan": (
        lambda: random_features(2).index_fill(0, torch.tensor([1]), torch.inf),
        NEW,
        NumericsError,
        "image 1",
    ),
    "large": (lambda: 1e9 * random_features(2), NEW, PullbackError, "features: some projections"),
    "whole": (lambda: random_features(2).long(), NEW, ShapeError, "features: expected floats"),
    "array": (
        lambda: random_features(2).numpy(),
        NEW,
        ShapeError,
        "features: expected features .* as a tensor",
    ),
    "keys": (
        lambda: random_features(2),
        [*NEW, "more"],
        PullbackError,
        "keys: expected a name for each of 2 images, got 3",
    ),
    "text": (lambda: random_features(2), [1, 2], PullbackError, r"keys: expected .* as a list of text, got \[1, 2\]"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_features_are_refused_and_nothing_is_added(tmp_path, metric, case):
    features, keys, error, message = BAD[case]
    gallery = filled(tmp_path / "g", 2, metric)
    with pytest.raises(error, match=message):
        gallery.add_features(keys, features())
    assert len(gallery) == 2 == Gallery.open(tmp_path / "g", device="cpu").verify()


def test_info_tells_what_it_is_for(tmp_path, of_scenes):
    told = Gallery.create(tmp_path / "g", of_scenes, device="cpu").info()
    assert (told["model"], told["layer"], told["decoder"], told["items"]) == ("tiny-scenes", 6, "cls", 0)
    assert told["bytes_per_item"] > 2 * told["tokens"] * told["rank"] and len(told["weights"]) == 64
    json.dumps(told)


def test_nothing_is_logged_or_warned_about(tmp_path, metric, caplog, recwarn):
    with caplog.at_level(logging.WARNING):
        filled(tmp_path / "g", 3, metric).search(random_features(1), k=1)
    assert not caplog.records and not recwarn.list


def test_candidates_are_taken_where_they_are_asked_for_and_refused_where_they_do_not_count(tmp_path, metric):
    gallery = filled(tmp_path / "g", metric=metric)
    assert gallery.search(random_features(1), k=2, candidates=3).method == "candidates"
    for method in ("exact", "transport"):
        with pytest.raises(PullbackError, match="candidates: expected with method 'candidates' alone"):
            gallery.search(random_features(1), k=2, method=method, candidates=3)


def test_transport_that_does_not_converge_says_what_else_there_is(tmp_path, metric, monkeypatch):
    def fails(*items):
        raise NumericsError("iterations: 1 of 9 pairs did not converge in 5 iterations. Raise iterations or blur.")

    monkeypatch.setattr("pullback.retrieval.transport.transport_distances", fails)
    with pytest.raises(NumericsError, match=r"method: transport cannot search here: 1 of 9 .* iterations\. Use exact"):
        filled(tmp_path / "g", metric=metric).search(random_features(1), k=2, method="transport")
