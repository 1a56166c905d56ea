"""What the ray caster reads of a scene, one entry per picture, and where rays meet objects.

An object is a unit shape (sphere of radius 1, cube [-1, 1]³, cylinder of radius 1 along z from -1 to 1) under an
affine map. `shots_of` makes the maps and one table of all surfaces. A ray is taken into the shape's frame, where the
interval functions give the part [near, far] of it that lies inside. Its direction is never normalised, so the ray
parameter means the same in every frame: for camera rays of depth 1 it is the metric depth, towards a lamp it runs from
0 to 1.

A ray that misses has an interval that is empty or NaN. NaN needs no care: it passes through `maximum` and `clamp`, and
every comparison with it is false.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from pullback.scenes.arrangement import NOTHING, Layout, Objects
from pullback.scenes.look import FACES, Look
from pullback.scenes.splits import BOX, CYLINDER, SPHERE, TEXTURES

Vector = tuple[Tensor, Tensor, Tensor]  # x, y, z, of any shapes that broadcast
Interval = tuple[Tensor, Tensor]
_Tree = TypeVar("_Tree")

FLOOR = 4
_SPAN = 1e3  # half width of the box whose top a wall or floor is
_FACE_IDS = (2, 3, 4, 5, 1, 6)  # instance ids of low x, high x, low y, high y, floor, ceiling
_TINY = 1e-12  # squared length of a direction below which a ray counts as parallel to the axis


# Pictures


@dataclass(frozen=True, eq=False)
class Shots:
    """What is known about each picture before rays are cast, N = scenes · views."""

    origin: Tensor  # [N, 3], where the camera is
    rays: Tensor  # [N, 3, 3]: pixel (x, y, 1) to a direction in the world whose depth is 1
    rotation: Tensor  # [N, 3, 3], world to camera
    pixel: Tensor  # [N], width of a pixel at depth 1
    is_open: Tensor  # [N] bool
    low: Tensor  # [N, 3]
    high: Tensor  # [N, 3]
    shape: Tensor  # [N, K] int64
    maps: Tensor  # [N, K, 3, 4], world to unit shape
    table: Tensor  # [N, C, S]: what `Columns` names, for each surface
    instance: Tensor  # [N, S] int16
    look: Look


class Columns:
    """Rows of `Shots.table`."""

    MAP = slice(0, 12)  # world to unit shape, [3, 4] row by row
    HALF = slice(12, 15)
    SHAPE = 15
    FIRST = slice(16, 19)
    SECOND = slice(19, 22)
    TEXTURE = 22
    SCALE = 23
    OFFSET = slice(24, 26)
    SHINE = 26
    GLOSS = 27


@dataclass(frozen=True, eq=False)
class Group:
    """The pictures `rows` (None: all) whose object `slot` has this shape; they are intersected together."""

    slot: int
    shape: int
    rows: Tensor | None

    def of(self, values: Tensor) -> Tensor:
        """Take the rows of this group."""
        return values if self.rows is None else values[self.rows]


@dataclass(frozen=True, eq=False)
class Plan:
    """What the ray caster must know on the CPU, so that it never has to wait for the device."""

    groups: list[Group]
    textures: set[str]  # names of those that can be seen
    lights: int  # the most of any image
    any_open: bool


def shots_of(layout: Layout, look: Look, intrinsics: Tensor) -> Shots:
    """Prepare all views of all scenes, in float32; `intrinsics` [B, V, 3, 3]."""
    views = intrinsics.shape[1]
    pose = layout.cameras.pose.flatten(0, 1)
    rotation, intrinsics = pose[:, :3, :3], intrinsics.flatten(0, 1)
    maps = _object_maps(layout.objects)
    shots = Shots(
        origin=-(rotation.mT @ pose[:, :3, 3:]).squeeze(-1),
        rays=rotation.mT @ torch.linalg.inv(intrinsics),
        rotation=rotation,
        pixel=1 / intrinsics[:, 0, 0],
        is_open=layout.is_open.repeat_interleave(views),
        low=layout.low.repeat_interleave(views, 0),
        high=layout.high.repeat_interleave(views, 0),
        shape=layout.objects.shape.repeat_interleave(views, 0),
        maps=maps.repeat_interleave(views, 0),
        table=_table(layout, look, maps).repeat_interleave(views, 0),
        instance=_instances(layout).repeat_interleave(views, 0),
        look=mapped(look, lambda values: values.repeat_interleave(views, 0)),
    )
    return mapped(shots, lambda values: values.float() if values.is_floating_point() else values)


def mapped(tree: _Tree, change: Callable[[Tensor], Tensor]) -> _Tree:
    """Apply `change` to every tensor of a dataclass, nested or not."""
    changed = {}
    for field in fields(tree):  # type: ignore[arg-type]
        value = getattr(tree, field.name)
        changed[field.name] = mapped(value, change) if is_dataclass(value) else change(value)
    return replace(tree, **changed)  # type: ignore[type-var]


def plan_of(shots: Shots, device: torch.device) -> Plan:
    """Read off the plan from shots that are still on the CPU."""
    seen = torch.cat([~shots.is_open[:, None].expand(-1, FACES), shots.shape != NOTHING], 1)  # [N, S]
    seen[:, FLOOR] = True
    textures = shots.look.surfaces.texture[seen].unique().tolist()
    lights = int(shots.look.lights.count.max())
    return Plan(_groups(shots.shape, device), {TEXTURES[i] for i in textures}, lights, bool(shots.is_open.any()))


def _groups(shape: Tensor, device: torch.device) -> list[Group]:
    """Make a group for each slot and shape that occurs; their rows go to the device in one copy."""
    found = [(slot, kind, shape[:, slot] == kind) for slot in range(shape.shape[1]) for kind in INTERVALS]
    found = [(slot, kind, mask) for slot, kind, mask in found if mask.any()]
    if not found:
        return []
    sizes = [int(mask.sum()) for *_, mask in found]
    rows = torch.cat([mask.nonzero().squeeze(1) for *_, mask in found]).to(device).split(sizes)
    return [
        Group(slot, kind, None if size == len(shape) else some)
        for (slot, kind, _), size, some in zip(found, sizes, rows, strict=True)
    ]


def _object_maps(objects: Objects) -> Tensor:
    """Return the maps [B, K, 3, 4] into the unit shapes: subtract the centre, turn back, divide by the half size."""
    cos, sin, still = objects.yaw.cos(), objects.yaw.sin(), torch.zeros_like(objects.yaw)
    turn = torch.stack([cos, sin, still, -sin, cos, still, still, still, still + 1], -1).unflatten(-1, (3, 3))
    linear = turn / objects.half[..., None]
    return torch.cat([linear, -(linear @ objects.centre[..., None])], -1)


def _face_maps(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Return (maps [B, 6, 3, 4], half [B, 6, 3]) of the faces of the room, each as the top of a wide box, so that it
    needs no code of its own. In its frame z points into the room, y up where the face is a wall, and x along it."""
    maps = torch.zeros(len(low), FACES, 3, 4, dtype=low.dtype)
    for face in range(FACES):
        axis, is_high = divmod(face, 2)
        along, up = {0: (1, 2), 1: (0, 2), 2: (0, 1)}[axis]
        inward = -1.0 if is_high else 1.0
        maps[:, face, 0, along] = 1 / _SPAN
        maps[:, face, 1, up] = 1 / _SPAN
        maps[:, face, 2, axis] = inward
        maps[:, face, 2, 3] = 1 - inward * (high if is_high else low)[:, axis]
    half = torch.tensor([_SPAN, _SPAN, 1.0], dtype=low.dtype).expand(len(low), FACES, 3)
    return maps, half


