"""One call that makes a frozen model faster, and one that undoes it.

`prune` wraps a model into a `PrunedModel`, which is called like the model and returns what the model returns; `restore`
gives the model back. As a folder it is written and read by `pruning.folder`.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pullback.backbones import Backbone, Remaining, load_backbone
from pullback.backbones.joined import fresh, joined, wanted
from pullback.backbones.outputs import (
    FIXED_SIZE,
    as_images,
    assembler,
    check_output_class,
    class_alone,
    no_assembler,
)
from pullback.checks import of_kind
from pullback.errors import ModelError, PullbackError, ShapeError
from pullback.pruning import published, resized
from pullback.pruning.folder import read_pruned, write_pruned
from pullback.pruning.forward import PrunedRun, forward, prepared
from pullback.pruning.plan import BlockPlan, Plan, PrunePlan
from pullback.pruning.plan import preset as named_plan
from pullback.pruning.plan import published as published_plan
from pullback.pruning.scores import (
    Choice,
    Modes,
    Score,
    check_weights,
    networks_of,
    with_shipped,
)
from pullback.pruning.tuned import VECTORS, TunedVectors, read_vectors, shared_copy
from pullback.registry import PRESETS

EXTRAS = ("output_hidden_states", "output_attentions")
_TAKEN_APART = ("backbone", "_running", "_used", "_assemble", "_places")
_SHORTENED = (
    "last_hidden_state, or whatever else holds the tokens of this pruned model, has fewer of them than the model's: "
    "pooled outputs and the class token are safe to read, patch tokens are not"
)
logger = logging.getLogger(__name__)


class Pruned(nn.Module):
    """A model that removes tokens on the way, as `restore` takes it; ``model`` is the original, untouched."""

    model: Any
    plan: Any


def prune(
    model: nn.Module,
    score: Choice | Sequence[Choice] | None = None,
    *,
    ratio: float | Sequence[float] | None = None,
    stages: Sequence[int] | None = None,
    preset: str = "best",
    r: int | tuple[float, float] | Sequence[int] | None = None,
    keep: float | None = None,
    size: int | None = None,
    output: str = "model",
    dense: bool | None = None,
    modes: Modes | nn.Module | None = None,
) -> PrunedModel:
    """Return a frozen model that removes the tokens that its task hardly uses.

    ``model``: a transformers DINOv2, CLIP or SigLIP vision, ViT or Depth Anything model, an image classifier made of
    one, one of ours, or one of a registered family, in evaluation mode.
    ``score``: "importance" (the heads that come with the package for this model), an importance head, another name
    (random, bipartite, strided, class-attention, norm, cls-similarity, or a registered one) or a function of the tokens
    [B, N, D] and the context; one for all stages, or one for each.
    ``ratio``: share of the patch tokens that is removed in the end, split equally over the stages, or a share for each.
    ``stages``: removal after these blocks.
    ``preset``: "best", another plan of stages (paper, drop, bipartite, attention-drop, strided), or a published rule as
    its authors run it, which takes no score, ratio or stages: "tome" with ``r`` tokens merged in every block ((8, -1):
    decreasing from 16 to 0), "pitome" or "evit" with the share ``keep`` of the patches, "resize" with ``size``, "none".
    ``size``: with any preset, the picture is first shrunk until its shorter side has so many pixels.
    ``output``: "cls" computes the class token alone in the last block, for outputs that read nothing else;
    last_hidden_state is None then.
    ``dense``: all patch tokens come back to their places in the output (default: where the model's own decoder or
    classifier reads them); without it last_hidden_state holds the tokens that are left, and only its class token and
    the pooled output are safe to read. ``modes``: preset "paper" on class tokens matches by d_task, with the
    metric of a Spectral Pullback Network: the score itself, or this one; or with exact modes, a function.
    """
    scores: list[Any] = list(score) if isinstance(score, (list, tuple, nn.ModuleList)) else [score]
    plan = plan_for(model, preset, ratio, stages, dense=dense, r=r, keep=keep, size=size, output=output)
    if isinstance(plan, PrunePlan) and plan.stages:
        if score is None:
            raise PullbackError(f"score: preset {preset!r} needs one: 'importance', a head, or a name such as 'norm'.")
    elif score is not None:
        raise PullbackError(f"score: preset {preset!r} has its own, and takes none. Leave it out.")
    else:
        scores = []
    if isinstance(plan, PrunePlan):
        scores = with_shipped(scores, plan.stages, load_backbone(model))
    pruned = PrunedModel(model, plan, scores, modes)
    check_weights(pruned.backbone, networks_of(pruned.scores, pruned.modes))
    for note in pruned.plan.notes(pruned.backbone.depth):
        logger.warning(note)
    if pruned.shortened:
        _say_once(
            f"{_SHORTENED}. To read patch tokens, for means, maps and heads of your own, prune with dense=True, which "
            "brings all of them back to their places. This is said once."
        )
    return pruned


@cache
def _say_once(note: str) -> None:
    logger.warning(note)


def plan_for(
    model: nn.Module,
    preset: str,
    ratio: float | Sequence[float] | None = None,
    stages: Sequence[int] | None = None,
    *,
    dense: bool | None = None,
    size: int | None = None,
    output: str = "model",
    **knobs: Any,
) -> Plan:
    """Return the named plan for this model; the arguments are those of `prune`."""
    _check_model(model)
    backbone = load_backbone(model)
    if assembler(backbone) is None:
        raise no_assembler(backbone)
    if dense is None:
        dense = backbone.reads_patches
    if not dense and backbone.reads_patches:
        raise PullbackError(f"dense: {_reader(backbone)} reads all patch tokens, so they must come back. Leave it out.")
    known = PRESETS.get(preset)
    plan: Plan
    if known is not None and known.knob:
        _check_unused(preset, {"ratio": ratio, "stages": stages} | _others(knobs, known.knob))
        plan = published_plan(preset, {**knobs, "size": size}, dense=dense, depth=backbone.depth)
    else:
        _check_unused(preset, knobs)
        if known is not None and (ratio is None or stages is None):
            missing = "ratio" if ratio is None else "stages"
            raise PullbackError(f"{missing}: preset {preset!r} needs it, as in prune(..., ratio=0.5, stages=[6]).")
        plan = named_plan(preset, ratio or 0.0, stages or (), dense=dense, depth=backbone.depth)
    plan = replace(plan, size=size, class_row=_class_row(backbone, output, dense))
    _check_fits(plan, backbone)
    return plan


def _others(knobs: Mapping[str, Any], own: str) -> dict[str, Any]:
    return {name: value for name, value in knobs.items() if name != own}


def _check_unused(preset: str, arguments: Mapping[str, Any]) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise PullbackError(f"{name}: preset {preset!r} does not take it, got {value!r}. Leave it out.")


def _class_row(backbone: Backbone, output: str, dense: bool) -> bool:
    """Whether the last block computes the class token alone; an error where the output reads more."""
    if output not in ("model", "cls"):
        raise PullbackError(f'output: expected "model" or "cls", got {output!r}.')
    if output == "cls" and (dense or not class_alone(backbone)):
        reads = "brings all patch tokens back" if dense and not backbone.reads_patches else "reads more than that"
        raise PullbackError(
            f'output: "cls" is for outputs of the class token alone, and the output of {backbone.name} {reads}. Leave '
            "it out."
        )
    return output == "cls"


def _check_fits(plan: Plan, backbone: Backbone) -> None:
    """Raise an error for a size that is no whole number of patches."""
    if plan.size is not None and plan.size % backbone.patch_size:
        near = max(1, round(plan.size / backbone.patch_size)) * backbone.patch_size
        raise PullbackError(
            f"size: expected a multiple of the patch size {backbone.patch_size} of {backbone.name}, got {plan.size}. "
            f"The nearest is {near}."
        )


def _reader(backbone: Backbone) -> str:
    """Name the part of a model that reads all patch tokens."""
    return f"the {'decoder' if backbone.hook_layers else 'classifier'} of {backbone.name}"


def _check_model(model: Any) -> None:
    """Raise an error for what is no model, is pruned already, or returns what a pruned copy cannot."""
    if isinstance(model, Pruned):
        raise ModelError("model: it is pruned already. Prune the original: pb.prune(pb.restore(model), ...).")
    if isinstance(model, (str, os.PathLike)):
        raise ModelError(
            f"model: expected a module, got the name {os.fspath(model)!r}. Load it first: "
            f"pb.load_probe({os.fspath(model)!r}).backbone.model."
        )
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"model: expected a module, got {type(model).__name__}. Of a probe it is probe.backbone.model."
        )
    check_output_class(model)


def restore(pruned: nn.Module) -> nn.Module:
    """Return the model that was pruned, exactly as it was; of a tuned one, the original without the tuned vectors."""
    if not isinstance(pruned, Pruned):
        raise ModelError(f"pruned: expected what pb.prune or pb.prune_views returned, got {type(pruned).__name__}.")
    original: nn.Module = pruned.model
    return original


class PrunedModel(Pruned):
    """A model with its own call signature and output class, that removes tokens on the way.

    ``model`` is the original, untouched: nothing is patched, its weights are shared, and several differently pruned
    copies of it can live side by side. A plan that removes nothing calls it. Of a frozen model
    (``model.requires_grad_(False)``) queries, keys and values come from one product, with a second copy of their
    matrices that all of them share (`backbones.joined`): compile it after weights were loaded, not before.
    """

    def __init__(
        self, model: nn.Module, plan: Plan, scores: Sequence[Choice], modes: Modes | nn.Module | None = None
    ) -> None:
        super().__init__()
        _check_model(model)
        of_kind("plan", plan, Plan, "a PrunePlan or a BlockPlan; pb.prune makes one of a preset")
        self.model, self.plan = model, plan
        self.tuned: TunedVectors | None
        self.register_module("tuned", None)
        self._take_apart()
        _check_fits(plan, self.backbone)
        self.scores: list[Score] = []
        self.modes: Modes | None = None
        if isinstance(plan, BlockPlan):
            plan.check_depth(self.backbone.depth)
            published.rule_of(plan, self.backbone)
        elif isinstance(plan, PrunePlan):
            self.scores, self.modes = prepared(self.backbone, plan, scores, modes)
        self.heads = nn.ModuleList(dict.fromkeys(score for score in self.scores if isinstance(score, nn.Module)))
        self.eval()

    @property
    def vectors(self) -> dict[str, Tensor] | None:
        """What `tune` has changed, by the name of the parameter in the model; None for a model that is not tuned."""
        return None if self.tuned is None else dict(self.tuned.by_name())

    @property
    def tuning(self) -> dict[str, Any] | None:
        """How the vectors were tuned, and the error on held-out images before and after; None for a model that is not
        tuned."""
        return None if self.tuned is None else dict(self.tuned.record)

    def with_vectors(self, tuned: TunedVectors | None, *, frozen: bool = False) -> PrunedModel:
        """Return the same pruned model with other vectors; everything else is shared. ``frozen``: no gradient reaches
        a parameter of the original."""
        other = copy.copy(self)
        other._modules = dict(self._modules)  # a shallow copy of a module has the very dictionary
        if frozen:
            other.model = shared_copy(self.model, {}, frozen=True)
        other.tuned = tuned
        other._take_apart()
        return other

    @property
    def config(self) -> Any:
        return getattr(self.model, "config", None)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    @property
    def main_input_name(self) -> str:
        return "pixel_values"

    @property
    def input_modalities(self) -> tuple[str, ...]:
        return ("image",)

    def can_generate(self) -> bool:
        """Answer transformers' pipelines, which ask: no, it makes no text."""
        return False

    @property
    def has_output(self) -> bool:
        """Whether the model's own output can be made of what this plan leaves; `run` works without it, too."""
        back = self.plan.comes_back or not self.backbone.reads_patches
        return back and self._assemble is not None

    @property
    def shortened(self) -> bool:
        """Whether the output holds tokens, and fewer of them than the model's own."""
        fewer = (self.plan.removes or self.plan.size is not None) and self.plan.reinsert == "none"
        read = self.backbone.classifier is not None or self.backbone.hook_layers or self.plan.class_row
        return fewer and self.has_output and not read

    def __repr__(self) -> str:
        note = _SHORTENED if self.shortened else "its output has the shape of the model's"
        if self.plan.class_row:
            note = "its output is that of the class token"
        name = type(self.model).__name__ + ("" if self.tuned is None else ", tuned")
        return f"PrunedModel({name}, {self._told()}; {note})"

    def _told(self) -> str:
        """Say what the plan does."""
        told = [] if self.plan.size is None else [f"pictures shrunk to {self.plan.size} pixels"]
        if isinstance(self.plan, BlockPlan):
            told.append(str(self.plan))
        elif self.plan.stages:
            shares = zip(self.plan.stages, self.plan.shares, strict=True)
            parts = ", ".join(f"{share:.3g} after block {stage}" for stage, share in shares)
            told.append(f"share of the patch tokens removed: {parts}")
        return ", ".join(told) or "nothing is removed"

    def train(self, mode: bool = True) -> PrunedModel:
        """Stay in evaluation mode, also inside a network that is trained: the model is frozen, and not ours alone."""
        return super().train(False)

    def forward(self, pixel_values: Tensor, **options: Any) -> Any:
        if not isinstance(pixel_values, Tensor):
            raise ShapeError(f"pixel_values: expected images [B, 3, H, W], got {type(pixel_values).__name__}.")
        if self.plan.idle:
            return self._used[0](pixel_values, **options)
        if self.backbone.family == "siglip2":
            mask, shapes = options.pop("pixel_attention_mask", None), options.pop("spatial_shapes", None)
            pixel_values = as_images(pixel_values, mask, shapes, self.backbone.patch_size)
        as_tuple = self._as_tuple(options.pop("return_dict", None))
        self._check(options)
        self._check_size(pixel_values, bool(options.get("interpolate_pos_encoding")))
        output = self.pruned(pixel_values)
        return output.to_tuple() if as_tuple else output

    def pruned(self, pixel_values: Tensor) -> Any:
        """Return the model's output by the pruned route, whatever the ratio is."""
        return self.with_record(pixel_values)[0]

    def with_record(self, pixel_values: Tensor) -> tuple[Any, PrunedRun]:
        """Return the model's output by the pruned route, and what each stage did."""
        if self._assemble is None:
            raise no_assembler(self.backbone)
        if not self.has_output:
            raise PullbackError(
                f"plan: {_reader(self.backbone)} reads all patch tokens, so they must come back; got a plan with "
                'reinsert="none". Of such a plan run(images, layers) gives the tokens that are left.'
            )
        hooks = self.backbone.hook_layers
        run = self.run(pixel_values, (*hooks, self.backbone.depth - 1))
        left = Remaining(run.taps[-1], run.layout, run.log_sizes, run.taps[: len(hooks)], self.plan.class_row)
        whole = self.whole_patches(pixel_values)
        if self.plan.size is not None and self.plan.reinsert != "none" and not self.backbone.reads_patches:
            left = resized.tokens_at(left, self.backbone.token_layout(whole))
        output = self._assemble(self.backbone, left)
        return resized.maps_at(output, whole.shape[-2:]) if hooks and self.plan.size is not None else output, run

    def run(self, pixel_values: Tensor, layers: Sequence[int]) -> PrunedRun:
        """Return the tokens at some layers, and what each stage did."""
        if not torch.compiler.is_compiling() and self._stale():
            self._take_apart()
        images = self.whole_patches(pixel_values)
        if self.plan.size is not None:
            images = resized.shrunk(images, self.plan.size, self.backbone.patch_size)
        backbone = self._running if wanted(self.backbone) else self.backbone
        if isinstance(self.plan, BlockPlan):
            return published.forward(backbone, images, self.plan, layers=layers)
        return forward(backbone, images, self.plan, self.scores, layers=layers, modes=self.modes)

    def save_pretrained(self, folder: str | Path, *, processor: Any | None = None, weights: bool = True) -> Path:
        """Write the plan, the heads, tuned vectors and the model, for `from_pretrained`. What cannot be saved is
        refused before.

        ``processor``: the model's image processor, for AutoImageProcessor.from_pretrained(folder); by default the one
        beside the weights that the model was loaded from, where there is one. ``weights``: False leaves the model out,
        as is a model of your own without save_pretrained; `from_pretrained` takes it as an argument then. Plan, heads
        and tuned vectors are small.
        """
        of_kind("folder", folder, (str, os.PathLike), "a folder to write")
        of_kind("weights", weights, bool, "True or False")
        folder = Path(folder)
        if processor is not None and not hasattr(processor, "save_pretrained"):
            raise ModelError(
                f"processor: expected an image processor of transformers, got {type(processor).__name__}. Load it by "
                "AutoImageProcessor.from_pretrained."
            )
        return write_pruned(self, folder, processor, weights)

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, *, model: nn.Module | None = None, device: str | torch.device = "cpu"
    ) -> PrunedModel:
        """Read what `save_pretrained` wrote; ``model`` instead of the saved copy, where there is one already."""
        of_kind("folder", folder, (str, os.PathLike), "the folder that save_pretrained wrote", ModelError)
        folder = Path(folder)
        saved = read_pruned(folder, model)
        pruned = cls(saved.model, saved.plan, saved.scores, saved.modes)
        check_weights(pruned.backbone, networks_of(pruned.scores, pruned.modes))
        if saved.tuned:
            pruned = pruned.with_vectors(read_vectors(folder / VECTORS, pruned.backbone))
        return pruned.to(device)

    def whole_patches(self, images: Tensor) -> Tensor:
        """Cut off the pixels of images [B, 3, H, W] at the right and the bottom that fill no patch: the models' own
        convolutions pass over them. An image without any patch is left to the backbone's error."""
        patch = self.backbone.patch_size
        height, width = images.shape[-2:]
        if (height % patch == 0 and width % patch == 0) or min(height, width) < patch:
            return images
        return images[..., : height // patch * patch, : width // patch * patch]

    def _as_tuple(self, return_dict: bool | None) -> bool:
        """Whether a tuple was asked for, or, if nothing was, the configuration says so, as transformers does."""
        default = getattr(self.config, "return_dict", None)
        if return_dict is False and default is None:
            raise ModelError(f"return_dict: {type(self.model).__name__} has one form of output. Leave it out.")
        return (default if return_dict is None else return_dict) is False

    def _check(self, options: dict[str, Any]) -> None:
        """Raise an error for options that would change the output, also where the configuration asks for them."""
        for name in EXTRAS:
            if options.get(name) is None and getattr(self.config, name, False):
                raise ModelError(
                    f"{name}: the model's configuration asks for it, and a pruned model gives its output alone. Pass "
                    f"{name}=False, or ask the original: pb.restore(model)."
                )
        wanted = [name for name, value in options.items() if value is not None and value is not False]
        wanted = [name for name in wanted if name != "interpolate_pos_encoding"]
        if wanted:
            raise ModelError(
                f"{wanted[0]}: a pruned model gives its output alone, because inner tokens are no longer those of the "
                "model. Leave it out, or ask the original: pb.restore(model)."
            )

    def _check_size(self, images: Tensor, interpolate: bool) -> None:
        """Raise an error where the model would: for another size than the trained one, unless it is asked for."""
        if interpolate or self.backbone.family not in FIXED_SIZE:
            return
        size = getattr(self.config, "vision_config", self.config).image_size
        expected = (size, size) if isinstance(size, int) else tuple(size)
        if tuple(images.shape[-2:]) != expected:
            raise ShapeError(
                f"pixel_values: {type(self.model).__name__} expects {expected[0]}x{expected[1]} pixels, got "
                f"{'x'.join(str(side) for side in images.shape[-2:])}. Resize them, or pass "
                "interpolate_pos_encoding=True."
            )

    def _take_apart(self) -> None:
        """Refer to the parameters that the model has now; they, and the layers that hold them, are kept to notice
        others later."""
        used = self.model if self.tuned is None else shared_copy(self.model, self.tuned.by_name())
        self._used = (used,)  # in a tuple, since a module that it holds would be saved with it
        self.backbone = load_backbone(used)
        self._running = joined(self.backbone)  # what inference runs; of weights that are trained the same
        self._assemble = assembler(self.backbone)
        own = [self.model] if self.tuned is None else [self.model, self.tuned]
        self._places = [
            (place, name, value)
            for module in (part for held in own for part in held.modules())
            for place in (module._parameters, module._modules)
            for name, value in place.items()
        ]

    def _stale(self) -> bool:
        """Whether a parameter or a layer was replaced, by load_state_dict(..., assign=True) or by hand, or one that
        was copied has been written to."""
        return any(place.get(name) is not value for place, name, value in self._places) or not fresh(self._running)

    def _apply(self, fn: Any, recurse: bool = True) -> PrunedModel:
        """Refer to the new parameters after a change of dtype or device."""
        super()._apply(fn, recurse)
        self._take_apart()
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what refers to parameters: a copy takes its own model apart, and follows that one's changes."""
        return {name: value for name, value in self.__dict__.items() if name not in _TAKEN_APART}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._take_apart()
