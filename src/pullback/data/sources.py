"""Sources of images: folders, lists, webdataset tars and Hugging Face datasets, read as one stream of items.

An item is a stable key and the place of its bytes. It is small and can be sent to another process, whatever that
process's current folder; nothing is read before ``item.read()``. A damaged archive becomes an item that cannot be
read, so it is recorded like any unreadable image.
"""

from __future__ import annotations

import glob
import itertools
import os
import posixpath
import re
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from pullback.data.images import EXTENSIONS, FoundImages, ImageSource, Unusable, as_paths, search_images
from pullback.errors import ImageError, first_line

HF = "hf://"
LISTED = "a list of paths"
"""The name of a source that was given as a Python list."""
LISTS = (".txt", ".lst", ".list")
_SAVED = ("dataset_dict.json", "state.json")  # what datasets.save_to_disk leaves
_COMPRESSED = re.compile(r"\.(tgz|tar\.\w+)$")
_BRACES = re.compile(r"\{([^{}]*)\}")


class ImageItem(Protocol):
    """One image of a source. ``key`` names it, the same on every machine."""

    @property
    def key(self) -> str: ...

    def read(self) -> bytes:
        """Read the encoded image."""
        ...


@dataclass(frozen=True)
class FileItem:
    """An image file."""

    key: str
    path: str

    def read(self) -> bytes:
        return Path(self.path).read_bytes()


@dataclass(frozen=True)
class TarItem:
    """A member of an uncompressed tar, read from its place in the file."""

    key: str
    path: str
    offset: int
    size: int

    def read(self) -> bytes:
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            data = file.read(self.size)
        if len(data) < self.size:
            raise Unusable(f"the archive ends after {len(data)} of its {self.size} bytes")
        return data


@dataclass(frozen=True)
class DatasetItem:
    """A row of a Hugging Face dataset."""

    key: str
    dataset: str
    split: str | None
    index: int

    def read(self) -> bytes:
        rows, column = _dataset(self.dataset, self.split)
        cell = rows[self.index][column]
        if isinstance(cell, dict):
            cell = cell["bytes"] if cell.get("bytes") is not None else Path(cell["path"]).read_bytes()
        return bytes(cell)


@dataclass(frozen=True)
class BrokenItem:
    """Something that cannot be read, such as the rest of a damaged archive; ``read`` raises the reason."""

    key: str
    reason: str

    def read(self) -> bytes:
        raise Unusable(self.reason)


@dataclass(frozen=True)
class Source:
    """A stream of items. ``name``: as it was asked for; ``count``: None where it takes a full read to know."""

    name: str
    items: Callable[[], Iterator[ImageItem]]
    count: int | None = None

    def __iter__(self) -> Iterator[ImageItem]:
        return self.items()


def open_source(path: ImageSource | Source) -> Source:
    """Open a source by its name. Only names are looked at; images are read later, item by item.

    - an image, a folder (recursive, as `read_images` has it) or a glob; keys are paths relative to it
    - a text file (.txt, .lst, .list) with a path per line, relative to the file's folder; keys are the lines
    - webdataset tars: a .tar, a glob or brace pattern of them, or a folder that holds tars; keys are tar/member
    - ``hf://name:split``, a dataset of the Hugging Face hub or a folder of `save_to_disk`; keys are row numbers
    - a list of images, folders and globs, or of tars; keys are their paths
    """
    if isinstance(path, Source):
        return path
    paths = [os.fspath(part) for part in as_paths(path)]
    if not isinstance(path, str | os.PathLike):
        return _several(paths)
    name = paths[0]
    if name.startswith(HF):
        return _hugging_face(name)
    name = str(Path(name))  # the same with and without a slash at its end
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _folder(name, folder)
    if _COMPRESSED.search(name):
        raise ImageError(
            f"source={name!r}: compressed archives cannot be read from the middle, so they are refused. "
            "Expected plain .tar files: unpack them once with gunzip."
        )
    if name.endswith(".tar"):
        return _tars(name, _expand_tars(name), fixed_part(name))
    if folder.suffix in LISTS and folder.is_file():
        return _text_list(name, folder)
    files = search_images(name)
    root = folder.parent if folder.is_file() else fixed_part(name)
    return _files(name, files, root)


def place_of(name: str) -> str:
    """Return the name of a source as it is from every folder: absolute, without links. Names of the hub stay."""
    if name == LISTED:
        return name
    if not name.startswith(HF):
        return str(Path(name).expanduser().resolve())
    dataset, colon, split = name.removeprefix(HF).rpartition(":")
    folder = Path(dataset if colon else split).expanduser()
    return f"{HF}{folder.resolve()}{colon}{split if colon else ''}" if folder.is_dir() else name


def _several(paths: Sequence[str]) -> Source:
    name = LISTED
    if paths and all(path.endswith(".tar") for path in paths):
        return _tars(name, [tar for path in paths for tar in _expand_tars(path)], None)
    return _files(name, search_images(paths), None)


def _folder(name: str, folder: Path) -> Source:
    if any((folder / file).is_file() for file in _SAVED):
        return _hugging_face(f"{HF}{name}", name)
    tars = sorted(folder.glob("*.tar"))
    try:
        return _files(name, search_images(folder), folder)
    except ImageError:
        if not tars:
            raise
    return _tars(name, tars, folder)


