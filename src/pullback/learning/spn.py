"""The Spectral Pullback Network (`eq:spn`): the rank-r task metric, predicted from features alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pullback.checks import of_kind, whole_number
from pullback.errors import ModelError, RankError, ShapeError
from pullback.learning.head import attend, inverse_softplus, standardise_inputs
from pullback.learning.pretrained import Origin, Pretrained
from pullback.operators import LowRankMetric


@dataclass(frozen=True)
class SpnConfig:
    """The size of a network, what it was trained for, and how well it does."""

    dim: int
    rank: int = 20
    width: int = 256
    heads: int = 4
    blocks: int = 2
    floor: float = 1e-3
    latent: tuple[int, int] | None = None  # (tokens, dim) of the space that U lives in; None: the features' own
    origin: Origin = field(default_factory=Origin)
    scores: Mapping[str, float] = field(default_factory=dict)
    tokens: int | None = None  # of the constant subspace that predictions are added to, where there is one


class SpectralPullbackNetwork(Pretrained):
    """A network that predicts the rank-r task metric eps I + U diag(lambda) U^T of a feature map, without any Jacobian.

    Linear D -> H, pre-norm attention blocks, per token D r coordinates, orthonormalised over all tokens together;
    the energies from the pooled tokens through an MLP and a Softplus. With ``latent`` = (K, d), U lives in R^(K d):
    K learned tokens join the sequence and carry it. `start_at` makes a network of deviations from one subspace.
    """

    kind, title = "spectral-pullback-network", "Spectral Pullback Network"
    predicts_metric = True

    def __init__(
        self,
        dim: int,
        rank: int = 20,
        width: int = 256,
        heads: int = 4,
        *,
        blocks: int = 2,
        floor: float = 1e-3,
        latent: tuple[int, int] | None = None,
        config: SpnConfig | None = None,
    ) -> None:
        super().__init__()
        for name, size in {"dim": dim, "rank": rank, "width": width, "heads": heads, "blocks": blocks}.items():
            whole_number(name, size, error=RankError if name == "rank" else ModelError)
        if width % heads:
            raise ModelError(f"width, heads: expected width to be a multiple of heads, got {width} and {heads}.")
        self.config = config or SpnConfig(dim, rank, width, heads, blocks, floor, latent)
        self.project = nn.Linear(dim, width)
        self.carriers = nn.Parameter(0.02 * torch.randn(latent[0], width)) if latent else None
        self.blocks = nn.ModuleList([AttentionBlock(width, heads) for _ in range(blocks)])
        self.norm = nn.LayerNorm(width)
        self.modes = nn.Linear(width, (latent[1] if latent else dim) * rank)
        self.energies = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, rank))
        tokens = self.config.tokens
        self.base = None if tokens is None else nn.Parameter(torch.zeros(tokens, latent[1] if latent else dim, rank))

    @classmethod
    def config_from_dict(cls, stored: Mapping[str, Any]) -> SpnConfig:
        names = ("dim", "rank", "width", "heads", "blocks", "floor")
        latent = None if stored["latent"] is None else (int(stored["latent"][0]), int(stored["latent"][1]))
        origin, scores = Origin.from_dict(stored["origin"]), dict(stored["scores"])
        sizes = {name: stored[name] for name in names}
        return SpnConfig(**sizes, latent=latent, origin=origin, scores=scores, tokens=stored.get("tokens"))

    @classmethod
    def from_config(cls, config: SpnConfig) -> SpectralPullbackNetwork:
        sizes = (config.dim, config.rank, config.width, config.heads)
        return cls(*sizes, blocks=config.blocks, floor=config.floor, latent=config.latent, config=config)

    def forward(self, features: Tensor) -> LowRankMetric:
        """Predict modes [B, r, N, D], or [B, r, K, d] in a latent space, and energies [B, r] of features [B, N, D]."""
        of_kind("features", features, Tensor, f"[B, N, {self.config.dim}]", ShapeError)
        if features.ndim != 3 or features.shape[-1] != self.config.dim:
            raise ShapeError(f"features: expected [B, N, {self.config.dim}], got {list(features.shape)}.")
        x = self.project(features.to(self.project.weight.dtype))
        if self.carriers is not None:
            x = torch.cat([self.carriers.expand(len(x), -1, -1), x], 1)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        energies = F.softplus(self.energies(x.mean(1)).float())
        carriers = x if self.carriers is None else x[:, : len(self.carriers)]
        coordinates = self.modes(carriers).unflatten(-1, (-1, self.config.rank))  # [B, K, d, r]
        if coordinates.shape[1] * coordinates.shape[2] < self.config.rank:
            raise RankError(
                f"rank: expected at most {coordinates.shape[1]} tokens x {coordinates.shape[2]} channels, got "
                f"{self.config.rank}: there are no more orthonormal modes. Use larger images or a lower rank."
            )
        if self.base is not None:
            if len(self.base) != coordinates.shape[1]:
                raise ShapeError(
                    f"features: expected {len(self.base)} tokens, as many as the subspace has that this network starts "
                    f"at, got {coordinates.shape[1]}. Train one for images of this size."
                )
            coordinates = coordinates + self.base
        modes = orthonormal_columns(coordinates.flatten(1, 2).float()).mT  # [B, r, K d]
        return LowRankMetric(modes.unflatten(-1, coordinates.shape[1:3]), energies, self.config.floor)

    @torch.no_grad()
    def start_at(self, subspace: Tensor) -> SpectralPullbackNetwork:
        """Predict deviations from one subspace [r, N, D], and none at first: V_1 begins where a constant ends.

        Beyond the paper. Features of many ViTs hardly tell where their token is, and modes depend on it; a constant
        knows, a network as published has to find out. It is bound to N tokens from then on. Of a network with a latent
        space the subspace is [r, K, d], and features may still have any number of tokens.
        """
        own = self.config
        expected = ("N", own.dim) if own.latent is None else own.latent
        fits = subspace.ndim == 3 and len(subspace) == own.rank
        fits = fits and all(side in ("N", size) for side, size in zip(expected, subspace.shape[1:], strict=True))
        if not fits:
            raise ShapeError(
                f"subspace: expected [{own.rank}, {expected[0]}, {expected[1]}], as this network predicts modes"
                f"{'' if own.latent is None else f' in its latent space of {own.latent}'}, got {list(subspace.shape)}."
            )
        tokens, dim = subspace.shape[1:]
        # entries of about 1, like those that the network adds, so that one learning rate suits both
        base = subspace.permute(1, 2, 0) * (tokens * dim) ** 0.5
        self.base = nn.Parameter(base.to(self.modes.weight).contiguous())
        nn.init.zeros_(self.modes.weight)
        nn.init.zeros_(self.modes.bias)
        return self.describe(tokens=tokens)

    @torch.no_grad()
    def start_from(self, features: Tensor, singular_values: Tensor) -> SpectralPullbackNetwork:
        """Fold the spread of these features [n, N, D] into the first layer and the mean log energies into the last."""
        standardise_inputs(self.project, features)
        level = singular_values.double().square().clamp_min(1e-30).log().mean(0).exp()
        cast(nn.Linear, self.energies[-1]).bias.copy_(inverse_softplus(level))
        return self


class AttentionBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.first, self.second = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(attend(self.qkv(self.norm1(x)), self.heads))
        return x + self.second(F.gelu(self.first(self.norm2(x))))


def orthonormal_columns(columns: Tensor) -> Tensor:
    """Return the Q of a QR of columns [B, n, r], differentiable: Q = X R^-1 with X^T X = R^T R, done twice.

    A batched QR of tall blocks runs column by column on a GPU; this is two products and a small Cholesky. They are in
    float64 whatever the columns are: a Gram matrix squares their condition, and autocast leaves float64 alone. Columns
    that depend on each other to the last digit give no NaN, but modes that are not orthonormal.
    """
    basis = columns.double()
    eye = torch.eye(columns.shape[-1], dtype=basis.dtype, device=basis.device)
    for _ in range(2):
        length = torch.linalg.vector_norm(basis.detach(), dim=1, keepdim=True)
        basis = basis / torch.where(length > 0, length, 1)  # Q does not change, the Gram matrix has a unit diagonal
        lower = torch.linalg.cholesky(basis.mT @ basis + 1e-12 * eye)
        basis = basis @ torch.linalg.solve_triangular(lower, eye.expand_as(lower), upper=False).mT
    return basis.to(columns.dtype)
