"""Targets of whole image collections: into a store that survives a crash, or into memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pullback.data.images import ImageSource
from pullback.data.sources import Source, open_source
from pullback.errors import ImageError, PullbackError
from pullback.operators import JacobianOperator
from pullback.operators.execution import check_precision
from pullback.probes import ProbeMap
from pullback.randnla.modes import choose_method
from pullback.randnla.svd import check_rank
from pullback.targets.recipe import Recipe
from pullback.targets.shards import Job, Shard, SkippedItem, compute_shard, plan
from pullback.targets.store import StoreWriter, TargetStore, configuration
from pullback.targets.table import TargetTable

ENGINES = ("local", "ray")
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
    """Targets of every image of ``source`` (see `open_source`) as Parquet shards in the folder ``out``.

    Called again it computes what is missing: after an interruption, with a larger ``limit`` or with new images in the
    source. Another configuration is refused. A row depends on its image, ``seed`` and the settings, not on order,
    batch or engine. ``crops``: so many random crops of each image instead of the plain one. Images that cannot be read
    are recorded (`TargetStore.skipped`). ``engine="ray"``: on all GPUs of a Ray cluster, ``workers`` of them.
    ``on_progress`` hears of so many more rows.
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
    batch_size: int | None = None,
    on_progress: Callable[[int], None] | None = None,
    **recipe: Any,
) -> tuple[TargetTable, tuple[SkippedItem, ...]]:
    """The rows of `compute_targets` and the images it would skip, in memory: nothing is written, pyarrow not needed."""
    images = open_source(source)
    job = _checked(probe, Recipe(rank, method, **recipe), size, crops, seed, batch_size)
    shards: list[Shard] = []
    for work in plan(images, job, shard_size=256, limit=limit):
        shards.append(compute_shard(probe, work, job, on_progress))
    skipped = tuple(item for shard in shards for item in shard.skipped)
    tables = [shard.table for shard in shards if shard.table is not None]
    if not tables:
        raise _nothing_readable(images, skipped)
    return TargetTable.join(tables), skipped


def _checked(
    probe: ProbeMap,
    recipe: Recipe,
    size: int | tuple[int, int] | None,
    crops: int,
    seed: int,
    batch_size: int | None,
) -> Job:
    """Refuse what would fail later, before anything is read or written."""
    if crops < 0:
        raise PullbackError(f"crops: expected a number of crops per image, or 0 for the plain image, got {crops}.")
    choose_method(recipe.method, 1, 1, recipe.rank)  # refuses unknown names before anything is read
    check_precision(recipe.precision)
    pixels = probe.pixel_format(size)
    blank = probe.features(torch.zeros(1, 3, *pixels.size))
    check_rank(JacobianOperator(probe, blank), recipe.rank)
    return Job(recipe, pixels, crops, seed, batch_size)


def _nothing_readable(source: Source, skipped: tuple[SkippedItem, ...]) -> ImageError:
    named = "; ".join(f"{item.key}: {item.reason}" for item in skipped[:_NAMED])
    return ImageError(
        f"source={source.name!r}: expected at least one readable image, but none of the {len(skipped)} could be used: "
        f"{named}. Give another source."
    )
