"""Find the items of a gallery that are nearest to a query, by comparing all of them or by way of candidates.

All of them (`Index.exact`): for queries i and items j, with x_j, h_j, a_j as in `records`, `eq:drm_sym` is

    d(i, j) = (|x_j^T h_i - a_i| + |a_j - x_i^T h_j|) / 2

and both products are matrix products over many items and all queries at once. Items are stored in float16, in which a
gallery is read from memory in half the time, and computed with in float32, a few megabytes at a time.

Candidates (`Index.candidates`), for large galleries, in three steps of which each looks more closely at fewer items:

    all items     distances of embeddings under the constant metric, 32 numbers an item        FAISS, or torch
    some 1,000    `eq:drm_sym` of sketches, 24 tokens in place of all N
    some 100      `eq:drm_sym`

How many it takes differs from query to query: the constant metric, and so the first step, is a good guess where the
weights h of an image are usual, and a bad one where they are not. So the nearest of each step are searched until the k
best of them lie in the first quarter, by what the step before said of them; else twice as many are looked at.

FAISS sorts embeddings into sqrt(n) cells and looks into the nearest quarter of them, torch looks at all.

Either way the distances of the best are computed once more in float64, from differences of tokens, and ties go by the
order of adding: an image is at distance 0 from its stored self, and comes first.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pullback.learning.distilled_metric import MetricItems
from pullback.operators.execution import free_bytes, matmul_precision
from pullback.retrieval.records import Columns, Form, Records

FROM = 100_000
"""Items from which candidates are worth it."""
PER_RESULT = 20
"""Candidates for each result that is asked for, unless told otherwise; more where it takes more."""
WIDER = 20
"""Sketches that are compared for each candidate."""
SURE = 4
"""The best must lie in this part (a quarter) of what was looked at."""
_QUERIES = 32  # at a time, as are the next three
_FLOATS = {"cpu": 2**21, "cuda": 2**28}  # of items that are converted
_SKETCHES = 8192
_PRECISE = 512  # items in float64
_CELLS_FROM = 10_000  # items; FAISS wants some 40 of them in each cell


class Found(NamedTuple):
    """The nearest items of Q queries, best first."""

    rows: Tensor  # [Q, k]
    distances: Tensor  # float32 [Q, k]
    compared: int  # items whose distance was computed, for each query: the mean where that differs


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
        return self._columns(rows).items(self.form.rank)

    @torch.no_grad()
    def exact(self, queries: MetricItems, k: int) -> Found:
        """Compare queries, as `MetricItems.half` gives them, with all items."""
        k, found = min(k, len(self)), []
        for start in range(0, len(queries), _QUERIES):
            part = queries[start : start + _QUERIES]
            distances = torch.cat([distances_to(part, block.columns(), self.device) for block in self.blocks], 1)
            distances[:, self.removed.to(distances.device)] = torch.inf
            limit = distances.topk(k, largest=False).values[:, -1] + _rounding(part).to(distances.device)
            for number in range(len(part)):
                rows = (distances[number] <= limit[number]).nonzero().flatten()
                found.append(self._settled(part[number : number + 1], rows, k))
        return _joined(found, len(self))

    @torch.no_grad()
    def candidates(self, queries: MetricItems, k: int, count: int) -> Found:
        """Compare queries with the ``count`` items whose sketches are nearest, or with more where it takes more."""
        k, count = min(k, len(self)), min(max(k, count), len(self))
        sketches, found, compared = self.form.sketch_of(queries), [], 0
        embedded = self.form.embedding(sketches)
        near = self.nearest(embedded, min(len(self), WIDER * count))
        for number, rows in enumerate(near):
            one = slice(number, number + 1)
            order = self._distances(sketches[one], rows, sketched=True).argsort()
            while len(rows) < len(self) and int(order[:k].max()) >= len(rows) // SURE:
                rows = self.nearest(embedded[one], min(len(self), 2 * len(rows)))[0]
                order = self._distances(sketches[one], rows, sketched=True).argsort()
            ranked, looked = rows[order.to(rows.device)], count
            distances = self._distances(queries[one], ranked[:looked])
            while looked < len(ranked) and int(distances.topk(k, largest=False).indices.max()) >= looked // SURE:
                more = self._distances(queries[one], ranked[looked : 2 * looked])
                distances, looked = torch.cat([distances, more]), 2 * looked
            limit = distances.topk(k, largest=False).values[-1] + _rounding(queries[one]).to(distances.device)
            best = ranked[: len(distances)][(distances <= limit).to(ranked.device)]
            found.append(self._settled(queries[one], best.sort().values, k))
            compared += len(distances)
        return _joined(found, round(compared / len(queries)))

    @cached_property
    def nearest(self) -> Callable[[Tensor, int], Tensor]:
        """Return the function (embeddings [Q, e], count) -> the rows [Q, count] of the nearest embeddings, nearest
        first. The first use reads the sketches of all items."""
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
        parts = (block[start : start + _SKETCHES].sketches() for start in range(0, len(block), _SKETCHES))
        return torch.cat([self.form.embedding(part.items(self.form.rank)).to(self.device) for part in parts])

    def _settled(self, query: MetricItems, rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the k best of these rows, which are sorted, and their distances."""
        parts = [precise_distances(query, self.items(part)) for part in rows.split(_PRECISE)]
        order = torch.cat(parts).sort(stable=True)
        return rows[order.indices[:k].to(rows.device)].cpu(), order.values[:k].float().cpu()

    def _distances(self, query: MetricItems, rows: Tensor, *, sketched: bool = False) -> Tensor:
        """Return the distances of one query from the items of these rows, in any order, or of their sketches: [n]."""
        ordered = rows.sort()  # read in the order in which they lie
        distances = distances_to(query, self._columns(ordered.values, sketched=sketched), self.device)[0]
        return torch.empty_like(distances).scatter_(0, ordered.indices.to(distances.device), distances)

    def _columns(self, rows: Tensor, *, sketched: bool = False) -> Columns:
        """Return the items of these rows, which are sorted, or their sketches."""
        places = self._places(rows)
        if sketched:
            return Columns.join([block.sketches(inside) for block, inside in places])
        return Columns.join([block[inside].columns() for block, inside in places])

    def _places(self, rows: Tensor) -> Iterator[tuple[Records, Tensor]]:
        """Iterate over the blocks that hold these rows, which are sorted, with the rows inside each of them."""
        starts = torch.tensor([0, *map(len, self.blocks)]).cumsum(0)
        places = torch.searchsorted(rows.cpu().contiguous(), starts).tolist()
        for block, start, first, last in zip(self.blocks, starts.tolist(), places[:-1], places[1:], strict=False):
            if first < last:
                yield block, (rows[first:last] - start).to(block.rest.device)


