"""The Spectral Pullback Network (`sec:our_algorithm`): what it learns under each supervision, and a head from it.

The paper states one number here (the head's rho) and arguments: naive supervision fails, power iteration does not, and
its cheapest setting reaches the ceiling of exact modes. Measured: every supervision, q, r_0 and alpha, each beside the
best constant subspace, which knows the training pictures and nothing of the picture at hand; then heads distilled from
the network's importance and from the exact one.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

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
from pullback.experiments.merging import COUNTS as MERGING_COUNTS
from pullback.experiments.merging import DINOV2, TINY, Setting, judged_on, probe_of, recipe_of
from pullback.experiments.scales import Scale, ScaleName
from pullback.experiments.spn_training import (
    BASE,
    CONSTANT,
    DIRECTIONS,
    DISTANCES,
    ENERGY,
    GAP,
    LEAD,
    NOISE,
    PATCH_LEAD,
    PATCHES,
    QUICK,
    QUICK_FROM_CONSTANT,
    RANK,
    RHO,
    RHO_PATCHES,
    SHARE,
    SPECTRAL,
    TARGET,
    UNTRAINED,
    V1,
    Ground,
    Variant,
    above,
    below,
    interval,
    learned,
    negated,
    network_of,
    reaches_ceiling,
    row_of,
    said,
    scores,
)
from pullback.experiments.workshop import Workshop
from pullback.learning.train_spn import SpnExamples
from pullback.operators import LowRankMetric
from pullback.targets.recipe import Targets, targets_of

NO_ROUND = Variant("RandNLA, q = 0", "randnla", 0)
TWO_ROUNDS = Variant("RandNLA, q = 2", "randnla", 2)
WIDER = Variant("RandNLA, q = 1, r₀ = 40", "randnla", width=40)
MODES_ALONE = Variant("RandNLA, q = 1, α = 0", "randnla", energy_weight=0.0)
ENERGIES = Variant("RandNLA, q = 1, α = 1", "randnla", energy_weight=1.0)
VARIANTS = (
    CONSTANT, UNTRAINED, DISTANCES, DIRECTIONS, NO_ROUND, QUICK, TWO_ROUNDS, WIDER, MODES_ALONE, ENERGIES, SPECTRAL,
    QUICK_FROM_CONSTANT,
)  # fmt: skip
SETTINGS = (DINOV2, TINY)

MAP, OWN = "Best constant map", f"{QUICK.row}: its importance"
FROM_EXACT, FROM_NETWORK = "Head on imp*", "Head on the network's importance"
_ROUND_OFF = 1e-3
"""Of a share of float32 modes."""
HEADS = (MAP, OWN, FROM_EXACT, FROM_NETWORK)
LESS, SIZE = "ρ less that on imp*", "parameters"

COUNTS: dict[ScaleName, dict[str, int]] = {
    "tiny": {
        "images": 48, "train": 112, "early images": 0, "early train": 0, "steps": 200, "width": 128, "scene size": 56,
        "spn images": 112, "spn steps": 140, "spn batch": 4, "spn width": 128, "spn seeds": 1, "constant pictures": 112,
    },
    "small": {
        **MERGING_COUNTS["small"],
        "spn steps": 400, "spn batch": 8, "spn seeds": 1, "constant pictures": 300,
    },
    "paper": {
        **MERGING_COUNTS["paper"],
        "spn steps": 2000, "spn batch": 16, "spn seeds": 3, "constant pictures": 500,
    },
}  # fmt: skip
"""Names that experiments on class tokens share mean the same, so that the heads are theirs where the numbers agree."""


def heads_table(setting: Setting) -> str:
    return f"{setting.table}: heads"


def columns_of(variant: Variant) -> tuple[str, ...]:
    if variant is CONSTANT:
        return (V1, PATCHES, SHARE)
    compared = (*((GAP,) if variant is not SPECTRAL else ()), *((BASE,) if variant not in (UNTRAINED, QUICK) else ()))
    sketched = (TARGET,) if variant.kind == "randnla" else ()
    return (V1, LEAD, PATCHES, PATCH_LEAD, *compared, *sketched, SHARE, RHO, RHO_PATCHES, ENERGY)


def cells(scale: Scale) -> list[Cell]:
    found, counts = [], COUNTS[scale.name]
    for setting in SETTINGS:
        outputs = 192 if setting.model == "tiny-scenes" else 768
        modes = 3.0 / 12 * outputs  # forward passes of the one block that is left
        for variant in VARIANTS:
            places = tuple(Place(setting.table, variant.row, column) for column in columns_of(variant))
            products = {"directions": RANK, "randnla": RANK * (3 * variant.power_iters + 1)}.get(variant.kind, 1)
            steps = counts["spn steps"] * counts["spn batch"] * counts["spn seeds"]
            forwards = steps * (0.3 + products / 12) if variant.kind not in ("constant", "untrained") else 0.0
            if variant is CONSTANT:
                forwards += (counts["spn images"] + counts["images"]) * (1 + modes)
            found.append(
                Cell(
                    f"{setting.table}: {variant.row}", places, partial(_row, setting, variant), model=setting.model,
                    data=setting.data, needs=(setting.train,), forwards=forwards,
                )
            )  # fmt: skip
        table = heads_table(setting)
        places = tuple(Place(table, row, column) for row in HEADS for column in _head_columns(row))
        found.append(
            Cell(
                table, places, partial(_heads, setting), model=setting.model, data=setting.data, needs=(setting.train,),
                forwards=counts["train"] * (1 + modes) + 0.6 * counts["steps"],
            )
        )  # fmt: skip
    return found


def _head_columns(row: str) -> tuple[str, ...]:
    return (RHO, RHO_PATCHES, *(() if row == FROM_EXACT else (LESS,)), *(() if row == MAP else (SIZE,)))


# Measuring


@lru_cache(maxsize=1)
def ground(shop: Workshop, setting: Setting) -> Ground:
    """Return the class token of a setting with exact modes of all pictures."""
    probe, size = probe_of(shop, setting), setting.size(shop)
    count, judged = shop.count("spn images"), setting.count(shop, "images")
    train = _features(shop, setting, setting.train, count, size)
    known = _modes(shop, train, probe, "training pictures")
    points = _features(shop, setting, setting.data, judged, size)
    truth = _modes(shop, points, probe, "held-out pictures")
    assert known.modes is not None and truth.modes is not None
    examples = SpnExamples(
        lambda rows: points[rows.to(points.device)], truth.modes, truth.singular_values, truth.total.value,
        probe.backbone.prefix,
    )  # fmt: skip
    precision = "tf32" if shop.device.type == "cuda" else "float32"
    return Ground(
        _name(shop, setting), probe, train, known.modes.half(), known.singular_values, examples, precision=precision
    )


def _features(shop: Workshop, setting: Setting, data: str, count: int, size: int | None) -> Tensor:
    pictures = shop.images(data, count, model=setting.model, size=size)
    return torch.cat([probe_of(shop, setting).features(part).as_subclass(Tensor) for part in pictures.split(8)])


def _modes(shop: Workshop, features: Tensor, probe: Any, what: str) -> Targets:
    shop.progress.describe(f"exact modes of {len(features)} {what}")
    return targets_of(probe, features, RANK, "exact", keep_modes=True, batch_size=8)


def _name(shop: Workshop, setting: Setting) -> dict[str, Any]:
    probe = probe_of(shop, setting)
    return {
        **shop.identity(probe), "train": setting.train, "data": setting.data,
        "counts": dict(shop.experiment.counts[shop.scale.name]), "seed": shop.seed,
    }  # fmt: skip


def _known(shop: Workshop, setting: Setting, variant: Variant) -> dict[str, Tensor]:
    return scores(shop, partial(ground, shop, setting), _name(shop, setting), variant)


def _row(setting: Setting, variant: Variant, shop: Workshop) -> Iterable[Measured]:
    return row_of(shop, setting.table, variant, columns_of(variant), partial(_known, shop, setting))


def _heads(setting: Setting, shop: Workshop) -> Iterable[Measured]:
    """Judge heads against imp* of held-out pictures, and what they are judged against: the mean training map."""
    own, probe, recipe = ground(shop, setting), probe_of(shop, setting), recipe_of(shop, setting, shop.seed)
    network = network_of(shop, own, QUICK, shop.seed)
    judge = own.held_out
    everyone = torch.arange(len(judge))
    wanted = LowRankMetric(judge.modes, judge.singular_values.square()).importance()
    exact = shop.head(probe, recipe)
    distilled = shop.head(probe, recipe, ({"network": own.name}, partial(_importance, network)))
    training = LowRankMetric(own.modes.float(), own.values.square()).importance()
    features = judge.features(everyone)
    with torch.no_grad():
        predicted = {
            MAP: (training / training.mean(1, keepdim=True)).mean(0).expand_as(wanted),
            OWN: _importance(network, features),
            FROM_EXACT: torch.cat([exact(part) for part in features.split(8)]),
            FROM_NETWORK: torch.cat([distilled(part) for part in features.split(8)]),
        }
    rho = {row: spearman(values, wanted) for row, values in predicted.items()}
    prefix = judge.prefix
    patches = {row: spearman(values[:, prefix:], wanted[:, prefix:]) for row, values in predicted.items()}
    sizes = {OWN: network, FROM_EXACT: exact, FROM_NETWORK: distilled}
    for row in HEADS:
        values = {RHO: rho[row], RHO_PATCHES: patches[row], LESS: rho[row] - rho[FROM_EXACT]}
        for column in _head_columns(row):
            place = Place(heads_table(setting), row, column)
            if column == SIZE:
                yield Measured(*place, float(sum(p.numel() for p in sizes[row].parameters())))
            else:
                yield shop.mean(place, values[column])


@torch.no_grad()
def _importance(network: torch.nn.Module, features: Tensor) -> Tensor:
    return torch.cat([network(part).importance() for part in features.split(8)])


# What the paper says


def _decides(found: Found) -> str | None:
    return next(iter(judged_on(found, (DINOV2,), (TINY,))), None)


_NOTHING = Verdict("not at this scale", "No network was trained.")


def _naive_fails(found: Found) -> Verdict:
    table = _decides(found)
    if table is None:
        return _NOTHING
    parts = {own.row: below(found, table, own.row, LEAD) for own in (DISTANCES, DIRECTIONS)}
    told = ", ".join(f"“{own.row}” {said(found, table, own.row, V1)}" for own in (DISTANCES, DIRECTIONS))
    beside = ", ".join(f"“{own.row}” {said(found, table, own.row, V1)}" for own in (UNTRAINED, CONSTANT, QUICK))
    return overall(parts, f"{table}, V₁: {told}; beside them {beside}.")


def _power_teaches(found: Found) -> Verdict:
    table = _decides(found)
    if table is None:
        return _NOTHING
    rounds = [interval(found, table, own.row, TARGET) for own in (NO_ROUND, QUICK, TWO_ROUNDS)]
    known = [own for own in rounds if own is not None]
    rising = all(after[1] > before[2] for before, after in pairwise(known)) if len(known) == len(rounds) else None
    random = interval(found, table, UNTRAINED.row, V1)
    parts = {
        "targets align more with each round": rising,
        "ahead of no training": None if random is None else above(found, table, QUICK.row, V1, random[2]),
        "ahead of the constant": above(found, table, QUICK.row, LEAD),
        "on patches as well": above(found, table, QUICK.row, PATCH_LEAD),
    }
    targets = ", ".join(said(found, table, own.row, TARGET) for own in (NO_ROUND, QUICK, TWO_ROUNDS))
    return overall(
        parts,
        f"{table}: V₁ of the targets at q = 0, 1 and 2 {targets}. V₁ of the network taught with q = 1, less that of "
        f"the best constant subspace: {said(found, table, QUICK.row, LEAD, True)}, over patches alone "
        f"{said(found, table, QUICK.row, PATCH_LEAD, True)}; an untrained one has "
        f"{said(found, table, UNTRAINED.row, V1)}.",
    )


def _ceiling(found: Found) -> Verdict:
    table = _decides(found)
    return _NOTHING if table is None else reaches_ceiling(found, table)


def _saturates(found: Found) -> Verdict:
    table = _decides(found)
    if table is None:
        return _NOTHING
    parts: dict[str, bool | None] = {
        f"no more than {NOISE} to gain": below(found, table, TWO_ROUNDS.row, BASE, NOISE),
        "nothing to gain": negated(above(found, table, TWO_ROUNDS.row, BASE)),
    }
    if learned(found, table, QUICK) is False:  # there is nothing to saturate
        parts = {name: None if held is None else False for name, held in parts.items()}
    return overall(
        parts,
        f"{table}, V₁ with q = 2 less q = 1: {said(found, table, TWO_ROUNDS.row, BASE, True)}. Another draw of the "
        f"sketches of q = 1 (r₀ = 40) changes V₁ by {said(found, table, WIDER.row, BASE, True)}.",
    )


def _no_more_than_kappa(found: Found) -> Verdict:
    """Judge whether the subspace of no variant holds more than the leading directions do."""
    table = _decides(found)
    if table is None:
        return _NOTHING
    known = {own.row: interval(found, table, own.row, SHARE) for own in VARIANTS}
    parts = {row: None if share is None else share[2] <= 1 + _ROUND_OFF for row, share in known.items()}
    best = max((share[0], row) for row, share in known.items() if share is not None) if any(known.values()) else None
    told = "No network was measured." if best is None else (
        f"{table}: of κ(20), the ceiling, the best subspace (“{best[1]}”) holds {best[0]:.1%}."
    )  # fmt: skip
    return overall(parts, told)


def _oversampling(found: Found) -> Verdict:
    table = _decides(found)
    if table is None:
        return _NOTHING
    usual = interval(found, table, QUICK.row, TARGET)
    better = None if usual is None else above(found, table, WIDER.row, TARGET, usual[2])
    return overall(
        {"targets": better},
        f"{table}: V₁ of the targets with r₀ = 40 {said(found, table, WIDER.row, TARGET)}, with r₀ = 20 "
        f"{said(found, table, QUICK.row, TARGET)}.",
    )


def _amortised(found: Found) -> Verdict:
    table = _decides(found)
    if table is None:
        return _NOTHING
    parts = {
        "subspace": below(found, table, SPECTRAL.row, V1, 0.95),
        "sensitivity": below(found, table, SPECTRAL.row, SHARE, 1.0),
    }
    return overall(
        parts,
        f"{table}, taught by exact modes: V₁ {said(found, table, SPECTRAL.row, V1)}; the subspace holds "
        f"{said(found, table, SPECTRAL.row, SHARE)} of what the best {RANK} directions hold (q = 1: "
        f"{said(found, table, QUICK.row, SHARE)}).",
    )


def _own_importance(found: Found) -> Verdict:
    table = _decides(found)
    if table is None:
        return _NOTHING
    heads = f"{table}: heads"
    constant = interval(found, heads, MAP, RHO)
    parts = {
        "more than a constant map": None if constant is None else above(found, heads, OWN, RHO, constant[2]),
        "ρ of 0.95": above(found, heads, OWN, RHO, 0.95),
    }
    return overall(
        parts,
        f"{table}: ρ of imp_θ against imp* {said(found, heads, OWN, RHO)}, over patches "
        f"{said(found, heads, OWN, RHO_PATCHES)}; the mean map of the training pictures has "
        f"{said(found, heads, MAP, RHO)} and {said(found, heads, MAP, RHO_PATCHES)}.",
    )


def _head_reaches(found: Found) -> Verdict:
    table = _decides(found)
    if table is None:
        return _NOTHING
    heads = f"{table}: heads"
    held = negated(below(found, heads, FROM_EXACT, RHO, 0.997))
    return overall(
        {"ρ": held},
        f"{table}: ρ {said(found, heads, FROM_EXACT, RHO)}, over patches alone "
        f"{said(found, heads, FROM_EXACT, RHO_PATCHES)}.",
    )


def _either_teacher(found: Found) -> Verdict:
    table = _decides(found)
    if table is None:
        return _NOTHING
    heads = f"{table}: heads"
    parts = {
        "exact targets suffice": below(found, heads, MAP, LESS),
        f"the network within {NOISE}": above(found, heads, FROM_NETWORK, LESS, -NOISE),
    }
    return overall(
        parts,
        f"{table}, ρ against imp*: head on imp* {said(found, heads, FROM_EXACT, RHO)}, head on the network's "
        f"importance {said(found, heads, FROM_NETWORK, RHO)}, a difference of "
        f"{said(found, heads, FROM_NETWORK, LESS, True)}; the best constant map {said(found, heads, MAP, RHO)}.",
    )


def _constant_note(found: Found) -> str | None:
    table = _decides(found)
    if table is None:
        return None
    return (
        "A random network is no baseline for V₁: one constant subspace, which sees the training pictures and nothing "
        f"of the picture at hand, has {said(found, table, CONSTANT.row, V1)} in {table}; a random network has "
        f"{said(found, table, UNTRAINED.row, V1)}."
    )


def _overlap_note(found: Found) -> str | None:
    table = _decides(found)
    if table is None:
        return None
    return (
        "The paper says that a uniform direction overlaps the rank-r subspace “with probability r/ND ≈ 1e-5”. It "
        "overlaps with probability 1; r/ND is the expected share of its squared length, and for r = 20 and ViT-B/14 "
        f"at 224 pixels it is 20/(257·768) = 1.0e-4. A random network's V₁, the same share, is "
        f"{said(found, table, UNTRAINED.row, V1)} in {table}."
    )


def _width_note(found: Found) -> str | None:
    table = _decides(found)
    if table is None or interval(found, table, WIDER.row, TARGET) is None:
        return None
    return (
        "“Leading r columns” of a QR span what a sketch of those r columns spans, with r₀ = r or more: oversampling "
        f"costs products and changes nothing unless a Rayleigh–Ritz step follows. {table}: V₁ of the targets "
        f"{said(found, table, WIDER.row, TARGET)} with r₀ = 40, {said(found, table, QUICK.row, TARGET)} with r₀ = 20."
    )


SPN = Experiment(
    name="spn",
    title="The Spectral Pullback Network and heads from it",
    paper_label="sec:our_algorithm",
    about=(
        "Networks for 20 modes of class tokens after block 10, by what supervises them; the paper's settings are not "
        "stated, here r₀ = 20 and α = 0.1 unless a row says otherwise. V₁: alignment with the exact modes. lead: over "
        "the best constant subspace; to exact: less that of “Spectral”; to q = 1: less that of “RandNLA, q = 1”; all "
        "picture by picture. target V₁: of the sketches that teach. of κ: sensitivity in the predicted subspace over "
        "that in the best one. ρ: of imp_θ against imp*, over tokens. Intervals are over pictures and know nothing of "
        "the draw of sketches: r₀ = 40 teaches by the law of r₀ = 20 with other draws, so its “to q = 1” shows what a "
        "draw changes. All networks have one size and start with the same weights; “from the constant” is ours."
    ),
    columns=(
        Column(V1, "higher"), Column(LEAD, "higher"), Column(PATCHES, "higher"), Column(PATCH_LEAD, "higher"),
        Column(GAP, "higher"), Column(BASE, "higher"), Column(TARGET, "higher"), Column(SHARE, "higher", percent=True),
        Column(RHO, "higher"), Column(RHO_PATCHES, "higher"), Column(ENERGY, "lower"), Column(LESS, "higher"),
        Column(SIZE, "lower"),
    ),
    cells=cells,
    counts=COUNTS,
    paper={
        Place(heads_table(DINOV2), FROM_EXACT, RHO): "0.998 ± 0.001",
        Place(heads_table(DINOV2), FROM_EXACT, SIZE): "≈ 310000",
    },
    claims=(
        Claim(
            "Naive supervision fails: neither distance matching nor random-direction regression finds the subspace.",
            "sec:naive_fails",
            _naive_fails,
        ),
        Claim(
            "Each step of power iteration amplifies the alignment with the task-sensitive subspace, so that a few make "
            "a usable supervision signal.",
            "sec:naive_fails",
            _power_teaches,
        ),
        Claim(
            "The SPN reaches the deterministic supervision ceiling at the cheapest setting, q = 1 (there of VGGT's "
            "depth behind a VAE; here of class tokens).",
            "sec:empirical_validation",
            _ceiling,
        ),
        Claim(
            "The SPN saturates at q = 1: further rounds of power iteration bring nothing (there behind a VAE).",
            "sec:vae_extension",
            _saturates,
        ),
        Claim("Oversampling the sketch, r₀ > r, gives better targets.", "thm:convergence_formal", _oversampling),
        Claim(
            "κ_cap(r) is the ceiling: no restriction to r dimensions retains more of the sensitivity.",
            "inthm:rank_r",
            _no_more_than_kappa,
        ),
        Claim(
            "In practice a single network shared across images does not fit every image exactly.",
            "sec:randnla_training",
            _amortised,
        ),
        Claim("The network's importance imp_θ approaches imp*.", "sec:conformal_head", _own_importance),
        Claim(
            "The head on imp* reaches ρ = 0.998 ± 0.001 on DINOv2 CLS L10.",
            "sec:empirical_validation",
            _head_reaches,
        ),
        Claim(
            "The head is trained from cached exact targets without an SPN, although the SPN can also be used.",
            "sec:conformal_head",
            _either_teacher,
        ),
    ),
    figures=tuple(
        Figure(
            f"subspaces-{number}", "scatter", f"Subspace and sensitivity: {setting.table}", table=setting.table,
            x=PATCHES, y=SHARE,
        )
        for number, setting in enumerate(SETTINGS)
    ),
    footnotes=(_constant_note, _overlap_note, _width_note),
)  # fmt: skip
