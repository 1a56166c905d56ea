"""Scores by the names of `pullback prune`, ready for a batch of images."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from pullback.decoders import task_distance
from pullback.errors import PullbackError
from pullback.geometry.scores import (
    exact_block_norms,
    exact_modes,
    metric_importance,
    metric_modes,
)
from pullback.learning.head import ImportanceHead
from pullback.learning.pretrained import Origin
from pullback.learning.spn import SpectralPullbackNetwork
from pullback.probes import ProbeMap
from pullback.pruning import SCORES, Modes, Score, ScoreContext, as_score
from pullback.pruning.compare_subject import Combination, Subject

EXACT = ("exact", "block-norm")
NAMES = ("importance", *EXACT, "spn", *SCORES)

TokenFunction = Callable[[Tensor, ScoreContext], Tensor]


@dataclass(frozen=True)
class ScoreBook:
    """Every score that can be asked for: heads and SPNs per stage, what is exact from the probe map."""

    subject: Subject
    heads: tuple[ImportanceHead, ...] = ()
    spns: tuple[SpectralPullbackNetwork, ...] = ()
    rank: int = 20
    distance: str | None = None
    seed: int = 0

    def check(self, wanted: Sequence[Combination]) -> None:
        """Refuse unknown names, and scores whose network was not given."""
        for name in dict.fromkeys(combination.score for combination in wanted):
            if name not in NAMES:
                raise PullbackError(f"scores: expected some of {', '.join(NAMES)}, got {name!r}.")
            if name == "importance" and not self.heads:
                raise PullbackError(
                    "scores: 'importance' needs --head DIR, a head that `pullback train head` wrote for this stage. "
                    "Without one, 'exact' is the importance that a head is trained on, by Jacobian products."
                )
            if name == "spn" and not self.spns:
                raise PullbackError("scores: 'spn' needs --spn DIR, which `pullback train spn` writes.")

    def per_stage(self, name: str) -> list[Score]:
        """The scores of a name, one for each stage, or one for all."""
        if name == "importance":
            return [as_score(head) for head in self.heads]
        if name == "spn":
            return [metric_importance(spn) for spn in self.spns]
        if name == "exact":
            return [_importance_of(self.exact_modes())]
        if name == "block-norm":
            return [_unlowered(exact_block_norms(self._probe()))]
        return [SCORES[name]]

    def modes(self) -> Modes:
        """For the matching by d_task: of the SPN where there is one, otherwise exact."""
        if not self.spns:
            return self.exact_modes()
        at = dict(zip(self.subject.stages, [metric_modes(spn) for spn in self.spns], strict=True))
        return lambda tokens, context: at[context.layer](tokens, context)

    def exact_modes(self) -> Modes:
        """sigma_j v_j by Jacobian products; exact importance and exact matching share them."""
        return _unlowered(exact_modes(self._probe(), self.rank))

    def deployable(self, combination: Combination) -> bool:
        """No Jacobian is involved, so its cost is worth measuring."""
        by_task = self.subject.plan(combination).match == "task"
        return combination.score not in EXACT and (bool(self.spns) or not by_task)

    def _probe(self) -> ProbeMap:
        subject = self.subject
        distance = task_distance(self.distance)
        return ProbeMap(subject.backbone, subject.decoder, subject.stages[0], distance=distance)


@dataclass
class BatchScores:
    """The scores of one batch of images, named by ``keys``; what is expensive is computed once for all plans."""

    book: ScoreBook
    keys: Sequence[str]
    _known: dict[str, list[Score]] = field(default_factory=dict)

    def per_stage(self, name: str) -> list[Score]:
        if name == "random":
            return [self._random]
        if name == "exact":
            return [_importance_of(self._exact)]
        if name not in self._known:
            self._known[name] = [_remembered(score) for score in self.book.per_stage(name)]
        return self._known[name]

    @cached_property
    def modes(self) -> Modes:
        return _remembered(self.book.modes()) if self.book.spns else self._exact

    @cached_property
    def _exact(self) -> Modes:
        return _remembered(self.book.exact_modes())

    def _random(self, tokens: Tensor, context: ScoreContext) -> Tensor:
        """Uniform, drawn for each image by itself, so that neither its batch nor a resumed run changes it."""
        draws = [
            torch.rand(context.layout.tokens, generator=_generator(self.book.seed, key, context.layer))
            for key in self.keys
        ]
        return torch.stack(draws).to(tokens.device).gather(1, context.positions)


def load_networks(
    kind: type[ImportanceHead] | type[SpectralPullbackNetwork],
    argument: str,
    folders: Sequence[Path],
    subject: Subject,
    weights: str,
) -> tuple:
    """One network per stage, each checked against model and stage; a single folder serves all stages."""
    if len(folders) not in (0, 1, len(subject.stages)):
        raise PullbackError(
            f"{argument}: expected one folder for each of the stages {list(subject.stages)}, got {len(folders)}."
        )
    folders = list(folders) * (len(subject.stages) if len(folders) == 1 else 1)
    networks = [kind.from_pretrained(folder, device=subject.backbone.device) for folder in folders]
    for network, layer in zip(networks, subject.stages, strict=False):
        origin: Origin = network.config.origin
        origin.check(argument, family=subject.backbone.family, layer=layer, weights=weights)
        if network.config.dim != subject.backbone.dim:
            raise PullbackError(
                f"{argument}: expected one for tokens of width {subject.backbone.dim}, got width {network.config.dim}."
            )
    return tuple(network.requires_grad_(False) for network in networks)


def _importance_of(modes: Modes) -> Score:
    """imp*_t = sqrt(sum_j sigma_j^2 |v_j^(t)|^2)."""
    return lambda tokens, context: torch.linalg.vector_norm(modes(tokens, context), dim=(1, 3))


def _remembered(function: TokenFunction) -> TokenFunction:
    """Of whole sequences, which are the same for every plan, computed once for each layer."""
    known: dict[int, Tensor] = {}

    def once(tokens: Tensor, context: ScoreContext) -> Tensor:
        if tokens.shape[1] != context.layout.tokens:
            return function(tokens, context)
        if context.layer not in known:
            known[context.layer] = function(tokens, context)
        return known[context.layer]

    return once


def _unlowered(function: TokenFunction) -> TokenFunction:
    """Jacobian products stay in the arithmetic of the weights, whatever the model runs in."""

    def run(tokens: Tensor, context: ScoreContext) -> Tensor:
        with torch.autocast(tokens.device.type, enabled=False):
            return function(tokens, context)

    return run


def _generator(seed: int, key: str, layer: int) -> torch.Generator:
    digest = hashlib.sha256(f"{seed} {layer} {key}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
