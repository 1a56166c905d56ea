"""Images to tune on, read once for any number of tunings.

They are divided into those that are trained on and those that judge. Several pruned models of one original, tuned on
the same images with the same seed, see the very same crops in every step: what the unpruned model says of these can be
remembered, so that only the first of the tunings runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from pullback.backbones import Backbone
from pullback.checks import finite_number
from pullback.data.images import ImageSource
from pullback.data.sources import Source, open_source
from pullback.errors import ImageError, PullbackError, naming
from pullback.learning.train_head import ImageRow, check_held_out, hash_of, pictures_to_vary, readable_rows
from pullback.runs.progress import Progress
from pullback.runs.provenance import weights_hash

_BATCH = 32  # of images that judge
_Answer = TypeVar("_Answer")


class TuningImages(Generic[_Answer]):
    """Images that train and judge, for one model.

    ``remember``: keep what the unpruned model says of the crops of every step, where the model is. For embeddings that
    is little: 700 steps of 128 images take 138 MB for a ViT-S.
    """

    def __init__(
        self,
        original: Backbone,
        images: ImageSource | Source,
        *,
        held_out: ImageSource | Source | float = 0.1,
        size: int | tuple[int, int] | None = None,
        limit: int | None = None,
        remember: bool = False,
    ) -> None:
        """Find the images that can be read. The arguments are those of `pb.tune`."""
        self.original, self.wanted = original, original.pixel_format(size)
        original.check_size(size)
        if self.wanted.size[0] != self.wanted.size[1]:
            height, width = self.wanted.size
            raise PullbackError(
                f"size: expected a square, since images are varied by square crops, got {height}x{width}."
            )
        with naming("images"):
            source = open_source(images)
        with naming("images", "source"):
            rows = readable_rows(source, self.wanted, limit)
        self.shared = 0
        """So many of the images that judge are also trained on."""
        if isinstance(held_out, (int, float)):
            self.train, self.judges = split_rows(rows, held_out)
        else:
            with naming("held_out"):
                self.train, self.judges = rows, readable_rows(open_source(held_out), self.wanted)
            known = {str(row.sha256): row.item.key for row in self.judges}
            self.shared = check_held_out(known, [row.sha256 for row in self.train])
        self._weights = weights_hash(original.model)
        self._pictures: Tensor | None = None
        self._judging: tuple[Tensor, ...] | None = None
        self._answers: dict[Hashable, _Answer] | None = {} if remember else None

    def check(self, original: Backbone, batch: int) -> None:
        """Raise an error unless these images are for this model, and enough for a batch."""
        if weights_hash(original.model) != self._weights or original.device != self.original.device:
            raise PullbackError(
                "images: these were read for a model of other weights, or on another device. Read them again."
            )
        if len(self.train) < batch:
            raise ImageError(
                f"images: expected at least the {batch} images of a batch to train on, got {len(self.train)}, with "
                f"{len(self.judges)} held out. Give more images, or a smaller batch."
            )

    def settings(self) -> dict[str, object]:
        """Return what tells these images apart from others, as plain JSON."""
        return {
            "size": list(self.wanted.size),
            "images": hash_of([row.sha256 for row in self.train]),
            "held_out": hash_of([row.sha256 for row in self.judges]),
            "model": self._weights,
        }

    def pictures(self, progress: Progress) -> Tensor:
        """Return what is trained on, [n, 3, S, S] uint8 with S a little more than the side of the crops, where the
        model is."""
        if self._pictures is None:
            self._pictures = pictures_to_vary(self.train, self.wanted, progress).to(self.original.device)
        return self._pictures

    def judging(self, progress: Progress) -> tuple[Tensor, ...]:
        """Return the images that judge, whole, [b, 3, H, W] each, where the model is."""
        if self._judging is None:
            progress.work("reading held-out images", len(self.judges), "images")
            batches = []
            for start in range(0, len(self.judges), _BATCH):
                some = self.judges[start : start + _BATCH]
                images = torch.stack([row.pixels(self.wanted) for row in some])
                batches.append(images.to(self.original.device, self.original.dtype))
                progress.advance(len(some))
            self._judging = tuple(batches)
        return self._judging

    def answer(self, key: Hashable, ask: Callable[[], _Answer]) -> _Answer:
        """Return what is remembered by this key, or ask."""
        if self._answers is None:
            return ask()
        if key not in self._answers:
            self._answers[key] = ask()
        return self._answers[key]


def split_rows(rows: Sequence[ImageRow], share: float) -> tuple[list[ImageRow], list[ImageRow]]:
    """Split into (training, held out): a share of the images, chosen by a hash of their bytes, but at least one.

    Copies of an image are on the same side."""
    finite_number("held_out", share, expected="a share between 0 and 1, or images of their own")
    if not 0 < share < 1:
        raise PullbackError(f"held_out: expected a share between 0 and 1, or images of their own, got {share}.")
    hashes = sorted({str(row.sha256) for row in rows})
    if len(hashes) < 2:
        raise ImageError(
            f"images: expected at least two different images, one of which is held out, got {len(hashes)}. Give more."
        )
    judges = set(hashes[: min(len(hashes) - 1, max(1, round(share * len(hashes))))])
    chosen = [row.sha256 in judges for row in rows]
    return (
        [row for row, out in zip(rows, chosen, strict=True) if not out],
        [row for row, out in zip(rows, chosen, strict=True) if out],
    )
