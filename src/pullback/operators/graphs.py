"""CUDA graphs for products of a fixed shape: record the kernels once, replay them without launch cost."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pullback.errors import NumericsError


class CapturedFunction:
    """``function`` on inputs shaped like ``example``. Each call copies the input in and the output out.

    The first replay is compared with an ordinary call, so that nothing the recording may have missed goes unnoticed.
    """

    def __init__(self, function: Callable[[Tensor], Tensor], example: Tensor) -> None:
        self._input = example.clone()
        side = torch.cuda.Stream(example.device)
        side.wait_stream(torch.cuda.current_stream(example.device))
        with torch.cuda.stream(side):  # libraries choose their kernels and workspaces before the recording
            function(self._input)
            expected = function(self._input)
        torch.cuda.current_stream(example.device).wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._output = function(self._input)
        self._check(expected)

    def _check(self, expected: Tensor) -> None:
        self._graph.replay()
        error = (self._output - expected).double().norm() / expected.double().norm().clamp_min(1e-300)
        if not error <= 1e-3:
            raise NumericsError(
                f"capture: the recorded product differs from the ordinary one by {error.item():.1e}, relative. "
                "Pass capture=False to JacobianOperator, and please report it."
            )

    def __call__(self, value: Tensor) -> Tensor:
        self._input.copy_(value)
        self._graph.replay()
        return self._output.clone()
