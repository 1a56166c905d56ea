"""A few images for the figures: what became of their tokens, and of a dense output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pullback.backbones import thumbnails
from pullback.data.images import PixelFormat
from pullback.evaluation.fidelity import degradation
from pullback.pruning.forward import StageRecord
from pullback.pruning.model import PrunedModel
from pullback.pruning.rules import Rule, Scores, Subject
from pullback.runs.documents import DROPPED, EXAMPLES, KEPT, MERGED, read_examples
from pullback.runs.files import write_arrays
from pullback.tokens import TokenLayout

MAX_IMAGES, MAX_PANELS = 4, 7
_SIDE = 224


class Examples:
    """The first images of a comparison, with what was computed of their scores, as they come batch by batch."""

    def __init__(self, scores: Scores) -> None:
        self._scores = scores
        self._images: list[Tensor] = []
        self._known: list[dict[tuple[str, int], Tensor]] = []
        self.keys: list[str] = []

    @property
    def full(self) -> bool:
        return len(self.keys) == MAX_IMAGES

    @property
    def images(self) -> Tensor:
        """[b, 3, h, w]"""
        return torch.cat(self._images)

    def add(self, keys: Sequence[str], images: Tensor) -> None:
        """Take what is still wanted of the batch at hand, images [B, 3, h, w] named by ``keys``."""
        count = min(MAX_IMAGES - len(self.keys), len(keys))
        if count:
            self.keys += keys[:count]
            self._images.append(images[:count].clone())
            self._known.append({name: value[:count] for name, value in self._scores.known.items()})

    def begin(self) -> None:
        """Turn the scores to these images; what was computed of all of them is not computed again."""
        common = set(self._known[0]).intersection(*self._known)
        self._scores.begin(self.keys)
        self._scores.known.update({name: torch.cat([part[name] for part in self._known]) for name in common})
        self._known.clear()


def panels(wanted: Sequence[Rule], reference: str) -> list[Rule]:
    """Choose rules to show: of the first preset the reference score at every ratio; then, at the highest ratio, the
    other presets and scores."""
    first, highest = wanted[0].preset, max(rule.ratio for rule in wanted)
    growing = [rule for rule in wanted if rule.preset == first and rule.score == reference]
    top = [rule for rule in wanted if rule.ratio == highest and rule not in growing]
    others = sorted(top, key=lambda r: (r.score != reference, r.preset != first))  # stable: their own order otherwise
    return [*growing, *others][:MAX_PANELS]


def write_examples(
    folder: Path,
    subject: Subject,
    shown: Mapping[Rule, PrunedModel],
    images: Tensor,
    keys: Sequence[str],
    pixels: PixelFormat,
) -> None:
    """Write what `runs.documents.read_examples` describes, of the images [b, 3, h, w] named by ``keys``; nothing where
    it is there already."""
    names = [Path(key).name for key in keys]
    if _is_there(folder, list(shown), names):
        return
    layout, count = subject.backbone.token_layout(images), len(names)
    full = subject.full(images)
    fates, partners, values, after = [], [], [], []
    for model in shown.values():
        output, records = subject.output(model, images)
        fate, partner = _fates(records, layout, count)
        fates.append(fate)
        partners.append(partner)
        errors = [row["value"] for row in degradation(output, full, depth=subject.depth).rows()]
        values.append([np.nan if error is None else error for error in errors])
        after.append(_map(output) if full.ndim == 3 else None)
    arrays = {
        "pictures": thumbnails(pixels.rgb(images)),
        "names": np.array(names),
        "presets": np.array([rule.preset for rule in shown]),
        "scores": np.array([rule.score for rule in shown]),
        "ratios": np.array([rule.ratio for rule in shown]),
        "fates": np.stack(fates),
        "partners": np.stack(partners),
        "values": np.array(values),
    }
    if full.ndim == 3:
        arrays |= {"before": _map(full), "after": np.stack([array for array in after if array is not None])}
    write_arrays(folder / EXAMPLES, arrays)


def _is_there(folder: Path, shown: Sequence[Rule], names: Sequence[str]) -> bool:
    """Whether the folder holds examples of these rules and images, with one picture for each name."""
    if not (folder / EXAMPLES).is_file():
        return False
    stored = read_examples(folder)
    columns = (stored[name].tolist() for name in ("presets", "scores", "ratios"))
    asked = [(rule.preset, rule.score, rule.ratio) for rule in shown]
    same_images = stored["names"].tolist() == list(names) and len(stored["pictures"]) == len(names)
    return [*zip(*columns, strict=True)] == asked and same_images


def _fates(records: Sequence[StageRecord], layout: TokenLayout, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return what became of each patch, and its partner, [b, rows, columns] each, from what the stages did."""
    fate = torch.full((count, layout.tokens), KEPT, dtype=torch.uint8)
    partner = torch.full((count, layout.tokens), -1)
    for record in records:
        removed, merged = record.removed.cpu(), record.merged.cpu()
        fate.scatter_(1, removed, torch.where(merged, MERGED, DROPPED).to(fate.dtype))
        partner.scatter_(1, removed, record.partner.cpu() - layout.prefix)
    return tuple(layout.patch_map(values)[:, 0].numpy() for values in (fate, partner))  # type: ignore[return-value]


def _map(output: Tensor) -> np.ndarray:
    """Shrink a map [b, h, w] to at most 224 pixels on the longer side."""
    height, width = output.shape[-2:]
    scale = min(1.0, _SIDE / max(height, width))
    return (
        F.interpolate(output[:, None], (round(height * scale), round(width * scale)), mode="area")[:, 0].cpu().numpy()
    )
