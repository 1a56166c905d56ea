"""The four regimes of section 4.3, with their thresholds and advice as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Thresholds:
    """Chosen so that every row of the paper's tables gets the label the paper gives it (tests/geometry)."""

    low_rank_kappa: float = 0.90  # kappa_cap(r) from here on: r directions are (nearly) the whole task
    rank_budget: float = 2.5  # an effective rank above this many times r is "rich", whatever kappa says
    concentrated_cv: float = 0.80  # tokens differ so much that a score per token is informative
    null_factor: float = 1.5  # CV up to this many times the null: indistinguishable from a random direction


THRESHOLDS = Thresholds()


@dataclass(frozen=True)
class Regime:
    label: str
    title: str
    advice: str


RICH = Regime(
    "i",
    "rich spectrum",
    "No rank-r metric captures the task and no few tokens carry it: raise the rank, or compress the features first "
    "(the S2-VAE bottleneck).",
)
LOW_RANK_SPREAD = Regime(
    "ii",
    "low rank, spread over tokens",
    "A rank-r metric captures the task, but its directions are spread over tokens: learn the metric with cross-token "
    "attention (SPN); scores per token are weak.",
)
LOW_RANK_LOCAL = Regime(
    "ii",
    "low rank, concentrated on tokens",
    "A rank-r metric captures the task and few tokens carry it: both the SPN and a per-token importance head will do.",
)
CONCENTRATED = Regime(
    "iii",
    "marginal rank, concentrated on tokens",
    "A rank-r metric misses much of the task, but few tokens carry it: score tokens with an importance head, for "
    "instance to prune or merge the others.",
)
RANK_BOUNDED = Regime(
    "iv",
    "structurally rank-bounded",
    "The output has no more dimensions than the rank asked for, so kappa is 100 % by construction: use the exact "
    "spectrum, it is cheap.",
)


def classify(
    *,
    kappa: float,
    effective_rank: float,
    cv: float,
    rank: int,
    max_rank: int,
    thresholds: Thresholds = THRESHOLDS,
) -> Regime:
    """``rank`` is the rank asked for, ``max_rank`` = min(M, N*D)."""
    if max_rank <= rank:
        return RANK_BOUNDED
    if kappa >= thresholds.low_rank_kappa and effective_rank <= thresholds.rank_budget * rank:
        return LOW_RANK_LOCAL if cv >= thresholds.concentrated_cv else LOW_RANK_SPREAD
    return CONCENTRATED if cv >= thresholds.concentrated_cv else RICH


def looks_random(cv: float, null: float, thresholds: Thresholds = THRESHOLDS) -> bool:
    return cv <= thresholds.null_factor * null
