"""What the commands share: messages instead of tracebacks, settings before torch is imported, readers of options."""

from __future__ import annotations

import errno
import logging
import os
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar, get_type_hints

import typer
from typer.models import OptionInfo

from pullback.errors import HEAD, FileError, PullbackError, counted
from pullback.report.console import console
from pullback.report.progress import ProgressDisplay
from pullback.report.wording import NO_FIGURES
from pullback.runs.documents import PAGE
from pullback.runs.files import check_folder
from pullback.runs.folder import check_kind

if TYPE_CHECKING:
    from pullback.probes import ProbeMap

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130
"""Exit codes: the machine's fault (a full disk, a damaged file, too little memory), the command's, and Ctrl-C."""
_OF_THE_COMMAND = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG)
_KINDS = dict.fromkeys(("head", "heads", "spn", "drm", "bottleneck", "tune"), "train")
_KINDS |= dict.fromkeys(("add", "info", "remove", "verify", "repair", "recall"), "index")
_OTHER_NAMES = {
    "path": ("images",),
    "source": ("images",),
    "query": ("image",),
    "folder": ("out", "gallery"),
    "out": ("gallery",),
}
"""What commands call the images, and the folder of a run or a gallery, by what functions call them. Where a command
reads others too, it says so by `errors.naming`."""
_LISTS = {
    "ratios": "0.1,0.3",
    "stages": "4,8",
    "sizes": "210,196",
    "r": "4,8",
    "keep": "0.95,0.9",
    "evit_keep": "0.7,0.5",
    "budgets": "0.8,0.6",
    "neighbours": "10,20",
    "methods": "tome,best",
}
"""What lists look like, in messages."""
_Item = TypeVar("_Item")
PRUNE_VIEWS = ("pb.prune_views(model, score, ratio=..., stages=...)", "docs/guide/vggt-pruning.md")
"""What to use for a VGGT in place of the commands about pruning, and the page about it."""


@contextmanager
def running(
    out: Path | None = None, command: Callable[..., None] | None = None, images: Sequence[str] = ()
) -> Iterator[ProgressDisplay]:
    """Surround a command: show its progress, prepare to import torch, and turn errors into messages.

    ``out``: the folder in which finished parts are kept if something fails; one that cannot be written, holds the
    results of another command, or lies among ``images``, which the command draws from, is refused at once.
    ``command``: the function, whose options messages name.
    """
    with ProgressDisplay(console(stderr=True)) as progress, reported(progress, out, command):
        if out is not None:
            check_folder(out)
            _check_outside(out, images)
        if out is not None and command is not None:
            check_kind(out, _KINDS.get(command.__name__, command.__name__))
        progress.stage("loading torch")
        prepare()
        yield progress


@contextmanager
def reported(
    progress: ProgressDisplay, out: Path | None = None, command: Callable[..., None] | None = None
) -> Iterator[None]:
    """Print one readable line instead of a traceback for everything that the user or the machine can cause."""
    try:
        yield
    except KeyboardInterrupt:
        _fail("interrupted", progress, out, INTERRUPTED)
    except FileError as error:
        _fail(f"error: {in_options(str(error), command)}", progress, out, FAILED)
    except PullbackError as error:
        _fail(f"error: {in_options(str(error), command)}", progress, out, BAD_INPUT)
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
        _fail(f"error: {reason}", progress, out, BAD_INPUT if error.errno in _OF_THE_COMMAND else FAILED)
    except (RuntimeError, MemoryError) as error:
        from pullback.operators.execution import is_out_of_memory

        if not is_out_of_memory(error):
            raise
        message = (
            "error: out of memory, though one sample at a time was tried. Use a smaller --size or --rank, a decoder "
            "with a smaller output (depth-8x8 for depth), or another --device."
        )
        _fail(message, progress, out, FAILED)


def _check_outside(out: Path, images: Sequence[str]) -> None:
    """Refuse a folder for figures in which the next run would find them and take them for images."""
    for source in images:
        folder = Path(source).expanduser()
        if folder.is_dir() and out.expanduser().resolve().is_relative_to(folder.resolve()):
            raise PullbackError(
                f"out: {out} lies in {source}, which is searched for images: the figures would be among them the next "
                "time. Choose a folder elsewhere."
            )


def in_options(message: str, command: Callable[..., None] | None) -> str:
    """Write the arguments that a message begins with as the command's options: "held_out: …" as "--held-out: …". A
    name that is no option of it stays."""
    head = HEAD.match(message)
    if head is None or command is None:
        return message
    hints = get_type_hints(command, include_extras=True)
    names = [_named(name, hints) for name in head[0].split(", ")]
    if not all(name in hints for name in names):
        return message
    typed = (f"--{name.replace('_', '-')}" if _is_option(hints[name]) else name for name in names)
    return ", ".join(typed) + message[head.end() :]


def _named(name: str, hints: Collection[str]) -> str:
    return next((own for own in (name, *_OTHER_NAMES.get(name, ())) if own in hints), name)


def _is_option(hint: object) -> bool:
    return any(isinstance(part, OptionInfo) for part in getattr(hint, "__metadata__", ()))


