"""The squared Frobenius norm |J|_F^2 = tr(J^T J), from JVPs with random signs."""

from __future__ import annotations

import torch
from torch import Tensor

from pullback.operators.base import LinearOperator
from pullback.randnla.estimate import Estimate
from pullback.randnla.streams import Streams


def hutchinson(op: LinearOperator, *, num_probes: int = 100, streams: Streams) -> Estimate:
    """Estimate |J|_F^2 as the mean of |J z|^2 over Rademacher z (Hutchinson 1990; the paper's Algorithm 1)."""
    energies = _energies(op @ streams.rademacher(op.cols, num_probes, op.dtype))
    return Estimate.from_samples(energies, round_off=op.round_off)


def deflated_hutchinson(
    op: LinearOperator,
    basis: Tensor,
    image: Tensor,
    *,
    num_probes: int = 32,
    rtol: float | None = None,
    max_probes: int = 1024,
    first: tuple[Tensor, Tensor] | None = None,
    streams: Streams,
) -> Estimate:
    """Estimate |J|_F^2 as |J V|_F^2 + mean |J (I - V V^T) z|^2, for orthonormal V [B, n, K] with image J V [B, m, K].

    The first term is known and only the second is sampled (Meyer et al. 2021, Hutch++), which is unbiased for every V
    that does not depend on z. With ``rtol``, ``num_probes`` more at a time until se <= rtol value for every sample.
    ``first``: probes (z, J z) that were drawn and multiplied before.
    """
    probes, probe_images = first or draw_probes(op, num_probes, streams)
    samples = tail_energies(probes, probe_images, basis, image)
    captured = energy(image)
    total = Estimate.from_samples(samples, captured, round_off=op.round_off)
    while rtol is not None and samples.shape[-1] < max_probes and (total.relative_se > rtol).any():
        more = tail_energies(*draw_probes(op, min(num_probes, max_probes - samples.shape[-1]), streams), basis, image)
        samples = torch.cat([samples, more], -1)
        total = Estimate.from_samples(samples, captured, round_off=op.round_off)
    return total


def draw_probes(op: LinearOperator, num_probes: int, streams: Streams) -> tuple[Tensor, Tensor]:
    """Draw Rademacher z [B, n, k] and multiply: z and J z [B, m, k]."""
    probes = streams.rademacher(op.cols, num_probes, op.dtype)
    return probes, op @ probes


def tail_energies(probes: Tensor, probe_images: Tensor, basis: Tensor, image: Tensor) -> Tensor:
    """Return |J (I - V V^T) z|^2 [B, k] without further products, since J V is known."""
    return _energies(probe_images - image @ (basis.mT @ probes))


def energy(image: Tensor) -> Tensor:
    """Return the squared Frobenius norm [B] of [B, m, K], in float64."""
    return _energies(image).sum(-1)


def _energies(image: Tensor) -> Tensor:
    return image.double().square().sum(1)
