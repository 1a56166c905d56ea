"""The pruning theorem (`thm:pruning`) at one pair of tensors: every quantity of it measured, nothing assumed.

    |phi(F) - phi(F^)| <= sum_{t in T} |J_:,t(F^)|_F |rho_t| + beta/2 sum_{t in T} |rho_t|^2,    rho_t = F_t - F^_t

phi is the decoder as a function of the tensor that it reads, F that tensor without and F^ with pruning, T the removed
tokens. The proof takes F_t = F^_t for every other token. In a transformer kept tokens attended to the removed ones, so
they moved too, and what the proof shows is the same line with both sums over ALL tokens: the corrected bound.

**What beta is here.** R_2 = phi(F) - phi(F^) - J(F^)(F - F^) is computed, and beta = 2 |R_2| / sum_t |rho_t|^2 over all
tokens: the least beta for which Taylor's |R_2| <= beta/2 |F - F^|^2 holds at this pair. The theorem wants the supremum
of the Hessian's operator norm over the segment and over all directions; one remainder in one direction is a lower bound
of it. So the corrected bound holds by construction, what it can show is how loose it is; the stated bound can fail, and
``beta_needed`` says which beta would have saved it, to be read beside ``beta_where_read``. Where phi has kinks (ReLU)
there is no such supremum at all: ``remainder_order`` tells from the data whether the remainder is still like a square.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pullback.errors import PullbackError, ShapeError
from pullback.geometry.scores import block_energies
from pullback.operators import JacobianOperator
from pullback.probes import Features

SEGMENT = (1 / 64, 1 / 32, 1 / 8, 1 / 2, 1.0)
"""Where on the way from F^ to F the remainder is looked at; the two first give its order."""
MOVED = 1e-6
"""A kept token has moved when |rho_t| is more than this share of |F_t|."""
_ROUND_OFF = 64
"""Units in the last place of |phi(F)| that a difference of two outputs may be off by."""


@dataclass(frozen=True)
class PruningBound:
    """B samples, N tokens, float64. Norms |.| are Euclidean, over all of an output or of a token's row."""

    block_norms: Tensor  # [B, N], |J_:,t(F^)|_F
    residuals: Tensor  # [B, N], |rho_t|
    token_norms: Tensor  # [B, N], |F_t|
    removed: Tensor  # [B, N], bool: the set T
    output_norm: Tensor  # [B], |phi(F)|
    true_error: Tensor  # [B], |phi(F) - phi(F^)|
    removed_error: Tensor  # [B], the same with F at kept tokens: the error that the theorem speaks of
    linear_change: Tensor  # [B], |J(F^)(F - F^)|: the first term before norms are added up token by token
    remainders: Tensor  # [B, S], |phi(F^ + s (F - F^)) - phi(F^) - s J(F^)(F - F^)| at the s of SEGMENT
    round_off: Tensor  # [B]: differences of outputs below this are noise

    @property
    def remainder(self) -> Tensor:
        """|R_2| [B]."""
        return self.remainders[:, -1]

    @property
    def beta(self) -> Tensor:
        """2 |R_2| / sum_t |rho_t|^2 over all tokens [B]: a lower bound of the theorem's beta."""
        return _over(2 * self.remainder, self.residuals.square().sum(1))

    @property
    def beta_on_segment(self) -> Tensor:
        """The largest 2 |R_2(s)| / |s (F - F^)|^2 over the points looked at [B]: a better lower bound."""
        steps = self.remainders.new_tensor(SEGMENT).square()
        return _over((2 * self.remainders / steps).amax(1), self.residuals.square().sum(1))

    @property
    def beta_where_read(self) -> Tensor:
        """2 |R_2| / sum |rho_t|^2 over tokens whose block is not zero [B]. If a zero block means that phi never reads
        the token, as for a class-token decoder, this is a lower bound too, and not diluted by what nobody reads."""
        return _over(2 * self.remainder, (self.residuals.square() * ~self._unread).sum(1))

    @property
    def remainder_order(self) -> Tensor:
        """p of |R_2(s)| ~ s^p near F^ [B]: 2 where phi is C^2, NaN where no remainder rises above round-off."""
        near, far = self.remainders[:, 0], self.remainders[:, 1]
        order = (far / near).log() / math.log(SEGMENT[1] / SEGMENT[0])
        return torch.where(near > self.round_off, order, torch.nan)

    @property
    def first_term(self) -> Tensor:
        """sum_{t in T} |J_:,t|_F |rho_t| [B]."""
        return first_order_term(self.block_norms, self.residuals, self.removed)

    @property
    def second_term(self) -> Tensor:
        """beta/2 sum_{t in T} |rho_t|^2 [B]."""
        return self.beta / 2 * (self.residuals.square() * self.removed).sum(1)

    @property
    def stated(self) -> Tensor:
        """The right-hand side of `eq:pruning_bound` [B], over removed tokens."""
        return self.first_term + self.second_term

    @property
    def fails(self) -> Tensor:
        """[B] bool: the true error is above the stated bound with the measured beta, by more than round-off."""
        return self.true_error > self.stated + self.round_off

    @property
    def holds_for_sure(self) -> Tensor:
        """[B] bool: the stated bound holds with the theorem's own beta, because one of its lower bounds suffices. Where
        this is false and ``beta_needed`` finite, nothing is decided; where it is infinite, no beta saves the bound."""
        return self.beta_needed <= torch.maximum(self.beta_on_segment, self.beta_where_read)

    @property
    def beta_needed(self) -> Tensor:
        """The beta with which the stated bound would just hold [B]; infinite where no beta helps."""
        missing = self.true_error - self.first_term
        lever = (self.residuals.square() * self.removed).sum(1) / 2
        return torch.where(missing > self.round_off, missing / lever, 0.0)

    @property
    def corrected_first_term(self) -> Tensor:
        """sum_t |J_:,t|_F |rho_t| [B], over all tokens."""
        return first_order_term(self.block_norms, self.residuals, torch.ones_like(self.removed))

    @property
    def corrected_second_term(self) -> Tensor:
        """beta/2 sum_t |rho_t|^2 [B], over all tokens: |R_2|."""
        return self.remainder

    @property
    def corrected(self) -> Tensor:
        """The bound that the proof gives [B]: both sums over all tokens."""
        return self.corrected_first_term + self.corrected_second_term

    @property
    def kept_moved(self) -> Tensor:
        """Share of the kept tokens that moved [B]; the theorem assumes 0."""
        moved = self.residuals > MOVED * self.token_norms
        return _over((moved & ~self.removed).sum(1).double(), (~self.removed).sum(1).double())

    @property
    def kept_energy(self) -> Tensor:
        """Share of |F - F^|^2 that sits on kept tokens [B]; the theorem assumes 0."""
        energies = self.residuals.square()
        return _over((energies * ~self.removed).sum(1), energies.sum(1))

    @property
    def kept_residual(self) -> Tensor:
        """Mean |rho_t| / |F_t| of the kept tokens [B]; the theorem assumes 0."""
        return self._mean_relative(~self.removed)

    @property
    def removed_residual(self) -> Tensor:
        """Mean |rho_t| / |F_t| of the removed tokens [B]."""
        return self._mean_relative(self.removed)

    @property
    def zero_blocks(self) -> Tensor:
        """Share of the removed tokens whose block is zero [B]. At 1 the stated first term is zero whatever happens."""
        return _over((self._unread & self.removed).sum(1).double(), self.removed.sum(1).double())

    @property
    def _unread(self) -> Tensor:
        """[B, N] bool: the block is zero, up to round-off."""
        return self.block_norms <= torch.finfo(torch.float32).eps * self.block_norms.amax(1, keepdim=True)

    def _mean_relative(self, chosen: Tensor) -> Tensor:
        relative = _over(self.residuals, self.token_norms)
        return _over((relative * chosen).sum(1), chosen.sum(1).double())


