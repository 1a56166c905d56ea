"""An importance head from stores of targets: what `pullback train head` and `ImportanceHead.fit` do.

Learning the importance head from targets (`eq:conformal_loss`), and what to compare it with.

From rows of targets back to features: the pixels of a row are cut out again and run through the backbone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pullback.data.crops import Crop, read_crop
from pullback.data.images import ImageSource, PixelFormat
from pullback.data.sources import ImageItem, Source, open_source
from pullback.errors import ImageError, ModelError, PullbackError, ShapeError
from pullback.evaluation import spearman
from pullback.learning.fit import FitConfig, Fitted, Losses, Network, Share, fit
from pullback.learning.head import HeadConfig, ImportanceHead
from pullback.learning.losses import conformal_loss
from pullback.operators import LowRankMetric
from pullback.probes import INPUTS, ProbeMap
from pullback.runs.provenance import weights_hash
from pullback.targets.origin import Origin
from pullback.targets.shards import READERS
from pullback.targets.store import NOT_COMPARED, TargetStore
from pullback.targets.table import TargetTable

Watch = Callable[[str, int], None]
"""Hears of progress: ("features" or "step", how many more)."""


def train_head(
    probe: AnyProbe,
    train: Sequence[TargetStore],
    held_out: TargetStore | float = 0.1,
    *,
    images: ImageSource | Source | None = None,
    width: int = 256,
    heads: int = 4,
    target: str = "importance",
    rank_weight: float = 0.5,
    start: ImportanceHead | None = None,
    keep_features: bool = True,
    config: FitConfig | None = None,
    out: str | Path | None = None,
    tensorboard: bool = False,
    watch: Watch = lambda what, count: None,
) -> ImportanceHead:
    """Train on these stores (several for several resolutions) and validate on a store, or on a share of the images.

    ``start``: go on from a head instead of a random one, for instance one that learned cheap block norms; it stays as
    it is. ``keep_features``: compute features once and hold them, or recompute them in every step. ``images``: where
    the images are now, if not where the store says. The scores end up in the head's config.
    """
    if not train:
        raise PullbackError("train: expected at least one store of targets, got none.")
    config = config or FitConfig()
    stores = [*train, held_out] if isinstance(held_out, TargetStore) else list(train)
    check_stores(probe, stores)
    _check_start(start, train[0])
    read = [
        StoredRows.of(probe, store, images, keep_features=keep_features, on_progress=lambda n: watch("features", n))
        for store in stores
    ]
    parts, judge = _split(read, held_out)
    examples = [part.examples(target) for part in parts]
    if start is None:
        head = new_head(examples[0], width, heads, target=target, seed=config.seed)
    else:
        head = deepcopy(start).to(probe.device)
    task = HeadTask(examples, judge.examples(target), rank_weight)
    settings = {
        "target": target,
        "rank_weight": rank_weight,
        "start": None if start is None else weights_hash(start),
        "train": [fingerprint(rows.table, store.config) for rows, store in zip(read, train, strict=False)],
        "held_out": fingerprint(judge.table, stores[-1].config) if isinstance(held_out, TargetStore) else held_out,
    }
    fitted = fit(
        head,
        task,
        config,
        out=None if out is None else Path(out),
        settings=settings,
        tensorboard=tensorboard,
        on_step=counting_steps(watch),
    )
    scores = _scores(fitted, task.train, task.held_out)
    return head.describe(origin=_origin(train), target=target, scores=scores).eval()


def new_head(
    examples: HeadExamples, width: int = 256, heads: int = 4, *, target: str = "importance", seed: int = 0
) -> ImportanceHead:
    """A random head where the features are, with the spread and the level of the first 256 examples folded in."""
    rows = torch.arange(min(256, len(examples)))
    features = examples.features(rows)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = ImportanceHead.from_config(HeadConfig(features.shape[-1], width, heads, target))
    return head.to(features.device).start_from(features, examples.target[rows])


def check_stores(probe: AnyProbe, stores: Sequence[TargetStore]) -> None:
    """Refuse targets of other features than the probe's."""
    asked: dict[str, Any] = {
        "family": probe.backbone.family,
        "weights": weights_hash(probe.backbone.model),
        "layer": probe.layer,
        "decoder": probe.decoder.name,
        "after_norm": probe.after_norm if probe.at == INPUTS else None,
    }
    for store in stores:
        different = [name for name, value in asked.items() if store.config.get(name) != value]
        if different:
            listing = "; ".join(f"{name}: {store.config.get(name)!r} there, {asked[name]!r} here" for name in different)
            raise ModelError(
                f"probe: {store.folder} holds targets of another one ({listing}). Load the one it was made for."
            )


