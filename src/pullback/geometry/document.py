"""A diagnosis as plain data: what `diagnosis.json` holds. Everything downstream reads that file and no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pullback.geometry import ConvergenceRow, SampleDiagnosis, Summary, Tractability, Verdict
from pullback.geometry.summary import summarize
from pullback.operators import ProductCount
from pullback.randnla import Estimate
from pullback.runs.rows import finite

_DIGITS = 9


def layer_result(report: Tractability, files: Sequence[str]) -> dict[str, Any]:
    """One entry of ``layers``. ``files`` names the image behind each sample."""
    count = len(report.samples)
    used = dict(zip(report.ranks, report.ranks_used, strict=True))
    value, is_bound = report.r90
    over_patches = report.verdict_over_patches
    return {
        "layer": report.layer,
        "probe": report.probe,
        "rank": report.rank,
        "rank_used": report.ranks_used[0],
        "ranks": list(report.ranks),
        "ranks_used": list(report.ranks_used),
        "num_images": count,
        "output_size": report.output_size,
        "tokens": report.input_shape[0],
        "dim": report.input_shape[1],
        "grid": list(report.token_layout.grid),
        "prefix": report.token_layout.prefix,
        "in_picture": report.token_layout.in_picture,
        "kappa": summary(report.kappa),
        "kappa_at": {str(rank): {**summary(report.kappa_at(used[rank])), "rank_used": used[rank]} for rank in used},
        "cv": {
            "mean": number(report.cv.mean),
            "null": number(report.cv_null),
            "patches": number(report.cv_patches.mean),
            "indistinguishable_from_random": report.looks_random,
            "patches_indistinguishable_from_random": report.patches_look_random,
            "std": number(report.cv.std),
            "se": number(report.cv.se),
            "estimation_se": number(report.cv.estimation_se),
            "patches_se": number(report.cv_patches.se),
            "patches_estimation_se": number(report.cv_patches.estimation_se),
        },
        "r_eff_trunc": number(report.r_eff_trunc.mean),
        "r_eff_trunc_se": number(report.r_eff_trunc.se),
        "r_eff_trunc_estimation_se": number(report.r_eff_trunc.estimation_se),
        "r_eff_slq": summary(report.r_eff_slq),
        "tail_ratio": number(report.tail_ratio.mean),
        "tail_ratio_se": number(report.tail_ratio.se),
        "r90": {"value": value, "is_lower_bound": is_bound},
        **_verdict(report.verdict),
        "regime_over_patches": None if over_patches is None else _verdict(over_patches),
        "advice": report.advice,
        "method": report.method,
        "seed": report.seed,
        "products": products(report.products),
        "products_per_image": number(report.products.total / count),
        "seconds": number(report.seconds),
        "gradient_signal_ratio": number(sum(s.gradient_signal_ratio for s in report.samples) / count),
        "convergence": [_convergence(row) for row in report.convergence],
        "per_image": [_image(s, report, file) for s, file in zip(report.samples, files, strict=True)],
    }


def multiplicity_result(estimate: Estimate, layers: Sequence[int]) -> dict[str, Any]:
    """K_eff over the images, how many independent layers the decoder really reads."""
    pairs = estimate.pairs()
    return {
        **summary(summarize(pairs)),
        "layers": list(layers),
        "per_image": [{"value": number(value), "se": number(se)} for value, se in pairs],
    }


def summary(value: Summary) -> dict[str, Any]:
    return {
        "mean": number(value.mean),
        "std": number(value.std),
        "se": number(value.se),
        "estimation_se": number(value.estimation_se),
        "interval": [number(end) for end in value.interval],
    }


def products(count: ProductCount) -> dict[str, int]:
    return {"jvp": count.jvp, "vjp": count.vjp}


def number(value: float) -> float | None:
    """Round to nine digits, more than any product is worth; None for NaN and infinity, which strict JSON lacks."""
    return finite(float(f"{value:.{_DIGITS}g}"))


def _verdict(verdict: Verdict) -> dict[str, Any]:
    return {
        "regime": verdict.regime.label,
        "regime_title": verdict.regime.title,
        "regime_could_be": [{"regime": other.label, "regime_title": other.title} for other in verdict.could_be],
    }


def _convergence(row: ConvergenceRow) -> dict[str, Any]:
    return {
        "rounds": row.rounds,
        "paper_q": row.paper_q,
        "alignment_error": number(float(row.alignment_error.mean())),
        "gradient_signal_ratio": number(float(row.gradient_signal_ratio.mean())),
        "num_images": len(row.alignment_error),
    }


def _image(sample: SampleDiagnosis, report: Tractability, file: str) -> dict[str, Any]:
    kappa, kappa_se = sample.kappa[report.ranks_used[0]]
    at = {
        str(asked): {"value": number(sample.kappa[used][0]), "se": number(sample.kappa[used][1])}
        for asked, used in zip(report.ranks, report.ranks_used, strict=True)
    }
    return {
        "file": file,
        "kappa": number(kappa),
        "kappa_se": number(kappa_se),
        "kappa_at": at,
        "cv": number(sample.cv[0]),
        "cv_se": number(sample.cv[1]),
        "cv_patches": number(sample.cv_patches[0]),
        "cv_patches_se": number(sample.cv_patches[1]),
        "r_eff_trunc": number(sample.r_eff_trunc[0]),
        "r_eff_trunc_se": number(sample.r_eff_trunc[1]),
        "r_eff_slq": number(sample.r_eff_slq[0]),
        "r_eff_slq_se": number(sample.r_eff_slq[1]),
        "r90": {"value": sample.r90[0], "is_lower_bound": sample.r90[1]},
        "energy": number(sample.energy[0]),
        "energy_se": number(sample.energy[1]),
        "gradient_signal_ratio": number(sample.gradient_signal_ratio),
        "singular_values": [number(value) for value in sample.singular_values],
    }
