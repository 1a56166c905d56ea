"""Files that a reader never meets half-written, and folders that are checked before the long work starts."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from pullback.checks import of_kind
from pullback.errors import FileError, PullbackError

if TYPE_CHECKING:
    import numpy as np
    from torch import nn

SAVE_EVERY = 30.0
"""Seconds of work that a run may lose when it is killed: whatever takes longer is saved on the way."""
CONFIG, WEIGHTS = "config.json", "model.safetensors"
# A list of plain numbers that `json.dumps(indent=...)` spread over lines. No string holds a raw newline: none matches.
_NUMBERS = re.compile(r"\[\n\s+(-?[\d.eE+-]+(?:,\n\s+-?[\d.eE+-]+)*)\n\s+\]")
_PROCESS = re.compile(r"\.(\d+)-[^.]*\.tmp$")
_FIXES = {
    errno.ENOSPC: "Free some space",
    errno.EDQUOT: "Free some space",
    errno.EFBIG: "Raise the limit on the size of files (ulimit -f)",
}


def check_folder(out: str | os.PathLike[str]) -> Path:
    """Raise an error if this folder cannot be written, or not be made; nothing is made yet."""
    of_kind("out", out, (str, os.PathLike), "a folder")
    path = Path(out)
    there = next((place for place in (path, *path.parents) if os.path.lexists(place)), Path())
    if not there.is_dir():
        raise PullbackError(f"out: cannot make the folder {path} ({there} is not a folder). Choose another folder.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise PullbackError(f"out: the folder {there} is not writable. Choose another folder.")
    return path


def make_folder(out: str | os.PathLike[str]) -> Path:
    """Create the folder, or raise an error that names it and says why it cannot be used."""
    path = check_folder(out)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PullbackError(f"out: cannot make the folder {path} ({error.strerror}). Choose another folder.") from None
    return path


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a failure to write, such as a full disk, into an error that names ``path``."""
    try:
        yield
    except FileError:
        raise
    except Exception as error:
        # safetensors has an error of its own for a full disk, and is not worth importing for that
        if not isinstance(error, OSError) and type(error).__name__ != "SafetensorError":
            raise
        reason = getattr(error, "strerror", None) or error
        told = re.search(r"os error (\d+)", str(error))
        number = getattr(error, "errno", None) or (int(told[1]) if told else 0)
        fix = _FIXES.get(number, "Choose another folder")
        raise FileError(f"{path}: cannot be written ({reason}). {fix}; what was finished before is kept.") from error


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yield a temporary file beside ``path`` to fill, then rename it over ``path``; after an error, delete it."""
    with writing(path):
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=_unfinished(path), suffix=".tmp")
        os.close(handle)
        temporary = Path(name)
        try:
            yield temporary
            temporary.chmod(0o666 & ~_umask())  # mkstemp makes private files
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


@contextmanager
def replaced_folder(path: Path, *, new: bool = False) -> Iterator[Path]:
    """Yield a temporary folder beside ``path`` to fill, then put it in the place of ``path``; after an error, delete
    it. ``new``: raise an error if there is anything in ``path`` by then."""
    with writing(path):
        temporary = Path(tempfile.mkdtemp(dir=make_folder(path.parent), prefix=_unfinished(path), suffix=".tmp"))
        try:
            yield temporary
            temporary.chmod(0o777 & ~_umask())
            if not new:
                shutil.rmtree(path, ignore_errors=True)
            temporary.replace(path)
        except BaseException as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if isinstance(error, FileError):
                error.args = (str(error).replace(str(temporary), str(path)),)
            raise


def write_atomic(
    path: Path, fill: Callable[[IO[bytes]], object], *, durable: bool = False, check: Callable[[], None] | None = None
) -> None:
    """Fill a temporary file beside ``path``, then rename it over ``path``: the file is there whole or not at all.

    ``durable`` also waits for the disk, so that the file survives a power cut. ``check`` runs just before the renaming
    and may raise to prevent it.
    """
    with replaced(path) as temporary:
        with open(temporary, "wb") as file:
            fill(file)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        if check is not None:
            check()
    if durable:
        sync_folder(path.parent)


def remove_unfinished(folder: Path) -> None:
    """Delete the temporary files and folders that killed runs left behind, but not those that another process of this
    machine is still filling."""
    for leftover in folder.glob(".*.tmp"):
        process = _PROCESS.search(leftover.name)
        if process and int(process[1]) != os.getpid() and _runs(int(process[1])):
            continue
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def _unfinished(path: Path) -> str:
    """Return how the name of a temporary file for ``path`` begins: with the process that fills it."""
    return f".{path.name}.{os.getpid()}-"


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        return True
    return True


@contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Wait until no other process is at work on ``path``, a file or folder, and keep others waiting meanwhile.

    The end of a process lets go, however it ends; what says so is a file beside ``path``, which is removed in the end.
    """
    import fcntl  # no such module on Windows

    beside = path.with_name(f".{path.name}.lock")
    while True:
        with writing(beside):
            handle = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            if not _is_still(beside, handle):  # who held it has removed it since: whoever comes now makes a new one
                continue
            try:
                yield
            finally:
                beside.unlink(missing_ok=True)
            return
        finally:
            os.close(handle)


