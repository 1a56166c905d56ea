"""Which tokens are removed, and which kept token each one follows: decided once, applied to any tensor that has a row
per token, and undone again.

From top to bottom: a `Matching` says which tokens are kept, which are removed, and the partner of each removed one.
Then come the choice of the tokens to remove and the search for their partners, and at last the way back, where
`Leftover` holds what a stage must remember to put removed tokens back at their places.

With "drift" a removed token t with partner b comes back as F_t + (F_b now - F_b then): what t would have become had it
moved as b did. F_t is its value when it was removed, F_b then the partner's right after the merge. The partner itself,
which stood for the mean since, comes back in the same way, so that without any movement all tokens are what they were.
A partner that was removed later is itself reconstructed first, because stages are undone in reverse order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pullback.backbones.attention import HAS_TRITON, kernels_run
from pullback.pruning.plan import Reinsert

if HAS_TRITON:
    from pullback.pruning import stage_kernels  # noqa: F401 - operators, called as torch.ops.pullback

ALIGNED = 8  # matrices whose rows start at multiples of 16 bytes are multiplied twice as fast on a GPU
NOBODY = -1.5  # below every cosine
KERNELS = frozenset({"ranks", "most_similar", "merge"})  # of `stage_kernels.py`, used where they run
LONGEST = 4096  # rows that they take
# Sorting one row leaves most of a GPU idle, comparing all of its pairs does not, if a compiler does it without storing
# them: 0.13 against 0.20 ms for a stage with 1,369 patches on an H200. Compilers treat a batch of one apart anyway.
FEW_PAIRS = 1 << 21


@dataclass(frozen=True, eq=False)
class Matching:
    """A split of N tokens into K kept and R removed ones, each of which has a partner among the kept.

    ``merged`` [B, R]: the share of it that goes into the partner, as a bool all or nothing. What is left of it is
    dropped; of a token that is dropped entirely the partner is only the one that its reconstruction follows.
    """

    kept: Tensor  # [B, K] indices into the sequence, ascending
    removed: Tensor  # [B, R]
    destination: Tensor  # [B, R] indices into `kept`
    merged: Tensor  # [B, R], from 0 to 1, or bool

    def keep(self, x: Tensor) -> Tensor:
        """Return the rows of the kept tokens: [B, N, ...] -> [B, K, ...]."""
        return rows(x, self.kept)

    def take(self, x: Tensor) -> Tensor:
        """Return the rows of the removed tokens: [B, N, ...] -> [B, R, ...]."""
        return rows(x, self.removed)

    def partner(self, y: Tensor) -> Tensor:
        """Return the partner's value for each removed token: [B, K, ...] -> [B, R, ...]."""
        return rows(y, self.destination)

    def merge(self, x: Tensor, weights: Tensor) -> Tensor:
        """Merge removed tokens into their partners: x [B, N, D], weights [B, N] -> [B, K, D].

        F_b + sum_a w_a / (w_b + sum_a w_a) (F_a - F_b): the weighted mean, written so that a token into which nothing
        is merged, or only its equals, does not change.
        """
        kept = self.keep(x)
        if self.removed.shape[1] == 0:
            return kept
        weights = weights.to(torch.promote_types(x.dtype, torch.float32))
        if weights.dtype == torch.float32 and _by_kernel("merge", self.removed.shape[1], x, weights):
            goes, share = torch.where(self.merged > 0, self.destination, -1), self.merged.to(torch.float32)
            moved: Tensor = torch.ops.pullback.merge(x, weights, self.kept, self.removed, goes.to(torch.int32), share)
            return moved
        shares = self._incoming(self.take(weights))  # [B, K, R]
        total = self.keep(weights) + shares.sum(-1)
        shares = (shares / total.clamp_min(torch.finfo(torch.float32).tiny)[..., None]).to(x.dtype)
        spare = -shares.shape[2] % ALIGNED
        gaps = self.take(x) - self.partner(kept)
        return kept + F.pad(shares, (0, spare)) @ F.pad(gaps, (0, 0, 0, spare))

    def add(self, x: Tensor) -> Tensor:
        """Add what is merged to its partner: x [B, N] -> [B, K]; what is dropped is lost."""
        return self.keep(x) + self._incoming(self.take(x)).sum(-1)

    def place(self, kept: Tensor, removed: Tensor) -> Tensor:
        """Put kept and removed tokens back at their places: [B, K, ...], [B, R, ...] -> [B, N, ...]."""
        order = torch.cat([self.kept, self.removed], 1)
        here = torch.arange(order.shape[1], device=order.device).expand_as(order)
        return rows(torch.cat([kept, removed], 1), torch.zeros_like(order).scatter(1, order, here))

    def unmerge(self, y: Tensor) -> Tensor:
        """Restore the sequence with copies of the partners in place of removed tokens: [B, K, ...] -> [B, N, ...]."""
        return self.place(y, self.partner(y))

    def _incoming(self, values: Tensor) -> Tensor:
        """Return values [B, R] of merged tokens in the row of their partner: [B, K, R]. A product with it is
        deterministic, which adding rows by index is not on a GPU."""
        partners = torch.arange(self.kept.shape[1], device=values.device)
        return (self.destination[:, None] == partners[:, None]) * (self.merged * values)[:, None]


