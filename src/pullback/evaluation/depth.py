"""Errors of predicted depth, per image."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pullback.errors import ShapeError


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
