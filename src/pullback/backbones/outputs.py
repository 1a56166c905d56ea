"""From the tokens that a pruned run hands over to what the model itself would have returned.

A family that is missing here cannot be pruned in place (`prune` says so), though `run_pruned` runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from pullback.backbones import Backbone
from pullback.backbones.registry import FAMILIES
from pullback.errors import ModelError
from pullback.tokens import TokenLayout

# (backbone, F^l by layer, before the final norm, layout) -> the model's own output
Assemble = Callable[[Backbone, Mapping[int, Tensor], TokenLayout], Any]


def dinov2(backbone: Backbone, taps: Mapping[int, Tensor], layout: TokenLayout) -> Any:
    model: Any = backbone.model
    if hasattr(model, "finish"):  # our own network
        return model.finish(taps[backbone.depth - 1])
    hidden = backbone.norm(taps[backbone.depth - 1])
    return _with_pooling(hidden, hidden[:, 0])


def vit(backbone: Backbone, taps: Mapping[int, Tensor], layout: TokenLayout) -> Any:
    hidden = backbone.norm(taps[backbone.depth - 1])
    pooler = getattr(backbone.model, "pooler", None)
    return _with_pooling(hidden, None if pooler is None else pooler(hidden))


def clip(backbone: Backbone, taps: Mapping[int, Tensor], layout: TokenLayout) -> Any:
    """CLIP normalises the class token alone; last_hidden_state is what left the last block."""
    hidden = taps[backbone.depth - 1]
    pooled = backbone.norm(hidden[:, 0])
    project = getattr(backbone.model, "visual_projection", None)
    if project is None:
        return _with_pooling(hidden, pooled)
    from transformers.models.clip.modeling_clip import CLIPVisionModelOutput

    return CLIPVisionModelOutput(image_embeds=project(pooled), last_hidden_state=hidden)


def depth_anything(backbone: Backbone, taps: Mapping[int, Tensor], layout: TokenLayout) -> Any:
    from transformers.modeling_outputs import DepthEstimatorOutput

    model: Any = backbone.model
    read = [backbone.norm(taps[layer]) if backbone.hooks_normed else taps[layer] for layer in backbone.hook_layers]
    depth = model.head(model.neck(read, *layout.grid), *layout.grid)
    return DepthEstimatorOutput(predicted_depth=depth)


def tiny_scenes(backbone: Backbone, taps: Mapping[int, Tensor], layout: TokenLayout) -> Any:
    model: Any = backbone.model
    return model.finish([taps[layer] for layer in backbone.hook_layers], taps[backbone.depth - 1], *layout.grid)


ASSEMBLE: dict[str, Assemble] = {
    "dinov2": dinov2,
    "dinov2-registers": dinov2,
    "dinov3": dinov2,
    "vit": vit,
    "deit": vit,
    "clip": clip,
    "depth-anything": depth_anything,
    "tiny-scenes": tiny_scenes,
}


# The classes whose output the functions above make. Others of the same family (backbones of detectors, classifiers)
# return something else from the same blocks.
WHOLE = (
    "Dinov2Model",
    "Dinov2WithRegistersModel",
    "DINOv3ViTModel",
    "ViTModel",
    "DeiTModel",
    "CLIPVisionModel",
    "CLIPVisionModelWithProjection",
    "DepthAnythingForDepthEstimation",
    "Dinov2",
    "TinyScenes",
)
# Their own forward takes images of one size, unless it is asked to interpolate its positions.
FIXED_SIZE = ("vit", "deit", "clip")


def assembler(backbone: Backbone) -> Assemble:
    if backbone.family not in ASSEMBLE:
        raise ModelError(
            f"model: {backbone.family} models cannot be pruned in place yet; known are {', '.join(ASSEMBLE)}."
        )
    return ASSEMBLE[backbone.family]


def check_output_class(model: nn.Module) -> None:
    """Refuse a class of a known family whose output is none of the above: a pruned copy would silently return another
    one. Of other families their adapter, or `assembler`, says what is wrong."""
    compiled: Any = getattr(model, "_orig_mod", model)  # torch.compile's wrapper returns what is inside
    config: Any = getattr(model, "config", None)
    if getattr(config, "model_type", None) not in _known_types() or _is_whole(compiled):
        return
    inner = [name for name, child in model.named_children() if _is_whole(child)]
    fix = (
        f"Pass model.{inner[0]}, its {type(getattr(model, inner[0])).__name__}, and run what follows on that output"
        if inner
        else "Load the weights with one of those: its from_pretrained takes the same folder or hub id"
    )
    raise ModelError(
        f"model: {type(model).__name__} returns something that a pruned copy cannot; expected one of "
        f"{', '.join(WHOLE)}. {fix}."
    )


def _is_whole(model: nn.Module) -> bool:
    return any(kind.__name__ in WHOLE for kind in type(model).__mro__)


def _known_types() -> set[str]:
    return {kind for family in FAMILIES if family.name in ASSEMBLE for kind in family.model_types}


def _with_pooling(hidden: Tensor, pooled: Tensor | None) -> Any:
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    return BaseModelOutputWithPooling(last_hidden_state=hidden, pooler_output=pooled)
