"""Pruning plans: which tokens are removed after which blocks, and what becomes of them. Plain data, and named plans."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from pullback.errors import PullbackError
from pullback.registry import PRESETS

Select = Literal["score", "cost"]
Match = Literal["none", "task", "cosine", "bipartite", "strided"]
Weighting = Literal["importance", "size"]
Reinsert = Literal["none", "frozen", "drift", "copy"]


@dataclass(frozen=True, kw_only=True)
class Plan(ABC):
    """What every plan may ask for.

    ``size``: the picture's shorter side in pixels, to which it is shrunk before anything else; None: as it comes.
    ``class_row``: the last block computes the class token alone, for outputs that read nothing else.
    """

    size: int | None = None
    class_row: bool = False

    def _check_input(self) -> None:
        whole = isinstance(self.size, int) and not isinstance(self.size, bool)
        if self.size is not None and not (whole and self.size > 0):
            raise PullbackError(f"size: expected the picture's shorter side in pixels, such as 182, got {self.size!r}.")

    @property
    @abstractmethod
    def removes(self) -> bool:
        """Whether any token is removed."""

    @property
    @abstractmethod
    def comes_back(self) -> bool:
        """Whether removed tokens come back where a decoder reads them."""

    @property
    def idle(self) -> bool:
        """Whether the model runs as it is."""
        return not (self.removes or self.size or self.class_row)


@dataclass(frozen=True)
class BlockPlan(Plan):
    """A published rule, which acts inside blocks, between attention and MLP (`pullback.pruning.published`).

    ``merged``: tokens that each block merges (ToMe), from block 0 on. ``keep``: share of the patch tokens that stays in
    every block (PiToMe), or in each of the blocks ``stages`` (EViT). ``reinsert``: "copy" where a decoder reads patch
    tokens: a removed token comes back as a copy of the one that it went into.
    """

    rule: Literal["tome", "pitome", "evit"]
    merged: tuple[int, ...] = ()
    keep: float = 1.0
    stages: tuple[int, ...] = ()
    reinsert: Literal["none", "copy"] = "none"

    def __post_init__(self) -> None:
        object.__setattr__(self, "merged", tuple(self.merged))
        object.__setattr__(self, "stages", as_blocks(self.stages))
        self._check_input()
        if self.rule not in ("tome", "pitome", "evit"):
            raise PullbackError(f"rule: expected one of tome, pitome, evit, got {self.rule!r}.")
        if not all(isinstance(count, int) and is_number(count) and count >= 0 for count in self.merged):
            raise PullbackError(f"r: expected how many tokens each block merges, 0 or more, got {list(self.merged)}.")
        if not (is_number(self.keep) and 0 < self.keep <= 1):
            raise PullbackError(f"keep: expected a share of the patch tokens above 0 and up to 1, got {self.keep!r}.")

    @property
    def removes(self) -> bool:
        return any(self.merged) if self.rule == "tome" else self.keep < 1

    @property
    def comes_back(self) -> bool:
        return self.reinsert != "none"

    def check_depth(self, depth: int) -> None:
        """Raise an error if a backbone with ``depth`` blocks does not have these blocks."""
        last = max((*self.stages, len(self.merged) - 1), default=0)
        if last >= depth:
            raise PullbackError(f"preset: {self.rule!r} is planned for block {last}, and the model has {depth} blocks.")

    def notes(self, depth: int) -> tuple[str, ...]:
        return ()

    def __str__(self) -> str:
        if self.rule == "tome":
            same = len(set(self.merged)) == 1
            return f"ToMe, {self.merged[0] if same else list(self.merged)} tokens merged in each block"
        where = "every block" if self.rule == "pitome" else f"each of the blocks {', '.join(map(str, self.stages))}"
        return f"{'PiToMe' if self.rule == 'pitome' else 'EViT'}, {self.keep:g} of the patch tokens kept in {where}"


@dataclass(frozen=True)
class PrunePlan(Plan):
    """What is removed at each stage, and what becomes of it.

    Stage l acts on F^l, the output of block l, so block l + 1 is the first that sees fewer tokens. Without stages
    nothing is removed.

    ``shares``: of the original patch tokens, removed at each stage; together they are the prune ratio.
    ``select``: the lowest scores go, or the lowest score^trust x distance to the partner. With ``trust`` = 1 these are
    the two factors of `eq:pruning_bound`; less of it lets the distance count for more.
    ``match``: the partner of a removed token is the nearest kept one by d_task (`eq:dtask`) or by cosine, or by cosine
    among every other patch (ToMe's second set) or a strided grid; "none" drops what is removed.
    ``gates``: for each stage the cosine under which a token is dropped rather than merged. ``fades``: the cosine from
    which on all of it is merged; in between a share that grows from 0 to 1 is, so that it weighs and counts as less
    than a token. By default the gates: no token is merged in part.
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
    fades: tuple[float, ...] = ()
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
        object.__setattr__(self, "fades", tuple(self.fades) or self.gates)
        self._check_input()
        self._check_stages()
        self._check_words()

    def _check_stages(self) -> None:
        if any(stage < 0 for stage in self.stages):
            raise PullbackError(f"stages: expected block indices from 0, got {list(self.stages)}.")
        if list(self.stages) != sorted(set(self.stages)):
            raise PullbackError(f"stages: expected ascending blocks, each once, got {list(self.stages)}.")
        for name, values in (("shares", self.shares), ("gates", self.gates), ("fades", self.fades)):
            if len(values) != len(self.stages):
                raise PullbackError(f"{name}: expected one for each of {len(self.stages)} stages, got {len(values)}.")
        if any(fade < gate for gate, fade in zip(self.gates, self.fades, strict=True)):
            raise PullbackError(
                f"fades: expected cosines that are not under the gates {list(self.gates)}, got {list(self.fades)}."
            )
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

    @property
    def removes(self) -> bool:
        return self.ratio > 0

    @property
    def comes_back(self) -> bool:
        return self.reinsert != "none" or not self.removes

    def counts(self, patches: int) -> tuple[int, ...]:
        """Return how many tokens each stage removes; together round(ratio * patches)."""
        edges = [0]
        for done in range(1, len(self.shares) + 1):
            edges.append(round(sum(self.shares[:done]) * patches))
        return tuple(after - before for before, after in itertools.pairwise(edges))

    def check_depth(self, depth: int) -> None:
        """Raise an error if a backbone with ``depth`` blocks does not have these stages."""
        if self.stages and self.stages[-1] > depth - 2:
            raise PullbackError(
                f"stages: expected blocks from 0 to {depth - 2} (of {depth}: after the last one nothing is left to "
                f"save), got {list(self.stages)}."
            )

    def notes(self, depth: int) -> tuple[str, ...]:
        """Return warnings about stages that are allowed but useless on a backbone with ``depth`` blocks."""
        if self.fuse_last and self.stages[-1:] == (depth - 2,) and self.shares[-1] > 0:
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
    if name not in PRESETS:
        raise PullbackError(f"preset: expected one of {', '.join(PRESETS)}, got {name!r}.")
    if PRESETS[name].knob:
        raise PullbackError(f"preset: {name!r} runs as its authors published it, and takes no ratio and stages.")
    stages = as_blocks(stages)
    if not stages:
        raise PullbackError("stages: expected at least one block index such as [3], got none.")
    shares = as_shares(ratio, len(stages))
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


def published(name: str, knobs: Mapping[str, Any], *, dense: bool = False, depth: int = 12) -> Plan:
    """Return the plan of a published rule, or of a smaller picture, from the one knob that it has.

    ``knobs``: r of "tome", a number, (r, inflection) as its authors have it, or one for each block; keep of "pitome"
    and "evit"; size of "resize"; none of "none".
    """
    knob = PRESETS[name].knob
    value = plain(knobs.get(knob))
    if name in ("resize", "none"):
        if knob != "none" and value is None:
            raise PullbackError("size: expected the picture's shorter side in pixels, such as 182, got None.")
        return PrunePlan((), (), size=value, reinsert="copy" if dense else "none")
    if value is None:
        example = {"r": "8", "keep": "0.95" if name == "pitome" else "0.7"}[knob]
        raise PullbackError(f"{knob}: preset {name!r} needs it, such as {knob}={example}.")
    back: Literal["none", "copy"] = "copy" if dense else "none"
    if name == "tome":
        return BlockPlan("tome", merged=_merged_by_block(value, depth), reinsert=back)
    if not is_number(value):
        raise PullbackError(f"keep: expected a share of the patch tokens above 0 and up to 1, got {value!r}.")
    stages = evit_blocks(depth) if name == "evit" else ()
    return BlockPlan(name, keep=float(value), stages=stages, reinsert=back)  # type: ignore[arg-type]


def evit_blocks(depth: int) -> tuple[int, ...]:
    """Return the blocks in which EViT removes tokens: 3, 6 and 9 of 12 (0-based), at the same quarters of others."""
    return tuple(dict.fromkeys(depth * quarter // 4 for quarter in (1, 2, 3)))


def _merged_by_block(r: Any, depth: int) -> tuple[int, ...]:
    """Return ToMe's r of every block. (r, inflection) runs linearly from r (1 - inflection) to r (1 + inflection), so
    that (8, -1) decreases from 16 to 0; a list is continued with 0."""
    if is_number(r) and isinstance(r, int):
        return (r,) * depth
    values = _listed(r)
    if isinstance(r, tuple) and values is not None and len(values) == 2 and all(is_number(value) for value in values):
        mean, inflection = values
        if not (float(mean).is_integer() and -1 <= inflection <= 1):
            raise PullbackError(f"r: expected (tokens, inflection from -1 to 1) such as (8, -1), got {r!r}.")
        first, last = int(mean * (1 - inflection)), 2 * mean - int(mean * (1 - inflection))
        step = (last - first) / max(1, depth - 1)
        return tuple(int(first + step * block) for block in range(depth))
    whole = values is not None and all(isinstance(value, int) and is_number(value) for value in values)
    if values is None or not whole or len(values) > depth:
        raise PullbackError(
            f"r: expected how many tokens each block merges, such as 8, (8, -1) for a decreasing schedule, or a list "
            f"of up to {depth}, got {r!r}."
        )
    return (*values, *(0,) * (depth - len(values)))


def _best(stages: tuple[int, ...], shares: tuple[float, ...], dense: bool, depth: int) -> PrunePlan:
    """Return the plan "best": tokens are chosen by score^trust times distance to their partner, merged with the score
    as weight, and counted by size in later attention. Dense decoders get all tokens back, so each has a partner."""
    early = [stage < depth / 3 for stage in stages]  # where tokens that are merged with others unlike them do most harm
    plan = PrunePlan(
        stages,
        shares,
        select="cost",
        match="cosine",
        gates=tuple(0.6 if first else 0.3 for first in early),
        fades=tuple(0.95 if first else 0.9 for first in early),
        sizes=True,
        safe=True,
        trust=0.3,
    )
    return replace(plan, gates=(), fades=(), reinsert="drift", fuse_last=True, trust=0.7) if dense else plan
