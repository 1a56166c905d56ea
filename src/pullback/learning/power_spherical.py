"""The power spherical distribution and the uniform one on the unit sphere of R^d (De Cao and Aziz, arXiv 2006.04437).

A direction x has the density N(κ, d) (1 + μᵀx)^κ around the location μ: like a von Mises–Fisher, but without Bessel
functions and without rejection. Written relative to the uniform distribution, with s = (1 + μᵀx) / 2 and
β = (d − 1) / 2,

    log p(x) = −log |S^(d−1)| + κ log s + D(κ),     D(κ) = [lnΓ(2β + κ) − lnΓ(β + κ)] − [lnΓ(2β) − lnΓ(β)],

so that E[log s] = −D′(κ), and the divergence from the uniform distribution is D(κ) − κ D′(κ): exactly 0 at κ = 0. Under
it s is Beta(β + κ, β) distributed, and the direction of x around μ is uniform.

Everything of one number per direction is computed in float64, whatever the dtype of the arguments, and returned in that
dtype: differences of lnΓ and 1 − μᵀx would lose all their digits in float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints, register_kl

from pullback.checks import of_kind, whole_number
from pullback.errors import NumericsError, PullbackError, ShapeError

Shape = torch.Size | tuple[int, ...] | list[int]
_TOLERANCE: Mapping[torch.dtype, float] = {torch.float64: 1e-6, torch.float32: 1e-4}
"""How far from 1 the length of a direction may be; 1e-2 in the other dtypes."""
_PRECISE_NOISE = 16
"""Up to this dimension normal vectors are drawn in float64: with so few coordinates one can lie along the location."""
_STIRLING = 1e5
"""Above it differences of lnΓ are taken by Stirling's series."""


