"""Heads that are used on another decoder, or at another layer, than the one that they were trained for.

A row is a head, a column a place: a decoder, probed at a layer. A head reads the features of the column's layer, and
its scores are compared with the exact importance there. Below stand what needs no head: the mean map of other pictures,
and the exact importances of one place taken for those of another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from pullback.evaluation.ranking import spearman
from pullback.experiments.ablations import COUNTS, Variant, range_of, recipes_of
from pullback.experiments.experiment import Cell, Claim, Column, Experiment, Found, Measured, Place, Verdict, overall
from pullback.experiments.scales import Scale, ScaleName
from pullback.experiments.soft_merge import Block, scores_of
from pullback.experiments.workshop import Workshop
from pullback.learning.head import ImportanceHead
from pullback.learning.shipped_heads import load_shipped, shipped_heads


@dataclass(frozen=True)
class Family:
    """A model whose heads are tried on each other's places."""

    title: str
    model: str
    places: tuple[tuple[str, int], ...]  # decoder and layer
    trained: str
    tested: str

    def blocks(self) -> list[Block]:
        return [self.block(decoder, layer) for decoder, layer in self.places]

    def block(self, decoder: str, layer: int) -> Block:
        scales: tuple[ScaleName, ...] = ("tiny", "small", "paper")
        only_small = self.model == "dinov2" and decoder == "depth"
        name = f"{decoder.split('-')[0]} L{layer}"
        return Block(
            name, self.model, decoder, layer, self.trained, self.tested, scales=scales[:2] if only_small else scales
        )


FAMILIES = (
    Family(
        "tiny-scenes", "tiny-scenes", tuple((name, layer) for name in ("cls", "depth-8x8") for layer in (3, 6, 10)),
        "scenes-train", "scenes",
    ),
    Family(
        "DINOv2", "dinov2", (("cls", 4), ("cls", 10), ("depth", 4), ("depth", 10)), "photos-train", "photos",
    ),
)  # fmt: skip
_TESTED: dict[ScaleName, int] = {"tiny": 6, "small": 64, "paper": 200}
TRANSFERRED: dict[ScaleName, dict[str, int]] = {name: {**COUNTS[name], "tested": _TESTED[name]} for name in COUNTS}
"""Heads are trained as in the ablations, and share what lies in the store; all places have the same pictures."""
MEAN_MAP = "mean map, no head"
_Run = Callable[..., Iterable[Measured]]


def transfer_cells(scale: Scale) -> list[Cell]:
    return [cell for family in FAMILIES for cell in _cells_of(family, scale)]


def _cells_of(family: Family, scale: Scale) -> Iterable[Cell]:
    blocks = family.blocks()
    there = [block for block in blocks if block.why_absent(scale) is None]
    rows: list[tuple[str, Block | None, _Run]] = [(f"head of {block.title}", block, _of_head) for block in blocks]
    rows += [(f"exact importance of {block.title}", block, _of_exact) for block in blocks]
    rows.append((MEAN_MAP, None, _of_mean_map))
    for row, own, run in rows:
        for others in (there, [block for block in blocks if block not in there]):
            if not others:
                continue
            counts = TRANSFERRED[scale.name]
            forwards = float(counts["tested"] * len(others))
            if own is not None and run is _of_head and others is there:  # its own importances, and those to learn from
                forwards += own.forwards(counts["tested"] + (0 if _ships(own, scale) else own.images(counts)))
            absent = next((why for block in (own, *others) if block and (why := block.why_absent(scale))), None)
            yield Cell(
                f"{family.title}: {row}" + ("" if others is there else ", elsewhere"),
                tuple(Place(family.title, row, f"on {other.title}") for other in others),
                partial(run, table=family.title, row=row, own=own, others=others),
                family.model, family.tested, (family.trained,), absent=absent, forwards=forwards,
            )  # fmt: skip


def _ships(block: Block, scale: Scale) -> bool:
    """Whether a head comes with the package, as far as an estimate can know: for class tokens of DINOv2-S, and for
    early layers of tiny-scenes."""
    return block.layer < 10 if block.drawn else not block.dense and scale.name != "paper"


def _of_head(shop: Workshop, *, table: str, row: str, own: Block, others: Sequence[Block]) -> Iterable[Measured]:
    """Use a head at the features of each place, and compare its scores with the exact importance there."""
    head, told = _head_of(shop, own)
    for other in others:
        known, pixels = _exact(shop, other)
        rho = spearman(scores_of(head, other.probe(shop), pixels), known)
        yield shop.mean((table, row, f"on {other.title}"), rho, note=told)


