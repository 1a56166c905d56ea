"""Pose encodings and cameras: OpenCV conventions, extrinsics [R | T] take world points into the camera.

An encoding is [T | quaternion x y z w | vertical, horizontal field of view in radians]. The principal point is the
middle of the image, W/2 and H/2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pullback.checks import of_kind
from pullback.errors import ShapeError


def decode_pose(encoding: Tensor, image_size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """[..., 9] and (H, W) -> extrinsics [..., 3, 4] and intrinsics [..., 3, 3].

    A field of view of 0, which the camera head can give, means an infinite focal length.
    """
    _expect(encoding, "encoding", (9,))
    translation, quaternion, fov = encoding.split((3, 4, 2), -1)
    extrinsics = torch.cat([rotation_matrix(quaternion), translation[..., None]], -1)
    of_kind("image_size", image_size, (tuple, list), "(height, width) in pixels", ShapeError)
    height, width = image_size
    half = encoding.new_tensor([height / 2, width / 2])
    focal_y, focal_x = (half / (fov / 2).tan()).unbind(-1)
    zero, one = torch.zeros_like(focal_x), torch.ones_like(focal_x)
    rows = [focal_x, zero, one * (width / 2), zero, focal_y, one * (height / 2), zero, zero, one]
    return extrinsics, torch.stack(rows, -1).unflatten(-1, (3, 3))


def encode_pose(extrinsics: Tensor, intrinsics: Tensor, image_size: tuple[int, int]) -> Tensor:
    """Extrinsics [..., 3, 4], intrinsics [..., 3, 3] and (H, W) -> [..., 9]; the principal point is not encoded."""
    _expect(extrinsics, "extrinsics", (3, 4))
    _expect(intrinsics, "intrinsics", (3, 3))
    half = intrinsics.new_tensor([image_size[0] / 2, image_size[1] / 2])
    focal = torch.stack([intrinsics[..., 1, 1], intrinsics[..., 0, 0]], -1)
    return torch.cat([extrinsics[..., 3], unit_quaternion(extrinsics[..., :3]), 2 * (half / focal).atan()], -1)


def rotation_matrix(quaternion: Tensor) -> Tensor:
    """[..., 4], scalar last, of any length but 0 -> [..., 3, 3]: I + 2/|q|^2 (w [v]x + [v]x^2) with v = (x, y, z)."""
    _expect(quaternion, "quaternion", (4,))
    x, y, z, w = quaternion.unbind(-1)
    zero = torch.zeros_like(x)
    cross = torch.stack([zero, -z, y, z, zero, -x, -y, x, zero], -1).unflatten(-1, (3, 3))
    twice = 2 / quaternion.square().sum(-1)[..., None, None]
    return torch.eye(3).to(quaternion) + twice * (w[..., None, None] * cross + cross @ cross)


def unit_quaternion(rotation: Tensor) -> Tensor:
    """Rotations [..., 3, 3] -> [..., 4], scalar last and not negative.

    4 q q^T is linear in the rotation; any of its columns is a multiple of q, and the longest one is well conditioned.
    """
    _expect(rotation, "rotation", (3, 3))
    trace = rotation.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    eye = torch.eye(3).to(rotation)
    imaginary = rotation + rotation.mT + (1 - trace) * eye  # 4 v v^T
    skew = rotation - rotation.mT
    mixed = torch.stack([skew[..., 2, 1], skew[..., 0, 2], skew[..., 1, 0]], -1)[..., None]  # 4 w v
    outer = torch.cat([torch.cat([imaginary, mixed], -1), torch.cat([mixed.mT, 1 + trace], -1)], -2)
    best = outer.diagonal(dim1=-2, dim2=-1).argmax(-1)[..., None, None]
    column = outer.gather(-1, best.expand(*outer.shape[:-1], 1))[..., 0]
    unit = column / column.norm(dim=-1, keepdim=True)
    return torch.where(unit[..., 3:] < 0, -unit, unit)


def invert_extrinsics(extrinsics: Tensor) -> Tensor:
    """World to camera [..., 3, 4] -> camera to world as [..., 4, 4]."""
    _expect(extrinsics, "extrinsics", (3, 4))
    back = extrinsics[..., :3].mT
    bottom = extrinsics.new_tensor([0, 0, 0, 1]).expand(*extrinsics.shape[:-2], 1, 4)
    return torch.cat([torch.cat([back, -back @ extrinsics[..., 3:]], -1), bottom], -2)


def unproject_depth(depth: Tensor, extrinsics: Tensor, intrinsics: Tensor) -> Tensor:
    """Depth along the optical axis [..., H, W, 1] -> world points [..., H, W, 3]; pixel centres are integers."""
    _expect(depth, "depth", (None, None, 1))
    height, width = depth.shape[-3:-1]
    u, v = (torch.arange(count).to(depth) for count in (width, height))
    focal, centre = intrinsics.diagonal(dim1=-2, dim2=-1)[..., :2], intrinsics[..., :2, 2]  # (x, y) each
    pixels = torch.stack(torch.meshgrid(u, v, indexing="xy"), -1)  # [H, W, 2]
    slopes = (pixels - centre[..., None, None, :]) / focal[..., None, None, :]
    points = torch.cat([slopes * depth, depth], -1)
    back = invert_extrinsics(extrinsics)
    return (points.flatten(-3, -2) @ back[..., :3, :3].mT + back[..., None, :3, 3]).unflatten(-2, (height, width))


def _expect(value: Tensor, name: str, shape: tuple[int | None, ...]) -> None:
    of_kind(name, value, Tensor, "a tensor", ShapeError)
    own = value.shape[-len(shape) :] if value.ndim >= len(shape) else None
    if own is None or any(wanted not in (None, got) for wanted, got in zip(shape, own, strict=True)):
        wanted = ", ".join("any" if side is None else str(side) for side in shape)
        raise ShapeError(f"{name}: expected [..., {wanted}], got {list(value.shape)}.")
