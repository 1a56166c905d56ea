"""Compute the targets of whole image collections, shard by shard: into a store that survives a crash, or into memory.

A shard is the unit of work, of writing and of loss: a run that dies loses the shards in flight and no others. What is
in it depends on its images alone, so any engine may compute it, twice if need be.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from pullback.data.crops import Crop, item_seed, read_crops
from pullback.data.images import ImageSource, PixelFormat, reason_of
from pullback.data.sources import ImageItem, Source, open_source
from pullback.errors import ImageError, PullbackError
from pullback.geometry.spectrum import Probe
from pullback.operators import JacobianOperator, ProductCount
from pullback.operators.execution import check_precision
from pullback.probes import ProbeMap
from pullback.randnla.modes import choose_method
from pullback.randnla.svd import check_rank
from pullback.targets.recipe import Recipe, targets_of
from pullback.targets.store import StoreWriter, TargetStore, configuration
from pullback.targets.table import Shard, SkippedItem, TargetTable

ENGINES = ("local", "ray")
GROUP = 64
"""Rows whose features are computed together; `targets_of` takes as many of them at a time as memory holds."""
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
    images = open_source(source)
    recipe = Recipe(rank, method, num_probes, rtol, precision, keep_modes)
    job = _checked(probe, recipe, size, crops, seed, batch_size)
    config = configuration(probe, recipe, job.pixels, crops=crops, seed=seed, source=images.name)
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
            writer.write(compute_shard(probe, work, job, on_progress))
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
    images = open_source(source)
    recipe = Recipe(rank, method, num_probes, rtol, precision, keep_modes)
    job = _checked(probe, recipe, size, crops, seed, batch_size)
    shards = [compute_shard(probe, work, job, on_progress) for work in plan(images, job, shard_size=256, limit=limit)]
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
    """The images of one shard, and which rows of each are wanted."""

    number: int
    images: tuple[tuple[ImageItem, tuple[int, ...]], ...]


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
    """Cut the rows that are still to be computed into shards of ``shard_size`` rows (an image's rows stay together).

    ``limit``: the first so many images of the source, readable or not. A key that comes up again is the same image.
    """
    if shard_size < 1:
        raise PullbackError(f"shard_size: expected at least 1 row, got {shard_size}.")
    if limit is not None and limit < 1:
        raise PullbackError(f"limit: expected a positive number of images, or None for all of them, got {limit}.")
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
            first, rows, images = first + 1, 0, []
    if images:
        yield Work(first, tuple(images))


def compute_shard(probe: Probe, work: Work, job: Job, on_progress: Callable[[int], None] | None = None) -> Shard:
    """Read the images of a shard, in threads and ahead of the computing, and compute their targets."""
    begun = time.perf_counter()
    skipped: list[SkippedItem] = []
    parts: list[TargetTable] = []
    method, products = None, ProductCount()
    for rows in _groups(_read_ahead(work, job), skipped):
        features = probe.features(torch.stack([row.pixels for row in rows]), normalized=True)
        seeds = [item_seed(job.seed, row.key, row.number) for row in rows]
        found = targets_of(
            probe, features, **asdict(job.recipe), seeds=seeds, batch_size=job.batch_size, on_progress=on_progress
        )
        columns = zip(*((row.key, row.sha256, row.number, row.crop) for row in rows), strict=True)
        parts.append(TargetTable.of(found, *columns))
        method, products = found.method, found.products
    table = TargetTable.join(parts) if parts else None
    return Shard(work.number, table, tuple(skipped), time.perf_counter() - begun, products, method)


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


def _groups(images: Iterator[list[_Row] | SkippedItem], skipped: list[SkippedItem]) -> Iterator[list[_Row]]:
    """Yield rows by `GROUP`; images that could not be read are added to ``skipped``."""
    rows: list[_Row] = []
    for image in images:
        if isinstance(image, SkippedItem):
            skipped.append(image)
            continue
        rows += image
        while len(rows) >= GROUP:
            yield rows[:GROUP]
            rows = rows[GROUP:]
    if rows:
        yield rows


def _checked(
    probe: ProbeMap,
    recipe: Recipe,
    size: int | tuple[int, int] | None,
    crops: int,
    seed: int,
    batch_size: int | None,
) -> Job:
    """Return the job, or raise an error for what would fail later, before anything is read or written."""
    if crops < 0:
        raise PullbackError(f"crops: expected a number of crops per image, or 0 for the plain image, got {crops}.")
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
