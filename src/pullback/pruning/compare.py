"""What removing tokens costs the output and what it saves, for many rules side by side: a request in, a folder out.

Every rule is a `PrunedModel` of the user's model, as `pb.prune` returns it: a decoder reads its tokens, and its call is
timed against the model's own. Images come in batches, and every rule is run on a batch before the next one is read: the
unpruned output and exact scores are computed once for all rules, and an interrupted run has compared everything on the
images that it has seen. Then come the costs, and the tests between rules. The folder holds settings.json, rows.jsonl,
cost.json, examples.npz, summary.json and, with labelled images, bank.npz; a second run into it adds what is missing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from pullback import __version__
from pullback.backbones import load_backbone
from pullback.backbones.outputs import own_output
from pullback.data.images import PixelFormat, SkippedImage, find_images, stream_images
from pullback.data.sources import fixed_part, place_of
from pullback.decoders import build_decoder
from pullback.errors import ImageError, PullbackError, counted, naming
from pullback.evaluation.cost import flops, milliseconds, race
from pullback.evaluation.fidelity import degradation, measure_of
from pullback.evaluation.neighbours import Bank, ClassOf, classes_from_folders, classes_from_table, notes_on
from pullback.evaluation.statistics import bootstrap_mean, compare_paired
from pullback.learning.head import ImportanceHead
from pullback.learning.pretrained import model_folder
from pullback.learning.shipped_heads import shipped_folders, shipped_heads
from pullback.learning.spn import SpectralPullbackNetwork
from pullback.pruning.examples import MAX_IMAGES, Examples, panels, write_examples
from pullback.pruning.model import PrunedModel
from pullback.pruning.plan import PrunePlan
from pullback.pruning.rules import Rule, Scores, Subject, load_networks, own_score, reference_score, rules
from pullback.pruning.scores import IMPORTANCE
from pullback.runs.documents import BANK, COST, ROWS, SETTINGS, SUMMARY
from pullback.runs.files import SAVE_EVERY, WEIGHTS, read_arrays, read_json, remove_unfinished, write_arrays, write_json
from pullback.runs.folder import check_kind, claim_folder
from pullback.runs.progress import Progress
from pullback.runs.provenance import commit, file_hash, machine, now, weights_hash
from pullback.runs.rows import Rows
from pullback.runs.settings import keep_settings

NOT_COMPARED = ("pullback", "commit", "model", "device")
"""Settings that may differ on resume: the weights' hash says which model it is, and another version may go on."""
PARTIAL_BANK = "bank.partial.npz"
_HASH_DIGITS = 16
_SECONDS, _FEWEST, _MOST = 0.5, 5, 30  # of each timing: about so long, and so many rounds

Row = dict[str, Any]
_Name = TypeVar("_Name", bound=Hashable)
UNPRUNED = Rule("unpruned", "none", 0.0)
"""Its rows hold the k-NN hits of the model as it is."""


@dataclass(frozen=True)
class PruneRequest:
    """Everything that decides the numbers. No ``stages``: one after a third of the blocks. No ``heads``: those that
    ship for these stages. No ``scores``: importance (of the heads, or without any exact) and the ones that need no
    training."""

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


