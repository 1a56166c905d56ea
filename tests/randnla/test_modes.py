import pytest
import torch

from helpers.spectra import copies, exponential, matrix, power_law, rank_bounded
from pullback.errors import PullbackError, RankError
from pullback.operators import DenseOperator, ProductCount
from pullback.randnla import Streams, choose_method, effective_rank_from_spectrum, leading_modes, sketch


def streams_for(op, seed=0):
    return Streams.from_seed(seed, op.batch, op.device)


def different_matrices(dtype=torch.float64):
    spectra = (power_law(60, 1.5), exponential(60, 6.0), rank_bounded(60, 12))
    return spectra, DenseOperator(torch.stack([matrix(s, 60, 200, i) for i, s in enumerate(spectra)]).to(dtype))


@pytest.mark.parametrize("method", ["krylov", "exact"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_batch_of_different_matrices_gets_each_its_own_numbers(method, dtype):
    spectra, op = different_matrices(dtype)
    result = sketch(op, 10, method=method, streams=streams_for(op))
    assert result.method == method and result.products == op.products
    assert result.right.shape == (3, 200, 10) and result.kappa.value.shape == (3, 10)
    for i, sigma in enumerate(spectra):
        energies = sigma.square()
        truths = (
            (result.singular_values[i], sigma[:10], 5e-3 * sigma[:10]),
            (result.total.value[i], energies.sum(), 4 * result.total.se[i]),
            (result.kappa.value[i], energies[:10].cumsum(0) / energies.sum(), 4 * result.kappa.se[i]),
            (
                result.effective_rank.value[i],
                effective_rank_from_spectrum(sigma[None])[0],
                4 * result.effective_rank.se[i],
            ),
        )
        for value, truth, allowed in truths:
            assert ((value - truth).abs() <= allowed).all()


def test_exact_knows_the_whole_spectrum_and_claims_only_round_off():
    spectra, op = different_matrices()
    result = sketch(op, 10, method="exact", streams=streams_for(op))
    torch.testing.assert_close(result.spectrum, torch.stack(spectra), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(result.total.se, op.round_off * result.total.value, rtol=1e-9, atol=0)
    energies = torch.stack(spectra).square()
    truths = (
        (result.total, energies.sum(-1)),
        (result.kappa, energies[:, :10].cumsum(-1) / energies.sum(-1, keepdim=True)),
        (result.effective_rank, effective_rank_from_spectrum(torch.stack(spectra))),
    )
    for estimate, truth in truths:
        assert ((estimate.value - truth).abs() <= 2 * estimate.se).all()
    assert result.products == ProductCount(vjp=60)


def test_auto_takes_the_cheaper_way_and_no_matrix_that_is_too_large(monkeypatch):
    _, small = different_matrices()
    assert sketch(small, 10, streams=streams_for(small)).method == "exact"
    large = copies(matrix(power_law(400, 2.0), 400, 500), 1)
    assert sketch(large, 4, with_effective_rank=False, streams=streams_for(large)).method == "krylov"
    assert sketch(large, 4, streams=streams_for(large)).method == "exact"
    monkeypatch.setattr("pullback.randnla.modes.MAX_DENSE_BYTES", 1e4)
    assert sketch(small, 10, streams=streams_for(small)).method == "krylov"


@pytest.mark.parametrize(
    ("rows", "cols", "expected"),
    [(192, 98688, "exact"), (193, 98688, "krylov"), (150, 10**7, "krylov")],
)
def test_auto_takes_what_needs_fewer_products_and_is_not_too_large(rows, cols, expected):
    assert choose_method("auto", rows, cols, 20, sampled=32) == expected


@pytest.mark.parametrize("shape", [(40, 90), (90, 40)], ids=["wide", "tall"])
@pytest.mark.parametrize("method", ["exact", "krylov", "paper"])
def test_leading_modes_agree_with_the_dense_truth_whatever_the_method(method, shape):
    op = copies(matrix(exponential(40, 0.7), *shape), 2)
    found = leading_modes(op, 3, method=method, rtol=1e-6, streams=streams_for(op))
    assert found.method == method
    truth = torch.linalg.svdvals(op.matrix)[:, :3]
    tolerance = {"paper": 0.05}.get(method, 1e-4)
    torch.testing.assert_close(found.svd.singular_values, truth, rtol=tolerance, atol=0)
    if found.known is None:
        assert method == "exact" and found.svd.column_energies is not None
    else:
        torch.testing.assert_close(found.known.pulled, op.matrix.mT @ found.known.basis, rtol=1e-4, atol=1e-4)


def test_an_unknown_method_is_refused():
    with pytest.raises(PullbackError, match="method: expected one of auto, krylov, paper, exact, got 'fast'"):
        choose_method("fast", 10, 10, 2)


def test_the_papers_method_costs_what_it_says():
    _, op = different_matrices()
    result = sketch(op, 20, method="paper", with_effective_rank=False, streams=streams_for(op))
    assert result.method == "paper" and result.effective_rank is None
    assert result.products == ProductCount(jvp=160, vjp=40)


def test_krylov_without_effective_rank_runs_no_lanczos():
    _, op = different_matrices()
    result = sketch(op, 10, method="krylov", with_effective_rank=False, streams=streams_for(op))
    assert result.effective_rank is None and result.products.total < 250


@pytest.mark.parametrize("rtol", [0.01, 0.002])
def test_rtol_bounds_the_relative_errors(rtol):
    op = copies(matrix(power_law(150, 0.7), 150, 500), 5)
    result = sketch(op, 10, method="krylov", rtol=rtol, streams=streams_for(op))
    assert (result.kappa.relative_se[:, -1] <= rtol).all()
    assert (result.effective_rank.relative_se <= rtol).all()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_modes_can_be_asked_to_be_accurate_whatever_the_noise_of_the_trace(seed):
    sigma = power_law(300, 0.3)  # decays so slowly that the trace of a few probes is noisy

    def found(modes_rtol):
        op = DenseOperator(matrix(sigma, 300, 400, seed)[None])
        knobs = {"num_probes": 8, "with_effective_rank": False, "modes_rtol": modes_rtol}
        result = sketch(op, 10, method="krylov", streams=streams_for(op, seed), **knobs)
        energies, truth = result.singular_values[0].square(), sigma[:10].square()
        return ((energies - truth).abs() / truth).max().item(), result.products.total

    (loose, few), (close, more) = found(None), found(1e-4)
    assert close < 1e-4 and loose > 5 * close and more > few


def test_a_sample_does_not_notice_its_batch_and_the_same_seed_repeats_itself():
    _, op = different_matrices()
    together, again = (sketch(op, 10, method="krylov", streams=streams_for(op)) for _ in range(2))
    assert torch.equal(together.kappa.value, again.kappa.value)
    last = DenseOperator(op.matrix[1:2])
    alone = sketch(last, 10, method="krylov", streams=Streams.from_seed(0, 1, "cpu", first=1))
    torch.testing.assert_close(alone.kappa.value[0], together.kappa.value[1])
    torch.testing.assert_close(alone.effective_rank.value[0], together.effective_rank.value[1])


def test_the_zero_operator_has_no_modes_and_no_nan():
    op = copies(torch.zeros(20, 50), 2)
    for method in ("krylov", "exact", "paper"):
        result = sketch(op, 4, method=method, streams=streams_for(op))
        for estimate in (result.total, result.kappa, result.effective_rank):
            assert not estimate.value.any() and not estimate.se.any()


def test_what_was_known_one_block_earlier_is_on_the_way_to_what_is_known_now():
    spectra, op = different_matrices()
    assert sketch(op, 10, method="krylov", streams=streams_for(op)).earlier is None, "only on demand"
    result = sketch(op, 10, method="krylov", with_earlier=True, streams=streams_for(op))
    values, right = result.earlier
    truth = torch.stack(spectra)[:, :10]
    assert values.shape == (3, 10) and right.shape == (3, 200, 10)
    torch.testing.assert_close(right.mT @ right, torch.eye(10).double().expand(3, -1, -1), rtol=0, atol=1e-10)
    assert (values <= result.singular_values * (1 + 1e-12)).all(), "Ritz values grow with the space"
    now, before = ((truth[0] - found[0]).norm() for found in (result.singular_values, values))
    assert now < 0.1 * before, "of the power law, which alone is not known to the last digit"
    overlap = (right.mT @ result.right).norm(dim=(1, 2)).square() / 10
    assert (overlap > 0.99).all() and overlap[0] < 1 - 1e-12
    for method in ("exact", "paper"):
        assert sketch(op, 10, method=method, with_earlier=True, streams=streams_for(op)).earlier is None


def test_a_space_that_holds_everything_has_no_earlier_one():
    op = copies(matrix(rank_bounded(60, 6), 60, 200), 2)
    result = sketch(op, 10, method="krylov", with_earlier=True, streams=streams_for(op))
    values, right = result.earlier
    torch.testing.assert_close(values, result.singular_values, rtol=0, atol=1e-7)
    torch.testing.assert_close((right * values[:, None]).norm(dim=2), (result.right * values[:, None]).norm(dim=2))


@pytest.mark.parametrize("method", ["krylov", "exact"])
def test_errors_below_round_off_are_refused(method):
    _, op = different_matrices(torch.float32)
    with pytest.raises(
        PullbackError, match=r"rtol: expected at least 1.2e-05, since .* error of 6e-06, got 1e-07\. Rai"
    ):
        sketch(op, 4, method=method, rtol=1e-7, streams=streams_for(op))


def test_mistakes_are_answered_with_the_fix():
    _, op = different_matrices()
    with pytest.raises(RankError, match=r"expected 1 <= rank <= 60.*got 61\. Ask for rank=60"):
        sketch(op, 61, streams=streams_for(op))
    with pytest.raises(PullbackError, match="method: expected one of auto, krylov, paper, exact, got 'fast'"):
        sketch(op, 4, method="fast", streams=streams_for(op))
