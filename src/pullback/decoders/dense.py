"""Decoders that give a map: DPT depth, the saliency head, any module on the patch grid."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor, nn

from pullback.backbones import AnyBackbone, Backbone
from pullback.decoders.decoder import Decoder
from pullback.decoders.identity import check_version
from pullback.errors import DecoderError
from pullback.tokens import TokenLayout


def depth(backbone: Backbone, *grid: str | int) -> Decoder:
    """The DPT depth map of Depth Anything, [B, H, W], or averaged down to ``grid``, rows and columns of cells.

    It reads four layers, normalised as the checkpoint says (`hooks_normed`), and ends in a ReLU.
    """
    name, cells = depth_name(*grid)
    neck, head = getattr(backbone.model, "neck", None), getattr(backbone.model, "head", None)
    if not backbone.hook_layers or neck is None or head is None:
        raise DecoderError(
            f"decoder: 'depth' needs a model with a DPT head such as Depth Anything, got {backbone.name} "
            f"({backbone.family})."
        )

    def decode(taps: Sequence[Tensor], layout: TokenLayout) -> Tensor:
        rows, columns = layout.grid
        full = head(neck(list(taps), rows, columns), rows, columns)
        return averaged(full, cells)

    return Decoder(name, backbone.hook_layers, decode, normed=backbone.hooks_normed)


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
