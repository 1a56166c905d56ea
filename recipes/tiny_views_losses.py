"""The losses of VGGT (Wang et al. 2025, section 3.4) in the scales that small networks learn well in.

camera: sum_i 0.6^(I-1-i) (|T| + |q| + |fov| / 2), mean absolute errors of each refinement round i.
depth and points: mean of c e - alpha log c over pixels that show something, with the confidence c, plus the differences
of neighbouring errors, which keep edges sharp. e is the error of log depth, or the length of the error of the points
under sign(p) log(1 + |p|), which is how both heads write their output: near things count as much as far ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pullback.vggt.network import VGGTOutput

ROUND_DECAY = 0.6  # an earlier round counts so much less than the next
CONFIDENCE_PRICE = 0.2  # alpha: at the best confidence c = alpha / e
FOV_WEIGHT = 0.5
_DISTANCES = (1, 4, 16)  # pixels between neighbours
_NEAREST = 1e-4


def losses(
    output: VGGTOutput,
    poses: Tensor,
    depth: Tensor,
    points: Tensor,
    valid: Tensor,
    *,
    camera_weight: float,
    edge_weight: float,
) -> dict[str, Tensor]:
    """All parts, and their weighted sum as "loss"; the truth as in `Truth`, depth and points of any of its views."""
    camera = camera_loss(output.pose_enc_list, poses)
    depth_error = torch.where(valid, _log(output.depth[..., 0]) - _log(depth), 0.0)[..., None]
    point_error = torch.where(valid[..., None], signed_log(output.world_points) - signed_log(points), 0.0)
    point_size = (point_error.square().sum(-1) + 1e-12).sqrt()  # a length of 0 has no derivative
    total, parts = camera_weight * camera, {"camera": camera}
    for name, error, size, confidence in (
        ("depth", depth_error, depth_error[..., 0].abs(), output.depth_conf),
        ("points", point_error, point_size, output.world_points_conf),
    ):
        jumps = edges(error, valid)
        total = total + confident(size, confidence, valid) + edge_weight * jumps
        parts |= {name: _mean(size, valid), f"{name} edges": jumps}
    return {"loss": total, **parts}


def camera_loss(rounds: Sequence[Tensor], truth: Tensor) -> Tensor:
    """Pose encodings [B, S, 9] of all rounds, against those of the cameras."""
    total = truth.new_zeros(())
    for index, pose in enumerate(rounds):
        translation, quaternion, fov = (part.mean() for part in (pose - truth).abs().split((3, 4, 2), -1))
        total = total + ROUND_DECAY ** (len(rounds) - 1 - index) * (translation + quaternion + FOV_WEIGHT * fov)
    return total


def confident(error: Tensor, confidence: Tensor, valid: Tensor) -> Tensor:
    """Mean of c e - alpha log c over the valid pixels; [B, S, H, W] each."""
    return _mean(confidence * error - CONFIDENCE_PRICE * confidence.log(), valid)


def edges(error: Tensor, valid: Tensor) -> Tensor:
    """Mean |difference| of errors [B, S, H, W, n] at neighbours in a row or column, over several distances."""
    parts = []
    for step in _DISTANCES:
        for axis in (2, 3):
            length = error.shape[axis] - step
            if length < 1:
                continue
            both = valid.narrow(axis, 0, length) & valid.narrow(axis, step, length)
            change = error.narrow(axis, step, length) - error.narrow(axis, 0, length)
            parts.append(_mean(change.abs().sum(-1), both))
    return torch.stack(parts).mean()


def signed_log(points: Tensor) -> Tensor:
    """sign(p) log(1 + |p|), the inverse of the point head's activation."""
    return points.sign() * points.abs().log1p()


def _log(depth: Tensor) -> Tensor:
    return depth.clamp_min(_NEAREST).log()


def _mean(values: Tensor, valid: Tensor) -> Tensor:
    return torch.where(valid, values, 0.0).sum() / valid.sum().clamp_min(1)