def _of_mean_map(
    shop: Workshop, *, table: str, row: str, own: Block | None, others: Sequence[Block]
) -> Iterable[Measured]:
    """Guess the importance of a picture by that of the others, each scaled to a mean of 1."""
    for other in others:
        known, _ = _exact(shop, other)
        maps = known / known.mean(1, keepdim=True)
        guess = (maps.sum(0) - maps) / (len(maps) - 1)
        note = f"of the exact importance of the {len(maps) - 1} other pictures"
        yield shop.mean((table, row, f"on {other.title}"), spearman(guess, known), note=note)


def _of_exact(shop: Workshop, *, table: str, row: str, own: Block, others: Sequence[Block]) -> Iterable[Measured]:
    """Compare exact importances with each other: more of them than they share no head could carry over."""
    mine, _ = _exact(shop, own)
    for other in others:
        yield shop.mean((table, row, f"on {other.title}"), spearman(mine, _exact(shop, other)[0]))


def _exact(shop: Workshop, block: Block) -> tuple[Tensor, Tensor]:
    """Return imp* [n, N] of the held-out pictures, and these."""
    count = shop.count("tested")
    known = shop.targets(block.probe(shop), block.tested, count, size=block.size(shop))["importance"]
    return known, shop.images(block.tested, count, model=block.model, size=block.size(shop))


def _head_of(shop: Workshop, block: Block) -> tuple[ImportanceHead, str]:
    """Return the head that ships for a place, or else a trained one; and what it is."""
    backbone = shop.backbone(block.model)
    folder = shipped_heads(backbone, block.decoder).get(block.layer)
    if folder is not None:
        return load_shipped(folder, backbone), "the head that ships"
    recipe = recipes_of(shop, block, Variant(""))[0]
    return shop.head(block.probe(shop), recipe), f"trained on {recipe.images} images"


def _lost(found: Found, others: str) -> Verdict:
    """Judge whether heads of another decoder at the same layer, or of another layer of the same decoder, are worse at a
    place than its own head, beyond the intervals of both."""
    parts: dict[str, bool | None] = {}
    said = []
    for family in FAMILIES:
        pairs = []
        for there in family.blocks():
            own = found.row(family.title, f"head of {there.title}", f"on {there.title}")
            for other in family.blocks():
                moved = found.row(family.title, f"head of {other.title}", f"on {there.title}")
                kin = (other.layer == there.layer, other.decoder == there.decoder)
                wanted = {"decoder": (True, False), "layer": (False, True)}[others]
                if own is not None and moved is not None and kin == wanted:
                    pairs.append((range_of(own), range_of(moved)))
        parts |= {f"{family.title} {number}": moved[2] < own[1] for number, (own, moved) in enumerate(pairs)}
        if pairs:
            mean = [sum(pair[which][0] for pair in pairs) / len(pairs) for which in (0, 1)]
            worse = sum(moved[2] < own[1] for own, moved in pairs)
            said.append(
                f"{family.title}: ρ {mean[1]:.2f} in place of {mean[0]:.2f} of the place's own heads; worse beyond the "
                f"intervals in {worse} of {len(pairs)} cases"
            )
    return overall(parts, "; ".join(said) or "No head was tried elsewhere.")


HEAD_TRANSFER = Experiment(
    name="head-transfer",
    title="Heads on other decoders and layers",
    paper_label="sec:limitations",
    about=(
        "Spearman's ρ over the tokens of a picture between a head's scores and the exact importance of the decoder and "
        "layer of the column. tiny-scenes' depth is averaged down to 8 × 8 cells."
    ),
    columns=tuple(
        Column(column, "higher")
        for column in dict.fromkeys(f"on {block.title}" for family in FAMILIES for block in family.blocks())
    ),
    cells=transfer_cells,
    counts=TRANSFERRED,
    claims=(
        Claim(
            "A head is for one decoder: each new task needs its own (not tested in the paper).", "sec:limitations",
            partial(_lost, others="decoder"),
        ),
        Claim(
            "A head is for one probe layer (not tested in the paper).", "sec:limitations",
            partial(_lost, others="layer"),
        ),
    ),
)  # fmt: skip
