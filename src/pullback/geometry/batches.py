"""Samples through the sketch, as many at a time as memory holds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from pullback.layout import TokenLayout
from pullback.operators import JacobianOperator, check_sensitive
from pullback.operators.memory import free_bytes, is_out_of_memory
from pullback.randnla import Sketch, Streams, sketch

# On a CPU a few samples already fill the cores; on a GPU more of them hide the launches.
MAX_SAMPLES = {"cpu": 2, "cuda": 64}


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
    """A batch of samples ``first``, ``first`` + 1, ... with its operator and sketch."""

    first: int
    operator: JacobianOperator
    sketch: Sketch
    seconds: float


def output_size(probe: Probe, features: Tensor) -> int:
    """M, from one sample."""
    with torch.no_grad():
        return probe(features[:1])[0].numel()


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
    """Sketch all samples, halving the batch when memory runs out. Results do not depend on the batch size: each sample
    has its own random stream, and what was finished before memory ran out has already been handed over."""
    size = batch_size or samples_that_fit(probe, features, rank)
    share = 0.3 * free_bytes(features.device)
    first = 0
    while first < len(features):
        part = features[first : first + size]
        begun = time.perf_counter()
        try:
            operator = JacobianOperator(probe, part, precision=precision)
            streams = Streams.from_seed(seed, len(part), part.device, first)
            # 'auto' must choose alike for every batch size, so the limit is per sample times samples
            result = sketch(operator, rank, streams=streams, max_dense_bytes=share, **knobs)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or len(part) == 1:
                raise
            size = max(1, len(part) // 2)
            if features.device.type == "cuda":
                torch.cuda.empty_cache()
            continue
        check_sensitive(result.total.value)
        yield Sketched(first, operator, result, time.perf_counter() - begun)
        first += len(part)


def samples_that_fit(probe: Probe, features: Tensor, rank: int) -> int:
    """From the memory of a dense J or a Krylov basis, whichever is smaller; the linearisation is of the same order."""
    inputs = features[0].numel()
    columns = min(output_size(probe, features), inputs, 20 * rank)
    bytes_per_sample = 6 * columns * inputs * features.element_size()
    limit = MAX_SAMPLES.get(features.device.type, 4)
    return max(1, min(limit, int(0.5 * free_bytes(features.device) / bytes_per_sample)))
