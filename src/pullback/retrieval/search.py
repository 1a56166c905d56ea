"""Find the items of a gallery that are nearest to a query, by comparing all of them or by way of candidates.

All of them (`Index.exact`): for queries i and items j, with x_j, h_j, a_j as in `records`, `eq:drm_sym` is

    d(i, j) = (|x_j^T h_i - a_i| + |a_j - x_i^T h_j|) / 2

and both products are matrix products over many items and all queries at once. Items are stored in float16, in which a
gallery is read from memory in half the time, and computed with in float32, a few megabytes at a time.

Candidates (`Index.candidates`), for large galleries, in three steps of which each looks more closely at fewer items:

    all items        distances of embeddings under the constant metric, about 32 numbers an item      FAISS, or torch
    16 in 1          `eq:drm_sym` of sketches, 16 tokens in place of all N                            per query
    1 in 1           `eq:drm_sym`                                                                     `count` a query

The constant metric alone does not tell near items well enough apart: in a gallery of 10,000 with N = 257 it takes 500
exact distances for a recall@10 of 0.99. Sketches, whose weights change with the image as those of the metric do, get
there with fewer than 200, at 16 / 257 of the cost. FAISS without compression, and torch without FAISS, find the same
nearest embeddings.

Either way the distances of the best are computed once more in float64, from differences of tokens, and ties go by the
order of adding: an image is at distance 0 from its stored self, and comes first.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pullback.learning.distilled_metric import MetricItems, pairwise_distances
from pullback.operators.execution import free_bytes, matmul_precision
from pullback.retrieval.records import Form, Records

FROM = 100_000
"""Items from which candidates are worth it."""
PER_RESULT = 25
"""Candidates for each result that is asked for, unless told otherwise."""
WIDER = 16
"""Sketches that are compared for each candidate."""
_QUERIES = 32  # at a time, as are the next three
_FLOATS = {"cpu": 2**21, "cuda": 2**28}  # of items that are converted
_SKETCHES = 8192
_PRECISE = 512  # items in float64


class Found(NamedTuple):
    """The nearest items of Q queries, best first."""

    rows: Tensor  # [Q, k]
    distances: Tensor  # float32 [Q, k]
    compared: int  # items whose distance was computed, for each query


def has_faiss() -> bool:
    """Whether the extra pullback[retrieval] is installed."""
    return importlib.util.find_spec("faiss") is not None


@dataclass(frozen=True, eq=False)
class Index:
    """The items of a gallery at one moment: in blocks, of which the rows ``removed`` are never found."""

    form: Form
    blocks: Sequence[Records]
    removed: Tensor  # int64, sorted
    device: torch.device  # where distances are computed

    @classmethod
    def of(cls, form: Form, blocks: Sequence[Records], removed: Sequence[int], device: torch.device) -> Index:
        """Take items, onto a GPU if they fit into half of what is free there; else they are sent chunk by chunk."""
        size = sum(part.nbytes for block in blocks for part in block.parts.values())
        if blocks and device.type != "cpu" and size < free_bytes(device) / 2:
            blocks = [_on(device, form, blocks)]
        return cls(form, blocks, torch.tensor(sorted(removed), dtype=torch.long), device)

    def __len__(self) -> int:
        """The number of items that can be found."""
        return sum(map(len, self.blocks)) - len(self.removed)

    def items(self, rows: Tensor) -> MetricItems:
        """Return the items in these rows, which are sorted, as queries."""
        return self._take(rows).items()

    @torch.no_grad()
    def exact(self, queries: MetricItems, k: int) -> Found:
        """Compare queries, as `MetricItems.half` gives them, with all items."""
        k, found = min(k, len(self)), []
        for start in range(0, len(queries), _QUERIES):
            part = queries[start : start + _QUERIES]
            distances = torch.cat([distances_to(part, block, self.device) for block in self.blocks], 1)
            distances[:, self.removed.to(distances.device)] = torch.inf
            limit = distances.topk(k, largest=False).values[:, -1] + _rounding(part).to(distances.device)
            for number in range(len(part)):
                rows = (distances[number] <= limit[number]).nonzero().flatten()
                found.append(self._settled(part[number : number + 1], rows, k))
        return _joined(found, len(self))

    @torch.no_grad()
    def candidates(self, queries: MetricItems, k: int, count: int) -> Found:
        """Compare queries with the ``count`` items whose sketches are nearest."""
        count = min(max(k, count), len(self))
        k, found = min(k, len(self)), []
        sketches = self.form.sketch_of(queries)
        near = self.nearest(self.form.embedding(sketches), min(len(self), WIDER * count))
        for number in range(len(queries)):
            query, rows = queries[number : number + 1], near[number].sort().values
            query_sketch = _on_device(sketches[number : number + 1], self.device)
            distances = pairwise_distances(query_sketch, self._sketches(rows))[0]
            rows = rows[distances.topk(count, largest=False, sorted=False).indices.to(rows.device)].sort().values
            distances = distances_to(query, self._take(rows), self.device)[0]
            limit = distances.topk(k, largest=False).values[-1] + _rounding(query).to(distances.device)
            found.append(self._settled(query, rows[(distances <= limit[0]).to(rows.device)], k))
        return _joined(found, count)

    @cached_property
    def nearest(self) -> Callable[[Tensor, int], Tensor]:
        """Return the function (embeddings [Q, e], count) -> the rows [Q, count] of the nearest embeddings, in no
        order. The first use reads the sketches of all items."""
        embedded = torch.cat([self._embedded(block) for block in self.blocks])
        living = torch.ones(len(embedded), dtype=torch.bool)
        living[self.removed] = False
        rows = living.nonzero().flatten()
        embedded = embedded[rows.to(embedded.device)] if len(self.removed) else embedded
        return _nearest_by_faiss(embedded, rows) if self._by_faiss else _nearest_by_torch(embedded, rows)

    @property
    def _by_faiss(self) -> bool:
        return self.device.type == "cpu" and has_faiss()

    def _embedded(self, block: Records) -> Tensor:
        parts = (block[start : start + _SKETCHES] for start in range(0, len(block), _SKETCHES))
        return torch.cat([self.form.embedding(part.sketch()).to(self.device) for part in parts])

    def _settled(self, query: MetricItems, rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the k best of these rows, which are sorted, and their distances."""
        parts = [precise_distances(query, self._take(part)) for part in rows.split(_PRECISE)]
        order = torch.cat(parts).sort(stable=True)
        return rows[order.indices[:k].to(rows.device)].cpu(), order.values[:k].float().cpu()

    def _take(self, rows: Tensor) -> Records:
        """Return the items of these rows, which are sorted, where distances are computed."""
        return Records.join([block[inside] for block, inside in self._places(rows)]).to(self.device)

    def _sketches(self, rows: Tensor) -> MetricItems:
        """Return the sketches of these rows, which are sorted, where distances are computed."""
        return _on_device(MetricItems.join([block.sketch(inside) for block, inside in self._places(rows)]), self.device)

    def _places(self, rows: Tensor) -> Iterator[tuple[Records, Tensor]]:
        """Iterate over the blocks that hold these rows, which are sorted, with the rows inside each of them."""
        starts = torch.tensor([0, *map(len, self.blocks)]).cumsum(0)
        places = torch.searchsorted(rows.cpu().contiguous(), starts).tolist()
        for block, start, first, last in zip(self.blocks, starts.tolist(), places[:-1], places[1:], strict=False):
            if first < last:
                yield block, (rows[first:last] - start).to(block.rest.device)


