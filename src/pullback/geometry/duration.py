"""How long a diagnosis or targets will take, from one timed product of each kind."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

import torch
from torch import Tensor

from pullback.geometry.spectrum import Probe, features_of
from pullback.operators import JacobianOperator, LinearOperator
from pullback.operators.execution import is_too_large
from pullback.randnla.modes import planned_products
from pullback.runs.progress import Progress, expectation

_SAMPLES, _COLUMNS = {"cpu": 1, "cuda": 16}, {"cpu": 8, "cuda": 64}
"""Of the timed product: few, since they are thrown away, but enough to cost as much each as in the run."""


def announce(
    progress: Progress,
    work: Mapping[str, tuple[Probe, int]],
    images: Tensor,
    rank: int,
    method: str = "auto",
    *,
    unit: str = "image",
    precision: str = "float32",
    with_effective_rank: bool = True,
) -> None:
    """Say how long some work will take, if that is long: a probe and how many images are left for it, by name.

    ``images`` are of the shape of all of them, at most a few are used; the rest is as in `seconds_per_sample`.
    """
    progress.stage("timing one product")
    each, place = {}, "CPU"
    for name, (probe, _) in work.items():
        features = features_of(probe, images[: _SAMPLES.get(probe.device.type, 1)], normalized=True)
        place = "GPU" if features.device.type == "cuda" else "CPU"
        each[name] = seconds_per_sample(
            probe, features, rank, method, precision=precision, with_effective_rank=with_effective_rank
        )
    line = expectation(each, {name: left for name, (_, left) in work.items()}, unit, place)
    if line is not None:
        progress.note(line)


def seconds_per_sample(
    probe: Probe,
    features: Tensor,
    rank: int,
    method: str = "auto",
    *,
    precision: str = "float32",
    with_effective_rank: bool = True,
) -> float:
    """Estimate how long a sample with such features [B, N, D] takes; NaN where memory does not suffice to find out.

    ``with_effective_rank``: as a diagnosis needs it; targets do not. Everything but the products is left out.
    """
    try:
        op = JacobianOperator(probe, features[: _SAMPLES.get(features.device.type, 1)], precision=precision)
        planned = planned_products(
            method, op.rows, op.cols, rank, itemsize=op.dtype.itemsize, with_effective_rank=with_effective_rank
        )
        jvps, vjps = _seconds_per_column(op, planned.jvp), _seconds_per_column(op.T, planned.vjp)
    except (RuntimeError, MemoryError) as error:
        if not is_too_large(error):
            raise
        return math.nan
    return (planned.jvp * jvps + planned.vjp * vjps) / op.batch


def _seconds_per_column(op: LinearOperator, planned: int) -> float:
    if planned == 0:
        return 0.0
    count = min(planned, _COLUMNS.get(op.device.type, 8))
    columns = torch.ones(op.batch, op.cols, count, dtype=op.dtype, device=op.device)
    op @ columns[..., :1]  # the first product also allocates
    _wait_for(op.device)
    begun = time.perf_counter()
    op @ columns
    _wait_for(op.device)
    return (time.perf_counter() - begun) / count


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
