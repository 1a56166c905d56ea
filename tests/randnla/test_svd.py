import pytest
import torch

from helpers.spectra import copies, exponential, matrix, nearly_flat, power_law, rank_bounded
from pullback.errors import PullbackError, RankError
from pullback.operators import DenseOperator, ProductCount
from pullback.randnla import Streams, block_krylov, exact_svd, output_krylov, power_iteration

METHODS = {
    "power": power_iteration,
    "krylov": block_krylov,
    "output": lambda op, rank, streams: output_krylov(op, rank, streams=streams)[0],
    "exact": lambda op, rank, streams: exact_svd(op, rank),
}


def streams_for(op, seed=0):
    return Streams.from_seed(seed, op.batch, op.device)


def different_matrices(rows, cols, dtype=torch.float64):
    small = min(rows, cols)
    spectra = (power_law(small, 2.0), exponential(small, 3.0), 5 * power_law(small, 3.0))
    return DenseOperator(torch.stack([matrix(s, rows, cols, seed) for seed, s in enumerate(spectra)]).to(dtype))


def energy_error(svd, op, rank):
    truth = torch.linalg.svdvals(op.matrix.double())[:, :rank].square().sum(-1)
    return (truth - svd.singular_values.double().square().sum(-1)) / truth


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("rows,cols", [(30, 90), (90, 30)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_every_method_returns_orthonormal_modes_with_their_singular_values(name, rows, cols, dtype):
    op = different_matrices(rows, cols, dtype)
    svd = METHODS[name](op, 5, streams=streams_for(op))
    assert svd.singular_values.shape == (3, 5) and svd.right.shape == (3, cols, 5)
    assert svd.right.dtype == svd.singular_values.dtype == dtype
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    assert (svd.right.mT @ svd.right - torch.eye(5, dtype=dtype)).abs().max() < tolerance
    assert (svd.singular_values.diff() <= 0).all()
    torch.testing.assert_close(torch.linalg.vector_norm(op.matrix @ svd.right, dim=1), svd.singular_values)
    assert svd.relative_error.shape == (3, 5) and (svd.relative_error >= 0).all()


@pytest.mark.parametrize("name", ["krylov", "output", "exact"])
@pytest.mark.parametrize("rows,cols", [(30, 90), (90, 30), (40, 40)])
def test_krylov_and_exact_find_the_modes_of_the_dense_svd(name, rows, cols):
    op = different_matrices(rows, cols)
    svd = METHODS[name](op, 4, streams=streams_for(op))
    truth = torch.linalg.svd(op.matrix)
    torch.testing.assert_close(svd.singular_values, truth.S[:, :4], rtol=2e-3, atol=0)
    alignment = (svd.right.mT @ truth.Vh[:, :4].mT).square().sum((1, 2)) / 4
    assert (alignment > 0.999).all()


@pytest.mark.parametrize("name", METHODS)
def test_a_rank_beyond_the_smaller_side_is_refused_with_the_limit_and_the_fix(name):
    op = different_matrices(9, 50)
    with pytest.raises(RankError, match=r"rank <= 9, the smaller side of this 9 x 50 operator, got 10.*rank=9"):
        METHODS[name](op, 10, streams=streams_for(op))


# The paper's Algorithm 2


def test_power_iteration_costs_what_the_paper_counts():
    op = copies(matrix(power_law(60, 1.0), 60, 200), 2)
    svd = power_iteration(op, 20, streams=streams_for(op))
    assert svd.products == op.products == ProductCount(jvp=60, vjp=40) and svd.products.pairs == 50
    wide = power_iteration(op, 20, power_iters=3, sketch_width=30, rayleigh_ritz=True, streams=streams_for(op))
    assert wide.products.pairs == 105


def test_power_iteration_is_the_papers_algorithm_to_the_letter():
    op = copies(matrix(power_law(40, 1.0), 40, 120), 2)
    omega = streams_for(op).gaussian(120, 8, torch.float64)
    for _ in range(2):
        omega = torch.linalg.qr(op.matrix.mT @ (op.matrix @ omega)).Q
    expected = (op.matrix @ omega[..., :6]).norm(dim=1).sort(descending=True).values
    svd = power_iteration(op, 6, sketch_width=8, streams=streams_for(op))
    torch.testing.assert_close(svd.singular_values, expected)


def test_no_power_iteration_at_all_is_a_random_subspace_with_an_unknown_error():
    op = copies(matrix(power_law(40, 1.0), 40, 120), 2)
    svd = power_iteration(op, 6, power_iters=0, streams=streams_for(op))
    assert (svd.relative_error == 1).all() and (energy_error(svd, op, 6) > 0.5).all()


def test_oversampling_helps_only_with_rayleigh_ritz():
    op = copies(matrix(power_law(100, 1.0), 100, 300), 20)
    runs = [(20, False), (30, False), (30, True)]
    exact, wide, rotated = (
        energy_error(
            power_iteration(op, 20, sketch_width=width, rayleigh_ritz=rr, streams=streams_for(op)), op, 20
        ).mean()
        for width, rr in runs
    )
    assert wide > 0.9 * exact and rotated < 0.6 * exact


def test_the_estimated_error_of_power_iteration_has_the_right_size():
    op = copies(matrix(power_law(100, 1.0), 100, 300), 20)
    svd = power_iteration(op, 20, streams=streams_for(op))
    ratio = svd.relative_error[:, -1].mean() / energy_error(svd, op, 20).mean()
    assert 0.3 < ratio < 3


# Block Krylov


@pytest.mark.parametrize("exponent,limit", [(1.06, 1.0e-4), (0.8, 5.1e-4)])
def test_ninety_pairs_beat_the_recorded_accuracy_on_spectra_like_those_of_cls_jacobians(exponent, limit):
    sigma = power_law(384, exponent)  # kappa(20) = 0.59 and 0.39, effective rank 79 and 179
    op = copies(matrix(sigma, 384, 2000), 8)
    svd = block_krylov(op, 20, block=10, depth=9, streams=streams_for(op))
    assert svd.products == ProductCount(jvp=90, vjp=90)
    kappa = sigma[:20].square().sum() / sigma.square().sum()
    assert (kappa * energy_error(svd, op, 20)).mean() < limit / 10


@pytest.mark.parametrize("shape", [(80, 400), (400, 80)], ids=["wide", "tall"])
@pytest.mark.parametrize("sigma", [power_law(80, 0.6), exponential(80, 10.0), nearly_flat(80)], ids=["p", "e", "f"])
def test_the_adaptive_depth_reaches_the_requested_accuracy(sigma, shape):
    op = copies(matrix(sigma, *shape), 20)
    svd = block_krylov(op, 10, rtol=1e-3, streams=streams_for(op))
    error = energy_error(svd, op, 10)
    assert (error <= 1e-3).double().mean() >= 0.95 and error.max() < 3e-3
    assert (svd.relative_error <= 1e-3).all()


def test_a_spent_row_space_is_recognised_and_then_everything_is_exact():
    sigma = rank_bounded(60, 12)
    for dtype in (torch.float64, torch.float32):
        op = copies(matrix(sigma, 60, 400).to(dtype), 4)
        svd = block_krylov(op, 20, streams=streams_for(op))
        assert svd.spectrum is not None and not svd.relative_error.any()
        torch.testing.assert_close(svd.spectrum, sigma.to(dtype).expand(4, 60), rtol=1e-5, atol=1e-5)
        assert svd.products.total <= 60


def test_multiple_singular_values_are_found_although_a_single_krylov_space_misses_them():
    sigma = torch.cat([torch.ones(15), torch.full((65,), 0.3)]).double()
    op = copies(matrix(sigma, 80, 200), 5)
    svd = block_krylov(op, 20, block=10, rtol=1e-6, streams=streams_for(op))
    torch.testing.assert_close(svd.singular_values, sigma[:20].expand(5, 20))


def test_a_flat_spectrum_converges_to_the_end_although_round_off_leaves_the_row_space():
    sigma = nearly_flat(60)
    op = copies(matrix(sigma, 60, 400).float(), 10)
    svd = block_krylov(op, 8, rtol=1e-7, streams=streams_for(op))
    torch.testing.assert_close(svd.singular_values, sigma[:8].float().expand(10, 8), rtol=1e-4, atol=0)


def test_a_sample_does_not_notice_its_batch():
    op = different_matrices(60, 150)
    together = block_krylov(op, 6, streams=streams_for(op))
    for i in range(3):
        alone = block_krylov(DenseOperator(op.matrix[i : i + 1]), 6, streams=Streams.from_seed(0, 1, "cpu", first=i))
        torch.testing.assert_close(alone.singular_values[0], together.singular_values[i])
        torch.testing.assert_close(alone.relative_error[0], together.relative_error[i], rtol=1e-2, atol=1e-12)


def test_the_same_seed_gives_the_same_modes():
    op = different_matrices(60, 150)
    first, again = (block_krylov(op, 6, streams=streams_for(op)) for _ in range(2))
    assert torch.equal(first.right, again.right)


def test_a_space_too_small_for_the_rank_is_refused():
    op = different_matrices(60, 150)
    with pytest.raises(RankError, match="rank 20 needs depth >= 2 with block 10, got 1"):
        block_krylov(op, 20, depth=1, streams=streams_for(op))


# Exactly


def test_exact_svd_of_a_singular_matrix_has_no_nan():
    op = copies(matrix(rank_bounded(20, 3), 20, 50), 2)
    svd = exact_svd(op, 6)
    assert svd.right.isfinite().all() and svd.products == ProductCount(vjp=20)
    torch.testing.assert_close(svd.spectrum, rank_bounded(20, 3).expand(2, 20), rtol=1e-6, atol=1e-7)
    zero = exact_svd(copies(torch.zeros(20, 50), 2), 6)
    assert not zero.singular_values.any() and not zero.right.any()


def test_pieces_of_the_long_side_do_not_change_the_result():
    op = different_matrices(30, 90)
    torch.testing.assert_close(exact_svd(op, 5, chunk=7).spectrum, exact_svd(op, 5).spectrum)


def test_an_exact_svd_has_no_basis_to_deflate_by():
    with pytest.raises(PullbackError, match="expected one with a basis"):
        exact_svd(different_matrices(30, 90), 5).deflation()