def counting_steps(watch: Watch) -> Callable[[int, Mapping[str, float]], None]:
    """Steps that were done before the run went on count at once."""
    done = 0

    def on_step(step: int, numbers: Mapping[str, float]) -> None:
        nonlocal done
        watch("step", step - done)
        done = step

    return on_step


def _check_start(start: ImportanceHead | None, store: TargetStore) -> None:
    if start is not None and start.config.dim != store.config["dim"]:
        raise ModelError(f"start: expected a head for features of width {store.config['dim']}, got {start.config.dim}.")


def _split(read: Sequence[StoredRows], held_out: TargetStore | float) -> tuple[list[StoredRows], StoredRows]:
    """(to train on, to judge by). A share of the images is held out of every store; those of the first judge."""
    if isinstance(held_out, TargetStore):
        return list(read[:-1]), read[-1]
    pairs = [rows.split(held_out) for rows in read]
    return [train for train, _ in pairs], pairs[0][1]


def _origin(stores: Sequence[TargetStore]) -> Origin:
    resolutions = tuple(dict.fromkeys(size for store in stores for size in store.origin.resolutions))
    return replace(stores[0].origin, resolutions=resolutions)


def _scores(fitted: Fitted, parts: Sequence[HeadExamples], judge: HeadExamples) -> Mapping[str, float]:
    scores = {name: value for name, value in fitted.scores.items() if name != "score"}
    same_grid = [part for part in parts if part.target.shape[1] == judge.target.shape[1]]
    if same_grid:
        scores["rho_of_the_mean_map"] = mean_map_scores(same_grid[0], judge)["rho"]
    sizes = {"training_rows": float(sum(map(len, parts))), "held_out_rows": float(len(judge))}
    return {**scores, **sizes, "best_step": float(fitted.step)}


@dataclass(frozen=True, eq=False)
class HeadExamples:
    """n examples of one token count: how to get features, and what the scores should be.

    ``features`` takes row numbers [b] and returns [b, N, D]: indexing a tensor where features are kept, a forward
    pass where they are recomputed.
    """

    features: Callable[[Tensor], Tensor]
    target: Tensor  # [n, N] > 0
    prefix: int = 1  # tokens in front of the patches

    def __len__(self) -> int:
        return len(self.target)

    @classmethod
    def kept(cls, features: Tensor, target: Tensor, prefix: int = 1) -> HeadExamples:
        """With features [n, N, D] in memory, in any floating dtype."""
        return cls(lambda rows: features[rows.to(features.device)].to(target.dtype), target, prefix)


