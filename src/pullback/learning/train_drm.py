"""Train a Distilled Riemannian Metric: what `pullback train drm` does.

From the outside in: `train_drm`, for images and a store of targets; `fit_drm`, for features and outputs from anywhere;
the task that both hand to the training loop (`MetricTask`), whose loss has the two parts of the paper,

    L = L_reg(d(F_1, F_2), d_task) + lambda_d L_distill

    L_reg      mean over all pairs of a batch of (d - d_task)^2, over the variance of d_task
    L_distill  `eq:conformal_loss` between the scores h and imp*, on images of which imp* is known

and what is measured on held-out images (`metric_scores`). A batch of B images gives B (B - 1) / 2 pairs: features are
what costs, and each is used B - 1 times. Under torchrun pairs are made within each process's share of the batch. imp*
comes from a store of `compute_targets`, or is computed of the first training images before the training begins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pullback.checks import finite_number, of_kind, whole_number
from pullback.data.crops import CROPS
from pullback.data.images import ImageSource, PixelFormat
from pullback.data.sources import Source, open_source
from pullback.errors import ImageError, ModelError, PullbackError, ShapeError, counted, naming
from pullback.evaluation.distances import RELATIVE, default_reference, output_distances
from pullback.evaluation.ranking import spearman
from pullback.evaluation.statistics import mean_and_error
from pullback.geometry.duration import announce
from pullback.geometry.spectrum import output_size
from pullback.learning.distilled_metric import DistilledMetric, MetricConfig, MetricItems, pairwise_distances
from pullback.learning.fit import FitConfig, Losses, Network, Share, check_going_on, fit
from pullback.learning.losses import conformal_loss
from pullback.learning.train_head import (
    TARGETS,
    HeadExamples,
    ImageRow,
    Reader,
    StoredRows,
    check_held_out,
    check_stores,
    feature_reader,
    fingerprint,
    hash_of,
    origin_of,
    pictures_to_vary,
    readable_rows,
    recorded,
    varied_pixels,
)
from pullback.probes import ProbeMap
from pullback.randnla import Streams
from pullback.runs.documents import OWN_TARGETS, layer_name
from pullback.runs.documents import TARGETS as STORE
from pullback.runs.progress import Progress
from pullback.runs.provenance import weights_hash
from pullback.targets.compute import compute_table, compute_targets
from pullback.targets.store import TargetStore, load_arrow, part_name, probe_choices

TRAINING_CELLS = 64
"""Outputs that are maps are averaged down to so many rows and columns before their distances are learned."""
_START_IMAGES = 256
_JUDGES = 500
"""Held-out images of which all pairs are compared at each validation."""
_BATCH = 64
_RANK = 20


@dataclass(frozen=True)
class MetricOptions:
    """The size of a metric, and what it is trained for."""

    rank: int = 32
    width: int = 256
    heads: int = 4
    rounds: int = 1
    reference: str | None = None  # the distance of outputs; None: `default_reference` of the decoder
    distill_weight: float = 0.01  # lambda_d
    target: str = "importance"  # of the distillation: imp*, or "block-norm"

    def __post_init__(self) -> None:
        finite_number("distill_weight", self.distill_weight, least=0, expected="a number that is not negative")
        if self.target not in TARGETS:
            raise PullbackError(f"target: expected one of {', '.join(TARGETS)}, got {self.target!r}.")
        if self.reference is not None and self.reference not in RELATIVE:
            raise PullbackError(
                f"reference: expected one of {', '.join(RELATIVE)}, or None for the decoder's own, got "
                f"{self.reference!r}."
            )

    def network(self, dim: int, decoder: str) -> MetricConfig:
        """Return the configuration of a metric on features of this width, for outputs of this decoder."""
        reference = self.reference or default_reference(decoder)
        return MetricConfig(dim, self.rank, self.width, self.heads, self.rounds, reference=reference)


@dataclass(frozen=True, eq=False)
class MetricExamples:
    """n images of one size: how to get their features, and their outputs."""

    features: Reader
    outputs: Tensor  # [n, ...]

    def __len__(self) -> int:
        return len(self.outputs)

    @classmethod
    def of(cls, features: Tensor, outputs: Tensor) -> MetricExamples:
        """Examples with features [n, N, D] in memory, in any floating dtype."""
        if len(features) != len(outputs):
            raise ShapeError(f"outputs: expected one for each of {len(features)} images, got {len(outputs)}.")
        plain = features.as_subclass(Tensor)
        return cls(lambda rows: plain[rows.to(plain.device)].float(), outputs)


def train_drm(
    probe: ProbeMap,
    images: ImageSource | Source,
    held_out: ImageSource | Source,
    targets: TargetStore | None = None,
    *,
    target_images: int = 200,
    target_source: ImageSource | Source | None = None,
    rank: int = 32,
    width: int = 256,
    heads: int = 4,
    rounds: int = 1,
    reference: str | None = None,
    distill_weight: float = 0.01,
    target: str = "importance",
    crops: int = 0,
    size: int | tuple[int, int] | None = None,
    limit: int | None = None,
    config: FitConfig | None = None,
    out: str | Path | None = None,
    tensorboard: bool = False,
    progress: Progress | None = None,
    seconds: float = math.inf,
) -> DistilledMetric:
    """Train a metric on pairs of these images, whose distances the probe's own decoder gives.

    ``targets``: a store of `compute_targets` of the same probe, to whose importance the weights h are distilled; its
    images need not be among ``images``, and ``target_source`` says where they are now, if not where the store says.
    Without a store the importance of the first ``target_images`` training images is computed here, in ``out``/targets
    where there is an ``out``; that takes longer than the training, and nothing with ``distill_weight=0``.
    ``held_out``: at least three other images, of which the first 500 count: all pairs of them are compared.
    ``crops``: train on so many random crops of each image too, held in memory like the images (0.2 MB each for
    DINOv2-S): new pairs, for which the decoder gives the distances. They need more steps.
    ``reference``: how outputs are compared, "relative_l1" (the default for depth) or "relative_l2"; a task distance of
    the probe is part of the output.
    ``out``: folder of metrics.jsonl and of the checkpoint that a second call goes on from; ``seconds``: stop after
    about so long. The scores end up in the config of the metric (`metric_scores`).
    """
    of_kind("probe", probe, ProbeMap, "a probe map, such as pb.load_probe(model, decoder, layer)")
    if not isinstance(probe.layer, int):
        raise ModelError(f"probe: expected one at a layer, such as pb.load_probe(model, decoder, 8), got {probe.name}.")
    of_kind("targets", targets, (TargetStore, type(None)), "a store of targets, pb.TargetStore.open(folder), or None")
    of_kind("config", config, (FitConfig, type(None)), "a FitConfig, or None")
    options = MetricOptions(rank, width, heads, rounds, reference, distill_weight, target)
    config, progress = config or drm_config(), progress or Progress()
    _check_batch(config)
    whole_number("crops", crops, least=0)
    stored = _stored(probe, targets, target_source, options)
    own = options.distill_weight > 0 and stored is None
    if own:
        _check_own(target_images, out)
    probe.backbone.check_size(size)
    wanted = probe.pixel_format(size)
    if crops and wanted.size[0] != wanted.size[1]:
        raise PullbackError(
            f"size: expected a square, of which crops are taken, got {wanted.size[0]}x{wanted.size[1]}. Use a square "
            "size, or crops=0."
        )
    with naming("held_out"):
        judges = open_source(held_out)
    progress.stage("reading the images")
    rows = readable_rows(images, wanted, limit)
    if len(rows) < 2:
        raise PullbackError(f"images: expected at least two, since pairs of them are compared, got {len(rows)}.")
    settings: dict[str, Any] = {
        "size": list(wanted.size),
        "crops": crops,
        "images": hash_of([row.sha256 for row in rows]),
        "held_out": hash_of([item.key for item in judges]),
        "targets": None if stored is None or targets is None else fingerprint(stored.table, targets.config),
    }
    if own:
        settings["targets"] = f"of the first {min(target_images, len(rows))} images"
    folder = None if out is None else Path(out)
    with torch.device("meta"):
        network = DistilledMetric.from_config(options.network(probe.backbone.dim, probe.decoder.name))
    check_going_on(network, config, folder, _settings(probe, options, settings))
    with naming("held_out"):
        others = readable_rows(judges, wanted, _JUDGES)
    if len(others) < 3:
        raise PullbackError(f"held_out: expected at least three images, since they are ranked, got {len(others)}.")
    shared = check_held_out({str(row.sha256): row.item.key for row in others}, [row.sha256 for row in rows])
    pictures = pictures_to_vary(rows, wanted, progress) if crops else None
    progress.work("computing features", (1 + crops) * len(rows), "images")
    batches = _plain_features(probe, rows, wanted)
    if pictures is not None:
        batches = chain(batches, varied_features(probe, pictures, wanted.size[0], crops, seed=config.seed))
    train = examples_of(probe, batches, (1 + crops) * len(rows), cells=TRAINING_CELLS, on_progress=progress.advance)
    progress.work("computing held-out features", len(others), "images")
    judge = examples_of(probe, _plain_features(probe, others, wanted), len(others), on_progress=progress.advance)
    importance = None
    if stored is not None:
        progress.work("computing features of the targets", len(stored), "images")
        importance = stored.kept(progress.advance).examples(options.target)
    elif own:
        importance = _own_importance(
            probe, images, rows[:target_images], train, options.target, wanted, folder, progress
        )
    metric = fit_drm(
        probe,
        train,
        judge,
        importance,
        options,
        config=config,
        out=folder,
        settings=settings,
        tensorboard=tensorboard,
        progress=progress,
        seconds=seconds,
    )
    scores = dict(metric.config.scores) | recorded(shared)
    origin = replace(metric.config.origin, resolutions=(wanted.size,))
    return metric.describe(origin=origin, scores=scores)


def drm_config(**changes: Any) -> FitConfig:
    """Return the training loop's settings for a metric, with these changes."""
    usual = FitConfig(steps=1500, batch=32, learning_rate=1e-3, warmup=30, ema=0.98, validate_every=100)
    return replace(usual, **changes)


