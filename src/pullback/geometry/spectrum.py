"""The leading singular values and modes of the Jacobian of a probe map, per sample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pullback.errors import ImageError
from pullback.geometry.batches import Probe, sketch_in_batches
from pullback.layout import TokenLayout
from pullback.operators import LowRankMetric, ProductCount
from pullback.randnla import Estimate, Sketch


@dataclass(frozen=True)
class Spectrum:
    """B samples, r modes, always with the batch axis."""

    singular_values: Tensor  # [B, r], descending
    modes: Tensor  # [B, r, N, D], orthonormal right singular vectors, a token map each
    kappa: Estimate  # [B, r], captured energy kappa_cap(1..r)
    total: Estimate  # [B], squared Frobenius norm of J
    effective_rank: Estimate | None  # [B], over the whole spectrum
    full: Tensor | None  # [B, min(M, N*D)], every singular value, where all of them are known
    method: str
    products: ProductCount  # per sample, of the one that took most
    seed: int
    token_layout: TokenLayout

    @property
    def rank(self) -> int:
        return self.singular_values.shape[1]

    def __len__(self) -> int:
        return len(self.singular_values)

    def metric(self, floor: float = 0.0) -> LowRankMetric:
        """The rank-r pullback metric eps I + sum_j sigma_j^2 v_j v_j^T."""
        return LowRankMetric(self.modes, self.singular_values.square(), floor)


def as_token_maps(columns: Tensor, shape: torch.Size) -> Tensor:
    """[B, N*D, r] -> [B, r, N, D]: the one place that turns flat columns into token maps."""
    return columns.mT.unflatten(-1, shape)


def spectrum(
    probe: Probe,
    images: Tensor,
    rank: int = 20,
    method: str = "auto",
    *,
    seed: int = 0,
    rtol: float | None = None,
    with_effective_rank: bool = False,
    power_iters: int = 2,
    sketch_width: int | None = None,
    rayleigh_ritz: bool = False,
    num_probes: int | None = None,
    precision: str = "float32",
    batch_size: int | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> Spectrum:
    """The leading ``rank`` modes of J at these images [B, 3, H, W].

    ``method``: "auto" (the cheaper of exact and krylov), "exact", "krylov", or "paper" (Algorithm 2 literally, with
    ``power_iters`` and ``sketch_width``; with ``rayleigh_ritz`` its better twin). ``rtol`` asks for smaller error bars.
    """
    if len(images) == 0:
        raise ImageError("images: expected at least one image, got an empty batch.")
    features = probe.features(images)
    done: list[Sketch] = []
    for part in sketch_in_batches(
        probe,
        features,
        rank,
        seed=seed,
        precision=precision,
        batch_size=batch_size,
        method=method,
        rtol=rtol,
        with_effective_rank=with_effective_rank,
        power_iters=power_iters,
        sketch_width=sketch_width,
        rayleigh_ritz=rayleigh_ritz,
        num_probes=num_probes,
    ):
        done.append(part.sketch)
        if on_progress is not None:
            on_progress(len(part.sketch.singular_values))
    ranks = [s.effective_rank for s in done if s.effective_rank is not None]
    spectra = [s.spectrum for s in done if s.spectrum is not None]
    return Spectrum(
        singular_values=torch.cat([s.singular_values for s in done]),
        modes=torch.cat([as_token_maps(s.right, features.shape[1:]) for s in done]),
        kappa=_joined([s.kappa for s in done]),
        total=_joined([s.total for s in done]),
        effective_rank=_joined(ranks) if ranks else None,
        full=torch.cat(spectra) if len(spectra) == len(done) else None,
        method=done[0].method,
        products=ProductCount(max(s.products.jvp for s in done), max(s.products.vjp for s in done)),
        seed=seed,
        token_layout=probe.token_layout(features),
    )


def _joined(parts: list[Estimate]) -> Estimate:
    return Estimate(torch.cat([part.value for part in parts]), torch.cat([part.se for part in parts]))


def token_importance(spectrum: Spectrum) -> Tensor:
    """imp*_t = sqrt(sum_j sigma_j^2 |v_j^(t)|^2), `eq:imp_target`: [B, N]."""
    return spectrum.metric().importance()
