"""Degradation against operations and time, for all methods on a model and pictures: a request in, a folder out.

Every method runs at several operating points (`operating_points`), and every point on every image; a decoder reads the
output, which is compared with that of the unpruned model. Images come in batches, and all points are run on a batch
before the next one is read, so that an interrupted run has compared everything on the images that it has seen. The
folder holds pareto-settings.json, rows.jsonl, cost.json, pareto.json and, with classes, embeddings/; a second run into
it adds what is missing, be it images or points, and computes nothing twice.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pullback import __version__
from pullback.backbones import load_backbone
from pullback.checks import finite_number, whole_number
from pullback.data.images import PixelFormat, SkippedImage, find_images, stream_images
from pullback.data.sources import place_of
from pullback.decoders import build_decoder
from pullback.errors import FileError, ImageError, PullbackError, counted, naming
from pullback.evaluation.fidelity import degradation, measure_of
from pullback.evaluation.neighbours import ClassOf, classes_from_folders, classes_from_table, leave_one_out
from pullback.evaluation.statistics import bootstrap_mean, bootstrap_share, mcnemar_p
from pullback.pruning.compare import NOT_COMPARED, batch_sizes, batches, key_of, not_the_own_output, timed
from pullback.pruning.frontier import compare_at, frontiers
from pullback.pruning.operating_points import (
    METHODS,
    Grid,
    Key,
    Knobs,
    Point,
    class_row,
    default_methods,
    point_on_disk,
    scores_by_block,
)
from pullback.pruning.operations import operations
from pullback.pruning.rules import Subject
from pullback.pruning.scores import IMPORTANCE
from pullback.runs.documents import COST, PARETO, PARETO_SETTINGS, ROWS
from pullback.runs.files import make_folder, read_json, remove_unfinished, write_json, writing
from pullback.runs.folder import check_kind, claim_folder
from pullback.runs.progress import Progress
from pullback.runs.provenance import commit, machine, now, weights_hash
from pullback.runs.rows import Rows
from pullback.runs.settings import keep_settings

BUDGETS = (0.8, 0.7, 0.6, 0.5)
NEIGHBOURS = (10, 20)
EMBEDDINGS = "embeddings"
SELECTION = (
    "At a budget a method counts by its best point at or below it, chosen on these same images: for a claim, measure "
    "the chosen points on images on which nothing was chosen. Plans that `pullback plan` found on other pictures, one "
    "for each budget, are no such choice."
)
_HASH_DIGITS = 16
_NUMBERS = ("value", "value_085", "floored")
UNPRUNED = Key("unpruned", "", False)
"""Its rows say which images the embeddings of the model as it is belong to."""

Row = dict[str, Any]


@dataclass(frozen=True)
class ParetoRequest:
    """Everything that decides the numbers. No ``methods``: all that the model can run. ``heads``: the scores of `best`
    (`operating_points.scores_by_block`). ``plans``: pruned models on disk, each with the method that it is a point of.
    ``labels`` or ``neighbours``: also classify by nearest neighbours, with the classes of a table or of folders."""

    model: str
    images: str
    decoder: str = "cls"
    methods: tuple[str, ...] | None = None
    heads: str | tuple[tuple[int, str], ...] = IMPORTANCE
    plans: tuple[tuple[str, Path], ...] = ()
    knobs: Knobs = field(default_factory=Knobs)
    budgets: tuple[float, ...] = BUDGETS
    labels: Path | None = None
    neighbours: tuple[int, ...] = ()
    size: int | tuple[int, int] | None = None
    limit: int | None = None
    batch: int = 16
    precision: str = "float32"
    device: str = "auto"
    seed: int = 0
    time: str = "auto"

    @property
    def ks(self) -> tuple[int, ...]:
        """How many neighbours vote; none: nobody asks."""
        return self.neighbours or (NEIGHBOURS if self.labels is not None else ())


def run_pareto(request: ParetoRequest, out: Path, progress: Progress) -> dict[str, Any]:
    """Fill the folder ``out`` and return what its pareto.json holds."""
    check_kind(out, "pareto")
    _check(request)
    files = find_images(request.images)
    class_of = _class_of(request, files[: request.limit]) if request.ks else None
    progress.stage(f"loading {request.model}")
    backbone = load_backbone(request.model, device=request.device)
    backbone.check_size(request.size)
    subject = Subject(backbone, build_decoder(request.decoder, backbone), (), request.precision)
    pixels = backbone.pixel_format(request.size)
    width = _embedding_width(request, subject, pixels) if class_of else 0
    points, notes = _points(request, subject, pixels)
    sizes = batch_sizes(request.time, backbone.device.type)
    weights, identity = weights_hash(backbone.model), subject.decoder.identity(backbone.model)
    settings = {
        "pullback": __version__,
        "commit": commit(),
        "model": backbone.name,
        "weights": weights,
        "device": backbone.device.type,
        "decoder": subject.decoder.name,
        "decoder_identity": identity,
        "source": place_of(request.images),
        "size": list(pixels.size),
        "precision": request.precision,
        "seed": request.seed,
        "classes": place_of(str(request.labels)) if request.labels else "folders" if class_of else None,
    }
    rows = PointRows(out / ROWS, points)  # which refuses other points of the same names before anything is written
    settings = keep_settings(
        claim_folder(out, "pareto") / PARETO_SETTINGS,
        settings,
        holds="a comparison",
        ignore=NOT_COMPARED,
        places=("source", "classes"),
    )
    remove_unfinished(out)
    embeddings = Embeddings(out / EMBEDDINGS, rows, width) if class_of else None
    origin = {name: settings[name] for name in ("model", "weights", "commit", "seed", "decoder")}
    origin["weights"] = weights[:_HASH_DIGITS]

    skipped: list[SkippedImage] = []
    seen: dict[str, str] = {}  # image: class
    first: Tensor | None = None
    progress.work("comparing", len(files[: request.limit]) * len(points), "rows")
    for paths, batch in batches(stream_images(files, pixels, request.limit), request.batch, skipped):
        keys, images = [key_of(path, request.images) for path in paths], batch.to(backbone.device)
        _add_rows(rows, subject, points, keys, images, origin, embeddings, progress)
        seen |= {key: class_of(path) if class_of else "" for key, path in zip(keys, paths, strict=True)}
        first = images[:1].clone() if first is None else first
    if first is None:
        raise ImageError(f"images: none of {counted(len(files), 'file')} could be read; the first: {skipped[0]}.")

    costs = Costs(out / COST, machine(backbone.device, threads=True))
    notes += costs.complete(subject, points, first, sizes, progress)
    progress.stage("comparing points")
    found = {} if embeddings is None else _neighbours(embeddings, points, seen, request.ks, backbone.device)
    if embeddings is not None:
        notes += _notes_on_classes(seen)
    document = {
        **settings,
        "date": now(),
        "machine": machine(backbone.device, threads=True),
        "torch": torch.__version__,
        "measure": measure_of(subject.full(first), depth=subject.depth),
        "class_row": class_row(subject),
        "selection": SELECTION,
        "budgets": sorted(request.budgets, reverse=True),
        "images": len(seen),
        "skipped": [image.record() for image in skipped],
        "notes": notes,
        "unpruned": {"neighbours": found.get(UNPRUNED)},
        **summarise(points, rows, list(seen), request, costs, found),
    }
    write_json(out / PARETO, document)
    return document


def _check(request: ParetoRequest) -> None:
    """Raise an error for what is wrong whatever the model is."""
    batch_sizes(request.time, "cpu")
    for name in request.methods or ():
        if name not in METHODS:
            raise PullbackError(f"methods: expected some of {', '.join(METHODS)}, got {name!r}.")
    if not request.budgets:
        raise PullbackError("budgets: expected shares of the operations such as 0.8,0.6, got none.")
    for budget in request.budgets:
        finite_number("budgets", budget, least=1e-3, most=1, expected="shares of the operations, above 0 and up to 1")
    for k in request.neighbours:
        whole_number("neighbours", k, expected="how many neighbours vote, 1 or more")


def _points(request: ParetoRequest, subject: Subject, pixels: PixelFormat) -> tuple[list[Point], list[str]]:
    """Return all points of a request, each name once, and notes on methods that this model cannot run."""
    methods = list(dict.fromkeys(request.methods or ()))
    notes: list[str] = []
    if request.methods is None:
        methods, notes = default_methods(subject, request.heads)
    heads = scores_by_block(subject, request.heads) if "best" in methods else {}
    with naming("methods", "preset"):
        points = Grid(subject, request.knobs, pixels.size, heads).points(methods)
    points += [point_on_disk(subject, name, folder, pixels.size) for name, folder in request.plans]
    if not points:
        raise PullbackError(
            f"methods: no point is left for pictures of {'x'.join(map(str, pixels.size))} pixels. Ask for more "
            "methods, or for pictures with more patches."
        )
    twice = [key for key, count in Counter(point.key for point in points).items() if count > 1]
    if twice:
        raise PullbackError(
            f"plan: expected each point once, got {twice[0].point!r} of {twice[0].method!r} several times. Give "
            "folders of the same name to different methods, and each setting once."
        )
    return points, notes


def _class_of(request: ParetoRequest, files: Sequence[Path]) -> ClassOf:
    """Return how the class of an image is found; an error where one has none."""
    found = classes_from_folders(Path(request.images)) if request.labels is None else classes_from_table(request.labels)
    for file in files:
        found(file)
    return found


def _embedding_width(request: ParetoRequest, subject: Subject, pixels: PixelFormat) -> int:
    """Return the width of what the decoder reads; an error where that is no embedding."""
    shape = subject.shape(subject.backbone.token_layout(torch.empty(0, 3, *pixels.size)))
    if len(shape) != 1 or subject.depth:
        name = "neighbours" if request.labels is None else "labels"
        raise PullbackError(
            f"{name}: nearest neighbours are those of embeddings, and decoder {request.decoder!r} gives {list(shape)}. "
            "Leave it out, or read an embedding."
        )
    return shape[0]


# Rows


class PointRows:
    """rows.jsonl by point and image: one line for each, appended as they are computed, and never computed twice."""

    def __init__(self, path: Path, points: Sequence[Point]) -> None:
        self._file = Rows(path)
        self._known: dict[Key, dict[str, dict[str, float | None]]] = {}
        wanted = {point.key: point.identity() for point in points}
        for row in self._file.each():
            key = Key.of(row)
            if key in wanted and {name: row[name] for name in wanted[key]} != wanted[key]:
                raise PullbackError(
                    f"out: {path.parent} holds rows of {key.method}, {key.point}, with another plan, other scores or "
                    "other vectors. Give this one another name, or choose another folder."
                )
            self._remember(key, row)

    def of(self, key: Key) -> dict[str, dict[str, float | None]]:
        """Return the numbers of a point by image, in the order in which they came."""
        return self._known.get(key, {})

    def add(self, key: Key, rows: Sequence[Row]) -> None:
        self._file.add(rows)
        for row in rows:
            self._remember(key, row)

    def _remember(self, key: Key, row: Row) -> None:
        """Keep the numbers alone: of thousands of images and a hundred points there are many rows."""
        self._known.setdefault(key, {})[row["image"]] = {name: row[name] for name in _NUMBERS if name in row}


class Embeddings:
    """embeddings/: of every point a file of float16 that grows, with one unit vector [width] for each of its rows.

    Vectors are written before their rows; what a killed run has written of more is cut off."""

    def __init__(self, folder: Path, rows: PointRows, width: int) -> None:
        self._folder, self._rows, self._width = make_folder(folder), rows, width

    def add(self, key: Key, vectors: Tensor) -> None:
        """Append vectors [B, width] of images whose rows come next."""
        path, before = self._path(key), len(self._rows.of(key)) * self._width * 2
        there = path.stat().st_size if path.is_file() else 0
        if there < before:
            raise self._damaged(path)
        with writing(path), open(path, "ab") as file:
            if there > before:
                file.truncate(before)
            file.write(F.normalize(vectors.float(), dim=1).to(torch.float16).cpu().numpy().tobytes())

    def read(self, key: Key, images: Sequence[str]) -> Tensor:
        """Return the vectors of these images [n, width], in float32."""
        path, order = self._path(key), {image: place for place, image in enumerate(self._rows.of(key))}
        content = path.read_bytes() if path.is_file() else b""
        count = len(order) * self._width
        if len(content) < 2 * count:
            raise self._damaged(path)
        stored = np.frombuffer(content, np.float16, count).reshape(-1, self._width)
        return torch.from_numpy(stored[[order[image] for image in images]].astype(np.float32))

    def _path(self, key: Key) -> Path:
        """Return the file of a point: its name as far as a file may have it, and a hash of all of it."""
        readable = re.sub(r"[^a-z0-9.]+", "-", " ".join(map(str, key[:2])).lower()).strip("-.")[:60]
        return self._folder / f"{readable}-{hashlib.sha256(repr(tuple(key)).encode()).hexdigest()[:8]}.f16"

    def _damaged(self, path: Path) -> FileError:
        return FileError(f"{path}: holds fewer embeddings than there are rows. Choose another folder, and run again.")


def _add_rows(
    rows: PointRows,
    subject: Subject,
    points: Sequence[Point],
    keys: Sequence[str],
    images: Tensor,
    origin: Row,
    embeddings: Embeddings | None,
    progress: Progress,
) -> None:
    """Compute the rows of a batch of images [B, 3, H, W] that are not there yet, point by point."""

    def lacking(key: Key) -> list[int]:
        return [place for place, image in enumerate(keys) if image not in rows.of(key)]

    def add(key: Key, identity: Row, output: Tensor) -> None:
        found, new = degradation(output, full, depth=subject.depth), lacking(key)
        if embeddings is not None:
            embeddings.add(key, output[new])
        named = {**origin, **key._asdict(), **identity, "measure": found.measure}
        numbers = found.rows()
        rows.add(key, [{**named, "image": keys[place], **numbers[place]} for place in new])

    missing = [point for point in points if lacking(point.key)]
    progress.advance(len(keys) * (len(points) - len(missing)))
    unpruned = embeddings is not None and bool(lacking(UNPRUNED))
    if not missing and not unpruned:
        return
    full = subject.full(images)
    if unpruned:
        add(UNPRUNED, {"plan": {}, "scores": []}, full)
    for point in missing:
        add(point.key, point.identity(), subject.output(point.model, images)[0])
        progress.advance(len(keys))


# Costs


class Costs:
    """cost.json: what each point computes, as a share of the unpruned blocks, and its milliseconds in turns with the
    unpruned model. Times are kept for later runs on the same machine."""

    def __init__(self, path: Path, machine: str) -> None:
        self._path, self._machine = path, machine
        stored = read_json(path, "out") if path.is_file() else {}
        here = stored.get("machine") == machine
        known = [row if here else {**row, "milliseconds": {}} for row in stored.get("points", [])]
        self.points: dict[Key, Row] = {Key.of(row): row for row in known}

    def complete(
        self, subject: Subject, points: Sequence[Point], image: Tensor, sizes: Sequence[int], progress: Progress
    ) -> list[str]:
        """Measure what is missing, on copies of one image [1, 3, H, W]; return what must be said about it."""
        progress.stage("counting operations")
        for point in points:
            if point.key not in self.points:
                share = operations(point.model, image)
                self.points[point.key] = {**point.key._asdict(), "operations": share, "milliseconds": {}}
        self._write()
        for size in sizes:
            missing = {p.key: p.model for p in points if str(size) not in self.points[p.key]["milliseconds"]}
            if missing:
                progress.stage(f"timing batches of {size}")
                for key, timing in timed(subject, missing, image.expand(size, -1, -1, -1)).items():
                    self.points[key]["milliseconds"][str(size)] = timing
                self._write()
        own = all(point.model.has_output for point in points)
        return [] if own or not sizes else [not_the_own_output(subject, "Times are")]

    def _write(self) -> None:
        write_json(self._path, {"machine": self._machine, "points": [*self.points.values()]})


# Neighbours


def _neighbours(
    embeddings: Embeddings, points: Sequence[Point], seen: Mapping[str, str], ks: Sequence[int], device: torch.device
) -> dict[Key, dict[str, Any]]:
    """Return, of every point and number of neighbours, how often the other images vote for the class of an image:
    "same", all of them made by the point; "unpruned", asked by the point, with the bank of the unpruned model."""
    images = list(seen)
    if len(images) < 2:
        raise ImageError("images: nearest neighbours need at least two images that can be read, got 1.")
    numbers = {name: number for number, name in enumerate(sorted(set(seen.values())))}
    labels = torch.tensor([numbers[seen[image]] for image in images], device=device)
    bank = embeddings.read(UNPRUNED, images).to(device)

    def right(bank: Tensor, queries: Tensor) -> dict[int, np.ndarray]:
        return {k: leave_one_out(bank, labels, queries, k=k).cpu().numpy() for k in ks}

    whole = right(bank, bank)
    found: dict[Key, dict[str, Any]] = {UNPRUNED: {str(k): _share(hits) for k, hits in whole.items()}}
    for point in points:
        queries = embeddings.read(point.key, images).to(device)
        banks = {"same": right(queries, queries), "unpruned": right(bank, queries)}
        found[point.key] = {
            str(k): {name: {**_share(hits[k]), "p_value": mcnemar_p(hits[k], whole[k])} for name, hits in banks.items()}
            for k in ks
        }
    return found


def _share(hits: np.ndarray) -> dict[str, Any]:
    interval = bootstrap_share(hits)
    return {"accuracy": interval.mean, "interval": [interval.low, interval.high]}


def _notes_on_classes(seen: Mapping[str, str]) -> list[str]:
    alone = sum(count == 1 for count in Counter(seen.values()).values())
    if not alone:
        return []
    return [f"{counted(alone, 'image')} with no other of the same class: nearest neighbours cannot be right."]


# The summary


def summarise(
    points: Sequence[Point],
    rows: PointRows,
    images: Sequence[str],
    request: ParetoRequest,
    costs: Costs,
    neighbours: Mapping[Key, dict[str, Any]],
) -> dict[str, Any]:
    """Return the points with means and intervals over the images of which all have a value, the frontiers of the
    methods, and tests of ours against the rivals at each budget."""
    usable = [image for image in images if all(_value(rows, point, image) is not None for point in points)]
    values = {point.key: np.array([_value(rows, point, image) for image in usable]) for point in points}
    entries = [] if not usable else [_entry(point, rows, usable, values, request.seed, costs) for point in points]
    for entry in entries:
        entry["neighbours"] = neighbours.get(Key.of(entry))
    budgets = sorted(request.budgets, reverse=True)
    tests = [
        compare_at(entries, values, budget, tuned, request.seed)
        for tuned in (False, True)
        for budget in budgets
        if entries
    ]
    return {
        "images_compared": len(usable),
        "points": entries,
        "frontiers": frontiers(entries, budgets),
        "tests": [test for test in tests if test is not None],
    }


def _value(rows: PointRows, point: Point, image: str) -> float | None:
    return rows.of(point.key)[image]["value"]


def _entry(
    point: Point, rows: PointRows, images: Sequence[str], values: Mapping[Key, np.ndarray], seed: int, costs: Costs
) -> Row:
    own, known = values[point.key], [rows.of(point.key)[image] for image in images]
    interval, cost = bootstrap_mean(own, generator=np.random.default_rng(seed)), costs.points[point.key]
    beside = [name for name in _NUMBERS[1:] if name in known[0]]
    return {
        **point.key._asdict(),
        "ours": point.ours,
        **point.identity(),
        "mean": interval.mean,
        "interval": [interval.low, interval.high],
        "median": float(np.median(own)),
        **{name: float(np.mean([numbers[name] for numbers in known])) for name in beside},
        "operations": cost["operations"],
        "milliseconds": cost["milliseconds"],
    }
