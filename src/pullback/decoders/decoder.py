"""What reads the features: a named function of the tokens of one or several layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor, nn

from pullback.backbones import AnyBackbone, TokenMap
from pullback.checks import shown
from pullback.decoders.identity import check_version, identity_of
from pullback.errors import DecoderError, PullbackError, first_line
from pullback.operators.execution import is_too_large
from pullback.tokens import TokenLayout

# the taps [B, n, D] of each layer that is read, in the order of `layers`, and where their tokens sit -> [B, ...]
DecodeFunction = Callable[[Sequence[Tensor], TokenLayout], Tensor]


@dataclass(frozen=True)
class Decoder:
    """``layers`` it reads (block indices), after the backbone's final norm if ``normed``.

    ``rows``: it reads only the first so many tokens (1 for a class-token decoder), so the last block need not compute
    the others. ``linear``: the function is linear in the tokens of all its layers together, without a constant term, so
    its derivative is itself; nothing checks this.

    ``version``: what files know the function by, in place of a hash of its code (`identity`); a text that has to change
    whenever the output does. ``source``: what ``decode`` was made of, where that is not all there is to it.
    """

    name: str
    layers: tuple[int, ...]
    decode: DecodeFunction
    normed: bool = True
    rows: int | None = None
    linear: bool = False
    version: str | None = None
    source: object = field(default=None, repr=False, compare=False)
    bottleneck: ClassVar[bool] = False  # whether what it reads passes one first

    def __post_init__(self) -> None:
        if not isinstance(self.layers, tuple) or not self.layers:
            raise DecoderError(
                f"layers: expected a tuple of block indices, such as (11,), for decoder {self.name!r}, got "
                f"{self.layers!r}."
            )
        if not callable(self.decode):
            raise DecoderError(f"decode: expected a function of the taps and their layout, got {shown(self.decode)}.")
        check_version(self.version)

    def identity(self, model: nn.Module) -> str:
        """Return what files know it by: the layers that it reads, version or code, and parameters of its own.

        ``model`` is the backbone's module: its weights are no parameters of the decoder. Where something in reach of
        the code cannot be hashed, the error asks for a version.
        """
        reads = f"layers {' '.join(map(str, self.layers))}{'' if self.normed else ' before the norm'}"
        what = self.decode if self.source is None else self.source
        known = identity_of(what, argument="decoder", name=self.name, model=model, version=self.version)
        return f"{reads}, {known}"

    def latent(self, backbone: AnyBackbone, space: str) -> tuple[AnyBackbone, Decoder]:
        """Return the network that ends in the latent of this decoder, and the decoder that reads it there.

        Only decoders with a bottleneck have one (`pullback.learning.bottleneck`); ``space`` as in `latent_probe`.
        """
        raise DecoderError(
            f"layer: only decoders with a bottleneck have a latent, expected one such as {self.name}@FOLDER, got "
            f"{self.name!r}. `pullback train bottleneck` makes such a FOLDER."
        )

    def __repr__(self) -> str:
        reads = "all tokens" if self.rows is None else f"the first {self.rows} tokens" if self.rows > 1 else "token 0"
        norm = "after the norm" if self.normed else "before the norm"
        return f"Decoder({self.name!r}, reads {reads} of layers {list(self.layers)} {norm})"

    def read(self, tap: Tensor, norm: TokenMap) -> Tensor:
        """What it sees of a layer [B, N, D]: the first ``rows`` tokens, after ``norm`` if it is to be applied."""
        seen = tap[:, : self.rows]
        return norm(seen) if self.normed else seen

    def output(self, taps: Sequence[Tensor], layout: TokenLayout, norm: TokenMap) -> Tensor:
        """The task's output [B, ...] from the taps [B, N, D] of `layers`, in their order, before the final ``norm``.

        This is the only place where a norm and a decoder follow each other: ``norm`` is that of the backbone, or
        `backbones.unchanged` where the taps have passed it already.
        """
        seen = [self.read(tap, norm) for tap in taps]
        shapes = ", ".join(str(list(tap.shape)) for tap in seen)
        with explained(f"decoder: {self.name!r} failed on tokens {shapes} in {seen[0].dtype}", _WRAP):
            return self.decode(seen, layout)


_WRAP = (
    "A decoder gets the tokens [B, N, D] in the dtype of the model; a head that reads a map [B, D, h, w], such as a "
    "convolution, is wrapped: pb.PatchGrid(head)."
)


@contextmanager
def explained(what: str, advice: str = "") -> Iterator[None]:
    """Turn an error of a function that is not ours into one that names it; a lack of memory stays what it is."""
    try:
        yield
    except Exception as error:
        if isinstance(error, PullbackError) or is_too_large(error):
            raise
        reason = first_line(error).rstrip(".")
        raise DecoderError(f"{what}: {type(error).__name__}: {reason}. {advice}".strip()) from error
