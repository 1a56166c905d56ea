"""Scores of predictions: how faithful an output is, how well ranks agree, what neighbours say, what a call costs."""

from pullback.evaluation.fidelity import (
    Degradation,
    DepthErrors,
    SilogErrors,
    cosine_degradation,
    degradation,
    depth_errors,
    measure_of,
    relative_l2,
    silog,
)
from pullback.evaluation.neighbours import Bank, neighbour_accuracy
from pullback.evaluation.ranking import kendall, spearman

__all__ = [
    "Bank",
    "Degradation",
    "DepthErrors",
    "SilogErrors",
    "cosine_degradation",
    "degradation",
    "depth_errors",
    "kendall",
    "measure_of",
    "neighbour_accuracy",
    "relative_l2",
    "silog",
    "spearman",
]
