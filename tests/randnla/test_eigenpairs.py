"""Leading modes of dense operators: those of a full decomposition, whatever the spectrum."""

import pytest
import torch

from pullback.operators import DenseOperator
from pullback.randnla import exact_svd
from pullback.randnla.eigenpairs import _high_power, all_eigenpairs, leading_eigenpairs
from pullback.randnla.svd import gram_and_rows

SIZE, RANK = 160, 20
PLACES = torch.arange(SIZE).double()
SPECTRA = {
    "decaying": 1 / (1 + PLACES),
    "slow": torch.exp(-PLACES / 60),
    "steep": torch.exp(-PLACES / 3),
    "flat": torch.ones(SIZE).double(),
    "few directions": (PLACES < 25).double(),
    "a pair at the cut": torch.where((PLACES == 20) | (PLACES == 19), 0.5, torch.exp(-PLACES / 30)),
}


def symmetric(spectrum: torch.Tensor, batch: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    turned = torch.linalg.qr(torch.randn(batch, SIZE, SIZE, dtype=torch.float64, generator=generator)).Q
    return (turned * spectrum) @ turned.mT


@pytest.mark.parametrize("name", SPECTRA)
def test_eigenpairs_are_those_of_a_full_decomposition(name):
    matrices = symmetric(SPECTRA[name])
    values, vectors = leading_eigenpairs(matrices, RANK)
    expected = all_eigenpairs(matrices, RANK)[0]
    torch.testing.assert_close(values, expected, rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(vectors.mT @ vectors, torch.eye(RANK).double().expand(2, -1, -1), rtol=0, atol=1e-10)
    missed = torch.linalg.vector_norm(matrices @ vectors - values[:, None] * vectors, dim=1)
    assert (missed <= 1.1e-5 * values.clamp_min(1e-10)).all()


def test_samples_of_a_batch_do_not_disturb_each_other():
    mixed = torch.cat([symmetric(SPECTRA[name], 1) for name in ("few directions", "slow", "decaying")])
    together = leading_eigenpairs(mixed, RANK)[0]
    alone = torch.cat([leading_eigenpairs(part, RANK)[0] for part in mixed.split(1)])
    torch.testing.assert_close(together, alone, rtol=1e-8, atol=1e-12)


def test_powers_of_a_matrix_have_a_number_however_steep_its_spectrum_is():
    matrices = symmetric(SPECTRA["decaying"])
    for ratio in (1.0, 1e5, 1e200, float("inf"), -1.0):
        found = _high_power(matrices, ratio)
        assert found.isfinite().all()
        vectors = all_eigenpairs(matrices, 3)[1]
        turned = found @ vectors
        torch.testing.assert_close(turned[..., 0], vectors[..., 0] * (vectors * turned).sum(1)[:, :1])


@pytest.mark.parametrize(("rank", "size"), [(30, SIZE), (4, 40)])
def test_small_matrices_and_high_ranks_are_decomposed_in_full(rank, size):
    matrices = symmetric(SPECTRA["slow"])[:, :size, :size]
    torch.testing.assert_close(leading_eigenpairs(matrices, rank)[0], all_eigenpairs(matrices, rank)[0])


@pytest.mark.parametrize("shape", [(12, 40), (40, 12)], ids=["wide", "tall"])
def test_modes_are_those_of_the_exact_svd(shape):
    matrix = torch.randn(2, *shape, generator=torch.Generator().manual_seed(1))
    found, expected = exact_svd(DenseOperator(matrix), 5, full=False), exact_svd(DenseOperator(matrix), 5)
    torch.testing.assert_close(found.singular_values, expected.singular_values)
    torch.testing.assert_close(found.right.abs(), expected.right.abs(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.column_energies, expected.column_energies)
    assert found.products == expected.products


def test_a_vanishing_mode_has_no_direction():
    matrix = torch.zeros(1, 4, 9)
    matrix[0, 0, 3], matrix[0, 2, 5] = 1.0, 0.5
    found = exact_svd(DenseOperator(matrix), 3, full=False)
    assert (found.right[..., 2] == 0).all() and found.right[..., 1].norm() > 0.99


def test_pieces_add_up():
    tall = torch.randn(2, 50, 6, generator=torch.Generator().manual_seed(2))
    for precision in ("float32", "tf32"):
        small, rows = gram_and_rows(tall, precision, chunk=16)
        torch.testing.assert_close(small, tall.double().mT @ tall.double(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(rows, tall.double().square().sum(2))
