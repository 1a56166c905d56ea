"""The modes that d_task needs (`eq:dtask`), from networks that predict the metric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from pullback.errors import ModelError
from pullback.pruning.context import Modes, Score, ScoreContext
from pullback.pruning.scores import HeadScore

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
