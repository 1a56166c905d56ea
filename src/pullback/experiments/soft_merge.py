"""The paper's soft merge by an importance head, and what it costs held-out pictures.

The tokens that a head scores lowest are merged into their nearest neighbours under d_task, by the exact modes of the
pictures. These lie in the store, as do the errors of every head: many tables read them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from pullback.backbones import Backbone
from pullback.backbones.block import Block as VitBlock
from pullback.evaluation.fidelity import degradation
from pullback.evaluation.ranking import spearman
from pullback.experiments.experiment import Cell, Measured, Place
from pullback.experiments.scales import Scale, ScaleName
from pullback.experiments.workshop import HeadRecipe, Workshop
from pullback.learning.head import ImportanceHead
from pullback.operators import LowRankMetric
from pullback.probes import ProbeMap
from pullback.pruning.forward import run_pruned
from pullback.pruning.plan import PrunePlan
from pullback.pruning.rules import Subject
from pullback.targets.recipe import targets_of

RATIOS = ("0.05", "0.10", "0.15", "0.20", "0.30", "0.40", "0.50")
_BATCH = 8
_DRAWS = 2000
_KRYLOV = 130  # products, where a Jacobian is too large to be formed
_SCENE = (112 / 224) ** 2  # of the tokens of a usual picture


@dataclass(frozen=True)
class Block:
    """A model with a decoder, probed and pruned after one layer. ``read``: the decoder whose output is judged, where it
    is not the one that importance is taken of."""

    title: str
    model: str
    decoder: str
    layer: int
    trained: str
    tested: str
    read: str = ""
    scales: tuple[ScaleName, ...] = ("tiny", "small", "paper")

    @property
    def drawn(self) -> bool:
        return self.trained.startswith("scenes")

    @property
    def dense(self) -> bool:
        return self.decoder.startswith("depth")

    def count(self, counts: Mapping[str, int], name: str) -> int:
        """Return a count of scenes or of photographs, for a decoder of maps or of class tokens."""
        return counts[f"{'scenes' if self.drawn else 'photos'}: {name}{', dense' if self.dense else ''}"]

    def images(self, counts: Mapping[str, int]) -> int:
        """Return how many pictures a head is trained on, unless that is what varies."""
        return self.count(counts, "trained on")

    def most(self, counts: Mapping[str, int]) -> int:
        """Return how many pictures a head is trained on at most."""
        return self.count(counts, "most")

    def tests(self, counts: Mapping[str, int]) -> int:
        """Return how many held-out pictures there are."""
        return self.count(counts, "tested")

    def size(self, shop: Workshop) -> int | None:
        return shop.count("size of scenes") if self.drawn else None

    def probe(self, shop: Workshop) -> ProbeMap:
        return shop.probe(self.model, self.decoder, self.layer)

    def subject(self, shop: Workshop) -> Subject:
        """Return the model with the decoder whose output is judged."""
        backbone = shop.backbone(self.model)
        assert isinstance(backbone, Backbone)
        decoder = shop.probe(self.model, self.read or self.decoder, self.layer).decoder
        return Subject(backbone, decoder, (self.layer,))

    def why_absent(self, scale: Scale) -> str | None:
        """Say why it cannot be had at a scale, whatever the models there; None if it can."""
        return None if scale.name in self.scales else "the depth head that ships is one of DINOv2-S"

    @property
    def share(self) -> float:
        """The tokens of one of its pictures over those of a usual one."""
        return _SCENE if self.drawn else 1.0

    def forwards(self, images: int) -> float:
        """About how many forward passes of a usual picture the importance of so many pictures takes."""
        outputs = 64 if "x" in self.decoder else _KRYLOV if self.dense else 192 if self.model == "tiny-scenes" else 768
        return 3 * outputs * images * (11 - self.layer) / 12 * self.share

    def cell(self, scale: Scale, key: str, places: Sequence[Place], run: Callable[..., Any], forwards: float) -> Cell:
        return Cell(
            key, tuple(places), run, self.model, self.tested, (self.trained,), absent=self.why_absent(scale),
            forwards=forwards,
        )  # fmt: skip


def counts_of(shop: Workshop) -> Mapping[str, int]:
    return shop.experiment.counts[shop.scale.name]


# What is known of held-out pictures


def known_of(shop: Workshop, block: Block) -> dict[str, Tensor]:
    """Return "importance" and "block-norm" [n, N] of the held-out pictures."""
    parts = held_out(shop, block)
    return {name: torch.cat([known[name] for _, known in parts]) for name in ("importance", "block-norm")}


@lru_cache(maxsize=2)
def held_out(shop: Workshop, block: Block) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Return the held-out pictures in parts, with what is known of each. Held, since reading modes for every head anew
    takes longer than judging it."""
    return [(part, _known(shop, block, first, part)) for first, part in _parts(shop, block)]


