"""`pullback report`: what `pullback reproduce` measured, as a page and as Markdown."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pullback.cli.common import reported, say
from pullback.errors import counted
from pullback.report.console import console
from pullback.report.progress import ProgressDisplay


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of `pullback reproduce`.")],
    against: Annotated[
        Path | None, typer.Option(help="Another such folder: every number is marked as same or changed.")
    ] = None,
    pictures: Annotated[
        bool, typer.Option("--pictures", help="Also write the charts as SVG files, which report.md then shows.")
    ] = False,
) -> None:
    """Write the report of measured experiments into their folder: report.html, self-contained, and report.md."""
    with ProgressDisplay(console(stderr=True)) as progress, reported(progress, folder, report):
        from pullback.experiments.registry import EXPERIMENTS
        from pullback.report.reproduced import write_report

        written = write_report(folder, against, order=tuple(EXPERIMENTS), pictures=pictures)
    said = ", ".join(f"{count} {word}" for word, count in written.words.items() if count)
    if said:
        say(f"claims: {said}")
    if written.changed is not None:
        say(f"against {against}: {counted(written.changed, 'change')}")
    if written.unfinished:
        say(f"unfinished: {', '.join(written.unfinished)}; the same `pullback reproduce` goes on with them", "yellow")
    if written.remark:
        say(written.remark, "yellow")
    size = written.page.stat().st_size / 1e6
    say(f"written to {folder}/: {written.page.name} ({size:.1f} MB), {written.text.name}", "bold")
    say(f"open {written.page.resolve().as_uri()}", "bold")
