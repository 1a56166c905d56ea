"""Kill processes at random moments while they add images to a gallery, and count what is lost and what is there twice.

    python tools/crash_gallery.py [--kills 100] [--images 200] [--batch 4] [--out FILE]

A process adds a folder of pictures, which takes a while, and says after each batch how many it is done with. It is
killed (SIGKILL) after a random part of that time, another one goes on, and so on until one gets through; then comes the
next gallery, until there were so many kills. After each kill

    lost   items that a process was done with, or that were there after an earlier kill, and are not there now
    twice  items with a key or a content that another item has
    wrong  items that are not found at distance 0 by what is stored of them, or whose distance from the same item of an
           uninterrupted gallery is more than rounding

are counted, and must all be 0; the exit code is 1 if not. Bytes that do not fit their checksums are an error. Processes
are forks of this one, which has imported everything, so that kills hit work and not imports.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

import pullback as pb
from pullback.experiments.demo import write_pictures
from pullback.learning.distilled_metric import DistilledMetric
from pullback.learning.pretrained import Origin
from pullback.retrieval import gallery as galleries
from pullback.retrieval.gallery import Gallery
from pullback.retrieval.search import distances_to
from pullback.runs.files import write_json
from pullback.runs.progress import Progress
from pullback.runs.provenance import provenance, weights_hash
from pullback.scenes.render import render

SIZE, LAYER = 56, 6
CPU = torch.device("cpu")


@dataclass
class Outcome:
    """What became of all galleries."""

    seconds: float  # of adding everything without a kill
    kills: int = 0
    kills_before_the_first_item: int = 0
    kills_between: int = 0
    galleries: int = 0
    lost: int = 0
    twice: int = 0
    wrong: int = 0
    messages: list[str] = field(default_factory=list)

    def count(self, name: str, keys: Sequence[str] | set[str]) -> None:
        """Count what is not as it should be."""
        if keys:
            setattr(self, name, getattr(self, name) + len(keys))
            self.messages.append(f"{name} after kill {self.kills}: {sorted(keys)[:5]}")


class Told(Progress):
    """Writes into a pipe how many images are done with."""

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe

    def advance(self, count: int) -> None:
        os.write(self.pipe, bytes([count]))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--batch", type=int, default=4, help="images that are committed together, at most 255")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, help="folder for everything, by default a temporary one")
    parser.add_argument("--out", type=Path, help="file for the results (JSON)")
    given = parser.parse_args(arguments)
    galleries._BATCH = given.batch
    torch.set_num_threads(1)  # forks of a process whose threads have worked do not end well
    with tempfile.TemporaryDirectory() as temporary:
        outcome = crash(given.work or Path(temporary), given.kills, given.images, random.Random(given.seed))
    print(
        f"{outcome.kills} kills ({outcome.kills_between} between the first and the last item) of {outcome.galleries} "
        f"galleries of {given.images} images: {outcome.lost} lost, {outcome.twice} twice, {outcome.wrong} wrong"
    )
    print("\n".join(outcome.messages[:20]), end="")
    if given.out is not None:
        settings = {name: getattr(given, name) for name in ("images", "batch", "seed")}
        write_json(given.out, provenance(CPU) | settings | asdict(outcome))
    return 1 if outcome.lost or outcome.twice or outcome.wrong else 0


def crash(work: Path, kills: int, images: int, draw: random.Random) -> Outcome:
    """Kill processes that fill galleries, and look after each kill."""
    photos = work / "photos"
    write_pictures(render(range(images), size=64), photos)
    metric = scene_metric()
    whole, begun = Gallery.create(work / "whole", metric, device="cpu"), time.perf_counter()
    whole.add(photos)
    outcome = Outcome(time.perf_counter() - begun)
    while outcome.kills < kills:
        folder = work / f"killed-{outcome.galleries}"
        Gallery.create(folder, metric, device="cpu")
        seen: list[str] = []
        while len(seen) < images:
            moment = draw.uniform(0, outcome.seconds / 2) if outcome.kills < kills else float("inf")
            done, was_killed = killed(folder, photos, moment)
            outcome.kills += was_killed
            seen = looked(folder, whole, seen, done, outcome)
            if was_killed:
                outcome.kills_before_the_first_item += not seen
                outcome.kills_between += 0 < len(seen) < images
        outcome.galleries += 1
    return outcome


def scene_metric() -> DistilledMetric:
    """A metric with random weights, of which alone it matters that it gives numbers."""
    probe = pb.load_probe("tiny-scenes", layer=LAYER, device="cpu")
    torch.manual_seed(0)
    features = probe.features(pb.normalised(render(range(4), size=SIZE).rgb[:, 0])).as_subclass(torch.Tensor)
    metric = DistilledMetric(probe.backbone.dim, 8, width=16, heads=2).start_from(features)
    origin = Origin(probe.backbone.family, weights_hash(probe.backbone.model), LAYER, resolutions=((SIZE, SIZE),))
    return metric.measure_constant([features]).describe(origin=origin, model="tiny-scenes").eval()


def killed(folder: Path, photos: Path, moment: float) -> tuple[int, bool]:
    """Add the photos in a fork that is killed after so many seconds; return how many it said it was done with, and
    whether it was killed before its end."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if not child:
        code = 1
        try:
            os.close(reading)
            Gallery.open(folder, device="cpu").add(photos, progress=Told(writing))
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    begun = time.perf_counter()
    ended, status = 0, 0
    while not ended and time.perf_counter() - begun < moment:
        ended, status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.001)
    if not ended:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    elif os.waitstatus_to_exitcode(status):
        raise SystemExit(f"adding to {folder} failed by itself")
    with open(reading, "rb") as pipe:
        return sum(pipe.read()), not ended


def looked(folder: Path, whole: Gallery, before: list[str], done: int, outcome: Outcome) -> list[str]:
    """Open the gallery and count what is not as it should be; return its keys."""
    gallery = Gallery.open(folder, device="cpu")
    keys = [item.key for item in gallery]
    contents = [item.sha256 for item in gallery]
    order = [item.key for item in whole]
    outcome.count("lost", (set(before) | set(order[:done])) - set(keys))
    outcome.count("twice", [key for key in set(keys) if keys.count(key) > 1])
    outcome.count("twice", [content for content in set(contents) if contents.count(content) > 1])
    gallery.verify()  # which raises an error
    if keys:
        rows = torch.arange(len(keys))
        same = whole.index.items(torch.tensor([order.index(key) for key in keys]))
        found = gallery.index.exact(gallery.index.items(rows), 1)
        outcome.count("wrong", [key for key, own in zip(keys, found.distances[:, 0].tolist(), strict=True) if own])
        apart = torch.cat([distances_to(same, block.columns(), CPU) for block in gallery.index.blocks], 1)
        limit = 1e-2 * apart.median()
        outcome.count("wrong", [key for key, far in zip(keys, (apart.diag() > limit).tolist(), strict=True) if far])
    return keys


if __name__ == "__main__":
    sys.exit(main())
