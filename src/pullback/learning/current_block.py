"""Examples that come in blocks: one at a time is held, for so many steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from pullback.errors import PullbackError

Block = TypeVar("Block")


class CurrentBlock(Generic[Block]):
    """``make`` gives block k; steps k s, ..., (k + 1) s - 1 use it, s = ``steps_per_block``."""

    def __init__(self, make: Callable[[int], Block], steps_per_block: int) -> None:
        if steps_per_block < 1:
            raise PullbackError(f"steps_per_block: expected at least 1, got {steps_per_block}.")
        self._make, self._steps = make, steps_per_block
        self._held: tuple[int, Block] | None = None

    def at(self, step: int) -> Block:
        number = step // self._steps
        if self._held is None or self._held[0] != number:
            self._held = None  # its memory is needed
            self._held = number, self._make(number)
        return self._held[1]
