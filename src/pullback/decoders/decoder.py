"""What reads the features: a named function of the tokens of one or several layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from pullback.tokens import TokenLayout

# the tokens [B, n, D] of each layer that is read, in the order of `layers`, and where they sit -> [B, ...]
DecodeFunction = Callable[[Sequence[Tensor], TokenLayout], Tensor]


@dataclass(frozen=True)
class Decoder:
    """``layers`` it reads (block indices), after the backbone's final norm if ``normed``.

    ``rows``: it reads only the first so many tokens (1 for a class-token decoder), so the last block need not compute
    the others. ``linear``: the function is linear in the tokens, so its derivative is itself.
    """

    name: str
    layers: tuple[int, ...]
    decode: DecodeFunction
    normed: bool = True
    rows: int | None = None
    linear: bool = False
