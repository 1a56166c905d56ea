"""VGGT (Wang et al. 2025): cameras, depth and points of a scene from one or many views, in one pass.

An implementation of our own with the parameter names of the published checkpoint. `aggregator.py` shows where a probe
can enter; `pullback.VGGT` is this network together with its files.
"""

from pullback.vggt.network.aggregator import Aggregator, AggregatorState
from pullback.vggt.network.camera_head import CameraHead
from pullback.vggt.network.config import VGGTConfig
from pullback.vggt.network.dpt_head import DPTHead
from pullback.vggt.network.model import VGGTNetwork, VGGTOutput

__all__ = ["Aggregator", "AggregatorState", "CameraHead", "DPTHead", "VGGTConfig", "VGGTNetwork", "VGGTOutput"]
