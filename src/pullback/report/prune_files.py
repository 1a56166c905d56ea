"""The files of a pruning comparison: their names and how they are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

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
