"""A folder of images to search by what a task sees.

    gallery = Gallery.create("shoes", "runs/drm/model")
    gallery.add("photos/")
    gallery.search("query.jpg", k=10).keys

`gallery.json` says what the items are of (model, layer, size, metric), `metric/` is a copy of the metric, `sketch.npz`
the basis that candidates are found in. The items are in the files of `storage`, which may be killed over and read
while somebody writes; what they hold is in `records`, and how they are searched in `search`.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pullback import __version__
from pullback.backbones.loading import resolve_device
from pullback.checks import of_kind, shown, whole_number
from pullback.data.crops import read_crop
from pullback.data.images import ImageSource, PixelFormat, checked_size, reason_of
from pullback.data.pictures import Pictures
from pullback.data.sources import FileItem, ImageItem, Source, open_source
from pullback.errors import FileError, ModelError, NumericsError, PullbackError, counted, naming
from pullback.evaluation.statistics import mean_and_error
from pullback.learning.distilled_metric import DistilledMetric, MetricItems
from pullback.learning.pretrained import Origin
from pullback.retrieval.reading import ItemReader, in_memory
from pullback.retrieval.records import Form, Records
from pullback.retrieval.search import FROM, PER_RESULT, Found, Index, has_faiss
from pullback.retrieval.storage import SHARD_BYTES, Log, Storage, Writer
from pullback.runs.documents import GALLERY
from pullback.runs.files import read_arrays, read_json, replaced_folder, write_arrays, write_json
from pullback.runs.progress import Progress
from pullback.runs.provenance import now, weights_hash
from pullback.targets.compute import READERS

FORMAT = 1
METRIC, SKETCH = "metric", "sketch.npz"
METHODS = ("auto", "exact", "candidates", "transport")
MOST_TRANSPORTED = 500
"""Items of a gallery that is searched by optimal transport: at 257 tokens a pair takes tenths of a second on a CPU."""
KEY_TAKEN = (
    "another image has this key already; add the folder above both, so that keys differ, or remove that one first"
)
_BATCH = 64  # images that are read, computed and committed together


@dataclass(frozen=True)
class GalleryItem:
    """An image of a gallery: its name, the sha256 of its bytes, and the file it was read from, if any."""

    key: str
    sha256: str
    place: str | None


@dataclass(frozen=True)
class Added:
    """What became of images that were to be added. ``known``: their bytes are in the gallery already, under this key
    or another one. ``skipped``: the others that were left out, (key, reason)."""

    added: int = 0
    known: int = 0
    skipped: list[tuple[str, str]] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Matches:
    """The nearest items of Q queries, best first; ties go by the order of adding."""

    keys: list[list[str]]
    distances: Tensor  # [Q, k], ascending
    places: list[list[str | None]]  # the files they were read from
    method: str  # exact, candidates or transport
    compared: int  # items whose exact distance was computed, for each query on average
    seconds: float  # of searching alone


@dataclass(frozen=True)
class Recall:
    """The share of the k nearest items that candidates find, over queries, and the seconds that each takes a query."""

    recall: float
    recall_se: float
    k: int
    queries: int
    candidates: int
    exact_seconds: float
    candidate_seconds: float


class Gallery:
    """Images in a folder, searched by a `DistilledMetric`; made by `Gallery.create`, opened by `Gallery.open`.

    >>> gallery = Gallery.create("shoes", "runs/drm/model")     # doctest: +SKIP
    >>> gallery.add("photos/")                                  # doctest: +SKIP
    >>> gallery.search("query.jpg", k=3).keys                   # doctest: +SKIP
    """

    def __init__(
        self, folder: Path, metric: DistilledMetric, manifest: Mapping[str, Any], form: Form, device: torch.device
    ) -> None:
        self.folder, self.metric, self.manifest, self.device = folder, metric, dict(manifest), device
        self._form = form
        self._storage = Storage(folder, form.words, int(manifest["capacity"]))
        self._reader = ItemReader(metric, self.manifest, device)
        self._log = Log()
        self._index: Index | None = None

    @classmethod
    def create(
        cls,
        folder: str | os.PathLike[str],
        drm: DistilledMetric | str | Path,
        *,
        size: int | tuple[int, int] | None = None,
        device: str | torch.device = "auto",
    ) -> Gallery:
        """Make an empty gallery for the images of a metric; a folder with anything in it is refused.

        ``size``: that images are cropped to, by default the one that the metric was trained on.
        """
        of_kind("folder", folder, (str, os.PathLike), "the folder of the gallery")
        place, path, metric = resolve_device(device), Path(folder), _metric(drm)
        if path.exists() and not (path.is_dir() and not any(path.iterdir())):
            known = " It holds a gallery: use Gallery.open." if (path / GALLERY).is_file() else ""
            raise PullbackError(f"folder: {path} is in use, expected a new or an empty one.{known}")
        with naming("drm"):
            form = Form.of(metric)
        manifest = _manifest(metric, form, _size(metric.config.origin, size))
        with replaced_folder(path, new=True) as temporary:
            metric.save_pretrained(temporary / METRIC)
            write_arrays(temporary / SKETCH, {"vectors": form.vectors.numpy(), "scales": form.scales.numpy()})
            write_json(temporary / GALLERY, manifest, durable=True)
        return cls.open(path, device=place)

    @classmethod
    def open(
        cls,
        folder: str | os.PathLike[str],
        *,
        drm: DistilledMetric | str | Path | None = None,
        backbone: Any = None,
        device: str | torch.device = "auto",
    ) -> Gallery:
        """Open a gallery as it is now. Others may write to it meanwhile: `refresh` takes note of that.

        ``drm``: the metric that it is expected to be of; another one is refused. ``backbone``: the model behind it, or
        its name, where that is not the one that the metric was trained on by name.
        """
        gallery = cls._opened(folder, device)
        if drm is not None:
            other, own = weights_hash(_metric(drm)), gallery.manifest["metric"]
            if other != own:
                raise ModelError(
                    f"drm: {gallery.folder} was made with another metric (weights {own[:12]}, these are {other[:12]}). "
                    "Leave it out to search by its own, or make a gallery for this one."
                )
        if backbone is not None:
            gallery._reader.take_backbone(backbone)
        gallery.refresh()
        return gallery

    @classmethod
    def _opened(cls, folder: str | os.PathLike[str], device: str | torch.device) -> Gallery:
        """Open a gallery without its items."""
        of_kind("folder", folder, (str, os.PathLike), "the folder of a gallery")
        path = Path(folder)
        if not (path / GALLERY).is_file():
            raise PullbackError(
                f"folder: {path} holds no gallery, there is no {GALLERY}. Make one with pb.Gallery.create, or "
                "`pullback index add`."
            )
        manifest = read_json(path / GALLERY)
        if manifest.get("format") != FORMAT:
            raise FileError(
                f"folder: {path} has format {manifest.get('format')!r}, this version reads {FORMAT}. Make the gallery "
                "anew, or use the version of pullback that made it, "
                f"{manifest.get('pullback')}."
            )
        place = resolve_device(device)
        with naming("folder"):
            metric = DistilledMetric.from_pretrained(path / METRIC, device=place)
        if weights_hash(metric) != manifest["metric"]:
            raise FileError(
                f"folder: {path / METRIC} is not the metric that {path} was made with. Put it back from a copy, or "
                "make the gallery anew."
            )
        arrays = {name: torch.from_numpy(values) for name, values in read_arrays(path / SKETCH).items()}
        return cls(path, metric, manifest, Form(metric.config.rank, arrays["vectors"], arrays["scales"]), place)

    # What is in it

    def __len__(self) -> int:
        """The number of items."""
        return self._log.living

    def __contains__(self, key: object) -> bool:
        return key in self._log.by_key

    def __iter__(self) -> Iterator[GalleryItem]:
        """Iterate over the items in the order of adding."""
        log = self._log
        rows = (row for row in range(len(log)) if row not in log.removed)
        return (GalleryItem(log.keys[row], log.sha256[row], log.places[row]) for row in rows)

    def __repr__(self) -> str:
        model = self.manifest["model"] or "features"
        return f"Gallery({str(self.folder)!r}, {len(self):,} items of {model}, layer {self.manifest['layer']})"

    def info(self) -> dict[str, Any]:
        """Return what it holds and what it is for, as plain values."""
        shards = range(len(self._storage.shards(len(self._log))))
        files = [self._storage.shard(part, number) for number in shards for part in self._form.words]
        told = ("model", "weights", "family", "layer", "decoder", "reference", "metric", "size", "tokens", "rank")
        return {
            "items": len(self),
            "removed": len(self._log.removed),
            "bytes": sum(path.stat().st_size for path in files),
            "bytes_per_item": self._storage.item_bytes,
            **{name: self.manifest[name] for name in told},
            "version": self.manifest["pullback"],
            "created": self.manifest["created"],
        }

    def pixel_format(self) -> PixelFormat:
        """Return the format in which images are seen; the model is loaded for it."""
        return self._reader.format()

    def refresh(self) -> Gallery:
        """Take note of what was added and removed by others since."""
        log = self._storage.read(self._log)
        self._storage.check_lengths(log)
        if log is not self._log:
            self._log, self._index = log, None
        return self

    # Changing it

    def add(
        self,
        images: ImageSource | Source | Pictures,
        *,
        backbone: Any = None,
        keys: Sequence[str] | None = None,
        progress: Progress | None = None,
    ) -> Added:
        """Add images: a folder, a list or anything else that `pb.open_source` takes; or pictures in memory, with keys.

        An image is known by the sha256 of its bytes, and is never there twice: the same bytes under another key are
        left out as known, and so are other bytes under a key that is taken, as skipped. Batches are on disk as they
        are done; after an interruption the same call goes on where it was. One process writes at a time.
        """
        progress = progress or Progress()
        if backbone is not None:
            self._reader.take_backbone(backbone)
        if in_memory(images):
            return self._add_pictures(images, keys, progress)
        if keys is not None:
            raise PullbackError("keys: expected with pictures in memory alone; those of files are their names.")
        source = open_source(images)  # type: ignore[arg-type]
        with self._writing() as writer, ThreadPoolExecutor(READERS) as pool:
            progress.work("adding", source.count, "images")
            adding = _Adding(self, writer)
            for window in _windows(source, pool, adding.read):
                adding.take([one for one in window if one is not None])
                progress.advance(len(window))
        return adding.result

    def _add_pictures(self, pictures: Any, keys: Sequence[str] | None, progress: Progress) -> Added:
        pixels = self._reader.pixels(pictures)
        names = _checked_keys(keys, len(pixels))
        with self._writing() as writer:
            progress.work("adding", len(names), "images")
            adding = _Adding(self, writer)
            for start in range(0, len(names), _BATCH):
                part = zip(names[start : start + _BATCH], pixels[start : start + _BATCH], strict=True)
                adding.take([_Read(key, _hash(picture), None, picture) for key, picture in part])
                progress.advance(len(names[start : start + _BATCH]))
        return adding.result

    def add_features(self, keys: Sequence[str], features: Tensor, *, sha256: Sequence[str] | None = None) -> Added:
        """Add images by their features [B, N, D] at the metric's layer, from anywhere. ``sha256``: of what they are
        features of, by default of the features themselves."""
        plain = self._reader.checked("features", features)
        names = _checked_keys(keys, len(plain))
        contents = [_hash(one) for one in plain] if sha256 is None else _checked_keys(sha256, len(plain), "sha256")
        with self._writing() as writer:
            adding = _Adding(self, writer)
            for start in range(0, len(names), _BATCH):
                part = slice(start, start + _BATCH)
                columns = zip(names[part], contents[part], plain[part], strict=True)
                adding.take([_Read(key, content, None, one) for key, content, one in columns], features=True)
        return adding.result

    def remove(self, keys: str | Sequence[str]) -> int:
        """Remove the items with these keys, which no search finds from then on; return how many there were. Their
        records stay where they are."""
        names = _checked_keys([keys] if isinstance(keys, str) else keys, None)
        with self._writing() as writer:
            unknown = [key for key in names if key not in writer.log.by_key]
            if unknown:
                raise PullbackError(
                    f"keys: expected keys of items in {self.folder}, but {len(unknown)} of {len(names)} are not, such "
                    f"as {unknown[0]!r}. Nothing was removed."
                )
            rows = sorted({writer.log.by_key[key] for key in names})
            if rows:
                writer.remove(rows)
        return len(rows)

    def verify(self) -> int:
        """Read everything that is stored and compare it with its checksums: return the number of items, or raise an
        error that names the files that are damaged."""
        found = self._storage.damaged(self._log)
        damaged = [(path, set(rows) - self._log.removed) for path, rows in found]
        if any(rows for _, rows in damaged):
            files = sorted({str(path) for path, rows in damaged if rows})
            items = {row for _, rows in damaged for row in rows}
            raise FileError(
                f"folder: the bytes of {', '.join(files)} are not those that were written, which concerns {len(items)} "
                f"of {len(self)} items. Put them back from a copy, or run `pullback index repair {self.folder}` "
                "(Gallery.repair), which takes these items out: the same `add` then makes them anew."
            )
        return len(self)

    @classmethod
    def repair(cls, folder: str | os.PathLike[str]) -> list[str]:
        """Remove the items whose records are damaged or gone, and return their keys; adding them again makes them
        anew. Records are checked in the groups in which they were written."""
        storage = cls._opened(folder, "cpu")._storage
        with storage.writer(lenient=True) as writer:
            rows = {row for _, rows in storage.damaged(writer.log) for row in rows} - writer.log.removed
            if rows:
                writer.remove(sorted(rows))
            writer.extend()
            return [writer.log.keys[row] for row in sorted(rows)]

    @contextmanager
    def _writing(self) -> Iterator[Writer]:
        """Be the only one who writes; afterwards this gallery knows what was written, also after an error."""
        with self._storage.writer(self._log) as writer:
            try:
                yield writer
            finally:
                self._log, self._index = writer.log, None

    # Searching it

    def search(
        self, query: Any, k: int = 10, *, method: str = "auto", candidates: int | None = None, backbone: Any = None
    ) -> Matches:
        """Return the k items that are nearest to each query.

        ``query``: a path or a list of them, pictures in memory as probes take them, or features [B, N, D].
        ``method``: "exact" compares all items; "candidates" those that a short embedding and a sketch put first
        (`recall` says what is lost); "transport" moves the tokens of one image onto the other's, wherever they are
        in the picture, and is for at most 500 items. "auto" takes candidates from 100,000 items on, on a CPU if FAISS
        is installed (the extra pullback[retrieval]), and else is exact; `Matches.method` says which it was.
        ``candidates``: how many are compared exactly, by default 20 for each result, and more where it takes more.
        """
        whole_number("k", k)
        if method not in METHODS:
            raise PullbackError(f"method: expected one of {', '.join(METHODS)}, got {method!r}.")
        if candidates is not None:
            whole_number("candidates", candidates, least=k, expected=f"at least as many as results, {k}, or None")
            if method not in ("auto", "candidates"):
                raise PullbackError(f"candidates: expected with method 'candidates' alone, got method {method!r}.")
        if backbone is not None:
            self._reader.take_backbone(backbone)
        if not len(self):
            raise PullbackError(f"gallery: {self.folder} holds no items yet. Add images first: gallery.add(folder).")
        if method == "transport" and len(self) > MOST_TRANSPORTED:
            raise PullbackError(
                f"method: transport is for galleries of at most {MOST_TRANSPORTED:,} items, this one has "
                f"{len(self):,}. Use exact or candidates."
            )
        queries = self._reader.items("query", self._reader.features(query))
        if method == "auto" and candidates is not None:
            method = "candidates"
        if method == "auto":
            quick = self.device.type != "cpu" or has_faiss()
            method = "candidates" if len(self) >= FROM and quick else "exact"
        begun = time.perf_counter()
        found = self._found(queries, k, method, candidates)
        log, rows = self._log, found.rows.tolist()
        return Matches(
            keys=[[log.keys[row] for row in best] for best in rows],
            distances=found.distances,
            places=[[log.places[row] for row in best] for best in rows],
            method=method,
            compared=found.compared,
            seconds=time.perf_counter() - begun,
        )

    def _found(self, queries: MetricItems, k: int, method: str, candidates: int | None) -> Found:
        if method == "candidates":
            return self.index.candidates(queries, k, candidates or PER_RESULT * k)
        return self.index.exact(queries, k) if method == "exact" else self._transported(queries, k)

    def _transported(self, queries: MetricItems, k: int) -> Found:
        from pullback.retrieval.transport import transport_distances

        rows = torch.tensor([row for row in range(len(self._log)) if row not in self._log.removed])
        stored = self.index.items(rows)
        try:
            distances = transport_distances(_float(queries, self.device), _float(stored, self.device))
        except NumericsError as error:
            reason = str(error).partition(": ")[2].partition(" Raise")[0]
            raise NumericsError(f"method: transport cannot search here: {reason} Use exact.") from None
        best = distances.cpu().sort(dim=1, stable=True)
        k = min(k, len(rows))
        return Found(rows[best.indices[:, :k]], best.values[:, :k].float(), len(rows))

    def recall(
        self,
        k: int = 10,
        *,
        queries: int = 100,
        candidates: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Recall:
        """Measure what candidates miss: for items drawn by ``generator`` (by default seed 0) as queries, the share of
        the k nearest other items that are found, with its standard error over queries, and what each way costs."""
        whole_number("k", k)
        whole_number("queries", queries, least=2, expected="at least 2, of which a standard error can be taken")
        if len(self) <= k:
            raise PullbackError(
                f"k: expected fewer than the {counted(len(self), 'item')} of {self.folder}, each of which is searched "
                f"for among the others, got {k}."
            )
        generator = torch.Generator().manual_seed(0) if generator is None else generator
        living = torch.tensor([row for row in range(len(self._log)) if row not in self._log.removed])
        rows = living[torch.randperm(len(living), generator=generator)[:queries]]
        count, shares, seconds = candidates or PER_RESULT * (k + 1), [], [0.0, 0.0]
        self.index.candidates(self.index.items(rows[:1]), k, count)  # makes what is made once
        for row in rows.split(1):
            query, begun = self.index.items(row), time.perf_counter()
            exact = self.index.exact(query, k + 1).rows[0]
            middle = time.perf_counter()
            found = self.index.candidates(query, k + 1, count).rows[0]
            seconds = [seconds[0] + middle - begun, seconds[1] + time.perf_counter() - middle]
            wanted = [other for other in exact.tolist() if other != int(row)][:k]
            shares.append(len(set(wanted) & set(found.tolist())) / k)
        recall, error = mean_and_error(torch.tensor(shares, dtype=torch.float64))
        number = len(shares)
        return Recall(recall, error, k, number, count, seconds[0] / number, seconds[1] / number)

    @property
    def index(self) -> Index:
        """The items, as `pullback.retrieval.search` searches them."""
        if self._index is None:
            blocks = [Records(self._form, **parts) for parts in self._storage.map(len(self._log))]
            self._index = Index.of(self._form, blocks, sorted(self._log.removed), self.device)
        return self._index


@dataclass(frozen=True)
class _Read:
    """An image on its way: pixels or features [...], or the reason why there are none."""

    key: str
    sha256: str
    place: str | None
    content: Tensor | None
    reason: str | None = None


class _Adding:
    """Images that go into a gallery, batch by batch."""

    def __init__(self, gallery: Gallery, writer: Writer) -> None:
        self.gallery, self.writer = gallery, writer
        self.added, self.known = 0, 0
        self.skipped: list[tuple[str, str]] = []

    @property
    def result(self) -> Added:
        return Added(self.added, self.known, self.skipped)

    def read(self, item: ImageItem) -> _Read:
        """Read an image, unless its bytes are known; nothing is raised for one that cannot be read."""
        place = item.path if isinstance(item, FileItem) else None
        try:
            data = item.read()
            sha256 = hashlib.sha256(data).hexdigest()
            if sha256 in self.writer.log.by_content or item.key in self.writer.log.by_key:
                return _Read(item.key, sha256, place, None)
            return _Read(item.key, sha256, place, read_crop(data, None, self.gallery._reader.format()))
        except PullbackError as error:
            if isinstance(error, ModelError):  # no image is to blame
                raise
            return _Read(item.key, "", place, None, str(error).removeprefix("data: "))
        except Exception as error:  # whatever an item raises that is not there any more
            return _Read(item.key, "", place, None, reason_of(error))

    def take(self, batch: Iterable[_Read], *, features: bool = False) -> None:
        """Add those of a batch that are new."""
        new: dict[str, _Read] = {}
        keys: set[str] = set()
        for one in batch:
            if one.reason is not None:
                self.skipped.append((one.key, one.reason))
            elif one.sha256 in self.writer.log.by_content or one.sha256 in new:
                self.known += 1
            elif one.key in self.writer.log.by_key or one.key in keys:
                self.skipped.append((one.key, KEY_TAKEN))
            else:
                new[one.sha256] = one
                keys.add(one.key)
        if not new:
            return
        contents = torch.stack([one.content for one in new.values() if one.content is not None])
        found = contents if features else self.gallery._reader.features_of(contents)
        records = self.gallery._form.pack(self.gallery._reader.items("features", found))
        self.writer.add(
            [one.key for one in new.values()], list(new), [one.place for one in new.values()], records.parts
        )
        self.added += len(new)


def _windows(source: Iterable[ImageItem], pool: ThreadPoolExecutor, read: Any) -> Iterator[list[_Read]]:
    """Read the items of a source batch by batch, each while the one before it is computed."""
    items = iter(source)
    ahead: list[Future[_Read]] = [pool.submit(read, item) for item in islice(items, _BATCH)]
    while ahead:
        following = [pool.submit(read, item) for item in islice(items, _BATCH)]
        yield [future.result() for future in ahead]
        ahead = following


def _metric(drm: Any) -> DistilledMetric:
    if isinstance(drm, DistilledMetric):
        return drm
    of_kind("drm", drm, (str, Path), "a DistilledMetric, or the folder of one", ModelError)
    with naming("drm"):
        return DistilledMetric.from_pretrained(drm)


def _size(origin: Origin, size: int | tuple[int, int] | None) -> tuple[int, int] | None:
    """Return (height, width) of images: as asked for, or the only one of the training; None: the model's own."""
    if size is not None:
        return checked_size(size)
    if len(origin.resolutions) > 1:
        raise PullbackError(
            f"size: the metric was trained on images of several sizes, {origin.resolutions}. Choose one."
        )
    return origin.resolutions[0] if origin.resolutions else None


