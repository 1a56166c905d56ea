"""The files of a gallery, which a writer may be killed over at any moment while others read them.

    tokens-00000.f16     the large part of each item, and beside it in
    rest-00000.f16       the small one: records of one length, as many in a shard as the gallery says
    items.jsonl          the log: which items the records are of, with a checksum of their bytes; which were removed
    .lock                held by the process that writes, and let go by the system when it is killed

The log decides. A writer first writes the records, waits for the disk, then adds one line to the log, and waits again:
records that no line names do not exist, and the next writer writes over them. A reader reads the log once and maps
what it names, which never changes, so that what it sees is the gallery of one moment.

Items are numbered in the order of adding, and item i lies in shard i // capacity. A removed item keeps its place.
"""

from __future__ import annotations

import os
import socket
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pullback.errors import FileError, PullbackError, counted, naming
from pullback.runs.files import sync_folder, writing
from pullback.runs.rows import Rows

LOG, LOCK = "items.jsonl", ".lock"
PARTS = ("tokens", "rest")
SHARD_BYTES = 2**28
_WORD = 2  # bytes of a float16


@dataclass
class Log:
    """What the log says: all items that were ever added, in order, and which of them are gone."""

    keys: list[str] = field(default_factory=list)
    sha256: list[str] = field(default_factory=list)
    places: list[str | None] = field(default_factory=list)
    removed: set[int] = field(default_factory=set)
    lines: list[dict[str, Any]] = field(default_factory=list)  # of adding, without the columns above
    by_key: dict[str, int] = field(default_factory=dict)  # living items alone, as is the next
    by_content: dict[str, int] = field(default_factory=dict)
    mark: tuple[int, int] | None = None  # of the file when it was read, see `Storage.mark`

    def __len__(self) -> int:
        """The number of items that were ever added."""
        return len(self.keys)

    @property
    def living(self) -> int:
        """The number of items that are there."""
        return len(self.keys) - len(self.removed)

    def take(self, line: Mapping[str, Any]) -> None:
        """Take note of one line; one that does not follow from those before it raises an error."""
        if "remove" in line:
            for row in line["remove"]:
                del self.by_key[self.keys[row]], self.by_content[self.sha256[row]]
                self.removed.add(row)
            return
        columns = line["keys"], line["sha256"], line["places"]
        if line["first"] != len(self) or len({len(column) for column in columns}) != 1:
            raise ValueError(f"it begins at item {line['first']}, and there are {len(self)}")
        for key, sha256, place in zip(*columns, strict=True):
            if key in self.by_key or sha256 in self.by_content:
                raise ValueError(f"{key!r} is there already")
            self.by_key[key] = self.by_content[sha256] = len(self.keys)
            self.keys.append(key)
            self.sha256.append(sha256)
            self.places.append(place)
        self.lines.append({"first": line["first"], "count": len(columns[0]), "crc32": line["crc32"]})


@dataclass(frozen=True)
class Storage:
    """The files in one folder. ``words``: float16 numbers in the record of an item, by part; ``capacity``: items in a
    shard."""

    folder: Path
    words: Mapping[str, int]
    capacity: int

    @property
    def item_bytes(self) -> int:
        """Bytes that an item takes, without its line in the log."""
        return _WORD * sum(self.words.values())

    def shard(self, part: str, number: int) -> Path:
        return self.folder / f"{part}-{number:05d}.f16"

    # Reading

    def read(self, known: Log | None = None, *, cut: bool = False) -> Log:
        """Read the log, or return the one that is ``known`` where nothing was written since; ``cut`` is for the
        writer, who cuts off a half-written line."""
        log, path = Log(mark=self.mark()), self.folder / LOG
        if known is not None and log.mark is not None and known.mark == log.mark:
            return known
        with naming("folder"):
            rows = Rows(path).read(cut=cut)
        for number, line in enumerate(rows, start=1):
            try:
                log.take(line)
            except (KeyError, IndexError, TypeError, ValueError) as error:
                raise FileError(
                    f"folder: line {number} of {path} does not follow from those before it ({error}). Put the file "
                    "back from a copy, or make the gallery anew."
                ) from None
        return log

    def mark(self) -> tuple[int, int] | None:
        """Return what tells one state of the log from a later one, None while its last line is half-written: lines are
        only added, and a file whose last line was cut off is another one."""
        try:
            with open(self.folder / LOG, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - 1))
                return (os.fstat(file.fileno()).st_ino, size) if file.read(1) in (b"\n", b"") else None
        except FileNotFoundError:
            return 0, 0

    def check_lengths(self, log: Log) -> None:
        """Raise an error for a shard that is shorter than the log says, and name the items that are gone."""
        for number, held in enumerate(self.shards(len(log))):
            for part in PARTS:
                path = self.shard(part, number)
                there = path.stat().st_size // (_WORD * self.words[part]) if path.is_file() else 0
                if there < held:
                    first = log.keys[number * self.capacity + there]
                    raise FileError(
                        f"folder: {path} {'is truncated' if path.is_file() else 'is missing'}: it should hold "
                        f"{counted(held, 'item')}, and has {there}; those from {first!r} on are gone. Put the file "
                        f"back from a copy, or run `pullback index repair {self.folder}`, which takes out what is "
                        "damaged: the same `add` then makes it anew."
                    )

    def shards(self, items: int) -> list[int]:
        """Return how many of so many items lie in each shard."""
        full, rest = divmod(items, self.capacity)
        return [self.capacity] * full + ([rest] if rest else [])

    def map(self, items: int) -> list[dict[str, Tensor]]:
        """Map the records of the first so many items, shard by shard: float16 [n, words] of each part."""
        return [
            {part: self._mapped(self.shard(part, number), held, self.words[part]) for part in PARTS}
            for number, held in enumerate(self.shards(items))
        ]

    def _mapped(self, path: Path, held: int, words: int) -> Tensor:
        # not numpy's memmap: torch warns of arrays that cannot be written. This one is a private copy when written.
        flat = torch.from_file(str(path), shared=False, size=held * words, dtype=torch.float16)
        return flat.view(held, words)

    def damaged(self, log: Log) -> list[tuple[Path, list[int]]]:
        """Read everything, and return the shards whose bytes are not those that were written, with their items."""
        found: list[tuple[Path, list[int]]] = []
        for line in log.lines:
            number, start = divmod(line["first"], self.capacity)
            for part in PARTS:
                path, size = self.shard(part, number), _WORD * self.words[part]
                if _checksum(_bytes(path, start * size, line["count"] * size)) != line["crc32"][part]:
                    found.append((path, list(range(line["first"], line["first"] + line["count"]))))
        return found

    # Writing

    @contextmanager
    def writer(self, known: Log | None = None, *, lenient: bool = False) -> Iterator[Writer]:
        """Be the only one who writes, or raise an error that says who does. ``known``: as for `read`. ``lenient``: also
        where shards are damaged."""
        with _locked(self.folder):
            log = self.read(known, cut=True)
            if not lenient:
                self.check_lengths(log)
            yield Writer(self, log)


