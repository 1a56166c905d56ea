"""The shortest path between two feature maps, as the task measures length, beside the straight segment.

    d(F_1, F_2) = inf over paths of the integral of |dF/dt|_g(F)                        (`eq:drm_geodesic`)

with g the pullback J^T J of a probe map psi, or a learned metric. A path is cut into K segments, F_0 = first to
F_K = second, and what is minimised over the nodes between is its energy, which the straight segment starts:

    of a map       E = K sum_k |psi(F_k+1) - psi(F_k)|^2       + eps K sum_k |F_k+1 - F_k|^2
    of a metric    E = K sum_k |F_k+1 - F_k|^2_g(midpoint)     + the same

(Shao et al. 2018). Both tend to the integral of |dF/dt|^2 as K grows, whose minimum is the square of the shortest
length, run through at constant speed. A node's gradient is one VJP, so a step for all nodes of all pairs is one pass.

Moves in the kernel of g are free. Of a pullback they do not change psi, so shortest paths are not unique, and none is
shorter than |psi(F_2) - psi(F_1)|. The kernel of a learned metric of low rank turns from point to point, and free moves
may lead everywhere: its infimum can be 0. eps = ``floor`` tr(g) / (N D) makes every move cost something: floor = 1
weighs a random move as much as g itself does.

With w the nodes' distance from the straight segment and the path Laplacian A = K tridiag(-1, 2, -1), the second sum is
|F_2 - F_1|^2 + w^T A w. L-BFGS therefore runs on z = A^(1/2) w, whose conditioning is that of g and not of K.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pullback.checks import finite_number, of_kind, shown, whole_number
from pullback.errors import DecoderError, NumericsError, PullbackError, ShapeError, counted
from pullback.geometry.lbfgs import minimise
from pullback.geometry.path_geometry import PathGeometry, PointwiseMetric, geometry_by
from pullback.geometry.spectrum import checked_batch_size, in_batches, within_memory
from pullback.operators import LowRankMetric, ProductCount
from pullback.operators.execution import matmul_precision
from pullback.probes import ProbeMap
from pullback.randnla import Estimate

HISTORY = 8
"""Steps that L-BFGS remembers of each pair."""
NODES = 3
"""Of Gauss-Legendre quadrature in each segment."""
MAX_PAIRS = {"cpu": 4, "cuda": 4096}
"""Pairs at a time: on a CPU more of them only leave the cache."""


@dataclass(frozen=True)
class PathSize:
    """Energies and lengths of B paths, [B] each, float64."""

    energy: Tensor  # what is minimised, the floor included
    task_energy: Tensor  # the same without the floor
    curve_energy: Tensor  # the integral of |dF/dt|_g^2 along the segments, without the floor
    chord_length: Tensor  # sum_k |psi(F_k+1) - psi(F_k)|, of a metric that of the midpoint rule
    length: Tensor  # the integral of |dF/dt|_g along the segments, which coarse chords could cut short

    def where(self, mask: Tensor, other: PathSize) -> PathSize:
        """Return these where ``mask`` [B] is true, and the other's elsewhere."""
        pairs = [(getattr(self, field.name), getattr(other, field.name)) for field in fields(self)]
        return PathSize(*(torch.where(mask, own, its) for own, its in pairs))

    @classmethod
    def join(cls, parts: Sequence[PathSize]) -> PathSize:
        """Return the paths of several parts as one."""
        return cls(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(cls)))


