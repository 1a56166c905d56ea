"""Files of a gallery under kills, damage, full disks and several processes at once."""

import errno
import json
import os
import signal
import sys
import time

import pytest
import torch

from helpers.disk import largest_file
from helpers.galleries import filled, names, random_features, small_metric
from pullback.errors import FileError, PullbackError
from pullback.retrieval import gallery as galleries
from pullback.retrieval.gallery import Gallery
from pullback.retrieval.records import Form

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")


@pytest.fixture(scope="module")
def metric():
    return small_metric()


@pytest.fixture
def shards_of_seven(monkeypatch):
    words = sum(Form.of(small_metric()).words.values())
    monkeypatch.setattr(galleries, "SHARD_BYTES", 7 * 2 * words)


def child(work) -> int:
    """Run ``work`` in a fork; return its process id."""
    sys.stdout.flush()
    started = os.fork()
    if started:
        return started
    try:
        work()
    finally:
        os._exit(0)


def assert_whole(gallery: Gallery) -> None:
    """Nothing is there twice, checksums are right, and every item is what its key says."""
    keys = [item.key for item in gallery]
    assert len(set(keys)) == len(keys) == len(gallery) == gallery.verify()
    numbers = [int(key.removeprefix("item-")) for key in keys]
    features = random_features(120)[numbers] if numbers else random_features(1)[:0]
    if len(features):
        found = gallery.search(features, k=1)
        assert [best[0] for best in found.keys] == keys and found.distances.max() == 0


def test_killed_at_any_moment_an_adding_loses_nothing_and_adds_nothing_twice(tmp_path, metric, monkeypatch):
    """One item a commit, so that kills hit commits; what was there before a kill is there after it."""
    monkeypatch.setattr(galleries, "_BATCH", 1)
    torch.set_num_threads(1)
    folder, features = tmp_path / "g", random_features(120)
    Gallery.create(folder, metric, device="cpu")
    draw = torch.Generator().manual_seed(0)

    def add() -> None:
        torch.set_num_threads(1)
        Gallery.open(folder, device="cpu").add_features(names(120), features)

    before: list[str] = []
    for _ in range(6):
        started = child(add)
        time.sleep(0.02 + 0.05 * float(torch.rand((), generator=draw)))
        os.kill(started, signal.SIGKILL)
        os.waitpid(started, 0)
        gallery = Gallery.open(folder, device="cpu")
        keys = [item.key for item in gallery]
        assert keys[: len(before)] == before and keys == names(len(keys))
        before = keys
    result = Gallery.open(folder, device="cpu").add_features(names(120), features)
    assert result.known == len(before) and result.added == 120 - len(before)
    assert_whole(Gallery.open(folder, device="cpu"))


@pytest.mark.parametrize("cut", ["records without a line", "half a line"])
def test_what_a_kill_leaves_half_done_does_not_exist_and_is_written_over(tmp_path, metric, cut, shards_of_seven):
    gallery = filled(tmp_path / "g", 9, metric)
    log = tmp_path / "g" / "items.jsonl"
    if cut == "half a line":
        log.write_bytes(log.read_bytes() + b'{"first": 9, "keys": ["item-0')
    for part in ("tokens", "rest"):
        with open(tmp_path / "g" / f"{part}-00001.f16", "ab") as file:
            file.write(b"\x01" * 77)
    left = log.read_bytes()
    assert_whole(Gallery.open(tmp_path / "g", device="cpu"))
    assert log.read_bytes() == left, "a reader wrote"
    gallery.add_features(names(11, start=9), random_features(20)[9:])
    assert_whole(Gallery.open(tmp_path / "g", device="cpu"))
    assert len(gallery) == 20


def test_a_second_writer_is_refused_at_once_and_told_who_writes(tmp_path, metric):
    gallery = filled(tmp_path / "g", 3, metric)
    reading, writing = os.pipe()

    def hold() -> None:
        with Gallery.open(tmp_path / "g", device="cpu")._writing():
            os.write(writing, b"x")
            time.sleep(60)

    started = child(hold)
    os.read(reading, 1)
    begun = time.monotonic()
    for change in (lambda: gallery.add_features(["x"], random_features(1, seed=5)), lambda: gallery.remove("item-001")):
        with pytest.raises(PullbackError, match=rf"another process writes to the gallery .*g \(process {started} on "):
            change()
    assert time.monotonic() - begun < 5
    assert len(gallery.search(random_features(1), k=3).keys[0]) == 3  # reading goes on
    os.kill(started, signal.SIGKILL)
    os.waitpid(started, 0)
    assert gallery.remove("item-001") == 1  # the lock went with the process


