"""Are leading directions spread evenly over tokens, and what does a metric of token scores lose by it? (Theorem 2.)

A direction drawn at random in R^(ND) has a CV of 1/sqrt(2D) already. So the CV of converged modes stands beside that of
random directions, and of what Algorithm 2 holds after q rounds, whose q = 0 is a random direction by construction.

The theorem's factored metric is g_F = diag(phi_t) x I_D: to a zeta-delocalized direction it gives at most (1 + zeta)
times what a random one gets, tr(g_F) / (ND). That bounds its agreement with the task metric g = J^T J too,

    <g, g_F> = sum_j sigma_j^2 v_j^T g_F v_j <= tr(g_F) / (ND) sum_j sigma_j^2 (1 + zeta_j)
    |g_F| >= tr(g_F) / sqrt(ND)

so that even the best one misses a share of |g|^2 of at least 1 - (sum_j sigma_j^2 (1 + zeta_j))^2 / (ND |g|^2). Beside
it stands what the best ones do miss, of three classes, each within the next: scores alone, scores times one D x D
metric that tokens share, and a D x D metric of its own for each token. What the last one misses is between tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from pullback.experiments.diagnosis_rows import ONLY_SMALL, dinov2_depth, embedded
from pullback.experiments.experiment import Cell, Claim, Column, Experiment, Found, Measured, Place, Verdict, overall
from pullback.experiments.scales import Scale, ScaleName
from pullback.experiments.subjects import (
    RANK,
    Subject,
    constant,
    deciding_rows,
    dense_jacobian,
    high,
    low,
    places,
    told,
)
from pullback.experiments.taxonomy import CLS_L10, DA_L02, DA_L10, DEPTH, POINTS
from pullback.experiments.workshop import Workshop
from pullback.geometry import coefficient_of_variation, null_cv
from pullback.geometry.regimes import THRESHOLDS
from pullback.geometry.spectrum import as_token_maps
from pullback.operators import DenseOperator, JacobianOperator, LinearOperator
from pullback.probes import INPUTS
from pullback.randnla import Streams, block_krylov, power_iteration
from pullback.randnla.svd import exact_svd

COUNTS: dict[ScaleName, dict[str, int]] = {
    "tiny": {"images": 6, "dense": 6, "size": 112},
    "small": {"images": 20, "dense": 8, "size": 224},
    "paper": {"images": 50, "dense": 20, "size": 224},
}
LARGEST = 2_000
"""Outputs up to which the Jacobian is formed."""
FINE = 1e-4
"""Relative error of the energies of converged modes where the Jacobian is not formed."""
ROUND_OFF = 1e-3
"""By how much float32 modes may be seen beyond the theorem's bound, which some of them reach."""

CLS_L02 = Subject("DINOv2 CLS, L02", "dinov2", "cls", 2, 768)
DA_CELLS = tuple(
    Subject(f"DA V2 depth 16×16, L{layer:02d}", "depth-anything", "depth-16x16", layer, 256) for layer in (5, 10)
)
DA_READ = Subject("DA V2, x_dpt", "depth-anything", "depth", INPUTS, 50_176)
OUR_DENSE = (
    embedded("tiny-scenes depth 8×8, L02", "depth-8x8", 2, 64),
    embedded("tiny-scenes depth 8×8, L10", "depth-8x8", 10, 64),
    dinov2_depth(16, 2), dinov2_depth(16, 10),
)  # fmt: skip
SALIENCY = Subject("saliency, L02", "saliency", "saliency", 2, 16_384)
OUR_CLS = (embedded("tiny-scenes CLS, L02", "cls", 2, 192), embedded("tiny-scenes CLS, L10", "cls", 10, 192))
SUBJECTS = (DA_L02, DA_L10, *DA_CELLS, DA_READ, POINTS, DEPTH, CLS_L02, CLS_L10, *OUR_DENSE, SALIENCY, *OUR_CLS)

