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

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from pullback.backbones.block import Block, Mlp, Norm, Rope

Part = TypeVar("Part", bound="Linearized")


class Linearized:
    """What was saved at the base point, to multiply with."""

    def to(self: Part, dtype: torch.dtype) -> Part:
        """A copy whose products run in ``dtype``; this one stays as it is."""
        part = copy.copy(self)
        vars(part).update({name: _cast(value, dtype) for name, value in vars(self).items()})
        return part


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, (Tensor, Linearized)):
        return value.to(dtype)
    if isinstance(value, Rope):
        return Rope(*(table.to(dtype) for table in value))
    return tuple(_cast(item, dtype) for item in value) if isinstance(value, tuple) else value


class LinearizedNorm(Linearized):
    """x -> x^ at fixed x, without weight and centring (see `_after_norm`). It is its own adjoint."""

    def __init__(self, norm: Norm, x: Tensor) -> None:
        centred = x - x.mean(-1, keepdim=True)
        rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + norm.eps)
        self.output = centred * rstd
        # [B, 1, n, .]: broadcast over the K tangents
        self.rstd = rstd[:, None]
        self.unit = self.output[:, None]
        # with eps the row x^ is slightly shorter than sqrt(D), but d rstd = -rstd^2 x^ . dx / D holds exactly
        self.shrunk = (self.unit * self.rstd) / x.shape[-1]

    def __call__(self, tangent: Tensor) -> Tensor:
        return torch.addcmul(tangent * self.rstd, self.shrunk, (tangent * self.unit).sum(-1, keepdim=True), value=-1)


def _after_norm(norm: Norm, weight: Tensor) -> Tensor:
    """The matrix that follows a layer norm, with the norm's weight and centring folded in: W diag(w) (I - 11^T/D)."""
    folded = weight * norm.weight
    return folded - folded.mean(-1, keepdim=True)


class LinearizedMlp(Linearized):
    """normalised tokens -> Mlp, at fixed input; scale2 is folded into the last matrix."""

    def __init__(self, mlp: Mlp, norm: Norm, scale: Tensor | None, x: Tensor) -> None:
        up = mlp.up(x)
        self.down = _before_scale(mlp.down.weight, scale)
        if mlp.gate is None:
            hidden, slope = _value_and_slope(mlp.activation, up)
            self.inner = _after_norm(norm, mlp.up.weight)
            self.slopes: tuple[Tensor, ...] = (slope[:, None],)
        else:
            gated, slope = _value_and_slope(mlp.activation, mlp.gate(x))
            hidden = gated * up
            self.inner = torch.cat([_after_norm(norm, mlp.gate.weight), _after_norm(norm, mlp.up.weight)])
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


def _before_scale(weight: Tensor, scale: Tensor | None) -> Tensor:
    return weight if scale is None else weight * scale[:, None]


