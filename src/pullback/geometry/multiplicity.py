"""Effective layer multiplicity: how many independent layers a multi-layer decoder really reads."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from pullback.checks import whole_number
from pullback.data.pictures import Pictures
from pullback.errors import PullbackError
from pullback.geometry.spectrum import Probe, features_of
from pullback.operators import JacobianOperator, check_sensitive
from pullback.probes import INPUTS, ProbeMap
from pullback.randnla import Estimate, Streams
from pullback.randnla.estimate import student_scale


class LayeredProbe(Probe, Protocol):
    """A probe whose features are the tokens of several layers side by side, [B, N, K*D]."""

    @property
    def layers(self) -> tuple[int, ...]: ...


def layer_multiplicity(
    probe: LayeredProbe, images: Pictures, *, num_probes: int = 16, seed: int = 0, normalized: bool = False
) -> Estimate:
    """Estimate K_eff [B]: 1 if the layers' Jacobians act on the same output directions, K if on orthogonal ones.

    With J = [J_1 | ... | J_K] and A_k = J_k J_k^T in output space, the alignment of two layers is the cosine
    c_kl = <A_k, A_l> / (|A_k| |A_l|) and K_eff = K^2 / sum_kl c_kl, over the layers that have any effect. All inner
    products tr(A_k A_l) are estimated from the same Rademacher probes w as <A_k w, A_l w>, at one VJP and K JVPs a
    probe; the error is a jackknife over probes.
    """
    whole_number("num_probes", num_probes, least=2, expected="at least 2, for an error bar")
    if not hasattr(probe, "layers") or (isinstance(probe, ProbeMap) and probe.at != INPUTS):
        name = getattr(probe, "name", type(probe).__name__)
        raise PullbackError(
            f"probe: expected one of several layers side by side, got {name}, whose features are of one layer. Use "
            "multi_layer_probe(model, decoder)."
        )
    layers = len(probe.layers)
    features = features_of(probe, images, normalized)
    results = [
        _multiplicity(JacobianOperator(probe, features[i : i + 1]), features.shape[1:], layers, num_probes, seed, i)
        for i in range(len(features))
    ]
    return Estimate.join(results)


def _multiplicity(
    op: JacobianOperator, shape: torch.Size, layers: int, num_probes: int, seed: int, first: int
) -> Estimate:
    streams = Streams.from_seed(seed, op.batch, op.device, first)
    probes = streams.rademacher(op.rows, num_probes, op.dtype)
    pulled = (op.T @ probes).unflatten(1, shape).unflatten(2, (layers, -1))  # [1, N, K, D, m]
    images = []
    for layer in range(layers):
        alone = torch.zeros_like(pulled)
        alone[:, :, layer] = pulled[:, :, layer]
        images.append(op @ alone.flatten(1, 3))
    check_sensitive(pulled.double().square().sum((1, 2, 3, 4)))
    stacked = torch.stack(images, 1).double()  # A_k w as [1, K, M, m]
    inner = torch.einsum("bkop,blop->bpkl", stacked, stacked)  # per probe
    every = _k_eff(inner.mean(1))
    left_out = _k_eff((inner.sum(1, keepdim=True) - inner) / (num_probes - 1))  # [1, m]
    value = num_probes * every - (num_probes - 1) * left_out.mean(1)
    spread = (left_out - left_out.mean(1, keepdim=True)).square().sum(1) * (num_probes - 1) / num_probes
    se = student_scale(num_probes) * spread.sqrt()
    return Estimate.of(value.clamp(1, layers), se, round_off=op.round_off)


def _k_eff(inner: Tensor) -> Tensor:
    """[..., K, K] -> [...]. A layer without any effect has no direction and does not count."""
    norms = inner.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()
    read = norms > 0
    scale = read / torch.where(read, norms, 1.0)
    cosines = scale[..., :, None] * inner * scale[..., None, :]
    return read.sum(-1) ** 2 / cosines.sum((-2, -1))
