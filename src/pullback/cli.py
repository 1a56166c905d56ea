"""The command line. Nothing heavy is imported before a command runs, so that `--help` is instant."""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer

from pullback import __version__
from pullback.errors import PullbackError
from pullback.report.console import console, diagnosis_summary, models_table
from pullback.report.drawing import Drawing
from pullback.report.progress import ProgressDisplay

Method = Literal["auto", "krylov", "paper", "exact"]
Precision = Literal["float32", "tf32", "bf16"]

BAD_INPUT, INTERRUPTED = 2, 130
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
    images: Annotated[str, typer.Option(help="An image, a folder or a glob.")],
    decoder: Annotated[
        str, typer.Option(help="cls, projection, pool, mean, depth, depth-8x8 (any size), saliency.")
    ] = "cls",
    layer: Annotated[
        list[str] | None,
        typer.Option(
            help="Block index, several times for several; `hooks`: all layers that a dense decoder reads, "
            "side by side.",
            show_default="the last but one",
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use so many images.", show_default="all")] = None,
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
        str | None, typer.Option(help="Crop in pixels, 224 or 224x308.", show_default="the backbone's")
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
        from pullback.workflow import DiagnosisRequest, run_diagnosis

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
        try:
            document = run_diagnosis(request, out, progress)
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
    seed: Annotated[int, typer.Option(help="Of the drawn pictures and every random probe.")] = 0,
) -> None:
    """A small diagnosis from start to end, without any download: pictures, numbers, figures, a page."""
    with Drawing() as drawing, ProgressDisplay(console(stderr=True)) as progress, reported(progress, out):
        progress.stage("loading torch")
        prepare()
        from pullback.demo import NOTE, run_demo

        documents = run_demo(out, progress, seed)
        progress.stage("drawing figures")
        figures = [drawing.draw(out / name) for name in documents]
        page = write_page(out, progress, list(documents), NOTE) if all(figures) else None
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

        table = models_table(rows())
    console().print(table)
    console().print(
        "A folder with config.json and safetensors of one of these types works like its hub id.", style="dim"
    )


@contextmanager
def reported(progress: ProgressDisplay, out: Path | None = None) -> Iterator[None]:
    """One readable line instead of a traceback for everything that the user or the machine can cause."""
    try:
        yield
    except KeyboardInterrupt:
        _fail("interrupted", progress, out, INTERRUPTED)
    except PullbackError as error:
        _fail(f"error: {error}", progress, out, BAD_INPUT)
    except OSError as error:
        _fail(f"error: {error}", progress, out, BAD_INPUT)
    except (RuntimeError, MemoryError) as error:
        from pullback.operators.memory import is_out_of_memory

        if not is_out_of_memory(error):
            raise
        message = (
            "error: out of memory, though one image at a time was tried. Use a smaller --size or --rank, a decoder "
            "with a smaller output (depth-8x8 for depth), or another --device."
        )
        _fail(message, progress, out, BAD_INPUT)


def _fail(message: str, progress: ProgressDisplay, out: Path | None, code: int) -> NoReturn:
    progress.close()
    screen = console(stderr=True)
    screen.print(message, style="red", markup=False, soft_wrap=True)
    if progress.done:
        where = f" before {progress.current}" if progress.current else ""
        screen.print(f"finished{where} and kept in {out}/: {', '.join(progress.done)}", markup=False, soft_wrap=True)
    raise typer.Exit(code)


def prepare() -> None:
    """Settings that must stand before torch and transformers are imported; whatever the user has set is kept.

    Other packages' bars and warnings stay off the screen; their errors reach us as exceptions. OpenMP threads sleep
    while they wait: spinning, as they do by default, made a run four times slower on cores shared with other programs.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for name in ("huggingface_hub", "matplotlib"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"(torch|transformers|huggingface_hub|matplotlib)(\.|$)")


def write_page(out: Path, progress: ProgressDisplay, folders: list[str], note: str) -> Path:
    progress.stage("writing the page")
    from pullback.report.page import write_page as write

    return write(out, folders, note)


def parse_layer(text: str) -> int | str:
    if text == "hooks":
        return text
    try:
        return int(text)
    except ValueError:
        raise PullbackError(f"layer: expected a block index such as 10, or 'hooks', got {text!r}.") from None


def parse_size(text: str | None) -> int | tuple[int, int] | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d+)(?:x(\d+))?", text)
    if match is None:
        raise PullbackError(f"size: expected pixels such as 224, or height x width such as 224x308, got {text!r}.")
    return (int(match[1]), int(match[2])) if match[2] else int(match[1])
