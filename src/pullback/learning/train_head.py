"""Train an importance head on stores of targets: what `pullback train head` and `ImportanceHead.fit` do.

From the outside in: `train_head`; the task that it hands to the training loop (`HeadTask`: batches, the loss
`eq:conformal_loss`, scores, and the baseline to beat); and the way from rows of targets back to features
(`StoredRows`), for which the pixels of a row are cut out again and run through the backbone.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pullback.backbones import AnyBackbone
from pullback.backbones.weights import block_hashes
from pullback.checks import finite_number, of_kind, whole_number
from pullback.data.crops import Crop, Variation, read_crop, varied
from pullback.data.images import ImageSource, PixelFormat, normalised, reason_of
from pullback.data.sources import ImageItem, Source, open_source
from pullback.errors import ImageError, ModelError, PullbackError, ShapeError, counted
from pullback.evaluation import spearman
from pullback.evaluation.statistics import mean_and_error
from pullback.learning.fit import FitConfig, Fitted, Losses, Network, Share, check_going_on, fit
from pullback.learning.head import HeadConfig, ImportanceHead
from pullback.learning.losses import conformal_loss
from pullback.learning.pretrained import Origin
from pullback.operators import LowRankMetric
from pullback.probes import ProbeMap
from pullback.runs.progress import Progress
from pullback.runs.provenance import weights_hash
from pullback.runs.settings import IDENTITY
from pullback.targets.compute import READERS
from pullback.targets.store import NOT_COMPARED, TargetStore, part_name, probe_choices
from pullback.targets.table import TargetTable

logger = logging.getLogger(__name__)
_NAMED = 5  # images that cannot be read, in the log
TARGETS = ("importance", "block-norm")
Reader = Callable[[Tensor], Tensor]
"""Row numbers [b] -> features [b, N, D]."""
_BATCH = 64
MARGIN = 8 / 7
"""Pictures that are varied are held so much larger than the crops of them: 256 pixels for crops of 224."""


def train_head(
    probe: ProbeMap,
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
    progress: Progress | None = None,
) -> ImportanceHead:
    """Train on these stores (several for several resolutions) and validate on a store, or on a share of the images.

    ``start``: go on from a head instead of a random one, for instance one that learned cheap block norms; it stays as
    it is. ``keep_features``: compute features once and hold them, or recompute them in every step. ``images``: where
    the images are now, if not where the store says. ``out``: folder of metrics.jsonl and of the checkpoint that a
    second call goes on from. The scores end up in the head's config.
    """
    of_kind("probe", probe, ProbeMap, "a probe map, such as pb.load_probe(model, decoder, layer)")
    of_kind("train", train, (list, tuple), "a list of stores of targets")
    if not train:
        raise PullbackError("train: expected at least one store of targets, got none.")
    for store in train:
        of_kind("train", store, TargetStore, "stores of targets, such as pb.TargetStore.open(folder)")
    if not isinstance(held_out, TargetStore):
        finite_number("held_out", held_out, expected="a share between 0 and 1, or a store of its own")
    of_kind("config", config, (FitConfig, type(None)), "a FitConfig, or None")
    of_kind("start", start, (ImportanceHead, type(None)), "an ImportanceHead, or None")
    finite_number("rank_weight", rank_weight, least=0, expected="a number that is not negative")
    if target not in TARGETS:
        raise PullbackError(f"target: expected one of {', '.join(TARGETS)}, got {target!r}.")
    config, progress = config or FitConfig(), progress or Progress()
    stores = [*train, held_out] if isinstance(held_out, TargetStore) else list(train)
    check_stores(probe, stores)
    shared = 0
    if isinstance(held_out, TargetStore):  # a share is held out by content, so nothing is on both sides
        shared = check_held_out(held_out.contents(), [sha256 for store in train for sha256 in store.contents()])
    dim = stores[0].config["dim"]
    if start is not None and start.config.dim != dim:
        raise ModelError(f"start: expected a head for features of width {dim}, got {start.config.dim}.")
    with torch.device("meta"):
        network = ImportanceHead.from_config(HeadConfig(dim, width, heads, target)) if start is None else start
    read = [StoredRows.of(probe, store, images, keep_features=False) for store in stores]
    settings = {
        "target": target,
        "rank_weight": rank_weight,
        "start": None if start is None else weights_hash(start),
        "train": [fingerprint(rows.table, store.config) for rows, store in zip(read, train, strict=False)],
        "held_out": fingerprint(read[-1].table, stores[-1].config) if isinstance(held_out, TargetStore) else held_out,
    }
    folder = None if out is None else Path(out)
    task = _task(read, held_out, target, rank_weight)
    check_going_on(network, config, folder, settings)  # what can be refused is refused before the long work
    if keep_features:
        progress.work("computing features", sum(map(len, stores)), "images")
        task = _task([rows.kept(progress.advance) for rows in read], held_out, target, rank_weight)
    if start is None:
        head = new_head(task.train[0], width, heads, target=target, seed=config.seed)
    else:
        head = deepcopy(start).to(probe.device)
    fitted = fit(
        head,
        task,
        config,
        out=folder,
        settings=settings,
        tensorboard=tensorboard,
        progress=progress,
    )
    sizes = dict.fromkeys(tuple(store.config["size"]) for store in train)
    known = all("decoder_identity" in store.config for store in stores)
    origin = origin_of(probe, stores[0].config["rank"], *sizes, decoder_known=known)
    scores = _scores(fitted, task) | recorded(shared)
    return head.describe(origin=origin, target=target, scores=scores).eval()


def _task(read: Sequence[StoredRows], held_out: TargetStore | float, target: str, rank_weight: float) -> HeadTask:
    """Divide the rows: the last store is held out, or a share of every store, and those of the first one judge."""
    if isinstance(held_out, TargetStore):
        parts, judge = list(read[:-1]), read[-1]
    else:
        pairs = [rows.split(held_out) for rows in read]
        parts, judge = [pair[0] for pair in pairs], pairs[0][1]
    return HeadTask([part.examples(target) for part in parts], judge.examples(target), rank_weight)


def new_head(
    examples: HeadExamples, width: int = 256, heads: int = 4, *, target: str = "importance", seed: int = 0
) -> ImportanceHead:
    """Make a random head where the features are, with the spread and the level of the first 256 examples folded in."""
    rows = torch.arange(min(256, len(examples)))
    features = examples.features(rows)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = ImportanceHead.from_config(HeadConfig(features.shape[-1], width, heads, target))
    return head.to(features.device).start_from(features, examples.target[rows])


def check_stores(probe: ProbeMap, stores: Sequence[TargetStore]) -> None:
    """Raise an error for stores whose targets are not those of the probe. Older stores do not tell all of it."""
    asked: dict[str, Any] = {
        "family": probe.backbone.family,
        "weights": weights_hash(probe.backbone.model),
        "layer": probe.layer,
        "decoder": probe.decoder.name,
        "distance": part_name(probe.distance),
        **probe_choices(probe),
        **probe.identity,
    }
    for store in stores:
        unknown = [name for name in asked if name.endswith(IDENTITY) and name not in store.config]  # by older versions
        different = [name for name, value in asked.items() if name not in unknown and store.config.get(name) != value]
        if different:
            listing = "; ".join(f"{name}: {store.config.get(name)!r} there, {asked[name]!r} here" for name in different)
            raise ModelError(
                f"probe: {store.folder} holds targets of another one ({listing}). Load the one it was made for."
            )


def check_held_out(held_out: Mapping[str, str], train: Iterable[str | None]) -> int:
    """Return how many held-out images, {sha256: key}, are also training images, with a warning; all is an error."""
    trained_on = set(train)
    shared = [key for sha256, key in held_out.items() if sha256 in trained_on]
    if not shared:
        return 0
    if len(shared) == len(held_out):
        raise ImageError(
            f"held_out: expected images that the network is not trained on, but all {len(shared)} are also training "
            f"images, such as {shared[0]!r} (the same bytes). Give others; for a head, a share such as 0.1 works too."
        )
    logger.warning(
        f"held_out: {len(shared)} of {len(held_out)} images are also training images, such as {shared[0]!r} (the same "
        "bytes), so the scores flatter the network. Their number is recorded with the scores."
    )
    return len(shared)


def recorded(shared: int) -> dict[str, float]:
    """Return what the scores say of held-out images that are also training images: nothing where there are none."""
    return {"held_out_images_trained_on": float(shared)} if shared else {}


def origin_of(probe: ProbeMap, rank: int, *sizes: tuple[int, int], decoder_known: bool = True) -> Origin:
    """Return what a network is made for that was trained on this probe with images of these sizes.

    ``decoder_known``: whether the targets were made by the decoder itself, and not by one of which the name is known.
    """
    return Origin(
        family=probe.backbone.family,
        weights=weights_hash(probe.backbone.model),
        layer=probe.layer if isinstance(probe.layer, int) else None,
        decoder=probe.decoder.name,
        rank=rank,
        resolutions=sizes,
        decoder_identity=probe.identity["decoder_identity"] if decoder_known else None,
        distance=part_name(probe.distance),
        output_metric=part_name(probe.output_metric),
        blocks=block_hashes(probe.backbone),
    )


def _scores(fitted: Fitted, task: HeadTask) -> dict[str, float]:
    scores = {name: value for name, value in fitted.scores.items() if name != "score"}
    tokens = task.held_out.target.shape[1]
    same_grid = [part for part in task.train if part.target.shape[1] == tokens]
    if same_grid:
        scores["rho_of_the_mean_map"] = mean_map_scores(same_grid[0], task.held_out)["rho"]
    sizes = {"training_rows": float(sum(map(len, task.train))), "held_out_rows": float(len(task.held_out))}
    return {**scores, **sizes, "best_step": float(fitted.step)}


@dataclass(frozen=True, eq=False)
class HeadExamples:
    """n examples of one token count: how to get features, and what the scores should be.

    ``features`` indexes a tensor where features are kept, and is a forward pass where they are recomputed.
    """

    features: Reader
    target: Tensor  # [n, N] > 0
    prefix: int = 1  # tokens in front of the patches

    def __len__(self) -> int:
        return len(self.target)

    @classmethod
    def kept(cls, features: Tensor, target: Tensor, prefix: int = 1) -> HeadExamples:
        """Examples with features [n, N, D] in memory, in any floating dtype."""
        return cls(lambda rows: features[rows.to(features.device)].to(target.dtype), target, prefix)


@dataclass(frozen=True)
class HeadTask:
    """A `Task`: a step takes its batch from one of ``train``, chosen by size, so that token counts may differ."""

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
        return conformal_loss(scores, target, rank_weight=self.rank_weight, generator=generator), {}

    def validate(self, network: Network) -> Mapping[str, float]:
        return head_scores(network, self.held_out, batch=self.batch)


@torch.no_grad()
def head_scores(network: Network, examples: HeadExamples, *, batch: int = 64) -> dict[str, float]:
    """Return Spearman's rho over the tokens of each image: mean and standard error over images, and over patches."""
    everything, patches = [], []
    for rows in torch.arange(len(examples)).split(batch):
        scores = network(examples.features(rows)).float()
        target = examples.target[rows.to(examples.target.device)].to(scores.device)
        everything.append(spearman(scores, target))
        patches.append(spearman(scores[:, examples.prefix :], target[:, examples.prefix :]))
    return rho_summary(torch.cat(everything), torch.cat(patches))


