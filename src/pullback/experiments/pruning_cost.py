"""What pruning costs and saves (`sec:pruning_details`, "Cost"): operations, taken apart, and wall-clock times.

Operations are shares of what the blocks of the unpruned model take. They follow from shapes alone, so those of the
paper's ViT-B/14 are counted at every scale, on a network without weights. Heads and networks for d_task are not
trained here: neither operations nor times depend on what they say.

    a rule saves = the blocks save - Last-Layer Fusion - its score - what finds partners for a merge
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from pullback.backbones import Backbone, load_backbone
from pullback.evaluation.cost import flops, laps
from pullback.experiments.dense_errors import SMALL_ONLY
from pullback.experiments.experiment import Cell, Column, Experiment, Measured, Place
from pullback.experiments.pruning_cost_claims import (
    BLOCKS,
    CLAIMS,
    CLS_OPERATIONS,
    CLS_TIMES,
    D_TASK,
    DENSE_OPERATIONS,
    DENSE_TIMES,
    DROPPED,
    FOOTNOTES,
    FUSION,
    HEAD,
    HEAD_TIME,
    IMPORTANCE,
    ONE_TOKEN,
    OURS,
    OVER_TOME,
    PAPERS_SIZE,
    PARAMETERS,
    SCORES,
    SHAPES,
    SIZES,
    TOME,
    TOME_SCORE,
    TOME_TIME,
    UNFUSED,
    UNPRUNED,
    WHO,
    faster,
    operations_row,
    saves,
    score_row,
    time_row,
)
from pullback.experiments.scales import Scale, ScaleName
from pullback.experiments.workshop import Workshop
from pullback.learning.head import ImportanceHead
from pullback.learning.spn import SpectralPullbackNetwork
from pullback.models.dinov2 import Dinov2, Dinov2Config
from pullback.pruning.model import PrunedModel
from pullback.pruning.operations import block_operations, count_stage, whole_operations
from pullback.pruning.plan import PrunePlan, preset
from pullback.pruning.rules import Subject
from pullback.pruning.scores import Choice, ScoreContext, as_score

RATIOS = (0.20, 0.50)
ONE, TWO, LAST = (4,), (4, 8), (10,)
"""Stages: one and two of dense decoders, and where the paper prunes class tokens."""
RANK = 20
HEAD_WIDTH = SPN_WIDTH = 256
_RESAMPLES = 2000
_WARM_UP = 2

COUNTS: dict[ScaleName, dict[str, int]] = {
    "tiny": {"rounds": 5, "few rounds": 5, "batch": 4},
    "small": {"rounds": 20, "few rounds": 5, "batch": 64},
    "paper": {"rounds": 40, "few rounds": 15, "batch": 64},
}
"""Rounds in which all models are timed in turn, of single pictures and of batches of ``batch``."""


@dataclass(frozen=True)
class Rule:
    """A way to prune by name: its plan is that of a preset, and ``choice`` is how tokens are chosen."""

    name: str
    preset: str
    choice: str


DENSE_RULES = (Rule(IMPORTANCE, "paper", "head"), Rule(TOME, "paper", "bipartite"), Rule(OURS, "best", "head"))
CLS_RULES = (Rule(IMPORTANCE, "paper", "head"), Rule(DROPPED, "drop", "head"), Rule(OURS, "best", "head"))


@dataclass(frozen=True)
class Profiled:
    """A model with a decoder whose cost is measured. ``sizes``: sides of its pictures in pixels, by scale."""

    title: str
    model: str
    decoder: str
    small_only: bool = False

    @property
    def dense(self) -> bool:
        return self.decoder != "cls"

    @property
    def table(self) -> str:
        """Of its operations."""
        return DENSE_OPERATIONS if self.dense else CLS_OPERATIONS

    @property
    def columns(self) -> tuple[str, ...]:
        """Of its operations."""
        parts = (BLOCKS, FUSION, HEAD, TOME_SCORE, UNFUSED) if self.dense else (BLOCKS, HEAD, D_TASK)
        return (*parts, *(saves(rule.name) for rule in self.rules))

    @property
    def rules(self) -> tuple[Rule, ...]:
        return DENSE_RULES if self.dense else CLS_RULES

    @property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        return (ONE, TWO) if self.dense else (LAST, ONE, TWO)

    def sizes(self) -> tuple[int, ...]:
        return SIZES["tiny-scenes" if self.model == "tiny-scenes" else "others"]

    def timed(self, scale: Scale) -> Iterator[tuple[int, int]]:
        """Yield (pixels, batch) of what is timed: on two CPU cores no batch of large pictures."""
        for px in self.sizes():
            for batch in (1, COUNTS[scale.name]["batch"]):
                if not (scale.name == "tiny" and px * batch > 500):
                    yield px, batch

    def absent(self, scale: Scale) -> str | None:
        return SMALL_ONLY if self.small_only and scale.name == "paper" else None


DA = Profiled(WHO["DA"], "depth-anything", "depth")
DEPTH_S = Profiled(WHO["DEPTH_S"], "dinov2", "depth", small_only=True)
DEPTH_TINY = Profiled(WHO["DEPTH_TINY"], "tiny-scenes", "depth")
CLS = Profiled(WHO["CLS"], "dinov2", "cls")
CLS_TINY = Profiled(WHO["CLS_TINY"], "tiny-scenes", "cls")
PROFILED = (DA, DEPTH_S, DEPTH_TINY, CLS, CLS_TINY)
BY_SHAPES = (Profiled(SHAPES, "", "depth"), Profiled(f"{SHAPES}, class token", "", "cls"))


def cells(scale: Scale) -> list[Cell]:
    return [
        *(cell for own in (*BY_SHAPES, *PROFILED) for cell in _operations_cells(own, scale)),
        *(cell for own in PROFILED for cell in _time_cells(own, scale)),
    ]


def _operations_cells(own: Profiled, scale: Scale) -> Iterator[Cell]:
    for px in own.sizes():
        places = [
            Place(own.table, operations_row(own.title, px, stages, ratio), column)
            for stages in own.stages
            for ratio in RATIOS
            for column in own.columns
        ]
        if own.dense:
            places.append(Place(SCORES, score_row(own.title, px), PARAMETERS))
        run = partial(_operations, own=own, px=px)
        yield Cell(
            f"operations, {own.title}, {px} px", tuple(places), run, own.model, absent=own.absent(scale),
            forwards=(px / 224) ** 2 if own.model else 0.0,
        )  # fmt: skip


def _time_cells(own: Profiled, scale: Scale) -> Iterator[Cell]:
    rounds = COUNTS[scale.name]
    about = partial(Cell, model=own.model, timed=True, absent=own.absent(scale))
    table = DENSE_TIMES if own.dense else CLS_TIMES
    for px, batch in own.timed(scale):
        forwards = (px / 224) ** 2 * batch * (_WARM_UP + rounds["rounds" if batch == 1 else "few rounds"])
        for stages in own.stages:
            places = [
                Place(table, time_row(own.title, px, batch, stages, ratio), column)
                for ratio in RATIOS
                for column in (UNPRUNED, *_time_columns(own))
            ]
            places += [
                Place(table, time_row(own.title, px, batch, stages, ONE_TOKEN), column)
                for column in (UNPRUNED, faster(IMPORTANCE))
            ]
            key = f"time, {own.title}, {px} px, batch {batch}, {list(stages)}"
            run = partial(_times, own=own, px=px, batch=batch, stages=stages)
            many = 2 + len(RATIOS) * len(own.rules)
            yield about(key, tuple(places), run, forwards=forwards * many)
        if own.dense:
            places = [Place(SCORES, f"{score_row(own.title, px)}, batch {batch}", name) for name in _SCORE_TIMES]
            run = partial(_score_times, own=own, px=px, batch=batch)
            yield about(f"time of scores, {own.title}, {px} px, batch {batch}", tuple(places), run, forwards=forwards)


def _time_columns(own: Profiled) -> tuple[str, ...]:
    return (*(faster(rule.name) for rule in own.rules), *((OVER_TOME,) if own.dense else ()))


# Operations


def _operations(shop: Workshop, own: Profiled, px: int) -> Iterable[Measured]:
    backbone = without_weights() if not own.model else _backbone(shop, own)
    network = networks(backbone)
    layers = sorted({layer for stages in own.stages for layer in stages})
    counter = Counter(backbone, torch.zeros(1, 3, px, px, device=backbone.device), layers)
    note = "counted without weights" if not own.model else None
    for stages in own.stages:
        for ratio in RATIOS:
            found = {}
            for rule in own.rules:
                plan = preset(rule.preset, ratio, stages, dense=own.dense, depth=backbone.depth)
                found[rule.name] = counter.shares(plan, network[rule.choice], network["spn"])
            first = found[IMPORTANCE]
            values = {
                BLOCKS: first.blocks,
                FUSION: first.fusion,
                HEAD: first.score,
                UNFUSED: first.saved + first.fusion,
                D_TASK: first.partners,
                **{saves(name): shares.saved for name, shares in found.items()},
            }
            if TOME in found:
                values[TOME_SCORE] = found[TOME].score
            for column in own.columns:
                yield Measured(
                    own.table, operations_row(own.title, px, stages, ratio), column, values[column], note=note
                )
    if own.dense:
        size = sum(part.numel() for part in network["head"].parameters())
        yield Measured(SCORES, score_row(own.title, px), PARAMETERS, size, note=f"width {HEAD_WIDTH}")


def _backbone(shop: Workshop, own: Profiled) -> Backbone:
    backbone = shop.backbone(own.model)
    assert isinstance(backbone, Backbone)
    return backbone


def without_weights() -> Backbone:
    """Return the paper's ViT-B/14 as shapes alone."""
    with torch.device("meta"):
        backbone = load_backbone(Dinov2(Dinov2Config(**PAPERS_SIZE)).eval())
    assert isinstance(backbone, Backbone)
    return backbone


