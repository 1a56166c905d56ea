"""Output directions and their pullbacks: exact, orthonormal, and free where a Krylov space knows them."""

import pytest
import torch

from helpers.spectra import exponential, matrix, power_law, rank_bounded
from pullback.operators import DenseOperator
from pullback.randnla import Streams, block_krylov, krylov_outputs, power_iteration, pulled_outputs

RANK = 6
SPECTRA = {
    "power law": power_law(60, 1.0),
    "exponential": exponential(60, 6.0),
    "flat": torch.ones(60, dtype=torch.float64),
    "rank 12": rank_bounded(60, 12),
}


@pytest.fixture(params=SPECTRA)
def dense(request) -> torch.Tensor:
    return torch.stack([matrix(SPECTRA[request.param], 60, 200, seed=seed) for seed in (0, 1)])


def streams() -> Streams:
    return Streams.from_seed(5, 2, "cpu")


def check(space, dense: torch.Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(space.pulled, dense.mT @ space.basis, rtol=0, atol=tolerance)
    kept = (space.basis != 0).any(1).double()
    torch.testing.assert_close(space.basis.mT @ space.basis, torch.diag_embed(kept), rtol=0, atol=tolerance)


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_a_krylov_space_knows_the_pullback_of_its_inner_images_without_a_product(dense, depth):
    op = DenseOperator(dense)
    svd = block_krylov(op, 3, block=RANK, depth=depth, streams=streams())
    spent = op.products
    space = krylov_outputs(svd)
    assert op.products == spent
    check(space, dense)
    assert (space.basis != 0).any(1).sum(-1).max() <= (depth - 1) * RANK, "the outermost block is not inner"


def test_samples_that_finished_early_keep_what_they_know(dense):
    """Of two samples in a batch one stops growing first: its zero columns are left out, the others stay exact."""
    mixed = torch.stack([dense[0], matrix(exponential(60, 2.0), 60, 200, seed=3)])
    op = DenseOperator(mixed)
    space = krylov_outputs(block_krylov(op, RANK, rtol=1e-6, streams=streams()))
    check(space, mixed)
    assert ((space.basis != 0).any(1).sum(-1) >= RANK).all()


def test_float32_spaces_leave_out_what_is_only_round_off():
    dense = torch.stack([matrix(exponential(60, 2.0), 60, 200, seed=seed) for seed in (0, 1)])
    op = DenseOperator(dense.float())
    space = krylov_outputs(block_krylov(op, RANK, depth=4, streams=streams()))
    kept = (space.basis != 0).any(1)
    assert kept.sum(-1).max() < 3 * 4
    error = (space.pulled.double() - dense.mT @ space.basis.double()).norm(dim=1)
    assert error.max() < 1e-3


def test_any_outputs_have_a_space_at_one_product_each(dense):
    op = DenseOperator(dense)
    image = power_iteration(op, RANK, streams=streams()).deflation()[1]
    spent = op.products
    space = pulled_outputs(op, image)
    assert (op.products - spent).vjp == RANK and (op.products - spent).jvp == 0
    check(space, dense)
    torch.testing.assert_close(space.basis @ (space.basis.mT @ image), image, rtol=0, atol=1e-9)
