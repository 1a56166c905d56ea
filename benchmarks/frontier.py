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

CLIP has no heads in the package, so these come first, and its points name them:

    python benchmarks/frontier.py heads --model CLIP --decoder projection --train train/ bank/ --judges diag/ --work W
    python benchmarks/frontier.py points --model CLIP --decoder projection --heads W/heads --budgets 0.7 0.5 ...

Every part goes on where it was stopped, and begins nothing that would not end before ``--minutes`` are over; it says
then that it is to be run again. 518 px are the same parts with `--size 518 --steps 300 --batch 32` and another folder.

What to carry: the checkout takes most of the 64 MiB that travel with a call, so `pack` makes parts of 15 MB. Carry one
of them (`local/parts/NN`) per call, and unpack it outside the checkout, where it stays while the machine is held.
`local/frontier` (points, and what was tuned before) is small and goes with the first call of a lease. There the command
is `PYTHONPATH=src python3 benchmarks/frontier.py`. A tuning of 700 steps takes about 45 s for a ViT-S on an H200, so
one lease of half an hour has the points and 25 tunings, of the 40 that there are; the folds take as many again.

Points: for each method the mildest setting within a budget of operations (`pb.operations`). Ours is what
`pb.plan_pruning` finds on training pictures; "planned, own size" may not shrink pictures. Tuning is the same for all:
`pb.tune`, whose best step on a tenth of the training pictures is kept. What is tuned first is what is claimed first.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import RESULTS, machine, save
from torch import Tensor, nn

import pullback as pb
from pullback.backbones import load_backbone
from pullback.evaluation.fidelity import readable
from pullback.evaluation.neighbours import classes_from_table, leave_one_out
from pullback.evaluation.statistics import bootstrap_mean, bootstrap_share, mcnemar_p
from pullback.learning.train_heads import heads_config, stream_config, train_heads
from pullback.pruning.pareto import NEIGHBOURS, ParetoRequest, run_pareto
from pullback.runs.documents import PRUNED
from pullback.runs.progress import Progress

BUDGETS = (0.70, 0.50, 0.35, 0.715, 0.65, 0.61, 0.54)  # the first are those at which every rival is tuned as well
CONTESTED = 3  # so many of them
SEEDS = (0, 1, 2)  # at the first budget
RIVALS = ("resize", "tome", "tome-decreasing", "pitome", "evit")
OURS, OWN_SIZE = "planned", "planned, own size"
FOLDS = 4
MACHINE, SHOWN = "machine.json", "heldout"  # the pictures of the figure
IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
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


# Points


