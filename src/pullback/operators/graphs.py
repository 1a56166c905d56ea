"""CUDA graphs for products of a fixed shape: record the kernels once, replay them without launch cost."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class CapturedFunction:
    """``function`` on inputs shaped like ``example``. Each call copies the input in and the output out."""

    def __init__(self, function: Callable[[Tensor], Tensor], example: Tensor) -> None:
        self._input = example.clone()
        side = torch.cuda.Stream(example.device)
        side.wait_stream(torch.cuda.current_stream(example.device))
        with torch.cuda.stream(side):  # libraries choose their kernels and workspaces before the recording
            for _ in range(2):
                function(self._input)
        torch.cuda.current_stream(example.device).wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._output = function(self._input)

    def __call__(self, value: Tensor) -> Tensor:
        self._input.copy_(value)
        self._graph.replay()
        return self._output.clone()
