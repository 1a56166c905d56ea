"""The same rows on a local Ray with two workers, one of which is killed on the way."""

import os
import pickle
import sys
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
import torch

import pullback as pb
from helpers.pictures import SMALL, DeadlyItem, small_probe, write_pictures
from helpers.rows import assert_same_rows
from pullback.data import Source, open_source
from pullback.errors import PullbackError
from pullback.targets.compute import Job, Work, compute_shards, compute_table, compute_targets, plan
from pullback.targets.ray import TRIES, TargetWorker, limited_tries, packed, unpacked
from pullback.targets.recipe import Recipe
from pullback.targets.store import StoreWriter, TargetStore

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def ray():
    pytest.importorskip("pyarrow", reason="pyarrow is not installed (the extra pullback[targets])")
    tests = str(Path(__file__).parents[1])  # where the workers find the class of the deadly image
    path = os.pathsep.join([tests, *filter(None, [os.environ.get("PYTHONPATH")])])
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patched.setenv("RAY_AUTH_MODE", "disabled")
        patched.setenv("PYTHONPATH", path)
        ray = pytest.importorskip("ray", reason="Ray is not installed (the extra pullback[ray])")
        pytest.importorskip("ray.data", reason="Ray Data is not installed (the extra pullback[ray])")
        ray.init(num_cpus=4, num_gpus=0, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        yield ray
        ray.shutdown()


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    return write_pictures(tmp_path_factory.mktemp("pictures") / "photos", 9)


SETTINGS = SMALL | {"method": "krylov"}


@lru_cache
def scenes_probe():
    """In float64, so that two processes agree; and without transformers, which takes a worker seconds to import."""
    return pb.load_probe("tiny-scenes", layer=10, device="cpu", dtype=torch.float64)


def on_ray(source, out: Path, **options):
    settings = SETTINGS | {"shard_size": 2, "engine": "ray", "workers": 2} | options
    return compute_targets(scenes_probe(), source, out=out, **settings)


def with_a_deadly_image(photos: Path, marker: Path, times: int) -> Source:
    """The folder, its fourth picture replaced by one that kills its reader."""
    source = open_source(photos)
    items = list(source)
    items[3] = DeadlyItem(items[3].key, items[3].path, str(marker), times)
    return replace(source, items=lambda: iter(items))


def test_two_workers_write_the_same_rows_as_one_process_though_one_is_killed(ray, photos, tmp_path):
    """What Ray has begun, this process may finish."""
    marker, progress = tmp_path / "killed", []
    source = with_a_deadly_image(photos, marker, times=1)
    store = on_ray(source, tmp_path / "store", on_progress=progress.append)
    assert marker.read_bytes() == b"x", "a worker was killed"
    alone, skipped = compute_table(scenes_probe(), photos, **SETTINGS)
    assert_same_rows(store.read(), alone)
    assert store.skipped == skipped and sum(progress) == len(store) == 9
    assert len(store.shards) == 5 and not list(store.folder.glob(".*.tmp"))
    store.shards[2].unlink()
    finished = compute_targets(scenes_probe(), photos, out=store.folder, **SETTINGS)
    assert_same_rows(finished.read(), alone)


def test_errors_of_workers_come_back_as_receipts(photos, tmp_path):
    worker = object.__new__(TargetWorker)
    worker.probe, worker.writer = small_probe(), StoreWriter(tmp_path, {}, "mark")
    worker.job = Job(Recipe(rank=99), small_probe().pixel_format((28, 42)))
    work = next(plan(open_source(photos), worker.job, shard_size=2))
    receipt = worker({"work": [pickle.dumps(work)]})
    assert receipt["kind"] == ["RankError"] and receipt["message"][0].startswith("rank: expected 1 <= rank <= 24")
    worker.job = None
    receipt = worker({"work": [pickle.dumps(work)]})
    assert receipt["kind"] == ["failure"] and "a worker failed (AttributeError" in receipt["message"][0]


@pytest.mark.parametrize("crops", [0, 3])
def test_a_worker_goes_on_behind_what_a_dead_one_has_written(photos, tmp_path, crops, monkeypatch):
    """The first one saves after every batch of two rows and dies in the third: no row is computed twice, none lost."""
    pytest.importorskip("pyarrow", reason="pyarrow is not installed (the extra pullback[targets])")
    whole = compute_targets(small_probe(), photos, out=tmp_path / "whole", crops=crops, **SMALL)
    job = Job(Recipe(3, num_probes=8), small_probe().pixel_format((28, 42)), crops, batch_size=2)
    (work,) = plan(open_source(photos), job, shard_size=256)
    worker = object.__new__(TargetWorker)
    worker.probe, worker.job = small_probe(), job
    worker.writer = StoreWriter.claim(tmp_path / "store", whole.config)
    monkeypatch.setattr("pullback.targets.ray.SAVE_EVERY", 0.0)
    first = compute_shards(worker.probe, work, job, seconds=0.0)
    for _ in range(2):
        worker.writer.write(next(first))
    receipt = worker({"work": [pickle.dumps(work)]})
    assert receipt["kind"] == [""], receipt["message"]
    store = TargetStore.open(tmp_path / "store")
    assert receipt["rows"] == [len(store)] == [len(whole)] and len(store.shards) > 4
    assert_same_rows(store.read(), whole.read())
    assert store.read().keys == whole.read().keys and store.skipped == whole.skipped
    again = worker({"work": [pickle.dumps(work)]})
    assert again["rows"] == [len(whole)] and len(store) == len(whole), "nothing is left to do"


def test_a_shard_that_kills_every_worker_stops_the_run(photos, tmp_path):
    """Ray starts dead workers again without end; a finished shard is forgotten."""
    work = next(plan(open_source(photos), Job(Recipe(3), small_probe().pixel_format()), shard_size=2))
    writer = StoreWriter(tmp_path, {}, "mark")
    for _ in range(TRIES):
        with pytest.raises(KeyboardInterrupt), limited_tries(writer, work):
            raise KeyboardInterrupt
    message = rf"00\.png to 01\.png have killed their worker {TRIES} times"
    with pytest.raises(PullbackError, match=message), limited_tries(writer, work):
        pass
    with limited_tries(writer, Work(7, work.images)):
        pass
    assert not (tmp_path / ".tries-00007.tmp").exists()


def test_more_workers_than_the_cluster_can_hold_are_refused(ray, photos, tmp_path):
    with pytest.raises(PullbackError, match=r"4 workers need a cluster with more than 4 CPUs, this one has 4"):
        on_ray(photos, tmp_path / "store", workers=4)


@pytest.mark.parametrize("name", ["dinov2", "siglip", "depth-v2"])
def test_a_probe_travels_with_everything_it_needs(name):
    """Closures, shared parameters and all: the copy gives the same output, and its blocks still share the model's."""
    pytest.importorskip("ray", reason="Ray is not installed (the extra pullback[ray])")
    from helpers.families import images_for, model_of

    decoder = {"siglip": "pool", "depth-v2": "depth"}.get(name, "cls")
    probe = pb.load_probe(model_of(name), decoder, 1)
    copy = unpacked(packed(probe), "cpu")
    images = images_for(name, (2, 3))
    assert torch.equal(copy(copy.features(images)), probe(probe.features(images)))
    own = {parameter.data_ptr() for parameter in copy.backbone.parameters()}
    assert copy.backbone.norm.weight.data_ptr() in own


def test_a_missing_ray_is_named_with_the_fix(photos, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(PullbackError, match=r"engine: 'ray' needs Ray Data, .* pip install 'pullback\[ray\]'"):
        on_ray(photos, tmp_path / "store")
