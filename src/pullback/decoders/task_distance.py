"""Task distances: maps y -> d(y) after which the Euclidean distance of two outputs is the task's own.

A task distance delta with delta(a, b) = |d(a) - d(b)| is composed with the decoder, and J becomes the Jacobian of
d(decoder). Users may pass any function [B, ...] -> [B, ...]; docs/guide/probes.md shows LPIPS as one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from pullback.errors import DecoderError

TaskDistance = Callable[[Tensor], Tensor]

# Depth heads end in a ReLU, so log needs a floor: this share of the median of each image's positive outputs. Pixels
# under it are constant and carry no sensitivity.
LOG_FLOOR = 1e-3


def cosine(output: Tensor) -> Tensor:
    """y / |y|: then |a - b|^2 = 2 (1 - cos(a, b))."""
    return F.normalize(output.flatten(1), dim=1)


def log(output: Tensor) -> Tensor:
    """log max(y, floor), the floor `LOG_FLOOR` times the median of the image's positive outputs, held constant."""
    flat = output.flatten(1)
    positive = flat.detach().where(flat.detach() > 0, torch.nan)
    floor = (LOG_FLOOR * positive.nanmedian(1, keepdim=True).values).nan_to_num(0.0).clamp_min(1e-12)
    return flat.maximum(floor).log()


def silog(output: Tensor) -> Tensor:
    """The scale-invariant log distance (SILog with lambda = 1): log depth without its mean, over sqrt(M)."""
    logs = log(output)
    return (logs - logs.mean(1, keepdim=True)) / logs.shape[1] ** 0.5


DISTANCES: dict[str, TaskDistance] = {"cosine": cosine, "log": log, "silog": silog}


def task_distance(choice: str | TaskDistance | None) -> TaskDistance | None:
    if choice is None or callable(choice):
        return choice
    if choice not in DISTANCES:
        raise DecoderError(f"distance: expected one of {', '.join(DISTANCES)}, a function or None, got {choice!r}.")
    return DISTANCES[choice]
