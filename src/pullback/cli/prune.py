"""`pullback prune`: what removing tokens costs the output, for every rule side by side, and what it saves."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pullback.cli import options
from pullback.cli.common import (
    PRUNE_VIEWS,
    keeping_rows,
    parse_size,
    refuse_scenes,
    row_count,
    running,
    say,
    say_written,
    several,
)
from pullback.registry import PRESETS, SCORES
from pullback.report.console import console
from pullback.report.drawing import Drawing
from pullback.report.prune_console import prune_summary
from pullback.runs.documents import EXAMPLES, ROWS, SUMMARY

_SCORES = ", ".join(
    f"{name} (of --{entry.needs})" if entry.needs in ("head", "spn") else name for name, entry in SCORES.items()
)
_PRESETS = ", ".join(name for name, entry in PRESETS.items() if not entry.score)
_LITERATURE = ", ".join(name for name, entry in PRESETS.items() if entry.score)


def prune(
    model: options.Model,
    images: options.Images,
    out: Annotated[Path, typer.Option(help="Folder for rows, summary and figures; a second run adds to it.")],
    decoder: options.Decoder = "cls",
    ratios: Annotated[str, typer.Option(help="Shares of the patch tokens to remove.")] = "0.1,0.2,0.3,0.5",
    stages: Annotated[
        str | None,
        typer.Option(
            help="Blocks after which tokens are removed, 4 or 4,8; each takes an equal part of the ratio.",
            show_default="a third of the depth",
        ),
    ] = None,
    scores: Annotated[
        str | None,
        typer.Option(
            help=f"{_SCORES}; of plugins, see `pullback ls`. The others are tested against importance, or the first.",
            show_default="importance, or exact where there are no heads, and those that need no training",
        ),
    ] = None,
    preset: Annotated[
        str, typer.Option(help=f"{_PRESETS}, and with their own score {_LITERATURE}; several by commas.")
    ] = "best",
    head: Annotated[
        str | None,
        typer.Option(
            help="A head of `pullback train head`; one for each stage, by commas.",
            show_default="those that come with the package for this model, decoder and stages",
        ),
    ] = None,
    spn: Annotated[
        str | None, typer.Option(help="An SPN of `pullback train spn`: the score spn, and the paper's matching.")
    ] = None,
    rank: options.Rank = 20,
    distance: options.Distance = None,
    bank: Annotated[
        Path | None, typer.Option(help="Images whose unpruned embeddings classify the pruned ones by k-NN.")
    ] = None,
    labels: Annotated[
        Path | None,
        typer.Option(help="A CSV with the columns file and class_index.", show_default="one subfolder per class"),
    ] = None,
    size: options.Size = None,
    limit: options.Limit = None,
    batch: options.Batch = 16,
    precision: options.ModelPrecision = "float32",
    device: options.Device = "auto",
    seed: options.Seed = 0,
    time: options.Times = "auto",
) -> None:
    """Compare pruning rules: degradation of the output per image, tests between rules, operations, time."""
    with Drawing() as drawing, running(out, prune, [images]) as progress:
        refuse_scenes(model, "prune", *PRUNE_VIEWS)
        from pullback.pruning.compare import PruneRequest, run_comparison

        request = PruneRequest(
            model=model,
            images=images,
            decoder=decoder,
            ratios=several("ratios", ratios, float),
            stages=None if stages is None else several("stages", stages, int),
            scores=None if scores is None else several("scores", scores, str),
            presets=several("preset", preset, str),
            heads=() if head is None else several("head", head, Path),
            spns=() if spn is None else several("spn", spn, Path),
            rank=rank,
            distance=distance,
            bank=bank,
            labels=labels,
            size=parse_size(size),
            limit=limit,
            batch=batch,
            precision=precision,
            device=device,
            seed=seed,
            time=time,
        )
        with keeping_rows(progress, lambda: row_count(out / ROWS)):
            document = run_comparison(request, out, progress)
        with progress.hidden():
            console().print(prune_summary(document))
            say("")
        progress.done.append("rows, summary and table")
        progress.stage("drawing figures")
        figures = drawing.draw(out)
    say_written(out, [ROWS, SUMMARY, EXAMPLES], figures)
