"""What a Jacobian operator needs of a function: its value at a point and its two derivative products.

`FunctionLinearization` serves any PyTorch function through `torch.func`. Functions that know their own structure (a
probe map that runs transformer blocks) bring a faster `Linearization` of their own by having a ``linearize`` method.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from pullback.errors import DecoderError


class Linearization(Protocol):
    """A function of B independent samples, linearised at a point [B, *input_shape]."""

    output: Tensor  # [B, M], the value at the point
    input_shape: tuple[int, ...]
    bytes_per_tangent: int  # estimated working memory of one tangent, all samples together

    def pushforward(self, tangents: Tensor) -> Tensor:
        """[B, K, *input_shape] -> [B, K, M]."""
        ...

    def pullback(self, cotangents: Tensor) -> Tensor:
        """[B, K, M] -> [B, K, *input_shape]."""
        ...


@contextmanager
def differentiable_attention() -> Iterator[None]:
    """Use the attention backend that has forward mode and vmap, which the fused ones lack; restored on exit."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


def draws_random_numbers() -> DecoderError:
    return DecoderError(
        "decoder: it draws random numbers, as dropout does, so its output is another at every call and has no "
        "Jacobian. Leave them out: module.eval(), or F.dropout(x, training=False)."
    )


class Derivative:
    """The value and both derivative products, at a point, of a function of one or several tensors [B, ...]."""

    def __init__(self, function: Callable[..., Tensor], *point: Tensor) -> None:
        self.function = lambda *x: flat_output(function(*x), len(x[0]))
        self._point = tuple(part.detach() for part in point)
        drawn = _random_state(self._point[0].device)
        with differentiable_attention(), torch.enable_grad():
            output, self._vjp = torch.func.vjp(self._watched, *self._point)[:2]
        if not torch.equal(_random_state(self._point[0].device), drawn):
            raise draws_random_numbers()
        self.output = output.detach()  # [B, M]

    def _watched(self, *x: Tensor) -> Tensor:
        """Call the function and note whether its output depends on the input.

        Reverse mode obeys a torch.no_grad() inside the function, forward mode does not; this makes the two agree.
        """
        output = self.function(*x)
        self._connected = output.requires_grad
        return output

    def jvp(self, *tangents: Tensor) -> Tensor:
        """[B, K, ...] for each tensor -> [B, K, M]."""
        if not self._connected:
            return self.output.new_zeros(len(self.output), tangents[0].shape[1], self.output.shape[1])

        def one(*tangent: Tensor) -> tuple[Tensor]:
            return (torch.func.jvp(self.function, self._point, tangent)[1],)

        return for_each_tangent(one, *tangents)[0]

    def vjp(self, cotangents: Tensor) -> tuple[Tensor, ...]:
        """[B, K, M] -> [B, K, ...] for each tensor."""
        return for_each_tangent(self._vjp, cotangents)


def _random_state(device: torch.device) -> Tensor:
    """Return the state of torch's own generator, which changes with every number that is drawn from it."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


class FunctionLinearization:
    """The linearisation of any function [B, *input_shape] -> [B, ...] whose samples do not mix, by `torch.func`."""

    def __init__(self, function: Callable[[Tensor], Tensor], point: Tensor) -> None:
        self.input_shape = tuple(point.shape[1:])
        self._derivative = Derivative(function, point)
        self.output = self._derivative.output
        # unknown inside: allow for a few dozen intermediate copies of input and output
        self.bytes_per_tangent = 32 * (point.numel() + self.output.numel()) * point.element_size()

    def pushforward(self, tangents: Tensor) -> Tensor:
        return self._derivative.jvp(tangents)

    def pullback(self, cotangents: Tensor) -> Tensor:
        return self._derivative.vjp(cotangents)[0]


def for_each_tangent(product: Callable[..., tuple[Tensor, ...]], *stacks: Tensor) -> tuple[Tensor, ...]:
    """Apply ``product`` along axis 1 of every stack [B, K, ...], with differentiable attention; K stays axis 1.

    (vmap itself can put the axis of an output that does not depend on its input, a zero derivative, only in front.)
    """
    # torch 2.11 cannot batch forward mode in inference mode, nor over tensors that were made in it
    with differentiable_attention(), torch.inference_mode(False), torch.no_grad():
        stacks = tuple(stack.clone() if stack.is_inference() else stack for stack in stacks)
        out = torch.func.vmap(product, in_dims=1, out_dims=0, randomness="error")(*stacks)
    return tuple(part.movedim(0, 1) for part in out)


def flat_output(output: Tensor, batch: int) -> Tensor:
    """Flatten a decoder's output to [B, M], or raise an error if it is not one floating-point tensor [B, ...]."""
    if not isinstance(output, Tensor):
        raise DecoderError(
            f"decoder: expected it to return one tensor [B, ...], got {type(output).__name__}. "
            "Wrap it in a function that picks the tensor."
        )
    if output.ndim == 0 or output.shape[0] != batch:
        raise DecoderError(
            f"decoder: expected an output with the batch axis first, [{batch}, ...], got {list(output.shape)}."
        )
    if not output.is_floating_point():
        raise DecoderError(
            f"decoder: expected a floating-point output, got {output.dtype}. Labels and indices have no derivative: "
            "use the scores from which they are taken."
        )
    return output.flatten(1) if output.ndim > 1 else output[:, None]