SPREAD, FACTORED = "CV", "factored"
ROUNDS = {"q = 0": 0, "q = 1": 1, "q = 2": 2}
CONVERGED, DRAWN, NULL = "converged", "random directions", "1/√(2D)"
SPREAD_COLUMNS = (*ROUNDS, CONVERGED, DRAWN, NULL)
ZETA, ZETA_DRAWN, DEVIATION, SIGNAL, WHOLE = "ζ", "ζ, random", "deviation / ζ", "signal of scores", "signal of J"
FIRST, FIRST_DRAWN = "signal of J, first", "signal of J, random"
"""The paper's gradient signal ratio, sigma_1^2 N D / |J|_F^2, and that of directions drawn at random."""
MUST, SCORES, SHARED, OWN, LOW_RANK = (
    "must lose", "scores lose", "scores × one D×D lose", "D×D per token lose", "rank 20 loses",
)  # fmt: skip
FACTORED_COLUMNS = (ZETA, ZETA_DRAWN, DEVIATION, SIGNAL, WHOLE, FIRST, FIRST_DRAWN, MUST, SCORES, SHARED, OWN, LOW_RANK)


def can_be_formed(subject: Subject) -> bool:
    return subject.outputs <= LARGEST


# What factored metrics lose


def deviations(modes: Tensor) -> Tensor:
    """Return zeta = max_t |N |v_t|^2 - 1| [..., r] of unit modes [..., r, N, D], in float64."""
    energies = torch.linalg.vector_norm(modes, dim=-1, dtype=torch.float64).square()
    return (modes.shape[-2] * energies - 1).abs().amax(-1)


def least_loss(energies: Tensor, zeta: Tensor, inputs: int) -> Tensor:
    """Return the share of |g|^2 that every metric diag(phi_t) x I_D must miss, by the theorem: sigma_j^2 [p], [p]."""
    reached = (energies * (1 + zeta)).sum().square() / (inputs * energies.square().sum())
    return (1 - reached).clamp_min(0)


def losses(matrix: Tensor, tokens: int) -> dict[str, Tensor]:
    """Return the share of |g|^2 that the best metric of each class misses, for g = J^T J of J [M, N D].

    diag(phi_t) x I_D: phi_t = |J_t|^2 / D. diag(s_t) x C: the leading singular triple of the N diagonal blocks of g as
    rows of D^2 numbers; their scalar products are those of positive matrices, so that s >= 0 and C is positive. Any
    block-diagonal metric: the diagonal blocks of g themselves.
    """
    columns = matrix.unflatten(1, (tokens, -1)).transpose(0, 1).double()  # [N, M, D]
    whole = (matrix.double() @ matrix.double().T).square().sum()
    blocks = (columns.mT @ columns).flatten(1)  # [N, D * D]
    products = blocks @ blocks.T
    scores = columns.square().sum((1, 2)).square().sum() / columns.shape[2]
    known = {SCORES: scores, SHARED: torch.linalg.eigvalsh(products)[-1], OWN: products.diagonal().sum()}
    return {name: 1 - value / whole for name, value in known.items()}


