"""`pullback targets`: the geometry of many images, into a store that training reads."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from pullback.cli.common import (
    Method,
    Precision,
    load_any_probe,
    parse_layer,
    parse_size,
    prepare,
    refuse_scenes,
    reported,
)
from pullback.report.console import console
from pullback.report.progress import ProgressDisplay
from pullback.runs.documents import layer_name

if TYPE_CHECKING:
    from pullback.data.sources import Source
    from pullback.targets.store import TargetStore

_NAMED = 10


def targets(
    model: Annotated[str, typer.Argument(help="A hub id, a folder, or an embedded name (see `pullback ls`).")],
    images: Annotated[
        str,
        typer.Option(
            help="A folder, a glob, a text file of paths, webdataset tars (shards/{000..127}.tar), or a Hugging Face "
            "dataset (hf://name:split)."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder of the store; a second run goes on where the first one stopped.")],
    decoder: Annotated[
        str, typer.Option(help="cls, projection, pool, mean, depth, depth-8x8 (any size), saliency.")
    ] = "cls",
    layer: Annotated[
        str | None,
        typer.Option(
            help="Block index; `hooks`: all layers that a dense decoder reads, side by side.",
            show_default="the last but one",
        ),
    ] = None,
    rank: Annotated[int, typer.Option(min=1, help="Modes per image, and the rank of the importance.")] = 20,
    crops: Annotated[
        int, typer.Option(min=0, help="So many random crops and flips of each image instead of the plain one.")
    ] = 0,
    size: Annotated[
        str | None, typer.Option(help="Crop in pixels, 224 or 224x308.", show_default="the backbone's")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use the first so many images.", show_default="all")] = None,
    method: Annotated[
        Method, typer.Option(help="auto: the cheaper of exact and krylov; paper: its Algorithm 2 literally.")
    ] = "auto",
    precision: Annotated[Precision, typer.Option(help="Arithmetic of the products.")] = "float32",
    device: Annotated[str, typer.Option(help="auto: the GPU where there is one.")] = "auto",
    seed: Annotated[int, typer.Option(help="Of every crop and random probe; the same seed gives the same rows.")] = 0,
    shard_size: Annotated[int, typer.Option(min=1, help="Rows per file: what an interruption can lose.")] = 256,
    keep_modes: Annotated[bool, typer.Option("--keep-modes", help="Store the modes too, 2 r N D bytes a row.")] = False,
    distance: Annotated[
        str | None, typer.Option(help="Task distance on the output: cosine, log or silog.", show_default="Euclidean")
    ] = None,
    engine: Annotated[
        Literal["local", "ray"], typer.Option(help="ray: on all GPUs of a Ray cluster (pip install 'pullback[ray]').")
    ] = "local",
    workers: Annotated[
        int | None, typer.Option(min=1, help="Workers of the ray engine.", show_default="one per GPU")
    ] = None,
) -> None:
    """Singular values, token importance and block norms of many images, as Parquet: what heads are trained on."""
    begun = time.perf_counter()
    with ProgressDisplay(console(stderr=True)) as progress, reported(progress, out):
        progress.stage("loading torch")
        prepare()
        refuse_scenes(model, "targets", "pullback.targets.recipe.targets_of(probe, probe.features(scenes))")
        from pullback.data.sources import open_source
        from pullback.targets.compute import compute_targets

        progress.stage(f"loading {model}")
        place = "cpu" if engine == "ray" else device  # on a cluster the workers have the GPUs
        probe = load_any_probe(model, decoder, None if layer is None else parse_layer(layer), place, distance)
        progress.stage(f"listing {images}")
        source = open_source(images)
        before = _rows(out)
        try:
            store = compute_targets(
                probe,
                source,
                out=out,
                rank=rank,
                method=method,
                size=parse_size(size),
                crops=crops,
                limit=limit,
                seed=seed,
                keep_modes=keep_modes,
                precision=precision,
                shard_size=shard_size,
                engine=engine,
                workers=workers,
                on_progress=_watch(progress, layer_name(probe.layer), _expected(source, limit, crops, before)),
            )
        except BaseException:
            kept = _rows(out)
            if kept:
                progress.done.append(f"{kept:,} rows; the same command goes on from there")
            progress.current = None
            raise
    _print_summary(store, before, time.perf_counter() - begun)


def _rows(out: Path) -> int:
    """Rows that are in the store already; 0 where there is none, and whatever is wrong with it is said later."""
    from pullback.errors import PullbackError
    from pullback.targets.store import TargetStore

    try:
        return len(TargetStore.open(out))
    except PullbackError:
        return 0


def _expected(source: Source, limit: int | None, crops: int, before: int) -> int | None:
    """Rows still to come, where the source knows its length."""
    if source.count is None:
        return None
    return max(0, min(source.count, limit or source.count) * max(1, crops) - before)


def _watch(progress: ProgressDisplay, name: str, expected: int | None) -> Callable[[int], None]:
    """A bar where the number of rows is known, a growing count where it is not."""
    done = 0

    def count(rows: int) -> None:
        nonlocal done
        done += rows
        progress.stage(f"targets at {name}: {done:,} rows")

    if expected is None:
        progress.stage(f"targets at {name}")
        return count
    progress.work(name, expected, "images")
    return progress.advance


def _print_summary(store: TargetStore, before: int, seconds: float) -> None:
    screen, skipped = console(), store.skipped
    rows = len(store)
    new, size = rows - before, sum(path.stat().st_size for path in store.shards)
    products = store.products
    screen.print(f"{rows:,} rows in {len(store.shards)} shards, {new:,} of them new", style="bold", markup=False)
    if new:
        speed = f"{seconds:.1f} s, {new / seconds:.3g} images/s in this run"
        screen.print(f"{speed}; {products.total:,} products per image ({store.method})", markup=False)
    screen.print(f"{size / max(1, rows):,.0f} bytes per row, {size / 1e6:,.1f} MB in all", markup=False)
    if skipped:
        screen.print(f"skipped {len(skipped)} image{'s' * (len(skipped) != 1)}:", style="yellow", markup=False)
        for item in skipped[:_NAMED]:
            screen.print(f"  {item.key}: {item.reason}", markup=False, soft_wrap=True)
        if len(skipped) > _NAMED:
            screen.print(f"  and {len(skipped) - _NAMED} more, all named in the store", markup=False)
    screen.print(f"written to {store.folder}/", style="bold", markup=False, soft_wrap=True)