def fit_drm(
    probe: ProbeMap,
    train: MetricExamples,
    held_out: MetricExamples,
    importance: HeadExamples | None = None,
    options: MetricOptions | None = None,
    *,
    config: FitConfig | None = None,
    out: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    tensorboard: bool = False,
    progress: Progress | None = None,
    seconds: float = math.inf,
) -> DistilledMetric:
    """Train a metric on features and outputs of ``probe``, from wherever they come.

    ``importance``: features with imp* of them (`eq:imp_target`), for the distillation. ``settings``: plain JSON that
    tells where all these come from; a run in ``out`` goes on only where it is the same.
    """
    options, config = options or MetricOptions(), config or drm_config()
    _check_batch(config)
    if importance is None and options.distill_weight:
        raise PullbackError(
            "importance: expected features with their importance, to which the weights are distilled, got None. Pass "
            "it, or set distill_weight to 0 to train on distances alone."
        )
    some = train.features(torch.arange(min(_START_IMAGES, len(train))))
    network = options.network(some.shape[-1], probe.decoder.name)
    folder, known = None if out is None else Path(out), _settings(probe, options, settings or {})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        metric = DistilledMetric.from_config(network).to(some.device)
    with torch.device("meta"):
        going_on = check_going_on(DistilledMetric.from_config(network), config, folder, known)
    task = MetricTask(train, held_out, network.reference, importance, options.distill_weight)
    if not going_on:
        target = None if importance is None else importance.target[: len(some)].to(some.device)
        metric.start_from(some, target)
        metric.rescale(task.start_scale(metric))
    fitted = fit(
        metric,
        task,
        config,
        out=folder,
        settings=known,
        tensorboard=tensorboard,
        progress=progress,
        seconds=seconds,
    )
    numbers = torch.arange(len(train))
    metric.measure_constant(train.features(part) for part in numbers.split(_BATCH))
    scores = {name: value for name, value in fitted.scores.items() if name != "score"}
    scores |= constant_scores(metric, held_out)
    scores |= {"training_images": float(len(train)), "held_out_images": float(len(held_out))}
    scores |= {"best_step": float(fitted.step), "steps": float(fitted.steps)}
    origin = replace(origin_of(probe, 0), rank=None)
    return metric.describe(origin=origin, scores=scores, model=probe.backbone.name).eval()


