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
LAYERS = (1, 3, 4)

# Small enough for half a minute on two cores; the head of the dense decoder is the expensive part.
SIZES = {"cls": 168, "depth-8x8": 112}


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
