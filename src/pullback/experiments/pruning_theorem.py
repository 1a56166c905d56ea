"""The pruning theorem (`thm:pruning`) and its corollary (`cor:opt_prune`): the bound beside the measured error, the
premise that it rests on, and whether the tokens that it would remove are the best ones.

Quantities of the theorem are those of `pullback.experiments.pruning_bound`, at the tensor of the last layer, as the
theorem has it. Selection is by the exact imp*, so that no head stands between the theorem and what is measured. The
bound is that of the paper's pipelines: for class tokens a merge under the exact d_task, for dense decoders tokens that
are frozen and come back, with Last-Layer Fusion. Choices are compared at equal count: dense decoders in that pipeline,
class tokens without a merge, whose weights would differ from choice to choice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property, partial
from itertools import combinations

import torch
from torch import Tensor

from pullback.backbones import Backbone
from pullback.evaluation.ranking import spearman
from pullback.experiments.dense_errors import difference_row
from pullback.experiments.experiment import Cell, Column, Experiment, Figure, Measured, Place
from pullback.experiments.merging import drawn
from pullback.experiments.pruning_bound import Measured as Probes
from pullback.experiments.pruning_bound import (
    block_norms_of,
    importance_of,
    judged,
    once,
    output_error,
    plan_for,
    removed_mask,
)
from pullback.experiments.pruning_theorem_claims import (
    ALIKE,
    BOUND,
    CASES,
    CHOICE_LEADS,
    CLAIMS,
    COROLLARY,
    CORRECTED,
    ERROR,
    FIRST,
    FIRST_BY_CHOICE,
    FIRST_LEADS,
    FUSED,
    HINDSIGHT,
    HOLDS,
    IMPORTANCE,
    KEPT_ENERGY,
    KEPT_FIRST,
    KEPT_RHO,
    LINEAR,
    MOVED,
    NOTES,
    ORDER,
    PREMISE,
    PRODUCT,
    PROXY,
    RANDOM,
    RATIOS,
    REMAINDER,
    REMOVED,
    SECOND,
    SPREAD,
    SURE,
    TIMES,
    TOME,
    Case,
    ratio_column,
)
from pullback.experiments.scales import DRAWN, Scale, ScaleName
from pullback.experiments.workshop import Workshop
from pullback.geometry.scores import exact_modes
from pullback.geometry.theorem import PruningBound, first_order_term
from pullback.operators.execution import matmul_precision
from pullback.probes import Features, load_probe
from pullback.pruning import Modes, PrunePlan, Score, run_pruned
from pullback.pruning.forward import PrunedRun
from pullback.pruning.scores import as_score

RANK = 20
_AT_ONCE = 4
COUNTS: dict[ScaleName, dict[str, int]] = {
    "tiny": {"class tokens": 8, "maps": 4, "size": 112, "probes": 64, "probes by choice": 16},
    "small": {"class tokens": 32, "maps": 12, "size": 112, "probes": 64, "probes by choice": 64},
    "paper": {"class tokens": 50, "maps": 50, "size": 224, "probes": 64, "probes by choice": 64},
}
"""Pictures by decoder and the side of scenes; VJPs for block norms of maps too large for exact ones, and those for the
first-order term of every choice. On four drawn scenes 16 of them decide that claim as exact norms do, and 8 do not."""

_IN_PERCENT = {ERROR: "true_error", REMOVED: "removed_error", FIRST: "first_term", SECOND: "second_term"}
_OF_BOUND = (*_IN_PERCENT, TIMES, HOLDS, SURE)
_OF_PREMISE = (MOVED, KEPT_RHO, KEPT_ENERGY, KEPT_FIRST, LINEAR, REMAINDER, ORDER, CORRECTED)
_OF_COROLLARY = (SPREAD, PROXY, FUSED, ALIKE)


def cells(scale: Scale) -> list[Cell]:
    found = []
    for case in CASES:
        of_case = partial(Cell, model=case.model, data=case.data)
        rows = [row for reading in case.readings for row in case.rows(reading)]
        places = [
            Place(table, row, column)
            for row in rows
            for table, columns in ((BOUND, _OF_BOUND), (PREMISE, _OF_PREMISE))
            for column in columns
        ]
        found.append(
            of_case(f"{case.title}: bound", tuple(places), partial(_bound, case), forwards=forwards(case, scale))
        )
        columns = [ratio_column(ratio) for ratio in RATIOS]
        choices = [Place(case.choice_table, name, column) for name in case.choices for column in columns]
        choices += [
            Place(CHOICE_LEADS, f"{case.title}: {other}", column) for other in case.choices[1:] for column in columns
        ]
        found.append(of_case(f"{case.title}: choices", tuple(choices), partial(_choices, case)))
        if case.dense:
            firsts = [
                Place(FIRST_BY_CHOICE, f"{case.title}: {name}", column) for name in case.choices for column in columns
            ]
            firsts += [
                Place(FIRST_LEADS, f"{case.title}: {other}", column) for other in case.choices[1:] for column in columns
            ]
            firsts += [Place(COROLLARY, row, column) for row in case.rows() for column in _OF_COROLLARY]
            found.append(of_case(f"{case.title}: corollary", tuple(firsts), partial(_corollary, case)))
    return found


def forwards(case: Case, scale: Scale) -> float:
    """About how many forward passes measuring a case takes. A product through the decoder of maps takes a quarter."""
    counts = COUNTS[scale.name]
    modes = 3.0 * case.products * (11 - case.layer) / 12
    runs = len(RATIOS) * (len(case.choices) + 1)
    decoded = 0.0
    if case.dense:
        bounds = len(RATIOS) + case.several
        decoded = (counts["probes"] * bounds + counts["probes by choice"] * len(RATIOS) * len(case.choices)) / 4
    area = (counts["size"] / 224) ** 2 if case.data in DRAWN else 1.0
    return counts[case.counted] * area * (modes + runs + decoded)


# What is measured


def measured(shop: Workshop, case: Case) -> dict[str, Tensor]:
    """Return numbers of pictures, kept for all cells of a case. Of the paper's pipeline [ratios, n]: "READING COLUMN"
    by the columns of the tables; of every choice "error" and "first" [choices, ratios, n], in % of the output."""
    key = {
        "what": "pruning-theorem", **shop.identity(shop.probe(case.model, case.decoder, case.layer)),
        "data": case.data if case.data in DRAWN else str(shop.scale.data[case.data]), "seed": shop.seed,
        "counts": {name: shop.count(name) for name in COUNTS[shop.scale.name]}, "images": _images(shop, case),
    }  # fmt: skip
    return {name: value.cpu() for name, value in shop.kept(key, partial(_measure, shop, case)).items()}


def _images(shop: Workshop, case: Case) -> int:
    available = shop.available(case.data)
    return shop.count(case.counted) if available is None else min(shop.count(case.counted), available)


def _measure(shop: Workshop, case: Case) -> dict[str, Tensor]:
    count, size = _images(shop, case), shop.count("size") if case.data in DRAWN else None
    pictures = shop.images(case.data, count, model=case.model, size=size)
    runner = shop.probe(case.model, case.decoder, case.layer)
    last = runner.backbone.depth - 1
    judge = load_probe(shop.scale.models[case.model], case.decoder, last, device=shop.device, dtype=torch.float64)
    parts = []
    for first in range(0, count, _AT_ONCE):
        shop.progress.describe(f"{case.title}: picture {first + 1} of {count}")
        with matmul_precision("float32"):
            parts.append(_Part(shop, case, Probes(runner, judge), pictures[first : first + _AT_ONCE], first).numbers())
    return {name: torch.cat([part[name] for part in parts], -1) for name in parts[0]}


class _Part:
    """A few pictures, run with everything that a case asks for."""

    def __init__(self, shop: Workshop, case: Case, probes: Probes, images: Tensor, first: int) -> None:
        self.shop, self.case, self.probes, self.images = shop, case, probes, images
        assert isinstance(probes.runner.backbone, Backbone)
        self.backbone = probes.runner.backbone
        self.layout, self.last = self.backbone.token_layout(images), self.backbone.depth - 1
        taps = self.backbone.features(images, sorted({*probes.layers, case.layer}))
        self.stage = taps[case.layer]
        self.unpruned = {layer: taps[layer] for layer in probes.layers}
        self.modes: Modes = once(exact_modes(probes.runner, RANK))
        self.random = drawn(shop, shop.seed, first, len(images), self.layout.tokens)

    def numbers(self) -> dict[str, Tensor]:
        found: dict[str, list[Tensor]] = {}
        for ratio in RATIOS:
            for name, value in self._of_bound(ratio).items():
                found.setdefault(name, []).append(value)
        numbers = {name: torch.stack(values) for name, values in found.items()}
        pairs = [[self._of_choice(name, ratio) for ratio in RATIOS] for name in self.case.choices]
        for place, name in enumerate(("error", "first")):
            numbers[name] = torch.stack([torch.stack([pair[place] for pair in row]) for row in pairs])
        return numbers

    def run(self, plan: PrunePlan, score: Score) -> tuple[PrunedRun, dict[int, Tensor], Tensor]:
        """Return a run, its tokens by layer, and which tokens [B, N] it removed."""
        layers = self.probes.layers
        run = run_pruned(self.backbone, self.images, plan, [score], layers=layers, modes=self.modes)
        pruned = dict(zip(layers, run.taps, strict=True))
        return run, pruned, removed_mask(run.records, self.stage)

    def _of_bound(self, ratio: float) -> dict[str, Tensor]:
        plan = plan_for("paper", ratio, self.probes)
        _, pruned, removed = self.run(plan, importance_of(self.modes))
        num_probes = None if self.case.exact else self.shop.count("probes")
        found: dict[str, Tensor] = {}
        wanted = [reading for reading in self.case.readings if ratio in self.case.ratios(reading)]
        bounds = judged(self.probes, self.unpruned, pruned, removed, self.images, num_probes)
        for reading, (_, bound) in zip(wanted, bounds, strict=False):  # those after the wanted ones are not computed
            found |= {f"{reading} {column}": value for column, value in _columns(bound).items()}
            if reading == "final" and self.case.dense:
                found |= self._of_corollary(bound)
        return found

    def _of_corollary(self, bound: PruningBound) -> dict[str, Tensor]:
        prefix = self.layout.prefix
        importance = self.known_modes().square().sum((1, 3)).sqrt()
        drift = self._drift()
        gone = bound.removed
        own = (bound.residuals * gone).sum(1) / gone.sum(1)
        spread = ((bound.residuals - own[:, None]).square() * gone).sum(1).div(gone.sum(1)).sqrt() / own
        return {
            SPREAD: spread,
            PROXY: spearman(importance[:, prefix:].double(), bound.block_norms[:, prefix:]),
            FUSED: own / ((drift * gone).sum(1) / gone.sum(1)),
        }

    def _of_choice(self, name: str, ratio: float) -> tuple[Tensor, Tensor]:
        """Return the error of the output and the first-order term [B], in per cent of the output."""
        plan = plan_for("paper" if self.case.dense else "drop", ratio, self.probes)
        plan = replace(plan, select="cost", trust=1.0) if name == PRODUCT else plan
        _, pruned, removed = self.run(plan, self._score(name))
        whole = self._length
        error = output_error(self.probes, self.unpruned, pruned, self.images)
        if not self.case.dense:
            return 100 * error / whole, torch.zeros_like(error)
        norms = self._block_norms(pruned[self.last], self.shop.count("probes by choice"))
        residuals = (self.unpruned[self.last] - pruned[self.last]).double().norm(dim=2)
        return 100 * error / whole, 100 * first_order_term(norms, residuals, removed) / whole

    def _score(self, name: str) -> Score:
        if name in (IMPORTANCE, PRODUCT):
            return importance_of(self.modes)
        if name == TOME:
            return as_score("bipartite")
        if name == RANDOM:
            return lambda tokens, context: self.random
        assert name == HINDSIGHT
        return lambda tokens, context: self._hindsight

    def known_modes(self) -> Tensor:
        """Return what `once` has kept of the first run."""
        return self.modes(self.stage, None)  # type: ignore[arg-type]

    @cached_property
    def _hindsight(self) -> Tensor:
        """The theorem's own product [B, N], of the unpruned model."""
        norms = self._block_norms(self.unpruned[self.last], self.shop.count("probes by choice"))
        return (norms * self._drift()).float()

    def _drift(self) -> Tensor:
        """Return |F_t^L - F_t^l| [B, N], what a frozen token misses."""
        return (self.unpruned[self.last] - self.stage).double().norm(dim=2)

    def _block_norms(self, tokens: Tensor, num_probes: int) -> Tensor:
        """Return |J_:,t|_F [B, N] of the decoder at tokens of the last layer, by at most so many VJPs."""
        quick = self.probes.runner
        below = {layer: self.unpruned[layer] for layer in quick.decoder.layers if layer != self.last}
        here = Features.attach(tokens, self.layout, below)
        enough = self.case.exact and num_probes >= self.case.products  # exact ones take no more
        return block_norms_of(replace(quick, at=self.last), here, None if enough else num_probes).double()

    @cached_property
    def _length(self) -> Tensor:
        """|phi(F)| [B]."""
        judge = self.probes.judge
        taps = [self.unpruned[layer].double() for layer in judge.decoder.layers]
        assert isinstance(judge.backbone, Backbone)
        with torch.no_grad():
            return judge.decoder.output(taps, self.layout, judge.backbone.norm).flatten(1).norm(dim=1)


