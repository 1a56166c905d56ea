"""How far the output of a changed model is from the unchanged one's, per image and times 100.

    embedding   100 (1 - cos(a, b))
    depth       100 sqrt(mean d^2 - lambda (mean d)^2),   d = log a - log b      (SILog)
    other maps  100 |a - b| / |b|

`degradation` chooses the one that suits an output. Everything is computed in float64: a model that keeps nearly all of
its tokens changes in the last digits of float32. `depth_errors` compares depth with the truth instead.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from pullback.checks import finite_number, of_kind
from pullback.errors import PullbackError, ShapeError
from pullback.runs.rows import finite

Measure = Literal["cosine", "silog", "relative_l2"]
LOG_FLOOR = 1e-3
"""Depth heads end in a ReLU, so log needs a floor: this share of the median of the unchanged prediction."""
SECOND_WEIGHT = 0.85
"""The lambda of SILog that is reported beside 1."""
_OUTPUTS: dict[str, Measure] = {
    "image_embeds": "cosine",
    "pooler_output": "cosine",
    "predicted_depth": "silog",
    "logits": "cosine",
}
"""What is measured of a model's output: the first of these that it has, since depth models may have logits beside."""


@dataclass(frozen=True)
class Degradation:
    """How much worse the output of each image became, times 100; the smaller the better, NaN where it has no error."""

    measure: Measure
    value: Tensor  # [B]
    beside: dict[str, Tensor] = field(default_factory=dict)  # of SILog also ``value_085`` and ``floored``, [B] each

    def rows(self) -> list[dict[str, float | None]]:
        """Return the numbers of each image by name; None for what is not finite, which JSON cannot hold."""
        columns = {"value": self.value, **self.beside}
        lists = {name: [finite(value) for value in values.tolist()] for name, values in columns.items()}
        return [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)]


def degradation(pruned: Any, full: Any, *, depth: bool = False) -> Degradation:
    """Measure how far the output of a changed model is from that of the unchanged one, image by image.

    Both are tensors [B, ...], ``depth`` maps or not, or outputs of a model with an embedding or a predicted depth.
    """
    measure, reference = readable(full, depth)
    return degradation_by(measure, readable(pruned, depth)[1], reference)


def degradation_by(measure: Measure, changed: Tensor, reference: Tensor) -> Degradation:
    """Measure, in the way that `readable` named, how far tensors [B, ...] of a changed model are from the reference."""
    if measure == "cosine":
        return Degradation(measure, cosine_degradation(changed, reference))
    if measure == "relative_l2":
        return Degradation(measure, relative_l2(changed, reference))
    errors, second = silog(changed, reference), silog(changed, reference, weight=SECOND_WEIGHT)
    return Degradation(measure, errors.error, {"value_085": second.error, "floored": errors.floored})


def measure_of(output: Any, *, depth: bool = False) -> Measure:
    """Return how `degradation` measures such an output."""
    return readable(output, depth)[0]


def readable(output: Any, depth: bool = False) -> tuple[Measure, Tensor]:
    """Return the measure for an output, and the tensor that it is taken of."""
    if isinstance(output, Tensor):
        vectors = output.ndim == 2 and output.shape[1] > 1  # a single number, such as one logit, has no direction
        return "silog" if depth else "cosine" if vectors else "relative_l2", output
    for name, measure in _OUTPUTS.items():
        if isinstance(getattr(output, name, None), Tensor):
            return measure, getattr(output, name)
    raise PullbackError(
        f"degrade: {type(output).__name__} has neither an embedding nor a depth map; pass a function of both outputs."
    )


@dataclass(frozen=True)
class SilogErrors:
    """Per image [B]. An image whose unchanged prediction is nowhere positive has NaN."""

    error: Tensor  # times 100
    floored: Tensor  # share of pixels at which one of the two predictions was lifted to the floor