@dataclass(frozen=True, eq=False)
class MetricTask:
    """A `Task`: distances between the images of a batch, and weights of other images that have targets."""

    train: MetricExamples
    held_out: MetricExamples
    reference: str
    importance: HeadExamples | None = None
    distill_weight: float = 0.01

    def __post_init__(self) -> None:
        for name, examples, least in (("train", self.train, 2), ("held_out", self.held_out, 3)):
            if len(examples) < least:
                raise PullbackError(f"{name}: expected at least {least} images, got {len(examples)}.")
            if not examples.outputs.isfinite().all():
                raise PullbackError(f"{name}: expected finite outputs, got NaN or infinity.")
        object.__setattr__(self, "_truth", output_distances(*2 * (self.held_out.outputs,), self.reference))
        if _pairs(self._truth).max() == 0:
            raise PullbackError("held_out: expected images with different outputs, but they are all the same.")

    _truth: Tensor = None  # type: ignore[assignment]  # distances of the held-out outputs, [n, n]

    def loss(self, network: Network, step: int, share: Share, generator: torch.Generator) -> Losses:
        rows = share.of(torch.randperm(len(self.train), generator=generator)[: share.batch])
        wanted = _pairs(self._distances_of(rows))
        items = network(self.train.features(rows)).full()
        found = _pairs(pairwise_distances(items, items))
        spread = wanted.var(correction=0) if len(wanted) > 1 else wanted.square().mean()
        regression = (found - wanted).square().mean() / spread.clamp_min(torch.finfo(torch.float32).tiny)
        if self.importance is None or not self.distill_weight:
            return regression, {}
        chosen = share.of(torch.randint(len(self.importance), (share.batch,), generator=generator))
        target = self.importance.target[chosen.to(self.importance.target.device)]
        weights = network(self.importance.features(chosen)).weights.float()
        distilled = conformal_loss(weights, target.to(weights.device), generator=generator)
        numbers = {"regression_loss": regression.item(), "distillation_loss": distilled.item()}
        return regression + self.distill_weight * distilled, numbers

    def _distances_of(self, rows: Tensor) -> Tensor:
        outputs = self.train.outputs[rows.to(self.train.outputs.device)]
        return output_distances(outputs, outputs, self.reference)

    def validate(self, network: Network) -> Mapping[str, float]:
        items = items_of(network, self.held_out)
        scores = metric_scores(pairwise_distances(items, items), self._truth.to(items.weights.device))
        return {"score": scores["rho"], **scores}

    @torch.no_grad()
    def start_scale(self, metric: DistilledMetric) -> float:
        """Return the factor that brings the mean distance of the first images to that of their outputs."""
        rows = torch.arange(min(_BATCH, len(self.train)))
        items = metric(self.train.features(rows))
        found, wanted = _pairs(pairwise_distances(items, items)).mean(), _pairs(self._distances_of(rows)).mean()
        if not (found > 0 and wanted > 0):
            raise PullbackError(
                "images: expected images with different features and outputs, but the first "
                f"{len(rows)} have none that differ."
            )
        return float(wanted / found)


