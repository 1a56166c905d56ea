"""Compute the targets of whole image collections, shard by shard: into a store that survives a crash, or into memory.

A shard is the unit of writing and of loss. It is full after so many rows or after `SAVE_EVERY` seconds, and what is
there is written before an error or Ctrl-C ends the run: a run that is killed loses less than that, and no other rows.
What is in a row depends on its image alone, so any engine may compute it, twice if need be.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from pullback.checks import callable_or_none, of_kind, whole_number
from pullback.data.crops import Crop, item_seed, read_crops
from pullback.data.images import ImageSource, PixelFormat, reason_of
from pullback.data.sources import ImageItem, Source, open_source, place_of
from pullback.errors import ImageError, PullbackError
from pullback.geometry.spectrum import Probe, checked_batch_size
from pullback.operators import JacobianOperator, ProductCount
from pullback.operators.execution import check_precision
from pullback.probes import ProbeMap
from pullback.randnla.modes import choose_method
from pullback.randnla.svd import check_rank
from pullback.runs.files import SAVE_EVERY
from pullback.targets.recipe import Recipe, Targets, targets_in_batches
from pullback.targets.store import StoreWriter, TargetStore, configuration
from pullback.targets.table import Shard, SkippedItem, TargetTable

ENGINES = ("local", "ray")
GROUP = 64
"""Rows whose features are computed together on a GPU; `targets_in_batches` takes as many of them as memory holds."""
READERS = min(8, os.cpu_count() or 1)
"""Threads that read images."""
_NAMED = 5


def compute_targets(
    probe: ProbeMap,
    source: ImageSource | Source,
    *,
    out: str | os.PathLike[str],
    rank: int = 20,
    method: str = "auto",
    size: int | tuple[int, int] | None = None,
    crops: int = 0,
    limit: int | None = None,
    seed: int = 0,
    keep_modes: bool = False,
    precision: str = "float32",
    num_probes: int = 32,
    rtol: float = 1e-3,
    shard_size: int = 256,
    batch_size: int | None = None,
    engine: str = "local",
    workers: int | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> TargetStore:
    """Compute the targets of every image of ``source`` (see `open_source`) as Parquet shards in the folder ``out``.

    Called again it computes what is missing: after an interruption, with a larger ``limit`` or with new images in the
    source. Another configuration is refused. A row depends on its image, ``seed`` and the settings, not on order,
    batch or engine. ``crops``: so many random crops of each image instead of the plain one. Images that cannot be read
    are recorded (`TargetStore.skipped`). ``engine="ray"``: on all GPUs of a Ray cluster, ``workers`` of them.
    ``on_progress`` is called with the number of rows that were added.
    """
    if engine not in ENGINES:
        raise PullbackError(f"engine: expected one of {', '.join(ENGINES)}, got {engine!r}.")
    of_kind("out", out, (str, os.PathLike), "the folder that the targets are written to")
    _check_counts(probe, limit, on_progress, shard_size)
    images = open_source(source)
    recipe = Recipe(rank, method, num_probes, rtol, precision, keep_modes)
    job = _checked(probe, recipe, size, crops, seed, batch_size)
    config = configuration(probe, recipe, job.pixels, crops=crops, seed=seed, source=place_of(images.name))
    writer = StoreWriter.claim(Path(out), config)
    store = TargetStore.open(out)
    left = plan(
        images,
        job,
        shard_size=shard_size,
        limit=limit,
        first=store.next_number,
        done=store.rows_done(),
        skipped={item.key for item in store.skipped},
    )
    if engine == "ray":
        from pullback.targets.ray import compute_on_ray

        compute_on_ray(probe, left, job, writer, workers=workers, on_progress=on_progress)
    else:
        for work in left:
            for shard in compute_shards(probe, work, job, on_progress, seconds=SAVE_EVERY):
                try:
                    writer.write(shard)
                except KeyboardInterrupt:  # the rows are computed: nothing is lost
                    writer.write(shard)
                    raise
    if len(store) == 0:
        raise _nothing_readable(images, store.skipped)
    return store


def compute_table(
    probe: ProbeMap,
    source: ImageSource | Source,
    *,
    rank: int = 20,
    method: str = "auto",
    size: int | tuple[int, int] | None = None,
    crops: int = 0,
    limit: int | None = None,
    seed: int = 0,
    keep_modes: bool = False,
    precision: str = "float32",
    num_probes: int = 32,
    rtol: float = 1e-3,
    batch_size: int | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> tuple[TargetTable, tuple[SkippedItem, ...]]:
    """Compute the rows of `compute_targets` in memory: nothing is written, and pyarrow is not needed.

    Returns the table and the images that were skipped."""
    _check_counts(probe, limit, on_progress)
    images = open_source(source)
    recipe = Recipe(rank, method, num_probes, rtol, precision, keep_modes)
    job = _checked(probe, recipe, size, crops, seed, batch_size)
    works = plan(images, job, shard_size=256, limit=limit)
    shards = [shard for work in works for shard in compute_shards(probe, work, job, on_progress)]
    skipped = tuple(item for shard in shards for item in shard.skipped)
    tables = [shard.table for shard in shards if shard.table is not None]
    if not tables:
        raise _nothing_readable(images, skipped)
    return TargetTable.join(tables), skipped


@dataclass(frozen=True)
class Job:
    """What every worker needs besides the probe and its share of the images."""

    recipe: Recipe
    pixels: PixelFormat
    crops: int = 0
    seed: int = 0
    batch_size: int | None = None

    @property
    def crop_numbers(self) -> tuple[int, ...]:
        """The rows of each image: 0 is the plain image, 1, 2, ... are random crops."""
        return tuple(range(1, self.crops + 1)) if self.crops else (0,)


@dataclass(frozen=True)
class Work:
    """Images, and which rows of each are wanted. Their shards have the numbers from ``number`` on, one for each row at
    most: every shard has the number of its first row."""

    number: int
    images: tuple[tuple[ImageItem, tuple[int, ...]], ...]

    @property
    def numbers(self) -> range:
        """The numbers that shards of this work may have."""
        return range(self.number, self.number + sum(len(wanted) for _, wanted in self.images))


def plan(
    source: Source,
    job: Job,
    *,
    shard_size: int,
    limit: int | None = None,
    first: int = 0,
    done: Set[tuple[str, int]] = frozenset(),
    skipped: Set[str] = frozenset(),
) -> Iterator[Work]:
    """Cut the rows that are still to be computed into works of ``shard_size`` rows (an image's rows stay together).

    ``limit``: the first so many images of the source, readable or not. A key that comes up again is the same image.
    """
    seen: set[str] = set(skipped)
    images: list[tuple[ImageItem, tuple[int, ...]]] = []
    rows = 0
    for item in islice(source, limit):
        if item.key in seen:
            continue
        seen.add(item.key)
        wanted = tuple(number for number in job.crop_numbers if (item.key, number) not in done)
        if not wanted:
            continue
        images.append((item, wanted))
        rows += len(wanted)
        if rows >= shard_size:
            yield Work(first, tuple(images))
            first, rows, images = first + rows, 0, []
    if images:
        yield Work(first, tuple(images))


def compute_shards(
    probe: Probe,
    work: Work,
    job: Job,
    on_progress: Callable[[int], None] | None = None,
    *,
    seconds: float = math.inf,
) -> Iterator[Shard]:
    """Read images, in threads and ahead of the computing, and compute their targets: one shard, or one for every
    ``seconds`` of work. An error or Ctrl-C comes after a shard with what was finished before it."""
    done, size = _Finished(work), job.batch_size
    # one by one on a CPU, so that no number depends on where a run before this one was stopped
    group = size or (1 if probe.device.type == "cpu" else GROUP)
    try:
        for rows in _groups(_read_ahead(work, job), group, done.skipped):
            features = probe.features(torch.stack([row.pixels for row in rows]), normalized=True)
            seeds = [item_seed(job.seed, row.key, row.number) for row in rows]
            first = 0
            for found in targets_in_batches(probe, features, job.recipe, seeds=seeds, batch_size=size, seconds=seconds):
                took = done.add(found, rows[first : first + len(found)])
                first += len(found)
                if took > seconds:
                    size = max(1, int(len(found) * seconds / took))
                if on_progress is not None:
                    on_progress(len(found))
                if done.late(seconds):
                    yield done.shard()
    except GeneratorExit:
        raise
    except BaseException:
        if done.rows:
            yield done.shard()
        raise
    if done.rows or done.skipped:
        yield done.shard()


class _Finished:
    """Rows that are computed and not yet in a shard, and the images that were skipped beside them."""

    def __init__(self, work: Work) -> None:
        self.rows: list[TargetTable] = []
        self.skipped: list[SkippedItem] = []
        self._numbers: dict[tuple[str, int], int] = {}
        rows = ((item.key, number) for item, wanted in work.images for number in wanted)
        self._numbers.update(zip(rows, work.numbers, strict=True))
        self._images = {item.key: self._numbers[item.key, wanted[0]] for item, wanted in work.images}
        self._number: int | None = None  # of the first row
        self._method: str | None = None
        self._products = ProductCount()
        self._begun = self._last = time.perf_counter()
        self._longest = 0.0

    def add(self, found: Targets, rows: Sequence[_Row]) -> float:
        """Add the targets of these rows; return the seconds since the ones before."""
        if self._number is None:
            self._number = self._numbers[rows[0].key, rows[0].number]
        columns = zip(*((row.key, row.sha256, row.number, row.crop) for row in rows), strict=True)
        self.rows.append(TargetTable.of(found, *columns))
        self._method, self._products = found.method, found.products
        now = time.perf_counter()
        took, self._last = now - self._last, now
        self._longest = max(self._longest, took)
        return took

    def late(self, seconds: float) -> bool:
        """Whether another batch like the longest would take the work at stake beyond so many seconds."""
        return time.perf_counter() - self._begun + self._longest > seconds

    def shard(self) -> Shard:
        """Return the shard of what there is, and begin the next one."""
        now = time.perf_counter()
        table = TargetTable.join(self.rows) if self.rows else None
        number = self._images[self.skipped[0].key] if self._number is None else self._number
        shard = Shard(number, table, tuple(self.skipped), now - self._begun, self._products, self._method)
        self._number = None
        self.rows.clear()
        self.skipped.clear()
        self._begun = self._last = now
        return shard


@dataclass(frozen=True, eq=False)
class _Row:
    key: str
    sha256: str
    number: int
    crop: Crop | None
    pixels: Tensor  # [3, H, W]


def _read_ahead(work: Work, job: Job) -> Iterator[list[_Row] | SkippedItem]:
    """Yield the images in order; the next ones are read meanwhile, and about two groups are held in memory."""
    waiting: deque[Future[list[_Row] | SkippedItem]] = deque()
    held = max(READERS, 2 * GROUP // len(job.crop_numbers))
    with ThreadPoolExecutor(READERS) as pool:
        for item, numbers in work.images:
            waiting.append(pool.submit(_read, item, numbers, job))
            if len(waiting) >= held:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _read(item: ImageItem, numbers: Sequence[int], job: Job) -> list[_Row] | SkippedItem:
    try:
        data = item.read()
        cut = read_crops(data, job.pixels, seed=job.seed, key=item.key, indices=numbers)
    except Exception as error:  # on a damaged file Pillow's decoders raise nearly anything
        return SkippedItem(item.key, reason_of(error))
    sha256 = hashlib.sha256(data).hexdigest()
    return [_Row(item.key, sha256, n, crop, pixels) for n, (crop, pixels) in zip(numbers, cut, strict=True)]


def _groups(images: Iterator[list[_Row] | SkippedItem], size: int, skipped: list[SkippedItem]) -> Iterator[list[_Row]]:
    """Yield rows by ``size``; images that could not be read are added to ``skipped``."""
    rows: list[_Row] = []
    for image in images:
        if isinstance(image, SkippedItem):
            skipped.append(image)
            continue
        rows += image
        while len(rows) >= size:
            yield rows[:size]
            rows = rows[size:]
    if rows:
        yield rows


def _check_counts(
    probe: ProbeMap, limit: int | None, on_progress: Callable[[int], None] | None, shard_size: int = 1
) -> None:
    callable_or_none("on_progress", on_progress)
    of_kind("probe", probe, ProbeMap, "a probe map, such as pb.load_probe(model, decoder, layer)")
    whole_number("shard_size", shard_size, expected="at least 1 row")
    if limit is not None:
        whole_number("limit", limit, expected="a positive number of images, or None for all of them")


def _checked(
    probe: ProbeMap,
    recipe: Recipe,
    size: int | tuple[int, int] | None,
    crops: int,
    seed: int,
    batch_size: int | None,
) -> Job:
    """Return the job, or raise an error for what would fail later, before anything is read or written."""
    whole_number("crops", crops, least=0, expected="a number of crops per image, or 0 for the plain image")
    whole_number("seed", seed, least=None)
    checked_batch_size(batch_size)
    choose_method(recipe.method, 1, 1, recipe.rank)  # refuses unknown names before anything is read
    check_precision(recipe.precision)
    pixels = probe.pixel_format(size)
    blank = probe.features(torch.zeros(1, 3, *pixels.size), normalized=True)
    check_rank(JacobianOperator(probe, blank), recipe.rank)
    return Job(recipe, pixels, crops, seed, batch_size)


def _nothing_readable(source: Source, skipped: tuple[SkippedItem, ...]) -> ImageError:
    named = "; ".join(f"{item.key}: {item.reason}" for item in skipped[:_NAMED])
    return ImageError(
        f"source={source.name!r}: expected at least one readable image, but none of the {len(skipped)} could be used: "
        f"{named}. Give another source."
    )
