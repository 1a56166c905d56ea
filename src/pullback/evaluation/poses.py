"""Errors of predicted cameras, in degrees, by formulas that stay exact for tiny and for half turns.

Extrinsics [R | T] take world points into a camera. Between two cameras only their relative pose can be compared, which
no choice of world changes: R_ij = R_j R_i^T, T_ij = T_j - R_ij T_i. Its length depends on the scene's scale, so the
translation counts by its direction.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pullback.errors import ShapeError


@dataclass(frozen=True, eq=False)
class PoseErrors:
    """Errors in degrees over all pairs i < j of a scene's views."""

    rotation: Tensor  # [B, pairs]
    translation: Tensor  # [B, pairs], angle between directions; NaN where one of the two has no length


def pose_errors(predicted: Tensor, truth: Tensor) -> PoseErrors:
    """Compare extrinsics [B, S, 3, 4] of the same views, in whatever world and scale each."""
    if predicted.shape != truth.shape or truth.ndim != 4 or truth.shape[-2:] != (3, 4) or truth.shape[1] < 2:
        raise ShapeError(
            "predicted, truth: expected extrinsics [B, S, 3, 4] of the same views, at least two, got "
            f"{list(predicted.shape)} and {list(truth.shape)}."
        )
    guessed, true = relative_poses(predicted), relative_poses(truth)
    return PoseErrors(rotation_angle(guessed[..., :3], true[..., :3]), direction_angle(guessed[..., 3], true[..., 3]))


def view_pairs(views: int) -> Tensor:
    """[pairs, 2]: (i, j) with i < j, those with the first view first."""
    return torch.combinations(torch.arange(views))


def relative_poses(extrinsics: Tensor) -> Tensor:
    """[B, S, 3, 4] -> [B, pairs, 3, 4] in float64: from camera i to camera j."""
    first, second = view_pairs(extrinsics.shape[1]).to(extrinsics.device).unbind(1)
    one, other = extrinsics.double()[:, first], extrinsics.double()[:, second]
    turn = other[..., :3] @ one[..., :3].mT
    return torch.cat([turn, other[..., 3:] - turn @ one[..., 3:]], -1)


def rotation_angle(first: Tensor, second: Tensor) -> Tensor:
    """Geodesic distance of rotations [..., 3, 3], degrees: the turn Q = A B^T has |Q - Q^T| = 2 sqrt(2) sin(angle) and
    trace 1 + 2 cos(angle). The arc cosine alone would lose half of the digits of a small angle."""
    turn = first.double() @ second.double().mT
    sine = (turn - turn.mT).flatten(-2).norm(dim=-1) / 8**0.5
    cosine = (turn.diagonal(dim1=-2, dim2=-1).sum(-1) - 1) / 2
    return torch.atan2(sine, cosine).rad2deg()


def direction_angle(first: Tensor, second: Tensor) -> Tensor:
    """Angle between vectors [..., 3], degrees: 2 atan2(|a - b|, |a + b|) of the unit vectors; NaN without a length."""
    a, b = (vector.double() / vector.double().norm(dim=-1, keepdim=True) for vector in (first, second))
    return 2 * torch.atan2((a - b).norm(dim=-1), (a + b).norm(dim=-1)).rad2deg()