def _value_and_slope(activation: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """An elementwise function and its derivative. (The first forward-mode call imports for a second.)"""
    with torch.enable_grad():
        point = x.detach().requires_grad_()
        value = activation(point)
        (slope,) = torch.autograd.grad(value.sum(), point)
    return value.detach(), slope


class LinearizedAttention(Linearized):
    """normalised tokens [B, N, D] -> scale1 * Attention [B, R, D] for the first R tokens, at fixed input."""

    def __init__(self, block: Block, x: Tensor, rope: Rope | None, rows: int) -> None:
        self.rope, self.rows, self.tokens, self.heads = rope, rows, x.shape[1], block.heads
        scaling = block.head_dim**-0.5
        q, k, v = block.attention_inputs(x, rope, rows)
        self.q, self.k, self.v = (t.contiguous() for t in (q * scaling, k, v))
        self.probabilities = torch.softmax(self.q @ self.k.mT, -1)  # [B, h, R, N]
        self.attended = self.probabilities @ self.v  # [B, h, R, d]
        merged = self.attended.transpose(1, 2).flatten(2)
        self.output = block.project(merged) if block.scale1 is None else block.project(merged) * block.scale1
        self.query_weight = scaling * _after_norm(block.norm1, block.query.weight)
        self.key_value_weight = torch.cat(
            [_after_norm(block.norm1, block.key.weight), _after_norm(block.norm1, block.value.weight)]
        )
        self.project_weight = _before_scale(block.project.weight, block.scale1)

    def jvp(self, dx: Tensor) -> Tensor:
        """[B, K, N, D] -> [B, K, R, D]."""
        count = dx.shape[1]
        dq = self._split(dx[:, :, : self.rows] @ self.query_weight.mT, 1)[0]
        dk, dv = self._split(dx @ self.key_value_weight.mT, 2)
        if self.rope is not None:
            dq, dk = self.rope.rotate_tangents(dq, self.rows), self.rope.rotate_tangents(dk, self.tokens)
        dq = dq.permute(0, 3, 2, 1, 4).flatten(2, 3)  # [B, h, R*K, d]
        dk = dk.permute(0, 3, 1, 2, 4).flatten(2, 3)  # [B, h, K*N, d]
        dv = dv.permute(0, 3, 2, 1, 4).flatten(3, 4)  # [B, h, N, K*d]
        scores = (dq @ self.k.mT).unflatten(2, (self.rows, count)).flatten(3)  # [B, h, R, K*N]
        scores = _accumulate(scores, self.q, dk.mT).unflatten(3, (count, self.tokens))  # [B, h, R, K, N]
        scores = scores.mul_(self.probabilities.unsqueeze(3))
        mass = scores.sum(-1, keepdim=True)
        moved = (scores.flatten(2, 3) @ self.v).unflatten(2, (self.rows, count))  # [B, h, R, K, d]
        moved = moved.addcmul_(mass, self.attended.unsqueeze(3), value=-1).flatten(3)
        moved = _accumulate(moved, self.probabilities, dv).unflatten(3, (count, -1))
        return moved.permute(0, 3, 2, 1, 4).flatten(3) @ self.project_weight.mT

    def vjp(self, c: Tensor) -> Tensor:
        """[B, K, R, D] -> [B, K, N, D]."""
        count = c.shape[1]
        moved = self._split(c @ self.project_weight, 1)[0].permute(0, 3, 2, 1, 4).contiguous()  # [B, h, R, K, d]
        value = self.probabilities.mT @ moved.flatten(3)  # [B, h, N, K*d]
        drop = (moved * self.attended.unsqueeze(3)).sum(-1, keepdim=True)  # [B, h, R, K, 1]
        scores = (moved.flatten(2, 3) @ self.v.mT).unflatten(2, (self.rows, count))  # [B, h, R, K, N]
        scores = scores.sub_(drop).mul_(self.probabilities.unsqueeze(3))
        query = (scores.flatten(2, 3) @ self.k).unflatten(2, (self.rows, count))  # [B, h, R, K, d]
        key = (scores.flatten(3).mT @ self.q).unflatten(2, (count, self.tokens))  # [B, h, K, N, d]
        query = query.permute(0, 3, 2, 1, 4)  # [B, K, R, h, d]
        key = key.permute(0, 2, 3, 1, 4)  # [B, K, N, h, d]
        value = value.unflatten(3, (count, -1)).permute(0, 3, 2, 1, 4)  # [B, K, N, h, d]
        if self.rope is not None:
            query = self.rope.rotate_cotangents(query, self.rows)
            key = self.rope.rotate_cotangents(key, self.tokens)
        out = torch.cat([key.flatten(3), value.flatten(3)], -1) @ self.key_value_weight
        out[:, :, : self.rows] += query.flatten(3) @ self.query_weight
        return out

    def _split(self, x: Tensor, parts: int) -> tuple[Tensor, ...]:
        """[B, K, n, parts*h*d] -> parts times [B, K, n, h, d]."""
        return x.unflatten(-1, (parts, self.heads, -1)).unbind(3)


def _accumulate(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """total + a @ b for [B, h, ., .] stacks, written into total."""
    flat = total.flatten(0, 1)
    torch.baddbmm(flat, a.flatten(0, 1), b.flatten(0, 1), out=flat)
    return flat.view(total.shape)


class LinearizedBlock(Linearized):
    """A `Block` at fixed tokens x [B, N, D]: ``output`` [B, R, D], and products with its Jacobian."""

    def __init__(self, block: Block, x: Tensor, rope: Rope | None = None, rows: int | None = None) -> None:
        self.tokens = x.shape[1]
        self.rows = self.tokens if rows is None else rows
        self.norm1 = LinearizedNorm(block.norm1, x)
        self.attention = LinearizedAttention(block, _affine(block.norm1, self.norm1.output), rope, self.rows)
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
