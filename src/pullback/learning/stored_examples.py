"""From rows of targets back to features: the pixels of a row are cut out again and run through the backbone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from pullback.data.crops import Crop, read_crop
from pullback.data.images import ImageSource, PixelFormat
from pullback.data.sources import ImageItem, Source, open_source
from pullback.errors import ImageError, PullbackError
from pullback.learning.fit_head import HeadExamples
from pullback.learning.provenance import NOT_COMPARED
from pullback.learning.shards import READERS
from pullback.learning.store import TargetStore
from pullback.learning.table import TargetTable
from pullback.probes import MultiLayerProbe, ProbeMap

TARGETS = ("importance", "block-norm")
Reader = Callable[[Tensor], Tensor]
AnyProbe = ProbeMap | MultiLayerProbe
_BATCH = 64


@dataclass(frozen=True)
class ImageRow:
    """An image, whole or a crop of it; with ``sha256`` the very image that it was."""

    item: ImageItem
    crop: Crop | None = None
    sha256: str | None = None

    def pixels(self, wanted: PixelFormat) -> Tensor:
        data = self.item.read()
        if self.sha256 is not None and hashlib.sha256(data).hexdigest() != self.sha256:
            raise ImageError(f"source: {self.item.key} has changed since its targets were computed. Compute them anew.")
        return read_crop(data, self.crop, wanted)


def rows_of_table(table: TargetTable, source: ImageSource | Source) -> list[ImageRow]:
    """The images behind the rows of a table."""
    items = {item.key: item for item in open_source(source)}
    missing = [key for key in table.keys if key not in items]
    if missing:
        raise ImageError(
            f"source: {len(missing)} of {len(table)} images of these targets are not in it, such as {missing[0]!r}. "
            "Give the folder that the targets were computed from."
        )
    columns = zip(table.keys, table.crops, table.image_sha256, strict=True)
    return [ImageRow(items[key], crop, sha256) for key, crop, sha256 in columns]


def readable_rows(source: ImageSource | Source, wanted: PixelFormat, limit: int | None = None) -> list[ImageRow]:
    """The images of a source that can be read: an unreadable one must not stop a training run in its middle."""
    rows = [ImageRow(item) for item in islice(open_source(source), limit)]
    with ThreadPoolExecutor(READERS) as pool:
        usable = list(pool.map(lambda row: _can_be_read(row, wanted), rows))
    rows = [row for row, is_usable in zip(rows, usable, strict=True) if is_usable]
    if not rows:
        raise ImageError("source: expected at least one readable image, got none.")
    return rows


def _can_be_read(row: ImageRow, wanted: PixelFormat) -> bool:
    try:
        row.pixels(wanted)
    except Exception:  # on a damaged file Pillow's decoders raise nearly anything
        return False
    return True


def feature_reader(probe: AnyProbe, rows: Sequence[ImageRow], wanted: PixelFormat) -> Reader:
    """Row numbers [b] -> features [b, N, D] on the probe's device, computed anew each time.

    Where the decoder reads layers below the probe, the features carry them, as `probe.features` has them."""
    pool = ThreadPoolExecutor(READERS)

    @torch.no_grad()
    def read(numbers: Tensor) -> Tensor:
        return probe.features(torch.stack(list(pool.map(lambda n: rows[n].pixels(wanted), numbers.tolist()))))

    return read


def kept(reader: Reader, count: int, *, on_progress: Callable[[int], None] | None = None) -> Reader:
    """The same reader with everything computed once and held in float16 where the features are: 0.2 MB an image for
    DINOv2-S at 224 px. Rounding moves a feature by 5e-4 of its size at most."""
    if count < 1:
        raise PullbackError(f"count: expected at least one row, got {count}.")
    held: Tensor | None = None
    dtype = torch.float32
    for rows in torch.arange(count).split(_BATCH):
        part = _plain(reader(rows))
        if held is None:  # one block from the start: joining parts would take twice the memory
            held, dtype = part.new_empty(count, *part.shape[1:], dtype=torch.float16), part.dtype
        held[rows.to(held.device)] = part.half()
        if not held[rows.to(held.device)].isfinite().all():
            raise PullbackError("features: some do not fit into float16. Recompute them in every step instead.")
        if on_progress is not None:
            on_progress(len(rows))
    assert held is not None
    return lambda rows: held[rows.to(held.device)].to(dtype)


def head_examples(table: TargetTable, features: Reader, *, target: str = "importance", prefix: int = 1) -> HeadExamples:
    """The examples of a head: imp* (`eq:imp_target`), or the block norms of the paper's ablation E.1."""
    if target not in TARGETS:
        raise PullbackError(f"target: expected one of {', '.join(TARGETS)}, got {target!r}.")
    wanted = table.importance if target == "importance" else table.block_norm
    return HeadExamples(lambda rows: _plain(features(rows)), wanted, prefix)


