"""Heat maps over pictures, with numpy and Pillow alone: they must not need matplotlib, which is an extra.

Energies are the squares of importances. They are shown as multiples of their mean over the patches of a picture, on a
logarithmic scale, in colours that grow lighter from the lowest to the highest.
"""

from __future__ import annotations

import numpy as np
from PIL import Image

# matplotlib's inferno at every eighth of its range; between them colours are interpolated
_ANCHORS = np.array(
    [(0, 0, 4), (31, 12, 72), (85, 15, 109), (136, 34, 106), (186, 54, 85), (227, 89, 51), (249, 140, 10),
     (249, 201, 50), (252, 255, 164)], dtype=float,
)  # fmt: skip
DECADES = 300.0
"""The highest energy on a scale over the lowest, at most."""
ALPHA = 0.75


def relative_energy(patches: np.ndarray) -> np.ndarray:
    """Divide energies [..., h, w] by their mean over each picture."""
    relative: np.ndarray = patches / np.maximum(patches.mean((-2, -1), keepdims=True), 1e-300)
    return relative


def split_energy(energy: np.ndarray, prefix: int, grid: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Split energies of tokens [..., N] into those of patches over their mean [..., rows, columns], and the share [...]
    that the ``prefix`` tokens before them hold."""
    patches = energy[..., prefix:].reshape(*energy.shape[:-1], *grid)
    return relative_energy(patches), energy[..., :prefix].sum(-1) / np.maximum(energy.sum(-1), 1e-300)


def limits(relative: np.ndarray) -> tuple[float, float]:
    """Choose the lowest and the highest energy of a colour scale, at most two and a half decades apart."""
    low, high = np.percentile(relative, [5, 99.5])
    high = max(float(high), 1.5)
    return min(max(float(low), high / DECADES), 0.7), high


def colours(values: np.ndarray) -> np.ndarray:
    """Colour values [...] from 0 to 1: uint8 [..., 3], black through red to light yellow; others are clipped."""
    places = np.linspace(0, 1, len(_ANCHORS))
    channels = [np.interp(values, places, anchors) for anchors in _ANCHORS.T]
    return np.rint(np.stack(channels, -1)).astype(np.uint8)


def scaled(relative: np.ndarray, scale: tuple[float, float]) -> np.ndarray:
    """Map energies to 0 (the lower limit of the scale and below) to 1, logarithmically."""
    low, high = scale
    return np.log(np.clip(relative, low, high) / low) / np.log(high / low)


def lay_over(
    picture: np.ndarray, relative: np.ndarray, scale: tuple[float, float], alpha: float = ALPHA
) -> Image.Image:
    """Lay energies of patches [h, w] over a picture, uint8 [H, W, 3]: an RGB image of the same size.

    Patches are blended into each other. Where they matter least the picture is dimmed, where they matter most it
    glows; ``alpha`` is how far, from 0 (the picture alone) to 1.
    """
    height, width = picture.shape[:2]
    values = Image.fromarray(scaled(relative, scale).astype(np.float32))
    smooth = np.clip(np.asarray(values.resize((width, height), Image.Resampling.BICUBIC)), 0, 1)
    weight = (alpha * (0.75 + 0.2 * smooth))[..., None]
    seen = picture.astype(float)
    grey = seen @ np.array([0.299, 0.587, 0.114])
    muted = seen + alpha * (0.6 * grey[..., None] - 0.6 * seen)
    blended = (1 - weight) * muted + weight * colours(smooth)
    return Image.fromarray(np.rint(np.clip(blended, 0, 255)).astype(np.uint8))
