"""Layer norm and attention linearised by hand (see `linearized_block.py` for the formulas)."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from pullback.backbones.block import Block, Norm, Rope

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
