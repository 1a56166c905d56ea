"""Learning the Spectral Pullback Network, how well it finds the task's subspace, and the constant it must beat."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pullback.errors import PullbackError
from pullback.geometry.batches import Probe
from pullback.learning.fit import Losses, Network, Share
from pullback.learning.losses import alignment
from pullback.learning.spn import orthonormal_columns
from pullback.learning.supervision import Supervision
from pullback.operators import JacobianOperator, LinearOperator, LowRankMetric
from pullback.randnla import Streams, block_krylov
from pullback.randnla.student import student_quantile

MetricNetwork = Callable[[Tensor], LowRankMetric]
"""Features [B, N, D] to the metric there."""


@dataclass(frozen=True, eq=False)
class SpnExamples:
    """Held-out feature maps whose leading modes are known."""

    features: Callable[[Tensor], Tensor]  # rows [b] -> [b, N, D]
    modes: Tensor  # [n, r, N, D]
    singular_values: Tensor  # [n, r]
    total: Tensor  # [n], |J|_F^2
    prefix: int = 1  # tokens of every view before its patches
    views: int = 1  # of a scene, whose tokens follow each other view by view

    def __len__(self) -> int:
        return len(self.modes)


@dataclass(frozen=True)
class SpnTask:
    """Batches of training features (``count`` of them) under one kind of supervision. With ``probe``, validation also
    measures the natural sensitivity ratio, for r JVPs per held-out image."""

    features: Callable[[Tensor], Tensor]
    count: int
    supervision: Supervision
    held_out: SpnExamples
    batch: int = 16  # of validation
    probe: Probe | None = None

    def __post_init__(self) -> None:
        if self.count < 1 or len(self.held_out) < 1:
            raise PullbackError(
                f"count, held_out: expected at least one example of each, got {self.count} and {len(self.held_out)}."
            )

    def loss(self, network: Network, step: int, share: Share, generator: torch.Generator) -> Losses:
        rows = torch.randint(self.count, (share.batch,), generator=generator)
        own = share.of(rows)
        features = self.features(own)
        # one stream per place in the batch, so that the sketches do not depend on the number of processes
        seed = int(torch.randint(1 << 62, (), generator=generator))
        everyone = Streams.from_seed(seed, share.batch, features.device).generators
        streams = Streams(everyone[share.rank :: share.world])
        losses, numbers = self.supervision(network(features), features, streams)
        return losses.mean(), numbers

    def validate(self, network: Network) -> Mapping[str, float]:
        scores = spn_scores(network, self.held_out, batch=self.batch)
        if self.probe is not None:
            ratio = natural_sensitivity_ratio(network, self.probe, self.held_out, batch=self.batch)
            scores.update(_mean_and_error("natural_ratio", ratio))
        return scores


@dataclass(frozen=True, eq=False)
class ExampleScores:
    """One number per example [n], on the CPU."""

    v1: Tensor  # over all tokens
    v1_patches: Tensor  # over patch tokens alone
    energy_share: Tensor  # what the predicted energies add up to, of |J|_F^2


@torch.no_grad()
def example_scores(network: MetricNetwork, examples: SpnExamples, *, batch: int = 16) -> ExampleScores:
    """V_1 of every example, and its predicted energies against the exact total."""
    whole, patches, share = [], [], []
    for rows in torch.arange(len(examples)).split(batch):
        metric = network(examples.features(rows))
        truth = examples.modes[rows].to(metric.modes)
        whole.append(alignment(metric.modes, truth).cpu())
        patches.append(patch_alignment(metric.modes, truth, examples.prefix, examples.views).cpu())
        share.append(metric.energies.sum(1).cpu() / examples.total[rows].cpu())
    return ExampleScores(torch.cat(whole), torch.cat(patches), torch.cat(share))


def spn_scores(network: MetricNetwork, examples: SpnExamples, *, batch: int = 16) -> dict[str, float]:
    """V_1 over all tokens and without the prefix (CLS) block, with standard errors over images, and how far the
    predicted energies are from the exact ones: the share of the total that they add up to, against kappa_cap."""
    found = example_scores(network, examples, batch=batch)
    kappa = examples.singular_values.double().square().sum(1) / examples.total.double()
    return {
        **_mean_and_error("v1", found.v1),
        **_mean_and_error("v1_patches", found.v1_patches),
        "score": float(found.v1.mean()),
        "sensitivity_ratio": float(found.energy_share.mean()),
        "kappa": float(kappa.mean()),
    }


def comparison_row(name: str, found: ExampleScores, constant: ExampleScores) -> dict[str, Any]:
    """Mean V_1 of a network, and its paired lead over the constant subspace with half the width of its 95 % interval:
    t_{0.975, n-1} std(lead) / sqrt(n), None for a single example."""
    row: dict[str, Any] = {"network": name}
    for label in ("v1", "v1_patches"):
        values = getattr(found, label).double()
        lead = values - getattr(constant, label).double()
        count = len(lead)
        half = student_quantile(0.975, count - 1) * float(lead.std()) / count**0.5 if count > 1 else None
        row |= {label: float(values.mean()), f"{label}_lead": float(lead.mean()), f"{label}_lead_half_width": half}
    return row


@torch.no_grad()
def natural_sensitivity_ratio(
    network: MetricNetwork,
    probe: Probe,
    examples: SpnExamples,
    *,
    batch: int = 16,
    precision: str = "float32",
) -> Tensor:
    """sum_j |J u_j|^2 / |J|_F^2 of every example [n], float64: the share of the task's sensitivity in the predicted
    subspace, with natural energies (Corollary cor:ssm_quality). At most kappa_cap(r), which the true modes reach."""
    ratios = []
    for rows in torch.arange(len(examples)).split(batch):
        features = examples.features(rows)
        operator = JacobianOperator(probe, features, precision=precision)
        images = operator @ network(features).modes.flatten(2).mT
        ratios.append(images.double().square().sum((1, 2)) / examples.total[rows].to(images.device))
    return torch.cat(ratios)


def patch_alignment(modes: Tensor, truth: Tensor, prefix: int, views: int = 1) -> Tensor:
    """V_1 of the two subspaces [B, r, N, D] restricted to the patch tokens [B]: the block of the CLS token, where most
    of the energy of late modes sits, would hide the rest. Each of ``views`` begins with ``prefix`` such tokens."""
    if views < 1 or modes.shape[2] % views:
        raise PullbackError(
            f"views: expected a number that divides the {modes.shape[2]} tokens of a scene, got {views}. Take it from "
            "probe.token_layout(features)."
        )
    own = [m.unflatten(2, (views, -1))[:, :, :, prefix:].flatten(2) for m in (modes, truth)]  # [B, r, patches D]
    spans = [orthonormal_columns(m.mT.float()).mT for m in own]
    return (spans[0] @ spans[1].mT).square().sum((1, 2)) / truth.shape[1]


class StackedModes(LinearOperator):
    """The modes of n images under each other, [n r, N D] scaled by 1 / sqrt(n): its leading right singular vectors are
    the subspace with the largest mean V_1."""

    def __init__(self, modes: Tensor) -> None:
        self.matrix = modes.flatten(2).flatten(0, 1)
        self.scale = len(modes) ** -0.5
        dtype = torch.promote_types(modes.dtype, torch.float32)  # modes may be stored in half precision
        super().__init__(1, *self.matrix.shape, dtype=dtype, device=modes.device)

    def _matmat(self, columns: Tensor) -> Tensor:
        return self.scale * (self.matrix.to(columns.dtype) @ columns)

    def _rmatmat(self, columns: Tensor) -> Tensor:
        return self.scale * (self.matrix.to(columns.dtype).mT @ columns)


def constant_subspace(modes: Tensor, rank: int, *, seed: int = 0) -> Tensor:
    """argmax_U mean_i |U^T V_i|_F^2 over orthonormal U, from training modes [n, r, N, D] -> [rank, N, D]."""
    stacked = StackedModes(modes)
    found = block_krylov(stacked, rank, rtol=1e-4, streams=Streams.from_seed(seed, 1, modes.device))
    return found.right[0].mT.unflatten(-1, modes.shape[2:])


def constant_network(subspace: Tensor) -> MetricNetwork:
    """One subspace [r, N, D] for every image, with energies of 1."""

    def network(features: Tensor) -> LowRankMetric:
        modes = subspace.to(features.device).expand(len(features), *subspace.shape)
        return LowRankMetric(modes, modes.new_ones(modes.shape[:2]))

    return network


def constant_scores(subspace: Tensor, examples: SpnExamples, *, batch: int = 16) -> dict[str, float]:
    """The same scores for one subspace [r, N, D] for every image."""
    scores = spn_scores(constant_network(subspace), examples, batch=batch)
    return {name: value for name, value in scores.items() if name != "sensitivity_ratio"}


def _mean_and_error(name: str, values: Tensor) -> dict[str, float]:
    error = float(values.std()) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return {name: float(values.mean()), f"{name}_se": error}