def _columns(bound: PruningBound) -> dict[str, Tensor]:
    """Return the numbers [B] of the tables "the bound" and "the premise"."""
    per_cent = {column: 100 * getattr(bound, name) / bound.output_norm for column, name in _IN_PERCENT.items()}
    error = bound.true_error
    return {
        **per_cent,
        TIMES: bound.stated / error,
        HOLDS: (~bound.fails).double(),
        SURE: bound.holds_for_sure.double(),
        MOVED: bound.kept_moved,
        KEPT_RHO: bound.kept_residual,
        KEPT_ENERGY: bound.kept_energy,
        KEPT_FIRST: 1 - bound.first_term / bound.corrected_first_term,
        LINEAR: bound.linear_change / error,
        REMAINDER: bound.remainder / error,
        ORDER: bound.remainder_order,
        CORRECTED: bound.corrected / error,
    }


# Rows


def _bound(case: Case, shop: Workshop) -> Iterable[Measured]:
    found = measured(shop, case)
    for reading in case.readings:
        for number, row in enumerate(case.rows(reading)):
            for table, columns in ((BOUND, _OF_BOUND), (PREMISE, _OF_PREMISE)):
                for column in columns:
                    yield _mean(shop, Place(table, row, column), found[f"{reading} {column}"][number])


