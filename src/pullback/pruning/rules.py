"""Pruning rules by name, ready to run: a preset, a score and a ratio make a `PrunedModel` of the user's model.

`Subject` is the model with the decoder through which its output is read. `Scores` knows every score by name, and what
each says of the batch of images at hand.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pullback.backbones import Backbone
from pullback.decoders import Decoder, task_distance
from pullback.errors import DecoderError, PullbackError, naming
from pullback.geometry.scores import exact_modes
from pullback.operators.execution import matmul_precision
from pullback.probes import ProbeMap
from pullback.pruning.forward import StageRecord
from pullback.pruning.model import PrunedModel
from pullback.pruning.plan import PrunePlan, preset
from pullback.pruning.resized import enlarged
from pullback.pruning.scores import (
    Choice,
    Modes,
    Score,
    ScoreContext,
    StageModes,
    check_network,
    check_weights,
    metric_score,
)
from pullback.registry import PRESETS, SCORES, check_former_score, current_rule, load_plugins, resolve
from pullback.tokens import TokenLayout


@dataclass(frozen=True)
class Rule:
    """What becomes of removed tokens, which ones are removed, and how many."""

    preset: str
    score: str
    ratio: float

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Rule:
        """Return the rule of a stored row, whichever version wrote it."""
        return cls(*current_rule(row["preset"], row["score"]), row["ratio"])

    def __str__(self) -> str:
        return f"{self.preset}, {self.score}, {self.ratio:g}"


def rules(presets: Sequence[str], scores: Sequence[str], ratios: Sequence[float]) -> list[Rule]:
    """Return all rules in the order of the arguments; presets from the literature are run with their own score only."""
    return [
        Rule(name, score, ratio)
        for name in presets
        for score in ([own_score(name)] if own_score(name) else scores)
        for ratio in ratios
    ]


def own_score(name: str) -> str:
    """Return the one score that a preset is defined with; nothing for presets that take any."""
    return PRESETS[name].score if name in PRESETS else ""


def reference_score(scores: Sequence[str]) -> str:
    """Return the score that the others are tested against."""
    return "importance" if "importance" in scores else scores[0]


@dataclass(frozen=True)
class Subject:
    """The user's model with a decoder; stages and arithmetic are the same for all rules."""

    backbone: Backbone
    decoder: Decoder
    stages: tuple[int, ...]
    precision: str = "float32"

    @property
    def dense(self) -> bool:
        """Whether the decoder reads patches, so that removed tokens must come back."""
        return self.decoder.rows is None

    @property
    def depth(self) -> bool:
        """Whether the decoder's output is a depth map."""
        return self.decoder.name.startswith("depth")

    def plan(self, rule: Rule) -> PrunePlan:
        return preset(rule.preset, rule.ratio, self.stages, dense=self.dense, depth=self.backbone.depth)

    def check(self, wanted: Sequence[Rule]) -> list[str]:
        """Raise an error for impossible stages; return what the plans have to say about odd ones, once."""
        depth, plans = self.backbone.depth, [self.plan(rule) for rule in wanted]
        for plan in plans:
            plan.check_depth(depth)
        return list(dict.fromkeys(note for plan in plans for note in plan.notes(depth)))

    def pruned(self, plan: PrunePlan, scores: Sequence[Choice], modes: Modes | None = None) -> PrunedModel:
        """Return the model with this plan; ``modes`` are used where the plan matches by d_task."""
        return PrunedModel(self.backbone.model, plan, scores, modes if plan.match == "task" else None)

    @torch.no_grad()
    def full(self, images: Tensor) -> Tensor:
        """Return what the decoder reads from the unpruned model, for images [B, 3, H, W]."""
        with self.arithmetic():
            taps = self.backbone.features(images, self.decoder.layers)
            return self._decoded([taps[layer] for layer in self.decoder.layers], self.backbone.token_layout(images))

    @torch.no_grad()
    def output(self, model: PrunedModel, images: Tensor) -> tuple[Tensor, tuple[StageRecord, ...]]:
        """Return what the decoder reads from a pruned model, and what every stage did. Maps of a picture that the plan
        has shrunk are enlarged again, so that they can be compared with those of `full`."""
        with self.arithmetic():
            run, whole = model.run(images, self.decoder.layers), self.backbone.token_layout(images)
            output = self._decoded(run.taps, run.layout)
        if self.dense and run.layout != whole:
            output = self._enlarged(output, self.shape(whole))
        return output, run.records

    @torch.no_grad()
    def shape(self, layout: TokenLayout) -> tuple[int, ...]:
        """Return the shape of what the decoder reads of one image whose tokens lie like this."""
        if layout not in self._shapes:
            tokens = self.backbone.norm.weight.new_zeros(1, layout.tokens, self.backbone.dim)
            with self.arithmetic():
                self._shapes[layout] = tuple(self._decoded([tokens] * len(self.decoder.layers), layout).shape[1:])
        return self._shapes[layout]

    @cached_property
    def _shapes(self) -> dict[TokenLayout, tuple[int, ...]]:
        return {}

    def _decoded(self, taps: Sequence[Tensor], layout: TokenLayout) -> Tensor:
        return self.decoder.output(taps, layout, self.backbone.norm).float()

    def _enlarged(self, output: Tensor, wanted: tuple[int, ...]) -> Tensor:
        """Enlarge what was read of a shrunk picture, maps [B, h, w] or [B, C, h, w], to the shape that it has at the
        picture's own size; what has that shape already, such as an embedding or cells, stays as it is."""
        shape = tuple(output.shape[1:])
        if shape == wanted:
            return output
        larger = all(small < side for small, side in zip(shape[-2:], wanted[-2:], strict=True))
        if len(shape) not in (2, 3) or shape[:-2] != wanted[:-2] or not larger:
            raise DecoderError(
                f"decoder: {self.decoder.name!r} reads {list(shape)} of a smaller picture and {list(wanted)} of the "
                "whole one, and only maps [h, w] or [C, h, w] are enlarged again. Leave smaller pictures out."
            )
        return enlarged(output[:, None] if len(shape) == 2 else output, wanted[-2:]).reshape(-1, *wanted)

    @contextmanager
    def arithmetic(self) -> Iterator[None]:
        """Set the arithmetic of the whole model; bf16 by autocast, so that weights and residual stream stay float32."""
        lower = self.precision == "bf16"
        with (
            matmul_precision(self.precision),
            torch.autocast(self.backbone.device.type, torch.bfloat16, enabled=lower),
        ):
            yield


