"""The files of a diagnosis: their names, and writing them so that a reader never meets half a file.

The files of a pruning comparison: their names and how they are read.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from pullback.errors import PullbackError

DIAGNOSIS = "diagnosis.json"
IMPORTANCE = "importance.npz"
SPECTRUM = "spectrum.png"
SCENES = "scenes.npz"
SCENES_FIGURE = "scenes.png"
PAGE = "index.html"

# A list of plain numbers that `json.dumps(indent=...)` spread over lines. No string holds a raw newline: none matches.
_NUMBERS = re.compile(r"\[\n\s+(-?[\d.eE+-]+(?:,\n\s+-?[\d.eE+-]+)*)\n\s+\]")


def layer_name(layer: int | str) -> str:
    """10 -> "L10", "hooks" -> "hooks": in tables, array names and file names."""
    return layer if isinstance(layer, str) else f"L{layer:02d}"


def tokens_figure(layer: int | str) -> str:
    return f"tokens_{layer_name(layer)}.png"


def thumbnails_of(scene: int) -> str:
    """The array with the views of a scene."""
    return f"thumbnails_{scene}"


def read_diagnosis(folder: Path) -> dict[str, Any]:
    path = folder / DIAGNOSIS
    if not path.is_file():
        raise PullbackError(f"folder: expected {DIAGNOSIS} in {folder}, which `pullback diagnose --out` writes there.")
    with open(path, encoding="utf-8") as file:
        document: dict[str, Any] = json.load(file)
    return document


def read_importance(folder: Path) -> dict[str, np.ndarray]:
    """Per layer name [B, N]; `thumbnails` uint8 [b, h, w, 3], `grid` [2], `prefix`.

    Of scenes [B, N] has NaN behind the tokens of scenes with fewer than others; `scenes` (their names) and `views` [B],
    `grid` [B, 2]; `thumbnails_0`, `thumbnails_1`, ... of the first scenes uint8 [views, h, w, 3]."""
    return _read_arrays(folder / IMPORTANCE)


def read_scenes(folder: Path) -> dict[str, np.ndarray]:
    """`pictures` uint8 [b, h, w, 3] with `captions`, `true_depth` (0: sky), `predicted_depth` [b, h, w] and its
    `abs_rel` [b]; `energy` of patches [t, b, rows, columns] for each of the `tasks`; the name of the `model`."""
    return _read_arrays(folder / SCENES)


def _read_arrays(path: Path) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Strict JSON; lists of numbers stay on one line."""
    text = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False)
    text = _NUMBERS.sub(lambda match: "[" + re.sub(r",\n\s+", ", ", match[1]) + "]", text)
    write_text(path, text + "\n")


def write_text(path: Path, text: str) -> None:
    _write(path, lambda file: file.write(text.encode("utf-8")))


def write_bytes(path: Path, content: bytes) -> None:
    _write(path, lambda file: file.write(content))


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    _write(path, lambda file: np.savez_compressed(file, **arrays))  # type: ignore[arg-type]


def _write(path: Path, fill: Callable[[IO[bytes]], object]) -> None:
    """Into a temporary file beside ``path``, then renamed over it."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            fill(file)
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _umask() -> int:
    """mkstemp makes private files; results are as readable as any other file of the user."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


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
    with open(folder / SUMMARY, encoding="utf-8") as file:
        document: dict[str, Any] = json.load(file)
    return document


def read_examples(folder: Path) -> dict[str, np.ndarray]:
    """``pictures`` uint8 [b, h, w, 3] with ``names`` [b]; for each of the panels (``presets``, ``scores``, ``ratios``
    [p]) the ``fates`` uint8 [p, b, rows, columns], the patch a removed one was matched to (``partners`` int
    [p, b, rows, columns], -1: kept) and its ``values`` [p, b]. Of dense decoders also ``before`` [b, h, w] and
    ``after`` [p, b, h, w]."""
    with np.load(folder / EXAMPLES, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}
