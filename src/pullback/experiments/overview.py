"""The task-induced metric at a glance (`fig:overview`): pictures, what matters in them to two decoders, and spectra.

The paper's figure is a drawing. Here it is measured: the sizes of the probe map and how many products its metric takes,
how fast its spectrum falls, which patches matter to the class token and to depth, which patches are near each other
under d_task (`eq:dtask`) and under cosine, and a depth map before and after half of the tokens were removed.

Whether d_task is nearer to the task than cosine is tested and not assumed: a token is replaced by its nearest one, and
what becomes of the decoder's output is compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pullback.backbones import Backbone
from pullback.data.images import to_pictures
from pullback.evaluation.fidelity import degradation
from pullback.evaluation.ranking import spearman
from pullback.experiments.dense_errors import SMALL_ONLY, Pipeline, plan_of
from pullback.experiments.diagnosis_rows import embedded
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
from pullback.experiments.subjects import RANK, Subject, add_spectrum, constant, deciding, diagnosis, places, told
from pullback.experiments.taxonomy import CAMERA, CLS_L10, DA_L02, OUR_CAMERA, OUR_CLS, OUR_DEPTH
from pullback.experiments.workshop import Workshop
from pullback.geometry.spectrum import Spectrum, output_size, spectrum
from pullback.operators import LowRankMetric
from pullback.probes import ProbeMap
from pullback.pruning.rules import Subject as Pruned
from pullback.tokens import Features

COUNTS: dict[ScaleName, dict[str, int]] = {
    "tiny": {"images": 4, "dense": 3, "scenes": 3, "size": 112, "view size": 56, "pictures": 4, "replaced": 16},
    "small": {"images": 8, "dense": 8, "scenes": 4, "size": 224, "view size": 112, "pictures": 12, "replaced": 64},
    "paper": {"images": 8, "dense": 8, "scenes": 4, "size": 224, "view size": 112, "pictures": 12, "replaced": 64},
}
"""Pictures that are diagnosed, and pictures that are shown; of each of these so many tokens are replaced."""
MAP, MAPS, NEAR, WIPED = (
    "the probe map",
    "what matters to two decoders",
    "nearest patches",
    "half of the tokens removed",
)
TOKENS, WIDTH, OUTPUTS, ENTRIES = "N", "D", "M", "entries of g"
PRODUCTS, ALL_PRODUCTS, K20, R90 = "products", "products for all of J", "κ(20)", "r_0.90"
MAP_COLUMNS = (TOKENS, WIDTH, OUTPUTS, ENTRIES, PRODUCTS, ALL_PRODUCTS, K20, R90)
RHO, QUARTERS, BY_LENGTH = "ρ", "shared quarter", "ρ with token length"
BY_TASK, BY_COSINE, BY_CHANCE, LESS = "by d_task", "by cosine", "by chance", "d_task less cosine"
SHARED, APART_TASK, APART_COSINE = "shared of five", "apart, d_task", "apart, cosine"
NEAR_COLUMNS = (BY_TASK, BY_COSINE, BY_CHANCE, LESS, SHARED, APART_TASK, APART_COSINE)
ERROR = "additional SILog × 100"
PIPELINES: dict[str, Pipeline] = {"paper": "paper", "ours": "ours"}

WHOLE_MAP = embedded("tiny-scenes depth, L10", "depth", 10, 12_544)
"""All pixels, as the paper's depth has them: too many outputs to diagnose on a CPU, so that only sizes are given."""
PAPERS = (CLS_L10, DA_L02, CAMERA)
OURS = (OUR_CLS[1], OUR_DEPTH[1], WHOLE_MAP, OUR_DEPTH[3], *OUR_CAMERA)
KINDS = (((CLS_L10,), OURS[:1]), ((DA_L02,), OURS[1:4]), ((CAMERA,), OURS[4:]))
"""Class tokens, depth and cameras: the paper's, and ours that stand in where it was not measured."""
LAYER = 4
"""The paper's block for pruning dense decoders: all pictures are of its tokens."""
NEAREST = 5
_QUARTER = 0.25
_ROUNDS = 2  # of power iteration, the paper's q
_PRODUCTS = 200
_AT_ONCE = 16
_STEPS = {"": 1.0, ", a tenth of the way": 0.1}
"""How far a token is moved towards its nearest one."""


