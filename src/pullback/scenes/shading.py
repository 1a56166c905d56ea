"""From hits to colours: where a ray met a surface and which way that faces, its texture, lights, shadows, haze, sky."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pullback.scenes.camera import INTERVALS, Columns, Group, Plan, Shots, Vector, dot, is_blocked
from pullback.scenes.look import noise, pattern
from pullback.scenes.splits import BOX, SPHERE

_LIFT = 2e-3  # metres off the surface at which shadow rays start; without it rounding darkens lit surfaces
_CORNER_DEPTH, _CORNER_WIDTH = 0.4, 0.22  # how much and how far (metres) corners are darker in ambient light
_HAZE_LENGTH = 22.0  # metres
_EXPOSURE = 1.8


@dataclass(frozen=True, eq=False)
class Hits:
    """Rays [N, H, W] and what they met first. On the sky the surface is any one, and the depth finite."""

    direction: Vector  # in the world, each [N, H, W]; the depth along it is 1
    depth: Tensor  # [N, H, W]
    surface: Tensor  # [N, H, W] int64
    sky: Tensor  # [N, H, W] bool


def shade(shots: Shots, hits: Hits, plan: Plan) -> tuple[Tensor, Vector]:
    """Return (rgb [N, 3, H, W] in [0, 1], unit normals in the world that face the camera)."""
    point = _points(shots.origin, hits)
    index = hits.surface.flatten(1)[:, None].expand(-1, shots.table.shape[1], -1)
    picked = shots.table.gather(2, index).unflatten(2, hits.depth.shape[1:])  # [N, C, H, W]
    columns = picked.unbind(1)
    normal, u, v = _local_geometry(columns, point)
    length = dot(hits.direction, hits.direction).sqrt()
    normal, cosine = _facing(normal, hits.direction, length)

    u, v = (torch.addcmul(o, x, columns[Columns.SCALE]) for o, x in zip(columns[Columns.OFFSET], (u, v), strict=True))
    rise = hits.direction[2] / length  # 1 straight up
    if plan.any_open:
        reach = 3 / ((rise.clamp(min=0) + 0.12) * length)  # clouds lie on a plane overhead
        u = torch.where(hits.sky, hits.direction[0] * reach, u)
        v = torch.where(hits.sky, hits.direction[1] * reach, v)
    detailed, broad = noise(u, v)
    width = hits.depth * _per_image(shots.pixel) * columns[Columns.SCALE] / cosine.clamp(min=0.02).sqrt()
    mix = 0.5 + 0.5 * pattern(columns[Columns.TEXTURE], u, v, width, detailed, plan.textures)
    albedo = torch.lerp(picked[:, Columns.SECOND], picked[:, Columns.FIRST], mix[:, None])
    albedo = albedo * (1 + 0.12 * broad)[:, None]

    diffuse, highlight = _lit(shots, hits.direction, length, point, normal, columns[Columns.GLOSS], plan)
    colour = albedo * torch.addcmul(diffuse, _channels(shots.look.ambient), _openness(shots, point, normal)[:, None])
    colour = torch.addcmul(colour, highlight, columns[Columns.SHINE][:, None])
    if plan.any_open:
        colour = _outdoors(shots, hits, rise, detailed, colour)
    return (1 - torch.exp(-_EXPOSURE * colour)).clamp(0, 1) ** (1 / 2.2), normal


def _points(origin: Tensor, hits: Hits) -> Vector:
    """Return the points in the world that the rays hit."""
    x, y, z = (torch.addcmul(_per_image(origin[:, axis]), hits.depth, hits.direction[axis]) for axis in range(3))
    return x, y, z


def _local_geometry(columns: tuple[Tensor, ...], point: Vector) -> tuple[Vector, Tensor, Tensor]:
    """Return the outward normal in the world, not yet of unit length, and the surface coordinates (u, v) in metres.

    In the frame of its unit shape a point's coordinates tell on which part of the surface it lies: the largest of them
    names the face of a box; a cylinder's cap is where |z| exceeds the distance from the axis.
    """
    maps, half = columns[Columns.MAP], columns[Columns.HALF]
    x, y, z = (_affine(maps[4 * row : 4 * row + 4], point) for row in range(3))
    shape = columns[Columns.SHAPE]
    is_box, is_ball = shape == BOX, shape == SPHERE
    lies_x = x.abs() >= y.abs()
    lateral = torch.where(is_box, torch.maximum(x.abs(), y.abs()), torch.hypot(x, y))
    on_top = (z.abs() > lateral) & ~is_ball

    normal_x = torch.where(on_top, 0.0, torch.where(is_box, torch.where(lies_x, x.sign(), 0.0), x))
    normal_y = torch.where(on_top, 0.0, torch.where(is_box, torch.where(lies_x, 0.0, y.sign()), y))
    normal_z = torch.where(on_top, z.sign(), torch.where(is_ball, z, 0.0))
    local = normal_x * half[0], normal_y * half[1], normal_z * half[2]  # a map's rows are a rotation's, over `half`
    world_x, world_y, world_z = (dot(local, (maps[axis], maps[4 + axis], maps[8 + axis])) for axis in range(3))

    metric_x, metric_y, metric_z = x * half[0], y * half[1], z * half[2]
    around = torch.where(is_box, torch.where(lies_x, metric_y, metric_x), torch.atan2(y, x) * half[0])
    upward = torch.where(is_ball, torch.asin(z.clamp(-1, 1)) * half[2], metric_z)
    u, v = torch.where(on_top, metric_x, around), torch.where(on_top, metric_y, upward)
    return (world_x, world_y, world_z), u, v


def _facing(normal: Vector, direction: Vector, length: Tensor) -> tuple[Vector, Tensor]:
    """Return the unit normal on the camera's side, and the cosine of the angle at which it is seen."""
    along = dot(normal, direction)
    scale = torch.rsqrt(dot(normal, normal).clamp(min=1e-12))
    scale = torch.where(along > 0, -scale, scale)  # on a silhouette rounding can leave it turned away
    x, y, z = (component * scale for component in normal)
    return (x, y, z), -along * scale / length


