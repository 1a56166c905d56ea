"""Which tokens matter: the scores that decide what is removed, and the modes that d_task needs (`eq:dtask`).

A score is a function (tokens [B, N, D], context) -> [B, N], not negative: the lowest are removed first. What it says of
an image never depends on the other images of the batch. Two things are optional (`Checked`, `WithModes`): a score may
refuse tokens that it was not made for, and it may know the modes of the metric by which it scores, so that scores and
distances come from one prediction, as in the paper. Names are looked up in `pullback.registry.SCORES`, where others
add theirs; networks that read the tokens alone become scores by `as_score`.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pullback import registry
from pullback.backbones import AnyBackbone
from pullback.backbones.shipped import has_fingerprint
from pullback.backbones.weights import same_weights
from pullback.errors import ModelError, PullbackError, ShapeError
from pullback.learning.shipped_heads import own_decoder, shipped_head
from pullback.operators import LowRankMetric
from pullback.runs.provenance import weights_hash
from pullback.tokens import TokenLayout

logger = logging.getLogger(__name__)
IMPORTANCE = "importance"
"""The name of the score that heads give."""
NEVER = 3.0  # a score above every 1 - cosine


@dataclass(frozen=True, eq=False)
class ScoreContext:
    """What a score may know besides the tokens, which are F^layer [B, N, D], the output of block ``layer``; earlier
    stages may have removed some of the image's.

    ``layout``: of the whole image. ``positions`` [B, N]: places of the tokens in the full sequence. ``sizes`` [B, N]:
    how many of the original tokens each stands for. ``block_input`` [B, N, D]: the tokens that entered block ``layer``.
    ``log_sizes`` [B, N]: what that block added to the logits of its attention, None: nothing. ``taps``: whole sequences
    of the layers that the decoder has read so far. ``generator``: of everything random.
    """

    backbone: AnyBackbone
    layer: int
    layout: TokenLayout
    positions: Tensor
    sizes: Tensor
    block_input: Tensor
    log_sizes: Tensor | None = None
    taps: Mapping[int, Tensor] = field(default_factory=dict)
    generator: torch.Generator | None = None

    @property
    def prefix(self) -> int:
        """Number of class and register tokens, which come first and are never removed."""
        return self.layout.prefix

    def class_attention(self) -> Tensor:
        """Return what the class token attends to in block ``layer`` [B, N], mean over heads: one query, one softmax."""
        if self.prefix == 0 or self.backbone.views:
            raise ModelError(f"score: {self.backbone.name} has no class token, so class attention does not exist.")
        block = self.backbone.blocks[self.layer]
        rope = self.backbone.gathered(self.positions).tables(self.layout, self.block_input)
        x = block.norm1(self.block_input)
        q, k = block.heads_first(block.query(x[:, :1])), block.heads_first(block.key(x))  # no values: nothing is mixed
        if rope is not None:
            q, k = rope.rotate(q, 1), rope.rotate(k, x.shape[1])
        # in float32: half precision knows too few numbers to order hundreds of tokens
        logits = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) * block.head_dim**-0.5  # [B, h, 1, N]
        if self.log_sizes is not None:
            logits = logits + self.log_sizes[:, None, None]
        return logits.softmax(-1).mean((1, 2))


class Score(Protocol):
    """A function of tokens [B, N, D]: scores [B, N], not negative, of which the lowest are removed first."""

    def __call__(self, tokens: Tensor, context: ScoreContext, /) -> Tensor: ...


# (tokens [B, N, D], context) -> sigma_j v_j [B, r, N, D], the scaled modes of J, or of a prediction of it
Modes = Callable[[Tensor, ScoreContext], Tensor]
# what users may pass for a score: a name, a network of the tokens alone, or a function
Choice = str | nn.Module | Score


@runtime_checkable
class Checked(Protocol):
    """A score that was made for certain tokens."""

    def check(self, family: str, dim: int, layer: int) -> None:
        """Raise an error if the score was made for another backbone family, token width or layer."""


@runtime_checkable
class WithModes(Protocol):
    """A score that also knows the modes of the metric it scores by."""

    def modes(self, tokens: Tensor, context: ScoreContext) -> Tensor:
        """Return the scaled modes [B, r, N, D] at these tokens [B, N, D]."""
        ...


@runtime_checkable
class MetricNetwork(Protocol):
    """A network that predicts a metric of the tokens from the tokens [B, N, D] alone, and says so."""

    predicts_metric: bool

    def __call__(self, tokens: Tensor) -> LowRankMetric: ...


def as_score(choice: Choice) -> Score:
    """Return the score of a name in the registry, or of a network of the tokens alone; a function is one already."""
    if isinstance(choice, str):
        return _named(choice)
    if isinstance(choice, nn.Module):
        if isinstance(choice, HeadScore):
            return choice
        return MetricScore(choice) if isinstance(choice, MetricNetwork) else HeadScore(choice)
    if not callable(choice):
        raise PullbackError(f"score: expected a name, a head or a function, got {type(choice).__name__}.")
    _check_arguments(choice)
    return choice


def _check_arguments(score: Callable[..., Any]) -> None:
    """Refuse a function that cannot be called with the tokens and their context."""
    try:
        signature = inspect.signature(score)
    except (TypeError, ValueError):  # of functions written in C nobody knows
        return
    try:
        signature.bind(None, None)
    except TypeError:
        raise PullbackError(
            f"score: expected a function of the tokens [B, N, D] and their ScoreContext, got one of {signature}."
        ) from None


def score_names() -> list[str]:
    """Return the names of the scores that need nothing but the tokens, with those of plugins."""
    registry.load_plugins()
    return [name for name, entry in registry.SCORES.items() if not entry.needs]


def _named(name: str) -> Score:
    registry.check_former_score("score", name)
    names = score_names()
    entry = registry.SCORES.get(name)
    if entry is None or entry.needs:
        why = "" if entry is None else f" ({name!r} is made of a {entry.needs}, and has no meaning by itself)"
        raise PullbackError(
            f"score: expected one of {', '.join(names)}, an importance head or a function, got {name!r}{why}."
        )
    score: Score = registry.resolve(entry.score)
    return score


# Scores that need no training


def random(tokens: Tensor, context: ScoreContext) -> Tensor:
    """Draw uniform scores, once for all images of the batch, so that no image depends on its neighbours."""
    count = tokens.shape[1]
    draw = _drawn(count) if context.generator is None else torch.rand(count, generator=context.generator)
    return draw.to(tokens.device).expand(tokens.shape[0], -1)


@torch.compiler.assume_constant_result  # a compiled graph can hold the numbers, but no generator
def _drawn(count: int) -> Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(0))


def token_norm(tokens: Tensor, context: ScoreContext) -> Tensor:
    """Return the length of each token."""
    return tokens.float().norm(dim=-1)


def class_similarity(tokens: Tensor, context: ScoreContext) -> Tensor:
    """Return 1 + cosine to the class token."""
    if context.prefix == 0:
        raise ModelError(f"score: {context.backbone.name} has no class token to be similar to.")
    wide = tokens.to(torch.promote_types(tokens.dtype, torch.float32))  # or hundreds of tokens would share a number
    return 1 + F.cosine_similarity(wide, wide[:, :1], dim=-1)


def class_attention(tokens: Tensor, context: ScoreContext) -> Tensor:
    """Return the attention that the class token gives, by which EViT chooses tokens (Liang et al. 2022)."""
    return context.class_attention()


def bipartite_redundancy(tokens: Tensor, context: ScoreContext) -> Tensor:
    """Score by the matching of ToMe (Bolya et al. 2023), in one stage and on the tokens instead of keys: patches are
    dealt to two sets in turn; the first goes in the order of its highest cosine to the second, which stays."""
    return _redundancy(tokens, alternate(context), context)


def strided_redundancy(tokens: Tensor, context: ScoreContext) -> Tensor:
    """Score as `bipartite_redundancy`, with one patch of every 2 x 2 as the set that stays (Bolya & Hoffman 2023)."""
    return _redundancy(tokens, strided(context), context)


def alternate(context: ScoreContext) -> Tensor:
    """Return every other patch of the current sequence, the second set of ToMe: [B, N] bool."""
    count = context.positions.shape[1]
    odd = (torch.arange(count, device=context.positions.device) - context.prefix) % 2 == 1
    patch = torch.arange(count, device=context.positions.device) >= context.prefix
    return (odd & patch).expand(context.positions.shape[0], -1)


def strided(context: ScoreContext, stride: int = 2) -> Tensor:
    """Return the upper left patch of each stride x stride cell of the image: [B, N] bool."""
    place = context.positions - context.prefix
    columns = context.layout.grid[1]
    return (place >= 0) & (place // columns % stride == 0) & (place % columns % stride == 0)


def _redundancy(tokens: Tensor, stays: Tensor, context: ScoreContext) -> Tensor:
    """Return 1 - max cosine to the tokens that ``stays`` [B, N] marks; those, and the prefix, are never removed."""
    unit = F.normalize(tokens.float(), dim=-1)
    closest = (unit @ unit.mT).masked_fill(~stays[:, None], -1.0).amax(-1)
    patch = torch.arange(tokens.shape[1], device=tokens.device) >= context.prefix
    return torch.where(stays | ~patch, NEVER, 1 - closest)


# Networks as scores


def with_shipped(choices: Sequence[Choice], stages: Sequence[int], backbone: AnyBackbone) -> list[Choice]:
    """Return the scores with the heads that ship in place of the name "importance": for each stage the one for what the
    model's own output reads."""
    if IMPORTANCE not in [choice for choice in choices if isinstance(choice, str)]:
        return list(choices)
    each = [choices[0]] * len(stages) if len(choices) == 1 else list(choices)
    decoder = own_decoder(backbone)
    return [
        shipped_head(backbone, decoder, stage) if isinstance(choice, str) and choice == IMPORTANCE else choice
        for choice, stage in zip(each, stages, strict=False)
    ] + each[len(stages) :]  # as many as were given: what does not fit is refused with its number


