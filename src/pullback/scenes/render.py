"""Procedural scenes with known ground truth: pictures, metric depth, normals, instances, class, cameras.

Rooms and open ground with spheres, boxes and cylinders, drawn from seeds and cast with analytic rays: no download, no
asset files. A scene depends on its seed and ranges alone; batch, device and number of views do not change it. The way
from a seed to a picture: `arrangement` (what stands where), `look` (colours and lights), `camera` (what rays need),
then here the rays, and `shading` (their colours).

    >>> batch = render([1, 2, 3], size=64, views=2)
    >>> batch.rgb.shape, CLASSES[batch.label[0]]
    (torch.Size([3, 2, 3, 64, 64]), 'open ground: tower of boxes')
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeAlias

import torch
from torch import Tensor

from pullback.data.images import checked_size, normalised
from pullback.errors import PullbackError
from pullback.scenes.arrangement import lay_out
from pullback.scenes.camera import FLOOR, INTERVALS, Plan, Shots, Vector, mapped, plan_of, room_exit, shots_of
from pullback.scenes.draws import Draws
from pullback.scenes.look import FACES, look_of
from pullback.scenes.shading import Hits, shade
from pullback.scenes.splits import CLASSES, SHIFTED, TRAINING, SceneRange

__all__ = ["CLASSES", "SHIFTED", "TRAINING", "SceneBatch", "SceneRange", "normalised", "render", "scene_labels"]

Seeds: TypeAlias = "Tensor | Sequence[int]"

_FLOATS_PER_RAY = 130  # live at the same time while a ray is shaded
_CHUNK_BYTES = {"cpu": 2**25, "cuda": 2**33}  # on the CPU what a core keeps close, on a GPU enough to fill it
_NEAREST = 1e-3  # metres in front of the camera


@dataclass(frozen=True, eq=False)
class SceneBatch:
    """B scenes seen by V cameras each; world coordinates in metres, z up.

    The middle of the pixel in row i and column j is at x = j + ½, y = i + ½.
    """

    rgb: Tensor  # [B, V, 3, H, W] in [0, 1]
    depth: Tensor  # [B, V, H, W], metres along the optical axis, 0 where the sky is
    sky: Tensor  # [B, V, H, W] bool
    normals: Tensor  # [B, V, 3, H, W], camera coordinates, unit, towards the camera, 0 where the sky is
    instance: Tensor  # [B, V, H, W] int16: 0 sky, 1 floor, 2 to 5 walls, 6 ceiling, from 10 objects
    label: Tensor  # [B] int64, index into CLASSES
    intrinsics: Tensor  # [B, V, 3, 3]
    pose: Tensor  # [B, V, 4, 4], world to camera, OpenCV axes: x right, y down, z forward

    def __len__(self) -> int:
        return len(self.label)

    def first_view(self) -> SceneBatch:
        """Keep camera 0 alone; the axis of views stays."""
        return replace(self, **{f.name: getattr(self, f.name)[:, :1] for f in fields(self) if f.name != "label"})

    def pictures(self) -> Tensor:
        """Return the pictures as they are written to files: uint8 [B, V, H, W, 3]."""
        return (self.rgb * 255).round().byte().movedim(-3, -1)

    def to(self, device: str | torch.device) -> SceneBatch:
        """Move every tensor to a device."""
        return mapped(self, lambda values: values.to(device))

    def points(self) -> Tensor:
        """Return the world coordinates [B, V, H, W, 3] of what each pixel shows; the camera's where the sky is."""
        rotation, shift = self.pose[..., :3, :3], self.pose[..., :3, 3]
        height, width = self.depth.shape[-2:]
        focal, middle = self.intrinsics[..., 0, 0], self.intrinsics[..., :2, 2]
        x, y = _pixel_centres(height, width, self.depth.device)
        x = (x - middle[..., None, None, 0]) / focal[..., None, None] * self.depth
        y = (y - middle[..., None, None, 1]) / focal[..., None, None] * self.depth
        local = torch.stack([x, y, self.depth], -1) - shift[..., None, None, :]
        return (rotation[..., None, None, :, :] * local[..., :, None]).sum(-2)  # rotationᵀ · local