def _lit(
    shots: Shots, direction: Vector, length: Tensor, point: Vector, normal: Vector, gloss: Tensor, plan: Plan
) -> tuple[Tensor, Tensor]:
    """Return the light [N, 3, H, W] that a white matt surface and a mirror-like highlight send to the camera."""
    lights = shots.look.lights
    size = (*point[0].shape[:1], 3, *point[0].shape[1:])
    diffuse, highlight = point[0].new_zeros(size), point[0].new_zeros(size)
    start = tuple(torch.add(p, n, alpha=_LIFT) for p, n in zip(point, normal, strict=True))
    for index in range(plan.lights):
        place, near = lights.place[:, index], lights.near[:, index]
        towards = tuple(_per_image(place[:, axis]) - _per_image(near) * point[axis] for axis in range(3))
        squared = dot(towards, towards)
        distance = squared.sqrt()
        cosine = dot(normal, towards) / distance
        strength = torch.reciprocal(1 + squared * _per_image(lights.falloff[:, index]))
        strength = torch.where(_shadowed(shots, start, place, near, plan.groups) | (cosine <= 0), 0.0, strength)
        halfway = tuple(a / distance - b / length for a, b in zip(towards, direction, strict=True))
        mirror = dot(normal, halfway).clamp(min=0) * torch.rsqrt(dot(halfway, halfway).clamp(min=1e-12))
        colour = _channels(lights.colour[:, index])
        diffuse.addcmul_(colour, (strength * cosine)[:, None])
        highlight.addcmul_(colour, (strength * mirror.pow(gloss))[:, None])
    return diffuse, highlight


def _shadowed(shots: Shots, start: tuple[Tensor, ...], place: Tensor, near: Tensor, groups: list[Group]) -> Tensor:
    """Return whether an object stands between each point and the light, [N, H, W]."""
    shadow = torch.zeros_like(start[0], dtype=torch.bool)
    for group in groups:
        maps = group.of(shots.maps)[:, group.slot]  # [n, 3, 4]
        light, here = group.of(place), group.of(near)
        target = (maps[..., :3] * light[:, None]).sum(-1) + maps[..., 3] * here[:, None]  # [n, 3], in the shape's frame
        x, y, z = (group.of(component) for component in start)
        # Objects turn about the vertical only: z does not mix with x and y.
        origin = (
            torch.addcmul(torch.addcmul(_entry(maps, 0, 3), x, _entry(maps, 0, 0)), y, _entry(maps, 0, 1)),
            torch.addcmul(torch.addcmul(_entry(maps, 1, 3), x, _entry(maps, 1, 0)), y, _entry(maps, 1, 1)),
            torch.addcmul(_entry(maps, 2, 3), z, _entry(maps, 2, 2)),
        )
        x, y, z = (_per_image(target[:, axis]) - _per_image(here) * origin[axis] for axis in range(3))
        blocked = is_blocked(INTERVALS[group.shape](origin, (x, y, z)))
        if group.rows is None:
            shadow |= blocked
        else:
            shadow[group.rows] |= blocked
    return shadow


def _openness(shots: Shots, point: Vector, normal: Vector) -> Tensor:
    """Return how much ambient light arrives, [N, H, W]: less in corners and where things stand on the floor."""
    share = torch.ones_like(point[0])
    for axis in range(3):
        for bound, side in ((shots.low, 1), (shots.high, -1)):
            gap = side * (point[axis] - _per_image(bound[:, axis]))
            near = torch.reciprocal(1 + gap / (4 * _CORNER_WIDTH)).square().square()  # exp(-gap / width), but cheaper
            share = share * (1 - _CORNER_DEPTH * near * (1 - (side * normal[axis]).clamp(min=0)))
    return share * (0.85 + 0.15 * normal[2])  # more comes from above


def _outdoors(shots: Shots, hits: Hits, rise: Tensor, detailed: Tensor, colour: Tensor) -> Tensor:
    """Lay haze over what is far, and paint the sky where nothing was hit."""
    look = shots.look
    horizon, zenith = _channels(look.horizon), _channels(look.zenith)
    haze = _per_image(look.haze) * (1 - torch.exp(-hits.depth / _HAZE_LENGTH))
    colour = torch.lerp(colour, horizon.expand_as(colour), haze[:, None])
    height = rise.clamp(min=0)
    sky = torch.lerp(horizon.expand_as(colour), zenith.expand_as(colour), height.sqrt()[:, None])
    cloud = (detailed + 0.1).clamp(min=0) * _per_image(look.clouds) * (4 * height).clamp(max=1)
    sky = torch.lerp(sky, torch.full_like(sky, 0.9), cloud[:, None])
    return torch.where(hits.sky[:, None], sky, colour)


def _affine(row: tuple[Tensor, ...], point: Vector) -> Tensor:
    return torch.addcmul(torch.addcmul(torch.addcmul(row[3], row[0], point[0]), row[1], point[1]), row[2], point[2])


def _entry(maps: Tensor, row: int, column: int) -> Tensor:
    return _per_image(maps[:, row, column])


def _per_image(values: Tensor) -> Tensor:
    return values[:, None, None]  # [N] to [N, 1, 1]


def _channels(values: Tensor) -> Tensor:
    return values[:, :, None, None]  # [N, 3] to [N, 3, 1, 1]
