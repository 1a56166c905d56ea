"""The demo: drawn pictures, the embedded model, a class-token and a dense decoder at three layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pullback.data.synthetic import draw_pictures
from pullback.workflow import DiagnosisRequest, Watcher, run_diagnosis

MODEL = "seeded-vit"
NOTE = (
    f"The embedded model {MODEL!r} has seeded random weights: the numbers are right for it, but they say nothing about "
    "trained models."
)
LAYERS = (0, 2, 4)

# Half the size for the dense decoder: its head is the expensive part on a CPU.
SIZES = {"cls": 224, "depth-8x8": 112}


def run_demo(out: Path, watch: Watcher, seed: int = 0) -> dict[str, dict[str, Any]]:
    """Pictures into ``out``/images, a diagnosis into ``out``/<decoder> for each decoder; the diagnoses by that name."""
    watch.stage("drawing pictures")
    draw_pictures(out / "images", seed=seed)
    documents = {}
    for decoder, size in SIZES.items():
        request = DiagnosisRequest(
            model=MODEL,
            images=str(out / "images"),
            decoder=decoder,
            layers=LAYERS,
            ranks=(10,),
            size=size,
            seed=seed,
        )
        documents[decoder] = run_diagnosis(request, out / decoder, watch)
    return documents