def networks(backbone: Backbone) -> dict[str, Any]:
    """Return what chooses tokens, by name, and what d_task takes its modes from: sizes as in the paper, untrained."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = {
            "head": ImportanceHead(backbone.dim, HEAD_WIDTH),
            "spn": SpectralPullbackNetwork(backbone.dim, RANK, SPN_WIDTH),
        }
    ready = {name: one.to(backbone.device).eval().requires_grad_(False) for name, one in made.items()}
    return {**ready, "bipartite": "bipartite"}


class Shares(NamedTuple):
    """What a plan saves, and what that is made of, as shares of the operations of the unpruned blocks."""

    blocks: float
    fusion: float
    score: float
    partners: float

    @property
    def saved(self) -> float:
        return self.blocks - self.fusion - self.score - self.partners


class Counter:
    """Counts what plans take on an image [1, 3, H, W]: blocks by their formula, and what chooses and merges at a stage
    by torch's counter, with as many tokens as it meets."""

    def __init__(self, backbone: Backbone, image: Tensor, layers: Sequence[int]) -> None:
        self.backbone, self.layout = backbone, backbone.token_layout(image)
        near = sorted({own for layer in layers for own in (layer - 1, layer)})
        with torch.no_grad():
            self.features = backbone.features(image, near)
        self.whole = whole_operations(backbone, self.layout.tokens)

    def shares(self, plan: PrunePlan, score: Choice, modes: nn.Module | None = None) -> Shares:
        tokens, left = self.layout.tokens, []
        removed = dict(zip(plan.stages, plan.counts(self.layout.patches), strict=True))
        scoring = stages = 0
        for layer in range(self.backbone.depth):
            left.append(tokens)
            if layer in removed:
                scoring += self._score(layer, tokens, score)
                stages += self._stage(plan, layer, tokens, removed[layer], score, modes)
                tokens -= removed[layer]
        each = [block_operations(block, n) for block, n in zip(self.backbone.blocks, left, strict=True)]
        fusion = block_operations(self.backbone.blocks[-1], self.layout.tokens) - each[-1] if plan.fuse_last else 0
        counted = (self.whole - sum(each), fusion, scoring, stages - scoring)
        return Shares(*(number / self.whole for number in counted))

    def _score(self, layer: int, tokens: int, choice: Choice) -> int:
        entered, x = (self.features[own][:, :tokens] for own in (layer - 1, layer))
        positions = torch.arange(tokens, device=x.device)[None]
        ones = torch.ones_like(positions, dtype=torch.float32)
        context = ScoreContext(self.backbone, layer, self.layout, positions, ones, entered)
        score = as_score(choice)
        return flops(lambda: score(x, context))

    def _stage(
        self, plan: PrunePlan, layer: int, tokens: int, removed: int, choice: Choice, modes: nn.Module | None
    ) -> int:
        alone = replace(plan, stages=(layer,), shares=(0.5,), gates=plan.gates[:1], fades=plan.fades[:1])
        pruned = PrunedModel(self.backbone.model, alone, [choice], modes if plan.match == "task" else None)
        return count_stage(pruned, self.layout, self.features[layer - 1], self.features[layer], tokens, removed)