def test_two_galleries_of_one_process_do_not_write_at_once_either(tmp_path, metric):
    gallery = filled(tmp_path / "g", 3, metric)
    with gallery._writing(), pytest.raises(PullbackError, match="another process writes"):
        Gallery.open(tmp_path / "g", device="cpu").remove("item-001")


def test_a_reader_sees_one_moment_while_another_process_writes(tmp_path, metric, monkeypatch, shards_of_seven):
    monkeypatch.setattr(galleries, "_BATCH", 2)
    folder = tmp_path / "g"
    Gallery.create(folder, metric, device="cpu")
    started = child(lambda: Gallery.open(folder, device="cpu").add_features(names(120), random_features(120)))
    seen, done = [], False
    while not done:
        done = os.waitpid(started, os.WNOHANG)[0] != 0
        gallery = Gallery.open(folder, device="cpu")
        count = len(gallery)
        assert [item.key for item in gallery] == names(count)
        if count:
            assert gallery.search(random_features(120)[count - 1 : count], k=1).keys == [names(1, start=count - 1)]
        assert len(gallery) == count
        seen.append(count)
    assert seen == sorted(seen) and Gallery.open(folder, device="cpu").refresh().verify() == 120


def test_an_open_gallery_sees_what_others_did_when_it_is_refreshed(tmp_path, metric):
    gallery = filled(tmp_path / "g", 5, metric)
    other = Gallery.open(tmp_path / "g", device="cpu")
    other.add_features(names(3, start=5), random_features(8)[5:])
    other.remove("item-001")
    assert len(gallery) == 5 and "item-001" in gallery
    assert len(gallery.refresh()) == 7 and "item-001" not in gallery
    assert gallery.search(random_features(8)[6:7], k=1).keys == [["item-006"]]


def test_a_gallery_that_was_open_before_a_kill_cuts_off_what_it_left_too(tmp_path, metric):
    gallery = filled(tmp_path / "g", 4, metric)
    log = tmp_path / "g" / "items.jsonl"
    log.write_bytes(log.read_bytes() + b'{"first": 4')
    assert len(gallery.refresh()) == 4
    gallery.add_features(names(2, start=4), random_features(6)[4:])
    assert_whole(Gallery.open(tmp_path / "g", device="cpu"))


def test_the_log_is_read_again_only_when_it_has_changed(tmp_path, metric, monkeypatch):
    gallery = filled(tmp_path / "g", 4, metric)
    with monkeypatch.context() as patched:
        patched.setattr("pullback.retrieval.storage.Rows.read", lambda *args, **more: pytest.fail("read"))
        gallery.add_features(["item-004"], random_features(5)[4:])
        assert len(gallery.refresh()) == 5
    Gallery.open(tmp_path / "g", device="cpu").remove("item-001")
    assert len(gallery.refresh()) == 4 and gallery.add_features(["item-005"], random_features(6)[5:]).added == 1
    assert_whole(gallery)


@pytest.mark.parametrize("part", ["tokens", "rest"])
def test_a_truncated_shard_names_itself_and_its_items_and_can_be_repaired(tmp_path, metric, shards_of_seven, part):
    filled(tmp_path / "g", 20, metric)
    path = tmp_path / "g" / f"{part}-00001.f16"
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size * 3 // 7 + 1)
    message = rf"{part}-00001.f16 is truncated: it should hold 7 items, and has 3; those from 'item-010' on are gone"
    with pytest.raises(FileError, match=message):
        Gallery.open(tmp_path / "g", device="cpu")
    lost = Gallery.repair(tmp_path / "g")
    assert set(lost) >= set(names(4, start=10)) and not set(lost) & set(names(7))
    gallery = Gallery.open(tmp_path / "g", device="cpu")
    assert len(gallery) == 20 - len(lost)
    assert gallery.search(random_features(20)[12:13], k=1).distances.min() > 0
    assert gallery.add_features(names(20), random_features(20)).added == len(lost)
    found = Gallery.open(tmp_path / "g", device="cpu").search(random_features(20), k=1)
    assert [best[0] for best in found.keys] == names(20)


