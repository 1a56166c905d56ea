"""Run the same jobs in two checkouts on this machine and compare what comes out, number by number.

    python tools/compare_checkouts.py OLD NEW [--only 'prune*,plan'] [--weights ../shared] [--device cuda]

OLD and NEW are checkouts (folders with src/pullback). Each side runs in a process of its own with its src/ first on
PYTHONPATH, with this Python and one thread. `compare_jobs.py` beside this file has the jobs, `--list` names them.
Pictures and small networks that the jobs read are made once, by OLD, and shared. Results of OLD are kept under
`--old-cache` by git's hash of src/, so that the next comparison with the same committed sources runs NEW alone.

For every array, and for every group of numbers that differ in list indices alone, the difference is
max |old − new| / max(max |old|, 1e-3 for single numbers of a document). A job's figure is the largest of these. Whole
numbers, texts and shapes must be equal; half-precision numbers may differ in their last place. The exit status is 1
where a job failed, a difference is above the job's tolerance, a text changed, or something is missing in NEW; what is
new in NEW is listed and does not count. Times are seconds of the processor.
`--ignore PATTERN` leaves out names of results, such as 'diagnose-*:*/advice'.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
RUNNER = HERE / "compare_jobs.py"
FLOOR = 1e-3
SHOWN = 6


@dataclass
class Difference:
    """What one job shows. ``largest`` is relative, ``where`` it is found."""

    leaves: int = 0
    largest: float = 0.0
    where: str = ""
    changed: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def fails(self, tolerance: float) -> bool:
        return bool(self.failures or self.missing or self.changed or not self.largest <= tolerance or not self.leaves)


def compare(old: Mapping[str, Any], new: Mapping[str, Any], ignored: Sequence[str] = ()) -> Difference:
    """Two documents of `compare_jobs.run`."""
    failures = [f"{side}: {doc['error']}" for side, doc in (("OLD", old), ("NEW", new)) if "error" in doc]
    if failures:
        return Difference(failures=failures)
    before, after = (_kept(doc["leaves"], ignored) for doc in (old, new))
    found = Difference(len(before))
    found.missing = [name for name in before if name not in after]
    found.added = [name for name in after if name not in before]
    for name, pairs in _groups(before, after).items():
        if not all(isinstance(part, float | np.ndarray) for pair in pairs for part in pair):
            found.changed += [f"{name}: {_short(a)} became {_short(b)}" for a, b in pairs if not _same(a, b)]
            continue
        for reason, size in _distances(pairs):
            if reason:
                found.changed.append(f"{name}: {reason}")
            elif not size <= found.largest:
                found.largest, found.where = size, name
    return found


def _kept(leaves: Mapping[str, Any], ignored: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in leaves.items() if not any(fnmatch.fnmatch(name, p) for p in ignored)}


def _groups(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, list[tuple[Any, Any]]]:
    """Single numbers of a list of objects are compared with the scale of all of them."""
    groups: dict[str, list[tuple[Any, Any]]] = {}
    for name, value in before.items():
        if name in after:
            one = isinstance(value, float) and isinstance(after[name], float)
            groups.setdefault(re.sub(r"\[\d+\]", "[*]", name) if one else name, []).append((value, after[name]))
    return groups


def _distances(pairs: Sequence[tuple[Any, Any]]) -> Iterator[tuple[str, float]]:
    if all(isinstance(part, float) for pair in pairs for part in pair):
        yield "", _relative(*(np.array(side) for side in zip(*pairs, strict=True)), FLOOR)
        return
    for pair in pairs:
        old, new = (np.asarray(part) for part in pair)
        if old.shape != new.shape:
            yield f"shape {old.shape} became {new.shape}", 0.0
        elif "f" in (old.dtype.kind, new.dtype.kind) and {old.dtype.kind, new.dtype.kind} <= set("fiu"):
            if "f" == old.dtype.kind == new.dtype.kind and old.dtype != new.dtype:
                yield f"{old.dtype} became {new.dtype}", 0.0
            yield "", _relative(old, new, 0.0)
        elif not np.array_equal(old, new):
            yield f"{np.mean(old != new):.2%} of {old.size} whole numbers or texts differ", 0.0


def _relative(old: np.ndarray, new: np.ndarray, floor: float) -> float:
    """Infinite where NaN or infinity are not at the same places."""
    finite = np.isfinite(old)
    if not np.array_equal(finite, np.isfinite(new)) or not np.array_equal(old[~finite], new[~finite], equal_nan=True):
        return float("inf")
    if not finite.any():
        return 0.0
    old, new = old[finite], new[finite]
    # half precision is a way to store: the last place may go either way
    slack = (
        np.spacing(np.maximum(abs(old), abs(new))).astype(np.float64) if old.dtype == new.dtype == np.float16 else 0.0
    )
    old, new = old.astype(np.float64), new.astype(np.float64)
    gap, scale = float((np.abs(old - new) - slack).clip(0).max()), max(float(np.abs(old).max()), floor)
    return 0.0 if gap == 0 else gap / scale if scale else float("inf")


def _same(old: Any, new: Any) -> bool:
    number = (int, float)
    if isinstance(old, number) != isinstance(new, number) or isinstance(old, np.ndarray) or isinstance(new, np.ndarray):
        return False
    if isinstance(old, float) or isinstance(new, float):  # 1 became 1.0, or the like
        return bool(old == new)
    return type(old) is type(new) and bool(old == new)


def _short(value: Any) -> str:
    text = repr(value) if not isinstance(value, np.ndarray) else f"array {value.shape}"
    return text if len(text) <= 80 else f"{text[:77]}..."


# Running


def git(checkout: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", str(checkout), *arguments], capture_output=True, text=True).stdout.strip()


def python(checkout: Path, *arguments: str | Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": str(checkout / "src"),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "COLUMNS": "200",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, str(RUNNER), *map(str, arguments), "--src", str(checkout / "src")]
    # in a folder of its own, so that nothing of this checkout is found by accident
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(command, env=environment, cwd=folder, check=True)


def results(folder: Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    found = {}
    for name in names:
        path = folder / f"{name}.pickle"
        if path.is_file():
            with open(path, "rb") as file:
                found[name] = pickle.load(file)
    return found


def chosen(jobs: Any, only: str | None, weights: Path | None) -> list[str]:
    names = [name for name in jobs.JOBS if weights is not None or name not in jobs.NEEDS_WEIGHTS]
    if only is None:
        return names
    patterns = only.split(",")
    unknown = [p for p in patterns if not any(fnmatch.fnmatch(name, p) for name in names)]
    if unknown:
        raise SystemExit(f"--only: {', '.join(unknown)} names no job. There are {', '.join(names)}.")
    return [name for name in names if any(fnmatch.fnmatch(name, p) for p in patterns)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path, nargs="?")
    parser.add_argument("new", type=Path, nargs="?")
    parser.add_argument("--only", help="names of jobs, by commas; * stands for anything")
    parser.add_argument("--weights", type=Path, help="folder with models/dinov2-small and data/imagenet_val: four more")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--old-cache", type=Path, default=Path(tempfile.gettempdir()) / "pullback-compare")
    parser.add_argument("--tolerance", type=float, help="in place of each job's own")
    parser.add_argument("--ignore", action="append", default=[], help="JOB:NAME pattern to leave out; may be repeated")
    parser.add_argument("--keep", type=Path, help="keep the files that NEW wrote here")
    parser.add_argument("--list", action="store_true", help="name the jobs and leave")
    options = parser.parse_args()
    sys.path.insert(0, str(HERE))
    import compare_jobs

    if options.list:
        for name, job in compare_jobs.JOBS.items():
            weights = "  needs --weights" if name in compare_jobs.NEEDS_WEIGHTS else ""
            print(f"{name:24} tolerance {compare_jobs.TOLERANCE[name]:g}{weights}  {(job.__doc__ or '').strip()}")
        return 0
    if options.old is None or options.new is None:
        parser.error("OLD and NEW are needed")
    old, new = options.old.resolve(), options.new.resolve()
    for checkout in (old, new):
        if not (checkout / "src" / "pullback").is_dir():
            parser.error(f"{checkout} has no src/pullback")
    names = chosen(compare_jobs, options.only, options.weights)
    weights = [] if options.weights is None else ["--weights", options.weights.resolve()]

    source, dirty = git(old, "rev-parse", "HEAD:src"), bool(git(old, "status", "--porcelain", "--", "src"))
    version = hashlib.sha256(RUNNER.read_bytes()).hexdigest()[:8]  # other jobs, other results
    key = f"{source[:12] or 'no-commit'}-{version}"
    base = options.old_cache.resolve() / (f"{key}-dirty" if dirty or not source else key)
    if dirty or not source:
        shutil.rmtree(base, ignore_errors=True)
    inputs, kept = base / "inputs", base / options.device
    if not inputs.is_dir():
        print(f"inputs, made by {old}", flush=True)
        unfinished = base / "inputs.tmp"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        python(old, "inputs", unfinished)
        unfinished.rename(inputs)
    common = ["--device", options.device, *weights]
    known = {name for name, result in results(kept, names).items() if "error" not in result}
    missing = [name for name in names if name not in known]
    print(f"OLD {old} ({key}{', dirty' if dirty else ''}): {len(names) - len(missing)} kept, {len(missing)} to run")
    begun = time.perf_counter()
    if missing:
        python(old, "run", inputs, kept, *missing, *common)
        for name in missing:
            shutil.rmtree(kept / name, ignore_errors=True)
    middle = time.perf_counter()
    scratch = Path(tempfile.mkdtemp(prefix="compare-new-")) if options.keep is None else options.keep.resolve()
    state = f"{git(new, 'rev-parse', 'HEAD')[:12]}{', dirty' * bool(git(new, 'status', '--porcelain', '--', 'src'))}"
    print(f"NEW {new} ({state})", flush=True)
    try:
        python(new, "run", inputs, scratch, *names, *common)
        failed = report(names, results(kept, names), results(scratch, names), options, compare_jobs.TOLERANCE)
    finally:
        if options.keep is None:
            shutil.rmtree(scratch, ignore_errors=True)
    print(f"\nOLD took {middle - begun:.0f} s, NEW {time.perf_counter() - middle:.0f} s")
    return 1 if failed else 0


def report(
    names: Sequence[str],
    old: Mapping[str, Mapping[str, Any]],
    new: Mapping[str, Mapping[str, Any]],
    options: argparse.Namespace,
    tolerances: Mapping[str, float],
) -> list[str]:
    """Print what differs and a table; the names of the jobs that do not agree."""
    nothing = {"error": "no result: the process ended before this job", "seconds": float("nan")}
    lines, failed = [], []
    for name in names:
        first, second = old.get(name, nothing), new.get(name, nothing)
        ignored = [p.partition(":")[2] for p in options.ignore if fnmatch.fnmatch(name, p.partition(":")[0])]
        found = compare(first, second, ignored)
        tolerance = tolerances[name] if options.tolerance is None else options.tolerance
        bad = found.fails(tolerance)
        failed += [name] * bad
        for title in ("failures", "changed", "missing", "added"):
            details = getattr(found, title)
            for detail in details[:SHOWN]:
                print(f"\n{name}, {title}: {detail}" if title == "failures" else f"{name}, {title}: {detail}")
            if len(details) > SHOWN:
                print(f"{name}, {title}: and {len(details) - SHOWN} more")
        counts = f"{len(found.changed):>7} {len(found.missing):>7} {len(found.added):>5}"
        times = f"{first['seconds']:>9.1f} {second['seconds']:>5.1f}"
        verdict = "FAILED" if found.failures else "DIFFERS" if bad else "equal" if found.largest == 0 else "round-off"
        lines.append(
            f"{name:24} {found.leaves:>6} {found.largest:>9.2g} {tolerance:>7.0e} {counts} {times}  {verdict:10}"
            f" {found.where}"
        )
    sizes = f"{'values':>6} {'largest':>9} {'allowed':>7}"
    print(f"\n{'job':24} {sizes} changed missing added  cpu s old new  verdict    where")
    print("\n".join(lines))
    print(f"\n{len(names) - len(failed)} of {len(names)} jobs agree" + (f"; not {', '.join(failed)}" if failed else ""))
    return failed


if __name__ == "__main__":
    sys.exit(main())
