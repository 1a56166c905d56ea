"""The leading singular values and modes of a probe map's Jacobian, for as many samples at a time as memory holds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor

from pullback.checks import callable_or_none, shown, whole_number
from pullback.data.pictures import Pictures
from pullback.errors import ImageError, PullbackError, RankError
from pullback.geometry.independence import check_independence
from pullback.operators import JacobianOperator, LowRankMetric, ProductCount, check_sensitive
from pullback.operators.execution import free_bytes, is_too_large
from pullback.randnla import Estimate, Sketch, Streams, sketch
from pullback.tokens import TokenLayout

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
    probe: str = ""  # the name of the probe map

    @property
    def rank(self) -> int:
        return self.singular_values.shape[1]

    def __len__(self) -> int:
        return len(self.singular_values)

    def metric(self, floor: float = 0.0) -> LowRankMetric:
        """Return the rank-r pullback metric eps I + sum_j sigma_j^2 v_j v_j^T."""
        return LowRankMetric(self.modes, self.singular_values.square(), floor)

    def plot(self) -> Figure:
        """Draw the energy of each direction, kappa, and the energy of each patch, as a matplotlib figure."""
        from pullback.geometry.overview import spectrum_overview

        return spectrum_overview(self).plot()

    def __repr__(self) -> str:
        from pullback.geometry.overview import spectrum_overview

        return f"Spectrum({spectrum_overview(self).line()})"

    def _repr_html_(self) -> str:
        from pullback.geometry.overview import spectrum_overview

        return spectrum_overview(self).html()


def as_token_maps(columns: Tensor, shape: torch.Size) -> Tensor:
    """Turn flat columns [B, N*D, r] into token maps [B, r, N, D]."""
    return columns.mT.unflatten(-1, shape)


def spectrum(
    probe: Probe,
    images: Pictures,
    rank: int = 20,
    method: str = "auto",
    *,
    normalized: bool = False,
    seed: int = 0,
    rtol: float | None = None,
    modes_rtol: float | None = None,
    with_effective_rank: bool = False,
    power_iters: int = 2,
    sketch_width: int | None = None,
    rayleigh_ritz: bool = False,
    num_probes: int | None = None,
    precision: str = "float32",
    batch_size: int | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> Spectrum:
    """Compute the leading ``rank`` modes of J at these images.

    ``images``: [B, 3, H, W], or pictures in any form that `ProbeMap.features` takes; ``normalized`` as there.
    ``method``: "auto" (the cheaper of exact and krylov), "exact", "krylov", or "paper" (Algorithm 2 literally, with
    ``power_iters`` and ``sketch_width``; with ``rayleigh_ritz`` its better twin). ``rtol`` asks for smaller error bars,
    ``modes_rtol`` for modes whose energies are at least this accurate, for instance 1e-4 (krylov).
    """
    whole_number("rank", rank, least=None, error=RankError)
    callable_or_none("on_progress", on_progress)
    features = features_of(probe, images, normalized)
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
        modes_rtol=modes_rtol,
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
        probe=probe.name,
    )


def token_importance(spectrum: Spectrum) -> Tensor:
    """Return the importance of each token, imp*_t = sqrt(sum_j sigma_j^2 |v_j^(t)|^2) (`eq:imp_target`): [B, N]."""
    if not isinstance(spectrum, Spectrum):
        raise PullbackError(
            f"spectrum: expected what pb.spectrum(probe, images) returned, got {shown(spectrum)}. A diagnosis has the "
            "importance of its tokens in .importance."
        )
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

    @property
    def device(self) -> torch.device: ...

    def features(self, images: Any, *, normalized: bool = ...) -> Tensor: ...

    def token_layout(self, features: Tensor) -> TokenLayout: ...

    def __call__(self, features: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Sketched:
    """The sketch of samples ``first``, ``first`` + 1, ..."""

    first: int
    sketch: Sketch


def features_of(probe: Probe, images: Pictures, normalized: bool = False) -> Tensor:
    """Compute the features of images at a probe; ``normalized`` as in `ProbeMap.features`."""
    check_probe(probe)
    features = probe.features(images, normalized=True) if normalized else probe.features(images)
    if len(features) == 0:
        raise ImageError("images: expected at least one image, got an empty batch.")
    return features


def check_probe(probe: Any) -> None:
    """Refuse what is no probe map, such as images or a model in its place."""
    if not callable(probe) or not hasattr(probe, "features") or not hasattr(probe, "token_layout"):
        raise PullbackError(
            f"probe: expected a probe map, such as pb.load_probe(model, decoder, layer), got {shown(probe)}. It is the "
            "first argument."
        )


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
    start: int = 0,
    **knobs: Any,
) -> Iterator[Sketched]:
    """Sketch all samples, halving the batch when memory runs out; what was finished before has then been handed over.

    Each sample has its own random stream, so results do not depend on the batch size (with ``rtol``, only within it:
    probes are added for a batch as a whole). The samples before ``start`` are left out."""
    size = checked_batch_size(batch_size) or samples_that_fit(probe, features, rank)

    def work(part: Tensor, first: int) -> Sketched:
        streams = Streams.from_seed(seed, len(part), part.device, first)
        return Sketched(first, _sketch(probe, part, first, rank, precision, streams, knobs))

    return in_batches(work, features, size, start)


def in_batches(
    work: Callable[[Tensor, int], _Result], features: Tensor, size: int, start: int = 0, seconds: float = math.inf
) -> Iterator[_Result]:
    """Call work(part, first) on the samples first, first + 1, ... of each part, halving it when memory runs out.

    What was finished before has then been handed over, and is not done again. The samples before ``start`` are left
    out. After a part that took more than ``seconds`` the next ones are smaller.
    """
    first = start
    while first < len(features):
        part = features[first : first + size]
        begun, result = time.perf_counter(), None
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
        took = time.perf_counter() - begun
        yield result
        first += len(part)
        if took > seconds:
            size = max(1, int(len(part) * seconds / took))


def checked_batch_size(batch_size: int | None) -> int | None:
    if batch_size is None:
        return None
    return whole_number("batch_size", batch_size, expected="at least 1, or None for as many as memory holds")


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
    inputs, rows = features[0].numel(), output_size(probe, features)
    columns = max(1, min(rows, inputs, 20 * rank))
    return within_memory(6 * columns * max(rows, inputs) * features.element_size(), features.device, MAX_SAMPLES)


def within_memory(bytes_per_sample: int, device: torch.device, most: Mapping[str, int]) -> int:
    """Return how many samples fill half of the free memory: at least 1, and at most so many on this kind of device."""
    return max(1, min(most.get(device.type, 4), int(0.5 * free_bytes(device) / bytes_per_sample)))
