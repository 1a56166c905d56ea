"""Decoders by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from torch import Tensor, nn

from pullback.backbones import Backbone, check_evaluation_mode
from pullback.decoders.decoder import Decoder
from pullback.decoders.dense import PatchGrid, depth, load_saliency_head, on_patch_grid
from pullback.decoders.embedding import class_token, patch_mean, pool, projection
from pullback.errors import DecoderError

EMBEDDINGS: dict[str, Callable[[Backbone], Decoder]] = {
    "cls": class_token,
    "projection": projection,
    "pool": pool,
    "mean": patch_mean,
}
NAMES = (*EMBEDDINGS, "depth", "depth-8x8 (any size)", "saliency")


def build_decoder(choice: str | Callable[[Tensor], Tensor] | PatchGrid | Decoder, backbone: Backbone) -> Decoder:
    """A decoder by name; a function of the last layer's normalised tokens, [B, N, D] -> [B, ...]; or a `PatchGrid`."""
    if isinstance(choice, Decoder):
        return choice
    if isinstance(choice, PatchGrid):
        if isinstance(choice.head, nn.Module):
            check_evaluation_mode(choice.head, "decoder")
        return on_patch_grid(backbone, choice)
    if callable(choice):
        return _user_decoder(choice, backbone)
    if choice in EMBEDDINGS:
        return EMBEDDINGS[choice](backbone)
    sized = re.fullmatch(r"depth(?:-(\d+)x(\d+))?", str(choice))
    if sized is not None:
        grid = (int(sized[1]), int(sized[2])) if sized[1] else None
        if grid is not None and min(grid) < 1:
            raise DecoderError(f"decoder: expected depth-GxG with G at least 1, got {choice!r}.")
        return depth(backbone, grid)
    if choice == "saliency":
        head = load_saliency_head(Path(backbone.name).parent, backbone.dim)
        return on_patch_grid(backbone, PatchGrid(head.to(backbone.device, backbone.dtype), "saliency"))
    raise DecoderError(f"decoder: expected one of {', '.join(NAMES)}, or a function, got {choice!r}.")


def _user_decoder(function: Callable[[Tensor], Tensor], backbone: Backbone) -> Decoder:
    if isinstance(function, nn.Module):
        check_evaluation_mode(function, "decoder")
    name = getattr(function, "__name__", type(function).__name__)
    return Decoder(name, (backbone.depth - 1,), lambda taps, layout: function(taps[0]))
