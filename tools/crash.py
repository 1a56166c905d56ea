"""Kill commands at random moments, let them go on, and compare what they leave with an uninterrupted run.

    python tools/crash.py [--kills 20] [--commands targets,train,prune,diagnose] [--save-every 30] [--out FILE]
    python tools/crash.py --commands reproduce:full-sweep,reproduce:estimators,reproduce:overview --out FILE

Every command first runs to its end. Then it runs in another folder, is killed (SIGKILL) after a random part of that
time, and the same command goes on, to be killed again, until one gets through; then comes the next folder, until there
were so many kills. Each folder must end with the same rows or weights as the uninterrupted one, bit for bit, and
without a temporary file.

What a kill costs is read from the files: the time from the last file that the run had written, or from its start if it
had written none, to the kill. It may not be more than ``--save-every`` seconds, to which the commands are set as well,
and what a command needs that has nothing left to do: loading, the features of a training. A job here lasts seconds:
with ``--save-every 0.5`` it is to its saves what a job of minutes is to those every 30 s.

`reproduce:NAME` is an experiment of the paper at the scale tiny, and keeps every finished cell, however long that took.

Commands run in forks of this process, which has imported everything, so that kills hit work and not imports. Figures
are left out. Nothing outside of the folder ``--work`` is written; the exit code is 1 if anything differed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import pullback as pb
from pullback.cli import app
from pullback.experiments.demo import write_pictures
from pullback.geometry import folder as diagnosing
from pullback.learning import fit as training
from pullback.learning import train_head
from pullback.pruning import compare as comparing
from pullback.runs.files import write_json
from pullback.runs.provenance import provenance
from pullback.scenes.render import render
from pullback.targets import compute as computing

REPRODUCE = "reproduce:"
SMALL = ("--size", "56", "--device", "cpu")
SLACK = 1.5  # a machine that is busy with other things saves a little later


@dataclass(frozen=True)
class Job:
    """A command line without its folder, and how the results of two folders differ (nothing: they do not)."""

    arguments: tuple[str, ...]
    difference: Callable[[Path, Path], str]


@dataclass
class Outcome:
    """What became of one command."""

    seconds: float  # of the uninterrupted run
    start: float  # of one with nothing left to do
    kills: int = 0
    finished: int = 0  # folders
    losses: list[float] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)

    def allowed(self, save_every: float) -> float:
        return SLACK * (save_every + self.start)

    def line(self, name: str, save_every: float) -> str:
        worst, limit = max(self.losses, default=0.0), self.allowed(save_every)
        verdict = "the same" if not self.differences else f"DIFFERENT: {'; '.join(self.differences[:3])}"
        late = "" if worst <= limit else " TOO MUCH"
        return (
            f"{name}: {self.seconds:.1f} s; {self.kills} kills, {self.finished} folders finished; a kill cost "
            f"{worst:.1f} s at most, allowed are {limit:.1f} s{late}; {verdict}"
        )

    def good(self, save_every: float) -> bool:
        return not self.differences and max(self.losses, default=0.0) <= self.allowed(save_every)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="of each command")
    parser.add_argument("--commands", default="targets,train,prune,diagnose")
    parser.add_argument("--save-every", type=float, default=30.0, help="seconds of work that a kill may cost")
    parser.add_argument("--images", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, help="folder for everything, by default a temporary one")
    parser.add_argument("--out", type=Path, help="file for the results (JSON)")
    given = parser.parse_args(arguments)
    rows = {}
    names = given.commands.split(",")
    with tempfile.TemporaryDirectory() as temporary:
        work = given.work or Path(temporary)
        reproduced = [name for name in names if name.startswith(REPRODUCE)]
        jobs = {name: reproduction(name.removeprefix(REPRODUCE)) for name in reproduced}
        if len(reproduced) < len(names):
            jobs |= prepared(work, given.images)
        good = True
        for name in names:
            outcome = crash(
                jobs[name], work / name.replace(":", "-"), given.kills, given.save_every, random.Random(given.seed)
            )
            print(outcome.line(name, given.save_every), flush=True)
            good &= outcome.good(given.save_every)
            rows[name] = asdict(outcome) | {"allowed": outcome.allowed(given.save_every)}
    if given.out is not None:
        header = provenance(torch.device("cpu")) | {
            "kills": given.kills,
            "save_every": given.save_every,
            "images": given.images,
        }
        write_json(given.out, header | {"seed": given.seed, "commands": rows})
    return 0 if good else 1


def prepared(work: Path, images: int) -> dict[str, Job]:
    """Draw pictures and compute the targets that training needs; return the jobs."""
    photos, store = work / "photos", work / "store"
    write_pictures(render(range(images), size=64), photos)
    (photos / "broken.png").write_bytes(b"not a picture")
    computing.compute_targets(pb.load_probe("tiny-scenes", layer=6, device="cpu"), photos, out=store, rank=2, size=56)
    model = ("tiny-scenes", "--images", str(photos))
    steps = ("--steps", "200", "--batch", "8", "--validate-every", "50", "--width", "32", "--heads", "2")
    rules = ("--time", "none", "--scores", "norm,random,exact", "--ratios", "0.25,0.5", "--batch", "2", "--rank", "3")
    return {
        "targets": Job(("targets", *model, *SMALL, "--layer", "6", "--rank", "5"), target_difference),
        "train": Job(
            ("train", "head", "--targets", str(store), "--held-out", "0.3", *steps, "--device", "cpu"),
            weight_difference,
        ),
        "prune": Job(("prune", *model, *SMALL, "--stages", "4", *rules), rule_difference),
        "diagnose": Job(
            ("diagnose", *model, *SMALL, "--layer", "7", "--layer", "9", "--rank", "3"), diagnosis_difference
        ),
    }


def reproduction(name: str) -> Job:
    """Return the job of an experiment."""
    return Job(("reproduce", name, "--scale", "tiny", "--device", "cpu"), experiment_difference)


def crash(job: Job, work: Path, kills: int, save_every: float, draw: random.Random) -> Outcome:
    """Run a job to its end, then again and again with kills in between, and compare."""
    whole = work / "whole"
    outcome = Outcome(*(_uninterrupted(job, whole, save_every) for _ in range(2)))
    while outcome.kills < kills:
        folder = work / f"killed-{outcome.finished}"
        while not _through(job, folder, outcome, kills, save_every, draw):
            pass
        outcome.finished += 1
        difference = job.difference(whole, folder)
        left = [path.name for path in folder.rglob(".*.tmp")]
        outcome.differences += [text for text in (difference, f"left {left}" if left else "") if text]
        if not difference:
            shutil.rmtree(folder)
    return outcome


def _uninterrupted(job: Job, folder: Path, save_every: float) -> float:
    """Run a job to its end; return the seconds that it took."""
    begun = time.time()
    code = os.waitstatus_to_exitcode(os.waitpid(started(job, folder, save_every), 0)[1])
    if code != 0:
        raise SystemExit(f"{job.arguments[0]} failed by itself, with exit code {code}; see {folder}.log")
    return time.time() - begun


def _through(job: Job, folder: Path, outcome: Outcome, kills: int, save_every: float, draw: random.Random) -> bool:
    """Run a job in a folder and kill it, unless there were enough kills; return whether it got to its end."""
    begun, fresh = time.time(), not folder.exists()
    moment = begun + draw.uniform(0, outcome.seconds) if outcome.kills < kills else float("inf")
    child = started(job, folder, save_every)
    while time.time() < moment:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            if code != 0:
                raise SystemExit(f"{job.arguments[0]} did not go on after a kill: exit code {code}; see {folder}.log")
            if fresh:  # the first run of all is slower than later ones, and a kill has to come before the end
                outcome.seconds = min(outcome.seconds, time.time() - begun)
            return True
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    killed = time.time()
    os.waitpid(child, 0)
    outcome.kills += 1
    last = max((path.stat().st_mtime for path in results(folder)), default=begun)
    outcome.losses.append(killed - max(begun, last))
    return False


def started(job: Job, out: Path, save_every: float) -> int:
    """Start the command in a fork; return its process id. What it says is in a file beside its folder."""
    out.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        log = os.open(f"{out}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        code = _run([*job.arguments, "--out", str(out)], save_every)
    finally:
        os._exit(code)


def _run(arguments: list[str], save_every: float) -> int:
    sys.modules["matplotlib"] = None  # type: ignore[assignment]  # no figures
    for module in (computing, training, train_head, comparing, diagnosing):
        if hasattr(module, "SAVE_EVERY"):
            module.SAVE_EVERY = save_every
    try:
        app(arguments)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def results(folder: Path) -> list[Path]:
    """The whole files of a run, without what is left of an unfinished one."""
    return [path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(".tmp")]


def target_difference(one: Path, other: Path) -> str:
    """Compare two stores row by row."""
    from pullback.targets.store import TargetStore

    tables = [TargetStore.open(folder).read() for folder in (one, other)]
    orders = [sorted(range(len(table)), key=lambda row, t=table: (t.keys[row], t.crop_index[row])) for table in tables]
    first, second = (table.select(order) for table, order in zip(tables, orders, strict=True))
    if (first.keys, first.crop_index, first.image_sha256) != (second.keys, second.crop_index, second.image_sha256):
        return f"{len(first)} rows and {len(second)} rows are of other images"
    for name in ("singular_values", "importance", "block_energy", "kappa", "total"):
        values, others = getattr(first, name).double(), getattr(second, name).double()
        if not torch.equal(values, others):
            return f"{name} differs by {float((values - others).abs().max()):.2g}"
    if TargetStore(one, {}).skipped != TargetStore(other, {}).skipped:
        return "other images were skipped"
    return ""


def weight_difference(one: Path, other: Path) -> str:
    """Compare two trainings bit by bit: the weights and the log."""
    for file in ("model/model.safetensors", "metrics.jsonl"):
        if (one / file).read_bytes() != (other / file).read_bytes():
            return f"{file} differs"
    return ""


def rule_difference(one: Path, other: Path) -> str:
    """Compare two comparisons of pruning rules image by image, and their summaries."""

    def rows(folder: Path) -> dict[tuple[Any, ...], float]:
        found = [json.loads(line) for line in (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
        named = {(row["preset"], row["score"], row["ratio"], row["image"]): row["value"] for row in found}
        return named if len(named) == len(found) else {}

    first, second = rows(one), rows(other)
    if not first or first.keys() != second.keys():
        return f"{len(first)} rows and {len(second)} rows, or rows twice"
    wrong = [key for key, value in first.items() if value != second[key]]
    if wrong:
        return f"{len(wrong)} rows differ, such as {wrong[0]}"
    means = [
        [rule["mean"] for rule in json.loads((folder / "summary.json").read_text(encoding="utf-8"))["rules"]]
        for folder in (one, other)
    ]
    return "" if means[0] == means[1] else "the summaries differ"


def diagnosis_difference(one: Path, other: Path) -> str:
    """Compare two diagnoses: what is said of every image at every layer, and the importance of every token."""
    import numpy as np

    first, second = (json.loads((folder / "diagnosis.json").read_text(encoding="utf-8")) for folder in (one, other))
    if not second["complete"] or first["image_files"] != second["image_files"]:
        return "the diagnosis is not complete"
    for mine, theirs in zip(first["layers"], second["layers"], strict=True):
        for image, again in zip(mine["per_image"], theirs["per_image"], strict=True):
            for name in ("kappa", "energy", "cv", "r_eff_trunc"):
                if image[name] != again[name]:
                    return f"{name} of {image['file']} at layer {mine['layer']} differs"
    with np.load(one / "importance.npz") as a, np.load(other / "importance.npz") as b:
        names = [name for name in a.files if name.startswith("L")]
        if any(not np.array_equal(a[name], b[name]) for name in names):
            return "importance.npz differs"
    return ""


def experiment_difference(one: Path, other: Path) -> str:
    """Compare the rows of two runs byte by byte, and their verdicts; times are not compared."""
    for whole in sorted(one.glob("*/rows.jsonl")):
        again = other / whole.relative_to(one)
        if not again.is_file() or whole.read_bytes() != again.read_bytes():
            return f"{whole.relative_to(one)} differs"
    for whole in sorted(one.glob("*/experiment.json")):
        first, second = (json.loads(path.read_text("utf-8")) for path in (whole, other / whole.relative_to(one)))
        if any(first[part] != second[part] for part in ("claims", "places", "footnotes")):
            return f"the verdicts of {whole.parent.name} differ"
    return ""


if __name__ == "__main__":
    sys.exit(main())
