"""What a head or a metric network learns from: the geometry of J at some features, as numbers per sample and token."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pullback.checks import callable_or_none, finite_number, of_kind, shown, whole_number
from pullback.errors import ImageError, PullbackError, RankError, ShapeError
from pullback.geometry.importance import block_norms, exact_block_norms
from pullback.geometry.independence import check_independence
from pullback.geometry.spectrum import (
    Probe,
    as_token_maps,
    check_probe,
    checked_batch_size,
    finite_products,
    in_batches,
    output_size,
    within_memory,
)
from pullback.operators import JacobianOperator, LowRankMetric, ProductCount, check_sensitive
from pullback.randnla import Estimate, Streams, choose_method, leading_modes
from pullback.randnla.modes import USUAL_DEPTH, capture_ratio
from pullback.randnla.svd import default_block

MAX_SAMPLES = {"cpu": 4, "cuda": 64}


@dataclass(frozen=True)
class Recipe:
    """How targets are computed; everything in here changes the numbers."""

    rank: int = 20
    method: str = "auto"
    num_probes: int = 32
    rtol: float = 1e-3
    precision: str = "float32"
    keep_modes: bool = False

    def __post_init__(self) -> None:
        whole_number("rank", self.rank, least=None, error=RankError)
        whole_number("num_probes", self.num_probes)
        finite_number("rtol", self.rtol, least=0, expected="a relative error such as 1e-3")


@dataclass(frozen=True)
class Targets:
    """B samples, N tokens, r modes, always with the batch axis."""

    singular_values: Tensor  # [B, r], descending
    importance: Tensor  # [B, N], imp*_t = sqrt(sum_j sigma_j^2 |v_j^(t)|^2), `eq:imp_target`
    block_energy: Estimate  # [B, N], |J_:,t|_F^2
    kappa: Estimate  # [B], captured energy kappa_cap(r)
    total: Estimate  # [B], |J|_F^2, the sum of the block energies
    modes: Tensor | None  # [B, r, N, D]
    products: ProductCount  # per sample, of the one that took most
    method: str  # what was used: "exact", "krylov" or "paper"

    def __len__(self) -> int:
        return len(self.singular_values)


def targets_of(
    probe: Probe,
    features: Tensor,
    rank: int = 20,
    method: str = "auto",
    *,
    seed: int = 0,
    seeds: Sequence[int] | None = None,
    keep_modes: bool = False,
    precision: str = "float32",
    num_probes: int = 32,
    rtol: float = 1e-3,
    batch_size: int | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> Targets:
    """Compute the targets at features [B, N, D], as many samples at a time as memory holds (or ``batch_size``).

    "exact": min(M, N D) products tell everything. "krylov": block Krylov until the energies are accurate to ``rtol``
    (imp* then is, too: measured 3e-4 in norm, 1e-3 for the median token of DINOv2-S), then ``num_probes`` VJPs for the
    block norms of what the space does not know. "paper": Algorithm 2 literally. "auto": whichever of the first two
    takes less, judged by the products.
    ``seeds``: one per sample instead of ``seed`` and its place. Random numbers are drawn on the CPU in output space, so
    they are the same for every batch size and device.
    """
    callable_or_none("on_progress", on_progress)
    recipe = Recipe(rank, method, num_probes, rtol, precision, keep_modes)
    parts: list[Targets] = []
    for part in targets_in_batches(probe, features, recipe, seed=seed, seeds=seeds, batch_size=batch_size):
        parts.append(part)
        if on_progress is not None:
            on_progress(len(part))
    return join(parts)


def targets_in_batches(
    probe: Probe,
    features: Tensor,
    recipe: Recipe,
    *,
    seed: int = 0,
    seeds: Sequence[int] | None = None,
    batch_size: int | None = None,
    seconds: float = math.inf,
) -> Iterator[Targets]:
    """Compute what `targets_of` returns batch by batch, for callers that keep what is finished.

    After a batch that took more than ``seconds`` the next ones are smaller, down to one sample.
    """
    check_probe(probe)
    of_kind("features", features, Tensor, "what probe.features(images) returned, [B, N, D]", ShapeError)
    if len(features) == 0:
        raise ImageError("features: expected at least one sample, got an empty batch.")
    if seeds is not None and (not isinstance(seeds, Sized) or len(seeds) != len(features)):
        given = len(seeds) if isinstance(seeds, Sized) else shown(seeds)
        raise PullbackError(f"seeds: expected one per sample, {len(features)}, got {given}.")
    check_independence(probe, features)
    rows, inputs = output_size(probe, features), features[0].numel()
    method = choose_method(
        recipe.method, rows, inputs, recipe.rank, sampled=recipe.num_probes, itemsize=features.element_size()
    )
    chosen = replace(recipe, method=method)
    size = checked_batch_size(batch_size) or _samples_that_fit(chosen, rows, features)

    def work(part: Tensor, first: int) -> Targets:
        streams = Streams.from_seed(seed, len(part), "cpu", first)
        if seeds is not None:
            streams = Streams.from_seeds(seeds[first : first + len(part)])
        operator = JacobianOperator(probe, part, precision=chosen.precision)
        with finite_products(operator, streams, first):
            found = _targets(operator, part.shape[1:], chosen, streams)
        check_sensitive(found.total.value, first)
        return found

    return in_batches(work, features, size, seconds=seconds)


def join(parts: Sequence[Targets]) -> Targets:
    """Join the targets of several batches."""
    modes = [part.modes for part in parts if part.modes is not None]
    return Targets(
        singular_values=torch.cat([part.singular_values for part in parts]),
        importance=torch.cat([part.importance for part in parts]),
        block_energy=Estimate.join([part.block_energy for part in parts]),
        kappa=Estimate.join([part.kappa for part in parts]),
        total=Estimate.join([part.total for part in parts]),
        modes=torch.cat(modes) if modes else None,
        products=ProductCount.most([part.products for part in parts]),
        method=parts[0].method,
    )


def _targets(op: JacobianOperator, shape: torch.Size, recipe: Recipe, streams: Streams) -> Targets:
    spent = op.products
    found = leading_modes(
        op, recipe.rank, method=recipe.method, rtol=recipe.rtol, precision=recipe.precision, streams=streams
    )
    svd = found.svd
    if svd.column_energies is not None:
        norms = exact_block_norms(svd.column_energies, shape[0], round_off=op.round_off)
    else:  # deflated by what is known of the output space
        norms = block_norms(op, shape[0], num_probes=recipe.num_probes, known=found.known, streams=streams)
    modes = as_token_maps(svd.right, shape)
    kappa = capture_ratio(svd, norms.total, found.captured)
    return Targets(
        singular_values=svd.singular_values,
        importance=LowRankMetric(modes, svd.singular_values.square()).importance(),
        block_energy=norms.squared,
        kappa=Estimate(kappa.value[:, -1], kappa.se[:, -1]),
        total=norms.total,
        modes=modes.contiguous() if recipe.keep_modes else None,
        products=op.products - spent,
        method=recipe.method,
    )


def _samples_that_fit(recipe: Recipe, rows: int, features: Tensor) -> int:
    """Return how many samples to take at a time: each needs twice the dense J and the copy that joins its pieces, or
    twice a Krylov basis, its copies and the probes."""
    inputs = features[0].numel()
    krylov = 4 * default_block(recipe.rank) * USUAL_DEPTH + 3 * recipe.num_probes
    columns = 2 * min(rows, inputs) if recipe.method == "exact" else krylov
    return within_memory(2 * columns * max(rows, inputs) * features.element_size(), features.device, MAX_SAMPLES)
