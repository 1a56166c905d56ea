"""Targets of a folder: the rows, what is skipped, what is refused, and a run that is killed and goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import pullback as pb
from helpers.pictures import SIZE, SMALL, encoded, small_probe, write_pictures
from helpers.rows import assert_same_rows
from pullback.data import Crop, open_source, read_crop
from pullback.errors import FileError, ImageError, ModelError, PullbackError
from pullback.targets import compute as computing
from pullback.targets import recipe
from pullback.targets.compute import compute_table, compute_targets
from pullback.targets.recipe import Recipe, targets_of
from pullback.targets.store import StaleRun, StoreWriter, TargetStore
from pullback.targets.table import Shard

pytest.importorskip("pyarrow", reason="pyarrow is not installed (the extra pullback[targets])")
KEYS = [f"{number:02d}.png" for number in range(7)]


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    return write_pictures(tmp_path_factory.mktemp("pictures") / "photos")


def compute(photos: Path, out: Path, **options) -> TargetStore:
    return compute_targets(small_probe(), photos, out=out, **(SMALL | {"shard_size": 3} | options))


@pytest.fixture(scope="module")
def store(photos, tmp_path_factory) -> TargetStore:
    return compute(photos, tmp_path_factory.mktemp("store") / "new" / "folder")


def test_every_readable_image_is_a_row(store, photos):
    table = store.read()
    assert table.keys == tuple(KEYS) and len(store) == 7
    assert len(store.shards) == 3 and [len(part) for part in store] == [2, 3, 2]
    assert table.crops == (None,) * 7 and table.crop_index == (0,) * 7
    assert (table.tokens, table.rank) == (7, 3)


def test_the_rows_are_the_targets_of_the_images(store, photos):
    probe, table = small_probe(), store.read()
    images = probe.read_images([photos / key for key in KEYS], SIZE).pixels
    expected = targets_of(probe, probe.features(images), 3)
    torch.testing.assert_close(table.importance, expected.importance.float())
    torch.testing.assert_close(table.block_energy, expected.block_energy.value.float())
    torch.testing.assert_close(table.kappa, expected.kappa.value)
    torch.testing.assert_close(table.total, expected.total.value)
    torch.testing.assert_close(table.singular_values, expected.singular_values.float())


def test_unreadable_images_are_recorded_and_not_fatal(store):
    (skipped,) = store.skipped
    assert skipped.key == "02-broken.png" and "not a readable image" in skipped.reason


def test_shards_carry_configuration_and_image_hashes(store):
    import hashlib

    import pyarrow.parquet as parquet

    schema = parquet.read_schema(store.shards[1])
    assert json.loads(schema.metadata[b"pullback.config"]) == store.config
    info = json.loads(schema.metadata[b"pullback.shard"])
    assert info["method"] == "exact" and info["products"] == {"jvp": 0, "vjp": 24} and info["seconds"] > 0
    table = store.read()
    assert table.image_sha256[3] == hashlib.sha256(encoded(3)).hexdigest()
    assert store.config["weights"] and store.config["size"] == list(SIZE)
    assert store.seconds > 0


def test_a_store_knows_where_its_images_are(store):
    assert [item.key for item in store.source()][:2] == ["00.png", "01.png"]


def test_memory_gives_the_same_rows_without_pyarrow(store, photos, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    table, skipped = compute_table(small_probe(), photos, **SMALL)
    monkeypatch.undo()
    assert_same_rows(table, store.read())
    assert [item.key for item in skipped] == ["02-broken.png"]


@pytest.mark.parametrize("method", ["exact", "krylov"])
def test_rows_do_not_depend_on_batches_shards_or_order(photos, tmp_path, method, monkeypatch):
    monkeypatch.setattr(computing, "GROUP", 3)
    options = {"method": method, "crops": 2, "seed": 5}
    one = compute(photos, tmp_path / "a", batch_size=1, shard_size=1, **options).read()
    monkeypatch.setattr(computing, "GROUP", 64)
    reverse = [photos / key for key in reversed(KEYS)]
    whole, _ = compute_table(small_probe(), photos, **SMALL, **options)
    assert_same_rows(one, whole)
    turned, _ = compute_table(small_probe(), reverse, **SMALL, **options)
    assert list(turned.keys[:2]) == [str(photos / "06.png")] * 2
    if method == "exact":  # other keys draw other crops and probes
        assert not torch.allclose(turned.importance.flip(0), whole.importance)


def test_crops_are_rows_that_can_be_cut_out_again(photos, tmp_path):
    store = compute(photos, tmp_path / "store", crops=3, seed=1)
    table, probe = store.read(), small_probe()
    assert len(table) == 21 and set(table.crop_index) == {1, 2, 3}
    assert all(isinstance(crop, Crop) for crop in table.crops) and len(set(table.crops)) > 15
    items = {item.key: item for item in open_source(store.config["source"])}
    pixels = [
        read_crop(items[key].read(), crop, probe.pixel_format(SIZE))
        for key, crop in zip(table.keys, table.crops, strict=True)
    ]
    again = targets_of(probe, probe.features(torch.stack(pixels)), 3)
    torch.testing.assert_close(table.importance, again.importance.float(), rtol=1e-5, atol=1e-6)


def test_an_images_crops_stay_in_one_shard(photos, tmp_path):
    store = compute(photos, tmp_path / "store", crops=2, shard_size=3)
    for part in store:
        assert all(part.keys.count(key) == 2 for key in part.keys)


def test_modes_are_stored_on_request(photos, tmp_path):
    store = compute(photos, tmp_path / "store", keep_modes=True, limit=2)
    table = store.read()
    assert table.modes.shape == (2, 3, 7, 24)
    again = (table.singular_values[:, :, None, None] * table.modes.float()).square().sum((1, 3)).sqrt()
    torch.testing.assert_close(again, table.importance, rtol=1e-2, atol=1e-3)
    assert store.read(modes=False).modes is None


def test_a_second_run_does_nothing_and_a_larger_limit_adds_rows(photos, tmp_path):
    progress: list[int] = []
    first = compute(photos, tmp_path / "store", limit=4, on_progress=progress.append)
    assert len(first) == 3 and sum(progress) == 3, "the limit counts images, readable or not"
    before = {path: path.stat().st_mtime_ns for path in first.shards}
    again = compute(photos, tmp_path / "store", limit=4, on_progress=progress.append)
    assert sum(progress) == 3 and {path: path.stat().st_mtime_ns for path in again.shards} == before
    larger = compute(photos, tmp_path / "store", on_progress=progress.append)
    assert sum(progress) == 7 and set(larger.read().keys) == set(KEYS)
    assert len(larger.skipped) == 1


def test_new_images_in_the_folder_are_added(tmp_path):
    photos = write_pictures(tmp_path / "photos", 2)
    compute(photos, tmp_path / "store")
    (photos / "00-new.png").write_bytes(encoded(99))
    assert set(compute(photos, tmp_path / "store").read().keys) == {"00-new.png", "00.png", "01.png"}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rank": 2}, "rank: 3 there, 2 asked for"),
        ({"seed": 1}, "seed: 0 there, 1 asked for"),
        ({"crops": 2}, "crops: 0 there, 2 asked for"),
        ({"size": (28, 28)}, r"tokens: 7 there, 5 asked for; .*size: \[28, 42\] there, \[28, 28\] asked for"),
        ({"method": "krylov"}, "method: 'auto' there, 'krylov' asked for"),
        ({"keep_modes": True}, "keep_modes: False there, True asked for"),
    ],
)
def test_another_configuration_is_refused_and_the_store_left_alone(store, photos, change, named):
    before = sorted(path.name for path in store.folder.iterdir())
    with pytest.raises(PullbackError, match=f"out: .* holds targets with other settings .*{named}"):
        compute(photos, store.folder, **change)
    assert sorted(path.name for path in store.folder.iterdir()) == before


def test_a_shard_is_there_whole_or_not_at_all(photos, tmp_path, monkeypatch):
    """The disk fills up in the middle of a file: the first shard stays, nothing half-written is seen."""
    import pyarrow.parquet as parquet

    real, calls = parquet.write_table, []

    def fails_the_second_time(table, file, **options):
        calls.append(1)
        if len(calls) == 2:
            file.write(b"PAR1 and then no more")
            raise OSError(28, "No space left on device")
        real(table, file, **options)

    monkeypatch.setattr(parquet, "write_table", fails_the_second_time)
    with pytest.raises(OSError, match="No space left"):
        compute(photos, tmp_path / "store")
    assert [path.name for path in TargetStore.open(tmp_path / "store").shards] == ["targets-00000.parquet"]
    assert not list((tmp_path / "store").glob(".*.tmp"))
    monkeypatch.undo()
    assert len(compute(photos, tmp_path / "store")) == 7


def test_a_shard_written_twice_is_there_once(photos, tmp_path):
    """What a worker does whose receipt was lost."""
    store = compute(photos, tmp_path / "store")
    job = computing.Job(Recipe(3), small_probe().pixel_format(SIZE))
    first = next(computing.plan(open_source(photos), job, shard_size=3))
    (shard,) = computing.compute_shards(small_probe(), first, job)
    StoreWriter.claim(store.folder, store.config).write(shard)
    assert len(store) == 7 and store.read().keys == tuple(KEYS)


def test_a_run_that_was_taken_over_cannot_write_any_more(photos, tmp_path):
    store = compute(photos, tmp_path / "store")
    old = StoreWriter.claim(store.folder, store.config)
    StoreWriter.claim(store.folder, store.config)
    with pytest.raises(StaleRun, match=r"another run has taken over .*; this one stops, and its shards are kept"):
        old.write(Shard(99, None, (), 0.0))
    assert len(store.shards) == 3


KILLED = """
import sys, time
import torch
sys.path[:0] = {path!r}
torch.set_num_threads(1)
import pullback as pb
from helpers.pictures import SMALL
from pullback.targets.compute import compute_targets

