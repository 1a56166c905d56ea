"""What is kept of an image: all that its distances need, and a sketch of it by which candidates are found.

Distances under a metric need the projected tokens x_t [N, k] and weights h_t [N], in float16, and the float32 aggregate
a = sum_t h_t x_t [k] of exactly these (`MetricItems.half`). The sketch expresses tokens and weights by the leading
eigenvectors V [N, m] of E[h h^T], which is what the constant metric is made of,

    Z = V^T x  [m, k],   c = V^T h  [m],       h(F_1) . x(F_2) = c(F_1) . Z(F_2)  up to what V leaves out of h

so that distances of (Z, c, a) in place of (x, h, a) cost m / N of the exact ones. Rows of Z, weighted by
the square roots of their eigenvalues, are an embedding whose Euclidean distances are those of the constant metric
(`DistilledMetric.embed`), and the first of them hold most of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pullback.errors import PullbackError, ShapeError
from pullback.learning.distilled_metric import DistilledMetric, MetricItems

SKETCHED = 24
"""Eigenvectors in a sketch: with 24 of 257 tokens it takes a tenth of an item."""
EMBEDDED = 32
"""Numbers in an embedding, or a little more, so that these are whole rows of Z."""


@dataclass(frozen=True, eq=False)
class Form:
    """How items are laid out: N tokens in k dimensions, and the eigenvectors V with the roots of their eigenvalues."""

    rank: int
    vectors: Tensor  # V [N, m]
    scales: Tensor  # [m]

    @classmethod
    def of(cls, metric: DistilledMetric) -> Form:
        """Take the eigenvectors of a metric. They are stored with a gallery: another machine may find others."""
        basis = metric.embedding_basis(share=1)[:, :SKETCHED].detach().cpu()
        scales = basis.norm(dim=0)
        kept = scales > 0
        return cls(metric.config.rank, basis[:, kept] / scales[kept], scales[kept])

    @property
    def tokens(self) -> int:
        """The number N of tokens."""
        return len(self.vectors)

    @property
    def words(self) -> dict[str, int]:
        """The float16 numbers of an item in each part: x by columns; then h, a (two for a float32), Z by columns, c."""
        sketched = len(self.scales)
        return {"tokens": self.rank * self.tokens, "rest": self.tokens + (2 + sketched) * self.rank + sketched}

    def pack(self, items: MetricItems) -> Records:
        """Return the records of what `MetricItems.half` gave."""
        if items.projected.shape[1:] != (self.tokens, self.rank):
            raise ShapeError(
                f"features: expected {self.tokens} tokens and {self.rank} projections of each, as all items of the "
                f"gallery have, got {items.projected.shape[1]} and {items.projected.shape[2]}. Use images of one size."
            )
        vectors = self.vectors.to(items.projected.device)
        sketched = torch.einsum("bnk,nm->bkm", items.projected.float(), vectors).half()
        if not sketched.isfinite().all():
            raise PullbackError("features: some projections are so large that their sketch does not fit into float16.")
        weights = (items.weights.float() @ vectors).half()
        aggregates = items.aggregates.contiguous().view(torch.float16)
        rest = torch.cat([items.weights, aggregates, sketched.flatten(1), weights], 1)
        return Records(self, items.projected.mT.flatten(1), rest)

    def sketch_of(self, items: MetricItems) -> MetricItems:
        """Return the sketches of items, as records have them."""
        return self.pack(items).sketches().items(self.rank)

    def embedding(self, sketch: MetricItems) -> Tensor:
        """Return the embedding [n, e] of sketches."""
        rows = max(1, EMBEDDED // self.rank)
        scales = self.scales[:rows].to(sketch.projected.device)
        return (sketch.projected[:, :rows].float() * scales[:, None]).flatten(1)


@dataclass(frozen=True, eq=False)
class Columns:
    """Items as distances are computed with: x of n items column by column, so that one product sums over tokens."""

    projected: Tensor  # float16 [n, k N]
    weights: Tensor  # float16 [n, N]
    aggregates: Tensor  # float32 [n, k]

    def __len__(self) -> int:
        return len(self.weights)

    def __getitem__(self, rows: slice) -> Columns:
        return Columns(self.projected[rows], self.weights[rows], self.aggregates[rows])

    @classmethod
    def join(cls, parts: Sequence[Columns]) -> Columns:
        """Return the items of several parts as one."""
        if len(parts) == 1:
            return parts[0]
        columns = ((part.projected, part.weights, part.aggregates) for part in parts)
        return cls(*(torch.cat(column) for column in zip(*columns, strict=True)))

    def items(self, rank: int) -> MetricItems:
        """Return them as `pairwise_distances` takes them."""
        return MetricItems(self.projected.unflatten(1, (rank, -1)).mT, self.weights, self.aggregates)


@dataclass(frozen=True, eq=False)
class Records:
    """Items as they are stored, in memory, on a device or mapped from a file: float16 [n, words] of each part."""

    form: Form
    tokens: Tensor
    rest: Tensor

    def __len__(self) -> int:
        return len(self.rest)

    def __getitem__(self, rows: slice | Tensor) -> Records:
        """Return the items in these rows: views of them for a slice."""
        if isinstance(rows, slice):
            return Records(self.form, self.tokens[rows], self.rest[rows])
        # four times as fast as indexing, which copies number by number
        return Records(self.form, self.tokens.index_select(0, rows), self.rest.index_select(0, rows))

    @property
    def parts(self) -> Mapping[str, Tensor]:
        """What a file of each part holds."""
        return {"tokens": self.tokens, "rest": self.rest}

    def columns(self) -> Columns:
        """Return x, h and a."""
        tokens = self.form.tokens
        aggregates = self.rest[:, tokens : tokens + 2 * self.form.rank]
        return Columns(self.tokens, self.rest[:, :tokens], _float32(aggregates))

    def sketches(self, rows: Tensor | None = None) -> Columns:
        """Return Z, c and a of all items, or of those in these rows."""
        words = self.rest[:, self.form.tokens :]
        words = words if rows is None else words.index_select(0, rows)
        sketched, ends = len(self.form.scales), 2 * self.form.rank
        projected, weights = words[:, ends:].split([sketched * self.form.rank, sketched], 1)
        return Columns(projected, weights, _float32(words[:, :ends]))


def _float32(words: Tensor) -> Tensor:
    """Return the float32 numbers [n, k] behind pairs of words [n, 2 k]."""
    plain = words.clone(memory_format=torch.contiguous_format)  # a float32 may not begin at an odd place
    return plain.view(torch.float32)
