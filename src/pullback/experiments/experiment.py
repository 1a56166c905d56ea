"""What an experiment is: a table or figure of the paper as cells to measure, and the claims that rest on it.

An `Experiment` is data. Its cells follow from a `Scale` alone, so that it can be listed, validated and estimated
without running anything. A cell measures one or several numbers at once (`Measured`); the runner
(`pullback.experiments.run`) adds where they come from and writes them as rows. Claims are judged from the finished
rows, so a verdict never rests on anything that is not on disk.

    OUT/EXPERIMENT/rows.jsonl      one line per number, in the order of the cells
    OUT/EXPERIMENT/times.jsonl     the same of timed cells, since no two runs agree on them
    row: table, row, column        its place
         value, low, high          what was measured, with its 95 % interval, None where there is none
         paper                     the paper's value at this place, a number or its own words, or None
         absent                    why there is no value: "not at this scale: ...". Never filled by another model
         count, over, note         how many images (or scenes, seeds) it is a mean over; a remark on this number
         cell, seed, model, weights, data, scale, commit, machine
    OUT/EXPERIMENT/experiment.json title, columns, places, verdicts, footnotes and figures: all that a report needs
    OUT/EXPERIMENT/arrays/*.npz    what figures are drawn from
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pullback.errors import PullbackError

if TYPE_CHECKING:
    from pullback.experiments.scales import Scale, ScaleName
    from pullback.experiments.workshop import Workshop

Word = Literal["holds", "holds partly", "does not hold", "not at this scale"]
Better = Literal["lower", "higher", "neither"]
FigureKind = Literal["curves", "scatter", "spectrum", "maps", "wipe", "neighbours"]
ABSENT = "not at this scale"


class Place(NamedTuple):
    """Where a number stands. ``table`` is the part of an experiment that is printed as one table."""

    table: str
    row: str
    column: str


@dataclass(frozen=True)
class Measured:
    """One number, with its 95 % interval over ``count`` images (or whatever ``over`` says)."""

    table: str
    row: str
    column: str
    value: float
    low: float | None = None
    high: float | None = None
    count: int | None = None
    over: str = "images"
    note: str | None = None

    @property
    def place(self) -> Place:
        return Place(self.table, self.row, self.column)


@dataclass(frozen=True)
class Cell:
    """A unit of work that is done or not done; several numbers that are measured together.

    ``key``: unique in its experiment. ``model``, ``data``: roles of the scale that it is about, which its rows name;
    ``needs``: further roles without which it cannot be measured. Where the scale lacks one of them, all ``places`` are
    listed as absent. ``run`` returns a number for each place, no more and no less, and is deterministic on one machine.
    ``timed``: the numbers are times. ``absent``: why it cannot be measured, whatever the models.
    ``forwards``: about how many forward passes of one image through the whole backbone it takes, for ``--dry-run``.
    """

    key: str
    places: tuple[Place, ...]
    run: Callable[[Workshop], Iterable[Measured]] | None = None
    model: str = ""
    data: str = ""
    needs: tuple[str, ...] = ()
    timed: bool = False
    absent: str | None = None
    forwards: float = 0.0

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(role for role in (self.model, self.data, *self.needs) if role)


@dataclass(frozen=True)
class Verdict:
    """What a claim comes to on these rows. ``why`` names the numbers and the model, in one or two sentences."""

    word: Word
    why: str


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, and how the rows decide it. ``where``: the label in the paper where it stands."""

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
class Figure:
    """A picture that the report draws.

    From rows, ``table`` names which: "curves", a line for each row of the table over its columns, whose names are
    numbers such as ratios; "scatter", a point for each row of the table with the columns ``x`` and ``y``, rows named
    "LINE · POINT" joined to lines. ``log``: the vertical axis is logarithmic.

    From arrays/NAME.npz, of n pictures: "spectrum": for each name singular values [r] or [images, r]; "maps":
    pictures uint8 [n, H, W, 3], names [m], maps [m, n, h, w] and rho [m, n] against the first map (NaN where there is
    none); "wipe": pictures, before and after [n, h, w], captions [n]; "neighbours": pictures, the grid [2] of patches,
    names [m] of distances and nearest [m, n, patches, k], numbers of the k patches nearest to each patch.
    """

    name: str
    kind: FigureKind
    title: str
    about: str = ""
    table: str = ""
    x: str = ""
    y: str = ""
    log: bool = False


