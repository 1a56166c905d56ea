"""What an experiment is: a table or figure of the paper as cells to measure, and the claims that rest on it.

An `Experiment` is data. Its cells follow from a `Scale` alone, so that it can be listed, validated and estimated
without running anything. A cell measures one or several numbers at once (`Measured`); the runner
(`pullback.experiments.run`) adds where they come from and writes them as rows. Claims are judged from the finished
rows, so a verdict never rests on anything that is not on disk.

    experiment/rows.jsonl     one line per number, in the order of the cells; timed cells are in times.jsonl
    row: table, row, column   its place; the paper's value beside it where the paper has that place
         value, low, high     what was measured, with its 95 % interval, None where there is none
         absent               why there is no value: "not at this scale: ...". Never filled by another model
         count, note          how many images or scenes; a footnote
         cell, seed, model, weights, data, scale, commit, machine
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from pullback.runs.progress import Progress

ScaleName = Literal["tiny", "small", "paper"]
Word = Literal["holds", "holds partly", "does not hold", "not at this scale"]
Better = Literal["lower", "higher", "neither"]
ABSENT = "not at this scale"


class Place(NamedTuple):
    """Where a number stands. ``table`` is the part of an experiment that is printed as one table."""

    table: str
    row: str
    column: str


@dataclass(frozen=True)
class Measured:
    """One number, with its 95 % interval over ``count`` images or scenes (or seeds, if the column says so)."""

    table: str
    row: str
    column: str
    value: float | None
    low: float | None = None
    high: float | None = None
    count: int | None = None
    note: str | None = None

    @property
    def place(self) -> Place:
        return Place(self.table, self.row, self.column)


@dataclass(frozen=True)
class Cell:
    """A unit of work that is done or not done; several numbers that are measured together.

    ``key``: unique in its experiment. ``model``, ``data``: roles of the scale (`Scale.models`, `Scale.data`) that it
    needs; where the scale has none of it, all its ``places`` are listed as absent. ``run`` returns a number for each
    place, no more and no less, and must be deterministic on one machine. ``timed``: the numbers are times, and go into
    a file of their own, since no two runs agree on them. ``absent``: why it cannot be measured, whatever the model.
    """

    key: str
    places: tuple[Place, ...]
    run: Callable[[Workshop], Iterable[Measured]] | None
    model: str = ""
    data: str = ""
    timed: bool = False
    absent: str | None = None
    seconds: float | None = None  # about how long it takes on two cores, for --dry-run and progress


@dataclass(frozen=True)
class Verdict:
    """What a claim comes to on these rows. ``why`` names the numbers, in one or two sentences."""

    word: Word
    why: str


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, and how the rows decide it. ``where``: the label of the paper that says it."""

    sentence: str
    where: str
    judge: Callable[[Found], Verdict]


@dataclass(frozen=True)
class Column:
    """How a column is printed: ``better`` says which direction is good, ``unit`` stands behind its title, ``digits``
    are significant ones; ``percent``: values are shares and printed as per cent."""

    name: str
    better: Better = "neither"
    unit: str = ""
    digits: int = 3
    percent: bool = False


@dataclass(frozen=True)
class Experiment:
    """A table or figure of the paper.

    ``cells``: those of a scale, in the order of the table. ``paper``: the paper's values by place; a place that no cell
    has is an error. ``figures``: names of pictures that the report draws from arrays/NAME.npz beside the rows.
    """

    name: str
    title: str
    paper_label: str
    about: str
    columns: tuple[Column, ...]
    cells: Callable[[Scale], Sequence[Cell]]
    paper: Mapping[Place, float] = field(default_factory=dict)
    claims: tuple[Claim, ...] = ()
    figures: tuple[str, ...] = ()
    footnotes: tuple[str, ...] = ()  # what the paper's table cannot have right, with our measurement


@dataclass(frozen=True)
class Scale:
    """How much is done, and with what. A role that is not in ``models`` or ``data`` is not at this scale.

    ``models``: by role ("tiny-scenes", "tiny-views", "dinov2", "clip", "saliency", "depth-anything", "vggt") a name
    that `load_probe` takes, or a folder. ``data``: by role ("scenes", "views", "train", "held-out", "sketch", "rgbd",
    "bank") a folder of images, or a range of seeds of scenes that are drawn. ``counts``: how many images, steps, seeds
    and directions, by a name that the experiment knows ("images", "spectra", "train", "steps", "seeds", "rank").
    ``substitutes``: roles whose weights are not those of the paper, with the paper's.
    """

    name: ScaleName
    models: Mapping[str, str]
    data: Mapping[str, str]
    counts: Mapping[str, int]
    substitutes: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0

    def why_absent(self, cell: Cell) -> str | None:
        """Say why a cell cannot be measured at this scale; None if it can."""
        if cell.absent:
            return f"{ABSENT}: {cell.absent}"
        if cell.model and cell.model not in self.models:
            return f"{ABSENT}: it has no {cell.model}"
        if cell.data and cell.data not in self.data:
            return f"{ABSENT}: it has no images {cell.data!r}"
        return None


class Workshop(Protocol):
    """What a cell works with. Everything that is expensive is made once, kept on disk where it can be, and found again
    by the same name, also by a later run."""

    scale: Scale
    progress: Progress

    @property
    def folder(self) -> Path:
        """Of this experiment, for arrays of figures (`arrays/NAME.npz`)."""

    @property
    def store(self) -> Path:
        """Of all experiments of this run, for what several share: heads, targets, bottlenecks, by content."""

    def probe(self, model: str, decoder: str, layer: int | str) -> Any:
        """Return the frozen probe of a role, loaded once."""

    def images(self, data: str, count: int, size: int | None = None, *, skip: int = 0) -> Any:
        """Return normalised images [B, 3, H, W] of a role: the first ``count`` after ``skip``, always the same."""

    def head(self, model: str, decoder: str, layer: int, **recipe: Any) -> Any:
        """Return the importance head of this recipe, trained when it is first asked for."""

    def count(self, name: str) -> int:
        """Return `Scale.counts`[name]."""


class Found:
    """Finished rows by place, as claims read them."""

    def __init__(self, rows: Iterable[Mapping[str, Any]]) -> None:
        self._rows = {Place(row["table"], row["row"], row["column"]): row for row in rows}

    def __iter__(self) -> Any:
        return iter(self._rows.items())

    def row(self, table: str, row: str, column: str) -> Mapping[str, Any] | None:
        """Return the row of a place that was measured; None where it is absent or there is none."""
        found = self._rows.get(Place(table, row, column))
        return None if found is None or found["value"] is None else found

    def value(self, table: str, row: str, column: str) -> float | None:
        found = self.row(table, row, column)
        return None if found is None else found["value"]

    def rows(self, table: str) -> list[str]:
        """Return the names of the rows of a table, in order, once each."""
        return list(dict.fromkeys(place.row for place in self._rows if place.table == table))
