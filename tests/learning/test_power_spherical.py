"""The power spherical distribution: its density, samples and gradients against high-precision truth."""

import itertools
import math

import mpmath as mp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats
from torch.distributions import kl_divergence

import pullback as pb
from pullback.errors import NumericsError, PullbackError, ShapeError

DIMS = [2, 3, 4, 16, 17, 128, 1000, 4096]
CONCENTRATIONS = [0.0, 1e-30, 1e-6, 0.1, 1.0, 7.5, 100.0, 1e4, 1e5, 1e6]


class Truth:
    """The formulas of arXiv 2006.04437 with 40 digits, as printed there."""

    def __init__(self, kappa: float, dim: int) -> None:
        self.kappa, self.beta = mp.mpf(kappa), mp.mpf(dim - 1) / 2
        self.alpha = self.beta + self.kappa
        self.log_normaliser = -(
            (self.alpha + self.beta) * mp.log(2)
            + self.beta * mp.log(mp.pi)
            + mp.loggamma(self.alpha)
            - mp.loggamma(self.alpha + self.beta)
        )
        self.expected = mp.log(2) + mp.psi(0, self.alpha) - mp.psi(0, self.alpha + self.beta)  # E[log(1 + t)]
        self.curvature = mp.psi(1, self.alpha) - mp.psi(1, self.alpha + self.beta)
        self.entropy = -(self.log_normaliser + self.kappa * self.expected)
        self.area = mp.log(2) + mp.mpf(dim) / 2 * mp.log(mp.pi) - mp.loggamma(mp.mpf(dim) / 2)

    def log_prob(self, cosine: mp.mpf) -> mp.mpf:
        power = self.kappa * mp.log(1 + cosine) if self.kappa else mp.mpf(0)
        return self.log_normaliser + power

    def log_prob_slope(self, cosine: mp.mpf) -> mp.mpf:
        """Of the concentration."""
        return mp.log(1 + cosine) - self.expected


@pytest.fixture(autouse=True)
def forty_digits():
    with mp.workdps(40):
        yield


def close(got: torch.Tensor, truth: mp.mpf, tolerance: float = 1e-4) -> bool:
    return bool(abs(mp.mpf(got.item()) - truth) <= tolerance * max(1, abs(truth)))


