"""Run experiments: cell by cell, each kept when it is done, so that a run that was killed goes on where it was.

Rows are appended in the order of the cells, those of a cell all or none: a cell of which a killed run left a part is
measured again. Apart from times, the rows of a run that was killed and continued are therefore those of one that was
not, byte for byte; nothing in them depends on when they were made.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from traceback import clear_frames
from typing import Any

import torch
from torch.backends import cudnn

from pullback import __version__
from pullback.errors import FileError, PullbackError, counted
from pullback.experiments.experiment import ABSENT, Cell, Claim, Experiment, Found, Measured, Place
from pullback.experiments.scales import DATA, MODELS, Scale
from pullback.experiments.workshop import Workshop
from pullback.operators.linearization import differentiable_attention
from pullback.runs.documents import EXPERIMENT, REPRODUCE, ROWS, TIMES
from pullback.runs.files import make_folder, one_at_a_time, remove_unfinished, write_json
from pullback.runs.folder import claim_folder
from pullback.runs.progress import Progress
from pullback.runs.provenance import commit, machine, now
from pullback.runs.rows import Rows, finite
from pullback.runs.settings import keep_settings

_HASH_DIGITS = 16


def run_experiments(
    experiments: Sequence[Experiment], scale: Scale, out: Path, device: torch.device, progress: Progress
) -> list[dict[str, Any]]:
    """Fill ``out`` with the rows of these experiments; return what their experiment.json hold.

    What fails leaves other cells and experiments untouched: the first error is raised when all others are done. Several
    processes may fill one folder: each experiment, and what experiments share, is made by one of them at a time.
    """
    planned = [(own, own.checked_cells(scale)) for own in experiments]  # nothing runs before everything is checked
    claim_folder(out, "reproduce")
    roles = (*MODELS, *DATA)  # a role may be added later: what was absent without it is measured then
    with one_at_a_time(out / REPRODUCE):
        keep_settings(out / REPRODUCE, _settings(scale), holds="experiments", places=roles, may_be_added=roles)
    remove_unfinished(make_folder(out / "store"))
    documents: list[dict[str, Any]] = []
    failed: dict[str, Exception] = {}
    for own, cells in planned:
        try:
            with one_at_a_time(make_folder(out / own.name)):
                documents.append(run_experiment(own, cells, Workshop(own, scale, out, device, progress)))
        except Exception as error:
            failed[own.name] = error
    for name, first in failed.items():
        if isinstance(first, PullbackError):
            others = f" {counted(len(failed) - 1, 'other experiment')} failed as well." if len(failed) > 1 else ""
            first.args = (f"{first} (In experiment {name}.{others} The finished ones are kept.)",)
        raise first
    return documents


def run_experiment(experiment: Experiment, cells: Sequence[Cell], shop: Workshop) -> dict[str, Any]:
    """Measure the cells that are not there yet, judge the claims, and write experiment.json; return that. Where a cell
    fails the others are measured, and nothing is judged: the next run has less to do."""
    scale, folder = shop.scale, make_folder(shop.folder)
    remove_unfinished(folder)
    files = {
        timed: CellRows(folder / name, cells, scale, timed=timed) for timed, name in ((False, ROWS), (True, TIMES))
    }
    origin = {
        "seed": scale.seed,
        "scale": scale.name,
        "commit": commit(),
        "machine": machine(shop.device, threads=True),
    }
    done = sum(files[cell.timed].has(cell) for cell in cells)
    shop.progress.work(experiment.name, len(cells), "cells", done)
    failed: list[Exception] = []
    for cell in cells:
        if files[cell.timed].has(cell):
            continue
        shop.progress.describe(f"{experiment.name}: {cell.key}")
        try:
            with nullcontext() if cell.timed else repeatable(shop.device):
                rows_of_cell = _rows(experiment, cell, shop, origin)
        except FileError:  # such as a full disk, which no other cell would fare better with
            raise
        except Exception as error:
            shop.progress.note(f"{experiment.name}: {cell.key}: {type(error).__name__}: {error}")
            clear_frames(error.__traceback__)  # which hold tensors that fill the memory of a GPU
            failed.append(error)
            continue
        files[cell.timed].add(cell, rows_of_cell)
        shop.progress.advance(1)
        if shop.device.type == "cuda":
            torch.cuda.empty_cache()  # other processes may fill the same folder on the same GPU
    if failed:
        raise failed[0]
    rows = ordered(cells, files)
    found = Found(rows)
    notes = [note(found) for note in experiment.footnotes]
    document = {
        "name": experiment.name,
        "title": experiment.title,
        "paper_label": experiment.paper_label,
        "about": experiment.about,
        "command": command_of(experiment, scale),
        "columns": [asdict(column) for column in experiment.columns],
        "places": [list(place) for cell in cells for place in cell.places],
        "claims": [_judged(claim, rows, scale) for claim in experiment.claims],
        "footnotes": [note for note in notes if note],
        "figures": [asdict(figure) for figure in experiment.figures],
        "scale": scale.name,
        "substitutes": {role: said for role, said in scale.substitutes.items() if scale.has(role)},
        "seed": scale.seed,
        "date": now(),
        "machine": origin["machine"],
        "pullback": __version__,
    }
    write_json(folder / EXPERIMENT, document)
    shop.progress.finished(experiment.name, _line(document, rows))
    return document


@contextmanager
def repeatable(device: torch.device) -> Iterator[None]:
    """Take kernels on a GPU whose gradients add up in the same order every time: those of fused attention and of some
    convolutions do not, and what is trained with them is another network in every run. Nothing is timed inside."""
    if device.type != "cuda":
        yield
        return
    before, cudnn.deterministic = cudnn.deterministic, True
    try:
        with differentiable_attention():
            yield
    finally:
        cudnn.deterministic = before


class CellRows:
    """The rows of an experiment on disk, cell by cell."""

    def __init__(self, path: Path, cells: Iterable[Cell], scale: Scale, *, timed: bool) -> None:
        self._file = Rows(path)
        stored: dict[str, list[dict[str, Any]]] = {}
        for row in self._file.each():
            stored.setdefault(row["cell"], []).append(row)
        wanted = {cell.key: cell for cell in cells if cell.timed is timed}
        whole = {key: rows for key, rows in stored.items() if key in wanted and _is_whole(rows, wanted[key], scale)}
        if whole.keys() != stored.keys():  # a killed run left a part, a role was added, or the places have changed
            self._file.keep(lambda row: row["cell"] in whole)
        self._rows = whole

    def has(self, cell: Cell) -> bool:
        return cell.key in self._rows

    def of(self, cell: Cell) -> list[dict[str, Any]]:
        return self._rows.get(cell.key, [])

    def add(self, cell: Cell, rows: list[dict[str, Any]]) -> None:
        self._file.add(rows, durable=True)
        self._rows[cell.key] = rows


def _is_whole(rows: Sequence[Mapping[str, Any]], cell: Cell, scale: Scale) -> bool:
    """Whether these are all rows of a cell, and none is absent for want of what the scale has by now."""
    told = [Place(row["table"], row["row"], row["column"]) for row in rows] == list(cell.places)
    lacked = any((row["absent"] or "").startswith(ABSENT) for row in rows)
    return told and not (lacked and scale.why_absent(cell) is None)


def ordered(cells: Iterable[Cell], files: Mapping[bool, CellRows]) -> list[dict[str, Any]]:
    """Return all rows in the order of the cells, timed or not."""
    return [row for cell in cells for row in files[cell.timed].of(cell)]


def command_of(experiment: Experiment, scale: Scale) -> str:
    """Return what regenerates the rows of an experiment, with folders by their roles."""
    given = [f"--model {role}=…" for role in scale.models if role not in ("tiny-scenes", "tiny-views")]
    given += [f"--images {role}=…" for role, place in scale.data.items() if place != "drawn"]
    seed = [f"--seed {scale.seed}"] if scale.seed else []
    parts = [f"pullback reproduce {experiment.name}", f"--scale {scale.name}", *given, *seed, "--out DIR"]
    return " ".join(parts)


def _judged(claim: Claim, rows: Iterable[Mapping[str, Any]], scale: Scale) -> dict[str, Any]:
    """Return a verdict, with the models "on" whose rows it was judged, and whether all of them are a "stand_in" for the
    paper's own: such a verdict is about the effect, not about the paper's numbers."""
    found = Found(rows)
    verdict = claim.judge(found)
    models = sorted(found.models) if verdict.word != ABSENT else []
    stand_in = bool(models) and not scale.own_models() & set(models)
    return {"sentence": claim.sentence, "where": claim.where, **asdict(verdict), "on": models, "stand_in": stand_in}


def _settings(scale: Scale) -> dict[str, Any]:
    roles = {role: scale.models.get(role, scale.data.get(role)) for role in (*MODELS, *DATA)}
    return {"scale": scale.name, "seed": scale.seed, **roles}


def _rows(experiment: Experiment, cell: Cell, shop: Workshop, origin: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Measure a cell, or say why it is absent; return its rows."""
    absent = shop.scale.why_absent(cell)
    found: dict[Place, Measured] = {}
    if absent is None and cell.run is not None:
        found = {one.place: one for one in cell.run(shop)}
        if set(found) != set(cell.places):
            differing = sorted(set(found) ^ set(cell.places))
            raise PullbackError(f"experiment {experiment.name}: cell {cell.key!r} gave other places: {differing}.")
    about = {
        "cell": cell.key,
        "seed": origin["seed"],
        "model": shop.scale.shown(cell.model),
        "weights": shop.weights(cell.model)[:_HASH_DIGITS] if absent is None and cell.model else None,
        "data": cell.data or None,
        "scale": origin["scale"],
        "commit": origin["commit"],
        "machine": origin["machine"],
    }
    return [{**_numbers(place, found.get(place), absent, experiment), **about} for place in cell.places]


def _numbers(place: Place, one: Measured | None, absent: str | None, experiment: Experiment) -> dict[str, Any]:
    value = None if one is None else finite(float(one.value))
    if one is not None and value is None:
        absent = "not a finite number"  # such as a correlation of constants; said, and never shown as a number
    return {
        **place._asdict(),
        "value": value,
        "low": None if one is None or one.low is None else finite(float(one.low)),
        "high": None if one is None or one.high is None else finite(float(one.high)),
        "paper": experiment.paper.get(place),
        "absent": absent,
        "count": None if one is None else one.count,
        "over": None if one is None else one.over,
        "note": None if one is None else one.note,
    }


def _line(document: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    measured = sum(row["value"] is not None for row in rows)
    words = [claim["word"] for claim in document["claims"]]
    said = ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(words))
    return f"{measured} of {counted(len(rows), 'number')}" + (f"; claims: {said}" if said else "")
