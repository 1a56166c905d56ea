"""Losses of the importance head and of the Spectral Pullback Network."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pullback.operators import LowRankMetric

_TINY = torch.finfo(torch.float32).tiny


def conformal_loss(
    scores: Tensor, target: Tensor, *, rank_weight: float = 0.5, shifts: int = 8, generator: torch.Generator
) -> Tensor:
    """mean_t (log h_t - log imp*_t)^2 + w_rank L_rank (`eq:conformal_loss`), scores and target [B, N] > 0."""
    predicted, wanted = scores.clamp_min(_TINY).log(), target.clamp_min(_TINY).log()
    loss = (predicted - wanted).square().mean()
    if rank_weight == 0:
        return loss
    return loss + rank_weight * ranking_loss(predicted, wanted, shifts=shifts, generator=generator)


def ranking_loss(predicted: Tensor, wanted: Tensor, *, shifts: int, generator: torch.Generator) -> Tensor:
    """Logistic loss on the order of random pairs of tokens: log(1 + exp(-sign(w_s - w_t) (p_s - p_t))), values [B, N].

    The paper names a pairwise ranking term and no formula; this is RankNet's (Burges et al. 2005). A random order of
    the tokens is compared with ``shifts`` rotations of itself, so every token is in 2 ``shifts`` pairs.
    """
    tokens = predicted.shape[1]
    order = torch.randperm(tokens, generator=generator).to(predicted.device)
    steps = torch.randperm(max(1, tokens - 1), generator=generator)[:shifts] + 1
    partners = torch.stack([order.roll(int(step)) for step in steps])  # [shifts, N]
    gaps = predicted[:, order][:, None] - predicted[:, partners]
    signs = (wanted[:, order][:, None] - wanted[:, partners]).sign()
    return (F.softplus(-signs * gaps) * signs.abs()).mean()  # equal targets say nothing


def order_loss(scores: Tensor, target: Tensor, *, level_weight: float = 0.1, rank_weight: float = 2.0) -> Tensor:
    """Not in the paper: for those who want the order above all. scores and target [B, N] > 0, d = log h - log imp*:

        mean_t (d_t - mean d)^2 + w_level (mean d)^2 + w_rank (1 - corr(Phi(z), rank(imp*))),  z = log h standardised

    An image's own level, hard to guess and of no use for the order, counts little. Phi(z) is a soft rank, so the last
    term is one minus a Spearman correlation that has a derivative.
    """
    predicted, wanted = scores.clamp_min(_TINY).log(), target.clamp_min(_TINY).log()
    error = predicted - wanted
    level = error.mean(1, keepdim=True)
    loss = (error - level).square().mean() + level_weight * level.square().mean()
    return loss + rank_weight * (1 - _soft_spearman(predicted, wanted).mean())


def _soft_spearman(predicted: Tensor, wanted: Tensor) -> Tensor:
    spread = predicted.std(1, keepdim=True, correction=0).clamp_min(1e-6)
    soft = torch.special.ndtr((predicted - predicted.mean(1, keepdim=True)) / spread)
    ranks = wanted.argsort(1).argsort(1).to(soft.dtype)
    return F.cosine_similarity(soft - soft.mean(1, keepdim=True), ranks - ranks.mean(1, keepdim=True))


def subspace_loss(modes: Tensor, target: Tensor) -> Tensor:
    """1 - |U^T V|_F^2 / r, the Grassmannian loss of Algorithm 2; both [B, r, N, D] with orthonormal modes -> [B]."""
    return 1 - alignment(modes, target)


def alignment(modes: Tensor, target: Tensor) -> Tensor:
    """V_1 = |U^T V|_F^2 / r in [0, 1], whatever the order of the modes -> [B]."""
    overlap = modes.flatten(2) @ target.flatten(2).mT
    return overlap.square().sum((1, 2)) / target.shape[1]


def energy_loss(energies: Tensor, singular_values: Tensor, *, ratio: float = 1.05) -> Tensor:
    """mean_j (log lambda_j - log S_j^2)^2 over modes that are not nearly degenerate; both [B, r], S descending -> [B].

    Where sigma_j / sigma_{j+1} < ``ratio`` the two modes can swap between images: both are left out. So is a mode
    with S_j = 0, which has no logarithm.
    """
    keep = ~nearly_degenerate(singular_values, ratio) & (singular_values > 0)
    error = energies.clamp_min(_TINY).log() - singular_values.square().clamp_min(_TINY).log()
    return (error.square() * keep).sum(1) / keep.sum(1).clamp_min(1)


def nearly_degenerate(singular_values: Tensor, ratio: float = 1.05) -> Tensor:
    """Modes [B, r] that have a neighbour within ``ratio``."""
    close = singular_values[:, :-1] < ratio * singular_values[:, 1:]
    edge = close.new_zeros(len(close), 1)
    return torch.cat([close, edge], 1) | torch.cat([edge, close], 1)


def distance_loss(metric: LowRankMetric, change: Tensor, distance: Tensor) -> Tensor:
    """Distance matching (section 5.1): the length of change = F_2 - F_1 [B, N, D] under g(F_1) against the distance [B]
    of the outputs, compared as logarithms -> [B]."""
    return _log_error(metric.squared_norm(change), distance.square())


def direction_loss(metric: LowRankMetric, directions: Tensor, sensitivities: Tensor) -> Tensor:
    """Random-direction regression (section 5.1): v^T g v against |J v|^2 [B], v [B, N, D] of unit length -> [B]."""
    return _log_error(metric.squared_norm(directions), sensitivities)


def _log_error(predicted: Tensor, wanted: Tensor) -> Tensor:
    return (predicted.clamp_min(_TINY).log() - wanted.clamp_min(_TINY).log()).square()
