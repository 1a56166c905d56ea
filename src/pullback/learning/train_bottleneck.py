"""Train an S2-VAE on the features that a decoder reads: what `pullback train bottleneck` does.

From the outside in: `train_bottleneck`, for images; `fit_bottleneck`, for batches of features from anywhere; the task
that both hand to the training loop (`BottleneckTask`), which weighs three parts,

    reconstruction   share of the variance of each layer that x~ does not explain, mean over the layers
    task             the same of the task's output: decoder(x~) against decoder(x), through the frozen decoder
    KL               of the posterior from the uniform on the sphere, per latent number, with a linear warm-up

and what is measured on held-out features (`bottleneck_scores`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pullback.checks import finite_number, of_kind, shown, whole_number
from pullback.data.crops import CROPS, Variation
from pullback.data.images import ImageSource, PixelFormat
from pullback.data.sources import Source, open_source
from pullback.decoders import check_distance
from pullback.errors import PullbackError, counted, naming
from pullback.evaluation.fidelity import depth_errors, relative_l2
from pullback.evaluation.statistics import mean_and_error
from pullback.learning.bottleneck import check_bare, check_patches_alone
from pullback.learning.fit import FitConfig, Losses, Network, Share, check_going_on, fit
from pullback.learning.power_spherical import PowerSpherical
from pullback.learning.s2vae import S2VAE, SPHERICAL, Reconstruction, S2VAEConfig
from pullback.learning.train_head import (
    ImageRow,
    Reader,
    check_held_out,
    feature_reader,
    hash_of,
    kept,
    origin_of,
    pictures_to_vary,
    readable_rows,
    recorded,
    varied_pixels,
)
from pullback.probes import ProbeMap
from pullback.probes.probe import INPUTS
from pullback.randnla import Streams
from pullback.runs.progress import Progress
from pullback.runs.provenance import weights_hash
from pullback.targets.store import part_name, probe_choices
from pullback.tokens import Features

_READ_AT_ONCE = 64
_START_SAMPLES, _START_NUMBERS = 256, 1 << 27
"""From how many samples a network starts, if their features have no more numbers than these together (1 GB of them)."""

Batches = Callable[[int, Share, torch.Generator], Tensor]
"""(step, share, generator) -> the features [b, N, D] of this process's share of a step. The generator is the same in
every process, so each draws the whole batch and takes its own part."""


@dataclass(frozen=True)
class BottleneckOptions:
    """The size of a bottleneck, and what it is trained for."""

    registers: int = 32
    latent: int = 128
    width: int = 256
    heads: int = 4
    blocks: int = 3
    posterior: str = SPHERICAL
    cells: bool = True  # whether registers start at the principal components of their part of the image
    task_weight: float = 10.0  # of the task's output; 0: features alone, and no pass through the decoder in training
    kl_weight: float = 1e-3
    kl_warmup: int = 500  # steps until the KL counts in full

    def __post_init__(self) -> None:
        for name in ("task_weight", "kl_weight"):
            finite_number(name, getattr(self, name), least=0, expected="a number that is not negative")
        whole_number("kl_warmup", self.kl_warmup, least=0)
        of_kind("cells", self.cells, bool, "True or False")

    def network(self, probe: ProbeMap, grid: tuple[int, int]) -> S2VAEConfig:
        """Return the configuration of a network for what the decoder of this probe reads of images with so many rows
        and columns of patches."""
        names = ("registers", "latent", "width", "heads", "blocks", "posterior")
        sizes = {name: getattr(self, name) for name in names}
        backbone, decoder = probe.backbone, probe.decoder
        dims = (backbone.tap_dim,) * len(decoder.layers)
        places = grid if self.cells else None
        return S2VAEConfig(dims, decoder.layers, backbone.prefix, **sizes, normed=decoder.normed, grid=places)


@dataclass(frozen=True, eq=False)
class FeatureSet:
    """Features of ``count`` samples, which ``features`` reads by their row numbers."""

    features: Reader
    count: int

    def __len__(self) -> int:
        return self.count

    @classmethod
    def of(cls, features: Tensor) -> FeatureSet:
        """The rows of one tensor of features, as `probe.features` returned it."""
        return cls(lambda rows: features[rows.to(features.device)], len(features))


def train_bottleneck(
    probe: ProbeMap,
    images: ImageSource | Source,
    held_out: ImageSource | Source,
    *,
    registers: int = 32,
    latent: int = 128,
    width: int = 256,
    heads: int = 4,
    blocks: int = 3,
    posterior: str = SPHERICAL,
    cells: bool = True,
    task_weight: float = 10.0,
    kl_weight: float = 1e-3,
    kl_warmup: int = 500,
    size: int | tuple[int, int] | None = None,
    limit: int | None = None,
    variation: Variation | None = CROPS,
    config: FitConfig | None = None,
    out: str | Path | None = None,
    tensorboard: bool = False,
    progress: Progress | None = None,
    seconds: float = math.inf,
    on_step: Callable[[int, Mapping[str, float]], None] | None = None,
) -> S2VAE:
    """Train a bottleneck for what the decoder of a probe reads (`multi_layer_probe`), on these images.

    The task loss compares outputs behind the task distance of the probe: for depth, ``distance="log"``, which is the
    default of `pullback train bottleneck` and not of `multi_layer_probe`.
    ``variation``: how far the pictures are varied in every step, for which they are held in memory and the size must be
    square; None: as they are, with features that are computed once and held in float16.
    ``cells``: whether registers start at the principal components of their part of the image (`S2VAE.start_from`).
    ``seconds``: stop after about so long; with ``out``, a second call goes on exactly from there.
    The scores end up in the config of the network (`bottleneck_scores`).
    """
    _check_probe(probe)
    of_kind("config", config, (FitConfig, type(None)), "a FitConfig, or None")
    of_kind("variation", variation, (Variation, type(None)), "a Variation of pullback.data.crops, or None")
    options = BottleneckOptions(
        registers, latent, width, heads, blocks, posterior, cells, task_weight, kl_weight, kl_warmup
    )
    config, progress = config or bottleneck_config(), progress or Progress()
    probe.backbone.check_size(size)
    wanted = probe.pixel_format(size)
    grid = probe.backbone.token_layout(torch.empty(0, 3, *wanted.size)).grid
    options.network(probe, grid)  # whose errors shall come before anything is read
    with naming("held_out"):
        judges = open_source(held_out)
    if variation is not None and wanted.size[0] != wanted.size[1]:
        raise PullbackError(
            f"size: expected a square, since pictures are varied by square crops, got {wanted.size[0]}x"
            f"{wanted.size[1]}. Use a square size, or variation=None (--no-vary)."
        )
    progress.stage("reading the images")
    rows = readable_rows(images, wanted, limit)
    settings = {
        "size": list(wanted.size),
        "variation": None if variation is None else hash_of(asdict(variation)),
        "images": hash_of([row.item.key for row in rows]),
        "held_out": hash_of([item.key for item in judges]),
    }
    check_bottleneck(probe, options, grid, config, out, settings)
    check_output(probe, feature_reader(probe, rows[:1], wanted)(torch.arange(1)))
    with naming("held_out"):
        others = readable_rows(judges, wanted)
    shared = check_held_out({str(row.sha256): row.item.key for row in others}, [row.sha256 for row in rows])
    train: Batches
    if variation is None:
        train = drawn_rows(_held(probe, rows, wanted, "computing features", progress))
    else:
        train = VariedPictures(
            probe, pictures_to_vary(rows, wanted, progress).to(probe.device), wanted.size[0], variation
        )
    judge = _held(probe, others, wanted, "computing held-out features", progress)
    vae = fit_bottleneck(
        probe,
        train,
        judge,
        options,
        config=config,
        out=out,
        settings=settings,
        tensorboard=tensorboard,
        progress=progress,
        seconds=seconds,
        on_step=on_step,
    )
    return vae.describe(scores=dict(vae.config.scores) | recorded(shared))


def bottleneck_config(**changes: Any) -> FitConfig:
    """Return the training loop's settings for a bottleneck, with these changes."""
    few = FitConfig(steps=500, batch=16, learning_rate=1e-3, warmup=20, ema=0.98, validate_every=100)
    return replace(few, **changes)


