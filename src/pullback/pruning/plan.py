"""Pruning plans: which tokens are removed after which blocks, and what becomes of them. Plain data, and named plans."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from pullback.errors import PullbackError
from pullback.registry import PRESETS

Select = Literal["score", "cost"]
Match = Literal["none", "task", "cosine", "bipartite", "strided"]
Weighting = Literal["importance", "size"]
Reinsert = Literal["none", "frozen", "drift", "copy"]


@dataclass(frozen=True)
class PrunePlan:
    """What is removed at each stage, and what becomes of it.

    Stage l acts on F^l, the output of block l, so block l + 1 is the first that sees fewer tokens.

    ``shares``: of the original patch tokens, removed at each stage; together they are the prune ratio.
    ``select``: the lowest scores go, or the lowest score^trust x distance to the partner. With ``trust`` = 1 these are
    the two factors of `eq:pruning_bound`; less of it lets the distance count for more.
    ``match``: the partner of a removed token is the nearest kept one by d_task (`eq:dtask`) or by cosine, or by cosine
    among every other patch (ToMe's second set) or a strided grid; "none" drops what is removed.
    ``gates``: for each stage the cosine under which a token is dropped rather than merged.
    ``weighting`` of the mean that replaces the partner. ``sizes``: later attention counts a token as often as what it
    stands for. ``safe``: nothing is merged into tokens of unusual norm.
    ``reinsert``: how removed tokens come back where a decoder reads them: as they were (the paper), moved as far as
    their partner moved since, or as copies of it; "none": not at all, for decoders that read the class token.
    ``fuse_last``: Last-Layer Fusion, they come back before the last block, which runs on all of them.
    """

    stages: tuple[int, ...]
    shares: tuple[float, ...]
    select: Select = "score"
    match: Match = "cosine"
    gates: tuple[float, ...] = ()
    weighting: Weighting = "importance"
    sizes: bool = False
    safe: bool = False
    reinsert: Reinsert = "none"
    fuse_last: bool = False
    trust: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", as_blocks(self.stages))
        object.__setattr__(self, "shares", as_shares(self.shares, len(self.stages)))
        object.__setattr__(self, "gates", tuple(self.gates) or (-1.0,) * len(self.stages))
        self._check_stages()
        self._check_words()

    def _check_stages(self) -> None:
        if not self.stages:
            raise PullbackError("stages: expected at least one block index such as [3], got none.")
        if any(stage < 0 for stage in self.stages):
            raise PullbackError(f"stages: expected block indices from 0, got {list(self.stages)}.")
        if list(self.stages) != sorted(set(self.stages)):
            raise PullbackError(f"stages: expected ascending blocks, each once, got {list(self.stages)}.")
        for name, values in (("shares", self.shares), ("gates", self.gates)):
            if len(values) != len(self.stages):
                raise PullbackError(f"{name}: expected one for each of {len(self.stages)} stages, got {len(values)}.")
        if not all(math.isfinite(share) and share >= 0 for share in self.shares) or self.ratio >= 1:
            raise PullbackError(
                f"ratio: expected a share of the patch tokens from 0 up to, but without, 1, got {self.ratio:g}"
                + (f" (stages {list(self.shares)})." if len(self.shares) > 1 else ".")
            )

    def _check_words(self) -> None:
        for name, allowed in (
            ("select", Select),
            ("match", Match),
            ("weighting", Weighting),
            ("reinsert", Reinsert),
        ):
            if getattr(self, name) not in get_args(allowed):
                words = ", ".join(get_args(allowed))
                raise PullbackError(f"{name}: expected one of {words}, got {getattr(self, name)!r}.")
        if not (is_number(self.trust) and math.isfinite(self.trust) and self.trust >= 0):
            raise PullbackError(f"trust: expected a power of the score, 0 or more, got {self.trust!r}.")
        if self.fuse_last and self.reinsert == "none":
            raise PullbackError("fuse_last: removed tokens must come back for it; set reinsert to frozen or drift.")

    @property
    def ratio(self) -> float:
        return sum(self.shares)

    def counts(self, patches: int) -> tuple[int, ...]:
        """Return how many tokens each stage removes; together round(ratio * patches)."""
        edges = [0]
        for done in range(1, len(self.shares) + 1):
            edges.append(round(sum(self.shares[:done]) * patches))
        return tuple(after - before for before, after in itertools.pairwise(edges))

    def check_depth(self, depth: int) -> None:
        """Raise an error if a backbone with ``depth`` blocks does not have these stages."""
        if self.stages[-1] > depth - 2:
            raise PullbackError(
                f"stages: expected blocks from 0 to {depth - 2} (of {depth}: after the last one nothing is left to "
                f"save), got {list(self.stages)}."
            )

    def notes(self, depth: int) -> tuple[str, ...]:
        """Return warnings about stages that are allowed but useless on a backbone with ``depth`` blocks."""
        if self.fuse_last and self.stages[-1] == depth - 2 and self.shares[-1] > 0:
            return (
                f"stages: block {depth - 2} is the last but one, and Last-Layer Fusion runs the last one on all "
                "tokens, so this stage changes nothing and costs time.",
            )
        return ()


def even(ratio: float, stages: int) -> tuple[float, ...]:
    """Split a ratio equally over so many stages."""
    return (ratio / max(1, stages),) * stages


def plain(value: Any) -> Any:
    """Convert a scalar of NumPy or torch to a Python number, which JSON takes; return anything else as it is."""
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


def is_number(value: Any) -> bool:
    """Whether value is an int or float, but not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def as_blocks(stages: Any) -> tuple[int, ...]:
    """Return block indices from any sequence of whole numbers."""
    blocks = _listed(stages)
    if blocks is None or not all(isinstance(block, int) and is_number(block) for block in blocks):
        raise PullbackError(f"stages: expected block indices from 0 in a list, such as [3, 6], got {stages!r}.")
    return blocks


def as_shares(ratio: Any, stages: int) -> tuple[float, ...]:
    """Return one share per stage, from one number that is split equally or from one for each."""
    shares = even(plain(ratio), stages) if is_number(plain(ratio)) else _listed(ratio)
    if shares is None or not all(is_number(share) for share in shares):
        raise PullbackError(
            f"ratio: expected a share of the patch tokens such as 0.5, or a list of one for each stage, got {ratio!r}."
        )
    return tuple(float(share) for share in shares)


def _listed(values: Any) -> tuple[Any, ...] | None:
    """Return the elements of a list, an array or a tensor; None for text and for what has no elements."""
    try:
        return None if isinstance(values, (str, bytes)) else tuple(plain(value) for value in values)
    except TypeError:
        return None


def preset(
    name: str, ratio: float | Sequence[float], stages: Sequence[int], *, dense: bool = False, depth: int = 12
) -> PrunePlan:
    """Return the plan of this name (`pullback.registry.PRESETS` says what each is).

    ``ratio``: split equally over the stages, or a share for each. ``dense``: the decoder reads patches. ``depth``:
    number of blocks of the backbone. bipartite, attention-drop and strided are baselines after methods of the
    literature, in the stages that are given; their scores are "bipartite", "class-attention" and "strided".
    """
    stages = as_blocks(stages)
    shares = as_shares(ratio, len(stages))
    if name not in PRESETS:
        raise PullbackError(f"preset: expected one of {', '.join(PRESETS)}, got {name!r}.")
    if name == "best":
        return _best(stages, shares, dense, depth)
    back: Reinsert = "copy" if dense else "none"
    if name == "paper" and dense:
        return PrunePlan(stages, shares, match="none", reinsert="frozen", fuse_last=True)
    if name == "paper":
        return PrunePlan(stages, shares, match="task")
    if name == "bipartite":
        return PrunePlan(stages, shares, match="bipartite", weighting="size", sizes=True, reinsert=back)
    if name == "strided":
        return PrunePlan(stages, shares, match="strided", weighting="size", sizes=True, reinsert=back)
    return PrunePlan(stages, shares, match="none", reinsert="frozen" if dense else "none")


def _best(stages: tuple[int, ...], shares: tuple[float, ...], dense: bool, depth: int) -> PrunePlan:
    """Return the plan "best": tokens are chosen by score^trust times distance to their partner, merged with the score
    as weight, and counted by size in later attention. Dense decoders get all tokens back, so each has a partner."""
    gates = tuple(0.6 if depth / 3 <= stage < 2 * depth / 3 else 0.7 for stage in stages)
    plan = PrunePlan(stages, shares, select="cost", match="cosine", gates=gates, sizes=True, safe=True, trust=0.3)
    return replace(plan, gates=(), reinsert="drift", fuse_last=True, trust=0.7) if dense else plan
