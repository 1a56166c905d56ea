"""One call that makes a frozen model faster, and one that undoes it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pullback.backbones import load_backbone
from pullback.errors import ModelError, PullbackError
from pullback.pruning.context import Modes, Score
from pullback.pruning.outputs import assembler
from pullback.pruning.plan import PrunePlan
from pullback.pruning.plan import preset as named_plan
from pullback.pruning.run import PrunedRun, forward, prepared
from pullback.pruning.vggt import PrunedVGGT

Choice = str | nn.Module | Score
logger = logging.getLogger(__name__)


class PrunedModel(nn.Module):
    """A model with its own call signature and output class, that removes tokens on the way.

    ``model`` is the original, untouched: nothing is patched, its weights are shared, and several differently pruned
    copies of it can live side by side. A plan that removes nothing calls it.
    """

    def __init__(
        self, model: nn.Module, plan: PrunePlan, scores: Sequence[Choice], modes: Modes | nn.Module | None = None
    ) -> None:
        super().__init__()
        self.model, self.plan = model, plan
        self.backbone = load_backbone(model)
        self._assemble = assembler(self.backbone)
        self.scores, self.modes = prepared(self.backbone, plan, scores, modes)
        self.heads = nn.ModuleList(dict.fromkeys(score for score in self.scores if isinstance(score, nn.Module)))
        self.eval()

    @property
    def config(self) -> Any:
        return self.model.config

    def forward(self, pixel_values: Tensor, **options: Any) -> Any:
        if self.plan.ratio == 0:
            return self.model(pixel_values, **options)
        as_tuple = options.pop("return_dict", None) is False
        self._check(options)
        output = self.pruned(pixel_values)
        return output.to_tuple() if as_tuple else output

    def pruned(self, pixel_values: Tensor) -> Any:
        """The model's output by the pruned route, whatever the ratio is."""
        return self.with_record(pixel_values)[0]

    def with_record(self, pixel_values: Tensor) -> tuple[Any, PrunedRun]:
        """The same, and what each stage did."""
        layers = self._layers()
        run = self.run(pixel_values, layers)
        layout = self.backbone.token_layout(pixel_values)
        return self._assemble(self.backbone, dict(zip(layers, run.taps, strict=True)), layout), run

    def run(self, pixel_values: Tensor, layers: Sequence[int]) -> PrunedRun:
        """The tokens at some layers, and what each stage did."""
        return forward(self.backbone, pixel_values, self.plan, self.scores, layers=layers, modes=self.modes)

    def save_pretrained(self, folder: str | Path) -> Path:
        """The plan, the heads and the model, for `from_pretrained`."""
        from pullback.pruning.saving import save_pruned

        return save_pruned(self, folder)

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, *, model: nn.Module | None = None, device: str | torch.device = "cpu"
    ) -> PrunedModel:
        """What `save_pretrained` wrote; ``model`` instead of the saved copy, where there is one already."""
        from pullback.pruning.saving import load_pruned

        return load_pruned(folder, model=model, device=device)

    def _layers(self) -> tuple[int, ...]:
        return tuple(sorted({*self.backbone.hook_layers, self.backbone.depth - 1}))

    @staticmethod
    def _check(options: dict[str, Any]) -> None:
        """Positions are always interpolated here; whatever else would change the output is refused."""
        wanted = [name for name, value in options.items() if value and name != "interpolate_pos_encoding"]
        if wanted:
            raise ModelError(
                f"{wanted[0]}: a pruned model gives its output alone, because inner tokens are no longer those of the "
                "model. Leave it out, or ask the original: pb.restore(model)."
            )

    def _apply(self, fn: Any, recurse: bool = True) -> PrunedModel:
        """After a change of dtype or device the backbone refers to the new parameters."""
        super()._apply(fn, recurse)
        self.backbone = load_backbone(self.model)
        return self


def prune(
    model: nn.Module,
    score: Choice | Sequence[Choice],
    *,
    ratio: float | Sequence[float],
    stages: Sequence[int],
    preset: str = "best",
    dense: bool | None = None,
    modes: Modes | nn.Module | None = None,
) -> PrunedModel:
    """A frozen model that removes the tokens that its task hardly uses.

    ``model``: a transformers DINOv2, CLIP vision, ViT or Depth Anything model, or one of ours, in evaluation mode.
    ``score``: an importance head, a name (random, tome, strided, evit, norm, cls-similarity) or a function of the
    tokens [B, N, D] and the context; one for all stages, or one for each. ``ratio``: share of the patch tokens that is
    removed in the end, split equally over the stages, or a share for each. ``stages``: removal after these blocks.
    ``dense``: all patch tokens come back in the output, for decoders that read them (default: where the model has such
    a decoder). ``modes``: preset "paper" on class tokens matches by d_task, with the metric of a Spectral Pullback
    Network: the score itself, or this one; or with exact modes, a function.
    """
    backbone = load_backbone(model)
    if dense is None:
        dense = bool(backbone.hook_layers)
    if not dense and backbone.hook_layers:
        raise PullbackError(f"dense: the decoder of {backbone.name} reads all patch tokens, so they must come back.")
    plan = named_plan(preset, ratio, stages, dense=dense, depth=backbone.depth)
    for note in plan.notes(backbone.depth):
        logger.warning(note)
    scores: list[Any] = list(score) if isinstance(score, (list, tuple, nn.ModuleList)) else [score]
    return PrunedModel(model, plan, scores, modes)


def restore(pruned: nn.Module) -> nn.Module:
    """The model that was pruned, exactly as it was."""
    if not isinstance(pruned, (PrunedModel, PrunedVGGT)):
        raise ModelError(f"pruned: expected what pb.prune or pb.prune_views returned, got {type(pruned).__name__}.")
    return pruned.model
