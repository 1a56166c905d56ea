"""Points of every method, frozen and tuned alike, against one another: what needs a GPU, in calls of ten minutes.

    python benchmarks/frontier.py pack --from DINOV2 train/ bank/ diag/ heldout/ sketch/ hires/ --out local/parts
    python benchmarks/frontier.py unpack --parts local/parts --out ~/data              # there; once for each part
    python benchmarks/frontier.py points --model DINOV2 --train train/ --work local/frontier
    python benchmarks/frontier.py replan --model DINOV2 --budgets 0.7 0.61 --work W     # or from plans found before
    python benchmarks/frontier.py tune --model DINOV2 --train train/ --work local/frontier --minutes 9
    python benchmarks/frontier.py evaluate --model DINOV2 --images heldout=heldout/ sketch=sketch/ --work local/frontier
    python benchmarks/frontier.py neighbours --model DINOV2 --images photos/ --labels labels.csv --work local/frontier
    python benchmarks/frontier.py collect --work local/frontier --out $OUT              # brings back what was computed
    python benchmarks/frontier.py report --work local/frontier                          # into benchmarks/results/

CLIP has heads in the package (for one set of weights: see their card); for what has none these come first, and its
points name them:

    python benchmarks/frontier.py points --model CLIP --decoder projection --budgets 0.7 0.5 ...
    python benchmarks/frontier.py heads --model OTHER --decoder projection --train train/ bank/ --judges diag/ --work W
    python benchmarks/frontier.py points --model OTHER --decoder projection --heads W/heads --budgets 0.7 0.5 ...

A dense decoder (saliency) has `dense` in place of `points` and `tune`: trust is chosen on training pictures.

    python benchmarks/frontier.py heads --model SALIENCY/backbone --decoder saliency --train ... --judges ... --work W
    python benchmarks/frontier.py dense --model SALIENCY/backbone --decoder saliency --heads W/heads --images ...

Every part goes on where it was stopped, and begins nothing that would not end before ``--minutes`` are over; it says
then that it is to be run again. Several processes with the same ``--work`` share the jobs of a part: each takes the
first that is not done and that no other process is at. 518 px are the same parts with `--size 518 --steps 300
--batch 32` and another folder; the photographs to tune on have 256 pixels, so they are enlarged for it.

What to carry: the checkout takes most of the 64 MiB that travel with a call, so `pack` makes parts of 15 MB. Carry one
of them (`local/parts/NN`) per call, and unpack it outside the checkout, where it stays while the machine is held.
`local/frontier` (points, and what was tuned before) is small and goes with the first call of a lease. There the command
is `PYTHONPATH=src python3 benchmarks/frontier.py`. A GPU waits for Python in most steps: three processes at once.

Points: for each method the mildest setting within a budget of operations (`pb.operations`). Ours is what
`pb.plan_pruning` finds on training pictures; "planned, own size" may not shrink pictures. Tuning is the same for all:
`pb.tune`, whose best step on a tenth of the training pictures is kept. What is tuned first is what is claimed first.
"""

from __future__ import annotations

import argparse
import fcntl
import io
import json
import shutil
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from frontier_parts.polish import Polisher
from frontier_parts.report import EXPECTED, MACHINE, OURS, OWN_SIZE, report
from measure import RESULTS, machine
from torch import Tensor, nn

import pullback as pb
from pullback.backbones import attention, load_backbone
from pullback.evaluation.fidelity import readable
from pullback.evaluation.neighbours import classes_from_table, leave_one_out
from pullback.learning.head import ImportanceHead
from pullback.learning.shipped_heads import load_shipped, shipped_heads
from pullback.learning.train_heads import heads_config, stream_config, train_heads
from pullback.pruning.operating_points import RATIOS, Knobs
from pullback.pruning.pareto import NEIGHBOURS, ParetoRequest, run_pareto
from pullback.pruning.plan import PrunePlan, preset
from pullback.pruning.tuning_images import TuningImages
from pullback.runs.documents import PRUNED
from pullback.runs.files import replaced_folder, write_arrays, write_json
from pullback.runs.progress import Progress