def render(
    seeds: Seeds,
    *,
    size: int | tuple[int, int] = 224,
    views: int = 1,
    ranges: SceneRange = TRAINING,
    device: str | torch.device = "cpu",
) -> SceneBatch:
    """Draw the scenes of these seeds.

    Args:
        seeds: one whole number per scene, any that fits into 64 bits.
        size: side of the square pictures, or (height, width).
        views: cameras per scene. Camera 0 has the arrangement in view; the others move around it.
        ranges: from which scenes are drawn; SHIFTED leaves the training ranges on purpose.
        device: where rays are cast and the result lies. Layouts are always made on the CPU, so that they agree.
    """
    words, target = _checked_seeds(seeds), _checked_device(device)
    height, width = checked_size(size)
    if isinstance(views, bool) or not isinstance(views, int) or views < 1:
        raise PullbackError(f"views={views!r}: expected a positive number of cameras per scene, such as 1.")
    if not isinstance(ranges, SceneRange):
        raise PullbackError(f"ranges={ranges!r}: expected a SceneRange, such as TRAINING or SHIFTED.")
    with torch.no_grad():
        with torch.device("cpu"):  # whatever the default device is
            draws = Draws(words)
            layout = lay_out(draws, views, ranges)
            intrinsics = _intrinsics(layout.cameras.fov, views, height, width)
            shots = shots_of(layout, look_of(draws, layout, ranges), intrinsics)
        images = _cast(shots, height, width, ranges.ground_radius, target)
    rgb, depth, sky, normals, instance = (image.unflatten(0, (len(words), views)) for image in images)
    cameras = intrinsics.float().to(target), layout.cameras.pose.float().to(target)
    return SceneBatch(rgb, depth, sky, normals, instance, layout.label.to(target), *cameras)


def scene_labels(seeds: Seeds, ranges: SceneRange = TRAINING) -> Tensor:
    """Return the classes [B] of these seeds, without drawing them."""
    with torch.device("cpu"):
        return lay_out(Draws(_checked_seeds(seeds)), 1, ranges).label


# Rays


def _cast(shots: Shots, height: int, width: int, ground_radius: float, device: torch.device) -> tuple[Tensor, ...]:
    """Return (rgb, depth, sky, normals, instance), each [N, ...], computed in chunks so that memory stays bounded."""
    total = len(shots.origin)
    rgb = torch.empty(total, 3, height, width, dtype=torch.float32, device=device)
    normals = torch.empty_like(rgb)
    depth = torch.empty(total, height, width, dtype=torch.float32, device=device)
    sky = torch.empty(total, height, width, dtype=torch.bool, device=device)
    instance = torch.empty(total, height, width, dtype=torch.int16, device=device)
    x, y = _pixel_centres(height, width, device)
    for images, lines in _chunks(total, height, width, device):
        some = mapped(shots, lambda values, images=images: values[images])  # type: ignore[misc]
        plan = plan_of(some, device)
        some = mapped(some, lambda values: values.to(device, non_blocking=True))
        hits = _first_hits(some, x, y[lines], ground_radius, plan)
        rgb[images, :, lines], world = shade(some, hits, plan)
        seen = ~hits.sky
        depth[images, lines], sky[images, lines] = hits.depth * seen, hits.sky
        for row in range(3):
            turned = sum(some.rotation[:, row, axis, None, None] * world[axis] for axis in range(3))
            normals[images, row, lines] = turned * seen
        ids = some.instance.gather(1, hits.surface.flatten(1)).view_as(hits.surface)
        instance[images, lines] = ids * seen
    return rgb, depth, sky, normals, instance