def rho_summary(everything: Tensor, patches: Tensor) -> dict[str, float]:
    """Return the scores of a head, from the rho [n] of each image over all tokens and over patches."""
    rho, error = mean_and_error(everything)
    return {"score": rho, "rho": rho, "rho_se": error, "rho_patches": mean_and_error(patches)[0]}


def mean_map_scores(train: HeadExamples, held_out: HeadExamples) -> dict[str, float]:
    """Score the baseline that looks at no image: the mean of the training maps, each scaled to mean 1."""
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
    spn: Callable[[Tensor], LowRankMetric], features: Reader, count: int, *, prefix: int = 1, batch: int = 64
) -> HeadExamples:
    """Make examples 0, ..., count - 1 whose target is the importance that an SPN predicts, sqrt(sum_j lambda_j
    |u_j^(t)|^2), in place of the exact one: they need no Jacobian. ``features`` as in `HeadExamples`."""
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


@dataclass(frozen=True, eq=False)
class StoredRows:
    """Rows of a store with the way to their features."""

    table: TargetTable
    features: Reader
    prefix: int = 1

    @classmethod
    def of(
        cls,
        probe: ProbeMap,
        store: TargetStore,
        images: ImageSource | Source | None = None,
        *,
        keep_features: bool = True,
        on_progress: Callable[[int], None] | None = None,
    ) -> StoredRows:
        """Take all rows of a store. ``images``: where the images are now, if not where the store says.

        Features are held as in `kept`, or computed anew each time, from the pixels that the targets are of.
        """
        table, config = store.read(modes=False), store.config
        height, width = config["size"]
        wanted = PixelFormat.of((height, width), config["mean"], config["std"], config["interpolation"])
        reader = feature_reader(probe, rows_of_table(table, store.source() if images is None else images), wanted)
        rows = cls(table, reader, config["prefix"])
        return rows.kept(on_progress) if keep_features else rows

    def kept(self, on_progress: Callable[[int], None] | None = None) -> StoredRows:
        """Return the same rows with their features computed, once, and held as the function `kept` holds them."""
        return replace(self, features=kept(self.features, len(self.table), on_progress=on_progress))

    def __len__(self) -> int:
        return len(self.table)

    def select(self, rows: Sequence[int]) -> StoredRows:
        """Return these rows, in this order."""
        index = torch.tensor(rows)
        return StoredRows(self.table.select(rows), lambda wanted: self.features(index[wanted.cpu()]), self.prefix)

    def split(self, share: float) -> tuple[StoredRows, StoredRows]:
        """Split into (training, held out) as in `split_by_image`."""
        train, held_out = split_by_image(self.table, share)
        return self.select(train), self.select(held_out)

    def examples(self, target: str = "importance") -> HeadExamples:
        """Return the examples of a head: imp* (`eq:imp_target`), or the block norms of the paper's ablation E.1."""
        if target not in TARGETS:
            raise PullbackError(f"target: expected one of {', '.join(TARGETS)}, got {target!r}.")
        wanted = self.table.importance if target == "importance" else self.table.block_norm
        return HeadExamples(lambda rows: _plain(self.features(rows)), wanted, self.prefix)


