"""A data set cut into shards: who computes what, and the computing of one shard.

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
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from pullback.data.crops import Crop, item_seed, read_crops
from pullback.data.images import PixelFormat, reason_of
from pullback.data.sources import ImageItem, Source
from pullback.errors import PullbackError
from pullback.geometry.spectrum import Probe
from pullback.operators import ProductCount
from pullback.targets.recipe import Recipe, targets_of
from pullback.targets.table import TargetTable

GROUP = 64
"""Rows whose features are computed together; `targets_of` takes as many of them at a time as memory holds."""
READERS = min(8, os.cpu_count() or 1)


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
        """Rows of each image: 0 is the plain image, 1, 2, ... are random crops."""
        return tuple(range(1, self.crops + 1)) if self.crops else (0,)


@dataclass(frozen=True)
class Work:
    """The images of one shard, and which rows of each are wanted."""

    number: int
    images: tuple[tuple[ImageItem, tuple[int, ...]], ...]


@dataclass(frozen=True)
class SkippedItem:
    """An image that could not be used, and why."""

    key: str
    reason: str


@dataclass(frozen=True)
class Shard:
    """What came out of one `Work`. No ``table`` when none of its images could be read."""

    number: int
    table: TargetTable | None
    skipped: tuple[SkippedItem, ...]
    seconds: float
    products: ProductCount = field(default_factory=ProductCount)  # per row
    method: str | None = None

    def __len__(self) -> int:
        return 0 if self.table is None else len(self.table)


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
    """The rows that are still to be computed, in shards of ``shard_size`` rows (an image's rows stay together).

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
        features = probe.features(torch.stack([row.pixels for row in rows]))
        recipe = job.recipe
        found = targets_of(
            probe,
            features,
            recipe.rank,
            recipe.method,
            seeds=[item_seed(job.seed, row.key, row.number) for row in rows],
            keep_modes=recipe.keep_modes,
            precision=recipe.precision,
            num_probes=recipe.num_probes,
            rtol=recipe.rtol,
            batch_size=job.batch_size,
            on_progress=on_progress,
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


def _read(item: ImageItem, numbers: Sequence[int], job: Job) -> list[_Row] | SkippedItem:
    try:
        data = item.read()
        cut = read_crops(data, job.pixels, seed=job.seed, key=item.key, indices=numbers)
    except Exception as error:  # on a damaged file Pillow's decoders raise nearly anything
        return SkippedItem(item.key, reason_of(error))
    sha256 = hashlib.sha256(data).hexdigest()
    return [_Row(item.key, sha256, n, crop, pixels) for n, (crop, pixels) in zip(numbers, cut, strict=True)]


def _read_ahead(work: Work, job: Job) -> Iterator[list[_Row] | SkippedItem]:
    """Images in order, the next ones being read while the caller computes; about two groups are held in memory."""
    waiting: deque[Future[list[_Row] | SkippedItem]] = deque()
    held = max(READERS, 2 * GROUP // len(job.crop_numbers))
    with ThreadPoolExecutor(READERS) as pool:
        for item, numbers in work.images:
            waiting.append(pool.submit(_read, item, numbers, job))
            if len(waiting) >= held:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _groups(images: Iterator[list[_Row] | SkippedItem], skipped: list[SkippedItem]) -> Iterator[list[_Row]]:
    """Rows by `GROUP`; what could not be read is put aside."""
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
