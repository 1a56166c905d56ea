"""The demo: freshly rendered scenes, the embedded model, a class-token and a dense decoder at three layers.

Pictures go to the model as they were rendered. Read from their files they would be resized and cropped, as photographs
are, which narrows the field of view that the model knows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from pullback.data.images import ImageBatch
from pullback.evaluation import depth_errors
from pullback.geometry.folder import DiagnosisRequest, run_diagnosis
from pullback.probes import load_probe
from pullback.runs import documents as files
from pullback.runs.files import make_folder, write_arrays
from pullback.runs.progress import Progress
from pullback.scenes.render import CLASSES, SceneBatch, normalised, render
from pullback.scenes.splits import HELD_OUT

MODEL = "tiny-scenes"
NOTE = (
    f"The embedded model {MODEL!r} was trained on procedural scenes like these and on nothing else: its numbers are "
    "right for it, but they say nothing about other models or about photographs."
)
SCENES_FOLDER = "scenes"

# Small enough for two cores and less than a minute; the dense head and the earliest layer are the expensive parts.
SIZE, COUNT, RANK = 224, 3, 10
DECODERS = ("cls", "depth-6x6")
LAYERS = (6, 8, 10)


def run_demo(
    out: Path, progress: Progress, seed: int = 0, on_layer: Callable[[dict[str, Any]], None] | None = None
) -> dict[str, dict[str, Any]]:
    """Write pictures into ``out``/images, what is known of them into ``out``/scenes, and a diagnosis for each decoder
    into ``out``/<decoder>; return the diagnoses by that name. ``on_layer`` is called with each layer that is done."""
    progress.stage("rendering scenes")
    first = HELD_OUT + seed * COUNT
    scenes = render(range(first, first + COUNT), size=SIZE)
    batch = write_pictures(scenes, out / "images")
    documents = {}
    for decoder in DECODERS:
        request = DiagnosisRequest(
            model=MODEL,
            images=str(out / "images"),
            decoder=decoder,
            layers=LAYERS,
            ranks=(RANK,),
            size=SIZE,
            seed=seed,
            convergence_samples=0,  # the table of power iteration would cost as much as one or two more scenes
        )
        documents[decoder] = run_diagnosis(request, out / decoder, progress, batch=batch, on_layer=on_layer, anew=True)
    progress.stage("predicting depth")
    write_scenes(scenes, batch, out)
    return documents


def write_pictures(scenes: SceneBatch, folder: Path) -> ImageBatch:
    """Write the first views as PNG files, and return them as the batch that a model takes."""
    make_folder(folder)
    paths = tuple(folder / f"scene-{number:02d}.png" for number in range(len(scenes)))
    for path, picture in zip(paths, _pictures(scenes), strict=True):
        Image.fromarray(picture).save(path)
    return ImageBatch(normalised(scenes.rgb[:, 0]), paths, ())


def write_scenes(scenes: SceneBatch, batch: ImageBatch, out: Path) -> None:
    """Write what the figure of the scenes needs: truth, prediction, and the energies that the diagnoses in ``out``
    found at the middle one of their layers."""
    probe = load_probe(MODEL, "depth")
    truth, predicted = scenes.depth[:, 0], probe(probe.features(batch.pixels, normalized=True)).cpu()
    errors = depth_errors(predicted, truth, ~scenes.sky[:, 0], median_scaling=False)
    layer = files.layer_name(LAYERS[len(LAYERS) // 2])
    arrays = {
        "model": np.array(MODEL),
        "captions": np.array([CLASSES[label] for label in scenes.label.tolist()]),
        "pictures": _pictures(scenes),
        "true_depth": _array(truth),
        "predicted_depth": _array(predicted),
        "abs_rel": _array(errors.abs_rel),
        "tasks": np.array([f"{decoder}, {layer}" for decoder in DECODERS]),
        "energy": np.stack([_patch_energy(out / decoder, layer) for decoder in DECODERS]),
    }
    write_arrays(make_folder(out / SCENES_FOLDER) / files.SCENES, arrays)


def _patch_energy(folder: Path, layer: str) -> np.ndarray:
    """[B, rows, columns]."""
    found = files.read_importance(folder)
    patches: np.ndarray = np.square(found[layer][:, int(found["prefix"]) :])
    return patches.reshape(-1, *found["grid"])


def _pictures(scenes: SceneBatch) -> np.ndarray:
    """uint8 [B, H, W, 3]."""
    return _array(scenes.pictures()[:, 0])


def _array(values: Tensor) -> np.ndarray:
    return values.detach().numpy()