@dataclass(frozen=True)
class ImageRow:
    """An image, whole or a crop of it; ``sha256`` is that of the file when it was first read, for its targets."""

    item: ImageItem
    crop: Crop | None = None
    sha256: str | None = None

    def pixels(self, wanted: PixelFormat) -> Tensor:
        data = self.item.read()
        if self.sha256 is not None and hashlib.sha256(data).hexdigest() != self.sha256:
            raise ImageError(
                f"source: {self.item.key} has changed since it was first read. Targets that were computed of it are of "
                "the old one: compute them anew, or start again."
            )
        return read_crop(data, self.crop, wanted)


def rows_of_table(table: TargetTable, source: ImageSource | Source) -> list[ImageRow]:
    """Find the images behind the rows of a table."""
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
    """List the images of a source that can be read: an unreadable one must not stop a training run in its middle.

    What cannot be read, folders among it, is named in the log.
    """
    if limit is not None:
        whole_number("limit", limit, expected="a positive number of images, or None for all of them")
    read = _rows_with_hashes(source, wanted, limit)
    rows = [row for row in read if isinstance(row, ImageRow)]
    skipped = [reason for reason in read if isinstance(reason, str)]
    if not rows:
        first = f"; the first: {skipped[0]}" if skipped else ""
        raise ImageError(f"source: expected at least one readable image, got none{first}.")
    if skipped:
        more = f"; and {len(skipped) - _NAMED} more" if len(skipped) > _NAMED else ""
        logger.warning(f"left out {len(skipped)} of {len(read)} images: {'; '.join(skipped[:_NAMED])}{more}")
    return rows


