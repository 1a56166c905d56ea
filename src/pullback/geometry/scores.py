"""What the geometry says of each token, in the form that pruning asks for it: (tokens [B, N, D], context) -> [B, N].

    imp*_t = sqrt(sum_{j<=r} sigma_j^2 |v_j^(t)|^2)   (`eq:imp_target`),    |J_:,t|_F,    and sigma_j v_j for `eq:dtask`

of the probe map that starts where the tokens are: block ``context.layer`` has just run, and J is the Jacobian of the
rest at exactly these tokens, pruned or not. So one score serves every stage, whatever layer the probe was loaded for.
Attention inside J counts each token once: log sizes that a plan adds to later logits are not part of the probe map.
Nothing here depends on which other images are in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from pullback.checks import shown, whole_number
from pullback.errors import DecoderError, PullbackError, RankError, ShapeError
from pullback.geometry.importance import block_norms
from pullback.geometry.spectrum import as_token_maps, finite_products, in_batches, samples_that_fit
from pullback.operators import JacobianOperator, LinearOperator, LowRankMetric, check_sensitive
from pullback.probes import Features, ProbeMap
from pullback.randnla import Streams, choose_method, leading_modes
from pullback.tokens import TokenLayout

_IDENTITY_CHUNK = 64


class Context(Protocol):
    """What these scores read of a pruning context. ``taps`` (layer -> F^layer [B, N, D]) is optional: decoders that
    read layers below the stage need what was there, because they hold it constant."""

    @property
    def layer(self) -> int: ...

    @property
    def layout(self) -> TokenLayout: ...

    @property
    def positions(self) -> Tensor: ...


TokenScore = Callable[[Tensor, Context], Tensor]  # (tokens [B, N, D], context) -> [B, N]
TokenModes = Callable[[Tensor, Context], Tensor]  # (tokens [B, N, D], context) -> sigma_j v_j [B, r, N, D]


def exact_importance(
    probe: ProbeMap, rank: int = 20, *, method: str = "auto", rtol: float = 1e-3, seed: int = 0
) -> TokenScore:
    """Return imp* by the Jacobian itself, as a score of tokens.

    ``method``: see `randnla.modes`; "krylov" goes on until the energies are accurate to ``rtol``. Every image uses the
    same ``seed``, so its score is its own.
    """
    metric_at = _metric(probe, rank, method, rtol, seed)

    def score(tokens: Tensor, context: Context) -> Tensor:
        return metric_at(tokens, context).importance()

    return score


def exact_modes(
    probe: ProbeMap, rank: int = 20, *, method: str = "auto", rtol: float = 1e-3, seed: int = 0
) -> TokenModes:
    """Return sigma_j v_j [B, r, N, D] by the Jacobian itself; the arguments are those of `exact_importance`."""
    metric_at = _metric(probe, rank, method, rtol, seed)

    def modes(tokens: Tensor, context: Context) -> Tensor:
        return metric_at(tokens, context).token_factors().transpose(1, 2)

    return modes


def exact_block_norms(probe: ProbeMap, num_probes: int | None = None, *, seed: int = 0) -> TokenScore:
    """Return |J_:,t|_F as a score of tokens: by min(M, N D) products, or by ``num_probes`` VJPs (squares unbiased)."""

    def score(tokens: Tensor, context: Context) -> Tensor:
        def work(op: JacobianOperator, shape: torch.Size, streams: Streams) -> Tensor:
            if num_probes is None:
                return block_energies(op, shape[0])
            return block_norms(op, shape[0], num_probes=num_probes, streams=streams).squared.value

        energies = torch.cat(_per_part(probe, tokens, context, work, seed))
        check_sensitive(energies.sum(1))
        return energies.clamp_min(0).sqrt()

    return score


def block_energies(op: LinearOperator, tokens: int) -> Tensor:
    """Compute |J_:,t|_F^2 [B, N] in float64, exactly: products with the identity of the shorter side, in slices.

    J is never held: a dense decoder's would not fit.
    """
    by_rows = op.rows <= op.cols
    side = op.rows if by_rows else op.cols
    energies = torch.zeros(op.batch, tokens, dtype=torch.float64, device=op.device)
    for first in range(0, side, _IDENTITY_CHUNK):
        count = min(_IDENTITY_CHUNK, side - first)
        columns = torch.zeros(op.batch, side, count, dtype=op.dtype, device=op.device)
        columns[:, first : first + count] = torch.eye(count, dtype=op.dtype, device=op.device)
        if by_rows:
            pulled = (op.T @ columns).unflatten(1, (tokens, -1))
            energies += torch.linalg.vector_norm(pulled, dim=(2, 3), dtype=torch.float64).square()
        else:
            of_columns = torch.linalg.vector_norm(op @ columns, dim=1, dtype=torch.float64).square()  # [B, count]
            owner = torch.arange(first, first + count, device=op.device) // (op.cols // tokens)
            energies.index_add_(1, owner, of_columns)
    return energies


def _metric(
    probe: ProbeMap, rank: int, method: str, rtol: float, seed: int
) -> Callable[[Tensor, Context], LowRankMetric]:
    _check_probe(probe)
    whole_number("rank", rank, error=RankError)
    choose_method(method, 1, 1, rank)  # refuses unknown names before anything is computed

    def metric_at(tokens: Tensor, context: Context) -> LowRankMetric:
        def work(op: JacobianOperator, shape: torch.Size, streams: Streams) -> tuple[Tensor, Tensor]:
            svd = leading_modes(op, rank, method=method, rtol=rtol, streams=streams).svd
            return svd.singular_values, as_token_maps(svd.right, shape)

        parts = _per_part(probe, tokens, context, work, seed, rank)
        values, modes = (torch.cat(part) for part in zip(*parts, strict=True))
        check_sensitive(values.square().sum(1))
        return LowRankMetric(modes, values.square())

    return metric_at


def _per_part(probe: ProbeMap, tokens: Tensor, context: Context, work: Callable, seed: int, rank: int = 20) -> list:
    """Call work(J, [N, D], streams) on as many samples at a time as memory holds."""
    _check_probe(probe)
    features = _features(probe, tokens, context)

    def part_of(part: Tensor, first: int) -> object:
        streams = Streams.from_seeds([seed] * len(part))
        operator = JacobianOperator(_from_here(probe, context, slice(first, first + len(part))), part)
        with finite_products(operator, streams, first):
            return work(operator, part.shape[1:], streams)

    one = _from_here(probe, context, slice(0, 1))
    return list(in_batches(part_of, features, samples_that_fit(one, features, rank)))


def _from_here(probe: ProbeMap, context: Context, samples: slice) -> ProbeMap:
    """Return the probe map that starts at the stage's layer, with the rotary positions of the tokens that are left."""
    return replace(probe, backbone=probe.backbone.gathered(context.positions[samples]), at=context.layer)


