"""What the commands that measure a trained model share: progress, means with errors, a result file that says where it
came from."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pullback.models import EMBEDDED

_DIGITS = 6
_SECONDS_BETWEEN_LINES = 5.0


class Progress:
    """One line that counts up in a terminal, a line every few seconds in a log."""

    def __init__(self, task: str, total: int) -> None:
        self.task, self.total, self.done = task, total, 0
        self.begun = time.perf_counter()
        self._printed = -math.inf

    def advance(self, scenes: int) -> None:
        self.done += scenes
        now, live = time.perf_counter(), sys.stderr.isatty()
        if live or now - self._printed > _SECONDS_BETWEEN_LINES or self.done == self.total:
            self._printed = now
            seconds = now - self.begun
            left = seconds / self.done * (self.total - self.done)
            line = f"{self.task}: {self.done}/{self.total} scenes, {seconds:.0f} s, about {left:.0f} s left"
            ending = "\r" if live and self.done < self.total else "\n"
            print(f"{line:<79}", end=ending, file=sys.stderr, flush=True)


def mean_with_error(values: Tensor) -> dict[str, float]:
    """Mean and its standard error over scenes [n]; scenes without the quantity (NaN) are left out."""
    known = values.double()[~values.isnan()]
    error = known.std() / math.sqrt(len(known)) if len(known) > 1 else known.new_tensor(math.nan)
    return {"mean": rounded(known.mean()), "se": rounded(error)}


def rounded(value: Tensor | float) -> float:
    return float(f"{float(value):.{_DIGITS}g}")


def weights_sha256(model: str) -> str:
    """Of the weights file that was measured, so that figures of other weights can be told apart."""
    folder = EMBEDDED.get(model, Path(model))
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def write_result(path: Path, content: dict[str, Any], device: torch.device) -> None:
    """As JSON, behind when, where and with which versions."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_origin(device) | content, indent=1) + "\n", encoding="utf-8")
    print(f"written: {path}", file=sys.stderr)


def _origin(device: torch.device) -> dict[str, Any]:
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": {
            "device": card,
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "vector_instructions": torch.backends.cpu.get_cpu_capability(),
        },
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
    }
