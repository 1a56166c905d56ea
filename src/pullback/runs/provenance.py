"""Where a number came from: machine, date, versions, commit of the code, hash of the weights."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pullback
from pullback.errors import counted

if TYPE_CHECKING:
    import torch
    from torch import nn

_GIT_SECONDS = 20


def provenance(device: torch.device) -> dict[str, Any]:
    """Return what every result file says about its origin, besides its settings."""
    import torch

    return {
        "device": str(device),
        "machine": machine(device),
        "threads": torch.get_num_threads(),
        "date": now(),
        "commit": commit(),
        "versions": {
            "pullback": pullback.__version__,
            "torch": torch.__version__,
            "transformers": _version("transformers"),
            "python": platform.python_version(),
        },
    }


def now() -> str:
    """Return the time in UTC, to the second, such as 2026-11-16T12:00:00+00:00."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def machine(device: torch.device, *, threads: bool = False) -> str:
    """Describe the machine, such as "AMD EPYC 9555, 2 cores, 8 GiB", and the GPU, such as ", NVIDIA H200 140 GiB".

    ``threads``: with the number of threads that a CPU computes with, on which times depend.
    """
    import torch

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    text = f"{_cpu_name()}, {counted(cores or 1, 'core')}, {memory:.0f} GiB"
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        text += f", {card.name} {card.total_memory / 2**30:.0f} GiB"
    if threads and device.type == "cpu":
        text += f", {counted(torch.get_num_threads(), 'thread')}"
    return text


def commit() -> str | None:
    """Return the commit of the checkout that runs, with "-dirty" where files differ; None outside of one."""
    folder = Path(pullback.__file__).parent
    try:
        _git(folder, "ls-files", "--error-unmatch", "__init__.py")
        # not `describe --dirty`: it writes the index, and a run that is stopped meanwhile would leave it locked
        changed = _git(folder, "--no-optional-locks", "status", "--porcelain", "--untracked-files=no")
        return _git(folder, "rev-parse", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


def weights_hash(module: nn.Module) -> str:
    """Return the sha256 over names, dtypes, shapes and bytes of all parameters and buffers, sorted by name."""
    import torch

    digest = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def file_hash(path: Path) -> str:
    """Return the sha256 of a file's bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=_GIT_SECONDS).stdout.strip()