def default_distance(decoder: str) -> str | None:
    """Return the task distance under which the output of a decoder is learned: of depth its logarithm, since near
    things count as much as far ones."""
    return "log" if re.fullmatch(r"depth(-\d+x\d+)?", decoder) else None


def fit_bottleneck(
    probe: ProbeMap,
    train: Batches,
    held_out: FeatureSet,
    options: BottleneckOptions | None = None,
    *,
    config: FitConfig | None = None,
    out: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    tensorboard: bool = False,
    progress: Progress | None = None,
    seconds: float = math.inf,
    on_step: Callable[[int, Mapping[str, float]], None] | None = None,
) -> S2VAE:
    """Train a bottleneck on batches of features of ``probe``, which sits at its decoder's inputs.

    ``train``: such as `drawn_rows(FeatureSet.of(features))`, or scenes that are drawn as they are needed. ``settings``:
    plain JSON that tells where these features come from; a run in ``out`` goes on only where it is the same.
    """
    _check_probe(probe)
    of_kind("options", options, (BottleneckOptions, type(None)), "BottleneckOptions, or None")
    of_kind("config", config, (FitConfig, type(None)), "a FitConfig, or None")
    of_kind("held_out", held_out, FeatureSet, "a FeatureSet, such as FeatureSet.of(probe.features(images))")
    if not callable(train):
        raise PullbackError(f"train: expected a function that draws batches, as of drawn_rows, got {shown(train)}.")
    options, config = options or BottleneckOptions(), config or bottleneck_config()
    if len(held_out) < 1:
        raise PullbackError("held_out: expected features of at least one sample, got none.")
    some = held_out.features(torch.arange(1))
    layout = probe.token_layout(some)
    going_on = check_bottleneck(probe, options, layout.grid, config, out, settings or {})
    check_output(probe, some)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        vae = S2VAE.from_config(options.network(probe, layout.grid)).to(some.device)
    if not going_on:
        first = _first_samples(train, config)
        weighed = options.task_weight * task_metric(probe, first, config.seed) if options.cells else None
        vae.start_from(torch.cat(first), probe.token_layout(first[0]), weighed)
    fitted = fit(
        vae,
        BottleneckTask(vae, probe, train, held_out, options, mixed=config.precision == "bf16"),
        config,
        out=None if out is None else Path(out),
        settings=_settings(probe, options, settings or {}),
        tensorboard=tensorboard,
        progress=progress,
        seconds=seconds,
        on_step=on_step,
    )
    size = (layout.grid[0] * probe.backbone.patch_size, layout.grid[1] * probe.backbone.patch_size)
    scores = {name: value for name, value in fitted.scores.items() if name != "score"}
    scores |= {"best_step": float(fitted.step), "steps": float(fitted.steps)}
    origin = replace(origin_of(probe, 0, size), rank=None)
    if not options.task_weight:  # then any decoder of the same features may read it
        origin = replace(origin, decoder=None, decoder_identity=None, distance=None, output_metric=None)
    return vae.describe(origin=origin, scores=scores).eval()


