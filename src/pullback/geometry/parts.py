"""The batches that a diagnosis has finished, as rows of a file: what is computed once is never computed again.

A row holds every number at full precision, so that a run which goes on from here ends with the very same results.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pullback.geometry.diagnosis import ConvergenceRow, Part, SampleDiagnosis
from pullback.operators import ProductCount
from pullback.runs.rows import Rows, finite

Pair = tuple[float, float]


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
    return {
        "first": part.first,
        "method": part.method,
        "products": _counts(part.products),
        "seconds": part.seconds,
        "samples": [_sample_row(sample) for sample in part.samples],
        "importance": part.importance.float().tolist(),  # as float32, in which importance.npz has it
        "convergence": [
            {
                "rounds": row.rounds,
                "paper_q": row.paper_q,
                "alignment_error": _numbers(row.alignment_error),
                "gradient_signal_ratio": _numbers(row.gradient_signal_ratio),
            }
            for row in part.convergence
        ],
    }


def _part(row: dict[str, Any]) -> Part:
    return Part(
        first=row["first"],
        samples=tuple(map(_sample, row["samples"])),
        importance=torch.tensor(row["importance"], dtype=torch.float32),
        convergence=tuple(
            ConvergenceRow(
                table["rounds"],
                table["paper_q"],
                _tensor(table["alignment_error"]),
                _tensor(table["gradient_signal_ratio"]),
            )
            for table in row["convergence"]
        ),
        method=row["method"],
        products=ProductCount(**row["products"]),
        seconds=row["seconds"],
    )


_PAIRS = ("r_eff_trunc", "r_eff_slq", "cv", "cv_patches", "energy")


def _sample_row(sample: SampleDiagnosis) -> dict[str, Any]:
    return {
        "kappa": {str(rank): _finite(pair) for rank, pair in sample.kappa.items()},
        **{name: _finite(getattr(sample, name)) for name in _PAIRS},
        "r90": list(sample.r90),
        "gradient_signal_ratio": finite(sample.gradient_signal_ratio),
        "singular_values": list(sample.singular_values),
        "products": _counts(sample.products),
    }


def _sample(row: dict[str, Any]) -> SampleDiagnosis:
    rank, is_bound = row["r90"]
    return SampleDiagnosis(
        kappa={int(rank): _pair(pair) for rank, pair in row["kappa"].items()},
        **{name: _pair(row[name]) for name in _PAIRS},
        r90=(rank, is_bound),
        gradient_signal_ratio=_number(row["gradient_signal_ratio"]),
        singular_values=tuple(row["singular_values"]),
        products=ProductCount(**row["products"]),
    )


def _counts(products: ProductCount) -> dict[str, int]:
    return {"jvp": products.jvp, "vjp": products.vjp}


def _finite(pair: Pair) -> list[float | None]:
    return [finite(number) for number in pair]


def _pair(stored: list[float | None]) -> Pair:
    return _number(stored[0]), _number(stored[1])


def _number(stored: float | None) -> float:
    return math.nan if stored is None else stored


def _numbers(values: Tensor) -> list[float | None]:
    return [finite(value) for value in values.tolist()]


def _tensor(stored: list[float | None]) -> Tensor:
    return torch.tensor([_number(value) for value in stored], dtype=torch.float64)
