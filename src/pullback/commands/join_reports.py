"""Diagnoses of samples that differ in shape, one at a time, as the diagnosis of all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from pullback.geometry import SampleDiagnosis, Tractability, classify
from pullback.geometry.convergence import join_tables
from pullback.operators import ProductCount


def join_reports(reports: Sequence[Tractability]) -> Tractability:
    """One report over all samples, its shape and its lowered ranks those of the largest Jacobian, its seed the first's.

    A smaller Jacobian is one with rows of zeros below: further singular values are 0, and kappa at a rank that it does
    not have is what it is at its own. Importance [B, N] has NaN behind the tokens of samples with fewer of them.
    """
    largest = max(reports, key=lambda report: (_max_rank(report), report.input_shape[0]))
    joined = replace(
        largest,
        seed=reports[0].seed,
        method=", ".join(dict.fromkeys(report.method for report in reports)),
        samples=tuple(_extended(sample, report, largest) for report in reports for sample in report.samples),
        convergence=join_tables([report.convergence for report in reports if report.convergence]),
        importance=torch.cat(_padded([report.importance for report in reports])),
        products=sum((report.products for report in reports), ProductCount()),
        seconds=sum(report.seconds for report in reports),
    )
    regime = classify(
        kappa=joined.kappa.mean,
        effective_rank=joined.r_eff_slq.mean,
        cv=joined.cv.mean,
        rank=joined.rank,
        max_rank=_max_rank(largest),
        thresholds=joined.thresholds,
    )
    return replace(joined, regime=regime)


def _max_rank(report: Tractability) -> int:
    return min(report.output_size, math.prod(report.input_shape))


def _extended(sample: SampleDiagnosis, own: Tractability, largest: Tractability) -> SampleDiagnosis:
    """With the ranks and the number of singular values of the largest."""
    missing = max(largest.ranks_used) - len(sample.singular_values)
    return replace(
        sample,
        kappa={rank: sample.kappa[used] for rank, used in zip(largest.ranks_used, own.ranks_used, strict=True)},
        singular_values=(*sample.singular_values, *(0.0,) * missing),
    )


def _padded(importance: Sequence[Tensor]) -> list[Tensor]:
    longest = max(part.shape[1] for part in importance)
    return [F.pad(part, (0, longest - part.shape[1]), value=math.nan) for part in importance]