def check_bottleneck(
    probe: ProbeMap,
    options: BottleneckOptions,
    grid: tuple[int, int],
    config: FitConfig,
    out: str | Path | None,
    settings: Mapping[str, Any],
) -> bool:
    """Return whether a run goes on, or raise the errors of `fit_bottleneck` that need no features, before long
    preparations for it."""
    with torch.device("meta"):
        network = S2VAE.from_config(options.network(probe, grid))
    return check_going_on(network, config, None if out is None else Path(out), _settings(probe, options, settings))


def _first_samples(train: Batches, config: FitConfig) -> list[Tensor]:
    """Draw the features that a network starts from: one batch of them, or several small ones."""
    streams = Streams.from_seed(config.seed, -(-_START_SAMPLES // config.batch)).generators
    first = train(0, Share(config.batch), streams[0])
    fitting = max(1, _START_NUMBERS // first.numel())
    return [first, *(train(0, Share(config.batch), stream) for stream in streams[1:fitting])]


def task_metric(probe: ProbeMap, parts: Sequence[Tensor], seed: int = 0) -> Tensor:
    """Return T [D, D] in float64 such that the task loss is about the mean of e_t^T T e_t over the patches t of all
    images, where e_t is the error of a patch: its second order, without what patches do together.

        T = mean over images of sum_t (J^T J)_tt / (M * variance of the output)

    with J of the task's output, M numbers. (J^T J)_tt is the mean of g_t g_t^T over g = J^T u with random u: one VJP an
    image. A decoder that does not depend on its inputs has T = 0.
    """
    generator = Streams.from_seed(seed, 1, parts[0].device).generators[0]
    seen = torch.zeros(2 * (parts[0].shape[-1],), dtype=torch.float64, device=parts[0].device)
    outputs = []
    for part in parts:
        decoded, plain = probe.bind(part), part.as_subclass(Tensor).detach().requires_grad_()
        with torch.enable_grad():
            output = decoded(plain)
            outputs.append(output.detach())
            if output.requires_grad:
                noise = torch.randn(output.shape, generator=generator, device=output.device, dtype=output.dtype)
                (gradient,) = torch.autograd.grad(output, plain, noise, materialize_grads=True)
                rows = probe.token_layout(part).patch_map(gradient).flatten(0, -2).double()
                seen += rows.mT @ rows
    every = torch.cat(outputs)
    return seen / (every.numel() * _spread(every).double().square())


def check_output(probe: ProbeMap, features: Tensor) -> None:
    """Refuse a decoder whose output at these features depends on class or register tokens, or has no logarithm where
    the task distance takes one."""
    bare = replace(probe, distance=None, output_metric=None)
    with torch.no_grad():
        check_distance(probe.distance, bare(features), probe.decoder.name)
    check_patches_alone(probe, features)


def drawn_rows(examples: FeatureSet) -> Batches:
    """Return batches of rows that are drawn at random, with replacement."""
    if len(examples) < 1:
        raise PullbackError("train: expected features of at least one sample, got none.")

    def batch(step: int, share: Share, generator: torch.Generator) -> Tensor:
        return examples.features(share.of(torch.randint(len(examples), (share.batch,), generator=generator)))

    return batch


@dataclass(frozen=True, eq=False)
class VariedPictures:
    """`Batches` of pictures [n, 3, H, W] uint8 that are varied anew in every step, as [b, 3, size, size]."""

    probe: ProbeMap
    pictures: Tensor
    size: int
    variation: Variation = CROPS

    @torch.no_grad()
    def __call__(self, step: int, share: Share, generator: torch.Generator) -> Tensor:
        rows = torch.randint(len(self.pictures), (share.batch,), generator=generator)
        chosen = self.pictures[rows.to(self.pictures.device)]
        pixels = varied_pixels(self.probe.backbone, chosen, self.size, self.variation, generator)
        return self.probe.features(share.of(pixels), normalized=True)


# The task


@dataclass(frozen=True, eq=False)
class BottleneckTask:
    """A `Task`: samples of the posterior in training, its location in validation.

    What is drawn follows from the step and, of several processes, from which one it is.
    """

    vae: S2VAE  # the network in training, for its sizes and its scale of the features
    probe: ProbeMap
    train: Batches
    held_out: FeatureSet
    options: BottleneckOptions
    batch: int = 64  # of validation
    mixed: bool = False  # whether the frozen decoder runs in bf16 too, in training alone

    def loss(self, network: Network, step: int, share: Share, generator: torch.Generator) -> Losses:
        own, x = self.options, self.train(step, share, generator)
        with _seeded(int(torch.randint(1 << 62, (), generator=generator)) + share.rank, x.device):
            passed: Reconstruction = network(x)
        parts = {"reconstruction_loss": unexplained(self.vae, x, passed.features).mean()}
        if own.task_weight:
            with torch.autocast(x.device.type, torch.bfloat16, enabled=self.mixed):
                parts["task_loss"] = task_loss(self.probe, x, passed.features)
        divergence = self.vae.divergence(passed.posterior)
        if divergence is not None:
            parts["kl_loss"] = divergence.mean() / own.latent
        weights = {"reconstruction_loss": 1.0, "task_loss": own.task_weight, "kl_loss": own.kl_weight}
        weights["kl_loss"] *= min(1.0, (step + 1) / own.kl_warmup) if own.kl_warmup else 1.0
        total = torch.stack([weights[name] * value.float() for name, value in parts.items()]).sum()
        values = torch.stack([value.detach().float() for value in parts.values()]).tolist()  # waits for the device once
        numbers = dict(zip(parts, values, strict=True))
        _check_finite(numbers, step, passed)
        return total, numbers

    def validate(self, network: Network) -> Mapping[str, float]:
        scores = bottleneck_scores(network, self.vae, self.probe, self.held_out, batch=self.batch)
        lost = scores["unexplained"] + self.options.task_weight * scores["task_unexplained"]
        return {"score": -lost, **scores}


def unexplained(vae: S2VAE, x: Tensor, reconstruction: Tensor) -> Tensor:
    """Return the share of each layer's variance that is lost, [K]: over patch tokens, all channels scaled alike.

    1 is what a network reaches that knows no more than the mean of every channel."""
    return _ratio(*_energies(vae, x, reconstruction))


def _energies(vae: S2VAE, x: Tensor, reconstruction: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each layer the energy of the error and that of x around the mean, [K] each."""
    layout = vae.layout_of(x)
    truth, found = (
        layout.patch_map((values.as_subclass(Tensor).to(vae.mean.dtype) - vae.mean) / vae.spread)
        for values in (x, reconstruction)
    )
    lost = torch.stack([part.square().sum() for part in vae.split(found - truth)])
    return lost, torch.stack([part.square().sum() for part in vae.split(truth)])


def task_loss(probe: ProbeMap, x: Tensor, reconstruction: Tensor) -> Tensor:
    """Return the mean of h(e) over the task's outputs, e = (psi(x~) - psi(x)) / their spread in the batch, h(e) = e^2
    up to 1 and 2 |e| - 1 beyond: the share of the variance that is lost, in which single wild outputs count less.

    Outputs are those behind the task distance, such as log depth; a decoder is often exponential, and the first
    reconstructions are far off.
    """
    decoded, plain = probe.bind(x), x.as_subclass(Tensor)

    def output(values: Tensor) -> Tensor:
        found = decoded(values)
        return found.to(torch.promote_types(found.dtype, torch.float32))  # a decoder in bf16 ends in it

    with torch.no_grad():
        truth = output(plain)
    error = (output(reconstruction.to(plain.dtype)) - truth) / _spread(truth)
    return 2 * torch.nn.functional.huber_loss(error, torch.zeros_like(error))


def _spread(output: Tensor) -> Tensor:
    """Return the standard deviation of an output, and not nothing where it does not vary."""
    found = output.float().std(correction=0)
    return found.clamp_min(1e-6 * output.abs().max().float()).clamp_min(torch.finfo(torch.float32).tiny)


@torch.no_grad()
def bottleneck_scores(
    network: Network, vae: S2VAE, probe: ProbeMap, examples: FeatureSet, *, batch: int = 64
) -> dict[str, float]:
    """Measure G(E(x)) on features: ``unexplained_L<layer>``, the share of each layer's variance that is lost, and their
    mean; ``task_unexplained``, the `task_loss`; the KL per latent number, and log10 of the mean concentration.

    Of maps that are nowhere negative, such as depth: ``delta1``, the share of pixels at which the output is within a
    factor of 1.25 of that from x, and ``abs_rel``. Of other outputs: ``relative_l2`` = |a - b| / |b|.
    """
    bare = replace(probe, distance=None, output_metric=None)
    lost: list[Tensor] = []
    held: list[Tensor] = []
    task, of_depth, others, kl, concentrations, positive = [], [], [], [], [], True
    for rows in torch.arange(len(examples)).split(batch):
        x = examples.features(rows)
        passed: Reconstruction = network(x)
        for total, part in zip((lost, held), _energies(vae, x, passed.features), strict=True):
            total.append(part.double())
        task.append(len(rows) * task_loss(probe, x, passed.features).double())
        decoded = bare.bind(x)
        truth = decoded(x.as_subclass(Tensor)).flatten(1)
        found = decoded(passed.features.to(x.dtype)).flatten(1)
        positive = positive and bool((truth >= 0).all())
        of_depth.append(depth_errors(found.clamp_min(0), truth, truth > 0, median_scaling=False))
        others.append(relative_l2(found, truth) / 100)
        divergence = vae.divergence(passed.posterior)
        if divergence is not None:
            kl.append(divergence.mean(1).double() / vae.config.latent)
        if isinstance(passed.posterior, PowerSpherical):
            concentrations.append(passed.posterior.concentration.mean(1).double())
    shares = _ratio(torch.stack(lost).sum(0), torch.stack(held).sum(0))
    scores = {f"unexplained_L{layer:02d}": float(s) for layer, s in zip(vae.config.layers, shares, strict=True)}
    scores |= {"unexplained": float(shares.mean()), "task_unexplained": float(torch.stack(task).sum()) / len(examples)}
    if positive:
        delta1, error = mean_and_error(torch.cat([errors.delta1 for errors in of_depth]))
        abs_rel = mean_and_error(torch.cat([errors.abs_rel for errors in of_depth]))[0]
        scores |= {"delta1": delta1, "delta1_se": error, "abs_rel": abs_rel}
    else:
        scores["relative_l2"], scores["relative_l2_se"] = mean_and_error(torch.cat(others))
    if kl:
        scores["kl"] = float(torch.cat(kl).mean())
    if concentrations:
        scores["log10_concentration"] = float(torch.cat(concentrations).mean().log10())
    return scores


def _ratio(lost: Tensor, held: Tensor) -> Tensor:
    return lost / held.clamp_min(torch.finfo(held.dtype).tiny)


def _check_finite(numbers: Mapping[str, float], step: int, passed: Reconstruction) -> None:
    """Stop a run whose loss is no number any more; its last checkpoint is still good."""
    wrong = [name.removesuffix("_loss") for name, value in numbers.items() if not math.isfinite(value)]
    if not wrong:
        return
    largest = ""
    if isinstance(passed.posterior, PowerSpherical):
        largest = f" (the largest concentration is {float(passed.posterior.concentration.detach().max()):.3g})"
    raise PullbackError(
        f"learning_rate: the loss ({', '.join(wrong)}) is NaN or infinite after {counted(step, 'step')}{largest}. "
        "Lower the learning rate, or raise kl_weight, which keeps posteriors from becoming too narrow, and train in "
        "another folder. If it happens at the first step, look for NaN in the features."
    )


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Draw from torch's own generators, as distributions do, by this seed, and leave them as they were."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def _settings(probe: ProbeMap, options: BottleneckOptions, more: Mapping[str, Any]) -> dict[str, Any]:
    """Return what decides the weights besides the training loop's settings and the network's sizes."""
    of_probe = {
        "family": probe.backbone.family,
        "weights": weights_hash(probe.backbone.model),
        "decoder": probe.decoder.name,
        "distance": part_name(probe.distance),
        **probe_choices(probe),
        **probe.identity,
    }
    weighed = {name: getattr(options, name) for name in ("task_weight", "kl_weight", "kl_warmup")}
    return {f"probe.{name}": value for name, value in of_probe.items()} | weighed | dict(more)


def _check_probe(probe: ProbeMap) -> None:
    of_kind("probe", probe, ProbeMap, "a probe map, such as pb.multi_layer_probe(model, decoder)")
    check_bare(probe)
    if probe.at != INPUTS or not probe.after_norm:
        place = f"at layer {probe.at}" if probe.at != INPUTS else "before the final norm"
        raise PullbackError(
            f"probe: a bottleneck holds what the decoder reads, expected a probe at its inputs, behind the norm, got "
            f"one {place}. Use pb.multi_layer_probe(model, decoder)."
        )


# Images


def _held(probe: ProbeMap, rows: Sequence[ImageRow], wanted: PixelFormat, what: str, progress: Progress) -> FeatureSet:
    """Compute the features of these images once and hold them, with their layout."""
    progress.work(what, len(rows), "images")
    layout = probe.backbone.token_layout(torch.empty(0, 3, *wanted.size))
    reader = kept(feature_reader(probe, rows, wanted), len(rows), on_progress=progress.advance)
    return FeatureSet(lambda numbers: Features.attach(reader(numbers), layout, {}), len(rows))
