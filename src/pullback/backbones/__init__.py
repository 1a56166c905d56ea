"""ViT families behind one contract."""

from pullback.backbones.backbone import Backbone, Preprocessing
from pullback.backbones.block import Block, Norm, Rope
from pullback.backbones.linearized import LinearizedBlock, LinearizedNorm
from pullback.backbones.loading import check_evaluation_mode, list_models, load_backbone, resolve_device

__all__ = [
    "Backbone",
    "Block",
    "LinearizedBlock",
    "LinearizedNorm",
    "Norm",
    "Preprocessing",
    "Rope",
    "check_evaluation_mode",
    "list_models",
    "load_backbone",
    "resolve_device",
]
