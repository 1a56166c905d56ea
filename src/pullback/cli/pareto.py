"""`pullback pareto`: degradation against operations and time, for all methods on the user's model and pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pullback.cli import options
from pullback.cli.common import (
    PRUNE_VIEWS,
    keeping_rows,
    parse_heads,
    parse_size,
    refuse_scenes,
    row_count,
    running,
    say,
    say_written,
    several,
)
from pullback.errors import PullbackError
from pullback.registry import SCORES
from pullback.report.console import console
from pullback.report.drawing import Drawing
from pullback.report.pareto_console import pareto_summary
from pullback.runs.documents import PARETO, ROWS

_SCORES = ", ".join(name for name, entry in SCORES.items() if not entry.needs)


def pareto(
    model: options.Model,
    images: options.Images,
    out: Annotated[Path, typer.Option(help="Folder for rows, summary and figures; a second run adds to it.")],
    decoder: options.Decoder = "cls",
    methods: Annotated[
        str | None,
        typer.Option(
            help="resize, tome, tome-decreasing, pitome, evit, best; several by commas.",
            show_default="all that the model can run",
        ),
    ] = None,
    plan: Annotated[
        list[str] | None,
        typer.Option(
            help="METHOD=FOLDER: a pruned copy of this model, as save_pretrained, `pullback plan` and `pullback tune` "
            "write it, as a point of a method; several by commas, or several times."
        ),
    ] = None,
    heads: Annotated[
        str,
        typer.Option(
            help="What best scores by: importance (the heads that come with the package), one score after every block "
            f"({_SCORES}), or as in `pullback plan` 3=heads/L03,6=norm."
        ),
    ] = "importance",
    sizes: Annotated[
        str | None, typer.Option(help="Of resize: pixels of the shorter side, 210,196.", show_default="a grid")
    ] = None,
    r: Annotated[
        str | None, typer.Option(help="Of ToMe: tokens merged in each block, 4,8.", show_default="a grid")
    ] = None,
    keep: Annotated[
        str | None, typer.Option(help="Of PiToMe: share of the patches kept in each block.", show_default="a grid")
    ] = None,
    evit_keep: Annotated[
        str | None, typer.Option(help="Of EViT: share of the patches kept in three blocks.", show_default="a grid")
    ] = None,
    ratios: Annotated[
        str | None, typer.Option(help="Of best: shares of the patch tokens to remove.", show_default="a grid")
    ] = None,
    stages: Annotated[
        str | None,
        typer.Option(
            help="Of best: blocks after which tokens are removed, '3;6;3,6' for three choices.",
            show_default="each block with a score, and some pairs",
        ),
    ] = None,
    smaller: Annotated[
        int, typer.Option(min=0, help="On so many next smaller pictures best runs as well, after one block.")
    ] = 2,
    budgets: Annotated[
        str, typer.Option(help="Shares of the operations at which methods are compared.")
    ] = "0.8,0.7,0.6,0.5",
    labels: Annotated[
        Path | None,
        typer.Option(
            help="A CSV with the columns file and class_index, for nearest neighbours among the images.",
            show_default="with --neighbours one subfolder per class",
        ),
    ] = None,
    neighbours: Annotated[
        str | None, typer.Option(help="How many neighbours vote, 10,20.", show_default="10,20 with --labels, else none")
    ] = None,
    size: options.Size = None,
    limit: options.Limit = None,
    batch: options.Batch = 16,
    precision: options.ModelPrecision = "float32",
    device: options.Device = "auto",
    seed: options.Seed = 0,
    time: options.Times = "auto",
) -> None:
    """Compare all methods: degradation of the output against operations and time, on your pictures."""
    with Drawing() as drawing, running(out, pareto, [images]) as progress:
        refuse_scenes(model, "pareto", *PRUNE_VIEWS)
        from pullback.pruning.operating_points import Knobs
        from pullback.pruning.pareto import ParetoRequest, run_pareto

        request = ParetoRequest(
            model=model,
            images=images,
            decoder=decoder,
            methods=None if methods is None else several("methods", methods, str),
            heads=tuple(parse_heads(heads)) if "=" in heads else heads,
            plans=_plans(plan or []),
            knobs=Knobs(
                sizes=None if sizes is None else several("sizes", sizes, int),
                r=None if r is None else several("r", r, int),
                keep=None if keep is None else several("keep", keep, float),
                evit_keep=None if evit_keep is None else several("evit_keep", evit_keep, float),
                ratios=None if ratios is None else several("ratios", ratios, float),
                stages=None if stages is None else tuple(several("stages", part, int) for part in stages.split(";")),
                smaller=smaller,
            ),
            budgets=several("budgets", budgets, float),
            labels=labels,
            neighbours=() if neighbours is None else several("neighbours", neighbours, int),
            size=parse_size(size),
            limit=limit,
            batch=batch,
            precision=precision,
            device=device,
            seed=seed,
            time=time,
        )
        with keeping_rows(progress, lambda: row_count(out / ROWS)):
            document = run_pareto(request, out, progress)
        with progress.hidden():
            console().print(pareto_summary(document))
            say("")
        progress.done.append("rows, summary and table")
        progress.stage("drawing figures")
        figures = drawing.draw(out)
    say_written(out, [ROWS, PARETO], figures)


def _plans(given: list[str]) -> tuple[tuple[str, Path], ...]:
    """["a=x,a=y", "b=z"] -> (("a", x), ("a", y), ("b", z))"""
    pairs = [part.strip().partition("=") for text in given for part in text.split(",")]
    for name, _, folder in pairs:
        if not (name and folder):
            raise PullbackError(f"plan: expected METHOD=FOLDER by commas, such as ours=fast, got {','.join(given)!r}.")
    return tuple((name, Path(folder)) for name, _, folder in pairs)
