"""Squared lengths of paths through feature space: as a map's outputs measure them, or a metric that is given.

`geodesic` knows of a geometry no more than `PathGeometry` says. A place on a path is a time from 0 to 1 and an offset
from the straight segment at that time, so that what features carry of layers below the probe moves with the time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from pullback.checks import shown
from pullback.errors import NumericsError, PullbackError, ShapeError, counted
from pullback.geometry.independence import check_independence
from pullback.operators import JacobianOperator, LowRankMetric, ProductCount, differentiable_attention
from pullback.operators.execution import round_off_of
from pullback.operators.linearization import flat_output
from pullback.probes import between
from pullback.randnla import Estimate, Streams, hutchinson


class PointwiseMetric(Protocol):
    """A metric given by its squares at any features, with derivatives, as `DistilledMetric` is."""

    def squared_norm_at(self, features: Tensor, change: Tensor) -> Tensor:
        """Return |change|^2_g(F) of features and changes [B, N, D]: [B]."""
        ...


class PathGeometry(Protocol):
    """Squared lengths of paths between the ends of P pairs."""

    first: Tensor
    second: Tensor
    forwards: int
    products: ProductCount

    def squares(self, rows: Tensor, times: Tensor, offsets: Tensor) -> Tensor:
        """Return those of the K segments of paths through the offsets [b, K - 1, ...] at times [K - 1] of the pairs
        ``rows`` [b]: [b, K], float64, differentiable in the offsets."""
        ...

    def speeds(self, time: float, offset: Tensor, slope: Tensor) -> Tensor:
        """Return |dF/dt|^2 [P] where paths are off by ``offset`` [P, ...], which changes by ``slope``: float64."""
        ...

    def trace(self, num_probes: int, seed: int) -> Estimate:
        """Return tr(g) [P], the mean of both ends."""
        ...

    def ends(self) -> Tensor | None:
        """Return the squared distance [P] of the ends that no path can beat; None: 0 is all that is known."""
        ...

    def outputs(self, times: Tensor, offsets: Tensor) -> Tensor | None:
        """Return psi [P, K + 1, ...] along paths; None of a metric."""
        ...


def geometry_by(given: Any, first: Tensor) -> Callable[[Tensor, Tensor, slice], PathGeometry]:
    """Return what makes the geometry of some of the pairs."""
    if isinstance(given, LowRankMetric):
        expected = (len(first), *given.modes.shape[2:])
        if tuple(first.shape) != expected or len(given.modes) != len(first):
            raise ShapeError(
                f"metric_or_probe: expected a metric for each of {counted(len(first), 'pair')} of features "
                f"{list(first.shape)}, got {given!r}."
            )
        return lambda one, other, pairs: _Pointwise(_Constant(given, pairs), one, other)
    if hasattr(given, "squared_norm_at"):
        return lambda one, other, pairs: _Pointwise(_Varying(given), one, other)
    if not callable(given):
        raise PullbackError(
            "metric_or_probe: expected a probe map, a function of features, or a metric with squared_norm_at such as a "
            f"DistilledMetric, got {shown(given)}."
        )
    if getattr(given, "output_metric", None) is not None:
        raise PullbackError(
            "metric_or_probe: expected a probe without an output metric, because paths are measured by distances of "
            f"outputs, got {given!r}. Put it into the decoder: let that return L^T y."
        )
    if first.ndim == 3:
        check_independence(given, first)
    return lambda one, other, pairs: _Pullback(given, one, other)


class _Pullback:
    """The pullback J^T J of a map, by its outputs."""

    def __init__(self, function: Callable[[Tensor], Tensor], first: Tensor, second: Tensor) -> None:
        self.function, self.first, self.second = function, first, second
        self.forwards, self.products = 2 * len(first), ProductCount()
        outputs = [function(between(first, second, t)) for t in (0.0, 1.0)]
        self._shape = outputs[0].shape[1:] if isinstance(outputs[0], Tensor) else ()
        self._ends = [flat_output(output, len(first)) for output in outputs]
        for name, output in zip(("first", "second"), self._ends, strict=True):
            if not output.isfinite().all():
                raise NumericsError(f"decoder: its output holds NaN or infinity at the features in {name}.")

    def squares(self, rows: Tensor, times: Tensor, offsets: Tensor) -> Tensor:
        inner = self._along(rows, times, offsets)
        self.forwards += inner.shape[:2].numel()
        if inner.requires_grad:
            self.products += ProductCount(vjp=inner.shape[:2].numel())
        every = torch.cat([self._ends[0][rows, None], inner, self._ends[1][rows, None]], 1)
        return every.diff(dim=1).square().sum(-1, dtype=torch.float64)

    def _along(self, rows: Tensor, times: Tensor, offsets: Tensor) -> Tensor:
        """Return the outputs [b, n, M] at so many times [n]."""
        pairs, count = offsets.shape[:2]
        each = rows.repeat_interleave(count)
        nodes = between(self.first[each], self.second[each], times.repeat(pairs)) + offsets.flatten(0, 1)
        return flat_output(self.function(nodes), len(each)).unflatten(0, (pairs, count))

    def speeds(self, time: float, offset: Tensor, slope: Tensor) -> Tensor:
        def output(t: Tensor) -> Tensor:
            passed = (t - time).reshape(-1, *[1] * (offset.ndim - 1))
            return self.function(between(self.first, self.second, t) + (offset + passed * slope))

        at = offset.new_full((len(offset),), time)
        self.products += ProductCount(jvp=len(offset))
        with differentiable_attention():
            change = torch.func.jvp(output, (at,), (torch.ones_like(at),))[1]
        return change.flatten(1).square().sum(1, dtype=torch.float64) if change.ndim > 1 else change.double().square()

    def trace(self, num_probes: int, seed: int) -> Estimate:
        def at(end: Tensor) -> Estimate:
            operator = JacobianOperator(self.function, end)
            streams = Streams.from_seeds([seed] * len(end), end.device)
            found = hutchinson(operator, num_probes=num_probes, streams=streams)
            self.products += operator.products * len(end)
            return found

        return _mean_of(at(self.first), at(self.second))

    def ends(self) -> Tensor | None:
        return (self._ends[1] - self._ends[0]).square().sum(1, dtype=torch.float64)

    def outputs(self, times: Tensor, offsets: Tensor) -> Tensor | None:
        inner = self._along(torch.arange(len(offsets), device=offsets.device), times, offsets)
        self.forwards += inner.shape[:2].numel()
        every = torch.cat([self._ends[0][:, None], inner, self._ends[1][:, None]], 1)
        return every.reshape(*every.shape[:2], *self._shape)


class _Pointwise:
    """A metric that is given at every point."""

    def __init__(self, metric: _Constant | _Varying, first: Tensor, second: Tensor) -> None:
        self.metric = metric
        self.first, self.second = (end.as_subclass(Tensor) for end in (first, second))
        self.forwards, self.products = 0, ProductCount()

    def squares(self, rows: Tensor, times: Tensor, offsets: Tensor) -> Tensor:
        share = times.reshape(-1, *[1] * (offsets.ndim - 2))
        first, second = self.first[rows, None], self.second[rows, None]
        path = torch.cat([first, torch.lerp(first, second, share) + offsets, second], 1)
        found = self.metric.squares(rows, (path[:, 1:] + path[:, :-1]) / 2, path.diff(dim=1))
        self.forwards += found.numel()
        if found.requires_grad and torch.is_grad_enabled():
            self.products += ProductCount(vjp=found.numel())
        return found.double()

    def speeds(self, time: float, offset: Tensor, slope: Tensor) -> Tensor:
        rows = torch.arange(len(offset), device=offset.device)
        points, changes = between(self.first, self.second, time) + offset, self.second - self.first + slope
        self.forwards += len(offset)
        return self.metric.squares(rows, points[:, None], changes[:, None])[:, 0].double()

    def trace(self, num_probes: int, seed: int) -> Estimate:
        return _mean_of(*(self.metric.trace(end, num_probes, seed) for end in (self.first, self.second)))

    def ends(self) -> Tensor | None:
        return None

    def outputs(self, times: Tensor, offsets: Tensor) -> Tensor | None:
        return None


@dataclass(frozen=True)
class _Varying:
    """A `PointwiseMetric`."""

    metric: Any

    def squares(self, rows: Tensor, points: Tensor, changes: Tensor) -> Tensor:
        """Return |change|^2 at points, [b, n, ...] each: [b, n]."""
        found = self.metric.squared_norm_at(points.flatten(0, 1), changes.flatten(0, 1))
        if not isinstance(found, Tensor) or found.shape != (points.shape[:2].numel(),):
            raise PullbackError(
                f"metric_or_probe: expected squared_norm_at to return [{points.shape[:2].numel()}], one number for "
                f"each sample, got {shown(found)}."
            )
        return found.unflatten(0, points.shape[:2])

    def trace(self, end: Tensor, num_probes: int, seed: int) -> Estimate:
        """Return tr(g) [P] at features, exactly where the metric says what it is."""
        known = self.metric.metric(end) if hasattr(self.metric, "metric") else None
        if isinstance(known, LowRankMetric):
            return _trace_of(known)
        probes = Streams.from_seeds([seed] * len(end), end.device).rademacher(end[0].numel(), num_probes, end.dtype)
        samples = [self.metric.squared_norm_at(end, probe.reshape(end.shape)) for probe in probes.unbind(2)]
        return Estimate.from_samples(torch.stack(samples, 1), round_off=round_off_of(end.dtype))


@dataclass(frozen=True)
class _Constant:
    """A `LowRankMetric` for each pair."""

    metric: LowRankMetric
    pairs: slice

    def squares(self, rows: Tensor, points: Tensor, changes: Tensor) -> Tensor:
        """Return |change|^2, [b, n, N, D] each: [b, n]."""
        own = self._own
        own = LowRankMetric(own.modes[rows], own.energies[rows], own.floor)
        return torch.stack([own.squared_norm(change) for change in changes.unbind(1)], 1)

    def trace(self, end: Tensor, num_probes: int, seed: int) -> Estimate:
        return _trace_of(self._own)

    @property
    def _own(self) -> LowRankMetric:
        return LowRankMetric(self.metric.modes[self.pairs], self.metric.energies[self.pairs], self.metric.floor)


def _trace_of(metric: LowRankMetric) -> Estimate:
    inputs = metric.modes[0, 0].numel()
    total = metric.energies.sum(1, dtype=torch.float64) + metric.floor * inputs
    return Estimate.exact(total, round_off=round_off_of(metric.modes.dtype))


def _mean_of(first: Estimate, second: Estimate) -> Estimate:
    """Return the mean of two estimates from the same probes, whose errors may therefore go together."""
    return Estimate((first.value + second.value) / 2, (first.se + second.se) / 2)
