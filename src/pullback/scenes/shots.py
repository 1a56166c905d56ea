"""From layouts to what the ray caster reads: per image, affine maps into unit shapes and one table of surfaces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from pullback.scenes.arrangement import NOTHING, Layout, Objects
from pullback.scenes.camera import BOX, INTERVALS
from pullback.scenes.look import FACES, Look
from pullback.scenes.splits import TEXTURES

FLOOR = 4
_SPAN = 1e3  # half width of the box whose top a wall or floor is
_FACE_IDS = (2, 3, 4, 5, 1, 6)  # instance ids of low x, high x, low y, high y, floor, ceiling

_Tree = TypeVar("_Tree")


@dataclass(frozen=True, eq=False)
class Shots:
    """One entry per image, N = scenes · views."""

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
    """The images `rows` (None: all of them) whose object `slot` has this shape: they are intersected together."""

    slot: int
    shape: int
    rows: Tensor | None

    def of(self, values: Tensor) -> Tensor:
        return values if self.rows is None else values[self.rows]


@dataclass(frozen=True, eq=False)
class Plan:
    """What the ray caster must know on the CPU, so that it never waits for the device."""

    groups: list[Group]
    textures: set[str]  # names of those that can be seen
    lights: int  # the most of any image
    any_open: bool


def shots_of(layout: Layout, look: Look, intrinsics: Tensor) -> Shots:
    """All views of all scenes, in float32; `intrinsics` [B, V, 3, 3]."""
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
    """A dataclass of tensors, nested or not, with every tensor changed."""
    changed = {}
    for field in fields(tree):  # type: ignore[arg-type]
        value = getattr(tree, field.name)
        changed[field.name] = mapped(value, change) if is_dataclass(value) else change(value)
    return replace(tree, **changed)  # type: ignore[type-var]


def plan_of(shots: Shots, device: torch.device) -> Plan:
    """Read shots that are still on the CPU."""
    seen = torch.cat([~shots.is_open[:, None].expand(-1, FACES), shots.shape != NOTHING], 1)  # [N, S]
    seen[:, FLOOR] = True
    textures = shots.look.surfaces.texture[seen].unique().tolist()
    lights = int(shots.look.lights.count.max())
    return Plan(_groups(shots.shape, device), {TEXTURES[i] for i in textures}, lights, bool(shots.is_open.any()))


def _groups(shape: Tensor, device: torch.device) -> list[Group]:
    """One group per slot and shape that occurs; their rows travel to the device in one copy."""
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
    """[B, K, 3, 4]: move to the centre, turn back, divide by the half size."""
    cos, sin, still = objects.yaw.cos(), objects.yaw.sin(), torch.zeros_like(objects.yaw)
    turn = torch.stack([cos, sin, still, -sin, cos, still, still, still, still + 1], -1).unflatten(-1, (3, 3))
    linear = turn / objects.half[..., None]
    return torch.cat([linear, -(linear @ objects.centre[..., None])], -1)


def _face_maps(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """(maps [B, 6, 3, 4], half [B, 6, 3]): each face of the room as the top of a wide box, so that it needs no code
    of its own. In its frame z points into the room, y up where the face is a wall, and x along it."""
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
    """[B, C, S] in float32, in the order of `Columns`."""
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
    faces = torch.tensor(_FACE_IDS).expand(len(layout.label), -1)
    return torch.cat([faces, layout.objects.instance], 1).to(torch.int16)
