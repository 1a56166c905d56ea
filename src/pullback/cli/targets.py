"""`pullback targets`: the geometry of many images, into a store that training reads."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from pullback.cli import options
from pullback.cli.common import keeping_rows, load_any_probe, one_layer, parse_size, refuse_scenes, running, say
from pullback.errors import PullbackError, counted
from pullback.runs.documents import layer_name

if TYPE_CHECKING:
    from pullback.data.sources import Source
    from pullback.targets.store import TargetStore

_NAMED = 10


def targets(
    model: options.Model,
    images: options.Source,
    out: Annotated[Path, typer.Option(help="Folder of the store; a second run goes on where the first one stopped.")],
    decoder: options.Decoder = "cls",
    layer: options.Layer = None,
    rank: options.Rank = 20,
    crops: Annotated[
        int, typer.Option(min=0, help="So many random crops and flips of each image instead of the plain one.")
    ] = 0,
    size: options.Size = None,
    limit: options.Limit = None,
    method: options.Method = "auto",
    precision: options.Precision = "float32",
    device: options.Device = "auto",
    seed: options.Seed = 0,
    shard_size: Annotated[
        int, typer.Option(min=1, help="Rows per file; a file is also closed after 30 s of work.")
    ] = 256,
    keep_modes: Annotated[bool, typer.Option("--keep-modes", help="Store the modes too, 2 r N D bytes a row.")] = False,
    distance: options.Distance = None,
    engine: Annotated[
        Literal["local", "ray"], typer.Option(help="ray: on all GPUs of a Ray cluster; it needs the extra `ray`.")
    ] = "local",
    workers: Annotated[
        int | None, typer.Option(min=1, help="Workers of the ray engine.", show_default="one per GPU")
    ] = None,
) -> None:
    """Compute singular values, token importance and block norms of many images, as Parquet for training heads."""
    begun = time.perf_counter()
    with running(out, targets) as progress:
        refuse_scenes(model, "targets", "pb.targets_of(probe, probe.features(scenes))")
        import torch

        from pullback.data.sources import open_source
        from pullback.geometry.duration import announce
        from pullback.targets.compute import compute_targets

        pixels, at = parse_size(size), one_layer(layer)
        progress.stage(f"listing {images}")
        source = open_source(images)
        before = stored_rows(out)
        progress.stage(f"loading {model}")
        place = "cpu" if engine == "ray" else device  # on a cluster the workers have the GPUs
        probe = load_any_probe(model, decoder, at, place, distance)
        name, expected = layer_name(probe.layer), _expected(source, limit, crops, before)
        if engine == "local" and expected:
            noise = torch.randn(1, 3, *probe.backbone.pixel_format(pixels).size)
            announce(
                progress, {name: (probe, expected)}, noise, rank, method, precision=precision, with_effective_rank=False
            )
        progress.work(name, expected, "images")
        with keeping_rows(progress, lambda: stored_rows(out)):
            store = compute_targets(
                probe,
                source,
                out=out,
                rank=rank,
                method=method,
                size=pixels,
                crops=crops,
                limit=limit,
                seed=seed,
                keep_modes=keep_modes,
                precision=precision,
                shard_size=shard_size,
                engine=engine,
                workers=workers,
                on_progress=progress.advance,
            )
    _print_summary(store, before, time.perf_counter() - begun)


def stored_rows(out: Path) -> int:
    """Count the rows that are in the store already; 0 where there is none, or none that can be opened."""
    from pullback.targets.store import TargetStore

    try:
        return len(TargetStore.open(out))
    except PullbackError:
        return 0


def _expected(source: Source, limit: int | None, crops: int, before: int) -> int | None:
    """Count the rows still to come, where the source knows its length."""
    if source.count is None:
        return None
    return max(0, min(source.count, limit or source.count) * max(1, crops) - before)


def _print_summary(store: TargetStore, before: int, seconds: float) -> None:
    """Print the size of the store, the speed of this run, and what was skipped."""
    rows, skipped = len(store), store.skipped
    new, size = rows - before, sum(path.stat().st_size for path in store.shards)
    say(f"{counted(rows, 'row')} in {counted(len(store.shards), 'shard')}, {new:,} of them new", "bold")
    if new:
        speed = f"{seconds:.1f} s, {new / seconds:.3g} images/s in this run"
        say(f"{speed}; {counted(store.products.total, 'product')} per image ({store.method})")
    say(f"{size / max(1, rows):,.0f} bytes per row, {size / 1e6:,.1f} MB in all")
    if skipped:
        say(f"skipped {counted(len(skipped), 'image')}:", "yellow")
        for item in skipped[:_NAMED]:
            say(f"  {item.key}: {item.reason}")
        if len(skipped) > _NAMED:
            say(f"  and {len(skipped) - _NAMED} more, all named in the store")
    say(f"written to {store.folder}/", "bold")
