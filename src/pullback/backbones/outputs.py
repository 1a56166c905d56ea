"""What a model returns, made of the tokens that leave its last block: all of them, or those that pruning left.

An assembler, ``assemble`` of a family in `pullback.registry`, makes what the model itself would have returned. A family
without one cannot be pruned in place (`prune` says so), though `run_pruned` runs it. A `Classifier` is the part of it
that makes logits; the decoder `logits` reads it, too. The last parts say how models are called on images, and which
classes of transformers return what is made here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pullback import registry
from pullback.backbones.backbone import Backbone, Classifier
from pullback.errors import ModelError, ShapeError
from pullback.tokens import TokenLayout


@dataclass(frozen=True, eq=False)
class Remaining:
    """What a pruned run leaves for the model's output, before the final norm.

    ``tokens``: after the last block, [B, N, D] where the plan brings removed tokens back to their places, otherwise
    those that are left, [B, K, D], the prefix first. ``layout``: of the whole image. ``log_sizes`` [B, K]: what
    attention adds for tokens that stand for several; None: nothing. ``hooks``: the layers that the model's own dense
    decoder reads (`Backbone.hook_layers`), whole. ``class_row``: the tokens are the class token alone, so that there
    is no last_hidden_state.
    """

    tokens: Tensor
    layout: TokenLayout
    log_sizes: Tensor | None = None
    hooks: tuple[Tensor, ...] = ()
    class_row: bool = False


# (backbone, what is left) -> the model's own output
Assemble = Callable[[Backbone, Remaining], Any]


def assembler(backbone: Backbone) -> Assemble | None:
    """Return the function that makes the model's output; None for families that have none."""
    entry = registry.BACKBONES.get(backbone.family)
    return None if entry is None or entry.assemble is None else registry.resolve(entry.assemble)


def no_assembler(backbone: Backbone) -> ModelError:
    """Return the error for families whose output cannot be made of the tokens that are left."""
    known = [name for name, other in registry.BACKBONES.items() if other.assemble is not None]
    return ModelError(
        f"model: {backbone.family} models cannot be pruned in place; known are {', '.join(known)}. A family of your "
        "own says how its output is made of the tokens that are left: BackboneEntry(..., assemble=...). "
        "pullback.pruning.run_pruned and `pullback prune` run a plan on any backbone."
    )


def class_alone(backbone: Backbone) -> bool:
    """Whether the model has an output that reads no token but the class token: pooled, projected, or logits."""
    if backbone.classifier is not None:
        return backbone.classifier.rows is not None
    if not backbone.prefix or backbone.reads_patches:
        return False
    make = assembler(backbone)
    return make in (dinov2, clip) or (make is vit and getattr(backbone.model, "pooler", None) is not None)


# The families


def dinov2(backbone: Backbone, left: Remaining) -> Any:
    """DINOv2 and DINOv3: normalised tokens, and the class token of them."""
    if backbone.classifier is not None:
        return _classified(backbone, left)
    model: Any = backbone.model
    if hasattr(model, "finish"):  # our own network
        output = model.finish(left.tokens)
        return output._replace(last_hidden_state=None) if left.class_row else output
    hidden = backbone.norm(left.tokens)
    return _with_pooling(None if left.class_row else hidden, hidden[:, 0])


def vit(backbone: Backbone, left: Remaining) -> Any:
    """ViT and DeiT: normalised tokens, and a dense layer on the class token where there is one."""
    if backbone.classifier is not None:
        return _classified(backbone, left)
    hidden = backbone.norm(left.tokens)
    pooler = getattr(backbone.model, "pooler", None)
    return _with_pooling(None if left.class_row else hidden, None if pooler is None else pooler(hidden))


def clip(backbone: Backbone, left: Remaining) -> Any:
    """CLIP normalises the class token alone; last_hidden_state is what left the last block."""
    if backbone.classifier is not None:
        return _classified(backbone, left)
    pooled = backbone.norm(left.tokens[:, 0])
    tokens = None if left.class_row else left.tokens
    project = getattr(backbone.model, "visual_projection", None)
    if project is None:
        return _with_pooling(tokens, pooled)
    from transformers.models.clip.modeling_clip import CLIPVisionModelOutput

    return CLIPVisionModelOutput(image_embeds=project(pooled), last_hidden_state=tokens)


def siglip(backbone: Backbone, left: Remaining) -> Any:
    """SigLIP pools by attention: a token that stands for several weighs as much as they did."""
    if backbone.classifier is not None:
        return _classified(backbone, left)
    hidden = backbone.norm(left.tokens)
    head = pooling_head(backbone)
    return _with_pooling(hidden, None if head is None else attention_pool(head, hidden, left.log_sizes))