# Times


def _times(shop: Workshop, own: Profiled, px: int, batch: int, stages: tuple[int, ...]) -> Iterable[Measured]:
    """Time the unpruned model and all pruned ones in turn."""
    backbone, table = _backbone(shop, own), DENSE_TIMES if own.dense else CLS_TIMES
    subject = Subject(backbone, shop.probe(own.model, own.decoder, stages[0]).decoder, stages)
    images, network = _noise(shop, batch, px), networks(backbone)
    patches = backbone.token_layout(images).patches
    wanted = [(ratio, rule) for ratio in RATIOS for rule in own.rules]
    wanted.insert(0, (len(stages) / patches, own.rules[0]))  # one token a stage: what is paid before anything is saved

    def run_of(ratio: float, rule: Rule) -> Callable[[], Any]:
        plan = preset(rule.preset, ratio, stages, dense=own.dense, depth=backbone.depth)
        model = PrunedModel(
            backbone.model, plan, [network[rule.choice]], network["spn"] if plan.match == "task" else None
        )
        return lambda: subject.output(model, images)

    runs = [run_of(*own) for own in wanted]
    found = laps([lambda: subject.full(images), *runs], shop.device, _rounds(shop, batch))
    whole, first, *others = found.T
    one = time_row(own.title, px, batch, stages, ONE_TOKEN)
    yield milliseconds((table, one, UNPRUNED), whole)
    yield quotient((table, one, faster(IMPORTANCE)), whole, first)
    for ratio in RATIOS:
        row = time_row(own.title, px, batch, stages, ratio)
        timed = {rule.name: others[wanted.index((ratio, rule)) - 1] for rule in own.rules}
        yield milliseconds((table, row, UNPRUNED), whole)
        for name, times in timed.items():
            yield quotient((table, row, faster(name)), whole, times)
        if own.dense:
            yield quotient((table, row, OVER_TOME), timed[IMPORTANCE], timed[TOME], less=1.0)


