"""Decoders, task distances and output metrics."""

from pullback.decoders.decoder import Decoder
from pullback.decoders.dense import PatchGrid, SaliencyHead
from pullback.decoders.distances import (
    DISTANCES,
    OutputMetric,
    TaskDistance,
    check_metric,
    factor_at,
    task_distance,
)
from pullback.decoders.registry import DecoderChoice, build_decoder

__all__ = [
    "DISTANCES",
    "Decoder",
    "DecoderChoice",
    "OutputMetric",
    "PatchGrid",
    "SaliencyHead",
    "TaskDistance",
    "build_decoder",
    "check_metric",
    "factor_at",
    "task_distance",
]
