"""What experiments about spectra look at: a decoder of a model, probed at a layer, on pictures of a role.

Diagnoses and exact spectra lie in the store of the run by everything that decides them, so that the experiments that
read the same ones share them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pullback.data.images import find_images
from pullback.experiments.experiment import Cell, Found, Measured, Place
from pullback.experiments.scales import DRAWN
from pullback.experiments.workshop import Workshop
from pullback.geometry import Regime, Tractability, classify, diagnose
from pullback.geometry.importance import exact_block_norms
from pullback.operators import DenseOperator, JacobianOperator
from pullback.probes import ProbeMap
from pullback.randnla.svd import exact_svd
from pullback.runs.files import read_arrays

RANK, SECOND_RANK = 20, 50
"""Of the paper's kappa_cap; the second one is that of its probes of several layers."""
VIEWS = 2
"""Of a drawn scene."""
VGGT_SIZE = 224
"""Pixels of a picture for VGGT: with it the full depth map has the paper's 5e4 outputs."""
_PART = 4
"""Pictures that are diagnosed, and stored, together."""
_KRYLOV_PRODUCTS = 2900
"""What a diagnosis takes where the Jacobian is too large to be formed."""


@dataclass(frozen=True)
class Subject:
    """A probe map by roles, and its name as the row of a table.

    ``layer``: a block, or "inputs", what the decoder reads. ``outputs``: M, for estimates of the work.
    ``absent``: why it cannot be measured, whatever the models.
    """

    row: str
    model: str
    decoder: str
    layer: int | str
    outputs: int
    data: str = "photos"
    absent: str | None = None

    @property
    def counted(self) -> str:
        """The name of its number of pictures in `Experiment.counts`: products with a decoder of maps take longer."""
        if self.model == "tiny-views":
            return "scenes"
        return "images" if self.decoder == "cls" or self.model == "vggt" else "dense"

    def probe(self, shop: Workshop) -> ProbeMap:
        return shop.probe(self.model, self.decoder, self.layer)

    def samples(self, shop: Workshop, first: int, count: int, total: int) -> Tensor:
        """Return the pictures first, first + 1, ... of ``total``; those of a VGGT as scenes, photographs of one view.

        Photographs for a VGGT may differ in height, so they come one at a time.
        """
        if self.model == "tiny-views":
            return shop.scenes(count, VIEWS, shop.count("view size"), skip=first)
        if self.model == "vggt":
            file = find_images(shop.scale.data[self.data])[first]
            return shop.backbone(self.model).load_views([file], VGGT_SIZE).to(shop.device)
        size = shop.count("size") if self.model == "tiny-scenes" else 224
        return shop.images(self.data, total, model=self.model, size=size)[first : first + count]

    def parts(self, total: int) -> list[tuple[int, int]]:
        """Return (first, count) of what is computed together."""
        step = 1 if self.model == "vggt" else _PART
        return [(first, min(step, total - first)) for first in range(0, total, step)]

    def identity(self, shop: Workshop) -> dict[str, Any]:
        """Return what decides its numbers, apart from the count of pictures, as plain JSON."""
        size = {"tiny-views": "view size", "tiny-scenes": "size"}.get(self.model)
        data = self.data if self.data in DRAWN else str(shop.scale.data[self.data])
        return {
            **shop.identity(self.probe(shop)),
            "data": data,
            "size": shop.count(size) if size else VGGT_SIZE,
            "seed": shop.seed,
        }

    def cell(self, places: tuple[Place, ...], run: Callable[[Workshop], Any], counts: Mapping[str, int]) -> Cell:
        """Return the cell that measures it."""
        products = min(self.outputs, _KRYLOV_PRODUCTS)
        behind = max(1, 11 - self.layer) / 12 if isinstance(self.layer, int) else 1 / 4  # of the blocks, or a head
        size = counts.get({"tiny-views": "view size", "tiny-scenes": "size"}.get(self.model, ""), 224)
        return Cell(
            key=self.row, places=places, run=run, model=self.model, data=self.data, absent=self.absent,
            forwards=3.0 * products * counts[self.counted] * behind * (size / 224) ** 2,
        )  # fmt: skip

    def at(self, row: str, layer: int | str) -> Subject:
        """Return the same decoder at another place, as another row."""
        return replace(self, row=row, layer=layer)


