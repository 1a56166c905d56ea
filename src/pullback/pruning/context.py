"""What a score may know besides the tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pullback.backbones import Backbone
from pullback.errors import ModelError
from pullback.layout import TokenLayout


@dataclass(frozen=True, eq=False)
class ScoreContext:
    """The tokens are F^layer [B, N, D], after block ``layer``; some of the image's may be gone already."""

    backbone: Backbone
    layer: int
    layout: TokenLayout  # of the whole image
    positions: Tensor  # [B, N] places of the tokens in the full sequence
    sizes: Tensor  # [B, N] how many of the original tokens each stands for
    block_input: Tensor  # [B, N, D] the tokens that entered block `layer`
    log_sizes: Tensor | None = None  # [B, N] as that block saw them, None: not at all
    taps: Mapping[int, Tensor] = field(default_factory=dict)  # layers read so far, whole sequences
    generator: torch.Generator | None = None

    @property
    def prefix(self) -> int:
        """Class and register tokens come first, and are never removed."""
        return self.layout.prefix

    def class_attention(self) -> Tensor:
        """[B, N]: what the class token attends to in block ``layer``, mean over heads. One query, one softmax."""
        if self.prefix == 0:
            raise ModelError(f"score: {self.backbone.name} has no class token, so class attention does not exist.")
        block = self.backbone.blocks[self.layer]
        rope = self.backbone.rope_of(self.block_input, self.layout, self.positions)
        x = block.norm1(self.block_input)
        q, k = block.heads_first(block.query(x[:, :1])), block.heads_first(block.key(x))  # no values: nothing is mixed
        if rope is not None:
            q, k = rope.rotate(q, 1), rope.rotate(k, x.shape[1])
        # in float32: half precision knows too few numbers to order hundreds of tokens
        logits = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) * block.head_dim**-0.5  # [B, h, 1, N]
        if self.log_sizes is not None:
            logits = logits + self.log_sizes[:, None, None]
        return logits.softmax(-1).mean((1, 2))


# (tokens [B, N, D], context) -> [B, N], not negative; the lowest are removed first
Score = Callable[[Tensor, ScoreContext], Tensor]
# (tokens [B, N, D], context) -> sigma_j v_j [B, r, N, D], the scaled modes of J, or of a prediction of it
Modes = Callable[[Tensor, ScoreContext], Tensor]