def _features(probe: ProbeMap, tokens: Tensor, context: Context) -> Tensor:
    """Return the tokens as features of the probe map, with the layers below that its decoder reads."""
    if tokens.ndim != 3 or tokens.shape[-1] != probe.backbone.dim:
        raise ShapeError(f"tokens: expected [B, N, {probe.backbone.dim}] of {probe.backbone.name}, got {_size(tokens)}")
    if probe.decoder.rows is None and tokens.shape[1] != context.layout.tokens:
        raise DecoderError(
            f"tokens: decoder {probe.decoder.name!r} reads every token, expected all {context.layout.tokens} of the "
            f"image at layer {context.layer}, got {tokens.shape[1]}: its Jacobian at a pruned sequence does not "
            "exist. Score later stages of a dense decoder with a head, or prune in one stage."
        )
    tokens = tokens.detach().to(probe.backbone.dtype)
    taps: Mapping[int, Tensor] = getattr(context, "taps", {}) or {}
    last = context.layer - 1 if probe.read_probe_layer else context.layer
    below = {layer: tokens if layer == context.layer else taps.get(layer) for layer in probe.decoder.layers}
    below = {layer: constant for layer, constant in below.items() if layer <= last}
    lost = [layer for layer, constant in below.items() if constant is None]
    if lost:
        raise DecoderError(
            f"context.taps: decoder {probe.decoder.name!r} also reads layers {lost}, below the stage at layer "
            f"{context.layer}, expected their tokens in context.taps, got layers {sorted(taps)}. Let the run keep "
            "them, or score with a head."
        )
    constants = {layer: constant.to(tokens) for layer, constant in below.items() if constant is not None}
    return Features.attach(tokens, context.layout, constants)


def _check_probe(probe: ProbeMap) -> None:
    if not isinstance(probe, ProbeMap) or not isinstance(probe.layer, int):
        got = probe.name if isinstance(probe, ProbeMap) else shown(probe)
        raise PullbackError(
            f"probe: expected a ProbeMap at a layer (pullback.load_probe), got {got}: "
            "tokens of one layer are scored, so the probe must start at one layer."
        )


def _size(tokens: Tensor) -> str:
    return f"{list(tokens.shape)}. Score with a probe of the model that is pruned."
