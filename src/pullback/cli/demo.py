"""`pullback demo`: a small diagnosis from start to end, without any download."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pullback.cli.common import running, say
from pullback.report.console import console, diagnosis_summary
from pullback.report.drawing import Drawing
from pullback.report.wording import NO_FIGURES


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the pictures, the results and index.html.")] = Path("demo-out"),
    seed: Annotated[int, typer.Option(min=0, help="Of the scenes and every random probe.")] = 0,
) -> None:
    """Run a small diagnosis from start to end, without any download: scenes, numbers, figures, a page."""
    with Drawing() as drawing, running(out, demo) as progress:
        from pullback.experiments.demo import NOTE, SCENES_FOLDER, run_demo

        documents = run_demo(out, progress, seed, progress.layer_done)
        with progress.hidden():
            screen = console()
            for document in documents.values():
                screen.print(diagnosis_summary(document, screen.width))
                screen.print()
            say(NOTE, "yellow")
        progress.stage("drawing figures")
        figures = [drawing.draw(out / name, page=False) for name in (SCENES_FOLDER, *documents)]
        page = None
        if all(figures):
            progress.stage("writing the page")
            from pullback.report.page import write_page

            page = write_page(out, list(documents), NOTE, SCENES_FOLDER)
    if page is None:
        say(NO_FIGURES, "yellow")
    where = "" if page is None else f", open {page.resolve().as_uri()}"
    say(f"written to {out}/{where}", "bold")
