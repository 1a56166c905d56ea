"""Probe maps."""

from pullback.probes.loading import load_probe
from pullback.probes.multi_layer import MultiLayerProbe, multi_layer_probe
from pullback.probes.probe import ProbeMap
from pullback.tokens import Features

__all__ = [
    "Features",
    "MultiLayerProbe",
    "ProbeMap",
    "load_probe",
    "multi_layer_probe",
]