@dataclass(frozen=True)
class Shown:
    """A model with pictures to show. ``cells``: its depth is averaged to so many rows and columns for its Jacobian;
    ``decoders``: by what they are called here; depth is always there."""

    title: str
    model: str
    data: str
    cells: int
    with_class: bool = True
    small_only: bool = False

    @property
    def decoders(self) -> dict[str, str]:
        depth = {"depth": f"depth-{self.cells}x{self.cells}"}
        return {"class token": "cls", **depth} if self.with_class else depth

    def absent(self, scale: Scale) -> str | None:
        return SMALL_ONLY if self.small_only and scale.name == "paper" else None

    def pixels(self, shop: Workshop) -> Tensor:
        size = shop.count("size") if self.data in DRAWN else 224
        return shop.images(self.data, shop.count("pictures"), model=self.model, size=size)


SCENES = Shown("tiny-scenes, scenes", "tiny-scenes", "scenes", 4)
PHOTOS = Shown("DINOv2-S, photographs", "dinov2", "photos", 8, small_only=True)
PHOTOS_DA = Shown("DA V2, photographs", "depth-anything", "photos", 8, with_class=False)
SHOWN = (SCENES, PHOTOS, PHOTOS_DA)


def cells(scale: Scale) -> list[Cell]:
    found = []
    for subject in (*PAPERS, *(one for one in OURS if one is not WHOLE_MAP)):
        own = subject if scale.name != "paper" or subject is not OUR_DEPTH[3] else replace(subject, absent=SMALL_ONLY)
        found.append(own.cell(places(MAP, own.row, MAP_COLUMNS), partial(_map, subject=own), COUNTS[scale.name]))
    sizes = places(MAP, WHOLE_MAP.row, MAP_COLUMNS[:6])
    found.append(Cell(WHOLE_MAP.row, sizes, _map_of_pixels, WHOLE_MAP.model, WHOLE_MAP.data, forwards=3.0 * _PRODUCTS))
    pictures = COUNTS[scale.name]["pictures"]
    for shown in SHOWN:
        about = partial(Cell, model=shown.model, data=shown.data, absent=shown.absent(scale))
        columns = (RHO, QUARTERS, BY_LENGTH) if shown.with_class else (BY_LENGTH,)
        forwards = 3.0 * pictures * (shown.cells**2 + (384 if shown.with_class else 0))
        found.append(about(f"maps, {shown.title}", places(MAPS, shown.title, columns), partial(_maps, shown=shown),
                           forwards=forwards))  # fmt: skip
        rows = [_near_row(shown, name) for name in shown.decoders]
        where = tuple(
            place
            for row in rows
            for step in _STEPS
            for place in places(NEAR, row + step, NEAR_COLUMNS if not step else NEAR_COLUMNS[:4])
        )
        forwards = 4.0 * pictures * COUNTS[scale.name]["replaced"]
        found.append(about(f"nearest, {shown.title}", where, partial(_nearest, shown=shown), forwards=forwards))
        where = tuple(Place(WIPED, _wiped_row(shown, name), ERROR) for name in PIPELINES)
        found.append(about(f"before and after, {shown.title}", where, partial(_wiped, shown=shown),
                           forwards=4.0 * pictures))  # fmt: skip
    return found


def front(scale: Scale) -> Shown:
    """Return whose pictures the figures show: photographs where the scale has them."""
    return [own for own in SHOWN if scale.has(own.model, own.data) and not own.absent(scale)][-1]


def _near_row(shown: Shown, decoder: str) -> str:
    return f"{shown.title}, {decoder}"


def _wiped_row(shown: Shown, pipeline: str) -> str:
    return f"{shown.title}: {pipeline}"


# The probe map


def _map(shop: Workshop, subject: Subject) -> Iterable[Measured]:
    found = diagnosis(shop, subject)
    add_spectrum(shop, subject, found)
    sample = subject.samples(shop, 0, 1, shop.count(subject.counted))
    taken = _by_the_paper(shop, subject, sample, found.rank_limit)
    yield from _sizes(subject, taken, found.outputs)
    yield shop.mean(Place(MAP, subject.row, K20), found.kappa_at(RANK))
    yield shop.mean(Place(MAP, subject.row, R90), found.r90)


def _map_of_pixels(shop: Workshop) -> Iterable[Measured]:
    sample = WHOLE_MAP.samples(shop, 0, 1, 1)
    probe = WHOLE_MAP.probe(shop)
    outputs = output_size(probe, probe.features(sample, normalized=True))
    yield from _sizes(WHOLE_MAP, _by_the_paper(shop, WHOLE_MAP, sample, outputs), outputs)


