"""The low-rank-plus-floor metric g = eps I + U diag(lam) U^T with orthonormal U (`eq:spn`), never formed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pullback.checks import finite_number, of_kind
from pullback.errors import PullbackError, ShapeError


@dataclass(frozen=True)
class LowRankMetric:
    """g on feature maps [N, D] of B samples: modes [B, r, N, D] orthonormal, energies [B, r] >= 0, floor eps >= 0."""

    modes: Tensor
    energies: Tensor
    floor: float = 0.0

    def __post_init__(self) -> None:
        for values in (self.modes, self.energies):
            of_kind("modes, energies", values, Tensor, "tensors [B, r, N, D] and [B, r]", ShapeError)
        if self.modes.ndim != 4 or self.modes.shape[:2] != self.energies.shape:
            raise ShapeError(
                "modes, energies: expected [B, r, N, D] and [B, r], got "
                f"{list(self.modes.shape)} and {list(self.energies.shape)}."
            )
        finite_number("floor", self.floor, least=0, expected="a number >= 0")

    def __repr__(self) -> str:
        batch, rank, tokens, dim = self.modes.shape
        where = f"batch of {batch}, {tokens} tokens of width {dim}"
        return f"LowRankMetric(rank {rank}, {where}, floor {self.floor:g}, on {self.modes.device})"

    def coordinates(self, v: Tensor) -> Tensor:
        """U^T v: [B, N, D] -> [B, r]."""
        self._check(v)
        return torch.einsum("brnd,bnd->br", self.modes, v)

    def __matmul__(self, v: Tensor) -> Tensor:
        """g v = eps v + U (lam * U^T v), in O(N D r)."""
        return self._combine(self.energies * self.coordinates(v)) + self.floor * v

    def solve(self, w: Tensor) -> Tensor:
        """g^-1 w by Woodbury: (w - U (lam / (eps + lam) * U^T w)) / eps, since U^T U = I."""
        if self.floor == 0:
            raise PullbackError("floor: solve needs floor > 0, without it g is singular. Build the metric with one.")
        shrink = self.energies / (self.floor + self.energies)
        return (w - self._combine(shrink * self.coordinates(w))) / self.floor

    def squared_norm(self, v: Tensor) -> Tensor:
        """v^T g v: [B, N, D] -> [B]."""
        return (self.energies * self.coordinates(v).square()).sum(1) + self.floor * v.square().sum((1, 2))

    def distance(self, a: Tensor, b: Tensor) -> Tensor:
        """sqrt((a-b)^T g (a-b)): the first-order change of the task's output between two feature maps."""
        self._check(a)
        self._check(b)
        return self.squared_norm(a - b).sqrt()

    def importance(self) -> Tensor:
        """sqrt(sum_j lam_j |u_j^(t)|^2) per token, `eq:imp_target`: [B, N]. The isotropic floor is left out."""
        return torch.einsum("br,brnd->bn", self.energies, self.modes.square()).clamp_min(0).sqrt()

    def token_factors(self) -> Tensor:
        """sqrt(lam_j) u_j^(t) as [B, N, r, D]: the metric of token t alone is Q_t = factor^T factor (`eq:dtask`)."""
        return torch.einsum("br,brnd->bnrd", self.energies.sqrt(), self.modes)

    def token_blocks(self) -> Tensor:
        """The diagonal blocks Q_t + eps I as [B, N, D, D]; quadratic in D, for looking and for tests."""
        factors = self.token_factors()
        eye = torch.eye(self.modes.shape[-1], dtype=self.modes.dtype, device=self.modes.device)
        return factors.mT @ factors + self.floor * eye

    def _combine(self, weights: Tensor) -> Tensor:
        return torch.einsum("br,brnd->bnd", weights, self.modes)

    def _check(self, v: Tensor) -> None:
        expected = (self.modes.shape[0], *self.modes.shape[2:])
        of_kind("v", v, Tensor, f"a feature map {list(expected)}", ShapeError)
        if tuple(v.shape) != expected:
            raise ShapeError(f"v: expected a feature map {list(expected)}, got {list(v.shape)}.")
