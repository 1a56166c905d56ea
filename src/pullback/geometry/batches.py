"""Samples through a computation, as many at a time as memory holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from pullback.errors import PullbackError
from pullback.layout import TokenLayout
from pullback.operators import JacobianOperator, check_sensitive
from pullback.operators.memory import free_bytes, is_too_large
from pullback.randnla import Sketch, Streams, sketch

# On a CPU a few samples already fill the cores; on a GPU more of them hide the launches.
MAX_SAMPLES = {"cpu": 2, "cuda": 64}
DENSE_SHARE = 0.15
"""The part of free memory that the dense J of one sample may take."""

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
    """Rows of J, from one sample: M, or k with an output metric of rank k."""
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
    dense_share = DENSE_SHARE * free_bytes(features.device)

    def work(part: Tensor, first: int) -> Sketched:
        streams = Streams.from_seed(seed, len(part), part.device, first)
        # 'auto' must choose alike for every batch size, so the limit grows with the batch
        limit = dense_share * len(part)
        return Sketched(first, _sketch(probe, part, first, rank, precision, limit, streams, knobs))

    return in_batches(work, features, size)


def in_batches(work: Callable[[Tensor, int], _Result], features: Tensor, size: int) -> Iterator[_Result]:
    """work(part, first) for the samples first, first + 1, ... of each part, halving it when memory runs out.

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
    limit: float,
    streams: Streams,
    knobs: dict[str, Any],
) -> Sketch:
    """A function of its own, so that the operator is gone before the next batch is linearised."""
    operator = JacobianOperator(probe, part, precision=precision)
    with finite_products(operator, streams, first):
        result = sketch(operator, rank, max_dense_bytes=limit, streams=streams, **knobs)
    check_sensitive(result.total.value, first)
    return result


@contextmanager
def finite_products(operator: JacobianOperator, streams: Streams, first: int) -> Iterator[None]:
    """What eigh says to NaN, said of the samples ``first``, ``first`` + 1, ... that cause it."""
    try:
        yield
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        check_sensitive((operator @ streams.gaussian(operator.cols, 1, operator.dtype)).square().sum((1, 2)), first)
        raise


def samples_that_fit(probe: Probe, features: Tensor, rank: int) -> int:
    """From the memory of a dense J or a Krylov basis, whichever is smaller; the linearisation is of the same order."""
    inputs = features[0].numel()
    columns = max(1, min(output_size(probe, features), inputs, 20 * rank))
    bytes_per_sample = 6 * columns * inputs * features.element_size()
    limit = MAX_SAMPLES.get(features.device.type, 4)
    return max(1, min(limit, int(0.5 * free_bytes(features.device) / bytes_per_sample)))
