"""Errors that users can act on: each names the argument, what was expected, what came, and the fix."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

HEAD = re.compile(r"[a-z_]\w*(?:, [a-z_]\w*)*(?==|:)")
"""The arguments that a message begins with: "path" of "path='x': no such file", "width, heads" of "width, heads: …"."""


class PullbackError(ValueError):
    """Base of every error this package raises on purpose."""


class ShapeError(PullbackError):
    """A tensor or an image has the wrong shape."""


class ModelError(PullbackError):
    """A model, its weights or its configuration cannot be used."""


class DecoderError(PullbackError):
    """A decoder is unknown, or its output has no usable derivative."""


class ImageError(PullbackError):
    """No image could be read, or the image size does not fit the model."""


class RankError(PullbackError):
    """The requested rank is larger than the operator allows."""


class NumericsError(PullbackError):
    """NaN or infinity appeared in a feature map, an output or a product."""


class FileError(PullbackError, OSError):
    """A file cannot be written, as on a full disk, or is damaged: nothing that another argument would mend."""


class DamagedModelError(ModelError, FileError):
    """A file of a model is there, but broken."""


@contextmanager
def naming(argument: str, instead_of: str | None = None) -> Iterator[None]:
    """Let errors from within begin with ``argument``, whatever the function that raised them calls it; with
    ``instead_of``, those alone that begin with this name."""
    try:
        yield
    except PullbackError as error:
        head = HEAD.match(str(error))
        if head and instead_of in (None, head[0]):
            error.args = (argument + str(error)[head.end() :],)
        else:
            error.args = (str(error),)
        raise


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its class where it has none: the rest is for its own author."""
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


def counted(count: int, unit: str, plural: str = "s") -> str:
    """Write "1 image", "2 images", "1,200 rows"; "3 classes" with ``plural`` = "es"."""
    return f"{count:,} {unit}{'' if count == 1 else plural}"
