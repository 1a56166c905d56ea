"""A small folder of pictures, a small model and small settings for the tests of targets."""

from __future__ import annotations

import io
import os
import signal
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import Image

import pullback as pb
from pullback.probes import ProbeMap

SIZE = (28, 42)  # 2 x 3 patches
SMALL = {"rank": 3, "size": SIZE, "num_probes": 8}


@lru_cache
def small_probe(name: str = "dinov2", layer: int = 1) -> ProbeMap:
    from helpers.families import model_of  # brings transformers, which takes seconds

    return pb.load_probe(model_of(name), "cls", layer)


def encoded(seed: int, height: int = 50, width: int = 70) -> bytes:
    """Smooth noise, so that resizing leaves something to see."""
    small = np.random.default_rng(seed).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC).save(file, "PNG")
    return file.getvalue()


def write_pictures(folder: Path, count: int = 7, broken: bool = True) -> Path:
    """00.png, 01.png, ...; with ``broken`` also a file between them that is no picture."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        (folder / f"{number:02d}.png").write_bytes(encoded(number))
    if broken:
        (folder / "02-broken.png").write_bytes(b"not a picture")
    return folder


@dataclass(frozen=True)
class DeadlyItem:
    """A picture that kills the process which reads it, as often as ``times`` says; the marker counts."""

    key: str
    path: str
    marker: str
    times: int = 1

    def read(self) -> bytes:
        with open(self.marker, "ab") as file:
            if file.tell() < self.times:
                file.write(b"x")
                file.flush()
                os.kill(os.getpid(), signal.SIGKILL)
        return Path(self.path).read_bytes()
