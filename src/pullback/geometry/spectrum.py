"""The leading singular values and modes of a probe map's Jacobian, for as many samples at a time as memory holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from pullback.errors import ImageError, PullbackError
from pullback.geometry.independence import check_independence
from pullback.operators import JacobianOperator, LowRankMetric, ProductCount, check_sensitive
from pullback.operators.execution import free_bytes, is_too_large
from pullback.randnla import Estimate, Sketch, Streams, sketch
from pullback.tokens import TokenLayout


@dataclass(frozen=True)
class Spectrum:
    """B samples, r modes, always with the batch axis."""

    singular_values: Tensor  # [B, r], descending
    modes: Tensor  # [B, r, N, D], orthonormal right singular vectors, a token map each
    kappa: Estimate  # [B, r], captured energy kappa_cap(1..r)
    total: Estimate  # [B], squared Frobenius norm of J
    effective_rank: Estimate | None  # [B], over the whole spectrum
    full: Tensor | None  # [B, min(M, N*D)], every singular value, where all of them are known
    method: str
    products: ProductCount  # per sample, of the one that took most
    seed: int
    token_layout: TokenLayout

    @property
    def rank(self) -> int:
        return self.singular_values.shape[1]

    def __len__(self) -> int:
        return len(self.singular_values)

    def metric(self, floor: float = 0.0) -> LowRankMetric:
        """Return the rank-r pullback metric eps I + sum_j sigma_j^2 v_j v_j^T."""
        return LowRankMetric(self.modes, self.singular_values.square(), floor)


def as_token_maps(columns: Tensor, shape: torch.Size) -> Tensor:
    """Turn flat columns [B, N*D, r] into token maps [B, r, N, D]."""
    return columns.mT.unflatten(-1, shape)


def spectrum(
    probe: Probe,
    images: Tensor,
    rank: int = 20,
    method: str = "auto",
    *,
    seed: int = 0,
    rtol: float | None = None,
    with_effective_rank: bool = False,
    power_iters: int = 2,
    sketch_width: int | None = None,
    rayleigh_ritz: bool = False,
    num_probes: int | None = None,
    precision: str = "float32",
    batch_size: int | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> Spectrum:
    """Compute the leading ``rank`` modes of J at these images [B, 3, H, W].

    ``method``: "auto" (the cheaper of exact and krylov), "exact", "krylov", or "paper" (Algorithm 2 literally, with
    ``power_iters`` and ``sketch_width``; with ``rayleigh_ritz`` its better twin). ``rtol`` asks for smaller error bars.
    """
    if len(images) == 0:
        raise ImageError("images: expected at least one image, got an empty batch.")
    features = probe.features(images)
    check_independence(probe, features)
    done: list[Sketch] = []
    for part in sketch_in_batches(
        probe,
        features,
        rank,
        seed=seed,
        precision=precision,
        batch_size=batch_size,
        method=method,
        rtol=rtol,
        with_effective_rank=with_effective_rank,
        power_iters=power_iters,
        sketch_width=sketch_width,
        rayleigh_ritz=rayleigh_ritz,
        num_probes=num_probes,
    ):
        done.append(part.sketch)
        if on_progress is not None:
            on_progress(len(part.sketch.singular_values))
    ranks = [s.effective_rank for s in done if s.effective_rank is not None]
    spectra = [s.spectrum for s in done if s.spectrum is not None]
    return Spectrum(
        singular_values=torch.cat([s.singular_values for s in done]),
        modes=torch.cat([as_token_maps(s.right, features.shape[1:]) for s in done]),
        kappa=Estimate.join([s.kappa for s in done]),
        total=Estimate.join([s.total for s in done]),
        effective_rank=Estimate.join(ranks) if ranks else None,
        full=torch.cat(spectra) if len(spectra) == len(done) else None,
        method=done[0].method,
        products=ProductCount.most([s.products for s in done]),
        seed=seed,
        token_layout=probe.token_layout(features),
    )


def token_importance(spectrum: Spectrum) -> Tensor:
    """Return the importance of each token, imp*_t = sqrt(sum_j sigma_j^2 |v_j^(t)|^2) (`eq:imp_target`): [B, N]."""
    return spectrum.metric().importance()


# On a CPU a few samples already fill the cores; on a GPU more of them hide the launches.
MAX_SAMPLES = {"cpu": 2, "cuda": 64}

_Result = TypeVar("_Result")


class Probe(Protocol):
    """What geometry needs of a probe map."""

    @property
    def name(self) -> str: ...

    @property
    def layer(self) -> Any: ...

    def features(self, images: Tensor) -> Tensor: ...

    def token_layout(self, features: Tensor) -> TokenLayout: ...

    def __call__(self, features: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Sketched:
    """The sketch of samples ``first``, ``first`` + 1, ..."""

    first: int
    sketch: Sketch


def output_size(probe: Probe, features: Tensor) -> int:
    """Return the number of rows of J, from one sample: M, or k with an output metric of rank k."""
    return JacobianOperator(probe, features[:1]).rows


def sketch_in_batches(
    probe: Probe,
    features: Tensor,
    rank: int,
    *,
    seed: int,
    precision: str = "float32",
    batch_size: int | None = None,
    **knobs: Any,
) -> Iterator[Sketched]:
    """Sketch all samples, halving the batch when memory runs out; what was finished before has then been handed over.

    Each sample has its own random stream, so results do not depend on the batch size (with ``rtol``, only within it:
    probes are added for a batch as a whole)."""
    size = checked_batch_size(batch_size) or samples_that_fit(probe, features, rank)

    def work(part: Tensor, first: int) -> Sketched:
        streams = Streams.from_seed(seed, len(part), part.device, first)
        return Sketched(first, _sketch(probe, part, first, rank, precision, streams, knobs))

    return in_batches(work, features, size)


def in_batches(work: Callable[[Tensor, int], _Result], features: Tensor, size: int) -> Iterator[_Result]:
    """Call work(part, first) on the samples first, first + 1, ... of each part, halving it when memory runs out.

    What was finished before has then been handed over, and is not done again.
    """
    first = 0
    while first < len(features):
        part = features[first : first + size]
        result = None
        try:
            result = work(part, first)
        except (RuntimeError, MemoryError) as error:
            if not is_too_large(error) or len(part) == 1:
                raise
        if result is None:  # only here, after the except clause, has its traceback let go of the tensors
            size = max(1, len(part) // 2)
            if features.device.type == "cuda":
                torch.cuda.empty_cache()
            continue
        yield result
        first += len(part)


def checked_batch_size(batch_size: int | None) -> int | None:
    if batch_size is not None and batch_size < 1:
        raise PullbackError(f"batch_size: expected at least 1, or None for as many as memory holds, got {batch_size}.")
    return batch_size


def _sketch(
    probe: Probe,
    part: Tensor,
    first: int,
    rank: int,
    precision: str,
    streams: Streams,
    knobs: dict[str, Any],
) -> Sketch:
    """Sketch one batch; in a function of its own, so that the operator is gone before the next is linearised."""
    operator = JacobianOperator(probe, part, precision=precision)
    with finite_products(operator, streams, first):
        result = sketch(operator, rank, streams=streams, **knobs)
    check_sensitive(result.total.value, first)
    return result


@contextmanager
def finite_products(operator: JacobianOperator, streams: Streams, first: int) -> Iterator[None]:
    """Raise, where eigh meets NaN, an error that names the samples ``first``, ``first`` + 1, ... that cause it."""
    try:
        yield
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        check_sensitive((operator @ streams.gaussian(operator.cols, 1, operator.dtype)).square().sum((1, 2)), first)
        raise


def samples_that_fit(probe: Probe, features: Tensor, rank: int) -> int:
    """Return how many samples to take at a time, by the memory of a dense J or a Krylov basis, whichever is smaller.

    The linearisation needs memory of the same order.
    """
    inputs = features[0].numel()
    columns = max(1, min(output_size(probe, features), inputs, 20 * rank))
    return within_memory(6 * columns * inputs * features.element_size(), features.device, MAX_SAMPLES)


def within_memory(bytes_per_sample: int, device: torch.device, most: Mapping[str, int]) -> int:
    """Return how many samples fill half of the free memory: at least 1, and at most so many on this kind of device."""
    return max(1, min(most.get(device.type, 4), int(0.5 * free_bytes(device) / bytes_per_sample)))
