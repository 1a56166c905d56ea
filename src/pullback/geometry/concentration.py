"""How unevenly task-sensitive directions spread over tokens, and what a random direction would show."""

from __future__ import annotations

import math

from torch import Tensor


def coefficient_of_variation(modes: Tensor, tokens: Tensor | None = None) -> Tensor:
    """CV = mean_j std_t |v_j^(t)| / mean_t |v_j^(t)| (`eq:cv`), std with n-1: modes [B, r, N, D] -> [B].

    ``tokens`` [N] bool restricts t, for instance to the patch tokens.
    """
    norms = modes.norm(dim=-1).double()
    if tokens is not None:
        norms = norms[..., tokens.to(norms.device)]
    return (norms.std(-1) / norms.mean(-1).clamp_min(1e-300)).mean(-1)


def null_cv(dim: int) -> float:
    """The CV of a direction drawn at random: token norms are then chi-distributed with D degrees of freedom.

    About 1/sqrt(2 D): 0.036 at D = 384, 0.026 at D = 768. A measured CV at this value says that the vectors look like
    noise, most likely because they have not converged.
    """
    mean = math.sqrt(2) * math.exp(math.lgamma((dim + 1) / 2) - math.lgamma(dim / 2))
    return math.sqrt(dim - mean**2) / mean
