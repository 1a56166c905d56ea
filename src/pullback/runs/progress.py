"""How a long job says how far it is. Jobs speak to a `Progress`; what is shown, and where, is not their business."""

from __future__ import annotations

import math
import sys
import time
from typing import Protocol

_SECONDS_BETWEEN_LINES = 5.0


class Progress(Protocol):
    """What a job tells of itself."""

    def stage(self, text: str) -> None:
        """Something of unknown length begins, such as loading a model."""

    def work(self, what: str, total: int, unit: str) -> None:
        """Something countable begins: ``total`` units, such as images, of ``what``."""

    def describe(self, what: str) -> None:
        """The work goes on with another part, such as the next layer."""

    def advance(self, count: int) -> None:
        """So many more units are done."""

    def finished(self, part: str, line: str) -> None:
        """A part is done and on disk; ``line`` says in a few words what came out."""


class Silent:
    """A `Progress` that shows nothing: the default of Python functions."""

    def stage(self, text: str) -> None:
        pass

    def work(self, what: str, total: int, unit: str) -> None:
        pass

    def describe(self, what: str) -> None:
        pass

    def advance(self, count: int) -> None:
        pass

    def finished(self, part: str, line: str) -> None:
        pass


class Lines:
    """A `Progress` of plain text on standard error: one line that counts up in a terminal, a line every few seconds
    anywhere else. For scripts; the command line has a livelier one (`report.progress`)."""

    def __init__(self) -> None:
        self._what, self._unit, self._total, self._done = "", "", 0, 0
        self._begun, self._printed = time.perf_counter(), -math.inf

    def stage(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def work(self, what: str, total: int, unit: str) -> None:
        self._what, self._unit, self._total, self._done = what, unit, total, 0
        self._begun, self._printed = time.perf_counter(), -math.inf

    def describe(self, what: str) -> None:
        self._what = what

    def advance(self, count: int) -> None:
        self._done += count
        now, live = time.perf_counter(), sys.stderr.isatty()
        if live or now - self._printed > _SECONDS_BETWEEN_LINES or self._done == self._total:
            self._printed = now
            seconds = now - self._begun
            left = seconds / max(1, self._done) * (self._total - self._done)
            line = f"{self._what}: {self._done}/{self._total} {self._unit}, {seconds:.0f} s, about {left:.0f} s left"
            print(f"{line:<79}", end="\r" if live and self._done < self._total else "\n", file=sys.stderr, flush=True)

    def finished(self, part: str, line: str) -> None:
        print(line, file=sys.stderr, flush=True)