def distances_to(queries: MetricItems, items: Records, device: torch.device) -> Tensor:
    """Return d(F_i, F_j) of `eq:drm_sym` for queries i and all items j: float32 [Q, n]."""
    rank, tokens = items.form.rank, items.form.tokens
    weights = queries.weights.to(device).float().mT.contiguous()  # [N, Q]
    projected = queries.projected.to(device).float().movedim(0, 1).flatten(1)  # [N, Q k]
    own = queries.aggregates.to(device)
    step = max(1, _FLOATS[device.type if device.type == "cpu" else "cuda"] // (rank * tokens))
    held = torch.empty(min(step, len(items)) * rank, tokens, device=device)
    found = torch.empty(len(queries), len(items), device=device)
    with matmul_precision("float32"):
        for start in range(0, len(items), step):
            part = items[start : start + step]
            plain = held[: len(part) * rank]
            plain.copy_(part.tokens.view(len(part) * rank, tokens))  # to float32, and to the device
            there = (plain @ weights).view(len(part), rank, -1) - own.mT  # [n, k, Q]
            back = (part.weights.to(device).float() @ projected).view(len(part), -1, rank)  # [n, Q, k]
            back = part.aggregates.to(device)[:, None] - back
            # not vector_norm, which over an axis in the middle takes half as long as the product itself
            both = there.square_().sum(1).sqrt_() + back.square_().sum(2).sqrt_()
            found[:, start : start + step] = both.mT / 2
    return found


def precise_distances(query: MetricItems, items: Records) -> Tensor:
    """Return the distances of one query from items in float64 [n], from differences of tokens: exactly 0 for items
    that are the query."""
    stored = items.items()
    change = stored.projected.double() - query.projected.to(stored.projected.device).double()
    ends = (query.weights.to(change.device).double(), stored.weights.double())
    return sum(torch.einsum("bnk,bn->bk", change, end.expand(len(items), -1)).norm(dim=1) for end in ends) / 2


def _rounding(queries: MetricItems) -> Tensor:
    """Return how far float32 may have moved the distances of each query: [Q]."""
    size = queries.weights.float().norm(dim=1) * queries.projected.float().flatten(1).norm(dim=1)
    return 8 * torch.finfo(torch.float32).eps * size


def _nearest_by_faiss(embedded: Tensor, rows: Tensor) -> Callable[[Tensor, int], Tensor]:
    import faiss

    index: Any = faiss.IndexFlatL2(embedded.shape[1])
    index.add(embedded.numpy())

    def nearest(queries: Tensor, count: int) -> Tensor:
        return rows[torch.from_numpy(index.search(queries.cpu().contiguous().numpy(), count)[1])]

    return nearest


def _nearest_by_torch(embedded: Tensor, rows: Tensor) -> Callable[[Tensor, int], Tensor]:
    half_squares, rows = embedded.square().sum(1) / 2, rows.to(embedded.device)

    def nearest(queries: Tensor, count: int) -> Tensor:
        parts = queries.to(embedded.device).split(_QUERIES)
        found = [(half_squares - part @ embedded.mT).topk(count, largest=False, sorted=False).indices for part in parts]
        return rows[torch.cat(found)]

    return nearest


def _on(device: torch.device, form: Form, blocks: Sequence[Records]) -> Records:
    """Copy blocks to a device one by one: joined here first, they would take their size in memory twice."""
    count = sum(map(len, blocks))
    held = {part: torch.empty(count, words, dtype=torch.float16, device=device) for part, words in form.words.items()}
    start = 0
    for block in blocks:
        for part, values in block.parts.items():
            held[part][start : start + len(block)].copy_(values)
        start += len(block)
    return Records(form, held["tokens"], held["rest"])


def _on_device(items: MetricItems, device: torch.device) -> MetricItems:
    return MetricItems(items.projected.to(device), items.weights.to(device), items.aggregates.to(device))


def _joined(found: Sequence[tuple[Tensor, Tensor]], compared: int) -> Found:
    rows, distances = zip(*found, strict=True)
    return Found(torch.stack(rows), torch.stack(distances), compared)
