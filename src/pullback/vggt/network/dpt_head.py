"""Dense prediction from four taps (DPT, Ranftl et al. 2021), view by view: depth or points, each with a confidence.

Unlike in that paper, the skip of a residual unit carries relu(x), not x: in the code that trained the checkpoint the
first ReLU works in place. Here nothing does, because that would break derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pullback.errors import ShapeError
from pullback.vggt.network.config import LEVELS, VGGTConfig
from pullback.vggt.network.grid_embedding import with_positions
from pullback.vggt.network.precision import without_autocast

HIDDEN = 32  # channels of the last hidden map, in every published head
CHUNK_VIEWS = 8  # views that a head takes at once; full-size maps of more would fill the memory


class ResidualUnit(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        rectified = F.relu(x)
        return self.conv2(F.relu(self.conv1(rectified))) + rectified


class Fusion(nn.Module):
    """Coarser features, a level's own (except at the coarsest) -> both together at the next finer size."""

    def __init__(self, channels: int, *, coarsest: bool) -> None:
        super().__init__()
        self.out_conv = nn.Conv2d(channels, channels, 1)
        if not coarsest:
            self.resConfUnit1 = ResidualUnit(channels)
        self.resConfUnit2 = ResidualUnit(channels)

    def forward(self, x: Tensor, level: Tensor | None, size: Sequence[int]) -> Tensor:
        if level is not None:
            x = x + self.resConfUnit1(level)
        return self.out_conv(_resize(self.resConfUnit2(x), size))


class Scratch(nn.Module):
    """Four levels of maps -> one map; the name is that of the checkpoint."""

    def __init__(self, channels: Sequence[int], features: int, outputs: int) -> None:
        super().__init__()
        for index, width in enumerate(channels, start=1):
            setattr(self, f"layer{index}_rn", nn.Conv2d(width, features, 3, padding=1, bias=False))
        for index in range(1, LEVELS + 1):
            setattr(self, f"refinenet{index}", Fusion(features, coarsest=index == LEVELS))
        self.output_conv1 = nn.Conv2d(features, features // 2, 3, padding=1)
        self.output_conv2 = nn.Sequential(
            nn.Conv2d(features // 2, HIDDEN, 3, padding=1), nn.ReLU(), nn.Conv2d(HIDDEN, outputs, 1)
        )

    def fuse(self, maps: Sequence[Tensor]) -> Tensor:
        """Level maps at 4, 2, 1 and 1/2 times the patch grid -> [F, features / 2, 8h, 8w]."""
        levels = [getattr(self, f"layer{index}_rn")(level) for index, level in enumerate(maps, start=1)]
        finest = levels[0].shape[-2:]
        sizes = [(2 * finest[0], 2 * finest[1]), *(level.shape[-2:] for level in levels[:-1])]
        fusions = [getattr(self, f"refinenet{index}") for index in range(1, LEVELS + 1)]
        x = fusions[3](levels[3], None, sizes[3])
        for index in (2, 1, 0):
            x = fusions[index](x, levels[index], sizes[index])
        return self.output_conv1(x)


class DPTHead(nn.Module):
    """``activation`` makes the prediction from all output channels but the last, which becomes the confidence."""

    def __init__(self, config: VGGTConfig, outputs: int, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.patch_size, self.activation = config.patch_size, activation
        dim, channels = 2 * config.embed_dim, config.dpt_out_channels
        self.norm = nn.LayerNorm(dim)
        self.projects = nn.ModuleList([nn.Conv2d(dim, width, 1) for width in channels])
        self.resize_layers = nn.ModuleList(
            [
                nn.ConvTranspose2d(channels[0], channels[0], 4, stride=4),
                nn.ConvTranspose2d(channels[1], channels[1], 2, stride=2),
                nn.Identity(),
                nn.Conv2d(channels[3], channels[3], 3, stride=2, padding=1),
            ]
        )
        self.scratch = Scratch(channels, config.dpt_features, outputs)

    def forward(
        self, taps: Sequence[Tensor], grid: tuple[int, int], *, chunk_views: int | None = CHUNK_VIEWS
    ) -> tuple[Tensor, Tensor]:
        """Four taps [B, S, P, 2C], whose last h w = grid tokens are patches -> what is predicted and its confidence,
        [B, S, H, W, outputs - 1] and [B, S, H, W]. ``chunk_views`` bounds the memory and changes no value."""
        self._check(taps, grid, chunk_views)
        batch, views = taps[0].shape[:2]
        # views apart first: the patches of all of them at once would be a copy of the taps
        chunks = zip(*(tap.flatten(0, 1).split(chunk_views or batch * views) for tap in taps), strict=True)
        patches = ([tap[:, -grid[0] * grid[1] :] for tap in chunk] for chunk in chunks)  # [F, h w, 2C] each
        with without_autocast(taps[0].device):
            maps = torch.cat([self._maps(chunk, grid) for chunk in patches])  # [B S, outputs, H, W]
            maps = maps.unflatten(0, (batch, views)).movedim(2, -1)
            return self.activation(maps[..., :-1]), 1 + maps[..., -1].exp()

    def levels(self, patches: Sequence[Tensor], grid: tuple[int, int]) -> list[Tensor]:
        """Patch tokens [F, h w, 2C] of four layers -> maps at 4, 2, 1 and 1/2 times the patch grid."""
        maps = []
        for tokens, project, resize in zip(patches, self.projects, self.resize_layers, strict=True):
            own = project(self.norm(tokens).mT.unflatten(-1, grid))
            maps.append(resize(with_positions(own, grid[1] / grid[0])))
        return maps

    def _maps(self, patches: Sequence[Tensor], grid: tuple[int, int]) -> Tensor:
        """[F, h w, 2C] of four layers -> [F, outputs, H, W], before the activation."""
        fused = self.scratch.fuse(self.levels(patches, grid))
        full = _resize(fused, [self.patch_size * side for side in grid])
        return self.scratch.output_conv2(with_positions(full, grid[1] / grid[0]))

    def _check(self, taps: Sequence[Tensor], grid: tuple[int, int], chunk_views: int | None) -> None:
        whole = isinstance(chunk_views, int) and not isinstance(chunk_views, bool) and chunk_views >= 1
        if chunk_views is not None and not whole:
            raise ShapeError(
                f"chunk_views: expected a whole number of views from 1, or None for all, got {chunk_views!r}."
            )
        width, patches = self.norm.normalized_shape[0], grid[0] * grid[1]
        wrong = [tap for tap in taps if tap.ndim != 4 or tap.shape[-1] != width or tap.shape[2] < patches]
        if len(taps) != LEVELS or wrong:
            got = [list(tap.shape) for tap in taps]
            raise ShapeError(
                f"taps: expected {LEVELS} of [B, S, P, {width}] with at least {grid[0]}x{grid[1]} patches, got {got}."
            )


def _resize(x: Tensor, size: Sequence[int]) -> Tensor:
    return F.interpolate(x, tuple(size), mode="bilinear", align_corners=True)


def inverse_log(y: Tensor) -> Tensor:
    """sign(y) (e^|y| - 1): near and far points on one scale."""
    return y.sign() * y.abs().expm1()