def test_a_missing_shard_is_named(tmp_path, metric):
    filled(tmp_path / "g", 4, metric)
    (tmp_path / "g" / "rest-00000.f16").unlink()
    with pytest.raises(FileError, match=r"rest-00000.f16 is missing: it should hold 4 items, and has 0"):
        Gallery.open(tmp_path / "g", device="cpu")


def test_bytes_that_changed_are_found_by_their_checksums(tmp_path, metric, shards_of_seven):
    gallery = filled(tmp_path / "g", 20, metric)
    assert gallery.verify() == 20
    with open(tmp_path / "g" / "tokens-00002.f16", "r+b") as file:
        file.seek(30)
        byte = file.read(1)
        file.seek(30)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(FileError, match=r"bytes of .*tokens-00002.f16 are not those .* concerns 6 of 20 items"):
        gallery.verify()
    assert Gallery.repair(tmp_path / "g") == names(6, start=14)
    assert Gallery.repair(tmp_path / "g") == []


@pytest.mark.parametrize(
    "line",
    [
        '{"first": 7, "keys": ["a"], "sha256": ["b"], "places": [null], "crc32": {}}',
        '{"first": 4, "keys": ["item-000"], "sha256": ["b"], "places": [null], "crc32": {}}',
        '{"first": 4, "keys": ["a", "b"], "sha256": ["b"], "places": [null], "crc32": {}}',
        '{"remove": [99]}',
        "[]",
    ],
)
def test_a_line_that_does_not_follow_is_named(tmp_path, metric, line):
    filled(tmp_path / "g", 4, metric)
    with open(tmp_path / "g" / "items.jsonl", "a") as file:
        file.write(f"{line}\n")
    with pytest.raises(FileError, match=r"line 2 of .*items.jsonl does not follow from those before it"):
        Gallery.open(tmp_path / "g", device="cpu")


def test_a_line_that_is_no_json_is_named(tmp_path, metric):
    filled(tmp_path / "g", 4, metric)
    log = tmp_path / "g" / "items.jsonl"
    log.write_text("nonsense\n" + log.read_text())
    with pytest.raises(FileError, match=r"folder: line 1 of .*items.jsonl is no JSON"):
        Gallery.open(tmp_path / "g", device="cpu")


@pytest.mark.parametrize("limit", [1000, 4200, 5000])
def test_a_full_disk_keeps_what_was_committed_and_leaves_nothing_half_done(tmp_path, metric, monkeypatch, limit):
    """The limits are met by the tokens, then by the log."""
    monkeypatch.setattr(galleries, "_BATCH", 4)
    folder = tmp_path / "g"
    gallery = Gallery.create(folder, metric, device="cpu")
    with largest_file(limit), pytest.raises(FileError, match=r"cannot be written \(File too large\)\. Raise the limit"):
        gallery.add_features(names(120), random_features(120))
    count = len(gallery)
    assert count < 120 and count % 4 == 0
    words = Form.of(metric).words
    for part in ("tokens", "rest"):
        path = folder / f"{part}-00000.f16"
        assert not path.is_file() or path.stat().st_size in (2 * words[part] * count, 2 * words[part] * (count + 4))
    assert_whole(Gallery.open(folder, device="cpu"))
    assert gallery.add_features(names(120), random_features(120)).added == 120 - count
    assert_whole(Gallery.open(folder, device="cpu"))


def test_a_disk_without_space_is_named(tmp_path, metric, monkeypatch):
    gallery = filled(tmp_path / "g", 4, metric)

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(FileError, match=r"tokens-00000.f16: cannot be written \(No space left on device\). Free"):
            gallery.add_features(["x"], random_features(1, seed=5))
        with pytest.raises(FileError, match=r"items.jsonl: cannot be written \(No space left on device\). Free"):
            gallery.remove("item-000")
    assert len(gallery) == 4 == Gallery.open(tmp_path / "g", device="cpu").verify()
    assert json.loads((tmp_path / "g" / "items.jsonl").read_text())["keys"] == names(4)
