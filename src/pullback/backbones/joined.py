"""Queries, keys and values in one product, for models that are run and not trained.

One product with a matrix of three times the rows takes less time than three, most of all for a single image on a GPU.
The joined matrix is a copy: a quarter of the weights of the blocks is in memory twice. All pruned models of one model
share it, and it goes with the last of them. A model's own parameters are not touched, and remain the ones that are
saved, tuned and differentiated.

Only frozen models get one (``requires_grad_(False)``), since a copy knows nothing of a training step. Whoever runs it
asks `fresh` before: weights that were replaced, moved or written to since are joined anew. That cannot be asked inside
of torch.compile and CUDA graphs, nor can a write to ``parameter.data`` be seen: compile after weights were loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from pullback.backbones.attention import exporting
from pullback.backbones.backbone import Backbone
from pullback.backbones.block import Affine, Block, Rope


@dataclass(frozen=True, eq=False)
class Source:
    """A tensor that was copied, and how to tell whether it is still the same."""

    tensor: Tensor
    version: int
    place: int

    @classmethod
    def of(cls, tensor: Tensor) -> Source:
        return cls(tensor, tensor._version, tensor.data_ptr())

    def fresh(self) -> bool:
        return self.tensor._version == self.version and self.tensor.data_ptr() == self.place


@dataclass(frozen=True, eq=False)
class Matrix:
    """The matrices [I, D] of queries, keys and values one above the other, [3 I, D], and what they were copied from."""

    weight: Tensor
    sources: tuple[Source, ...]


_KNOWN: WeakValueDictionary[tuple[int, ...], Matrix] = WeakValueDictionary()


@dataclass(frozen=True, kw_only=True)
class JoinedBlock(Block):
    """A block with its queries, keys and values in one product, ``joined`` [3 I, D]; they are ``query``, ``key`` and
    ``value`` otherwise."""

    joined: Affine
    matrix: Matrix
    sources: tuple[Source, ...]  # of the bias

    def attention_inputs(self, x: Tensor, rope: Rope | None, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        own = self.query.weight.shape[0]
        if rows == x.shape[1]:
            q, k, v = map(self.heads_first, self.joined(x).chunk(3, -1))
        else:  # keys and values of all tokens, but few queries
            bias = self.joined.bias
            both = Affine(self.joined.weight[own:], None if bias is None else bias[own:])
            q, (k, v) = self.heads_first(self.query(x[:, :rows])), map(self.heads_first, both(x).chunk(2, -1))
        if rope is not None:
            q, k = rope.rotate(q, rows), rope.rotate(k, x.shape[1])
        return q, k, v


def joined(backbone: Backbone) -> Backbone:
    """Return the backbone with joined products wherever the weights are frozen; the rest of it is the same."""
    return replace(backbone, blocks=tuple(map(_joined_block, backbone.blocks)))


def fresh(backbone: Backbone) -> bool:
    """Whether the joined products of a backbone are still those of its weights."""
    return all(
        source.fresh()
        for block in backbone.blocks
        if isinstance(block, JoinedBlock)
        for source in (*block.matrix.sources, *block.sources)
    )


def wanted(backbone: Backbone) -> bool:
    """Whether joined products may be used now: no gradient of the weights is wanted, and no file for other runtimes
    is made, where the weights would be in twice."""
    if exporting():
        return False
    return not (torch.is_grad_enabled() and any(t.requires_grad for block in backbone.blocks for t in _parts(block)))


def _joined_block(block: Block) -> Block:
    parts = list(_parts(block))
    weights = [part.weight for part in (block.query, block.key, block.value)]
    biases = [part.bias for part in (block.query, block.key, block.value)]
    if type(block) is not Block or not all(map(_plain, parts)) or len({part.device for part in parts}) > 1:
        return block
    if len({part.dtype for part in parts}) > 1 or len({weight.shape for weight in weights}) > 1:
        return block
    matrix = _matrix(weights)
    given = [bias for bias in biases if bias is not None]
    with torch.no_grad():
        filled = [weights[0].new_zeros(len(weights[0])) if bias is None else bias for bias in biases]
        bias = nn.Parameter(torch.cat(filled), requires_grad=False) if given else None
    own = {field.name: getattr(block, field.name) for field in fields(Block)}
    sources = tuple(map(Source.of, given))
    return JoinedBlock(**own, joined=Affine(matrix.weight, bias), matrix=matrix, sources=sources)


def _matrix(weights: list[Tensor]) -> Matrix:
    """Join three matrices, or find them joined already. What is known holds its sources, whose ids are theirs alone."""
    sources = tuple(map(Source.of, weights))
    key = tuple(number for one in sources for number in (id(one.tensor), one.version, one.place))
    found = _KNOWN.get(key)
    if found is None:
        with torch.no_grad():  # a parameter, so that compilers take its place in memory for fixed
            found = Matrix(nn.Parameter(torch.cat(weights), requires_grad=False), sources)
        _KNOWN[key] = found
    return found


def _plain(tensor: Tensor) -> bool:
    """Whether it is an ordinary frozen tensor whose changes are counted."""
    known = type(tensor) in (Tensor, nn.Parameter) and not tensor.is_inference()
    return known and not tensor.requires_grad and tensor.device.type != "meta" and tensor.is_floating_point()


def _parts(block: Block) -> Iterator[Tensor]:
    for part in (block.query, block.key, block.value):
        yield from (tensor for tensor in part if tensor is not None)
