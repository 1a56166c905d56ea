"""What removing tokens costs the map of a dense decoder, image by image: by pipeline, stages and score.

The paper's pipeline: the tokens that a score ranks lowest are removed, come back as they were wherever the decoder
reads, and Last-Layer Fusion runs the last block on all of them. Beside it: the same without fusion; the soft merge of
class tokens, merged tokens coming back as copies; and the rule `best`. Heads and what is drawn at random have several
seeds. What is measured of a setting is kept, so that rows, and differences between rows on the same pictures, rest on
the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from pullback.backbones import Backbone
from pullback.evaluation.fidelity import degradation, silog
from pullback.evaluation.statistics import bootstrap_change
from pullback.experiments.experiment import Cell, Measured, Place
from pullback.experiments.scales import DRAWN, Scale, ScaleName
from pullback.experiments.workshop import HeadRecipe, Workshop
from pullback.geometry.scores import exact_modes
from pullback.learning.head import ImportanceHead
from pullback.probes import ProbeMap
from pullback.pruning.forward import PrunedRun
from pullback.pruning.plan import PrunePlan, preset
from pullback.pruning.rules import Scores, Subject
from pullback.pruning.scores import ScoreContext

RANDOM, TOME, IMPORTANCE = "Random", "ToMe score", "Importance"
SCORES = {RANDOM: "random", TOME: "bipartite", IMPORTANCE: "importance"}
"""How tokens are chosen, as the paper calls it, and the name of the score."""
Pipeline = Literal["paper", "not fused", "soft merge", "ours"]
REMOVAL, STALE, STALE_FUSED, FUSION = "removal alone", "stale alone", "stale and fused", "fusion alone"
WHOLE, SHIFT, FLOOR = "all of it", "shift of the log depth", "pixels at the floor, %"
CAUSES = (WHOLE, REMOVAL, STALE_FUSED, STALE, FUSION, SHIFT, FLOOR)
"""What of the paper's pipeline is left of its error when the rest is as in the unpruned model (`causes`)."""
SMALL_ONLY = "the depth head that comes with the package is of DINOv2-S"
_BATCH = 16
_PRODUCTS = 130  # of a Krylov space, where a Jacobian is too large to be formed

COUNTS: dict[ScaleName, dict[str, int]] = {
    "tiny": {
        "scenes": 16, "scenes to train": 16, "larger scenes to train": 12, "photos": 8, "photos to train": 16,
        "larger photos to train": 16, "rooms": 8, "rooms to train": 16, "seeds": 3, "steps": 60, "batch": 16,
        "width": 128, "cells": 3,
    },
    "small": {
        "scenes": 64, "scenes to train": 320, "larger scenes to train": 96, "photos": 64, "photos to train": 320,
        "larger photos to train": 64, "rooms": 48, "rooms to train": 96, "seeds": 3, "steps": 240, "batch": 32,
        "width": 256, "cells": 6,
    },
    "paper": {
        "scenes": 200, "scenes to train": 2000, "larger scenes to train": 2000, "photos": 200,
        "photos to train": 2000, "larger photos to train": 2000, "rooms": 200, "rooms to train": 1000, "seeds": 3,
        "steps": 3000, "batch": 32, "width": 256, "cells": 0,
    },
}  # fmt: skip
"""Pictures to measure on and to train a head on, by kind. ``cells``: of depth averaged over so many rows and columns
heads learn what matters, 0: of the whole map, as in the paper. A Jacobian of few outputs takes few products."""


