"""Targets of many images as one table of tensors: what training reads, from disk or straight from memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from pullback.data.crops import Crop
from pullback.errors import PullbackError
from pullback.operators import ProductCount
from pullback.targets.recipe import Targets


@dataclass(frozen=True, eq=False)
class TargetTable:
    """n rows of N tokens; a row is an image or a crop of it. Tensors are on the CPU."""

    keys: tuple[str, ...]
    image_sha256: tuple[str, ...]
    crop_index: tuple[int, ...]  # 0: the plain image
    crops: tuple[Crop | None, ...]  # None: the plain image, as `read_images` has it
    singular_values: Tensor  # [n, r] float32
    importance: Tensor  # [n, N] float32, imp*
    block_energy: Tensor  # [n, N] float32, |J_:,t|_F^2
    block_energy_se: Tensor  # [n, N] float32
    kappa: Tensor  # [n] float64, kappa_cap(r)
    kappa_se: Tensor  # [n] float64
    total: Tensor  # [n] float64, |J|_F^2
    total_se: Tensor  # [n] float64
    modes: Tensor | None = None  # [n, r, N, D] float16

    @classmethod
    def of(
        cls,
        targets: Targets,
        keys: Sequence[str],
        image_sha256: Sequence[str],
        crop_index: Sequence[int],
        crops: Sequence[Crop | None],
    ) -> TargetTable:
        """Make a table of the targets of some images, moved to the CPU and rounded to what a store keeps."""
        energy = targets.block_energy
        return cls(
            tuple(keys),
            tuple(image_sha256),
            tuple(crop_index),
            tuple(crops),
            singular_values=targets.singular_values.float().cpu(),
            importance=targets.importance.float().cpu(),
            block_energy=energy.value.float().cpu(),
            block_energy_se=energy.se.float().cpu(),
            kappa=targets.kappa.value.cpu(),
            kappa_se=targets.kappa.se.cpu(),
            total=targets.total.value.cpu(),
            total_se=targets.total.se.cpu(),
            modes=None if targets.modes is None else targets.modes.half().cpu(),
        )

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def tokens(self) -> int:
        return self.importance.shape[1]

    @property
    def rank(self) -> int:
        return self.singular_values.shape[1]

    @property
    def block_norm(self) -> Tensor:
        """|J_:,t|_F [n, N], the target of the paper's ablation E.1."""
        return self.block_energy.clamp_min(0).sqrt()

    def select(self, rows: Sequence[int] | Tensor) -> TargetTable:
        """Return these rows, in this order."""
        chosen = [int(row) for row in rows]

        def pick(column: Any) -> Any:
            return column[chosen] if isinstance(column, Tensor) else tuple(column[row] for row in chosen)

        columns: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        picked: dict[str, Any] = {name: None if column is None else pick(column) for name, column in columns.items()}
        return TargetTable(**picked)

    @classmethod
    def join(cls, tables: Sequence[TargetTable]) -> TargetTable:
        """Join tables of one token count and rank."""
        if not tables:
            raise PullbackError("tables: expected at least one, got none.")
        shapes = {(table.tokens, table.rank) for table in tables}
        if len(shapes) > 1:
            raise PullbackError(
                f"tables: expected one number of tokens and one rank, got {sorted(shapes)} (tokens, rank). "
                "Keep images of different sizes in tables of their own."
            )

        def joined(name: str) -> Any:
            parts = [getattr(table, name) for table in tables]
            if any(part is None for part in parts):
                return None
            return torch.cat(parts) if isinstance(parts[0], Tensor) else tuple(cell for part in parts for cell in part)

        return cls(**{field.name: joined(field.name) for field in fields(cls)})


@dataclass(frozen=True)
class SkippedItem:
    """An image that could not be used, and why."""

    key: str
    reason: str


@dataclass(frozen=True)
class Shard:
    """The rows that are computed and written together. No ``table`` when none of the images could be read."""

    number: int
    table: TargetTable | None
    skipped: tuple[SkippedItem, ...]
    seconds: float
    products: ProductCount = field(default_factory=ProductCount)  # per row
    method: str | None = None

    def __len__(self) -> int:
        return 0 if self.table is None else len(self.table)
