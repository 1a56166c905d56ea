"""The target store: a folder of Parquet shards that a run may be killed over at any moment.

    targets.json             the configuration
    targets-00000.parquet    rows, with the configuration and the images that were skipped in the file's metadata
    .run                     which run may write here

A shard is written under a temporary name, flushed to disk and renamed, so it is there whole or not at all. Every run
puts its own mark into `.run` and a shard is only renamed while that mark stands: a worker that outlives its run, or a
second run beside the first, cannot write rows that are already there.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from pullback.data.sources import LISTED, Source, open_source
from pullback.errors import PullbackError
from pullback.learning.origin import Origin
from pullback.learning.parquet import from_arrow, load_arrow, to_arrow
from pullback.learning.provenance import FORMAT, check_same
from pullback.learning.shards import Shard, SkippedItem
from pullback.learning.table import TargetTable
from pullback.operators import ProductCount

CONFIG, RUN = "targets.json", ".run"
_SHARD = re.compile(r"targets-(\d+)\.parquet")


class StaleRun(PullbackError):
    """Another run has taken this store over."""


@dataclass(frozen=True)
class StoreWriter:
    """The right to add shards to a store, until another run claims it. Small, and may travel to other processes."""

    folder: Path
    config: dict[str, Any]
    mark: str

    @classmethod
    def claim(cls, folder: Path, config: dict[str, Any]) -> StoreWriter:
        """Make the store, or take over one of the same configuration; leftovers of a killed run are removed."""
        load_arrow()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if (folder / CONFIG).is_file():
                check_same(_read_config(folder), config, folder)
            elif any(_SHARD.fullmatch(path.name) for path in folder.iterdir()):
                raise PullbackError(f"out: {folder} holds shards but no {CONFIG}. Choose another folder.")
            writer = cls(folder.absolute(), config, uuid.uuid4().hex)
            _write(folder / RUN, lambda file: file.write(writer.mark.encode()))
            if not (folder / CONFIG).is_file():
                _write(folder / CONFIG, lambda file: file.write(json.dumps(config, indent=1).encode() + b"\n"))
        except OSError as error:
            raise PullbackError(f"out: cannot write to {folder} ({error.strerror}). Choose another folder.") from None
        for leftover in folder.glob(".*.tmp"):
            leftover.unlink(missing_ok=True)
        return writer

    def write(self, shard: Shard) -> Path:
        """Add a shard; the same one a second time takes the place of the first."""
        pa, parquet = load_arrow()
        path = self.folder / f"targets-{shard.number:05d}.parquet"
        table = to_arrow(pa, shard, self.config)
        # floats hardly repeat: a dictionary of them would make the file half as large again
        options = {"compression": "zstd", "use_dictionary": False}
        _write(path, lambda file: parquet.write_table(table, file, **options), self._still_ours)
        return path

    def _still_ours(self) -> None:
        if (self.folder / RUN).read_text() != self.mark:
            raise StaleRun(f"out: another run has taken over {self.folder}; this one stops, and its shards are kept.")


@dataclass(frozen=True, eq=False)
class TargetStore:
    """A folder of targets, for reading. ``config`` is what decided the rows."""

    folder: Path
    config: dict[str, Any]

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> TargetStore:
        path = Path(folder)
        if not (path / CONFIG).is_file():
            raise PullbackError(f"folder: expected {CONFIG} in {path}, which `pullback targets --out` writes there.")
        return cls(path, _read_config(path))

    @property
    def shards(self) -> list[Path]:
        """The shards that are there now, by number."""
        found = {int(match[1]): path for path in self.folder.iterdir() if (match := _SHARD.fullmatch(path.name))}
        return [found[number] for number in sorted(found)]

    @property
    def next_number(self) -> int:
        return 1 + max((int(path.stem.rpartition("-")[2]) for path in self.shards), default=-1)

    def __len__(self) -> int:
        """Rows."""
        _, parquet = load_arrow()
        return sum(parquet.read_metadata(path).num_rows for path in self.shards)

    def __iter__(self) -> Iterator[TargetTable]:
        """One shard after the other; empty ones are left out."""
        return (table for path in self.shards if len(table := self._read(path)))

    def read(self, *, modes: bool = True) -> TargetTable:
        """All rows in one table, without the modes if they are not wanted."""
        tables = [table for path in self.shards if len(table := self._read(path, modes))]
        if not tables:
            raise PullbackError(f"folder: {self.folder} holds no rows yet. Run `pullback targets` to the end first.")
        return TargetTable.join(tables)

    @property
    def skipped(self) -> tuple[SkippedItem, ...]:
        """Images that could not be used."""
        return tuple(SkippedItem(*pair) for info in self._infos for pair in info["skipped"])

    @property
    def seconds(self) -> float:
        """Spent on computing, over all shards and workers."""
        return sum(info["seconds"] for info in self._infos)

    @property
    def products(self) -> ProductCount:
        """Per row, of the shard that took most."""
        counts = [ProductCount(**info["products"]) for info in self._infos]
        return max(counts, key=lambda count: count.total, default=ProductCount())

    @property
    def method(self) -> str | None:
        """What was used: "auto" chooses from sizes alone, so it is the same for all shards."""
        return next((info["method"] for info in self._infos if info["method"]), None)

    def rows_done(self) -> set[tuple[str, int]]:
        """(key, crop number) of every row."""
        _, parquet = load_arrow()
        done: set[tuple[str, int]] = set()
        for path in self.shards:
            part = parquet.read_table(path, columns=["key", "crop"])
            done.update(zip(part["key"].to_pylist(), part["crop"].to_pylist(), strict=True))
        return done

    def source(self) -> Source:
        """The images behind the rows: ``{item.key: item for item in store.source()}``."""
        if self.config["source"] == LISTED:
            raise PullbackError(
                f"source: the images of {self.folder} came as a Python list, which is not stored. "
                "Call open_source with that list."
            )
        return open_source(self.config["source"])

    @cached_property
    def origin(self) -> Origin:
        """What a network that learns from these targets is made for."""
        config, layer = self.config, self.config["layer"]
        return Origin(
            family=config["family"],
            weights=config["weights"],
            layer=layer if isinstance(layer, int) else None,
            decoder=config["decoder"],
            rank=config["rank"],
            resolutions=(tuple(config["size"]),),
        )

    @property
    def _infos(self) -> list[dict[str, Any]]:
        _, parquet = load_arrow()
        return [json.loads(parquet.read_schema(path).metadata[b"pullback.shard"]) for path in self.shards]

    def _read(self, path: Path, modes: bool = True) -> TargetTable:
        _, parquet = load_arrow()
        names = parquet.read_schema(path).names
        wanted = [name for name in names if modes or name != "modes"]
        return from_arrow(parquet.read_table(path, columns=wanted), self.config)


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PullbackError(f"folder: {folder / CONFIG} cannot be read: {error}") from None
    if config.get("format") != FORMAT:
        raise PullbackError(
            f"folder: {folder} has format {config.get('format')!r}, this version reads {FORMAT}. Compute it anew."
        )
    return config


def _write(path: Path, fill: Callable[[IO[bytes]], object], check: Callable[[], None] = lambda: None) -> None:
    """Into a temporary file beside ``path``, to the disk, then renamed over it; ``check`` has the last word."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        check()
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """The renaming itself must survive a power cut, too."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
