"""RGB-D pairs of a folder: colour as JPEG, depth as 16-bit PNG in millimetres (0: not measured), `labels.csv`.

Its columns are rgb and depth (paths in the folder), split, sequence, scene and depth_kind. All pairs of a split have
one size.
"""

from __future__ import annotations

import csv
import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from pullback.data.images import PixelFormat, scaled_size
from pullback.errors import PullbackError, first_line

LABELS = "labels.csv"
INFILLED = "infilled"  # depth_kind of maps whose holes were filled by a guess
_COLUMNS = ("rgb", "depth", "split", "sequence", "scene", "depth_kind")
_MILLIMETRES = 1000


@dataclass(frozen=True, eq=False)
class Pairs:
    """Colour and depth of n photographs."""

    paths: tuple[Path, ...]  # of the colour pictures
    rgb: Tensor  # [n, 3, H, W] uint8
    depth: Tensor  # [n, H, W] float32, metres, 0 where it was not measured
    sequence: tuple[str, ...]
    scene: tuple[str, ...]
    infilled: Tensor  # [n] bool: the holes of the depth map were filled by a guess

    def __len__(self) -> int:
        return len(self.paths)

    def to(self, device: torch.device) -> Pairs:
        """Move all tensors to a device."""
        return replace(self, rgb=self.rgb.to(device), depth=self.depth.to(device), infilled=self.infilled.to(device))

    def digest(self) -> str:
        """Return a hash of the pixels, the depths and the scenes."""
        found = hashlib.sha256("\n".join(self.scene).encode())
        for values in (self.rgb, self.depth, self.infilled):
            found.update(values.cpu().contiguous().numpy().tobytes())
        return found.hexdigest()[:16]

    def centred_depth(self, wanted: PixelFormat) -> Tensor:
        """Return the depth [n, h, w] of the pixels that `data.images.centre_crop` shows, by the nearest neighbour."""
        own_height, own_width = self.depth.shape[-2:]
        width, height = scaled_size(own_width, own_height, wanted.size)
        rows = _nearest(wanted.size[0], height, own_height)
        columns = _nearest(wanted.size[1], width, own_width)
        return self.depth[:, rows.to(self.depth.device)][:, :, columns.to(self.depth.device)]


def read_pairs(folder: Path, split: str) -> Pairs:
    """Read the pairs of a split, "train" or "heldout", in the order of `labels.csv`."""
    rows = [row for row in _labels(folder) if row["split"] == split]
    if not rows:
        raise PullbackError(f"rgbd: {folder / LABELS} has no pair of the split {split!r}. Expected train and heldout.")
    rgb = [_colour(folder / row["rgb"]) for row in rows]
    depth = [_depth(folder / row["depth"]) for row in rows]
    size = rgb[0].shape[-2:]
    for row, colour, map_ in zip(rows, rgb, depth, strict=True):
        if colour.shape[-2:] != size or map_.shape != size:
            raise PullbackError(
                f"rgbd: {row['rgb']} is {_size(colour)} and {row['depth']} {_size(map_)}, expected {_size(rgb[0])}, "
                "as the first picture of the split. Resize them to one size."
            )
    return Pairs(
        tuple(folder / row["rgb"] for row in rows),
        torch.stack(rgb),
        torch.stack(depth),
        tuple(row["sequence"] for row in rows),
        tuple(row["scene"] for row in rows),
        torch.tensor([row["depth_kind"] == INFILLED for row in rows]),
    )


def _labels(folder: Path) -> list[dict[str, str]]:
    path = folder / LABELS
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            rows = list(reader)
    except OSError as error:
        raise PullbackError(
            f"rgbd: {path} cannot be read ({error.strerror}). Expected a folder with {LABELS} and the pictures that it "
            "names."
        ) from None
    lacking = [name for name in _COLUMNS if name not in (reader.fieldnames or ())]
    if lacking:
        raise PullbackError(f"rgbd: {path} has no column {', '.join(lacking)}; expected {', '.join(_COLUMNS)}.")
    return rows


def _colour(path: Path) -> Tensor:
    """[3, H, W] uint8."""
    with _opened(path) as image:
        return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def _depth(path: Path) -> Tensor:
    """[H, W] float32 in metres."""
    with _opened(path) as image:
        if not image.mode.startswith("I"):
            raise PullbackError(
                f"rgbd: {path} has the mode {image.mode}, expected 16-bit gray in millimetres (I;16). Save it as one."
            )
        return torch.from_numpy(np.array(image).astype(np.float32)) / _MILLIMETRES


def _opened(path: Path) -> Image.Image:
    try:
        image = Image.open(path)
        image.load()
    except OSError as error:  # also UnidentifiedImageError, and a file that was cut off
        raise PullbackError(
            f"rgbd: {path}, which {LABELS} names, cannot be read ({first_line(error)}). Is the folder complete?"
        ) from None
    return image


def _nearest(shown: int, scaled: int, own: int) -> Tensor:
    """Of the middle ``shown`` of ``scaled`` places, the nearest of ``own`` places."""
    places = torch.arange(shown) + (scaled - shown) // 2
    return ((places + 0.5) * own / scaled).long().clamp(0, own - 1)


def _size(picture: Tensor) -> str:
    return f"{picture.shape[-1]}x{picture.shape[-2]}"