BUDGETS = (0.70, 0.50, 0.35, 0.715, 0.65, 0.61, 0.54)  # the first are those at which every rival is tuned as well
CONTESTED = 3  # so many of them
SEEDS = (0, 1, 2)  # at the first budget
RIVALS = ("resize", "tome", "tome-decreasing", "pitome", "evit")
FOLDS = 4
TRUST = (0.0, 0.3, 0.5, 0.7, 1.0)
AGAIN = 3  # exit status: the time is over, and something is left to do


# Time


class Deadline(Exception):
    """Nothing more can be finished in the time that is left."""


class Clock:
    """Says whether another job like the longest one so far would end in time."""

    def __init__(self, minutes: float) -> None:
        self._end, self._longest = time.monotonic() + 60 * minutes, 0.0

    def run(self, name: str, job: Callable[[], Any]) -> Any:
        """Run a job, or raise Deadline."""
        if time.monotonic() + self._longest > self._end:
            raise Deadline(name)
        begun = time.monotonic()
        found = job()
        took = time.monotonic() - begun
        self._longest = max(self._longest, took)
        print(f"[frontier] {name}: {took:.0f} s", flush=True)
        return found


# Jobs


@dataclass(frozen=True)
class Job:
    """Something to compute. ``place``: what is there when it is done, whole or not at all."""

    place: Path
    do: Callable[[Path], Any]


@contextmanager
def claimed(path: Path) -> Iterator[bool]:
    """Say whether this process alone has the claim ``path``. The system takes a lock back when its process ends, also
    one that is killed, so nothing stays claimed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def work_through(study: Study, clock: Clock, listed: Callable[[], Iterable[Job]]) -> None:
    """Do all jobs that are not done and that no other process is at, and look again after each, because others may
    have made new ones possible. One that fails does not keep the rest waiting: its error is raised in the end."""
    failed: dict[Path, Exception] = {}

    def one() -> bool:
        for job in listed():
            if job.place.exists() or job.place in failed:
                continue
            with claimed(study.work / "claims" / f"{job.place.parent.name} {job.place.name}") as mine:
                if not mine or job.place.exists():  # another process is at it, or has just ended it
                    continue
                try:
                    clock.run(job.place.name, partial(job.do, job.place))
                except (pb.PullbackError, RuntimeError) as error:  # a GPU that is out of memory raises the latter
                    print(f"[frontier] {job.place.name}: {error}", flush=True)
                    failed[job.place] = error
                return True
        return False

    while one():
        pass
    for error in failed.values():
        raise error


# Points


class Study:
    """A model with what reads it, and the pictures that may choose and train."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.work = options, Path(options.work)
        self._read: dict[tuple[Path, ...], TuningImages[Any]] = {}

    @cached_property
    def probe(self) -> pb.ProbeMap:
        return pb.load_probe(self.options.model, self.options.decoder, device=self.options.device)

    @property
    def backbone(self) -> pb.Backbone:
        backbone = self.probe.backbone
        assert isinstance(backbone, pb.Backbone)
        return backbone

    @property
    def model(self) -> nn.Module:
        return self.backbone.model

    def pictures(self, files: Sequence[Path]) -> Tensor:
        names = [str(file) for file in files]
        return self.probe.load_images(names, self.options.size).to(self.options.device)

    def to_tune(self, files: Sequence[Path]) -> TuningImages[Any]:
        """Return images to tune on, which are read once."""
        key = tuple(files)
        if key not in self._read:
            names = [str(file) for file in files]
            self._read[key] = TuningImages(self.backbone, names, size=self.options.size, remember=True)
        return self._read[key]

    def load(self, folder: Path) -> pb.PrunedModel:
        """Read a point; without the device, the model that it shares would be moved to the CPU."""
        return pb.PrunedModel.from_pretrained(folder, model=self.model, device=self.probe.device)

    @cached_property
    def heads(self) -> dict[int, ImportanceHead]:
        """The heads of `best` by layer: those of the package, or of a folder with one for each layer."""
        folder = self.options.heads
        if folder is None:
            shipped = shipped_heads(self.backbone, self.options.decoder)
            return {layer: load_shipped(place, self.backbone) for layer, place in shipped.items()}
        found = sorted(Path(folder).glob("L[0-9]*"))
        return {
            int(path.name[1:]): ImportanceHead.from_pretrained(path, device=self.probe.device).requires_grad_(False)
            for path in found
        }

    def frozen(self, method: str, budget: float) -> Path:
        return self.work / "frozen" / f"{method} {budget:g}"

    def tuned(self, method: str, budget: float, seed: int) -> Path:
        return self.work / "tuned" / f"{method} {budget:g} seed {seed}"