def run_comparison(request: PruneRequest, out: Path, progress: Progress) -> dict[str, Any]:
    """Fill the folder ``out`` and return what its summary.json holds."""
    check_kind(out, "prune")
    files = find_images(request.images)
    with naming("bank"):
        in_bank = [] if request.bank is None else find_images(request.bank)
    batch_sizes(request.time, "cpu")
    with naming("ratios"):
        for ratio in request.ratios:
            PrunePlan((0,), (ratio,))
    progress.stage(f"loading {request.model}")
    backbone = load_backbone(request.model, device=request.device)
    stages = (backbone.depth // 3,) if request.stages is None else request.stages
    subject = Subject(backbone, build_decoder(request.decoder, backbone), stages, request.precision)
    request = replace(request, heads=_heads(request, subject))
    names = request.scores or _default_scores(request, backbone.prefix)
    wanted = rules(request.presets, names, request.ratios)
    notes = subject.check(wanted)
    weights, identity = weights_hash(backbone.model), subject.decoder.identity(backbone.model)
    scores = Scores(
        subject,
        heads=load_networks(ImportanceHead, "head", request.heads, subject, identity),
        spns=load_networks(SpectralPullbackNetwork, "spn", request.spns, subject, identity),
        rank=request.rank,
        distance=request.distance,
        seed=request.seed,
    )
    scores.check(wanted)
    backbone.check_size(request.size)
    pixels = backbone.pixel_format(request.size)
    sizes = batch_sizes(request.time, backbone.device.type)
    classes = None if request.bank is None else _class_of(request, request.bank, subject)
    if classes is not None:
        notes += notes_on({classes(file) for file in in_bank}, [classes(file) for file in files[: request.limit]])
    models = {rule: scores.pruned(rule) for rule in wanted}

    settings = keep_settings(
        claim_folder(out, "prune") / SETTINGS,
        _settings(request, subject, weights, identity, pixels),
        holds="a comparison",
        ignore=NOT_COMPARED,
        may_be_added=("head",),  # rows without it do not depend on it
        places=("source", "bank", "labels"),
    )
    remove_unfinished(out)
    rows = RuleRows(out / ROWS)
    costs = Costs(out / COST, machine(backbone.device, threads=True))
    bank = None
    if classes is not None:
        progress.stage(f"embedding the bank {request.bank}")
        bank = _bank(out / BANK, in_bank, subject, classes, pixels, request.batch)

    origin = {name: settings[name] for name in ("model", "weights", "commit", "seed", "decoder")}
    origin |= {"weights": weights[:_HASH_DIGITS], "layer": list(stages)}
    skipped: list[SkippedImage] = []
    seen: list[str] = []
    shown = Examples(scores)
    # a Jacobian takes long on a CPU: one by one, a killed run loses one image at most, and no number depends on it
    one_by_one = backbone.device.type == "cpu" and not all(scores.deployable(rule) for rule in wanted)
    at_a_time = 1 if one_by_one else request.batch
    progress.work("pruning", len(files[: request.limit]) * len(wanted), "rows")
    for paths, images in batches(stream_images(files, pixels, request.limit), at_a_time, skipped):
        keys, truth = [key_of(path, request.images) for path in paths], [classes(path) for path in paths if classes]
        batch = Batch(keys, images.to(backbone.device), truth)
        scores.begin(keys)
        _add_rows(rows, subject, models, batch, origin, bank, progress)
        shown.add(keys, batch.images)
        seen += keys
        if shown.full and len(seen) - len(keys) < MAX_IMAGES:
            _write_examples(out, subject, shown, models, names, pixels)
    if not seen:
        raise ImageError(f"images: none of {counted(len(files), 'file')} could be read; the first: {skipped[0]}.")
    if not shown.full:
        _write_examples(out, subject, shown, models, names, pixels)
    first = shown.images[:1]

    plain = {rule: scores.pruned(rule, plain=True) for rule in wanted if sizes and scores.deployable(rule)}
    notes += costs.complete(subject, plain, first, sizes, progress)
    progress.stage("testing")
    unpruned = rows.of(UNPRUNED)
    document = {
        **settings,
        "date": now(),
        "machine": machine(backbone.device, threads=True),
        "torch": torch.__version__,
        "measure": measure_of(subject.full(first), depth=subject.depth),
        "reference": reference_score(names),
        "presets": list(request.presets),
        "scores": list(names),
        "ratios": list(request.ratios),
        "images": len(seen),
        "images_compared": len(images_of_all(rows, wanted, seen)),
        "skipped": [image.record() for image in skipped],
        "notes": notes,
        "unpruned": {
            "flops": costs.unpruned_flops,
            "knn": sum(unpruned[key]["knn"] for key in seen) / len(seen) if bank else None,
        },
        "rules": summarise(rows, wanted, seen, names, request.seed, costs.rules),
    }
    write_json(out / SUMMARY, document)
    return document


def _write_examples(
    out: Path,
    subject: Subject,
    shown: Examples,
    models: Mapping[Rule, PrunedModel],
    names: Sequence[str],
    pixels: PixelFormat,
) -> None:
    chosen = {rule: models[rule] for rule in panels(list(models), reference_score(names))}
    shown.begin()
    write_examples(out, subject, chosen, shown.images, shown.keys, pixels)


def _heads(request: PruneRequest, subject: Subject) -> tuple[Path, ...]:
    """Return the folders of the heads that score: those that were given, or of each stage the one that ships. Where
    importance was not asked for by name, there may be none."""
    if request.heads or (request.scores is not None and IMPORTANCE not in request.scores):
        return request.heads
    backbone, decoder, stages = subject.backbone, subject.decoder.name, list(subject.stages)
    if request.scores is None and not set(stages) <= set(shipped_heads(backbone, decoder)):
        return ()
    return tuple(shipped_folders(backbone, decoder, stages, argument="scores"))


def _default_scores(request: PruneRequest, prefix: int) -> tuple[str, ...]:
    """Return importance and the scores that need no training; two of them need a class token."""
    own = "importance" if request.heads else "exact"
    return (own, "random", "bipartite", "norm", *(("class-attention", "cls-similarity") if prefix else ()))


# The rows


class RuleRows:
    """rows.jsonl by rule and image: one line for each, appended as they are computed, and never computed twice."""

    def __init__(self, path: Path) -> None:
        self._file = Rows(path)
        self._known: dict[Rule, dict[str, Row]] = {}
        self._remember(self._file.read())

    def of(self, rule: Rule) -> dict[str, Row]:
        """Return the rows of a rule by image, in the order in which they came."""
        return self._known.get(rule, {})

    def add(self, rows: Iterable[Row]) -> None:
        new = list(rows)
        self._file.add(new)
        self._remember(new)

    def _remember(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self._known.setdefault(Rule.of(row), {})[row["image"]] = row


@dataclass(frozen=True)
class Batch:
    """Images [B, 3, H, W] with the keys that rows name them by, and, where there is a bank, their classes."""

    keys: list[str]
    images: Tensor
    classes: list[str]


def _add_rows(
    rows: RuleRows,
    subject: Subject,
    models: Mapping[Rule, PrunedModel],
    batch: Batch,
    origin: Row,
    bank: Bank | None,
    progress: Progress,
) -> None:
    """Compute the rows of a batch that are not there yet, rule by rule."""
    keys = batch.keys
    everything = [*([UNPRUNED] if bank is not None else []), *models]
    missing = [rule for rule in everything if not all(key in rows.of(rule) for key in keys)]
    progress.advance(len(keys) * sum(rule not in missing for rule in models))
    if not missing:
        return
    full = subject.full(batch.images)
    for rule in missing:
        output = full if rule == UNPRUNED else subject.output(models[rule], batch.images)[0]
        found = degradation(output, full, depth=subject.depth)
        named = {**origin, **asdict(rule), "measure": found.measure}
        new: list[Row] = [{**named, "image": key, **row} for key, row in zip(keys, found.rows(), strict=True)]
        if bank is not None:
            for row, hit in zip(new, bank.votes_right(output, batch.classes), strict=True):
                row["knn"] = hit
        rows.add(row for row in new if row["image"] not in rows.of(rule))
        if rule != UNPRUNED:
            progress.advance(len(keys))


def batches(
    images: Iterable[tuple[Path, Tensor | SkippedImage]], size: int, skipped: list[SkippedImage]
) -> Iterator[tuple[list[Path], Tensor]]:
    """Stack images as they are read, so many at a time; collect the unreadable ones in ``skipped``."""
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


def _class_of(request: PruneRequest, bank: Path, subject: Subject) -> ClassOf:
    """Return how the class of an image is found: in the table of labels, or as its folder in the images or the bank."""
    if subject.dense or subject.depth:
        raise PullbackError(
            f"bank: k-NN classifies embeddings of decoders that read the class token, got --decoder {request.decoder}."
        )
    if request.labels is not None:
        return classes_from_table(request.labels)
    by_root = [(root, classes_from_folders(root)) for root in (Path(request.images), bank)]

    def class_of(file: Path) -> str:
        inside = [find for root, find in by_root if file.resolve().is_relative_to(root.resolve())]
        return (inside or [by_root[0][1]])[0](file)

    return class_of


def _bank(
    path: Path, files: Sequence[Path], subject: Subject, class_of: ClassOf, pixels: PixelFormat, size: int
) -> Bank:
    """Read the bank stored at ``path``, or compute the unpruned embeddings of images and store them there.

    What is done of it is kept every `SAVE_EVERY` seconds in a file beside it, with which a run that was killed goes
    on."""
    partial_path = path.with_name(PARTIAL_BANK)
    if not path.is_file():
        classes: list[str] = []
        parts: list[Tensor] = []
        done, saved = 0, time.perf_counter()
        if partial_path.is_file():
            stored = read_arrays(partial_path)
            classes, parts, done = (
                stored["classes"].tolist(),
                [torch.from_numpy(stored["embeddings"])],
                int(stored["done"]),
            )
        skipped: list[SkippedImage] = []
        for paths, images in batches(stream_images(files[done:], pixels), size, skipped):
            classes += [class_of(file) for file in paths]
            parts.append(subject.full(images.to(subject.backbone.device)).cpu().float())
            if time.perf_counter() - saved > SAVE_EVERY:
                last = done + files[done:].index(paths[-1]) + 1
                arrays = {"embeddings": torch.cat(parts).numpy(), "classes": np.array(classes), "done": np.array(last)}
                write_arrays(partial_path, arrays)
                saved = time.perf_counter()
        if not parts:
            raise ImageError("bank: expected images that can be read, got none.")
        write_arrays(path, {"embeddings": torch.cat(parts).numpy(), "classes": np.array(classes)})
    partial_path.unlink(missing_ok=True)
    arrays = read_arrays(path)
    return Bank.of(torch.from_numpy(arrays["embeddings"]), arrays["classes"].tolist())


def _settings(
    request: PruneRequest, subject: Subject, weights: str, identity: str, pixels: PixelFormat
) -> dict[str, Any]:
    """Return what must not change between two runs into one folder. Ratios, scores, presets and images may be added."""
    return {
        "pullback": __version__,
        "commit": commit(),
        "model": subject.backbone.name,
        "weights": weights,
        "device": subject.backbone.device.type,
        "decoder": subject.decoder.name,
        "decoder_identity": identity,
        "stages": list(subject.stages),
        "source": place_of(request.images),
        "size": list(pixels.size),
        "precision": request.precision,
        "seed": request.seed,
        "rank": request.rank,
        "distance": request.distance,
        "head": [network_hash(folder) for folder in request.heads] or None,
        "spn": [network_hash(folder) for folder in request.spns] or None,
        "bank": None if request.bank is None else place_of(str(request.bank)),
        "labels": None if request.labels is None else place_of(str(request.labels)),
    }


def network_hash(folder: Path) -> str:
    """Return the hash of the weights in a folder of `save_pretrained`; of a hub id its name."""
    path = Path(model_folder(folder)) / WEIGHTS
    return file_hash(path)[:_HASH_DIGITS] if path.is_file() else str(folder)


def key_of(path: Path, source: str) -> str:
    """Return how a row names an image: by its path relative to the folder that was asked for, or to the part of a glob
    without wildcards, however that is spelled."""
    root = Path(source).expanduser()
    return path.relative_to(root if root.is_dir() else fixed_part(source)).as_posix()


# The costs


def batch_sizes(text: str, device: str) -> tuple[int, ...]:
    """Read the batch sizes to time: "auto" (1, 8 and 64 on a GPU, 1 and 8 on a CPU), "none", or numbers."""
    if text == "none":
        return ()
    if text == "auto":
        return (1, 8) if device == "cpu" else (1, 8, 64)
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise PullbackError(f"time: expected auto, none or batch sizes such as 1,8,64, got {text!r}.")
    return sizes


class Costs:
    """cost.json: operations per image, and milliseconds in turns with the unpruned model. Each is measured once on a
    machine, and kept for later runs there."""

    def __init__(self, path: Path, machine: str) -> None:
        self._path, self._machine = path, machine
        stored = read_json(path, "out") if path.is_file() else {}
        stored = stored if stored.get("machine") == machine else {}
        known = [(Rule.of(row), row) for row in stored.get("rules", [])]
        self.rules = {rule: {**row, **asdict(rule)} for rule, row in known}
        self.unpruned_flops: int | None = stored.get("unpruned_flops")

    def complete(
        self,
        subject: Subject,
        models: Mapping[Rule, PrunedModel],
        image: Tensor,
        sizes: Sequence[int],
        progress: Progress,
    ) -> list[str]:
        """Measure what is missing, on copies of one image [1, 3, H, W]; return what must be said about it."""
        if not models:
            return []
        progress.stage("counting operations")
        unpruned, pruned = _calls(subject, models, image)
        self.unpruned_flops = flops(unpruned)
        for rule, call in pruned.items():
            if rule not in self.rules:
                self.rules[rule] = {**asdict(rule), "flops": flops(call), "milliseconds": {}}
        for size in sizes:
            missing = {rule: m for rule, m in models.items() if str(size) not in self.rules[rule]["milliseconds"]}
            if missing:
                progress.stage(f"timing batches of {size}")
                self._time(subject, missing, image.expand(size, -1, -1, -1))
                self._write()
        self._write()
        if all(model.has_output for model in models.values()):
            return []
        return [not_the_own_output(subject, "Operations and time are")]

    def _write(self) -> None:
        document = {
            "machine": self._machine,
            "unpruned_flops": self.unpruned_flops,
            "rules": [*self.rules.values()],
        }
        write_json(self._path, document)

    def _time(self, subject: Subject, models: Mapping[Rule, PrunedModel], images: Tensor) -> None:
        for rule, timing in timed(subject, models, images).items():
            self.rules[rule]["milliseconds"][str(len(images))] = timing


def timed(subject: Subject, models: Mapping[_Name, PrunedModel], images: Tensor) -> dict[_Name, Row]:
    """Return the milliseconds of every model on images [B, 3, H, W], measured in turns with the unpruned one."""
    unpruned, pruned = _calls(subject, models, images)
    device = subject.backbone.device
    once = milliseconds(unpruned, device, rounds=1).median / 1e3
    rounds = min(_MOST, max(_FEWEST, round(_SECONDS / once)))
    before, *after = race([unpruned, *pruned.values()], device, rounds)
    return {
        name: {**asdict(timing), "unpruned": before.median, "speedup": before.median / timing.median}
        for name, timing in zip(pruned, after, strict=True)
    }


def not_the_own_output(subject: Subject, what: str) -> str:
    """Return the note that what is measured is not the call of the model itself."""
    return (
        f"{what} of the backbone with decoder {subject.decoder.name!r}: the model's own output cannot be made of the "
        "tokens that these plans leave."
    )


def _calls(
    subject: Subject, models: Mapping[_Name, PrunedModel], images: Tensor
) -> tuple[Callable[[], Any], dict[_Name, Callable[[], Any]]]:
    """Return what a user runs: the model itself, and its pruned copies. Where its own output cannot be made of what
    they leave, only what the decoder reads is computed, by both."""
    if not all(model.has_output for model in models.values()):
        return partial(subject.full, images), {
            rule: partial(subject.output, model, images) for rule, model in models.items()
        }

    def run(model: Any) -> Any:
        with subject.arithmetic():
            return own_output(model, subject.backbone, images)

    return partial(run, subject.backbone.model), {rule: partial(run, model) for rule, model in models.items()}


# The summary


def images_of_all(rows: RuleRows, wanted: Sequence[Rule], images: Sequence[str]) -> list[str]:
    """Return the images that every rule has a value of: tests are paired, and means are over the same images."""

    def known(rule: Rule) -> set[str]:
        return {image for image, row in rows.of(rule).items() if row["value"] is not None}

    common = set(images).intersection(*(known(rule) for rule in wanted))
    return [image for image in images if image in common]


def summarise(
    rows: RuleRows,
    wanted: Sequence[Rule],
    images: Sequence[str],
    scores: Sequence[str],
    seed: int,
    costs: Mapping[Rule, Row],
) -> list[dict[str, Any]]:
    """Return means with intervals, tests and cost of every rule. Within a preset scores are tested against the
    reference score, and across presets against the reference score under the first one."""
    usable = images_of_all(rows, wanted, images)
    if not usable:
        return []
    found = {rule: [rows.of(rule)[image] for image in usable] for rule in wanted}
    values = {rule: np.array([row["value"] for row in own]) for rule, own in found.items()}
    reference, first = reference_score(scores), wanted[0].preset
    entries = []
    for rule in wanted:
        others = [Rule(name, own_score(name) or reference, rule.ratio) for name in dict.fromkeys((rule.preset, first))]
        interval = bootstrap_mean(values[rule], generator=np.random.default_rng(seed))
        entries.append(
            {
                **asdict(rule),
                "images": len(usable),
                "mean": interval.mean,
                "interval": [interval.low, interval.high],
                "median": float(np.median(values[rule])),
                **_means(found[rule]),
                "tests": [_test(values, rule, other, seed) for other in others if other != rule],
                "cost": costs.get(rule),
            }
        )
    return entries


def _test(values: Mapping[Rule, np.ndarray], own: Rule, other: Rule, seed: int) -> dict[str, Any]:
    """Test a rule against another: a positive difference and a factor above 1 say that the other is better."""
    compared = compare_paired(values[own], values[other], generator=np.random.default_rng(seed))
    against = float(values[other].mean())
    return {
        "preset": other.preset,
        "score": other.score,
        "p_value": compared.p_value,
        "difference": compared.difference.mean,
        "interval": [compared.difference.low, compared.difference.high],
        "factor": float(values[own].mean()) / against if against > 0 else None,
        "worse_on": float((values[own] > values[other]).mean()),
    }


def _means(rows: Sequence[Row]) -> dict[str, float]:
    """Average whatever else the rows hold: the other SILog, the share of floored pixels, k-NN hits."""
    names = {"value_085": "mean_085", "floored": "floored", "knn": "knn"}
    known = {name: written for name, written in names.items() if rows[0].get(name) is not None}
    return {written: float(np.mean([row[name] for row in rows])) for name, written in known.items()}