@dataclass(frozen=True)
class HeadTask:
    """A step takes its batch from one of ``train``, chosen by size, so that token counts may differ between them."""

    train: Sequence[HeadExamples]
    held_out: HeadExamples
    rank_weight: float = 0.5
    batch: int = 64  # of validation
    sizes: Tensor = field(init=False)

    def __post_init__(self) -> None:
        for name, parts in (("train", self.train), ("held_out", [self.held_out])):
            if not parts or min(map(len, parts)) == 0:
                raise PullbackError(f"{name}: expected at least one example in every set of targets, got none.")
            if not all(part.target.isfinite().all() for part in parts):
                raise PullbackError(
                    f"{name}: expected finite targets, got NaN or infinity. Compute these targets again."
                )
        object.__setattr__(self, "sizes", torch.tensor([len(examples) for examples in self.train]).double())

    def loss(self, network: Network, step: int, share: Share, generator: torch.Generator) -> Losses:
        examples = self.train[int(torch.multinomial(self.sizes, 1, generator=generator))]
        rows = share.of(torch.randint(len(examples), (share.batch,), generator=generator))
        scores = network(examples.features(rows))
        target = examples.target[rows.to(examples.target.device)].to(scores.device)
        loss = conformal_loss(scores, target, rank_weight=self.rank_weight, generator=generator)
        return loss, {}

    def validate(self, network: Network) -> Mapping[str, float]:
        return head_scores(network, self.held_out, batch=self.batch)


@torch.no_grad()
def head_scores(network: Network, examples: HeadExamples, *, batch: int = 64) -> dict[str, float]:
    """Spearman's rho over the tokens of each image, mean and standard error over images; all tokens and patches."""
    everything, patches = [], []
    for rows in torch.arange(len(examples)).split(batch):
        scores = network(examples.features(rows)).float()
        target = examples.target[rows.to(examples.target.device)].to(scores.device)
        everything.append(spearman(scores, target))
        patches.append(spearman(scores[:, examples.prefix :], target[:, examples.prefix :]))
    return rho_summary(torch.cat(everything), torch.cat(patches))


def rho_summary(everything: Tensor, patches: Tensor) -> dict[str, float]:
    """From the rho [n] of each image over all tokens and over patches."""
    error = everything.std() / len(everything) ** 0.5 if len(everything) > 1 else everything.new_tensor(0.0)
    rho = float(everything.mean())
    return {"score": rho, "rho": rho, "rho_se": float(error), "rho_patches": float(patches.mean())}


def mean_map_scores(train: HeadExamples, held_out: HeadExamples) -> dict[str, float]:
    """The baseline that looks at no image: the mean of the training maps, each with mean 1 so that none dominates."""
    if train.target.shape[1] != held_out.target.shape[1]:
        raise ShapeError(
            f"held_out: expected the {train.target.shape[1]} tokens of the training maps, got "
            f"{held_out.target.shape[1]}: a mean map has no meaning on another grid."
        )
    maps = train.target / train.target.mean(1, keepdim=True)
    guess = maps.mean(0, keepdim=True).expand_as(held_out.target)
    prefix = held_out.prefix
    everything = spearman(guess, held_out.target)
    return rho_summary(everything, spearman(guess[:, prefix:], held_out.target[:, prefix:]))


@torch.no_grad()
def distilled_examples(
    spn: Callable[[Tensor], LowRankMetric],
    features: Callable[[Tensor], Tensor],
    count: int,
    *,
    prefix: int = 1,
    batch: int = 64,
) -> HeadExamples:
    """Examples 0, ..., count - 1 whose target is the importance that an SPN predicts, sqrt(sum_j lambda_j |u_j^(t)|^2),
    in place of the exact one: they need no Jacobian. ``features`` as in `HeadExamples`."""
    if count < 1:
        raise PullbackError(f"count: expected at least one example, got {count}.")
    parts = []
    for rows in torch.arange(count).split(batch):
        inputs = features(rows)
        target = spn(inputs).importance()
        if target.shape != inputs.shape[:2]:
            raise ModelError(
                f"spn: expected modes on the {inputs.shape[1]} tokens of the features, got {target.shape[1]}. Modes of "
                "a latent space say nothing about single tokens: use a network without one."
            )
        parts.append(target.cpu())
    return HeadExamples(features, torch.cat(parts), prefix)


TARGETS = ("importance", "block-norm")
Reader = Callable[[Tensor], Tensor]
AnyProbe = ProbeMap
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
