"""A probe map linearised: blocks by hand, the final norm by hand, the decoder by `torch.func`.

    F^l --block l+1--> ... --block L-1--> F^{L-1};   every layer that the decoder reads --norm--> decoder --> y

Forward: tangents run up the blocks and are collected where the decoder reads. Reverse: the decoder hands back one
cotangent per layer read, and they join the one that runs down.

`WeightedLinearization` puts L^T of an output metric in front of this or any other linearisation.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from pullback.backbones import LinearizedBlock, LinearizedNorm, Norm
from pullback.operators import Linearization
from pullback.operators.linearization import Derivative

Tail = Callable[..., Tensor]  # one tensor [B, n, D] per tap that follows the perturbation -> [B, ...]


class ProbeLinearization:
    """A `Linearization` of blocks, taps and decoder.

    ``blocks[i]`` maps the state after i blocks to the state after i+1; ``taps`` maps such an index (0 is the probed
    features themselves) to what the decoder reads there.
    """

    def __init__(
        self,
        features: Tensor,
        blocks: Sequence[LinearizedBlock],
        taps: dict[int, Tap],
        tail: DecoderTail,
        bytes_per_tangent: int,
    ) -> None:
        self.input_shape = tuple(features.shape[1:])
        self._dtype = self._block_dtype = features.dtype
        self.capturable = tail.linear
        self._blocks, self._taps, self._tail = blocks, taps, tail
        self.output = tail.output
        self.bytes_per_tangent = bytes_per_tangent

    def bfloat16(self) -> ProbeLinearization:
        """Return a copy whose blocks multiply in bfloat16; norm, decoder and base point stay exact."""
        lower = copy.copy(self)
        lower._block_dtype = torch.bfloat16
        lower._blocks = [block.to(torch.bfloat16) for block in self._blocks]
        return lower

    def pushforward(self, tangents: Tensor) -> Tensor:
        read = []
        for index in range(len(self._blocks) + 1):
            if index in self._taps:
                read.append(self._taps[index].jvp(tangents.to(self._dtype)))
            if index < len(self._blocks):
                tangents = self._blocks[index].jvp(tangents.to(self._block_dtype))
        return self._tail.jvp(read)

    def pullback(self, cotangents: Tensor) -> Tensor:
        pulled = iter(reversed(self._tail.vjp(cotangents)))
        running: Tensor | None = None
        for index in range(len(self._blocks), -1, -1):
            if index < len(self._blocks) and running is not None:
                running = self._blocks[index].vjp(running.to(self._block_dtype))
            if index in self._taps:
                arriving = self._taps[index].vjp(next(pulled))
                running = arriving if running is None else running + arriving
        assert running is not None  # a probe map reads at least one layer that follows the perturbation
        return running.to(self._dtype)


class Tap:
    """A layer that the decoder reads: its first ``rows`` tokens (or all), after the final norm or not."""

    def __init__(self, tokens: Tensor, norm: Norm | None, rows: int | None) -> None:
        self.rows, self.tokens, self.dim = rows, tokens.shape[1], tokens.shape[2]
        read = tokens[:, :rows]
        self.norm = None if norm is None else LinearizedNorm(norm, read)
        self.weight = read.new_ones(()) if norm is None else norm.weight
        self.value = read if norm is None else norm(read)

    def jvp(self, tangent: Tensor) -> Tensor:
        tangent = tangent[:, :, : self.rows]
        if self.norm is None:
            return tangent
        unit = self.norm(tangent)
        return (unit - unit.mean(-1, keepdim=True)) * self.weight

    def vjp(self, cotangent: Tensor) -> Tensor:
        if self.norm is not None:
            unit = self.norm(cotangent * self.weight)
            cotangent = unit - unit.mean(-1, keepdim=True)
        if cotangent.shape[2] == self.tokens:
            return cotangent
        full = cotangent.new_zeros(*cotangent.shape[:2], self.tokens, self.dim)
        full[:, :, : self.rows] = cotangent
        return full


class DecoderTail:
    """The decoder (and task distance) as a function of the taps."""

    def __init__(self, tail: Tail, values: Sequence[Tensor], *, linear: bool) -> None:
        self.linear, self._values = linear, values
        self._derivative = Derivative(tail, *values)
        self.output = self._derivative.output

    def jvp(self, tangents: Sequence[Tensor]) -> Tensor:
        """[B, K, n, D] per tap -> [B, K, M]."""
        if self.linear:  # a linear function is its own derivative: fold the tangents into the batch
            folded = self._derivative.function(*(tangent.flatten(0, 1) for tangent in tangents))
            return folded.unflatten(0, tangents[0].shape[:2])
        return self._derivative.jvp(*tangents)

    def vjp(self, cotangents: Tensor) -> tuple[Tensor, ...]:
        """[B, K, M] -> [B, K, n, D] per tap."""
        if self.linear:
            return self._transposed(cotangents)
        return self._derivative.vjp(cotangents)

    def _transposed(self, cotangents: Tensor) -> tuple[Tensor, ...]:
        """A linear decoder's adjoint, the cotangents folded into the batch: the gradient of <cotangent, decoder(x)>.

        By plain autograd of a scalar: its graph lives on the stream on which a CUDA graph may be recording, and every
        other reverse mode imports parts of the compiler first, which takes seconds.
        """
        folded = cotangents.shape[:2].numel()
        with torch.enable_grad():
            start = [value.new_zeros(folded, *value.shape[1:]).requires_grad_() for value in self._values]
            pairing = (self._derivative.function(*start) * cotangents.flatten(0, 1)).sum()
            pulled = torch.autograd.grad(pairing, start)
        return tuple(part.unflatten(0, cotangents.shape[:2]) for part in pulled)


class WeightedLinearization:
    """A linearisation with L^T of an output metric in front: y becomes L^T y, and J becomes L^T J.

    ``factor`` is L [B, M, k]; ``arithmetic`` the context in which the products compute.
    """

    def __init__(
        self, inner: Linearization, factor: Tensor, arithmetic: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        self._inner, self._factor, self._arithmetic = inner, factor, arithmetic
        self.input_shape, self.bytes_per_tangent = inner.input_shape, inner.bytes_per_tangent
        self.capturable = getattr(inner, "capturable", False)
        self.output = self._weighted(inner.output[:, None])[:, 0]

    @property
    def bfloat16(self) -> Callable[[], WeightedLinearization]:
        """The bfloat16 form of the inner linearisation with L^T in front; absent where that has none."""
        lower: Callable[[], Linearization] = self._inner.bfloat16  # type: ignore[attr-defined]
        return lambda: WeightedLinearization(lower(), self._factor, self._arithmetic)

    def pushforward(self, tangents: Tensor) -> Tensor:
        return self._weighted(self._inner.pushforward(tangents))

    def pullback(self, cotangents: Tensor) -> Tensor:
        with self._arithmetic():
            cotangents = cotangents @ self._factor.mT
        return self._inner.pullback(cotangents)

    def _weighted(self, output: Tensor) -> Tensor:
        """L^T y on rows: [B, K, M] -> [B, K, k]."""
        with self._arithmetic():
            return output @ self._factor
