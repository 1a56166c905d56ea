"""The tractability diagnostic (Algorithm 1): does a low-rank task metric exist here, and which tokens carry it?

`diagnose` sketches J at every image, summarises captured energy, effective ranks and concentration over tokens with
their errors, and names one of the four regimes of section 4.3 (`regimes`), over all tokens and over the patches. In
this order: the diagnosis, how unevenly directions spread over tokens (CV) beside what a random direction would show,
and the convergence of power iteration.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pullback.checks import callable_or_none, of_kind, whole_number
from pullback.data.pictures import Pictures
from pullback.errors import PullbackError, RankError, counted
from pullback.geometry.independence import check_independence
from pullback.geometry.regimes import (
    BEHIND_A_BOTTLENECK,
    OF_REGISTERS,
    THRESHOLDS,
    Regime,
    Thresholds,
    Verdict,
    judge,
    looks_random,
)
from pullback.geometry.spectrum import Probe, Sketched, as_token_maps, features_of, output_size, sketch_in_batches
from pullback.geometry.summary import Summary, summarize
from pullback.operators import JacobianOperator, LinearOperator, LowRankMetric, ProductCount
from pullback.randnla import Estimate, Sketch, Streams, block_krylov, effective_rank_from_spectrum
from pullback.randnla.orthonormal import qr_basis
from pullback.tokens import TokenLayout

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
class Part:
    """The samples ``first``, ``first`` + 1, ... that were diagnosed together: what a run keeps when it is stopped."""

    first: int
    samples: tuple[SampleDiagnosis, ...]
    importance: Tensor  # [b, N] on the CPU, imp* of every token at the first rank
    convergence: tuple[ConvergenceRow, ...]  # of those samples that have one, on the CPU
    method: str
    products: ProductCount  # of these samples together
    seconds: float


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
    convergence: tuple[ConvergenceRow, ...]
    importance: Tensor  # [B, N], imp* of every token at the first rank
    token_layout: TokenLayout
    products: ProductCount  # of all samples together
    seconds: float
    thresholds: Thresholds = THRESHOLDS
    bottleneck: bool = False  # whether the decoder has one in front of it

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
    def max_rank(self) -> int:
        """The smaller side of the largest Jacobian, min(M, N*D)."""
        return min(self.output_size, math.prod(self.input_shape))

    @property
    def verdict(self) -> Verdict:
        """The regime over all tokens, with those that the errors do not exclude."""
        return self._judged(self.cv)

    @property
    def verdict_over_patches(self) -> Verdict | None:
        """The regime with the CV of the patches alone; None where there are no other tokens, or no patch counts.

        A decoder that reads the class token makes the CV over all tokens a statement about that token, and only patches
        can be pruned.
        """
        return self._judged(self.cv_patches) if self.token_layout.prefix and self.patches_count else None

    @property
    def patches_count(self) -> bool:
        """Whether any patch moves the output; behind the last attention none does, for a decoder of the class token."""
        largest = self.token_layout.patch_map(self.importance).max()
        return bool(largest > 1e-6 * self.importance.max())

    @property
    def regime(self) -> Regime:
        """The regime over all tokens."""
        return self.verdict.regime

    def _judged(self, cv: Summary) -> Verdict:
        return judge(
            kappa=self.kappa,
            effective_rank=self.r_eff_slq,
            cv=cv,
            rank=self.rank,
            max_rank=self.max_rank,
            thresholds=self.thresholds,
        )

    @property
    def looks_random(self) -> bool:
        """Whether the CV over all tokens is that of a random direction."""
        return looks_random(self.cv.mean, self.cv_null, self.thresholds)

    @property
    def patches_look_random(self) -> bool:
        """Whether the CV over patches is that of a random direction; a single patch has none."""
        several = self.token_layout.views * self.token_layout.patches > 1 and self.patches_count
        return several and looks_random(self.cv_patches.mean, self.cv_null, self.thresholds)

    @property
    def advice(self) -> str:
        """What to do in a few sentences: about the patches where their regime is another, since only they can be
        pruned; with a warning where the modes look like noise, and with the regimes that the errors do not exclude."""
        verdict, patches, sentences = self.verdict, self.verdict_over_patches, []
        if self.looks_random or (patches is not None and self.patches_look_random):
            cv, where = (self.cv, "") if self.looks_random else (self.cv_patches, " over patches")
            sentences.append(
                f"CV{where} {cv.mean:.3f} is indistinguishable from a random direction (null {self.cv_null:.3f}): the "
                f"{'tokens count alike' if self.method == 'exact' else 'modes have probably not converged'}."
            )
        if not self.patches_count:
            others = counted(self.token_layout.prefix, "token")
            return (
                f"No patch of this layer moves the output, only the {others} before them: it tells nothing about "
                "patches. To see which of them matter, take an earlier layer."
            )
        if patches is not None and patches.regime != verdict.regime:
            sentences.append(f"Only patches can be pruned, and over them it is regime {patches.regime}.")
        followed = patches or verdict
        sentences.append(self._what_to_do(followed.regime))
        if followed.could_be:
            names, where = " or ".join(map(str, followed.could_be)), "" if patches is None else " over patches"
            more = f"more {self.token_layout.unit}s would tell"
            sentences.append(f"Within two standard errors it could also be {names}{where}: {more}.")
        return " ".join(sentences)

    def _what_to_do(self, regime: Regime) -> str:
        special = BEHIND_A_BOTTLENECK if self.token_layout.in_picture else OF_REGISTERS
        return special.get(regime, regime.advice) if self.bottleneck else regime.advice

    def plot(self) -> Figure:
        """Draw the energy of each direction, kappa, and the energy of each patch, as a matplotlib figure."""
        from pullback.geometry.overview import report_overview

        return report_overview(self).plot()

    def __repr__(self) -> str:
        from pullback.geometry.overview import report_overview

        return f"Tractability({report_overview(self).line('regime')})"

    def _repr_html_(self) -> str:
        from pullback.geometry.overview import report_overview

        return report_overview(self).html()

    def __str__(self) -> str:
        bound = ">=" if self.r90[1] else ""
        unit = self.token_layout.unit
        alone = f" (one {unit}, no error over {unit}s)" if len(self.samples) == 1 else ""
        over_patches = self.verdict_over_patches
        beside = (
            "" if over_patches is None else f"; over patches CV = {self.cv_patches.mean:.2f}, regime {over_patches}"
        )
        return (
            f"{self.probe}{alone}: kappa({self.ranks_used[0]}) = {self.kappa}, r_eff = {self.r_eff_slq}, "
            f"CV = {self.cv.mean:.2f} (null {self.cv_null:.3f}), r90 {bound}{self.r90[0]}, "
            f"regime {self.verdict}{beside}. {self.advice}"
        )


KNOBS = {"power_iters", "sketch_width", "rayleigh_ritz", "num_probes", "lanczos_steps", "slq_probes", "max_depth"}
"""Arguments of `randnla.sketch` that `diagnose` passes on."""


def diagnose(
    probe: Probe,
    images: Pictures,
    rank: int | Sequence[int] = 20,
    method: str = "auto",
    *,
    normalized: bool = False,
    seed: int = 0,
    rtol: float | None = None,
    precision: str = "float32",
    batch_size: int | None = None,
    convergence_samples: int = 1,
    thresholds: Thresholds = THRESHOLDS,
    on_progress: Callable[[int], None] | None = None,
    parts: Sequence[Part] = (),
    on_part: Callable[[Part], None] | None = None,
    **knobs: Any,
) -> Tractability:
    """Diagnose a probe map: kappa_cap, effective ranks, CV and its null, r_0.90 with error bars; regime and advice.

    ``images``: [B, 3, H, W], or pictures in any form that `ProbeMap.features` takes; ``normalized`` as there.
    A rank above min(M, N*D) is lowered to it; the regime is then (iv). ``convergence_samples``: for how many samples
    the power-iteration table is measured as well (6 rank pairs each). ``on_part`` is called with each batch that is
    done; with these as ``parts`` a second call goes on where the first one stopped, in batches of the same size, and
    ends with the same numbers. Other ``knobs`` go to `randnla.sketch`.
    """
    ranks = checked_ranks(rank)
    whole_number("convergence_samples", convergence_samples, least=0)
    of_kind("thresholds", thresholds, Thresholds, "a Thresholds of pullback.geometry")
    callable_or_none("on_progress", on_progress)
    for name in sorted(set(knobs) - KNOBS):
        raise PullbackError(
            f"{name}: diagnose has no such argument. Besides its own it takes {', '.join(sorted(KNOBS))}."
        )
    begun = time.perf_counter()
    features = features_of(probe, images, normalized)
    check_independence(probe, features)
    rows, inputs = output_size(probe, features), features[0].numel()
    used = tuple(min(r, rows, inputs) for r in ranks)
    layout = probe.token_layout(features)
    done = list(parts)
    for sketched in sketch_in_batches(
        probe,
        features,
        max(used),
        seed=seed,
        precision=precision,
        batch_size=batch_size or (len(done[-1].samples) if done else None),
        start=sum(len(part.samples) for part in done),
        method=method,
        rtol=rtol,
        with_earlier=True,
        **knobs,
    ):
        count = len(sketched.sketch.right)
        products = sketched.sketch.products * count
        table: tuple[ConvergenceRow, ...] = ()
        observed = features[sketched.first : min(sketched.first + count, convergence_samples)]
        if len(observed) > 0:
            operator = JacobianOperator(probe, observed, precision=precision)
            table, spent = _convergence(operator, sketched, used[0], seed)
            products += spent * len(observed)
        modes = as_token_maps(sketched.sketch.right, features.shape[1:])
        leading = LowRankMetric(modes[:, : used[0]], sketched.sketch.singular_values[:, : used[0]].square())
        now = time.perf_counter()
        part = Part(
            first=sketched.first,
            samples=tuple(_diagnose_batch(sketched, modes, used, layout)),
            importance=leading.importance().cpu(),
            convergence=table,
            method=sketched.sketch.method,
            products=products,
            seconds=now - begun,
        )
        begun = now
        done.append(part)
        if on_part is not None:
            on_part(part)
        if on_progress is not None:
            on_progress(count)
    shape = (features.shape[1], features.shape[2])
    return Tractability(
        probe=probe.name,
        layer=probe.layer,
        ranks=ranks,
        ranks_used=used,
        output_size=rows,
        input_shape=shape,
        method=done[-1].method,
        seed=seed,
        samples=tuple(sample for part in done for sample in part.samples),
        cv_null=null_cv(shape[1]),
        convergence=join_tables([part.convergence for part in done if part.convergence]),
        importance=torch.cat([part.importance for part in done]),
        token_layout=layout,
        products=sum((part.products for part in done), ProductCount()),
        seconds=sum(part.seconds for part in done),
        thresholds=thresholds,
        bottleneck=getattr(probe, "bottleneck", False),
    )


def checked_ranks(rank: int | Sequence[int]) -> tuple[int, ...]:
    """Return one rank or several as a tuple, or raise an error for what is no whole number from 1 up."""
    ranks = tuple(rank) if isinstance(rank, list | tuple | range) else (rank,)
    if not ranks:
        raise RankError(f"rank: expected one or several numbers from 1 up, got {rank!r}.")
    wish = "one or several numbers from 1 up"
    return tuple(whole_number("rank", value, expected=wish, error=RankError) for value in ranks)


def _convergence(
    operator: JacobianOperator, part: Sketched, rank: int, seed: int
) -> tuple[tuple[ConvergenceRow, ...], ProductCount]:
    """Return the convergence table of the first samples of a batch, and its products per sample."""
    start, other = (Streams.from_seed(seed + i, operator.batch, operator.device, part.first) for i in (1, 2))
    reference = part.sketch.right[: operator.batch, :, :rank]
    if part.sketch.method == "paper":  # unconverged modes cannot judge convergence
        reference = block_krylov(operator, rank, rtol=1e-4, streams=other).right
    table = convergence_table(operator, reference, part.sketch.total.value[: operator.batch], streams=start)
    on_cpu = [
        replace(row, alignment_error=row.alignment_error.cpu(), gradient_signal_ratio=row.gradient_signal_ratio.cpu())
        for row in table
    ]
    return tuple(on_cpu), operator.products


def _diagnose_batch(
    part: Sketched, modes: Tensor, ranks: tuple[int, ...], layout: TokenLayout
) -> list[SampleDiagnosis]:
    sketch, first = part.sketch, ranks[0]
    assert sketch.effective_rank is not None
    inputs = math.prod(modes.shape[2:])
    signal = sketch.singular_values[:, 0].double().square() * inputs / sketch.total.value
    known = sketch.singular_values if sketch.spectrum is None else sketch.spectrum
    captured = known.double().square().cumsum(1) / sketch.total.value[:, None]
    kappa = {r: Estimate(sketch.kappa.value[:, r - 1], sketch.kappa.se[:, r - 1]).pairs() for r in ranks}
    whole, energy = sketch.effective_rank.pairs(), sketch.total.pairs()
    trunc = _leading_effective_rank(sketch, first).pairs()
    cv, cv_patches = (_cv(sketch, modes[:, :first], mask).pairs() for mask in (None, layout.patch_mask()))
    values, signals = sketch.singular_values.tolist(), signal.tolist()
    return [
        SampleDiagnosis(
            kappa={r: kappa[r][i] for r in ranks},
            r_eff_trunc=trunc[i],
            r_eff_slq=whole[i],
            cv=cv[i],
            cv_patches=cv_patches[i],
            r90=rank_for(captured[i], 0.90),
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


def _quotient(above: tuple[float, float], below: tuple[float, float]) -> tuple[float, float]:
    """Divide two (value, standard error) pairs; where the error of the divisor is not known, it is left out."""
    value = above[0] / below[0]
    known = 0.0 if math.isnan(below[1]) else below[1]
    return value, math.hypot(above[1] / below[0], value * known / below[0])


def rank_for(captured: Tensor, share: float) -> tuple[int, bool]:
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
