"""Spectral Pullback Networks under every supervision, trained alike and judged picture by picture.

A `Ground` is a probe with pictures to learn from and others to judge by. All networks on it begin with the same weights
and see the same pictures in the same order; they differ in what they are compared with (`Variant`). They are judged as
their last step left them, so that nothing is chosen by the pictures that judge. What a variant comes to is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from pullback.evaluation.ranking import spearman
from pullback.experiments.experiment import Found, Measured, Place, Verdict, overall
from pullback.experiments.workshop import Workshop
from pullback.geometry.spectrum import as_token_maps
from pullback.learning.fit import FitConfig, fit
from pullback.learning.losses import alignment
from pullback.learning.spn import SpectralPullbackNetwork, SpnConfig
from pullback.learning.train_head import hash_of
from pullback.learning.train_spn import (
    DistanceMatching,
    KnownModes,
    RandNLA,
    RandomDirections,
    SpnExamples,
    SpnTask,
    Supervised,
    Supervision,
    constant_network,
    constant_subspace,
    patch_alignment,
    spectral_loss,
)
from pullback.operators import DenseOperator, JacobianOperator, LinearOperator, LowRankMetric
from pullback.probes import ProbeMap
from pullback.randnla import Streams, power_iteration
from pullback.runs.files import replaced_folder

RANK = 20
V1, LEAD, GAP, BASE, TARGET, SHARE = "V₁", "lead", "to exact", "to q = 1", "target V₁", "of κ"
PATCHES, PATCH_LEAD, RHO, RHO_PATCHES, ENERGY = "V₁ patches", "lead patches", "ρ", "ρ patches", "log λ error"
NOISE = 0.02
"""A difference of V_1 or of rho that is as good as none; the paper calls 0.003 noise, of one run each."""
_AT_ONCE = 8

Kind = Literal["constant", "untrained", "distances", "directions", "randnla", "spectral"]


@dataclass(frozen=True)
class Variant:
    """How a network is supervised. ``row``: its name. ``width``: r_0, by default r. ``energy_weight``: alpha.
    ``from_constant``: it starts at the best constant subspace, which is ours and not the paper's."""

    row: str
    kind: Kind
    power_iters: int = 1
    width: int | None = None
    energy_weight: float = 0.1
    from_constant: bool = False


CONSTANT = Variant("Best constant subspace", "constant")
UNTRAINED = Variant("Random init", "untrained")
DISTANCES = Variant("Distance matching", "distances")
DIRECTIONS = Variant("Random directions", "directions")
QUICK = Variant("RandNLA, q = 1", "randnla")
SPECTRAL = Variant("Spectral", "spectral")
QUICK_FROM_CONSTANT = Variant("RandNLA, q = 1, from the constant", "randnla", from_constant=True)
SPECTRAL_FROM_CONSTANT = Variant("Spectral, from the constant", "spectral", from_constant=True)


@dataclass(frozen=True, eq=False)
class Ground:
    """Where networks learn and are judged, J being that of ``probe``.

    ``inputs`` [n, N, D]: what networks read of the training pictures; ``points``: where J is taken, by default there.
    ``modes`` [n, r, N, D] and ``values`` [n, r]: exact ones. ``jacobians`` [n, M, N D] and ``judging`` [m, M, N D],
    of training and held-out pictures, where they are held; else products are taken.
    """

    name: Mapping[str, Any]  # what decides all of this, as plain JSON
    probe: ProbeMap
    inputs: Tensor
    modes: Tensor
    values: Tensor
    held_out: SpnExamples
    points: Tensor | None = None
    jacobians: Tensor | None = None
    judging: Tensor | None = None
    precision: str = "float32"
    latent: bool = False
    _subspace: list[Tensor] = field(default_factory=list)

    def subspace(self, count: int) -> Tensor:
        """Return the best constant subspace [r, N, D] of the first ``count`` training pictures."""
        if not self._subspace:
            self._subspace.append(constant_subspace(self.modes[:count].float(), RANK))
        return self._subspace[0]

    def operator(self, rows: Tensor) -> LinearOperator:
        """Return J at held-out pictures."""
        if self.judging is not None:
            return DenseOperator(self.judging[rows.to(self.judging.device)])
        return JacobianOperator(self.probe, self.held_out.features(rows))

    def teacher(self, variant: Variant) -> Supervision:
        """Return what networks of a variant are compared with."""
        weight = variant.energy_weight
        if variant.kind == "spectral":
            return KnownModes(self.modes, self.values, weight)
        if variant.kind == "randnla" and self.jacobians is not None:
            return HeldRandNLA(self.jacobians, variant.power_iters, variant.width, weight)
        choices: dict[str, Callable[[], Supervision]] = {
            "randnla": lambda: RandNLA(
                self.probe, variant.power_iters, variant.width, weight, precision=self.precision, signal_probes=0
            ),
            "distances": lambda: DistanceMatching(self.probe),
            "directions": lambda: RandomDirections(self.probe, precision=self.precision),
        }
        return choices[variant.kind]()


