"""The tractability diagnostic (Algorithm 1): does a low-rank task metric exist here, and which tokens carry it?

`diagnose` sketches J at every image, summarises captured energy, effective ranks and concentration over tokens with
their errors, and names one of the four regimes of section 4.3. In this order: the regimes, the diagnosis, how unevenly
directions spread over tokens (CV) beside what a random direction would show, the convergence of power iteration, and
means of numbers that have errors of their own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pullback.errors import ImageError, RankError
from pullback.geometry.independence import check_independence
from pullback.geometry.spectrum import Probe, Sketched, as_token_maps, output_size, sketch_in_batches
from pullback.operators import JacobianOperator, LinearOperator, LowRankMetric, ProductCount
from pullback.randnla import Estimate, Sketch, Streams, block_krylov, effective_rank_from_spectrum
from pullback.randnla.estimate import student_quantile
from pullback.randnla.orthonormal import qr_basis
from pullback.tokens import TokenLayout

# The regimes, with their thresholds and advice as data


@dataclass(frozen=True)
class Thresholds:
    """Chosen so that every row of the paper's tables gets the label the paper gives it (tests/geometry)."""

    low_rank_kappa: float = 0.90  # kappa_cap(r) from here on: r directions are (nearly) the whole task
    rank_budget: float = 2.5  # an effective rank above this many times r is "rich", whatever kappa says
    concentrated_cv: float = 0.80  # tokens differ so much that a score per token is informative
    null_factor: float = 1.5  # CV up to this many times the null: indistinguishable from a random direction


THRESHOLDS = Thresholds()


@dataclass(frozen=True)
class Regime:
    label: str
    title: str
    advice: str


RICH = Regime(
    "i",
    "rich spectrum",
    "No rank-r metric captures the task and no few tokens carry it: raise the rank, or compress the features first "
    "(the S2-VAE bottleneck).",
)
LOW_RANK_SPREAD = Regime(
    "ii",
    "low rank, spread over tokens",
    "A rank-r metric captures the task, but its directions are spread over tokens: learn the metric with cross-token "
    "attention (SPN); scores per token are weak.",
)
LOW_RANK_LOCAL = Regime(
    "ii",
    "low rank, concentrated on tokens",
    "A rank-r metric captures the task and few tokens carry it: both the SPN and a per-token importance head will do.",
)
CONCENTRATED = Regime(
    "iii",
    "marginal rank, concentrated on tokens",
    "A rank-r metric misses much of the task, but few tokens carry it: score tokens with an importance head, for "
    "instance to prune or merge the others.",
)
RANK_BOUNDED = Regime(
    "iv",
    "structurally rank-bounded",
    "The output has no more dimensions than the rank asked for, so kappa is 100 % by construction: use the exact "
    "spectrum, it is cheap.",
)


def classify(
    *,
    kappa: float,
    effective_rank: float,
    cv: float,
    rank: int,
    max_rank: int,
    thresholds: Thresholds = THRESHOLDS,
) -> Regime:
    """Return the regime of these means; ``rank`` is the rank asked for, ``max_rank`` = min(M, N*D)."""
    if max_rank <= rank:
        return RANK_BOUNDED
    if kappa >= thresholds.low_rank_kappa and effective_rank <= thresholds.rank_budget * rank:
        return LOW_RANK_LOCAL if cv >= thresholds.concentrated_cv else LOW_RANK_SPREAD
    return CONCENTRATED if cv >= thresholds.concentrated_cv else RICH


def looks_random(cv: float, null: float, thresholds: Thresholds = THRESHOLDS) -> bool:
    return cv <= thresholds.null_factor * null


# The diagnosis


@dataclass(frozen=True)
class SampleDiagnosis:
    """One sample. Pairs are (value, standard error); an error that is NaN is not known."""

    kappa: dict[int, tuple[float, float]]  # rank -> kappa_cap(rank)
    r_eff_trunc: tuple[float, float]
    r_eff_slq: tuple[float, float]
    cv: tuple[float, float]
    cv_patches: tuple[float, float]
    r90: tuple[int, bool]  # (rank, it is only a lower bound)
    gradient_signal_ratio: float
    energy: tuple[float, float]  # |J|_F^2
    singular_values: tuple[float, ...]
    products: ProductCount


