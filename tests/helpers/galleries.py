"""Small metrics with random weights, and features to fill galleries with."""

import torch
from torch import Tensor

import pullback as pb
from pullback.learning.distilled_metric import DistilledMetric
from pullback.learning.pretrained import Origin
from pullback.retrieval.gallery import Gallery
from pullback.runs.provenance import weights_hash

TOKENS, DIM, RANK = 10, 12, 4
SIZE = 56  # pixels of pictures for tiny-scenes


def random_features(count: int, seed: int = 0, tokens: int = TOKENS, dim: int = DIM) -> Tensor:
    """The first so many of 128: of another number torch would draw others."""
    return torch.randn(128, tokens, dim, generator=torch.Generator().manual_seed(seed))[:count]


def small_metric(seed: int = 0, rank: int = RANK) -> DistilledMetric:
    """A metric on features of no model in particular."""
    torch.manual_seed(seed)
    features = random_features(64, seed)
    return DistilledMetric(DIM, rank, width=8, heads=2).start_from(features).measure_constant([features]).eval()


def moody_metric() -> DistilledMetric:
    """A metric whose weights differ a lot from image to image, which candidates have a hard time with."""
    metric, features = small_metric(), random_features(64)
    with torch.no_grad():
        for parameter in metric.head.parameters():
            parameter.mul_(2)
        metric.level.copy_(metric.head(features).mean())
    return metric.measure_constant([features])


def metric_of_scenes(layer: int = 6) -> DistilledMetric:
    """A metric on features of tiny-scenes that knows what it is for."""
    probe = pb.load_probe("tiny-scenes", layer=layer, device="cpu")
    torch.manual_seed(0)
    features = probe.features(pb.normalised(pb.render([0, 1, 2], size=SIZE).rgb[:, 0])).as_subclass(Tensor)
    metric = DistilledMetric(probe.backbone.dim, RANK, width=8, heads=2).start_from(features)
    origin = Origin(
        family=probe.backbone.family,
        weights=weights_hash(probe.backbone.model),
        layer=layer,
        decoder="cls",
        resolutions=((SIZE, SIZE),),
    )
    return metric.measure_constant([features]).describe(origin=origin, model="tiny-scenes").eval()


def names(count: int, start: int = 0) -> list[str]:
    return [f"item-{number:03d}" for number in range(start, start + count)]


def filled(folder: object, count: int = 30, metric: DistilledMetric | None = None) -> Gallery:
    """A gallery of random features named item-000, item-001, ..."""
    gallery = Gallery.create(folder, metric or small_metric(), device="cpu")  # type: ignore[arg-type]
    gallery.add_features(names(count), random_features(count))
    return gallery