def depth_anything(backbone: Backbone, left: Remaining) -> Any:
    from transformers.modeling_outputs import DepthEstimatorOutput

    model: Any = backbone.model
    read = [backbone.norm(tap) if backbone.hooks_normed else tap for tap in left.hooks]
    grid = left.layout.grid
    return DepthEstimatorOutput(predicted_depth=model.head(model.neck(read, *grid), *grid))


def tiny_scenes(backbone: Backbone, left: Remaining) -> Any:
    model: Any = backbone.model
    return model.finish(list(left.hooks), left.tokens, *left.layout.grid)


def _with_pooling(hidden: Tensor | None, pooled: Tensor | None) -> Any:
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    return BaseModelOutputWithPooling(last_hidden_state=hidden, pooler_output=pooled)


# Attention pooling


def pooling_head(backbone: Backbone) -> Any | None:
    """Return the module that pools the tokens of a SigLIP by attention; None where it has none."""
    model: Any = backbone.model
    return getattr(getattr(model, "vision_model", None) or model, "head", None)


def attention_pool(head: Any, tokens: Tensor, log_sizes: Tensor | None = None) -> Tensor:
    """Pool tokens [B, N, D] -> [B, D] as SigLIP does, written out: `nn.MultiheadAttention` has no forward mode.

    ``log_sizes`` [B, N]: token t stands for exp(log_sizes_t) equal ones.
    """
    attention = head.attention
    wq, wk, wv = attention.in_proj_weight.chunk(3)
    bq, bk, bv = attention.in_proj_bias.chunk(3)

    def heads_first(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return nn.functional.linear(x, weight, bias).unflatten(-1, (attention.num_heads, -1)).transpose(-3, -2)

    q = heads_first(head.probe, wq, bq)  # [1, h, 1, d]
    k, v = heads_first(tokens, wk, bk), heads_first(tokens, wv, bv)  # [B, h, N, d]
    scores = (q * q.shape[-1] ** -0.5) @ k.mT
    if log_sizes is not None:
        scores = scores + log_sizes.to(scores.dtype)[:, None, None]
    pooled = attention.out_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))  # [B, 1, D]
    return (pooled + head.mlp(head.layernorm(pooled)))[:, 0]


# Image classifiers

# How the classifiers of a family read the tokens: the class token and the mean patch, one of the two, or the mean patch
# before the final norm.
READS = {
    "dinov2": "both",
    "dinov2-registers": "both",
    "vit": "class token",
    "deit": "class token",
    "clip": "patches before the norm",
    "siglip": "patches",
    "siglip2": "patches",
}
CLASSIFIERS = ("classifier",), ("cls_classifier", "distillation_classifier")  # one head, or DeiT's two with a teacher


def classifier_of(model: nn.Module, family: str) -> Classifier | None:
    """Return the classifier of a *ForImageClassification model; None for models without one."""
    for names in CLASSIFIERS:
        heads = [getattr(model, name, None) for name in names]
        if all(isinstance(head, nn.Module) for head in heads):
            return classifier(family, *heads)
    return None


def classifier(family: str, head: Any, distilled: Any = None) -> Classifier | None:
    """Return how a family makes logits by its ``head``; of DeiT with a teacher also by that of the ``distilled`` token.
    None for families that have no classifiers."""
    how, classes = READS.get(family), class_count(head)
    if how == "both":
        return Classifier(lambda x, layout: head(torch.cat([x[:, 0], _patch_mean(x, layout)], 1)), classes)
    if how == "class token" and distilled is None:
        return Classifier(lambda x, layout: head(x[:, 0]), classes, rows=1)
    if how == "class token":
        return Classifier(lambda x, layout: (head(x[:, 0]) + distilled(x[:, 1])) / 2, classes, rows=2)
    if how is not None:
        return Classifier(lambda x, layout: head(_patch_mean(x, layout)), classes, normed=how == "patches")
    return None


def _patch_mean(tokens: Tensor, layout: TokenLayout) -> Tensor:
    return tokens[:, layout.prefix :].mean(1)


def class_count(head: Any) -> int | None:
    """Return the number of classes of a linear layer; None for a head that is none, such as the identity."""
    weight = getattr(head, "weight", None)
    return None if weight is None else int(weight.shape[0])


def _classified(backbone: Backbone, left: Remaining) -> Any:
    from transformers.modeling_outputs import ImageClassifierOutput

    model: Any = backbone.model
    assert backbone.classifier is not None
    logits = backbone.classifier.read(left.tokens, left.layout, backbone.norm)
    if not hasattr(model, "distillation_classifier"):
        return ImageClassifierOutput(logits=logits)
    from transformers.models.deit.modeling_deit import DeiTForImageClassificationWithTeacherOutput

    first, second = backbone.norm(left.tokens[:, :2]).unbind(1)
    return DeiTForImageClassificationWithTeacherOutput(
        logits=logits,
        cls_logits=model.cls_classifier(first),
        distillation_logits=model.distillation_classifier(second),
    )


