"""What `pullback prune` compares: a frozen model, a decoder, and plans that are made of names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pullback.backbones import Backbone
from pullback.decoders import Decoder
from pullback.evaluation import cosine_degradation, relative_l2, silog
from pullback.operators.execution import matmul_precision
from pullback.pruning import Modes, PrunePlan, Score, StageRecord, preset, run_pruned

OWN_SCORE = {"tome": "tome", "evit": "evit", "strided": "strided"}
"""Presets from the literature choose tokens in their own way; they are run with it and with nothing else."""

SECOND_WEIGHT = 0.85
"""The lambda of SILog that is reported beside 1."""


@dataclass(frozen=True)
class Combination:
    """One rule: what becomes of removed tokens, which ones are removed, and how many."""

    preset: str
    score: str
    ratio: float

    def __str__(self) -> str:
        return f"{self.preset}, {self.score}, {self.ratio:g}"


def combinations(presets: Sequence[str], scores: Sequence[str], ratios: Sequence[float]) -> list[Combination]:
    """All of them, in the order of the arguments."""
    return [
        Combination(name, score, ratio)
        for name in presets
        for score in ([OWN_SCORE[name]] if name in OWN_SCORE else scores)
        for ratio in ratios
    ]


@dataclass(frozen=True)
class Subject:
    """The model with its decoder; stages and arithmetic are the same for all combinations."""

    backbone: Backbone
    decoder: Decoder
    stages: tuple[int, ...]
    precision: str = "float32"

    @property
    def dense(self) -> bool:
        """The decoder reads patches, so removed tokens must come back."""
        return self.decoder.rows is None

    def plan(self, combination: Combination) -> PrunePlan:
        depth = self.backbone.depth
        return preset(combination.preset, combination.ratio, self.stages, dense=self.dense, depth=depth)

    def plan_warnings(self, wanted: Sequence[Combination]) -> list[str]:
        """Refuse impossible stages; what the plans have to say about odd ones, once."""
        depth, plans = self.backbone.depth, [self.plan(combination) for combination in wanted]
        for plan in plans:
            plan.check_depth(depth)
        return list(dict.fromkeys(note for plan in plans for note in plan.notes(depth)))

    @torch.no_grad()
    def full(self, images: Tensor) -> Tensor:
        """The unpruned output of images [B, 3, H, W]."""
        with self.arithmetic():
            tokens = self.backbone.features(images, self.decoder.layers)
            return self._decode([tokens[layer] for layer in self.decoder.layers], images)

    @torch.no_grad()
    def pruned(
        self, images: Tensor, plan: PrunePlan, scores: Sequence[Score], modes: Modes | None = None
    ) -> tuple[Tensor, tuple[StageRecord, ...]]:
        """The output with the plan's tokens removed on the way, and what every stage did."""
        with self.arithmetic():
            run = run_pruned(self.backbone, images, plan, scores, layers=self.decoder.layers, modes=modes)
            return self._decode(run.taps, images), run.records

    def _decode(self, taps: Sequence[Tensor], images: Tensor) -> Tensor:
        read = [tap[:, : self.decoder.rows] for tap in taps]
        if self.decoder.normed:
            read = [self.backbone.norm(tap) for tap in read]
        return self.decoder.decode(read, self.backbone.token_layout(images)).float()

    @contextmanager
    def arithmetic(self) -> Iterator[None]:
        """Of the whole model; bf16 by autocast, so that weights and residual stream stay float32."""
        lower = self.precision == "bf16"
        with (
            matmul_precision(self.precision),
            torch.autocast(self.backbone.device.type, torch.bfloat16, enabled=lower),
        ):
            yield


def measure_of(decoder: str, output: Tensor) -> str:
    """How the degradation of such an output [B, ...] is measured."""
    if decoder.startswith("depth"):
        return "silog"
    return "cosine" if output.ndim == 2 else "relative_l2"


def degradation(measure: str, pruned: Tensor, full: Tensor) -> list[dict[str, Any]]:
    """For each image its ``value``, the smaller the better; None where it does not exist."""
    if measure == "silog":
        errors, beside = silog(pruned, full), silog(pruned, full, weight=SECOND_WEIGHT)
        columns = {"value": errors.error, "value_085": beside.error, "floored": errors.floored}
    else:
        columns = {"value": (cosine_degradation if measure == "cosine" else relative_l2)(pruned, full)}
    lists = {name: [_number(value) for value in values.tolist()] for name, values in columns.items()}
    return [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)]


def _number(value: float) -> float | None:
    return value if value == value and abs(value) != float("inf") else None
