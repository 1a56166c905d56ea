"""The command line. Nothing heavy is imported before a command runs, so that `--help` is instant."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pullback import __version__
from pullback.commands.common import Method, Precision, parse_layer, parse_size, prepare, reported
from pullback.commands.plan import plan
from pullback.commands.prune import prune
from pullback.commands.targets import targets
from pullback.commands.train import train
from pullback.report.console import console, diagnosis_summary, models_table
from pullback.report.drawing import Drawing
from pullback.report.progress import ProgressDisplay

NO_FIGURES = "no figures: they need matplotlib, which is an extra: pip install 'pullback[plot]'"

app = typer.Typer(
    name="pullback",
    help="The task-induced geometry of vision-transformer features.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """The entry point of the `pullback` script."""
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pullback {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


@app.command()
def diagnose(
    model: Annotated[str, typer.Argument(help="A hub id, a folder, or an embedded name (see `pullback ls`).")],
    images: Annotated[
        str,
        typer.Option(
            help="An image, a folder or a glob. For a VGGT every folder at or below that holds images is a scene."
        ),
    ],
    decoder: Annotated[
        str | None,
        typer.Option(
            help="cls, projection, pool, mean, depth, depth-8x8 (any size), saliency. Of a VGGT camera, camera-0, "
            "points, depth, depth-8x8.",
            show_default="cls, of a VGGT camera",
        ),
    ] = None,
    layer: Annotated[
        list[str] | None,
        typer.Option(
            help="Block index, several times for several; `hooks`: all layers that a dense decoder reads, "
            "side by side.",
            show_default="the last but one",
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use so many images, or scenes.", show_default="all")] = None,
    rank: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            help="Rank of the metric, several times for several; the first decides the regime.",
            show_default="20",
        ),
    ] = None,
    method: Annotated[
        Method, typer.Option(help="auto: the cheaper of exact and krylov; paper: its Algorithms 1 and 2 literally.")
    ] = "auto",
    device: Annotated[str, typer.Option(help="auto: the GPU where there is one.")] = "auto",
    seed: Annotated[int, typer.Option(help="Of every random probe; the same seed gives the same numbers.")] = 0,
    size: Annotated[
        str | None,
        typer.Option(
            help="Crop in pixels, 224 or 224x308. Of a VGGT the width of the views, 518.", show_default="the backbone's"
        ),
    ] = None,
    precision: Annotated[Precision, typer.Option(help="Arithmetic of the products.")] = "float32",
    rtol: Annotated[
        float | None, typer.Option(min=0.0, help="Continue until the relative errors are this small (krylov).")
    ] = None,
    distance: Annotated[
        str | None, typer.Option(help="Task distance on the output: cosine, log or silog.", show_default="Euclidean")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for diagnosis.json, importance.npz and the figures.")] = Path(
        "diagnosis"
    ),
) -> None:
    """Does a low-rank task metric exist here, which tokens carry it, and how sure are we?"""
    with Drawing() as drawing, ProgressDisplay(console(stderr=True)) as progress, reported(progress, out):
        progress.stage("loading torch")
        prepare()
        from pullback.backbones.vggt import is_vggt
        from pullback.commands.scene_diagnosis import run_scene_diagnosis
        from pullback.workflow import DiagnosisRequest, run_diagnosis

        of_scenes = is_vggt(model)
        request = DiagnosisRequest(
            model=model,
            images=images,
            decoder=decoder or ("camera" if of_scenes else "cls"),
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
        try:
            document = (run_scene_diagnosis if of_scenes else run_diagnosis)(request, out, progress)
        except Exception:
            if progress.done:
                drawing.draw(out)
            raise
        progress.stage("drawing figures")
        figures = drawing.draw(out)
    screen = console()
    screen.print(diagnosis_summary(document, screen.width))
    written = ", ".join(["diagnosis.json", "importance.npz", *figures])
    screen.print(f"\nwritten to {out}/: {written}", style="bold", markup=False, soft_wrap=True)
    if not figures:
        screen.print(NO_FIGURES, style="yellow", markup=False)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the pictures, the results and index.html.")] = Path("demo-out"),
    seed: Annotated[int, typer.Option(min=0, help="Of the scenes and every random probe.")] = 0,
) -> None:
    """A small diagnosis from start to end, without any download: scenes, numbers, figures, a page."""
    with Drawing() as drawing, ProgressDisplay(console(stderr=True)) as progress, reported(progress, out):
        progress.stage("loading torch")
        prepare()
        from pullback.demo import NOTE, SCENES_FOLDER, run_demo

        documents = run_demo(out, progress, seed)
        progress.stage("drawing figures")
        figures = [drawing.draw(out / name) for name in (SCENES_FOLDER, *documents)]
        page = write_page(out, progress, list(documents), NOTE, SCENES_FOLDER) if all(figures) else None
    screen = console()
    for document in documents.values():
        screen.print(diagnosis_summary(document, screen.width))
        screen.print()
    screen.print(NOTE, style="yellow", markup=False)
    if page is None:
        screen.print(NO_FIGURES, style="yellow", markup=False)
    where = "" if page is None else f", open {page.resolve().as_uri()}"
    screen.print(f"written to {out}/{where}", style="bold", markup=False, soft_wrap=True)


@app.command(name="ls")
def list_models() -> None:
    """Models that can be loaded, and the decoders that fit them."""
    with ProgressDisplay(console(stderr=True)) as progress, reported(progress):
        progress.stage("loading torch")
        prepare()
        from pullback.backbones import list_models as rows
        from pullback.commands.scene_diagnosis import MODELS_ROW

        table = models_table([*rows(), MODELS_ROW])
    console().print(table)
    console().print(
        "`tiny-scenes` and `tiny-views` (a vggt) come with the package. A folder with config.json and safetensors of "
        "one of these types works like its hub id. Samples of vggt are scenes of several views, which only "
        "`pullback diagnose` and Python take (docs/guide/vggt.md).",
        style="dim",
    )


def write_page(out: Path, progress: ProgressDisplay, folders: list[str], note: str, scenes: str) -> Path:
    progress.stage("writing the page")
    from pullback.report.page import write_page as write

    return write(out, folders, note, scenes)


app.command()(plan)
app.command()(prune)
app.command()(targets)
app.add_typer(train)