class Scores:
    """The scores of a request by name, and what they say of the batch of images at hand: what is expensive is computed
    once for all rules that ask for it."""

    def __init__(
        self,
        subject: Subject,
        *,
        heads: Sequence[nn.Module] = (),
        spns: Sequence[nn.Module] = (),
        rank: int = 20,
        distance: str | None = None,
        seed: int = 0,
    ) -> None:
        self.subject, self.heads, self.spns = subject, heads, spns
        self.rank, self.distance, self.seed = rank, distance, seed
        self._keys: Sequence[str] = ()
        self.known: dict[tuple[str, int], Tensor] = {}  # by name and layer, for the batch at hand

    def check(self, wanted: Sequence[Rule]) -> None:
        """Raise an error for unknown names, and for scores whose network was not given."""
        load_plugins()
        for name in dict.fromkeys(rule.score for rule in wanted):
            check_former_score("scores", name)
            if name not in SCORES:
                raise PullbackError(f"scores: expected some of {', '.join(SCORES)}, got {name!r}.")
            if SCORES[name].needs == "head" and not self.heads:
                raise PullbackError(
                    f"scores: {name!r} needs --head DIR, a head that `pullback train head` wrote for this stage. "
                    "Without one, 'exact' is the importance that a head is trained on, by Jacobian products."
                )
            if SCORES[name].needs == "spn" and not self.spns:
                raise PullbackError(f"scores: {name!r} needs --spn DIR, which `pullback train spn` writes.")

    def deployable(self, rule: Rule) -> bool:
        """Whether no Jacobian is involved, so that the cost of a rule is worth measuring."""
        by_task = self.subject.plan(rule).match == "task"
        return SCORES[rule.score].needs != "probe" and (bool(self.spns) or not by_task)

    def begin(self, keys: Sequence[str]) -> None:
        """Turn to another batch of images, which are named by ``keys``."""
        self._keys, self.known = keys, {}

    def pruned(self, rule: Rule, *, plain: bool = False) -> PrunedModel:
        """Return the model of a rule, with scores for the batch at hand; ``plain``: as a user would have it."""
        choices = self.plain(rule.score) if plain else self.of(rule.score)
        return self.subject.pruned(self.subject.plan(rule), choices, self._modes() if plain else self.modes())

    def plain(self, name: str) -> list[Any]:
        """Return the scores of a name, one for each stage, or one for all."""
        entry = SCORES[name]
        score = resolve(entry.score)
        if entry.needs == "probe":
            return [_unlowered(score(self._probe()))]
        networks = {"head": self.heads, "spn": self.spns}.get(entry.needs)
        return [score] if networks is None else [score(network) for network in networks]

    def of(self, name: str) -> list[Score]:
        """Return the scores of a name for the batch at hand; what is expensive is computed once."""
        if name == "random":
            return [self._random]
        if name == "exact":  # shares its modes with the exact matching
            modes = self._remember("exact", self._exact_modes())
            return [lambda tokens, context: torch.linalg.vector_norm(modes(tokens, context), dim=(1, 3))]
        return [self._remember(name, score) for score in self.plain(name)]

    def modes(self) -> Modes:
        """Return the modes for the matching by d_task: of the SPN where there is one, otherwise exact."""
        return self._remember("spn modes" if self.spns else "exact", self._modes())

    def _modes(self) -> Modes:
        if not self.spns:
            return self._exact_modes()
        return StageModes(dict(zip(self.subject.stages, map(metric_score, self.spns), strict=True)))

    def _exact_modes(self) -> Modes:
        return _unlowered(exact_modes(self._probe(), self.rank))

    def _probe(self) -> ProbeMap:
        subject = self.subject
        distance = task_distance(self.distance)
        return ProbeMap(subject.backbone, subject.decoder, subject.stages[0], distance=distance)

    def _random(self, tokens: Tensor, context: ScoreContext) -> Tensor:
        """Draw uniform scores for each image by itself, so that neither its batch nor a resumed run changes them."""
        draws = [
            torch.rand(context.layout.tokens, generator=_generator(self.seed, key, context.layer)) for key in self._keys
        ]
        return torch.stack(draws).to(tokens.device).gather(1, context.positions)

    def _remember(self, name: str, function: Score) -> Score:
        """Compute a function of whole sequences, which are the same for every plan, once for each layer of a batch."""

        def once(tokens: Tensor, context: ScoreContext) -> Tensor:
            if tokens.shape[1] != context.layout.tokens:
                return function(tokens, context)
            if (name, context.layer) not in self.known:
                self.known[name, context.layer] = function(tokens, context)
            return self.known[name, context.layer]

        return once


