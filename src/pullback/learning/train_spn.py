"""Train a Spectral Pullback Network on images: what `pullback train spn` does.

From the outside in: `train_spn`; the task that it hands to the training loop (`SpnTask`); what the network is compared
with in a training step (`Supervision`: the paper's way, its ceiling and two rivals); how well it finds the task's
subspace (`spn_scores`), and the constant subspace that it must beat (`constant_subspace`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from pullback.checks import of_kind
from pullback.data.images import ImageSource
from pullback.data.sources import Source, open_source
from pullback.errors import PullbackError, RankError
from pullback.evaluation.statistics import mean_and_error
from pullback.geometry.spectrum import Probe, as_token_maps
from pullback.learning.bottleneck import LatentBackbone
from pullback.learning.fit import FitConfig, Losses, Network, Share, check_going_on, fit
from pullback.learning.losses import alignment, direction_loss, distance_loss, energy_loss, subspace_loss
from pullback.learning.spn import SpectralPullbackNetwork, SpnConfig, orthonormal_columns
from pullback.learning.train_head import (
    Reader,
    check_held_out,
    contents_of,
    feature_reader,
    hash_of,
    kept,
    origin_of,
    readable_rows,
    recorded,
    rows_of_table,
)
from pullback.operators import JacobianOperator, LinearOperator, LowRankMetric, check_sensitive
from pullback.probes import INPUTS, ProbeMap
from pullback.randnla import Streams, Svd, block_krylov, power_iteration
from pullback.randnla.estimate import student_quantile
from pullback.randnla.svd import exact_svd
from pullback.randnla.trace import draw_probes, energy, tail_energies
from pullback.runs.progress import Progress
from pullback.targets.compute import compute_table
from pullback.targets.recipe import Recipe
from pullback.targets.store import NOT_COMPARED, configuration
from pullback.targets.table import TargetTable
from pullback.tokens import Features

_PAIRS = "batch: distance matching compares pairs, expected at least 2 a process, got 1."
SUPERVISIONS = ("randnla", "spectral", "distances", "directions")
MetricNetwork = Callable[[Tensor], LowRankMetric]
"""Features [B, N, D] to the metric there."""


def train_spn(
    probe: ProbeMap,
    images: ImageSource | Source,
    held_out: ImageSource | Source,
    *,
    rank: int = 20,
    width: int = 256,
    heads: int = 4,
    supervision: str = "randnla",
    power_iters: int = 1,
    sketch_width: int | None = None,
    precision: str = "float32",
    size: int | tuple[int, int] | None = None,
    limit: int | None = None,
    keep_features: bool = True,
    constant_images: int = 0,
    config: FitConfig | None = None,
    out: str | Path | None = None,
    tensorboard: bool = False,
    progress: Progress | None = None,
) -> SpectralPullbackNetwork:
    """Train on these images under one supervision; V_1 against the exact modes of ``held_out`` decides and is logged.

    ``keep_features``: compute features once and hold them, or recompute them in every step. Features of decoders that
    read layers below the probe are always recomputed: those layers belong to them.
    ``constant_images``: start at the best constant subspace of so many training images (`start_at`), which needs their
    modes; 0 starts at random, as the paper does.

    In the latent of a bottleneck (`latent_probe`) the network reads the last layer of the backbone that the decoder
    reads (`read_by_network`) and predicts modes of the latent; "spectral" supervision computes the modes of all
    training images once, to a relative error of 1e-4, and holds them.
    """
    of_kind("probe", probe, ProbeMap, "a probe map, such as pb.load_probe(model, decoder, layer)")
    of_kind("config", config, (FitConfig, type(None)), "a FitConfig, or None")
    config, progress = config or FitConfig(steps=2000, batch=16, learning_rate=1e-3), progress or Progress()
    wanted = probe.pixel_format(size)
    teacher = supervision_of(
        supervision, probe, power_iters=power_iters, sketch_width=sketch_width, precision=precision
    )
    reads = read_by_network(probe)
    dim, own_dim = (own.backbone.dim * len(own.layers) for own in (reads, probe))
    tokens = probe.backbone.token_layout(torch.empty(0, 3, *wanted.size)).tokens
    latent = None if reads is probe else (tokens, own_dim)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        network = SpectralPullbackNetwork.from_config(SpnConfig(dim, rank, width, heads, latent=latent))
    folder = None if out is None else Path(out)
    progress.stage("reading the images")
    made_for = configuration(probe, Recipe(rank, precision=precision), wanted, crops=0, seed=config.seed, source="")
    rows = readable_rows(images, wanted, limit)
    settings = {f"probe.{name}": value for name, value in made_for.items() if name not in NOT_COMPARED} | {
        "supervision": supervision,
        "power_iters": power_iters,
        "sketch_width": sketch_width,
        "constant_images": constant_images,
        "images": hash_of([row.item.key for row in rows]),
        "held_out": hash_of([item.key for item in open_source(held_out)]),
    }
    _check_step(supervision, config.batch, rank, sketch_width, tokens * own_dim)
    with torch.device("meta"):
        start = SpnConfig(dim, rank, width, heads, latent=latent, tokens=tokens if constant_images else None)
        check_going_on(SpectralPullbackNetwork.from_config(start), config, folder, settings)
    shared = check_held_out(contents_of(held_out, wanted), [row.sha256 for row in rows])
    judge = held_out_modes(probe, held_out, rank, size=wanted.size, progress=progress)
    points = feature_reader(probe, rows, wanted)
    inputs = points if latent is None else feature_reader(reads, rows, wanted)
    first = inputs(torch.arange(min(8, len(rows))))
    if keep_features and type(first) is torch.Tensor:
        progress.work("computing features", len(rows), "images")
        inputs = kept(inputs, len(rows), on_progress=progress.advance)
        points = inputs if latent is None else held_latents(points, len(rows))
    network.to(first.device).start_from(first, judge.singular_values[: len(first)].to(first.device))
    if latent is not None and supervision == "spectral":
        known = _modes(probe, images, rank, wanted.size, limit, "computing modes", progress, rtol=1e-4)
        teacher = known_modes(known, [row.item.key for row in rows])
    if constant_images:
        count = constant_images if limit is None else min(limit, constant_images)
        known = _modes(probe, images, rank, wanted.size, count, "computing the constant subspace", progress)
        assert known.modes is not None
        network.start_at(constant_subspace(known.modes.to(first.device), rank, seed=config.seed))
    fitted = fit(
        network,
        SpnTask(points, len(rows), teacher, judge, probe=probe, inputs=None if latent is None else inputs),
        config,
        out=folder,
        settings=settings,
        tensorboard=tensorboard,
        progress=progress,
    )
    scores = {name: value for name, value in fitted.scores.items() if name != "score"} | recorded(shared)
    return network.describe(origin=origin_of(probe, rank, wanted.size), scores=scores).eval()


def read_by_network(probe: ProbeMap) -> ProbeMap:
    """Return the probe whose features a network reads to predict the metric of ``probe``: the same one. In the latent
    of a bottleneck it is the last layer that the decoder reads, after the final norm if the decoder sees it so."""
    own = probe.backbone
    if not isinstance(own, LatentBackbone):
        return probe
    inner = own.decoder.inner
    return ProbeMap(own.image, replace(inner, layers=(max(inner.layers),)), INPUTS)


def held_latents(reader: Reader, count: int) -> Reader:
    """Return a reader that has computed all latents [n, K, d] and holds them as they are, with their layout."""
    parts = [reader(rows) for rows in torch.arange(count).split(64)]
    whole = torch.cat([part.as_subclass(Tensor) for part in parts])
    latents = Features.attach(whole, parts[0].token_layout, {})  # type: ignore[attr-defined]
    return lambda rows: latents[rows.to(latents.device)]


def known_modes(table: TargetTable, keys: Sequence[str]) -> KnownModes:
    """Return the supervision by the modes of a table, for training images with these keys."""
    assert table.modes is not None
    place = {key: number for number, key in enumerate(table.keys)}
    rows = torch.tensor([place[key] for key in keys])
    return KnownModes(table.modes[rows], table.singular_values[rows])


def _check_step(supervision: str, batch: int, rank: int, sketch_width: int | None, coordinates: int) -> None:
    """Raise the errors of the first step before anything is computed for it."""
    if supervision == "randnla" and sketch_width is not None and not rank <= sketch_width <= coordinates:
        raise RankError(f"sketch_width: expected rank <= width <= {coordinates}, got {sketch_width} at rank {rank}.")
    if supervision == "distances" and batch < 2:
        raise PullbackError(_PAIRS)


def held_out_modes(
    probe: ProbeMap,
    images: ImageSource | Source,
    rank: int,
    *,
    size: int | tuple[int, int] | None = None,
    limit: int | None = None,
    progress: Progress | None = None,
) -> SpnExamples:
    """Compute the leading modes of these images, exact or accurate to 1e-3, with the way to their features."""
    wanted = probe.pixel_format(size)
    table = _modes(probe, images, rank, wanted.size, limit, "computing held-out modes", progress or Progress())
    assert table.modes is not None
    layout = probe.backbone.token_layout(torch.empty(0, 3, *wanted.size))
    rows, reads = rows_of_table(table, images), read_by_network(probe)
    inputs = None if reads is probe else feature_reader(reads, rows, wanted)
    points = feature_reader(probe, rows, wanted)
    return SpnExamples(points, table.modes, table.singular_values, table.total, layout.prefix, inputs=inputs)


def _modes(
    probe: ProbeMap,
    images: ImageSource | Source,
    rank: int,
    size: tuple[int, int],
    limit: int | None,
    what: str,
    progress: Progress,
    *,
    rtol: float = 1e-3,
) -> TargetTable:
    """Compute targets of these images with their modes, told to ``progress`` as ``what``."""
    source = open_source(images)
    if source.count is None:
        progress.stage(what)
    else:
        progress.work(what, source.count if limit is None else min(source.count, limit), "images")
    count = None if source.count is None else progress.advance
    return compute_table(
        probe, source, rank=rank, size=size, limit=limit, keep_modes=True, rtol=rtol, on_progress=count
    )[0]


@dataclass(frozen=True, eq=False)
class SpnExamples:
    """Held-out feature maps whose leading modes are known: those of J at ``features``. Networks read ``inputs``, by
    default the same; to predict modes in the latent of a bottleneck they read features of the backbone."""

    features: Reader
    modes: Tensor  # [n, r, N, D]
    singular_values: Tensor  # [n, r]
    total: Tensor  # [n], |J|_F^2
    prefix: int = 1  # tokens of every view before its patches
    views: int = 1  # of a scene, whose tokens follow each other view by view
    inputs: Reader | None = None

    def __len__(self) -> int:
        return len(self.modes)

    def metrics(self, network: MetricNetwork, rows: Tensor) -> LowRankMetric:
        """Return what a network predicts for these rows."""
        return network((self.inputs or self.features)(rows))


@dataclass(frozen=True)
class SpnTask:
    """A `Task`: batches of training features (``count`` of them) under one kind of supervision. With ``probe``,
    validation also measures the natural sensitivity ratio, for r JVPs per held-out image. The supervision takes its
    products at ``features``; the network reads ``inputs``, by default the same."""

    features: Reader
    count: int
    supervision: Supervision
    held_out: SpnExamples
    batch: int = 16  # of validation
    probe: Probe | None = None
    inputs: Reader | None = None

    def __post_init__(self) -> None:
        if self.count < 1 or len(self.held_out) < 1:
            raise PullbackError(
                f"count, held_out: expected at least one example of each, got {self.count} and {len(self.held_out)}."
            )

    def rows(self, step: int, batch: int, generator: torch.Generator) -> Tensor:
        """Return the training examples of a step [batch]."""
        return torch.randint(self.count, (batch,), generator=generator)

    def loss(self, network: Network, step: int, share: Share, generator: torch.Generator) -> Losses:
        own = share.of(self.rows(step, share.batch, generator))
        features = self.features(own)
        # one stream per place in the batch, so that the sketches do not depend on the number of processes
        seed = int(torch.randint(1 << 62, (), generator=generator))
        everyone = Streams.from_seed(seed, share.batch, features.device).generators
        streams = Streams(everyone[share.rank :: share.world])
        metric = network(features if self.inputs is None else self.inputs(own))
        losses, numbers = self.supervision(metric, features, streams, own)
        return losses.mean(), numbers

    def validate(self, network: Network) -> Mapping[str, float]:
        scores = spn_scores(network, self.held_out, batch=self.batch)
        if self.probe is not None:
            ratio = natural_sensitivity_ratio(network, self.probe, self.held_out, batch=self.batch)
            scores["natural_ratio"], scores["natural_ratio_se"] = mean_and_error(ratio)
        return scores


class Supervision(Protocol):
    """What a metric is compared with in a training step: the loss [B] of a batch, and what is worth logging.

    Products are taken in the precision of the features and compared in that of the metric. ``rows`` [B] are the numbers
    of the training examples, for a supervision that has looked at them before (`KnownModes`)."""

    def __call__(self, metric: LowRankMetric, features: Tensor, streams: Streams, rows: Tensor) -> Supervised: ...


Supervised = tuple[Tensor, Mapping[str, float]]


def supervision_of(
    name: str, probe: ProbeMap, *, power_iters: int, sketch_width: int | None, precision: str
) -> Supervision:
    """Return the supervision with this name on the command line."""
    choices: dict[str, Callable[[], Supervision]] = {
        "randnla": lambda: RandNLA(probe, power_iters, sketch_width, precision=precision),
        "spectral": lambda: Spectral(probe, precision=precision),
        "distances": lambda: DistanceMatching(probe),
        "directions": lambda: RandomDirections(probe, precision=precision),
    }
    if name not in choices:
        raise PullbackError(f"supervision: expected one of {', '.join(SUPERVISIONS)}, got {name!r}.")
    return choices[name]()


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

    def __call__(
        self, metric: LowRankMetric, features: Tensor, streams: Streams, rows: Tensor | None = None
    ) -> Supervised:
        # recording a graph pays for products that come back, not for the few of one step
        operator = JacobianOperator(self.probe, features, precision=self.precision, capture=False)
        rank = metric.modes.shape[1]
        found = power_iteration(
            operator, rank, power_iters=self.power_iters, sketch_width=self.sketch_width, streams=streams
        )
        modes = as_token_maps(found.right, features.shape[1:])
        loss, numbers = spectral_loss(metric, modes, found.singular_values, self.energy_weight)
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

    def __call__(
        self, metric: LowRankMetric, features: Tensor, streams: Streams, rows: Tensor | None = None
    ) -> Supervised:
        operator = JacobianOperator(self.probe, features, precision=self.precision)
        found = exact_svd(operator, metric.modes.shape[1], full=False, precision=self.precision)
        modes = as_token_maps(found.right, features.shape[1:])
        return spectral_loss(metric, modes, found.singular_values, self.energy_weight)


@dataclass(frozen=True, eq=False)
class KnownModes:
    """The same ceiling where the training examples are a fixed set: their modes, computed once and looked up."""

    modes: Tensor  # [n, r, N, D], of every training example
    singular_values: Tensor  # [n, r]
    energy_weight: float = 0.1

    def __call__(self, metric: LowRankMetric, features: Tensor, streams: Streams, rows: Tensor) -> Supervised:
        own = rows.to(self.modes.device)
        modes, values = (known[own].to(metric.modes.device) for known in (self.modes, self.singular_values))
        return spectral_loss(metric, modes, values, self.energy_weight)


@dataclass(frozen=True)
class DistanceMatching:
    """The other naive supervision: the predicted length of F_2 - F_1 against the distance of the two outputs.

    Pairs are neighbours within a process, so several processes compare other pairs than one does.
    """

    probe: Callable[[Tensor], Tensor]

    def __call__(
        self, metric: LowRankMetric, features: Tensor, streams: Streams, rows: Tensor | None = None
    ) -> Supervised:
        if len(features) < 2:
            raise PullbackError(_PAIRS)
        other = features[torch.arange(len(features)).roll(1)]  # a slice keeps what a decoder reads below the features
        with torch.no_grad():
            change = (self.probe(other) - self.probe(features)).flatten(1)
        distance = torch.linalg.vector_norm(change, dim=1)
        return distance_loss(metric, (other - features).to(metric.modes.dtype), distance), {}


@dataclass(frozen=True)
class RandomDirections:
    """The naive supervision of section 5.1: v^T g v against |J v|^2 for random unit v."""

    probe: Probe
    count: int = 20
    precision: str = "float32"

    def __call__(
        self, metric: LowRankMetric, features: Tensor, streams: Streams, rows: Tensor | None = None
    ) -> Supervised:
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


def spectral_loss(
    metric: LowRankMetric, modes: Tensor, singular_values: Tensor, energy_weight: float = 0.1
) -> tuple[Tensor, dict[str, float]]:
    """Return the loss [B] of Algorithm 2 against modes [B, r, N, D] and singular values [B, r], and the alignment."""
    check_sensitive(singular_values[:, 0].square())
    target = modes.to(metric.modes.dtype)
    loss = subspace_loss(metric.modes, target) + energy_weight * energy_loss(metric.energies, singular_values)
    return loss, {"alignment": float(alignment(metric.modes.detach(), target).mean())}


@dataclass(frozen=True, eq=False)
class ExampleScores:
    """One number per example [n], on the CPU."""

    v1: Tensor  # over all tokens
    v1_patches: Tensor  # over patch tokens alone
    energy_share: Tensor  # what the predicted energies add up to, of |J|_F^2


@torch.no_grad()
def example_scores(network: MetricNetwork, examples: SpnExamples, *, batch: int = 16) -> ExampleScores:
    """Return V_1 of every example, and its predicted energies against the exact total, ``batch`` examples at a time."""
    whole, patches, share = [], [], []
    for rows in torch.arange(len(examples)).split(batch):
        metric = examples.metrics(network, rows)
        truth = examples.modes[rows].to(metric.modes)
        whole.append(alignment(metric.modes, truth).cpu())
        patches.append(patch_alignment(metric.modes, truth, examples.prefix, examples.views).cpu())
        share.append(metric.energies.sum(1).cpu() / examples.total[rows].cpu())
    return ExampleScores(torch.cat(whole), torch.cat(patches), torch.cat(share))


def spn_scores(network: MetricNetwork, examples: SpnExamples, *, batch: int = 16) -> dict[str, float]:
    """Return V_1 over all tokens and without the prefix (CLS) block, with standard errors over images, and how far the
    predicted energies are from the exact ones: the share of the total that they add up to, against kappa_cap."""
    found = example_scores(network, examples, batch=batch)
    kappa = examples.singular_values.double().square().sum(1) / examples.total.double()
    v1, v1_se = mean_and_error(found.v1)
    patches, patches_se = mean_and_error(found.v1_patches)
    return {
        "v1": v1,
        "v1_se": v1_se,
        "v1_patches": patches,
        "v1_patches_se": patches_se,
        "score": v1,
        "sensitivity_ratio": float(found.energy_share.mean()),
        "kappa": float(kappa.mean()),
    }


def comparison_row(name: str, found: ExampleScores, constant: ExampleScores) -> dict[str, Any]:
    """Return the mean V_1 of a network, and its paired lead over the constant subspace with half the width of its 95 %
    interval: t_{0.975, n-1} std(lead) / sqrt(n), None for a single example."""
    row: dict[str, Any] = {"network": name}
    for label in ("v1", "v1_patches"):
        values = getattr(found, label).double()
        lead = values - getattr(constant, label).double()
        ahead, error = mean_and_error(lead)
        half = student_quantile(0.975, len(lead) - 1) * error if len(lead) > 1 else None
        row |= {label: float(values.mean()), f"{label}_lead": ahead, f"{label}_lead_half_width": half}
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
    """Return sum_j |J u_j|^2 / |J|_F^2 of every example [n], float64: the share of the task's sensitivity in the
    predicted subspace, with natural energies (`cor:ssm_quality`). At most kappa_cap(r), which the true modes reach."""
    ratios = []
    for rows in torch.arange(len(examples)).split(batch):
        features = examples.features(rows)
        operator = JacobianOperator(probe, features, precision=precision)
        images = operator @ examples.metrics(network, rows).modes.flatten(2).mT
        ratios.append(images.double().square().sum((1, 2)) / examples.total[rows].to(images.device))
    return torch.cat(ratios)


def patch_alignment(modes: Tensor, truth: Tensor, prefix: int, views: int = 1) -> Tensor:
    """Return V_1 [B] of two subspaces [B, r, N, D] on the patch tokens alone: the block of the CLS token, where most of
    the energy of late modes sits, would hide the rest. Each of ``views`` begins with ``prefix`` such tokens."""
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
    """Find argmax_U mean_i |U^T V_i|_F^2 over orthonormal U, from training modes [n, r, N, D] -> [rank, N, D]."""
    stacked = StackedModes(modes)
    found = block_krylov(stacked, rank, rtol=1e-4, streams=Streams.from_seed(seed, 1, modes.device))
    return found.right[0].mT.unflatten(-1, modes.shape[2:])


def constant_network(subspace: Tensor) -> MetricNetwork:
    """Return a network that predicts one subspace [r, N, D] for every image, with energies of 1."""

    def network(features: Tensor) -> LowRankMetric:
        modes = subspace.to(features.device).expand(len(features), *subspace.shape)
        return LowRankMetric(modes, modes.new_ones(modes.shape[:2]))

    return network