def _manifest(metric: DistilledMetric, form: Form, size: tuple[int, int] | None) -> dict[str, Any]:
    """Return what decides the items of a gallery, as plain JSON."""
    origin = metric.config.origin
    return {
        "format": FORMAT,
        "pullback": __version__,
        "created": now(),
        "model": metric.config.model,
        "family": origin.family,
        "weights": origin.weights,
        "layer": origin.layer,
        "decoder": origin.decoder,
        "reference": metric.config.reference,
        "metric": weights_hash(metric),
        "size": None if size is None else list(size),
        "tokens": form.tokens,
        "rank": form.rank,
        "capacity": max(1, SHARD_BYTES // (2 * sum(form.words.values()))),
    }


def _checked_keys(keys: Any, count: int | None, argument: str = "keys") -> list[str]:
    wanted = "names" if count is None else f"a name for each of {count} images"
    if not isinstance(keys, list | tuple) or not all(isinstance(key, str) and key for key in keys):
        raise PullbackError(f"{argument}: expected {wanted}, as a list of text, got {shown(keys)}.")
    if count is not None and len(keys) != count:
        raise PullbackError(f"{argument}: expected {wanted}, got {len(keys)}.")
    return list(keys)


def _hash(content: Tensor) -> str:
    """Return the sha256 of pixels or features in float32."""
    return hashlib.sha256(content.detach().cpu().float().contiguous().numpy().tobytes()).hexdigest()


def _float(items: MetricItems, device: torch.device) -> MetricItems:
    parts = (items.projected, items.weights, items.aggregates)
    return MetricItems(*(part.to(device).float() for part in parts))
