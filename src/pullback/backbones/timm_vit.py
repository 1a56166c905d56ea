"""Plain ViTs with the attribute names of timm: those of timm itself, and the many networks that copied its names.

timm is never imported, because it imports torchvision. A module is known by its parts:

    patch_embed.proj, cls_token, reg_token, pos_embed, norm_pre
    blocks[i]: norm1, attn (qkv, proj, num_heads), ls1.gamma, norm2, mlp (fc1, act, fc2), ls2.gamma
    norm or fc_norm, global_pool ("token" or "avg"), head

Parts that are not in this list are refused. Every block is compared with its own forward on random tokens, and the
whole with the model's output for a random image, so that a variant with the same names (norms after attention,
normalised queries, another pooling) is not taken for a plain one.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pullback.backbones.backbone import Backbone, Classifier, Preprocessing
from pullback.backbones.block import Affine, Block, Mlp, Norm
from pullback.backbones.outputs import Remaining, class_count
from pullback.data.images import IMAGENET_MEAN, IMAGENET_STD
from pullback.errors import ImageError, ModelError

GUIDE = "docs/guide/own-vit.md shows how to write an adapter"
_PARTS = {"patch_embed", "norm_pre", "blocks", "norm", "fc_norm", "head"}
_PARAMETERS = {"cls_token", "reg_token", "pos_embed"}
_INERT = ("Identity", "Dropout", "DropPath", "PatchDropout")  # nothing in evaluation mode
_POOLS = ("token", "avg")
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}  # of a block; half precision: 0.1


def recognise(module: nn.Module) -> bool:
    """Whether a module has the parts of a ViT of timm."""
    blocks = getattr(module, "blocks", None)
    first = blocks[0] if isinstance(blocks, (nn.Sequential, nn.ModuleList)) and len(blocks) else None
    embeds = hasattr(getattr(module, "patch_embed", None), "proj") and hasattr(module, "pos_embed")
    return embeds and hasattr(getattr(first, "attn", None), "qkv")


def adapt(model: Any, name: str) -> Backbone:
    """Take a ViT of timm apart."""
    _check_parts(getattr(model, "_orig_mod", model), name)  # torch.compile's wrapper has other children
    before = (getattr(model, part, None) for part in ("cls_token", "reg_token"))
    tokens = [token for token in before if token is not None]
    patch = model.patch_embed.proj.kernel_size
    if patch[0] != patch[1] or tuple(model.patch_embed.proj.stride) != tuple(patch):
        raise ModelError(f"model: {name} has patches of {patch}; expected square ones that do not overlap. {GUIDE}.")
    last = (getattr(model, part, None) for part in ("norm", "fc_norm"))
    norms = [norm for norm in last if _is_norm(norm)]
    if len(norms) != 1:
        raise ModelError(f"model: expected one final LayerNorm in {name}, norm or fc_norm, got {len(norms)}. {GUIDE}.")
    grid = _trained_grid(model, name)
    backbone = Backbone(
        name=name,
        family="timm-vit",
        model=model,
        blocks=tuple(_block(layer, f"block {index} of {name}") for index, layer in enumerate(model.blocks)),
        norm=_norm(norms[0]),
        prefix=sum(token.shape[1] for token in tokens),
        patch_size=patch[0],
        preprocessing=_preprocessing(model, grid[0] * patch[0]),
        embed_pixels=partial(_embed, model, tokens, grid),
        classifier=_classifier(model),
    )
    return _with_checked_output(backbone, [side * patch[0] for side in grid])


def assemble(backbone: Backbone, left: Remaining) -> Tensor:
    """Return what the model does: logits [B, classes], or pooled tokens [B, D] where it has no classes."""
    if backbone.classifier is None:
        pools = getattr(backbone.model, "global_pool", None)
        raise ModelError(
            f"model: {backbone.name} pools its tokens by {pools!r}; a pruned copy knows "
            f"{' and '.join(map(repr, _POOLS))}. model.reset_classifier(0, 'token') makes a model of timm return the "
            "class token."
        )
    return backbone.classifier.read(left.tokens, left.layout, backbone.norm)


def _check_parts(model: Any, name: str) -> None:
    """Refuse a model with parts that the adapter would leave out."""
    children = [key for key, part in model.named_children() if type(part).__name__ not in _INERT]
    parameters = [key for key, _ in model.named_parameters(recurse=False)]
    unknown = sorted(set(children) - _PARTS) + sorted(set(parameters) - _PARAMETERS)
    if unknown:
        raise ModelError(
            f"model: {name} has the names of a ViT of timm, and {', '.join(unknown)} besides, which a plain one has "
            f"not. {GUIDE}."
        )
    if getattr(model, "cls_token", None) is None and getattr(model, "global_pool", "") == "token":
        raise ModelError(f"model: {name} has no cls_token, but pools by 'token'.")


def _block(layer: Any, name: str) -> Block:
    """Take a block apart, and compare what is made of it with the block's own forward on random tokens."""
    try:
        attention, mlp = layer.attn, layer.mlp
        weights = attention.qkv.weight.chunk(3)
        biases = (None,) * 3 if attention.qkv.bias is None else attention.qkv.bias.chunk(3)
        query, key, value = map(Affine, weights, biases)
        block = Block(
            norm1=_norm(layer.norm1),
            query=query,
            key=key,
            value=value,
            project=_affine(attention.proj),
            norm2=_norm(layer.norm2),
            mlp=Mlp(_affine(mlp.fc1), _affine(mlp.fc2), mlp.act),
            heads=attention.num_heads,
            scale1=getattr(getattr(layer, "ls1", None), "gamma", None),
            scale2=getattr(getattr(layer, "ls2", None), "gamma", None),
        )
        _compare(block, layer)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise ModelError(f"model: {name} is no plain pre-norm block of a ViT ({error}). {GUIDE}.") from None
    return block


