"""Training a head on pictures that are varied anew all the time, with targets as fast as the device computes them.

Early layers need many different pictures. Block norms from a few VJPs cost a fifteenth of the top-r importance there
and rank tokens nearly alike, so a head learns from many cheap targets first. Pictures come in blocks: block k follows
from the seed and k alone, is used for ``steps_per_block`` steps and forgotten, so a stopped run goes on exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pullback.data.augment import CROPS, Variation, varied
from pullback.geometry.block_norms import block_norms
from pullback.learning.current_block import CurrentBlock
from pullback.learning.fit import Losses, Network, Share
from pullback.learning.fit_head import HeadExamples, HeadTask, head_scores
from pullback.learning.quick_importance import quick_importance
from pullback.learning.stored_examples import AnyProbe
from pullback.learning.targets import targets_of
from pullback.operators import JacobianOperator
from pullback.randnla import Streams


@dataclass(frozen=True)
class FreshCrops:
    """Block k of varied pictures with their targets.

    ``pictures`` [n, 3, H, W] uint8 on any device. ``num_probes``: so many VJPs for block norms; None: importance,
    accurate, or with ``rounds`` as `quick_importance` has it.
    """

    probe: AnyProbe
    pictures: Tensor
    size: int
    block: int = 2048
    variation: Variation = CROPS
    num_probes: int | None = 4
    rank: int = 20
    rounds: int | None = None
    batch: int = 64
    precision: str = "float32"
    seed: int = 0

    def __call__(self, number: int) -> HeadExamples:
        generator = Streams.from_seed(self.seed, 1, first=number).generators[0]
        features, targets = [], []
        for _ in range(0, self.block, self.batch):
            rows = torch.randint(len(self.pictures), (self.batch,), generator=generator)
            chosen = self.pictures[rows.to(self.pictures.device)].to(self.probe.device)
            pixels = self._normalised(varied(chosen.float() / 255, self.size, self.variation, generator))
            with torch.no_grad():
                part = self.probe.features(pixels)
            seed = int(torch.randint(1 << 62, (), generator=generator))
            targets.append(self._targets(part, seed).float())
            features.append(part.as_subclass(Tensor).half())
        layout = self.probe.backbone.token_layout(torch.empty(0, 3, self.size, self.size))
        return HeadExamples.kept(torch.cat(features)[: self.block], torch.cat(targets)[: self.block], layout.prefix)

    def _targets(self, features: Tensor, seed: int) -> Tensor:
        if self.num_probes is None and self.rounds is None:
            return targets_of(self.probe, features, self.rank, seed=seed, precision=self.precision).importance
        operator = JacobianOperator(self.probe, features, precision=self.precision)
        streams = Streams.from_seed(seed, len(features), features.device)
        if self.num_probes is None:
            width = min(operator.rows, self.rank + 12)
            return quick_importance(
                operator, features.shape[1], self.rank, width=width, rounds=self.rounds or 0, streams=streams
            )
        found = block_norms(operator, features.shape[1], num_probes=self.num_probes, streams=streams)
        return found.squared.value.clamp_min(0).sqrt()

    def _normalised(self, pictures: Tensor) -> Tensor:
        wanted = self.probe.backbone.preprocessing
        mean, std = (pictures.new_tensor(values).view(3, 1, 1) for values in (wanted.mean, wanted.std))
        return (pictures - mean) / std


@dataclass(eq=False)
class FreshHeadTask:
    """A `Task` whose examples are replaced every ``steps_per_block`` steps."""

    blocks: Callable[[int], HeadExamples]
    held_out: HeadExamples
    steps_per_block: int
    rank_weight: float = 0.5
    _current: CurrentBlock[HeadTask] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._current = CurrentBlock(self._task, self.steps_per_block)

    def _task(self, number: int) -> HeadTask:
        return HeadTask([self.blocks(number)], self.held_out, self.rank_weight)

    def loss(self, network: Network, step: int, share: Share, generator: torch.Generator) -> Losses:
        return self._current.at(step).loss(network, step, share, generator)

    def validate(self, network: Network) -> Mapping[str, float]:
        return head_scores(network, self.held_out)
