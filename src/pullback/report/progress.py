"""How far a run is: a live bar in a terminal, a plain line now and then where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from pullback.report.wording import counted, percent, regime
from pullback.runs.documents import layer_name
from pullback.runs.progress import Lines, Progress


class ProgressDisplay(Progress):
    """A `runs.progress.Progress` for people, as a context manager; it may hear several runs one after the other.

    ``done`` are the parts that are finished and on disk, ``current`` the one that runs.
    """

    def __init__(self, console: Console) -> None:
        self.done: list[str] = []
        self.current: str | None = None
        self._console = console
        self._lines = Progress() if console.is_terminal else Lines(self._print)
        self._bar = Bar(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[count]}"),
            TimeElapsedColumn(),
            TextColumn("elapsed"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._work: TaskID | None = None
        self._stage: TaskID | None = None
        self._unit = "images"

    def __enter__(self) -> ProgressDisplay:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Take the bar off the screen; a second time does nothing."""
        self._bar.stop()

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Take the bar off the screen while something is printed."""
        self._bar.stop()
        yield
        self._bar.start()

    def stage(self, text: str) -> None:
        self._end_stage()
        self._lines.stage(text)
        self._stage = self._bar.add_task(text, total=None, count="")

    def note(self, line: str) -> None:
        self._end_stage()
        self._print(f"{line}\n")

    def work(self, what: str, total: int | None, unit: str, done: int = 0) -> None:
        """A bar of ``total`` units, in place of the last one; a growing count where the total is not known."""
        self._end_stage()
        self._lines.work(what, total, unit, done)
        if self._work is not None:
            self._bar.remove_task(self._work)
        self.current, self._unit = what or None, unit
        self._work = self._bar.add_task(what, total=total, completed=done, count="")

    def describe(self, what: str) -> None:
        self._end_stage()
        assert self._work is not None, "work comes first"
        self.current = what
        self._lines.describe(what)
        self._bar.update(self._work, description=what, count=self._count())

    def advance(self, count: int) -> None:
        assert self._work is not None, "work comes first"
        self._bar.advance(self._work, count)
        self._bar.update(self._work, count=self._count())
        self._lines.advance(count)

    def finished(self, part: str, line: str) -> None:
        self._end_stage()
        self.done.append(part)
        self.current = None
        self._print(f"{line}\n")

    def layer_done(self, result: dict[str, Any]) -> None:
        """A layer of a diagnosis is finished; ``result`` is its entry in diagnosis.json."""
        name, count = layer_name(result["layer"]), result["num_images"]
        line = f"{name}: κ({result['rank_used']}) = {percent(result['kappa'])}, regime {regime(result)}"
        self.finished(name, f"{line}, {counted(count, self._unit.removesuffix('s'))} in {result['seconds']:.1f} s")

    def _count(self) -> str:
        task = next((task for task in self._bar.tasks if task.id == self._work), None)
        if task is None:
            return ""
        total = "" if task.total is None else f"/{task.total:,.0f}"
        return f"{task.completed:,.0f}{total} {self._unit}"

    def _print(self, text: str) -> None:
        self._console.print(text, style="dim", markup=False, end="")

    def _end_stage(self) -> None:
        if self._stage is not None:
            self._bar.remove_task(self._stage)
            self._stage = None
