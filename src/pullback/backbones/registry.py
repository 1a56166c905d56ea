"""The families that can be loaded, as data. `pullback ls` prints this table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn

from pullback.backbones import families
from pullback.backbones.backbone import Backbone
from pullback.errors import ModelError


@dataclass(frozen=True)
class Family:
    """``model_types`` are the names in config.json; ``loader`` is transformers' class for checkpoints that we do
    not read ourselves (`checkpoint.reader_of`).

    ``may_lack``: parameters that published checkpoints leave out and that no decoder here reads unless they are there.
    """

    name: str
    model_types: tuple[str, ...]
    loader: str
    adapt: Callable[[nn.Module, str], Backbone]
    decoders: tuple[str, ...]
    example: str
    may_lack: tuple[str, ...] = ()


FAMILIES: tuple[Family, ...] = (
    Family(
        "dinov2",
        ("dinov2",),
        "AutoModel",
        families.dinov2,
        ("cls", "mean", "saliency"),
        "facebook/dinov2-base",
        ("mask_token",),
    ),
    Family(
        "dinov2-registers",
        ("dinov2_with_registers",),
        "AutoModel",
        partial(families.dinov2, family="dinov2-registers"),
        ("cls", "mean"),
        "facebook/dinov2-with-registers-base",
        ("mask_token",),
    ),
    Family(
        "dinov3",
        ("dinov3_vit",),
        "AutoModel",
        families.dinov3,
        ("cls", "mean"),
        "facebook/dinov3-vitb16-pretrain-lvd1689m",
        ("mask_token",),
    ),
    Family(
        "clip",
        ("clip", "clip_vision_model"),
        "CLIPVisionModelWithProjection",
        families.clip,
        ("cls", "projection", "mean"),
        "openai/clip-vit-base-patch16",
        ("visual_projection",),
    ),
    Family(
        "siglip",
        ("siglip", "siglip_vision_model"),
        "SiglipVisionModel",
        families.siglip,
        ("pool", "mean"),
        "google/siglip-base-patch16-224",
    ),
    Family(
        "vit",
        ("vit",),
        "AutoModel",
        families.vit,
        ("cls", "pool", "mean"),
        "google/vit-base-patch16-224",
        ("pooler", "mask_token"),
    ),
    Family(
        "deit",
        ("deit",),
        "AutoModel",
        partial(families.vit, family="deit", prefix=2),
        ("cls", "pool", "mean"),
        "facebook/deit-base-distilled-patch16-224",
        ("pooler", "mask_token"),
    ),
    Family(
        "depth-anything",
        ("depth_anything",),
        "AutoModelForDepthEstimation",
        families.depth_anything,
        ("depth", "depth-GxG", "cls", "mean"),
        "depth-anything/Depth-Anything-V2-Base-hf",
        ("mask_token",),
    ),
    Family(
        "tiny-scenes",
        ("tiny_scenes",),
        "",
        families.tiny_scenes,
        ("depth", "depth-GxG", "cls", "mean"),
        "tiny-scenes",
    ),
)


def family_of(model_type: str) -> Family:
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    if model_type == "vggt":
        raise ModelError(
            "model: a VGGT takes scenes of several views, not single images: use load_probe or prune_views."
        )
    known = ", ".join(sorted(name for family in FAMILIES for name in family.model_types))
    raise ModelError(f"model: no adapter for transformers' model type {model_type!r}; known are {known}.")