_SCORE_TIMES = {HEAD_TIME: "head", TOME_TIME: "bipartite"}


def _score_times(shop: Workshop, own: Profiled, px: int, batch: int) -> Iterable[Measured]:
    """Time the head and ToMe's score by themselves, on the tokens of the first stage."""
    backbone, images = _backbone(shop, own), _noise(shop, batch, px)
    network = networks(backbone)
    with torch.no_grad():
        taps = backbone.features(images, [ONE[0] - 1, ONE[0]])
    positions = torch.arange(taps[ONE[0]].shape[1], device=images.device).expand(batch, -1)
    sizes = torch.ones_like(positions, dtype=torch.float32)
    context = ScoreContext(backbone, ONE[0], backbone.token_layout(images), positions, sizes, taps[ONE[0] - 1])
    scores = [as_score(network[choice]) for choice in _SCORE_TIMES.values()]
    runs = [partial(score, taps[ONE[0]], context) for score in scores]
    found = laps(runs, shop.device, 4 * _rounds(shop, batch))
    for column, times in zip(_SCORE_TIMES, found.T, strict=True):
        yield milliseconds((SCORES, f"{score_row(own.title, px)}, batch {batch}", column), times)


def _noise(shop: Workshop, batch: int, px: int) -> Tensor:
    """Return noise [B, 3, H, W]: a time does not depend on what is seen."""
    return torch.randn(batch, 3, px, px, generator=shop.generator("noise", batch, px)).to(shop.device)