@dataclass(frozen=True)
class Experiment:
    """A table or figure of the paper.

    ``cells``: those of a scale, in the order of the tables. ``counts``: how many images, steps, seeds and directions at
    each scale, by names that the experiment chooses. ``paper``: the paper's values by place; a place that no cell has
    is an error. ``footnotes``: what the paper's table cannot have right, made of the rows; None where they lack it.
    """

    name: str
    title: str
    paper_label: str
    about: str
    columns: tuple[Column, ...]
    cells: Callable[[Scale], Sequence[Cell]]
    counts: Mapping[ScaleName, Mapping[str, int]] = field(default_factory=dict)
    paper: Mapping[Place, float | str] = field(default_factory=dict)
    claims: tuple[Claim, ...] = ()
    figures: tuple[Figure, ...] = ()
    footnotes: tuple[Callable[[Found], str | None], ...] = ()

    def checked_cells(self, scale: Scale) -> list[Cell]:
        """Return the cells of a scale, or raise an error for what is wrong with the list: nothing is run."""
        cells = list(self.cells(scale))
        keys = [cell.key for cell in cells]
        places = [place for cell in cells for place in cell.places]
        columns = {column.name for column in self.columns}
        tables = {place.table for place in places}
        wrong = [f"cell {key!r} is listed twice" for key in _twice(keys)]
        wrong += [f"{place} belongs to two cells" for place in _twice(places)]
        wrong += [
            f"column {place.column!r} of {place} is not listed" for place in places if place.column not in columns
        ]
        wrong += [f"the paper's {place} has no cell" for place in self.paper if place not in set(places)]
        wrong += [f"cell {cell.key!r} has neither run nor absent" for cell in cells if not (cell.run or cell.absent)]
        wrong += [
            f"figure {own.name!r}: no table {own.table!r}" for own in self.figures if own.table not in {"", *tables}
        ]
        if wrong:
            raise PullbackError(f"experiment {self.name}: {'; '.join(wrong)}.")
        return cells


class Found:
    """Finished rows by place, as claims and footnotes read them; what is absent is not there.

    ``models``: of whose rows a value was read so far, as rows name them: a verdict says what it was judged on.
    """

    def __init__(self, rows: Iterable[Mapping[str, Any]]) -> None:
        self._rows = {Place(row["table"], row["row"], row["column"]): row for row in rows if row["value"] is not None}
        self.models: set[str] = set()

    def __iter__(self) -> Iterator[Place]:
        return iter(self._rows)

    def row(self, table: str, row: str, column: str) -> Mapping[str, Any] | None:
        return self._read(Place(table, row, column))

    def value(self, table: str, row: str, column: str) -> float | None:
        found = self.row(table, row, column)
        return None if found is None else float(found["value"])

    def rows(self, table: str) -> list[str]:
        """Return the names of the rows of a table that have a value, in order, once each."""
        return list(dict.fromkeys(place.row for place in self._rows if place.table == table))

    def columns(self, table: str, row: str) -> dict[str, float]:
        """Return the values of a row of a table by column, in order."""
        wanted = [place for place in self._rows if (place.table, place.row) == (table, row)]
        return {place.column: float(found["value"]) for place in wanted if (found := self._read(place)) is not None}

    def _read(self, place: Place) -> Mapping[str, Any] | None:
        found = self._rows.get(place)
        if found is not None and found.get("model"):
            self.models.add(found["model"])
        return found


def overall(parts: Mapping[str, bool | None], why: str) -> Verdict:
    """Return "holds" if all parts hold, "does not hold" if none does, "holds partly" between, "not at this scale" if
    none could be looked at (None)."""
    seen = [held for held in parts.values() if held is not None]
    why = why if why.endswith((".", "!", "?")) else f"{why}."
    if not seen:
        return Verdict("not at this scale", why)
    return Verdict("holds" if all(seen) else "holds partly" if any(seen) else "does not hold", why)


def _twice(items: Sequence[Any]) -> list[Any]:
    seen: set[Any] = set()
    return [item for item in items if item in seen or seen.add(item)]  # type: ignore[func-returns-value]
