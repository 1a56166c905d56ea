"""The Distilled Riemannian Metric: the distance that a decoder would see between two images, from features alone.

    |D|_g(F) = s |A(F) D|,   A(F) D = W^T sum_t h(F)_t D_t                       (`eq:drm_seminorm`)
    d(F_1, F_2) = (|F_2 - F_1|_g(F_1) + |F_2 - F_1|_g(F_2)) / 2                   (`eq:drm_sym`)

with the scores h of an importance head, W [D, k] and the scale s, all learned (`train_drm`). A distance never needs
both features at once: with x_t = s W^T F_t and a = sum_t h_t x_t, computed once per image (`MetricItems`),

    s A(F_1)(F_2 - F_1) = sum_t h(F_1)_t x(F_2)_t - a(F_1)

so that all distances between two sets of images are two matrix products (`pairwise_distances`).

The metric g(F) = s^2 h h^T (x) W W^T changes with F. Its mean E[g] = s^2 E[h h^T] (x) W W^T does not: distances under
it are those of an embedding (`DistilledMetric.embed`), obey the triangle inequality, and serve as candidates in large
galleries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pullback.checks import finite_number, whole_number
from pullback.errors import ModelError, PullbackError, RankError, ShapeError
from pullback.learning.head import ImportanceHead
from pullback.learning.pretrained import Origin, Pretrained
from pullback.operators import LowRankMetric

EMBEDDED_SHARE = 0.999
"""Of the trace of E[h h^T] that an embedding keeps by default."""


@dataclass(frozen=True)
class MetricConfig:
    """The size of a metric, what it was trained for, and how well it does."""

    dim: int
    rank: int = 32  # k
    width: int = 256  # of the importance head, as are the next two
    heads: int = 4
    rounds: int = 1
    tokens: int | None = None  # of the images that E[h h^T] was measured on; None: not yet measured
    reference: str = "relative_l2"  # the distance of outputs that it was trained on, see `evaluation.distances`
    model: str | None = None  # the backbone, as it was called in training
    origin: Origin = field(default_factory=Origin)
    scores: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class MetricItems:
    """What distances need of n images: all that a gallery stores of them."""

    projected: Tensor  # x_t = s W^T (F_t - mean), [n, N, k]
    weights: Tensor  # h_t, [n, N]
    aggregates: Tensor  # a = sum_t h_t x_t, [n, k]

    def __len__(self) -> int:
        return len(self.weights)

    def __getitem__(self, rows: slice | Tensor | Sequence[int]) -> MetricItems:
        return MetricItems(self.projected[rows], self.weights[rows], self.aggregates[rows])

    @classmethod
    def join(cls, parts: Sequence[MetricItems]) -> MetricItems:
        """Return the images of several parts as one."""
        columns = ((part.projected, part.weights, part.aggregates) for part in parts)
        return cls(*(torch.cat(column) for column in zip(*columns, strict=True)))

    def full(self) -> MetricItems:
        """Return them in float32, with the aggregates of exactly these: what was computed in bfloat16 has lost the
        digits in which aggregates of near images differ."""
        weights, projected = self.weights.float(), self.projected.float()
        return MetricItems(projected, weights, _aggregates(weights, projected))

    def half(self) -> MetricItems:
        """Return what is stored: projections and weights in float16, and the float32 aggregates of exactly these, so
        that an image is at distance 0 from its stored self up to the rounding of sums."""
        projected, weights = self.projected.half(), self.weights.half()
        if not (projected.isfinite().all() and weights.isfinite().all()):
            raise PullbackError("features: some projections or weights do not fit into float16; NaN features do not.")
        return MetricItems(projected, weights, _aggregates(weights.float(), projected.float()))


def _aggregates(weights: Tensor, projected: Tensor) -> Tensor:
    return torch.einsum("bn,bnk->bk", weights, projected)


def pairwise_distances(first: MetricItems, second: MetricItems) -> Tensor:
    """Return d(F_i, F_j) of `eq:drm_sym` for every image i of one set and j of another: [n, m], differentiable."""
    if first.projected.shape[1:] != second.projected.shape[1:]:
        raise ShapeError(
            f"first, second: expected images with the same number of tokens and the same k, got "
            f"{list(first.projected.shape[1:])} and {list(second.projected.shape[1:])}."
        )
    there = torch.einsum("in,jnk->ijk", first.weights, second.projected) - first.aggregates[:, None]
    back = second.aggregates - torch.einsum("jn,ink->ijk", second.weights, first.projected)
    return (_norm(there) + _norm(back)) / 2


def _norm(vectors: Tensor) -> Tensor:
    """Return the norm of the last axis; its derivative at 0 is 0, not NaN."""
    return torch.linalg.vector_norm(vectors, dim=-1)


class DistilledMetric(Pretrained):
    """A learned metric whose distance between the features of two images is the one that a decoder would see.

    An importance head h, a factor W [D, k] and a scale s. Weights are kept in units of ``level``, their mean in
    training, and projections in units of its inverse, which changes no distance.

    >>> metric = DistilledMetric(dim=8, rank=4, width=16, heads=2)
    >>> one, other = torch.randn(2, 5, 10, 8)
    >>> metric.distance(one, other).shape
    torch.Size([5])
    """

    kind, title = "distilled-metric", "Distilled Riemannian Metric"

    mean: Tensor
    level: Tensor
    second_moment: Tensor

    def __init__(
        self,
        dim: int,
        rank: int = 32,
        width: int = 256,
        heads: int = 4,
        rounds: int = 1,
        *,
        config: MetricConfig | None = None,
    ) -> None:
        super().__init__()
        whole_number("rank", rank, error=RankError)
        self.config = config or MetricConfig(dim, rank, width, heads, rounds)
        self.head = ImportanceHead(dim, width, heads, rounds)
        if rank > dim:
            raise RankError(f"rank: expected at most the width of the features, {dim}, got {rank}.")
        self.factor = nn.Linear(dim, rank, bias=False)
        self.log_scale = nn.Parameter(torch.zeros(()))
        tokens = self.config.tokens or 0
        self.register_buffer("mean", torch.zeros(dim))  # of features: it cancels, and keeps projections small
        self.register_buffer("level", torch.ones(()))
        self.register_buffer("second_moment", torch.zeros(tokens, tokens))  # E[h h^T]

    @classmethod
    def config_from_dict(cls, stored: Mapping[str, Any]) -> MetricConfig:
        names = ("dim", "rank", "width", "heads", "rounds", "tokens", "reference", "model")
        origin, scores = Origin.from_dict(stored["origin"]), dict(stored["scores"])
        return MetricConfig(**{name: stored[name] for name in names}, origin=origin, scores=scores)

    @classmethod
    def from_config(cls, config: MetricConfig) -> DistilledMetric:
        return cls(config.dim, config.rank, config.width, config.heads, config.rounds, config=config)

    @property
    def layer(self) -> int | None:
        """The layer whose features it compares, where that is known."""
        return self.config.origin.layer

    @property
    def scale(self) -> Tensor:
        """The scale s."""
        return self.log_scale.exp()

    # One image at a time

    def forward(self, features: Tensor) -> MetricItems:
        """Return what distances need of features [B, N, D]."""
        plain = features.as_subclass(Tensor)
        weights, projected = self._weights(plain), self._project(plain.to(self.mean.dtype) - self.mean)
        return MetricItems(projected, weights, _aggregates(weights, projected))

    def importance(self, features: Tensor) -> Tensor:
        """Return the scores h(F) [B, N] > 0, which were distilled to imp*."""
        return self.head(features.as_subclass(Tensor))

    def _weights(self, features: Tensor) -> Tensor:
        return self.head(features) / self.level

    def _project(self, change: Tensor) -> Tensor:
        return self.scale * self.level * self.factor(change)

    # The metric at a point

    def seminorm(self, features: Tensor, change: Tensor) -> Tensor:
        """Return |change|_g(F) of `eq:drm_seminorm` for changes and features [B, N, D]: [B]."""
        return _norm(self._moved(features, change))

    def squared_norm_at(self, features: Tensor, change: Tensor) -> Tensor:
        """Return the square of `seminorm`, with derivatives everywhere: what `geodesic` minimises."""
        return self._moved(features, change).square().sum(-1)

    def _moved(self, features: Tensor, change: Tensor) -> Tensor:
        """Return s A(F) change: [B, k]."""
        features, change = features.as_subclass(Tensor), change.as_subclass(Tensor)
        if features.shape != change.shape:
            raise ShapeError(
                f"features, change: expected one shape [B, N, {self.config.dim}], got {list(features.shape)} and "
                f"{list(change.shape)}."
            )
        return _aggregates(self._weights(features), self._project(change.to(self.mean.dtype)))

    def metric(self, features: Tensor) -> LowRankMetric:
        """Return g(F) = s^2 h h^T (x) W W^T as a low-rank metric: its modes are h/|h| times singular vectors of W."""
        weights = self._weights(features.as_subclass(Tensor))
        left, values, _ = torch.linalg.svd(self.scale * self.level * self.factor.weight.mT, full_matrices=False)
        length = torch.linalg.vector_norm(weights, dim=1)  # > 0, as every score is
        modes = torch.einsum("bn,dk->bknd", weights / length[:, None], left)
        return LowRankMetric(modes, length.square()[:, None] * values.square())

    # Two images

    def distance(self, first: Tensor, second: Tensor, *, nodes: int | None = None) -> Tensor:
        """Return d(F_1, F_2) [B] of features [B, N, D] pair by pair, by the two-endpoint rule of `eq:drm_sym`.

        ``nodes``: the length of the straight segment by Gauss-Legendre quadrature with so many nodes in its place,
        which needs the head at each of them; the two-endpoint rule is its trapezoidal approximation.
        """
        if first.shape != second.shape:
            raise ShapeError(
                f"first, second: expected features of one shape [B, N, {self.config.dim}], got {list(first.shape)} and "
                f"{list(second.shape)}."
            )
        change = second.as_subclass(Tensor) - first.as_subclass(Tensor)
        if nodes is None:
            return (self.seminorm(first, change) + self.seminorm(second, change)) / 2
        whole_number("nodes", nodes, expected="at least 1 node, or None for the two-endpoint rule")
        places, shares = np.polynomial.legendre.leggauss(nodes)
        parts = [
            share / 2 * self.seminorm(first.as_subclass(Tensor) + (1 + place) / 2 * change, change)
            for place, share in zip(places.tolist(), shares.tolist(), strict=True)
        ]
        return torch.stack(parts).sum(0)

    # The constant metric

    @torch.no_grad()
    def measure_constant(self, batches: Sequence[Tensor] | Any) -> DistilledMetric:
        """Measure E[h h^T] over batches of features [b, N, D], as the constant metric needs it."""
        total, count = None, 0
        for features in batches:
            weights = self._weights(features.as_subclass(Tensor)).double()
            moment = weights.mT @ weights
            if total is not None and total.shape != moment.shape:
                raise ShapeError(f"batches: expected images of one size, got {len(total)} and {len(moment)} tokens.")
            total, count = moment if total is None else total + moment, count + len(weights)
        if total is None:
            raise PullbackError("batches: expected features of at least one image, got none.")
        self.second_moment = (total / count).to(self.mean)
        return self.describe(tokens=len(self.second_moment))

    def embedding_basis(self, share: float = EMBEDDED_SHARE) -> Tensor:
        """Return Q [N, m] with Q Q^T = E[h h^T] up to (1 - ``share``) of its trace, by its leading eigenvectors."""
        if self.config.tokens is None:
            raise ModelError(
                "metric: its constant metric was not measured. Train it with `pullback train drm`, or call "
                "metric.measure_constant(batches of features)."
            )
        finite_number("share", share, least=0, most=1, expected="a share of the trace between 0 and 1")
        values, vectors = torch.linalg.eigh(self.second_moment.double())
        values, vectors = values.flip(0).clamp_min(0), vectors.flip(1)
        reached = values.cumsum(0) >= share * values.sum()
        kept = int(reached.nonzero()[0]) + 1 if bool(reached.any()) else len(values)
        return (vectors[:, :kept] * values[:kept].sqrt()).to(self.mean)

    def embed(self, images: Tensor | MetricItems, share: float = EMBEDDED_SHARE) -> Tensor:
        """Return embeddings [B, m k] of features [B, N, D], or of what was computed of them, whose Euclidean distances
        are those of the constant metric E[g] = s^2 E[h h^T] (x) W W^T, a true pseudometric: exactly with ``share`` = 1,
        else with so much of the trace of E[h h^T]."""
        projected = images.projected if isinstance(images, MetricItems) else self(images).projected
        basis = self.embedding_basis(share)
        if projected.shape[1] != len(basis):
            raise ShapeError(
                f"images: expected {len(basis)} tokens, as many as the constant metric was measured with, got "
                f"{projected.shape[1]}. Use images of the size that the metric was trained on."
            )
        return torch.einsum("bnk,nm->bmk", projected.to(basis.dtype), basis).flatten(1)

    # Training

    @torch.no_grad()
    def start_from(self, features: Tensor, target: Tensor | None = None) -> DistilledMetric:
        """Start at the whitened principal components of these features [n, N, D], with the level of the importance
        ``target`` [n, N] where there is one."""
        plain = features.as_subclass(Tensor).to(self.mean.dtype)
        level = plain.new_ones(plain.shape[:2]) if target is None else target
        self.head.start_from(plain, level)
        self.mean.copy_(plain.mean((0, 1)))
        centred = (plain - self.mean).flatten(0, 1).double()
        values, vectors = torch.linalg.eigh(centred.mT @ centred / len(centred))
        values, vectors = values.flip(0)[: self.config.rank], vectors.flip(1)[:, : self.config.rank]
        # a channel that does not vary gets the weight of an average one, not that of round-off
        spread = values.clamp_min(1e-6 * values.mean().clamp_min(torch.finfo(torch.float32).tiny)).sqrt()
        self.factor.weight.copy_((vectors / spread).mT)
        self.level.copy_(self.head(plain).mean())
        return self

    @torch.no_grad()
    def rescale(self, ratio: float | Tensor) -> DistilledMetric:
        """Multiply every distance by a positive number."""
        value = torch.as_tensor(ratio, dtype=torch.float64)
        if not (value.isfinite() and value > 0):
            raise PullbackError(f"ratio: expected a positive number, got {float(value):g}.")
        self.log_scale.add_(value.log().to(self.log_scale))
        return self

    def check(self, argument: str, *, family: str, layer: int, weights: str | None = None) -> None:
        """Raise an error that names ``argument`` where it is used with another family, layer or set of weights."""
        self.config.origin.check(argument, family=family, layer=layer, weights=weights)

    def made_for(self, **changes: Any) -> DistilledMetric:
        """Set fields of what it was made for."""
        return self.describe(origin=replace(self.config.origin, **changes))
