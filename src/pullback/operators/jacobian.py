"""The Jacobian of a probe map as an operator: J @ V by forward mode, J.T @ W by reverse mode; J is never formed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from pullback.checks import of_kind, shown, whole_number
from pullback.errors import DecoderError, NumericsError, PullbackError, ShapeError
from pullback.operators.base import LinearOperator
from pullback.operators.execution import (
    CapturedFunction,
    apply_in_chunks,
    check_precision,
    matmul_precision,
    round_off_of,
    tangents_that_fit,
)
from pullback.operators.linearization import FunctionLinearization, Linearization

# On the CPU larger blocks only leave the cache; on a GPU they fill it.
MAX_CHUNK = {"cpu": 32, "cuda": 4096}
# Blocks with a larger working set keep the GPU busy by themselves.
CAPTURE_BYTES = 4 << 30


class JacobianOperator(LinearOperator):
    """The Jacobian J of ``probe`` at ``features`` [B, *shape]: rows M (flattened output), columns prod(shape).

    ``probe`` is any function [B, *shape] -> [B, ...] whose samples do not mix. One with a ``linearize`` method brings
    its own products; others are differentiated by `torch.func`. ``output`` [B, M] is the value at the features.

    ``precision``: "float32" (default), "tf32" or "bf16" (bf16 reaches only linearisations that support it).
    ``chunk_size``: tangents per pass; by default from free memory, and halved whenever memory runs out.
    ``capture``: replay products as CUDA graphs, which pays where launching the kernels costs more than running them:
    few images, late layers. By default a small block is recorded when its shape comes up for the third time, if the
    linearisation allows it (a linear decoder such as cls); True records at once, False never.
    """

    def __init__(
        self,
        probe: Callable[[Tensor], Tensor],
        features: Tensor,
        *,
        precision: str = "float32",
        chunk_size: int | None = None,
        capture: bool | None = None,
    ) -> None:
        check_precision(precision)
        if chunk_size is not None:
            whole_number("chunk_size", chunk_size)
        if not (hasattr(probe, "linearize") or callable(probe)):
            raise PullbackError(f"probe: expected a probe map or a function of features, got {shown(probe)}.")
        of_kind("features", features, Tensor, "a tensor [B, N, D] (the batch axis first)", ShapeError)
        if not features.is_floating_point():
            raise ShapeError(f"features: expected floating-point numbers, got {features.dtype}.")
        if features.ndim < 2:
            raise ShapeError(f"features: expected [B, N, D] (the batch axis first), got {list(features.shape)}.")
        if not torch.isfinite(features).all():
            raise NumericsError("features: expected finite numbers, got NaN or infinity. Check the images and weights.")
        self.precision = precision
        linearize = getattr(probe, "linearize", None)
        with matmul_precision("float32"):
            self.linearization: Linearization = (
                linearize(features) if linearize is not None else FunctionLinearization(probe, features)
            )
        if precision == "bf16":
            self.linearization = _to_bfloat16(self.linearization)
        self.output = self.linearization.output
        if not torch.isfinite(self.output).all():
            raise NumericsError("decoder: its output holds NaN or infinity at these features; J is undefined there.")
        batch, rows = self.output.shape
        cols = features[0].numel()
        super().__init__(batch, rows, cols, dtype=features.dtype, device=features.device)
        limit = MAX_CHUNK.get(self.device.type, 64)
        self.chunk_size = chunk_size or min(limit, tangents_that_fit(self.linearization.bytes_per_tangent, self.device))
        self._capture_after = _capture_after(capture, self.device, self.linearization)
        self._seen: Counter[tuple] = Counter()
        self._captured: dict[tuple, CapturedFunction] = {}

    @property
    def round_off(self) -> float:
        return round_off_of(self.dtype, self.precision)

    def _matmat(self, columns: Tensor) -> Tensor:
        shape = self.linearization.input_shape
        return self._apply("pushforward", columns.mT.unflatten(-1, shape)).mT

    def _rmatmat(self, columns: Tensor) -> Tensor:
        return self._apply("pullback", columns.mT).flatten(2).mT

    def _apply(self, product: str, stack: Tensor) -> Tensor:
        function = getattr(self.linearization, product)
        if self._capture_after is not None:
            function = self._replayed(product, function)
        with torch.no_grad(), matmul_precision(self.precision):
            out, self.chunk_size = apply_in_chunks(function, stack, self.chunk_size)
        return out

    def _replayed(self, product: str, function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Wrap a product so that small blocks of a shape that comes back are recorded and replayed."""

        def run(stack: Tensor) -> Tensor:
            key = (product, tuple(stack.shape))
            self._seen[key] += 1
            small = self.linearization.bytes_per_tangent * stack.shape[1] <= CAPTURE_BYTES or self._capture_after == 0
            if not small or self._seen[key] <= (self._capture_after or 0):
                return function(stack)
            if key not in self._captured:
                self._captured[key] = CapturedFunction(function, stack)
            return self._captured[key](stack)

        return run


def _capture_after(capture: bool | None, device: torch.device, linearization: Linearization) -> int | None:
    """Return how often a block of one shape runs before it is recorded; None: it never is."""
    if device.type != "cuda" or capture is False:
        return None
    if not getattr(linearization, "capturable", False):
        if capture:
            raise PullbackError("capture: only products of a probe with a linear decoder (cls, mean) can be recorded.")
        return None
    return 0 if capture else 2


def check_sensitive(squared_norm: Tensor, first: int = 0) -> None:
    """Refuse Jacobians that are zero or not finite, given their squared norms [B].

    A zero Jacobian means that the decoder is cut off from the features, never that the task is insensitive.

    ``first``: the number of the first of these samples, for the message.
    """
    if not torch.isfinite(squared_norm).all():
        raise NumericsError("J: its products hold NaN or infinity. Check the decoder and the features.")
    dead = [first + index for index in (squared_norm == 0).nonzero().flatten().tolist()]
    if dead:
        raise DecoderError(
            f"decoder: its output does not depend on the features (zero Jacobian, samples {dead[:5]}). Expected a "
            "differentiable path: look for .detach(), torch.no_grad(), argmax, a constant or a mean over the batch in "
            "the decoder, or a probe layer above every layer that the decoder reads."
        )


def _to_bfloat16(linearization: Linearization) -> Linearization:
    lower = getattr(linearization, "bfloat16", None)
    if lower is None:
        raise PullbackError(
            "precision: 'bf16' needs a probe with its own linearisation (a backbone and a decoder), got a plain "
            "function. Use 'tf32' or 'float32'."
        )
    return lower()
