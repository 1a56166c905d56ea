"""Decoders, task distances and output metrics."""

from pullback.decoders.decoder import Decoder
from pullback.decoders.dense import PatchGrid, SaliencyHead
from pullback.decoders.distances import DISTANCES, OutputMetric, TaskDistance, factor_at, task_distance
from pullback.decoders.registry import build_decoder

__all__ = [
    "DISTANCES",
    "Decoder",
    "OutputMetric",
    "PatchGrid",
    "SaliencyHead",
    "TaskDistance",
    "build_decoder",
    "factor_at",
    "task_distance",
]
