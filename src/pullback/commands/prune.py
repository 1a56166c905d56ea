"""`pullback prune`: what removing tokens costs the output, for every rule side by side, and what it saves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from pullback.commands.common import Precision, parse_size, prepare, refuse_scenes, reported
from pullback.errors import PullbackError
from pullback.report.console import console
from pullback.report.drawing import Drawing
from pullback.report.progress import ProgressDisplay
from pullback.report.prune_console import prune_summary
from pullback.report.prune_files import EXAMPLES, ROWS, SUMMARY

_Item = TypeVar("_Item")


def prune(
    model: Annotated[str, typer.Argument(help="A hub id, a folder, or an embedded name (see `pullback ls`).")],
    images: Annotated[str, typer.Option(help="An image, a folder or a glob.")],
    out: Annotated[Path, typer.Option(help="Folder for rows, summary and figures; a second run adds to it.")],
    decoder: Annotated[
        str, typer.Option(help="cls, projection, pool, mean, depth, depth-8x8 (any size), saliency.")
    ] = "cls",
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
            help="importance (of --head), exact, block-norm, spn, random, tome, strided, evit, norm, cls-similarity. "
            "The others are tested against importance, or the first.",
            show_default="importance, or exact without --head, and those that need no training",
        ),
    ] = None,
    preset: Annotated[
        str, typer.Option(help="best, paper, drop, and with their own score tome, evit, strided; several by commas.")
    ] = "best",
    head: Annotated[
        str | None, typer.Option(help="A head of `pullback train head`; one for each stage, by commas.")
    ] = None,
    spn: Annotated[
        str | None, typer.Option(help="An SPN of `pullback train spn`: the score spn, and the paper's matching.")
    ] = None,
    rank: Annotated[int, typer.Option(min=1, help="Of exact importance and modes.")] = 20,
    distance: Annotated[
        str | None, typer.Option(help="Of exact scores: cosine, log or silog.", show_default="Euclidean")
    ] = None,
    bank: Annotated[
        Path | None, typer.Option(help="Images whose unpruned embeddings classify the pruned ones by k-NN.")
    ] = None,
    labels: Annotated[
        Path | None,
        typer.Option(help="A CSV with the columns file and class_index.", show_default="one subfolder per class"),
    ] = None,
    size: Annotated[
        str | None, typer.Option(help="Crop in pixels, 224 or 224x308.", show_default="the backbone's")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use the first so many images.", show_default="all")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Images at a time.")] = 16,
    precision: Annotated[Precision, typer.Option(help="Arithmetic of the model, pruned or not.")] = "float32",
    device: Annotated[str, typer.Option(help="auto: the GPU where there is one.")] = "auto",
    seed: Annotated[int, typer.Option(help="Of random scores and bootstrap intervals.")] = 0,
    time: Annotated[
        str, typer.Option(help="Batch sizes to time, such as 1,8,64; auto: these on a GPU, 1,8 on a CPU; none.")
    ] = "auto",
) -> None:
    """How much of the output survives when tokens go: degradation per image, tests between rules, operations, time."""
    with Drawing() as drawing, ProgressDisplay(console(stderr=True)) as progress, reported(progress, out):
        progress.stage("loading torch")
        prepare()
        instead = "pullback.pruning.vggt.prune_views(model, score, ratio=..., stages=...)"
        refuse_scenes(model, "prune", instead, "docs/guide/vggt-pruning.md")
        from pullback.commands.prune_rows import PruneRequest, run_comparison

        request = PruneRequest(
            model=model,
            images=images,
            decoder=decoder,
            ratios=_several("ratios", ratios, float),
            stages=None if stages is None else _several("stages", stages, int),
            scores=None if scores is None else _several("scores", scores, str),
            presets=_several("preset", preset, str),
            heads=() if head is None else _several("head", head, Path),
            spns=() if spn is None else _several("spn", spn, Path),
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
        try:
            document = run_comparison(request, out, progress)
        except BaseException:
            kept = _rows(out)
            if kept:
                progress.done.append(f"{kept:,} rows; the same command goes on from there")
            raise
        progress.stage("drawing figures")
        figures = drawing.draw(out)
    screen = console()
    screen.print(prune_summary(document))
    written = ", ".join([ROWS, SUMMARY, EXAMPLES, *figures])
    screen.print(f"\nwritten to {out}/: {written}", style="bold", markup=False, soft_wrap=True)
    if not figures:
        words = "no figures: they need matplotlib, which is an extra: pip install 'pullback[plot]'"
        screen.print(words, style="yellow", markup=False)


def _several(option: str, text: str, read: Callable[[str], _Item]) -> tuple[_Item, ...]:
    """A list with commas, each item once."""
    try:
        items = tuple(dict.fromkeys(read(part.strip()) for part in text.split(",") if part.strip()))
    except ValueError:
        items = ()
    if not items:
        example = {"ratios": "0.1,0.3", "stages": "4,8"}.get(option, "a,b")
        raise PullbackError(f"{option}: expected a list such as {example}, got {text!r}.")
    return items


def _rows(out: Path) -> int:
    path = out / ROWS
    return path.read_bytes().count(b"\n") if path.is_file() else 0
