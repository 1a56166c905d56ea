"""What a head or a metric network learns from: the geometry of J at some features, as numbers per sample and token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pullback.errors import ImageError, PullbackError
from pullback.geometry.batches import Probe, checked_batch_size, finite_products, in_batches, output_size
from pullback.geometry.block_norms import BlockNorms, block_norms, exact_block_norms
from pullback.geometry.spectrum import as_token_maps
from pullback.learning.exact_modes import exact_modes
from pullback.operators import JacobianOperator, LowRankMetric, ProductCount, check_sensitive
from pullback.operators.memory import free_bytes
from pullback.randnla import (
    Estimate,
    Streams,
    Svd,
    block_krylov,
    krylov_outputs,
    output_krylov,
    power_iteration,
    pulled_outputs,
)
from pullback.randnla.sketch import METHODS, capture_ratio
from pullback.randnla.svd import default_block
from pullback.randnla.trace import energy

MAX_SAMPLES = {"cpu": 4, "cuda": 64}
MAX_DENSE_BYTES = 2e9
"""Of the dense J of one sample. A constant, not a share of the memory: every machine must choose the same method."""
_USUAL_DEPTH = 8


@dataclass(frozen=True)
class Recipe:
    """How targets are computed; everything in here changes the numbers."""

    rank: int = 20
    method: str = "auto"
    num_probes: int = 32
    rtol: float = 1e-3
    precision: str = "float32"
    keep_modes: bool = False


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
    """Targets at features [B, N, D], as many samples at a time as memory holds (or ``batch_size``).

    "exact": min(M, N D) products tell everything. "krylov": block Krylov until the energies are accurate to ``rtol``
    (imp* then is, too: measured 3e-4 in norm, 1e-3 for the median token of DINOv2-S), then ``num_probes`` VJPs for the
    block norms of what the space does not know. "paper": Algorithm 2 literally. "auto": whichever of the first two
    takes less, judged by the products.
    ``seeds``: one per sample instead of ``seed`` and its place. Random numbers are drawn on the CPU in output space, so
    they are the same for every batch size and device.
    """
    if len(features) == 0:
        raise ImageError("features: expected at least one sample, got an empty batch.")
    if seeds is not None and len(seeds) != len(features):
        raise PullbackError(f"seeds: expected one per sample, {len(features)}, got {len(seeds)}.")
    rows, inputs = output_size(probe, features), features[0].numel()
    method = choose_method(method, rows, inputs, rank, num_probes=num_probes, itemsize=features.element_size())
    recipe = Recipe(rank, method, num_probes, rtol, precision, keep_modes)
    size = checked_batch_size(batch_size) or _samples_that_fit(recipe, rows, features)

    def work(part: Tensor, first: int) -> Targets:
        streams = Streams.from_seed(seed, len(part), "cpu", first)
        if seeds is not None:
            streams = Streams.from_seeds(seeds[first : first + len(part)])
        operator = JacobianOperator(probe, part, precision=recipe.precision)
        with finite_products(operator, streams, first):
            found = _targets(operator, part.shape[1:], recipe, streams)
        check_sensitive(found.total.value, first)
        return found

    parts: list[Targets] = []
    for part in in_batches(work, features, size):
        parts.append(part)
        if on_progress is not None:
            on_progress(len(part))
    return join(parts)


def choose_method(method: str, rows: int, cols: int, rank: int, *, num_probes: int = 32, itemsize: int = 4) -> str:
    """What "auto" means for a J of rows x cols: decided by sizes alone, so that all machines decide alike."""
    if method not in METHODS:
        raise PullbackError(f"method: expected one of {', '.join(METHODS)}, got {method!r}.")
    if method != "auto":
        return method
    cheaper = min(rows, cols) <= 2 * default_block(rank) * _USUAL_DEPTH + num_probes
    return "exact" if cheaper and rows * cols * itemsize <= MAX_DENSE_BYTES else "krylov"


def join(parts: Sequence[Targets]) -> Targets:
    """The targets of several batches as one."""

    def estimates(name: str) -> Estimate:
        values = [getattr(part, name) for part in parts]
        return Estimate(torch.cat([v.value for v in values]), torch.cat([v.se for v in values]))

    modes = [part.modes for part in parts if part.modes is not None]
    return Targets(
        singular_values=torch.cat([part.singular_values for part in parts]),
        importance=torch.cat([part.importance for part in parts]),
        block_energy=estimates("block_energy"),
        kappa=estimates("kappa"),
        total=estimates("total"),
        modes=torch.cat(modes) if modes else None,
        products=ProductCount(max(p.products.jvp for p in parts), max(p.products.vjp for p in parts)),
        method=parts[0].method,
    )


def _targets(op: JacobianOperator, shape: torch.Size, recipe: Recipe, streams: Streams) -> Targets:
    spent = op.products
    svd, norms, captured = _svd_and_norms(op, shape[0], recipe, streams)
    modes = as_token_maps(svd.right, shape)
    kappa = capture_ratio(svd, norms.total, captured)
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


def _svd_and_norms(
    op: JacobianOperator, tokens: int, recipe: Recipe, streams: Streams
) -> tuple[Svd, BlockNorms, Tensor | None]:
    """The leading modes, the block norms deflated by what they know of the output space, and the energy in there."""
    if recipe.method == "exact":
        svd = exact_modes(op, recipe.rank, precision=recipe.precision)
        assert svd.column_energies is not None
        return svd, exact_block_norms(svd.column_energies, tokens, round_off=op.round_off), None
    captured = None
    if recipe.method == "krylov" and op.rows <= op.cols:
        svd, known = output_krylov(op, recipe.rank, rtol=recipe.rtol, streams=streams)
        captured = known.pulled.square().sum((1, 2)).double()
    elif recipe.method == "krylov":
        svd = block_krylov(op, recipe.rank, rtol=recipe.rtol, streams=streams)
        known, captured = krylov_outputs(svd), energy(svd.deflation()[1])
    else:
        svd = power_iteration(op, recipe.rank, streams=streams)
        known = pulled_outputs(op, svd.deflation()[1])
    return svd, block_norms(op, tokens, num_probes=recipe.num_probes, known=known, streams=streams), captured


def _samples_that_fit(recipe: Recipe, rows: int, features: Tensor) -> int:
    """Twice the dense J and the copy that joins its pieces, or twice a Krylov basis, its copies and the probes."""
    inputs = features[0].numel()
    krylov = 4 * default_block(recipe.rank) * _USUAL_DEPTH + 3 * recipe.num_probes
    columns = 2 * min(rows, inputs) if recipe.method == "exact" else krylov
    bytes_per_sample = 2 * columns * inputs * features.element_size()
    limit = MAX_SAMPLES.get(features.device.type, 4)
    return max(1, min(limit, int(0.5 * free_bytes(features.device) / bytes_per_sample)))
