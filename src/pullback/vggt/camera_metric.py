"""An output metric for cameras that knows rotations: radians for rotations, and lengths that count like radians.

A pose encoding [T | q | f] has three kinds of numbers, and only the direction of the quaternion q means something. Two
rotations differ by the angle theta of R(q)^T R(q'), and to first order, with q = (v, w),

    theta = |omega|,   omega = (2 / |q|^2) E(q) dq,   E(q) = [w I + [v]x | -v]   (3 x 4)
    E E^T = |q|^2 I,   E q = 0,   so   theta^2 = dq^T (4 / |q|^2) (I - q q^T / |q|^2) dq

is blind to the length of q and the same for q and -q. Per view

    H = diag( I / a^2,  (4 / |q|^2) (I - q q^T / |q|^2),  I / b^2 ) = L L^T
    L = diag( I / a,    (2 / |q|^2) E^T,                  I / b )                (9 x 8)

H is singular along q, which is why it has a factor and no Cholesky. Several views are blocks on the diagonal.

Units. A world point x has camera coordinates R x + T, which change by omega x (R x) + dT: a radian moves points by up
to their distance |x| from the origin, the first camera. VGGT is trained on scenes scaled to a mean |x| of 1, so with
a = 1 turning by a small angle and shifting by that many units move the scene alike. In other units a is the mean
distance. Fields of view are in radians as well, b = 1. (The paper says "comparable units" and gives no numbers.)
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import torch
from torch import Tensor

from pullback.errors import DecoderError

POSE, FREE = 9, 8
"""Numbers of a pose encoding, and how many of them are left without the length of the quaternion."""
_CAMERA = r"camera(-\d+)?( \(official derivative\))?"  # as `vggt.decoders.camera` names its decoders


@dataclass(frozen=True)
class CameraMetric:
    """The SO(3)-aware, block-scaled H of camera decoders: ``load_probe(..., output_metric=CameraMetric())``.

    ``translation_unit``: the length that weighs as much as a radian (a above). ``fov_unit``: the same for fields of
    view, in radians (b).
    """

    translation_unit: float = 1.0
    fov_unit: float = 1.0

    def __post_init__(self) -> None:
        for name in ("translation_unit", "fov_unit"):
            value = getattr(self, name)
            if not (isinstance(value, (int, float)) and 0 < value < math.inf):
                raise DecoderError(f"{name}: expected a positive number, got {value!r}.")

    @property
    def __name__(self) -> str:
        """The name that a store of targets records."""
        return f"CameraMetric(translation_unit={self.translation_unit:g}, fov_unit={self.fov_unit:g})"

    def check(self, decoder: str, *, distance: bool) -> None:
        """Refuse a decoder, by its name, whose outputs are no poses, even where their number would fit."""
        if distance or not re.fullmatch(_CAMERA, decoder):
            after = " after a task distance" if distance else ""
            raise DecoderError(
                f"output_metric: CameraMetric is about pose encodings, expected decoder 'camera' or 'camera-0' (any "
                f"view) without a task distance, got decoder {decoder!r}{after}. Leave the metric out, or pass a "
                "factor L of your own."
            )

    def __call__(self, output: Tensor) -> Tensor:
        """L at poses [B, 9 S]: [B, 9 S, 8 S]."""
        if output.ndim != 2 or output.shape[1] % POSE or output.shape[1] == 0:
            raise DecoderError(
                f"output_metric: CameraMetric expected pose encodings [B, 9 S] (decoder 'camera' or 'camera-0', no "
                f"task distance), got {list(output.shape)}."
            )
        poses = output.unflatten(1, (-1, POSE))  # [B, S, 9]
        blocks = poses.new_zeros(*poses.shape[:2], POSE, FREE)
        blocks[..., :3, :3] = torch.eye(3).to(poses) / self.translation_unit
        blocks[..., 3:7, 3:6] = rotation_factor(poses[..., 3:7])
        blocks[..., 7:, 6:] = torch.eye(2).to(poses) / self.fov_unit
        return block_diagonal(blocks)


def rotation_factor(quaternion: Tensor) -> Tensor:
    """(2 / |q|^2) E(q)^T [..., 4, 3] of quaternions [..., 4] (scalar last, any length): its transpose takes dq to the
    rotation vector omega in radians, dR = [omega]x R."""
    # of q / max |q_i|, because |q|^2 itself would leave the range of float32 from lengths of 1e-19 and 1e19 on
    largest = quaternion.abs().amax(-1)[..., None]
    if not ((largest >= torch.finfo(quaternion.dtype).tiny) & largest.isfinite()).all():
        raise DecoderError(
            "output_metric: expected quaternions that are rotations, got one whose length is zero or not finite."
        )
    scaled = quaternion / largest
    x, y, z, w = scaled.unbind(-1)
    rows = [w, z, -y, -z, w, x, y, -x, w, -x, -y, -z]  # E^T: w I - [v]x above -v^T
    lengths = scaled.square().sum(-1)[..., None, None] * largest[..., None]
    return 2 * torch.stack(rows, -1).unflatten(-1, (4, 3)) / lengths


def block_diagonal(blocks: Tensor) -> Tensor:
    """[B, S, m, k] -> [B, S m, S k]."""
    batch, views, rows, columns = blocks.shape
    full = blocks.new_zeros(batch, views, rows, views, columns)
    index = torch.arange(views, device=blocks.device)
    full[:, index, :, index] = blocks.transpose(0, 1)  # indices apart from each other come out in front
    return full.flatten(3).flatten(1, 2)
