"""A pruned class-token model as an ONNX file (needs the extra `pullback[onnx]`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pullback.checks import of_kind
from pullback.data.images import checked_size
from pullback.errors import ModelError, PullbackError
from pullback.pruning.model import PrunedModel

EMBEDDING, LOGITS, KEPT = "image_embedding", "logits", "kept_tokens"


class _Exported(nn.Module):
    """A module from pixel_values [B, 3, H, W] to (embedding or logits [B, M], places of the kept tokens [B, K])."""

    def __init__(self, pruned: PrunedModel) -> None:
        super().__init__()
        self.pruned = pruned

    def forward(self, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
        output, run = self.pruned.with_record(pixel_values)
        return embedding_of(output), run.records[-1].kept


def embedding_of(output: Any) -> Tensor:
    """Return what a model calls its embedding: CLIP's projection, the pooled class token, or a classifier's logits."""
    if isinstance(output, Tensor):
        return output
    for name in ("image_embeds", "pooler_output", "embedding", "logits"):
        value = getattr(output, name, None)
        if isinstance(value, Tensor):
            return value
    raise PullbackError(f"output: expected an embedding of the image, got {type(output).__name__} without one.")


def export_onnx(pruned: PrunedModel, path: str | Path, *, size: int | tuple[int, int]) -> Path:
    """Write the model as ONNX for float32 images [B, 3, H, W] of one size, any B; return the path.

    Its outputs are ``image_embedding`` [B, M], of an image classifier ``logits`` [B, classes], and ``kept_tokens``
    [B, K], the places of the tokens that are left.
    """
    if not isinstance(pruned, PrunedModel):
        raise ModelError(
            f"pruned: expected what pb.prune returned, got {type(pruned).__name__}. Prune it first, or export it by "
            "torch.onnx.export."
        )
    if pruned.backbone.hook_layers:
        raise PullbackError(
            f"export_onnx: expected a class-token model, got {pruned.backbone.name}, whose decoder reads all tokens."
        )
    of_kind("path", path, (str, Path), "the file to write")
    path = Path(path)
    height, width = checked_size(size)
    example = torch.zeros(2, 3, height, width, device=pruned.device)
    try:
        program: Any = torch.onnx.export(
            _Exported(pruned).eval(),
            (example,),
            dynamo=True,
            verbose=False,
            input_names=["pixel_values"],
            output_names=[EMBEDDING if pruned.backbone.classifier is None else LOGITS, KEPT],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
        )
    except ModuleNotFoundError as error:
        raise PullbackError(
            f"export_onnx: needs {error.name}. Install it with: pip install 'pullback[onnx]'."
        ) from None
    path.parent.mkdir(parents=True, exist_ok=True)
    program.save(path)
    return path
