"""Probe maps."""

from pullback.probes.loading import load_probe
from pullback.probes.multi_layer import MultiLayerProbe, multi_layer_probe
from pullback.probes.probe import ProbeMap
from pullback.tokens import Features
from pullback.vggt.probes import SceneInputProbe, SceneProbe, scene_input_probe, scene_probe

__all__ = [
    "Features",
    "MultiLayerProbe",
    "ProbeMap",
    "SceneInputProbe",
    "SceneProbe",
    "load_probe",
    "multi_layer_probe",
    "scene_input_probe",
    "scene_probe",
]