def _choices(case: Case, shop: Workshop) -> Iterable[Measured]:
    yield from _compared(shop, case, measured(shop, case)["error"], case.choice_table, CHOICE_LEADS, "")


def _corollary(case: Case, shop: Workshop) -> Iterable[Measured]:
    found = measured(shop, case)
    yield from _compared(shop, case, found["first"], FIRST_BY_CHOICE, FIRST_LEADS, f"{case.title}: ")
    found[ALIKE] = ordered_alike(found["first"], found["error"])
    for number, row in enumerate(case.rows()):
        for column in _OF_COROLLARY:
            yield _mean(shop, Place(COROLLARY, row, column), found[column][number])


def _compared(shop: Workshop, case: Case, values: Tensor, table: str, leads: str, before: str) -> Iterable[Measured]:
    """Return rows of values [choices, ratios, n], and by how many per cent importance differs from every other."""
    for number, ratio in enumerate(RATIOS):
        for place, name in enumerate(case.choices):
            yield shop.mean((table, f"{before}{name}", ratio_column(ratio)), values[place, number])
            if place:
                pair = (values[0, number][None], values[place, number][None])
                yield difference_row(shop, (leads, f"{case.title}: {name}", ratio_column(ratio)), *pair)


def ordered_alike(first: Tensor, second: Tensor) -> Tensor:
    """Return the share of pairs of choices that two numbers [choices, ...] order alike [...]; chance has 0.5."""
    pairs = list(combinations(range(len(first)), 2))
    alike = [(first[a] - first[b]).sign() == (second[a] - second[b]).sign() for a, b in pairs]
    return torch.stack(alike).double().mean(0)


