"""`pullback diagnose`: the spectrum of the Jacobian at one or several layers, with error bars, figures and advice."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from pullback.cli import options
from pullback.cli.common import kept, parse_layer, parse_size, running, say, say_written
from pullback.errors import FileError, PullbackError
from pullback.report.console import console, diagnosis_summary
from pullback.report.drawing import Drawing
from pullback.runs.documents import DIAGNOSIS, IMPORTANCE


def diagnose(
    model: options.Model,
    images: Annotated[
        str,
        typer.Option(
            help="An image, a folder or a glob. For a VGGT every folder at or below that holds images is a scene."
        ),
    ],
    decoder: Annotated[
        str | None, typer.Option(help=options.decoder_help(), show_default="cls, of a VGGT camera")
    ] = None,
    layer: options.Layers = None,
    limit: options.Limit = None,
    rank: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            help="Rank of the metric, several times for several; the first decides the regime.",
            show_default="20",
        ),
    ] = None,
    method: options.Method = "auto",
    device: options.Device = "auto",
    seed: options.Seed = 0,
    size: options.Size = None,
    precision: options.Precision = "float32",
    rtol: Annotated[
        float | None, typer.Option(min=0.0, help="Continue until the relative errors are this small (krylov).")
    ] = None,
    distance: options.Distance = None,
    out: Annotated[Path, typer.Option(help="Folder for diagnosis.json, importance.npz and the figures.")] = Path(
        "diagnosis"
    ),
) -> None:
    """Find out whether a low-rank task metric exists, which tokens carry it, and how sure the numbers are."""
    with Drawing() as drawing, running(out, diagnose, [images]) as progress:
        from pullback.geometry.folder import DiagnosisRequest, run_diagnosis, stopped_in

        request = DiagnosisRequest(
            model=model,
            images=images,
            decoder=decoder,
            layers=tuple(parse_layer(text) for text in layer or ()),
            limit=limit,
            ranks=tuple(rank or (20,)),
            method=method,
            device=device,
            seed=seed,
            size=parse_size(size),
            precision=precision,
            rtol=rtol,
            distance=distance,
        )
        before = stopped_in(out)
        try:
            document = run_diagnosis(request, out, progress, on_layer=progress.layer_done)
        except BaseException as error:
            name, count = found = stopped_in(out)
            if count and (found != before or not isinstance(error, PullbackError)):
                progress.done.append(kept(error, count, "image", f" of {name}"))
            if progress.done and isinstance(error, Exception):
                with suppress(FileError):  # what went wrong first is what matters
                    drawing.draw(out)
            raise
        with progress.hidden():
            screen = console()
            screen.print(diagnosis_summary(document, screen.width))
            say("")
        progress.stage("drawing figures")
        figures = drawing.draw(out)
    say_written(out, [DIAGNOSIS, IMPORTANCE], figures)
