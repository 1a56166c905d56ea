"""Whether a probe map treats the samples of a batch one by one, checked before long work.

Everything here takes J of a batch to be one matrix per sample. A mean over the batch or batch norm in train mode breaks
that, and every number would depend on which samples were computed together.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from pullback.decoders import factor_at
from pullback.errors import DecoderError
from pullback.operators.execution import matmul_precision, round_off_of
from pullback.operators.linearization import draws_random_numbers

LARGEST = 0.05
"""Difference between alone and in a batch, relative to the output, that is never taken for round-off."""
_CHECKED: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


@torch.no_grad()
def check_independence(probe: Any, features: Tensor) -> None:
    """Compare the output of the first sample of features [B, N, D] alone and beside another one, once for each probe.

    The other one is the same sample, moved about as far as its tokens differ. Outputs that are no tensors, or not
    finite, are left to `JacobianOperator`, which says what is wrong with them.
    """
    if _CHECKED.get(id(probe)) is probe:
        return
    pair = _with_another(features)
    with matmul_precision("float32"):
        alone, both = probe(pair[:1]), probe(pair)
        if not _is_output(alone, 1):
            return
        if not isinstance(both, Tensor) or both.shape != (2, *alone.shape[1:]):
            found = list(both.shape) if isinstance(both, Tensor) else type(both).__name__
            raise DecoderError(f"decoder: expected an output {[2, *alone.shape[1:]]} for two samples, got {found}.")
        try:
            _compare("decoder", alone, both, features.dtype)
        except DecoderError:
            if not torch.equal(probe(pair[:1]), alone):
                raise draws_random_numbers() from None
            raise
        metric = getattr(probe, "output_metric", None)
        if callable(metric):
            factor, factors = (factor_at(metric, output.flatten(1)) for output in (alone, both))
            _compare("output_metric", factor, factors, features.dtype)
    _remember(probe)


def _with_another(features: Tensor) -> Tensor:
    """Return the first sample and a neighbour of it, [2, N, D]."""
    pair = features[[0, 0]]
    plain = pair[1].as_subclass(Tensor)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(plain.shape[0], 1, generator=generator) * torch.randn(plain.shape[-1], generator=generator)
    moved = (0.5 * plain.std(0, correction=0) + 0.1 * plain.abs()) * noise.to(plain)
    return pair + torch.stack([torch.zeros_like(moved), moved])


def _is_output(output: object, samples: int) -> bool:
    return (
        isinstance(output, Tensor)
        and output.ndim > 0
        and len(output) == samples
        and output.is_floating_point()
        and bool(output.isfinite().all())
    )


def _compare(argument: str, alone: Tensor, both: Tensor, dtype: torch.dtype) -> None:
    own, beside = alone[0].double(), both[0].double()
    error = float((beside - own).norm() / own.norm().clamp_min(1e-300))
    if not error <= min(LARGEST, 100 * round_off_of(dtype)):
        raise DecoderError(
            f"{argument}: what it gives for a sample must not depend on the other samples of the batch, but alone and "
            f"beside another one it differs by {error:.1e}, relative. Look for a mean or a norm over the first axis, "
            "and for batch norm in train mode (call .eval())."
        )


def _remember(probe: Any) -> None:
    try:
        _CHECKED[id(probe)] = probe
    except TypeError:  # no weak references to it: it is checked again next time
        return
