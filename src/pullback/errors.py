"""Errors that users can act on: each names the argument, what was expected, what came, and the fix."""


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
