"""What the table of wrong arguments (tests/test_bad_inputs.py) passes on: everything is small, and made once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

import pullback as pb
from helpers.families import images_for, model_of
from helpers.pictures import SIZE, small_probe, write_pictures
from helpers.vggt_models import tiny


class Shared:
    """A probe with its images and features, a folder of pictures, and what else the rows need."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.probe, self.images, self.model = small_probe(), images_for("dinov2", (2, 2)), model_of("dinov2")
        self.backbone = self.probe.backbone
        self.pixels = torch.full((1, 3, 28, 28), 7, dtype=torch.uint8)

    @cached_property
    def photos(self) -> Path:
        return write_pictures(self.folder / "photos", 3, broken=False)

    @cached_property
    def features(self) -> torch.Tensor:
        return self.probe.features(self.images)

    @cached_property
    def spectrum(self) -> pb.Spectrum:
        return pb.spectrum(self.probe, self.images, rank=2)

    @cached_property
    def store(self) -> pb.TargetStore:
        return pb.compute_targets(self.probe, self.photos, out=self.folder / "targets", rank=2, size=SIZE)

    @cached_property
    def several(self) -> pb.ProbeMap:
        return pb.multi_layer_probe(model_of("depth-v2"), "depth-2x2")

    @cached_property
    def vggt(self) -> pb.VGGT:
        return tiny()

    @cached_property
    def pruned(self) -> pb.PrunedModel:
        return pb.prune(self.model, "norm", ratio=0.5, stages=[1])

    @cached_property
    def text(self) -> Path:
        path = self.folder / "notes.txt"
        path.write_text("hello")
        return path

    def decoded(self, decoder: Any, **options: Any) -> pb.Spectrum:
        return pb.spectrum(pb.load_probe(self.model, decoder, 1), self.images, rank=1, **options)


Row = tuple[str, Callable[[Shared], Any], str]  # the mistake, the call that makes it, what the message must match