@torch.no_grad()
def _compare(block: Block, layer: nn.Module) -> None:
    weight = block.query.weight
    tokens = torch.randn(1, 5, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight)
    ours, theirs = block(tokens).double(), layer(tokens).double()
    difference = float((ours - theirs).norm() / (theirs - tokens.double()).norm().clamp_min(1e-12))
    if not difference < _TOLERANCE.get(weight.dtype, 0.1):
        raise ValueError(f"its own forward differs by {difference:.1e} of what it adds")


@torch.no_grad()
def _with_checked_output(backbone: Backbone, size: list[int]) -> Backbone:
    """Compare what the parts make of a random image with the model's own output; without a classifier where that is
    something else than pooled tokens or logits."""
    if backbone.classifier is None:
        return backbone
    image = torch.randn(1, 3, *size, generator=torch.Generator().manual_seed(0)).to(backbone.norm.weight)
    last = backbone.depth - 1
    tokens = backbone.states(image, (last,))[last].tokens
    ours = backbone.classifier.read(tokens, backbone.token_layout(image), backbone.norm)
    try:
        theirs = getattr(backbone.model, "_orig_mod", backbone.model)(image)
    except TypeError:  # it takes more than an image
        theirs = None
    if not isinstance(theirs, Tensor) or theirs.shape != ours.shape:
        return replace(backbone, classifier=None)
    difference = float((ours.double() - theirs.double()).norm() / theirs.double().norm().clamp_min(1e-12))
    if not difference < _TOLERANCE.get(ours.dtype, 0.1):
        raise ModelError(
            f"model: {backbone.name} has the names of a ViT of timm, but its output differs from what such parts give "
            f"by {difference:.1e}, relative. {GUIDE}."
        )
    return backbone


def _affine(linear: nn.Linear) -> Affine:
    return Affine(linear.weight, linear.bias)


def _is_norm(part: object) -> bool:
    return isinstance(part, nn.LayerNorm)


def _norm(norm: Any) -> Norm:
    if not _is_norm(norm):
        raise TypeError(f"expected a LayerNorm, got {type(norm).__name__}")
    return Norm(norm.weight, norm.bias, norm.eps)


def _trained_grid(model: Any, name: str) -> tuple[int, int]:
    """Return rows and columns of the patches that the position embeddings are for."""
    known = getattr(model.patch_embed, "grid_size", None)
    if known is None:
        raise ModelError(f"model: patch_embed of {name} has no grid_size, (rows, columns) of its patches. {GUIDE}.")
    return int(known[0]), int(known[1])


def _embed(model: Any, tokens: list[Tensor], trained: tuple[int, int], pixels: Tensor) -> Tensor:
    """Embed images [B, 3, H, W] -> [B, N, D]: class token, registers, patches. Some models give positions to all of
    them, others to the patches alone."""
    patches = model.patch_embed.proj(pixels)
    grid = (patches.shape[2], patches.shape[3])
    patches = getattr(model.patch_embed, "norm", nn.Identity())(patches.flatten(2).mT)
    stored, batch = model.pos_embed, pixels.shape[0]
    before = stored.shape[1] - trained[0] * trained[1]  # 0: positions are for patches alone
    positions = stored[:, before:]
    if grid != trained:
        positions = _resized(model, positions, trained, grid)
    prefix = [token.expand(batch, -1, -1) for token in tokens]
    if before and prefix:
        prefix = [torch.cat(prefix, 1) + stored[:, :before]]
    embedded = torch.cat([*prefix, patches + positions], 1)
    return getattr(model, "norm_pre", nn.Identity())(embedded)


def _resized(model: Any, positions: Tensor, trained: tuple[int, int], grid: tuple[int, int]) -> Tensor:
    """Resize position embeddings [1, h w, D] as timm does, where the model is made for it."""
    if not getattr(model, "dynamic_img_size", False):
        patch = model.patch_embed.proj.kernel_size[0]
        raise ImageError(
            f"images: this model takes {trained[0] * patch}x{trained[1] * patch} pixels, got "
            f"{grid[0] * patch}x{grid[1] * patch}. Resize them, or make the model with dynamic_img_size=True."
        )
    square = positions.unflatten(1, trained).permute(0, 3, 1, 2).float()
    resized = F.interpolate(square, grid, mode="bicubic", antialias=True)
    return resized.flatten(2).mT.to(positions.dtype)


def _classifier(model: Any) -> Classifier | None:
    """Return how the model makes its output; None where it pools in a way that is not known here."""
    how, head = getattr(model, "global_pool", "token"), getattr(model, "head", nn.Identity())
    after, normed = getattr(model, "fc_norm", nn.Identity()), _is_norm(getattr(model, "norm", None))
    if how == "token":
        return Classifier(lambda x, layout: head(after(x[:, 0])), class_count(head), normed, rows=1)
    if how == "avg":
        return Classifier(lambda x, layout: head(after(x[:, layout.prefix :].mean(1))), class_count(head), normed)
    return None


def _preprocessing(model: Any, side: int) -> Preprocessing:
    """Return the normalisation that the weights were published with, ImageNet's where they do not say."""
    published = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None) or {}
    mean, std = published.get("mean", IMAGENET_MEAN), published.get("std", IMAGENET_STD)
    return Preprocessing(tuple(mean), tuple(std), size=side)