def _rounds(shop: Workshop, batch: int) -> int:
    return shop.count("rounds" if batch == 1 else "few rounds")


def milliseconds(place: tuple[str, str, str], times: np.ndarray) -> Measured:
    """Return the median of times [rounds]."""
    return _of_medians(place, lambda rounds: np.median(times[rounds], -1), len(times))


def quotient(place: tuple[str, str, str], whole: np.ndarray, own: np.ndarray, *, less: float = 0.0) -> Measured:
    """Return how many times longer the first takes, by medians over the same rounds [rounds] each."""

    def value(rounds: np.ndarray) -> np.ndarray:
        return np.median(whole[rounds], -1) / np.median(own[rounds], -1) - less

    return _of_medians(place, value, len(whole))


def _of_medians(place: tuple[str, str, str], value: Callable[[np.ndarray], np.ndarray], count: int) -> Measured:
    """Return a value of the rounds that it is given by number, with its 95 % bootstrap interval over rounds."""
    drawn = np.random.default_rng(0).integers(count, size=(_RESAMPLES, count))
    low, high = np.quantile(value(drawn), [0.025, 0.975])
    return Measured(*place, float(value(np.arange(count))), float(low), float(high), count, "rounds")


def _paper() -> dict[Place, float | str]:
    shares = {(224, ONE): 0.121, (448, ONE): 0.167, (224, TWO): 0.086}
    times = {
        (224, ONE): {IMPORTANCE: 0.96, TOME: 0.98}, (448, ONE): {IMPORTANCE: 1.12, TOME: 1.15},
        (224, TWO): {IMPORTANCE: 0.88},
    }  # fmt: skip
    return {
        **{
            Place(DENSE_OPERATIONS, operations_row(title, px, stages, 0.20), saves(IMPORTANCE)): share
            for title in (DA.title, SHAPES)
            for (px, stages), share in shares.items()
        },
        **{
            Place(DENSE_TIMES, time_row(DA.title, px, 1, stages, 0.20), faster(name)): value
            for (px, stages), values in times.items()
            for name, value in values.items()
        },
        **{Place(SCORES, score_row(title, 224), PARAMETERS): "≈ 310,000" for title in (DA.title, SHAPES)},
    }


PRUNING_COST = Experiment(
    name="pruning-cost",
    title="What pruning costs and saves",
    paper_label="sec:pruning_details",
    about=(
        "Operations: shares of what all blocks of the unpruned model take. A rule saves what the blocks save, less "
        "Last-Layer Fusion (all tokens in the last block), its score, and what finds partners for a merge (cosines, "
        "or d_task by a Spectral Pullback Network). Wall-clock: whole models with "
        "their decoders, unpruned over pruned, by medians of rounds in which all take turns; float32, not compiled, "
        "on the machine that the rows name; intervals are over the rounds of one run. Importance and ToMe score run "
        "the paper's pipeline. Heads are untrained, which changes neither number."
    ),
    columns=(
        Column(BLOCKS, "higher", percent=True),
        *(Column(name, "lower", percent=True, digits=2) for name in (FUSION, HEAD, TOME_SCORE, D_TASK)),
        *(Column(name, "higher", percent=True) for name in (*map(saves, (IMPORTANCE, TOME, DROPPED, OURS)), UNFUSED)),
        Column(UNPRUNED),
        *(Column(faster(name), "higher") for name in (IMPORTANCE, TOME, DROPPED, OURS)),
        Column(OVER_TOME, "lower", percent=True, digits=2),
        Column(PARAMETERS, digits=6), Column(HEAD_TIME, "lower"), Column(TOME_TIME, "lower"),
    ),
    cells=cells,
    counts=COUNTS,
    paper=_paper(),
    claims=CLAIMS,
    footnotes=FOOTNOTES,
)  # fmt: skip
