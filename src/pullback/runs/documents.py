"""The files that runs leave in their folders (diagnoses, looks, comparisons, plans, trainings): names, and readers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pullback.errors import PullbackError
from pullback.registry import current_rule, current_score
from pullback.runs.files import CONFIG, read_arrays, read_json
from pullback.runs.rows import Rows

if TYPE_CHECKING:
    import numpy as np

DIAGNOSIS = "diagnosis.json"
IMPORTANCE = "importance.npz"
PARTS = "images.jsonl"
SPECTRUM = "spectrum.png"
SCENES = "scenes.npz"
SCENES_FIGURE = "scenes.png"
PAGE = "index.html"


def layer_name(layer: int | str) -> str:
    """10 -> "L10", "hooks" -> "hooks": in tables, array names and file names."""
    return layer if isinstance(layer, str) else f"L{layer:02d}"


def in_picture(layer: dict[str, Any]) -> bool:
    """Return whether the tokens of a layer of a diagnosis have a place in the picture: registers have none."""
    return layer.get("in_picture", True)  # earlier versions knew no others


def tokens_figure(layer: int | str) -> str:
    return f"tokens_{layer_name(layer)}.png"


def thumbnails_of(scene: int) -> str:
    """The array with the views of a scene."""
    return f"thumbnails_{scene}"


def read_diagnosis(folder: Path) -> dict[str, Any]:
    """Read `diagnosis.json`, with no error over images where there is only one.

    Earlier versions wrote the error of the estimate in its place.
    """
    path = folder / DIAGNOSIS
    if not path.is_file():
        raise PullbackError(f"folder: expected {DIAGNOSIS} in {folder}, which `pullback diagnose --out` writes there.")
    document = read_json(path)
    for layer in document.get("layers", []):
        if layer["num_images"] == 1:
            _forget_errors_over_samples(layer)
    return document


def _forget_errors_over_samples(found: dict[str, Any]) -> None:
    """Set every "se" and "..._se" to None, but those of estimates and of single images."""
    for name, value in found.items():
        if isinstance(value, dict):
            _forget_errors_over_samples(value)
        elif (name == "se" or name.endswith("_se")) and not name.endswith("estimation_se"):
            found[name] = None


def read_importance(folder: Path) -> dict[str, np.ndarray]:
    """Per layer name [B, N]; `thumbnails` uint8 [b, h, w, 3], `grid` [2], `prefix`.

    Of scenes [B, N] has NaN behind the tokens of scenes with fewer than others; `scenes` (their names) and `views` [B],
    `grid` [B, 2]; `thumbnails_0`, `thumbnails_1`, ... of the first scenes uint8 [views, h, w, 3]."""
    return read_arrays(folder / IMPORTANCE)


def read_scenes(folder: Path) -> dict[str, np.ndarray]:
    """`pictures` uint8 [b, h, w, 3] with `captions`, `true_depth` (0: sky), `predicted_depth` [b, h, w] and its
    `abs_rel` [b]; `energy` of patches [t, b, rows, columns] for each of the `tasks`; the name of the `model`."""
    return read_arrays(folder / SCENES)


REPRODUCE = "reproduce.json"
EXPERIMENT = "experiment.json"
TIMES = "times.jsonl"
REPORT_PAGE, REPORT_TEXT = "report.html", "report.md"

LOOK = "look.json"
LOOK_ARRAYS = "look.npz"


def read_look(folder: Path) -> dict[str, np.ndarray]:
    """`pictures` uint8 [b, H, W, 3]; `energy` of every token [maps, b, N]; `grid` [2], `prefix`."""
    return read_arrays(folder / LOOK_ARRAYS)


GALLERY = "gallery.json"
MATCHES, MATCHES_ARRAYS, MATCHES_FIGURE = "matches.json", "matches.npz", "matches.png"


def read_matches(folder: Path) -> dict[str, np.ndarray]:
    """`pictures` uint8 [1 + k, H, W, 3]: the query, then what was found; grey where its file is gone or has changed."""
    return read_arrays(folder / MATCHES_ARRAYS)


SETTINGS = "settings.json"
ROWS = "rows.jsonl"
COST = "cost.json"
BANK = "bank.npz"
SUMMARY = "summary.json"
EXAMPLES = "examples.npz"

CURVES_FIGURE = "prune.png"
TOKENS_FIGURE = "tokens.png"
OUTPUT_FIGURE = "output.png"

KEPT, MERGED, DROPPED = 0, 1, 2
"""What became of a patch, in the array ``fates``."""

MEASURES = {
    "cosine": "cosine degradation × 100",
    "silog": "additional SILog × 100",
    "relative_l2": "relative L2 change × 100",
}


def read_summary(folder: Path) -> dict[str, Any]:
    """Read `summary.json`, with presets and scores by the names that they have now."""
    return with_current_names(read_json(folder / SUMMARY))


def with_current_names(summary: dict[str, Any]) -> dict[str, Any]:
    """Return a summary of any version with presets and scores by the names that they have now."""
    presets: dict[str, str] = {}

    def current(part: dict[str, Any]) -> dict[str, Any]:
        preset, score = current_rule(part["preset"], part["score"])
        presets[part["preset"]] = preset
        return {**part, "preset": preset, "score": score}

    rules = [
        {
            **current(rule),
            "tests": [current(test) for test in rule["tests"]],
            "cost": rule["cost"] and current(rule["cost"]),
        }
        for rule in summary["rules"]
    ]
    return {
        **summary,
        "presets": [presets.get(name, name) for name in summary["presets"]],
        "scores": [current_score(name) for name in summary["scores"]],
        "reference": current_score(summary["reference"]),
        "rules": rules,
    }


PARETO_SETTINGS = "pareto-settings.json"
PARETO = "pareto.json"
PARETO_FIGURE = "pareto.png"


def read_pareto(folder: Path) -> dict[str, Any]:
    """What `pullback pareto` found: the ``points`` of all methods with degradation, operations, time and neighbours,
    the ``frontiers`` of the methods, and the ``tests`` at each of the ``budgets``."""
    return read_json(folder / PARETO)


def read_examples(folder: Path) -> dict[str, np.ndarray]:
    """``pictures`` uint8 [b, h, w, 3] with ``names`` [b]; for each of the panels (``presets``, ``scores``, ``ratios``
    [p]) the ``fates`` uint8 [p, b, rows, columns], the patch a removed one was matched to (``partners`` int
    [p, b, rows, columns], -1: kept) and its ``values`` [p, b]. Of dense decoders also ``before`` [b, h, w] and
    ``after`` [p, b, h, w]. Presets and scores have the names that they have now."""
    import numpy as np

    arrays = read_arrays(folder / EXAMPLES)
    panels = zip(arrays["presets"].tolist(), arrays["scores"].tolist(), strict=True)
    rules = [current_rule(preset, score) for preset, score in panels]
    presets, scores = [preset for preset, _ in rules], [score for _, score in rules]
    return {**arrays, "presets": np.array(presets), "scores": np.array(scores)}


TARGETS = "targets.json"
HEADS = "heads.json"
PRUNED, PLAN = "pruned.json", "plan.json"
PLAN_FIGURE = "plan.png"
METRICS, CHECKPOINT = "metrics.jsonl", "checkpoint.pt"
OWN_TARGETS = "targets"
"""The folder, in that of a training run, of the targets that it computed itself."""
TRAINING_FIGURE = "training.png"


_OF_PLANS: dict[str, Any] = {
    **dict.fromkeys(("size", "interval", "tuning")),
    **{name: [] for name in ("shares", "alternatives", "notes")},
    "class_row": False,
}


def read_plan(folder: Path) -> dict[str, Any]:
    """What was asked for, the plan that was found, what to expect of it and of the ``alternatives``, and the ``trials``
    on the way, with operations as their cost.

    Earlier versions knew no sizes and no alternatives; where they compared times, their trials are left out."""
    document = read_json(folder / PLAN)
    earlier = "size" not in document
    trials = [] if earlier and document["budget"]["name"] == "milliseconds" else document["trials"]
    return {
        **_OF_PLANS,
        **document,
        "scores": {block: current_score(name) for block, name in document["scores"].items()},
        "trials": [{"size": None, **trial} for trial in trials],
    }


def read_training(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """The numbers of each validation, and the configuration of the model, None while there is none."""
    config = folder / "model" / CONFIG
    return Rows(folder / METRICS).read(), read_json(config) if config.is_file() else None