class Study:
    """A model with what reads it, and the pictures that may choose and train."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.work = options, Path(options.work)

    @cached_property
    def probe(self) -> pb.ProbeMap:
        return pb.load_probe(self.options.model, self.options.decoder, device=self.options.device)

    @property
    def model(self) -> nn.Module:
        return self.probe.backbone.model

    def pictures(self, files: Sequence[Path]) -> Tensor:
        names = [str(file) for file in files]
        return self.probe.load_images(names, self.options.size).to(self.options.device)

    def heads(self) -> dict[int, pb.ImportanceHead] | str:
        """Return the heads of `best`: those of the package, or one folder for each layer."""
        folder, device = self.options.heads, self.options.device
        if folder is None:
            return "importance"
        found = sorted(Path(folder).glob("L[0-9]*"))
        return {int(path.name[1:]): pb.ImportanceHead.from_pretrained(path, device=device) for path in found}

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
    options, model, heads = study.options, study.model, study.heads()
    files = training_files(options.train)  # every so-manieth, because files often lie in the order of their classes
    images = study.pictures(files[:: max(1, len(files) // options.choosing)][: options.choosing])
    for budget in options.budgets:
        for method in (OURS, OWN_SIZE, *options.rivals):
            place = study.frozen(method, budget)
            if place.is_dir():
                continue
            if method in RIVALS:
                made = clock.run(place.name, partial(mildest, model, method, images[:1], budget))
            else:
                made = clock.run(place.name, partial(planned, model, heads, method, images, budget, options))
            made.save_pretrained(place, weights=False)
            print(f"[frontier]   {made}: {pb.operations(made, images[:1]):.3f} of the operations", flush=True)


def planned(
    model: nn.Module,
    heads: dict[int, pb.ImportanceHead] | str,
    method: str,
    images: Tensor,
    budget: float,
    options: argparse.Namespace,
) -> pb.PrunedModel:
    """Return the best plan within a budget that the planner finds on these pictures."""
    sizes = () if method == OWN_SIZE else None
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
    assert found.model is not None
    return found.model


def replan(study: Study, clock: Clock) -> None:
    """Write a folder for each budget from plans that were found before (``--plans``): the stages and the picture of the
    plan of the nearest budget, and its own shares, or for other budgets those in the same proportion that just fit."""
    known = json.loads(study.options.plans.read_text())["plans"]
    image = torch.zeros(1, 3, study.options.size, study.options.size)
    for budget in study.options.budgets:
        nearest = min(known, key=lambda plan: abs(plan["budget"] - budget))
        made = clock.run(f"{OURS} {budget:g}", partial(within, study.model, study.heads(), nearest, budget, image))
        made.save_pretrained(study.frozen(OURS, budget), weights=False)
        print(f"[frontier]   {made}: {pb.operations(made, image):.3f} of the operations", flush=True)


def within(
    model: nn.Module, heads: dict[int, pb.ImportanceHead] | str, plan: dict[str, Any], budget: float, image: Tensor
) -> pb.PrunedModel:
    """Return a plan at its own budget, or with the smallest shares of the same proportion that meet another one."""

    def scaled(factor: float) -> pb.PrunedModel:
        shares = [factor * share for share in plan["shares"]]
        score = heads if isinstance(heads, str) else [heads[stage] for stage in plan["stages"]]
        return pb.prune(model, score, ratio=shares, stages=plan["stages"], size=plan["size"], output="cls")

    low, high = (1.0, 1.0) if plan["budget"] == budget else (0.0, 0.95 / sum(plan["shares"]))
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (low, middle) if pb.operations(scaled(middle), image) <= budget else (middle, high)
    return scaled(high)


# Tuning


def jobs(options: argparse.Namespace) -> list[tuple[str, float, int]]:
    """Return method, budget and seed of everything that is tuned; what is claimed first comes first."""
    contested, others = options.budgets[:CONTESTED], options.budgets[CONTESTED:]
    everybody, ours = (OURS, OWN_SIZE, *options.rivals), (OURS, OWN_SIZE)
    return [
        *((method, budget, 0) for budget in contested for method in everybody),
        *((method, budget, 0) for budget in others for method in ours),
        *((method, contested[0], seed) for seed in options.seeds[1:] for method in everybody),
    ]


def tune_points(study: Study, clock: Clock) -> None:
    """Tune frozen points: WORK/tuned/METHOD BUDGET seed S, with checkpoints in WORK/runs."""
    options, files = study.options, training_files(study.options.train)
    for method, budget, seed in jobs(options):
        place, start = study.tuned(method, budget, seed), study.frozen(method, budget)
        if (
            place.is_dir()
            or not start.is_dir()
            or (method == OWN_SIZE and same_plan(start, study.frozen(OURS, budget)))
        ):
            continue
        frozen, run = pb.PrunedModel.from_pretrained(start, model=study.model), study.work / "runs" / place.name
        tuned = clock.run(place.name, partial(tuned_on, frozen, files, options, seed, run))
        tuned.save_pretrained(place, weights=False)
        shutil.rmtree(run, ignore_errors=True)
        told = tuned.tuning
        print(f"[frontier]   on held-out pictures {told['before']:.3f} -> {told['after']:.3f}", flush=True)


def same_plan(one: Path, other: Path) -> bool:
    """Whether two points are the same one, which needs tuning once."""
    return other.is_dir() and (one / PRUNED).read_text() == (other / PRUNED).read_text()


def tuned_on(
    frozen: pb.PrunedModel, files: Sequence[Path], options: argparse.Namespace, seed: int, out: Path | None
) -> pb.PrunedModel:
    return pb.tune(
        frozen,
        [str(file) for file in files],
        steps=options.steps,
        batch=options.batch,
        size=options.size,
        seed=seed,
        validate_every=max(1, options.steps // 7),
        out=out,
    )


# Measuring


def evaluate(study: Study, clock: Clock) -> None:
    """Measure all points, frozen and tuned, on each set of pictures: WORK/pareto/NAME."""
    options = study.options
    plans = [(folder.name.rpartition(" ")[0], folder) for folder in sorted((study.work / "frozen").iterdir())]
    for folder in sorted((study.work / "tuned").glob("*")):
        method, _, _, seed = folder.name.rsplit(" ", 3)
        plans.append((method if seed == "0" else f"{method} seed {seed}", folder))
    for entry in options.images:
        name, _, place = entry.partition("=")
        request = ParetoRequest(
            model=options.model,
            images=place,
            decoder=options.decoder,
            methods=(),
            plans=tuple(plans),
            budgets=tuple(options.budgets),
            size=options.size,
            limit=options.limit,
            batch=options.at_once,
            device=options.device,
            time="none",
        )
        clock.run(f"pareto {name}", partial(run_pareto, request, study.work / "pareto" / name, Progress()))


def neighbours(study: Study, clock: Clock) -> None:
    """Leave-one-out neighbours in folds: what is tuned on the other folds embeds all pictures, and its own fold asks.

    WORK/neighbours/NAME.npz holds who was right; what is not tuned needs no folds."""
    options, model = study.options, study.model
    files = training_files([entry.partition("=")[2] or entry for entry in options.images])
    class_of = classes_from_table(Path(options.labels))
    names = [class_of(file) for file in files]
    number = {name: place for place, name in enumerate(sorted(set(names)))}
    labels, fold = torch.tensor([number[name] for name in names]), folds_of(names)
    folder = study.work / "neighbours"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MACHINE).write_text(json.dumps(machine(torch.device(options.device))))

    def keep(name: str, build: Callable[[], nn.Module], asking: Tensor) -> None:
        path = folder / f"{name}.npz"
        if not path.is_file():
            found = clock.run(name, lambda: right(embedded(build(), files, study), labels, asking))
            with open(path, "wb") as file:
                np.savez(file, which=asking.numpy(), **found)

    everyone = torch.ones(len(files), dtype=torch.bool)
    keep("unpruned", lambda: pb.prune(model, preset="none", output="cls"), everyone)
    for budget in options.budgets[:2]:
        for method in (OURS, *options.rivals):
            frozen = pb.PrunedModel.from_pretrained(study.frozen(method, budget), model=model)
            keep(f"{method} {budget:g}", lambda f=frozen: f, everyone)
            for own in fold.unique().tolist():
                others = [file for file, its in zip(files, fold.tolist(), strict=True) if its != own]
                build = partial(tuned_on, frozen, others, options, 0, None)
                keep(f"{method} {budget:g} tuned, fold {own}", build, fold == own)


@torch.no_grad()
def embedded(model: nn.Module, files: Sequence[Path], study: Study) -> Tensor:
    """Return the embeddings of all pictures, [n, D]."""
    parts = []
    for start in range(0, len(files), study.options.at_once):
        images = study.pictures(files[start : start + study.options.at_once])
        parts.append(readable(model(images))[1].float().cpu())
    return torch.cat(parts)


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


def neighbour_rows(folder: Path) -> list[dict[str, Any]]:
    """Return accuracy and what it is more than that of the unpruned model, of all that has every image's answer."""
    groups: dict[str, list[Any]] = {}
    for path in sorted(folder.glob("*.npz")):
        groups.setdefault(path.stem.partition(", fold ")[0], []).append(np.load(path))
    rows = []
    for name, parts in groups.items():
        if not np.sum([part["which"] for part in parts], axis=0).all():
            continue
        for k in map(str, NEIGHBOURS):
            own, full = np.zeros(len(parts[0]["which"]), bool), groups["unpruned"][0][k]
            for part in parts:
                own[part["which"]] = part[k]
            share = bootstrap_share(own)
            more = bootstrap_mean(own.astype(float) - full, generator=np.random.default_rng(0))
            rows.append(
                {
                    "name": name,
                    "k": int(k),
                    "accuracy": share.mean,
                    "interval": [share.low, share.high],
                    "more": more.mean,
                    "more interval": [more.low, more.high],
                    "p_value": mcnemar_p(own, full),
                }
            )
    return rows


