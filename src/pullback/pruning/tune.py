"""Tuning without labels: the vectors of a pruned model learn to give the output of the unpruned one back.

Matrices stay frozen. The biases, norms and layer scales of the blocks, few numbers beside the model's, are trained on
unlabelled images, cropped and flipped anew in every step, so that the pruned model's own output comes close to that of
the original:

    embedding   1 - cos
    depth       SILog
    other maps  |a - b| / |b|, as `pullback.evaluation` has all three

Which tokens a stage removes follows from its score, which is not trained, and no gradient passes through that choice.
The training loop is `learning.fit`; the vectors that are kept are the best on held-out images, and those of the model
as it was where no step was better.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pullback.backbones import Backbone, Remaining, load_backbone
from pullback.backbones.loading import check_evaluation_mode, published_preprocessing
from pullback.backbones.outputs import assembler, own_output
from pullback.checks import finite_number, of_kind, whole_number
from pullback.data.crops import CROPS, Variation
from pullback.data.images import ImageSource
from pullback.data.sources import Source
from pullback.errors import ModelError, PullbackError, counted
from pullback.evaluation.fidelity import Measure, cosine_degradation, readable, relative_l2, silog
from pullback.evaluation.statistics import mean_and_error
from pullback.learning.fit import FitConfig, Losses, Network, Share, Trainable, check_going_on, fit
from pullback.learning.train_head import hash_of, recorded, varied_pixels
from pullback.pruning.model import PrunedModel
from pullback.pruning.scores import HeadScore
from pullback.pruning.tuned import TunedVectors, holds_views, vector_names
from pullback.pruning.tuning_images import TuningImages
from pullback.runs.progress import Progress
from pullback.runs.provenance import weights_hash

logger = logging.getLogger(__name__)


def tune(
    pruned: PrunedModel,
    images: ImageSource | Source | TuningImages[Any],
    *,
    held_out: ImageSource | Source | float = 0.1,
    steps: int = 700,
    batch: int = 128,
    learning_rate: float = 2e-3,
    positions: bool = False,
    match_hooks: float = 0.0,
    size: int | tuple[int, int] | None = None,
    limit: int | None = None,
    variation: Variation = CROPS,
    validate_every: int = 100,
    patience: int | None = None,
    precision: str | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    progress: Progress | None = None,
    on_step: Callable[[int, Mapping[str, float]], None] | None = None,
) -> PrunedModel:
    """Return a tuned copy of a pruned model; the argument and the original stay as they are.

    ``images``: unlabelled, a folder, a list or any other source; 2,000 are enough. ``held_out``: a share of them, or a
    source of its own, that decides which vectors are kept. ``positions``: tune position embeddings, too.
    ``match_hooks``: weight of the layers that a dense decoder reads, beside its output. ``size``: side of the crops, by
    default the model's. ``precision``: float32 or bf16, which is the default on a GPU. ``out``: folder of metrics.jsonl
    and of the checkpoint that a second call goes on from.
    To tune several pruned models on the same images, read these once, as `tuning_images.TuningImages`, which then
    decide ``held_out``, ``size`` and ``limit``.

    It runs where the model is: `pruned.to("cuda")` before. What it did is in ``tuning`` of the copy: the error on
    held-out images (times 100, as `pullback.evaluation` has it) before and after, with standard errors.
    """
    original = _checked(pruned)
    finite_number("match_hooks", match_hooks, least=0, expected="a weight that is not negative")
    of_kind("positions", positions, bool, "True or False")
    of_kind("variation", variation, Variation, "a Variation of pullback.data.crops")
    config = _config(pruned, steps, batch, learning_rate, validate_every, patience, precision, seed)
    progress = progress or Progress()
    task = _Outputs(pruned, original, match_hooks)
    network = _new_network(pruned, original, positions, task)
    progress.stage("reading the images")
    if not isinstance(images, TuningImages):
        images = TuningImages(original, images, held_out=held_out, size=size, limit=limit)
    elif size is not None or limit is not None:
        raise PullbackError("size, limit: images that were read before have theirs. Leave these out.")
    images.check(original, batch)
    settings = {
        **images.settings(),
        "variation": hash_of(asdict(variation)),
        "match_hooks": match_hooks,
        "pruned": hash_of([asdict(pruned.plan), repr(pruned), *map(_identity, pruned.scores)]),
        "start": None if pruned.tuned is None else weights_hash(pruned.tuned),
    }
    folder = None if out is None else Path(out)
    check_going_on(network, config, folder, settings)
    held = _HeldOut.of(task, images.judging(progress))
    job = TuneTask(task, images, images.pictures(progress), held, variation, config.precision == "bf16", config.seed)
    before = job.measured(network.forward)
    if math.isnan(before["degradation"]):
        raise PullbackError(
            "pruned: its output for held-out images is NaN before any step. Look for NaN in its weights."
        )
    start = {name: value.detach().clone() for name, value in network.state_dict().items()}
    fitted = fit(network, job, config, out=folder, settings=settings, progress=progress, on_step=on_step)
    after, best_step = fitted.scores, fitted.step
    if not after["score"] > before["score"]:
        logger.warning(
            f"tune: no step of {fitted.steps} was better on held-out images than the model as it was "
            f"({before['degradation']:.3g}), so its vectors stay. Give more images or steps, or a lower learning rate."
        )
        network.load_state_dict(start)
        after, best_step = before, 0
    record = {
        "measure": job.held_out.measure,
        "before": before["degradation"],
        "before_se": before["degradation_se"],
        "after": after["degradation"],
        "after_se": after["degradation_se"],
        "images": len(images.train),
        "held_out_images": len(images.judges),
        "size": list(images.wanted.size),
        "positions": positions,
        "steps": fitted.steps,
        "best_step": best_step,
        **recorded(images.shared),
    }
    return pruned.with_vectors(TunedVectors(network.vectors.by_name(), record))


# Before it starts


def _checked(pruned: Any) -> Backbone:
    """Return the unpruned model, taken apart, with the pixels that its checkpoint asks for."""
    of_kind("pruned", pruned, PrunedModel, "a pruned model, as pb.prune returned it", ModelError)
    check_evaluation_mode(pruned.model, "pruned.model")
    if pruned.dtype not in (torch.float32, torch.float64):
        raise ModelError(
            f"pruned: expected weights in float32, got {pruned.dtype}, in which small steps are lost. Tune "
            'pruned.float(), with precision="bf16" for the products, and cast what comes out.'
        )
    if not pruned.has_output:
        raise PullbackError(
            f"pruned: expected a plan that brings the tokens back, which the output of {pruned.backbone.name} is made "
            "of. Prune with dense=True."
        )
    original = load_backbone(pruned.model)
    source = str(getattr(pruned.model, "name_or_path", ""))
    if not Path(source).is_dir():
        return original
    return replace(original, preprocessing=published_preprocessing(source, original.preprocessing))


def _config(
    pruned: PrunedModel,
    steps: int,
    batch: int,
    learning_rate: float,
    validate_every: int,
    patience: int | None,
    precision: str | None,
    seed: int,
) -> FitConfig:
    whole_number("steps", steps)
    return FitConfig(
        steps=steps,
        batch=batch,
        learning_rate=learning_rate,
        warmup=steps // 10,
        weight_decay=0.0,
        validate_every=validate_every,
        patience=patience,
        precision=precision or ("bf16" if pruned.device.type == "cuda" else "float32"),
        seed=seed,
    )


def _identity(score: Any) -> str:
    """Name a score, so that a run does not go on with another one."""
    if isinstance(score, nn.Module):
        return weights_hash(score.head if isinstance(score, HeadScore) else score)
    return f"{getattr(score, '__module__', '')}.{getattr(score, '__qualname__', type(score).__qualname__)}"


# What is compared


class _Read(NamedTuple):
    """An output in numbers, and the layers that a dense decoder reads, where they are matched, too."""

    measure: Measure
    value: Tensor  # [B, ...]
    hooks: tuple[Tensor, ...] = ()  # [B, N, D] each

    def errors(self, full: _Read) -> Tensor:
        """Return the degradation, times 100, against the unpruned model: [B]."""
        return _MEASURES[full.measure](self.value, full.value)

    def measurable(self) -> Tensor:
        """Return which images [B] have an error against this one: depth that is nowhere positive has none."""
        if self.measure == "silog":
            return (self.value > 0).flatten(1).any(1)
        return torch.ones(len(self.value), dtype=torch.bool, device=self.value.device)


_MEASURES: dict[Measure, Callable[[Tensor, Tensor], Tensor]] = {
    "cosine": cosine_degradation,
    "silog": lambda pruned, full: silog(pruned, full).error,
    "relative_l2": relative_l2,
}


@dataclass(frozen=True, eq=False)
class _Outputs:
    """How the outputs of a pruned model and of the original are read, so that they can be compared."""

    pruned: PrunedModel  # not tuned
    original: Backbone
    match_hooks: float = 0.0

    def __post_init__(self) -> None:
        if self.match_hooks and not self.original.hook_layers:
            raise PullbackError(
                f"match_hooks: {self.original.name} has no dense decoder, so there are no layers that it reads. Leave "
                "it out."
            )
        if self.match_hooks and self.pruned.plan.size is not None:
            raise PullbackError(
                "match_hooks: layers of a smaller picture have fewer tokens than those of the unpruned model. Leave it "
                "out."
            )

    @property
    def manner(self) -> tuple[float, bool]:
        """What decides, beside the model, how its output is read."""
        return self.match_hooks, self._back

    @property
    def _back(self) -> bool:
        """Whether all tokens come back, and nothing of the model's own reads them."""
        return self.pruned.plan.reinsert != "none" and not self.original.reads_patches

    @torch.no_grad()
    def full(self, images: Tensor) -> _Read:
        """Read the unpruned model."""
        backbone, hooks = self.original, self.original.hook_layers
        if not self.match_hooks:
            return self._read(own_output(backbone.model, backbone, images))
        states = backbone.features(images, (*hooks, backbone.depth - 1))
        taps = tuple(states[layer] for layer in hooks)
        left = Remaining(states[backbone.depth - 1], backbone.token_layout(images), None, taps)
        assemble = assembler(backbone)
        assert assemble is not None  # a pruned model that has an output has one
        return self._read(assemble(backbone, left), self._normed(backbone, taps))

    def changed(self, student: PrunedModel, images: Tensor) -> _Read:
        """Read a pruned model with other vectors."""
        if not self.match_hooks:
            return self._read(own_output(student, student.backbone, images))
        output, run = student.with_record(images)
        return self._read(output, self._normed(student.backbone, run.taps[: len(self.original.hook_layers)]))

    def _normed(self, backbone: Backbone, taps: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(backbone.norm(tap) if backbone.hooks_normed else tap for tap in taps)

    def _read(self, output: Any, hooks: tuple[Tensor, ...] = ()) -> _Read:
        """Return the part of an output that may be read of a pruned model: a map, an embedding or, where all tokens
        come back and nothing else reads them, the tokens; without any of these the class token."""
        tokens = getattr(output, "last_hidden_state", None)
        if isinstance(output, Tensor) and output.ndim == 3 and not self.original.reads_patches:
            tokens = output
        if tokens is not None and self._back and self.original.classifier is None:
            return _Read("relative_l2", tokens, hooks)
        if tokens is not None and self.original.prefix and (tokens is output or not _has_embedding(output)):
            return _Read("cosine", tokens[:, 0], hooks)
        return _Read(*readable(output), hooks)


def _has_embedding(output: Any) -> bool:
    return any(isinstance(getattr(output, name, None), Tensor) for name in ("image_embeds", "pooler_output", "logits"))


# The task


@dataclass(frozen=True)
class _NetworkConfig:
    """What a checkpoint says of the vectors in it."""

    positions: bool
    numbers: int


class TuningNetwork(Trainable):
    """The vectors in training: images [B, 3, H, W] to what the pruned model with these vectors gives."""

    kind = "tuned-vectors"

    def __init__(self, vectors: TunedVectors, positions: bool, run: Callable[[Tensor], _Read]) -> None:
        super().__init__()
        self.vectors = vectors
        self.config = _NetworkConfig(positions, sum(value.numel() for value in vectors.parameters()))
        self._run = run  # a function, of which copies of this network for averages have the same one

    def forward(self, images: Tensor) -> _Read:
        return self._run(images)


def _new_network(pruned: PrunedModel, original: Backbone, positions: bool, outputs: _Outputs) -> TuningNetwork:
    """Make the network that is trained: it begins with the vectors that the pruned model has."""
    used = dict(pruned.model.named_parameters()) | (pruned.vectors or {})
    names = [*vector_names(pruned.model, load_backbone(pruned.model), positions=positions), *(pruned.vectors or {})]
    vectors = TunedVectors({name: used[name] for name in dict.fromkeys(names)})
    vectors.requires_grad_(True)
    student = pruned.with_vectors(vectors, frozen=True)
    student.scores = [_Undifferentiated(score) for score in student.scores]
    if student.modes is not None:
        student.modes = _Undifferentiated(student.modes)
    views = holds_views(pruned.model, original)

    def run(images: Tensor) -> _Read:
        if views:  # of parameters that have changed since, through which torch could not go back
            student._take_apart()
        return outputs.changed(student, images)

    return TuningNetwork(vectors, positions, run)


class _Undifferentiated(nn.Module):
    """A score, or modes, through which no gradient passes."""

    def __init__(self, score: Any) -> None:
        super().__init__()
        self.score = score

    @torch.no_grad()
    def forward(self, *given: Any) -> Tensor:
        result: Tensor = self.score(*given)
        return result


@dataclass(frozen=True, eq=False)
class _HeldOut:
    """Images that judge, whole, with what the unpruned model says of them."""

    images: tuple[Tensor, ...]  # [b, 3, H, W] each
    full: tuple[_Read, ...]

    @classmethod
    def of(cls, outputs: _Outputs, images: tuple[Tensor, ...]) -> _HeldOut:
        return cls(images, tuple(outputs.full(some)._replace(hooks=()) for some in images))

    @property
    def measure(self) -> Measure:
        return self.full[0].measure


@dataclass(frozen=True, eq=False)
class TuneTask:
    """A `Task`: the output of the pruned model against that of the unpruned one, of the same crop.

    ``mixed``: products in bf16 in training; held-out images are always judged in the model's own precision.
    """

    outputs: _Outputs
    read: TuningImages[Any]
    pictures: Tensor  # [n, 3, S, S] uint8
    held_out: _HeldOut
    variation: Variation
    mixed: bool
    seed: int

    def loss(self, network: Network, step: int, share: Share, generator: torch.Generator) -> Losses:
        rows = torch.randperm(len(self.pictures), generator=generator)[: share.batch]
        chosen = self.pictures[rows.to(self.pictures.device)]
        size = self.held_out.images[0].shape[-1]
        images = share.of(varied_pixels(self.outputs.original, chosen, size, self.variation, generator))

        def ask() -> _Read:
            with torch.autocast(images.device.type, torch.bfloat16, enabled=self.mixed):
                return self.outputs.full(images)

        full = self.read.answer((step, share, self.seed, self.variation, self.mixed, self.outputs.manner), ask)
        loss = _loss(network(images), full, self.outputs.match_hooks)
        if not loss.isfinite():
            raise _overflow("loss", f"after {counted(step, 'step')}")
        return loss, {}

    def validate(self, network: Network) -> Mapping[str, float]:
        scores = self.measured(network)
        if not math.isfinite(scores["degradation"]):
            raise _overflow("error", "on held-out images")
        return scores

    @torch.no_grad()
    def measured(self, network: Network) -> dict[str, float]:
        """Return the mean error on held-out images, times 100, whatever it is."""
        errors = []
        with torch.autocast(self.pictures.device.type, enabled=False):
            for images, full in zip(self.held_out.images, self.held_out.full, strict=True):
                errors.append(network(images).errors(full)[full.measurable()])
        known = torch.cat(errors)
        if not len(known):
            raise PullbackError("held_out: no image has an error that can be measured: no depth is positive.")
        mean, error = mean_and_error(known)
        return {"score": -mean, "degradation": mean, "degradation_se": error}


def _overflow(what: str, when: str) -> PullbackError:
    return PullbackError(
        f"learning_rate: the {what} is NaN or infinite {when}. Lower the learning rate, and tune in another folder; "
        "the last checkpoint in this one is still good."
    )


def _loss(changed: _Read, full: _Read, match_hooks: float) -> Tensor:
    """Return the mean error of a batch; images without one, or whose error cannot be measured, add nothing to it."""
    counts = full.measurable() & (changed.value != full.value).flatten(1).any(1)  # a root has no derivative at 0
    errors = _MEASURES[full.measure](changed.value[counts], full.value[counts])
    loss = errors.sum() / len(counts) / 100 if len(errors) else 0 * changed.value.sum().double()
    if not match_hooks:
        return loss
    hooks = [relative_l2(own, other).mean() / 100 for own, other in zip(changed.hooks, full.hooks, strict=True)]
    return loss + match_hooks * torch.stack(hooks).mean()
