"""Tokens of samples: where they sit, and what travels with them.

A `TokenLayout` says where the tokens of a sample sit: views, prefix tokens, patch grid. `Features` are tokens of one
layer that remember what a probe map needs besides them: their layout, and what its decoder reads of layers below the
probe, which a probe map keeps constant. These travel along through sums, scalings, dtype and device changes, and
slices of the batch, so that ``probe(F + step * V)`` and ``probe(F[:1])`` mean what they say; of two features that are
added, the first's stay. Whatever else is done to them gives a plain tensor: after a flip or a sort the tokens would no
longer be where the constants are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pullback.errors import ShapeError


@dataclass(frozen=True)
class TokenLayout:
    """``views`` times (``prefix`` class or register tokens, then grid[0] x grid[1] patches, row by row)."""

    prefix: int
    grid: tuple[int, int]
    views: int = 1

    @property
    def unit(self) -> str:
        """What a sample is called: "image", or "scene" of several views."""
        return "scene" if self.views > 1 else "image"

    @property
    def in_picture(self) -> bool:
        """Whether its patches are places of the picture, so that a map of them can be laid over it."""
        return True

    @property
    def patches(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def tokens(self) -> int:
        return self.views * (self.prefix + self.patches)

    def patch_mask(self) -> Tensor:
        """[N] bool, true at patch tokens."""
        view = torch.arange(self.prefix + self.patches) >= self.prefix
        return view.repeat(self.views)

    def patch_map(self, per_token: Tensor) -> Tensor:
        """[B, N, ...] -> [B, views, rows, columns, ...], prefix tokens dropped."""
        split = per_token.unflatten(1, (self.views, -1))
        return split[:, :, self.prefix :].unflatten(2, self.grid)

    @staticmethod
    def square(tokens: int, prefix: int) -> TokenLayout:
        """The layout of a square image with this many tokens."""
        side = math.isqrt(max(0, tokens - prefix))
        if side == 0 or side * side != tokens - prefix:
            raise ShapeError(
                f"features: {tokens} tokens with {prefix} prefix tokens do not make a square grid, so the image shape "
                "must come along. Pass what probe.features(images) returned, or slices and sums of it."
            )
        return TokenLayout(prefix, (side, side))


# by name, without the underscores of `__radd__` and `add_`: arithmetic, and changes of dtype, device or graph
_KEEPING = {
    *("add", "radd", "iadd", "sub", "rsub", "isub", "mul", "rmul", "imul", "div", "truediv", "itruediv", "neg", "lerp"),
    *("to", "type", "type_as", "float", "double", "half", "bfloat16", "cpu", "cuda", "contiguous"),
    *("clone", "detach", "requires_grad"),
}


class Features(torch.Tensor):
    """[B, N, D] with ``token_layout`` and ``below``: layer -> what is constant of it, [B, N, width]."""

    token_layout: TokenLayout
    below: dict[int, Tensor]

    @staticmethod
    def attach(tokens: Tensor, layout: TokenLayout, below: dict[int, Tensor]) -> Features:
        """The tokens with these companions."""
        features = tokens.as_subclass(Features)
        features.token_layout, features.below = layout, below
        return features

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():  # so that whatever is new comes out as a plain tensor
            return cls._keep(func(*args, **(kwargs or {})), func, args)

    @staticmethod
    def _keep(out: Any, func: Any, args: Any) -> Any:
        source = next((arg for arg in args if isinstance(arg, Features) and hasattr(arg, "token_layout")), None)
        if source is None or out is source:
            return out
        if func is torch.Tensor.__getitem__:
            return _slice(out, source, args[1])
        if func.__name__.strip("_") in _KEEPING and out.shape == source.shape:
            return _follow(out, source, lambda constant: constant.to(dtype=out.dtype, device=out.device))
        return out


def _slice(out: Tensor, source: Features, index: Any) -> Tensor:
    rows = index[0] if isinstance(index, tuple) else index
    whole = all(part == slice(None) for part in index[1:]) if isinstance(index, tuple) else True
    if out.ndim == source.ndim and out.shape[1:] == source.shape[1:] and whole:
        return _follow(out, source, lambda constant: constant[rows])
    return out


def _follow(out: Tensor, source: Features, change: Any) -> Features:
    return Features.attach(out, source.token_layout, {layer: change(value) for layer, value in source.below.items()})


def between(first: Tensor, second: Tensor, t: float | Tensor) -> Tensor:
    """Return the point first + t (second - first) of the segment between features [B, N, D]; ``t`` a number or [B].

    What they carry of layers below the probe moves along, so that a probe map gives the first images' output at t = 0
    and the second's at t = 1, exactly. (``first + t * (second - first)`` would keep what the first carry.)
    """
    if first.shape != second.shape:
        raise ShapeError(
            f"first, second: expected features of one shape [B, N, D], got {list(first.shape)} and "
            f"{list(second.shape)}."
        )
    point = _lerp(first, second, t)
    carried = [features for features in (first, second) if isinstance(features, Features)]
    if not carried:
        return point
    layouts, layers = ([getattr(part, name) for part in carried] for name in ("token_layout", "below"))
    if layouts[0] != layouts[-1] or (len(carried) == 1 and layers[0]) or layers[0].keys() != layers[-1].keys():
        raise ShapeError(
            "first, second: expected features of one probe and one size of images, which carry the same layers below "
            "the probe. Pass what probe.features(images) returned, or batch slices of it."
        )
    return Features.attach(
        point, layouts[0], {layer: _lerp(part, layers[-1][layer], t) for layer, part in layers[0].items()}
    )


def _lerp(first: Tensor, second: Tensor, t: float | Tensor) -> Tensor:
    """Interpolate linearly, exactly at both ends."""
    start, end = first.as_subclass(Tensor), second.as_subclass(Tensor)
    if isinstance(t, Tensor):
        t = t.to(start).reshape(-1, *[1] * (start.ndim - 1))
    return torch.lerp(start, end, t)
