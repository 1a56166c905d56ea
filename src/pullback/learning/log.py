"""The numbers of a run, line by line, in a form that survives being killed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pullback.errors import PullbackError


class Log:
    """metrics.jsonl, and TensorBoard where it is wanted."""

    def __init__(self, folder: Path | None, step: int, tensorboard: bool) -> None:
        self.path = None if folder is None else folder / "metrics.jsonl"
        self.board = _summary_writer(folder, step) if tensorboard and folder is not None else None
        if self.path is not None and self.path.exists():  # lines after the checkpoint will be written again
            kept = self.path.with_suffix(".tmp")
            kept.write_text("".join(_lines_until(step, self.path.read_text("utf-8"))), encoding="utf-8")
            os.replace(kept, self.path)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, **numbers}) + "\n")
        if self.board is not None:
            for name, value in numbers.items():
                self.board.add_scalar(name, value, step)

    def close(self) -> None:
        if self.board is not None:
            self.board.close()


def _lines_until(step: int, text: str) -> Iterator[str]:
    for line in text.splitlines(keepends=True):
        try:
            if json.loads(line)["step"] <= step:
                yield line
        except json.JSONDecodeError:  # the run was killed while it wrote this one
            return


def _summary_writer(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise PullbackError("tensorboard: the package is missing: pip install tensorboard, or leave it out.") from None
    return SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
