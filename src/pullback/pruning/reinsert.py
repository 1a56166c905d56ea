"""Removed tokens back at their places.

With "drift" a removed token t with partner b comes back as F_t + (F_b now - F_b then): what t would have become had it
moved as b did. F_t is its value when it was removed, F_b then the partner's right after the merge. The partner itself,
which stood for the mean since, comes back in the same way, so that without any movement all tokens are what they were.
A partner that was removed later is itself reconstructed first, because stages are undone in reverse order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from pullback.pruning.matching import Matching
from pullback.pruning.plan import Reinsert


@dataclass(frozen=True, eq=False)
class Leftover:
    """What a stage keeps of the tokens that it removed. ``offset`` [B, R, D] is added to the partner's value now, or,
    where ``follows`` is false, is the value itself. ``own`` [B, K, D] is what the merge took from the kept ones."""

    matching: Matching
    offset: Tensor | None
    follows: bool
    own: Tensor | None = None

    def back(self, y: Tensor) -> Tensor:
        """[B, K, D] after the stage -> [B, N, D] as it was before."""
        if not self.follows:
            assert self.offset is not None
            return self.matching.place(y, self.offset.to(y.dtype))
        partner = self.matching.partner(y)
        if self.offset is None or self.own is None:
            return self.matching.place(y, partner)
        return self.matching.place(y + self.own, partner + self.offset)


def leftover(how: Reinsert, matching: Matching, before: Tensor, after: Tensor) -> Leftover:
    """Of a stage that turned ``before`` [B, N, D] into ``after`` [B, K, D]."""
    if how == "frozen":
        return Leftover(matching, matching.take(before), follows=False)
    if how == "copy":
        return Leftover(matching, None, follows=True)
    own = matching.keep(before) - after
    return Leftover(matching, matching.take(before) - matching.partner(after), follows=True, own=own)


def reinserted(tokens: Tensor, leftovers: Sequence[Leftover]) -> Tensor:
    """The full sequence [B, N, D] from the tokens that are left [B, K, D]."""
    for one in reversed(leftovers):
        tokens = one.back(tokens)
    return tokens
