"""What `tiny-views` learns from: some views of a scene in some order, and what VGGT should say about them.

Truth is given in the frame of the first view and in units of the scene: everything is divided by the mean distance of
the points that the views show from the first camera (sky shows none). Pictures alone do not tell metres.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pullback.scenes.render import SceneBatch
from pullback.vggt.network.pose import encode_pose, unproject_depth


@dataclass(frozen=True, eq=False)
class Truth:
    """Of scenes seen in S views each; lengths in units of the scene."""

    poses: Tensor  # [B, S, 9]: world-to-camera translation, quaternion (scalar last), fields of view
    depth: Tensor  # [B, S, H, W], 0 where nothing is known
    points: Tensor  # [B, S, H, W, 3], in the first camera's frame
    valid: Tensor  # [B, S, H, W] bool: no sky
    extrinsics: Tensor  # [B, S, 3, 4], the first is [I | 0]
    scale: Tensor  # [B], metres per unit


@dataclass(frozen=True, eq=False)
class Views:
    """V views of each of B scenes, as they were drawn."""

    rgb: Tensor  # [B, V, 3, H, W] in [0, 1]
    depth: Tensor  # [B, V, H, W], metres
    valid: Tensor  # [B, V, H, W] bool: no sky
    pose: Tensor  # [B, V, 4, 4], world to camera
    intrinsics: Tensor  # [B, V, 3, 3]

    @classmethod
    def of(cls, scenes: SceneBatch) -> Views:
        return cls(scenes.rgb, scenes.depth, ~scenes.sky, scenes.pose, scenes.intrinsics)

    def chosen(self, scenes: Tensor, views: Tensor) -> Views:
        """The views [n, S] of the scenes [n]."""
        rows = scenes[:, None]
        return Views(*(values[rows, views] for values in self._all()))

    def relit(self, generator: torch.Generator) -> Views:
        """Another light for each scene, and a slightly different one for each of its views. Draws come from the CPU, so
        that they are the same on every device."""
        count, views = self.rgb.shape[:2]
        gain, contrast = (
            1 + 0.2 * _signed((count, 1, 1, 1, 1), generator) + 0.05 * _signed((count, views, 1, 1, 1), generator)
            for _ in range(2)
        )
        tint = 1 + 0.1 * _signed((count, 1, 3, 1, 1), generator)
        gain, contrast, tint = (values.to(self.rgb, non_blocking=True) for values in (gain, contrast, tint))
        mean = self.rgb.mean((-3, -2, -1), keepdim=True)
        rgb = (((self.rgb - mean) * contrast + mean * gain) * tint).clamp(0, 1)
        return Views(rgb, self.depth, self.valid, self.pose, self.intrinsics)

    def mirrored(self, which: Tensor) -> Views:
        """The scenes ``which`` [B] bool as a mirror shows them: with M = diag(-1, 1, 1), a camera [R | t] becomes
        [M R M | M t]. The axis goes through the middle of the picture, so intrinsics stay."""
        signs = self.pose.new_tensor([-1.0, 1.0, 1.0, 1.0])
        pose = torch.where(which[:, None, None, None], signs[:, None] * self.pose * signs, self.pose)
        rgb = torch.where(which[:, None, None, None, None], self.rgb.flip(-1), self.rgb)
        depth, valid = (
            torch.where(which[:, None, None, None], values.flip(-1), values) for values in (self.depth, self.valid)
        )
        return Views(rgb, depth, valid, pose, self.intrinsics)

    def truth(self) -> Truth:
        """What is to be predicted, the first view being the reference."""
        extrinsics = relative_extrinsics(self.pose)
        centred = self.intrinsics.clone()
        centred[..., :2, 2] -= 0.5  # pixel centres lie at j + 1/2 here, at whole numbers for `unproject_depth`
        points = unproject_depth(self.depth[..., None], extrinsics, centred)
        distance = torch.where(self.valid, points.norm(dim=-1), 0.0)
        scale = distance.sum((1, 2, 3)) / self.valid.sum((1, 2, 3)).clamp_min(1)
        extrinsics = torch.cat([extrinsics[..., :3], extrinsics[..., 3:] / scale[:, None, None, None]], -1)
        height, width = self.depth.shape[-2:]
        return Truth(
            encode_pose(extrinsics, self.intrinsics, (height, width)),
            self.depth / scale[:, None, None, None],
            points / scale[:, None, None, None, None],
            self.valid,
            extrinsics,
            scale,
        )

    def _all(self) -> tuple[Tensor, ...]:
        return self.rgb, self.depth, self.valid, self.pose, self.intrinsics


def relative_extrinsics(pose: Tensor) -> Tensor:
    """World-to-camera [B, S, 4, 4] -> [B, S, 3, 4] with the first camera as the world: R_i R_0^T, t_i - R_i R_0^T t_0.

    In float64, because the world's origin may be far from both cameras.
    """
    precise = pose.double()
    rotation, shift = precise[..., :3, :3], precise[..., :3, 3:]
    turn = rotation @ rotation[:, :1].mT
    return torch.cat([turn, shift - turn @ shift[:, :1]], -1).to(pose.dtype)


def draw_views(count: int, drawn: int, views: int, generator: torch.Generator) -> Tensor:
    """[count, views]: for each scene some of its ``drawn`` views in random order; the first becomes the reference."""
    return torch.rand(count, drawn, generator=generator).argsort(1)[:, :views]


def _signed(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Uniform in [-1, 1)."""
    return 2 * torch.rand(shape, generator=generator) - 1