def factored(matrix: Tensor, tokens: int, random: Tensor) -> dict[str, Tensor]:
    """Return the numbers of a row of J [M, N D]: those of the theorem, and what factored metrics lose.

    ``random``: directions [r, N, D] drawn at random, for the zeta that they have.
    """
    svd = exact_svd(DenseOperator(matrix), min(matrix.shape))
    energies = svd.singular_values[0].double().square()
    modes = as_token_maps(svd.right, torch.Size((tokens, matrix.shape[1] // tokens)))[0]
    zeta, rank = deviations(modes), min(RANK, len(modes))
    norms = matrix.unflatten(1, (tokens, -1)).double().square().sum((0, 2))
    shares = torch.linalg.vector_norm(modes[:rank], dim=-1, dtype=torch.float64).square()
    ratios = tokens * (shares @ norms) / norms.sum()  # of a leading mode over a random direction, under token scores
    true = energies[:rank] * matrix.shape[1] / energies.sum()
    return {
        ZETA: zeta[:rank].mean(),
        ZETA_DRAWN: deviations(random).mean(),
        DEVIATION: ((ratios - 1).abs() / zeta[:rank]).amax(),
        SIGNAL: ratios.mean(),
        WHOLE: true.mean(),
        FIRST: true[0],
        FIRST_DRAWN: (matrix @ random.flatten(1).to(matrix).T).double().square().sum(0).mean()
        * matrix.shape[1]
        / energies.sum(),
        MUST: least_loss(energies, zeta, matrix.shape[1]),
        LOW_RANK: 1 - energies[:rank].square().sum() / energies.square().sum(),
        **losses(matrix, tokens),
    }


# The cells


def cells(scale: Scale) -> list[Cell]:
    made = []
    for own in SUBJECTS:
        foreign = own.model == "dinov2" and own.decoder != "cls" and scale.name == "paper"
        subject = replace(own, absent=ONLY_SMALL) if foreign else own
        made.append(subject.cell(places_of(own), partial(measure, subject=subject), COUNTS[scale.name]))
    return made


def places_of(subject: Subject) -> tuple[Place, ...]:
    spread = places(SPREAD, subject.row, SPREAD_COLUMNS)
    return (*spread, *places(FACTORED, subject.row, FACTORED_COLUMNS)) if can_be_formed(subject) else spread


def measure(shop: Workshop, *, subject: Subject) -> Iterator[Measured]:
    found = readings(shop, subject)
    for place in places_of(subject):
        if place.column == NULL:
            yield constant(place, float(found[NULL][0]), count=len(found[NULL]))
        else:
            yield shop.mean(place, found[place.column])


def readings(shop: Workshop, subject: Subject) -> dict[str, Tensor]:
    """Return the numbers of each column [pictures], in float64. Each picture lies in the store of the run."""
    total = shop.count(subject.counted)
    found = []
    for picture in range(total):
        key = {"what": "delocalization", **subject.identity(shop), "picture": picture}

        def compute(picture: int = picture) -> dict[str, Tensor]:
            shop.progress.describe(f"{subject.row}: picture {picture + 1} of {total}")
            return {name: value.reshape(1) for name, value in at_one_picture(shop, subject, picture, total).items()}

        found.append(shop.kept(key, compute))
    return {name: torch.cat([part[name] for part in found]).cpu() for name in found[0]}


def at_one_picture(shop: Workshop, subject: Subject, picture: int, total: int) -> dict[str, Tensor]:
    op: LinearOperator
    if can_be_formed(subject):
        op, tokens = dense_jacobian(shop, subject, picture, total)
    else:
        probe = subject.probe(shop)
        features = probe.features(subject.samples(shop, picture, 1, total), normalized=True)
        op, tokens = JacobianOperator(probe, features), features.shape[1]
    rank, shape = min(RANK, op.rows), torch.Size((tokens, op.cols // tokens))

    def streams(first: int) -> Streams:
        return Streams.from_seed(shop.seed + picture, 1, op.device, first)

    def cv(right: Tensor) -> Tensor:
        return coefficient_of_variation(as_token_maps(right, shape))[0]

    random = streams(1).gaussian(op.cols, rank, op.dtype)
    random = random / torch.linalg.vector_norm(random, dim=1, keepdim=True)
    if isinstance(op, DenseOperator):
        known = exact_svd(op, rank, full=False)
        more = factored(op.matrix[0], tokens, as_token_maps(random, shape)[0])
    else:
        known, more = block_krylov(op, rank, rtol=FINE, margin=2, streams=streams(2)), {}
    return {
        **{
            name: cv(power_iteration(op, rank, power_iters=rounds, streams=streams(0)).right)
            for name, rounds in ROUNDS.items()
        },
        CONVERGED: cv(known.right),
        DRAWN: cv(random),
        NULL: torch.tensor(null_cv(shape[1]), dtype=torch.float64),
        **more,
    }


# What the rows say about the claims

NO_DEPTH = "This scale has no depth decoder whose Jacobian can be formed."


def is_spread(found: Found) -> Verdict:
    rows = rows_of(found, SPREAD, (DA_L02, DA_L10), OUR_DENSE)
    parts: dict[str, bool | None] = {}
    for row in rows:
        null = found.columns(SPREAD, row)[NULL]
        parts[row] = high(found, SPREAD, row, CONVERGED) <= THRESHOLDS.null_factor * null
    return overall(parts, cvs_told(found, rows, "This scale has no depth decoder."))


def is_concentrated(found: Found) -> Verdict:
    rows = rows_of(found, SPREAD, (CLS_L10,), OUR_CLS[1:])
    parts: dict[str, bool | None] = {
        row: low(found, SPREAD, row, CONVERGED) >= THRESHOLDS.concentrated_cv for row in rows
    }
    return overall(parts, cvs_told(found, rows, "This scale has no class token."))


def cvs_told(found: Found, rows: Sequence[str], otherwise: str) -> str:
    """Say the CV of converged modes of these rows, and that of chance."""
    values = {row: found.columns(SPREAD, row) for row in rows}
    said = [f"{row}: CV {own[CONVERGED]:.3g}, of random directions {own[NULL]:.2g}" for row, own in values.items()]
    return "; ".join(said) or otherwise


def within_zeta(found: Found) -> Verdict:
    """Judge the theorem's inequality for the metric of block norms, at the leading mode that comes nearest to it."""
    rows = rows_of(found, FACTORED, (*DA_CELLS, POINTS, CLS_L02, CLS_L10), (*OUR_DENSE, *OUR_CLS))
    parts: dict[str, bool | None] = {row: high(found, FACTORED, row, DEVIATION) <= 1 + ROUND_OFF for row in rows}
    columns = {DEVIATION: "{:.2f}", ZETA: "{:.2g}", ZETA_DRAWN: "{:.2g}"}
    return overall(parts, told(found, FACTORED, rows, columns, "This scale has no Jacobian that can be formed."))


def little_signal(found: Found) -> Verdict:
    """Judge depth by what the theorem takes from every metric of scores, and by what the best one misses: over half."""
    rows = rows_of(found, FACTORED, DA_CELLS, OUR_DENSE)
    parts: dict[str, bool | None] = {}
    for row in rows:
        parts[f"{row}, by the theorem"] = low(found, FACTORED, row, MUST) > 0.5
        parts[f"{row}, measured"] = low(found, FACTORED, row, SCORES) > 0.5
    columns = {ZETA: "{:.2g}", MUST: "{:.1%}", SCORES: "{:.2%}", SIGNAL: "{:.3g}", WHOLE: "{:.3g}"}
    return overall(parts, told(found, FACTORED, rows, columns, NO_DEPTH))


def converged_signal(found: Found) -> Verdict:
    """Judge the corollary: the first direction has at least the mean signal of the leading ones, kappa N D / r, and
    random directions have about 1."""
    rows = rows_of(found, FACTORED, (*DA_CELLS, POINTS, CLS_L02, CLS_L10), (*OUR_DENSE, *OUR_CLS))
    parts: dict[str, bool | None] = {}
    for row in rows:
        values = found.columns(FACTORED, row)
        parts[f"{row}, converged"] = values[FIRST] >= values[WHOLE]
        near = low(found, FACTORED, row, FIRST_DRAWN) <= 1.1 and high(found, FACTORED, row, FIRST_DRAWN) >= 0.9
        parts[f"{row}, random"] = near
    columns = {FIRST: "{:.3g}", WHOLE: "{:.3g}", FIRST_DRAWN: "{:.2g}"}
    return overall(parts, told(found, FACTORED, rows, columns, "This scale has no Jacobian that can be formed."))


def cv_predicts(found: Found) -> Verdict:
    """Judge that of two decoders the one with the higher CV loses less to token scores, beyond what pictures differ."""
    rows = rows_of(found, FACTORED, (*DA_CELLS, POINTS, CLS_L02, CLS_L10), (*OUR_DENSE, *OUR_CLS))
    ordered = sorted(rows, key=lambda row: found.columns(SPREAD, row)[CONVERGED])
    parts: dict[str, bool | None] = {}
    for even, uneven in pairwise(ordered):
        for column in (SCORES, OWN):
            less = high(found, FACTORED, uneven, column) < low(found, FACTORED, even, column)
            parts[f"{uneven} after {even}, {column}"] = less
    said = [
        f"{row}: CV {found.value(SPREAD, row, CONVERGED):.3g}, {told(found, FACTORED, [row], _LOST).split(': ', 1)[1]}"
        for row in ordered
    ]
    return overall(parts, "; ".join(said) if len(ordered) > 1 else "This scale has no two such decoders.")


def needs_crossing(found: Found) -> Verdict:
    """Judge that for depth most of the metric lies between tokens, where no metric per token reaches."""
    rows = rows_of(found, FACTORED, DA_CELLS, OUR_DENSE)
    parts: dict[str, bool | None] = {row: low(found, FACTORED, row, OWN) > 0.5 for row in rows}
    return overall(parts, told(found, FACTORED, rows, {OWN: "{:.1%}", LOW_RANK: "{:.2%}"}, NO_DEPTH))


_LOST = {SCORES: "{:.2%}", OWN: "{:.1%}"}


def rows_of(found: Found, table: str, papers: Sequence[Subject], ours: Sequence[Subject]) -> list[str]:
    """Return the rows that decide: complete in a table, and with a CV beside it."""
    return deciding_rows(found, papers, ours, _NEEDED[table])


_NEEDED: dict[str, dict[str, Sequence[str]]] = {
    SPREAD: {SPREAD: SPREAD_COLUMNS},
    FACTORED: {FACTORED: FACTORED_COLUMNS, SPREAD: (CONVERGED,)},
}


# What the paper cannot have right


def never_multiplied(found: Found) -> str | None:
    rows = [own.row for own in SUBJECTS if found.value(SPREAD, own.row, CONVERGED) is not None]
    if not rows:
        return None
    columns = {"q = 0": "{:.3f}", "q = 1": "{:.3g}", CONVERGED: "{:.3g}"}
    return (
        "A CV of 0.026 at D = 768 is that of directions drawn at random, 1/√(2D) = 0.0255, as a sketch has before its "
        "first product with J. One round of power iteration is enough to leave it: "
        f"{told(found, SPREAD, rows, columns)}."
    )


def identity_within_tokens(found: Found) -> str | None:
    rows = [own.row for own in SUBJECTS if found.value(FACTORED, own.row, SCORES) is not None]
    if not rows:
        return None
    return (
        "Theorem 2's metric is a multiple of the identity within each token, so at any CV it also misses which of the "
        "D directions of a token matter. What the best scores miss of |JᵀJ|², and the best D×D metric of its own for "
        "each token, which misses only what is between tokens: "
        f"{told(found, FACTORED, rows, _LOST)}."
    )


DELOCALIZATION = Experiment(
    name="delocalization",
    title="Spread over tokens, and what factored metrics lose",
    paper_label="thm:impossibility_formal",
    about="CV of converged modes beside those of unconverged and random directions, and what metrics per token miss of "
    "|JᵀJ|².",
    columns=(
        *(Column(name) for name in SPREAD_COLUMNS), Column(ZETA), Column(ZETA_DRAWN), Column(DEVIATION), Column(SIGNAL),
        Column(WHOLE), Column(FIRST), Column(FIRST_DRAWN),
        *(Column(name, percent=True) for name in (MUST, SCORES, SHARED, OWN, LOW_RANK)),
    ),
    cells=cells,
    counts=COUNTS,
    paper={
        Place(SPREAD, own.row, "q = 2"): value
        for own, value in (
            (DA_L02, 0.026), (DA_L10, 0.026), (DA_CELLS[0], 1.06), (DA_CELLS[1], 1.26), (DA_READ, 2.381),
            (POINTS, 0.59), (DEPTH, 0.63), (CLS_L02, 0.83), (CLS_L10, 4.06),
        )
    },
    claims=(
        Claim(
            "The leading directions of Depth Anything at one layer are spread evenly over tokens: CV 0.026.",
            "sec:regime_taxonomy", is_spread,
        ),
        Claim(
            "DINOv2's class token has its leading directions on few tokens: CV 4.06 at L10.", "sec:regime_taxonomy",
            is_concentrated,
        ),
        Claim(
            "A factored metric gives a ζ-delocalized direction what it gives a random one, up to a share of ζ.",
            "thm:impossibility", within_zeta,
        ),
        Claim("By Theorem 2 no metric of token scores can represent depth.", "sec:regime_taxonomy", little_signal),
        Claim(
            "The CV predicts whether a metric per token will do: with a higher CV it does better.", "eq:cv", cv_predicts
        ),
        Claim("Depth needs attention across tokens to represent its metric.", "sec:spn", needs_crossing),
        Claim(
            "The gradient signal ratio is at least κ·ND/r at convergence, and about 1 for a random sketch.", "cor:gsr",
            converged_signal,
        ),
    ),
    footnotes=(never_multiplied, identity_within_tokens),
)  # fmt: skip
