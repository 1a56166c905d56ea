"""Cameras from the camera tokens of the last layer, refined in a few rounds that see the pose of the round before.

The published code detaches the pose between rounds. Its values are the same, but its derivative is that of the last
correction alone, not of the pose. Which of the two autograd shall give is the argument ``derivative``.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pullback.errors import ModelError, ShapeError
from pullback.vggt.network.block import Block, Mlp
from pullback.vggt.network.config import VGGTConfig
from pullback.vggt.network.precision import without_autocast

POSE = 9  # translation 3, quaternion 4 (scalar last), field of view 2 (vertical, horizontal)
PoseDerivative = Literal["exact", "official"]


class CameraHead(nn.Module):
    def __init__(self, config: VGGTConfig) -> None:
        super().__init__()
        self.iterations = config.camera_iterations
        dim = 2 * config.embed_dim
        self.empty_pose_tokens = nn.Parameter(torch.zeros(1, 1, POSE))
        blocks = [
            Block(dim, config.num_heads, config.mlp_ratio, layer_scale=config.layer_scale)
            for _ in range(config.camera_trunk_depth)
        ]
        self.trunk = nn.Sequential(*blocks)
        self.token_norm = nn.LayerNorm(dim)
        self.trunk_norm = nn.LayerNorm(dim)
        self.embed_pose = nn.Linear(POSE, dim)
        self.poseLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 3 * dim))
        self.pose_branch = Mlp(dim, dim // 2, POSE)

    def forward(self, tap: Tensor, *, derivative: PoseDerivative = "exact") -> list[Tensor]:
        """The last layer's tap [B, S, P, 2C] -> the pose encoding [B, S, 9] of every round; the last one counts."""
        return [activated(raw) for raw in self.rounds(tap, derivative=derivative)]

    def rounds(self, tap: Tensor, *, derivative: PoseDerivative = "exact") -> list[Tensor]:
        """Return what `forward` does before the activation, [B, S, 9] each: what the next round sees."""
        if derivative not in get_args(PoseDerivative):
            raise ModelError(
                f"derivative: expected 'exact' (through all rounds) or 'official' (only the last correction, as "
                f"published), got {derivative!r}."
            )
        width = self.token_norm.normalized_shape[0]
        if tap.ndim != 4 or tap.shape[-1] != width:
            raise ShapeError(f"tap: expected the last layer's tokens [B, S, P, {width}], got {list(tap.shape)}.")
        with without_autocast(tap.device):
            return self._rounds(self.token_norm(tap[:, :, 0]), derivative)

    def _rounds(self, tokens: Tensor, derivative: PoseDerivative) -> list[Tensor]:
        """Normed camera tokens [B, S, 2C] -> [B, S, 9] of every round."""
        poses: list[Tensor] = []
        for _ in range(self.iterations):
            if not poses:
                poses.append(self._correction(tokens, self.empty_pose_tokens))  # the empty pose itself is not added
                continue
            before = poses[-1].detach() if derivative == "official" else poses[-1]
            poses.append(before + self._correction(tokens, before))
        return poses

    def _correction(self, tokens: Tensor, pose: Tensor) -> Tensor:
        """Camera tokens [B, S, 2C], modulated by a pose [B or 1, S or 1, 9], attend to each other -> [B, S, 9]."""
        shift, scale, gate = self.poseLN_modulation(self.embed_pose(pose)).chunk(3, -1)
        normed = F.layer_norm(tokens, tokens.shape[-1:], eps=1e-6)
        modulated = tokens + gate * (normed * (1 + scale) + shift)
        return self.pose_branch(self.trunk_norm(self.trunk(modulated)))


def activated(raw: Tensor) -> Tensor:
    """Fields of view are not negative; translation and quaternion stay as they are. [..., 9] -> [..., 9]."""
    return torch.cat([raw[..., :7], F.relu(raw[..., 7:])], -1)