def distances_to(queries: MetricItems, items: Columns, device: torch.device) -> Tensor:
    """Return d(F_i, F_j) of `eq:drm_sym` for queries i and all items j: float32 [Q, n]."""
    tokens, rank = queries.projected.shape[1:]
    weights = queries.weights.to(device).float().mT.contiguous()  # [N, Q]
    projected = queries.projected.to(device).float().movedim(0, 1).flatten(1)  # [N, Q k]
    own = queries.aggregates.to(device)
    step = max(1, _FLOATS[device.type if device.type == "cpu" else "cuda"] // (rank * tokens))
    held = torch.empty(min(step, len(items)), rank * tokens, device=device)
    found = torch.empty(len(queries), len(items), device=device)
    with matmul_precision("float32"):
        for start in range(0, len(items), step):
            part = items[start : start + step]
            plain = held[: len(part)].copy_(part.projected)  # to float32, and to the device
            there = (plain.view(-1, tokens) @ weights).view(len(part), rank, -1) - own.mT  # [n, k, Q]
            back = (part.weights.to(device).float() @ projected).view(len(part), -1, rank)  # [n, Q, k]
            back = part.aggregates.to(device)[:, None] - back
            # not vector_norm, which over an axis in the middle takes half as long as the product itself
            both = there.square_().sum(1).sqrt_() + back.square_().sum(2).sqrt_()
            found[:, start : start + step] = both.mT / 2
    return found


def precise_distances(query: MetricItems, items: MetricItems) -> Tensor:
    """Return the distances of one query from items in float64 [n], from differences of tokens: exactly 0 for items
    that are the query."""
    change = items.projected.double() - query.projected.to(items.projected.device).double()
    ends = (query.weights.to(change.device).double(), items.weights.double())
    return sum(torch.einsum("bnk,bn->bk", change, end.expand(len(items), -1)).norm(dim=1) for end in ends) / 2


def _rounding(queries: MetricItems) -> Tensor:
    """Return how far float32 may have moved the distances of each query: [Q]."""
    size = queries.weights.float().norm(dim=1) * queries.projected.float().flatten(1).norm(dim=1)
    return 8 * torch.finfo(torch.float32).eps * size


def _nearest_by_faiss(embedded: Tensor, rows: Tensor) -> Callable[[Tensor, int], Tensor]:
    faiss: Any = importlib.import_module("faiss")  # its own types know no parameters of a search
    count, width = embedded.shape
    cells = round(count**0.5) if count >= _CELLS_FROM else 1
    index = faiss.IndexIVFFlat(faiss.IndexFlatL2(width), width, cells)
    index.train(embedded[:: max(1, count // (64 * cells))].contiguous().numpy())
    index.add(embedded.numpy())

    def nearest(queries: Tensor, wanted: int) -> Tensor:
        plain = queries.cpu().contiguous().numpy()
        looked = max(math.ceil(cells / 4), min(cells, math.ceil(4 * wanted / count * cells)))
        found = index.search(plain, wanted, params=faiss.SearchParametersIVF(nprobe=looked))[1]
        if (found < 0).any():  # these cells hold fewer
            found = index.search(plain, wanted, params=faiss.SearchParametersIVF(nprobe=cells))[1]
        return rows[torch.from_numpy(found)]

    return nearest


def _nearest_by_torch(embedded: Tensor, rows: Tensor) -> Callable[[Tensor, int], Tensor]:
    half_squares, rows = embedded.square().sum(1) / 2, rows.to(embedded.device)

    def nearest(queries: Tensor, wanted: int) -> Tensor:
        parts = queries.to(embedded.device).split(_QUERIES)
        found = [(half_squares - part @ embedded.mT).topk(wanted, largest=False).indices for part in parts]
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


def _joined(found: Sequence[tuple[Tensor, Tensor]], compared: int) -> Found:
    rows, distances = zip(*found, strict=True)
    return Found(torch.stack(rows), torch.stack(distances), compared)
