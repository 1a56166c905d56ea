"""A checkpoint as several files, none of them large: `checkpoint-000500-1-of-4` and so on.

Some places store or transfer files of a limited size only. A part appears under its name only when it is whole, and
older checkpoints go only after the newer one is complete, so whatever stops a run, the last whole checkpoint can be
read.
"""

from __future__ import annotations

import io
import math
import os
import re
from pathlib import Path
from typing import Any

import torch

PART_BYTES = 15_000_000
_NAME = re.compile(r"checkpoint-(\d+)-(\d+)-of-(\d+)")


def write_parts(state: dict[str, Any], step: int, folder: Path, *, part_bytes: int = PART_BYTES) -> list[Path]:
    """The parts of this step, in order; those of other steps are deleted."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    content = buffer.getbuffer()
    count = max(1, math.ceil(len(content) / part_bytes))
    written = []
    for index in range(count):
        path = folder / f"checkpoint-{step:06d}-{index + 1}-of-{count}"
        unfinished = path.with_suffix(".tmp")
        unfinished.write_bytes(content[index * part_bytes : (index + 1) * part_bytes])
        os.replace(unfinished, path)
        written.append(path)
    for path in folder.glob("checkpoint-*"):
        if path not in written:
            path.unlink()
    return written


def read_parts(folder: Path, device: torch.device) -> dict[str, Any] | None:
    """The state of the latest step of which all parts are there; None where there is none."""
    found: dict[tuple[int, int], dict[int, Path]] = {}
    for path in folder.glob("checkpoint-*"):
        name = _NAME.fullmatch(path.name)
        if name:
            step, index, count = map(int, name.groups())
            found.setdefault((step, count), {})[index] = path
    whole = [(step, parts) for (step, count), parts in found.items() if len(parts) == count]
    if not whole:
        return None
    _, parts = max(whole, key=lambda entry: entry[0])
    content = b"".join(parts[index].read_bytes() for index in sorted(parts))
    state: dict[str, Any] = torch.load(io.BytesIO(content), map_location=device, weights_only=True)
    return state
