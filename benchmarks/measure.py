"""Timing and bookkeeping that the benchmarks share."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import pullback as pb
from pullback.runs.provenance import provenance

RESULTS = Path(__file__).parent / "results"
_CPU = 0  # in the profiler's traces


def milliseconds(functions: dict[str, Callable[[], Any]], device: torch.device, rounds: int = 7) -> dict[str, float]:
    """The median time of one call of each function. The functions take turns, so that a machine whose speed drifts
    slows all of them alike; on a GPU by events, five calls a turn of what is quick."""
    calls: dict[str, int] = {}
    for name, function in functions.items():  # the first turn warms up
        function()
        calls[name] = 5 if device.type == "cuda" and _elapsed(function, device, 1) < 100 else 1
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            times[name].append(_elapsed(function, device, calls[name]) / calls[name])
    return {name: statistics.median(values) for name, values in times.items()}


def _elapsed(function: Callable[[], Any], device: torch.device, calls: int) -> float:
    if device.type != "cuda":
        begun = time.perf_counter()
        for _ in range(calls):
            function()
        return 1e3 * (time.perf_counter() - begun)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    start.record()
    for _ in range(calls):
        function()
    stop.record()
    torch.cuda.synchronize(device)
    return start.elapsed_time(stop)


def peak_gigabytes(call: Callable[[], Any], device: torch.device) -> float:
    """The most that tensors took at any time of one call, beside what was there before it."""
    return _peak_of_cuda(call, device) if device.type == "cuda" else _peak_of_cpu(call)


def _peak_of_cuda(call: Callable[[], Any], device: torch.device) -> float:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 1e9


def _peak_of_cpu(call: Callable[[], Any]) -> float:
    """From the profiler's trace, in which every allocation and every release carries the total after it. What the
    process takes from the system would be no measure: an allocator keeps what it once had."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    changes = [event for event in events if event.get("name") == "[memory]" and event["args"]["Device Type"] == _CPU]
    if not changes:
        return 0.0
    first = min(changes, key=lambda event: event["ts"])["args"]
    before = first["Total Allocated"] - first["Bytes"]
    return max(0, *(event["args"]["Total Allocated"] - before for event in changes)) / 1e9


def machine(device: torch.device) -> dict[str, str | None]:
    """What a result file says about its origin."""
    found = provenance(device)
    return {
        "device": found["machine"],
        "threads": str(found["threads"]),
        "torch": found["versions"]["torch"],
        "python": found["versions"]["python"],
        "date": found["date"][:10],
        "commit": found["commit"],
    }


def save(name: str, content: dict[str, Any], folder: Path | None = None) -> Path:
    folder = folder or RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def random_dinov2(size: str, seed: int = 0) -> nn.Module:
    """DINOv2 of a published size with random weights: the speed is that of the real one."""
    from transformers import Dinov2Config, Dinov2Model

    width, heads = {"small": (384, 6), "base": (768, 12), "large": (1024, 16)}[size]
    torch.manual_seed(seed)
    config = Dinov2Config(
        hidden_size=width,
        num_attention_heads=heads,
        num_hidden_layers=24 if size == "large" else 12,
        patch_size=14,
        image_size=518,  # as published: at that size positions are not interpolated
    )
    return Dinov2Model(config).eval().requires_grad_(False)


LAYER_SCALE = 0.2  # of a random VGGT; at 0.01, where training starts, every block is nearly the identity


def random_vggt(config: dict[str, Any], device: torch.device, seed: int = 0) -> pb.VGGT:
    """In float32, made where it is used: 5 GB need not pass through the CPU."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = pb.VGGT(pb.VGGTConfig(**config))
    for name, parameter in model.named_parameters():
        if name.endswith(".gamma"):
            torch.nn.init.constant_(parameter, LAYER_SCALE)
        if name.endswith(("aggregator.camera_token", "aggregator.register_token")):
            torch.nn.init.normal_(parameter)
    return model.eval().requires_grad_(False)
