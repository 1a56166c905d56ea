"""How a long job says how far it is. Jobs speak to a `Progress`; what is shown, and where, is not their business."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping

_SECONDS_BETWEEN_LINES = 5.0
_SHARE_BETWEEN_LINES = 0.02
"""Of the time that has passed: the lines of a run of hours still fit on a few screens."""
_LONG = 10.0
"""Seconds from which on people want to know in advance."""


class Progress:
    """What a job tells of itself; this one shows nothing of it, and others derive from it."""

    def stage(self, text: str) -> None:
        """Something of unknown length begins, such as loading a model."""

    def note(self, line: str) -> None:
        """Something worth a line that stays, such as how long the work will take."""

    def work(self, what: str, total: int | None, unit: str, done: int = 0) -> None:
        """Something countable begins: ``total`` units, such as images, of ``what``; None where nobody knows. ``done``:
        how many of them an earlier run did."""

    def describe(self, what: str) -> None:
        """The work goes on with another part, such as the next layer."""

    def advance(self, count: int) -> None:
        """So many more units are done."""

    def finished(self, part: str, line: str) -> None:
        """A part is done and on disk; ``line`` says in a few words what came out."""


class Lines(Progress):
    """A `Progress` of plain text: one line that counts up in a terminal, a line every few seconds anywhere else.

    For scripts, on standard error, where the end of work always has its line; and for the command line without a
    terminal, by ``write``, where short work has none. (In a terminal it has a livelier display, `report.progress`.)
    """

    def __init__(self, write: Callable[[str], object] | None = None) -> None:
        self._write = write or _on_standard_error
        self._live = write is None
        self._what, self._unit, self._done, self._earlier = "", "", 0, 0
        self._total: int | None = None
        self._begun = self._printed = time.perf_counter()

    def stage(self, text: str) -> None:
        self._write(f"{text}\n")

    def note(self, line: str) -> None:
        self._write(f"{line}\n")

    def work(self, what: str, total: int | None, unit: str, done: int = 0) -> None:
        self._what, self._unit, self._total, self._done, self._earlier = what, unit, total, done, done
        self._begun = self._printed = time.perf_counter()

    def describe(self, what: str) -> None:
        self._what = what

    def advance(self, count: int) -> None:
        self._done += count
        now = time.perf_counter()
        seconds, ended = now - self._begun, self._done == self._total
        if self._live and sys.stderr.isatty():
            self._write(f"{self._line(seconds):<79}" + ("\n" if ended else "\r"))
            return
        pause = max(_SECONDS_BETWEEN_LINES, _SHARE_BETWEEN_LINES * seconds)
        if now - self._printed > pause or (ended and (self._live or seconds > _SECONDS_BETWEEN_LINES)):
            self._printed = now
            self._write(f"{self._line(seconds)}\n")

    def _line(self, seconds: float) -> str:
        if self._total is None:
            return f"{self._what}: {self._done:,} {self._unit}, {in_words(seconds)}"
        left = in_words(seconds / max(1, self._done - self._earlier) * (self._total - self._done))
        return f"{self._what}: {self._done:,}/{self._total:,} {self._unit}, {in_words(seconds)}, about {left} left"

    def finished(self, part: str, line: str) -> None:
        self._write(f"{line}\n")


def _on_standard_error(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)


def in_words(seconds: float) -> str:
    """Write "0.4 s", "40 s", "6 min", "2.5 h": two digits, as an estimate deserves."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 99.5 * 60 else f"{seconds / 3600:.2g} h"


def expectation(each: Mapping[str, float], left: Mapping[str, int], unit: str, place: str) -> str | None:
    """Write how long work will take, as "L02: about 40 s an image on this CPU; L10: 1.0 s; in all about 6 min."

    ``each``: seconds per ``unit`` by part; NaN where it is not known. ``left``: how many units of each part are to
    come. None where all of it is a matter of seconds.
    """
    total = sum(seconds * left[part] for part, seconds in each.items())
    if not total >= _LONG:
        return None
    article = f"an {unit}" if unit[0] in "aeiou" else f"a {unit}"
    first, *others = [(part, in_words(seconds)) for part, seconds in each.items()]
    parts = [f"{first[0]}: about {first[1]} {article} on this {place}", *(f"{part}: {time}" for part, time in others)]
    return f"{'; '.join(parts)}; in all about {in_words(total)}. Ctrl-C is safe: the same command goes on from there."
