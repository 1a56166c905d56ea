"""Decoders that give a map: DPT depth, the saliency head, any module on the patch grid."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pullback.backbones import AnyBackbone, Backbone
from pullback.backbones.shipped import shipped
from pullback.decoders.decoder import Decoder
from pullback.decoders.identity import check_version
from pullback.errors import DecoderError, ModelError, first_line
from pullback.models.dpt import DPTDepth, DPTDepthConfig
from pullback.registry import BACKBONES
from pullback.tokens import TokenLayout

DPT_DEPTH = "dpt-depth"
"""What config.json calls a depth head by itself."""


def depth(backbone: Backbone, *grid: str | int) -> Decoder:
    """The DPT depth map of a model, [B, H, W], or averaged down to ``grid``, rows and columns of cells.

    Of Depth Anything and tiny-scenes it is the model's own, which reads four layers, normalised as the checkpoint says
    (`hooks_normed`). For a DINOv2 whose weights are known, a head comes with the package (`DPTDepth`): metres.
    """
    name, cells = depth_name(*grid)
    neck, head = getattr(backbone.model, "neck", None), getattr(backbone.model, "head", None)
    if not backbone.hook_layers or neck is None or head is None:
        return depth_decoder(shipped_depth_head(backbone), *grid)

    def decode(taps: Sequence[Tensor], layout: TokenLayout) -> Tensor:
        rows, columns = layout.grid
        full = head(neck(list(taps), rows, columns), rows, columns)
        return averaged(full, cells)

    return Decoder(name, backbone.hook_layers, decode, normed=backbone.hooks_normed)


def depth_decoder(head: DPTDepth, *grid: str | int) -> Decoder:
    """The decoder of a depth head by itself, such as one that `recipes/dinov2_depth.py` trained.

    It has to be on the device and in the dtype of the model (`load_depth_head`).
    """
    name, cells = depth_name(*grid)

    def decode(taps: Sequence[Tensor], layout: TokenLayout) -> Tensor:
        return averaged(head(taps, *layout.grid), cells)

    return Decoder(name, head.config.hooks, decode)


def shipped_depth_head(backbone: AnyBackbone) -> DPTDepth:
    """Load the depth head that comes with the package for the weights of this backbone."""
    needs = (
        f"decoder: 'depth' needs a model with a DPT head such as Depth Anything, got {backbone.name} "
        f"({backbone.family})"
    )
    family = BACKBONES.get(backbone.family)
    if family is None or "depth" not in family.decoders:
        raise DecoderError(f"{needs}.")
    fix = (
        "Train a head for these weights (recipes/dinov2_depth.py in the repository) and pass "
        "decoder=depth_decoder(load_depth_head(FOLDER)), both of pullback.decoders.dense."
    )
    try:
        folder = shipped(DPT_DEPTH, backbone, fix=fix)
    except ModelError as error:
        reason = str(error).removeprefix("model: ")
        raise DecoderError(f"{needs}, or weights for which the package has one: {reason}") from None
    return load_depth_head(folder, backbone.device, backbone.dtype)


def load_depth_head(
    folder: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> DPTDepth:
    """Load a depth head that `recipes/dinov2_depth.py` wrote: config.json and model.safetensors."""
    from safetensors.torch import load_file

    path = Path(folder)
    try:
        stored = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DecoderError(
            f"folder: {path / 'config.json'} cannot be read ({first_line(error)}). Expected the folder of a depth head."
        ) from None
    kind = stored.get("kind") if isinstance(stored, dict) else None
    if kind != DPT_DEPTH:
        raise DecoderError(f"folder: {path} holds {kind or 'no part of this package'}, expected a {DPT_DEPTH}.")
    try:
        head = DPTDepth(DPTDepthConfig.from_dict(stored)).to(device=device, dtype=dtype)
        head.load_state_dict(load_file(path / "model.safetensors"))
    except Exception as error:  # OSError, SafetensorError, and RuntimeError with many lines where shapes differ
        raise DecoderError(
            f"folder: the weights in {path} cannot be used: {first_line(error)} Train it again."
        ) from None
    return head.eval().requires_grad_(False)


def depth_name(*grid: str | int) -> tuple[str, tuple[int, int] | None]:
    """The name of a depth decoder with so many rows and columns of cells, and these as numbers; none: the full map."""
    if not grid:
        return "depth", None
    rows, columns = (int(side) for side in grid)
    name = f"depth-{rows}x{columns}"
    if min(rows, columns) < 1:
        raise DecoderError(f"decoder: expected depth-GxG with G at least 1, got {name!r}.")
    return name, (rows, columns)


def averaged(maps: Tensor, cells: tuple[int, int] | None) -> Tensor:
    """Average maps [..., H, W] down to so many rows and columns of cells; None: as they are.

    More cells than pixels are refused: pixels would be repeated, and J would have rows that say the same."""
    if cells is None:
        return maps
    height, width = maps.shape[-2:]
    if cells[0] > height or cells[1] > width:
        raise DecoderError(
            f"decoder: 'depth-{cells[0]}x{cells[1]}' averages a depth map down to cells, expected at most as many as "
            f"its {height}x{width} pixels. Use 'depth' for the whole map, fewer cells, or larger images."
        )
    return F.adaptive_avg_pool2d(maps, cells)


@dataclass(frozen=True)
class PatchGrid:
    """A head that wants the last layer's normalised patch tokens as a map: [B, D, h, w] -> [B, ...].

    ``version``: as in `Decoder`.
    """

    head: Callable[[Tensor], Tensor]
    name: str = "dense"
    version: str | None = None

    def __post_init__(self) -> None:
        check_version(self.version)


def on_patch_grid(backbone: AnyBackbone, choice: PatchGrid) -> Decoder:
    """The decoder of a head that reads the patch grid."""

    def decode(taps: Sequence[Tensor], layout: TokenLayout) -> Tensor:
        return choice.head(layout.patch_map(taps[0])[:, 0].permute(0, 3, 1, 2))

    return Decoder(choice.name, (backbone.depth - 1,), decode, version=choice.version, source=choice)


def saliency(backbone: Backbone) -> Decoder:
    """The saliency head in ``decoder.safetensors`` beside the folder of a fine-tuned backbone."""
    head = load_saliency_head(Path(backbone.name).parent, backbone.dim)
    return on_patch_grid(backbone, PatchGrid(head.to(backbone.device, backbone.dtype), "saliency"))


class SaliencyHead(nn.Module):
    """Three transposed convolutions with batch norm, then a 1x1 convolution: logits on 8 times the patch grid.

    For display the logits are resized to the image and put through a sigmoid; the decoder stops at the logits.
    """

    def __init__(self, dim: int, widths: Sequence[int] = (256, 128, 64)) -> None:
        super().__init__()
        for index, (before, after) in enumerate(zip((dim, *widths[:-1]), widths, strict=True), start=1):
            setattr(self, f"upconv{index}", nn.ConvTranspose2d(before, after, 4, stride=2, padding=1))
            setattr(self, f"bn{index}", nn.BatchNorm2d(after))
        self.stages = len(widths)
        self.final_conv = nn.Conv2d(widths[-1], 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, D, h, w] -> [B, 8h, 8w]."""
        for index in range(1, self.stages + 1):
            x = F.relu(getattr(self, f"bn{index}")(getattr(self, f"upconv{index}")(x)))
        return self.final_conv(x)[:, 0]


def load_saliency_head(folder: Path, dim: int) -> SaliencyHead:
    """The decoder beside a fine-tuned backbone: ``folder``/decoder.safetensors."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = folder / "decoder.safetensors"
    if not path.is_file():
        raise DecoderError(
            f"decoder: 'saliency' needs {path}, which is not there. Expected a folder with backbone/ and "
            "decoder.safetensors."
        )
    head = SaliencyHead(dim)
    try:
        missing, unexpected = head.load_state_dict(load_file(path), strict=False, assign=True)
    except (RuntimeError, SafetensorError) as error:
        lines = str(error).splitlines()
        raise DecoderError(f"decoder: {path} does not fit the saliency head: {lines[-1].strip()}") from None
    missing = [key for key in missing if not key.endswith("num_batches_tracked")]
    if missing or unexpected:
        raise DecoderError(
            f"decoder: {path} does not fit the saliency head (missing {missing[:3]}, extra {unexpected[:3]})."
        )
    return head.eval().requires_grad_(False)
