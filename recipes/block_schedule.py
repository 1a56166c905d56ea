"""Scenes drawn in blocks that are seen a few times, and the learning rate along the way: what all recipes share."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pullback.errors import PullbackError
from pullback.scenes.splits import HELD_OUT

SEEDS_PER_RUN = 1 << 30  # scenes that a run may see, so that runs with other seeds see others


@dataclass(frozen=True)
class BlockSchedule:
    """Everything follows from the seed and the step number, so a stopped run can go on exactly."""

    steps: int
    batch: int  # scenes of a step
    block: int  # scenes drawn at a time
    passes: int  # over each block
    seed: int
    learning_rate: float
    warmup: int

    def __post_init__(self) -> None:
        if self.block % self.batch:
            raise PullbackError(f"block={self.block}: expected a multiple of batch={self.batch}.")
        drawn = (self._block_of(max(0, self.steps - 1)) + 1) * self.block
        if not 0 <= self.seed < HELD_OUT // SEEDS_PER_RUN or drawn > SEEDS_PER_RUN:
            raise PullbackError(
                f"seed={self.seed}, steps={self.steps}, batch={self.batch}: expected a seed from 0 to "
                f"{HELD_OUT // SEEDS_PER_RUN - 1} and at most {SEEDS_PER_RUN} scenes, so that no held-out scene is "
                "seen."
            )

    def scenes(self, step: int) -> range:
        """The seeds of the block that this step draws from."""
        first = self.seed * SEEDS_PER_RUN + self._block_of(step) * self.block
        return range(first, first + self.block)

    def rows(self, step: int) -> Tensor:
        """Which scenes of its block [batch] a step sees: every pass has an order of its own."""
        turn, within = divmod(step * self.batch, self.block)
        order = torch.randperm(self.block, generator=self.generator(turn))
        return order[within : within + self.batch]

    def generator(self, number: int) -> torch.Generator:
        """Of this recipe's seed and a number of its own. A generator on the CPU reads the lowest 32 bits alone."""
        return torch.Generator().manual_seed((number + 0x9E3779B9 * self.seed) % (1 << 32))

    def rate(self, step: int) -> float:
        """Linear warm-up, then half a cosine to zero."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        progress = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))

    def _block_of(self, step: int) -> int:
        return step * self.batch // (self.block * self.passes)