def directions(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    normal = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.nn.functional.normalize(normal, dim=-1).to(dtype)


def cosine_of(x: torch.Tensor, loc: torch.Tensor) -> mp.mpf:
    """Between two float32 vectors, with 40 digits."""
    one, other = (mp.matrix([mp.mpf(v) for v in vector.tolist()]) for vector in (x, loc))
    return (one.T * other)[0] / (mp.norm(one) * mp.norm(other))


@pytest.mark.parametrize("dim", DIMS)
def test_divergence_entropy_mean_and_their_gradients_are_those_of_the_truth(dim):
    loc = directions(dim)
    for kappa in CONCENTRATIONS:
        concentration = torch.tensor(kappa, requires_grad=True)
        truth = Truth(concentration.item(), dim)
        divergence = kl_divergence(pb.PowerSpherical(loc, concentration), pb.HypersphericalUniform(dim))
        entropy = pb.PowerSpherical(loc, concentration).entropy()
        length = pb.PowerSpherical(loc, concentration).mean @ loc
        total = truth.kappa + dim - 1
        for got, value, slope in (
            (divergence, truth.area - truth.entropy, truth.kappa * truth.curvature),
            (entropy, truth.entropy, -truth.kappa * truth.curvature),
            (length, truth.kappa / total, (dim - 1) / total**2),
        ):
            assert got.dtype == torch.float32
            assert close(got.detach(), value) and close(torch.autograd.grad(got, concentration)[0], slope)


@pytest.mark.parametrize("dim", [2, 3, 17, 128, 4096])
def test_log_densities_and_their_gradients_are_those_of_the_truth(dim):
    loc = directions(dim)
    sideways = torch.nn.functional.normalize(directions(dim, seed=1) - 0.5 * loc, dim=-1)
    values = [loc, torch.nn.functional.normalize(loc + 1e-3 * sideways, dim=-1), sideways, directions(dim, seed=2)]
    cosines = [cosine_of(value, loc) for value in values]
    for kappa in CONCENTRATIONS:
        concentration = torch.tensor(kappa, requires_grad=True)
        truth = Truth(concentration.item(), dim)
        for value, cosine in zip(values, cosines, strict=True):
            x, centre = value.clone().requires_grad_(), loc.clone().requires_grad_()
            got = pb.PowerSpherical(centre, concentration).log_prob(x)
            slope, by_value, by_loc = torch.autograd.grad(got, (concentration, x, centre))
            assert close(got.detach(), truth.log_prob(cosine))
            assert close(slope, truth.log_prob_slope(cosine))
            factor = float(truth.kappa / (1 + cosine))
            for gradient, at, other in ((by_value, value, loc), (by_loc, loc, value)):
                wanted = factor * (other.double() - float(cosine) * at.double())  # in the tangent space
                scale = max(1.0, wanted.norm().item(), 1e-3 * factor)
                assert (gradient.double() - wanted).norm() <= 1e-4 * scale


@pytest.mark.parametrize("dim", [2, 3, 128])
@pytest.mark.parametrize("kappa", [0.0, 0.5, 1e6])
def test_at_the_antipode_nothing_is_nan(dim, kappa):
    loc, concentration = directions(dim).requires_grad_(), torch.tensor(kappa, requires_grad=True)
    x = (-loc.detach()).requires_grad_()
    density = pb.PowerSpherical(loc, concentration).log_prob(x)
    gradients = torch.autograd.grad(density, (loc, concentration, x))
    assert not any(gradient.isnan().any() for gradient in gradients)
    if kappa == 0:
        assert density.item() == pytest.approx(-float(Truth(0, dim).area), rel=1e-5)
    else:
        assert density.item() == -math.inf


@pytest.mark.parametrize(("dim", "kappa"), [(2, 0.0), (2, 0.7), (3, 4.0), (7, 30.0), (128, 50.0), (128, 1000.0)])
def test_the_density_integrates_to_one_and_has_this_entropy_mean_and_variance(dim, kappa):
    """By quadrature over the polar angle, of the density that `log_prob` returns."""
    loc = directions(dim, dtype=torch.float64)
    around = torch.nn.functional.normalize(directions(dim, seed=1, dtype=torch.float64), dim=-1)
    around = torch.nn.functional.normalize(around - (around @ loc) * loc, dim=-1)
    distribution = pb.PowerSpherical(loc, torch.tensor(kappa, dtype=torch.float64))
    nodes, weights = (torch.from_numpy(array) for array in np.polynomial.legendre.leggauss(400))
    angle = (nodes + 1) * math.pi / 2
    x = angle.cos()[:, None] * loc + angle.sin()[:, None] * around
    density = distribution.log_prob(x)
    ring = math.log(2) + (dim - 1) / 2 * math.log(math.pi) - math.lgamma((dim - 1) / 2)  # area of the sphere below
    measure = (weights * math.pi / 2) * (density + ring + (dim - 2) * angle.sin().log()).exp()
    cosine = angle.cos()
    mean, square = (measure * cosine).sum(), (measure * cosine.square()).sum()
    assert measure.sum().item() == pytest.approx(1, abs=1e-9)
    assert -(measure * density).sum().item() == pytest.approx(distribution.entropy().item(), abs=1e-8)
    torch.testing.assert_close(distribution.mean, mean * loc)
    covariance = (square - mean.square()) * torch.outer(loc, loc)
    covariance += (1 - square) / (dim - 1) * (torch.eye(dim, dtype=torch.float64) - torch.outer(loc, loc))
    torch.testing.assert_close(distribution.variance, covariance.diagonal())
    torch.testing.assert_close(distribution.stddev.square(), covariance.diagonal())


@pytest.mark.parametrize("dim", [2, 3, 16, 17, 128])
@pytest.mark.parametrize("kappa", [0.0, 0.5, 20.0, 1e6])
def test_samples_have_length_one_and_the_right_law(dim, kappa):
    torch.manual_seed(dim)
    loc = directions(dim)
    distribution = pb.PowerSpherical(loc, kappa)
    x = distribution.sample([4000])
    assert x.dtype == torch.float32 and (x.norm(dim=-1) - 1).abs().max() < 1e-6
    share = (x.double() + loc.double()).square().sum(-1) / 4
    beta = (dim - 1) / 2
    if kappa < 1e6:
        assert stats.kstest(share.numpy(), stats.beta(beta + kappa, beta).cdf).pvalue > 1e-4
    rest = (x.double() - loc.double()).square().sum(-1) / 4  # keeps its digits where share is nearly 1
    assert stats.kstest(rest.numpy(), stats.beta(beta, beta + kappa).cdf).pvalue > 1e-4
    across = x.double() - (x.double() @ loc.double())[:, None] * loc.double()
    across = across / across.norm(dim=-1, keepdim=True)
    assert (across.mean(0).norm() * math.sqrt(4000)) < 5  # no direction around loc is preferred


def test_standard_deviations_are_not_nan_where_rounding_makes_a_coordinate_larger_than_one():
    loc = torch.tensor([1 + 1e-7, 0.0, 0.0], requires_grad=True)
    deviation = pb.PowerSpherical(loc, 1e6).stddev
    assert deviation.tolist() == pytest.approx([2e-6, 2**0.5 * 1e-3, 2**0.5 * 1e-3], rel=0.01)
    deviation.sum().backward()
    assert not loc.grad.isnan().any()


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_locations_along_an_axis_are_like_others(axis, sign):
    torch.manual_seed(0)
    loc = torch.zeros(4)
    loc[axis] = sign
    loc.requires_grad_()
    x = pb.PowerSpherical(loc, 3.0).rsample([2000])
    x.sum().backward()
    assert (x.norm(dim=-1) - 1).abs().max() < 1e-6 and loc.grad.isfinite().all()
    assert (x.mean(0) - pb.PowerSpherical(loc.detach(), 3.0).mean).abs().max() < 0.06


@pytest.mark.parametrize(("dim", "kappa"), [(2, 0.0), (2, 3.0), (3, 0.5), (5, 40.0), (128, 60.0)])
def test_gradients_of_samples_by_the_concentration_are_right_in_expectation(dim, kappa):
    """For several functions of μᵀx, whose expectation under the Beta distribution is known by quadrature."""
    torch.manual_seed(0)
    loc = directions(dim, dtype=torch.float64)
    concentration = torch.full([40_000], kappa, dtype=torch.float64, requires_grad=True)
    cosine = pb.PowerSpherical(loc, concentration).rsample() @ loc
    beta = (dim - 1) / 2

    def expected(function, kappa: float) -> float:
        law = stats.beta(beta + kappa, beta)
        return integrate.quad(lambda q: function(2 * law.ppf(q) - 1), 0, 1, epsabs=1e-11, limit=200)[0]

    for function, plain in ((lambda t: t, lambda t: t), (torch.square, lambda t: t * t), (torch.exp, math.exp)):
        gradients = torch.autograd.grad(function(cosine).sum(), concentration, retain_graph=True)[0]
        step = 1e-3
        at = max(kappa, step)
        truth = (expected(plain, at + step) - expected(plain, at - step)) / (2 * step)
        standard_error = gradients.std().item() / math.sqrt(len(gradients))
        assert abs(gradients.mean().item() - truth) < 5 * standard_error + 2e-3 * abs(truth)


@pytest.mark.parametrize(("dim", "kappa"), [(2, 1.0), (3, 2.0), (20, 15.0)])
def test_samples_move_with_the_concentration_as_their_distribution_function_says(dim, kappa):
    """Where s = (1 + μᵀx) / 2, its speed is −(∂F/∂κ) / p on average: compared in five bins of equal probability."""
    torch.manual_seed(0)
    loc, beta, step = directions(dim, dtype=torch.float64), (dim - 1) / 2, 1e-4
    concentration = torch.full([40_000], kappa, dtype=torch.float64, requires_grad=True)
    share = (1 + pb.PowerSpherical(loc, concentration).rsample() @ loc) / 2
    speed = torch.autograd.grad(share.sum(), concentration)[0]
    assert (speed >= 0).all()  # a larger concentration brings every sample closer
    edges = stats.beta(beta + kappa, beta).ppf(np.linspace(0, 1, 6))

    def flow(s: float) -> float:
        return -(stats.beta.cdf(s, beta + kappa + step, beta) - stats.beta.cdf(s, beta + kappa - step, beta)) / (
            2 * step
        )

    for low, high in itertools.pairwise(edges):
        inside = speed * ((share.detach() >= low) & (share.detach() < high))
        truth = integrate.quad(flow, low, high, epsabs=1e-10)[0]
        standard_error = inside.std().item() / math.sqrt(len(inside))
        assert abs(inside.mean().item() - truth) < 5 * standard_error + 1e-3 * truth


@pytest.mark.parametrize("dim", [2, 3, 6])
def test_gradients_of_samples_by_the_location_are_right_in_expectation(dim):
    """E[aᵀx + (bᵀx)²] is known from the mean and the covariance."""
    torch.manual_seed(0)
    loc, a, b = (directions(dim, seed=seed, dtype=torch.float64) for seed in range(3))
    centres = loc.repeat(40_000, 1).requires_grad_()
    x = pb.PowerSpherical(centres, 2.0).rsample()
    (x @ a + (x @ b).square()).sum().backward()

    def expected(centre: torch.Tensor) -> torch.Tensor:
        centre = centre / centre.norm()
        total = 2.0 + dim - 1
        across = 2 * (2.0 + (dim - 1) / 2) / (total * (total + 1))
        along = 1 - (dim - 1) * across  # E[(μᵀx)²]
        return 2.0 / total * (a @ centre) + across + (along - across) * (b @ centre).square()

    truth = torch.func.grad(expected)(loc)  # lies in the tangent space
    gradients = centres.grad - (centres.grad @ loc)[:, None] * loc
    standard_error = gradients.std(0) / math.sqrt(len(gradients))
    assert ((gradients.mean(0) - truth).abs() < 5 * standard_error + 1e-12).all()


def test_each_sample_turns_with_its_location():
    """Turning loc by a small rotation turns the sample by the same one: its place relative to loc stays."""
    loc = directions(5, dtype=torch.float64)

    def sample(centre: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        return pb.PowerSpherical(centre, 4.0, validate_args=False).rsample()

    jacobian = torch.func.jacrev(sample)(loc)
    x = sample(loc)
    tangent = directions(5, seed=1, dtype=torch.float64)
    tangent = tangent - (tangent @ loc) * loc
    turn = torch.outer(tangent, loc) - torch.outer(loc, tangent)  # generator of the rotation of loc towards tangent
    torch.testing.assert_close(jacobian @ tangent, turn @ x)


def test_samples_follow_the_seed_and_shapes_the_arguments():
    loc = directions(4, 1, 8)
    distribution = pb.PowerSpherical(loc, torch.rand(3) * 10)
    assert distribution.batch_shape == (4, 3) and distribution.event_shape == (8,) and distribution.dim == 8
    torch.manual_seed(1)
    first = distribution.rsample([2])
    torch.manual_seed(1)
    assert first.shape == (2, 4, 3, 8) and torch.equal(first, distribution.rsample([2]))
    assert distribution.log_prob(first).shape == (2, 4, 3)
    assert distribution.entropy().shape == kl_divergence(distribution, pb.HypersphericalUniform(8)).shape == (4, 3)
    assert distribution.mean.shape == distribution.variance.shape == distribution.mode.shape == (4, 3, 8)
    wide = distribution.expand([5, 4, 3])
    assert wide.batch_shape == (5, 4, 3) and wide.rsample().shape == (5, 4, 3, 8)
    torch.testing.assert_close(wide.log_prob(first[0]), distribution.log_prob(first[0]).expand(5, 4, 3))
    assert isinstance(wide, pb.PowerSpherical) and distribution.has_rsample
    assert not distribution.sample().requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_come_back_as_they_went_in(dtype):
    loc = directions(6, 32, dtype=dtype).requires_grad_()
    concentration = torch.full([6], 20.0, dtype=dtype, requires_grad=True)
    distribution = pb.PowerSpherical(loc, concentration)
    x = distribution.rsample()
    parts = (x, distribution.log_prob(x.detach()), distribution.entropy(), distribution.mean, distribution.variance)
    assert all(part.dtype == dtype and part.isfinite().all() for part in parts)
    sum(part.sum() for part in parts).backward()
    assert loc.grad.isfinite().all() and concentration.grad.isfinite().all()


@settings(max_examples=60, deadline=None)
@given(
    dim=st.integers(2, 4096),
    kappa=st.one_of(st.just(0.0), st.floats(-30, 38).map(lambda exponent: 10**exponent)),
    seed=st.integers(0, 1000),
)
def test_nothing_is_nan_at_any_finite_concentration(dim, kappa, seed):
    loc, concentration = directions(dim, seed=seed).requires_grad_(), torch.tensor(kappa, requires_grad=True)
    distribution = pb.PowerSpherical(loc, concentration)
    uniform = pb.HypersphericalUniform(dim)
    torch.manual_seed(seed)
    x = distribution.rsample()
    divergence, entropy = kl_divergence(distribution, uniform), distribution.entropy()
    results = (x, distribution.mean, distribution.variance, divergence, entropy, distribution.log_prob(x.detach()))
    assert all(result.isfinite().all() for result in results) and abs(x.norm().item() - 1) < 1e-6
    assert divergence.item() >= 0
    assert (uniform.entropy() - entropy).item() == pytest.approx(divergence.item(), rel=1e-5, abs=1e-5 + 1e-6 * dim)
    sum(result.sum() for result in results).backward()
    assert loc.grad.isfinite().all() and concentration.grad.isfinite().all()


def test_zero_concentration_is_the_uniform_distribution():
    loc, uniform = directions(3, 5), pb.HypersphericalUniform(5)
    distribution = pb.PowerSpherical(loc, 0.0)
    x = uniform.sample([7, 3])
    torch.testing.assert_close(distribution.log_prob(x), uniform.log_prob(x))
    torch.testing.assert_close(distribution.variance, uniform.variance.expand(3, 5))
    assert kl_divergence(distribution, uniform).tolist() == [0.0, 0.0, 0.0]
    assert distribution.mean.abs().max() == 0


@pytest.mark.parametrize("dim", [2, 3, 40])
def test_the_uniform_distribution_on_the_sphere(dim):
    torch.manual_seed(0)
    uniform = pb.HypersphericalUniform(dim)
    x = uniform.rsample([5000])
    assert (x.norm(dim=-1) - 1).abs().max() < 1e-6
    assert (x.mean(0) - uniform.mean).norm() * math.sqrt(5000) < 5
    assert (x.var(0) / uniform.variance - 1).abs().max() < 0.15
    area = {2: 2 * math.pi, 3: 4 * math.pi}.get(dim, float(mp.exp(Truth(0, dim).area)))
    torch.testing.assert_close(uniform.log_prob(x), torch.full([5000], -math.log(area)))
    assert uniform.entropy().item() == pytest.approx(math.log(area), rel=1e-5)
    assert uniform.expand([2, 3]).sample().shape == (2, 3, dim) and uniform.expand([2]).entropy().shape == (2,)
    assert repr(uniform) == f"HypersphericalUniform(dim={dim})"
    double = pb.HypersphericalUniform(dim, dtype=torch.float64)
    assert double.sample().dtype == double.entropy().dtype == torch.float64


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dim", [2, 128, 4096])
def test_a_gpu_gives_the_same_values_and_gradients(dim):
    results = []
    for device in ("cpu", "cuda"):
        concentration = torch.tensor(CONCENTRATIONS, device=device, requires_grad=True)
        loc = directions(len(CONCENTRATIONS), dim).to(device).requires_grad_()
        distribution = pb.PowerSpherical(loc, concentration)
        value = directions(len(CONCENTRATIONS), dim, seed=1).to(device)
        cost = kl_divergence(distribution, pb.HypersphericalUniform(dim))
        parts = (distribution.log_prob(value), cost, distribution.entropy(), distribution.mean, distribution.variance)
        gradients = torch.autograd.grad(sum(part.sum() for part in parts), (loc, concentration), retain_graph=True)
        results.append([tensor.detach().cpu() for tensor in (*parts, *gradients)])
        x = distribution.rsample([200])
        x.sum().backward()
        assert x.device.type == device and (x.norm(dim=-1) - 1).abs().max() < 1e-6
        assert concentration.grad.isfinite().all() and loc.grad.isfinite().all()
    for cpu, cuda in zip(*results, strict=True):
        torch.testing.assert_close(cuda, cpu, rtol=1e-4, atol=1e-5)


UNIT = [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("loc", "concentration", "error", "message"),
    [
        (UNIT, -1.0, NumericsError, r"concentration: expected finite numbers that are not negative, got -1 in"),
        (UNIT, math.inf, NumericsError, r"concentration: .* got inf in torch.float32 \(1 of 1 are invalid\)"),
        (UNIT, math.nan, NumericsError, r"concentration: .* got nan"),
        (UNIT, 1e39, NumericsError, r"concentration: .* got inf"),
        (UNIT, torch.ones(2, dtype=torch.int64), PullbackError, r"concentration: expected floating-point numbers"),
        (UNIT, "3", ShapeError, r"concentration: expected a number or a tensor, got '3'"),
        ([[1.0, 0.0]] * 3, torch.ones(2), ShapeError, r"concentration: .* broadcasts with \[3\], .* got \[2\]"),
        ([1.0, 1.0], 1.0, NumericsError, r"loc: expected vectors of length 1 .* got length 1.41421; divide"),
        ([math.nan, 1.0], 1.0, NumericsError, r"loc: expected vectors of length 1 .* got length nan"),
        ([1.0], 1.0, ShapeError, r"loc: expected unit vectors \[..., d\] with d of at least 2, got shape \[1\]"),
        (1.0, 1.0, ShapeError, r"loc: .* got shape \[\]"),
        ([1, 0], 1.0, PullbackError, r"loc: expected floating-point numbers, got torch.int64"),
    ],
)
def test_bad_arguments_are_refused_by_name(loc, concentration, error, message):
    with pytest.raises(error, match=message):
        pb.PowerSpherical(torch.tensor(loc), concentration)


def test_a_list_is_no_location():
    with pytest.raises(ShapeError, match=r"loc: expected a tensor of unit vectors \[..., d\], got \[1.0, 0.0, 0.0\]"):
        pb.PowerSpherical(UNIT, 1.0)


@pytest.mark.parametrize("dim", [1, 0, -3, 2.5, True, "3"])
def test_a_bad_dimension_is_refused(dim):
    with pytest.raises(PullbackError, match="dim: expected the number of coordinates of the space, at least 2, got"):
        pb.HypersphericalUniform(dim)


@pytest.mark.parametrize("distribution", [pb.PowerSpherical(directions(4, 3), 2.0), pb.HypersphericalUniform(3, [4])])
def test_bad_values_are_refused_by_name(distribution):
    with pytest.raises(ShapeError, match=r"value: expected directions \[..., 3\], got shape \[4, 2\]"):
        distribution.log_prob(directions(4, 2))
    with pytest.raises(ShapeError, match=r"value: expected a shape that broadcasts with \[4\]"):
        distribution.log_prob(directions(5, 3))
    with pytest.raises(NumericsError, match=r"value: expected vectors of length 1 .* got length 2;"):
        distribution.log_prob(2 * directions(4, 3))


def test_another_dimension_has_no_divergence():
    with pytest.raises(ShapeError, match="q: expected a uniform distribution with dim=3, as p has, got dim=4"):
        kl_divergence(pb.PowerSpherical(directions(3), 1.0), pb.HypersphericalUniform(4))


def test_without_validation_nothing_is_checked_and_a_value_counts_by_its_direction():
    pb.PowerSpherical(torch.tensor([3.0, 4.0]), -1.0, validate_args=False)
    loc, x = directions(6), directions(6, seed=1)
    checked, unchecked = pb.PowerSpherical(loc, 5.0), pb.PowerSpherical(2 * loc, 5.0, validate_args=False)
    torch.testing.assert_close(unchecked.log_prob(3 * x), checked.log_prob(x))
    assert unchecked.expand([2])._validate_args is False and checked.expand([2])._validate_args is True
