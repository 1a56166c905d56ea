"""The Spectral Pullback Network behind a bottleneck (`sec:vae_extension`, `sec:spn_vae_validation`).

The paper compresses what VGGT's depth head reads through an S²-VAE, so that the map z -> phi(G(z)) has no more columns
than the latent, and teaches a network its leading modes. No S²-VAE of VGGT's features is published, so the same is
measured with the bottleneck that ships, of the embedded depth network. Its output is averaged to cells, few enough for
all Jacobians to be formed: exact modes and sketches are then the paper's, without matrix-free products.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from pullback.evaluation.fidelity import depth_errors
from pullback.experiments.diagnosis_rows import COLUMNS as DIAGNOSED
from pullback.experiments.diagnosis_rows import COUNTS as DIAGNOSIS_COUNTS
from pullback.experiments.diagnosis_rows import K20, K50, R90, R_EFF, diagnosed_cells
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
from pullback.experiments.scales import Scale, ScaleName
from pullback.experiments.spn_training import (
    CONSTANT,
    GAP,
    LEAD,
    NOISE,
    QUICK,
    QUICK_FROM_CONSTANT,
    RANK,
    SHARE,
    SPECTRAL,
    SPECTRAL_FROM_CONSTANT,
    TARGET,
    UNTRAINED,
    V1,
    Ground,
    Variant,
    above,
    below,
    interval,
    negated,
    reaches_ceiling,
    row_of,
    said,
    scores,
)
from pullback.experiments.subjects import Subject
from pullback.experiments.taxonomy import DEPTH_READ, POINTS_READ
from pullback.experiments.workshop import Workshop
from pullback.geometry.agreement import agreement
from pullback.learning.train_spn import SpnExamples, read_by_network
from pullback.operators import DenseOperator, JacobianOperator
from pullback.probes import INPUTS, ProbeMap
from pullback.randnla.svd import exact_svd

PAPERS, OURS = "VGGT depth behind the VAE", "tiny-scenes depth behind the VAE"
COMPRESSED, KEPT = "before and after", "what the VAE keeps"
VARIANTS = (CONSTANT, UNTRAINED, QUICK, SPECTRAL, QUICK_FROM_CONSTANT, SPECTRAL_FROM_CONSTANT)
OF_PAPER = {UNTRAINED: 0.005, QUICK: 0.713, SPECTRAL: 0.710}
WITH_VAE = "VGGT depth with the VAE, x_vis"
READ, READ_THROUGH, LATENT = (
    f"tiny-scenes depth, {place}" for place in ("its four layers", "its four layers with the VAE", "the latent z")
)
SPECTRUM = (K20, K50, R_EFF, R90)
DELTA, HELD, RHO = "δ1", "of the best", "ρ of importance"
UNPUBLISHED = "no S²-VAE of VGGT's features is published; `pullback train bottleneck` trains one"
LATENT_SIZE = 32 * 128

COUNTS: dict[ScaleName, dict[str, int]] = {
    "tiny": {
        **DIAGNOSIS_COUNTS["tiny"], "size": 56, "dense": 4, "cells": 8, "quality": 16, "agreement": 4,
        "train": 48, "images": 20, "spn steps": 160, "spn batch": 4, "spn width": 128, "spn seeds": 1,
        "constant pictures": 48,
    },
    "small": {
        **DIAGNOSIS_COUNTS["small"], "cells": 16, "quality": 100, "agreement": 16, "train": 300,
        "spn steps": 400, "spn batch": 8, "spn width": 256, "spn seeds": 1, "constant pictures": 300,
    },
    "paper": {
        **DIAGNOSIS_COUNTS["paper"], "cells": 32, "quality": 200, "agreement": 50, "train": 2000,
        "spn steps": 2000, "spn batch": 16, "spn width": 256, "spn seeds": 3, "constant pictures": 1000,
    },
}  # fmt: skip
"""Scenes to learn from ("train") and to judge by ("images"), and for diagnoses ("dense"). The map is averaged to
"cells" × "cells"."""


def columns_of(variant: Variant) -> tuple[str, ...]:
    if variant is CONSTANT:
        return (V1, SHARE)
    gap = () if variant is SPECTRAL else (GAP,)
    return (V1, LEAD, *gap, *((TARGET,) if variant.kind == "randnla" else ()), SHARE)


def cells(scale: Scale) -> list[Cell]:
    counts = COUNTS[scale.name]
    side = counts["cells"]
    about = partial(Cell, model="tiny-scenes", data="scenes")
    found = [
        Cell(
            PAPERS, tuple(Place(PAPERS, variant.row, V1) for variant in OF_PAPER), model="vggt", data="photos",
            absent=UNPUBLISHED,
        )
    ]  # fmt: skip
    for variant in VARIANTS:
        places = tuple(Place(OURS, variant.row, column) for column in columns_of(variant))
        forwards = 5.0 * (counts["train"] + counts["images"]) * side**2 if variant is CONSTANT else 0.0
        if variant not in (CONSTANT, UNTRAINED):
            forwards = 0.3 * counts["spn steps"] * counts["spn batch"] * counts["spn seeds"]
        run = partial(_row, variant)
        found.append(about(f"{OURS}: {variant.row}", places, run, needs=("scenes-train",), forwards=forwards))
    through = f"depth-{side}x{side}@s2vae"
    subjects = (
        DEPTH_READ,
        Subject(WITH_VAE, "vggt", "depth", INPUTS, 50_176, absent=UNPUBLISHED),
        POINTS_READ,
        Subject(READ, "tiny-scenes", f"depth-{side}x{side}", INPUTS, side**2, "scenes"),
        Subject(READ_THROUGH, "tiny-scenes", through, INPUTS, side**2, "scenes"),
        Subject(LATENT, "tiny-scenes", through, "latent-ambient", side**2, "scenes"),
    )
    found += diagnosed_cells(COMPRESSED, subjects, lambda own: SPECTRUM, scale)
    found += [
        Cell(
            f"{KEPT}: VGGT", (Place(KEPT, "VGGT depth", DELTA),), model="vggt", data="photos", absent=UNPUBLISHED
        ),
        about(
            f"{KEPT}: depth", (Place(KEPT, "tiny-scenes depth", DELTA),), _quality, forwards=6.0 * counts["quality"]
        ),
        about(
            f"{KEPT}: pullback", tuple(Place(KEPT, "tiny-scenes depth", column) for column in (V1, HELD, RHO)),
            _agreement, forwards=6.0 * counts["agreement"] * side**2,
        ),
    ]  # fmt: skip
    return found


# Measuring


def _through(shop: Workshop, place: int | str) -> ProbeMap:
    side = shop.count("cells")
    return shop.probe("tiny-scenes", f"depth-{side}x{side}@s2vae", place)


def _pictures(shop: Workshop, data: str, count: int) -> Tensor:
    return shop.images(data, count, model="tiny-scenes", size=shop.count("size"))


@lru_cache(maxsize=1)
def ground(shop: Workshop) -> Ground:
    """Return z -> phi(G(z)) at z = E(x), with the Jacobians and exact modes of all scenes. Networks read the last layer
    that the depth head reads."""
    probe = _through(shop, "latent-ambient")
    inputs, points, jacobians = _held(shop, probe, "scenes-train", shop.count("train"))
    modes, values = _exact(jacobians, points.shape[1:])
    read, latents, judging = _held(shop, probe, "scenes", shop.count("images"))
    truth, singular = _exact(judging, latents.shape[1:])
    total = judging.double().square().sum((1, 2))
    examples = SpnExamples(
        lambda rows: latents[rows.to(latents.device)], truth, singular, total, prefix=0,
        inputs=lambda rows: read[rows.to(read.device)],
    )  # fmt: skip
    return Ground(_name(shop), probe, inputs, modes, values, examples, points, jacobians, judging, latent=True)


def _held(shop: Workshop, probe: ProbeMap, data: str, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return what networks read [n, N, D], the latents [n, K, d] and J there [n, M, K d]."""
    read = read_by_network(probe)
    inputs, points, jacobians = [], [], []
    for first, part in enumerate(_pictures(shop, data, count).split(8)):
        shop.progress.describe(f"Jacobians of {count} {data}: {8 * first}")
        latents = probe.features(part, normalized=True)
        inputs.append(read.features(part, normalized=True).as_subclass(Tensor))
        points.append(latents.as_subclass(Tensor))
        jacobians.append(JacobianOperator(probe, latents).dense())
    return torch.cat(inputs), torch.cat(points), torch.cat(jacobians)