@dataclass(frozen=True)
class Dense:
    """A model with a dense decoder, and the pictures that it is judged on. ``trained``: the role of data of its heads;
    where that is ``data`` itself, they are trained on the pictures after those that are measured."""

    title: str
    model: str
    decoder: str
    data: str
    trained: str
    size: int
    small_only: bool = False

    @property
    def kind(self) -> str:
        """How `COUNTS` calls its pictures."""
        return "scenes" if self.data in DRAWN else "rooms" if self.data == "rooms" else "photos"

    @property
    def measure(self) -> str:
        return "additional SILog × 100" if self.decoder == "depth" else "relative L2 × 100"

    def at(self, size: int) -> Dense:
        """Return the same on pictures of another size."""
        return replace(self, size=size)

    def of(self, data: str, trained: str) -> Dense:
        """Return the same on other pictures."""
        return replace(self, data=data, trained=trained)

    def absent(self, scale: Scale) -> str | None:
        return SMALL_ONLY if self.small_only and scale.name == "paper" else None

    def subject(self, shop: Workshop, stages: Sequence[int]) -> Subject:
        backbone = shop.backbone(self.model)
        assert isinstance(backbone, Backbone)
        return Subject(backbone, shop.probe(self.model, self.decoder, stages[0]).decoder, tuple(stages))

    def probe(self, shop: Workshop, layer: int) -> ProbeMap:
        """Return the probe map of a single layer that its heads are trained for."""
        cells = shop.count("cells") if self.decoder == "depth" else 0
        distance = "log" if self.decoder == "depth" else None
        return shop.probe(self.model, f"depth-{cells}x{cells}" if cells else self.decoder, layer, distance=distance)

    def images(self, shop: Workshop) -> Tensor:
        return shop.images(self.data, shop.count(self.kind), model=self.model, size=self.size)

    def recipe(self, shop: Workshop, seed: int) -> HeadRecipe:
        cells = shop.count("cells") if self.decoder == "depth" else 0
        return HeadRecipe(
            self.trained, shop.count(self._trained_on), self.size, steps=shop.count("steps"),
            batch=shop.count("batch"), width=shop.count("width"), rank=min(20, cells * cells or 20), seed=seed,
            skip=shop.count(self.kind) if self.trained == self.data else 0,
        )  # fmt: skip

    def heads(self, shop: Workshop, layers: Sequence[int], seed: int) -> list[ImportanceHead]:
        """Return one head per layer."""
        return [shop.head(self.probe(shop, layer), self.recipe(shop, seed)) for layer in layers]

    def cell(
        self, scale: Scale, key: str, places: Sequence[Place], run: Any, *, passes: float = 0.0, trains: int = 0,
        modes: bool = False,
    ) -> Cell:  # fmt: skip
        """Return a cell about it. ``passes``: of the backbone for each picture; ``trains``: heads, one per layer;
        ``modes``: those of the pictures themselves are needed."""
        counts = COUNTS[scale.name]
        cells = counts["cells"] if self.decoder == "depth" else 0
        products = 3.0 * (cells * cells or _PRODUCTS)
        pictures = trains * counts[self._trained_on] + modes * counts[self.kind]
        forwards = passes * counts[self.kind] + products * pictures
        needs = (self.trained,) if trains and self.trained != self.data else ()
        return Cell(
            key, tuple(places), run, self.model, self.data, needs, absent=self.absent(scale),
            forwards=forwards * (self.size / 224) ** 2,
        )  # fmt: skip

    @property
    def _trained_on(self) -> str:
        usual = 112 if self.kind == "scenes" else 224
        larger = "larger " if self.size > usual and self.kind != "rooms" else ""
        return f"{larger}{self.kind} to train"


PHOTOS_DA = Dense("DA V2 depth, photographs", "depth-anything", "depth", "photos", "photos-train", 224)
ROOMS_DA = Dense("DA V2 depth, rooms", "depth-anything", "depth", "rooms", "rooms", 224)
PHOTOS_S = Dense("DINOv2-S depth head, photographs", "dinov2", "depth", "photos", "photos-train", 224, small_only=True)
ROOMS_S = Dense("DINOv2-S depth head, rooms", "dinov2", "depth", "rooms", "rooms", 224, small_only=True)
SALIENCY = Dense("Saliency on DINOv2-S, photographs", "saliency", "saliency", "photos", "photos-train", 224)
SCENES = Dense("tiny-scenes depth", "tiny-scenes", "depth", "scenes", "scenes-train", 112)


def plan_of(pipeline: Pipeline, ratio: float, stages: Sequence[int], depth: int = 12) -> PrunePlan:
    """Return what a pipeline does with a share of the tokens, split equally over stages."""
    if pipeline == "ours":
        return preset("best", ratio, stages, dense=True, depth=depth)
    paper = preset("paper", ratio, stages, dense=True, depth=depth)
    if pipeline == "soft merge":
        return replace(paper, match="task", reinsert="copy", fuse_last=False)
    return paper if pipeline == "paper" else replace(paper, fuse_last=False)


# Errors