@contextmanager
def keeping_rows(progress: ProgressDisplay, count: Callable[[], int], unit: str = "row") -> Iterator[None]:
    """Surround work that adds rows to a folder: an error that ends it also says how many are kept there.

    ``count`` returns how many there are. What was there before counts where the same command goes on from it."""
    before = count()
    try:
        yield
    except BaseException as error:
        if (rows := count()) > (before if isinstance(error, PullbackError) else 0):
            progress.done.append(kept(error, rows, unit))
        progress.current = None
        raise


def kept(error: BaseException, count: int, unit: str, of: str = "") -> str:
    """Write what is kept of a run that ends with this error, such as "3 images of L04", and that the same command goes
    on from there: it does, unless the error comes again with the same command."""
    goes_on = isinstance(error, (KeyboardInterrupt, OSError, MemoryError))
    return counted(count, unit) + of + ("; the same command goes on from there" if goes_on else "")


def _fail(message: str, progress: ProgressDisplay, out: Path | None, code: int) -> NoReturn:
    """Print the message and what is kept of the finished parts, and leave."""
    progress.close()
    say(message, "red", stderr=True)
    if progress.done:
        where = f" before {progress.current}" if progress.current else ""
        say(f"finished{where} and kept in {out}/: {', '.join(progress.done)}", stderr=True)
    raise typer.Exit(code)


def prepare() -> None:
    """Make settings that must stand before torch and transformers are imported; what the user has set is kept.

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


def say(text: str, style: str = "", *, stderr: bool = False) -> None:
    """Print a text as it is: no markup is read in it, and no line is broken."""
    console(stderr=stderr).print(text, style=style, markup=False, soft_wrap=True)


def say_written(out: Path, files: Sequence[str], figures: Sequence[str]) -> None:
    """Print what a run has left in its folder, and why there are no figures if there are none."""
    say(f"written to {out}/: {', '.join([*files, *figures])}", "bold")
    say_page(out, figures)


def say_page(out: Path, figures: Sequence[str]) -> None:
    """Print where the page of a run is, or why there are no figures if there are none."""
    if PAGE in figures:
        say(f"open {(out / PAGE).resolve().as_uri()}", "bold")
    if not figures:
        say(NO_FIGURES, "yellow")


def parse_layer(text: str) -> int | str:
    """Read a block index or the name of a place, such as "hooks"."""
    if text in ("hooks", "latent", "latent-ambient"):
        return text
    try:
        return int(text)
    except ValueError:
        raise PullbackError(
            f"layer: expected a block index such as 10, or 'hooks', got {text!r}. Decoders with a bottleneck also have "
            "'latent' and 'latent-ambient'."
        ) from None


def one_layer(given: Sequence[str] | None) -> str | None:
    """Return the layer of a command that takes one, None where it was left out; refuse several."""
    if given and len(given) > 1:
        raise PullbackError(
            f"layer: expected one, got {', '.join(given)}. Run the command for each of them, with an --out of its own."
        )
    return given[0] if given else None


def parse_size(text: str | None) -> int | tuple[int, int] | None:
    """Read pixels such as 224, or height x width such as 224x308."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+)(?:x(\d+))?", text)
    if match is None:
        raise PullbackError(f"size: expected pixels such as 224, or height x width such as 224x308, got {text!r}.")
    return (int(match[1]), int(match[2])) if match[2] else int(match[1])


def several(option: str, text: str, read: Callable[[str], _Item]) -> tuple[_Item, ...]:
    """Read a list with commas. Of stages and heads the order matters, and a stage that comes twice is refused later;
    of anything else the same item a second time means nothing."""
    try:
        items = tuple(read(part.strip()) for part in text.split(",") if part.strip())
    except ValueError:
        items = ()
    items = items if option in ("stages", "head", "spn") else tuple(dict.fromkeys(items))
    if not items:
        raise PullbackError(f"{option}: expected a list such as {_LISTS.get(option, 'a,b')}, got {text!r}.")
    return items


def parse_heads(text: str) -> list[tuple[int, str]]:
    """3=a,6=b -> [(3, "a"), (6, "b")]"""
    try:
        pairs = [(int(layer), name) for layer, name in (part.split("=", 1) for part in text.split(","))]
    except ValueError:
        raise PullbackError(
            f"heads: expected BLOCK=HEAD by commas, such as 3=heads/L03, or importance, got {text!r}."
        ) from None
    blocks = [block for block, _ in pairs]
    if len(set(blocks)) < len(blocks):
        raise PullbackError(f"heads: expected each block once, got {text!r}.")
    return pairs


def row_count(path: Path) -> int:
    """Count the rows of a file that may not be there yet."""
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def parse_held_out(text: str) -> str | float:
    """Read a share such as 0.1, or return the name of images."""
    try:
        return float(text)
    except ValueError:
        return text


def refuse_scenes(model: str, command: str, instead: str, page: str = "docs/guide/vggt.md") -> None:
    """Refuse a VGGT before it is loaded: its samples are scenes of several views, the command reads single images."""
    from pullback.backbones import entry_of

    if entry_of(model).views:
        raise PullbackError(
            f"model: `pullback {command}` expects a model of single images, got {model!r}, a VGGT, whose samples are "
            f"scenes of several views. In Python, use {instead} ({page})."
        )


def load_any_probe(model: str, decoder: str, layer: str | None, device: str, distance: str | None = None) -> ProbeMap:
    """Load a probe at what ``layer`` says, see `parse_layer`."""
    from pullback.probes import load_probe

    at = None if layer is None else parse_layer(layer)
    return load_probe(model, decoder, at, device=device, distance=distance)
