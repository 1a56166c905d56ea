"""Probes of the geometry tests, and the dense truth about them by plain autodiff and a plain SVD."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

import pullback as pb
from helpers.families import seeded_vit
from pullback.operators import differentiable_attention
from pullback.probes import ProbeMap
from pullback.tokens import TokenLayout


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@lru_cache
def seeded(decoder: str, layer: int) -> ProbeMap:
    return load_seeded(decoder, layer)


def load_seeded(decoder: str | Callable[[Tensor], Tensor], layer: int = 4, **options: object) -> ProbeMap:
    return pb.load_probe(seeded_vit(), decoder=decoder, layer=layer, **options)


def random_images(batch: int = 3, size: tuple[int, int] = (56, 56), seed: int = 0) -> Tensor:
    return normal(batch, 3, *size, seed=seed)


@dataclass(frozen=True)
class FunctionProbe:
    """Any function [B, N, D] -> [B, ...] as a probe; "images" [B, 1, N, D] are the features themselves."""

    function: Callable[[Tensor], Tensor]
    layers: tuple[int, ...] = (0,)
    name: str = "function"
    layer: int = 0

    def features(self, images: Tensor) -> Tensor:
        return images.flatten(1, 2)

    def token_layout(self, features: Tensor) -> TokenLayout:
        return TokenLayout(1, (1, features.shape[1] - 1))

    def __call__(self, features: Tensor) -> Tensor:
        return self.function(features)


def with_singular_values(sigma: list[float], tokens: int, width: int, rows: int, seed: int = 0) -> FunctionProbe:
    """A linear probe with these singular values."""
    left = torch.linalg.qr(normal(rows, len(sigma), seed=seed)).Q
    right = torch.linalg.qr(normal(tokens * width, len(sigma), seed=seed + 1)).Q
    matrix = (left * torch.tensor(sigma, dtype=torch.float64)) @ right.T
    return FunctionProbe(lambda x: x.flatten(1) @ matrix.T)


@dataclass(frozen=True)
class Truth:
    """Of B samples, by definition."""

    jacobian: Tensor  # [B, M, N, D]

    @property
    def svd(self) -> tuple[Tensor, Tensor]:
        """Singular values [B, p] and right vectors [B, p, N, D]."""
        _, values, right = torch.linalg.svd(self.jacobian.flatten(2), full_matrices=False)
        return values, right.unflatten(2, self.jacobian.shape[2:])

    @property
    def energies(self) -> Tensor:
        return self.svd[0].square()

    def kappa(self, rank: int) -> Tensor:
        return self.energies[:, :rank].sum(1) / self.energies.sum(1)

    def effective_rank(self, rank: int | None = None) -> Tensor:
        shares = self.energies[:, :rank] / self.energies[:, :rank].sum(1, keepdim=True)
        shares = shares.clamp_min(1e-300)
        return (-(shares * shares.log()).sum(1)).exp()

    def cv(self, rank: int, skip: int = 0) -> Tensor:
        """Over tokens skip, skip + 1, ..."""
        norms = self.svd[1][:, :rank, skip:].square().sum(-1).sqrt()
        count = norms.shape[-1]
        mean = norms.sum(-1) / count
        variance = (norms - mean[..., None]).square().sum(-1) / (count - 1)
        return (variance.sqrt() / mean).mean(1)

    def rank_for(self, share: float) -> list[int]:
        captured = self.energies.cumsum(1) / self.energies.sum(1, keepdim=True)
        return [int((row < share).sum()) + 1 for row in captured]


def truth_of(probe, images: Tensor) -> Truth:
    features = probe.features(images)
    parts = []
    for i in range(len(features)):
        one = features[i : i + 1]
        function = probe.bind(one) if isinstance(probe, ProbeMap) else probe
        with differentiable_attention():
            jacobian = torch.func.jacrev(function)(one.as_subclass(Tensor))
        parts.append(jacobian.reshape(-1, *features.shape[1:]))
    return Truth(torch.stack(parts))
