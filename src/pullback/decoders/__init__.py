"""Decoders, task distances and output metrics."""

from pullback.decoders.decoder import Decoder
from pullback.decoders.dense import PatchGrid, SaliencyHead
from pullback.decoders.distances import DISTANCES, OutputMetric, TaskDistance, factor_at, task_distance
from pullback.decoders.registry import build_decoder
from pullback.vggt.camera_metric import CameraMetric

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