def _plain(features: Tensor) -> Tensor:
    """Without the layers below, which a head does not read."""
    return features.as_subclass(Tensor)


def split_by_image(table: TargetTable, share: float) -> tuple[list[int], list[int]]:
    """(training rows, held-out rows): about ``share`` of the images are held out, all crops of an image together.

    By a hash of the image, so that the same images are held out whatever else is in the table."""
    if not 0 < share < 1:
        raise PullbackError(f"held_out: expected a share between 0 and 1, or a store of its own, got {share}.")
    chosen = [int(digest[:8], 16) < share * 2**32 for digest in table.image_sha256]
    parts = [row for row, out in enumerate(chosen) if not out], [row for row, out in enumerate(chosen) if out]
    if not all(parts):
        raise PullbackError(f"held_out: {len(table)} rows are too few to hold out a share of {share}. Give a store.")
    return parts


def subset(reader: Reader, rows: Sequence[int]) -> Reader:
    """The reader of some rows of a table, by their number among those."""
    index = torch.tensor(rows)
    return lambda wanted: reader(index[wanted.cpu()])


def fingerprint(table: TargetTable, config: Mapping[str, Any]) -> str:
    """Of rows and how they were computed, wherever the images lie: other rows, or another order, train another head."""
    known = {name: value for name, value in config.items() if name not in (*NOT_COMPARED, "source")}
    rows = list(zip(table.keys, table.crop_index, table.image_sha256, strict=True))
    return hash_of([known, rows])


def hash_of(plain: Any) -> str:
    """Of anything that JSON can hold."""
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class StoredRows:
    """Rows of a store with the way to their features."""

    table: TargetTable
    features: Reader
    prefix: int = 1

    @classmethod
    def of(
        cls,
        probe: AnyProbe,
        store: TargetStore,
        images: ImageSource | Source | None = None,
        *,
        keep_features: bool = True,
        on_progress: Callable[[int], None] | None = None,
    ) -> StoredRows:
        """``images``: where the images are now, if not where the store says. Features as in `kept`, or computed anew
        each time; either way from the pixels that the store's targets are of."""
        table, config = store.read(modes=False), store.config
        height, width = config["size"]
        wanted = PixelFormat.of((height, width), config["mean"], config["std"], config["interpolation"])
        reader = feature_reader(probe, rows_of_table(table, store.source() if images is None else images), wanted)
        if keep_features:
            reader = kept(reader, len(table), on_progress=on_progress)
        return cls(table, reader, config["prefix"])

    def __len__(self) -> int:
        return len(self.table)

    def select(self, rows: Sequence[int]) -> StoredRows:
        """These rows, in this order."""
        return StoredRows(self.table.select(rows), subset(self.features, rows), self.prefix)

    def split(self, share: float) -> tuple[StoredRows, StoredRows]:
        """(training, held out) as in `split_by_image`."""
        train, held_out = split_by_image(self.table, share)
        return self.select(train), self.select(held_out)

    def examples(self, target: str = "importance") -> HeadExamples:
        return head_examples(self.table, self.features, target=target, prefix=self.prefix)