def _by_the_paper(shop: Workshop, subject: Subject, pictures: Tensor, limit: int) -> Spectrum:
    return spectrum(
        subject.probe(shop), pictures, min(RANK, limit), method="paper", power_iters=_ROUNDS, normalized=True,
        seed=shop.seed,
    )  # fmt: skip


def _sizes(subject: Subject, taken: Spectrum, outputs: int) -> Iterable[Measured]:
    tokens, width = taken.modes.shape[2:]
    products = taken.products
    facts: dict[str, tuple[float, str | None]] = {
        TOKENS: (tokens, None),
        WIDTH: (width, None),
        OUTPUTS: (outputs, None),
        ENTRIES: (float(tokens * width) ** 2, None),
        PRODUCTS: (products.total, f"{products.jvp} JVPs and {products.vjp} VJPs at r = {taken.rank}"),
        ALL_PRODUCTS: (min(outputs, tokens * width), None),
    }
    for column, (value, note) in facts.items():
        yield constant(Place(MAP, subject.row, column), value, note)


# Pictures


def geometry(shop: Workshop, shown: Shown, decoder: str) -> dict[str, Tensor]:
    """Return of every picture the importance [n, N] of its tokens to a decoder, for each patch the nearest others by
    d_task and by cosine, "by d_task" and "by cosine" [n, patches, 5], and "changes" [n, steps, 3]: by how many per cent
    the output changes if a token moves towards its nearest one by d_task, by cosine, or one drawn at random."""
    probe = shop.probe(shown.model, shown.decoders[decoder], LAYER)
    count, replaced = shop.count("pictures"), shop.count("replaced")
    pixels = shown.pixels(shop)

    def compute(number: int) -> dict[str, Tensor]:
        shop.progress.describe(f"{shown.title}, {decoder}: picture {number + 1} of {count}")
        features = probe.features(pixels[number : number + 1], normalized=True)
        prefix = probe.token_layout(features).prefix
        rank = min(RANK, probe(features)[0].numel())
        found = spectrum(probe, pixels[number : number + 1], rank, normalized=True, seed=shop.seed)
        metric = found.metric()
        tokens = features.as_subclass(Tensor)
        by_task = nearest(task_distances(metric, tokens)[0, prefix:, prefix:])
        by_cosine = nearest(cosine_distances(tokens[:, prefix:])[0])
        patches = len(by_task)
        chosen = torch.arange(0, patches, max(1, patches // replaced))[:replaced].to(tokens.device)
        drawn = torch.randint(patches, (len(chosen),), generator=shop.generator("replaced", number)).to(tokens.device)
        partners = torch.stack([by_task[chosen, 0], by_cosine[chosen, 0], drawn])
        return {
            "importance": metric.importance(),
            BY_TASK: by_task[None],
            BY_COSINE: by_cosine[None],
            "changes": torch.stack(
                [changes(probe, features, chosen + prefix, partners + prefix, step) for step in _STEPS.values()]
            )[None],
        }

    found = []
    data = shown.data if shown.data in DRAWN else str(shop.scale.data[shown.data])
    for number in range(count):
        key = {
            "what": "overview", **shop.identity(probe), "data": data, "size": list(pixels.shape[-2:]), "number": number,
            "seed": shop.seed, "replaced": replaced, "nearest": NEAREST,
        }  # fmt: skip
        found.append(shop.kept(key, partial(compute, number)))
    return {name: torch.cat([part[name] for part in found]).cpu() for name in found[0]}


def task_distances(metric: LowRankMetric, tokens: Tensor) -> Tensor:
    """Return d_task(a, b) (`eq:dtask`) of every token from every other [B, N, N]: row a has the metric of token a."""
    factors = metric.token_factors()  # [B, N, r, D]
    own = torch.einsum("bnrd,bnd->bnr", factors, tokens)
    found = [  # token by token, since [N, N, r] is large
        torch.linalg.vector_norm(own[:, a, None] - tokens @ factors[:, a].mT, dim=-1) for a in range(tokens.shape[1])
    ]
    return torch.stack(found, 1)


def cosine_distances(tokens: Tensor) -> Tensor:
    """Return 1 - cos of every token from every other [B, N, N]."""
    unit = F.normalize(tokens, dim=-1)
    return 1 - unit @ unit.mT


def nearest(distances: Tensor, count: int = NEAREST) -> Tensor:
    """Return the nearest others [n, count] of each by distances [n, n], the nearest first and never itself."""
    apart = distances.clone().fill_diagonal_(torch.inf)
    return apart.argsort(dim=1, stable=True)[:, :count]


@torch.no_grad()
def changes(probe: ProbeMap, features: Tensor, chosen: Tensor, partners: Tensor, step: float = 1.0) -> Tensor:
    """Return by how many per cent of its length the output of one picture, features [1, N, D], changes on average if
    a token ``chosen`` [c] moves to its partner, or by a part ``step`` of the way there, for each row of ``partners``
    [m, c]: [m]."""
    point, before = features.as_subclass(Tensor), probe(features).flatten(1)
    layout, held = probe.token_layout(features), getattr(features, "below", {})
    found = []
    for others in partners:
        moved = point.repeat(len(chosen), 1, 1)
        moved[torch.arange(len(chosen), device=chosen.device), chosen] = point[0, chosen].lerp(point[0, others], step)
        for part in moved.split(_AT_ONCE):
            below = {layer: own.expand(len(part), -1, -1) for layer, own in held.items()}
            after = probe(Features.attach(part, layout, below)).flatten(1)
            found.append(torch.linalg.vector_norm(after - before, dim=1))
    apart = torch.cat(found).unflatten(0, partners.shape)
    return 100 * apart.mean(1) / torch.linalg.vector_norm(before)


def _layout(shop: Workshop, shown: Shown) -> tuple[int, tuple[int, int]]:
    """Return how many tokens are no patches, and the grid of those that are."""
    layout = shop.backbone(shown.model).token_layout(shown.pixels(shop))
    return layout.prefix, layout.grid


def _drawn_as(shop: Workshop, shown: Shown) -> Any:
    return to_pictures(shop.backbone(shown.model).pixel_format().rgb(shown.pixels(shop)))


def _lengths(shop: Workshop, shown: Shown) -> Tensor:
    """Return |F_t| of the tokens [n, N]."""
    probe = shop.probe(shown.model, shown.decoders["depth"], LAYER)
    return probe.features(shown.pixels(shop), normalized=True).as_subclass(Tensor).norm(dim=-1).cpu()


def _maps(shop: Workshop, shown: Shown) -> Iterable[Measured]:
    prefix, grid = _layout(shop, shown)
    maps = {name: geometry(shop, shown, name)["importance"][:, prefix:].double() for name in shown.decoders}
    lengths = _lengths(shop, shown)[:, prefix:].double()
    first, *_ = maps.values()
    if shown == front(shop.scale):
        every = {**{f"matters to {name}": own for name, own in maps.items()}, "length of the token": lengths}
        rho = torch.stack([spearman(own, first) for own in every.values()])
        rho[0] = torch.nan
        shop.keep(
            "maps",
            {
                "pictures": _drawn_as(shop, shown), "names": list(every),
                "maps": torch.stack(list(every.values())).unflatten(-1, grid), "rho": rho,
            },
        )  # fmt: skip
    if shown.with_class:
        yield shop.mean((MAPS, shown.title, RHO), spearman(first, maps["depth"]))
        yield shop.mean(
            (MAPS, shown.title, QUARTERS), shared_quarter(first, maps["depth"]), note=f"{_QUARTER:g} by chance"
        )
    yield shop.mean((MAPS, shown.title, BY_LENGTH), spearman(first, lengths), note=f"of {next(iter(maps))}")


def shared_quarter(first: Tensor, second: Tensor) -> Tensor:
    """Return which share of the highest quarter of one [n, patches] is in the highest quarter of the other [n]."""
    count = max(1, round(_QUARTER * first.shape[1]))
    marked = [torch.zeros_like(own).scatter(1, own.topk(count, 1).indices, 1.0) for own in (first, second)]
    return (marked[0] * marked[1]).sum(1) / count


def _nearest(shop: Workshop, shown: Shown) -> Iterable[Measured]:
    _, grid = _layout(shop, shown)
    found = {name: geometry(shop, shown, name) for name in shown.decoders}
    if shown == front(shop.scale):
        near = [own[BY_TASK] for own in found.values()] + [found["depth"][BY_COSINE]]
        shop.keep(
            "neighbours",
            {
                "pictures": _drawn_as(shop, shown), "grid": torch.tensor(grid),
                "names": [f"d_task of {name}" for name in found] + ["cosine"], "nearest": torch.stack(near),
            },
        )  # fmt: skip
    for name, own in found.items():
        row = _near_row(shown, name)
        by_task, by_cosine = own[BY_TASK], own[BY_COSINE]
        for step, moved in zip(_STEPS, own["changes"].double().unbind(1), strict=True):
            task, cosine, chance = moved.unbind(1)
            for column, values in {BY_TASK: task, BY_COSINE: cosine, BY_CHANCE: chance, LESS: task - cosine}.items():
                yield shop.mean(
                    (NEAR, row + step, column), values, note="of the same tokens" if column == LESS else None
                )
        shared = (by_task[..., :, None] == by_cosine[..., None, :]).any(-1).double().mean((1, 2))
        note = f"{NEAREST / (grid[0] * grid[1] - 1):.3f} by chance"
        yield shop.mean((NEAR, row, SHARED), shared, note=note)
        yield shop.mean((NEAR, row, APART_TASK), apart(by_task[..., 0], grid))
        yield shop.mean((NEAR, row, APART_COSINE), apart(by_cosine[..., 0], grid))


def apart(partners: Tensor, grid: Sequence[int]) -> Tensor:
    """Return how many patches the ``partners`` [n, patches] lie from their patches in a grid, on average [n]."""
    own = torch.arange(partners.shape[1])
    rows, columns = partners // grid[1] - own // grid[1], partners % grid[1] - own % grid[1]
    return torch.hypot(rows.double(), columns.double()).mean(1)


def _wiped(shop: Workshop, shown: Shown) -> Iterable[Measured]:
    """Remove half of the tokens after block 4, those of the lowest importance to depth, by the Jacobian."""
    backbone, pixels = shop.backbone(shown.model), shown.pixels(shop)
    assert isinstance(backbone, Backbone)
    pruned = Pruned(backbone, shop.probe(shown.model, "depth", LAYER).decoder, (LAYER,))
    importance = geometry(shop, shown, "depth")["importance"].to(pixels.device)
    before = pruned.full(pixels)
    for name, pipeline in PIPELINES.items():
        model = pruned.pruned(plan_of(pipeline, 0.5, (LAYER,), backbone.depth), [lambda tokens, context: importance])
        after = pruned.output(model, pixels)[0]
        errors = degradation(after, before, depth=True).value
        yield shop.mean((WIPED, _wiped_row(shown, name), ERROR), errors)
        if shown == front(shop.scale):
            said = [f"{ERROR.replace('additional', 'Additional')}: {error:.2f}" for error in errors.tolist()]
            shop.keep(
                f"depth-{name}",
                {"pictures": _drawn_as(shop, shown), "before": before, "after": after, "captions": said},
            )


# What the paper says


def _deciding(found: Found, columns: Sequence[str]) -> list[str]:
    return [own.row for papers, ours in KINDS for own in deciding(found, MAP, papers, ours, columns)]


def cheaper_than_all(found: Found) -> Verdict:
    """Judge whether so many products are fewer than those that give J itself."""
    rows = _deciding(found, (PRODUCTS, ALL_PRODUCTS))
    parts: dict[str, bool | None] = {}
    for row in rows:
        values = found.columns(MAP, row)
        parts[row] = values[PRODUCTS] < values[ALL_PRODUCTS]
    columns = {PRODUCTS: "{:.0f}", ALL_PRODUCTS: "{:.0f}"}
    return overall(parts, told(found, MAP, rows, columns, "No probe map was measured."))


def decays_rapidly(found: Found) -> Verdict:
    """Judge whether 20 directions capture more than half, beyond the noise."""
    rows = _deciding(found, (K20,))
    parts: dict[str, bool | None] = {}
    for row in rows:
        known = found.row(MAP, row, K20)
        assert known is not None
        parts[row] = bool(known["low"] > 0.5)
    return overall(parts, told(found, MAP, rows, {K20: "{:.1%}", R90: "{:.3g}"}, "No probe map was measured."))


def nearer_to_the_task(found: Found) -> Verdict:
    """Judge whether the nearest token by d_task changes the output less than the nearest by cosine, beyond the noise,
    all the way and a tenth of it, on photographs where there are some."""
    rows = [row for row in found.rows(NEAR) if not row.startswith(SCENES.title)] or found.rows(NEAR)
    parts: dict[str, bool | None] = {}
    why = []
    for row in rows:
        less = found.row(NEAR, row, LESS)
        values = found.columns(NEAR, row)
        if less is not None and {BY_TASK, BY_COSINE} <= values.keys():
            parts[row] = bool(less["high"] < 0)
            why.append(
                f"{row} {values[BY_TASK]:.3g} % and {values[BY_COSINE]:.3g} % "
                f"({less['value']:+.2g} [{less['low']:+.2g}, {less['high']:+.2g}])"
            )
    told = f"Moved to its nearest token by d_task and by cosine, a token changes the output: {'; '.join(why)}."
    return overall(parts, told if why else "No pictures were measured.")


def few_outputs(found: Found) -> str | None:
    known = {row: (found.value(MAP, row, PRODUCTS), found.value(MAP, row, ALL_PRODUCTS)) for row in found.rows(MAP)}
    rows = [row for row, (some, every) in known.items() if some is not None and every is not None and some >= every]
    if not rows:
        return None
    return (
        "Where a decoder has few outputs, as many products as it has give J exactly, with no error and for less than "
        "the m + (2q + 1) r of Algorithms 1 and 2 at m = 100, q = 2, r = 20: "
        f"{told(found, MAP, rows, {PRODUCTS: '{:.0f}', ALL_PRODUCTS: '{:.0f}'})}."
    )


_MEASURED_ON = "On photographs where the scale has some, else on procedural scenes."

OVERVIEW = Experiment(
    name="overview",
    title="The task-induced metric at a glance",
    paper_label="fig:overview",
    about=(
        "The paper's drawing, measured. The probe map: N tokens of width D become M outputs, so g has (N D)² entries; "
        "products are those of the paper's Algorithms 1 and 2 (m = 100, r = 20, q = 2). Pictures are seen after block "
        "4, depth averaged to few cells for its Jacobian. Nearest patches: by how many per cent a decoder's output "
        "changes if a token is replaced by the nearest one, or moved a tenth of the way there; how many of the five "
        "nearest are the same by both; and how many patches away the nearest one is."
    ),
    columns=(
        *(Column(name, digits=6) for name in (TOKENS, WIDTH, OUTPUTS)), Column(ENTRIES), Column(PRODUCTS, "lower"),
        Column(ALL_PRODUCTS, digits=6), Column(K20, "higher", percent=True), Column(R90, "lower"),
        Column(RHO), Column(QUARTERS, percent=True), Column(BY_LENGTH),
        *(Column(name, "lower", unit="%") for name in (BY_TASK, BY_COSINE, BY_CHANCE)), Column(LESS, "lower"),
        Column(SHARED, percent=True), Column(APART_TASK), Column(APART_COSINE), Column(ERROR, "lower"),
    ),
    cells=cells,
    counts=COUNTS,
    paper={
        **{Place(MAP, own.row, TOKENS): 257 for own in (CLS_L10, DA_L02)},
        **{Place(MAP, own.row, WIDTH): 768 for own in (CLS_L10, DA_L02)},
        **{Place(MAP, own.row, ENTRIES): "≈ 4 × 10¹⁰" for own in (CLS_L10, DA_L02)},
        **{Place(MAP, own.row, PRODUCTS): "≈ 140 pairs" for own in (CLS_L10, DA_L02)},
        Place(MAP, CLS_L10.row, OUTPUTS): 768,
        Place(MAP, DA_L02.row, OUTPUTS): "≈ 50,000",
        Place(MAP, CAMERA.row, OUTPUTS): 9,
    },
    claims=(
        Claim(
            "The pullback metric is never formed, and accessed only via JVPs and VJPs, at a cost of O(m + rq).",
            "fig:overview",
            cheaper_than_all,
        ),
        Claim(
            "Rapid singular-value decay indicates that a rank-r truncation can capture most of the task sensitivity.",
            "fig:overview",
            decays_rapidly,
        ),
        Claim(
            "d_task measures how far apart two tokens are in the directions that the task is most sensitive to, "
            "whereas cosine weights all directions equally.",
            "eq:dtask",
            nearer_to_the_task,
        ),
    ),
    figures=(
        Figure("maps", "maps", "What matters to the class token, and to depth", _MEASURED_ON),
        Figure("spectrum", "spectrum", "Singular values over the largest one", log=True),
        Figure("neighbours", "neighbours", "The patches nearest to a patch, under d_task and under cosine",
               _MEASURED_ON),
        Figure("depth-paper", "wipe", "Depth with all tokens, and with half of them: the paper's pipeline",
               "The tokens that matter least to depth are removed after block 4, come back as they were, and "
               "Last-Layer Fusion runs the last block on all."),
        Figure("depth-ours", "wipe", "The same with the rule best",
               "The same importance; tokens are merged, and come back moved as far as their partner."),
    ),
    footnotes=(few_outputs,),
)  # fmt: skip
