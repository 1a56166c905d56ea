"""The batches that a diagnosis has finished, as rows of a file: what is computed once is never computed again.

A row holds every number at full precision, so that a run which goes on from here ends with the very same results.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pullback.geometry.diagnosis import ConvergenceRow, Part, SampleDiagnosis
from pullback.operators import ProductCount
from pullback.runs.rows import Rows, finite


class FinishedParts:
    """The parts in a file, by layer and by group of samples of one shape."""

    def __init__(self, path: Path) -> None:
        self._rows = Rows(path)
        self._found: dict[tuple[int | str, int], list[Part]] = {}
        for row in self._rows.read():
            known, part = self._found.setdefault((row["layer"], row["group"]), []), _part(row)
            if part.first == sum(len(other.samples) for other in known):  # two runs at once may write a part twice
                known.append(part)

    def of(self, layer: int | str, group: int) -> list[Part]:
        """Return the finished parts, in order."""
        return self._found.get((layer, group), [])

    def count(self, layer: int | str) -> int:
        """Return how many samples of a layer are finished."""
        return sum(len(part.samples) for (own, _), parts in self._found.items() if own == layer for part in parts)

    def add(self, layer: int | str, group: int, part: Part) -> None:
        """Append a part to the file."""
        self._rows.add([{"layer": layer, "group": group, **_row(part)}])


def _row(part: Part) -> dict[str, Any]:
    """Return a part as plain JSON; importance as float32, in which importance.npz has it."""
    row: dict[str, Any] = _plain(asdict(replace(part, importance=part.importance.float())))
    return row


def _plain(value: Any) -> Any:
    """Turn tensors and tuples into lists, and NaN and infinity, for which strict JSON has no words, into None."""
    if isinstance(value, Tensor):
        return _plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return finite(value) if isinstance(value, float) else value


def _part(row: Mapping[str, Any]) -> Part:
    tables = (
        ConvergenceRow(
            **{**table, **{name: torch.tensor(_numbers(table[name]), dtype=torch.float64) for name in _TENSORS}}
        )
        for table in row["convergence"]
    )
    return Part(
        first=row["first"],
        samples=tuple(map(_sample, row["samples"])),
        importance=torch.tensor(row["importance"], dtype=torch.float32),
        convergence=tuple(tables),
        method=row["method"],
        products=ProductCount(**row["products"]),
        seconds=row["seconds"],
    )


_TENSORS = ("alignment_error", "gradient_signal_ratio")  # of a `ConvergenceRow`


def _sample(row: Mapping[str, Any]) -> SampleDiagnosis:
    values = {name: _numbers(value) for name, value in row.items() if name not in ("kappa", "products")}
    kappa = {int(rank): _numbers(pair) for rank, pair in row["kappa"].items()}
    return SampleDiagnosis(kappa=kappa, products=ProductCount(**row["products"]), **values)


def _numbers(stored: Any) -> Any:
    """Turn None back into NaN, and lists into tuples."""
    if isinstance(stored, list):
        return tuple(map(_numbers, stored))
    return math.nan if stored is None else stored
