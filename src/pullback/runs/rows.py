"""Append-only rows: one JSON object a line, in a file that a run may be killed over at any moment."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pullback.errors import FileError
from pullback.runs.files import write_bytes, write_text, writing


class Rows:
    """The rows of one file. A half-written last line, left by a killed run, is cut off before anything is read; who
    reads while another process writes leaves it there, and does not see it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, *, cut: bool = True) -> list[dict[str, Any]]:
        """Return all whole rows; an empty list where there is no file yet. ``cut``: whether to write at all."""
        return list(self.each(cut=cut))

    def each(self, *, cut: bool = True) -> Iterator[dict[str, Any]]:
        """Yield what `read` returns, one by one: of a long file there is less in memory."""
        if not self.path.is_file():
            return
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if cut and whole != content:
            write_bytes(self.path, whole)
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                row = json.loads(line)
            except ValueError as error:  # of JSON or of UTF-8
                raise FileError(
                    f"out: line {number} of {self.path} is no JSON ({error}). Choose another folder."
                ) from None
            yield row

    def add(self, rows: Iterable[Mapping[str, Any]], *, durable: bool = False) -> None:
        """Append rows, all or none of them. NaN and infinity are refused: strict JSON has no words for them.

        ``durable`` also waits for the disk."""
        text = "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
        with writing(self.path), open(self.path, "ab", buffering=0) as file:
            before, left = file.tell(), memoryview(text.encode())
            try:
                while left:
                    left = left[file.write(left) :]
                if durable:
                    os.fsync(file.fileno())
            except BaseException:
                file.truncate(before)
                raise

    def keep(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Rewrite the file with the rows that are wanted, for instance those up to the last checkpoint."""
        if self.path.is_file():
            kept = [row for row in self.read() if wanted(row)]
            write_text(self.path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept))


def finite(value: float) -> float | None:
    """Return the value if strict JSON has a word for it; None for NaN and infinity."""
    return value if math.isfinite(value) else None
