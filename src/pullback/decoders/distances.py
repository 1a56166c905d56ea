"""What is measured of an output: a task distance behind the decoder, or an output metric in front of the Jacobian.

A task distance delta with delta(a, b) = |d(a) - d(b)| is given by its map y -> d(y), which is composed with the
decoder, and J becomes the Jacobian of d(decoder). Users may pass any function [B, ...] -> [B, ...];
docs/guide/probes.md shows LPIPS as one.

An output metric H = L L^T makes the pullback J^T H J, which is the Euclidean one of L^T J. (The paper writes LJ, which
is right only for symmetric L: with H = L L^T, J^T H J = (L^T J)^T (L^T J).) L is any M x k factor, so H may be
semidefinite. It may depend on the output at the base point, is evaluated there once per sample and held constant.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from pullback.decoders.decoder import explained
from pullback.decoders.identity import name_of
from pullback.errors import DecoderError
from pullback.registry import OWN_VERSION

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
    return flat.maximum(_floor(flat.detach())).log()


def _floor(flat: Tensor) -> Tensor:
    """Return the floor of each image [B, 1], from its outputs [B, M]."""
    positive = flat.where(flat > 0, torch.nan)
    return (LOG_FLOOR * positive.nanmedian(1, keepdim=True).values).nan_to_num(0.0).clamp_min(1e-12)


def silog(output: Tensor) -> Tensor:
    """The scale-invariant log distance (SILog with lambda = 1): log depth without its mean, over sqrt(M)."""
    logs = log(output)
    return (logs - logs.mean(1, keepdim=True)) / logs.shape[1] ** 0.5


DISTANCES: dict[str, TaskDistance] = {"cosine": cosine, "log": log, "silog": silog}
LOGARITHMIC: tuple[TaskDistance, ...] = (log, silog)
for _function in DISTANCES.values():
    vars(_function)["version"] = OWN_VERSION  # what files know them by


def check_distance(distance: TaskDistance | None, output: Tensor, decoder: str) -> None:
    """Refuse the logarithm of a decoder's output [B, ...] that has negative numbers: it would hold them constant.

    Numbers that are nearer to 0 than the floor of `log` count as 0, which the ReLU of a depth head gives.
    """
    if distance not in LOGARITHMIC or not isinstance(output, Tensor):  # the operator explains what is no tensor
        return
    flat = output.detach().flatten(1)
    lowest = flat.amin(1)
    wrong = (lowest < -_floor(flat)[:, 0]).nonzero().flatten()
    if len(wrong):
        name = "log" if distance is log else "silog"
        raise DecoderError(
            f"distance: {name!r} takes the logarithm of outputs such as depth, expected none below 0, but decoder "
            f"{decoder!r} gives {lowest[wrong[0]].item():.3g}. Use 'cosine' for embeddings, or no distance."
        )


def task_distance(choice: str | TaskDistance | None) -> TaskDistance | None:
    """A task distance by name, or the function itself."""
    if choice is None or callable(choice):
        return choice
    if not isinstance(choice, str) or choice not in DISTANCES:
        raise DecoderError(f"distance: expected one of {', '.join(DISTANCES)}, a function or None, got {choice!r}.")
    return DISTANCES[choice]


OutputMetric = Tensor | Callable[[Tensor], Tensor]
"""The factor L itself, [M, k] or [B, M, k], or a function of the base output [B, M] that returns one.

A function object may have a method ``check(decoder, *, distance)`` that refuses decoders, by name, and task distances
that it does not fit (`CameraMetric`); a probe calls it when it is made."""


def check_metric(metric: OutputMetric | None, decoder: str, *, distance: bool) -> None:
    """Let a metric refuse the decoder, or a task distance behind it."""
    if metric is not None and not isinstance(metric, Tensor) and not callable(metric):
        raise DecoderError(f"output_metric: expected a factor L as a tensor, got {type(metric).__name__}.")
    check = getattr(metric, "check", None)
    if check is not None:
        check(decoder, distance=distance)


def factor_at(metric: OutputMetric, output: Tensor) -> Tensor:
    """L [B, M, k] at the base output [B, M]."""
    with explained(f"output_metric: {name_of(metric)} failed on outputs {list(output.shape)}"):
        factor = metric(output.detach()) if callable(metric) else metric
    if not isinstance(factor, Tensor):
        raise DecoderError(f"output_metric: expected a factor L as a tensor, got {type(factor).__name__}.")
    factor = factor.detach().to(output)
    if factor.ndim == 2:
        factor = factor.expand(len(output), *factor.shape)
    if factor.ndim != 3 or factor.shape[:2] != output.shape:
        raise DecoderError(
            f"output_metric: expected L with shape [{output.shape[1]}, k] or {[*output.shape, 'k']}, "
            f"got {list(factor.shape)}."
        )
    if not torch.isfinite(factor).all():
        raise DecoderError("output_metric: the factor L holds NaN or infinity.")
    return factor
