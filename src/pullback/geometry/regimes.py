"""The four regimes of section 4.3, with their thresholds and advice as data, and which of them some numbers belong to.

`classify` names the regime of plain numbers. `judge` names that of means with errors, and with it every other one that
the errors do not exclude.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

from pullback.geometry.summary import Summary


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
    """One of the four. Two of them share the paper's label (ii), so a title always stands beside it."""

    label: str
    title: str
    advice: str

    def __str__(self) -> str:
        return f"({self.label}) {self.title}"


RICH = Regime(
    "i",
    "rich spectrum",
    "No rank-r metric captures the task and no few tokens carry it: raise the rank, or compress the features first: "
    "`pullback train bottleneck` makes a FOLDER, and the decoder's name with @FOLDER behind it goes through it.",
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

BEHIND_A_BOTTLENECK = {
    RICH: "Even behind the bottleneck no rank-r metric captures the task, and no few tokens carry it: raise the rank, "
    "or train a smaller bottleneck, and see what it costs in the task's own measure.",
}
"""Advice that differs where the decoder has a bottleneck in front of it already."""
OF_REGISTERS = {
    RICH: "Even in the latent no rank-r metric captures the task: raise the rank, or train a smaller bottleneck, and "
    "see what it costs in the task's own measure.",
    LOW_RANK_LOCAL: "A rank-r metric captures the task, and few registers carry it: the SPN learns it, and fewer "
    "registers may do.",
    LOW_RANK_SPREAD: "A rank-r metric captures the task, with directions that are spread over the registers: the SPN "
    "learns it.",
    CONCENTRATED: "A rank-r metric misses much of the task, and few registers carry it: raise the rank, or train a "
    "bottleneck with fewer registers.",
}
"""Advice at the latent of a bottleneck, whose registers are not pruned and have no scores."""


def classify(
    *,
    kappa: float,
    effective_rank: float,
    cv: float,
    rank: int,
    max_rank: int,
    thresholds: Thresholds = THRESHOLDS,
) -> Regime:
    """Return the regime of these means; ``rank`` is the rank asked for, ``max_rank`` = min(M, N*D)."""
    if max_rank <= rank:
        return RANK_BOUNDED
    if kappa >= thresholds.low_rank_kappa and effective_rank <= thresholds.rank_budget * rank:
        return LOW_RANK_LOCAL if cv >= thresholds.concentrated_cv else LOW_RANK_SPREAD
    return CONCENTRATED if cv >= thresholds.concentrated_cv else RICH


def looks_random(cv: float, null: float, thresholds: Thresholds = THRESHOLDS) -> bool:
    return cv <= thresholds.null_factor * null


@dataclass(frozen=True)
class Verdict:
    """The regime of the means, and those beyond a threshold that lies within two standard errors of them."""

    regime: Regime
    could_be: tuple[Regime, ...] = ()

    def __str__(self) -> str:
        return ", could be ".join(
            [str(self.regime), *([" or ".join(map(str, self.could_be))] if self.could_be else [])]
        )


def judge(
    *,
    kappa: Summary,
    effective_rank: Summary,
    cv: Summary,
    rank: int,
    max_rank: int,
    thresholds: Thresholds = THRESHOLDS,
) -> Verdict:
    """Classify the means, and whatever they may be instead, each within two standard errors.

    The error is that over samples; of a single sample it is that of its estimate, and an unknown one counts as none.
    """
    found = [
        classify(kappa=k, effective_rank=r, cv=c, rank=rank, max_rank=max_rank, thresholds=thresholds)
        for k, r, c in product(*map(_within_the_error, (kappa, effective_rank, cv)))
    ]
    regime, *others = dict.fromkeys(found)  # that of the means comes first
    return Verdict(regime, tuple(others))


def _within_the_error(summary: Summary) -> tuple[float, ...]:
    error = summary.estimation_se if summary.count == 1 else summary.se
    if math.isnan(error):
        return (summary.mean,)
    return summary.mean, summary.mean - 2 * error, summary.mean + 2 * error