def _table(layout: Layout, look: Look, maps: Tensor) -> Tensor:
    """Return the table [B, C, S] in float32, in the order of `Columns`."""
    face_maps, face_half = _face_maps(layout.low, layout.high)
    surfaces = look.surfaces
    boxes = torch.full(face_maps.shape[:2], BOX)
    columns = [
        torch.cat([face_maps, maps], 1).flatten(2),
        torch.cat([face_half, layout.objects.half], 1),
        torch.cat([boxes, layout.objects.shape], 1)[..., None],
        surfaces.first,
        surfaces.second,
        surfaces.texture[..., None],
        surfaces.scale[..., None],
        surfaces.offset,
        surfaces.shine[..., None],
        surfaces.gloss[..., None],
    ]
    return torch.cat([column.float() for column in columns], -1).mT.contiguous()


def _instances(layout: Layout) -> Tensor:
    """Return the instance id of each surface, [B, S] int16."""
    faces = torch.tensor(_FACE_IDS).expand(len(layout.label), -1)
    return torch.cat([faces, layout.objects.instance], 1).to(torch.int16)


# Rays against unit shapes


def sphere_interval(origin: Vector, direction: Vector) -> Interval:
    """Return the part of the ray inside the unit sphere."""
    return _round_interval(origin, direction)


