"""Random numbers of the scenes, each a hash of (seed, name, index) and of nothing else.

A generator with a state would tie a scene to the batch it is drawn in. With hashes a scene is the same alone or among
others, and a new draw under a new name changes none of the old ones.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word


# splitmix64 (Steele, Lea and Flood 2014): the step between states and the two multipliers that mix one.
_STEP = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)


def hashed(words: Tensor) -> Tensor:
    """Hash each int64 to an int64 (splitmix64); products wrap around on every device."""
    words = words + _STEP
    words = (words ^ _shifted(words, 30)) * _FIRST
    words = (words ^ _shifted(words, 27)) * _SECOND
    return words ^ _shifted(words, 31)


def _shifted(words: Tensor, bits: int) -> Tensor:
    """Shift right and fill with zeros (torch's >> copies the sign bit)."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


@dataclass(frozen=True, eq=False)
class Draws:
    """Named random numbers of the scenes `seeds` [B], in float64 and on the CPU, whatever device renders them."""

    seeds: Tensor  # [B] int64

    def uniform(self, name: str, low: float = 0.0, high: float = 1.0, count: int = 1) -> Tensor:
        """Draw numbers [B, count] in [low, high)."""
        stream = hashed(self.seeds ^ hashed(torch.tensor(zlib.crc32(name.encode()))))  # [B]
        words = hashed(stream[:, None] + torch.arange(count))
        return low + (high - low) * (_shifted(words, 11).double() / (1 << 53))

    def integer(self, name: str, low: int, high: int, count: int = 1) -> Tensor:
        """Draw whole numbers [B, count] from low to high, both included."""
        return self.uniform(name, low, high + 1, count).floor().long().clamp(max=high)

    def angle(self, name: str, low: float, high: float, count: int = 1) -> Tensor:
        """Draw angles [B, count] in radians, between bounds in degrees."""
        return self.uniform(name, math.radians(low), math.radians(high), count)

    def geometric(self, name: str, low: float, high: float, count: int = 1) -> Tensor:
        """Draw numbers [B, count] between low and high whose logarithm is uniform, for scales."""
        return low * (high / low) ** self.uniform(name, count=count)

    def chance(self, name: str, probability: float, count: int = 1) -> Tensor:
        """Draw truth values [B, count] that are true with this probability."""
        return self.uniform(name, count=count) < probability
