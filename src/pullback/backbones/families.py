"""Each ViT family as a `Backbone`: adapters, which take a transformers model (or one of ours) apart.

transformers renames submodules between releases (`attention.attention.query` became `attention.q_proj`), so parts are
found by the first name that exists. What an adapter returns is checked against the model's own forward in the tests.
A model with something on top of its ViT, such as an image classifier, is taken apart as that ViT; what it returns is in
`outputs.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pullback.backbones.backbone import Backbone, Preprocessing
from pullback.backbones.block import Affine, Block, Mlp, Norm, Rope
from pullback.backbones.outputs import as_patches, classifier_of
from pullback.data.images import IMAGENET_MEAN, IMAGENET_STD
from pullback.errors import ModelError
from pullback.tokens import TokenLayout

IMAGENET = (IMAGENET_MEAN, IMAGENET_STD)
HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
OPENAI = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))


def dinov2(model: Any, name: str, family: str = "dinov2", **hooks: Any) -> Backbone:
    tower = _tower(model, "dinov2", "dinov2_with_registers")
    registers = getattr(tower.config, "num_register_tokens", 0) or 0
    return _backbone(
        name,
        family,
        hooks.pop("owner", model),
        tower,
        part(tower, "encoder.layer", "encoder.layers", "layers"),
        part(tower, "layernorm"),
        prefix=1 + registers,
        preprocessing=Preprocessing(*IMAGENET, size=224),
        embed_pixels=part(tower, "embeddings"),
        **hooks,
    )


def dinov2_registers(model: Any, name: str) -> Backbone:
    return dinov2(model, name, "dinov2-registers")


def dinov3(model: Any, name: str) -> Backbone:
    prefix = 1 + model.config.num_register_tokens
    rope = part(model, "rope_embeddings")

    def tables(layout: TokenLayout) -> Rope:
        size = [side * model.config.patch_size for side in layout.grid]
        reference = model.norm.weight
        cos, sin = rope(torch.empty(1, 1, *size, dtype=reference.dtype, device=reference.device))
        ones = torch.ones(prefix, cos.shape[-1], dtype=cos.dtype, device=cos.device)
        return Rope(torch.cat([ones, cos])[None, None], torch.cat([0 * ones, sin])[None, None])

    return _backbone(
        name,
        "dinov3",
        model,
        model,
        part(model, "model.layer", "layer", "encoder.layer"),
        part(model, "norm"),
        prefix=prefix,
        preprocessing=Preprocessing(*IMAGENET, size=224),
        embed_pixels=part(model, "embeddings"),
        rope_tables=tables,
    )


def clip(model: Any, name: str) -> Backbone:
    tower = _tower(model, "vision_model")
    return _backbone(
        name,
        "clip",
        model,
        tower,
        part(tower, "encoder.layers"),
        part(tower, "post_layernorm"),
        prefix=1,
        preprocessing=Preprocessing(*OPENAI, size=tower.config.image_size),
        embed_pixels=partial(_interpolating, part(tower, "embeddings"), part(tower, "pre_layrnorm")),
    )


def siglip(model: Any, name: str) -> Backbone:
    tower = _tower(model, "vision_model")
    return _backbone(
        name,
        "siglip",
        model,
        tower,
        part(tower, "encoder.layers"),
        part(tower, "post_layernorm"),
        prefix=0,
        preprocessing=Preprocessing(*HALF, size=tower.config.image_size),
        embed_pixels=partial(_interpolating, part(tower, "embeddings"), None),
    )


def siglip2(model: Any, name: str) -> Backbone:
    """SigLIP 2 for images of any shape, "naflex", whose own forward takes patches. Its checkpoints for images of one
    size are SigLIPs."""
    tower = _tower(model, "vision_model")
    embeddings = part(tower, "embeddings")
    return _backbone(
        name,
        "siglip2",
        model,
        tower,
        part(tower, "encoder.layers"),
        part(tower, "post_layernorm"),
        prefix=0,
        preprocessing=Preprocessing(*HALF, size=embeddings.position_embedding_size * tower.config.patch_size),
        embed_pixels=partial(_embed_patches, embeddings),
    )


def vit(model: Any, name: str, family: str = "vit", prefix: int = 1) -> Backbone:
    normalisation = HALF if family == "vit" else IMAGENET
    tower = _tower(model, "vit", "deit")
    return _backbone(
        name,
        family,
        model,
        tower,
        part(tower, "layers", "encoder.layer", "encoder.layers"),
        part(tower, "layernorm"),
        prefix=prefix,
        preprocessing=Preprocessing(*normalisation, size=tower.config.image_size),
        embed_pixels=partial(_interpolating, part(tower, "embeddings"), None),
    )


def deit(model: Any, name: str) -> Backbone:
    return vit(model, name, "deit", prefix=2)


def tiny_scenes(model: Any, name: str) -> Backbone:
    """Our own ViT with a DPT head, after DINOv2's pattern."""
    return dinov2(model.backbone, name, "tiny-scenes", owner=model, hook_layers=model.config.hooks)