def contents_of(source: ImageSource | Source, wanted: PixelFormat) -> dict[str, str]:
    """Return {sha256 of an image: its key} of every image of a source that can be read, as a store does."""
    rows = (row for row in _rows_with_hashes(source, wanted) if isinstance(row, ImageRow))
    return {row.sha256: row.item.key for row in rows if row.sha256 is not None}


def _rows_with_hashes(
    source: ImageSource | Source, wanted: PixelFormat, limit: int | None = None
) -> list[ImageRow | str]:
    """Read every image of a source once: its row with the hash of its file, or why it cannot be used."""

    def read(item: ImageItem) -> ImageRow | str:
        try:
            data = item.read()
            read_crop(data, None, wanted)
        except Exception as error:  # on a damaged file Pillow's decoders raise nearly anything
            return f"{item.key}: {reason_of(error).removeprefix('data: ')}"
        return ImageRow(item, sha256=hashlib.sha256(data).hexdigest())

    with ThreadPoolExecutor(READERS) as pool:
        return list(pool.map(read, islice(open_source(source), limit)))


def feature_reader(probe: ProbeMap, rows: Sequence[ImageRow], wanted: PixelFormat) -> Reader:
    """Return a reader that computes the features of these rows anew each time, on the probe's device.

    Where the decoder reads layers below the probe, the features carry them, as `probe.features` has them."""
    pool = ThreadPoolExecutor(READERS)

    @torch.no_grad()
    def read(numbers: Tensor) -> Tensor:
        pixels = torch.stack(list(pool.map(lambda n: rows[n].pixels(wanted), numbers.tolist())))
        return probe.features(pixels, normalized=True)

    return read


