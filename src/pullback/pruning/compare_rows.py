"""What `pullback prune` does, without the terminal: a request in, files in a folder out.

Images come in batches, and every combination of preset, score and ratio is run on a batch before the next one is read:
the unpruned output and exact scores are computed once for all of them, and an interrupted run has compared everything
on the images that it has seen.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pullback import __version__
from pullback.backbones import load_backbone
from pullback.data.images import PixelFormat, SkippedImage, find_images, iter_images
from pullback.decoders import build_decoder
from pullback.errors import ImageError, PullbackError
from pullback.learning.head import ImportanceHead
from pullback.learning.spn import SpectralPullbackNetwork
from pullback.pruning.compare_cost import CostBook, parse_batches
from pullback.pruning.compare_examples import panels, write_examples
from pullback.pruning.compare_neighbours import Bank, ClassOf, classes_from_folders, classes_from_table, read_bank
from pullback.pruning.compare_scores import BatchScores, ScoreBook, load_networks
from pullback.pruning.compare_store import RowStore, folder_hash
from pullback.pruning.compare_subject import Combination, Subject, combinations, degradation, measure_of
from pullback.pruning.compare_summary import images_of_all, reference_score, summarise
from pullback.report.progress import ProgressDisplay
from pullback.runs import documents as prune_files
from pullback.runs.files import write_json
from pullback.runs.provenance import commit, weights_hash

UNPRUNED = Combination("unpruned", "none", 0.0)
"""Its rows hold the k-NN hits of the model as it is."""

_HASH_DIGITS = 16
Batch = tuple[list[Path], Tensor]


@dataclass(frozen=True)
class PruneRequest:
    """Everything that decides the numbers. No ``stages``: one after a third of the blocks. No ``scores``: importance
    (of the head, or exact) and the ones that need no training."""

    model: str
    images: str
    decoder: str = "cls"
    ratios: tuple[float, ...] = (0.1, 0.2, 0.3, 0.5)
    stages: tuple[int, ...] | None = None
    scores: tuple[str, ...] | None = None
    presets: tuple[str, ...] = ("best",)
    heads: tuple[Path, ...] = ()
    spns: tuple[Path, ...] = ()
    rank: int = 20
    distance: str | None = None
    bank: Path | None = None
    labels: Path | None = None
    size: int | tuple[int, int] | None = None
    limit: int | None = None
    batch: int = 16
    precision: str = "float32"
    device: str = "auto"
    seed: int = 0
    time: str = "auto"


def run_comparison(request: PruneRequest, out: Path, watch: ProgressDisplay) -> dict[str, Any]:
    """Fill ``out`` and return what its summary.json holds."""
    watch.stage(f"loading {request.model}")
    backbone = load_backbone(request.model, device=request.device)
    stages = (backbone.depth // 3,) if request.stages is None else request.stages
    subject = Subject(backbone, build_decoder(request.decoder, backbone), stages, request.precision)
    scores = request.scores or _default_scores(request, backbone.prefix)
    wanted = combinations(request.presets, scores, request.ratios)
    notes = subject.plan_warnings(wanted)
    weights = weights_hash(backbone.model)
    book = ScoreBook(
        subject,
        load_networks(ImportanceHead, "head", request.heads, subject, weights),
        load_networks(SpectralPullbackNetwork, "spn", request.spns, subject, weights),
        request.rank,
        request.distance,
        request.seed,
    )
    book.check(wanted)
    pixels = _pixel_format(subject, request.size)
    files = find_images(request.images)
    sizes = parse_batches(request.time, backbone.device.type)
    classes = None if request.bank is None else _class_of(request, subject)
    settings = _settings(request, subject, weights, pixels)
    store = RowStore(out, settings)
    bank = None
    if request.bank is not None and classes is not None:
        watch.stage(f"embedding the bank {request.bank}")
        bank = _bank(request, subject, pixels, classes, out)
        notes += bank.notes_on([classes(file) for file in files[: request.limit]])

    count = len(files[: request.limit])
    watch.work("pruning", count * len(wanted), "rows")
    skipped: list[SkippedImage] = []
    names: list[str] = []
    first: tuple[Tensor, BatchScores] | None = None
    for paths, images in batches(_stream(files, pixels, request.limit), request.batch, skipped):
        keys = [_key(path, request.images) for path in paths]
        truth = None if classes is None else [classes(path) for path in paths]
        images, ready = images.to(backbone.device), BatchScores(book, keys)
        first = first or (images, ready)
        _add_rows(store, subject, ready, wanted, images, bank, truth, watch)
        names += keys
    if first is None:
        raise ImageError(f"images: none of the {len(files)} files could be read; the first: {skipped[0]}.")

    costs = CostBook(out / prune_files.COST, _machine(backbone.device))
    if sizes:
        costs.complete(subject, book, wanted, first[0][0], sizes, watch.stage)
    watch.stage("pictures of tokens")
    reference = reference_score(scores)
    write_examples(out, subject, first[1], panels(wanted, reference), first[0], pixels)
    watch.stage("testing")
    unpruned = store.of(UNPRUNED)
    document = {
        **store.settings,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": _machine(backbone.device),
        "torch": torch.__version__,
        "measure": measure_of(subject.decoder.name, subject.full(first[0][:1])),
        "reference": reference,
        "presets": list(request.presets),
        "scores": list(scores),
        "ratios": list(request.ratios),
        "images": len(names),
        "images_compared": len(images_of_all(store, wanted, names)),
        "skipped": [{"file": str(image.path), "reason": image.reason} for image in skipped],
        "notes": notes,
        "unpruned": {
            "flops": costs.unpruned_flops,
            "knn": sum(unpruned[name]["knn"] for name in names) / len(names) if bank else None,
        },
        "rules": summarise(store, wanted, names, scores, request.seed, costs.rules),
    }
    write_json(out / prune_files.SUMMARY, document)
    return document


def _add_rows(
    store: RowStore,
    subject: Subject,
    scores: BatchScores,
    wanted: Sequence[Combination],
    images: Tensor,
    bank: Bank | None,
    classes: list[str] | None,
    watch: ProgressDisplay,
) -> None:
    """The rows of a batch that are not there yet, combination by combination."""
    keys = scores.keys
    everything = [*([UNPRUNED] if bank is not None else []), *wanted]
    missing = [rule for rule in everything if not all(store.has(rule, key) for key in keys)]
    watch.advance(len(keys) * sum(rule not in missing for rule in wanted))
    if not missing:
        return
    full = subject.full(images)
    measure = measure_of(subject.decoder.name, full)
    origin = {name: store.settings[name] for name in ("model", "weights", "commit", "seed", "decoder")}
    origin |= {"weights": origin["weights"][:_HASH_DIGITS], "layer": list(subject.stages)}
    for rule in missing:
        output = full if rule == UNPRUNED else _pruned(subject, scores, rule, images)
        found = degradation(measure, output, full)
        if bank is not None and classes is not None:
            for row, hit in zip(found, bank.votes_right(output, classes), strict=True):
                row["knn"] = hit
        named = {"preset": rule.preset, "score": rule.score, "ratio": rule.ratio, "measure": measure}
        store.add(
            {**origin, **named, "image": key, **row}
            for key, row in zip(keys, found, strict=True)
            if not store.has(rule, key)
        )
        if rule != UNPRUNED:
            watch.advance(len(keys))


def _pruned(subject: Subject, scores: BatchScores, rule: Combination, images: Tensor) -> Tensor:
    plan = subject.plan(rule)
    modes = scores.modes if plan.match == "task" else None
    return subject.pruned(images, plan, scores.per_stage(rule.score), modes)[0]


def batches(
    images: Iterable[tuple[Path, Tensor | SkippedImage]], size: int, skipped: list[SkippedImage]
) -> Iterator[Batch]:
    """Images as they are read, so many at a time; the unreadable ones are collected in ``skipped``."""
    files: list[Path] = []
    pixels: list[Tensor] = []
    for file, image in images:
        if isinstance(image, SkippedImage):
            skipped.append(image)
            continue
        files.append(file)
        pixels.append(image)
        if len(files) == size:
            yield files, torch.stack(pixels)
            files, pixels = [], []
    if files:
        yield files, torch.stack(pixels)


def _stream(
    files: Sequence[Path], wanted: PixelFormat, limit: int | None
) -> Iterator[tuple[Path, Tensor | SkippedImage]]:
    return iter_images(
        files, wanted.size, mean=wanted.mean, std=wanted.std, limit=limit, interpolation=wanted.interpolation
    )


def _default_scores(request: PruneRequest, prefix: int) -> tuple[str, ...]:
    """The last two ask the class token, which not every model has."""
    own = "importance" if request.heads else "exact"
    return (own, "random", "tome", "norm", *(("evit", "cls-similarity") if prefix else ()))


def _pixel_format(subject: Subject, size: int | tuple[int, int] | None) -> PixelFormat:
    wanted = subject.backbone.preprocessing
    chosen = PixelFormat.of(wanted.size if size is None else size, wanted.mean, wanted.std, wanted.interpolation)
    subject.backbone.token_layout(torch.empty(0, 3, *chosen.size))  # refuses sizes that the patches do not divide
    return chosen


def _class_of(request: PruneRequest, subject: Subject) -> ClassOf:
    if subject.dense or request.decoder.startswith("depth"):
        raise PullbackError(
            f"bank: k-NN classifies embeddings of decoders that read the class token, got --decoder {request.decoder}."
        )
    if request.labels is not None:
        return classes_from_table(request.labels)
    assert request.bank is not None
    by_root = [(root, classes_from_folders(root)) for root in (Path(request.images), request.bank)]

    def class_of(file: Path) -> str:
        inside = [find for root, find in by_root if file.resolve().is_relative_to(root.resolve())]
        return (inside or [by_root[0][1]])[0](file)

    return class_of


def _bank(request: PruneRequest, subject: Subject, pixels: PixelFormat, classes: ClassOf, out: Path) -> Bank:
    assert request.bank is not None
    stream = batches(_stream(find_images(request.bank), pixels, None), request.batch, [])
    device = subject.backbone.device
    return read_bank(out / prune_files.BANK, stream, lambda images: subject.full(images.to(device)), classes)


def _settings(request: PruneRequest, subject: Subject, weights: str, pixels: PixelFormat) -> dict[str, Any]:
    """What must not change between two runs into one folder. Ratios, scores, presets and images may be added."""
    return {
        "pullback": __version__,
        "commit": commit(),
        "model": subject.backbone.name,
        "weights": weights,
        "device": subject.backbone.device.type,
        "decoder": subject.decoder.name,
        "stages": list(subject.stages),
        "source": str(Path(request.images)),
        "size": list(pixels.size),
        "precision": request.precision,
        "seed": request.seed,
        "rank": request.rank,
        "distance": request.distance,
        "head": [folder_hash(folder) for folder in request.heads] or None,
        "spn": [folder_hash(folder) for folder in request.spns] or None,
        "bank": None if request.bank is None else str(request.bank),
        "labels": None if request.labels is None else str(request.labels),
    }


def _key(path: Path, source: str) -> str:
    """How a row names an image: relative to the folder that was asked for."""
    root = Path(source).expanduser()
    return path.relative_to(root).as_posix() if root.is_dir() else path.as_posix()


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{platform.machine()}, {threads} thread{'s' * (threads != 1)}"