def depth_anything(model: Any, name: str) -> Backbone:
    """DINOv2 with a DPT head. Hook i of transformers' backbone is the output of block i-1 (0 is the embedding)."""
    config = model.backbone.config
    hooks = tuple(sorted(index - 1 for index in config.out_indices))
    if min(hooks) < 0:
        raise ModelError(f"{name}: its DPT head reads the embedding (out_indices {config.out_indices}), not a block.")
    return dinov2(
        model.backbone,
        name,
        "depth-anything",
        owner=model,
        hook_layers=hooks,
        hooks_normed=bool(config.apply_layernorm),
    )


def part(module: Any, *paths: str) -> Any:
    """The first of several dotted attribute paths that exists."""
    for path in paths:
        found = module
        for name in path.split("."):
            found = getattr(found, name, None)
            if found is None:
                break
        else:
            return found
    raise ModelError(
        f"model: {type(module).__name__} has none of {', '.join(paths)}. Expected a ViT of its family (Dinov2Model, "
        "ViTModel, CLIPVisionModel, ...), an image classifier made of one, or a network with the parts of one; "
        "transformers is supported from 5.17 on."
    )


def optional_part(module: Any, *paths: str) -> Any | None:
    try:
        return part(module, *paths)
    except ModelError:
        return None


def _tower(model: Any, *names: str) -> Any:
    """Return the ViT inside a model that has something on top of it, or beside it; of a bare ViT itself."""
    return optional_part(model, *names) or model


def _affine(linear: Any) -> Affine:
    return Affine(part(linear, "weight"), linear.bias)


def _norm(norm: Any) -> Norm:
    return Norm(part(norm, "weight"), norm.bias, norm.eps)


def _mlp(mlp: Any) -> Mlp:
    activation = optional_part(mlp, "activation_fn", "activation", "act_fn") or nn.functional.silu
    fused = optional_part(mlp, "weights_in")  # SwiGLU with gate and value in one matrix
    if fused is not None:
        weights, biases = fused.weight.chunk(2), fused.bias.chunk(2)
        return Mlp(
            up=Affine(weights[1], biases[1]),
            down=_affine(part(mlp, "weights_out")),
            activation=nn.functional.silu,
            gate=Affine(weights[0], biases[0]),
        )
    gate = optional_part(mlp, "gate_proj")
    return Mlp(
        up=_affine(part(mlp, "fc1", "up_proj")),
        down=_affine(part(mlp, "fc2", "down_proj")),
        activation=activation,
        gate=None if gate is None else _affine(gate),
    )


def _block(layer: Any, heads: int) -> Block:
    attention = part(layer, "attention", "self_attn")
    return Block(
        norm1=_norm(part(layer, "norm1", "layer_norm1", "layernorm_before")),
        query=_affine(part(attention, "q_proj", "attention.query", "query")),
        key=_affine(part(attention, "k_proj", "attention.key", "key")),
        value=_affine(part(attention, "v_proj", "attention.value", "value")),
        project=_affine(part(attention, "o_proj", "out_proj", "output.dense")),
        norm2=_norm(part(layer, "norm2", "layer_norm2", "layernorm_after")),
        mlp=_mlp(part(layer, "mlp")),
        heads=heads,
        scale1=optional_part(layer, "layer_scale1.lambda1"),
        scale2=optional_part(layer, "layer_scale2.lambda1"),
    )


def _backbone(name: str, family: str, model: Any, tower: Any, layers: Any, norm: Any, **kwargs: Any) -> Backbone:
    config = tower.config
    if getattr(config, "hidden_act", "") is None or config.num_hidden_layers != len(layers):
        raise ModelError(f"{name}: the configuration does not describe the {len(layers)} layers that were found.")
    patch = config.patch_size
    return Backbone(
        name=name,
        family=family,
        model=model,
        blocks=tuple(_block(layer, config.num_attention_heads) for layer in layers),
        norm=_norm(norm),
        patch_size=patch if isinstance(patch, int) else int(patch[0]),
        classifier=classifier_of(model, family),
        **kwargs,
    )


def _embed_patches(embeddings: Any, pixels: Tensor) -> Tensor:
    """Embed images [B, 3, H, W] as SigLIP 2 does: positions are resized bilinearly, on a CPU in float32."""
    grid = [side // embeddings.patch_size for side in pixels.shape[-2:]]
    side = embeddings.position_embedding_size
    stored = embeddings.position_embedding.weight
    square = stored.unflatten(0, (side, side)).permute(2, 0, 1)[None]
    square = square.float() if square.device.type == "cpu" else square
    resized = nn.functional.interpolate(square, grid, mode="bilinear", antialias=True)
    return embeddings.patch_embedding(as_patches(pixels, embeddings.patch_size)) + resized.flatten(2).mT.to(stored)


def _interpolating(embeddings: Any, pre_norm: Callable[[Tensor], Tensor] | None, pixels: Tensor) -> Tensor:
    tokens = embeddings(pixels, interpolate_pos_encoding=True)
    return tokens if pre_norm is None else pre_norm(tokens)
