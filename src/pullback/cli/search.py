"""`pullback search`: the images of a gallery that look most like a picture to the task."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from pullback.cli import options
from pullback.cli.common import running, say, say_page


def search(
    gallery: Annotated[Path, typer.Argument(metavar="GALLERY", help="The folder of `pullback index`.")],
    image: Annotated[str, typer.Argument(metavar="IMAGE", help="The picture to search for.")],
    k: Annotated[int, typer.Option(min=1, help="How many images.")] = 10,
    method: Annotated[
        Literal["auto", "exact", "candidates", "transport"],
        typer.Option(
            help="exact: compare all; candidates: those that are near in the constant metric; transport: wherever in "
            "the picture things are, for small galleries; auto: exact, or candidates where there are very many."
        ),
    ] = "auto",
    candidates: Annotated[
        int | None, typer.Option(min=1, help="How many are compared exactly.", show_default="enough for k")
    ] = None,
    device: options.Device = "auto",
    out: Annotated[Path, typer.Option(help="Folder for matches.png, matches.json and index.html.")] = Path("search"),
) -> None:
    """Find the images of a gallery that look most like a picture to the task, and show them with their distances."""
    with running(out, search) as progress:
        from pullback.report.matches import draw_matches
        from pullback.retrieval.folder import SearchRequest, run_search

        request = SearchRequest(str(gallery), image, k, method, candidates, device)
        document = run_search(request, out, progress)
        progress.stage("drawing")
        drawn = draw_matches(out)
    say("rank  distance  image")
    for match in document["matches"]:
        say(f"{match['rank']:>4}  {match['distance']:8.4f}  {match['key']}")
    say(document["how"])
    say(f"written to {out}/: matches.json, {drawn[0]}", "bold")
    say_page(out, drawn)
