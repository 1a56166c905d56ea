"""Rows of an experiment as tables to print: numbers in words, the paper's beside ours, and why one is absent.

tables_of(result) → [Table]: columns, rows of Cells, and the notes that their markers point to
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pullback.errors import counted
from pullback.report.changes import Change
from pullback.report.numbers import Style, all_whole, interval, number, paper_said
from pullback.report.results import Place, Result
from pullback.report.wording import UNKNOWN

_ARROWS = {"lower": "↓", "higher": "↑"}
_FEW, _PARTS = 3, ("interval", "paper", "then")
NOT_YET = "not measured yet: the run was ended before"


@dataclass(frozen=True)
class Cell:
    """What stands at a place. ``value``: our number, a dash where there is none; ``interval``, ``paper`` and ``then``,
    what has become of it since another run: texts, empty where there is none; ``markers``: of the notes below the
    table."""

    place: Place
    value: str
    interval: str = ""
    paper: str = ""
    absent: bool = False
    markers: tuple[str, ...] = ()
    then: str = ""
    mark: str = ""


@dataclass(frozen=True)
class Heading:
    """A column: its name, its unit, and which direction is good."""

    name: str
    unit: str
    better: str
    arrow: str


@dataclass(frozen=True)
class Line:
    """A row of a table. ``markers``: of notes on the whole of it."""

    name: str
    cells: tuple[Cell | None, ...]
    markers: tuple[str, ...]
    absent: bool


@dataclass(frozen=True)
class Table:
    """One table of an experiment. ``notes``: (marker, text). ``left_out``: reasons, and the rows that have neither a
    number for that reason nor one of the paper. ``origins``: where the numbers come from, by row."""

    name: str
    columns: tuple[Heading, ...]
    lines: tuple[Line, ...]
    notes: tuple[tuple[str, str], ...]
    left_out: Mapping[str, Sequence[str]]
    origins: tuple[Mapping[str, str], ...]
    timed: bool

    @property
    def spread(self) -> list[tuple[str, ...]] | None:
        """The parts of each column that stand beside each other, "interval", "paper" and "then", where there are so few
        columns that there is room; None where they stand below each other."""
        if len(self.columns) > _FEW or not self.lines:
            return None
        columns = list(zip(*(line.cells for line in self.lines), strict=True))
        return [tuple(part for part in _PARTS if any(getattr(c, part) for c in column if c)) for column in columns]


@dataclass
class _Notes:
    """Texts with the marker of each: a, b, c, ..., the same text the same one."""

    texts: dict[str, str] = field(default_factory=dict)

    def marker(self, text: str) -> str:
        return self.texts.setdefault(text, _letters(len(self.texts)))


def tables_of(result: Result, changes: Mapping[Place, Change] | None = None) -> list[Table]:
    """Return the tables of a finished experiment, in the order of its places."""
    assert result.document is not None
    places = result.places
    return [
        _table(name, [place for place in places if place.table == name], result, changes or {})
        for name in dict.fromkeys(place.table for place in places)
    ]


def _table(name: str, places: Sequence[Place], result: Result, changes: Mapping[Place, Change]) -> Table:
    assert result.document is not None
    listed = {column["name"]: column for column in result.document["columns"]}
    used = {place.column for place in places}
    columns = [column for key, column in listed.items() if key in used]
    columns += [{"name": key} for key in dict.fromkeys(place.column for place in places) if key not in listed]
    whole = {
        column["name"]: all_whole(
            [result.rows[place] for place in places if place.column == column["name"] and place in result.rows]
        )
        for column in columns
    }
    notes, lines, listed_places = _Notes(), [], set(places)
    left_out: dict[str, list[str]] = {}
    for row in dict.fromkeys(place.row for place in places):
        own = [Place(name, row, column["name"]) for column in columns]
        there = [place for place in own if place in listed_places]
        reasons = {_absent(result.rows.get(place)) for place in there}
        common = reasons.pop() if len(reasons) == 1 else None  # one reason for the whole row is said once
        if common and not any(place in changes or _paper(result.rows.get(place)) is not None for place in there):
            left_out.setdefault(common, []).append(row)
            continue
        cells = tuple(
            _cell(place, result.rows.get(place), column, whole[column["name"]], notes, changes, said=common)
            if place in there
            else None
            for place, column in zip(own, columns, strict=True)
        )
        markers = (notes.marker(common),) if common else ()
        lines.append(Line(row, cells, markers, absent=common is not None))
    headings = tuple(_heading(column) for column in columns)
    timed = any(place in result.timed for place in places)
    told = tuple((marker, text) for text, marker in notes.texts.items())
    return Table(name, headings, tuple(lines), told, left_out, _origins(places, result), timed)


def _cell(
    place: Place, row: Mapping[str, Any] | None, column: Mapping[str, Any], whole: bool, notes: _Notes,
    changes: Mapping[Place, Change], *, said: str | None,
) -> Cell:  # fmt: skip
    style = Style.of(column, whole=whole)
    absent = _absent(row)
    paper = "" if _paper(row) is None else paper_said(_paper(row), style)
    change = changes.get(place)
    then, mark = _then(change, style), change.mark if change else ""
    if absent is not None:
        markers = () if absent == said else (notes.marker(absent),)
        return Cell(place, UNKNOWN, paper=paper, absent=True, markers=markers, then=then, mark=mark)
    assert row is not None
    markers = (notes.marker(row["note"]),) if row.get("note") else ()
    value = number(row["value"], style)
    return Cell(place, value, interval(row, style), paper, markers=markers, then=then, mark=mark)


def _then(change: Change | None, style: Style) -> str:
    """Write "same", "new", or what the number was before."""
    if change is None or change.then is None or change.mark == "same":
        return "" if change is None else change.mark
    was = number(change.then["value"], style)
    return f"was {was}" if change.mark == "changed" else f"{change.mark}, was {was}"


def _paper(row: Mapping[str, Any] | None) -> Any:
    return None if row is None else row["paper"]


def _absent(row: Mapping[str, Any] | None) -> str | None:
    if row is None:
        return NOT_YET
    return None if row["value"] is not None else str(row["absent"] or "there is no number")


def _heading(column: Mapping[str, Any]) -> Heading:
    better = column.get("better", "neither")
    return Heading(column["name"], column.get("unit", ""), better, _ARROWS.get(better, ""))


def _origins(places: Sequence[Place], result: Result) -> tuple[dict[str, str], ...]:
    """Say of each row of a table which model and pictures its numbers come from, each combination once."""
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for place in places:
        row = result.rows.get(place)
        if row is None or row["value"] is None:
            continue
        origin = {
            "row": place.row,
            "model": row.get("model") or UNKNOWN,
            "weights": (row.get("weights") or UNKNOWN)[:12],
            "data": row.get("data") or UNKNOWN,
            "over": "" if row.get("count") is None else _over(row["count"], row.get("over") or "images"),
            "commit": (row.get("commit") or UNKNOWN)[:12],
            "machine": row.get("machine") or UNKNOWN,
        }
        found.setdefault(tuple(origin.values()), origin)
    return tuple(found.values())


def _over(count: int, unit: str) -> str:
    """Write "20 images", "1 image"."""
    return counted(count, unit.removesuffix("s")) if unit.endswith("s") else f"{count:,} {unit}"


def _letters(index: int) -> str:
    """0 -> "a", 25 -> "z", 26 -> "aa"."""
    text = ""
    index += 1
    while index:
        index, rest = divmod(index - 1, 26)
        text = string.ascii_lowercase[rest] + text
    return text
