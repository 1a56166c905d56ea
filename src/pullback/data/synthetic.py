"""Pictures drawn by rule, for the demo and for tests: the same seed gives the same pixels everywhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from pullback.errors import ImageError

_PALETTES = (
    np.array(
        [
            [(236, 112, 99), (244, 208, 63), (93, 173, 226), (88, 214, 141)],
            [(255, 140, 66), (58, 134, 255), (255, 190, 11), (131, 56, 236)],
            [(239, 71, 111), (6, 214, 160), (17, 138, 178), (255, 209, 102)],
        ],
        dtype=float,
    )
    / 255
)
_LIGHT = np.array([-0.5, -0.7, 0.6]) / np.linalg.norm([-0.5, -0.7, 0.6])  # from the upper left, towards the viewer

Picture = np.ndarray  # [side, side, 3], 0 to 1


def draw_pictures(folder: Path, count: int = 6, side: int = 256, seed: int = 0) -> list[Path]:
    """Write ``count`` PNGs into ``folder``, the kinds of scene in turn."""
    if count < 1 or side < 16:
        raise ImageError(f"count={count}, side={side}: expected at least one picture of at least 16 pixels.")
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for index in range(count):
        name, draw = list(SCENES.items())[index % len(SCENES)]
        picture = draw(np.random.default_rng([seed, index]), side)
        paths.append(folder / f"{index:02d}-{name}.png")
        Image.fromarray((picture.clip(0, 1) * 255).round().astype(np.uint8)).save(paths[-1])
    return paths


def spheres(rng: np.random.Generator, side: int) -> Picture:
    """Shaded balls before a gradient."""
    picture, colours = _gradient(rng, side), _colours(rng)
    for index in range(5):
        radius = rng.uniform(0.09, 0.2)
        _ball(picture, rng.uniform(0.15, 0.85, 2), radius, colours[index % 4])
    return picture


def boxes(rng: np.random.Generator, side: int) -> Picture:
    """Turned rectangles that cast soft shadows."""
    picture, colours = _gradient(rng, side), _colours(rng)
    for index in range(6):
        centre, half, angle = rng.uniform(0.2, 0.8, 2), rng.uniform(0.06, 0.2, 2), rng.uniform(0, np.pi)
        for offset, colour, softness in ((0.03, np.zeros(3), 0.03), (0.0, colours[index % 4], 0.004)):
            x, y = _turned(side, centre + offset, angle)
            inside = np.maximum(np.abs(x) - half[0], np.abs(y) - half[1])
            _blend(picture, colour, _edge(inside, softness) * (0.35 if offset else 1.0))
    return picture


def gratings(rng: np.random.Generator, side: int) -> Picture:
    """Discs of stripes on stripes: textures without shading."""
    colours = _colours(rng)
    picture = _stripes(rng, side, colours[0], colours[1])
    for _ in range(3):
        x, y = _turned(side, rng.uniform(0.2, 0.8, 2), 0.0)
        inside = np.hypot(x, y) - rng.uniform(0.14, 0.26)
        texture = _stripes(rng, side, *rng.permutation(colours)[:2])
        picture += _edge(inside, 0.004)[..., None] * (texture - picture)
    return picture


def floor(rng: np.random.Generator, side: int) -> Picture:
    """A chequered floor in perspective, with a ball on it."""
    picture, colours = _gradient(rng, side), _colours(rng)
    x, y = _turned(side, np.array([0.5, rng.uniform(0.38, 0.48)]), 0.0)
    depth = 0.12 / np.maximum(y, 1e-3)
    tiles = (np.floor(8 * x * depth + rng.uniform(0, 8)) + np.floor(8 * depth)) % 2
    shade = np.where(tiles[..., None] > 0, 0.93, 0.28) * np.exp(-0.25 * depth)[..., None]
    picture += _edge(-y, 0.004)[..., None] * (shade - picture)
    centre = np.array([rng.uniform(0.3, 0.7), 0.6])
    x, y = _turned(side, centre + (0.05, 0.19), 0.0)
    _blend(picture, np.zeros(3), 0.5 * _edge(np.hypot(x, 3.5 * y) - 0.2, 0.08))
    _ball(picture, centre, 0.19, colours[0])
    return picture


def clouds(rng: np.random.Generator, side: int) -> Picture:
    """Noise with a natural spectrum, before a low sun."""
    waves = np.fft.fftfreq(side)
    size = np.hypot(waves[:, None], waves[None, :])
    noise = rng.standard_normal((side, side)) + 1j * rng.standard_normal((side, side))
    field = np.fft.ifft2(noise / np.maximum(size, 1 / side) ** 1.7).real
    cover = 1 / (1 + np.exp(-2.2 * (field - field.mean()) / field.std()))
    height = np.linspace(0, 1, side)[:, None, None]
    picture = (1 - height) * np.array([0.16, 0.35, 0.66]) + height * np.array([0.98, 0.66, 0.42])
    picture = np.broadcast_to(picture, (side, side, 3)).copy()
    x, y = _turned(side, np.array([rng.uniform(0.25, 0.75), 0.66]), 0.0)
    _blend(picture, np.array([1.0, 0.93, 0.7]), _edge(np.hypot(x, y) - 0.09, 0.012))
    _blend(picture, np.array([0.97, 0.95, 0.96]), 0.9 * cover**2)
    return picture


def rings(rng: np.random.Generator, side: int) -> Picture:
    """Concentric rings around two centres, cut by a straight edge."""
    colours = _colours(rng)
    parts = []
    for index in range(2):
        x, y = _turned(side, rng.uniform(0.25, 0.75, 2), 0.0)
        wave = 0.5 + 0.5 * np.tanh(4 * np.sin(2 * np.pi * rng.uniform(6, 11) * np.hypot(x, y)))
        parts.append(colours[2 * index] + wave[..., None] * (colours[2 * index + 1] - colours[2 * index]))
    x, _ = _turned(side, rng.uniform(0.4, 0.6, 2), rng.uniform(0, np.pi))
    return parts[0] + _edge(x, 0.004)[..., None] * (parts[1] - parts[0])


SCENES: dict[str, Callable[[np.random.Generator, int], Picture]] = {
    "spheres": spheres,
    "floor": floor,
    "boxes": boxes,
    "clouds": clouds,
    "gratings": gratings,
    "rings": rings,
}


def _colours(rng: np.random.Generator) -> np.ndarray:
    return rng.permutation(_PALETTES[rng.integers(len(_PALETTES))])


def _gradient(rng: np.random.Generator, side: int) -> Picture:
    """From one soft tint at the top to another at the bottom."""
    top, bottom = (1 - rng.uniform(0.2, 0.5) * (1 - _colours(rng)[0]) for _ in range(2))
    along = np.linspace(0, 1, side)[:, None, None]
    return np.broadcast_to((1 - along) * top + along * bottom, (side, side, 3)).copy()


def _stripes(rng: np.random.Generator, side: int, first: np.ndarray, second: np.ndarray) -> Picture:
    x, _ = _turned(side, np.zeros(2), rng.uniform(0, np.pi))
    wave = 0.5 + 0.5 * np.sin(2 * np.pi * rng.uniform(8, 22) * x)
    return first + wave[..., None] * (second - first)


def _turned(side: int, centre: np.ndarray, angle: float) -> tuple[np.ndarray, np.ndarray]:
    """Pixel coordinates [side, side] as seen from ``centre``, in picture widths, turned by ``angle``."""
    y, x = (np.mgrid[:side, :side] + 0.5) / side
    x, y = x - centre[0], y - centre[1]
    return np.cos(angle) * x + np.sin(angle) * y, np.cos(angle) * y - np.sin(angle) * x


def _edge(inside: np.ndarray, softness: float) -> np.ndarray:
    """1 where the signed distance is negative, 0 where it is positive, with a soft rim."""
    return np.clip(0.5 - inside / (2 * softness), 0, 1)


def _blend(picture: Picture, colour: np.ndarray, amount: np.ndarray) -> None:
    picture += amount[..., None] * (colour - picture)


def _ball(picture: Picture, centre: np.ndarray, radius: float, colour: np.ndarray) -> None:
    x, y = (axis / radius for axis in _turned(len(picture), centre, 0.0))
    z = np.sqrt(np.clip(1 - x**2 - y**2, 0, 1))
    light = np.clip(x * _LIGHT[0] + y * _LIGHT[1] + z * _LIGHT[2], 0, 1)[..., None]
    shaded = colour * (0.22 + 0.78 * light) + 0.6 * light**40
    picture += _edge((np.hypot(x, y) - 1) * radius, 0.004)[..., None] * (shaded - picture)