def rows(x: Tensor, index: Tensor) -> Tensor:
    """Return the rows of x [B, N, ...] at index [B, n]: [B, n, ...]."""
    if x.ndim > 2 and not (x.is_cuda or torch.compiler.is_compiling()):
        # Copies whole rows, without an index for each number: 5 to 12 times as fast on a CPU.
        first = x.shape[1] * torch.arange(x.shape[0], device=x.device)[:, None]
        return x.flatten(0, 1).index_select(0, (first + index).flatten()).unflatten(0, index.shape)
    wide = index.reshape(*index.shape, *(1,) * (x.ndim - 2))
    return x.gather(1, wide.expand(*index.shape, *x.shape[2:]))


def lowest(scores: Tensor, count: int, prefix: int) -> tuple[Tensor, Tensor]:
    """Remove the ``count`` patches with the lowest scores [B, N]: (kept [B, N - count], removed [B, count]), ascending.

    The prefix takes no part in the order, so that no score, infinite or not a number, can remove it.
    """
    stays = ranks(scores[:, prefix:]) < scores.shape[1] - prefix - count
    stays = F.pad(stays, (prefix, 0), value=True)
    left = scores.shape[1] - count
    here, before = _places(scores), stays.cumsum(1)
    place = torch.where(stays, before - 1, left + here - before)
    order = torch.zeros_like(here).scatter(1, place, here).long()
    return order[:, :left], order[:, left:]


def ranks(scores: Tensor) -> Tensor:
    """Rank scores [B, N]: 0 is the highest; equal ones in some order, so that no two share a rank. NaN is high."""
    scores = scores.float()
    if _by_kernel("ranks", scores.shape[1], scores):
        return torch.ops.pullback.ranks(scores)
    if _compiled_for_gpu(scores) and len(scores) == 1 and scores.numel() ** 2 <= FEW_PAIRS:
        return _ranks_by_pairs(scores)
    here = _places(scores)
    return torch.zeros_like(here).scatter(1, scores.sort(dim=1, descending=True).indices, here)


def _by_kernel(name: str, longest: int, *tensors: Tensor) -> bool:
    """Whether a kernel does it, with rows of at most ``longest``, in float32 or less."""
    fits = longest <= LONGEST and all(x.dtype != torch.float64 for x in tensors)
    return name in KERNELS and fits and kernels_run(*tensors)


def _places(scores: Tensor) -> Tensor:
    """Return 0, 1, ..., N - 1 in every row [B, N]; int32, whose scatter compilers write themselves, unlike int64's."""
    return torch.arange(scores.shape[1], dtype=torch.int32, device=scores.device).expand_as(scores)


