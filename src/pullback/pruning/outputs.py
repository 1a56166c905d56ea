"""From the tokens that a pruned run hands over to what the model itself would have returned.

A family that is missing here cannot be pruned in place (`prune` says so), though `run_pruned` runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from pullback.backbones import Backbone
from pullback.errors import ModelError
from pullback.layout import TokenLayout

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


def assembler(backbone: Backbone) -> Assemble:
    if backbone.family not in ASSEMBLE:
        raise ModelError(
            f"model: {backbone.family} models cannot be pruned in place yet; known are {', '.join(ASSEMBLE)}."
        )
    if backbone.family == "clip" and hasattr(backbone.model, "text_model"):
        raise ModelError("model: expected CLIP's vision model (CLIPVisionModelWithProjection), got one with text.")
    return ASSEMBLE[backbone.family]


def _with_pooling(hidden: Tensor, pooled: Tensor | None) -> Any:
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    return BaseModelOutputWithPooling(last_hidden_state=hidden, pooler_output=pooled)