def training_files(folders: Sequence[str]) -> list[Path]:
    return sorted(path for folder in folders for path in Path(folder).iterdir() if path.suffix in (".jpg", ".png"))


def settings_of(method: str, backbone: pb.Backbone, side: int) -> Iterator[dict[str, Any]]:
    """Return the settings of a published rule from mild to strong, as `pb.prune` takes them."""
    patch = backbone.patch_size
    if method == "resize":
        return ({"preset": "resize", "size": size} for size in range(side - patch, 0, -patch))
    if method == "pitome":
        return ({"preset": "pitome", "keep": step / 200} for step in range(199, 99, -1))
    if method == "evit":
        return ({"preset": "evit", "keep": step / 100} for step in range(98, 4, -2))
    most = max(1, (side // patch) ** 2 // 2)
    if method == "tome":
        return ({"preset": "tome", "r": r} for r in range(1, most))
    return ({"preset": "tome", "r": (r, -1)} for r in range(1, most))


def mildest(model: nn.Module, method: str, images: Tensor, budget: float) -> pb.PrunedModel:
    """Return the first setting of a published rule within a budget, by bisection."""
    candidates = list(settings_of(method, load_backbone(model), min(images.shape[-2:])))
    low, high = 0, len(candidates) - 1
    while low < high:
        middle = (low + high) // 2
        pruned = pb.prune(model, output="cls", **candidates[middle])
        low, high = (low, middle) if pb.operations(pruned, images) <= budget else (middle + 1, high)
    return pb.prune(model, output="cls", **candidates[low])


def make_points(study: Study, clock: Clock) -> None:
    """Write a folder for each method and budget, frozen: WORK/frozen/METHOD BUDGET."""
    options, model, heads = study.options, study.model, study.heads
    images = study.pictures(spread(training_files(options.train), options.choosing))

    def make(method: str, budget: float, place: Path) -> None:
        if method in RIVALS:
            made = mildest(model, method, images[:1], budget)
        else:
            made, expected = planned(model, heads, method, images, budget, options)
            write_expected(study, place, expected)
        save_whole(made, place)
        print(f"[frontier]   {made}: {pb.operations(made, images[:1]):.3f} of the operations", flush=True)

    methods = [*options.ours, *options.rivals]
    if torch.device(options.device).type == "cuda":
        torch.set_float32_matmul_precision("high")  # a search: what it finds is measured in float32
    points = [Job(study.frozen(m, b), partial(make, m, b)) for b in options.budgets for m in methods]
    work_through(study, clock, lambda: points)


def spread(files: Sequence[Path], count: int) -> list[Path]:
    """Return every so-manieth file, because files often lie in the order of their classes."""
    return list(files[:: max(1, len(files) // count)][:count])


def write_expected(study: Study, place: Path, expected: dict[str, Any]) -> None:
    """Write beside the points what a plan is expected to lose."""
    (study.work / EXPECTED).mkdir(parents=True, exist_ok=True)
    write_json(study.work / EXPECTED / f"{place.name}.json", expected)


def save_whole(pruned: pb.PrunedModel, place: Path) -> None:
    """Write a pruned model into a folder that is there whole or not at all."""
    with replaced_folder(place) as temporary:
        pruned.save_pretrained(temporary, weights=False)


def planned(
    model: nn.Module,
    heads: dict[int, ImportanceHead],
    method: str,
    images: Tensor,
    budget: float,
    options: argparse.Namespace,
) -> tuple[pb.PrunedModel, dict[str, Any]]:
    """Return the best plan within a budget that the planner finds on these pictures, with small changes that help, and
    where it was found and what it is expected to lose, by the half of the pictures that did not choose."""
    sizes = () if method == OWN_SIZE else options.sizes
    found = pb.plan_pruning(
        model,
        heads,
        images,
        flops=budget,
        sizes=sizes,
        stages=options.stages,
        output="cls",
        batch=options.at_once,
        rounds=1,
    )
    print(f"[frontier]   {found}", flush=True)
    assert isinstance(found.plan, PrunePlan)
    return polished(model, heads, found.plan, images, budget, options)


def polished(
    model: nn.Module,
    heads: dict[int, ImportanceHead],
    plan: PrunePlan,
    images: Tensor,
    budget: float,
    options: argparse.Namespace,
) -> tuple[pb.PrunedModel, dict[str, Any]]:
    """Return a plan with the small changes that help on one half of the pictures, and what the other half expects."""
    polisher = Polisher(model, heads, images, budget, 4 * options.at_once)
    better = polisher.improved(plan)
    before, after = (polisher.mean(one, expecting=True) for one in (plan, better))
    print(f"[frontier]   polished on one half: {before:.3f} -> {after:.3f} on the other, {better}", flush=True)
    expected = {
        "device": machine(images.device)["device"],
        "pictures": len(images),
        "blocks": sorted(heads),
        "stages": options.stages,
        "searched": before,
        "polished": after,
    }
    return polisher.build(better), expected


def replan(study: Study, clock: Clock) -> None:
    """Write a folder for each budget from plans that were found before (``--plans``): the stages and the picture of the
    plan of the nearest budget, and its own shares, or for other budgets those in the same proportion that just fit.
    With ``--polish`` small changes follow that help on one half of so many training pictures (``--choosing``), of the
    plan that is in the folder if there is one."""
    options = study.options
    known = json.loads(options.plans.read_text())["plans"]
    image = torch.zeros(1, 3, options.size, options.size, device=study.probe.device)
    images = study.pictures(spread(training_files(options.train), options.choosing)) if options.polish else image
    for budget in options.budgets:
        nearest = min(known, key=lambda plan: abs(plan["budget"] - budget))
        place = study.frozen(OURS, budget)
        if options.polish and place.is_dir():
            made = pb.PrunedModel.from_pretrained(place, model=study.model)
        else:
            made = clock.run(f"{OURS} {budget:g}", partial(within, study.model, study.heads, nearest, budget, image))
        if options.polish:
            made, expected = polished(study.model, study.heads, made.plan, images, budget, options)
            write_expected(study, place, expected)
        save_whole(made, place)
        print(f"[frontier]   {made}: {pb.operations(made, image):.3f} of the operations", flush=True)


def within(
    model: nn.Module, heads: Mapping[int, Any], plan: dict[str, Any], budget: float, image: Tensor
) -> pb.PrunedModel:
    """Return a plan at its own budget, or with the smallest shares of the same proportion that meet another one."""

    def scaled(factor: float) -> pb.PrunedModel:
        shares = [factor * share for share in plan["shares"]]
        score = [heads[stage] for stage in plan["stages"]]
        return pb.prune(model, score, ratio=shares, stages=plan["stages"], size=plan["size"], output="cls")

    low, high = (1.0, 1.0) if plan["budget"] == budget else (0.0, 0.95 / sum(plan["shares"]))
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (low, middle) if pb.operations(scaled(middle), image) <= budget else (middle, high)
    return scaled(high)


# Tuning


def to_tune(options: argparse.Namespace) -> list[tuple[str, float, int]]:
    """Return method, budget and seed of everything that is tuned; what is claimed first comes first."""
    contested, others = options.budgets[:CONTESTED], options.budgets[CONTESTED:]
    everybody, ours = (*options.ours, *options.rivals), options.ours
    first = contested[0]
    return [
        *((method, first, 0) for method in everybody),
        *((method, budget, 0) for budget in others for method in ours),
        *((method, budget, 0) for budget in contested[1:] for method in everybody),
        *((method, first, seed) for seed in options.seeds[1:] for method in everybody),
    ]


def tune_points(study: Study, clock: Clock) -> None:
    """Tune frozen points: WORK/tuned/METHOD BUDGET seed S, with checkpoints in WORK/runs."""
    options, files = study.options, training_files(study.options.train)

    def tune(start: Path, seed: int, place: Path) -> None:
        run = study.work / "runs" / place.name
        tuned = tuned_on(study, study.load(start), files, seed, run)
        save_whole(tuned, place)
        shutil.rmtree(run, ignore_errors=True)
        told = tuned.tuning or {}
        print(f"[frontier]   on held-out pictures {told['before']:.3f} -> {told['after']:.3f}", flush=True)

    def listed() -> Iterator[Job]:
        for method, budget, seed in to_tune(options):
            start = study.frozen(method, budget)
            if start.is_dir() and not (method == OWN_SIZE and same_plan(study, budget)):
                yield Job(study.tuned(method, budget, seed), partial(tune, start, seed))

    work_through(study, clock, listed)


def same_plan(study: Study, budget: float) -> bool:
    """Whether the best plan leaves the picture its size anyway, and needs tuning once."""
    one, other = (study.frozen(method, budget) / PRUNED for method in (OURS, OWN_SIZE))
    return one.is_file() and other.is_file() and one.read_text() == other.read_text()


def tuned_on(
    study: Study, frozen: pb.PrunedModel, files: Sequence[Path], seed: int, out: Path | None
) -> pb.PrunedModel:
    steps = study.options.steps
    return pb.tune(
        frozen,
        study.to_tune(files),
        steps=steps,
        batch=study.options.batch,
        seed=seed,
        validate_every=max(1, steps // 7),
        out=out,
    )


# Measuring


def evaluate(study: Study, clock: Clock) -> None:
    """Measure all points, frozen and tuned, on each set of pictures: WORK/pareto/NAME, and with other seeds
    WORK/pareto/NAME-seeds. What was measured before is not measured again."""
    first: list[tuple[str, Path]] = [
        (folder.name.rpartition(" ")[0], folder) for folder in sorted((study.work / "frozen").glob("[!.]*"))
    ]
    others: list[tuple[str, Path]] = []
    for folder in sorted((study.work / "tuned").glob("[!.]*")):
        method, _, _, seed = folder.name.rsplit(" ", 3)
        (first if seed == "0" else others).append((method if seed == "0" else f"{method}, seed {seed}", folder))
    for entry in study.options.images:
        name, _, place = entry.partition("=")
        for label, plans in ((name, first), (f"{name}-seeds", others)):
            if plans:
                compare(study, clock, label, place, plans)


def compare(
    study: Study, clock: Clock, name: str, place: str, plans: Sequence[tuple[str, Path]], **changes: Any
) -> None:
    """Measure points on a set of pictures, unless another process is at it."""
    options = study.options
    request = ParetoRequest(
        model=options.model,
        images=place,
        decoder=options.decoder,
        plans=tuple(plans),
        budgets=tuple(options.budgets),
        size=options.size,
        batch=options.at_once,
        device=options.device,
        time="none",
        **{"methods": (), "limit": options.limit, **changes},
    )
    with claimed(study.work / "claims" / f"pareto {name}") as mine:
        if mine:
            clock.run(f"pareto {name}", partial(run_pareto, request, study.work / "pareto" / name, Progress()))


def neighbours(study: Study, clock: Clock) -> None:
    """Leave-one-out neighbours in folds: what is tuned on the other folds embeds all pictures, and its own fold asks.

    WORK/neighbours/NAME.npz holds who was right; what is not tuned needs no folds."""
    options = study.options
    files = training_files([entry.partition("=")[2] or entry for entry in options.images])
    class_of = classes_from_table(Path(options.labels))
    names = [class_of(file) for file in files]
    number = {name: place for place, name in enumerate(sorted(set(names)))}
    labels, fold = torch.tensor([number[name] for name in names]), folds_of(names)
    folder = study.work / "neighbours"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MACHINE).write_text(json.dumps({**machine(torch.device(options.device)), "steps": options.steps}))
    everyone = torch.ones(len(files), dtype=torch.bool)
    held: list[Tensor] = []  # the pictures, which are read once

    def keep(build: Callable[[], nn.Module], asking: Tensor, place: Path) -> None:
        if not held:
            held.extend(study.pictures(files[start : start + options.at_once])
                        for start in range(0, len(files), options.at_once))  # fmt: skip
        found = right(embedded(build(), held), labels, asking)
        write_arrays(place, {"which": asking.numpy(), **found})

    def tuned(start: Path, own: int) -> nn.Module:
        others = [file for file, its in zip(files, fold.tolist(), strict=True) if its != own]
        run = study.work / "runs" / f"{start.name} fold {own}"
        found = tuned_on(study, study.load(start), others, 0, run)
        shutil.rmtree(run, ignore_errors=True)
        return found

    def job(name: str, build: Callable[[], nn.Module], asking: Tensor = everyone) -> Job:
        return Job(folder / f"{name}.npz", partial(keep, build, asking))

    everything = [job("unpruned", lambda: pb.prune(study.model, preset="none", output="cls"))]
    for budget in options.budgets[:2]:
        methods = [m for m in (*options.ours, *options.rivals) if not (m == OWN_SIZE and same_plan(study, budget))]
        starts = [place for place in (study.frozen(method, budget) for method in methods) if place.is_dir()]
        everything += [job(start.name, partial(study.load, start)) for start in starts]
        everything += [
            job(f"{start.name} tuned, fold {own}", partial(tuned, start, own), fold == own)
            for start in starts
            for own in range(FOLDS)
        ]
    work_through(study, clock, lambda: everything)


@torch.no_grad()
def embedded(model: nn.Module, pictures: Sequence[Tensor]) -> Tensor:
    """Return the embeddings of all pictures, [n, D]."""
    return torch.cat([readable(model(images))[1].float().cpu() for images in pictures])


def right(vectors: Tensor, labels: Tensor, asking: Tensor) -> dict[str, np.ndarray]:
    """Return for each number of neighbours who of those that ask is right, [m] bool."""
    return {str(k): leave_one_out(vectors, labels, vectors, k=k, which=asking).numpy() for k in NEIGHBOURS}


def folds_of(names: Sequence[str]) -> Tensor:
    """Return the fold of each image: the first of every class is in fold 0, the second in fold 1, and so on."""
    seen: dict[str, int] = {}
    folds = []
    for name in names:
        folds.append(seen.get(name, 0) % FOLDS)
        seen[name] = seen.get(name, 0) + 1
    return torch.tensor(folds)


# Heads


def make_heads(study: Study, clock: Clock) -> None:
    """Train the heads of all layers from 2 on, from a checkpoint where there is one: WORK/heads/L02 and so on."""
    options, probe = study.options, study.probe
    layers = (4, 8) if options.quick else tuple(range(2, probe.backbone.depth - 1))
    of_stream = {"block": 4, "steps_per_block": 2} if options.quick else {}
    of_fit = {"steps": options.steps, "batch": options.batch, "validate_every": 2} if options.quick else {}
    if options.head_steps is not None:
        of_fit = {"steps": options.head_steps, "validate_every": max(1, options.head_steps // 4)} | of_fit
    train = partial(
        train_heads,
        probe,
        [str(file) for file in training_files(options.train)],
        [str(file) for file in training_files(options.judges)],
        layers=layers,
        judges=2 if options.quick else options.judging,
        size=options.size,
        half=True,
        stream=stream_config(probe, layers, options.size, **of_stream),
        config=heads_config(probe.device, **of_fit),
        out=study.work / "heads",
        seconds=60 * options.minutes - 60,
    )
    clock.run("heads", train)


# A dense decoder


def dense(study: Study, clock: Clock) -> None:
    """Measure a dense decoder with learned heads, one stage at a time, at several values of trust, against the
    published rules and a smaller picture: WORK/pareto/chosen on training pictures, and on those of ``--images``."""
    options, heads, depth = study.options, study.heads, study.probe.backbone.depth
    plans = []
    for trust in options.trust:
        for layer, head in heads.items():
            for ratio in RATIOS:
                place = study.work / "frozen" / f"block {layer}, {ratio:g}, trust {trust:g}"
                if not place.is_dir():
                    plan = replace(preset("best", ratio, [layer], dense=True, depth=depth), trust=trust)
                    save_whole(pb.PrunedModel(study.model, plan, [head]), place)
                plans.append((f"best, trust {trust:g}", place))
    chosen = study.work / "chosen"
    if not chosen.is_dir():
        with replaced_folder(chosen) as folder:
            for file in spread(training_files(options.train), options.choosing):
                shutil.copyfile(file, folder / file.name)
    rivals = {"methods": tuple(options.rivals), "knobs": Knobs()}
    compare(study, clock, "chosen", str(chosen), plans, limit=None)
    for entry in options.images:
        name, _, place = entry.partition("=")
        compare(study, clock, name, place, plans, **rivals)


# Files


def pack(options: argparse.Namespace) -> None:
    """Write folders as one tar in parts of a size that travels: OUT/00/part, OUT/01/part, ..."""
    _write_parts({folder.resolve().name: folder for folder in map(Path, getattr(options, "from"))}, options)


def collect(options: argparse.Namespace) -> None:
    """Write plans, tuned vectors, hits, rows and summaries in such parts, without what is in the making, and without
    the heads in each point, which are those of the package or in WORK/heads."""
    work = Path(options.work)
    left = {"runs", "claims", "chosen", "embeddings", "checkpoint.pt"}
    chosen = {}
    for path in sorted(path for path in work.rglob("*") if path.is_file()):
        parts = path.relative_to(work).parts
        of_point = {"frozen", "tuned"} & set(parts) and "heads" in parts
        if not (of_point or left & set(parts) or any(part.startswith(".") for part in parts)):
            chosen["/".join(parts)] = path
    _write_parts(chosen, options)


def _write_parts(things: dict[str, Path], options: argparse.Namespace) -> None:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz", compresslevel=6) as tar:
        for name, path in things.items():
            tar.add(path, arcname=name)
    whole, step = content.getvalue(), int(1e6 * options.part_mb)
    for number, start in enumerate(range(0, len(whole), step)):
        place = Path(options.out) / f"{number:02d}"
        place.mkdir(parents=True, exist_ok=True)
        (place / "part").write_bytes(whole[start : start + step])
    print(f"[frontier] {-(-len(whole) // step)} parts of {len(whole) / 1e6:.1f} MB in {options.out}")


def unpack(options: argparse.Namespace) -> None:
    """Keep the parts that are here, and take them apart once all are."""
    kept = Path(options.out)
    kept.mkdir(parents=True, exist_ok=True)
    for part in sorted(Path(options.parts).glob("[0-9][0-9]/part")):
        shutil.copyfile(part, kept / f"part-{part.parent.name}")
    parts = sorted(kept.glob("part-*"))
    try:
        with tarfile.open(fileobj=io.BytesIO(b"".join(part.read_bytes() for part in parts))) as tar:
            tar.getmembers()  # which fails before anything is written, where the end is missing
            tar.extractall(kept, filter="data")
        for part in parts:
            part.unlink()
        folders = sorted(path.name for path in kept.iterdir() if path.is_dir())
        print(f"[frontier] {len(parts)} parts: {', '.join(folders)}")
    except (tarfile.ReadError, EOFError):
        print(f"[frontier] {len(parts)} parts so far; carry the next one")


# Commands

PARTS: dict[str, Callable[[Study, Clock], None]] = {
    "heads": make_heads,
    "points": make_points,
    "replan": replan,
    "dense": dense,
    "tune": tune_points,
    "evaluate": evaluate,
    "neighbours": neighbours,
}
FILES: dict[str, Callable[[argparse.Namespace], None]] = {
    "pack": pack,
    "unpack": unpack,
    "collect": collect,
    "report": report,
}


def made_quick(options: argparse.Namespace) -> None:
    """Little of everything, on a few pictures, to see that it runs."""
    work = Path(options.work)
    work.mkdir(parents=True, exist_ok=True)
    options.size, options.steps, options.batch = 56, 2, 2
    options.budgets, options.seeds, options.choosing, options.at_once, options.stages = [0.6], [0], 2, 4, 1
    options.rivals = ["resize", "evit"]
    options.heads, options.device, options.minutes = str(work / "heads"), "cpu", 60.0
    options.images = [f"pictures={folder}" for folder in options.train]
    options.labels = str(work / "labels.csv")
    files = training_files(options.train)
    rows = [f"{path.resolve()},{number % 2}" for number, path in enumerate(files)]
    Path(options.labels).write_text("\n".join(["file,class_index", *rows]) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=[*PARTS, "all", *FILES], help="all: the parts that compute, one by one")
    parser.add_argument("--work", default="local/frontier", help="folder of everything that is computed")
    parser.add_argument("--model", default="facebook/dinov2-small")
    parser.add_argument("--decoder", default="cls")
    parser.add_argument("--heads", help="folder of heads L01, L02, ... (default: those of the package)")
    parser.add_argument("--train", nargs="+", default=[], help="folders of pictures that choose and train")
    parser.add_argument("--judges", nargs="+", default=[], help="heads: folders of pictures that judge them")
    parser.add_argument("--images", nargs="+", default=[], help="evaluate: NAME=FOLDER; neighbours: folders")
    parser.add_argument("--labels", help="neighbours: a table of classes")
    parser.add_argument("--budgets", nargs="+", type=float, default=list(BUDGETS))
    parser.add_argument("--ours", nargs="+", choices=(OURS, OWN_SIZE), default=[OURS, OWN_SIZE])
    parser.add_argument("--rivals", nargs="+", choices=RIVALS, default=list(RIVALS))
    parser.add_argument("--stages", type=int, default=2, help="points: at most so many")
    parser.add_argument("--choosing", type=int, default=256, help="points: training pictures that choose")
    parser.add_argument("--sizes", nargs="*", type=int, help="points: smaller pictures to consider (default: many)")
    parser.add_argument("--head-steps", type=int, help="heads: steps (default: those of `train_heads`)")
    parser.add_argument("--judging", type=int, default=50, help="heads: pictures that judge, at most")
    parser.add_argument("--trust", nargs="+", type=float, default=list(TRUST), help="dense: values to choose from")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--at-once", type=int, default=64, help="pictures at a time where nothing is trained")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--minutes", type=float, default=9.0, help="begin nothing that would not end in time")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--from", nargs="+", default=[], help="pack: folders")
    parser.add_argument("--polish", action="store_true", help="replan: with small changes that help")
    parser.add_argument("--plans", type=Path, default=RESULTS / "frontier_plans_cpu.json", help="replan: plans")
    parser.add_argument("--part-mb", type=float, default=15.0, help="pack: size of a part")
    parser.add_argument("--figure", help="report: pictures of which to draw the figure")
    parser.add_argument("--parts", default="local/parts", help="unpack: folder of the parts")
    parser.add_argument("--out", type=Path, help="folder of pack, unpack, collect and report")
    parser.add_argument("--quick", action="store_true", help="little of everything, on a CPU")
    options = parser.parse_args()
    if options.quick:
        made_quick(options)
    if options.part in FILES:
        FILES[options.part](options)
        return 0
    attention.HAS_TRITON = False  # torch's counter of operations does not see into kernels of our own
    clock = Clock(options.minutes)
    try:
        every = [part for part in PARTS if part not in ("replan", "dense")]
        for part in every if options.part == "all" else [options.part]:
            PARTS[part](Study(options), clock)
    except Deadline as next_one:
        print(f"[frontier] the time is over before {next_one}: the same command goes on")
        return AGAIN
    return 0


if __name__ == "__main__":
    sys.exit(main())