class HeadScore(nn.Module):
    """A network from tokens [B, N, D] to scores [B, N], such as an importance head, as a score."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, tokens: Tensor, context: ScoreContext) -> Tensor:
        return self.head(tokens)

    def check(self, family: str, dim: int, layer: int) -> None:
        check_network("head", self.head, family, dim, layer)


class MetricScore(HeadScore):
    """A network that predicts a metric, such as a Spectral Pullback Network: the metric's importance is the score."""

    def forward(self, tokens: Tensor, context: ScoreContext) -> Tensor:
        return self._metric(tokens).importance()

    def modes(self, tokens: Tensor, context: ScoreContext) -> Tensor:
        """Return sqrt(lambda_j) u_j [B, r, N, D]."""
        return self._metric(tokens).token_factors().transpose(1, 2)

    def _metric(self, tokens: Tensor) -> LowRankMetric:
        metric: LowRankMetric = self.head(tokens)
        if metric.modes.shape[2:] != tokens.shape[1:]:
            raise ShapeError(
                f"spn: expected modes on the tokens themselves, [B, r, {tokens.shape[1]}, {tokens.shape[2]}], got "
                f"{list(metric.modes.shape)}: a metric of another (latent) space does not score tokens."
            )
        return metric


class StageModes(nn.Module):
    """The modes of the score that each stage names: (tokens [B, N, D], context) -> [B, r, N, D]."""

    def __init__(self, scores: Mapping[int, WithModes]) -> None:
        super().__init__()
        self.scores = dict(scores)
        networks = {str(layer): score.head for layer, score in scores.items() if isinstance(score, MetricScore)}
        self.networks = nn.ModuleDict(networks)

    def check(self, family: str, dim: int) -> None:
        """Raise an error if a network was made for another family, width or layer, or for a latent space."""
        for layer, network in self.networks.items():
            if getattr(getattr(network, "config", None), "latent", None) is not None:
                raise ModelError(
                    "modes: expected modes of tokens, got a network with a latent space. Train one without."
                )
            check_network("modes", network, family, dim, int(layer))

    def forward(self, tokens: Tensor, context: ScoreContext) -> Tensor:
        return self.scores[context.layer].modes(tokens, context)


