"""What the Spectral Pullback Network is compared with in a training step: the paper's way, its ceiling and two rivals.

Each is a function of (metric, features, streams) that returns the loss [B] of a batch and what is worth logging.
Products are taken in the precision of the features and compared in that of the metric.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pullback.errors import PullbackError
from pullback.geometry.batches import Probe
from pullback.geometry.spectrum import as_token_maps
from pullback.learning.exact_modes import exact_modes
from pullback.learning.losses import alignment, direction_loss, distance_loss, energy_loss, subspace_loss
from pullback.operators import JacobianOperator, LinearOperator, LowRankMetric, check_sensitive
from pullback.randnla import Streams, Svd, power_iteration
from pullback.randnla.trace import draw_probes, energy, tail_energies

Supervised = tuple[Tensor, Mapping[str, float]]


class Supervision(Protocol):
    def __call__(self, metric: LowRankMetric, features: Tensor, streams: Streams) -> Supervised: ...


@dataclass(frozen=True)
class RandNLA:
    """Algorithm 2 literally: a fresh sketch, q rounds of power iteration, its leading columns as they are.

    The columns are sorted by their energies, so that lambda_1 learns the largest. ``signal_probes`` more JVPs a step
    estimate |J|_F^2 for the gradient signal ratio in the log; 0 leaves it out.
    """

    probe: Probe
    power_iters: int = 1
    sketch_width: int | None = None
    energy_weight: float = 0.1
    precision: str = "float32"
    signal_probes: int = 4

    def __call__(self, metric: LowRankMetric, features: Tensor, streams: Streams) -> Supervised:
        operator = JacobianOperator(self.probe, features, precision=self.precision)
        rank = metric.modes.shape[1]
        found = power_iteration(
            operator, rank, power_iters=self.power_iters, sketch_width=self.sketch_width, streams=streams
        )
        loss, numbers = _spectral_loss(metric, found, features.shape[1:], self.energy_weight)
        if self.signal_probes:
            signal = gradient_signal_ratio(operator, found, num_probes=self.signal_probes, streams=streams)
            numbers["gradient_signal_ratio"] = float(signal.mean())
        return loss, numbers


@dataclass(frozen=True)
class Spectral:
    """The ceiling: the exact leading modes in every step."""

    probe: Probe
    energy_weight: float = 0.1
    precision: str = "float32"

    def __call__(self, metric: LowRankMetric, features: Tensor, streams: Streams) -> Supervised:
        operator = JacobianOperator(self.probe, features, precision=self.precision)
        return _spectral_loss(
            metric,
            exact_modes(operator, metric.modes.shape[1], precision=self.precision),
            features.shape[1:],
            self.energy_weight,
        )


@dataclass(frozen=True)
class DistanceMatching:
    """Naive: the predicted length of F_2 - F_1 against the distance of the two outputs, for pairs of a batch.

    Pairs are neighbours within a process, so several processes compare other pairs than one does.
    """

    probe: Callable[[Tensor], Tensor]

    def __call__(self, metric: LowRankMetric, features: Tensor, streams: Streams) -> Supervised:
        if len(features) < 2:
            raise PullbackError("batch: distance matching compares pairs, expected at least 2 a process, got 1.")
        other = features[torch.arange(len(features)).roll(1)]  # a slice keeps what a decoder reads below the features
        with torch.no_grad():
            change = (self.probe(other) - self.probe(features)).flatten(1)
        distance = torch.linalg.vector_norm(change, dim=1)
        return distance_loss(metric, (other - features).to(metric.modes.dtype), distance), {}


@dataclass(frozen=True)
class RandomDirections:
    """Naive: v^T g v against |J v|^2 for random unit v."""

    probe: Probe
    count: int = 20
    precision: str = "float32"

    def __call__(self, metric: LowRankMetric, features: Tensor, streams: Streams) -> Supervised:
        operator = JacobianOperator(self.probe, features, precision=self.precision)
        columns = streams.gaussian(operator.cols, self.count, operator.dtype)
        columns = columns / torch.linalg.vector_norm(columns, dim=1, keepdim=True)
        sensitivities = (operator @ columns).square().sum(1)  # [B, count]
        directions = as_token_maps(columns, features.shape[1:]).to(metric.modes.dtype)
        losses = [direction_loss(metric, directions[:, k], sensitivities[:, k]) for k in range(self.count)]
        return torch.stack(losses).mean(0), {}


def gradient_signal_ratio(operator: LinearOperator, found: Svd, *, num_probes: int, streams: Streams) -> Tensor:
    """|J v_1|^2 N D / |J|_F^2 (Corollary cor:gsr) of what power iteration ``found`` [B]: how much more its leading
    direction tells of J than a random unit vector, for which it is 1 in the mean. |J|_F^2 is what the found directions
    capture, which is known, and the rest by ``num_probes`` Hutchinson probes."""
    basis, image = found.deflation()
    rest = tail_energies(*draw_probes(operator, num_probes, streams), basis, image).mean(-1)
    return found.singular_values[:, 0].double().square() * operator.cols / (energy(image) + rest)


def _spectral_loss(
    metric: LowRankMetric, found: Svd, shape: torch.Size, energy_weight: float
) -> tuple[Tensor, dict[str, float]]:
    check_sensitive(found.singular_values[:, 0].square())
    target = as_token_maps(found.right, shape).to(metric.modes.dtype)
    loss = subspace_loss(metric.modes, target) + energy_weight * energy_loss(metric.energies, found.singular_values)
    return loss, {"alignment": float(alignment(metric.modes.detach(), target).mean())}
