"""Which patches a decoder depends on, as maps over the picture (appendix "Token Importance Visualizations").

Beside the exact importance imp*: what an importance head says, and the cosine by which ToMe finds tokens redundant. The
paper shows four pictures that it chose; here they are the first four of those held out, and all numbers are also means
over all of these. Prefix tokens have no place in a picture and are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pullback.data.images import to_pictures
from pullback.evaluation.ranking import spearman
from pullback.experiments.experiment import (
    Cell,
    Claim,
    Column,
    Experiment,
    Figure,
    Found,
    Measured,
    Place,
    Verdict,
    overall,
)
from pullback.experiments.scales import DRAWN, Scale, ScaleName
from pullback.experiments.workshop import HeadRecipe, Workshop
from pullback.learning.head import ImportanceHead
from pullback.learning.shipped_heads import load_shipped, shipped_heads
from pullback.probes import ProbeMap
from pullback.pruning.scores import NEVER, ScoreContext, as_score
from pullback.tokens import TokenLayout

EXACT, HEAD, TOME, DEPTH = "Exact importance", "Head", "ToMe, every patch", "Depth, predicted"
TOP = 0.25
"""The share of the patches that are outlined, as in the paper: those that pruning would keep."""
SHOWN = 4
RHO, LOWEST, HIGHEST, SHARED = "ρ", "lowest ρ shown", "highest ρ shown", "top 25 % shared"
TOGETHER, EDGES, DEEP = "neighbours marked too", "top 25 % on depth edges", "ρ with depth itself"
MEASURES = (RHO, SHARED, TOGETHER)
OF_DEPTH = (EDGES, DEEP)
BY_HEAD, BY_TOME, BY_HALF = "ρ, head", "ρ, ToMe", "ρ, ToMe, the half it orders"
SHARED_HEAD, SHARED_TOME = "shared, head", "shared, ToMe"
BY_PICTURE = (BY_HEAD, BY_TOME, BY_HALF, SHARED_HEAD, SHARED_TOME)
LESS = "Head less ToMe"
"""The row of differences on the same pictures."""
SMALL_ONLY = "the depth head that comes with the package is of DINOv2-S"
_RANK = 20
_BATCH = 8

COUNTS: dict[ScaleName, dict[str, int]] = {
    "tiny": {"images": 6, "size": 168, "cells": 8, "train": 16, "steps": 150, "batch": 16, "width": 128},
    "small": {"images": 40, "size": 224, "cells": 6, "train": 320, "steps": 240, "batch": 32, "width": 256},
    "paper": {"images": 200, "size": 224, "cells": 0, "train": 2000, "steps": 3000, "batch": 32, "width": 256},
}
"""``cells``: importance is that of depth averaged over so many rows and columns, 0: of the whole map."""


@dataclass(frozen=True)
class Shown:
    """A decoder at a layer, whose maps are drawn. ``distance``: how its head compares outputs."""

    title: str
    model: str
    decoder: str
    layer: int
    data: str
    trained: str
    distance: str | None = None
    small_only: bool = False

    @property
    def by_picture(self) -> str:
        return f"{self.title}: picture by picture"

    @property
    def dense(self) -> bool:
        return self.decoder == "depth"

    @property
    def measures(self) -> tuple[str, ...]:
        return (*MEASURES, *OF_DEPTH) if self.dense else MEASURES

    @property
    def columns(self) -> tuple[str, ...]:
        return (RHO, LOWEST, HIGHEST, *self.measures[1:])

    def size(self, shop: Workshop) -> int:
        return shop.count("size") if self.data in DRAWN else 224

    def probe(self, shop: Workshop) -> ProbeMap:
        cells = shop.count("cells") if self.dense else 0
        decoder = f"depth-{cells}x{cells}" if cells else self.decoder
        return shop.probe(self.model, decoder, self.layer, distance=self.distance)

    def rank(self, shop: Workshop) -> int:
        """Return the rank of imp*: of few outputs all there is."""
        cells = shop.count("cells") if self.dense else 0
        return min(_RANK, cells * cells or _RANK)

    def head(self, shop: Workshop) -> tuple[ImportanceHead, str]:
        """Return the head that ships for this decoder and layer, or else one trained here; and which it is."""
        probe, backbone = self.probe(shop), shop.backbone(self.model)
        folder = None if self.distance else shipped_heads(backbone, probe.decoder.name).get(self.layer)
        if folder is not None:
            return load_shipped(folder, backbone), "the head that comes with the package"
        count = shop.count("train")
        recipe = HeadRecipe(
            self.trained, count, self.size(shop), steps=shop.count("steps"), batch=shop.count("batch"),
            width=shop.count("width"), rank=self.rank(shop), seed=shop.seed,
        )  # fmt: skip
        return shop.head(probe, recipe), f"a head trained on {count:,} pictures"

    def forwards(self, scale: Scale) -> float:
        counts = COUNTS[scale.name]
        cells = counts["cells"] if self.dense else 0
        products = cells * cells or (130 if self.dense or self.decoder == "saliency" else 384)
        trained = 0 if self.model == "tiny-scenes" else counts["train"]
        size = counts["size"] if self.data in DRAWN else 224
        return 1.0 * products * (counts["images"] + trained) * (11 - self.layer) / 12 * (size / 224) ** 2


_PHOTOS = ("photos", "photos-train")
DEPTH_ANYTHING = Shown("DA V2 depth, L04", "depth-anything", "depth", 4, *_PHOTOS, "log")
DINOV2_DEPTH = Shown("DINOv2-S depth head, L04", "dinov2", "depth", 4, *_PHOTOS, "log", small_only=True)
SALIENCY = Shown("Saliency on DINOv2-S, L04", "saliency", "saliency", 4, *_PHOTOS)
DINOV2_CLS = Shown("DINOv2 CLS, L06", "dinov2", "cls", 6, *_PHOTOS)
TINY_DEPTH = Shown("tiny-scenes depth, L06", "tiny-scenes", "depth", 6, "scenes", "scenes-train")
TINY_CLS = Shown("tiny-scenes CLS, L06", "tiny-scenes", "cls", 6, "scenes", "scenes-train")
SUBJECTS = (DEPTH_ANYTHING, DINOV2_DEPTH, SALIENCY, DINOV2_CLS, TINY_DEPTH, TINY_CLS)
PAPERS, OURS = (DEPTH_ANYTHING,), (DINOV2_DEPTH, TINY_DEPTH)
"""Of depth, which the paper shows."""


def cells(scale: Scale) -> list[Cell]:
    return [
        Cell(
            own.title, tuple(_places(own)), partial(measure, own=own), own.model, own.data, (own.trained,),
            absent=SMALL_ONLY if own.small_only and scale.name == "paper" else None, forwards=own.forwards(scale),
        )
        for own in SUBJECTS
    ]  # fmt: skip


def _places(own: Shown) -> Iterator[Place]:
    for row in (EXACT, HEAD, TOME):
        yield from (Place(own.title, row, column) for column in own.columns)
    yield from (Place(own.title, LESS, column) for column in own.measures)
    for number in range(SHOWN):
        yield from (Place(own.by_picture, picture(number), column) for column in BY_PICTURE)


def picture(number: int) -> str:
    return f"picture {number + 1}"


# Measuring


def measure(shop: Workshop, *, own: Shown) -> Iterator[Measured]:
    """Compare the maps of all pictures, and keep those of the first ones for the figure."""
    maps, said, pictures = maps_of(shop, own)
    found = {row: scores_of(maps, row) for row in (EXACT, HEAD, TOME)}
    for row, scores in found.items():
        note = said if row == HEAD else None
        yield shop.mean((own.title, row, RHO), scores[RHO], note=note)
        shown = scores[RHO][:SHOWN]
        first = f"of the first {len(shown)} pictures"
        yield Measured(own.title, row, LOWEST, float(shown.min()), count=len(shown), note=first)
        yield Measured(own.title, row, HIGHEST, float(shown.max()), count=len(shown), note=first)
        for column in own.measures[1:]:
            yield shop.mean((own.title, row, column), scores[column], note=note)
    half = half_ordered(maps)
    for number in range(SHOWN):
        values = (found[HEAD][RHO], found[TOME][RHO], half, found[HEAD][SHARED], found[TOME][SHARED])
        for column, each in zip(BY_PICTURE, values, strict=True):
            yield Measured(own.by_picture, picture(number), column, float(each[number]), count=1)
    for column in own.measures:
        yield shop.mean((own.title, LESS, column), found[HEAD][column] - found[TOME][column])
    drawn = [name for name in (EXACT, HEAD, TOME, DEPTH) if name in maps]
    rho = [found[name][RHO][:SHOWN] if name in (HEAD, TOME) else torch.full((SHOWN,), torch.nan) for name in drawn]
    shop.keep(
        figure_of(own),
        {
            "pictures": to_pictures(pictures[:SHOWN].float()),
            "names": np.array(drawn),
            "maps": torch.stack([maps[name][:SHOWN].float().cpu() for name in drawn]),
            "rho": torch.stack([values.double().cpu() for values in rho]),
        },
    )


def maps_of(shop: Workshop, own: Shown) -> tuple[dict[str, Tensor], str, Tensor]:
    """Return maps [n, h, w] by name, which head it is, and the pictures in [0, 1]. "half": what ToMe orders, `NEVER`
    where it keeps a patch whatever it shows; "edges": how much the depth jumps, where there is depth."""
    count, size, probe = shop.count("images"), own.size(shop), own.probe(shop)
    available = shop.available(own.data)
    count = min(count, available or count)
    pixels = shop.images(own.data, count, model=own.model, size=size)
    known = shop.targets(probe, own.data, count, size=size, rank=own.rank(shop))
    head, said = own.head(shop)
    whole = shop.probe(own.model, "depth", own.layer) if own.dense else None
    shop.progress.describe(f"{own.title}: maps of {count} pictures")
    parts: list[dict[str, Tensor]] = []
    for number, part in enumerate(pixels.split(_BATCH)):
        rows = slice(number * _BATCH, number * _BATCH + len(part))
        tokens, layout = known["features"][rows], probe.backbone.token_layout(part)
        with torch.no_grad():
            scores = {
                EXACT: known["importance"][rows], HEAD: head(tokens), TOME: redundancy(tokens, layout.prefix),
                "half": _bipartite(probe, tokens, layout),
            }  # fmt: skip
            found = {name: on_grid(values, layout) for name, values in scores.items()}
            if whole is not None:
                depth = whole(whole.features(part, normalized=True)).float()
                found[DEPTH] = F.adaptive_avg_pool2d(depth[:, None], layout.grid)[:, 0]
                found["edges"] = depth_steps(depth, layout.grid)
        parts.append(found)
    maps = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return maps, said, shop.backbone(own.model).pixel_format(size).rgb(pixels)


def on_grid(scores: Tensor, layout: TokenLayout) -> Tensor:
    """Return the scores [B, N] of patches as maps [B, h, w]."""
    return scores[:, layout.prefix :].unflatten(1, layout.grid)


def redundancy(tokens: Tensor, prefix: int) -> Tensor:
    """Return 1 - the highest cosine to another patch [B, N], of all tokens: ToMe's score without its two sets, of which
    it scores only one, so that every patch has a value."""
    unit = F.normalize(tokens.float(), dim=-1)
    cosine = unit @ unit.mT
    cosine[:, :, :prefix] = -1.0
    cosine.diagonal(dim1=1, dim2=2).fill_(-1.0)
    return 1 - cosine.amax(-1)


def _bipartite(probe: ProbeMap, tokens: Tensor, layout: TokenLayout) -> Tensor:
    places = torch.arange(tokens.shape[1], device=tokens.device).expand(len(tokens), -1)
    assert isinstance(probe.layer, int)
    context = ScoreContext(probe.backbone, probe.layer, layout, places, torch.ones_like(places), tokens)
    return as_score("bipartite")(tokens, context)


def depth_steps(depth: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return how far the log depth [B, H, W] ranges around each patch [B, h, w]: within windows twice as wide as a
    patch, so that an edge between two patches belongs to both."""
    rows, columns = grid
    side = max(2, 2 * round(depth.shape[1] / rows / 2))  # pixels of a patch, even
    values = depth.clamp_min(1e-3).log()[:, None]
    if values.shape[2:] != (rows * side, columns * side):
        values = F.interpolate(values, (rows * side, columns * side), mode="bilinear")
    highest, lowest = (
        sign * F.max_pool2d(sign * values, 2 * side, side, padding=side // 2)[:, 0] for sign in (1.0, -1.0)
    )
    return highest - lowest


# Scores of maps


def scores_of(maps: Mapping[str, Tensor], row: str) -> dict[str, Tensor]:
    """Return for each picture [n] how a map agrees with the exact one, with edges of depth and with its neighbours."""
    own, exact = maps[row], maps[EXACT]
    marked = marks(own)
    found = {
        RHO: spearman(own.flatten(1).double(), exact.flatten(1).double()),
        SHARED: _shared(marked, marks(exact)),
        TOGETHER: together(marked),
    }
    if DEPTH in maps:
        found |= {
            EDGES: _shared(marked, marks(maps["edges"])),
            DEEP: spearman(own.flatten(1).double(), maps[DEPTH].flatten(1).double()),
        }
    return found


def marks(values: Tensor) -> Tensor:
    """Return which patches [n, h, w] are among the highest quarter of a map."""
    flat = values.flatten(1)
    order = flat.argsort(dim=1, descending=True, stable=True)[:, : max(1, round(TOP * flat.shape[1]))]
    return torch.zeros_like(flat, dtype=torch.bool).scatter_(1, order, True).view_as(values)


def _shared(marked: Tensor, others: Tensor) -> Tensor:
    """Return which share of the marked patches others mark too."""
    return (marked & others).sum((1, 2)).double() / marked.sum((1, 2))


def together(marked: Tensor) -> Tensor:
    """Return which share of the neighbours, to four sides, of marked patches [n, h, w] is marked."""
    down, right = marked[:, 1:] & marked[:, :-1], marked[:, :, 1:] & marked[:, :, :-1]
    both = 2 * (down.sum((1, 2)) + right.sum((1, 2))).double()
    sides = F.conv2d(torch.ones_like(marked[:, None], dtype=torch.float64), _CROSS.to(marked.device), padding=1)[:, 0]
    return both / (sides * marked).sum((1, 2))


_CROSS = torch.tensor([[0.0, 1, 0], [1, 0, 1], [0, 1, 0]], dtype=torch.float64)[None, None]


def half_ordered(maps: Mapping[str, Tensor]) -> Tensor:
    """Return rho of ToMe's score with the exact importance, over the patches that it may remove."""
    ordered = maps["half"] < NEVER
    pairs = ((maps["half"][at][keep], maps[EXACT][at][keep]) for at, keep in enumerate(ordered))
    return torch.cat([spearman(score[None].double(), exact[None].double()) for score, exact in pairs])


# Claims


Part = dict[str, bool | None]
CHANCE = TOP
"""What the overlap of two quarters chosen at random is in the mean."""


def judged_on(found: Found, *needed: tuple[str, str]) -> list[Shown]:
    """Return what decides, the paper's own or else ours; what lacks a needed number (row, column) decides nothing."""

    def there(own: Shown) -> bool:
        return all(found.value(own.title, *place) is not None for place in ((HEAD, RHO), *needed))

    return [own for own in PAPERS if there(own)] or [own for own in OURS if there(own)]


def _of_pictures(found: Found, own: Shown, column: str) -> list[float]:
    values = (found.value(own.by_picture, picture(number), column) for number in range(SHOWN))
    return [value for value in values if value is not None]


def _row(found: Found, own: Shown, row: str, column: str) -> Mapping[str, Any]:
    known = found.row(own.title, row, column)
    assert known is not None  # of what decides
    return known


def _said(parts: Sequence[str]) -> str:
    return "; ".join(parts) + "." if parts else "No decoder of depth was measured."


def _listed(values: Iterable[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values).replace("-", "−")


def _spanned(row: Mapping[str, Any]) -> str:
    return "{value:.2f} ({low:.2f} to {high:.2f})".format(**row).replace("-", "−")


def _head_agrees(found: Found) -> Verdict:
    parts: Part = {}
    why = []
    for own in judged_on(found):
        values = _of_pictures(found, own, BY_HEAD)
        parts |= {f"{own.title} {number}": round(value, 2) >= 0.87 for number, value in enumerate(values)}
        why.append(f"{own.title}: ρ {_listed(values)} on the first {len(values)} held-out pictures")
    return overall(parts, _said(why))


def _average_is_low(found: Found) -> Verdict:
    """Judge whether the mean is about 0.2, and below all of the pictures shown, by its interval."""
    parts: Part = {}
    why = []
    for own in judged_on(found, (HEAD, LOWEST)):
        mean, lowest = _row(found, own, HEAD, RHO), _row(found, own, HEAD, LOWEST)["value"]
        parts[f"{own.title}: about 0.2"] = mean["low"] <= 0.3 and mean["high"] >= 0.1
        parts[f"{own.title}: below"] = mean["high"] < lowest
        why.append(f"{own.title}: {_spanned(mean)} over {mean['count']} pictures, the lowest shown {_listed([lowest])}")
    return overall(parts, _said(why))


def _tome_is_unrelated(found: Found) -> Verdict:
    parts: Part = {}
    why = []
    for own in judged_on(found, (TOME, RHO)):
        values = _of_pictures(found, own, BY_TOME)
        parts |= {f"{own.title} {number}": round(abs(value), 2) <= 0.27 for number, value in enumerate(values)}
        mean = _row(found, own, TOME, RHO)
        why.append(f"{own.title}: ρ {_listed(values)}; over {mean['count']} pictures {_spanned(mean)}")
    return overall(parts, _said(why))


def _on_edges(found: Found) -> Verdict:
    """Judge against chance, and against ToMe on the same pictures."""
    parts: Part = {}
    why = []
    for own in judged_on(found, *((row, column) for row in (HEAD, TOME, EXACT) for column in (EDGES, DEEP))):
        rows = {row: _row(found, own, row, EDGES) for row in (HEAD, TOME, EXACT)}
        less = found.row(own.title, LESS, EDGES)
        parts[f"{own.title}: more than chance"] = rows[HEAD]["low"] > CHANCE
        parts[f"{own.title}: more than ToMe"] = None if less is None else less["low"] > 0
        told = ", ".join(f"{row} {_spanned(value)}" for row, value in rows.items())
        deep = ", ".join(f"{row} {_spanned(_row(found, own, row, DEEP))}" for row in rows)
        why.append(
            f"{own.title}: on the quarter of patches with the largest steps lies so much of the highest quarter, by "
            f"chance {CHANCE:g}: {told}; ρ with depth itself: {deep}"
        )
    return overall(parts, _said(why))


def _scattered(found: Found) -> Verdict:
    """Judge whether the patches that the head marks have more marked neighbours than those of ToMe."""
    parts: Part = {}
    why = []
    for own in judged_on(found, *((row, TOGETHER) for row in (HEAD, TOME, EXACT))):
        less = found.row(own.title, LESS, TOGETHER)
        parts[own.title] = None if less is None else less["low"] > 0
        told = ", ".join(f"{row} {_spanned(_row(found, own, row, TOGETHER))}" for row in (HEAD, TOME, EXACT))
        why.append(f"{own.title}: share of the neighbours of marked patches that are marked too: {told}")
    return overall(parts, _said(why))


def _chosen_note(found: Found) -> str | None:
    told = []
    for own in judged_on(found):
        values, mean = _of_pictures(found, own, BY_HEAD), _row(found, own, HEAD, RHO)
        if not values:
            continue
        ends = " to ".join(_listed([end]) for end in (min(values), max(values)))
        told.append(f"{ends} beside {_spanned(mean)} ({own.title})")
    if not told:
        return None
    return (
        "The paper's four pictures reach ρ 0.87 to 0.95 with a head whose average is 0.20, so they are not typical of "
        f"it, as it says. The first {SHOWN} held-out pictures here, which nobody chose, have {'; '.join(told)} over "
        "all pictures."
    )


def _half_note(found: Found) -> str | None:
    told = [
        f"{_listed(_of_pictures(found, own, BY_HALF))} ({own.title})"
        for own in judged_on(found)
        if _of_pictures(found, own, BY_HALF)
    ]
    if not told:
        return None
    return (
        "ToMe scores only every other patch, those that it may remove. The maps and ρ of ToMe are of the same cosine "
        "between all patches; over the half that ToMe itself orders, ρ of the pictures shown is "
        f"{'; '.join(told)}."
    )


def figure_of(own: Shown) -> str:
    return f"maps-{SUBJECTS.index(own)}"


_CELLS = ", ".join(
    f"{side} × {side} at the scale {scale}" if (side := counts["cells"]) else f"of the whole map at the scale {scale}"
    for scale, counts in COUNTS.items()
)

IMPORTANCE_MAPS = Experiment(
    name="importance-maps",
    title="What matters, over the picture",
    paper_label="fig:depth_importance",
    about=(
        "ρ: Spearman's, over the patches of a picture, with the exact importance imp*. Top 25 %: the outlined patches, "
        "which pruning would keep; two quarters chosen at random share 25 %. Depth edges: the quarter of the patches "
        "around which the predicted depth ranges furthest. The importance to depth is that of its mean over cells: "
        f"{_CELLS}. Pictures are the first ones held out."
    ),
    columns=(
        Column(RHO, "higher"), Column(LOWEST, "higher"), Column(HIGHEST, "higher"),
        Column(SHARED, "higher", percent=True), Column(TOGETHER, percent=True),
        Column(EDGES, percent=True), Column(DEEP),
        Column(BY_HEAD, "higher"), Column(BY_TOME, "higher"), Column(BY_HALF, "higher"),
        Column(SHARED_HEAD, "higher", percent=True), Column(SHARED_TOME, "higher", percent=True),
    ),
    cells=cells,
    counts=COUNTS,
    paper={
        Place(DEPTH_ANYTHING.title, HEAD, RHO): 0.20,
        Place(DEPTH_ANYTHING.title, HEAD, LOWEST): 0.87,
        Place(DEPTH_ANYTHING.title, HEAD, HIGHEST): 0.95,
        Place(DEPTH_ANYTHING.title, TOME, LOWEST): -0.14,
        Place(DEPTH_ANYTHING.title, TOME, HIGHEST): 0.27,
    },
    claims=(
        Claim(
            "On the pictures shown the head agrees well with the exact importance: ρ from 0.87 to 0.95.",
            "fig:depth_importance", _head_agrees,
        ),
        Claim(
            "The pictures shown are not typical: the average over held-out ones is about 0.20.",
            "sec:token_importance_visualizations", _average_is_low,
        ),
        Claim(
            "ToMe's score is nearly uncorrelated with the exact importance: ρ from −0.14 to 0.27.",
            "fig:depth_importance", _tome_is_unrelated,
        ),
        Claim(
            "The head's map concentrates on depth discontinuities, and ToMe's does not.",
            "sec:token_importance_visualizations", _on_edges,
        ),
        Claim(
            "ToMe's score picks scattered patches, the head regions.", "sec:token_importance_visualizations",
            _scattered,
        ),
    ),
    figures=tuple(
        Figure(figure_of(own), "maps", own.title, "Outlined: the highest quarter. ρ: with the exact importance.",
               table=own.title)
        for own in SUBJECTS
    ),
    footnotes=(_chosen_note, _half_note),
)  # fmt: skip