@dataclass(frozen=True)
class Writer:
    """The right to change the files; ``log`` keeps up with what is written."""

    storage: Storage
    log: Log

    def add(
        self, keys: Sequence[str], sha256: Sequence[str], places: Sequence[str | None], parts: Mapping[str, Tensor]
    ) -> None:
        """Add items with their records, float16 [n, words] of each part. After an error, such as a full disk, those
        of whole shards may be there, and the others are not."""
        done = 0
        while done < len(keys):
            room = self.storage.capacity - len(self.log) % self.storage.capacity
            rows = slice(done, min(len(keys), done + room))
            self._add({name: part[rows] for name, part in parts.items()}, keys[rows], sha256[rows], places[rows])
            done = rows.stop

    def _add(
        self, parts: Mapping[str, Tensor], keys: Sequence[str], sha256: Sequence[str], places: Sequence[str | None]
    ) -> None:
        number, start = divmod(len(self.log), self.storage.capacity)
        checksums = {}
        for part in PARTS:
            content = parts[part].contiguous().cpu().numpy().tobytes()
            path = self.storage.shard(part, number)
            _write_at(path, start * _WORD * self.storage.words[part], content)
            checksums[part] = _checksum(content)
        if start == 0:
            sync_folder(self.storage.folder)
        line = {"first": len(self.log), "keys": list(keys), "sha256": list(sha256), "places": list(places)}
        self._say(line | {"crc32": checksums})

    def remove(self, rows: Sequence[int]) -> None:
        self._say({"remove": list(rows)})

    def extend(self) -> None:
        """Give truncated shards their length back, with zeros: only when their items were removed."""
        for number, held in enumerate(self.storage.shards(len(self.log))):
            for part in PARTS:
                path, size = self.storage.shard(part, number), held * _WORD * self.storage.words[part]
                with writing(path), open(path, "ab") as file:
                    if file.tell() < size:
                        file.truncate(size)

    def _say(self, line: Mapping[str, Any]) -> None:
        Rows(self.storage.folder / LOG).add([line], durable=True)
        self.log.take(line)
        self.log.mark = self.storage.mark()


def _write_at(path: Path, offset: int, content: bytes) -> None:
    """Write over whatever follows ``offset`` in a file, and wait for the disk; after an error, nothing follows it."""
    with writing(path), open(path, "ab", buffering=0) as file:  # "ab": made where it is missing, and never emptied
        file.truncate(offset)
        try:
            left = memoryview(content)
            while left:
                left = left[file.write(left) :]
            os.fsync(file.fileno())
        except BaseException:
            file.truncate(offset)
            raise


def _checksum(content: bytes) -> int:
    return zlib.crc32(content)


def _bytes(path: Path, offset: int, count: int) -> bytes:
    """Read part of a file; less than that of a file that is shorter, nothing of one that is missing."""
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            return file.read(count)
    except FileNotFoundError:
        return b""


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, or raise an error at once that names who does."""
    import fcntl  # no such module on Windows, where galleries can be read alone

    path = folder / LOCK
    with writing(path):
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(handle, 1000).decode("utf-8", "replace").strip()
            raise PullbackError(
                f"folder: another process writes to the gallery {folder}{f' ({holder})' if holder else ''}, and one "
                "may at a time. Wait until it has finished; searching is possible meanwhile."
            ) from None
        with writing(path):
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield
    finally:
        os.close(handle)  # which lets the lock go, as the end of the process does
