"""Frozen networks behind one contract: ViT families as blocks that can be run, linearised and pruned."""

from pullback.backbones.backbone import AnyBackbone, Backbone, Classifier, Preprocessing, State
from pullback.backbones.block import Affine, Block, Mlp, Norm, Rope, TokenMap, unchanged
from pullback.backbones.linearized import LinearizedBlock, LinearizedNorm
from pullback.backbones.loading import (
    check_evaluation_mode,
    entry_of,
    load_any_backbone,
    load_backbone,
    resolve_device,
)
from pullback.backbones.outputs import Remaining
from pullback.backbones.samples import Group, Samples, image_samples, thumbnails
from pullback.registry import list_models

__all__ = [
    "Affine",
    "AnyBackbone",
    "Backbone",
    "Block",
    "Classifier",
    "Group",
    "LinearizedBlock",
    "LinearizedNorm",
    "Mlp",
    "Norm",
    "Preprocessing",
    "Remaining",
    "Rope",
    "Samples",
    "State",
    "TokenMap",
    "check_evaluation_mode",
    "entry_of",
    "image_samples",
    "list_models",
    "load_any_backbone",
    "load_backbone",
    "resolve_device",
    "thumbnails",
    "unchanged",
]