class _UnitSphere(constraints.Constraint):
    """Vectors of length one along the last axis."""

    event_dim = 1

    def check(self, value: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(value, dim=-1, dtype=torch.float64)
        return (length - 1).abs() <= _TOLERANCE.get(value.dtype, 1e-2)


unit_sphere = _UnitSphere()


class PowerSpherical(Distribution):
    """Directions around ``loc`` with density N(κ, d) (1 + locᵀx)^κ on the unit sphere of R^d.

    ``loc`` [..., d] has length one along its last axis, d ≥ 2; ``concentration`` κ ≥ 0, a number or a tensor that
    broadcasts with [...]. κ = 0 is the uniform distribution. Samples [*sample_shape, ..., d] are reparametrised.

    A value that is not of length one counts by its direction: ``log_prob(x)`` is ``log_prob(x / |x|)``, so that the
    rounding of a float32 vector costs nothing however large κ is, and gradients lie in the tangent space of the sphere.
    There the same holds for ``loc``.

        >>> loc = torch.nn.functional.normalize(torch.randn(8, 128), dim=-1)
        >>> posterior = pb.PowerSpherical(loc, torch.full([8], 50.0))
        >>> posterior.rsample().shape
        torch.Size([8, 128])
    """

    arg_constraints = {"loc": unit_sphere, "concentration": constraints.nonnegative}  # noqa: RUF012
    support = unit_sphere
    has_rsample = True

    def __init__(self, loc: Tensor, concentration: Tensor | float, validate_args: bool | None = None) -> None:
        checked = validate_args is not False  # torch's own default is switched off for good by any torch.compile
        of_kind("loc", loc, Tensor, "a tensor of unit vectors [..., d]", ShapeError)
        of_kind("concentration", concentration, (Tensor, Real), "a number or a tensor", ShapeError)
        if not isinstance(concentration, Tensor):
            concentration = torch.tensor(concentration, dtype=loc.dtype, device=loc.device)
        if checked:
            _check_loc(loc)
            _check_concentration(concentration)
        dtype = torch.promote_types(loc.dtype, concentration.dtype)
        batch = _broadcast(loc, concentration)
        self.loc = loc.to(dtype).expand(*batch, loc.shape[-1])
        self.concentration = concentration.to(dtype).expand(batch)
        super().__init__(batch, loc.shape[-1:], validate_args=False)
        self._validate_args = checked

    def expand(self, batch_shape: Shape, _instance: Any = None) -> PowerSpherical:
        new = self._get_checked_instance(PowerSpherical, _instance)
        batch_shape = torch.Size(batch_shape)
        new.loc = self.loc.expand(batch_shape + self.event_shape)
        new.concentration = self.concentration.expand(batch_shape)
        super(PowerSpherical, new).__init__(batch_shape, self.event_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    @property
    def dim(self) -> int:
        """Number of coordinates, d."""
        return self.event_shape[0]

    @property
    def mode(self) -> Tensor:
        return self.loc

    @property
    def mean(self) -> Tensor:
        """Return E[x] = κ / (κ + d − 1) loc, which lies inside the sphere."""
        return self.loc * (self.concentration / (self.concentration + (self.dim - 1)))[..., None]

    @property
    def variance(self) -> Tensor:
        """Return the variance of each coordinate: the diagonal of the covariance along and across ``loc``."""
        kappa = self.concentration.double()
        total = kappa + (self.dim - 1)
        alpha = kappa + self._beta
        across = 2 * alpha / (total * (total + 1))
        along = 4 * alpha * self._beta / (total.square() * (total + 1))
        across, along = across.to(self.loc.dtype)[..., None], along.to(self.loc.dtype)[..., None]
        square = self.loc.square().clamp_max(1)  # rounding may lie above
        return across * (1 - square) + along * square

    def rsample(self, sample_shape: Shape = torch.Size()) -> Tensor:  # noqa: B008
        """Draw directions [*sample_shape, ..., d] whose gradients reach ``loc`` and ``concentration``.

        With A ~ Gamma(β + κ) and the part n of a normal vector that is orthogonal to loc, B = |n|²/2 is Gamma(β) and
        independent of n / |n|, hence locᵀx = (A − B) / (A + B). As loc turns, x turns with it by the smallest rotation,
        which adds less noise to the gradient than a reflection (no spin around loc).
        """
        shape = self._extended_shape(torch.Size(sample_shape))
        gamma = torch._standard_gamma((self.concentration.double() + self._beta).expand(shape[:-1]))
        dtype = torch.promote_types(self.loc.dtype, torch.float32)
        loc = self.loc.to(dtype)
        with torch.no_grad():
            normal = _normal(shape, loc)
            centre = loc.to(normal.dtype)
            normal = normal - _dot(centre, normal) / _dot(centre, centre) * centre
            length = torch.linalg.vector_norm(normal, dim=-1, keepdim=True, dtype=torch.float64)
            around = (normal / length.clamp_min(torch.finfo(dtype).tiny).to(normal.dtype)).to(dtype)
            half = length[..., 0].square() / 2  # B. Where it is 0, x is loc, and no direction around it is needed
        along = ((gamma - half) / (gamma + half)).to(dtype)
        across = (2 * gamma.sqrt() * half.sqrt() / (gamma + half)).to(dtype)
        # `around` is orthogonal to loc: in value this changes rounding alone, but its derivative is the rotation.
        around = around - _dot(loc, around) * (loc + loc.detach()) / 2
        return (along[..., None] * loc + across[..., None] * around).to(self.loc.dtype)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-density [...] of directions [..., d] with respect to the area of the sphere; −inf at −loc."""
        if self._validate_args:
            _check_value(self, value)
        dtype = torch.promote_types(self.loc.dtype, value.dtype)
        value, loc, kappa = _unit(value), _unit(self.loc), self.concentration.double()
        share = (value + loc).square().sum(-1) / 4  # s, with all its digits around −loc
        rest = (value - loc).square().sum(-1) / 4  # 1 − s, with all its digits around loc
        close = rest < share
        # Of the two terms one is 0. At −loc no direction is the steepest: the gradient is 0, not NaN, in `value`.
        power = torch.xlogy(kappa, torch.where(close, 1, torch.where(share > 0, share, 0)))
        power = power + kappa * torch.log1p(-torch.where(close, rest, 0))
        return (power + self._gain() - log_area(self.dim)).to(dtype)

    def entropy(self) -> Tensor:
        """Return −E[log p(x)] [...] with respect to the area of the sphere."""
        return (log_area(self.dim) - self._divergence()).to(self.loc.dtype)

    @property
    def _beta(self) -> float:
        return (self.dim - 1) / 2

    def _gain(self) -> Tensor:
        """Return D(κ) in float64: the log-density at ``loc`` relative to the uniform one."""
        start = math.lgamma(2 * self._beta) - math.lgamma(self._beta)
        return _lgamma_step(self.concentration.double() + self._beta, self._beta) - start

    def _divergence(self) -> Tensor:
        """Return D(κ) − κ D′(κ) in float64: the divergence from the uniform distribution."""
        kappa = self.concentration.double()
        return (self._gain() - kappa * _digamma_step(kappa + self._beta, self._beta)).clamp_min(0)


class HypersphericalUniform(Distribution):
    """The uniform distribution on the unit sphere of R^dim; ``dim`` counts the coordinates, dim ≥ 2.

    >>> pb.HypersphericalUniform(3).sample([5]).shape
    torch.Size([5, 3])
    """

    arg_constraints: dict[str, constraints.Constraint] = {}  # noqa: RUF012
    support = unit_sphere
    has_rsample = True

    def __init__(
        self,
        dim: int,
        batch_shape: Shape = (),
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        validate_args: bool | None = None,
    ) -> None:
        self.dim = whole_number("dim", dim, least=2, expected="the number of coordinates of the space, at least 2")
        self._like = torch.empty(0, dtype=dtype, device=device)
        if not self._like.is_floating_point():
            raise PullbackError(f"dtype: expected a floating-point one, such as torch.float32, got {dtype}")
        super().__init__(torch.Size(batch_shape), torch.Size([dim]), validate_args=validate_args is not False)

    def expand(self, batch_shape: Shape, _instance: Any = None) -> HypersphericalUniform:
        new = self._get_checked_instance(HypersphericalUniform, _instance)
        new.dim, new._like = self.dim, self._like
        super(HypersphericalUniform, new).__init__(torch.Size(batch_shape), self.event_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    @property
    def mean(self) -> Tensor:
        return self._like.new_zeros(self.batch_shape + self.event_shape)

    @property
    def variance(self) -> Tensor:
        return self._like.new_full(self.batch_shape + self.event_shape, 1 / self.dim)

    def rsample(self, sample_shape: Shape = torch.Size()) -> Tensor:  # noqa: B008
        shape = self._extended_shape(torch.Size(sample_shape))
        return torch.nn.functional.normalize(_normal(shape, self._like), dim=-1).to(self._like.dtype)

    def __repr__(self) -> str:
        return f"HypersphericalUniform(dim={self.dim})"

    def log_prob(self, value: Tensor) -> Tensor:
        """Return minus the logarithm of the sphere's area [...] for directions [..., d]."""
        if self._validate_args:
            _check_value(self, value)
        shape = torch.broadcast_shapes(value.shape[:-1], self.batch_shape)
        return value.new_full(shape, -log_area(self.dim))

    def entropy(self) -> Tensor:
        """Return the logarithm of the sphere's area [...]."""
        return self._like.new_full(self.batch_shape, log_area(self.dim))


def log_area(dim: int) -> float:
    """Return the logarithm of the area of the unit sphere in R^dim."""
    return math.log(2) + dim / 2 * math.log(math.pi) - math.lgamma(dim / 2)


@register_kl(PowerSpherical, HypersphericalUniform)
def _kl_power_spherical_uniform(p: PowerSpherical, q: HypersphericalUniform) -> Tensor:
    if p.event_shape != q.event_shape:
        raise ShapeError(f"q: expected a uniform distribution with dim={p.dim}, as p has, got dim={q.dim}")
    try:
        shape = torch.broadcast_shapes(p.batch_shape, q.batch_shape)
    except RuntimeError:
        raise ShapeError(
            f"q: expected a batch shape that broadcasts with {list(p.batch_shape)}, that of p, got "
            f"{list(q.batch_shape)}"
        ) from None
    return p._divergence().to(p.loc.dtype).expand(shape)


def _lgamma_step(a: Tensor, step: float) -> Tensor:
    """Return lnΓ(a + step) − lnΓ(a) in float64; by Stirling's series where both are so large that digits would cancel.

    Left out of the series is 1/(360 a³): nothing that float64 shows.
    """
    many = a > _STIRLING
    large = torch.where(many, a, _STIRLING)
    correction = -step / (12 * large * (large + step))
    series = (large - 0.5) * torch.log1p(step / large) + step * (torch.log(large + step) - 1) + correction
    small = torch.where(many, _STIRLING, a)
    return torch.where(many, series, torch.lgamma(small + step) - torch.lgamma(small))


def _digamma_step(a: Tensor, step: float) -> Tensor:
    """Return ψ(a + step) − ψ(a) in float64, the derivative of `_lgamma_step`."""
    many = a > _STIRLING
    large = torch.where(many, a, _STIRLING)
    series = torch.log1p(step / large) + step / (2 * large * (large + step))
    series = series + (1 / large.square() - 1 / (large + step).square()) / 12
    small = torch.where(many, _STIRLING, a)
    return torch.where(many, series, torch.digamma(small + step) - torch.digamma(small))


def _normal(shape: torch.Size, like: Tensor) -> Tensor:
    """Draw a normal vector in float32 or better."""
    dtype = torch.float64 if shape[-1] <= _PRECISE_NOISE else torch.promote_types(like.dtype, torch.float32)
    return torch.randn(shape, dtype=dtype, device=like.device)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Return the inner products along the last axis, which is kept; no matrix product, which TF32 would round."""
    return (a * b).sum(-1, keepdim=True)


def _unit(vector: Tensor) -> Tensor:
    return torch.nn.functional.normalize(vector.double(), dim=-1)


def _broadcast(loc: Tensor, concentration: Tensor) -> torch.Size:
    try:
        return torch.broadcast_shapes(loc.shape[:-1], concentration.shape)
    except RuntimeError:
        raise ShapeError(
            f"concentration: expected a number or a shape that broadcasts with {list(loc.shape[:-1])}, the shape of "
            f"loc without its last axis, got {list(concentration.shape)}"
        ) from None


def _check_loc(loc: Tensor) -> None:
    if loc.ndim < 1 or loc.shape[-1] < 2:
        raise ShapeError(f"loc: expected unit vectors [..., d] with d of at least 2, got shape {list(loc.shape)}")
    if not loc.is_floating_point():
        raise PullbackError(f"loc: expected floating-point numbers, got {loc.dtype}")
    if not unit_sphere.check(loc).all():
        raise NumericsError(f"loc: expected vectors of length 1 along the last axis, {_lengths(loc)}")


def _check_concentration(concentration: Tensor) -> None:
    if not concentration.is_floating_point():
        raise PullbackError(f"concentration: expected floating-point numbers, got {concentration.dtype}")
    valid = concentration.isfinite() & (concentration >= 0)
    if not valid.all():
        worst = concentration.detach()[~valid].flatten()[0].item()
        raise NumericsError(
            f"concentration: expected finite numbers that are not negative, got {worst:g} in {concentration.dtype} "
            f"({int((~valid).sum())} of {valid.numel()} are invalid)"
        )


def _check_value(distribution: Distribution, value: Tensor) -> None:
    dim = distribution.event_shape[0]
    of_kind("value", value, Tensor, f"a tensor of directions [..., {dim}]", ShapeError)
    if not value.is_floating_point():
        raise PullbackError(f"value: expected floating-point numbers, got {value.dtype}")
    if value.ndim < 1 or value.shape[-1] != dim:
        raise ShapeError(f"value: expected directions [..., {dim}], got shape {list(value.shape)}")
    try:
        torch.broadcast_shapes(value.shape[:-1], distribution.batch_shape)
    except RuntimeError:
        raise ShapeError(
            f"value: expected a shape that broadcasts with {list(distribution.batch_shape)}, the batch shape, "
            f"before its last axis, got {list(value.shape)}"
        ) from None
    if not unit_sphere.check(value).all():
        raise NumericsError(f"value: expected vectors of length 1 along the last axis, {_lengths(value)}")


def _lengths(vectors: Tensor) -> str:
    length = torch.linalg.vector_norm(vectors.detach(), dim=-1, dtype=torch.float64).flatten()
    worst = length[(length - 1).abs().nan_to_num(math.inf, math.inf).argmax()].item()
    return f"got length {worst:.6g}; divide them by their length (torch.nn.functional.normalize)"
