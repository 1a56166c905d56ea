"""Features that remember what a probe map needs besides them: the token layout, and the layers below the probe.

A decoder that reads layers below the probe layer keeps them constant, so they must travel with the features. They do
through sums, scalings, dtype and device changes, and slices of the batch, so that ``probe(F + step * V)`` and
``probe(F[:1])`` mean what they say. Whatever else is done to them gives a plain tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pullback.layout import TokenLayout


class Features(torch.Tensor):
    """[B, N, D] with ``token_layout`` and ``below`` (layer -> constant tokens [B, N, D])."""

    token_layout: TokenLayout
    below: dict[int, Tensor]

    @staticmethod
    def attach(tokens: Tensor, layout: TokenLayout, below: dict[int, Tensor]) -> Features:
        features = tokens.as_subclass(Features)
        features.token_layout, features.below = layout, below
        return features

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs or {})
        if not isinstance(out, Features):
            return out
        source = next((arg for arg in args if isinstance(arg, Features) and hasattr(arg, "token_layout")), None)
        if source is not None and func is torch.Tensor.__getitem__:
            return _slice(out, source, args[1])
        if source is not None and out.shape == source.shape:
            return _follow(out, source, lambda constant: constant.to(dtype=out.dtype, device=out.device))
        return out.as_subclass(torch.Tensor)


def _slice(out: Tensor, source: Features, index: Any) -> Tensor:
    rows = index[0] if isinstance(index, tuple) else index
    whole = all(part == slice(None) for part in index[1:]) if isinstance(index, tuple) else True
    if out.ndim == source.ndim and out.shape[1:] == source.shape[1:] and whole:
        return _follow(out, source, lambda constant: constant[rows])
    return out.as_subclass(torch.Tensor)


def _follow(out: Tensor, source: Features, change: Any) -> Features:
    return Features.attach(out, source.token_layout, {layer: change(value) for layer, value in source.below.items()})