def errors(
    shop: Workshop, dense: Dense, pipeline: Pipeline, stages: Sequence[int], ratios: Sequence[float], score: str
) -> Tensor:
    """Return the degradation of every picture [ratios, seeds, n]; ToMe's score has one seed, as nothing is drawn."""
    seeds = _seeds(shop, score)
    key = {**_key(shop, dense, stages, ratios, score), "what": "dense-errors", "pipeline": pipeline}

    def compute() -> dict[str, Tensor]:
        subject = dense.subject(shop, stages)
        heads = [dense.heads(shop, stages, seed) if score == IMPORTANCE else [] for seed in seeds]
        scores = [Scores(subject, heads=own, seed=seed) for own, seed in zip(heads, seeds, strict=True)]
        modes = _Modes(dense.probe(shop, stages[0]), dense.recipe(shop, shop.seed).rank)
        plans = [plan_of(pipeline, ratio, stages, subject.backbone.depth) for ratio in ratios]
        models = [[subject.pruned(plan, own.of(SCORES[score]), modes) for own in scores] for plan in plans]
        shop.progress.describe(f"{dense.title}, {dense.size} px: {pipeline}, {score}, stages {list(stages)}")
        parts = []
        for keys, images in _batches(dense, dense.images(shop)):
            for own in scores:
                own.begin(keys)
            if pipeline == "soft merge":
                modes.begin(images)
            full = subject.full(images)
            found = [
                degradation(subject.output(model, images)[0], full, depth=subject.depth).value
                for row in models
                for model in row
            ]
            parts.append(torch.stack(found).unflatten(0, (len(ratios), len(seeds))))
        return {"errors": torch.cat(parts, -1)}

    return shop.kept(key, compute)["errors"].cpu()


class _Modes:
    """The scaled modes [B, r, N, D] of the images at hand, for d_task, by their Jacobian."""

    def __init__(self, probe: ProbeMap, rank: int) -> None:
        self._probe, self._rank = probe, rank
        self._known: Tensor | None = None
        self._images: Tensor | None = None

    def begin(self, images: Tensor) -> None:
        self._images, self._known = images, None

    def __call__(self, tokens: Tensor, context: ScoreContext) -> Tensor:
        if self._known is None:  # the first stage meets whole images, so it is the same for all plans
            self._known = exact_modes(self._probe, self._rank)(tokens, context)
        return self._known


def _seeds(shop: Workshop, score: str) -> list[int]:
    return list(range(shop.seed, shop.seed + (1 if score == TOME else shop.count("seeds"))))


def _key(shop: Workshop, dense: Dense, stages: Sequence[int], ratios: Sequence[float], score: str) -> dict[str, Any]:
    """Return what decides errors, apart from what becomes of removed tokens."""
    places = {role: role if role in DRAWN else str(shop.scale.data[role]) for role in (dense.data, dense.trained)}
    learned = {
        "probe": shop.identity(dense.probe(shop, stages[0])), "recipe": asdict(dense.recipe(shop, shop.seed)),
        "trained": places[dense.trained],
    }  # fmt: skip
    return {
        **shop.identity(shop.probe(dense.model, dense.decoder, stages[0])), "data": places[dense.data],
        "size": dense.size, "count": shop.count(dense.kind), "stages": list(stages), "ratios": list(ratios),
        "score": score, "seeds": _seeds(shop, score), "learned": learned,
    }  # fmt: skip


def _batches(dense: Dense, images: Tensor) -> list[tuple[list[str], Tensor]]:
    """Return pictures in batches, each with the keys by which what is drawn for a picture stays its own."""
    return [
        ([f"{dense.data} {first + place}" for place in range(len(part))], part)
        for first, part in zip(range(0, len(images), _BATCH), images.split(_BATCH), strict=True)
    ]


# Where the error comes from


def causes(shop: Workshop, dense: Dense, stage: int, ratios: Sequence[float], score: str) -> Tensor:
    """Return what each of `CAUSES` does to every picture [causes, ratios, n] in the paper's pipeline of one stage:

    all of it; removal alone: the other tokens run without those removed, which come back as in the unpruned model;
    stale and fused: nothing is removed from attention, but stale tokens are what the decoder reads and what the last
    block sees; stale alone: the same without fusion; fusion alone: only the last block sees stale tokens, the other
    layers are read as they were; then of all of it the part of the log depth that SILog leaves out, 100 |mean d|, and
    the share of pixels at the floor of the logarithm, in per cent.
    """
    key = {**_key(shop, dense, [stage], ratios, score), "what": "dense-causes"}

    def compute() -> dict[str, Tensor]:
        subject = dense.subject(shop, [stage])
        heads = dense.heads(shop, [stage], shop.seed) if score == IMPORTANCE else []
        scores = Scores(subject, heads=heads, seed=shop.seed)
        shop.progress.describe(f"{dense.title}: causes, {score}")
        parts = []
        for keys, images in _batches(dense, dense.images(shop)):
            scores.begin(keys)
            full = subject.full(images)
            parts.append(torch.stack([_causes(subject, scores, score, images, full, ratio) for ratio in ratios], 1))
        return {"causes": torch.cat(parts, -1)}

    return shop.kept(key, compute)["causes"].cpu()


