"""A transformer block linearised by hand: products with its Jacobian for K tangents of B samples at once.

Around fixed tokens x the block is a linear map of dx. Autodiff reaches the same numbers through many small unfused
kernels; written out, one product is about the arithmetic of a forward. With P the attention matrix, O = P v:

    dS = dq k^T + q dk^T,   dO = (P*dS) v - rowsum(P*dS) * O + P dv                              (forward)
    S' = P * (c v^T - rowsum(c*O)),   q' = S' k,   k' = S'^T q,   v' = P^T c                     (reverse)

Layer norm is x^ = (x - mean)/std with tangent (dx - mean(dx) - x^ mean(x^*dx))/std. Its weight and its centring are
folded into the matrix that follows, the layer scales into the matrix before, so only the x^ term is elementwise.
K is folded into the rows or columns of each attention product, laid out so that no operand is ever copied K times.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pullback.backbones.block import Block, Mlp, Norm, Rope
from pullback.backbones.linearized_attention import (
    Linearized,
    LinearizedAttention,
    LinearizedNorm,
    after_norm,
    before_scale,
)
from pullback.backbones.linearized_readout import LinearizedReadout


class LinearizedMlp(Linearized):
    """normalised tokens -> Mlp, at fixed input; scale2 is folded into the last matrix."""

    def __init__(self, mlp: Mlp, norm: Norm, scale: Tensor | None, x: Tensor) -> None:
        up = mlp.up(x)
        self.down = before_scale(mlp.down.weight, scale)
        if mlp.gate is None:
            hidden, slope = _value_and_slope(mlp.activation, up)
            self.inner = after_norm(norm, mlp.up.weight)
            self.slopes: tuple[Tensor, ...] = (slope[:, None],)
        else:
            gated, slope = _value_and_slope(mlp.activation, mlp.gate(x))
            hidden = gated * up
            self.inner = torch.cat([after_norm(norm, mlp.gate.weight), after_norm(norm, mlp.up.weight)])
            self.slopes = ((slope * up)[:, None], gated[:, None])
        self.output = mlp.down(hidden) if scale is None else mlp.down(hidden) * scale

    def jvp(self, dx: Tensor) -> Tensor:
        parts = (dx @ self.inner.mT).chunk(len(self.slopes), -1)
        hidden = parts[0].mul_(self.slopes[0])
        if len(parts) == 2:
            hidden = hidden.addcmul_(parts[1], self.slopes[1])
        return hidden @ self.down.mT

    def vjp(self, c: Tensor) -> Tensor:
        hidden = c @ self.down
        if len(self.slopes) == 2:
            hidden = torch.cat([hidden * slope for slope in self.slopes], -1)
        else:
            hidden = hidden.mul_(self.slopes[0])
        return hidden @ self.inner


def _value_and_slope(activation: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """An elementwise function and its derivative. (The first forward-mode call imports for a second.)"""
    with torch.enable_grad():
        point = x.detach().requires_grad_()
        value = activation(point)
        (slope,) = torch.autograd.grad(value.sum(), point)
    return value.detach(), slope


class LinearizedBlock(Linearized):
    """A `Block` at fixed tokens x [B, N, D]: ``output`` [B, R, D], and products with its Jacobian."""

    def __init__(self, block: Block, x: Tensor, rope: Rope | None = None, rows: int | None = None) -> None:
        self.tokens = x.shape[1]
        self.rows = self.tokens if rows is None else rows
        self.norm1 = LinearizedNorm(block.norm1, x)
        kind = LinearizedReadout if LinearizedReadout.pays(block, rope, self.rows) else LinearizedAttention
        self.attention = kind(block, _affine(block.norm1, self.norm1.output), rope, self.rows)
        middle = x[:, : self.rows] + self.attention.output
        self.norm2 = LinearizedNorm(block.norm2, middle)
        self.mlp = LinearizedMlp(block.mlp, block.norm2, block.scale2, _affine(block.norm2, self.norm2.output))
        self.output = middle + self.mlp.output

    def jvp(self, dx: Tensor) -> Tensor:
        """[B, K, N, D] -> [B, K, R, D]."""
        dy = self.attention.jvp(self.norm1(dx)).add_(dx[:, :, : self.rows])
        return self.mlp.jvp(self.norm2(dy)).add_(dy)

    def vjp(self, c: Tensor) -> Tensor:
        """[B, K, R, D] -> [B, K, N, D]."""
        c = self.norm2(self.mlp.vjp(c)).add_(c)
        out = self.norm1(self.attention.vjp(c))
        out[:, :, : self.rows] += c
        return out


def _affine(norm: Norm, unit: Tensor) -> Tensor:
    scaled = unit * norm.weight
    return scaled if norm.bias is None else scaled + norm.bias
