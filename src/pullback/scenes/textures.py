"""Procedural textures: a number in [-1, 1] at each (u, v), in cells, that mixes a surface's two colours.

Edges are as wide as a pixel, and a pattern fades to its mean where a pixel covers whole cells, so that far patterns
turn gray and do not flicker.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from pullback.scenes.draws import hashed
from pullback.scenes.splits import TEXTURES

_CELLS = 16  # of the noise tile, which repeats beyond
_FINE = 16  # samples per cell of the tile


def pattern(texture: Tensor, u: Tensor, v: Tensor, width: Tensor, noise: Tensor, names: set[str]) -> Tensor:
    """The value of each pixel's own texture, [..., H, W].

    Args:
        texture: index into TEXTURES.
        u, v: in cells.
        width: of a pixel, in cells.
        noise: value noise at (u, v).
        names: the textures that occur at all; the others cost nothing.
    """
    sharp = 2 / width.clamp(min=1e-3)  # slope of an edge one pixel wide
    fade = (1.6 - 1.2 * width).clamp(0, 1)  # 0 where a pixel covers more than a cell
    value = torch.zeros_like(u)
    if "gradient" in names:
        value = _set(value, texture, "gradient", torch.sin(0.5 * v + 0.2 * u))
    if "noise" in names:
        value = _set(value, texture, "noise", noise * fade)
    if names & {"checker", "stripes", "zigzag"}:
        wave = _triangle(u)
        stripes = (wave * sharp).clamp(-1, 1) * fade
        value = _set(value, texture, "stripes", stripes)
        if "checker" in names:
            value = _set(value, texture, "checker", stripes * (_triangle(v) * sharp).clamp(-1, 1))
        if "zigzag" in names:
            value = _set(value, texture, "zigzag", (_triangle(v + 1.4 * wave) * sharp).clamp(-1, 1) * fade)
    if "bricks" in names:
        value = _set(value, texture, "bricks", _bricks(u, v, sharp, fade))
    if "dots" in names:
        radius = torch.hypot(u - u.floor() - 0.5, v - v.floor() - 0.5)
        value = _set(value, texture, "dots", ((0.32 - radius) * sharp).clamp(-1, 1) * fade - 0.36 * (1 - fade))
    return value


def _set(value: Tensor, texture: Tensor, name: str, pattern: Tensor) -> Tensor:
    return torch.where(texture == TEXTURES.index(name), pattern, value)


def _triangle(x: Tensor) -> Tensor:
    """Distance to the nearest whole number, counted negative in every other cell."""
    return 0.5 - ((x + 0.5) - 2 * torch.floor(0.5 * x + 0.25) - 1).abs()


def _bricks(u: Tensor, v: Tensor, sharp: Tensor, fade: Tensor) -> Tensor:
    """Bricks two cells long and one high, every other course moved by one cell, mortar between."""
    course = v.floor()
    along = 0.5 * u + 0.5 * course
    along = along - along.floor()
    to_side = 1 - (2 * along - 1).abs()  # in cells: a brick is two cells long
    to_bed = 0.5 - (v - course - 0.5).abs()
    joint = torch.minimum(to_side, to_bed) - 0.06
    return (joint * sharp).clamp(-1, 1) * fade + 0.66 * (1 - fade)


def noise(u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Two independent value noises in [-1, 1] at (u, v) [N, H, W], in cells: one with fine detail, one broad."""
    tile = _noise_tile(u.device)
    grid = torch.stack([u, v], -1).flatten(0, -3)[None] / _CELLS  # [1, N·H, W, 2]
    grid = 2 * (grid - grid.floor()) - 1
    values = functional.grid_sample(tile[None], grid, mode="bilinear", align_corners=True)[0]
    return values[0].view_as(u), values[1].view_as(u)


@cache
def _noise_tile(device: torch.device) -> Tensor:
    """[2, side, side] with side = _CELLS · _FINE + 1; the last row and column repeat the first."""
    with torch.device("cpu"):
        tile = _tile()
    return functional.pad(tile[None], (0, 1, 0, 1), mode="circular")[0].float().to(device)


def _tile() -> Tensor:
    detailed = torch.stack([_value_noise(octave, _CELLS << octave) * 0.5**octave for octave in range(4)]).sum(0)
    broad = _value_noise(10, _CELLS // 2) + 0.5 * _value_noise(11, _CELLS)
    return torch.stack([values / values.abs().max() for values in (detailed, broad)])


def _value_noise(stream: int, cells: int) -> Tensor:
    """Random numbers on a lattice of cells × cells, smoothly interpolated, periodic; [side, side] in float64."""
    side = _CELLS * _FINE
    lattice = hashed(torch.arange(cells * cells) + (stream + 1) * 1_000_003).double() / (1 << 63)
    lattice = lattice.view(cells, cells)
    position = torch.arange(side, dtype=torch.float64) * cells / side
    left = position.floor().long()
    share = position - left
    share = share * share * (3 - 2 * share)
    right = (left + 1) % cells
    rows = lattice[left] * (1 - share)[:, None] + lattice[right] * share[:, None]
    return rows[:, left] * (1 - share) + rows[:, right] * share
