"""Products with the Jacobian of a transformer block, written by hand for K tangents of B samples at once.

Around fixed tokens x the block is a linear map of dx. Autodiff reaches the same numbers through many small unfused
kernels; written out, one product is about the arithmetic of a forward. With P the attention matrix, O = P v:

    dS = dq k^T + q dk^T,   dO = (P*dS) v - rowsum(P*dS) * O + P dv                              (forward)
    S' = P * (c v^T - rowsum(c*O)),   q' = S' k,   k' = S'^T q,   v' = P^T c                     (reverse)

Layer norm is x^ = (x - mean)/std with tangent (dx - mean(dx) - x^ mean(x^*dx))/std. Its weight and its centring are
folded into the matrix that follows, the layer scales into the matrix before, so only the x^ term is elementwise.
K is folded into the rows or columns of each attention product, laid out so that no operand is ever copied K times.

In order: `LinearizedBlock`, and its parts `LinearizedNorm`, `LinearizedAttention`, `LinearizedReadout` (attention of
which a decoder reads a few tokens) and `LinearizedMlp`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from pullback.backbones.block import Block, Mlp, Norm, Rope

Part = TypeVar("Part", bound="Linearized")

CACHE_BYTES = 4 << 20  # of attention scores at a time, on a CPU


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


class LinearizedNorm(Linearized):
    """x -> x^ at fixed x, without weight and centring (see `after_norm`). It is its own adjoint."""

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


def after_norm(norm: Norm, weight: Tensor) -> Tensor:
    """The matrix that follows a layer norm, with the norm's weight and centring folded in: W diag(w) (I - 11^T/D)."""
    folded = weight * norm.weight
    return folded - folded.mean(-1, keepdim=True)


def before_scale(weight: Tensor, scale: Tensor | None) -> Tensor:
    return weight if scale is None else weight * scale[:, None]


