"""Small changes of a plan that was found, as long as one makes it better: what `pb.plan_pruning` has no ladders for.

A stage a block earlier or later, a part of one stage's share for another, more or less trust, other gates. Every change
is scaled to the budget, and tried on the images that choose; the others say what to expect.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

import pullback as pb
from pullback.evaluation.fidelity import cosine_degradation, readable
from pullback.pruning.operations import PredictedOperations
from pullback.pruning.plan import PrunePlan

MOVES = (1 / 4, 1 / 8)  # of a stage's share
STEP = 0.1  # of trust, gates and fades
MOST_ROUNDS = 4


class Polisher:
    """Tries plans of a model with one head for each block, on images [n, 3, H, W] whose first half chooses."""

    def __init__(
        self, model: nn.Module, heads: Mapping[int, pb.ImportanceHead], images: Tensor, budget: float, batch: int
    ) -> None:
        self.model, self.heads, self.budget, self.batch = model, heads, budget, batch
        self._formula: PredictedOperations | None = None
        self.choosing, self.others = images[::2], images[1::2]
        self._full = [self._outputs(model, images) for images in (self.choosing, self.others)]

    @torch.no_grad()
    def _outputs(self, model: nn.Module, images: Tensor) -> Tensor:
        return torch.cat([readable(model(part))[1] for part in images.split(self.batch)])

    def build(self, plan: PrunePlan) -> pb.PrunedModel:
        return pb.PrunedModel(self.model, plan, [self.heads[stage] for stage in plan.stages])

    def mean(self, plan: PrunePlan, expecting: bool = False) -> float:
        """Return the mean degradation on the images that choose, or on the others."""
        images = self.others if expecting else self.choosing
        return float(cosine_degradation(self._outputs(self.build(plan), images), self._full[expecting]).mean())

    def fitted(self, plan: PrunePlan) -> PrunePlan | None:
        """Return the plan with the smallest shares in its proportions that meet the budget; None where none do."""
        if self._formula is None:  # what a stage takes does not depend on anything that changes here
            self._formula = PredictedOperations(self.model, self.choosing, self.heads, plan)
        formula = self._formula

        def scaled(factor: float) -> PrunePlan:
            return replace(plan, shares=tuple(factor * share for share in plan.shares))

        low, high = 0.0, 0.95 / sum(plan.shares)
        if formula(scaled(high)) > self.budget:
            return None
        while high - low > 1e-3:
            middle = (low + high) / 2
            low, high = (low, middle) if formula(scaled(middle)) <= self.budget else (middle, high)
        while pb.operations(self.build(scaled(high)), self.choosing[:1]) > self.budget:
            high *= 1.002
        return scaled(high)

    def improved(self, plan: PrunePlan) -> PrunePlan:
        """Take the best change again and again, until none is better."""
        best, value = plan, self.mean(plan)
        for _ in range(MOST_ROUNDS if plan.stages else 0):
            tried = [changed for changed in map(self.fitted, changes(best, self.heads)) if changed is not None]
            values = [self.mean(changed) for changed in tried]
            if not values or min(values) >= value:
                break
            value, best = min(zip(values, tried, strict=True), key=lambda pair: pair[0])
        return best


def changes(plan: PrunePlan, heads: Mapping[int, object]) -> Iterator[PrunePlan]:
    """Return plans that differ from this one in one thing."""
    stages, shares = plan.stages, plan.shares
    for place, stage in enumerate(stages):
        for other in (stage - 1, stage + 1):
            moved = (*stages[:place], other, *stages[place + 1 :])
            if other in heads and list(moved) == sorted(set(moved)):
                yield replace(plan, stages=moved)
        for to in range(len(stages)):
            for part in MOVES if to != place else ():
                given = part * shares[place]
                own = [share - given * (i == place) + given * (i == to) for i, share in enumerate(shares)]
                yield replace(plan, shares=tuple(own))
    for trust in (plan.trust - STEP, plan.trust + STEP):
        if 0 <= trust <= 1:
            yield replace(plan, trust=trust)
    for step in (-STEP, STEP):
        gates = tuple(gate + step for gate in plan.gates)
        if gates and all(gate <= fade for gate, fade in zip(gates, plan.fades, strict=True)):
            yield replace(plan, gates=gates)
        fades = tuple(min(1.0, fade + step) for fade in plan.fades)
        if fades != plan.fades and all(gate <= fade for gate, fade in zip(plan.gates, fades, strict=True)):
            yield replace(plan, fades=fades)