def cosine_degradation(pruned: Tensor, full: Tensor) -> Tensor:
    """Return 100 (1 - cos) of embeddings [B, M] -> [B].

    As 50 |a/|a| - b/|b||^2: 1 - cos itself loses all digits where the two are nearly parallel.
    """
    a, b = (_unit(values) for values in _pair(pruned, full))
    return 50 * (a - b).square().sum(1)


def relative_l2(pruned: Tensor, full: Tensor) -> Tensor:
    """Return 100 |a - b| / |b| of outputs [B, ...] -> [B]."""
    a, b = _pair(pruned, full)
    return 100 * torch.linalg.vector_norm(a - b, dim=1) / torch.linalg.vector_norm(b, dim=1)


def silog(pruned: Tensor, full: Tensor, *, weight: float = 1.0) -> SilogErrors:
    """Return the scale-invariant log error of depths [B, ...]; ``weight`` is lambda: 1 ignores a common factor."""
    finite_number("weight", weight, least=0, most=1, expected="lambda between 0 and 1")
    a, b = _pair(pruned, full)
    floor = LOG_FLOOR * _middle(b)
    d = a.maximum(floor).log() - b.maximum(floor).log()
    mean = d.mean(1)
    spread = (d - mean[:, None]).square().mean(1)  # mean d^2 - (mean d)^2 without its cancellation
    floored = ((a < floor) | (b < floor)).double().mean(1)
    return SilogErrors(100 * (spread + (1 - weight) * mean.square()).sqrt(), floored)


def _middle(depth: Tensor) -> Tensor:
    """Return the median [B, 1] of depths [B, M]; where most pixels are not positive, the median of those that are."""
    median = depth.median(1, keepdim=True).values
    positive = depth.where(depth > 0, torch.nan).nanmedian(1, keepdim=True).values
    return torch.where(median > 0, median, positive)


def _unit(values: Tensor) -> Tensor:
    return values / torch.linalg.vector_norm(values, dim=1, keepdim=True)


def _pair(pruned: Tensor, full: Tensor) -> tuple[Tensor, Tensor]:
    """Return both as float64 [B, M]."""
    for values in (pruned, full):
        of_kind("pruned, full", values, Tensor, "two tensors of one shape [B, ...]", ShapeError)
    if pruned.shape != full.shape or pruned.ndim < 2:
        raise ShapeError(
            f"pruned, full: expected one shape [B, ...], got {list(pruned.shape)} and {list(full.shape)}. Compare the "
            "outputs of the same images; a pruned dense model gives the full grid."
        )
    return pruned.double().flatten(1), full.double().flatten(1)


@dataclass(frozen=True)
class DepthErrors:
    """Errors over the valid pixels of each image [B]; NaN for an image without any."""

    abs_rel: Tensor  # mean |d - d*| / d*
    delta1: Tensor  # share with max(d / d*, d* / d) < 1.25


def depth_errors(prediction: Tensor, truth: Tensor, valid: Tensor, *, median_scaling: bool) -> DepthErrors:
    """Compare depths [B, H, W] with the truth where ``valid``.

    ``median_scaling`` multiplies each prediction by median(d*) / median(d), as is usual where the scale of a scene
    cannot be seen.
    """
    for values in (prediction, truth, valid):
        of_kind("prediction, truth, valid", values, Tensor, "tensors of one shape [B, H, W]", ShapeError)
    if not prediction.shape == truth.shape == valid.shape:
        raise ShapeError(
            f"prediction, truth, valid: expected one shape [B, H, W], got {list(prediction.shape)}, "
            f"{list(truth.shape)} and {list(valid.shape)}."
        )
    nothing = torch.full_like(truth, torch.nan)
    predicted, true = (torch.where(valid, depth, nothing).flatten(1) for depth in (prediction, truth))
    if median_scaling:
        scale = true.nanmedian(1, keepdim=True).values / predicted.nanmedian(1, keepdim=True).values
        predicted = predicted * scale
    ratio = torch.maximum(predicted / true, true / predicted)
    close = torch.where(ratio.isnan(), ratio, (ratio < 1.25).to(ratio.dtype))
    return DepthErrors(((predicted - true).abs() / true).nanmean(1), close.nanmean(1))
