"""How fast power iteration finds the leading directions, and whether one can tell (Theorem 3, `thm:convergence`).

Misalignment is the theorem's eps = 1 - |V^T V*|_F^2 / r. Where the Jacobian can be formed, the iteration runs in the
coordinates of its right singular vectors: J is diag(sigma) there, a Gaussian start stays Gaussian, and the course
depends on the singular values alone. Where it cannot, it runs on the Jacobian's products, against a Krylov space.

The paper prints errors of 0.2 to 0.8 at q = 0, where Algorithm 2 leaves a random subspace with an error near 1. So its
q is taken to count rounds after a first product with J^T J: q means q + 1 rounds (`geometry.convergence_table`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from pullback.experiments.diagnosis_rows import ONLY_SMALL, dinov2_depth, embedded
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
from pullback.experiments.subjects import RANK, Subject, deciding_rows, exact_spectrum, high, low, places, told
from pullback.experiments.workshop import Workshop
from pullback.operators import DenseOperator, JacobianOperator, LinearOperator
from pullback.randnla import Streams, block_krylov
from pullback.randnla.orthonormal import gram, qr_basis

COUNTS: dict[ScaleName, dict[str, int]] = {
    "tiny": {"images": 12, "dense": 12, "size": 112, "sketches": 8},
    "small": {"images": 20, "dense": 20, "size": 224, "sketches": 8},
    "paper": {"images": 50, "dense": 20, "size": 224, "sketches": 8},
}
WIDE = 30
"""Columns r0 of the twin, whose leading 20 directions are rotated out of all of them."""
PAPER_Q = (0, 1, 2, 5, 15)
MOST_ROUNDS = 41
STABLE = 1e-3
"""Adaptive q: rounds go on until one turns the subspace, 1 - |V_q^T V_{q-1}|^2 / r, by less than this."""
CONVERGED = 0.05
"""A misalignment up to which a subspace counts as found; the paper calls 0.011 enough and 0.254 too much."""
NOTHING = 0.01
"""A share of the leading energy up to which nothing counts as lost, though the subspace be another one."""
LARGEST = 2_000
"""Outputs up to which the Jacobian is formed."""

DPT = Subject("DPT depth, L02", "depth-anything", "depth", 2, 50_176)
DINOV2 = Subject("DINOv2 CLS, L10", "dinov2", "cls", 10, 768)
CLIP = Subject("CLIP CLS, L10", "clip", "cls", 10, 512)
OUR_DENSE = (embedded("tiny-scenes depth 8×8, L02", "depth-8x8", 2, 64), dinov2_depth(16, 2))
OUR_CLS = (embedded("tiny-scenes CLS, L02", "cls", 2, 192), embedded("tiny-scenes CLS, L10", "cls", 10, 192))
SUBJECTS = (DPT, DINOV2, CLIP, *OUR_DENSE, *OUR_CLS)

MISALIGNMENT, RATE, ADAPTIVE = "misalignment", "rate", "adaptive q"
Q_COLUMNS = tuple(str(q) for q in PAPER_Q)
GAP, THEOREM, SHARP, SEEN, CONSTANT, BOUND = "σ₂₁/σ₂₀", "theorem", "sharp", "measured", "C", "bound at q = 2"
CHOSEN, TRUTH, PAIRS, LOST, AT_TWO, LOST_AT_TWO = "q", "error there", "pairs", "κ lost", "error, q = 2", "κ lost, q = 2"
RATE_COLUMNS = (GAP, THEOREM, SHARP, SEEN, CONSTANT, BOUND)
ADAPTIVE_COLUMNS = (CHOSEN, TRUTH, PAIRS, LOST, AT_TWO, LOST_AT_TWO)


def twin(row: str) -> str:
    return f"{row} · {WIDE} columns, Rayleigh–Ritz"


@dataclass(frozen=True)
class Course:
    """Power iteration of B samples after 1, 2, ... rounds, each [B, rounds]: ``sketches`` samples of each picture."""

    misalignment: Tensor
    turned: Tensor  # what each round changed: the misalignment with the round before; 1 for the first
    lost: Tensor  # share of the energy of the true leading directions that those found do not have
    sketches: int = 1

    def on_cpu(self) -> Course:
        return replace(self, misalignment=self.misalignment.cpu(), turned=self.turned.cpu(), lost=self.lost.cpu())

    def chosen(self) -> Tensor:
        """Return the index [B] of the first round that changed less than `STABLE`, or the last one."""
        stable = self.turned < STABLE
        stable[:, -1] = True
        return stable.double().argmax(1)

    def of_pictures(self, values: Tensor) -> Tensor:
        """Return the means over the sketches of each picture: [B] -> [pictures]."""
        return values.double().reshape(-1, self.sketches).mean(1)


def course(op: LinearOperator, reference: Tensor, best: Tensor, width: int, rounds: int, streams: Streams) -> Course:
    """Run power iteration with ``width`` columns beside the true directions [B, n, r], whose energy is ``best`` [B].

    With more columns than r, their leading r directions are taken by Rayleigh-Ritz; with r, as they are.
    """
    rank = reference.shape[-1]
    image = op @ qr_basis(streams.gaussian(op.cols, width, op.dtype))
    before: Tensor | None = None
    misalignment, turned, lost = [], [], []
    for _ in range(rounds):
        columns = qr_basis(op.T @ image)
        image = op @ columns
        leading, seen = columns, image
        if width > rank:
            rotation = torch.linalg.eigh(gram(image, image)).eigenvectors.flip(-1)[..., :rank].to(op.dtype)
            leading, seen = columns @ rotation, image @ rotation
        misalignment.append(misaligned(leading, reference))
        turned.append(torch.ones_like(misalignment[-1]) if before is None else misaligned(leading, before))
        lost.append(1 - seen.double().square().sum((1, 2)) / best)
        before = leading
    return Course(torch.stack(misalignment, 1), torch.stack(turned, 1), torch.stack(lost, 1))


def misaligned(found: Tensor, reference: Tensor) -> Tensor:
    """Return 1 - |V^T V*|_F^2 / r [B] of orthonormal columns [B, n, r]."""
    return (1 - gram(found, reference).square().sum((1, 2)) / reference.shape[-1]).clamp_min(0)


# The cells


def cells(scale: Scale) -> list[Cell]:
    made = []
    for own in SUBJECTS:
        foreign = own.model == "dinov2" and own.decoder != "cls" and scale.name == "paper"
        subject = replace(own, absent=ONLY_SMALL) if foreign else own
        rows = (own.row, twin(own.row))
        wanted = tuple(place for row in rows for place in places(MISALIGNMENT, row, Q_COLUMNS))
        if own.outputs <= LARGEST:
            wanted += places(RATE, own.row, RATE_COLUMNS)
        wanted += tuple(place for row in rows for place in places(ADAPTIVE, row, ADAPTIVE_COLUMNS))
        made.append(subject.cell(wanted, partial(measure, subject=subject), COUNTS[scale.name]))
    return made


def measure(shop: Workshop, *, subject: Subject) -> list[Measured]:
    formed = subject.outputs <= LARGEST
    paths = courses_of_spectra(shop, subject) if formed else courses_of_products(shop, subject)
    measured: list[Measured] = []
    for row, own in zip((subject.row, twin(subject.row)), paths, strict=True):
        for q in PAPER_Q:
            measured.append(shop.mean(Place(MISALIGNMENT, row, str(q)), own.of_pictures(own.misalignment[:, q])))
        if row == subject.row and formed:
            measured += rate(shop, subject, own)
        measured += adaptive(shop, row, own, RANK if row == subject.row else WIDE)
    return measured


def courses_of_spectra(shop: Workshop, subject: Subject) -> tuple[Course, Course]:
    """Return the courses of both forms, of several sketches each, from the singular values of each picture."""
    values = exact_spectrum(shop, subject, shop.count(subject.counted))["singular_values"].to(shop.device)
    sketches = shop.count("sketches")
    each = values.repeat_interleave(sketches, 0)  # all at once: single ones leave a GPU waiting
    op, best = DenseOperator(torch.diag_embed(each)), each[:, :RANK].square().sum(1)
    reference = torch.eye(values.shape[1], RANK, dtype=values.dtype, device=values.device).expand(len(each), -1, -1)
    found = []
    for width in (RANK, WIDE):
        streams = Streams.from_seed(shop.seed + width, len(each), op.device)
        own = course(op, reference, best, width, MOST_ROUNDS, streams)
        found.append(replace(own.on_cpu(), sketches=sketches))
    return found[0], found[1]


def courses_of_products(shop: Workshop, subject: Subject) -> tuple[Course, Course]:
    """Return the courses of both forms of one sketch each, by products with the Jacobian of each picture."""
    total, probe = shop.count(subject.counted), subject.probe(shop)
    found: dict[int, list[Course]] = {RANK: [], WIDE: []}
    for number in range(total):
        features = probe.features(subject.samples(shop, number, 1, total), normalized=True)
        op = JacobianOperator(probe, features)
        streams = Streams.from_seed(shop.seed, 1, op.device, first=number)
        known = block_krylov(op, RANK, rtol=1e-5, margin=2, streams=streams)
        best = known.singular_values.double().square().sum(1)
        for width in found:
            found[width].append(course(op, known.right, best, width, MOST_ROUNDS, streams).on_cpu())
    return joined(found[RANK]), joined(found[WIDE])


def joined(parts: list[Course], sketches: int = 1) -> Course:
    return Course(
        torch.cat([own.misalignment for own in parts]),
        torch.cat([own.turned for own in parts]),
        torch.cat([own.lost for own in parts]),
        sketches,
    )


def rate(shop: Workshop, subject: Subject, own: Course) -> Iterator[Measured]:
    """Measure the decay a round beside the theorem's (sigma_21/sigma_20)^2, and its bound with the constant.

    Both angles and their sines fall like (sigma_21/sigma_20)^(2q), so that eps, of squared sines, has the square of the
    theorem's rate: "sharp".
    """
    known = exact_spectrum(shop, subject, shop.count(subject.counted))
    values, inputs = known["singular_values"], int(known["width"][0]) * known["block_norms"].shape[1]
    ratio = values[:, RANK] / values[:, RANK - 1]
    first, last = PAPER_Q[-2:]
    before, after = (own.of_pictures(own.misalignment[:, q]) for q in (first, last))
    seen = (after / before) ** (1 / (last - first))
    constant = torch.tensor(
        [constant_of(shop.generator("constant", subject.row, number), inputs) for number in range(len(values))]
    )
    columns = {
        GAP: ratio,
        THEOREM: ratio**2,
        SHARP: ratio**4,
        SEEN: seen,
        CONSTANT: constant,
        BOUND: constant * ratio ** (2 * 3),
    }
    for name, found in columns.items():
        yield shop.mean(Place(RATE, subject.row, name), found)


def constant_of(generator: torch.Generator, inputs: int) -> float:
    """Return C = |B|_F^2 / (sigma_min(A)^2 r) of one Gaussian sketch with r columns of ``inputs`` rows.

    A, its part in the leading directions, is drawn; |B|_F^2, a sum of millions of squares, is at its mean.
    """
    drawn = torch.randn(RANK, RANK, dtype=torch.float64, generator=generator)
    return (inputs - RANK) * RANK / float(torch.linalg.svdvals(drawn)[-1]) ** 2 / RANK


def adaptive(shop: Workshop, row: str, own: Course, width: int) -> Iterator[Measured]:
    """Measure what raising q until the subspace is stable chooses, costs and misses."""
    chosen = own.chosen()[:, None]
    columns = {
        CHOSEN: chosen.double()[:, 0],  # rounds - 1
        TRUTH: own.misalignment.gather(1, chosen)[:, 0],
        PAIRS: (chosen.double()[:, 0] + 1) * width,
        LOST: own.lost.gather(1, chosen)[:, 0],
        AT_TWO: own.misalignment[:, 2],
        LOST_AT_TWO: own.lost[:, 2],
    }
    for name, found in columns.items():
        yield shop.mean(Place(ADAPTIVE, row, name), own.of_pictures(found))


# What the rows say about the claims

NOT_FORMED = "This scale has no Jacobian that can be formed."


def geometric(found: Found) -> Verdict:
    """Judge that the error falls at least as fast as the theorem says, and is below its bound at q = 2: an upper bound
    fails where it is exceeded beyond what pictures differ by."""
    wanted = {RATE: RATE_COLUMNS, MISALIGNMENT: Q_COLUMNS}
    rows = deciding_rows(found, (DINOV2, CLIP), (*OUR_DENSE, *OUR_CLS), wanted)
    parts: dict[str, bool | None] = {}
    for row in rows:
        parts[f"{row} falls as fast"] = low(found, RATE, row, SEEN) <= high(found, RATE, row, THEOREM)
        parts[f"{row} is bounded"] = low(found, MISALIGNMENT, row, "2") <= high(found, RATE, row, BOUND)
    columns = {SEEN: "{:.3f}", THEOREM: "{:.3f}", SHARP: "{:.3f}"}
    said = told(found, RATE, rows, columns)
    return overall(parts, f"A round multiplies the error by: {said}." if said else NOT_FORMED)


def two_suffice(found: Found) -> Verdict:
    """Judge that after two steps the subspace is found, and that its energy is."""
    rows = deciding_rows(found, (DPT,), OUR_DENSE, {MISALIGNMENT: Q_COLUMNS, ADAPTIVE: ADAPTIVE_COLUMNS})
    parts: dict[str, bool | None] = {}
    for row in rows:
        parts[f"{row} is found"] = high(found, MISALIGNMENT, row, "2") <= CONVERGED
        parts[f"{row} loses nothing"] = high(found, ADAPTIVE, row, LOST_AT_TWO) <= NOTHING
    columns = {AT_TWO: "{:.3f}", LOST_AT_TWO: "{:.2%}"}
    return overall(parts, told(found, ADAPTIVE, rows, columns, "This scale has no depth decoder."))


def flat_needs_more(found: Found) -> Verdict:
    rows = deciding_rows(found, (DINOV2, CLIP), OUR_CLS, {MISALIGNMENT: Q_COLUMNS})
    parts: dict[str, bool | None] = {}
    for row in rows:
        parts[f"{row}: two are too few"] = low(found, MISALIGNMENT, row, "2") > CONVERGED
        parts[f"{row}: fifteen suffice"] = high(found, MISALIGNMENT, row, "15") <= CONVERGED
    return overall(parts, courses_told(found, rows, "This scale has no class token."))


def flatter_is_slower(found: Found) -> Verdict:
    """Judge the order of errors at q = 2 among rows by the order of their gaps, beyond what pictures differ by."""
    rows = deciding_rows(found, (DINOV2, CLIP), (*OUR_DENSE, *OUR_CLS), {RATE: (GAP,), MISALIGNMENT: ("2",)})
    ordered = sorted(rows, key=lambda row: found.columns(RATE, row)[GAP])
    parts: dict[str, bool | None] = {
        f"{flat} is slower than {steep}": low(found, MISALIGNMENT, flat, "2") > high(found, MISALIGNMENT, steep, "2")
        for steep, flat in pairwise(ordered)
    }
    told_rows = [
        f"{row}: {GAP} {found.columns(RATE, row)[GAP]:.3f}, error {found.value(MISALIGNMENT, row, '2'):.3f}"
        for row in ordered
    ]
    return overall(parts, "; ".join(told_rows) if len(ordered) > 1 else "This scale has no two such decoders.")


def vacuous(found: Found) -> Verdict:
    rows = deciding_rows(found, (DINOV2, CLIP), (*OUR_DENSE, *OUR_CLS), {RATE: (CONSTANT, BOUND)})
    parts: dict[str, bool | None] = {row: low(found, RATE, row, BOUND) > 1 for row in rows}
    said = told(found, RATE, rows, {CONSTANT: "{:.2g}", BOUND: "{:.2g}"})
    return overall(parts, f"Of an error that is at most 1: {said}." if said else NOT_FORMED)


def reaches_the_ceiling(found: Found) -> Verdict:
    """Judge the corollary for the subspace and energies that power iteration gives: what they lose of kappa is at most
    the misalignment, which is less than its bound, and goes to nothing as rounds are added.

    Divided by kappa, the bound is (sigma_1^2 + sigma_21^2) r eps / sum_j sigma_j^2, and that is eps or more, since
    r sigma_1^2 is no less than the sum of r squares.
    """
    rows = deciding_rows(found, (DPT, DINOV2, CLIP), (*OUR_DENSE, *OUR_CLS), {ADAPTIVE: ADAPTIVE_COLUMNS})
    parts: dict[str, bool | None] = {}
    for row in rows:
        parts[f"{row} is bounded"] = low(found, ADAPTIVE, row, LOST_AT_TWO) <= high(found, ADAPTIVE, row, AT_TWO)
        parts[f"{row} gains"] = high(found, ADAPTIVE, row, LOST) < low(found, ADAPTIVE, row, LOST_AT_TWO)
        parts[f"{row} reaches it"] = high(found, ADAPTIVE, row, LOST) <= NOTHING
    columns = {LOST_AT_TWO: "{:.2%}", AT_TWO: "{:.3f}", CHOSEN: "{:.1f}", LOST: "{:.2%}"}
    return overall(parts, told(found, ADAPTIVE, rows, columns, "This scale has no decoder."))


def stability_tells(found: Found) -> Verdict:
    """Judge that the subspace at which the iteration stops is the true one, or as good."""
    wanted = {ADAPTIVE: ADAPTIVE_COLUMNS}
    rows = deciding_rows(found, (DPT, DINOV2, CLIP), (*OUR_DENSE, *OUR_CLS), wanted)
    parts: dict[str, bool | None] = {}
    for row in rows:
        parts[f"{row} is found"] = high(found, ADAPTIVE, row, TRUTH) <= CONVERGED
        parts[f"{row} loses nothing"] = high(found, ADAPTIVE, row, LOST) <= NOTHING
    columns = {CHOSEN: "{:.1f}", TRUTH: "{:.3f}", LOST: "{:.2%}", PAIRS: "{:.0f}"}
    return overall(parts, told(found, ADAPTIVE, rows, columns, "This scale has no decoder."))


def courses_told(found: Found, rows: list[str], otherwise: str) -> str:
    """Say the errors of these rows at each q."""
    parts = []
    for row in rows:
        values = found.columns(MISALIGNMENT, row)
        parts.append(f"{row}: " + ", ".join(f"{values[q]:.3f} at q = {q}" for q in Q_COLUMNS if q in values))
    return "; ".join(parts) or otherwise


def counted_note(found: Found) -> str | None:
    if not found.rows(MISALIGNMENT):
        return None
    return (
        "The paper's errors of 0.2 to 0.8 at q = 0 are not those of Algorithm 2 without a round, whose random subspace "
        "has an error near 1. q counts rounds after a first product with JᵀJ here; Algorithm 2 with q rounds has the "
        "error of the column q − 1."
    )


def sharper_note(found: Found) -> str | None:
    rows = [row for row in found.rows(RATE) if found.value(RATE, row, SEEN) is not None]
    if not rows:
        return None
    columns = {SEEN: "{:.3f}", SHARP: "{:.3f}", THEOREM: "{:.3f}"}
    return (
        "The error is of squared sines, so its last rate is (σ₂₁/σ₂₀)⁴, the square of the theorem's; before that, "
        f"directions well beyond the 20th fall away faster. By each round: {told(found, RATE, rows, columns)}."
    )


CONVERGENCE = Experiment(
    name="convergence",
    title="How fast power iteration finds the leading directions",
    paper_label="thm:convergence_formal",
    about="Misalignment with the true 20 directions after q rounds: the paper's form, and a twin that rotates 20 "
    "directions out of 30 columns.",
    columns=(
        *(Column(name, "lower") for name in Q_COLUMNS),
        Column(GAP), Column(THEOREM), Column(SHARP), Column(SEEN, "lower"), Column(CONSTANT), Column(BOUND),
        Column(CHOSEN), Column(TRUTH, "lower"), Column(PAIRS, "lower"), Column(LOST, "lower", percent=True),
        Column(AT_TWO, "lower"), Column(LOST_AT_TWO, "lower", percent=True),
    ),
    cells=cells,
    counts=COUNTS,
    paper={
        Place(MISALIGNMENT, own.row, q): value
        for own, values in (
            (DPT, (0.198, 0.011, 0.001)), (DINOV2, (0.617, 0.254, 0.083)), (CLIP, (0.802, 0.438, 0.214)),
        )
        for q, value in zip(("0", "2", "5"), values, strict=True)
    },
    claims=(
        Claim("Convergence is geometric in q: the error is at most C (σ₂₁/σ₂₀)^(2q).", "thm:convergence", geometric),
        Claim(
            "Two steps suffice where the gap is large: depth has an error of 0.011 at q = 2.", "thm:convergence_formal",
            two_suffice,
        ),
        Claim(
            "Flat spectra need about fifteen: class tokens have errors of 0.25 and 0.44 at q = 2.", "thm:convergence",
            flat_needs_more,
        ),
        Claim("Flatter spectra converge more slowly.", "thm:convergence_formal", flatter_is_slower),
        Claim(
            "The constant grows as ND·r₀, so the bound may be vacuous and does not tell how many steps suffice.",
            "thm:convergence_formal", vacuous,
        ),
        Claim(
            "Raising q until the subspace is stable chooses it in practice.", "thm:convergence_formal", stability_tells
        ),
        Claim(
            "With the subspace of q rounds and its natural energies, the sensitivity ratio converges to κ_cap(r) as q "
            "grows, within a bound by the misalignment.", "cor:ssm_quality", reaches_the_ceiling,
        ),
    ),
    figures=(Figure("misalignment", "curves", "Misalignment against q", table=MISALIGNMENT, log=True),),
    footnotes=(counted_note, sharper_note),
)  # fmt: skip
