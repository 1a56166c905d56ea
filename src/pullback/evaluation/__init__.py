"""Scores of predictions. Knows tensors only."""

from pullback.evaluation.fidelity import DepthErrors, SilogErrors, cosine_degradation, depth_errors, relative_l2, silog
from pullback.evaluation.neighbours import neighbour_accuracy
from pullback.evaluation.ranking import spearman

__all__ = [
    "DepthErrors",
    "SilogErrors",
    "cosine_degradation",
    "depth_errors",
    "neighbour_accuracy",
    "relative_l2",
    "silog",
    "spearman",
]
