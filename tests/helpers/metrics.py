"""A metric of tiny-scenes that knows little, made in a second, and rendered scenes to search among."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

import pullback as pb
from pullback.experiments.demo import write_pictures
from pullback.learning.distilled_metric import DistilledMetric, MetricConfig
from pullback.learning.train_head import origin_of
from pullback.scenes.render import normalised, render

SIDE, LAYER = 56, 8


def scenes(folder: Path, seeds: range) -> Path:
    """scene-00.png, scene-01.png, ..."""
    write_pictures(render(seeds, size=SIDE), folder)
    return folder


def untrained_metric(seed: int = 0, *, layer: int = LAYER) -> DistilledMetric:
    """Where a training starts, with its constant metric measured."""
    probe = pb.load_probe("tiny-scenes", "depth", layer, device="cpu")
    features = probe.features(normalised(render(range(100, 108), size=SIDE).rgb[:, 0]))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        metric = DistilledMetric.from_config(MetricConfig(probe.backbone.dim, 4, 16, 2, reference="relative_l1"))
    origin = replace(origin_of(probe, 0, (SIDE, SIDE)), rank=None)
    metric.start_from(features).measure_constant([features])
    return metric.describe(origin=origin, model="tiny-scenes").eval()