def as_modes(choice: Modes | nn.Module | None, stages: Sequence[int], scores: Sequence[Score]) -> Modes | None:
    """Return the modes for the matching by d_task, None where there are none.

    A function is taken as it is, a network that predicts a metric serves all stages. Without either, the scores give
    their own modes, if all of them have some.
    """
    if isinstance(choice, nn.Module) and not isinstance(choice, StageModes):
        return StageModes(dict.fromkeys(stages, metric_score(choice)))
    if choice is not None:
        return choice
    known = [score for score in scores if isinstance(score, WithModes)]
    return StageModes(dict(zip(stages, known, strict=True))) if len(known) == len(stages) else None


def metric_score(network: nn.Module) -> WithModes:
    """Return the score of a network that predicts a metric; raise an error for one that does not."""
    score = as_score(network)
    if not isinstance(score, WithModes):
        raise ModelError(
            f"modes: expected a SpectralPullbackNetwork or a function, got {type(network).__name__}, which predicts no "
            "modes. As a score it is the second argument of pb.prune."
        )
    return score


def check_network(argument: str, network: nn.Module, family: str, dim: int, layer: int, **decoder: str | None) -> None:
    """Raise an error that blames ``argument`` if the network says that it was made for another width, family, layer or,
    where ``decoder`` and ``decoder_identity`` are given, another decoder. Its weights: `check_weights`."""
    config: Any = getattr(network, "config", None)
    if getattr(config, "dim", dim) != dim:
        raise ModelError(f"{argument}: expected one for tokens of width {dim}, got width {config.dim}.")
    origin = getattr(config, "origin", None)
    if origin is not None:
        origin.check(argument, family=family, layer=layer, **decoder)


