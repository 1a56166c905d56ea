"""What the commands that measure a trained model share: means with errors, and a result file that knows its origin."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pullback.evaluation.statistics import mean_and_error
from pullback.models import EMBEDDED
from pullback.runs.files import make_folder, write_json
from pullback.runs.provenance import file_hash, provenance
from pullback.runs.rows import finite

_DIGITS = 6


def mean_with_error(values: Tensor) -> dict[str, float]:
    """Mean and its standard error over scenes [n]; scenes without the quantity (NaN) are left out."""
    known = values[~values.isnan()]
    mean, error = mean_and_error(known)
    return {"mean": rounded(mean), "se": rounded(error if len(known) > 1 else math.nan)}


def mean_rotation(rotations: Tensor, dim: int = 0) -> Tensor:
    """Return the rotation [..., 3, 3] with the least sum of squared chordal distances to those along ``dim``.

    It is the nearest rotation to their mean, U diag(1, 1, det U V^T) V^T.
    """
    u, _, vh = torch.linalg.svd(rotations.double().mean(dim))
    flip = torch.ones_like(u[..., 0])
    flip[..., 2] = torch.linalg.det(u @ vh)
    return (u * flip[..., None, :]) @ vh


def median_with_error(values: Tensor, *, resamples: int = 1000, seed: int = 0) -> dict[str, float]:
    """Return the median of all values [n scenes, pairs], NaN left out, and its standard error.

    Scenes are drawn again with replacement, because the pairs of a scene are not independent.
    """
    generator = torch.Generator().manual_seed(seed)
    known = values.double().cpu()
    medians = [
        known[torch.randint(len(known), (len(known),), generator=generator)].nanmedian() for _ in range(resamples)
    ]
    return {"median": known.nanmedian().item(), "se": torch.stack(medians).std().item()}


def rounded(value: Tensor | float) -> float:
    """The value to six digits."""
    return float(f"{float(value):.{_DIGITS}g}")


def weights_sha256(model: str) -> str:
    """The hash of the weights file that was measured, so that figures of other weights can be told apart."""
    return file_hash(EMBEDDED.get(model, Path(model)) / "model.safetensors")


def write_result(path: Path, content: dict[str, Any], device: torch.device) -> None:
    """Write the content as JSON, behind where, when and with which versions it was measured."""
    make_folder(path.parent)
    write_json(path, provenance(device) | _strict(content))
    print(f"written: {path}", file=sys.stderr)


def _strict(content: Any) -> Any:
    """The same with None for NaN and infinity, for which JSON has no word."""
    if isinstance(content, dict):
        return {name: _strict(value) for name, value in content.items()}
    if isinstance(content, list):
        return [_strict(value) for value in content]
    return finite(content) if isinstance(content, float) else content