@dataclass(frozen=True, repr=False)
class Geodesic:
    """B pairs of feature maps, the paths of least energy that were found between them, and the straight segments."""

    path: Tensor  # [B, K + 1, N, D], from first to second
    outputs: Tensor | None  # [B, K + 1, ...], psi along it; None of a metric
    found: PathSize
    straight: PathSize
    output_distance: Tensor | None  # [B], |psi(second) - psi(first)|, which no path can beat; None of a metric
    feature_distance: Tensor  # [B], |second - first|
    floor: float
    eps: Tensor  # [B], floor tr(g) / (N D)
    trace: Estimate | None  # [B], tr(g), the mean of both ends; None where the floor is 0
    converged: Tensor  # [B], bool
    iterations: Tensor  # [B], steps taken
    forwards: int  # values of psi, or of the metric, that were computed for all pairs together
    products: ProductCount  # for all pairs together; a gradient of the metric counts as a VJP

    def __len__(self) -> int:
        return len(self.path)

    @property
    def segments(self) -> int:
        """K."""
        return self.path.shape[1] - 1

    @property
    def energy(self) -> Tensor:
        """Energy of the path [B], the floor included."""
        return self.found.energy

    @property
    def straight_energy(self) -> Tensor:
        """That of the straight segment [B], never less."""
        return self.straight.energy

    @property
    def length(self) -> Tensor:
        """Length of the path [B] by Jacobian products within its segments, without the floor."""
        return self.found.length

    @property
    def straight_length(self) -> Tensor:
        """That of the straight segment [B]."""
        return self.straight.length

    @property
    def chord_length(self) -> Tensor:
        """Length of the path [B] by the outputs at its nodes, without the floor."""
        return self.found.chord_length

    @property
    def ratio(self) -> Tensor:
        """Energy of the straight segment over that of the path [B]: 1 where the straight segment is the geodesic."""
        known = self.energy > 0
        ratio = self.straight_energy / torch.where(known, self.energy, 1.0)
        return torch.where(known, ratio, torch.where(self.straight_energy > 0, torch.inf, 1.0))

    def __repr__(self) -> str:
        ratio, longer = self.ratio.median(), (self.straight_length / self.length.clamp_min(1e-300)).median()
        return (
            f"Geodesic({counted(len(self), 'pair')}, {self.segments} segments, floor {self.floor:g}, the straight "
            f"segment has {ratio:.3g} x the energy and {longer:.3g} x the length (medians), "
            f"{int(self.converged.sum())} converged in at most {counted(int(self.iterations.max()), 'step')})"
        )


def geodesic(
    metric_or_probe: ProbeMap | Callable[[Tensor], Tensor] | PointwiseMetric | LowRankMetric,
    first: Tensor,
    second: Tensor,
    *,
    segments: int = 8,
    floor: float = 0.0,
    steps: int = 200,
    rtol: float = 1e-3,
    num_probes: int = 16,
    precision: str = "float32",
    batch_size: int | None = None,
    seed: int = 0,
) -> Geodesic:
    """Find the path of least energy between the features of two images, for B pairs at once.

    ``metric_or_probe``: a probe map or any function [B, ...] -> [B, ...] whose samples do not mix (its pullback is the
    metric), a metric with ``squared_norm_at`` such as a `DistilledMetric`, or a `LowRankMetric` of the pairs.
    ``first``, ``second``: features [B, N, D] pair by pair, as probe.features(images) returned them. What these carry of
    layers below the probe (`Features`) is no part of the path: at the node k of K it is held at
    (1 - k/K) first + (k/K) second, so that psi runs from one image's output to the other's exactly, and counts in
    lengths.

    ``floor``: eps in units of tr(g) / (N D), whose trace takes ``num_probes`` JVPs at either end, drawn from ``seed``.
    ``rtol``: a pair has converged when its energy falls by no more than this share of it: to first order, in the last
    steps, or because no path has less. ``steps``: at most so many gradients of each pair; 0 measures the straight
    segment. ``precision``: of the steps, "float32" or "tf32"; what is reported is measured in float32.

    >>> sphere = lambda x: torch.stack([x[:, 0].sin() * x[:, 1].cos(), x[:, 0].sin() * x[:, 1].sin(), x[:, 0].cos()], 1)
    >>> found = geodesic(sphere, torch.tensor([[0.5, 0.0]]), torch.tensor([[0.5, 3.0]]), segments=32)
    >>> round(found.length.item(), 2), round(found.straight_length.item(), 2)
    (0.99, 1.44)
    """
    whole_number("segments", segments, least=2, expected="at least 2 segments")
    finite_number("floor", floor, least=0, expected="a number >= 0, in units of tr(g) / (N D), such as 1e-3")
    whole_number("steps", steps, least=0, expected="a number of steps, 0 for the straight segment alone")
    finite_number("rtol", rtol, least=1e-12, most=1, expected="a number between 1e-12 and 1")
    whole_number("num_probes", num_probes, least=2, expected="at least 2, for an error bar")
    whole_number("seed", seed, least=None)
    if precision not in ("float32", "tf32"):
        raise PullbackError(f"precision: expected 'float32' or 'tf32', got {shown(precision)}.")
    _check_ends(first, second)
    geometry_of = geometry_by(metric_or_probe, first)

    def work(part: Tensor, start: int) -> Geodesic:
        pairs = slice(start, start + len(part))
        path = _Paths(geometry_of(part, second[pairs], pairs), segments, floor, num_probes, seed)
        return path.solved(steps, rtol, precision)

    def fitting() -> int:
        one = _Paths(geometry_of(first[:1], second[:1], slice(0, 1)), segments, 0.0, num_probes, seed)
        return within_memory(one.bytes_per_pair(), first.device, MAX_PAIRS)

    with torch.inference_mode(False), torch.no_grad(), matmul_precision("float32"):
        first, second = (end.clone() if end.is_inference() else end for end in (first, second))
        parts = list(in_batches(work, first, checked_batch_size(batch_size) or fitting()))
    return _joined(parts)


