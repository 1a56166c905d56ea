"""Shards on a Ray cluster: one model per GPU, work streamed to a pool of actors (Ray Data), the same rows as here.

Workers write their shards themselves, so the folder must be one that all nodes see, and only receipts come back. The
numbers of its shards are decided before a work is begun: a worker that dies is started again, and goes on behind the
rows of that work that it had written.
"""

from __future__ import annotations

import io
import logging
import os
import pickle
from collections import ChainMap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from pullback import errors
from pullback.data.sources import ImageItem
from pullback.errors import PullbackError
from pullback.probes import ProbeMap
from pullback.runs.files import SAVE_EVERY
from pullback.targets.compute import Job, Work, compute_shards
from pullback.targets.store import StoreWriter, TargetStore, number_of

TRIES = 5
"""How often one shard may kill its worker before the run gives up."""


def compute_on_ray(
    probe: ProbeMap,
    left: Iterator[Work],
    job: Job,
    writer: StoreWriter,
    *,
    workers: int | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> None:
    """Compute and write every shard that is left. Connects to the cluster that is there, or starts one on this machine.

    ``workers``: by default one per GPU, without GPUs half of the CPUs.
    """
    ray = _ray()
    waiting = [{"work": ray.cloudpickle.dumps(work)} for work in left]
    if not waiting:
        return
    if not ray.is_initialized():
        ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    gpus, workers = _resources(ray, workers)
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    settings = ray.data.DataContext.get_current()
    settings.enable_progress_bars = settings.print_on_execution_start = False
    receipts = ray.data.from_items(waiting, override_num_blocks=len(waiting)).map_batches(
        TargetWorker,
        fn_constructor_args=(ray.put(packed(probe)), job, writer),
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=min(workers, len(waiting))),
        num_cpus=1,
        num_gpus=1 if gpus else 0,
    )
    try:
        for receipt in receipts.iter_rows():
            if receipt["kind"]:
                raise getattr(errors, receipt["kind"], PullbackError)(receipt["message"])
            if on_progress is not None:
                on_progress(int(receipt["rows"]))
    except ray.exceptions.RayError as error:
        raise _failure(str(error).strip().splitlines()[-1]) from error


class TargetWorker:
    """A process with a model of its own, on the GPU that Ray gave it."""

    def __init__(self, probe: Any, job: Job, writer: StoreWriter) -> None:
        import ray

        self.probe = unpacked(ray.get(probe), "cuda" if ray.get_gpu_ids() else "cpu")
        self.job, self.writer = job, writer

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        """Compute and write the one shard of a batch. An error comes back as a receipt: Ray would not hand it over."""
        (work,) = (pickle.loads(work) for work in batch["work"])
        try:
            rows = self._finish(work)
        except PullbackError as error:
            return {"rows": [0], "kind": [type(error).__name__], "message": [str(error)]}
        except Exception as error:
            return {"rows": [0], "kind": ["failure"], "message": [str(_failure(f"{type(error).__name__}: {error}"))]}
        return {"rows": [rows], "kind": [""], "message": [""]}

    def _finish(self, work: Work) -> int:
        with limited_tries(self.writer, work):
            store = TargetStore(self.writer.folder, self.writer.config)
            rest, rows = rest_of(work, store)
            for shard in compute_shards(self.probe, rest, self.job, seconds=SAVE_EVERY):
                self.writer.write(shard)
                rows += len(shard)
        return rows


def rest_of(work: Work, store: TargetStore) -> tuple[Work, int]:
    """Return what a worker that died has left of a work, and how many rows of it are in the store."""
    own = [path for path in store.shards if number_of(path) in work.numbers]
    done, skipped = store.rows_done(own), {item.key for item in store.skipped_in(own)}
    images: list[tuple[ImageItem, tuple[int, ...]]] = []
    number = work.number
    for item, wanted in work.images:
        left = tuple(row for row in wanted if (item.key, row) not in done)
        usable = left if item.key not in skipped else ()
        if not images:  # rows are finished in order: the first ones that are left begin the next shard
            number += len(wanted) - len(usable)
        if usable:
            images.append((item, usable))
    return Work(number, tuple(images)), len(done)


@contextmanager
def limited_tries(writer: StoreWriter, work: Work) -> Iterator[None]:
    """Count the tries of a shard, and stop the run with an error when it has killed too many workers: Ray would start
    them again without end."""
    tally = writer.folder / f".tries-{work.number:05d}.tmp"
    with open(tally, "ab") as file:
        file.write(b".")
    if tally.stat().st_size > TRIES:
        keys = [item.key for item, _ in work.images]
        raise PullbackError(
            f"engine: the images {keys[0]} to {keys[-1]} have killed their worker {TRIES} times, most likely for lack "
            "of memory. Use a smaller batch_size, or take the guilty one out."
        )
    yield
    tally.unlink(missing_ok=True)


def packed(probe: Any) -> bytes:
    """Pack a probe for another machine. Decoders and embeddings are closures, which only cloudpickle can write.

    transformers hangs hooks with context variables on some models; they stand for "nobody is listening" in the copy.
    """
    from ray import cloudpickle

    class Pickler(cloudpickle.Pickler):
        dispatch_table: ClassVar = ChainMap({ContextVar: _reduce_variable}, cloudpickle.Pickler.dispatch_table)

    buffer = io.BytesIO()
    torch.save(probe, buffer, pickle_module=SimpleNamespace(Pickler=Pickler, __name__="cloudpickle"))
    return buffer.getvalue()


def _reduce_variable(variable: ContextVar[Any]) -> tuple[Any, ...]:
    return _silent_variable, (variable.name,)


def _silent_variable(name: str) -> ContextVar[Any]:
    return ContextVar(name, default=None)


def unpacked(data: bytes, device: str) -> Any:
    """Unpack a probe onto a device, with every tensor inside its closures."""
    return torch.load(io.BytesIO(data), map_location=device, weights_only=False)


def _resources(ray: Any, workers: int | None) -> tuple[int, int]:
    """Return the GPUs of the cluster and how many workers to start; Ray Data needs a CPU beside them to go on."""
    total = ray.cluster_resources()
    gpus, cpus = int(total.get("GPU", 0)), int(total.get("CPU", 0))
    workers = workers or gpus or max(1, cpus // 2)
    if gpus and workers > gpus:
        raise PullbackError(f"workers: expected at most one per GPU, {gpus}, got {workers}.")
    if workers >= cpus:
        raise PullbackError(
            f"workers: {workers} workers need a cluster with more than {workers} CPUs, this one has {cpus}. Start Ray "
            "with more (ray start --num-cpus), or ask for fewer workers."
        )
    return gpus, workers


def _failure(reason: str) -> PullbackError:
    return PullbackError(
        f"engine: a worker failed ({reason}). What is finished is kept; run again to go on, or with engine='local' to "
        "see the whole error."
    )


def _ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
        import ray.cloudpickle
        import ray.data
        import ray.exceptions
    except ImportError:
        raise PullbackError(
            "engine: 'ray' needs Ray Data, which is an extra: pip install 'pullback[ray]'. engine='local' does without."
        ) from None
    return ray
