"""The losses of a step and their gradients, as they are or replayed as a CUDA graph.

A small network is thousands of short kernels a step, and an H200 waits for Python longer than it computes. A graph of
forward and backward, one for each shape of the examples, takes Python out of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Losses = Callable[..., dict[str, Tensor]]  # of the examples' tensors; "loss" is differentiated
Gradients = Callable[[Losses, Sequence[nn.Parameter], Sequence[Tensor]], dict[str, Tensor]]
_WARM_UP = 3  # runs before a capture, in which compilers and cuDNN make their choices


def eager_gradients(
    losses: Losses, parameters: Sequence[nn.Parameter], examples: Sequence[Tensor]
) -> dict[str, Tensor]:
    """Fills every parameter's ``grad``. Gradients stay where they are in memory, so that a graph can hold them."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    torch._foreach_zero_([parameter.grad for parameter in parameters if parameter.grad is not None])
    parts = losses(*examples)
    parts["loss"].backward()
    return {name: part.detach() for name, part in parts.items()}


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    examples: list[Tensor]  # where it reads
    parts: dict[str, Tensor]  # where it writes


class GraphedGradients:
    """`eager_gradients` of one function and its parameters; what comes back is overwritten by the next call."""

    def __init__(self) -> None:
        self._captured: dict[tuple[torch.Size, ...], _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(
        self, losses: Losses, parameters: Sequence[nn.Parameter], examples: Sequence[Tensor]
    ) -> dict[str, Tensor]:
        shapes = tuple(example.shape for example in examples)
        if shapes not in self._captured:
            self._captured[shapes] = self._capture(losses, parameters, [example.clone() for example in examples])
        own = self._captured[shapes]
        for place, example in zip(own.examples, examples, strict=True):
            place.copy_(example)
        own.graph.replay()
        return own.parts

    def _capture(self, losses: Losses, parameters: Sequence[nn.Parameter], examples: list[Tensor]) -> _Captured:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP):
                eager_gradients(losses, parameters, examples)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            parts = eager_gradients(losses, parameters, examples)
        return _Captured(graph, examples, parts)
