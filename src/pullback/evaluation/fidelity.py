"""How far the output of a changed model is from the unchanged one's, per image and times 100.

    embedding   100 (1 - cos(a, b))
    depth       100 sqrt(mean d^2 - lambda (mean d)^2),   d = log a - log b      (SILog)
    other maps  100 |a - b| / |b|

Everything is computed in float64: a model that keeps nearly all of its tokens changes in the last digits of float32.

Errors of predicted depth, per image.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pullback.errors import PullbackError, ShapeError

LOG_FLOOR = 1e-3
"""Depth heads end in a ReLU, so log needs a floor: this share of the median of the unchanged prediction."""


@dataclass(frozen=True)
class SilogErrors:
    """Per image [B]. An image whose unchanged prediction is nowhere positive has NaN."""

    error: Tensor  # times 100
    floored: Tensor  # share of pixels at which one of the two predictions was lifted to the floor


def cosine_degradation(pruned: Tensor, full: Tensor) -> Tensor:
    """100 (1 - cos) of embeddings [B, M] -> [B].

    As 50 |a/|a| - b/|b||^2: 1 - cos itself loses all digits where the two are nearly parallel.
    """
    a, b = (_unit(values) for values in _pair(pruned, full))
    return 50 * (a - b).square().sum(1)


def relative_l2(pruned: Tensor, full: Tensor) -> Tensor:
    """100 |a - b| / |b| of outputs [B, ...] -> [B]."""
    a, b = _pair(pruned, full)
    return 100 * torch.linalg.vector_norm(a - b, dim=1) / torch.linalg.vector_norm(b, dim=1)


def silog(pruned: Tensor, full: Tensor, *, weight: float = 1.0) -> SilogErrors:
    """The scale-invariant log error of depths [B, ...]; ``weight`` is lambda, 1: a common factor is no error at all."""
    if not 0 <= weight <= 1:
        raise PullbackError(f"weight: expected lambda between 0 and 1, got {weight}.")
    a, b = _pair(pruned, full)
    floor = LOG_FLOOR * _middle(b)
    d = a.maximum(floor).log() - b.maximum(floor).log()
    mean = d.mean(1)
    spread = (d - mean[:, None]).square().mean(1)  # mean d^2 - (mean d)^2 without its cancellation
    floored = ((a < floor) | (b < floor)).double().mean(1)
    return SilogErrors(100 * (spread + (1 - weight) * mean.square()).sqrt(), floored)


def _middle(depth: Tensor) -> Tensor:
    """The median [B, 1] of depths [B, M]; where most pixels are not positive, the median of those that are."""
    median = depth.median(1, keepdim=True).values
    positive = depth.where(depth > 0, torch.nan).nanmedian(1, keepdim=True).values
    return torch.where(median > 0, median, positive)


def _unit(values: Tensor) -> Tensor:
    return values / torch.linalg.vector_norm(values, dim=1, keepdim=True)


def _pair(pruned: Tensor, full: Tensor) -> tuple[Tensor, Tensor]:
    """Both as float64 [B, M]."""
    if pruned.shape != full.shape or pruned.ndim < 2:
        raise ShapeError(
            f"pruned, full: expected one shape [B, ...], got {list(pruned.shape)} and {list(full.shape)}. Compare the "
            "outputs of the same images; a pruned dense model gives the full grid."
        )
    return pruned.double().flatten(1), full.double().flatten(1)


@dataclass(frozen=True)
class DepthErrors:
    """Of the valid pixels of each image [B]; an image without any has NaN."""

    abs_rel: Tensor  # mean |d - d*| / d*
    delta1: Tensor  # share with max(d / d*, d* / d) < 1.25


def depth_errors(prediction: Tensor, truth: Tensor, valid: Tensor, *, median_scaling: bool) -> DepthErrors:
    """[B, H, W] each. ``median_scaling`` multiplies each prediction by median(d*) / median(d), as is usual where the
    scale of a scene cannot be seen."""
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