def _known(shop: Workshop, block: Block, first: int, pixels: Tensor) -> dict[str, Tensor]:
    """Return what is known of some pictures: "importance", "block-norm" [n, N]; the output of the whole model, "whole"
    [n, ...]; and the scaled modes "modes" [n, r, N, D], in float16 and up to a factor for each picture, which changes
    no nearest neighbour."""

    def compute() -> dict[str, Tensor]:
        probe = block.probe(shop)
        found = targets_of(
            probe, probe.features(pixels), seed=shop.seed + first, keep_modes=True, batch_size=len(pixels)
        )
        assert found.modes is not None
        scaled = LowRankMetric(found.modes, found.singular_values.square()).token_factors().transpose(1, 2)
        return {
            "importance": found.importance,
            "block-norm": found.block_energy.value.clamp_min(0).sqrt(),
            "modes": (scaled / scaled.abs().amax((1, 2, 3), keepdim=True)).half(),
            "whole": block.subject(shop).full(pixels),
        }

    return shop.kept({**_tested_key(shop, block), "first": first, "count": len(pixels)}, compute)


def _tested_key(shop: Workshop, block: Block) -> dict[str, Any]:
    data = shop.scale.data[block.tested]
    return {
        "what": "modes", **shop.identity(block.probe(shop)), "data": [block.tested, data], "size": block.size(shop),
        "seed": shop.seed, "read": block.read,
    }  # fmt: skip


def _parts(shop: Workshop, block: Block) -> list[tuple[int, Tensor]]:
    """Return the held-out pictures in parts, each with the number of its first one."""
    pixels = shop.images(block.tested, block.tests(counts_of(shop)), model=block.model, size=block.size(shop))
    step = _BATCH if block.dense else shop.together(_BATCH)
    return [(number * step, part) for number, part in enumerate(pixels.split(step))]


@torch.no_grad()
def scores_of(head: ImportanceHead, probe: ProbeMap, pixels: Tensor) -> Tensor:
    """Return the scores [n, N] of pictures."""
    return torch.cat([head(probe.features(part).as_subclass(Tensor)).float() for part in pixels.split(_BATCH)])


# What a head does to them


def judged_by(shop: Workshop, block: Block, recipe: HeadRecipe) -> dict[str, Tensor]:
    """Return what a head does to the held-out pictures: "errors" [ratios, n], the degradation by its soft merge; "rho"
    [n] of its scores and imp*, and "own" [n] of its scores and what it was trained for."""
    key = {**_tested_key(shop, block), "what": "pruned", "count": block.tests(counts_of(shop)), "ratios": RATIOS}
    key |= {"head": {**vars(recipe), "data": [recipe.data, shop.scale.data[recipe.data]]}}

    def compute() -> dict[str, Tensor]:
        head, probe = shop.head(block.probe(shop), recipe), block.probe(shop)
        found: dict[str, list[Tensor]] = {"errors": [], "rho": [], "own": []}
        for part, known in held_out(shop, block):
            scores = scores_of(head, probe, part)
            found["errors"].append(degradations(block.subject(shop), head, part, known["modes"], known["whole"]))
            found["rho"].append(spearman(scores, known["importance"].float()))
            found["own"].append(spearman(scores, known[recipe.target].float()))
        return {name: torch.cat(parts, -1) for name, parts in found.items()}

    return shop.kept(key, compute)


