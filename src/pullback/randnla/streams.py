"""Randomness that belongs to a sample, not to the batch in which the sample happens to be processed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pullback.checks import whole_number

_WORD = (1 << 64) - 1


@dataclass(frozen=True)
class Streams:
    """One random generator per sample. Drawing advances them; the same seed always gives the same numbers."""

    generators: tuple[torch.Generator, ...]

    @classmethod
    def from_seed(cls, seed: int, batch: int, device: torch.device | str = "cpu", first: int = 0) -> Streams:
        """Streams of samples first, first + 1, ..., so that a data set may be cut into batches anywhere."""
        seed, indices = whole_number("seed", seed, least=None), range(first, first + batch)
        return cls(tuple(torch.Generator(device).manual_seed(_mix(seed, index)) for index in indices))

    @classmethod
    def from_seeds(cls, seeds: Sequence[int], device: torch.device | str = "cpu") -> Streams:
        """One stream per seed, for samples that have a seed of their own instead of a place in a data set."""
        whole = [whole_number("seeds", seed, least=None) for seed in seeds]
        return cls(tuple(torch.Generator(device).manual_seed(_splitmix(seed & _WORD)) for seed in whole))

    def __len__(self) -> int:
        return len(self.generators)

    def gaussian(self, n: int, k: int, dtype: torch.dtype, only: Tensor | None = None) -> Tensor:
        """Standard normal columns [B, n, k]; zeros for samples outside the mask ``only`` [B], which draw nothing."""

        def draw(generator: torch.Generator) -> Tensor:
            return torch.randn(n, k, dtype=dtype, device=generator.device, generator=generator)

        return self._stack(draw, only)

    def rademacher(self, n: int, k: int, dtype: torch.dtype, only: Tensor | None = None) -> Tensor:
        """Columns [B, n, k] of independent signs; ``only`` as above."""

        def draw(generator: torch.Generator) -> Tensor:
            bits = torch.randint(0, 2, (n, k), dtype=torch.int8, device=generator.device, generator=generator)
            return bits.to(dtype).mul_(2).sub_(1)

        return self._stack(draw, only)

    def _stack(self, draw: Callable[[torch.Generator], Tensor], only: Tensor | None) -> Tensor:
        if only is None:
            return torch.stack([draw(generator) for generator in self.generators])
        drawn = {i: draw(self.generators[i]) for i in only.nonzero()[:, 0].tolist()}
        zeros = torch.zeros_like(next(iter(drawn.values())))
        return torch.stack([drawn.get(i, zeros) for i in range(len(self))])


def _mix(seed: int, index: int) -> int:
    """SplitMix64 (Steele, Lea & Flood 2014) twice: neighbouring seeds and indices give unrelated generators."""
    return _splitmix(_splitmix(seed & _WORD) ^ (index & _WORD))


def _splitmix(state: int) -> int:
    state = (state + 0x9E3779B97F4A7C15) & _WORD
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _WORD
    return state ^ (state >> 31)
