"""Probe maps: what is differentiated."""

from pullback.probes.loading import load_probe, multi_layer_probe
from pullback.probes.probe import HOOKS, INPUTS, LATENTS, ProbeMap, probe_at
from pullback.tokens import Features, between

__all__ = [
    "HOOKS",
    "INPUTS",
    "LATENTS",
    "Features",
    "ProbeMap",
    "between",
    "load_probe",
    "multi_layer_probe",
    "probe_at",
]
