"""Experiments cut down to seconds, and finished rows made by hand, as claims and footnotes read them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pullback.experiments.experiment import Cell, Experiment, Found, Measured
from pullback.experiments.run import run_experiments
from pullback.experiments.scales import SCALES, Scale
from pullback.runs.documents import ROWS
from pullback.runs.progress import Progress

Known = float | tuple[float, float, float]
"""A number, or a number with its interval: (value, low, high)."""


def finished(values: Mapping[tuple[str, str, str], Known], **about: Any) -> Found:
    """Return the rows with these values by (table, row, column); a number without an interval is its own interval.
    ``about``: what else stands in every row, such as count=32."""
    return Found(
        {"table": table, "row": row, "column": column, "count": 10, "over": "images", "note": None, **_known(known)}
        | about
        for (table, row, column), known in values.items()
    )


def lines(table: str, columns: Iterable[str], rows: Mapping[str, Iterable[Known]]) -> dict[tuple[str, str, str], Known]:
    """Return the values of a table, row by row in the order of its columns, for `finished`."""
    wanted = list(columns)
    return {
        (table, row, column): known
        for row, values in rows.items()
        for column, known in zip(wanted, values, strict=True)
    }


def of_measured(measured: Iterable[Measured]) -> Found:
    """Return rows as the runner would write them."""
    return Found(vars(one) for one in measured)


def judged(experiment: Experiment, found: Found, beginning: str) -> tuple[str, str]:
    """Return the verdict, as (word, why), on the claim of an experiment whose sentence begins like this."""
    (claim,) = [claim for claim in experiment.claims if claim.sentence.startswith(beginning)]
    verdict = claim.judge(found)
    return verdict.word, verdict.why


def _known(known: Known) -> dict[str, float]:
    value, low, high = known if isinstance(known, tuple) else (known, known, known)
    return {"value": value, "low": low, "high": high}


def cut_down(experiment: Experiment, keep: Callable[[Cell], bool], **counts: int) -> Experiment:
    """Return an experiment with some of its cells, and other counts at the scale tiny."""

    def cells(scale: Scale) -> list[Cell]:
        return [cell for cell in experiment.cells(scale) if keep(cell)]

    kept = {place for cell in cells(SCALES["tiny"]) for place in cell.places}
    tables = {place.table for place in kept}
    return replace(
        experiment,
        cells=cells,
        counts={"tiny": {**experiment.counts["tiny"], **counts}},
        paper={place: value for place, value in experiment.paper.items() if place in kept},
        figures=tuple(figure for figure in experiment.figures if figure.table in {"", *tables}),
    )


def run(experiment: Experiment, out: Path) -> list[dict[str, Any]]:
    """Run an experiment on the embedded models; return its rows, which name no commit: two runs are compared whatever
    is done in the checkout between them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pullback.experiments.run.commit", lambda: "of the test")
        run_experiments([experiment], SCALES["tiny"], out, torch.device("cpu"), Progress())
    return [json.loads(line) for line in rows_file(experiment, out).read_text().splitlines()]


def rows_file(experiment: Experiment, out: Path) -> Path:
    return out / experiment.name / ROWS