def tell(rows):
    print(rows, flush=True)
    time.sleep(0.2)

probe = pb.load_probe("tiny-scenes", layer=9, device="cpu")
compute_targets(probe, sys.argv[1], out=sys.argv[2], shard_size=3, batch_size=1, on_progress=tell, **SMALL)
"""


def test_a_run_killed_at_any_moment_goes_on_where_it_stopped(photos, tmp_path):
    """kill -9 in the middle of the second shard: the first is kept, a second run does the rest, no row twice."""
    out = tmp_path / "store"
    code = KILLED.format(path=[path for path in sys.path if path])
    process = subprocess.Popen([sys.executable, "-c", code, photos, out], stdout=subprocess.PIPE, text=True)
    for _ in range(4):  # two rows of the first shard, two of the second
        assert process.stdout.readline().strip() == "1"
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait(30) == -signal.SIGKILL
    (out / ".targets-00001.parquet.x1.tmp").write_bytes(b"what a kill in the middle of writing leaves")
    kept = TargetStore.open(out)
    assert list(kept.read().keys) == ["00.png", "01.png"]
    before = kept.shards[0].stat().st_mtime_ns
    probe = pb.load_probe("tiny-scenes", layer=9, device="cpu")
    finished = compute_targets(probe, photos, out=out, shard_size=3, **SMALL)
    assert_same_rows(finished.read(), compute_table(probe, photos, **SMALL)[0])
    assert finished.shards[0].stat().st_mtime_ns == before, "what was done is not done again"
    assert not list(out.glob(".*.tmp")) and len(finished.skipped) == 1


def test_rows_are_saved_by_time_as_well_as_by_number(photos, tmp_path, monkeypatch):
    """Every batch takes longer than what may be lost: each is a shard of its own, and the numbers follow the rows."""
    monkeypatch.setattr(computing, "SAVE_EVERY", 0.0)
    store = compute(photos, tmp_path / "slow", shard_size=256, batch_size=2, crops=2)
    whole = compute(photos, tmp_path / "quick", shard_size=256, crops=2)
    assert len(store.shards) > 7 and len(store.skipped) == 1
    assert_same_rows(store.read(), whole.read())
    assert store.read().keys == whole.read().keys, "in the order of the images"
    assert_same_rows(compute(photos, tmp_path / "slow", crops=2).read(), whole.read())


def test_a_shard_is_written_before_the_next_batch_would_take_it_beyond_the_limit(photos, tmp_path, monkeypatch):
    """Batches of 8 s and 30 s that may be lost: three of them are 24 s, and with a fourth it would be too much."""
    clock = [0.0]
    real = computing.targets_in_batches

    def slow(*arguments, **options):
        for found in real(*arguments, **options):
            clock[0] += 8.0
            yield found

    monkeypatch.setattr(computing, "targets_in_batches", slow)
    monkeypatch.setattr(computing.time, "perf_counter", lambda: clock[0])
    store = compute(photos, tmp_path / "store", shard_size=256, batch_size=1)
    assert [len(part) for part in store] == [3, 3, 1]


def test_slow_batches_become_smaller(photos, tmp_path, monkeypatch):
    """A batch of four that took 60 s is followed by batches of two, and by groups that begin with two."""
    clock, sizes = [0.0], []
    real = recipe._targets

    def slow(operator, *arguments):
        sizes.append(operator.batch)
        clock[0] += 15.0 * operator.batch
        return real(operator, *arguments)

    monkeypatch.setattr(recipe, "_targets", slow)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(computing, "GROUP", 6)
    store = compute(photos, tmp_path / "store", shard_size=256, batch_size=4, crops=2)
    assert sizes == [4, 2, 2, 2, 2, 2] and [len(part) for part in store] == [4, 2, 2, 2, 2, 2]


def test_an_error_comes_after_the_rows_that_were_finished(photos, tmp_path, monkeypatch):
    real = computing.targets_in_batches

    def fails(*arguments, **options):
        yield next(real(*arguments, **options))
        raise PullbackError("features: NaN in image 3.")

    monkeypatch.setattr(computing, "targets_in_batches", fails)
    with pytest.raises(PullbackError, match="NaN in image 3"):
        compute(photos, tmp_path / "store", shard_size=256, batch_size=2)
    assert len(TargetStore.open(tmp_path / "store")) == 2
    monkeypatch.undo()
    assert_same_rows(compute(photos, tmp_path / "store").read(), compute(photos, tmp_path / "whole").read())


def test_ctrl_c_while_a_shard_is_written_loses_no_row(photos, tmp_path, monkeypatch):
    import pyarrow.parquet as parquet

    real, calls = parquet.write_table, []

    def interrupted(table, file, **options):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        real(table, file, **options)

    monkeypatch.setattr(parquet, "write_table", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compute(photos, tmp_path / "store")
    assert len(TargetStore.open(tmp_path / "store")) == 5


@pytest.mark.parametrize("spelling", ["relative", "slash", "link", "dots", "home"])
def test_a_store_goes_on_however_the_folder_is_spelled(tmp_path, spelling, monkeypatch):
    photos = write_pictures(tmp_path / "photos", 3)
    compute(photos, tmp_path / "store", limit=1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "link").symlink_to(photos)
    other = {
        "relative": "photos",
        "slash": f"{photos}/",
        "link": tmp_path / "link",
        "dots": "photos/../photos",
        "home": "~/photos",
    }[spelling]
    assert len(compute(other, tmp_path / "store")) == 3
    monkeypatch.chdir("/")
    assert len(list(TargetStore.open(tmp_path / "store").source())) == 4, "the images are found from any folder"


def test_another_folder_is_still_refused(photos, tmp_path):
    compute(photos, tmp_path / "store", limit=1)
    with pytest.raises(PullbackError, match=r"source: '.*' there, '.*others' asked for"):
        compute(write_pictures(tmp_path / "others", 2), tmp_path / "store")


@pytest.mark.parametrize("content", [b"", b"PAR1", None], ids=["empty", "four bytes", "half"])
def test_a_damaged_shard_is_named_with_the_way_out(photos, tmp_path, content):
    store = compute(photos, tmp_path / "store")
    whole = store.read()
    path = store.shards[1]
    path.write_bytes(path.read_bytes()[:2000] if content is None else content)
    message = rf"{path.name}: cannot be read \(.*\)\. Delete it, and run `pullback targets` again"
    for read in (store.read, store.rows_done, lambda: len(store), lambda: store.skipped, lambda: list(store)):
        with pytest.raises(FileError, match=message):
            read()
    with pytest.raises(FileError, match=message):
        compute(photos, store.folder)
    path.unlink()
    assert_same_rows(compute(photos, store.folder).read(), whole)


def test_what_cannot_work_is_refused_before_anything_is_written(photos, tmp_path):
    out = tmp_path / "store"
    wrong = {
        "engine": ({"engine": "spark"}, "engine: expected one of local, ray, got 'spark'"),
        "crops": ({"crops": -1}, "crops: expected a number of crops per image, or 0 for the plain image, got -1"),
        "method": ({"method": "svd"}, "method: expected one of auto, krylov, paper, exact, got 'svd'"),
        "precision": ({"precision": "fp8"}, "precision: expected one of float32, tf32, bf16, got 'fp8'"),
        "size": ({"size": 30}, "30x30 pixels are not divisible by the patch size 14"),
        "rank": ({"rank": 25}, "rank: expected 1 <= rank <= 24"),
    }
    for change, message in wrong.values():
        with pytest.raises((PullbackError, ModelError), match=message):
            compute(photos, out, **change)
    assert not out.exists()
    with pytest.raises(PullbackError, match="shard_size: expected at least 1 row, got 0"):
        compute(photos, out, shard_size=0)
    with pytest.raises(PullbackError, match=r"limit: expected a positive number of images, or None .* got 0"):
        compute(photos, out, limit=0)


def test_a_source_without_a_readable_image_is_refused(tmp_path):
    photos = write_pictures(tmp_path / "photos", 0)
    with pytest.raises(ImageError, match=r"none of the 1 could be used: 02-broken\.png: not a readable image"):
        compute(photos, tmp_path / "store")
    with pytest.raises(ImageError, match="expected at least one readable image"):
        compute_table(small_probe(), photos, **SMALL)


def test_folders_that_are_no_stores_are_named(photos, tmp_path):
    with pytest.raises(PullbackError, match=r"expected targets\.json in .*, which `pullback targets --out` writes"):
        TargetStore.open(tmp_path)
    (tmp_path / "targets-00000.parquet").write_bytes(b"")
    with pytest.raises(PullbackError, match=r"holds shards but no targets\.json\. Choose another folder"):
        compute(photos, tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(PullbackError, match=r"out: cannot make the folder .*file .*Choose another"):
        compute(photos, tmp_path / "file")
    (tmp_path / "targets.json").write_text('{"format": 99}')
    with pytest.raises(PullbackError, match="has format 99, this version reads 1"):
        TargetStore.open(tmp_path)


def test_an_empty_store_and_a_list_of_paths_say_what_they_lack(photos, tmp_path):
    listed = compute([photos / "00.png"], tmp_path / "listed")
    with pytest.raises(PullbackError, match=r"came as a Python list, which is not stored\. Call open_source with that"):
        listed.source()
    listed.shards[0].unlink()
    with pytest.raises(PullbackError, match="holds no rows yet"):
        listed.read()


def test_a_missing_pyarrow_is_named_with_the_fix(photos, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(PullbackError, match=r"pyarrow is needed: pip install 'pullback\[targets\]'"):
        compute(photos, tmp_path / "store")
    assert not (tmp_path / "store").exists()