def first_order_term(block_norms: Tensor, residuals: Tensor, removed: Tensor) -> Tensor:
    """sum_{t in T} |J_:,t|_F |rho_t|: [B, N], [B, N], bool [B, N] -> [B]."""
    return (block_norms * residuals * removed).sum(-1)


@torch.no_grad()
def pruning_bound(
    phi: Callable[[Tensor], Tensor],
    full: Tensor,
    pruned: Tensor,
    removed: Tensor,
    *,
    block_norms: Tensor | None = None,
) -> PruningBound:
    """Measure every term of the theorem at F = ``full``, F^ = ``pruned`` [B, N, D], T = ``removed`` [B, N] bool.

    ``phi``: a `ProbeMap` at the last layer, one at the decoder's inputs (its tensor holds all layers that the decoder
    reads), or any function [B, N, D] -> [B, ...] whose samples do not mix. ``full`` may carry layers below
    (`Features`); they are the constants of phi at F^ too. Use float64: the remainder is a difference of nearly equal
    numbers.
    ``block_norms``: |J_:,t(F^)|_F [B, N] where they are known already, sampled or in a lower precision, which serves
    them well; otherwise they take min(M, N D) products.
    """
    _check(phi, full, pruned, removed, block_norms)
    plain, reached = full.as_subclass(Tensor), pruned.as_subclass(Tensor)
    difference = plain - reached

    def at(tokens: Tensor) -> Tensor:
        if isinstance(full, Features):
            tokens = Features.attach(tokens, full.token_layout, full.below)
        return tokens

    def output(tokens: Tensor) -> Tensor:
        return phi(at(tokens)).flatten(1).double()

    operator = JacobianOperator(phi, at(reached))
    base, aim = operator.output.double(), output(plain)
    linear = (operator @ difference.flatten(1)[..., None])[..., 0].double()
    along = [output(reached + step * difference) for step in SEGMENT[:-1]] + [aim]
    remainders = [value - base - step * linear for step, value in zip(SEGMENT, along, strict=True)]
    only_removed = torch.where(removed[..., None], reached, plain)
    if block_norms is None:
        block_norms = block_energies(operator, full.shape[1]).sqrt()
    return PruningBound(
        block_norms=block_norms.double(),
        residuals=difference.double().norm(dim=2),
        token_norms=plain.double().norm(dim=2),
        removed=removed,
        output_norm=aim.norm(dim=1),
        true_error=(aim - base).norm(dim=1),
        removed_error=(aim - output(only_removed)).norm(dim=1),
        linear_change=linear.norm(dim=1),
        remainders=torch.stack([part.norm(dim=1) for part in remainders], 1),
        round_off=_ROUND_OFF * torch.finfo(full.dtype).eps * aim.norm(dim=1),
    )