def _files(name: str, found: FoundImages, root: Path | None) -> Source:
    """Files, after the folders that could not be searched: these are recorded as images that cannot be read are."""
    files = list(dict.fromkeys(found.files))

    def items() -> Iterator[ImageItem]:
        yield from (BrokenItem(_key(folder.path, root), folder.reason) for folder in found.unread)
        yield from (FileItem(_key(file, root), str(file.absolute())) for file in files)

    return Source(name, items, len(files) + len(found.unread))


def _text_list(name: str, file: Path) -> Source:
    lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    lines = list(dict.fromkeys(line for line in lines if line and not line.startswith("#")))
    if not lines:
        raise ImageError(f"source={name!r}: expected one path per line, got a file without any.")

    def items() -> Iterator[ImageItem]:
        return (FileItem(line, str(file.parent.absolute() / line)) for line in lines)

    return Source(name, items, len(lines))


def _tars(name: str, tars: Sequence[Path], root: Path | None) -> Source:
    def items() -> Iterator[ImageItem]:
        return itertools.chain.from_iterable(_members(tar, _key(tar, root)) for tar in tars)

    return Source(name, items)


def _members(tar: Path, prefix: str) -> Iterator[ImageItem]:
    try:
        with tarfile.open(tar, "r:") as archive:
            for member in archive:
                if member.isfile() and _is_image(member.name):
                    name = posixpath.normpath(member.name)
                    yield TarItem(f"{prefix}/{name}", str(tar.absolute()), member.offset_data, member.size)
    except (tarfile.TarError, OSError) as error:
        yield BrokenItem(prefix, f"the archive cannot be read any further: {error}")


def _is_image(member: str) -> bool:
    base = member.rsplit("/", 1)[-1]
    return base.lower().endswith(EXTENSIONS) and not base.startswith(".")


def _expand_tars(pattern: str) -> list[Path]:
    """Expand braces as the shell does ({000..127}, {a,b}), then wildcards; refuse names without a file."""
    found: list[Path] = []
    for name in _expand_braces(pattern):
        path = Path(name).expanduser()
        matches = [path] if path.is_file() else [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
        if not matches:
            raise ImageError(f"source={pattern!r}: no such archive: {name}. Check the spelling and the numbers.")
        found += matches
    return list(dict.fromkeys(found))


def _expand_braces(pattern: str) -> list[str]:
    match = _BRACES.search(pattern)
    if match is None:
        return [pattern]
    numbers = re.fullmatch(r"(\d+)\.\.(\d+)", match[1])
    choices = match[1].split(",")
    if numbers is not None:
        first, last = int(numbers[1]), int(numbers[2])
        choices = [str(number).zfill(len(numbers[1])) for number in range(first, last + 1)]
    heads = [pattern[: match.start()] + choice + pattern[match.end() :] for choice in choices]
    return [name for head in heads for name in _expand_braces(head)]


def fixed_part(pattern: str) -> Path:
    """Return the folder before the first wildcard or brace."""
    parts = Path(pattern).expanduser().parts[:-1]
    return Path(*itertools.takewhile(lambda part: not any(sign in part for sign in "*?[{"), parts))


def _key(path: Path, root: Path | None) -> str:
    return (path if root is None else path.relative_to(root)).as_posix()


def _hugging_face(name: str, shown: str | None = None) -> Source:
    dataset, _, split = name.removeprefix(HF).rpartition(":")
    if not dataset:
        dataset, split = split, ""
    if Path(dataset).is_dir():
        dataset = str(Path(dataset).absolute())
    count = len(_dataset(dataset, split or None)[0])

    def items() -> Iterator[ImageItem]:
        return (DatasetItem(str(index), dataset, split or None, index) for index in range(count))

    return Source(shown or name, items, count)


@lru_cache(maxsize=4)
def _dataset(name: str, split: str | None) -> tuple[Any, str]:
    """Open a dataset, once per process; return its rows and the name of the column with the encoded images."""
    try:
        import datasets
    except ImportError:
        raise ImageError(
            f"source='{HF}{name}': needs the package datasets, which is not installed: pip install datasets."
        ) from None
    saved = any((Path(name) / file).is_file() for file in _SAVED)
    try:
        rows = datasets.load_from_disk(name) if saved else datasets.load_dataset(name, split=split)
    except Exception as error:  # the hub client raises network, not-found and validation errors of many classes
        raise ImageError(f"source='{HF}{name}': could not be loaded: {first_line(error)}") from None
    rows = _split_of(rows, name, split)
    images = [column for column, kind in rows.features.items() if isinstance(kind, datasets.Image)]
    if not images:
        raise ImageError(f"source='{HF}{name}': expected a column of images, got {dict(rows.features)}.")
    return rows.cast_column(images[0], datasets.Image(decode=False)).select_columns(images[:1]), images[0]


def _split_of(rows: Any, name: str, split: str | None) -> Any:
    if not isinstance(rows, dict):
        return rows
    splits = list(rows)
    if split is None and len(splits) == 1:
        return rows[splits[0]]
    if split not in rows:
        raise ImageError(
            f"source='{HF}{name}': expected one of the splits {', '.join(splits)}, got {split!r}. "
            f"Write {HF}{name}:{splits[0]}."
        )
    return rows[split]
