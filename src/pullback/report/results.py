"""What `pullback reproduce` left in a folder, read as it stands: experiments, their rows by place, what is unfinished.

    read_results(DIR) → Results: settings, and for each experiment a Result: document, rows, arrays on demand

Nothing is measured or judged here. An experiment without experiment.json was not finished; its rows are counted and
otherwise left alone, since claims are judged from all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pullback.errors import FileError, PullbackError
from pullback.runs import documents as files
from pullback.runs.files import read_arrays, read_json
from pullback.runs.rows import Rows

WORDS = ("holds", "holds partly", "does not hold", "not at this scale")
"""What a claim of the paper may come to, in the order in which reports list them."""
_IN_A_ROW = ("table", "row", "column", "value", "low", "high", "paper", "absent")
_IN_A_DOCUMENT = ("title", "about", "command", "columns", "places", "claims", "figures", "scale", "seed")


class Place(NamedTuple):
    """Where a number stands in an experiment."""

    table: str
    row: str
    column: str


@dataclass(frozen=True)
class Result:
    """An experiment. ``document`` is experiment.json, None where it is unfinished; ``rows`` are those of rows.jsonl
    and times.jsonl by place, ``timed`` the places of the latter."""

    name: str
    folder: Path
    document: Mapping[str, Any] | None
    rows: Mapping[Place, Mapping[str, Any]]
    timed: frozenset[Place] = frozenset()

    @property
    def places(self) -> list[Place]:
        """All places, in the order of the experiment's cells."""
        return [Place(*place) for place in self.document["places"]] if self.document else list(self.rows)

    def arrays(self, figure: str) -> dict[str, np.ndarray]:
        """Return the arrays that a figure is drawn from, or raise an error that names their file."""
        path = self.folder / "arrays" / f"{figure}.npz"
        if not path.is_file():
            raise PullbackError(f"figure: there is no arrays/{path.name}.")
        return read_arrays(path)


@dataclass(frozen=True)
class Results:
    """A folder of experiments. ``settings``: its scale, its seed, and what plays each role."""

    folder: Path
    settings: Mapping[str, Any]
    experiments: Sequence[Result] = field(default_factory=list)

    @property
    def finished(self) -> list[Result]:
        return [own for own in self.experiments if own.document is not None]

    @property
    def unfinished(self) -> list[Result]:
        return [own for own in self.experiments if own.document is None]

    def command(self, name: str) -> str:
        """Return what measures an experiment with the models and pictures of this folder, by their roles."""
        for own in self.finished:
            assert own.document is not None
            said = str(own.document["command"])
            if said.startswith(f"pullback reproduce {own.name} "):
                return said.replace(f"reproduce {own.name} ", f"reproduce {name} ", 1)
        seed = f" --seed {self.settings['seed']}" if self.settings.get("seed") else ""
        return f"pullback reproduce {name} --scale {self.settings['scale']}{seed} --out DIR"


def read_results(folder: Path, order: Sequence[str] = ()) -> Results:
    """Read a folder; experiments in ``order`` come first, others by name. Nothing is written."""
    if not (folder / files.REPRODUCE).is_file():
        raise PullbackError(
            f"folder: expected {files.REPRODUCE} in {folder}, which `pullback reproduce ... --out {folder}` writes "
            "there. Name the folder of such a run."
        )
    settings = read_json(folder / files.REPRODUCE)
    if not {"scale", "seed"} <= set(settings):
        raise FileError(f"folder: {folder / files.REPRODUCE} names no scale and seed. Run `pullback reproduce` anew.")
    there = sorted(
        path.parent.name
        for path in {*folder.glob(f"*/{files.EXPERIMENT}"), *folder.glob(f"*/{files.ROWS}")}
        if not path.parent.name.startswith(".")
    )
    names = dict.fromkeys([*(name for name in order if name in there), *there])
    return Results(folder, settings, [_read(folder / name) for name in names])


def _read(folder: Path) -> Result:
    document = read_json(folder / files.EXPERIMENT) if (folder / files.EXPERIMENT).is_file() else None
    missing = [key for key in _IN_A_DOCUMENT if document is not None and key not in document]
    if missing:
        raise FileError(f"folder: {folder / files.EXPERIMENT} lacks {', '.join(missing)}. {_again(folder)}")
    rows, times = (_rows(folder / name) for name in (files.ROWS, files.TIMES))
    return Result(folder.name, folder, document, {**rows, **times}, frozenset(times))


def _rows(path: Path) -> dict[Place, dict[str, Any]]:
    try:
        rows = Rows(path).read(cut=False)  # of a run that goes on meanwhile, the last line may be half-written
    except FileError as error:
        message = str(error).removeprefix("out: ").partition(" Choose")[0]
        raise FileError(f"folder: {message} Delete that line. {_again(path.parent)}") from None
    found: dict[Place, dict[str, Any]] = {}
    for number, row in enumerate(rows, start=1):
        if not (isinstance(row, dict) and all(key in row for key in _IN_A_ROW)):
            raise FileError(
                f"folder: line {number} of {path} is no row of an experiment. Delete it. {_again(path.parent)}"
            )
        found[Place(row["table"], row["row"], row["column"])] = row
    return found


def _again(folder: Path) -> str:
    return f"Run `pullback reproduce {folder.name}` again, with what it was run with: it measures what is missing."