def _unlowered(function: Score) -> Score:
    """Keep Jacobian products in the arithmetic of the weights, whatever the model runs in."""

    def run(tokens: Tensor, context: ScoreContext) -> Tensor:
        with torch.autocast(tokens.device.type, enabled=False):
            return function(tokens, context)

    return run


def _generator(seed: int, key: str, layer: int) -> torch.Generator:
    digest = hashlib.sha256(f"{seed} {layer} {key}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def load_networks(kind: Any, argument: str, folders: Sequence[Path], subject: Subject, identity: str) -> list[Any]:
    """Read one network per stage, each checked against model, stage and decoder, of which ``identity`` is the
    identity; a single folder serves all stages."""
    if len(folders) not in (0, 1, len(subject.stages)):
        raise PullbackError(
            f"{argument}: expected one folder for each of the stages {list(subject.stages)}, got {len(folders)}."
        )
    backbone = subject.backbone
    folders = list(folders) * (len(subject.stages) if len(folders) == 1 else 1)
    with naming(argument):
        networks = [kind.from_pretrained(folder, device=backbone.device).requires_grad_(False) for folder in folders]
    for network, layer in zip(networks, subject.stages, strict=False):
        decoder = {"decoder": subject.decoder.name, "decoder_identity": identity}
        check_network(argument, network, backbone.family, backbone.dim, layer, **decoder)
    check_weights(backbone, [(argument, network) for network in networks])
    return networks