class LinearizedAttention(Linearized):
    """normalised tokens [B, N, D] -> scale1 * Attention [B, R, D] for the first R tokens, at fixed input."""

    def __init__(self, block: Block, x: Tensor, rope: Rope | None, rows: int) -> None:
        self.rope, self.rows, self.tokens, self.heads = rope, rows, x.shape[1], block.heads
        scaling = block.head_dim**-0.5
        q, k, v = block.attention_inputs(x, rope, rows)
        probabilities = torch.softmax((q * scaling) @ k.mT, -1)
        attended = probabilities @ v
        merged = attended.transpose(1, 2).flatten(2)
        self.output = block.project(merged) if block.scale1 is None else block.project(merged) * block.scale1
        # Samples and heads are one axis from here on, g = B*h.
        self.q, self.k, self.v = (t.flatten(0, 1).contiguous() for t in (q * scaling, k, v))  # [g, R or N, d]
        self.k_transposed = self.k.mT.contiguous()  # faster than a transposed view in products with many rows
        self.probabilities, self.attended = probabilities.flatten(0, 1), attended.flatten(0, 1)  # [g, R, N], [g, R, d]
        self.query_weight = scaling * after_norm(block.norm1, block.query.weight)
        self.key_value_weight = torch.cat(
            [after_norm(block.norm1, block.key.weight), after_norm(block.norm1, block.value.weight)]
        )
        self.project_weight = before_scale(block.project.weight, block.scale1)

    def jvp(self, dx: Tensor) -> Tensor:
        """[B, K, N, D] -> [B, K, R, D]."""
        batch, count = dx.shape[:2]
        dq = self._split(dx[:, :, : self.rows] @ self.query_weight.mT, 1)[0]
        dk, dv = self._split(dx @ self.key_value_weight.mT, 2)
        if self.rope is not None:
            dq, dk = self.rope.rotate_tangents(dq, self.rows), self.rope.rotate_tangents(dk, self.tokens)
        dq = dq.permute(0, 3, 2, 1, 4).flatten(2, 3).flatten(0, 1)  # [g, R*K, d]
        dk = dk.permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1)  # [g, K*N, d]
        dv = dv.permute(0, 3, 2, 1, 4).flatten(3, 4).flatten(0, 1)  # [g, N, K*d]
        moved = _joined([self._moved(g, dq[g], dk[g], dv[g], count) for g in self._groups(count, dx)])
        moved = moved.unflatten(0, (batch, self.heads)).permute(0, 3, 2, 1, 4)  # [B, K, R, h, d]
        return moved.flatten(3) @ self.project_weight.mT

    def _moved(self, g: slice, dq: Tensor, dk: Tensor, dv: Tensor, count: int) -> Tensor:
        """dO for some heads: [g, R, K, d]."""
        scores = (dq @ self.k_transposed[g]).view(-1, self.rows, count * self.tokens)  # [g, R, K*N]
        torch.baddbmm(scores, self.q[g], dk.mT, out=scores)
        scores = scores.view(-1, self.rows, count, self.tokens).mul_(self.probabilities[g].unsqueeze(2))
        mass = scores.sum(-1, keepdim=True)
        moved = (scores.flatten(1, 2) @ self.v[g]).view(-1, self.rows, count, dq.shape[-1])
        moved = moved.addcmul_(mass, self.attended[g].unsqueeze(2), value=-1).flatten(2)
        torch.baddbmm(moved, self.probabilities[g], dv, out=moved)
        return moved.view(-1, self.rows, count, dq.shape[-1])

    def vjp(self, c: Tensor) -> Tensor:
        """[B, K, R, D] -> [B, K, N, D]."""
        batch, count = c.shape[:2]
        moved = self._split(c @ self.project_weight, 1)[0].permute(0, 3, 2, 1, 4).flatten(0, 1)  # [g, R, K, d]
        parts = [self._pulled(g, moved[g].contiguous()) for g in self._groups(count, c)]
        query, key, value = (_joined(part).unflatten(0, (batch, self.heads)) for part in zip(*parts, strict=True))
        query = query.permute(0, 3, 2, 1, 4)  # [B, K, R, h, d]
        key = key.permute(0, 2, 3, 1, 4)  # [B, K, N, h, d]
        value = value.permute(0, 3, 2, 1, 4)  # [B, K, N, h, d]
        if self.rope is not None:
            query = self.rope.rotate_cotangents(query, self.rows)
            key = self.rope.rotate_cotangents(key, self.tokens)
        out = torch.cat([key.flatten(3), value.flatten(3)], -1) @ self.key_value_weight
        out[:, :, : self.rows] += query.flatten(3) @ self.query_weight
        return out

    def _pulled(self, g: slice, moved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Cotangents [g, R, K, d] of some heads' outputs -> those of queries [g, R, K, d], keys [g, K, N, d] and
        values [g, N, K, d]."""
        count, dim = moved.shape[2:]
        probabilities = self.probabilities[g]
        value = (probabilities.mT @ moved.flatten(2)).view(-1, self.tokens, count, dim)
        drop = (moved * self.attended[g].unsqueeze(2)).sum(-1, keepdim=True)  # [g, R, K, 1]
        scores = (moved.flatten(1, 2) @ self.v[g].mT).view(-1, self.rows, count, self.tokens)
        scores = scores.sub_(drop).mul_(probabilities.unsqueeze(2))
        query = (scores.flatten(1, 2) @ self.k[g]).view(moved.shape)
        key = (scores.flatten(2).mT @ self.q[g]).view(-1, count, self.tokens, dim)
        return query, key, value

    def _groups(self, count: int, like: Tensor) -> list[slice]:
        """Heads that are processed together: on a CPU few enough that their scores stay in the cache."""
        heads = len(self.q)
        together = heads
        if like.device.type == "cpu":
            together = max(1, CACHE_BYTES // (self.rows * count * self.tokens * like.element_size()))
        return [slice(start, start + together) for start in range(0, heads, together)]

    def _split(self, x: Tensor, parts: int) -> tuple[Tensor, ...]:
        """[B, K, n, parts*h*d] -> parts times [B, K, n, h, d]."""
        return x.unflatten(-1, (parts, self.heads, -1)).unbind(3)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


class LinearizedReadout(LinearizedAttention):
    """The map of `LinearizedAttention` where few tokens are read: the last block of a class-token decoder.

    With R queries and h heads there are only R h attention rows, so keys and values are never formed for a tangent.
    With a_(h,r) = W_K,h^T q_(h,r) and dx_t the normalised tangent of token t,

        q . dk_t = a . dx_t,      sum_t P_t dv_t = W_V,h (sum_t P_t dx_t)                        (forward)
        x'_t = sum_(h,r) P_t W_V,h^T c_h + S'_t a_(h,r)                                          (reverse)

    N D (2 R h) multiplications instead of N D (2 D): 32 times fewer for one class token of a ViT-S or ViT-B. There must
    be no rotary embedding, which would turn every key differently.
    """

    @staticmethod
    def pays(block: Block, rope: Rope | None, rows: int) -> bool:
        """2 R h D multiplications per token against 2 D^2, both without the launches: at least half are saved."""
        return rope is None and 2 * rows <= block.head_dim

    def __init__(self, block: Block, x: Tensor, rope: Rope | None, rows: int) -> None:
        super().__init__(block, x, rope, rows)
        heads = self.heads
        per_head = self.key_value_weight.unflatten(0, (2, heads, -1))  # [2, h, d, D]
        key_weight, self.value_weight = per_head[0], per_head[1].contiguous()
        q, k, v, p, o = (
            t.unflatten(0, (-1, heads)) for t in (self.q, self.k, self.v, self.probabilities, self.attended)
        )
        self.pulled_query = torch.einsum("bhrd,hde->bhre", q, key_weight).flatten(1, 2)  # a: [B, hR, D]
        self.rows_of_attention = p.flatten(1, 2)  # [B, hR, N]
        self.keys, self.values, self.outputs = k, v, o.unsqueeze(2)  # [B, h, N, d] twice, [B, h, 1, R, d]

    def jvp(self, dx: Tensor) -> Tensor:
        """[B, K, N, D] -> [B, K, R, D]."""
        heads, rows = self.heads, self.rows
        dq = self._split(dx[:, :, :rows] @ self.query_weight.mT, 1)[0].permute(0, 3, 1, 2, 4)  # [B, h, K, R, d]
        scores = (self.pulled_query[:, None] @ dx.mT).unflatten(2, (heads, rows)).transpose(1, 2)  # [B, h, K, R, N]
        scores = scores + (dq.flatten(2, 3) @ self.keys.mT).view(scores.shape)
        scores = scores * self.rows_of_attention.unflatten(1, (heads, rows))[:, :, None]
        moved = (scores.flatten(2, 3) @ self.values).view(*scores.shape[:-1], -1)
        moved = moved.addcmul(scores.sum(-1, keepdim=True), self.outputs, value=-1)
        gathered = (self.rows_of_attention[:, None] @ dx).unflatten(2, (heads, rows))  # [B, K, h, R, D]
        moved = moved + torch.einsum("bkhre,hde->bhkrd", gathered, self.value_weight)
        return moved.permute(0, 2, 3, 1, 4).flatten(3) @ self.project_weight.mT

    def vjp(self, c: Tensor) -> Tensor:
        """[B, K, R, D] -> [B, K, N, D]."""
        batch, count = c.shape[:2]
        moved = self._split(c @ self.project_weight, 1)[0].permute(0, 3, 1, 2, 4)  # [B, h, K, R, d]
        drop = (moved * self.outputs).sum(-1, keepdim=True)
        scores = (moved.flatten(2, 3) @ self.values.mT).view(*moved.shape[:-1], self.tokens)
        scores = (scores - drop) * self.rows_of_attention.unflatten(1, (self.heads, self.rows))[:, :, None]
        query = (scores.flatten(2, 3) @ self.keys).view(moved.shape).permute(0, 2, 3, 1, 4)  # [B, K, R, h, d]
        pulled_value = torch.einsum("bhkrd,hde->bkhre", moved, self.value_weight).flatten(2, 3)  # [B, K, hR, D]
        weights = torch.cat(
            [
                self.rows_of_attention[:, None].expand(-1, count, -1, -1),
                scores.transpose(1, 2).flatten(2, 3),
            ],
            2,
        )  # [B, K, 2hR, N]
        vectors = torch.cat([pulled_value, self.pulled_query[:, None].expand(-1, count, -1, -1)], 2)
        out = (weights.flatten(0, 1).mT @ vectors.flatten(0, 1)).unflatten(0, (batch, count))
        out[:, :, : self.rows] += query.flatten(3) @ self.query_weight
        return out


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
