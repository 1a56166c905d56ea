"""Decoders, task distances and output metrics."""

from pullback.decoders.camera_metric import CameraMetric
from pullback.decoders.decoder import Decoder
from pullback.decoders.dense import PatchGrid, SaliencyHead
from pullback.decoders.output_metric import OutputMetric, factor_at
from pullback.decoders.registry import build_decoder
from pullback.decoders.task_distance import DISTANCES, TaskDistance, task_distance

__all__ = [
    "DISTANCES",
    "CameraMetric",
    "Decoder",
    "OutputMetric",
    "PatchGrid",
    "SaliencyHead",
    "TaskDistance",
    "build_decoder",
    "factor_at",
    "task_distance",
]