def check_weights(backbone: AnyBackbone, networks: Iterable[tuple[str, nn.Module]]) -> None:
    """Raise an error for networks, each with the argument to blame, that were trained for other weights.

    A copy of the model in another class, on another device or in a lower dtype has the same weights. Where it cannot be
    told, a warning says why.
    """
    for argument, network in {id(network): (argument, network) for argument, network in networks}.values():
        origin: Any = getattr(getattr(network, "config", None), "origin", None)
        known = getattr(origin, "blocks", {})
        same: bool | None
        if not known and getattr(origin, "fingerprint", {}):
            same, why = has_fingerprint(origin.fingerprint, backbone), ""
        elif known:
            same = same_weights(known, backbone)
            why = f"it was trained on {next(iter(known))}, and the model has another dtype, which has no common form"
        elif getattr(origin, "weights", None) is not None:
            same = weights_hash(backbone.model) == origin.weights or None
            why = "it is of an older version of pullback, which knew weights by one class and dtype of the model alone"
        else:
            continue
        if same is False:
            raise ModelError(
                f"{argument}: it was trained for other weights than those of {backbone.name}. Train one for these "
                "weights (pullback train), or use it with the model that it belongs to."
            )
        if same is None:
            logger.warning(f"{argument}: cannot tell whether it was trained for the weights of {backbone.name}: {why}.")


def networks_of(scores: Iterable[Any], modes: Any = None) -> list[tuple[str, nn.Module]]:
    """Return the networks in scores and modes of a plan, as `check_weights` takes them."""
    heads = [("head", score.head) for score in scores if isinstance(score, HeadScore)]
    return heads + [("modes", network) for network in getattr(modes, "networks", nn.ModuleDict()).values()]