def items_of(network: Callable[[Tensor], MetricItems], examples: MetricExamples) -> MetricItems:
    """Return what distances need of all images of a set, in float32."""
    with torch.no_grad():
        parts = [network(examples.features(rows)) for rows in torch.arange(len(examples)).split(_BATCH)]
    return MetricItems.join(parts).full()


def metric_scores(predicted: Tensor, reference: Tensor) -> dict[str, float]:
    """Compare distances [n, n] with the outputs' own: Spearman's rho of each image with all others (mean and standard
    error) and over all pairs, and the mean absolute error."""
    own, other = _without_self(predicted), _without_self(reference)
    rho, error = mean_and_error(spearman(own, other))
    overall = spearman(_pairs(predicted)[None], _pairs(reference)[None])
    return {"rho": rho, "rho_se": error, "rho_pairs": overall.item(), "mae": (own - other).abs().mean().item()}


def constant_scores(metric: DistilledMetric, examples: MetricExamples) -> dict[str, float]:
    """Compare distances under the constant metric with the outputs' own, and say how long its embeddings are."""
    with torch.no_grad():
        embedded = metric.embed(items_of(metric, examples))
        scores = metric_scores(
            torch.cdist(embedded, embedded),
            output_distances(examples.outputs, examples.outputs, metric.config.reference).to(embedded.device),
        )
    return {"constant_rho": scores["rho"], "embedding": float(embedded.shape[1])}


