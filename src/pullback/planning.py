"""From a model, its heads and a budget to a pruning plan, with what to expect of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pullback.errors import PullbackError
from pullback.evaluation.cost import flops as count_flops
from pullback.evaluation.cost import race
from pullback.evaluation.fidelity import cosine_degradation, silog
from pullback.pruning.apply import Choice, PrunedModel, prune
from pullback.pruning.planner import Forecast, best_within_cost, cheapest_within_degradation, stage_choices

# (output of the pruned model, output of the model) -> how much worse each image is [B]
Degrade = Callable[[Any, Any], Tensor]


def output_degradation(pruned: Any, full: Any) -> Tensor:
    """[B]: cosine distance x 100 of an embedding, additional SILog x 100 of a depth map."""
    for name in ("image_embeds", "pooler_output"):
        if isinstance(getattr(full, name, None), Tensor):
            return cosine_degradation(getattr(pruned, name), getattr(full, name))
    if isinstance(getattr(full, "predicted_depth", None), Tensor):
        return silog(pruned.predicted_depth, full.predicted_depth).error
    raise PullbackError(
        f"degrade: {type(full).__name__} has neither an embedding nor a depth map; pass a function of both outputs."
    )


@dataclass(frozen=True, eq=False)
class Calibration:
    """A model, images to try plans on, and what the model says of them."""

    model: nn.Module
    images: Tensor  # [n, 3, H, W]
    batch: int
    degrade: Degrade
    rounds: int = 20  # of each timing

    def degradation(self, pruned: nn.Module) -> Tensor:
        """[n]"""
        parts = []
        for images in self.images.split(self.batch):
            with torch.no_grad():
                parts.append(self.degrade(pruned(images), self.model(images)))
        return torch.cat(parts)

    def flops(self, pruned: nn.Module) -> float:
        """Operations on one image, as a share of the model's."""
        one = self.images[:1]
        return count_flops(lambda: pruned(one)) / count_flops(lambda: self.model(one))

    def milliseconds(self, pruned: nn.Module) -> float:
        """Of one batch, in turns with the model itself: a machine that slows down slows down both, and what counts is
        the ratio, times the model's own time."""
        some = self.images[: self.batch]
        own, whole = race([lambda: pruned(some), lambda: self.model(some)], some.device, self.rounds)
        return own.median / whole.median * self._baseline()

    def _baseline(self) -> float:
        if "_whole" not in self.__dict__:
            some = self.images[: self.batch]
            object.__setattr__(self, "_whole", race([lambda: self.model(some)], some.device, self.rounds)[0].median)
        return float(self.__dict__["_whole"])


def plan_pruning(
    model: nn.Module,
    heads: Mapping[int, Choice],
    images: Tensor,
    *,
    flops: float | None = None,
    milliseconds: float | None = None,
    degradation: float | None = None,
    degrade: Degrade = output_degradation,
    batch: int = 64,
    stages: int = 2,
    preset: str = "best",
    rounds: int = 20,
) -> Forecast:
    """The plan for one of three budgets, tried on calibration images [n, 3, H, W] as the model takes them.

    ``heads``: the score to use after each block, {3: head, 6: head}. ``flops``: at most this share of the model's
    operations. ``milliseconds``: at most so many for one batch, as the model runs here. ``degradation``: at most so
    much in the mean over the images, as cheap as possible in operations. ``stages``: at most so many. ``rounds`` of
    each timing.
    `prune(model, [heads[s] for s in f.plan.stages], ratio=f.plan.ratio, stages=f.plan.stages)` makes the model.
    """
    budgets = {"flops": flops, "milliseconds": milliseconds, "degradation": degradation}
    given = {name: value for name, value in budgets.items() if value is not None}
    if len(given) != 1:
        names = ", ".join(given) or "none"
        raise PullbackError(f"budget: expected one of flops, milliseconds and degradation, got {names}.")
    if not heads:
        raise PullbackError("heads: expected a score for at least one block, such as {3: head}, got none.")
    calibration = Calibration(model, images, batch, degrade, rounds)

    def build(chosen: tuple[int, ...], ratio: float) -> PrunedModel:
        return prune(model, [heads[stage] for stage in chosen], ratio=ratio, stages=chosen, preset=preset)

    choices = stage_choices(heads, stages)
    ((name, limit),) = given.items()
    if name == "degradation":
        return cheapest_within_degradation(build, choices, calibration.flops, calibration.degradation, limit)
    cost = calibration.flops if name == "flops" else calibration.milliseconds
    return best_within_cost(build, choices, cost, calibration.degradation, limit)
