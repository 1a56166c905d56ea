"""`pullback look`: which patches of an image matter, at several layers or to several decoders, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pullback.cli import options
from pullback.cli.common import parse_layer, parse_size, running, say, say_page


def look(
    model: options.Model,
    images: Annotated[list[str], typer.Argument(metavar="IMAGE...", help="Images, folders or globs.")],
    decoder: Annotated[
        list[str] | None,
        typer.Option(help=f"Several times for several. {options.decoder_help()}", show_default="cls"),
    ] = None,
    layer: Annotated[
        list[str] | None,
        typer.Option(
            help="Block index, several times for several; `hooks`: all layers that a dense decoder reads.",
            show_default="three of them; of several decoders two",
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Use the first so many images.")] = 8,
    size: options.Size = None,
    probes: Annotated[int, typer.Option(min=2, help="Random output directions of each map.")] = 32,
    distance: options.Distance = None,
    device: options.Device = "auto",
    seed: options.Seed = 0,
    out: Annotated[Path, typer.Option(help="Folder for a picture of each image and index.html.")] = Path("look"),
) -> None:
    """Show which patches of your images matter: maps of several layers or decoders, side by side."""
    with running(out, look, images) as progress:
        layers, pixels = tuple(parse_layer(text) for text in layer or ()), parse_size(size)
        from pullback.geometry.look import LookRequest, run_look
        from pullback.report.look import draw_look

        request = LookRequest(
            model=model,
            images=tuple(images),
            decoders=tuple(decoder or ()),
            layers=layers,
            limit=limit,
            size=pixels,
            num_probes=probes,
            distance=distance,
            device=device,
            seed=seed,
        )
        document = run_look(request, out, progress)
        progress.stage("drawing")
        drawn = draw_look(out)
    pictures = drawn[:-1]
    shown, skipped = len(pictures), document["skipped"]
    if document["found"] > shown + len(skipped):
        say(f"{shown} of {document['found']} images; --limit takes more", "yellow")
    for image in skipped:
        say(f"skipped {image['file']}: {image['reason']}", "yellow")
    say(f"written to {out}/: {', '.join(pictures)}", "bold")
    say_page(out, drawn)
