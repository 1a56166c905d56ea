"""A plan that was found, as plain data beside the pruned model: what `plan.json` holds and its page shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from pullback.pruning.forecast import Alternative, Forecast
from pullback.runs.documents import PLAN
from pullback.runs.files import write_json
from pullback.runs.provenance import provenance
from pullback.runs.rows import finite

UNITS = {
    "flops": "of the operations",
    "milliseconds": "milliseconds a batch",
    "degradation": "degradation of the output",
}


@dataclass(frozen=True)
class Asked:
    """What a plan was asked for: one of the ``budget`` is not None; ``scores`` by the block after which they rank."""

    model: str
    scores: Mapping[int, str]
    budget: Mapping[str, float | None]
    images: int
    batch: int


def write_plan(out: Path, forecast: Forecast, asked: Asked, device: torch.device) -> None:
    """Write `plan.json` into the folder of the pruned model: what was asked for, found and tried."""
    ((name, limit),) = [(name, limit) for name, limit in asked.budget.items() if limit is not None]
    document: dict[str, Any] = {
        "folder": str(out),
        "summary": _sentence(str(forecast)),
        "model": asked.model,
        "budget": {"name": name, "limit": limit, "unit": UNITS[name]},
        "size": forecast.plan.size,
        "stages": list(forecast.plan.stages),
        "ratio": forecast.plan.ratio,
        "shares": list(forecast.plan.shares),
        "class_row": forecast.plan.class_row,
        "tuning": forecast.tuning,
        "scores": {str(stage): asked.scores[stage] for stage in forecast.plan.stages},
        "flops": forecast.flops,
        "milliseconds": forecast.milliseconds,
        "whole_milliseconds": forecast.whole_milliseconds,
        "degradation": forecast.degradation,
        "degradation_se": finite(forecast.degradation_se),
        "interval": None if forecast.interval is None else list(forecast.interval),
        "alternatives": [_plain(other) for other in forecast.alternatives],
        "notes": list(forecast.notes),
        "measured": forecast.measured,
        "images": asked.images,
        "batch": asked.batch,
        "trials": [asdict(trial) for trial in forecast.trials],
        **provenance(device),
    }
    write_json(out / PLAN, document)


def _plain(other: Alternative) -> dict[str, Any]:
    return {**asdict(other), "verdict": other.verdict}


def _sentence(text: str) -> str:
    """Begin with a capital and leave out what comes behind the colon, which a table says better."""
    first = text.split(":")[0]
    return f"{first[:1].upper()}{first[1:]}"
