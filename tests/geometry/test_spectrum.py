"""`spectrum` against a plain SVD of the dense Jacobian, by every route."""

import pytest
import torch

import pullback as pb
from helpers.truth import FunctionProbe, load_seeded, normal, random_images, seeded, truth_of, with_singular_values
from pullback.errors import ImageError, PullbackError, RankError
from pullback.geometry import Spectrum

RANK = 4
PROBES = [("cls", 1), ("cls", 4), ("depth-4x4", 3)]


def same_up_to_sign(found, expected, **tolerance):
    """Modes [B, r, N, D]."""
    signs = (found * expected).sum((2, 3), keepdim=True).sign()
    torch.testing.assert_close(found * signs, expected, **tolerance)


def misalignment(modes, truth, rank: int):
    """1 - |V_hat^T V|^2 / r per sample."""
    overlap = modes.flatten(2) @ truth.svd[1][:, :rank].flatten(2).mT
    return 1 - overlap.square().sum((1, 2)) / rank


@pytest.mark.parametrize(("decoder", "layer"), PROBES)
def test_exact_is_the_svd(decoder, layer):
    probe, images = seeded(decoder, layer), random_images()
    truth = truth_of(probe, images)
    values, right = truth.svd
    found = pb.spectrum(probe, images, RANK, "exact", with_effective_rank=True)
    assert found.method == "exact" and found.rank == RANK and len(found) == 3
    torch.testing.assert_close(found.singular_values, values[:, :RANK])
    torch.testing.assert_close(found.full, values, rtol=1e-6, atol=1e-7)
    same_up_to_sign(found.modes, right[:, :RANK], rtol=1e-6, atol=1e-8)
    for rank in range(1, RANK + 1):
        torch.testing.assert_close(found.kappa.value[:, rank - 1], truth.kappa(rank))
    torch.testing.assert_close(found.total.value, truth.energies.sum(1))
    torch.testing.assert_close(found.effective_rank.value, truth.effective_rank(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("layer", [1, 4])
def test_krylov_is_the_svd_within_its_error_bars(layer):
    probe, images = seeded("cls", layer), random_images()
    truth = truth_of(probe, images)
    found = pb.spectrum(probe, images, RANK, "krylov", with_effective_rank=True)
    assert found.method == "krylov" and found.full is None
    for rank in range(1, RANK + 1):
        error = (found.kappa.value[:, rank - 1] - truth.kappa(rank)).abs()
        assert (error <= 3 * found.kappa.se[:, rank - 1]).all()
    assert ((found.total.value - truth.energies.sum(1)).abs() <= 3 * found.total.se).all()
    assert ((found.effective_rank.value - truth.effective_rank()).abs() <= 3 * found.effective_rank.se).all()
    assert (found.kappa.relative_se < 0.1).all() and (found.effective_rank.relative_se < 0.1).all()
    assert (found.singular_values <= truth.svd[0][:, :RANK] * (1 + 1e-12)).all(), "Ritz values lie below"


def test_asked_for_smaller_errors_krylov_finds_the_modes():
    probe, images = seeded("depth-4x4", 3), random_images(2)
    truth = truth_of(probe, images)
    found = pb.spectrum(probe, images, RANK, "krylov", rtol=1e-4)
    assert (found.kappa.relative_se[:, -1] <= 1e-4).all()
    torch.testing.assert_close(found.kappa.value[:, -1], truth.kappa(RANK), rtol=3e-4, atol=0)
    assert (misalignment(found.modes, truth, RANK) < 1e-3).all()


def test_paper_is_algorithm_2_biased_low():
    """Power iteration with plain Hutchinson: its columns are orthonormal, its energies too small, its kappa within the
    printed error all the same."""
    probe, images = seeded("cls", 1), random_images()
    truth = truth_of(probe, images)
    found = pb.spectrum(probe, images, RANK, "paper", power_iters=2, sketch_width=RANK + 2)
    assert found.method == "paper"
    assert found.products == pb.operators.ProductCount(jvp=2 * (RANK + 2) + RANK + 100, vjp=2 * (RANK + 2))
    gram = found.modes.flatten(2) @ found.modes.flatten(2).mT
    torch.testing.assert_close(gram, torch.eye(RANK).double().expand(3, -1, -1), rtol=0, atol=1e-10)
    captured = found.singular_values.square().sum(1) / truth.energies.sum(1)
    assert (captured < truth.kappa(RANK) - 0.01).all()
    assert ((found.kappa.value[:, -1] - truth.kappa(RANK)).abs() < 3 * found.kappa.se[:, -1]).all()
    better = pb.spectrum(probe, images, RANK, "paper", power_iters=40)
    torch.testing.assert_close(better.singular_values, truth.svd[0][:, :RANK], rtol=1e-2, atol=0)
    assert (misalignment(better.modes, truth, RANK) < misalignment(found.modes, truth, RANK)).all()


def test_auto_takes_the_exact_route_where_it_is_cheaper():
    few_outputs = pb.spectrum(seeded("depth-4x4", 4), random_images(1), RANK)
    assert few_outputs.method == "exact" and few_outputs.products.vjp == 16 and few_outputs.products.jvp == 0
    sigma = [0.9**j for j in range(600)]
    many = pb.spectrum(with_singular_values(sigma, 60, 10, 600), normal(1, 1, 60, 10), 2)
    assert many.method == "krylov" and many.products.total < 600


@pytest.mark.parametrize("method", ["exact", "krylov", "paper"])
def test_the_batch_axis_is_always_there(method):
    found = pb.spectrum(seeded("cls", 4), random_images(1), RANK, method)
    assert found.singular_values.shape == found.kappa.value.shape == (1, RANK)
    assert found.modes.shape == (1, RANK, 17, 64) and found.total.value.shape == (1,)
    assert pb.token_importance(found).shape == (1, 17)
    assert found.token_layout.grid == (4, 4) and found.token_layout.prefix == 1


@pytest.mark.parametrize("method", ["auto", "exact", "krylov", "paper"])
def test_a_rank_above_the_smaller_side_is_refused(method):
    with pytest.raises(RankError, match=r"rank: expected 1 <= rank <= 16, .* got 17\. Ask for rank=16"):
        pb.spectrum(seeded("depth-4x4", 4), random_images(1), 17, method)


@pytest.mark.parametrize("rank", [0, -1])
def test_a_rank_below_one_is_refused(rank):
    with pytest.raises(RankError, match=f"expected 1 <= rank <= 64, .* got {rank}"):
        pb.spectrum(seeded("cls", 4), random_images(1), rank)


def test_bad_arguments_are_named():
    probe, images = seeded("cls", 4), random_images(1)
    with pytest.raises(ImageError, match="at least one image, got an empty batch"):
        pb.spectrum(probe, images[:0], RANK)
    with pytest.raises(ImageError, match=r"images: expected normalised floats .*got "):
        pb.spectrum(probe, torch.tensor(1.0), RANK)
    with pytest.raises(ValueError, match="method: expected one of auto, krylov, paper, exact, got 'lanczos'"):
        pb.spectrum(probe, images, RANK, "lanczos")
    with pytest.raises(PullbackError, match="batch_size: expected at least 1"):
        pb.spectrum(probe, images, RANK, batch_size=-1)


def test_the_full_rank_is_allowed():
    probe, images = seeded("depth-4x4", 4), random_images(2)
    found = pb.spectrum(probe, images, 16)
    torch.testing.assert_close(found.kappa.value[:, -1], torch.ones(2).double())
    torch.testing.assert_close(found.metric().importance(), block_norms(truth_of(probe, images)))


def block_norms(truth):
    """|J_:,t|_F."""
    return truth.jacobian.square().sum((1, 3)).sqrt()


def test_importance_is_its_definition():
    probe, images = seeded("cls", 1), random_images()
    truth = truth_of(probe, images)
    values, right = truth.svd
    expected = torch.stack(
        [
            sum(values[:, j, None] ** 2 * right[:, j].square().sum(-1) for j in range(rank)).sqrt()
            for rank in (1, RANK, 64)
        ]
    )
    found = [pb.token_importance(pb.spectrum(probe, images, rank, "exact")) for rank in (1, RANK, 64)]
    torch.testing.assert_close(torch.stack(found), expected, rtol=1e-7, atol=1e-10)
    torch.testing.assert_close(found[-1], block_norms(truth), rtol=1e-7, atol=1e-10)
    assert (found[0] <= found[1] + 1e-12).all() and (found[1] <= found[2] + 1e-12).all()


def test_the_metric_measures_the_first_order_change_of_the_output():
    probe, images = seeded("depth-4x4", 4), random_images(2)
    truth = truth_of(probe, images)
    metric = pb.spectrum(probe, images, 16).metric(floor=0.25)
    step = normal(2, 17, 64, seed=1)
    change = torch.einsum("bmnd,bnd->bm", truth.jacobian, step).square().sum(1)
    torch.testing.assert_close(metric.squared_norm(step), change + 0.25 * step.square().sum((1, 2)))


def numbers(found: Spectrum) -> dict[str, torch.Tensor]:
    out = {
        "values": found.singular_values,
        "kappa": found.kappa.value,
        "se": found.kappa.se,
        "total": found.total.value,
    }
    if found.effective_rank is not None:
        out |= {"r_eff": found.effective_rank.value, "r_eff se": found.effective_rank.se}
    return out


@pytest.mark.parametrize("method", ["krylov", "paper", "exact"])
def test_the_batch_size_does_not_change_the_numbers(method):
    probe, images = seeded("cls", 4), random_images(5)
    together, alone, uneven = (
        pb.spectrum(probe, images, RANK, method, with_effective_rank=True, seed=3, batch_size=size)
        for size in (5, 1, 2)
    )
    for other in (alone, uneven):
        for name, value in numbers(together).items():
            torch.testing.assert_close(numbers(other)[name], value, rtol=1e-6, atol=0, msg=name)
        same_up_to_sign(other.modes, together.modes, rtol=0, atol=1e-6)


def test_the_same_seed_gives_the_same_numbers_and_another_seed_others():
    probe, images = seeded("cls", 4), random_images(2)
    first, again, other = (pb.spectrum(probe, images, RANK, "krylov", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.kappa.value, again.kappa.value) and torch.equal(first.modes, again.modes)
    assert (first.kappa.value != other.kappa.value).any() and (first.seed, other.seed) == (1, 2)


def test_the_spectrum_of_an_output_metric_is_that_of_its_factor_times_j():
    factor = normal(64, 5, seed=2)
    probe, images = load_seeded("cls", output_metric=factor), random_images(2)
    weighted = factor.T @ truth_of(seeded("cls", 4), images).jacobian.flatten(2)
    torch.testing.assert_close(pb.spectrum(probe, images, 5).singular_values, torch.linalg.svdvals(weighted))


def low_rank(rank: int) -> torch.Tensor:
    return normal(40, rank, seed=rank) @ normal(60, rank, seed=rank + 1).T


def easy_and_hard() -> tuple[FunctionProbe, torch.Tensor]:
    """Two samples, marked by their first feature: J of rank 3, which krylov exhausts at once, and of rank 30."""
    easy, hard = low_rank(3), low_rank(30)

    def function(x: torch.Tensor) -> torch.Tensor:
        chosen = (x[:, :1, 0] > 0).double()
        return chosen * (x.flatten(1) @ easy.T) + (1 - chosen) * (x.flatten(1) @ hard.T)

    features = normal(2, 1, 10, 6)
    features[0, 0, 0, 0], features[1, 0, 0, 0] = 1.0, -1.0
    return FunctionProbe(function), features


def test_the_full_spectrum_is_there_only_when_it_is_known_of_every_sample():
    probe, features = easy_and_hard()
    first = pb.spectrum(probe, features[:1], 3, "krylov")
    torch.testing.assert_close(first.full[0], torch.linalg.svdvals(low_rank(3)), rtol=0, atol=1e-6)
    both = pb.spectrum(probe, features, 3, "krylov", batch_size=1)
    assert both.full is None and len(both) == 2
    torch.testing.assert_close(both.singular_values[:1], first.singular_values)


def test_products_are_those_of_the_sample_that_took_most():
    probe, features = easy_and_hard()
    first = pb.spectrum(probe, features[:1], 3, "krylov").products
    both = pb.spectrum(probe, features, 3, "krylov", batch_size=1).products
    assert both.jvp > first.jvp and both.vjp > first.vjp


def test_the_papers_method_finds_more_energy_with_its_rayleigh_ritz_twin():
    probe = seeded("cls", 3)
    images = torch.randn(2, 3, 56, 56, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    literal, rotated = (
        pb.spectrum(probe, images, rank=4, method="paper", sketch_width=12, rayleigh_ritz=twin).singular_values
        for twin in (False, True)
    )
    assert (rotated.square().sum(1) > 1.01 * literal.square().sum(1)).all()