def _mean(shop: Workshop, place: Place, values: Tensor) -> Measured:
    """Return the mean over the pictures that have a number, and say so where some have none."""
    known = values[values.isfinite()]
    if not len(known):
        return Measured(*place, float("nan"), count=0)
    note = None if len(known) == len(values) else f"the other {len(values) - len(known)} have none above round-off"
    return shop.mean(place, known, note=note)


PRUNING_THEOREM = Experiment(
    name="pruning-theorem",
    title="The error bound of pruning",
    paper_label="thm:pruning",
    about=(
        "Every quantity of Theorem 4 at pruned runs: the error of the output and the two terms of its bound in per "
        "cent of the output, with the least β that Taylor's estimate allows at that pair. The paper's pipelines, "
        "tokens chosen by the exact imp*. η: share of the tokens that is removed. Choices are compared at equal count: "
        "in the paper's pipeline for dense decoders, removed without a merge for class tokens. The theorem has no "
        "table in the paper, so there are no numbers beside ours."
    ),
    columns=(
        Column(ERROR, "lower", "%"), Column(REMOVED, unit="%"), Column(FIRST, unit="%"), Column(SECOND, unit="%"),
        Column(TIMES, unit="×"), Column(HOLDS, "higher", percent=True), Column(SURE, percent=True),
        *(Column(name, percent=True) for name in (MOVED, KEPT_RHO, KEPT_ENERGY, KEPT_FIRST)), Column(LINEAR, unit="×"),
        Column(REMAINDER, unit="×"), Column(ORDER), Column(CORRECTED, unit="×"),
        *(Column(ratio_column(ratio), "lower", "%") for ratio in RATIOS), Column(SPREAD, percent=True), Column(PROXY),
        Column(FUSED, "lower", "×"), Column(ALIKE, percent=True),
    ),
    cells=cells,
    counts=COUNTS,
    claims=CLAIMS,
    figures=tuple(
        Figure(f"choices-{number}", "curves", f"Error by choice: {case.title}", table=case.choice_table, log=True)
        for number, case in enumerate(CASES)
    ),
    footnotes=NOTES,
)  # fmt: skip
