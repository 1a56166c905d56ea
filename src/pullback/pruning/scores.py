"""Which tokens matter: scores that need no training, and a common form for those that do.

Every score is (tokens [B, N, D], context) -> [B, N], not negative, the lowest are removed first. Scores of an image
never depend on the others in its batch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pullback.errors import ModelError, PullbackError
from pullback.pruning.context import Score, ScoreContext

NEVER = 3.0  # above every 1 - cosine


def random(tokens: Tensor, context: ScoreContext) -> Tensor:
    """Uniform. One draw for all images of the batch, so that an image's tokens do not depend on its neighbours."""
    count = tokens.shape[1]
    draw = _drawn(count) if context.generator is None else torch.rand(count, generator=context.generator)
    return draw.to(tokens.device).expand(tokens.shape[0], -1)


@torch.compiler.assume_constant_result  # a compiled graph can hold the numbers, but no generator
def _drawn(count: int) -> Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(0))


def token_norm(tokens: Tensor, context: ScoreContext) -> Tensor:
    return tokens.float().norm(dim=-1)


def class_similarity(tokens: Tensor, context: ScoreContext) -> Tensor:
    """1 + cosine to the class token."""
    if context.prefix == 0:
        raise ModelError(f"score: {context.backbone.name} has no class token to be similar to.")
    wide = tokens.to(torch.promote_types(tokens.dtype, torch.float32))  # or hundreds of tokens would share a number
    return 1 + F.cosine_similarity(wide, wide[:, :1], dim=-1)


def class_attention(tokens: Tensor, context: ScoreContext) -> Tensor:
    """EViT (Liang et al. 2022): the attention that the class token gives."""
    return context.class_attention()


def bipartite_redundancy(tokens: Tensor, context: ScoreContext) -> Tensor:
    """ToMe (Bolya et al. 2023): patches are dealt to two sets in turn; the first goes in the order of its highest
    cosine to the second, which stays."""
    return _redundancy(tokens, alternate(context), context)


def strided_redundancy(tokens: Tensor, context: ScoreContext) -> Tensor:
    """The same with one patch of every 2 x 2 as the set that stays (Bolya & Hoffman 2023)."""
    return _redundancy(tokens, strided(context), context)


def alternate(context: ScoreContext) -> Tensor:
    """[B, N] bool: every other patch of the current sequence, the second set of ToMe."""
    count = context.positions.shape[1]
    odd = (torch.arange(count, device=context.positions.device) - context.prefix) % 2 == 1
    patch = torch.arange(count, device=context.positions.device) >= context.prefix
    return (odd & patch).expand(context.positions.shape[0], -1)


def strided(context: ScoreContext, stride: int = 2) -> Tensor:
    """[B, N] bool: the upper left patch of each stride x stride cell of the image."""
    place = context.positions - context.prefix
    columns = context.layout.grid[1]
    return (place >= 0) & (place // columns % stride == 0) & (place % columns % stride == 0)


def _redundancy(tokens: Tensor, stays: Tensor, context: ScoreContext) -> Tensor:
    """1 - max cosine to the tokens that stay [B, N] bool; those, and the prefix, never go."""
    unit = F.normalize(tokens.float(), dim=-1)
    closest = (unit @ unit.mT).masked_fill(~stays[:, None], -1.0).amax(-1)
    patch = torch.arange(tokens.shape[1], device=tokens.device) >= context.prefix
    return torch.where(stays | ~patch, NEVER, 1 - closest)


SCORES: dict[str, Score] = {
    "random": random,
    "tome": bipartite_redundancy,
    "strided": strided_redundancy,
    "evit": class_attention,
    "norm": token_norm,
    "cls-similarity": class_similarity,
}


def as_score(choice: str | nn.Module | Score) -> Score:
    """By name; an importance head, which needs the tokens alone; or any function of the tokens and the context."""
    if isinstance(choice, str):
        if choice not in SCORES:
            raise PullbackError(
                f"score: expected one of {', '.join(SCORES)}, an importance head or a function, got {choice!r}."
            )
        return SCORES[choice]
    if isinstance(choice, nn.Module):
        return choice if isinstance(choice, HeadScore) else HeadScore(choice)
    if not callable(choice):
        raise PullbackError(f"score: expected a name, a head or a function, got {type(choice).__name__}.")
    return choice


class HeadScore(nn.Module):
    """A network of the tokens alone, as a score: one that gives scores [B, N], or, as a Spectral Pullback Network does,
    a metric, whose importance counts."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, tokens: Tensor, context: ScoreContext) -> Tensor:
        found = self.head(tokens)
        return found if isinstance(found, Tensor) else found.importance()

    def check(self, family: str, dim: int, layer: int) -> None:
        """Refuse a head of another width, family or layer, where the head says what it was made for."""
        config: Any = getattr(self.head, "config", None)
        if getattr(config, "dim", dim) != dim:
            raise ModelError(f"head: expected one for tokens of width {dim}, got width {config.dim}.")
        origin = getattr(config, "origin", None)
        if origin is not None:
            origin.check("head", family=family, layer=layer)