def _ranks_by_pairs(scores: Tensor) -> Tensor:
    """Rank by counting, for each score, those that are higher, or equal and before."""
    scores, here = stored(torch.where(scores.isnan(), torch.inf, scores)), _places(scores)
    others, own = scores[:, None], scores[..., None]
    return ((others > own) | ((others == own) & (here[:, None] < here[..., None]))).sum(-1, dtype=torch.int32)


def stored(x: Tensor) -> Tensor:
    """Return x itself, in memory. A GPU compiler fuses what makes x into whatever reads it, and would work it out anew
    for each of N^2 pairs; strides it can only give to what is in memory. (Of a view it would forget where in its base
    it starts.)"""
    if not _compiled_for_gpu(x):
        return x
    own = x.clone(memory_format=torch.contiguous_format)
    return own.as_strided(own.shape, own.stride())


def _compiled_for_gpu(x: Tensor) -> bool:
    return x.is_cuda and torch.compiler.is_compiling()


def artifacts(tokens: Tensor, prefix: int, deviations: float = 4.0) -> Tensor:
    """Return which tokens [B, N] have a norm more than 4 median absolute deviations from the median of the patches.

    DINOv2 has a few such tokens in the background from the middle layers on; averages that touch them are ruined.
    """
    norms = tokens.float().norm(dim=-1)
    centre = _median(norms[:, prefix:])
    away = (norms - centre).abs()
    return away > deviations * _median(away[:, prefix:])


def _median(values: Tensor) -> Tensor:
    """Return the median of each row, [B, n] -> [B, 1], the upper one of two; by ranks, faster on a GPU than sorting."""
    middle = ranks(values) == (values.shape[1] - 1) // 2
    return torch.where(middle, values, 0).sum(1, keepdim=True)


def cosines(tokens: Tensor) -> Tensor:
    """Return the cosine of every pair of tokens [B, N, D]: [B, N, M]; columns from N on are padding."""
    count = tokens.shape[1]
    unit = F.pad(F.normalize(tokens, dim=-1), (0, 0, 0, -count % ALIGNED))
    return unit[:, :count] @ unit.mT


def most_similar(cosine: Tensor, among: Tensor) -> tuple[Tensor, Tensor]:
    """Return the highest cosine [B, n, M] ``among`` [B, n or 1, N] bool, and its index: [B, n] each; -2 where none."""
    padded = F.pad(among, (0, cosine.shape[-1] - among.shape[-1]))
    best = torch.where(padded, cosine, -2.0).max(-1)
    return best.values, best.indices


def residuals(tokens: Tensor, scores: Tensor, allowed: Tensor, cosine: Tensor) -> Tensor:
    """Return |F_t - F_u| [B, N] to the most similar allowed token u with a higher score, which is likely to be kept; at
    most the token's own length, which is what dropping it takes away."""
    place = ranks(scores)
    reach = stored(torch.where(allowed, place, place.shape[1]))  # who is not allowed comes after everyone
    if _by_kernel("most_similar", place.shape[1], cosine):
        best, partner = torch.ops.pullback.most_similar(cosine, reach, None, place)
    else:
        best, partner = most_similar(cosine, reach[:, None] < place[..., None])
    return gaps(tokens, best, partner)


def gaps(tokens: Tensor, cosine: Tensor, partner: Tensor) -> Tensor:
    """Return |F_t - F_u| [B, N] to the ``partner`` u [B, N] of each token, at most the token's own length, which also
    stands for tokens without a partner: those whose ``cosine`` [B, N] is not above `NOBODY`."""
    own = tokens.float().norm(dim=-1)
    away = (tokens - rows(tokens, partner.clamp_max(tokens.shape[1] - 1))).float().norm(dim=-1)
    return torch.where(cosine > NOBODY, torch.minimum(away, own), own)


def removal_costs(scores: Tensor, distances: Tensor, trust: float) -> Tensor:
    """Return score^trust x distance [B, N]; the sign of a score stays."""
    return scores.sign() * scores.abs() ** trust * distances


