"""What is kept of an image: all that its distances need, and a sketch of it by which candidates are found.

Distances under a metric need the projected tokens x_t [N, k] and weights h_t [N], in float16, and the float32 aggregate
a = sum_t h_t x_t [k] of exactly these (`MetricItems.half`). The sketch expresses tokens and weights by the leading
eigenvectors V [N, m] of E[h h^T], which is what the constant metric is made of,

    Z = V^T x  [m, k],   c = V^T h  [m],       h(F_1) . x(F_2) = c(F_1) . Z(F_2)  up to what V leaves out of h

so that `pairwise_distances` of (Z, c, a) in place of (x, h, a) costs m / N of the exact ones. Rows of Z, weighted by
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

SKETCHED = 16
"""Eigenvectors in a sketch: with 16 of 257 it takes 7 % of an item."""
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
        """The float16 numbers of an item in each part: x by columns; then h, a (two for each float32), Z and c."""
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
        sketched = torch.einsum("bnk,nm->bmk", items.projected.float(), vectors).half()
        if not sketched.isfinite().all():
            raise PullbackError("features: some projections are so large that their sketch does not fit into float16.")
        weights = (items.weights.float() @ vectors).half()
        aggregates = items.aggregates.contiguous().view(torch.float16)
        rest = torch.cat([items.weights, aggregates, sketched.flatten(1), weights], 1)
        return Records(self, items.projected.mT.flatten(1), rest)

    def sketch_of(self, items: MetricItems) -> MetricItems:
        """Return the sketch of items in float32, as records have it."""
        return self.pack(items).sketch()

    def embedding(self, sketch: MetricItems) -> Tensor:
        """Return the embedding [n, e] of sketches."""
        rows = max(1, EMBEDDED // self.rank)
        scales = self.scales[:rows].to(sketch.projected.device)
        return (sketch.projected[:, :rows] * scales[:, None]).flatten(1)


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

    @classmethod
    def join(cls, parts: Sequence[Records]) -> Records:
        """Return the items of several parts as one."""
        if len(parts) == 1:
            return parts[0]
        return cls(parts[0].form, torch.cat([part.tokens for part in parts]), torch.cat([part.rest for part in parts]))

    @property
    def parts(self) -> Mapping[str, Tensor]:
        """What a file of each part holds."""
        return {"tokens": self.tokens, "rest": self.rest}

    @property
    def weights(self) -> Tensor:
        """h [n, N] in float16."""
        return self.rest[:, : self.form.tokens]

    @property
    def aggregates(self) -> Tensor:
        """a [n, k] in float32."""
        return _float32(self.rest[:, self.form.tokens :][:, : 2 * self.form.rank])

    def items(self) -> MetricItems:
        """Return what distances need, as it was packed."""
        projected = self.tokens.view(len(self), self.form.rank, self.form.tokens).mT
        return MetricItems(projected, self.weights, self.aggregates)

    def sketch(self, rows: Tensor | None = None) -> MetricItems:
        """Return the sketches of all items, or of those in these rows, in float32."""
        words = self.rest[:, self.form.tokens :]
        words = words if rows is None else words.index_select(0, rows)
        sketched, aggregates = len(self.form.scales), 2 * self.form.rank
        projected, weights = words[:, aggregates:].float().split([sketched * self.form.rank, sketched], 1)
        unflat = projected.unflatten(1, (sketched, self.form.rank))
        return MetricItems(unflat, weights, _float32(words[:, :aggregates]))

    def to(self, device: torch.device) -> Records:
        return Records(self.form, self.tokens.to(device), self.rest.to(device))


def _float32(words: Tensor) -> Tensor:
    """Return the float32 numbers [n, k] behind pairs of words [n, 2 k]."""
    plain = words.clone(memory_format=torch.contiguous_format)  # a float32 may not begin at an odd place
    return plain.view(torch.float32)