def _pairs(distances: Tensor) -> Tensor:
    """Return the distances [n, n] of i < j as one row."""
    first, second = torch.triu_indices(len(distances), distances.shape[1], offset=1, device=distances.device)
    return distances[first, second]


def _without_self(distances: Tensor) -> Tensor:
    """Return distances [n, n] without the diagonal: [n, n - 1]."""
    count = len(distances)
    return distances.flatten()[1:].view(count - 1, count + 1)[:, :-1].reshape(count, count - 1)


def _stored(
    probe: ProbeMap, targets: TargetStore | None, images: ImageSource | Source | None, options: MetricOptions
) -> StoredRows | None:
    """Return the rows of the store, or raise an error where it does not fit the probe; None where there is none."""
    if targets is None:
        return None
    check_stores(probe, [targets])
    if not len(targets):
        raise PullbackError(f"targets: {targets.folder} holds no rows yet. Run `pullback targets` to the end first.")
    if not options.distill_weight:
        raise PullbackError("targets: given, but distill_weight is 0, so that they would not be used. Leave one out.")
    return StoredRows.of(probe, targets, images, keep_features=False)


def _check_own(count: int, out: str | Path | None) -> None:
    """Raise the errors of `_own_importance` before anything is read."""
    whole_number("target_images", count, expected="a positive number of images, or distill_weight=0 for none of them")
    if out is not None:
        load_arrow()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise PullbackError(
            "targets: expected a store where several processes train, since each of them would compute the importance "
            "again. Run `pullback targets` first, or set distill_weight to 0."
        )


def _own_importance(
    probe: ProbeMap,
    images: ImageSource | Source,
    rows: list[ImageRow],
    train: MetricExamples,
    target: str,
    wanted: PixelFormat,
    out: Path | None,
    progress: Progress,
) -> HeadExamples:
    """Compute the importance of the first training images: into a store in the folder of the run, which goes on where
    it was stopped, or in memory."""
    blank = torch.zeros(1, 3, *wanted.size)
    rank, what = min(_RANK, output_size(probe, probe.features(blank, normalized=True))), "computing importance"
    source = Source(open_source(images).name, lambda: iter([row.item for row in rows]), len(rows))
    folder = None if out is None else out / OWN_TARGETS
    if folder is None:
        progress.work(what, len(rows), "images")
        table = compute_table(probe, source, rank=rank, size=wanted.size, on_progress=progress.advance)[0]
    else:
        there = TargetStore.open(folder).rows_done() if (folder / STORE).is_file() else set()
        left = sum((row.item.key, 0) not in there for row in rows)
        if left:
            announce(progress, {layer_name(probe.layer): (probe, left)}, blank, rank, with_effective_rank=False)
        progress.work(what, len(rows), "images", len(rows) - left)
        store = compute_targets(probe, source, out=folder, rank=rank, size=wanted.size, on_progress=progress.advance)
        table = store.read(modes=False)
    place = {row: number for number, row in enumerate(zip(table.keys, table.image_sha256, strict=True))}
    changed = [row.item.key for row in rows if (row.item.key, row.sha256) not in place]
    if changed:
        raise ImageError(
            f"images: {counted(len(changed), 'image')}, such as {changed[0]!r}, changed since the importance was "
            f"computed.{'' if folder is None else f' Delete {folder}, or train in another folder.'}"
        )
    found = [place[row.item.key, str(row.sha256)] for row in rows]
    values = table.importance if target == "importance" else table.block_norm
    prefix = probe.backbone.token_layout(torch.empty(0, 3, *wanted.size)).prefix
    return HeadExamples(train.features, values[torch.tensor(found)], prefix)


