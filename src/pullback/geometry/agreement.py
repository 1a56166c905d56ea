"""How far two probes of the same features agree in the directions that matter: a probe, and one that approximates it.

With J of the original and J~ of the approximation, V and V~ [n, r] their leading right singular vectors:

    principal angles    between the spans of V and V~: 0 to 90 degrees, r of them
    alignment V_1       |V^T V~|_F^2 / r, the mean of their squared cosines
    captured energy     |J V~|_F^2 / |J|_F^2: what a metric that knows the r directions of the approximation sees of the
                        task itself; never more than kappa(r) of J, which the best r directions see
    correlation         Spearman's rho of the two token importances over the patches of an image

It was made for bottlenecks (`pullback.learning.bottleneck.compressed_probe`), but any two probes at one place will do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pullback.checks import finite_number, of_kind
from pullback.data.pictures import Pictures
from pullback.errors import PullbackError, RankError, counted
from pullback.evaluation import spearman
from pullback.geometry.diagnosis import checked_ranks, rank_for
from pullback.geometry.spectrum import Probe, Spectrum, features_of, in_batches, output_size, samples_that_fit, spectrum
from pullback.geometry.summary import Summary, summarize
from pullback.operators import JacobianOperator, LowRankMetric, ProductCount
from pullback.randnla import Estimate

_PER_IMAGE = ("captured", "alignment", "share_of_best", "correlation")
_SAME_ENERGY = 0.05
"""How far the energy of a known mode may be off: more than round-off, less than between two images."""


@dataclass(frozen=True, repr=False)
class Agreement:
    """B images. The subspaces are those of the first of the ``ranks``; kappa is stated at all of them."""

    ranks: tuple[int, ...]
    original: Spectrum
    approximation: Spectrum
    angles: Tensor  # [B, r], principal angles in radians, ascending, float64
    captured: Estimate  # [B], share of |J|_F^2 in the leading directions of the approximation
    correlation: Tensor  # [B], Spearman's rho of the importances of patches

    def __len__(self) -> int:
        return len(self.angles)

    @property
    def rank(self) -> int:
        return self.ranks[0]

    @property
    def alignment(self) -> Tensor:
        """V_1 [B]: 1 where the subspaces are the same, r / (N D) on average where they have nothing in common."""
        return self.angles.cos().square().mean(-1)

    @property
    def share_of_best(self) -> Tensor:
        """captured / kappa(r) of the original [B]: 1 where its own directions see no more of the task."""
        return self.captured.value / self.original.kappa.value[:, self.rank - 1]

    @property
    def products(self) -> ProductCount:
        """Products per image with both Jacobians, for the spectra and the captured energy."""
        return self.original.products + self.approximation.products + ProductCount(jvp=self.rank)

    def summary(self, name: str) -> Summary:
        """Return mean and error over images of "captured", "alignment", "share_of_best" or "correlation"."""
        if name not in _PER_IMAGE:
            raise PullbackError(f"name: expected one of {', '.join(_PER_IMAGE)}, got {name!r}.")
        found = getattr(self, name)
        return summarize(found.pairs() if isinstance(found, Estimate) else [(value, 0.0) for value in found.tolist()])

    def rows(self) -> list[dict[str, Any]]:
        """Return the numbers of each image as plain data, for JSON."""
        sides = {"original": _facts(self.original, self.ranks), "approximation": _facts(self.approximation, self.ranks)}
        return [
            {
                "captured": {"value": value, "se": se},
                "alignment": self.alignment[place].item(),
                "share_of_best": self.share_of_best[place].item(),
                "correlation": self.correlation[place].item(),
                "angles_degrees": [math.degrees(angle) for angle in self.angles[place].tolist()],
                **{name: facts[place] for name, facts in sides.items()},
            }
            for place, (value, se) in enumerate(self.captured.pairs())
        ]

    def __repr__(self) -> str:
        samples = counted(len(self.angles), self.original.token_layout.unit)
        which = f"{self.approximation.probe} for {self.original.probe}, {samples}, rank {self.rank}"
        return f"Agreement({which}, captured {self.summary('captured')})"

    def __str__(self) -> str:
        best = summarize(_at(self.original.kappa, self.rank).pairs())
        return (
            f"{self.approximation.probe} for {self.original.probe}: its first {self.rank} directions hold "
            f"{self.summary('captured')} of the original's energy (the best ones {best}), V_1 = "
            f"{self.summary('alignment')}, importances of patches rho = {self.summary('correlation')}."
        )


def agreement(
    original: Probe,
    approximation: Probe,
    images: Pictures,
    rank: int | Sequence[int] = 20,
    method: str = "auto",
    *,
    known: Spectrum | None = None,
    normalized: bool = False,
    seed: int = 0,
    rtol: float = 1e-4,
    with_effective_rank: bool = True,
    precision: str = "float32",
    batch_size: int | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> Agreement:
    """Compare the leading directions of two probes at the same features of some images.

        pb.agreement(probe, pb.compressed_probe(probe, vae), images, rank=(20, 50))

    ``rank``: of the subspaces, or several, the first for the subspaces and all for kappa; the largest is as far as
    r_0.90 is looked for. ``rtol``: how accurate the energies of the modes are where they come from Krylov spaces; 1e-4
    counts as exact. ``known``: the spectrum of the original at these images with at least these ranks, such as
    ``found.original`` of another agreement, where several approximations are compared with it. The effective rank takes
    most of the products of a dense decoder, and can be left out. The rest is as in `spectrum`; ``on_progress`` hears of
    every image twice, once for each probe.
    """
    ranks = checked_ranks(rank)
    finite_number("rtol", rtol, least=0, expected="a relative error such as 1e-4")
    features = _same_features(original, approximation, images, normalized)
    sides = [output_size(probe, own) for probe, own in zip((original, approximation), features, strict=True)]
    smaller = min(*sides, features[0][0].numel())
    if max(ranks) > smaller:
        raise RankError(f"rank: expected at most {smaller}, the smaller side of the Jacobians, got {max(ranks)}.")
    if known is not None:
        of_kind("known", known, Spectrum, "a Spectrum of the original")
        same = (known.probe, len(known), *known.modes.shape[2:]) == (original.name, *features[0].shape)
        if not same or known.rank < max(ranks):
            raise PullbackError(
                f"known: expected the spectrum of {original.name} at these {len(features[0])} images, with rank "
                f"{max(ranks)} at least, got that of {known.probe} at {len(known)} images, with rank {known.rank}."
            )
        _check_known(known, original, features[0], precision)

    def computed(probe: Probe) -> Spectrum:
        return spectrum(
            probe,
            images,
            max(ranks),
            method,
            normalized=normalized,
            seed=seed,
            modes_rtol=rtol,
            with_effective_rank=with_effective_rank,
            precision=precision,
            batch_size=batch_size,
            on_progress=on_progress,
        )

    before, after = known or computed(original), computed(approximation)
    energy = captured_energy(original, features[0], after.modes[:, : ranks[0]], precision)
    share = energy / before.total.value
    maps = [LowRankMetric(s.modes[:, : ranks[0]], s.singular_values[:, : ranks[0]].square()) for s in (before, after)]
    patches = [before.token_layout.patch_map(own.importance()).flatten(1) for own in maps]
    return Agreement(
        ranks=ranks,
        original=before,
        approximation=after,
        angles=principal_angles(*(side.modes[:, : ranks[0]].flatten(2).mT for side in (before, after))),
        captured=Estimate(share, share * before.total.relative_se),
        correlation=spearman(*patches),
    )


def captured_energy(probe: Probe, features: Tensor, directions: Tensor, precision: str = "float32") -> Tensor:
    """Compute |J V|_F^2 [B] in float64 of directions [B, r, N, D] at features [B, N, D], by r JVPs an image."""

    def work(part: Tensor, first: int) -> Tensor:
        columns = directions[first : first + len(part)].flatten(2).mT
        pushed = JacobianOperator(probe, part, precision=precision) @ columns
        return torch.linalg.vector_norm(pushed, dim=(1, 2), dtype=torch.float64).square()

    return torch.cat(list(in_batches(work, features, samples_that_fit(probe, features, directions.shape[1]))))


def principal_angles(first: Tensor, second: Tensor) -> Tensor:
    """Return the angles between the column spans of [B, n, r] and [B, n, r] in radians, ascending: [B, r], float64.

    Columns that are zero stand for directions that do not exist, and are orthogonal to all others. Small angles come
    from their sines, whose digits cosines lose.
    """
    one, other = (_orthonormal(columns) for columns in (first, second))
    overlap = one.mT @ other
    _, cosines, turned = torch.linalg.svd(overlap)
    sines = torch.linalg.vector_norm((other - one @ overlap) @ turned.mT, dim=1)
    found = torch.where(cosines.square() > 0.5, sines.clamp_max(1).asin(), cosines.clamp_max(1).acos())
    return found.sort(-1).values


def _orthonormal(columns: Tensor) -> Tensor:
    """Return an orthonormal basis [B, n, r] of the columns in float64, with zeros where they are zero, at the end."""
    exists = torch.linalg.vector_norm(columns, dim=1, keepdim=True) > 0
    return torch.linalg.qr(columns.double()).Q * exists


def _same_features(original: Probe, approximation: Probe, images: Pictures, normalized: bool) -> tuple[Tensor, Tensor]:
    """Return the features of both probes, which differ at most in what they carry besides, or raise an error."""
    features, others = (features_of(probe, images, normalized) for probe in (original, approximation))
    plain, beside = features.as_subclass(Tensor), others.as_subclass(Tensor)
    if plain.shape != beside.shape or not torch.allclose(plain, beside, rtol=1e-3, atol=1e-3 * float(plain.std())):
        raise PullbackError(
            f"approximation: expected a probe at the same features as {original.name}, {list(plain.shape)}, got "
            f"{approximation.name}, {list(beside.shape)}. Load both at one layer, or at the inputs of one decoder."
        )
    return features, others


def _check_known(known: Spectrum, original: Probe, features: Tensor, precision: str) -> None:
    """Raise an error unless the first mode of a known spectrum has its energy at these features too, by one JVP."""
    expected = known.singular_values[:, 0].double().square()
    found = captured_energy(original, features, known.modes[:, :1], precision)
    wrong = ((found - expected).abs() > _SAME_ENERGY * expected).nonzero().flatten().tolist()
    if wrong:
        raise PullbackError(
            f"known: expected the spectrum of {original.name} at these images, got one whose first mode has the energy "
            f"{expected[wrong[0]].item():.4g} there and {found[wrong[0]].item():.4g} here, at image {wrong[0]}. Leave "
            "it out, or give the one that was computed of these images in this order."
        )


def _at(kappa: Estimate, rank: int) -> Estimate:
    return Estimate(kappa.value[:, rank - 1], kappa.se[:, rank - 1])


def _facts(found: Spectrum, ranks: Sequence[int]) -> list[dict[str, Any]]:
    """Return what a spectrum says of each image: kappa, the effective rank, r_0.90 and the singular values."""
    known = found.singular_values if found.full is None else found.full
    shares = known.double().square().cumsum(1) / found.total.value[:, None]
    kappa = {str(rank): _at(found.kappa, rank).pairs() for rank in ranks}
    effective = None if found.effective_rank is None else found.effective_rank.pairs()
    rows = []
    for place, (energy, se) in enumerate(found.total.pairs()):
        r90, is_bound = rank_for(shares[place], 0.90)
        rows.append(
            {
                "kappa": {rank: _pair(pairs[place]) for rank, pairs in kappa.items()},
                "effective_rank": None if effective is None else _pair(effective[place]),
                "r90": {"value": r90, "is_lower_bound": is_bound},
                "energy": _pair((energy, se)),
                "singular_values": found.singular_values[place].tolist(),
            }
        )
    return rows


def _pair(pair: tuple[float, float]) -> dict[str, float]:
    return {"value": pair[0], "se": pair[1]}
