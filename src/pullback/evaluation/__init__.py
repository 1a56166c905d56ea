"""Scores of predictions. Knows tensors only."""

from pullback.evaluation.depth import DepthErrors, depth_errors
from pullback.evaluation.neighbours import neighbour_accuracy
from pullback.evaluation.ranking import spearman

__all__ = ["DepthErrors", "depth_errors", "neighbour_accuracy", "spearman"]