def _over(part: Tensor, whole: Tensor) -> Tensor:
    """part / whole, and 0 where there is no whole."""
    return torch.where(whole > 0, part / torch.where(whole > 0, whole, 1), 0.0)


def _check(
    phi: Callable[[Tensor], Tensor], full: Tensor, pruned: Tensor, removed: Tensor, block_norms: Tensor | None
) -> None:
    if full.ndim != 3 or full.shape != pruned.shape:
        raise ShapeError(
            f"full, pruned: expected the same [B, N, D], got {list(full.shape)} and {list(pruned.shape)}. Removed "
            'tokens must be re-inserted: run the plan with reinsert="frozen", "drift" or "copy".'
        )
    if removed.shape != full.shape[:2] or removed.dtype != torch.bool:
        raise ShapeError(
            f"removed: expected a bool mask {list(full.shape[:2])}, got {removed.dtype} {list(removed.shape)}."
        )
    if block_norms is not None and block_norms.shape != full.shape[:2]:
        raise ShapeError(f"block_norms: expected {list(full.shape[:2])}, got {list(block_norms.shape)}.")
    if getattr(phi, "output_metric", None) is not None:
        raise PullbackError(
            "phi: expected the decoder itself, got a probe with an output metric, whose Jacobian is not that of its "
            "output. Load the probe without one."
        )