@torch.no_grad()
def degradations(subject: Subject, head: ImportanceHead, pixels: Tensor, modes: Tensor, whole: Tensor) -> Tensor:
    """Return what the paper's soft merge by a head costs pictures [n, 3, H, W] with these modes, against the output of
    the whole model: [ratios, n]."""
    backbone, decoder = subject.backbone, subject.decoder
    (layer,) = subject.stages
    resumed, layout = with_memory(backbone, layer), backbone.token_layout(pixels)
    rows = []
    for ratio in RATIOS:
        with subject.arithmetic():
            plan, known = soft_merge(float(ratio), layer, dense=subject.dense), modes.float()
            run = run_pruned(resumed, pixels, plan, [head], layers=decoder.layers, modes=lambda *_, known=known: known)
            output = decoder.output(run.taps, layout, backbone.norm).float()
        rows.append(degradation(output, whole, depth=subject.depth).value)
    return torch.stack(rows)


def soft_merge(ratio: float, layer: int, *, dense: bool) -> PrunePlan:
    """Return the paper's soft merge, preset "paper" of class tokens. Of a dense decoder merged tokens come back as
    copies of what they were merged into, and nothing is fused."""
    return PrunePlan((layer,), (ratio,), match="task", reinsert="copy" if dense else "none")


def with_memory(backbone: Backbone, layer: int) -> Backbone:
    """Return the backbone with blocks up to ``layer`` that remember their last tokens: seven ratios share them."""
    first = [cast(VitBlock, _Remembered(block)) for block in backbone.blocks[: layer + 1]]
    return replace(backbone, blocks=(*first, *backbone.blocks[layer + 1 :]))


class _Remembered:
    """A block that knows what it made of its last tokens."""

    def __init__(self, block: VitBlock) -> None:
        self._block = block
        self._last: tuple[Tensor, Tensor] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._block, name)

    def __call__(self, tokens: Tensor, *others: Any) -> Tensor:
        if self._last is None or not torch.equal(self._last[0], tokens):
            self._last = tokens, self._block(tokens, *others)
        return self._last[1]


# Means over seeds and pictures


def seeds_mean(shop: Workshop, place: tuple[str, str, str], values: Tensor, note: str) -> Measured:
    """Return the mean of values [seeds, images], and its 95 % interval over both."""
    known = _float64(values)
    low, high = np.percentile(_drawn_means(shop, known), [2.5, 97.5])
    spread = known.mean(1).std(ddof=1) if len(known) > 1 else 0.0
    said = f"{note}; ± {spread:.2g} over {len(known)} seeds"
    return Measured(*place, float(known.mean()), float(low), float(high), known.shape[1], "images and seeds", said)


def seeds_change(shop: Workshop, place: tuple[str, str, str], values: Tensor, usual: Tensor, note: str) -> Measured:
    """Return by which share the mean of values [seeds, images] is above that of the usual ones, on the same pictures
    and seeds, and the 95 % interval of that quotient over both."""
    new, old = _float64(values), _float64(usual)
    change = float(new.mean() / old.mean() - 1)
    low, high = np.percentile(_drawn_means(shop, new) / _drawn_means(shop, old) - 1, [2.5, 97.5])
    return Measured(*place, change, float(low), float(high), new.shape[1], "images and seeds", note)


def _drawn_means(shop: Workshop, values: np.ndarray) -> np.ndarray:
    """Return means [draws] of values [seeds, images]: seeds and pictures are drawn with replacement, each on its own,
    always the same ones."""
    seeds, images = values.shape
    rng = np.random.default_rng(shop.seed)
    of_seeds = rng.multinomial(seeds, np.full(seeds, 1 / seeds), _DRAWS) / seeds
    of_images = rng.multinomial(images, np.full(images, 1 / images), _DRAWS) / images
    means: np.ndarray = ((of_seeds @ values) * of_images).sum(1)
    return means


def _float64(values: Tensor) -> np.ndarray:
    known: np.ndarray = values.double().cpu().numpy()
    return known