def pictures_to_vary(rows: Sequence[ImageRow], wanted: PixelFormat, progress: Progress) -> Tensor:
    """Read pictures [n, 3, S, S] uint8 to be varied, with S a little more than the side of the crops."""
    progress.work("reading pictures", len(rows), "images")
    plain = PixelFormat.of(round(MARGIN * wanted.size[0]), (0, 0, 0), (1, 1, 1), wanted.interpolation)
    held = torch.empty(len(rows), 3, *plain.size, dtype=torch.uint8)
    with ThreadPoolExecutor(READERS) as pool:
        read = pool.map(lambda row: (row.pixels(plain) * 255).round().byte(), rows)
        for number, picture in enumerate(read):
            held[number] = picture
            progress.advance(1)
    return held


def varied_pixels(
    backbone: AnyBackbone, pictures: Tensor, size: int, variation: Variation, generator: torch.Generator
) -> Tensor:
    """Vary pictures [b, 3, H, W] uint8 and normalise them for the backbone: [b, 3, size, size], where it is."""
    changed = varied(pictures.to(backbone.device).float() / 255, size, variation, generator)
    wanted = backbone.preprocessing
    return normalised(changed, wanted.mean, wanted.std).to(backbone.dtype)


def kept(reader: Reader, count: int, *, on_progress: Callable[[int], None] | None = None) -> Reader:
    """Return a reader that computes everything once and holds it in float16 where the features are.

    That takes 0.2 MB an image for DINOv2-S at 224 px; rounding moves a feature by 5e-4 of its size at most.
    """
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


def _plain(features: Tensor) -> Tensor:
    """Return the features without the layers below, which a head does not read."""
    return features.as_subclass(Tensor)


def split_by_image(table: TargetTable, share: float) -> tuple[list[int], list[int]]:
    """Split into (training rows, held-out rows): about ``share`` of the images, all crops of an image together.

    They are chosen by a hash of the image, so that the same images are held out whatever else is in the table."""
    if not 0 < share < 1:
        raise PullbackError(f"held_out: expected a share between 0 and 1, or a store of its own, got {share}.")
    chosen = [int(digest[:8], 16) < share * 2**32 for digest in table.image_sha256]
    parts = [row for row, out in enumerate(chosen) if not out], [row for row, out in enumerate(chosen) if out]
    if not all(parts):
        raise PullbackError(
            f"held_out: {counted(len(table), 'row')} cannot be split by a share of {share}: images are chosen by a "
            f"hash of their bytes, and {'none was' if parts[0] else 'all were'}. Give more images, another share, or a "
            "store of its own."
        )
    return parts


def fingerprint(table: TargetTable, config: Mapping[str, Any]) -> str:
    """Hash rows and how they were computed, wherever the images lie: other rows, or another order, train another
    head."""
    known = {name: value for name, value in config.items() if name not in (*NOT_COMPARED, "source")}
    rows = list(zip(table.keys, table.crop_index, table.image_sha256, strict=True))
    return hash_of([known, rows])


def hash_of(plain: Any) -> str:
    """Return a short hash of anything that JSON can hold."""
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]