@torch.no_grad()
def _causes(subject: Subject, scores: Scores, score: str, images: Tensor, full: Tensor, ratio: float) -> Tensor:
    backbone, decoder = subject.backbone, subject.decoder
    (stage,), last = subject.stages, backbone.depth - 1
    choices = scores.of(SCORES[score])
    whole = subject.output(subject.pruned(plan_of("paper", ratio, [stage]), choices), images)[0]
    with subject.arithmetic():
        run = subject.pruned(plan_of("not fused", ratio, [stage]), choices).run(images, decoder.layers)
        taps = backbone.features(images, sorted({*decoder.layers, stage, last - 1}))
    removed, stale = removed_tokens(run, taps[stage]), taps[stage]
    layout = backbone.token_layout(images)

    def stale_at(tokens: Tensor) -> Tensor:
        return torch.where(removed, stale, tokens)

    with subject.arithmetic():
        seen = stale_at(taps[last - 1])
        fused = backbone.blocks[last](seen, backbone.rope_of(seen, layout, None), None, None)

    def error(read: Sequence[Tensor]) -> Tensor:
        with subject.arithmetic():
            output = decoder.output(read, layout, backbone.norm).float()
        return degradation(output, full, depth=subject.depth).value

    exact = [taps[layer] for layer in decoder.layers]
    late = [layer > stage for layer in decoder.layers]
    old = [stale_at(tap) if after else tap for tap, after in zip(exact, late, strict=True)]
    at_last = partial(_with_last, decoder.layers, last)
    ignored = silog(whole, full, weight=0.0).error.square() - silog(whole, full).error.square()
    found = {
        WHOLE: degradation(whole, full, depth=subject.depth).value,
        REMOVAL: error([torch.where(removed, own, tap) for own, tap in zip(exact, run.taps, strict=True)]),
        STALE_FUSED: error(at_last(old, fused)),
        STALE: error(old),
        FUSION: error(at_last(exact, fused)),
        SHIFT: ignored.clamp_min(0).sqrt(),
        FLOOR: 100 * silog(whole, full).floored,
    }
    return torch.stack([found[cause] for cause in CAUSES])


def removed_tokens(run: PrunedRun, tokens: Tensor) -> Tensor:
    """Return which tokens [B, N, 1] of whole sequences [B, N, D] a run has removed."""
    gone = torch.zeros(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
    for record in run.records:
        gone = gone.scatter(1, record.removed, True)
    return gone[..., None]


def _with_last(layers: Sequence[int], last: int, taps: Sequence[Tensor], value: Tensor) -> list[Tensor]:
    return [value if layer == last else tap for layer, tap in zip(layers, taps, strict=True)]


# Rows


def mean_row(shop: Workshop, place: tuple[str, str, str], values: Tensor) -> Measured:
    """Return the mean of errors [seeds, n] over pictures, of each the mean over seeds; pictures without an error left
    out."""
    known = values[:, values.isfinite().all(0)]
    note = None
    if len(known) > 1:
        note = f"{len(known)} seeds, std {seeds_std(known):.2g}"
    return shop.mean(place, known.mean(0), note=note)


def seeds_std(values: Tensor) -> float:
    """Return the standard deviation between seeds of the mean of errors [seeds, n] over pictures."""
    return float(values.mean(1).std()) if len(values) > 1 else 0.0


def difference_row(shop: Workshop, place: tuple[str, str, str], first: Tensor, second: Tensor) -> Measured:
    """Return by how many per cent of the second's mean error the first's differs from it, [seeds, n] each on the same
    pictures: negative where it has the smaller error. Pictures without an error are left out."""
    own, other = first.mean(0), second.mean(0)
    both = own.isfinite() & other.isfinite() & (other > 0)
    if not both.any():
        return Measured(*place, math.nan, count=0)
    pairs = own[both].numpy(), other[both].numpy()
    found = bootstrap_change(*pairs, generator=np.random.default_rng(shop.seed))
    return Measured(*place, 100 * found.mean, 100 * found.low, 100 * found.high, int(both.sum()))
