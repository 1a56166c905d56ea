"""Tensors from disk."""

from pullback.data.images import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    ImageBatch,
    SkippedImage,
    find_images,
    iter_images,
    load_images,
    read_images,
)

__all__ = [
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "ImageBatch",
    "SkippedImage",
    "find_images",
    "iter_images",
    "load_images",
    "read_images",
]