@dataclass(frozen=True, eq=False)
class HeldRandNLA:
    """Algorithm 2 as in `RandNLA`, with Jacobians [n, M, N D] that are held in place of products."""

    jacobians: Tensor
    power_iters: int
    width: int | None
    energy_weight: float

    def __call__(self, metric: LowRankMetric, features: Tensor, streams: Streams, rows: Tensor) -> Supervised:
        operator = DenseOperator(self.jacobians[rows.to(self.jacobians.device)])
        found = power_iteration(
            operator, metric.modes.shape[1], power_iters=self.power_iters, sketch_width=self.width, streams=streams
        )
        modes = as_token_maps(found.right, metric.modes.shape[2:])
        return spectral_loss(metric, modes, found.singular_values, self.energy_weight)


# What a variant comes to


def scores(
    shop: Workshop, ground: Callable[[], Ground], name: Mapping[str, Any], variant: Variant
) -> dict[str, Tensor]:
    """Return one number per held-out picture [n], means over seeds: "v1" and, of pictures with patches, "patches";
    "share", of |J|_F^2 in the predicted subspace over that in the best one; of networks "rho" and "rho-patches" of
    their importance against imp*, and "energy", mean_j |log lambda_j - log sigma_j^2|; of sketches "target", V_1."""
    seeds = range(shop.seed, shop.seed + (1 if variant.kind == "constant" else shop.count("spn seeds")))
    found = []
    for seed in seeds:
        key = {"what": "spn-scores", **name, **asdict(variant), "seed": seed}
        key.pop("row")
        found.append(shop.kept(key, partial(_measure, shop, ground, variant, seed)))
    return {column: torch.stack([one[column].double() for one in found]).mean(0) for column in found[0]}


def network_of(shop: Workshop, ground: Ground, variant: Variant, seed: int) -> SpectralPullbackNetwork:
    """Return the network of a variant, trained when it is first wanted."""
    own = {"what": "spn-network", **ground.name, **asdict(variant), "seed": seed}
    own.pop("row")
    folder = shop.store / f"spn-network-{hash_of(own)[:16]}"
    with shop.lacking(folder / "config.json") as lacks:
        if lacks:
            network = _new_network(shop, ground, seed)
            if variant.from_constant:
                network.start_at(ground.subspace(shop.count("constant pictures")))
            if variant.kind != "untrained":
                shop.progress.describe(f"training a network: {variant.row}")
                _fit(shop, ground, network, variant, seed)
            with replaced_folder(folder) as temporary:
                network.eval().save_pretrained(temporary)
    return SpectralPullbackNetwork.from_pretrained(folder).to(shop.device).eval()


def _new_network(shop: Workshop, ground: Ground, seed: int) -> SpectralPullbackNetwork:
    """Make a network with the same weights for every variant, scaled to the training pictures."""
    latent = (ground.modes.shape[2], ground.modes.shape[3]) if ground.latent else None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = SpnConfig(ground.inputs.shape[-1], RANK, shop.count("spn width"), latent=latent)
        network = SpectralPullbackNetwork.from_config(config)
    first = slice(0, 64)  # enough for means and spreads
    return network.to(ground.inputs.device).start_from(ground.inputs[first].float(), ground.values[first])


def _fit(shop: Workshop, ground: Ground, network: SpectralPullbackNetwork, variant: Variant, seed: int) -> None:
    steps = shop.count("spn steps")
    config = FitConfig(
        steps=steps, batch=shop.count("spn batch"), learning_rate=3e-3, warmup=steps // 10, ema=0.95, seed=seed,
        validate_every=steps, precision="bf16" if shop.device.type == "cuda" else "float32",
    )  # fmt: skip
    inputs, points = ground.inputs, ground.inputs if ground.points is None else ground.points

    def read(rows: Tensor) -> Tensor:
        return inputs[rows.to(inputs.device)].float()

    def at(rows: Tensor) -> Tensor:
        return points[rows.to(points.device)]

    judged = ground.held_out
    task = SpnTask(at, len(inputs), ground.teacher(variant), judged, inputs=read if ground.latent else None)
    fit(network, task, config)