# Heads


def make_heads(study: Study, clock: Clock) -> None:
    """Train the heads of all layers from 2 on, from a checkpoint where there is one: WORK/heads/L02 and so on."""
    options, probe = study.options, study.probe
    layers = (4, 8) if options.quick else tuple(range(2, probe.backbone.depth - 1))
    of_stream = {"block": 4, "steps_per_block": 2} if options.quick else {}
    of_fit = {"steps": options.steps, "batch": options.batch, "validate_every": 2} if options.quick else {}
    train = partial(
        train_heads,
        probe,
        [str(file) for file in training_files(options.train)],
        [str(file) for file in training_files(options.judges)],
        layers=layers,
        judges=2 if options.quick else 50,
        size=options.size,
        half=True,
        stream=stream_config(probe, layers, options.size, **of_stream),
        config=heads_config(probe.device, **of_fit),
        out=study.work / "heads",
        seconds=60 * options.minutes - 60,
    )
    clock.run("heads", train)


# Files


def pack(options: argparse.Namespace) -> None:
    """Write folders as one tar in parts of a size that travels: OUT/00/part, OUT/01/part, ..."""
    _write_parts({folder.resolve().name: folder for folder in map(Path, getattr(options, "from"))}, options)


def collect(options: argparse.Namespace) -> None:
    """Write the points, tuned vectors, hits and summaries in such parts, without rows, embeddings and heads in the
    making; `unpack` makes the same folder of them elsewhere."""
    work, heads = Path(options.work), Path(options.work) / "heads"
    chosen = {
        str(path.relative_to(work)): path
        for path in sorted(work.rglob("*"))
        if path.is_file()
        and "embeddings" not in path.parts
        and path.name != "rows.jsonl"
        and path not in (heads / "checkpoint.pt", heads / "metrics.jsonl")
    }
    _write_parts(chosen, options)