# What models take


def own_output(model: Any, backbone: Backbone, images: Tensor) -> Any:
    """Call a model, or a pruned copy of it, on images [B, 3, H, W] of any size."""
    if backbone.family == "siglip2":
        return model(**patch_inputs(images, backbone.patch_size))
    return model(images, **({"interpolate_pos_encoding": True} if backbone.family in FIXED_SIZE else {}))


def patch_inputs(images: Tensor, patch: int) -> dict[str, Tensor]:
    """Return what SigLIP 2 takes for images [B, 3, H, W] of one shape: patches, a mask, and rows and columns."""
    patches = as_patches(images, patch)
    shapes = torch.tensor([[side // patch for side in images.shape[-2:]]] * len(images), device=images.device)
    mask = torch.ones(patches.shape[:2], dtype=torch.int32, device=images.device)
    return {"pixel_values": patches, "pixel_attention_mask": mask, "spatial_shapes": shapes}


def as_patches(images: Tensor, patch: int) -> Tensor:
    """Cut images [B, 3, H, W] into patches [B, h w, patch * patch * 3], row by row."""
    return images.unflatten(3, (-1, patch)).unflatten(2, (-1, patch)).permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


def as_images(patches: Any, mask: Tensor | None, shapes: Tensor | None, patch: int) -> Tensor:
    """Put together the images [B, 3, H, W] of patches [B, P, patch * patch * 3], as SigLIP 2's image processor makes
    them; ``shapes`` [B, 2] are rows and columns, and patches that fill up a row of the batch are cut off."""
    if not isinstance(patches, Tensor) or patches.ndim != 3 or shapes is None:
        got = list(patches.shape) if isinstance(patches, Tensor) else type(patches).__name__
        raise ShapeError(
            f"pixel_values: SigLIP 2 takes patches [B, P, {3 * patch * patch}] with pixel_attention_mask and "
            f"spatial_shapes, as its image processor makes them, got {got}."
        )
    rows, columns = (int(side) for side in shapes[0])
    if not bool((shapes == shapes[0]).all()) or (mask is not None and not bool((mask.sum(1) == rows * columns).all())):
        raise ShapeError(
            f"spatial_shapes: a pruned model takes images of one shape at a time, got {shapes.tolist()}. Pass them one "
            "by one, or in groups of a shape."
        )
    grid = patches[:, : rows * columns].unflatten(1, (rows, columns)).unflatten(3, (patch, patch, 3))
    return grid.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)


# Classes of transformers

# The classes whose output the functions above make. Others of the same family (backbones of detectors, models with a
# text tower) return something else from the same blocks.
WHOLE = (
    "Dinov2Model",
    "Dinov2WithRegistersModel",
    "DINOv3ViTModel",
    "ViTModel",
    "DeiTModel",
    "CLIPVisionModel",
    "CLIPVisionModelWithProjection",
    "SiglipVisionModel",
    "Siglip2VisionModel",
    "Dinov2ForImageClassification",
    "Dinov2WithRegistersForImageClassification",
    "ViTForImageClassification",
    "DeiTForImageClassification",
    "DeiTForImageClassificationWithTeacher",
    "CLIPForImageClassification",
    "SiglipForImageClassification",
    "Siglip2ForImageClassification",
    "DepthAnythingForDepthEstimation",
    "Dinov2",
    "TinyScenes",
)
# Their own forward takes images of one size, unless it is asked to interpolate its positions.
FIXED_SIZE = ("vit", "deit", "clip", "siglip")


def check_output_class(model: nn.Module) -> None:
    """Refuse a class of a known family whose output is none of the above: a pruned copy would silently return another
    one. Of other families their adapter, or `assembler`, says what is wrong."""
    compiled: Any = getattr(model, "_orig_mod", model)  # torch.compile's wrapper returns what is inside
    config: Any = getattr(model, "config", None)
    if getattr(config, "model_type", None) not in _known_types() or _is_whole(compiled):
        return
    inner = [name for name, child in model.named_children() if _is_whole(child)]
    fix = (
        f"Pass model.{inner[0]}, its {type(getattr(model, inner[0])).__name__}, with dense=True if what follows reads "
        "patch tokens, and run that on the output"
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
    """Return the model types of the families whose output is made here."""
    own = (entry for entry in registry.BACKBONES.values() if str(entry.assemble).startswith(f"{__name__}:"))
    return {kind for entry in own for kind in entry.model_types}
