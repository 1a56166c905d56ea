"""Rays against unit shapes, each as the interval [near, far] of the ray parameter inside the shape.

An object is a unit shape (sphere of radius 1, cube [-1, 1]³, cylinder of radius 1 along z from -1 to 1) under an
affine map. The ray is taken into the shape's frame and its direction is never normalised, so the parameter means the
same in every frame: for camera rays of depth 1 it is the metric depth, towards a lamp it runs from 0 to 1.

A miss is an interval that is empty or NaN. NaN needs no care: it passes through `maximum` and `clamp`, and every
comparison with it is false.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Vector = tuple[Tensor, Tensor, Tensor]  # x, y, z, of any shapes that broadcast
Interval = tuple[Tensor, Tensor]

SPHERE, BOX, CYLINDER = 0, 1, 2
_TINY = 1e-12  # squared length of a direction below which a ray counts as parallel to the axis


def sphere_interval(origin: Vector, direction: Vector) -> Interval:
    """Where the ray is inside the unit sphere."""
    return _round_interval(origin, direction)


def box_interval(origin: Vector, direction: Vector) -> Interval:
    """Where the ray is inside the cube [-1, 1]³."""
    near, far = _slab(origin[0], direction[0])
    for axis in (1, 2):
        low, high = _slab(origin[axis], direction[axis])
        near, far = torch.maximum(near, low), torch.minimum(far, high)
    return near, far


def cylinder_interval(origin: Vector, direction: Vector) -> Interval:
    """Where the ray is inside the capped cylinder x² + y² ≤ 1, |z| ≤ 1."""
    near, far = _round_interval(origin[:2], direction[:2])
    low, high = _slab(origin[2], direction[2])
    return torch.maximum(near, low), torch.minimum(far, high)


INTERVALS: dict[int, Callable[[Vector, Vector], Interval]] = {
    SPHERE: sphere_interval,
    BOX: box_interval,
    CYLINDER: cylinder_interval,
}


def is_blocked(interval: Interval) -> Tensor:
    """Whether the shape lies between the two ends of a segment, parameters 0 and 1."""
    near, far = interval
    return near.clamp(min=0) < far.clamp(max=1)


def room_exit(origin: Vector, direction: Vector, low: Vector, high: Vector) -> tuple[Tensor, Tensor]:
    """(parameter, face) at which a ray that starts inside an axis-aligned room meets it from inside.

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
    """Where -1 ≤ z ≤ 1. A parallel ray divides by zero, and the infinities come out right: all of it or nothing."""
    reciprocal = direction.reciprocal()
    enters, leaves = (-1 - origin) * reciprocal, (1 - origin) * reciprocal
    return torch.minimum(enters, leaves), torch.maximum(enters, leaves)


def _round_interval(origin: tuple[Tensor, ...], direction: tuple[Tensor, ...]) -> Interval:
    """Where the ray is within distance 1 of the centre (three components) or of the z axis (two).

    The half chord is measured from the point of closest approach: b² - ac loses all digits for a small shape far away.
    """
    length2 = _dot(direction, direction).clamp(min=_TINY)
    middle = -_dot(origin, direction) / length2
    closest = tuple(torch.addcmul(o, middle, d) for o, d in zip(origin, direction, strict=True))
    squared = (1 - _dot(closest, closest)) / length2
    half = squared * squared.rsqrt()  # NaN where the ray passes by; on such numbers MKL's sqrt is twenty times slower
    return middle - half, middle + half


def _dot(left: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> Tensor:
    total = left[0] * right[0]
    for x, y in zip(left[1:], right[1:], strict=True):
        total = torch.addcmul(total, x, y)
    return total