# Diagnoses


@dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` says of n pictures, one number each [n]."""

    kappa: Tensor  # [n, r]
    singular_values: Tensor  # [n, r]
    r_eff: Tensor
    r_eff_trunc: Tensor
    cv: Tensor
    cv_patches: Tensor
    r90: Tensor
    r90_is_bound: Tensor
    null: float
    outputs: int
    rank_limit: int  # min(M, N D)

    def kappa_at(self, rank: int) -> Tensor:
        """kappa_cap [n] at a rank, or at the largest there is."""
        return self.kappa[:, min(rank, self.kappa.shape[1]) - 1]

    @property
    def regime(self) -> Regime:
        """Of the means at the paper's rank."""
        return classify(
            kappa=float(self.kappa_at(RANK).mean()), effective_rank=float(self.r_eff.mean()), cv=float(self.cv.mean()),
            rank=RANK, max_rank=self.rank_limit,
        )  # fmt: skip


def diagnosis(shop: Workshop, subject: Subject, ranks: tuple[int, ...] = (RANK, SECOND_RANK)) -> Diagnosis:
    """Return the diagnosis of a subject, over as many pictures as the experiment counts."""
    total, probe = shop.count(subject.counted), subject.probe(shop)
    found = []
    for first, count in subject.parts(total):
        key = {"what": "diagnosis", **subject.identity(shop), "first": first, "count": count, "ranks": list(ranks)}

        def compute(first: int = first, count: int = count) -> dict[str, Tensor]:
            shop.progress.describe(f"{subject.row}: pictures {first + 1} to {first + count}")
            pictures = subject.samples(shop, first, count, total)
            return _arrays(
                diagnose(probe, pictures, ranks, normalized=True, seed=shop.seed + first, convergence_samples=0)
            )

        found.append(shop.kept(key, compute))
    joined = {name: torch.cat([part[name] for part in found]).cpu() for name in found[0]}
    null, outputs, limit = joined.pop("facts").reshape(-1, 3)[0].tolist()
    return Diagnosis(**joined, null=null, outputs=int(outputs), rank_limit=int(limit))


def _arrays(report: Tractability) -> dict[str, Tensor]:
    samples = report.samples
    values = torch.tensor([sample.singular_values for sample in samples], dtype=torch.float64)
    energy = torch.tensor([sample.energy[0] for sample in samples], dtype=torch.float64)

    def column(pick: Callable[[Any], float]) -> Tensor:
        return torch.tensor([pick(sample) for sample in samples], dtype=torch.float64)

    return {
        "kappa": values.square().cumsum(1) / energy[:, None],
        "singular_values": values,
        "r_eff": column(lambda sample: sample.r_eff_slq[0]),
        "r_eff_trunc": column(lambda sample: sample.r_eff_trunc[0]),
        "cv": column(lambda sample: sample.cv[0]),
        "cv_patches": column(lambda sample: sample.cv_patches[0]),
        "r90": column(lambda sample: sample.r90[0]),
        "r90_is_bound": column(lambda sample: sample.r90[1]),
        "facts": torch.tensor([[report.cv_null, report.output_size, report.max_rank]], dtype=torch.float64),
    }


def add_spectrum(shop: Workshop, subject: Subject, found: Diagnosis) -> None:
    """Add singular values over the largest one to the figure "spectrum" of the experiment."""
    path = shop.folder / "arrays" / "spectrum.npz"
    known = read_arrays(path) if path.is_file() else {}
    shop.keep("spectrum", {**known, subject.row: found.singular_values / found.singular_values[:, :1]})


# Exact spectra


def dense_jacobian(shop: Workshop, subject: Subject, number: int, total: int) -> tuple[DenseOperator, int]:
    """Return the Jacobian at one picture as a matrix, by M VJPs, and the number of its tokens."""
    probe = subject.probe(shop)
    features = probe.features(subject.samples(shop, number, 1, total), normalized=True)
    return DenseOperator(JacobianOperator(probe, features).dense()), features.shape[1]


def exact_spectrum(shop: Workshop, subject: Subject, total: int) -> dict[str, Tensor]:
    """Return of ``total`` pictures "singular_values" [n, p], all of them; of the leading 20 modes the energy of each
    token, "token_energies" [n, 20, N]; "block_norms" [n, N], |J_:,t|_F; and "width" [n], D. Float64, on the CPU."""
    found = []
    for number in range(total):
        key = {"what": "exact", **subject.identity(shop), "number": number}

        def compute(number: int = number) -> dict[str, Tensor]:
            shop.progress.describe(f"{subject.row}: picture {number + 1} of {total}")
            matrix, tokens = dense_jacobian(shop, subject, number, total)
            svd = exact_svd(matrix, min(RANK, matrix.rows))
            assert svd.spectrum is not None and svd.column_energies is not None  # as of every exact one
            modes = svd.right.mT.double().unflatten(-1, (tokens, -1))
            norms = exact_block_norms(svd.column_energies, tokens, round_off=matrix.round_off)
            return {
                "singular_values": svd.spectrum.double(),
                "token_energies": modes.square().sum(-1),
                "block_norms": norms.squared.value.clamp_min(0).sqrt(),
                "width": torch.tensor([matrix.cols // tokens]),
            }

        found.append(shop.kept(key, compute))
    return {name: torch.cat([part[name] for part in found]).cpu() for name in found[0]}


# Rows about subjects


def places(table: str, row: str, columns: Sequence[str]) -> tuple[Place, ...]:
    return tuple(Place(table, row, column) for column in columns)


def constant(place: Place, value: float, note: str | None = None, *, count: int | None = None) -> Measured:
    """Return a number without an interval."""
    return Measured(*place, value, count=count, note=note)


def deciding(
    found: Found, table: str, papers: Sequence[Subject], ours: Sequence[Subject], columns: Sequence[str]
) -> list[Subject]:
    """Return whose rows decide a claim: the paper's own models where any was measured, else ours. Rows that lack a
    value in one of the columns decide nothing."""

    def measured(subject: Subject) -> bool:
        return all(found.value(table, subject.row, column) is not None for column in columns)

    return [own for own in papers if measured(own)] or [own for own in ours if measured(own)]


def deciding_rows(
    found: Found, papers: Sequence[Subject], ours: Sequence[Subject], wanted: Mapping[str, Sequence[str]]
) -> list[str]:
    """Return the names of the rows that decide a claim about several tables, as `deciding` does; ``wanted``: by table
    the columns that a row must have."""

    def complete(own: Subject) -> bool:
        return all(found.value(table, own.row, column) is not None for table in wanted for column in wanted[table])

    return [own.row for own in papers if complete(own)] or [own.row for own in ours if complete(own)]


def told(found: Found, table: str, rows: Iterable[str], columns: Mapping[str, str], otherwise: str = "") -> str:
    """Say the values of these rows, "ROW: COLUMN VALUE, ...; ..."; ``columns``: a format by column. ``otherwise``: what
    to say if there are no rows."""
    parts = []
    for row in rows:
        values = found.columns(table, row)
        known = [f"{column} {columns[column].format(values[column])}" for column in columns if column in values]
        parts.append(f"{row}: {', '.join(known)}")
    return "; ".join(parts) or otherwise


def low(found: Found, table: str, row: str, column: str) -> float:
    """Return the lower end of the interval of a number that was measured, or the number where it has none."""
    return _end(found, table, row, column, "low")


def high(found: Found, table: str, row: str, column: str) -> float:
    """Return the upper end of the interval of a number that was measured, or the number where it has none."""
    return _end(found, table, row, column, "high")


def _end(found: Found, table: str, row: str, column: str, end: str) -> float:
    known = found.row(table, row, column)
    assert known is not None  # of the rows that decide
    return float(known["value"] if known[end] is None else known[end])
