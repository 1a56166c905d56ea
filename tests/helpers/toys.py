"""Small networks, data and probes of the learning tests, seeded, and the dense truth about the probes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pullback.learning.head import ImportanceHead
from pullback.learning.spn import SpectralPullbackNetwork
from pullback.learning.train_head import HeadExamples, HeadTask
from pullback.learning.train_spn import RandNLA, SpnExamples, SpnTask
from pullback.operators import LowRankMetric
from pullback.tokens import TokenLayout

TOKENS, DIM, RANK = 6, 8, 3


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed), dtype=dtype)


def orthonormal(batch: int, rank: int, tokens: int = TOKENS, dim: int = DIM, seed: int = 0) -> Tensor:
    """Modes [batch, rank, tokens, dim] in float64."""
    return torch.linalg.qr(normal(batch, tokens * dim, rank, seed=seed)).Q.mT.unflatten(-1, (tokens, dim))


def metric_of(batch: int, rank: int = RANK, seed: int = 0, floor: float = 0.0) -> LowRankMetric:
    """A random one with descending energies, float64."""
    energies = normal(batch, rank, seed=seed + 1).exp().sort(descending=True).values
    return LowRankMetric(orthonormal(batch, rank, seed=seed), energies, floor)


def tiny_head(seed: int = 0, dim: int = DIM, width: int = 16) -> ImportanceHead:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return ImportanceHead(dim, width, heads=2)


def tiny_spn(seed: int = 0, dim: int = DIM, rank: int = RANK, width: int = 16, **changes) -> SpectralPullbackNetwork:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return SpectralPullbackNetwork(dim, rank, width, 2, **changes)


@dataclass(frozen=True)
class PlainProbe:
    """Any function [B, N, D] -> [B, ...] whose "images" are the features themselves."""

    function: Callable[[Tensor], Tensor]
    name: str = "plain"
    layer: int = 0

    def features(self, images: Tensor) -> Tensor:
        return images

    def token_layout(self, features: Tensor) -> TokenLayout:
        return TokenLayout(1, (1, features.shape[1] - 1))

    def __call__(self, features: Tensor) -> Tensor:
        return self.function(features)


def linear_probe(matrix: Tensor) -> PlainProbe:
    return PlainProbe(lambda features: features.flatten(1) @ matrix.to(features).T)


def with_singular_values(values: Tensor, inputs: int = TOKENS * DIM, seed: int = 0) -> Tensor:
    """A matrix [len(values), inputs] with these singular values."""
    left = torch.linalg.qr(normal(len(values), len(values), seed=seed)).Q
    return (left * values.double()) @ torch.linalg.qr(normal(inputs, len(values), seed=seed + 1)).Q.T


def bent_probe(outputs: int = 9, tokens: int = TOKENS, dim: int = DIM) -> PlainProbe:
    """Another Jacobian at every feature map, with singular values that fall off."""
    matrix = with_singular_values(10 * 0.7 ** torch.arange(outputs), tokens * dim)
    return PlainProbe(lambda features: torch.tanh(0.3 * features).flatten(1) @ matrix.to(features).T)


def jacobians(probe: Callable[[Tensor], Tensor], features: Tensor) -> Tensor:
    """[B, M, N D] by plain reverse mode, one sample at a time."""
    return torch.stack(
        [torch.func.jacrev(lambda x: probe(x[None]).flatten())(sample).flatten(1) for sample in features]
    )


def leading(jacobian: Tensor, rank: int, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Singular values [B, rank] and right vectors [B, rank, N, D] of dense [B, M, N D]."""
    _, values, right = torch.linalg.svd(jacobian, full_matrices=False)
    return values[:, :rank], right[:, :rank].unflatten(-1, shape)


def examples_of(probe: Callable[[Tensor], Tensor], features: Tensor, rank: int = RANK) -> SpnExamples:
    """Held-out examples with the dense truth."""
    dense = jacobians(probe, features)
    values, modes = leading(dense, rank, features.shape[1:])
    return SpnExamples(lambda rows: features[rows], modes, values, dense.square().sum((1, 2)))


def head_task(images: int = 24, dtype: torch.dtype = torch.float32) -> HeadTask:
    """The target is a function of the features; two token counts."""
    sets = []
    for number, tokens in enumerate((TOKENS, TOKENS + 3, TOKENS)):
        features = normal(images, tokens, DIM, seed=number, dtype=dtype)
        sets.append(HeadExamples.kept(features, rule(features)))
    return HeadTask(sets[:2], sets[2], batch=10)


def rule(features: Tensor) -> Tensor:
    """Positive scores [n, N] that depend on the token and on the mean of all tokens."""
    direction = normal(features.shape[-1], seed=99, dtype=features.dtype)
    with_mean = (features * features.mean(1, keepdim=True)).sum(-1)
    return (0.5 * features @ direction + 0.3 * with_mean).exp()


def spn_task(images: int = 10, dtype: torch.dtype = torch.float32, **supervision) -> SpnTask:
    """RandNLA supervision on a probe with another Jacobian at every image."""
    probe = bent_probe()
    features = normal(images + 4, TOKENS, DIM, seed=5, dtype=dtype)
    held_out = examples_of(probe, features[images:])
    return SpnTask(lambda rows: features[rows], images, RandNLA(probe, **supervision), held_out, batch=3)
