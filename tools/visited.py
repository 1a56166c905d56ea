"""Count the files that everyday jobs lead through, and how often they change rooms.

    PYTHONPATH=<checkout>/src python tools/visited.py [--files] [--json]

A file under src/pullback is visited by a job if the body of a function, method, property or lambda that is written in
it was executed, in any thread. Module and class bodies do not count (importing is no visit), nor does code that
`dataclass` generates. Functions that run because a module is imported (decorators, registrations) count: a reader meets
them. Comprehensions belong to the function around them.

A room is a package or module directly under `pullback`: `backbones`, `cli`, `errors`. Two numbers are printed:

  changes   calls whose room differs from that of the call before it, in the order in which they happen in a thread.
            They grow with the work done, so compare them for the same jobs alone.
  doors     different pairs (room of the caller, room of the called), the caller being the nearest frame of the package
            on the stack. They do not depend on how often something is done.

Each job runs in a process of its own, in which the command runs as `python -m pullback` would. Figures are left out:
they are drawn by another process, which is not traced. The first line counts the files and lines of the package.

At commit e84502d: diagnose 51 files, targets 53, pb.compute_table of a loaded probe 37, prune 62, pb.prune + call 27,
in 209 files of 25,084 lines. `pullback/__init__.py`, which looks public names up, is one of the 37 and of the 27.
Changes of prune vary by a fifth from run to run, since it measures times until they are steady.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import runpy
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

PARTS = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}


class Trace:
    """Hears of every call while it is on."""

    def __init__(self, package: Path) -> None:
        self.package = f"{package}{os.sep}"
        self.files: Counter[str] = Counter()  # calls by file
        self.doors: Counter[tuple[str, str]] = Counter()
        self.changes = 0
        self._known: dict[CodeType, str | None] = {}
        self._last = threading.local()

    def __enter__(self) -> Trace:
        threading.setprofile(self._hear)
        sys.setprofile(self._hear)
        return self

    def __exit__(self, *unused: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]

    def _hear(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or (file := self._file(frame.f_code)) is None:
            return
        self.files[file] += 1
        room, before = room_of(file), getattr(self._last, "room", None)
        self.changes += before is not None and before != room
        self._last.room = room
        caller = frame.f_back
        while caller is not None and (origin := self._file(caller.f_code)) is None:
            caller = caller.f_back
        if caller is not None and room_of(origin) != room:
            self.doors[room_of(origin), room] += 1

    def _file(self, code: CodeType) -> str | None:
        """The file of a function of the package, relative to it."""
        if code not in self._known:
            own = code.co_filename.startswith(self.package) and code.co_flags & inspect.CO_OPTIMIZED
            own = own and code.co_name not in PARTS
            self._known[code] = code.co_filename.removeprefix(self.package) if own else None
        return self._known[code]


def room_of(file: str) -> str:
    return Path(file).parts[0].removesuffix(".py")


# The jobs


def command(*words: str) -> None:
    sys.argv = ["pullback", *words, "--device", "cpu"]
    try:
        runpy.run_module("pullback", run_name="__main__")
    except SystemExit as exit:
        if exit.code:
            raise RuntimeError(f"{' '.join(sys.argv)} ended with {exit.code}") from None


def diagnose() -> None:
    command("diagnose", "tiny-scenes", "--decoder", "cls", "--images", "photos", "--size", "112", "--out", "diagnosis")


def targets() -> None:
    command("targets", "tiny-scenes", "--decoder", "cls", "--images", "photos", "--size", "112", "--out", "targets")


def table() -> None:
    """Targets in memory, of a probe that is there already."""
    import pullback as pb

    pb.compute_table(LOADED["probe"], "photos", rank=8, size=112)


def prune() -> None:
    command("prune", "tiny-scenes", "--decoder", "cls", "--images", "photos", "--size", "112", "--out", "comparison")


def pb_prune() -> None:
    import torch

    import pullback as pb

    probe = pb.load_probe("tiny-scenes", "cls", device="cpu")
    pruned = pb.prune(probe.backbone.model, "class-attention", ratio=0.5, stages=[4])
    with torch.no_grad():
        pruned(torch.zeros(1, 3, 112, 112))


JOBS = {
    "diagnose": diagnose,
    "targets": targets,
    "pb.compute_table": table,
    "prune": prune,
    "pb.prune + call": pb_prune,
}
LOADED: dict[str, Any] = {}


def run(name: str) -> dict[str, Any]:
    """One job, traced, in a folder of its own with two pictures in photos/."""
    sys.modules["matplotlib"] = None  # type: ignore[assignment]
    import importlib.util

    import numpy as np
    from PIL import Image

    found = importlib.util.find_spec("pullback")  # not imported: what runs on import is part of the job
    assert found is not None and found.origin is not None
    package = Path(found.origin).resolve().parent
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("photos").mkdir()
        for seed in range(2):
            pixels = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)
            Image.fromarray(pixels).resize((128, 128), Image.Resampling.BICUBIC).save(f"photos/{seed}.png")
        if name == "pb.compute_table":
            import pullback as pb

            LOADED["probe"] = pb.load_probe("tiny-scenes", "cls", device="cpu")
        with Trace(package) as trace, open(os.devnull, "w") as nowhere:
            screen, sys.stdout = sys.stdout, nowhere
            try:
                JOBS[name]()
            finally:
                sys.stdout = screen
        os.chdir("/")
    return {"files": trace.files, "changes": trace.changes, "doors": [list(door) for door in sorted(trace.doors)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", action="store_true", help="name the files of each job")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--job", choices=JOBS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        print(json.dumps(run(options.job)))
        return
    results = {}
    for name in JOBS:
        words = [sys.executable, __file__, "--job", name]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{name} failed:\n{done.stderr[-3000:]}")
        results[name] = json.loads(done.stdout.splitlines()[-1])
    package = package_size()
    if options.json:
        print(json.dumps({"jobs": results, "package": package}, indent=1))
        return
    print(f"{package['folder']}: {package['files']} files, {package['lines']:,} lines\n")
    print(f"{'job':18} files rooms changes doors")
    for name, result in results.items():
        rooms = {room_of(file) for file in result["files"]}
        print(f"{name:18} {len(result['files']):>5} {len(rooms):>5} {result['changes']:>7} {len(result['doors']):>5}")
        if options.files:
            print("".join(f"    {calls:>7}  {file}\n" for file, calls in sorted(result["files"].items())))


def package_size() -> dict[str, Any]:
    import importlib.util

    found = importlib.util.find_spec("pullback")
    if found is None or found.origin is None:
        raise SystemExit("pullback is not found: set PYTHONPATH to the checkout's src")
    folder = Path(found.origin).resolve().parent
    files = sorted(folder.rglob("*.py"))
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
    return {"folder": str(folder), "files": len(files), "lines": lines}


if __name__ == "__main__":
    main()