@torch.no_grad()
def _measure(shop: Workshop, ground: Callable[[], Ground], variant: Variant, seed: int) -> dict[str, Tensor]:
    own = ground()
    examples = own.held_out
    if variant.kind == "constant":
        network = constant_network(own.subspace(shop.count("constant pictures")))
    else:
        with torch.enable_grad():
            network = network_of(shop, own, variant, seed)
    parts = []
    for rows in torch.arange(len(examples)).split(_AT_ONCE):
        metric, operator = examples.metrics(network, rows), own.operator(rows)
        truth, values = examples.modes[rows].to(metric.modes), examples.singular_values[rows].to(metric.modes)
        images = operator @ metric.modes.flatten(2).mT.to(operator.dtype)
        best = values.double().square().sum(1)
        part = {"v1": alignment(metric.modes, truth), "share": images.double().square().sum((1, 2)) / best}
        if not own.latent:
            part["patches"] = patch_alignment(metric.modes, truth, examples.prefix, examples.views)
        if variant.kind != "constant":
            part |= _against(metric, LowRankMetric(truth, values.square()), examples.prefix)
        if variant.kind == "randnla":
            streams = Streams.from_seed(seed, len(rows), operator.device, int(rows[0]))
            found = power_iteration(
                operator, RANK, power_iters=variant.power_iters, sketch_width=variant.width, streams=streams
            )
            part["target"] = alignment(as_token_maps(found.right, truth.shape[2:]), truth)
        parts.append(part)
    return {name: torch.cat([part[name].cpu() for part in parts]) for name in parts[0]}


def _against(metric: LowRankMetric, truth: LowRankMetric, prefix: int) -> dict[str, Tensor]:
    """Compare importances and energies of two metrics."""
    predicted, wanted = metric.importance(), truth.importance()
    logs = [own.energies.double().clamp_min(1e-30).log() for own in (metric, truth)]
    return {
        "rho": spearman(predicted, wanted),
        "rho-patches": spearman(predicted[:, prefix:], wanted[:, prefix:]),
        "energy": (logs[0] - logs[1]).abs().mean(1),
    }


# Rows

_NUMBERS = {V1: "v1", PATCHES: "patches", SHARE: "share", RHO: "rho", RHO_PATCHES: "rho-patches", ENERGY: "energy",
            TARGET: "target"}  # fmt: skip
_DIFFERENCES = {
    LEAD: ("v1", CONSTANT), PATCH_LEAD: ("patches", CONSTANT), GAP: ("v1", SPECTRAL), BASE: ("v1", QUICK),
}  # fmt: skip
"""What of, less that of which variant, picture by picture."""


def row_of(
    shop: Workshop, table: str, variant: Variant, columns: Sequence[str], known: Callable[[Variant], dict[str, Tensor]]
) -> Iterator[Measured]:
    """Return the row of a variant. ``known``: the `scores` of a variant."""
    own = known(variant)
    for column in columns:
        if column in _NUMBERS:
            values = own[_NUMBERS[column]]
        else:
            name, other = _DIFFERENCES[column]
            values = own[name] - known(other)[name]
        yield shop.mean(Place(table, variant.row, column), values)


# Reading finished rows


def interval(found: Found, table: str, row: str, column: str) -> tuple[float, float, float] | None:
    """Return a value with its interval; None where it was not measured."""
    own = found.row(table, row, column)
    return None if own is None else (own["value"], own["low"], own["high"])


def above(found: Found, table: str, row: str, column: str, level: float = 0.0) -> bool | None:
    """Whether a number lies above a level beyond its interval."""
    own = interval(found, table, row, column)
    return None if own is None else own[1] > level


def below(found: Found, table: str, row: str, column: str, level: float = 0.0) -> bool | None:
    """Whether a number lies below a level beyond its interval."""
    own = interval(found, table, row, column)
    return None if own is None else own[2] < level


def said(found: Found, table: str, row: str, column: str, signed: bool = False, digits: int = 3) -> str:
    """Return a number with its interval in words; ``digits`` behind the point."""
    own = interval(found, table, row, column)
    if own is None:
        return "not measured"
    value, low, high = (f"{number:{'+' if signed else ''}.{digits}f}" for number in own)
    return f"{value} ({low} to {high})"


def learned(found: Found, table: str, variant: Variant) -> bool | None:
    """Whether a network is ahead of an untrained one by more than what is as good as nothing."""
    random = interval(found, table, UNTRAINED.row, V1)
    return None if random is None else above(found, table, variant.row, V1, random[2] + NOISE)


def negated(held: bool | None) -> bool | None:
    """Return the opposite of what is known."""
    return None if held is None else not held


def reaches_ceiling(found: Found, table: str) -> Verdict:
    """Judge whether the cheapest sketches teach as well as exact modes: what teaches nothing is no ceiling."""
    parts: dict[str, bool | None] = {
        f"within {NOISE}": above(found, table, QUICK.row, GAP, -NOISE),
        "not measurably behind": negated(below(found, table, QUICK.row, GAP)),
    }
    if learned(found, table, SPECTRAL) is False:
        parts = {name: None if held is None else False for name, held in parts.items()}
    return overall(
        parts,
        f"{table}: V₁ with q = 1 {said(found, table, QUICK.row, V1)}, with exact modes "
        f"{said(found, table, SPECTRAL.row, V1)}; picture by picture {said(found, table, QUICK.row, GAP, True)}.",
    )