def _first_hits(shots: Shots, x: Tensor, y: Tensor, ground_radius: float, plan: Plan) -> Hits:
    """Find the nearest surface on each ray, for pixels at x [W] and y [H, 1]: the room or ground, then objects."""
    direction = _directions(shots.rays, x, y)
    origin, low, high = (_split(values) for values in (shots.origin, shots.low, shots.high))
    depth, surface = room_exit(origin, direction, low, high)
    if plan.any_open:
        reach = torch.hypot(origin[0] + depth * direction[0], origin[1] + depth * direction[1])
        sky = shots.is_open[:, None, None] & ((surface != FLOOR) | (reach > ground_radius))
        surface = torch.where(sky, FLOOR, surface)
        depth = torch.where(sky, torch.inf, depth)
    for group in plan.groups:
        maps = group.of(shots.maps)[:, group.slot]
        start = (maps[..., :3] * group.of(shots.origin)[:, None]).sum(-1) + maps[..., 3]
        rays = (maps[..., :3, None] * group.of(shots.rays)[:, None]).sum(2)  # no matmul: it could run in TF32
        near, far = INTERVALS[group.shape](_split(start), _directions(rays, x, y))
        nearest = group.of(depth)
        closer = (near < far) & (near < nearest) & (near > _NEAREST)
        if group.rows is None:
            depth = torch.where(closer, near, nearest)
            surface.masked_fill_(closer, FACES + group.slot)
        else:
            depth[group.rows] = torch.where(closer, near, nearest)
            surface[group.rows] = group.of(surface).masked_fill_(closer, FACES + group.slot)
    sky = depth.isinf()
    return Hits(direction, torch.where(sky, 1.0, depth), surface, sky)


def _directions(rays: Tensor, x: Tensor, y: Tensor) -> Vector:
    """Multiply rays [N, 3, 3] by (x, y, 1); each component is [N, H, W]."""
    row = rays[..., None, None]  # [N, 3, 3, 1, 1]
    first, second, third = (
        torch.addcmul(torch.addcmul(row[:, axis, 2], row[:, axis, 1], y), row[:, axis, 0], x) for axis in range(3)
    )
    return first, second, third


def _split(values: Tensor) -> Vector:
    """Split [N, 3] into three tensors [N, 1, 1]."""
    x, y, z = values[:, :, None, None].unbind(1)
    return x, y, z


def _chunks(total: int, height: int, width: int, device: torch.device) -> Iterator[tuple[slice, slice]]:
    """Yield slices of pictures, and of lines where a single picture is too much."""
    rays = max(1, _CHUNK_BYTES.get(device.type, _CHUNK_BYTES["cuda"]) // (4 * _FLOATS_PER_RAY))
    images, lines = max(1, rays // (height * width)), min(height, max(1, rays // width))
    for first in range(0, total, images):
        for line in range(0, height, lines):
            yield slice(first, min(first + images, total)), slice(line, min(line + lines, height))


def _pixel_centres(height: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return x [W] and y [H, 1] of the middles of the pixels."""
    x, y = (torch.arange(side, dtype=torch.float32, device=device) + 0.5 for side in (width, height))
    return x, y[:, None]


def _intrinsics(fov: Tensor, views: int, height: int, width: int) -> Tensor:
    """Return [B, V, 3, 3]: square pixels, the axis through the middle, the field of view over the shorter side."""
    focal = 0.5 * min(height, width) / (fov / 2).tan()
    matrix = torch.zeros(len(fov), views, 3, 3, dtype=fov.dtype)
    matrix[..., 0, 0] = matrix[..., 1, 1] = focal[:, None]
    matrix[..., 0, 2], matrix[..., 1, 2], matrix[..., 2, 2] = width / 2, height / 2, 1
    return matrix


# Arguments


def _checked_seeds(seeds: Seeds) -> Tensor:
    """Return the seeds as [B] int64 on the CPU, or raise an error that names what came."""
    try:
        words = torch.as_tensor(seeds, device="cpu")
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise PullbackError(f"seeds: expected a list of whole numbers or an integer tensor [B]; got {error}.") from None
    if words.ndim != 1 or not len(words):
        raise PullbackError(
            f"seeds: expected at least one seed in one dimension [B]; got shape {tuple(words.shape)}. "
            "Give a list such as [0, 1, 2] or torch.arange(8)."
        )
    if words.is_floating_point() or words.is_complex() or words.dtype == torch.bool:
        raise PullbackError(f"seeds: expected whole numbers; got dtype {words.dtype}. Convert with seeds.long().")
    return words.long()


def _checked_device(device: str | torch.device) -> torch.device:
    """Return the device, or raise an error if tensors cannot be made on it."""
    try:
        target = torch.device(device)
        torch.empty(0, device=target)
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise PullbackError(f"device={device!r}: expected a device that works here, such as 'cpu'; {reason}") from None
    return target
