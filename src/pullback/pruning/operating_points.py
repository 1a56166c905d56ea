"""Operating points: every method at every setting of its knob, as pruned models of one backbone.

A *method* is a way to compute less (a smaller picture, ToMe, PiToMe, EViT, ours, a pruned model on disk); a *point* is
one setting of it. Where nothing but the class token is read, every point that may computes its row alone in the last
block; for dense decoders removed tokens come back as the presets have it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from pullback.backbones.weights import block_hashes, same_weights
from pullback.errors import ModelError, PullbackError, naming
from pullback.learning.head import ImportanceHead
from pullback.learning.shipped_heads import load_shipped, shipped_folders, shipped_heads
from pullback.pruning.folder import MODEL
from pullback.pruning.model import PrunedModel
from pullback.pruning.plan import Plan, PrunePlan, preset, published
from pullback.pruning.rules import Subject
from pullback.pruning.scores import IMPORTANCE, Choice, HeadScore, check_network, check_weights, score_names
from pullback.registry import SCORES, check_former_score, resolve
from pullback.runs.provenance import weights_hash
from pullback.tokens import TokenLayout

# The grids, where nothing else is asked for: those of the rivals are fine enough to come close to any budget
LEAST_OF_THE_PATCHES, MOST_SIZES = 0.35, 8  # of the smallest picture; of sizes in between
TOME_MERGED = tuple(step / 10 for step in range(1, 12))  # of the patches, in all blocks together; r follows
PITOME_KEEP = (0.98, 0.97, 0.96, 0.95, 0.94, 0.93, 0.92, 0.91, 0.9, 0.88, 0.86, 0.84, 0.82, 0.8)
EVIT_KEEP = tuple(step / 20 for step in range(18, 7, -1))
RATIOS = (0.3, 0.5, 0.7)  # of `best` after one block
RATIOS_OF_TWO = (0.5, 0.7)  # of `best` after two blocks, in all
RATIOS_SMALLER, SMALLER = (0.3, 0.5), 2  # of `best` on so many next smaller pictures
APART = 4  # the second of two blocks is at least a depth / so many behind the first

METHODS = {
    "resize": "resize",
    "tome": "tome",
    "tome-decreasing": "tome, decreasing",
    "pitome": "pitome",
    "evit": "evit",
    "best": "best",
}
"""The methods by the names that they are asked for, and as rows and tables call them."""
_DIGITS = 16


@dataclass(frozen=True)
class Knobs:
    """What the methods are run at; None: the grids of this file, for the size of the pictures.

    ``sizes``: pixels of the shorter side. ``r``: tokens that each block merges (ToMe), of a decreasing schedule on
    average. ``keep``: share that stays in every block (PiToMe), ``evit_keep``: in three of them (EViT). ``ratios`` and
    ``stages`` of `best`: shares of the patch tokens that are removed after a block, or several. ``smaller``: on so many
    next smaller pictures `best` runs as well, after one block.
    """

    sizes: tuple[int, ...] | None = None
    r: tuple[int, ...] | None = None
    keep: tuple[float, ...] | None = None
    evit_keep: tuple[float, ...] | None = None
    ratios: tuple[float, ...] | None = None
    stages: tuple[tuple[int, ...], ...] | None = None
    smaller: int = SMALLER


class Key(NamedTuple):
    """How rows and tables name a point."""

    method: str
    point: str
    tuned: bool

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Key:
        """Return the key of a stored row."""
        return cls(row["method"], row["point"], row["tuned"])


@dataclass(frozen=True, eq=False)
class Point:
    """A pruned model at one setting of a method, which is known by its ``key``. ``scores``: the name of each stage's
    score, or the hash of its head; of a tuned model also the hash of its vectors."""

    key: Key
    model: PrunedModel
    scores: tuple[str, ...] = ()

    @property
    def ours(self) -> bool:
        """Whether tokens are removed in stages, as this package does; rivals act inside blocks, or shrink pictures."""
        return isinstance(self.model.plan, PrunePlan) and self.model.plan.removes

    def identity(self) -> dict[str, Any]:
        """Return what decides its numbers, as plain data."""
        return {"plan": plain_plan(self.model.plan), "scores": list(self.scores)}


def plain_plan(plan: Plan) -> dict[str, Any]:
    """Return the fields of a plan that are not at their defaults, as JSON has them."""
    values = {field.name: getattr(plan, field.name) for field in fields(plan)}
    changed = {field.name for field in fields(plan) if values[field.name] != field.default}
    return {
        name: list(value) if isinstance(value, tuple) else value for name, value in values.items() if name in changed
    }


@dataclass(frozen=True)
class Grid:
    """Makes the points of every method for one subject and pictures of one size, (height, width).

    ``heads``: the scores of `best` by block.
    """

    subject: Subject
    knobs: Knobs
    size: tuple[int, int]
    heads: Mapping[int, Choice]

    def points(self, methods: Sequence[str]) -> list[Point]:
        """Return all points of these methods, keys of `METHODS`."""
        made: dict[str, Callable[[], Iterator[Point]]] = {
            "resize": self._resized,
            "tome": self._tome,
            "tome-decreasing": self._decreasing,
            "pitome": self._pitome,
            "evit": self._evit,
            "best": self._best,
        }
        return [point for method in methods for point in made[method]()]

    def _resized(self) -> Iterator[Point]:
        for size in self._sizes():
            yield self._published("resize", f"{size} px", size=size)

    def _tome(self) -> Iterator[Point]:
        for r in self._r():
            yield self._published("tome", f"r = {r}", r=r)

    def _decreasing(self) -> Iterator[Point]:
        for r in self._r():
            yield self._published("tome-decreasing", f"r = {r}", r=(r, -1))

    def _pitome(self) -> Iterator[Point]:
        for keep in self.knobs.keep or PITOME_KEEP:
            yield self._published("pitome", f"keep {keep:g}", keep=keep)

    def _evit(self) -> Iterator[Point]:
        for keep in self.knobs.evit_keep or EVIT_KEEP:
            with naming("evit_keep", "keep"):
                point = self._published("evit", f"keep {keep:g}", keep=keep)
            yield point

    def _best(self) -> Iterator[Point]:
        stages, asked = self._stages(), self.knobs.ratios
        for chosen in stages:
            for ratio in asked or (RATIOS if len(chosen) == 1 else RATIOS_OF_TWO):
                yield self._removing(chosen, ratio, None)
        smaller = self._smaller()[: self.knobs.smaller]
        for size in smaller:
            for chosen in stages:
                for ratio in (asked or RATIOS_SMALLER) if len(chosen) == 1 else ():
                    yield self._removing(chosen, ratio, size)

    def _published(self, method: str, label: str, **knobs: Any) -> Point:
        subject, name = self.subject, "tome" if method == "tome-decreasing" else method
        plan = published(name, knobs, dense=subject.dense, depth=subject.backbone.depth)
        return Point(Key(METHODS[method], label, False), self._model(plan, ()))

    def _removing(self, stages: tuple[int, ...], ratio: float, size: int | None) -> Point:
        """Return the point of `best` that removes a share of the tokens after these blocks."""
        subject = self.subject
        with naming("ratios", "ratio"):
            plan = preset("best", ratio, stages, dense=subject.dense, depth=subject.backbone.depth)
        choices = [self.heads[stage] for stage in stages]
        names = list(dict.fromkeys(choice if isinstance(choice, str) else IMPORTANCE for choice in choices))
        method = "best" if names == [IMPORTANCE] else f"best, {' and '.join(names)}"
        places = f"block{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"
        label = f"{places}, {ratio:g}" + ("" if size is None else f", {size} px")
        model = self._model(replace(plan, size=size), choices)
        return Point(Key(method, label, False), model, tuple(map(_name_of, choices)))

    def _model(self, plan: Plan, choices: Sequence[Choice]) -> PrunedModel:
        return PrunedModel(self.subject.backbone.model, replace(plan, class_row=class_row(self.subject)), choices)

    def _smaller(self) -> list[int]:
        """Return all sizes below that of the pictures, the largest first."""
        patch, short = self.subject.backbone.patch_size, min(self.size)
        return list(range(short - patch, 0, -patch))

    def _sizes(self) -> list[int]:
        """Return the sizes to shrink pictures to: those that were asked for, or some of all that save enough."""
        patch, short = self.subject.backbone.patch_size, min(self.size)
        for size in self.knobs.sizes or ():
            if size % patch or not 0 < size < short:
                raise PullbackError(
                    f"sizes: expected multiples of the patch size {patch} below the {short} pixels of the pictures, "
                    f"got {size}."
                )
        if self.knobs.sizes:
            return list(self.knobs.sizes)
        enough = [size for size in self._smaller() if size**2 >= LEAST_OF_THE_PATCHES * short**2]
        return [
            enough[place] for place in np.linspace(0, len(enough) - 1, min(len(enough), MOST_SIZES)).round().astype(int)
        ]

    def _r(self) -> list[int]:
        """Return the tokens that ToMe merges in each block."""
        for r in self.knobs.r or ():
            if r < 1:
                raise PullbackError(f"r: expected how many tokens each block merges, 1 or more, got {r}.")
        backbone = self.subject.backbone
        patches = TokenLayout(0, (self.size[0] // backbone.patch_size, self.size[1] // backbone.patch_size)).patches
        shares = (max(1, round(share * patches / backbone.depth)) for share in TOME_MERGED)
        return list(dict.fromkeys(self.knobs.r or shares))

    def _stages(self) -> list[tuple[int, ...]]:
        """Return the choices of blocks after which `best` removes tokens: each by itself, and each with the next one
        that is far enough behind it."""
        depth, known = self.subject.backbone.depth, sorted(self.heads)
        for stages in self.knobs.stages or ():
            unknown = [stage for stage in stages if stage not in self.heads]
            if unknown:
                raise PullbackError(
                    f"stages: expected blocks with a score, {', '.join(map(str, known)) or 'of which there are none'}, "
                    f"got {', '.join(map(str, unknown))}. Give one by heads, such as {unknown[0]}=norm."
                )
        behind = {one: [other for other in known if other - one >= depth / APART] for one in known}
        pairs = [(one, others[0]) for one, others in behind.items() if others]
        return list(self.knobs.stages or [*((stage,) for stage in known), *pairs])


def class_row(subject: Subject) -> bool:
    """Whether nothing but the class token is read, so that the last block may compute its row alone."""
    rows, backbone = subject.decoder.rows, subject.backbone
    return rows is not None and bool(backbone.prefix) and rows <= backbone.class_rows


def default_methods(subject: Subject, heads: str | Sequence[tuple[int, str]]) -> tuple[list[str], list[str]]:
    """Return the methods that this model can run, and notes on those that it cannot."""
    methods, notes = list(METHODS), []
    if not subject.backbone.prefix:
        methods.remove("evit")
        notes.append(f"evit is left out: {subject.backbone.name} has no class token.")
    if heads == IMPORTANCE and not shipped_heads(subject.backbone, subject.decoder.name):
        methods.remove("best")
        notes.append(
            f"best is left out: no importance heads for decoder {subject.decoder.name} of {subject.backbone.name} come "
            "with the package. Name some by --heads, or a score such as norm."
        )
    return methods, notes


def scores_by_block(subject: Subject, heads: str | Sequence[tuple[int, str]]) -> dict[int, Choice]:
    """Return the score of `best` after each block.

    ``heads``: "importance", all heads that come with the package; another score's name, for every block; or pairs of a
    block and a score's name or the folder of a head.
    """
    backbone, names = subject.backbone, score_names()
    if heads == IMPORTANCE:
        layers = list(shipped_heads(backbone, subject.decoder.name)) or [backbone.depth // 3]  # whose error says all
        found = shipped_folders(backbone, subject.decoder.name, layers, argument="heads")
        return {layer: load_shipped(folder, backbone) for layer, folder in zip(layers, found, strict=True)}
    if isinstance(heads, str):
        check_former_score("heads", heads)
        if heads not in names:
            raise PullbackError(
                f"heads: expected importance, a score ({', '.join(names)}) or BLOCK=HEAD by commas, such as "
                f"3=heads/L03, got {heads!r}."
            )
        return dict.fromkeys(range(1, backbone.depth - 1), heads)
    identity = subject.decoder.identity(backbone.model)
    chosen: dict[int, Choice] = {}
    for block, name in heads:
        check_former_score("heads", name)
        if name == IMPORTANCE:
            (name,) = map(str, shipped_folders(backbone, subject.decoder.name, [block], argument="heads"))
        chosen[block] = name if name in names else _head(subject, block, name, identity)
    with naming("heads"):
        PrunePlan(tuple(sorted(chosen)), (0.0,) * len(chosen)).check_depth(backbone.depth)
    return chosen


def _head(subject: Subject, block: int, folder: str, identity: str) -> ImportanceHead:
    backbone = subject.backbone
    with naming("heads"):
        head = ImportanceHead.from_pretrained(folder, device=backbone.device).requires_grad_(False)
    decoder = {"decoder": subject.decoder.name, "decoder_identity": identity}
    check_network("heads", head, backbone.family, backbone.dim, block, **decoder)
    check_weights(backbone, [("heads", head)])
    return head


def _name_of(choice: Any) -> str:
    """Return the name of a score, or the hash of a network."""
    if isinstance(choice, str):
        return choice
    network = choice.head if isinstance(choice, HeadScore) else choice
    if isinstance(network, nn.Module):
        return weights_hash(network)[:_DIGITS]
    return next((name for name, entry in SCORES.items() if not entry.needs and resolve(entry.score) is choice), "own")


# Pruned models on disk


def point_on_disk(subject: Subject, name: str, folder: Path, size: tuple[int, int]) -> Point:
    """Return the point of a pruned model that was saved, as one of the method ``name``; an error where it is one of
    other weights, or cannot be read through the decoder."""
    with naming("plan"):
        pruned = _read(subject, folder)
    plan = pruned.plan
    if subject.dense and plan.removes and not plan.comes_back:
        raise PullbackError(
            f"plan: decoder {subject.decoder.name!r} reads all patch tokens, and {folder} does not bring removed ones "
            "back. Prune with dense=True."
        )
    if plan.size is not None and plan.size > min(size):
        raise PullbackError(
            f"plan: {folder} shrinks pictures to {plan.size} pixels, and these have {size[0]}x{size[1]}. Use larger "
            "ones."
        )
    if class_row(subject) and not (plan.removes and plan.comes_back):
        pruned.plan = replace(plan, class_row=True)
    scores = tuple(map(_name_of, pruned.scores))
    networks = getattr(pruned.modes, "networks", {})
    scores += tuple(f"modes {layer}: {_name_of(network)}" for layer, network in networks.items())
    if pruned.tuned is not None:
        scores += (f"vectors: {_name_of(pruned.tuned)}",)
    return Point(Key(name, Path(folder).resolve().name, pruned.tuned is not None), pruned, scores)


def _read(subject: Subject, folder: Path) -> PrunedModel:
    """Read a pruned model; its own copy of the weights must be those of the subject's model, and is not kept where both
    are of one class."""
    backbone = subject.backbone
    if not (folder / MODEL).is_dir():  # of a model that cannot be saved: heads and vectors know their weights
        return PrunedModel.from_pretrained(folder, model=backbone.model, device=backbone.device)
    own = PrunedModel.from_pretrained(folder)
    original = own if own.tuned is None else own.with_vectors(None)
    if not same_weights(block_hashes(original.backbone), backbone):
        raise ModelError(
            f"plan: {folder} was made of other weights than those of {backbone.name}, or of weights in a dtype that "
            "cannot be compared. Compare it on the model that it was made of."
        )
    if type(own.model) is type(backbone.model):
        return PrunedModel.from_pretrained(folder, model=backbone.model, device=backbone.device)
    return own.to(backbone.device).to(backbone.dtype)
