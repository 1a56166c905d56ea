"""Krylov in output space: the modes and costs of its twin in feature space, and pullbacks that come for nothing."""

import pytest
import torch

from helpers.spectra import exponential, matrix, nearly_flat, power_law, rank_bounded
from pullback.operators import DenseOperator
from pullback.randnla import Streams, block_krylov, output_krylov

SPECTRA = {
    "power law": power_law(60, 2.0),
    "exponential": exponential(60, 3.0),
    "slow": power_law(60, 1.0),
    "nearly flat": nearly_flat(60),
    "rank bounded": rank_bounded(60, 7),
}


def operator(*spectra, dtype=torch.float64, cols=300):
    return DenseOperator(torch.stack([matrix(s, 60, cols, seed) for seed, s in enumerate(spectra)]).to(dtype))


@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_singular_values_are_as_accurate_as_the_error_says(name, dtype):
    op = operator(SPECTRA[name], dtype=dtype)
    svd, _ = output_krylov(op, 10, streams=Streams.from_seed(0, 1))
    truth, found = (values.double().square().cumsum(-1) for values in (SPECTRA[name][:10], svd.singular_values[0]))
    assert ((truth - found).abs() / truth < 2 * svd.relative_error[0] + 1e-5).all()
    assert (svd.relative_error <= 1e-3).all()


@pytest.mark.parametrize("depth", [2, 4, 6])
def test_at_equal_depth_it_finds_the_same_as_krylov_in_feature_space(depth):
    op = operator(SPECTRA["slow"])
    svd, _ = output_krylov(op, 6, block=5, depth=depth, streams=Streams.from_seed(3, 1))
    twin = block_krylov(op, 6, block=5, depth=depth, streams=Streams.from_seed(3, 1))
    torch.testing.assert_close(svd.singular_values, twin.singular_values, rtol=1e-9, atol=0)
    torch.testing.assert_close((svd.right.mT @ twin.right).abs(), torch.eye(6, dtype=torch.float64)[None])
    assert svd.products == twin.products


def test_the_known_outputs_are_orthonormal_and_their_pullbacks_right():
    op = operator(SPECTRA["slow"], SPECTRA["exponential"])
    _, known = output_krylov(op, 6, streams=Streams.from_seed(0, 2))
    torch.testing.assert_close(known.pulled, op.matrix.mT @ known.basis)
    gram = known.basis.mT @ known.basis
    alive = (known.basis != 0).any(1)
    torch.testing.assert_close(gram, torch.diag_embed(alive.double()))


def test_a_sample_does_not_depend_on_its_batch():
    hard, easy = SPECTRA["slow"], SPECTRA["exponential"]
    together, _ = output_krylov(operator(hard, easy), 6, streams=Streams.from_seed(0, 2))
    alone, _ = output_krylov(operator(hard), 6, streams=Streams.from_seed(0, 1))
    torch.testing.assert_close(together.singular_values[:1], alone.singular_values, rtol=1e-12, atol=0)
    easy_alone = DenseOperator(operator(hard, easy).matrix[1:])
    second, _ = output_krylov(easy_alone, 6, streams=Streams.from_seed(0, 1, first=1))
    torch.testing.assert_close(together.singular_values[1:], second.singular_values, rtol=1e-12, atol=0)


def test_multiple_singular_values_are_all_found():
    op = operator(torch.cat([torch.full((9,), 2.0), torch.zeros(51)]).double())  # nothing else to find
    svd, _ = output_krylov(op, 9, block=4, streams=Streams.from_seed(0, 1))
    torch.testing.assert_close(svd.singular_values[0], torch.full((9,), 2.0, dtype=torch.float64))


def test_fewer_directions_than_the_rank_come_back_as_zeros():
    op = operator(SPECTRA["rank bounded"])
    svd, _ = output_krylov(op, 10, streams=Streams.from_seed(0, 1))
    torch.testing.assert_close(svd.singular_values[0, 7:], torch.zeros(3, dtype=torch.float64))
    assert (svd.right[0, :, 7:] == 0).all()


def test_outputs_that_are_exhausted_give_the_exact_spectrum():
    op = DenseOperator(matrix(nearly_flat(7), 7, 40)[None])
    svd, known = output_krylov(op, 7, block=3, streams=Streams.from_seed(0, 1))
    torch.testing.assert_close(svd.singular_values[0], nearly_flat(7))
    assert known.basis.shape[-1] == 7 and (svd.relative_error == 0).all()
