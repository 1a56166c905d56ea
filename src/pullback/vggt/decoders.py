"""The heads of VGGT as decoders of the taps [B, N, 2C] that they read: cameras, points, depth.

camera      translation 3, quaternion 4 (scalar last), field of view 2, of every view        M = 9 S
camera-V    the same of view V alone                                                         M = 9
points      64 points of the scene (points-K: K of them), see `point_pixels`                 M = 3 K
depth       the depth map of every view                                                      M = S H W
depth-GxG   each view's map averaged down to G x G cells                                     M = S G G

`pullback.registry` holds these names; numbers in a name reach the functions here as they were written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pullback.decoders import Decoder
from pullback.decoders.dense import averaged, depth_name
from pullback.errors import DecoderError
from pullback.tokens import TokenLayout
from pullback.vggt.backbone import VGGTBackbone

POINTS = 64
PLASTIC = 1.32471795724474602596
"""The positive root of x^3 = x + 1: its powers are the golden ratio of the plane (the R2 sequence, Roberts 2018)."""
_DERIVATIVES = ("exact", "official")


def camera(backbone: VGGTBackbone, view: str | int | None = None, *, pose_derivative: str = "exact") -> Decoder:
    """Pose encodings [B, S, 9], or [B, 9] of one view, of the last round. It reads the last layer alone.

    ``pose_derivative`` is what the derivative goes through: all rounds of the refinement ("exact") or, as in the
    published code, the last correction alone ("official").
    """
    if pose_derivative not in _DERIVATIVES:
        raise DecoderError(
            f"pose_derivative: expected 'exact' (through all rounds) or 'official' (the last correction alone, as "
            f"published), got {pose_derivative!r}."
        )
    head, number = _head(backbone, "camera"), None if view is None else int(view)

    def decode(taps: Sequence[Tensor], layout: TokenLayout) -> Tensor:
        poses = head(per_view(taps[0], layout), derivative=pose_derivative)[-1]
        return poses if number is None else poses[:, _checked(number, layout)]

    name = "camera" if number is None else f"camera-{number}"
    name = name if pose_derivative == "exact" else f"{name} (official derivative)"
    return Decoder(name, (backbone.depth - 1,), decode, normed=False)


def points(backbone: VGGTBackbone, count: str | int = POINTS) -> Decoder:
    """World points [B, count, 3] at `point_pixels`."""
    head, number = _head(backbone, "point"), int(count)

    def decode(taps: Sequence[Tensor], layout: TokenLayout) -> Tensor:
        found = head([per_view(tap, layout) for tap in taps], layout.grid)[0]  # [B, S, H, W, 3]
        if number > found.shape[1:4].numel():
            raise DecoderError(
                f"decoder: 'points-{number}' asks for more points than the {found.shape[1]} views have pixels, "
                f"{found.shape[1:4].numel()}. Ask for fewer, or use larger views."
            )
        pixels = point_pixels(number, found.shape[1], found.shape[2], found.shape[3])
        return found.flatten(1, 3)[:, pixels.to(found.device)]

    return Decoder("points" if number == POINTS else f"points-{number}", backbone.hook_layers, decode, normed=False)


def depth(backbone: VGGTBackbone, *grid: str | int) -> Decoder:
    """Depth maps [B, S, H, W], or averaged down to ``grid``, rows and columns of cells, [B, S, *grid]."""
    (name, cells), head = depth_name(*grid), _head(backbone, "depth")

    def decode(taps: Sequence[Tensor], layout: TokenLayout) -> Tensor:
        full = head([per_view(tap, layout) for tap in taps], layout.grid)[0][..., 0]
        return averaged(full, cells)

    return Decoder(name, backbone.hook_layers, decode, normed=False)


def point_pixels(count: int, views: int, height: int, width: int) -> Tensor:
    """Which pixels are read, as places in the flattened [S, H, W]: [count].

    Point k lies in view k mod S, at (y, x) = ((1/2 + k/p) mod 1, (1/2 + k/p^2) mod 1) of its height and width, with the
    plastic number p. Without any randomness, all of them together and those of each view alone are spread evenly.
    """
    k = torch.arange(count, dtype=torch.float64)
    row = ((0.5 + k / PLASTIC) % 1 * height).long()
    column = ((0.5 + k / PLASTIC**2) % 1 * width).long()
    return (k.long() % views * height + row) * width + column


def per_view(tap: Tensor, layout: TokenLayout) -> Tensor:
    """[B, N, 2C] -> [B, S, P, 2C], as the heads take it."""
    return tap.unflatten(1, (layout.views, -1))


def _head(backbone: VGGTBackbone, name: str) -> Any:
    head = getattr(backbone.model, f"{name}_head")
    if head is None:
        raise DecoderError(
            f"decoder: {backbone.name} was built without its {name} head (config.heads = "
            f"{backbone.model.config.heads}). Load one that has it."
        )
    return head


def _checked(view: int, layout: TokenLayout) -> int:
    if view >= layout.views:
        raise DecoderError(f"decoder: 'camera-{view}' needs at least {view + 1} views, got scenes of {layout.views}.")
    return view