def _exact(jacobians: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Return the leading modes [n, r, K, d] and singular values [n, r] of J [n, M, K d]."""
    found = [exact_svd(DenseOperator(part), RANK, full=False) for part in jacobians.split(8)]
    modes = torch.cat([one.right for one in found]).mT.unflatten(-1, shape)
    return modes.contiguous(), torch.cat([one.singular_values for one in found])


def _name(shop: Workshop) -> dict[str, Any]:
    counts = dict(shop.experiment.counts[shop.scale.name])
    return {**shop.identity(_through(shop, "latent-ambient")), "counts": counts, "seed": shop.seed}


def _row(variant: Variant, shop: Workshop) -> Iterable[Measured]:
    def known(own: Variant) -> dict[str, Tensor]:
        return scores(shop, partial(ground, shop), _name(shop), own)

    return row_of(shop, OURS, variant, columns_of(variant), known)


def _quality(shop: Workshop) -> Iterable[Measured]:
    """Compare the depth maps with the bottleneck to those without, at full resolution."""
    plain, through = (shop.probe("tiny-scenes", name, INPUTS) for name in ("depth", "depth@s2vae"))
    found = []
    with torch.no_grad():
        for part in _pictures(shop, "scenes", shop.count("quality")).split(8):
            changed, full = (own(own.features(part, normalized=True)).double().flatten(1) for own in (through, plain))
            found.append(depth_errors(changed, full, full > 0, median_scaling=False).delta1)
    yield shop.mean(Place(KEPT, "tiny-scenes depth", DELTA), torch.cat(found))


def _agreement(shop: Workshop) -> Iterable[Measured]:
    side = shop.count("cells")
    plain, through = shop.probe("tiny-scenes", f"depth-{side}x{side}", INPUTS), _through(shop, INPUTS)
    pictures = _pictures(shop, "scenes", shop.count("agreement"))

    def compute() -> dict[str, Tensor]:
        shop.progress.describe("two pullbacks at the same features")
        found = agreement(plain, through, pictures, RANK, normalized=True, seed=shop.seed, with_effective_rank=False)
        return {V1: found.alignment, HELD: found.share_of_best, RHO: found.correlation}

    key = {"what": "agreement", **shop.identity(through), "size": shop.count("size"), "images": len(pictures)}
    for column, values in shop.kept({**key, "seed": shop.seed}, compute).items():
        yield shop.mean(Place(KEPT, "tiny-scenes depth", column), values)


# What the paper says

_NOTHING = Verdict("not at this scale", "No network was trained behind a bottleneck.")


def _table(found: Found) -> str | None:
    """The paper's model where it was measured, else ours."""
    return next((table for table in (PAPERS, OURS) if found.value(table, QUICK.row, V1) is not None), None)


def _ceiling(found: Found) -> Verdict:
    table = _table(found)
    return _NOTHING if table is None else reaches_ceiling(found, table)


def _no_signal(found: Found) -> Verdict:
    table = _table(found)
    if table is None:
        return _NOTHING
    own = interval(found, table, UNTRAINED.row, V1)
    held = None if own is None else own[2] < NOISE
    covered = f"a random subspace covers r/M' = {RANK / LATENT_SIZE:.4f}"
    return overall({"random": held}, f"{table}: V₁ {said(found, table, UNTRAINED.row, V1)}; {covered}.")


def _learns_geometry(found: Found) -> Verdict:
    table = _table(found)
    if table is None:
        return _NOTHING
    parts = {own.row: above(found, table, own.row, LEAD) for own in (QUICK, SPECTRAL)}
    told = ", ".join(f"“{own.row}” {said(found, table, own.row, LEAD, True)}" for own in (QUICK, SPECTRAL))
    ours = ", ".join(f"“{own.row}” {said(found, table, own.row, LEAD, True)}" for own in VARIANTS if own.from_constant)
    return overall(
        parts,
        f"{table}: the best constant subspace, made of the training scenes alone, has V₁ "
        f"{said(found, table, CONSTANT.row, V1)}. Ahead of it by: {told}; of those that start there {ours}.",
    )


def _reaches(found: Found) -> Verdict:
    table = _table(found)
    if table is None:
        return _NOTHING
    parts = {
        own.row: negated(below(found, table, own.row, V1, value)) for own, value in OF_PAPER.items() if value > 0.1
    }
    told = ", ".join(f"“{own.row}” {said(found, table, own.row, V1)}" for own in VARIANTS)
    return overall(parts, f"{table}, V₁: {told}.")


def _resolves(found: Found) -> Verdict:
    table = _table(found)
    if table is None:
        return _NOTHING
    parts = {f"{level} of it": above(found, table, QUICK.row, TARGET, level) for level in (0.8, 0.95)}
    return overall(parts, f"{table}: V₁ of single sketches with q = 1 {said(found, table, QUICK.row, TARGET)}.")


def _compresses(found: Found) -> Verdict:
    pairs = [
        (before, after)
        for before, after in ((DEPTH_READ.row, WITH_VAE), (READ, READ_THROUGH))
        if interval(found, COMPRESSED, before, R_EFF) and interval(found, COMPRESSED, after, R_EFF)
    ]
    if not pairs:
        return Verdict("not at this scale", "No probe was measured with and without a bottleneck.")
    before, after = pairs[0]
    first, last = interval(found, COMPRESSED, before, R_EFF), interval(found, COMPRESSED, after, R_EFF)
    assert first is not None and last is not None
    parts = {
        "falls": last[2] < first[1],
        "to 53 or less": last[1] <= 53 if first[0] > 53 else None,  # else it says nothing
        "about 6 times": first[0] > 4 * last[0],
    }
    return overall(
        parts,
        f"r_eff of {before} {said(found, COMPRESSED, before, R_EFF, digits=1)}, with the VAE "
        f"{said(found, COMPRESSED, after, R_EFF, digits=1)}: {first[0] / last[0]:.2f} times less. "
        f"κ(20) {said(found, COMPRESSED, before, K20)} and {said(found, COMPRESSED, after, K20)}.",
    )


def _keeps_depth(found: Found) -> Verdict:
    row = next((row for row in ("VGGT depth", "tiny-scenes depth") if found.row(KEPT, row, DELTA)), None)
    if row is None:
        return Verdict("not at this scale", "No bottleneck was measured.")
    held = negated(below(found, KEPT, row, DELTA, 0.985))
    return overall({"δ1": held}, f"{row}: δ1 against the depth without a bottleneck {said(found, KEPT, row, DELTA)}.")


def _pullbacks_agree(found: Found) -> Verdict:
    row = "tiny-scenes depth"
    if not found.row(KEPT, row, HELD):
        return Verdict("not at this scale", "No pullback was compared.")
    parts = {
        "subspace": above(found, KEPT, row, V1, 0.5),
        "sensitivity": above(found, KEPT, row, HELD, 0.5),
        "importance": above(found, KEPT, row, RHO, 0.5),
    }
    return overall(
        parts,
        f"{row}, at the decoder's inputs: V₁ of the two leading subspaces {said(found, KEPT, row, V1)}; the compressed "
        f"one holds {said(found, KEPT, row, HELD)} of what the best {RANK} directions hold of the original pullback; "
        f"importances of patches agree with ρ {said(found, KEPT, row, RHO)}.",
    )


def _constant_note(found: Found) -> str | None:
    table = _table(found)
    if table is None or interval(found, table, CONSTANT.row, V1) is None:
        return None
    return (
        "The paper takes the gap from a random network (0.005) to a trained one (0.713) as proof of task geometry "
        "“and not training-set artifacts”. A constant subspace of the training scenes, which knows nothing of the "
        f"scene at hand, has {said(found, table, CONSTANT.row, V1)} in {table}; only what is above that is learned "
        "from features."
    )


SPN_VAE = Experiment(
    name="spn-vae",
    title="The Spectral Pullback Network behind a bottleneck",
    paper_label="tab:spn_vae_variants",
    about=(
        "V₁ of networks that predict 20 modes of z ↦ φ(G(z)) in R^(32×128) from the last layer that the depth head "
        "reads. Ours: the embedded depth network with the S²-VAE that ships, depth averaged to 8×8 cells (tiny), 16×16 "
        "(small) or 32×32 (paper); on tiny pictures of 56 pixels, for which the VAE was not trained. lead: over the "
        "best constant subspace; to exact: less that of “Spectral”, both scene by scene. target V₁: of the sketches "
        "that teach. of κ, of the best: sensitivity in a subspace over that in the best one. “From the constant” is "
        "ours. δ1: depth with the VAE against depth without."
    ),
    columns=(
        Column(V1, "higher"), Column(LEAD, "higher"), Column(GAP, "higher"), Column(TARGET, "higher"),
        Column(SHARE, "higher", percent=True), *(DIAGNOSED[name] for name in SPECTRUM), Column(DELTA, "higher"),
        Column(HELD, "higher", percent=True), Column(RHO, "higher"),
    ),
    cells=cells,
    counts=COUNTS,
    paper={
        **{Place(PAPERS, variant.row, V1): value for variant, value in OF_PAPER.items()},
        Place(COMPRESSED, DEPTH_READ.row, R_EFF): 282,
        Place(COMPRESSED, DEPTH_READ.row, K50): 0.578,
        Place(COMPRESSED, DEPTH_READ.row, R90): "≫ 100",
        Place(COMPRESSED, WITH_VAE, R_EFF): "30 to 53",
        Place(COMPRESSED, WITH_VAE, R90): "≈ 40",
        Place(COMPRESSED, POINTS_READ.row, R_EFF): 212,
        Place(COMPRESSED, POINTS_READ.row, R90): "≫ 100",
        Place(KEPT, "VGGT depth", DELTA): "≈ 0.99",
    },
    claims=(
        Claim(
            "RandNLA at q = 1 matches the supervision ceiling within noise (0.713 and 0.710).",
            "tab:spn_vae_variants",
            _ceiling,
        ),
        Claim("A randomly initialised network has no signal: V₁ = 0.005.", "tab:spn_vae_variants", _no_signal),
        Claim(
            "The gap from random to trained shows that the SPN learns task geometry and not training-set artifacts.",
            "sec:spn_vae_validation",
            _learns_geometry,
        ),
        Claim("Trained networks reach V₁ ≈ 0.71.", "tab:spn_vae_variants", _reaches),
        Claim(
            "A single power-iteration step already resolves the top-r subspace of the compressed Jacobian.",
            "sec:spn_vae_validation",
            _resolves,
        ),
        Claim(
            "Compression moves the spectrum into the tractable regime: r_eff falls from 282 to 30–53, about 6 times.",
            "sec:vae_extension",
            _compresses,
        ),
        Claim("The bottleneck keeps the depth: δ1 ≈ 0.99.", "sec:vae_extension", _keeps_depth),
        Claim(
            "The compressed and the original pullback agree approximately in the task-sensitive directions.",
            "sec:vae_extension",
            _pullbacks_agree,
        ),
    ),
    figures=(Figure("spectrum", "spectrum", "Singular values over the largest one, by probe", log=True),),
    footnotes=(_constant_note,),
)  # fmt: skip