def match_by_cosine(
    cosine: Tensor, kept: Tensor, removed: Tensor, allowed: Tensor, gate: float, fade: float | None = None
) -> tuple[Tensor, Tensor]:
    """Find the most similar kept token among ``allowed`` [B, N] for each removed one: (destination, merged) [B, R].

    A token is merged where the cosine is above ``gate``, and only into an allowed one: all of it, or, with a ``fade``
    above the gate, the share min(1, (cosine - gate) / (fade - gate)), through which no gradient passes.
    """
    stays = torch.zeros_like(allowed).scatter(1, kept, True)
    if _by_kernel("most_similar", allowed.shape[1], cosine):
        best, partner = torch.ops.pullback.most_similar(cosine, (~(allowed & stays)).to(torch.int32), removed)
    else:
        best, partner = most_similar(rows(cosine, removed), stored(allowed & stays)[:, None])
    place = stays.cumsum(1) - 1  # of a kept token among the kept
    destination = rows(place, partner.clamp_max(allowed.shape[1] - 1)).clamp_min(0)
    merged = best > max(gate, NOBODY)
    if fade is None or fade <= gate:
        return destination, merged
    return destination, ((best.detach() - gate) / (fade - gate)).clamp(0, 1) * merged


def match_by_task(tokens: Tensor, modes: Tensor, kept: Tensor, removed: Tensor, prefix: int) -> tuple[Tensor, Tensor]:
    """Find the nearest kept token under d_task (`eq:dtask`), literally: (destination, merged) [B, R].

    d(a, b)^2 = sum_j ((sigma_j v_j^(a))^T (F_a - F_b))^2 with the scaled modes sigma_j v_j [B, r, N, D]. The class
    token counts as a destination; its importance is infinite (s_0 = inf), so whatever is merged into it is lost.
    """
    wide = torch.promote_types(tokens.dtype, modes.dtype)
    tokens, modes = tokens.to(wide), modes.to(wide)
    index = removed[:, None, :, None].expand(-1, modes.shape[1], -1, modes.shape[-1])
    blocks = modes.gather(2, index)  # [B, r, R, D]
    own = (blocks * rows(tokens, removed)[:, None]).sum(-1, keepdim=True)  # [B, r, R, 1]
    reach = blocks @ rows(tokens, kept).mT[:, None]  # [B, r, R, K]
    nearest = (own - reach).square().sum(1).argmin(-1)
    return nearest, rows(kept, nearest) >= prefix


@dataclass(frozen=True, eq=False)
class Leftover:
    """What a stage remembers of the tokens that it removed. ``offset`` [B, R, D] is added to the partner's value, or,
    where ``follows`` is false, is the value itself. ``own`` [B, K, D] is what the merge took from the kept ones."""

    matching: Matching
    offset: Tensor | None
    follows: bool
    own: Tensor | None = None

    def back(self, y: Tensor) -> Tensor:
        """Return the sequence as it was before the stage: [B, K, D] -> [B, N, D]."""
        if not self.follows:
            assert self.offset is not None
            return self.matching.place(y, self.offset.to(y.dtype))
        if self.offset is None or self.own is None:
            return self.matching.unmerge(y)
        return self.matching.place(y + self.own, self.matching.partner(y) + self.offset)


def leftover(how: Reinsert, matching: Matching, before: Tensor, after: Tensor) -> Leftover:
    """Return what to remember of a stage that turned ``before`` [B, N, D] into ``after`` [B, K, D]."""
    if how == "frozen":
        return Leftover(matching, matching.take(before), follows=False)
    if how == "copy":
        return Leftover(matching, None, follows=True)
    own = matching.keep(before) - after
    return Leftover(matching, matching.take(before) - matching.partner(after), follows=True, own=own)


def reinserted(tokens: Tensor, leftovers: Sequence[Leftover]) -> Tensor:
    """Return the full sequence [B, N, D], made of the tokens that are left [B, K, D]."""
    for one in reversed(leftovers):
        tokens = one.back(tokens)
    return tokens
