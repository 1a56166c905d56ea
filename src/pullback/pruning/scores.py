"""What a score may know besides the tokens.

Which tokens matter: scores that need no training, and a common form for those that do.

Every score is (tokens [B, N, D], context) -> [B, N], not negative, the lowest are removed first. Scores of an image
never depend on the others in its batch.

The modes that d_task needs (`eq:dtask`), from networks that predict the metric.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pullback.backbones import Backbone
from pullback.errors import ModelError, PullbackError
from pullback.tokens import TokenLayout


@dataclass(frozen=True, eq=False)
class ScoreContext:
    """The tokens are F^layer [B, N, D], after block ``layer``; some of the image's may be gone already."""

    backbone: Backbone
    layer: int
    layout: TokenLayout  # of the whole image
    positions: Tensor  # [B, N] places of the tokens in the full sequence
    sizes: Tensor  # [B, N] how many of the original tokens each stands for
    block_input: Tensor  # [B, N, D] the tokens that entered block `layer`
    log_sizes: Tensor | None = None  # [B, N] as that block saw them, None: not at all
    taps: Mapping[int, Tensor] = field(default_factory=dict)  # layers read so far, whole sequences
    generator: torch.Generator | None = None

    @property
    def prefix(self) -> int:
        """Class and register tokens come first, and are never removed."""
        return self.layout.prefix

    def class_attention(self) -> Tensor:
        """[B, N]: what the class token attends to in block ``layer``, mean over heads. One query, one softmax."""
        if self.prefix == 0:
            raise ModelError(f"score: {self.backbone.name} has no class token, so class attention does not exist.")
        block = self.backbone.blocks[self.layer]
        rope = self.backbone.rope_of(self.block_input, self.layout, self.positions)
        x = block.norm1(self.block_input)
        q, k = block.heads_first(block.query(x[:, :1])), block.heads_first(block.key(x))  # no values: nothing is mixed
        if rope is not None:
            q, k = rope.rotate(q, 1), rope.rotate(k, x.shape[1])
        # in float32: half precision knows too few numbers to order hundreds of tokens
        logits = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) * block.head_dim**-0.5  # [B, h, 1, N]
        if self.log_sizes is not None:
            logits = logits + self.log_sizes[:, None, None]
        return logits.softmax(-1).mean((1, 2))


# (tokens [B, N, D], context) -> [B, N], not negative; the lowest are removed first
Score = Callable[[Tensor, ScoreContext], Tensor]
# (tokens [B, N, D], context) -> sigma_j v_j [B, r, N, D], the scaled modes of J, or of a prediction of it
Modes = Callable[[Tensor, ScoreContext], Tensor]


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


SPN = "spectral-pullback-network"


class StageModes(nn.Module):
    """sqrt(lambda_j) u_j [B, r, N, D] of the Spectral Pullback Network of each stage."""

    def __init__(self, networks: Mapping[int, nn.Module]) -> None:
        super().__init__()
        self.networks = nn.ModuleDict({str(layer): network for layer, network in networks.items()})

    def check(self, family: str, dim: int) -> None:
        """Refuse a network of another width, family or layer, where it says what it was made for, and one that
        predicts no metric of the tokens."""
        for layer, network in self.networks.items():
            config: Any = getattr(network, "config", None)
            if getattr(network, "kind", SPN) != SPN:
                raise ModelError(
                    f"modes: expected a SpectralPullbackNetwork or a function, got {type(network).__name__}, which "
                    "predicts no modes. As a score it is the second argument of pb.prune."
                )
            if getattr(config, "latent", None) is not None:
                raise ModelError(
                    "modes: expected modes of tokens, got a network with a latent space. Train one without."
                )
            if getattr(config, "dim", dim) != dim:
                raise ModelError(f"modes: expected a network for tokens of width {dim}, got width {config.dim}.")
            origin = getattr(config, "origin", None)
            if origin is not None:
                origin.check("modes", family=family, layer=int(layer))

    def forward(self, tokens: Tensor, context: ScoreContext) -> Tensor:
        metric: Any = self.networks[str(context.layer)](tokens)
        return metric.token_factors().transpose(1, 2)


def as_modes(choice: Modes | nn.Module | None, stages: Sequence[int], scores: Sequence[Score]) -> Modes | None:
    """A function as it is; a Spectral Pullback Network for all stages; or, without either, the networks that score,
    where all of them predict a metric: then scores and distances come from one prediction, as in the paper."""
    if isinstance(choice, nn.Module) and not isinstance(choice, StageModes):
        return StageModes(dict.fromkeys(stages, choice))
    if choice is not None:
        return choice
    networks = [score.head for score in scores if isinstance(score, HeadScore) and _predicts_a_metric(score.head)]
    return StageModes(dict(zip(stages, networks, strict=True))) if len(networks) == len(stages) else None


def _predicts_a_metric(network: nn.Module) -> bool:
    return getattr(network, "kind", None) == SPN