def _is_still(path: Path, handle: int) -> bool:
    """Whether an open file still has this name."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(handle))
    except FileNotFoundError:
        return False


def write_bytes(path: Path, content: bytes) -> None:
    write_atomic(path, lambda file: file.write(content))


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, document: Mapping[str, Any], *, durable: bool = False) -> None:
    """Write strict JSON, with lists of numbers on one line."""
    text = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False)
    text = _NUMBERS.sub(lambda match: "[" + re.sub(r",\n\s+", ", ", match[1]) + "]", text)
    write_atomic(path, lambda file: file.write(f"{text}\n".encode()), durable=durable)


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray], *, compressed: bool = True) -> None:
    import numpy as np

    packed = io.BytesIO()  # an archive that cannot be written to its end complains once more when it is forgotten
    save = np.savez_compressed if compressed else np.savez
    save(packed, **arrays)  # type: ignore[arg-type]
    write_bytes(path, packed.getvalue())


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a file that `write_arrays` wrote, or raise an error that names it."""
    import zipfile

    import numpy as np

    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError, EOFError, AttributeError, zipfile.BadZipFile) as error:
        raise FileError(f"{path}: cannot be read ({error}). Delete it, and run again to have it made anew.") from None


def write_network(folder: str | os.PathLike[str], network: nn.Module, config: Mapping[str, Any]) -> Path:
    """Write config.json and model.safetensors, the weights in their own dtype; return the folder.

    A network that was read from this very folder may still map its old file, which the renaming leaves alone.
    """
    from safetensors.torch import save_file

    path = make_folder(folder)
    tensors = {name: value.detach().cpu().contiguous() for name, value in network.state_dict().items()}
    with replaced(path / WEIGHTS) as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})
    write_text(path / CONFIG, json.dumps(config, indent=1) + "\n")
    return path


def read_json(path: Path, argument: str = "folder") -> dict[str, Any]:
    """Return the JSON object in a file, or raise an error that blames ``argument`` and says what is wrong."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PullbackError(f"{argument}: there is no {path}. Choose another folder.") from None
    except (OSError, ValueError) as error:  # also UnicodeDecodeError and JSONDecodeError
        raise FileError(f"{argument}: {path} cannot be read as JSON ({error}). Choose another folder.") from None
    if not isinstance(document, dict):
        raise FileError(f"{argument}: {path} holds {type(document).__name__}, expected a JSON object.")
    return document


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def sync_folder(folder: Path) -> None:
    """Wait until the names of new and renamed files are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
