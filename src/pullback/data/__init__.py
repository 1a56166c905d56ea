"""Pictures from files to tensors: single images, streams of many, random crops."""

from pullback.data.crops import Crop, random_crop, read_crop
from pullback.data.images import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    ImageBatch,
    PixelFormat,
    SkippedImage,
    find_images,
    iter_images,
    load_images,
    normalised,
    read_images,
)
from pullback.data.pictures import Pictures, as_pixels
from pullback.data.sources import Source, open_source

__all__ = [
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "Crop",
    "ImageBatch",
    "Pictures",
    "PixelFormat",
    "SkippedImage",
    "Source",
    "as_pixels",
    "find_images",
    "iter_images",
    "load_images",
    "normalised",
    "open_source",
    "random_crop",
    "read_crop",
    "read_images",
]