def box_interval(origin: Vector, direction: Vector) -> Interval:
    """Return the part of the ray inside the cube [-1, 1]³."""
    near, far = _slab(origin[0], direction[0])
    for axis in (1, 2):
        low, high = _slab(origin[axis], direction[axis])
        near, far = torch.maximum(near, low), torch.minimum(far, high)
    return near, far


def cylinder_interval(origin: Vector, direction: Vector) -> Interval:
    """Return the part of the ray inside the capped cylinder x² + y² ≤ 1, |z| ≤ 1."""
    near, far = _round_interval(origin[:2], direction[:2])
    low, high = _slab(origin[2], direction[2])
    return torch.maximum(near, low), torch.minimum(far, high)


INTERVALS: dict[int, Callable[[Vector, Vector], Interval]] = {
    SPHERE: sphere_interval,
    BOX: box_interval,
    CYLINDER: cylinder_interval,
}


def is_blocked(interval: Interval) -> Tensor:
    """Return whether the shape lies between the two ends of a segment, parameters 0 and 1."""
    near, far = interval
    return near.clamp(min=0) < far.clamp(max=1)


def room_exit(origin: Vector, direction: Vector, low: Vector, high: Vector) -> tuple[Tensor, Tensor]:
    """Return (parameter, face) at which a ray that starts inside an axis-aligned room meets it from inside.

    Faces are numbered 0 and 1 for low and high x, 2 and 3 for y, 4 for the floor, 5 for the ceiling.
    """
    exits = []
    for axis in range(3):
        reciprocal = direction[axis].reciprocal()
        exits.append(torch.maximum((low[axis] - origin[axis]) * reciprocal, (high[axis] - origin[axis]) * reciprocal))
    nearest = torch.minimum(torch.minimum(exits[0], exits[1]), exits[2])
    face = torch.where(exits[0] <= nearest, direction[0] > 0, (direction[1] > 0) + 2)
    face = torch.where(exits[2] <= nearest, (direction[2] > 0) + 4, face)
    return nearest, face


def _slab(origin: Tensor, direction: Tensor) -> Interval:
    """Return the part with -1 ≤ z ≤ 1. A parallel ray divides by zero, and the infinities give all of it or nothing."""
    reciprocal = direction.reciprocal()
    enters, leaves = (-1 - origin) * reciprocal, (1 - origin) * reciprocal
    return torch.minimum(enters, leaves), torch.maximum(enters, leaves)


def _round_interval(origin: tuple[Tensor, ...], direction: tuple[Tensor, ...]) -> Interval:
    """Return the part within distance 1 of the centre (three components) or of the z axis (two).

    The half chord is measured from the point of closest approach: b² - ac loses all digits for a small shape far away.
    """
    length2 = dot(direction, direction).clamp(min=_TINY)
    middle = -dot(origin, direction) / length2
    closest = tuple(torch.addcmul(o, middle, d) for o, d in zip(origin, direction, strict=True))
    squared = (1 - dot(closest, closest)) / length2
    half = squared * squared.rsqrt()  # NaN where the ray passes by; on such numbers MKL's sqrt is twenty times slower
    return middle - half, middle + half


def dot(left: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> Tensor:
    """Multiply two vectors, component tensors of any number."""
    total = left[0] * right[0]
    for x, y in zip(left[1:], right[1:], strict=True):
        total = torch.addcmul(total, x, y)
    return total
