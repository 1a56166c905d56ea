"""How the recipes move weights: Muon and AdamW, and the gradients of a step, as they are or replayed as a CUDA graph.

A small network is thousands of short kernels a step, and an H200 waits for Python longer than it computes. Matrices of
one shape that are orthogonalised together, and a graph of forward and backward, one for each shape of the examples,
take Python out of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pullback.learning.fit import StepConfig, adamw

Losses = Callable[..., dict[str, Tensor]]  # of the examples' tensors; "loss" is differentiated
Gradients = Callable[[Losses, Sequence[nn.Parameter], Sequence[Tensor]], dict[str, Tensor]]
_POLYNOMIAL = (3.4445, -4.7750, 2.0315)  # of Newton-Schulz steps that take singular values to about 1
_NEWTON_SCHULZ_STEPS = 5
_WARM_UP = 3  # runs before a capture, in which compilers and cuDNN make their choices


def muon_and_adamw(
    network: nn.Module, matrices: Sequence[nn.Parameter], config: StepConfig
) -> list[torch.optim.Optimizer]:
    """Muon (orthogonalised momentum) for the matrices of the blocks, if any, AdamW for everything else.

    With tiny-scenes, after 400 steps on an H200, AdamW alone (1e-3) had an AbsRel of 0.133, both together (3e-3) 0.097.
    """
    own = {id(p) for p in matrices}
    rest = [p for p in network.parameters() if id(p) not in own]
    own_rule = adamw(rest, config, fused=rest[0].device.type == "cuda")
    if not matrices:
        return [own_rule]
    # Muon's step has the size that AdamW's would have, so both share one learning rate
    return [StackedMuon(matrices, config.learning_rate, weight_decay=config.weight_decay), own_rule]


class StackedMuon(torch.optim.Optimizer):
    """Muon with matrices of one shape orthogonalised together.

    m <- mu m + (1 - mu) g,   u = (1 - mu) g + mu m,   w <- (1 - lr wd) w - 0.2 lr sqrt(max(rows, columns)) orth(u)

    `torch.optim.Muon` takes one matrix after the other, some forty short kernels each. Its rule, coefficients and
    scaling ("match_rms_adamw") are the same.
    """

    def __init__(self, matrices: Iterable[Tensor], lr: float, *, weight_decay: float, momentum: float = 0.95) -> None:
        super().__init__(list(matrices), {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise ValueError("closure: expected none; call backward() before step().")
        for group in self.param_groups:
            shapes: dict[torch.Size, list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    shapes.setdefault(parameter.shape, []).append(parameter)
            for shape, own in shapes.items():
                update = orthogonalised(self._momentum(own, group["momentum"])).to(own[0].dtype)
                torch._foreach_mul_(own, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(own, update.unbind(), alpha=-0.2 * group["lr"] * math.sqrt(max(shape)))

    def _momentum(self, own: list[Tensor], momentum: float) -> Tensor:
        """Nesterov's, [n, rows, columns]."""
        gradients = [parameter.grad for parameter in own if parameter.grad is not None]
        for parameter in own:
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        buffers = [self.state[parameter]["momentum_buffer"] for parameter in own]
        torch._foreach_lerp_(buffers, gradients, 1 - momentum)
        return torch.stack(torch._foreach_lerp(gradients, buffers, momentum))


def orthogonalised(matrices: Tensor) -> Tensor:
    """U V^T of matrices U S V^T [n, rows, columns], roughly: singular values between 0.7 and 1.2, in bfloat16."""
    a, b, c = _POLYNOMIAL
    x = matrices.bfloat16()
    turned = x.shape[1] > x.shape[2]
    x = x.mT if turned else x
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp_min(1e-7)
    for _ in range(_NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if turned else x


def eager_gradients(
    losses: Losses, parameters: Sequence[nn.Parameter], examples: Sequence[Tensor]
) -> dict[str, Tensor]:
    """Fill every parameter's ``grad`` and return the losses. Gradients stay where they are in memory, so that a graph
    can hold them."""
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
