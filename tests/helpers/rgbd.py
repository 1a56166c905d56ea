"""A small folder of RGB-D pairs."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
from PIL import Image

from recipes.rgbd import LABELS


def write_pairs(folder: Path, count: int = 6, size: tuple[int, int] = (40, 30)) -> Path:
    """``count`` pairs of random pictures, every other one held out; the first train pair is in-filled."""
    generator = np.random.default_rng(0)
    width, height = size
    rows = []
    for index in range(count):
        rgb, depth = f"s{index % 3}/{index}.jpg", f"s{index % 3}/{index}_depth.png"
        (folder / f"s{index % 3}").mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 255, (height, width, 3), dtype=np.uint8)).save(folder / rgb)
        Image.fromarray(generator.integers(500, 4000, (height, width), dtype=np.uint16)).save(folder / depth)
        split, kind = ("heldout" if index % 2 else "train"), ("infilled" if index == 0 else "raw")
        rows.append([rgb, depth, split, f"sequence{index % 3}", f"scene{index % 3}", kind])
    with (folder / LABELS).open("w", newline="") as file:
        csv.writer(file).writerows([["rgb", "depth", "split", "sequence", "scene", "depth_kind"], *rows])
    return folder
