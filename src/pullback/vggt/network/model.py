"""VGGT: views of a scene in, cameras, depth maps and a point cloud out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pullback.checks import of_kind
from pullback.errors import ImageError, ModelError, ShapeError
from pullback.tokens import TokenLayout
from pullback.vggt.network.aggregator import Aggregator
from pullback.vggt.network.camera_head import CameraHead, PoseDerivative
from pullback.vggt.network.config import VGGTConfig
from pullback.vggt.network.dpt_head import CHUNK_VIEWS, DPTHead, inverse_log


class VGGTOutput(dict[str, Any]):
    """The predictions by name, also as attributes; those of a head that the network does not have are absent."""

    pose_enc: Tensor  # [B, S, 9], the last round's: translation, quaternion (scalar last), fields of view
    pose_enc_list: list[Tensor]  # every round's
    depth: Tensor  # [B, S, H, W, 1]
    depth_conf: Tensor  # [B, S, H, W], at least 1
    world_points: Tensor  # [B, S, H, W, 3], in the frame of the first view
    world_points_conf: Tensor  # [B, S, H, W]
    images: Tensor  # [B, S, 3, H, W], as they came; only in evaluation mode

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(f"no output {name!r}; there are {', '.join(self)}.")


def as_scenes(images: Tensor) -> Tensor:
    """Return views with an axis of scenes: [S, 3, H, W] is one scene. What else does not fit is refused further on."""
    of_kind("images", images, Tensor, "views [S, 3, H, W] or [B, S, 3, H, W] in [0, 1]", ImageError)
    return images[None] if images.ndim == 4 else images


class VGGTNetwork(nn.Module):
    """The network alone. `pullback.VGGT` adds `from_pretrained` and `save_pretrained`.

    Heads are functions of the taps alone (see `aggregator.py`), so that a probe can enter at any layer:

        taps = model.aggregator.taps(state)                                    # {layer: [B, S, P, 2C]}
        model.camera_head(taps[last])                                          # rounds of [B, S, 9]
        model.depth_head([taps[layer] for layer in hook_layers], grid)         # depth, confidence
    """

    def __init__(self, config: VGGTConfig | None = None) -> None:
        super().__init__()
        of_kind(
            "config",
            config,
            (VGGTConfig, type(None)),
            "a VGGTConfig; weights are read by VGGT.from_pretrained",
            ModelError,
        )
        self.config = config = config or VGGTConfig()
        self.aggregator = Aggregator(config)
        self.camera_head = CameraHead(config) if "camera" in config.heads else None
        self.point_head = DPTHead(config, 4, inverse_log) if "point" in config.heads else None
        self.depth_head = DPTHead(config, 2, torch.exp) if "depth" in config.heads else None

    def forward(
        self,
        images: Tensor,
        *,
        pose_derivative: PoseDerivative = "exact",
        chunk_views: int | None = CHUNK_VIEWS,
        dense_views: Tensor | None = None,
    ) -> VGGTOutput:
        """Images in [0, 1], one scene [S, 3, H, W] or several [B, S, 3, H, W], sides divisible by the patch size.

        ``pose_derivative``: what autograd sees of the camera's refinement (`camera_head.py`); values do not change.
        ``chunk_views``: how many views the dense heads take at once, None for all; bounds memory alone.
        ``dense_views``: [n] int64, of which views depth and points are wanted; None for all.
        """
        scenes = as_scenes(images)
        taps = self.aggregator(scenes)
        output = self.decode(
            taps,
            self.aggregator.token_layout(scenes),
            pose_derivative=pose_derivative,
            chunk_views=chunk_views,
            dense_views=dense_views,
        )
        if not self.training:
            output["images"] = scenes
        return output

    def decode(
        self,
        taps: Mapping[int, Tensor],
        layout: TokenLayout,
        *,
        pose_derivative: PoseDerivative = "exact",
        chunk_views: int | None = CHUNK_VIEWS,
        dense_views: Tensor | None = None,
    ) -> VGGTOutput:
        """Taps {layer: [B, S, P, 2C]} -> what the heads make of them; never in reduced precision by autocast
        (`precision.py`)."""
        absent = [layer for layer in self.config.read_layers if layer not in taps]
        if absent:
            raise ModelError(f"taps: expected layers {list(self.config.read_layers)}, got {sorted(taps)}.")
        output = VGGTOutput()
        if self.camera_head is not None:
            output["pose_enc_list"] = self.camera_head(taps[self.config.depth - 1], derivative=pose_derivative)
            output["pose_enc"] = output["pose_enc_list"][-1]
        hooks = [taps[layer] for layer in self.config.dense_layers]
        if dense_views is not None:
            _check_views(dense_views, layout.views)
            hooks = [hook.index_select(1, dense_views.to(hook.device)) for hook in hooks]
        for head, name in ((self.depth_head, "depth"), (self.point_head, "world_points")):
            if head is not None:
                output[name], output[f"{name}_conf"] = head(hooks, layout.grid, chunk_views=chunk_views)
        return output


def _check_views(chosen: Tensor, views: int) -> None:
    if not isinstance(chosen, Tensor) or chosen.ndim != 1 or chosen.dtype not in (torch.int64, torch.int32):
        got = f"{chosen.dtype} {list(chosen.shape)}" if isinstance(chosen, Tensor) else type(chosen).__name__
        raise ShapeError(
            f"dense_views: expected the indices of views as a tensor [n] of int64, got {got}. Pass "
            "torch.tensor([0, 2]), for example."
        )
    if torch.compiler.is_compiling() or chosen.is_meta or (chosen.is_cuda and torch.cuda.is_current_stream_capturing()):
        return  # values cannot be looked at; on a GPU a wrong one would otherwise end the process
    outside = chosen[(chosen < 0) | (chosen >= views)].tolist()
    if outside or not len(chosen):
        raise ShapeError(
            f"dense_views: expected one or more views from 0 to {views - 1}, got {outside[0] if outside else 'none'}."
        )
