"""From seeds to positions: the class of each scene, its objects, its cameras and its room, in float64 on the CPU.

The world's z axis points up, the floor is z = 0 and the arrangement stands around the origin. Nothing is drawn and
thrown away: distances are chosen so that objects cannot meet and cameras cannot be inside anything, and the room is
built around what has to be in it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pullback.scenes.draws import Draws
from pullback.scenes.splits import ARRANGEMENTS, BOX, CLASSES, MAX_DISTRACTORS, MAX_MAIN, SHAPES, SPHERE, SceneRange

NOTHING = -1  # the shape of an empty slot
FIRST_OBJECT = 10  # instance ids below belong to the floor (1), walls (2 to 5) and the ceiling (6)
GARDEN_WALL = 2

_CLEARANCE = 0.5  # between a camera and the arrangement
_TO_WALL = 0.3  # between a camera and a wall
_HIGHEST = 1e4  # the "ceiling" of open ground


@dataclass(frozen=True, eq=False)
class Objects:
    """One slot per object: a unit shape, scaled by `half`, turned about the vertical by `yaw`, moved to `centre`."""

    shape: Tensor  # [B, K] int64: SPHERE, BOX, CYLINDER or NOTHING
    centre: Tensor  # [B, K, 3]
    half: Tensor  # [B, K, 3]
    yaw: Tensor  # [B, K]
    instance: Tensor  # [B, K] int64

    @property
    def reach(self) -> Tensor:  # [B, K]
        """Horizontal radius."""
        return torch.where(self.shape == BOX, self.half[..., 0].hypot(self.half[..., 1]), self.half[..., 0])


@dataclass(frozen=True, eq=False)
class Cameras:
    """The cameras of each scene."""

    pose: Tensor  # [B, V, 4, 4], world to camera
    fov: Tensor  # [B], radians over the shorter side of the image


@dataclass(frozen=True, eq=False)
class _Stage:
    """What the room and the cameras must know about the arrangement, each [B]."""

    azimuth: Tensor  # of camera 0, seen from the arrangement
    radius: Tensor  # of the disc on which the arrangement stands
    top: Tensor  # its height
    fov: Tensor
    distance: Tensor  # of camera 0 from the origin, along the ground
    height: Tensor  # of camera 0


@dataclass(frozen=True, eq=False)
class Layout:
    """What stands where in each scene, before anything has a colour."""

    label: Tensor  # [B] int64
    is_open: Tensor  # [B] bool
    objects: Objects
    low: Tensor  # [B, 3], corners of the room; on open ground, of the part of the world that is looked at
    high: Tensor  # [B, 3]
    cameras: Cameras


def lay_out(draws: Draws, views: int, ranges: SceneRange) -> Layout:
    """Lay out the scenes of `draws`, with `views` cameras each; a scene does not depend on the number of cameras."""
    label = draws.integer("class", 0, len(CLASSES) - 1).squeeze(1)
    setting, rest = label // (len(ARRANGEMENTS) * len(SHAPES)), label % (len(ARRANGEMENTS) * len(SHAPES))
    arrangement, shape = rest // len(SHAPES), rest % len(SHAPES)
    is_open = setting == 1
    azimuth = draws.uniform("azimuth", 0, 2 * math.pi).squeeze(1)

    main = _main_objects(draws, arrangement, shape, azimuth, ranges)
    radius, top = _extent(main)
    distractors = _distractors(draws, shape, azimuth, radius, ranges)
    backdrop = _backdrop(draws, shape, azimuth, radius, is_open)
    objects = _joined(main, distractors, backdrop)

    stage = _stage(draws, azimuth, radius, top, ranges)
    low, high = _room(draws, objects, stage, ranges)
    ground = torch.tensor([ranges.ground_radius, ranges.ground_radius, 0], dtype=torch.float64)
    low = torch.where(is_open[:, None], -ground, low)
    high = torch.where(is_open[:, None], ground + torch.tensor([0, 0, _HIGHEST]), high)
    return Layout(
        label, is_open, objects, low, high, Cameras(_poses(draws, views, stage, low, high, ranges), stage.fov)
    )


# Objects


def _main_objects(draws: Draws, arrangement: Tensor, shape: Tensor, azimuth: Tensor, ranges: SceneRange) -> Objects:
    """Place the objects of the arrangement: a row, a ring, a tower or one giant, all of one shape."""
    row, ring, tower, giant = (arrangement[:, None] == index for index in range(len(ARRANGEMENTS)))  # each [B, 1]
    index = torch.arange(MAX_MAIN)
    counts = (
        draws.integer("row count", *ranges.row_count) * row + draws.integer("ring count", *ranges.ring_count) * ring
    )
    counts = counts + draws.integer("tower count", *ranges.tower_count) * tower + giant.long()  # [B, 1]

    radius = draws.uniform("object size", *ranges.object_size) / 2
    radius = torch.where(giant, draws.uniform("giant size", *ranges.giant_size) / 2, radius)
    variation = draws.uniform("size variation", 0.9, 1.08, MAX_MAIN)
    taper = draws.uniform("taper", 0.8, 0.97) ** index * 1.25  # towers are broad below and slender above
    half = _proportions(draws, arrangement, shape, radius * torch.where(tower, taper, variation))
    kinds = torch.where(index < counts, shape[:, None], NOTHING)
    objects = Objects(
        kinds, torch.zeros_like(half), half, _yaw(draws, shape, azimuth), FIRST_OBJECT + index.expand_as(kinds)
    )

    spacing = 2 * torch.where(kinds >= 0, objects.reach, 0.0).amax(1, keepdim=True)
    spacing = spacing * torch.where(ring, draws.uniform("ring spacing", 1.2, 1.7), draws.uniform("spacing", 1.1, 1.45))
    across = (index - (counts - 1) / 2) * spacing * row
    slant = draws.uniform("row direction", -0.6, 0.6)
    turn = draws.uniform("ring phase", 0, 2 * math.pi) + 2 * math.pi * index / counts
    ring_radius = spacing / (2 * (math.pi / counts.clamp(min=2)).sin()) * ring
    right = across * slant.cos() + ring_radius * turn.cos()
    near = across * slant.sin() + ring_radius * turn.sin()
    height = torch.where(tower, (2 * half[..., 2]).cumsum(1) - half[..., 2], half[..., 2])
    centre = torch.cat([_to_world(right, near, azimuth), height[..., None]], -1)
    return Objects(objects.shape, centre, half, objects.yaw, objects.instance)


def _proportions(draws: Draws, arrangement: Tensor, shape: Tensor, radius: Tensor) -> Tensor:
    """Draw half sizes [B, MAX_MAIN, 3] within the given radii, alike within a scene and different between scenes."""
    count = radius.shape[1]
    wide = draws.uniform("width", 0.62, 0.84) * draws.uniform("width variation", 0.94, 1.06, count)
    deep = draws.uniform("depth", 0.62, 0.84) * draws.uniform("depth variation", 0.94, 1.06, count)
    # Half heights over radii: a ring is low enough to be seen over, a storey flat enough to be told from a pillar.
    shortest = torch.tensor([0.6, 0.4, 0.5, 0.6], dtype=torch.float64)[arrangement, None]  # as in ARRANGEMENTS
    tallest = torch.tensor([1.25, 0.8, 0.75, 1.0], dtype=torch.float64)[arrangement, None]
    tall = shortest + (tallest - shortest) * draws.uniform("height")
    tall = tall * draws.uniform("height variation", 0.92, 1.08, count)
    box = torch.stack([radius * wide, radius * deep, radius * tall], -1)
    cylinder = torch.stack([radius * wide, radius * wide, radius * tall], -1)
    ball = radius[..., None].expand_as(box)
    kind = shape[:, None, None]
    return torch.where(kind == SPHERE, ball, torch.where(kind == BOX, box, cylinder))


def _yaw(draws: Draws, shape: Tensor, azimuth: Tensor) -> Tensor:
    """Draw rotations [B, MAX_MAIN]; round shapes keep the seam of their texture away from camera 0."""
    free = draws.uniform("yaw", -math.pi / 4, math.pi / 4, MAX_MAIN)
    return torch.where((shape == BOX)[:, None], free, 0.3 * free) + azimuth[:, None]


def _extent(main: Objects) -> tuple[Tensor, Tensor]:
    """Return the horizontal radius and the height of the arrangement, each [B]."""
    reach = main.centre[..., :2].norm(dim=-1) + main.reach
    top = main.centre[..., 2] + main.half[..., 2]
    there = main.shape != NOTHING
    return torch.where(there, reach, 0.0).amax(1), torch.where(there, top, 0.0).amax(1)


def _distractors(draws: Draws, shape: Tensor, azimuth: Tensor, radius: Tensor, ranges: SceneRange) -> Objects:
    """Place small objects of other shapes around the arrangement, each in a sector of its own away from camera 0."""
    count = MAX_DISTRACTORS
    index = torch.arange(count)
    there = index < draws.integer("distractors", *ranges.distractors)
    kind = (shape[:, None] + draws.integer("distractor shape", 1, 2, count)) % len(SHAPES)
    low, high = ranges.object_size
    size = draws.uniform("distractor size", 0.22 * low, 0.42 * high, count)
    tall = draws.uniform("distractor height", 0.7, 1.5, count)
    half = torch.stack([size, size, torch.where(kind == SPHERE, size, size * tall)], -1)
    reach = torch.where(kind == BOX, math.sqrt(2) * size, size)
    away = radius[:, None] + reach + draws.uniform("distractor distance", 0.06, 0.8, count)
    angle = math.radians(75) + math.radians(70) * (index + draws.uniform("distractor angle", 0.3, 0.7, count))
    centre = torch.cat([_to_world(away * angle.sin(), away * angle.cos(), azimuth), half[..., 2:]], -1)
    yaw = draws.uniform("distractor yaw", -0.7, 0.7, count) + azimuth[:, None]
    ids = FIRST_OBJECT + MAX_MAIN + index.expand_as(kind)
    return Objects(torch.where(there, kind, NOTHING), centre, half, yaw, ids)


def _backdrop(draws: Draws, shape: Tensor, azimuth: Tensor, radius: Tensor, is_open: Tensor) -> Objects:
    """Place, on open ground and not always, a garden wall behind the arrangement and something large far away."""
    there = is_open[:, None] & draws.chance("backdrop", 0.5, 2)
    other = (shape + draws.integer("far shape", 1, 2).squeeze(1)) % len(SHAPES)
    kind = torch.stack([torch.full_like(shape, BOX), other], 1)
    length, height = draws.uniform("wall length", 2.5, 6.0), draws.uniform("wall height", 0.4, 1.1)
    wall = torch.cat([length, torch.full_like(length, 0.12), height], 1)
    width = draws.uniform("far width", 0.8, 2.2)
    far_height = torch.where(other[:, None] == SPHERE, width, width * draws.uniform("far height", 0.8, 1.6))
    half = torch.stack([wall, torch.cat([width, width, far_height], 1)], 1)
    away = radius[:, None] + torch.cat([draws.uniform("wall away", 3, 6.5), draws.uniform("far away", 11, 20)], 1)
    right = draws.uniform("wall aside", -2, 2, 2) * torch.tensor([1.0, 3.0], dtype=torch.float64)
    centre = torch.cat([_to_world(right, -away, azimuth), half[..., 2:]], -1)
    turn = draws.uniform("wall yaw", -0.14, 0.14, 2) * torch.tensor([1.0, 5.0], dtype=torch.float64)
    yaw = turn + azimuth[:, None] + torch.tensor([math.pi / 2, 0.0], dtype=torch.float64)
    ids = torch.tensor([GARDEN_WALL, FIRST_OBJECT + MAX_MAIN + MAX_DISTRACTORS]).expand_as(kind)
    return Objects(torch.where(there, kind, NOTHING), centre, half, yaw, ids)


def _joined(*parts: Objects) -> Objects:
    names = ("shape", "centre", "half", "yaw", "instance")
    return Objects(*(torch.cat([getattr(part, name) for part in parts], 1) for name in names))


def _to_world(right: Tensor, near: Tensor, azimuth: Tensor) -> Tensor:
    """Convert distances to the right of and towards camera 0 to world coordinates [B, K, 2]."""
    cos, sin = azimuth.cos()[:, None], azimuth.sin()[:, None]
    return torch.stack([near * cos - right * sin, near * sin + right * cos], -1)


# Room and cameras


def _stage(draws: Draws, azimuth: Tensor, radius: Tensor, top: Tensor, ranges: SceneRange) -> _Stage:
    """Place camera 0 far enough away to see the whole arrangement, not looking down too steeply."""
    fov = draws.angle("fov", *ranges.fov_degrees).squeeze(1)
    distance = radius.hypot(top / 2) / (fov / 2).sin() * draws.uniform("framing", *ranges.framing).squeeze(1)
    height = draws.uniform("camera height", *ranges.camera_height).squeeze(1)
    along = (distance**2 - (height - top / 2) ** 2).clamp(min=0).sqrt()
    along = along.maximum((height - top / 2) / math.tan(math.radians(ranges.steepest_degrees)))
    return _Stage(azimuth, radius, top, fov, along.maximum(radius + _CLEARANCE), height)


def _room(draws: Draws, objects: Objects, stage: _Stage, ranges: SceneRange) -> tuple[Tensor, Tensor]:
    """Return two corners [B, 3] of a room that holds the objects, camera 0 and a way around the arrangement."""
    camera = stage.distance[:, None] * torch.stack([stage.azimuth.cos(), stage.azimuth.sin()], 1)
    around = (stage.radius + _CLEARANCE + _TO_WALL + 0.1)[:, None].expand(-1, 2)
    there, reach = (objects.shape != NOTHING)[..., None], objects.reach[..., None] + 0.08
    high = torch.where(there, objects.centre[..., :2] + reach, 0.0).amax(1)
    low = torch.where(there, objects.centre[..., :2] - reach, 0.0).amin(1)
    margin = draws.uniform("room margin", *ranges.room_margin, 4)
    high = torch.stack([high, around, camera + _TO_WALL]).amax(0) + margin[:, :2]
    low = torch.stack([low, -around, camera - _TO_WALL]).amin(0) - margin[:, 2:]
    ceiling = draws.uniform("room height", *ranges.room_height).squeeze(1)
    ceiling = torch.stack([ceiling, stage.top + 0.4, stage.height + _TO_WALL]).amax(0)
    return torch.cat([low, torch.zeros_like(ceiling)[:, None]], 1), torch.cat([high, ceiling[:, None]], 1)


def _poses(draws: Draws, views: int, stage: _Stage, low: Tensor, high: Tensor, ranges: SceneRange) -> Tensor:
    """Return world-to-camera matrices [B, V, 4, 4]. Camera 0 is given; the others turn around the arrangement.

    They keep outside its disc, inside the room, and on camera 0's side, where no distractor stands.
    """
    azimuth, radius, top, fov, distance, height = (
        values[:, None] for values in (stage.azimuth, stage.radius, stage.top, stage.fov, stage.distance, stage.height)
    )
    view = torch.arange(views)
    first = view == 0
    side = 1 - 2 * ((view + draws.integer("orbit side", 0, 1)) % 2)
    turn = side * draws.angle("orbit", *ranges.orbit_degrees, views)
    angle = azimuth + torch.where(first, 0.0, turn)  # [B, V]
    outward = torch.stack([angle.cos(), angle.sin()], -1)
    walls = torch.where(outward > 0, high[:, None, :2] - _TO_WALL, low[:, None, :2] + _TO_WALL)
    free = (walls / outward).amin(-1)  # the way from the origin to the nearest wall
    away = distance * torch.where(first, 1.0, draws.uniform("orbit distance", 0.85, 1.2, views))
    away = torch.minimum(away, free).maximum(radius + _CLEARANCE)
    up = torch.where(first, height, draws.uniform("orbit height", *ranges.camera_height, views))
    up = torch.minimum(up, high[:, None, 2] - _TO_WALL)
    position = torch.cat([away[..., None] * outward, up[..., None]], -1)

    drop = top / 2 - up
    slack = (fov / 2 - (radius.hypot(top / 2) / away.hypot(drop)).clamp(max=1).asin()).clamp(min=0)
    tilt, pan = (draws.angle(name, *ranges.pitch_degrees, views).clamp(-slack, slack) for name in ("tilt", "pan"))
    pitch, heading = drop.atan2(away) + tilt, angle + math.pi + pan
    roll = draws.angle("roll", *ranges.roll_degrees, views)
    return _world_to_camera(position, heading, pitch, roll)


def _world_to_camera(position: Tensor, heading: Tensor, pitch: Tensor, roll: Tensor) -> Tensor:
    """Build matrices [..., 4, 4] with OpenCV axes: x right, y down, z forward."""
    level = torch.zeros_like(heading)
    forward = torch.stack([pitch.cos() * heading.cos(), pitch.cos() * heading.sin(), pitch.sin()], -1)
    right = torch.stack([heading.sin(), -heading.cos(), level], -1)
    down = torch.linalg.cross(forward, right)
    cos, sin = roll.cos()[..., None], roll.sin()[..., None]
    rotation = torch.stack([cos * right + sin * down, cos * down - sin * right, forward], -2)
    pose = torch.eye(4, dtype=position.dtype).repeat(*position.shape[:-1], 1, 1)
    pose[..., :3, :3] = rotation
    pose[..., :3, 3] = -(rotation * position[..., None, :]).sum(-1)
    return pose
