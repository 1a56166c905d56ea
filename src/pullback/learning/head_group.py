"""Heads that are trained side by side, as one network, and the task that is handed to the training loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pullback.errors import PullbackError
from pullback.learning.fit import CurrentBlock, Losses, Network, Share
from pullback.learning.head import ImportanceHead
from pullback.learning.losses import order_loss
from pullback.learning.pretrained import Pretrained
from pullback.learning.target_streams import LayerBlock
from pullback.learning.train_head import HeadExamples, head_scores


@dataclass(frozen=True)
class GroupConfig:
    """The heads of a group: (name, place of its layer in the stream, width, rounds) each."""

    dim: int
    hints: int
    heads: tuple[tuple[str, int, int, int], ...]


class HeadGroup(Pretrained):
    """Heads that are trained side by side, each with a linear map from its state to the hints."""

    kind, title = "head-group", "Importance heads"

    def __init__(self, config: GroupConfig) -> None:
        super().__init__()
        self.config = config
        self.members = nn.ModuleDict()
        self.helpers = nn.ModuleDict()
        for name, _, width, rounds in config.heads:
            self.members[name] = ImportanceHead(config.dim, width, rounds=rounds)
            self.helpers[name] = nn.Linear(width, config.hints)

    @classmethod
    def config_from_dict(cls, stored: Mapping[str, Any]) -> GroupConfig:
        return GroupConfig(stored["dim"], stored["hints"], tuple(tuple(head) for head in stored["heads"]))

    @classmethod
    def from_config(cls, config: GroupConfig) -> HeadGroup:
        return cls(config)

    def start_from(self, block: LayerBlock, count: int = 512) -> HeadGroup:
        for name, place, _, _ in self.config.heads:
            self.head(name).start_from(block.features[place, :count].float(), block.norms[place, :count])
        return self

    def head(self, name: str) -> ImportanceHead:
        found = self.members[name]
        assert isinstance(found, ImportanceHead)
        return found

    def forward(self, features: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """[L, B, N, D] -> for every head its scores [B, N] and its guess of the hints [B, N, k]."""
        out = {}
        for name, place, _, _ in self.config.heads:
            state = self.head(name).state(features[place])
            out[name] = self.head(name).scores_of(state), self.helpers[name](state)
        return out


@dataclass(eq=False)
class GroupTask:
    """A `Task`: every head against the block norms of its layer, judged by the exact importance of held-out images.

    ``dropout`` of the entries of the features, against learning the training pictures by heart.
    """

    blocks: Callable[[int], LayerBlock]
    held_out: Sequence[HeadExamples]  # one per layer of the stream
    group: HeadGroup
    steps_per_block: int
    hint_weight: float = 0.3
    dropout: float = 0.0
    _current: CurrentBlock[LayerBlock] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.dropout < 1:
            raise PullbackError(f"dropout: expected a share from 0 up to, but without, 1, got {self.dropout}.")
        self._current = CurrentBlock(self.blocks, self.steps_per_block)

    def start(self) -> None:
        """Give the heads the spread and the level of the first block."""
        self.group.start_from(self._current.at(0))

    def loss(self, network: Network, step: int, share: Share, generator: torch.Generator) -> Losses:
        block = self._current.at(step)
        rows = share.of(torch.randint(block.hints.shape[0], (share.batch,), generator=generator))
        rows = rows.to(block.features.device)
        found = network(self._dropped(block.features[:, rows].float(), generator))
        hints = block.hints[rows].float()
        losses = []
        for name, place, _, _ in self.group.config.heads:
            scores, guess = found[name]
            helped = (guess.float() - hints).square().mean()
            losses.append(order_loss(scores, block.norms[place, rows]) + self.hint_weight * helped)
        return torch.stack(losses).sum(), {}

    def _dropped(self, features: Tensor, generator: torch.Generator) -> Tensor:
        """Drop entries of the features, by draws that follow from the step, so that a run that goes on has the same."""
        if not self.dropout:
            return features
        seed = int(torch.randint(1 << 62, (), generator=generator))
        draws = torch.Generator(features.device).manual_seed(seed)
        kept = torch.rand(features.shape, generator=draws, device=features.device) >= self.dropout
        return features * kept / (1 - self.dropout)

    def validate(self, network: Network) -> Mapping[str, float]:
        """Score every head; the mean of their rho decides."""
        scores: dict[str, float] = {}
        for name, place, _, _ in self.group.config.heads:
            found = head_scores(self.group.head(name), self.held_out[place])
            scores |= {f"{name}/{key}": value for key, value in found.items() if key != "score"}
        rho = [value for name, value in scores.items() if name.endswith("/rho")]
        return {"score": sum(rho) / len(rho), **scores}
