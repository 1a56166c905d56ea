"""What every rule costs: operations per image, and milliseconds beside the unpruned model's in the same race."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from pullback.errors import PullbackError
from pullback.evaluation.cost import Timing, flops, milliseconds, race
from pullback.pruning.compare_scores import ScoreBook
from pullback.pruning.compare_subject import Combination, Subject
from pullback.runs.files import write_json

_SECONDS, _FEWEST, _MOST = 0.5, 5, 30


def parse_batches(text: str, device: str) -> tuple[int, ...]:
    """ "auto": 1, 8 and 64 on a GPU, 1 and 8 on a CPU; "none"; or numbers."""
    if text == "none":
        return ()
    if text == "auto":
        return (1, 8) if device == "cpu" else (1, 8, 64)
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise PullbackError(f"time: expected auto, none or batch sizes such as 1,8,64, got {text!r}.")
    return sizes


class CostBook:
    """cost.json: measured once, whatever is asked for later. The machine is part of what is remembered."""

    def __init__(self, path: Path, machine: str) -> None:
        self._path, self._machine = path, machine
        stored = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        known = stored.get("rules", []) if stored.get("machine") == machine else []
        self.rules = {Combination(row["preset"], row["score"], row["ratio"]): row for row in known}
        self.unpruned_flops: int | None = stored.get("unpruned_flops")

    def complete(
        self,
        subject: Subject,
        book: ScoreBook,
        wanted: Sequence[Combination],
        image: Tensor,
        sizes: Sequence[int],
        watch: Callable[[str], None],
    ) -> None:
        """Measure what is missing, on copies of one image [3, H, W]; whatever needs a Jacobian is left out."""
        wanted = [combination for combination in wanted if book.deployable(combination)]
        image = image.to(subject.backbone.device)
        self._count(subject, book, wanted, image[None], watch)
        for size in sizes:
            missing = [rule for rule in wanted if str(size) not in self.rules[rule]["milliseconds"]]
            if missing:
                watch(f"timing batches of {size}")
                self._time(subject, book, missing, image.expand(size, -1, -1, -1))
        self._write()

    def _count(
        self, subject: Subject, book: ScoreBook, wanted: Sequence[Combination], images: Tensor, watch: Callable
    ) -> None:
        watch("counting operations")
        self.unpruned_flops = flops(lambda: subject.full(images))
        for rule in wanted:
            if rule not in self.rules:
                self.rules[rule] = {**asdict(rule), "flops": flops(_call(subject, book, rule, images))}
                self.rules[rule]["milliseconds"] = {}

    def _time(self, subject: Subject, book: ScoreBook, rules: Sequence[Combination], images: Tensor) -> None:
        def unpruned() -> Tensor:
            return subject.full(images)

        device = subject.backbone.device
        once = milliseconds(unpruned, device, rounds=1).median / 1e3
        rounds = min(_MOST, max(_FEWEST, round(_SECONDS / once)))
        calls = [unpruned, *(_call(subject, book, rule, images) for rule in rules)]
        before, *after = race(calls, device, rounds)
        for rule, timing in zip(rules, after, strict=True):
            self.rules[rule]["milliseconds"][str(len(images))] = _entry(timing, before)

    def _write(self) -> None:
        document = {"machine": self._machine, "unpruned_flops": self.unpruned_flops, "rules": [*self.rules.values()]}
        write_json(self._path, document)


def _call(subject: Subject, book: ScoreBook, rule: Combination, images: Tensor) -> Callable[[], Any]:
    plan, scores = subject.plan(rule), book.per_stage(rule.score)
    modes = book.modes() if plan.match == "task" else None
    return lambda: subject.pruned(images, plan, scores, modes)


def _entry(timing: Timing, unpruned: Timing) -> dict[str, float]:
    return {
        "median": timing.median,
        "low": timing.low,
        "high": timing.high,
        "unpruned": unpruned.median,
        "speedup": unpruned.median / timing.median,
        "rounds": timing.rounds,
    }
