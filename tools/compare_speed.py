"""Whether a refactoring cost speed: two checkouts take turns at the same jobs, and their median times are compared.

    python tools/compare_speed.py OLD NEW --device cuda --out speed.json
    python tools/compare_speed.py OLD NEW --device cpu --size small --rounds 5

Each checkout runs in a process of its own that stays alive, so that models are built and kernels chosen once. In every
round each job is timed in the old process, then in the new one: a machine whose speed drifts slows both alike. Cold
starts (a new process for each) are timed in turns as well. The exit status is 1 if a job is slower than its limit.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

LIMIT, COLD_LIMIT = 1.05, 1.10
COLD = {
    "cold start: help": ["-m", "pullback", "diagnose", "--help"],
    "cold start: import": ["-c", "import pullback as pb; pb.load_probe; pb.diagnose"],
}


def jobs(device: str, size: str) -> dict[str, Any]:
    """The timed jobs, by name: functions of nothing. Runs in a worker, with its checkout's `pullback`."""
    import torch
    from transformers import Dinov2Config, Dinov2Model

    import pullback as pb
    from pullback.registry import SCORES

    width, heads = {"small": (384, 6), "base": (768, 12)}[size]
    torch.manual_seed(0)
    config = Dinov2Config(hidden_size=width, num_attention_heads=heads, patch_size=14, image_size=518)
    model = Dinov2Model(config).eval().requires_grad_(False).to(device)
    gpu = device == "cuda"
    images = torch.randn(8 if gpu else 1, 3, 224, 224, device=device)
    found: dict[str, Any] = {}
    for layer in (2, 10):
        probe = pb.load_probe(model, "cls", layer)
        features = probe.features(images[:1])
        operator = pb.JacobianOperator(probe, features, precision="tf32" if gpu else "float32")
        columns = torch.randn(1, operator.cols, 20, device=device)
        rows = torch.randn(1, operator.rows, 20, device=device)
        found[f"20 JVPs at L{layer:02d}"] = lambda operator=operator, columns=columns: operator @ columns
        found[f"20 VJPs at L{layer:02d}"] = lambda operator=operator, rows=rows: operator.T @ rows
    probe = pb.load_probe(model, "cls", 10)
    features = probe.features(images)
    targets = _targets_of(pb)
    precision = "tf32" if gpu else "float32"
    found["exact targets at L10"] = lambda: targets(probe, features, 20, "exact", precision=precision)
    found["Krylov targets at L10"] = lambda: targets(probe, features[:2], 20, "krylov", precision=precision)
    found["diagnosis at L10"] = lambda: pb.diagnose(probe, images[:2], rank=20)
    head = pb.ImportanceHead(width, 256).eval().requires_grad_(False).to(device)
    many = torch.randn(64 if gpu else 2, 3, 224, 224, device=device)
    attention = "class-attention" if "class-attention" in SCORES else "evit"  # what older checkouts call it
    for name, score in (("head", head), ("class attention", attention)):
        pruned = pb.prune(model, score, ratio=0.5, stages=[3])
        found[f"pruned forward by {name}"] = lambda pruned=pruned: _without_gradients(pruned, many)
    views = torch.rand(1, 4, 3, 128, 128, device=device)
    scene_probe = pb.load_probe("tiny-views", "camera", device=device)
    scene = pb.JacobianOperator(scene_probe, scene_probe.features(views))
    outputs = torch.randn(1, scene.rows, 9, device=device)
    found["9 VJPs of a camera"] = lambda: scene.T @ outputs
    return found


def _targets_of(pb: Any) -> Any:
    if "targets_of" in pb.__all__:
        return pb.targets_of
    from pullback.learning.targets import targets_of  # where it was before it became public

    return targets_of


def _without_gradients(model: Any, images: Any) -> Any:
    import torch

    with torch.inference_mode():
        return model(images)


def work(device: str, size: str) -> None:
    """Time the jobs whose names come on standard input, one a line; answer with milliseconds."""
    import torch

    def synchronize() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    known = jobs(device, size)
    for job in known.values():
        for _ in range(4):  # kernels are chosen, graphs recorded
            job()
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor()
    print(json.dumps({"jobs": list(known), "machine": name, "torch": torch.__version__}), flush=True)
    for line in sys.stdin:
        job = known[line.strip()]
        synchronize()
        begun = time.perf_counter()
        calls = 0
        while calls < 1 or (time.perf_counter() - begun < 0.2 and calls < 50):
            job()
            synchronize()
            calls += 1
        print(1e3 * (time.perf_counter() - begun) / calls, flush=True)


class Worker:
    """A checkout's process."""

    def __init__(self, checkout: Path, device: str, size: str) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), "--work", device, size]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(checkout)
        )
        self.facts: dict[str, Any] = json.loads(self._line())
        self.jobs: list[str] = self.facts.pop("jobs")

    def milliseconds(self, job: str) -> float:
        assert self.process.stdin is not None
        print(job, file=self.process.stdin, flush=True)
        return float(self._line())

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("a worker ended early; its message stands above")
        return line


def environment(checkout: Path) -> dict[str, str]:
    extra = os.environ.get("PYTHONPATH", "")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(checkout.resolve() / "src"), extra]))}


def commit(checkout: Path) -> str | None:
    """The commit of a checkout, None without git."""
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def cold(checkout: Path, arguments: list[str]) -> float:
    begun = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True, env=environment(checkout))
    return 1e3 * (time.perf_counter() - begun)


def main() -> None:
    if sys.argv[1:2] == ["--work"]:
        work(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--size", choices=("small", "base"), default="base")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--cold-rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    old, new = (Worker(path, options.device, options.size) for path in (options.old, options.new))
    times: dict[str, tuple[list[float], list[float]]] = {}
    for _ in range(options.rounds):
        for job in old.jobs:
            both = times.setdefault(job, ([], []))
            both[0].append(old.milliseconds(job))
            both[1].append(new.milliseconds(job))
    for name, arguments in COLD.items():
        times[name] = ([], [])
        for number in range(options.cold_rounds + 1):
            both = cold(options.old, arguments), cold(options.new, arguments)
            if number:  # the first fills the caches
                times[name][0].append(both[0])
                times[name][1].append(both[1])
    rows = []
    for name, (before, after) in times.items():
        limit = COLD_LIMIT if name in COLD else LIMIT
        ratio = statistics.median(b / a for a, b in zip(before, after, strict=True))
        rows.append({"job": name, "old_ms": statistics.median(before), "new_ms": statistics.median(after)})
        rows[-1] |= {"ratio": ratio, "limit": limit, "rounds": len(before)}
        verdict = "" if ratio <= limit else "  SLOWER"
        print(f"{name:28} {rows[-1]['old_ms']:9.2f} ms {rows[-1]['new_ms']:9.2f} ms  {ratio:5.3f}{verdict}")
    if options.out is not None:
        document = {
            **new.facts,
            "date": date.today().isoformat(),
            "old": commit(options.old),
            "new": commit(options.new),
        }
        document |= {"device": options.device, "size": options.size, "rows": rows}
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    sys.exit(any(row["ratio"] > row["limit"] for row in rows))


if __name__ == "__main__":
    main()
