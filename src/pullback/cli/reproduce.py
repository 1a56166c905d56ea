"""`pullback reproduce`: the tables and figures of the paper, measured here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from pullback.cli import options
from pullback.cli.common import keeping_rows, row_count, running, say
from pullback.errors import PullbackError
from pullback.report.console import console
from pullback.report.experiments_console import plan_table, verdicts_table
from pullback.runs.documents import ROWS, TIMES

_ROLES = "Several times, or several by commas."


def reproduce(
    experiment: Annotated[str, typer.Argument(help="One of `pullback ls experiments`, several by commas, or all.")],
    out: Annotated[Path, typer.Option(help="Folder for the rows; the same command goes on with what it holds.")],
    scale: Annotated[
        str,
        typer.Option(
            help="tiny: the embedded models, offline, in minutes; small: with --model and --images what you have; "
            "paper: the paper's models and counts."
        ),
    ] = "tiny",
    model: Annotated[
        list[str] | None,
        typer.Option(help=f"ROLE=NAME: dinov2=facebook/dinov2-small, saliency=FOLDER, ... {_ROLES}"),
    ] = None,
    images: Annotated[
        list[str] | None, typer.Option(help=f"ROLE=FOLDER: photos=DIR, photos-train=DIR, rooms=DIR, ... {_ROLES}")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the list, and print what would be measured and how long it takes.")
    ] = False,
    device: options.Device = "auto",
    seed: options.Seed = 0,
) -> None:
    """Measure tables and figures of the paper on your models, each number beside the paper's."""
    folders = [text.partition("=")[2] for part in images or () for text in part.split(",")]
    with running(None if dry_run else out, reproduce, folders) as progress:
        from pullback.backbones.loading import resolve_device
        from pullback.experiments.estimate import estimates
        from pullback.experiments.registry import chosen
        from pullback.experiments.run import run_experiments
        from pullback.experiments.scales import scale_of

        wanted = chosen(experiment)
        asked = scale_of(scale, dict(_pairs("model", model)), dict(_pairs("images", images)), seed)
        if dry_run:
            with progress.hidden():
                console().print(plan_table(estimates(wanted, asked, resolve_device(device))))
            return
        files = [out / own.name / name for own in wanted for name in (ROWS, TIMES)]
        with keeping_rows(progress, lambda: sum(map(row_count, files)), "number"):
            documents = run_experiments(wanted, asked, out, resolve_device(device), progress)
        with progress.hidden():
            console().print(verdicts_table(documents))
            say(f"rows in {out}/; a page of them: pullback report {out}")


def _pairs(argument: str, given: Sequence[str] | None) -> list[tuple[str, str]]:
    """["a=x,b=y", "c=z"] -> [("a", "x"), ("b", "y"), ("c", "z")]"""
    pairs = [part.strip().partition("=") for text in given or () for part in text.split(",")]
    for role, _, name in pairs:
        if not (role and name):
            raise PullbackError(f"{argument}: expected ROLE=NAME, such as dinov2=DIR, got {','.join(given or ())!r}.")
    return [(role, name) for role, _, name in pairs]