def _write_parts(things: dict[str, Path], options: argparse.Namespace) -> None:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz", compresslevel=1) as tar:
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


def report(options: argparse.Namespace) -> None:
    """Write WORK/pareto/NAME/pareto.json and neighbours as result files, frontier_NAME_cuda.json, and the figure."""
    work, out = Path(options.work), options.out or RESULTS
    for path in sorted((work / "pareto").glob("*/pareto.json")):
        document = compact(json.loads(path.read_text()))
        name = f"frontier_{path.parent.name}_{document['device']}"
        print(f"[frontier] {save(name, document, out)}")
        if path.parent.name == SHOWN:
            from pullback.report.pareto_figures import pareto_png  # with matplotlib, which a GPU machine may lack

            image = IMAGES / "frontier.png" if options.out is None else out / "frontier.png"
            image.write_bytes(pareto_png(document, dpi=100))
    if (work / "neighbours" / MACHINE).is_file():
        content = {"machine": json.loads((work / "neighbours" / MACHINE).read_text())}
        content["rows"] = neighbour_rows(work / "neighbours")
        print(f"[frontier] {save('frontier_neighbours_cuda', content, out)}")


def compact(document: dict[str, Any]) -> dict[str, Any]:
    """Return a comparison without folders of this machine, and its numbers with six digits."""
    kept = {key: value for key, value in document.items() if key not in ("skipped", "classes", "selection")}
    kept |= {key: Path(str(document[key])).name for key in ("model", "source")}
    return json.loads(json.dumps(kept), parse_float=lambda text: float(f"{float(text):.6g}"))


# Commands

PARTS: dict[str, Callable[[Study, Clock], None]] = {
    "heads": make_heads,
    "points": make_points,
    "replan": replan,
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
    parser.add_argument("--rivals", nargs="+", choices=RIVALS, default=list(RIVALS))
    parser.add_argument("--stages", type=int, default=2, help="points: at most so many")
    parser.add_argument("--choosing", type=int, default=256, help="points: training pictures that choose")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--at-once", type=int, default=64, help="pictures at a time where nothing is trained")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--minutes", type=float, default=9.0, help="begin nothing that would not end in time")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--from", nargs="+", default=[], help="pack: folders")
    parser.add_argument("--plans", type=Path, default=RESULTS / "frontier_plans_cpu.json", help="replan: plans")
    parser.add_argument("--part-mb", type=float, default=15.0, help="pack: size of a part")
    parser.add_argument("--parts", default="local/parts", help="unpack: folder of the parts")
    parser.add_argument("--out", type=Path, help="folder of pack, unpack, collect and report")
    parser.add_argument("--quick", action="store_true", help="little of everything, on a CPU")
    options = parser.parse_args()
    if options.quick:
        made_quick(options)
    if options.part in FILES:
        FILES[options.part](options)
        return 0
    clock = Clock(options.minutes)
    try:
        for part in [part for part in PARTS if part != "replan"] if options.part == "all" else [options.part]:
            PARTS[part](Study(options), clock)
    except Deadline as next_one:
        print(f"[frontier] the time is over before {next_one}: the same command goes on")
        return AGAIN
    return 0


if __name__ == "__main__":
    sys.exit(main())
