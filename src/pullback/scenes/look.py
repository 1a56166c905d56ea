"""From seeds to appearance: colours, textures and gloss of surfaces, lights, sky. Colours are linear RGB.

`look_of` draws what a scene looks like; `pattern` and `noise` compute the value of a texture at a point, a number in
[-1, 1] that mixes the two colours of a surface. Edges of a pattern are as wide as a pixel, and it fades to its mean
where a pixel covers whole cells, so that distant patterns turn gray and do not flicker.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from pullback.scenes.arrangement import Layout
from pullback.scenes.draws import Draws, hashed
from pullback.scenes.splits import MAX_LIGHTS, TEXTURES, SceneRange

FACES = 6  # surfaces 0 to 5 are the faces of the room (low x, high x, low y, high y, floor, ceiling), objects follow
_WALLS = 4
_CELLS = 16  # of the noise tile, which repeats beyond
_FINE = 16  # samples per cell of the tile


@dataclass(frozen=True, eq=False)
class Surfaces:
    """One entry per surface: two colours, the texture that mixes them, and how it shines."""

    first: Tensor  # [B, S, 3]
    second: Tensor  # [B, S, 3]
    texture: Tensor  # [B, S] int64, index into TEXTURES
    scale: Tensor  # [B, S], cells per metre
    offset: Tensor  # [B, S, 2], where the texture begins, in cells
    shine: Tensor  # [B, S], weight of the highlight
    gloss: Tensor  # [B, S], its exponent


@dataclass(frozen=True, eq=False)
class Lights:
    """Lamps (`near` 1, `place` a position) or suns (`near` 0, `place` a direction, far longer than any scene)."""

    place: Tensor  # [B, L, 3]
    near: Tensor  # [B, L]
    colour: Tensor  # [B, L, 3], 0 for a light that is not there
    falloff: Tensor  # [B, L], of a lamp's light with the squared distance
    count: Tensor  # [B] int64


@dataclass(frozen=True, eq=False)
class Look:
    """Everything about the appearance of each scene."""

    surfaces: Surfaces
    lights: Lights
    ambient: Tensor  # [B, 3]
    horizon: Tensor  # [B, 3]
    zenith: Tensor  # [B, 3]
    clouds: Tensor  # [B], how much of the sky's brightness varies
    haze: Tensor  # [B], how much of the horizon's colour the farthest ground takes on


def look_of(draws: Draws, layout: Layout, ranges: SceneRange) -> Look:
    """Draw the appearance of the scenes of `layout`."""
    lights = _lights(draws, layout, ranges)
    outside = layout.is_open[:, None]
    horizon, zenith = _sky(draws)
    level = draws.uniform("ambient", 0.16, 0.32)
    inside_tint = _rgb(
        draws.uniform("ambient hue"), draws.uniform("ambient saturation", 0, 0.12), torch.ones_like(level)
    )
    sky_tint = zenith / zenith.amax(-1, keepdim=True) * 0.35 + 0.65
    ambient = level * torch.where(outside, 1.15 * sky_tint, inside_tint.squeeze(1))
    clouds = draws.uniform("clouds", 0.0, 0.5).squeeze(1)
    haze = (draws.uniform("haze", 0.1, 0.45) * outside).squeeze(1)
    return Look(_surfaces(draws, layout, ranges), lights, ambient, horizon, zenith, clouds, haze)


# Drawn from the seed


def _surfaces(draws: Draws, layout: Layout, ranges: SceneRange) -> Surfaces:
    slots = layout.objects.shape.shape[1]
    count = FACES + slots
    faces, objects = torch.arange(FACES), torch.arange(slots)
    # All four walls share what is drawn for the first; a family of objects often shares its hue.
    shared = torch.where(faces < _WALLS, 0, faces)
    family = draws.chance("same hue", 0.5) & (objects < slots - 2)
    hue = draws.uniform("hue", count=count)
    spread = draws.uniform("hue spread", -0.05, 0.05, slots)
    object_hue = torch.where(family, hue[:, FACES : FACES + 1] + spread, hue[:, FACES:])
    object_first = _rgb(
        object_hue, draws.uniform("saturation", 0.3, 0.88, slots), draws.uniform("value", 0.5, 0.95, slots)
    )
    face_first = _face_colours(draws, layout, hue[:, :FACES][:, shared], shared)
    first = torch.cat([face_first, object_first], 1)

    contrast = draws.uniform("contrast", 0.3, 0.75, count)
    contrast = torch.where(torch.arange(count) < FACES, 0.25 + 0.75 * contrast, contrast)  # large areas are calmer
    tint = _rgb(draws.uniform("second hue", count=count), draws.uniform("second saturation", 0, 0.35, count), contrast)
    texture = torch.tensor([TEXTURES.index(name) for name in ranges.textures])
    chosen = texture[draws.integer("texture", 0, len(texture) - 1, count)]
    coarse = torch.where(torch.arange(count) < FACES, 0.5, 1.0)
    scale = draws.geometric("scale", *ranges.texture_scale, count) * coarse
    offset = torch.stack([draws.uniform("offset u", 0, 16, count), draws.uniform("offset v", 0, 16, count)], -1)
    shine = draws.uniform("shine", 0.0, 0.35, count) * torch.where(torch.arange(count) < FACES, 0.25, 1.0)
    gloss = draws.geometric("gloss", 8, 70, count)

    each = torch.cat([shared, objects + FACES])
    rest = (values[:, each] for values in (chosen, scale, offset, shine, gloss))
    return Surfaces(first, first * tint[:, each], *rest)


def _face_colours(draws: Draws, layout: Layout, hue: Tensor, shared: Tensor) -> Tensor:
    """Draw colours [B, FACES, 3]: pale walls, paler ceilings, floors of wood or stone, ground of grass or sand."""
    outside = layout.is_open[:, None]
    floor_hue = torch.where(outside, draws.uniform("ground hue", 0.07, 0.36), draws.uniform("floor hue", 0.02, 0.16))
    hue = torch.cat([hue[:, :4], floor_hue, hue[:, 5:]], 1)
    saturation = draws.uniform("wall saturation", 0.03, 0.35, FACES)[:, shared]
    floor = torch.where(
        outside, draws.uniform("ground saturation", 0.15, 0.5), draws.uniform("floor saturation", 0, 0.5)
    )
    saturation = torch.cat([saturation[:, :4], floor, 0.3 * saturation[:, 5:]], 1)
    value = draws.uniform("wall value", 0.62, 0.95, FACES)[:, shared]
    floor = torch.where(outside, draws.uniform("ground value", 0.42, 0.78), draws.uniform("floor value", 0.4, 0.85))
    value = torch.cat([value[:, :4], floor, 0.3 * value[:, 5:] + 0.67], 1)
    return _rgb(hue, saturation, value)


def _lights(draws: Draws, layout: Layout, ranges: SceneRange) -> Lights:
    outside = layout.is_open[:, None]
    count = draws.integer("lights", *ranges.lights)  # [B, 1]
    index = torch.arange(MAX_LIGHTS)
    there = index < count

    across = draws.uniform("lamp x", 0.15, 0.85, MAX_LIGHTS), draws.uniform("lamp y", 0.15, 0.85, MAX_LIGHTS)
    room = layout.high - layout.low
    lamp = [layout.low[:, axis, None] + across[axis] * room[:, axis, None] for axis in range(2)]
    lamp.append(layout.high[:, 2, None] - draws.uniform("lamp drop", 0.08, 0.35, MAX_LIGHTS))
    azimuth = draws.uniform("sun azimuth", 0, 2 * math.pi, MAX_LIGHTS)
    elevation = draws.angle("sun elevation", *ranges.sun_degrees, MAX_LIGHTS)
    sun = [azimuth.cos() * elevation.cos(), azimuth.sin() * elevation.cos(), elevation.sin()]
    place = torch.where(outside[..., None], 100 * torch.stack(sun, -1), torch.stack(lamp, -1))

    warmth = draws.uniform("light warmth", -0.6, 1.0, MAX_LIGHTS)[..., None]  # blue below 0, yellow above
    tint = 1 - torch.where(
        warmth > 0,
        warmth * torch.tensor([0.0, 0.12, 0.34], dtype=torch.float64),
        -warmth * torch.tensor([0.25, 0.1, 0.0], dtype=torch.float64),
    )
    weight = draws.uniform("light weight", 0.6, 1.4, MAX_LIGHTS) * there
    weight = weight / weight.sum(1, keepdim=True)  # as bright with three lamps as with one
    lamp_power = weight * draws.uniform("lamp power", 1.7, 2.6)
    sun_power = draws.uniform("sun power", 0.95, 1.45) * torch.where(index == 0, 1.0, 0.22) * there
    colour = tint * torch.where(outside, sun_power, lamp_power)[..., None]
    falloff = torch.where(outside, 0.0, 1 / (0.38 * room.norm(dim=-1, keepdim=True)) ** 2).expand(-1, MAX_LIGHTS)
    return Lights(place, (~outside).double().expand(-1, MAX_LIGHTS), colour, falloff, count.squeeze(1))


def _sky(draws: Draws) -> tuple[Tensor, Tensor]:
    """Draw the colours [B, 3] of horizon and zenith: blue to overcast, and sometimes an evening."""
    evening = draws.chance("evening", 0.2)
    blue, clear = draws.uniform("sky hue", 0.54, 0.63), draws.uniform("sky clearness", 0.1, 0.62)
    zenith = _rgb(blue, clear, draws.uniform("sky value", 0.66, 0.92))
    pale = _rgb(
        torch.where(evening, draws.uniform("evening hue", 0.03, 0.12), blue),
        clear * 0.45,
        draws.uniform("horizon value", 0.85, 0.97),
    )
    return pale.squeeze(1), zenith.squeeze(1)


def _rgb(hue: Tensor, saturation: Tensor, value: Tensor) -> Tensor:
    """Convert HSV colours, all in [0, 1], to linear RGB [..., 3]; the hue wraps around."""
    sector = (torch.tensor([5.0, 3.0, 1.0], dtype=hue.dtype) + 6 * hue[..., None]) % 6
    coloured = torch.minimum(sector, 4 - sector).clamp(0, 1)
    return (value[..., None] * (1 - saturation[..., None] * coloured)) ** 2.2


# Textures


def pattern(texture: Tensor, u: Tensor, v: Tensor, width: Tensor, noise: Tensor, names: set[str]) -> Tensor:
    """Compute the value of each pixel's own texture, [..., H, W].

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
    """Return the distance to the nearest whole number, negative in every other cell."""
    return 0.5 - ((x + 0.5) - 2 * torch.floor(0.5 * x + 0.25) - 1).abs()


