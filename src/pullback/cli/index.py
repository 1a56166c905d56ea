"""`pullback index add`, `info`, `remove` and `recall`: a gallery of images to search by what a task sees."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from pullback.cli import options
from pullback.cli.common import keeping_rows, running, say
from pullback.errors import PullbackError, counted
from pullback.runs.documents import GALLERY

index = typer.Typer(
    name="index", help="Keep a gallery of images that is searched by what a task sees.", no_args_is_help=True
)

Folder = Annotated[Path, typer.Argument(metavar="GALLERY", help="The folder of a gallery.")]
_NAMED = 10


@index.command()
def add(
    gallery: Folder,
    images: Annotated[list[str], typer.Argument(metavar="IMAGES...", help=f"{options.SOURCES} Or several images.")],
    drm: Annotated[
        str | None,
        typer.Option(help="The folder of `pullback train drm`, for a new gallery.", show_default="the gallery's own"),
    ] = None,
    device: options.Device = "auto",
) -> None:
    """Add images to a gallery, which is made on first use. Images that are there are not computed again; the same
    command goes on after an interruption."""
    with running(gallery, add) as progress:
        from pullback.data.sources import open_source
        from pullback.retrieval.gallery import Gallery

        source = open_source(images[0] if len(images) == 1 else images)
        if not (gallery / GALLERY).is_file():
            if drm is None:
                raise PullbackError(
                    f"drm: there is no gallery in {gallery} yet, expected the folder of a metric to make one for. "
                    "`pullback train drm` trains one."
                )
            progress.stage("loading the metric and its model")
            own = Gallery.create(gallery, drm, device=device)
        else:
            progress.stage(f"opening {gallery}")
            own = Gallery.open(gallery, drm=drm, device=device)
        with keeping_rows(progress, lambda: len(own), "image"):
            added = own.add(source, progress=progress)
    known = f", {counted(added.known, 'image')} known already" if added.known else ""
    say(f"added {counted(added.added, 'image')}{known}; {counted(len(own), 'image')} in {gallery}/", "bold")
    if added.skipped:
        say(f"skipped {counted(len(added.skipped), 'image')}:", "yellow")
        for key, reason in added.skipped[:_NAMED]:
            say(f"  {key}: {reason}")
        if len(added.skipped) > _NAMED:
            say(f"  and {len(added.skipped) - _NAMED} more")


@index.command()
def info(gallery: Folder) -> None:
    """Say what a gallery holds, and what it was made for."""
    with running(None, info):
        from pullback.retrieval.gallery import Gallery

        found = Gallery.open(gallery, device="cpu").info()
    width = max(map(len, found))
    for name, value in found.items():
        say(f"{name.replace('_', ' '):<{width}}  {_words(value)}")


@index.command()
def remove(
    gallery: Folder, keys: Annotated[list[str], typer.Argument(metavar="KEY...", help="As a search shows them.")]
) -> None:
    """Take images out of a gallery. Their files stay."""
    with running(gallery, remove):
        from pullback.retrieval.gallery import Gallery

        own = Gallery.open(gallery, device="cpu")
        removed = own.remove(keys)
    say(f"removed {counted(removed, 'image')}; {counted(len(own), 'image')} left in {gallery}/", "bold")


@index.command()
def verify(gallery: Folder) -> None:
    """Read everything that is stored, and compare it with its checksums."""
    with running(None, verify) as progress:
        from pullback.retrieval.gallery import Gallery

        progress.stage("reading")
        count = Gallery.open(gallery, device="cpu").verify()
    say(f"{counted(count, 'image')} in {gallery}/, all as they were written", "bold")


@index.command()
def repair(gallery: Folder) -> None:
    """Take out the images whose records are damaged; adding them again makes them anew."""
    with running(gallery, repair):
        from pullback.retrieval.gallery import Gallery

        removed = Gallery.repair(gallery)
    say(f"took out {counted(len(removed), 'image')}", "bold")
    for key in removed[:_NAMED]:
        say(f"  {key}")
    if len(removed) > _NAMED:
        say(f"  and {len(removed) - _NAMED} more")


@index.command()
def recall(
    gallery: Folder,
    queries: Annotated[int, typer.Option(min=2, help="So many images of the gallery are searched for.")] = 100,
    k: Annotated[int, typer.Option(min=1, help="Neighbours of each.")] = 10,
    candidates: Annotated[
        int | None, typer.Option(min=1, help="Compared exactly.", show_default="as a search takes them")
    ] = None,
    device: options.Device = "auto",
) -> None:
    """Measure how many of the true neighbours a search by candidates finds, and how much faster it is."""
    with running(None, recall) as progress:
        from pullback.retrieval.gallery import Gallery

        own = Gallery.open(gallery, device=device)
        progress.stage("searching exactly and by candidates")
        found = own.recall(k, queries=queries, candidates=candidates)
    error = f" ± {found.recall_se:.2g}" if found.recall_se else ""
    say(f"recall@{found.k}: {found.recall:.4g}{error} over {counted(found.queries, 'image')} searched for", "bold")
    exact, quick = found.exact_seconds, found.candidate_seconds
    say(f"{1000 * quick:.3g} ms a query with {counted(found.candidates, 'candidate')}, {1000 * exact:.3g} ms exactly")


def _words(value: object) -> str:
    """Write a value of `Gallery.info`."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    return ", ".join(map(_words, value))
