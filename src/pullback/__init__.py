"""pullback: the task-induced geometry of vision-transformer features.

    import pullback as pb

    probe = pb.load_probe("facebook/dinov2-base", decoder="cls", layer=10)
    images = pb.load_images("photos/", size=224)
    report = pb.diagnose(probe, images, rank=20)

Names are imported when they are first used, so that ``import pullback`` is quick and needs no optional package.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "DenseOperator": "pullback.operators",
    "JacobianOperator": "pullback.operators",
    "LinearOperator": "pullback.operators",
    "LowRankMetric": "pullback.operators",
    "CameraMetric": "pullback.vggt.camera_metric",
    "Decoder": "pullback.decoders",
    "PatchGrid": "pullback.decoders",
    "ProbeMap": "pullback.probes",
    "load_probe": "pullback.probes",
    "multi_layer_probe": "pullback.probes",
    "load_images": "pullback.data",
    "PullbackError": "pullback.errors",
    "VGGT": "pullback.vggt.checkpoint",
    "VGGTConfig": "pullback.vggt.network",
    "ImportanceHead": "pullback.learning.head",
    "SpectralPullbackNetwork": "pullback.learning.spn",
    "TargetStore": "pullback.targets.store",
    "TargetTable": "pullback.targets.table",
    "compute_table": "pullback.targets.compute",
    "compute_targets": "pullback.targets.compute",
    "PrunePlan": "pullback.pruning",
    "PrunedModel": "pullback.pruning",
    "PrunedVGGT": "pullback.vggt.pruning",
    "export_onnx": "pullback.pruning.export",
    "plan_pruning": "pullback.pruning.budget",
    "prune": "pullback.pruning",
    "prune_views": "pullback.vggt.pruning",
    "restore": "pullback.pruning",
    "Spectrum": "pullback.geometry",
    "Tractability": "pullback.geometry",
    "diagnose": "pullback.geometry",
    "layer_multiplicity": "pullback.geometry",
    "spectrum": "pullback.geometry",
    "token_importance": "pullback.geometry",
}
__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'pullback' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
