"""Probe maps: what is differentiated."""

from pullback.probes.loading import load_probe, multi_layer_probe
from pullback.probes.probe import HOOKS, INPUTS, ProbeMap, place_of_layer
from pullback.tokens import Features

__all__ = [
    "HOOKS",
    "INPUTS",
    "Features",
    "ProbeMap",
    "load_probe",
    "multi_layer_probe",
    "place_of_layer",
]