def _check_batch(config: FitConfig) -> None:
    """Refuse a batch of single images."""
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    world = torch.distributed.get_world_size() if several else 1
    if config.batch < 2 * world:
        each = " a process" if several else ""
        raise PullbackError(f"batch: pairs of images are compared, expected at least 2{each}, got {config.batch}.")


def _settings(probe: ProbeMap, options: MetricOptions, more: Mapping[str, Any]) -> dict[str, Any]:
    """Return what decides the weights besides network and loop: the probe, and how the parts of the loss weigh."""
    of_probe = {
        "weights": weights_hash(probe.backbone.model),
        "layer": probe.layer,
        "decoder": probe.decoder.name,
        "distance": part_name(probe.distance),
        **probe_choices(probe),
        **probe.identity,
    }
    weighed = {name: getattr(options, name) for name in ("distill_weight", "target")}
    return {f"probe.{name}": value for name, value in of_probe.items()} | weighed | dict(more)


def examples_of(
    probe: ProbeMap,
    batches: Iterable[Tensor],
    count: int,
    *,
    cells: int | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> MetricExamples:
    """Compute the outputs of batches of features [b, N, D], ``count`` in all, and hold both, features in float16.

    ``cells``: of outputs that are maps, see `averaged_output`.
    """
    held: Tensor | None = None
    outputs: list[Tensor] = []
    done = 0
    for features in batches:
        with torch.no_grad():
            outputs.append(averaged_output(probe(features), cells))
        plain = features.as_subclass(Tensor).half()
        if not plain.isfinite().all():
            raise PullbackError("features: some do not fit into float16, in which they are held.")
        if held is None:  # one block from the start: joining parts would take twice the memory
            held = plain.new_empty(count, *plain.shape[1:])
        held[done : done + len(plain)] = plain
        done += len(plain)
        if on_progress is not None:
            on_progress(len(plain))
    assert held is not None and done == count
    return MetricExamples.of(held, torch.cat(outputs))


def _plain_features(probe: ProbeMap, rows: list[ImageRow], wanted: PixelFormat) -> Iterator[Tensor]:
    reader = feature_reader(probe, rows, wanted)
    return (reader(numbers) for numbers in torch.arange(len(rows)).split(_BATCH // 2))


def varied_features(probe: ProbeMap, pictures: Tensor, size: int, copies: int, *, seed: int) -> Iterator[Tensor]:
    """Compute features of ``copies`` random crops of each of pictures [n, 3, H, W] uint8, in batches [b, N, D]."""
    generator = Streams.from_seed(seed, 1).generators[0]
    for _ in range(copies):
        for part in pictures.split(_BATCH // 2):
            pixels = varied_pixels(probe.backbone, part, size, CROPS, generator)
            yield probe.features(pixels, normalized=True)


def averaged_output(output: Tensor, cells: int | None) -> Tensor:
    """Average maps [B, ..., H, W] down to at most ``cells`` rows and columns; vectors and small maps stay."""
    if cells is None or output.ndim < 3 or max(output.shape[-2:]) <= cells:
        return output.float()
    whole_number("cells", cells)
    maps = output.float().flatten(1, -3) if output.ndim > 3 else output.float()[:, None]
    height, width = (min(side, cells) for side in output.shape[-2:])
    return F.adaptive_avg_pool2d(maps, (height, width))