@dataclass(frozen=True)
class Tractability:
    """The diagnosis of one probe map over several samples."""

    probe: str
    layer: int | str
    ranks: tuple[int, ...]  # as asked for
    ranks_used: tuple[int, ...]  # lowered to min(M, N*D) where necessary
    output_size: int
    input_shape: tuple[int, int]
    method: str
    seed: int
    samples: tuple[SampleDiagnosis, ...]
    cv_null: float
    regime: Regime
    convergence: tuple[ConvergenceRow, ...]
    importance: Tensor  # [B, N], imp* of every token at the first rank
    token_layout: TokenLayout
    products: ProductCount  # of all samples together
    seconds: float
    thresholds: Thresholds = THRESHOLDS

    @property
    def rank(self) -> int:
        return self.ranks[0]

    @property
    def kappa(self) -> Summary:
        """kappa_cap at the first rank."""
        return self.kappa_at(self.ranks_used[0])

    def kappa_at(self, rank: int) -> Summary:
        """kappa_cap at one of the ranks asked for, or at what it was lowered to."""
        used = dict(zip(self.ranks, self.ranks_used, strict=True)).get(rank, rank)
        if used not in self.ranks_used:
            raise RankError(f"rank: expected one of those diagnosed, {list(self.ranks)}, got {rank}.")
        return summarize([sample.kappa[used] for sample in self.samples])

    @property
    def cv(self) -> Summary:
        return summarize([sample.cv for sample in self.samples])

    @property
    def cv_patches(self) -> Summary:
        return summarize([sample.cv_patches for sample in self.samples])

    @property
    def r_eff_trunc(self) -> Summary:
        return summarize([sample.r_eff_trunc for sample in self.samples])

    @property
    def r_eff_slq(self) -> Summary:
        return summarize([sample.r_eff_slq for sample in self.samples])

    @property
    def tail_ratio(self) -> Summary:
        return summarize([_quotient(sample.r_eff_slq, sample.r_eff_trunc) for sample in self.samples])

    @property
    def r90(self) -> tuple[int, bool]:
        """The median over samples, a lower bound if any sample's is one."""
        values = sorted(sample.r90[0] for sample in self.samples)
        return values[len(values) // 2], any(sample.r90[1] for sample in self.samples)

    @property
    def advice(self) -> str:
        """One sentence on what to do, with a warning when the modes look like noise."""
        if looks_random(self.cv.mean, self.cv_null, self.thresholds):
            return (
                f"CV {self.cv.mean:.3f} is indistinguishable from a random direction (null {self.cv_null:.3f}): the "
                f"modes have probably not converged. {self.regime.advice}"
            )
        return self.regime.advice

    def __str__(self) -> str:
        bound = ">=" if self.r90[1] else ""
        return (
            f"{self.probe}: kappa({self.ranks_used[0]}) = {self.kappa}, r_eff = {self.r_eff_slq}, "
            f"CV = {self.cv.mean:.2f} (null {self.cv_null:.3f}), r90 {bound}{self.r90[0]}, "
            f"regime ({self.regime.label}) {self.regime.title}. {self.advice}"
        )


def diagnose(
    probe: Probe,
    images: Tensor,
    rank: int | Sequence[int] = 20,
    method: str = "auto",
    *,
    seed: int = 0,
    rtol: float | None = None,
    precision: str = "float32",
    batch_size: int | None = None,
    convergence_samples: int = 1,
    thresholds: Thresholds = THRESHOLDS,
    on_progress: Callable[[int], None] | None = None,
    **knobs: Any,
) -> Tractability:
    """Diagnose a probe map: kappa_cap, effective ranks, CV and its null, r_0.90 with error bars; regime and advice.

    A rank above min(M, N*D) is lowered to it; the regime is then (iv). ``convergence_samples``: for how many samples
    the power-iteration table is measured as well (6 rank pairs each). Other ``knobs`` go to `randnla.sketch`.
    """
    ranks = (rank,) if isinstance(rank, int) else tuple(rank)
    if not ranks or min(ranks) < 1:
        raise RankError(f"rank: expected one or several numbers from 1 up, got {rank!r}.")
    if len(images) == 0:
        raise ImageError("images: expected at least one image, got an empty batch.")
    begun = time.perf_counter()
    features = probe.features(images)
    check_independence(probe, features)
    rows, inputs = output_size(probe, features), features[0].numel()
    limit = min(rows, inputs)
    used = tuple(min(r, limit) for r in ranks)
    layout = probe.token_layout(features)
    shape = (features.shape[1], features.shape[2])
    samples: list[SampleDiagnosis] = []
    importance: list[Tensor] = []
    tables: list[tuple[ConvergenceRow, ...]] = []
    products = ProductCount()
    method_used = method
    for part in sketch_in_batches(
        probe,
        features,
        max(used),
        seed=seed,
        precision=precision,
        batch_size=batch_size,
        method=method,
        rtol=rtol,
        with_earlier=True,
        **knobs,
    ):
        modes = as_token_maps(part.sketch.right, features.shape[1:])
        leading = LowRankMetric(modes[:, : used[0]], part.sketch.singular_values[:, : used[0]].square())
        importance.append(leading.importance().cpu())
        samples += _diagnose_batch(part, modes, used, layout)
        method_used = part.sketch.method
        count = len(modes)
        observed = features[part.first : min(part.first + count, convergence_samples)]
        if len(observed) > 0:
            table, spent = _convergence(JacobianOperator(probe, observed, precision=precision), part, used[0], seed)
            tables.append(table)
            products += spent * len(observed)
        products += part.sketch.products * count
        if on_progress is not None:
            on_progress(count)
    first = used[0]
    summary = {
        "kappa": summarize([s.kappa[first] for s in samples]).mean,
        "effective_rank": summarize([s.r_eff_slq for s in samples]).mean,
        "cv": summarize([s.cv for s in samples]).mean,
    }
    return Tractability(
        probe=probe.name,
        layer=probe.layer,
        ranks=ranks,
        ranks_used=used,
        output_size=rows,
        input_shape=shape,
        method=method_used,
        seed=seed,
        samples=tuple(samples),
        cv_null=null_cv(shape[1]),
        regime=classify(**summary, rank=ranks[0], max_rank=limit, thresholds=thresholds),
        convergence=join_tables(tables),
        importance=torch.cat(importance),
        token_layout=layout,
        products=products,
        seconds=time.perf_counter() - begun,
        thresholds=thresholds,
    )


def _convergence(
    operator: JacobianOperator, part: Sketched, rank: int, seed: int
) -> tuple[tuple[ConvergenceRow, ...], ProductCount]:
    """Return the convergence table of the first samples of a batch, and its products per sample."""
    start, other = (Streams.from_seed(seed + i, operator.batch, operator.device, part.first) for i in (1, 2))
    reference = part.sketch.right[: operator.batch, :, :rank]
    if part.sketch.method == "paper":  # unconverged modes cannot judge convergence
        reference = block_krylov(operator, rank, rtol=1e-4, streams=other).right
    table = convergence_table(operator, reference, part.sketch.total.value[: operator.batch], streams=start)
    return table, operator.products


def _diagnose_batch(
    part: Sketched, modes: Tensor, ranks: tuple[int, ...], layout: TokenLayout
) -> list[SampleDiagnosis]:
    sketch, first = part.sketch, ranks[0]
    assert sketch.effective_rank is not None
    inputs = math.prod(modes.shape[2:])
    signal = sketch.singular_values[:, 0].double().square() * inputs / sketch.total.value
    known = sketch.singular_values if sketch.spectrum is None else sketch.spectrum
    captured = known.double().square().cumsum(1) / sketch.total.value[:, None]
    kappa = {r: _pairs(Estimate(sketch.kappa.value[:, r - 1], sketch.kappa.se[:, r - 1])) for r in ranks}
    whole, energy = _pairs(sketch.effective_rank), _pairs(sketch.total)
    trunc = _pairs(_leading_effective_rank(sketch, first))
    cv, cv_patches = (_pairs(_cv(sketch, modes[:, :first], mask)) for mask in (None, layout.patch_mask()))
    values, signals = sketch.singular_values.tolist(), signal.tolist()
    return [
        SampleDiagnosis(
            kappa={r: kappa[r][i] for r in ranks},
            r_eff_trunc=trunc[i],
            r_eff_slq=whole[i],
            cv=cv[i],
            cv_patches=cv_patches[i],
            r90=_rank_for(captured[i], 0.90),
            gradient_signal_ratio=signals[i],
            energy=energy[i],
            singular_values=tuple(values[i]),
            products=sketch.products,
        )
        for i in range(len(modes))
    ]


def _leading_effective_rank(sketch: Sketch, rank: int) -> Estimate:
    """Estimate exp(H) [B] of the first ``rank`` singular values; its error is what the last Krylov block changed."""
    value = effective_rank_from_spectrum(sketch.singular_values[:, :rank])
    change = _unknown_or_zero(sketch, value)
    if sketch.earlier is not None:
        change = value - effective_rank_from_spectrum(sketch.earlier[0][:, :rank])
    return Estimate.of(value, change.abs(), round_off=sketch.round_off)


def _cv(sketch: Sketch, modes: Tensor, tokens: Tensor | None) -> Estimate:
    """Estimate the CV [B] of modes [B, r, N, D]; its error is what the last Krylov block changed.

    Modes whose singular values agree to within round-off are any basis of what they span, and so is their CV.
    """
    value = coefficient_of_variation(modes, tokens)
    change = _unknown_or_zero(sketch, value)
    if sketch.earlier is not None:
        earlier = as_token_maps(sketch.earlier[1][..., : modes.shape[1]], modes.shape[2:])
        change = change_of_cv(modes, earlier, tokens)
    return Estimate.of(value, change, round_off=sketch.round_off)


def _unknown_or_zero(sketch: Sketch, value: Tensor) -> Tensor:
    """Return the error without an earlier sketch: 0 if J is known exactly. The paper's power iteration stops
    after a fixed number of rounds and cannot tell how far its columns are from singular vectors: NaN."""
    return torch.full_like(value, math.nan if sketch.method == "paper" else 0.0)


def _pairs(estimate: Estimate) -> list[tuple[float, float]]:
    return list(zip(estimate.value.tolist(), estimate.se.tolist(), strict=True))


def _quotient(above: tuple[float, float], below: tuple[float, float]) -> tuple[float, float]:
    """Divide two (value, standard error) pairs; where the error of the divisor is not known, it is left out."""
    value = above[0] / below[0]
    known = 0.0 if math.isnan(below[1]) else below[1]
    return value, math.hypot(above[1] / below[0], value * known / below[0])


def _rank_for(captured: Tensor, share: float) -> tuple[int, bool]:
    """Return the first rank whose captured energy reaches the share, else one past the known ranks and True."""
    reached = (captured >= share - 1e-12).nonzero().flatten()
    return (int(reached[0]) + 1, False) if len(reached) else (len(captured) + 1, True)


# Concentration over tokens


def coefficient_of_variation(modes: Tensor, tokens: Tensor | None = None) -> Tensor:
    """CV = mean_j std_t |v_j^(t)| / mean_t |v_j^(t)| (`eq:cv`), std with n-1: modes [B, r, N, D] -> [B].

    ``tokens`` [N] bool restricts t, for instance to the patch tokens. Modes that are zero there (of vanishing singular
    values) are left out of the mean; a single token has CV 0.
    """
    each, alive = _cv_of_each(modes, tokens)
    return each.sum(-1) / alive.sum(-1).clamp_min(1)


def change_of_cv(modes: Tensor, earlier: Tensor, tokens: Tensor | None = None) -> Tensor:
    """Estimate how far the CV of ``modes`` [B, r, N, D] may still be off, by what changed since ``earlier``: [B].

    sqrt(sum_j d_j^2) / r with the changes d_j of each mode's CV, which have no common sign. (The change of their mean
    alone can vanish by chance: the truth then lies outside of twice of it in up to one of four cases.)
    """
    each, alive = _cv_of_each(modes, tokens)
    changes = each - _cv_of_each(earlier, tokens)[0]
    return changes.norm(dim=-1) / alive.sum(-1).clamp_min(1)


def _cv_of_each(modes: Tensor, tokens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the CV of each mode (0 where the mode is zero), and whether it is not zero: [B, r] both."""
    norms = modes.norm(dim=-1).double()
    if tokens is not None:
        norms = norms[..., tokens.to(norms.device)]
    mean = norms.mean(-1)
    alive = mean > 0
    if norms.shape[-1] < 2:
        return torch.zeros_like(mean), alive
    return norms.std(-1) / torch.where(alive, mean, 1.0), alive


def null_cv(dim: int) -> float:
    """Return the CV of a direction drawn at random: token norms are then chi-distributed with D degrees of freedom.

    About 1/sqrt(2 D): 0.036 at D = 384, 0.026 at D = 768. A measured CV at this value says that the vectors look like
    noise, most likely because they have not converged.
    """
    mean = math.sqrt(2) * math.exp(math.lgamma((dim + 1) / 2) - math.lgamma(dim / 2))
    return math.sqrt(dim - mean**2) / mean


# Convergence of power iteration: the paper's table after Theorem 3. It prints errors of 0.2 to 0.8 at "q = 0", where a
# random subspace has an error near 1, so its q counts the rounds after a first product with J^T J. Here both counts are
# given.


@dataclass(frozen=True)
class ConvergenceRow:
    """After ``rounds`` products with J^T J in all; ``paper_q`` = rounds - 1 (None before the first)."""

    rounds: int
    paper_q: int | None
    alignment_error: Tensor  # [B], 1 - |V_hat^T V|_F^2 / r
    gradient_signal_ratio: Tensor  # [B], |J v_1|^2 N D / |J|_F^2: 1 for a random direction (Corollary `cor:gsr`)


def convergence_table(
    op: LinearOperator,
    reference: Tensor,
    total: Tensor,
    *,
    paper_q: tuple[int, ...] = (0, 2, 5),
    streams: Streams,
) -> tuple[ConvergenceRow, ...]:
    """Compare power iteration from a Gaussian start with reference modes [B, n, r]; total [B] is |J|_F^2.

    Costs (max q + 1) r pairs and one JVP per sample.
    """
    wanted = {0, *(q + 1 for q in paper_q)}
    columns = qr_basis(streams.gaussian(op.cols, reference.shape[-1], op.dtype))
    rows = []
    for rounds in range(max(wanted) + 1):
        last = rounds == max(wanted)
        image = op @ (columns[..., :1] if last else columns)
        if rounds in wanted:
            overlap = (columns.mT @ reference).square().sum((1, 2)) / reference.shape[-1]
            signal = image[..., 0].double().square().sum(1) * op.cols / total
            rows.append(ConvergenceRow(rounds, rounds - 1 if rounds else None, 1 - overlap.double(), signal))
        if not last:
            columns = qr_basis(op.T @ image)
    return tuple(rows)


def join_tables(tables: Sequence[tuple[ConvergenceRow, ...]]) -> tuple[ConvergenceRow, ...]:
    """Join the tables of several batches."""
    return tuple(
        ConvergenceRow(
            rows[0].rounds,
            rows[0].paper_q,
            torch.cat([row.alignment_error for row in rows]),
            torch.cat([row.gradient_signal_ratio for row in rows]),
        )
        for rows in zip(*tables, strict=True)
    )


# Means of numbers that have errors of their own


@dataclass(frozen=True)
class Summary:
    """``std`` is between samples (n-1), ``se`` of their mean: from that spread, which contains the estimation error, or
    for a single sample its own error. ``estimation_se`` is the part that more products, or a higher precision, would
    remove; NaN if the estimates carry no error of their own."""

    mean: float
    std: float
    se: float
    estimation_se: float
    count: int

    @property
    def interval(self) -> tuple[float, float]:
        """95 % for the mean over such samples."""
        half = self.se * (2.0 if self.count == 1 else student_quantile(0.975, self.count - 1))
        return self.mean - half, self.mean + half

    def __str__(self) -> str:
        return f"{self.mean:.3g} ± {self.se:.2g}"


def summarize(pairs: Sequence[tuple[float, float]]) -> Summary:
    """Return the mean of (value, standard error) pairs, one per sample."""
    count = len(pairs)
    mean = sum(value for value, _ in pairs) / count
    own = math.sqrt(sum(se**2 for _, se in pairs)) / count
    if count == 1:
        return Summary(mean, 0.0, own, own, 1)
    std = math.sqrt(sum((value - mean) ** 2 for value, _ in pairs) / (count - 1))
    spread = std / math.sqrt(count)
    return Summary(mean, std, spread if math.isnan(own) else max(spread, own), own, count)
