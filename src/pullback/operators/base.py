"""Linear operators that are known by their products alone, for a batch of samples at once.

A subclass provides its sizes and two products, ``_matmat`` and ``_rmatmat``, on tensors that always carry the
batch axis. Everything else follows: shape checks, ``@``, ``.T``, composition, the dense matrix, the product counter.

Shapes: for B samples an operator maps V [B, n, k] to [B, m, k] and its transpose maps W [B, m, k] to [B, n, k].
With a single sample the batch axis may be dropped, V [n, k] or a vector [n]; the answer then has none either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pullback.checks import of_kind
from pullback.errors import ShapeError
from pullback.operators.execution import round_off_of


@dataclass(frozen=True)
class ProductCount:
    """Products spent per sample: one column of V is one JVP, one column of W is one VJP."""

    jvp: int = 0
    vjp: int = 0

    def __add__(self, other: ProductCount) -> ProductCount:
        return ProductCount(self.jvp + other.jvp, self.vjp + other.vjp)

    def __sub__(self, other: ProductCount) -> ProductCount:
        return ProductCount(self.jvp - other.jvp, self.vjp - other.vjp)

    def __mul__(self, samples: int) -> ProductCount:
        return ProductCount(self.jvp * samples, self.vjp * samples)

    @staticmethod
    def most(counts: Sequence[ProductCount]) -> ProductCount:
        """Return the largest number of each kind."""
        return ProductCount(max(count.jvp for count in counts), max(count.vjp for count in counts))

    @property
    def pairs(self) -> float:
        """JVP/VJP pairs, the unit in which the paper counts cost."""
        return (self.jvp + self.vjp) / 2

    @property
    def total(self) -> int:
        return self.jvp + self.vjp


class LinearOperator:
    """A batch of ``batch`` linear maps from R^cols to R^rows."""

    def __init__(self, batch: int, rows: int, cols: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.batch, self.rows, self.cols = batch, rows, cols
        self.dtype, self.device = dtype, device
        self._products = ProductCount()

    def _matmat(self, columns: Tensor) -> Tensor:
        """[B, cols, k] -> [B, rows, k]."""
        raise TypeError(f"{type(self).__name__} must define _matmat")

    def _rmatmat(self, columns: Tensor) -> Tensor:
        """[B, rows, k] -> [B, cols, k]."""
        raise TypeError(f"{type(self).__name__} must define _rmatmat")

    def __repr__(self) -> str:
        spent = self.products
        counts = f"{spent.jvp} JVPs and {spent.vjp} VJPs a sample" if spent.total else "no products yet"
        size = f"{self.rows} x {self.cols}"
        kind = f"{str(self.dtype).removeprefix('torch.')} on {self.device}"
        return f"{type(self).__name__}({size}, batch of {self.batch}, {kind}, {counts})"

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.batch, self.rows, self.cols

    @property
    def products(self) -> ProductCount:
        """Products with this operator so far, per sample. Subtract two readings to count those of a computation."""
        return sum((leaf._products for leaf in self._leaves()), ProductCount())

    @property
    def round_off(self) -> float:
        """Relative standard error that rounding leaves in squared norms of products: the floor under error bars."""
        return round_off_of(self.dtype)

    def _leaves(self) -> set[LinearOperator]:
        """The operators on which products are counted, each once: J.T @ J counts J."""
        return {self}

    def matmat(self, columns: Tensor) -> Tensor:
        """Multiply: [B, cols, k] -> [B, rows, k]."""
        columns, restore = self._as_batch(columns, self.cols, "V in A @ V")
        self._products += ProductCount(jvp=columns.shape[-1])
        return restore(self._matmat(columns) if columns.numel() else columns.new_zeros(self.batch, self.rows, 0))

    def rmatmat(self, columns: Tensor) -> Tensor:
        """Multiply by the transpose: [B, rows, k] -> [B, cols, k]."""
        columns, restore = self._as_batch(columns, self.rows, "W in A.T @ W")
        self._products += ProductCount(vjp=columns.shape[-1])
        return restore(self._rmatmat(columns) if columns.numel() else columns.new_zeros(self.batch, self.cols, 0))

    @property
    def T(self) -> LinearOperator:
        return Transposed(self)

    def __matmul__(self, other: Any) -> Any:
        """Compose with an operator, or multiply a tensor."""
        return Composed(self, other) if isinstance(other, LinearOperator) else self.matmat(other)

    def dense(self) -> Tensor:
        """Build the explicit matrices [B, rows, cols] by products with the identity of the smaller side."""
        if self.rows < self.cols:
            return self.rmatmat(self._identity(self.rows)).mT
        return self.matmat(self._identity(self.cols))

    def _identity(self, size: int) -> Tensor:
        return torch.eye(size, dtype=self.dtype, device=self.device).expand(self.batch, size, size)

    def _as_batch(self, columns: Tensor, expected: int, name: str) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        of_kind(name, columns, Tensor, f"a tensor of shape [{self.batch}, {expected}, k]", ShapeError)
        given = tuple(columns.shape)
        if columns.ndim == 3:
            batched, restore = columns, lambda out: out
        elif columns.ndim == 2 and self.batch == 1:
            batched, restore = columns[None], lambda out: out[0]
        elif columns.ndim == 1 and self.batch == 1:
            batched, restore = columns[None, :, None], lambda out: out[0, :, 0]
        else:
            raise ShapeError(self._shape_message(name, expected, given))
        if batched.shape[0] != self.batch or batched.shape[1] != expected:
            raise ShapeError(self._shape_message(name, expected, given))
        if batched.dtype != self.dtype or batched.device != self.device:
            batched = batched.to(dtype=self.dtype, device=self.device)
        return batched, restore

    def _shape_message(self, name: str, expected: int, given: tuple[int, ...]) -> str:
        short = f" (or [{expected}, k] or [{expected}] for one sample)" if self.batch == 1 else ""
        return (
            f"{name}: expected shape [{self.batch}, {expected}, k]{short}, got {list(given)}. "
            f"Columns are flattened feature maps: use tokens.flatten(-2)[..., None] for a single direction."
        )


class Transposed(LinearOperator):
    """The transpose of an operator. Its products count as VJPs and JVPs of the operator that it transposes."""

    def __init__(self, base: LinearOperator) -> None:
        super().__init__(base.batch, base.cols, base.rows, dtype=base.dtype, device=base.device)
        self.base = base

    @property
    def round_off(self) -> float:
        return self.base.round_off

    def _leaves(self) -> set[LinearOperator]:
        return self.base._leaves()

    @property
    def T(self) -> LinearOperator:
        return self.base

    def _matmat(self, columns: Tensor) -> Tensor:
        return self.base.rmatmat(columns)

    def _rmatmat(self, columns: Tensor) -> Tensor:
        return self.base.matmat(columns)


class Composed(LinearOperator):
    """The composition left @ right. Products are counted on the two parts."""

    def __init__(self, left: LinearOperator, right: LinearOperator) -> None:
        if left.batch != right.batch or left.cols != right.rows:
            raise ShapeError(
                f"A @ B: expected B with batch {left.batch} and {left.cols} rows, "
                f"got batch {right.batch} and {right.rows} rows."
            )
        super().__init__(left.batch, left.rows, right.cols, dtype=right.dtype, device=right.device)
        self.left, self.right = left, right

    @property
    def round_off(self) -> float:
        return max(self.left.round_off, self.right.round_off)

    def _leaves(self) -> set[LinearOperator]:
        return self.left._leaves() | self.right._leaves()

    def _matmat(self, columns: Tensor) -> Tensor:
        return self.left.matmat(self.right.matmat(columns))

    def _rmatmat(self, columns: Tensor) -> Tensor:
        return self.right.rmatmat(self.left.rmatmat(columns))


class DenseOperator(LinearOperator):
    """Explicit matrices [B, m, n] (or [m, n]) as an operator: what every other operator is tested against."""

    def __init__(self, matrix: Tensor) -> None:
        of_kind("matrix", matrix, Tensor, "a tensor [m, n] or [B, m, n]", ShapeError)
        matrix = matrix[None] if matrix.ndim == 2 else matrix
        if matrix.ndim != 3:
            raise ShapeError(f"matrix: expected [m, n] or [B, m, n], got {list(matrix.shape)}.")
        super().__init__(*matrix.shape, dtype=matrix.dtype, device=matrix.device)
        self.matrix = matrix

    def _matmat(self, columns: Tensor) -> Tensor:
        return self.matrix @ columns

    def _rmatmat(self, columns: Tensor) -> Tensor:
        return self.matrix.mT @ columns
