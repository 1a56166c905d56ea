"""What a pruned model computes, as a share of what the blocks of the whole model compute."""

from __future__ import annotations

import torch
from torch import Tensor

from pullback.evaluation.cost import flops
from pullback.pruning import resized
from pullback.pruning.model import PrunedModel


@torch.no_grad()
def operations(pruned: PrunedModel, images: Tensor) -> float:
    """Return the operations of a pruned model over those of the unpruned blocks at the pictures' own size.

    Counted are all blocks with the tokens that they really run (8nD^2 + 4n^2D for attention, 16nD^2 for an MLP of four
    times the width), and what chooses and merges tokens; not counted are patch embedding and decoder. ``images``
    [B, 3, H, W], of which the first is run.
    """
    backbone, one = pruned.backbone, images[:1]
    last = [backbone.depth - 1]
    whole = flops(lambda: backbone.features(one, last)) - flops(lambda: backbone.embed(one))
    seen = one if pruned.plan.size is None else resized.shrunk(one, pruned.plan.size, backbone.patch_size)
    return (flops(lambda: pruned.run(one, last)) - flops(lambda: backbone.embed(seen))) / whole
