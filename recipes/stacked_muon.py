"""Muon with matrices of one shape orthogonalised together.

m <- mu m + (1 - mu) g,   u = (1 - mu) g + mu m,   w <- (1 - lr wd) w - 0.2 lr sqrt(max(rows, columns)) orth(u)

`torch.optim.Muon` takes one matrix after the other, some forty short kernels each; small networks have dozens of equal
ones, and a GPU waits for Python most of that time. Its rule, coefficients and scaling ("match_rms_adamw") are the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

_POLYNOMIAL = (3.4445, -4.7750, 2.0315)  # of Newton-Schulz steps that take singular values to about 1
_STEPS = 5


class StackedMuon(torch.optim.Optimizer):
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
    for _ in range(_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if turned else x
