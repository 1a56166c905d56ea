"""What a learned metric is compared with: distances of features as they are, and the true energy of a straight line.

`feature_distances` costs nothing but the features:

    "l2"            |F_1 - F_2| over all tokens
    "cls-cosine"    1 - cos of the class tokens
    "mean-cosine"   1 - cos of the mean patch tokens

`line_energy` asks the decoder all along the way. With the path gamma(t) = F_1 + t (F_2 - F_1) and its output psi,

    E = int_0^1 |d/dt psi(gamma(t))|^2 dt

which for a probe that carries nothing else is int |J(gamma(t)) (F_2 - F_1)|^2, the pullback energy of the segment; it
is the proxy for geodesic distance of relative geodesic representations (arXiv 2506.01599). Where the decoder reads
layers below the probe, these move along the path too (`pullback.tokens.between`): only then does it lead from the first
image's output to the second's, and the derivative is the whole one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pullback.checks import of_kind, shown, whole_number
from pullback.decoders import factor_at
from pullback.errors import NumericsError, PullbackError, ShapeError
from pullback.operators import ProductCount, differentiable_attention
from pullback.operators.execution import apply_in_chunks, matmul_precision
from pullback.probes.probe import FEATURE_BATCH
from pullback.tokens import TokenLayout, between

KINDS = ("l2", "cls-cosine", "mean-cosine")
RULES = ("jacobian", "chord")
_COLUMNS = 4096
"""Numbers of each image that are in float64 at once."""
_NEAR = 1e-8
"""Squared distances below this share of the squared norms are computed again from differences."""


# Features as they are


def feature_distances(first: Tensor, second: Tensor, kind: str = "l2", *, layout: TokenLayout | None = None) -> Tensor:
    """Return the distances of features [n, N, D] from features [m, N, D]: [n, m].

    ``layout``: where the tokens are, ``probe.token_layout(features)``; the cosines need it.

    >>> features = torch.eye(2).reshape(2, 1, 2)
    >>> feature_distances(features, features)
    tensor([[0.0000, 1.4142],
            [1.4142, 0.0000]])
    """
    if kind not in KINDS:
        raise PullbackError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}.")
    first, second = _plain(first), _plain(second)
    if first.ndim != 3 or first.shape[1:] != second.shape[1:]:
        raise ShapeError(
            f"first, second: expected features [n, N, D] and [m, N, D], got {list(first.shape)} and "
            f"{list(second.shape)}."
        )
    exact = _euclidean(first, second) if kind == "l2" else _one_minus_cosine(*_vectors(kind, layout, first, second))
    return exact.to(torch.promote_types(first.dtype, torch.float32))


def _euclidean(first: Tensor, second: Tensor) -> Tensor:
    """Return |a - b| in float64, by matrix products over blocks of columns; near pairs by their difference, since
    their Gram matrix keeps too few digits of them."""
    a, b = first.flatten(1), second.flatten(1)
    product = torch.zeros(len(a), len(b), dtype=torch.float64, device=a.device)
    sizes = [torch.zeros(len(rows), dtype=torch.float64, device=a.device) for rows in (a, b)]
    for x, y in zip(a.split(_COLUMNS, 1), b.split(_COLUMNS, 1), strict=True):
        x, y = x.double(), y.double()
        middle = y.mean(0)  # any shift is right; this one keeps the numbers small
        x, y = x - middle, y - middle
        product += x @ y.T
        for size, rows in zip(sizes, (x, y), strict=True):
            size += rows.square().sum(1)
    together = sizes[0][:, None] + sizes[1]
    squared = (together - 2 * product).clamp_min(0)
    near = (squared < _NEAR * together).nonzero()
    for i, j in zip(*(numbers.split(64) for numbers in near.unbind(1)), strict=True):
        squared[i, j] = (a[i].double() - b[j].double()).square().sum(1)
    return squared.sqrt()


def _one_minus_cosine(a: Tensor, b: Tensor) -> Tensor:
    """Return 1 - cos of vectors [n, D] and [m, D] as half the squared distance of the unit vectors, which keeps the
    digits of near ones."""
    units = []
    for name, vectors in (("first", a), ("second", b)):
        length = torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
        if not (length > 0).all():
            raise NumericsError(f"{name}: some of its vectors are 0, which have no direction. Use kind='l2'.")
        units.append(vectors / length)
    return torch.cdist(units[0], units[1], compute_mode="donot_use_mm_for_euclid_dist").square() / 2


def _vectors(kind: str, layout: TokenLayout | None, *features: Tensor) -> list[Tensor]:
    """Return the vectors [n, D] in float64 whose cosines are meant."""
    of_kind("layout", layout, TokenLayout, f"probe.token_layout(features), which {kind!r} needs", ShapeError)
    assert layout is not None
    if layout.tokens != features[0].shape[1]:
        raise ShapeError(f"layout: expected one of {features[0].shape[1]} tokens, got {layout.tokens}.")
    if kind == "mean-cosine":
        return [layout.patch_map(tokens.double()).mean((1, 2, 3)) for tokens in features]
    if layout.prefix == 0 or layout.views > 1:
        raise PullbackError(f"kind: these features have no class token, which {kind!r} compares. Use 'mean-cosine'.")
    return [tokens[:, 0].double() for tokens in features]


def _plain(features: Tensor) -> Tensor:
    of_kind("first, second", features, Tensor, "features [n, N, D] and [m, N, D]", ShapeError)
    return features.detach().as_subclass(Tensor)


# The decoder all along the way


@dataclass(frozen=True, eq=False)
class LineEnergy:
    """Energies and lengths of straight lines under a decoder, and what they cost per pair."""

    energies: Tensor  # int |d/dt psi|^2 dt, [B]
    lengths: Tensor  # int |d/dt psi| dt, [B]; at most sqrt(energies)
    outputs: int  # of the decoder, with the blocks below it
    products: ProductCount  # with the Jacobian

    @property
    def distances(self) -> Tensor:
        """The energies in the units of a distance: their square roots [B]."""
        return self.energies.sqrt()


def line_energy(
    probe: Callable[[Tensor], Tensor],
    first: Tensor,
    second: Tensor,
    *,
    points: int = 8,
    rule: str = "jacobian",
    chunk_size: int = FEATURE_BATCH,
) -> LineEnergy:
    """Compute the energy of the straight line between features [B, N, D], pair by pair.

    ``rule``: "jacobian", derivatives at ``points`` Gauss-Legendre nodes, one JVP each; exact where psi is a polynomial
    of degree up to ``points`` along the line. "chord", points sum_i |psi(gamma(i / points)) - psi(gamma((i - 1) /
    points))|^2 of ``points`` steps, which needs outputs alone and never exceeds the energy; with one step it is
    |psi(F_2) - psi(F_1)|^2.
    ``chunk_size``: outputs computed at once; halved where memory runs out.

    The outputs of networks turn sharply on the way, and 8 points are far from enough to integrate them: raise
    ``points`` until the energies stay where energies themselves, and not only their order, are wanted.

    >>> one, other = torch.zeros(1, 1, 2), torch.ones(1, 1, 2)
    >>> line_energy(lambda features: features.flatten(1) ** 2, one, other).energies  # int 2 (2 t)^2 dt
    tensor([2.6667])
    """
    if not callable(probe):
        raise PullbackError(f"probe: expected a probe map or a function of features, got {shown(probe)}.")
    whole_number("points", points)
    whole_number("chunk_size", chunk_size)
    if rule not in RULES:
        raise PullbackError(f"rule: expected one of {', '.join(RULES)}, got {rule!r}.")
    for features in (first, second):
        of_kind("first, second", features, Tensor, "features [B, N, D] of as many images", ShapeError)
    if len(first) == 0 or first.shape != second.shape:
        raise ShapeError(
            f"first, second: expected features [B, N, D] of pairs of images, got {list(first.shape)} and "
            f"{list(second.shape)}."
        )
    weighted = getattr(probe, "output_metric", None)
    if rule == "chord":
        if weighted is not None:
            raise PullbackError("rule: 'chord' compares outputs and has no output metric. Use rule='jacobian'.")
        return _by_chords(probe, first, second, points, chunk_size)
    places, shares = np.polynomial.legendre.leggauss(points)
    nodes, weights = (torch.from_numpy(x).to(first.device, first.dtype) for x in ((1 + places) / 2, shares / 2))

    def speeds(numbers: Tensor) -> Tensor:
        """Return |d/dt psi| of some of the B * points nodes [1, k]."""
        pair, node = numbers[0] // points, numbers[0] % points
        start, end, t = first[pair], second[pair], nodes[node]
        value, change, *_ = torch.func.jvp(lambda t: probe(between(start, end, t)), (t,), (torch.ones_like(t),))
        change = change.flatten(1)
        if weighted is not None:
            change = torch.einsum("bmk,bm->bk", factor_at(weighted, value.flatten(1)), change)
        return torch.linalg.vector_norm(change, dim=1)[None]

    found = _in_chunks(speeds, len(first) * points, chunk_size, first.device).view(-1, points)
    _check_finite(found)
    count = ProductCount(jvp=points)
    return LineEnergy(found.square() @ weights, found @ weights, points, count)


def _by_chords(probe: Any, first: Tensor, second: Tensor, steps: int, chunk_size: int) -> LineEnergy:
    nodes = torch.linspace(0, 1, steps + 1, dtype=first.dtype, device=first.device)

    def chords(pairs: Tensor) -> Tensor:
        """Return |psi(gamma_i) - psi(gamma_(i-1))| of some pairs [1, k]: [1, k, steps]."""
        before, lengths = None, []
        for t in nodes:
            output = probe(between(first[pairs[0]], second[pairs[0]], t.expand(pairs.shape[1]))).flatten(1)
            if before is not None:
                lengths.append(torch.linalg.vector_norm(output - before, dim=1))
            before = output
        return torch.stack(lengths, 1)[None]

    found = _in_chunks(chords, len(first), chunk_size, first.device)
    _check_finite(found)
    return LineEnergy(steps * found.square().sum(1), found.sum(1), steps + 1, ProductCount())


def _in_chunks(function: Callable[[Tensor], Tensor], count: int, chunk_size: int, device: torch.device) -> Tensor:
    numbers = torch.arange(count, device=device)[None]
    with torch.no_grad(), differentiable_attention(), matmul_precision("float32"):
        return apply_in_chunks(function, numbers, chunk_size)[0][0]


def _check_finite(lengths: Tensor) -> None:
    if not lengths.isfinite().all():
        raise NumericsError("probe: its output or derivative along the line holds NaN or infinity.")