def _bricks(u: Tensor, v: Tensor, sharp: Tensor, fade: Tensor) -> Tensor:
    """Compute bricks two cells long and one high, every other course moved by one cell, mortar between them."""
    course = v.floor()
    along = 0.5 * u + 0.5 * course
    along = along - along.floor()
    to_side = 1 - (2 * along - 1).abs()  # in cells: a brick is two cells long
    to_bed = 0.5 - (v - course - 0.5).abs()
    joint = torch.minimum(to_side, to_bed) - 0.06
    return (joint * sharp).clamp(-1, 1) * fade + 0.66 * (1 - fade)


def noise(u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Compute two independent noises in [-1, 1] at (u, v) [N, H, W], in cells: one with fine detail, one broad."""
    tile = _noise_tile(u.device)
    grid = torch.stack([u, v], -1).flatten(0, -3)[None] / _CELLS  # [1, N·H, W, 2]
    grid = 2 * (grid - grid.floor()) - 1
    values = functional.grid_sample(tile[None], grid, mode="bilinear", align_corners=True)[0]
    return values[0].view_as(u), values[1].view_as(u)


@cache
def _noise_tile(device: torch.device) -> Tensor:
    """Return the tile [2, side, side], side = _CELLS · _FINE + 1; the last row and column repeat the first."""
    with torch.device("cpu"):
        tile = _tile()
    return functional.pad(tile[None], (0, 1, 0, 1), mode="circular")[0].float().to(device)


def _tile() -> Tensor:
    detailed = torch.stack([_value_noise(octave, _CELLS << octave) * 0.5**octave for octave in range(4)]).sum(0)
    broad = _value_noise(10, _CELLS // 2) + 0.5 * _value_noise(11, _CELLS)
    return torch.stack([values / values.abs().max() for values in (detailed, broad)])


def _value_noise(stream: int, cells: int) -> Tensor:
    """Interpolate random numbers on a periodic lattice of cells × cells smoothly; [side, side] in float64."""
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
