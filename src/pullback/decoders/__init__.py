"""Decoders, task distances and output metrics."""

from pullback.decoders.decoder import Decoder, explained
from pullback.decoders.dense import PatchGrid, SaliencyHead
from pullback.decoders.distances import (
    DISTANCES,
    LOGARITHMIC,
    OutputMetric,
    TaskDistance,
    check_distance,
    check_metric,
    factor_at,
    task_distance,
)
from pullback.decoders.identity import identity_of, name_of
from pullback.decoders.registry import DecoderChoice, build_decoder

__all__ = [
    "DISTANCES",
    "LOGARITHMIC",
    "Decoder",
    "DecoderChoice",
    "OutputMetric",
    "PatchGrid",
    "SaliencyHead",
    "TaskDistance",
    "build_decoder",
    "check_distance",
    "check_metric",
    "explained",
    "factor_at",
    "identity_of",
    "name_of",
    "task_distance",
]