def _check_ends(first: Tensor, second: Tensor) -> None:
    for name, end in (("first", first), ("second", second)):
        of_kind(name, end, Tensor, "features [B, N, D], as probe.features(images) returned them", ShapeError)
        if end.ndim < 2 or not len(end) or not end.is_floating_point():
            raise ShapeError(
                f"{name}: expected floating-point features [B, N, D] of at least one image, got {end.dtype} of shape "
                f"{list(end.shape)}."
            )
        if not end.isfinite().all():
            raise NumericsError(f"{name}: expected finite numbers, got NaN or infinity. Check the images and weights.")
    if (first.shape, first.dtype, first.device) != (second.shape, second.dtype, second.device):
        raise ShapeError(
            f"first, second: expected pairs of one shape, dtype and device, got {list(first.shape)} {first.dtype} on "
            f"{first.device} and {list(second.shape)} {second.dtype} on {second.device}."
        )


# Paths


class _Paths:
    """Paths between the ends of P pairs, as offsets [P, K - 1, ...] of their nodes from the straight segment."""

    def __init__(self, geometry: PathGeometry, segments: int, floor: float, num_probes: int, seed: int) -> None:
        self.geometry, self.segments, self.floor = geometry, segments, floor
        self.change = (geometry.second - geometry.first).as_subclass(Tensor)
        self.times = torch.linspace(0, 1, segments + 1, dtype=self.change.dtype, device=self.change.device)[1:-1]
        self.distance = torch.linalg.vector_norm(self.change.flatten(1), dim=1, dtype=torch.float64)
        self.everyone = torch.arange(len(self.change), device=self.change.device)
        self.whiten = _inverse_root(segments).to(self.change)
        self.trace: Estimate | None = None
        self.eps = torch.zeros_like(self.distance)
        if floor > 0:
            self.trace = geometry.trace(num_probes, seed)
            self.eps = floor * self.trace.value / self.change[0].numel()

    def solved(self, steps: int, rtol: float, precision: str) -> Geodesic:
        """Return the paths of least energy, starting from the straight segments."""
        start = self.change.new_zeros(len(self.change), (self.segments - 1) * self.change[0].numel())
        straight = self.measured(self.offsets(start))
        if not straight.energy.isfinite().all():
            raise NumericsError("metric_or_probe: it gives NaN or infinity on the segment from first to second.")
        ends = self.geometry.ends()
        least = self.eps * self.distance.square() + (0.0 if ends is None else ends)
        evaluate = partial(self.evaluated, precision=precision)
        end = minimise(evaluate, start, radius=self.distance, least=least, rtol=rtol, steps=steps, history=HISTORY)
        offsets, size = self.offsets(end.point), straight
        if end.iterations.any():
            size = self.measured(offsets)
            lower = size.energy <= straight.energy  # else no more than the rounding of the steps
            size = size.where(lower, straight)
            offsets = offsets * lower.reshape(-1, *[1] * (offsets.ndim - 1))
        outputs = self.geometry.outputs(self.times, offsets)
        ends_of_path = [self.geometry.first.as_subclass(Tensor), self.geometry.second.as_subclass(Tensor)]
        inner = torch.lerp(ends_of_path[0][:, None], ends_of_path[1][:, None], self._spread(self.times)) + offsets
        return Geodesic(
            path=torch.cat([ends_of_path[0][:, None], inner, ends_of_path[1][:, None]], 1),
            outputs=outputs,
            found=size,
            straight=straight,
            output_distance=None if ends is None else ends.sqrt(),
            feature_distance=self.distance,
            floor=self.floor,
            eps=self.eps,
            trace=self.trace,
            converged=end.converged,
            iterations=end.iterations,
            forwards=self.geometry.forwards,
            products=self.geometry.products,
        )

    def offsets(self, z: Tensor) -> Tensor:
        """Return w = A^(-1/2) z [b, K - 1, ...] of z [b, (K - 1) n]."""
        nodes = z.unflatten(1, (self.segments - 1, -1))
        return torch.einsum("kj,bjn->bkn", self.whiten, nodes).unflatten(2, self.change.shape[1:])

    def evaluated(self, z: Tensor, rows: Tensor, precision: str = "float32") -> tuple[Tensor, Tensor]:
        """Return energies [b] and their gradients by z [b, (K - 1) n]."""
        offsets = self.offsets(z)
        with torch.enable_grad(), matmul_precision(precision):
            leaf = offsets.requires_grad_()
            energy = self.segments * self.geometry.squares(rows, self.times, leaf).sum(1)
            if not energy.requires_grad:
                raise DecoderError(
                    "metric_or_probe: expected a differentiable function of the features, got one whose result does "
                    "not depend on them. Look for .detach(), torch.no_grad() or argmax in it."
                )
            slopes = torch.autograd.grad(energy.sum(), leaf)[0]
        gradient = torch.einsum("jk,bjn->bkn", self.whiten, slopes.flatten(2)).flatten(1)
        eps, squared = self.eps[rows], z.square().sum(1, dtype=torch.float64)
        total = energy.detach() + eps * (self.distance[rows].square() + squared)
        return total, gradient + (2 * eps).to(z)[:, None] * z

    def measured(self, offsets: Tensor) -> PathSize:
        """Return energies and lengths of paths [P, K - 1, ...]."""
        squares = self.geometry.squares(self.everyone, self.times, offsets)
        task = self.segments * squares.sum(1)
        every = torch.nn.functional.pad(offsets.flatten(2), (0, 0, 1, 1)).unflatten(2, offsets.shape[2:])
        slopes = self.segments * every.diff(dim=1)
        bend = torch.linalg.vector_norm(slopes.flatten(1), dim=1, dtype=torch.float64).square() / self.segments
        length, energy = torch.zeros_like(task), torch.zeros_like(task)
        nodes, weights = np.polynomial.legendre.leggauss(NODES)  # on [-1, 1]
        places = list(zip(nodes.tolist(), weights.tolist(), strict=True))
        for segment, (node, weight) in product(range(self.segments), places):
            passed, share = (1 + node) / (2 * self.segments), weight / (2 * self.segments)
            offset = every[:, segment] + passed * slopes[:, segment]
            speed = self.geometry.speeds(segment / self.segments + passed, offset, slopes[:, segment])
            energy += share * speed
            length += share * speed.clamp_min(0).sqrt()
        return PathSize(
            energy=task + self.eps * (self.distance.square() + bend),
            task_energy=task,
            curve_energy=energy,
            chord_length=squares.clamp_min(0).sqrt().sum(1),
            length=length,
        )

    def bytes_per_pair(self) -> int:
        """Return the memory that a pair takes: what its graph saves for the way back, and what L-BFGS remembers."""
        saved = 0

        def count(part: Tensor) -> Tensor:
            nonlocal saved
            saved += part.numel() * part.element_size()
            return part

        start = self.change.new_zeros(1, (self.segments - 1) * self.change[0].numel())
        with torch.autograd.graph.saved_tensors_hooks(count, lambda part: part):
            self.evaluated(start, self.everyone[:1])
        return 2 * saved + (2 * HISTORY + 8) * start.numel() * start.element_size()

    def _spread(self, times: Tensor) -> Tensor:
        return times.reshape(-1, *[1] * (self.change.ndim - 1))


def _inverse_root(segments: int) -> Tensor:
    """Return A^(-1/2) of the path Laplacian A = K tridiag(-1, 2, -1), [K - 1, K - 1] in float64."""
    inner = segments - 1
    off = torch.diag(torch.ones(inner - 1, dtype=torch.float64), 1)
    values, vectors = torch.linalg.eigh(segments * (2 * torch.eye(inner, dtype=torch.float64) - off - off.mT))
    return (vectors / values.sqrt()) @ vectors.mT


def _joined(parts: Sequence[Geodesic]) -> Geodesic:
    """Return the pairs of several parts as one."""
    whole: dict[str, Any] = {
        "floor": parts[0].floor,
        "forwards": sum(part.forwards for part in parts),
        "products": sum((part.products for part in parts), ProductCount()),
    }
    for name in (field.name for field in fields(Geodesic) if field.name not in whole):
        values = [getattr(part, name) for part in parts]
        join = getattr(type(values[0]), "join", torch.cat)  # of an Estimate or a PathSize its own
        whole[name] = None if values[0] is None else join(values)
    return Geodesic(**whole)
