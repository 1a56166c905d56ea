"""From images, in any form, to the items that a gallery compares: pixels of one size, features, projections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from pullback.backbones import AnyBackbone, load_any_backbone
from pullback.backbones.loading import Model
from pullback.checks import of_kind
from pullback.data.crops import read_crop
from pullback.data.images import PixelFormat, reason_of
from pullback.data.pictures import as_pixels
from pullback.data.sources import ImageItem, open_source
from pullback.errors import ImageError, ModelError, NumericsError, ShapeError, naming
from pullback.learning.distilled_metric import DistilledMetric, MetricItems
from pullback.probes import ProbeMap
from pullback.runs.provenance import weights_hash

BATCH = 64
"""Images whose features are computed together."""


class ItemReader:
    """Reads what a gallery takes, and refuses what it does not: ``manifest`` says which model, layer and size its items
    are of. The model is loaded when the first image comes."""

    def __init__(self, metric: DistilledMetric, manifest: Mapping[str, Any], device: torch.device) -> None:
        self.metric, self.manifest, self.device = metric, manifest, device
        self._backbone: AnyBackbone | None = None
        self._loading = Lock()  # images are read by several threads, and the first one wants the model

    def features(self, query: Any) -> Tensor:
        """Return the features of queries in any form."""
        if self._are_features(query):
            return self.checked("query", query)
        if in_memory(query):
            return self.features_of(self.pixels(query))
        with naming("query"):
            items = list(open_source(query))
        wanted = self.format()
        pixels = [_pixels_of(item, wanted) for item in items]
        return torch.cat([self.features_of(torch.stack(pixels[s : s + BATCH])) for s in range(0, len(pixels), BATCH)])

    def _are_features(self, query: Any) -> bool:
        """Whether this is meant as features [B, N, D], and not as one picture [3, H, W] or [H, W, 3]."""
        if not isinstance(query, Tensor) or query.ndim != 3 or not query.is_floating_point():
            return False
        fits = query.shape[2] == self.metric.config.dim or query.shape[1] == self.manifest["tokens"]
        return fits or 3 not in (query.shape[0], query.shape[2])

    def checked(self, argument: str, features: Any) -> Tensor:
        """Return features [B, N, D] as a plain tensor, or raise an error that names ``argument``."""
        of_kind(argument, features, Tensor, "features [B, N, D] as a tensor", ShapeError)
        plain, wanted = features.detach().as_subclass(Tensor), (self.manifest["tokens"], self.metric.config.dim)
        if plain.ndim != 3 or tuple(plain.shape[1:]) != wanted or not len(plain):
            raise ShapeError(
                f"{argument}: expected features [B, {wanted[0]}, {wanted[1]}] at layer {self.manifest['layer']} of "
                f"{self.manifest['model'] or 'the model of the metric'}, as all items of the gallery are of, got "
                f"{list(plain.shape)}. Use images of one size{_times(self.manifest['size'])}."
            )
        if not plain.is_floating_point():
            raise ShapeError(f"{argument}: expected floats, got {plain.dtype}.")
        bad = (~plain.isfinite()).flatten(1).any(1).nonzero().flatten().tolist()
        if bad:
            raise NumericsError(
                f"{argument}: expected finite numbers, got NaN or infinity in image {bad[0]} ({len(bad)} of "
                f"{len(plain)})."
            )
        return plain

    @torch.no_grad()
    def items(self, argument: str, features: Tensor) -> MetricItems:
        """Return what is stored of features: queries are rounded as items are."""
        parts = [self.metric(part.to(self.device).float()) for part in features.split(BATCH)]
        with naming(argument):
            return MetricItems.join([part.half() for part in parts])

    def pixels(self, pictures: Any) -> Tensor:
        """Return pictures in memory as the model takes them; tensors of another size than the gallery's are refused."""
        wanted = self.format()
        pixels = as_pixels(pictures, wanted)
        if tuple(pixels.shape[-2:]) != wanted.size:
            raise ImageError(
                "images: expected {}x{} pixels, as all items of the gallery have, got {}x{}. Pass PIL images or files, "
                "which are resized and cropped.".format(*wanted.size, *pixels.shape[-2:])
            )
        return pixels

    @torch.no_grad()
    def features_of(self, pixels: Tensor) -> Tensor:
        """Return the features of pixels [B, 3, H, W]."""
        layer = self.manifest["layer"]
        return self.checked("images", self.backbone().features(pixels.to(self.backbone().device), [layer])[layer])

    def format(self) -> PixelFormat:
        """Return the format of images: of the gallery's size, or where it has none of the model's own."""
        size = self.manifest["size"]
        return self.backbone().pixel_format(None if size is None else tuple(size))

    def backbone(self) -> AnyBackbone:
        """Return the model, which is loaded by the name that the metric knows unless one was passed."""
        with self._loading:
            if self._backbone is None and self.manifest["model"] is None:
                raise ModelError(
                    "backbone: the metric does not say what model it is for, so images cannot be read. Pass the model, "
                    "or features."
                )
            return self._backbone or self.take_backbone(self.manifest["model"])

    def take_backbone(self, given: ProbeMap | AnyBackbone | Model) -> AnyBackbone:
        """Use this model from now on, or raise an error if the metric was trained for another one."""
        if isinstance(given, ProbeMap):
            given = given.backbone
        if not isinstance(given, AnyBackbone):
            given = load_any_backbone(given, device="auto" if isinstance(given, torch.nn.Module) else self.device)
        if given.views:
            raise ModelError(f"backbone: {given.name} takes several views of a scene; galleries hold single images.")
        layer = self.manifest["layer"]
        if layer is None:
            raise ModelError(
                "backbone: the metric does not say which layer it is for. Pass features instead of images."
            )
        self.metric.check("backbone", family=given.family, layer=layer, weights=weights_hash(given.model))
        if given.dim != self.metric.config.dim:
            raise ModelError(
                f"backbone: expected features of width {self.metric.config.dim}, as the metric has, got {given.dim}."
            )
        self._backbone = given
        return given


def in_memory(images: Any) -> bool:
    """Whether these are pictures in memory, and not where to find some."""
    if isinstance(images, list | tuple):
        return bool(images) and in_memory(images[0])
    return isinstance(images, Tensor | np.ndarray | Image.Image | Mapping)


def _pixels_of(item: ImageItem, wanted: PixelFormat) -> Tensor:
    try:
        return read_crop(item.read(), None, wanted)
    except Exception as error:
        raise ImageError(f"query: {item.key}: {reason_of(error).removeprefix('data: ')}") from None


def _times(size: Sequence[int] | None) -> str:
    return "" if size is None else ", {}x{} pixels".format(*size)
