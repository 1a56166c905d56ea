"""What a call costs: floating-point operations by torch's counter, and wall-clock time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pullback.checks import shown, whole_number
from pullback.errors import PullbackError

_WARM_UP = 2


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call: the median over the rounds, and the middle half of them."""

    median: float
    low: float  # a quarter of the rounds was faster
    high: float  # a quarter was slower
    rounds: int


@torch.no_grad()
def flops(function: Callable[[], Any]) -> int:
    """Count the floating-point operations of one call, a multiplication and an addition counted as two.

    With attention written out: torch's counter does not see the fused kernels of the CPU at all. Kernels of our own
    step aside for it.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    _check_function(function)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        function()
    return int(counter.get_total_flops())


def milliseconds(function: Callable[[], Any], device: torch.device | str, rounds: int = 20) -> Timing:
    """Time one call, after two that only warm up; a GPU has finished before the clock is read."""
    return race([function], device, rounds)[0]


def race(functions: Sequence[Callable[[], Any]], device: torch.device | str, rounds: int = 20) -> list[Timing]:
    """Time several calls in turn, round by round: a machine that slows down, slows down all of them."""
    return [_timing(column) for column in laps(functions, device, rounds).T]


@torch.no_grad()
def laps(functions: Sequence[Callable[[], Any]], device: torch.device | str, rounds: int = 20) -> np.ndarray:
    """Return the milliseconds of a `race` one by one [rounds, functions], to compare calls within each round."""
    whole_number("rounds", rounds, expected="at least 1")
    for function in functions:
        _check_function(function)
    place = torch.device(device)
    for function in functions:
        for _ in range(_WARM_UP):
            function()
    return np.array([[_once(function, place) for function in functions] for _ in range(rounds)])


def _check_function(function: Any) -> None:
    if not callable(function):
        raise PullbackError(f"function: expected one without arguments, lambda: model(images), got {shown(function)}.")


def _once(function: Callable[[], Any], device: torch.device) -> float:
    _finish(device)
    begun = time.perf_counter()
    function()
    _finish(device)
    return 1e3 * (time.perf_counter() - begun)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _timing(rounds: np.ndarray) -> Timing:
    low, median, high = np.quantile(rounds, [0.25, 0.5, 0.75])
    return Timing(float(median), float(low), float(high), len(rounds))
