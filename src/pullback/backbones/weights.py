"""Whether two models have the same weights, whatever class holds them and in whatever dtype.

A head is trained on a model that this package loaded, in float32 as a rule, and used on a model of transformers, on
another device, often cast to bfloat16 or float16. Names of parameters and bytes then differ, although the weights are
the same. What is compared is therefore hashes of the blocks and the final norm, as `Backbone` has them, in the dtype
of the model and in every lower one that a copy could be cast to.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from pullback.backbones.backbone import AnyBackbone

CASTS: Mapping[torch.dtype, tuple[torch.dtype, ...]] = {
    torch.float64: (torch.float64, torch.float32, torch.bfloat16, torch.float16),
    torch.float32: (torch.float32, torch.bfloat16, torch.float16),
    torch.bfloat16: (torch.bfloat16,),
    torch.float16: (torch.float16,),
}
"""Dtypes, and those that a cast takes them to without leaving anything to chance."""
_DIGITS = 16


def block_hashes(backbone: AnyBackbone) -> dict[str, str]:
    """Return {name of a dtype: hash of the weights in it}: the model's own dtype, and all that it can be cast to."""
    dtype = _dtype(backbone)
    return {} if dtype is None else {_name(lower): _hash(backbone, lower) for lower in CASTS[dtype]}


def same_weights(known: Mapping[str, str], backbone: AnyBackbone) -> bool | None:
    """Compare with hashes of `block_hashes`: True, False, or None where it cannot be told.

    The comparison is made in the dtype of this model or, where the other one was coarser, in that one's. Neither of
    bfloat16 and float16 can be had from the other, and of quantised weights there is no hash.
    """
    dtype = _dtype(backbone)
    if dtype is None:
        return None
    for common in CASTS[dtype]:
        if _name(common) in known:
            return _hash(backbone, common) == known[_name(common)]
    return None


def _dtype(backbone: AnyBackbone) -> torch.dtype | None:
    """Return the coarsest dtype among the weights, None where there is no such thing."""
    found = {tensor.dtype for tensor in _tensors(backbone)}
    if not found or not found <= set(CASTS):
        return None
    coarsest = [dtype for dtype in found if all(dtype in CASTS[other] for other in found)]
    return coarsest[0] if coarsest else None


def _hash(backbone: AnyBackbone, dtype: torch.dtype) -> str:
    digest = hashlib.sha256()
    for tensor in _tensors(backbone):
        digest.update(f"{tuple(tensor.shape)}\n".encode())
        content: Any = tensor.detach().to(dtype).cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        digest.update(content)
    return digest.hexdigest()[:_DIGITS]


def _tensors(backbone: AnyBackbone) -> Iterator[Tensor]:
    """Yield the weights of the blocks and the final norm; of networks without such blocks all parameters, by name."""
    if backbone.blocks:
        yield from tensors_within((backbone.blocks, backbone.norm))
    else:
        yield from (value for _, value in sorted(backbone.model.named_parameters()))


def tensors_within(part: object) -> Iterator[Tensor]:
    """Yield the tensors of a block, a norm or a tuple of them, in the order of their fields."""
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, tuple):
        for item in part:
            yield from tensors_within(item)
    elif is_dataclass(part):
        for field in fields(part):
            yield from tensors_within(getattr(part, field.name))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
