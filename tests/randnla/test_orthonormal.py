import pytest
import torch

from pullback.randnla.orthonormal import orthonormalize

TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-6}


def gram_error(columns):
    return (columns.mT @ columns - torch.eye(columns.shape[-1], dtype=columns.dtype)).abs().max()


@pytest.fixture(params=[torch.float64, torch.float32], ids=str)
def blocks(request):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(3, 200, 6, dtype=request.param, generator=generator) for _ in range(2)]


def test_columns_become_orthonormal_and_keep_their_span(blocks):
    basis = orthonormalize(blocks[0])
    assert gram_error(basis) < TOLERANCE[basis.dtype]
    torch.testing.assert_close(basis @ (basis.mT @ blocks[0]), blocks[0])


def test_columns_become_orthogonal_to_a_given_basis_even_when_almost_inside_it(blocks):
    against = orthonormalize(blocks[0])
    inside = against @ torch.randn(6, 6, dtype=against.dtype)
    basis = orthonormalize(inside + 1e-3 * blocks[1], against)
    assert gram_error(torch.cat([against, basis], -1)) < 10 * TOLERANCE[basis.dtype]


def test_columns_of_very_different_length_are_no_problem(blocks):
    lengths = torch.logspace(-6, 6, 6, dtype=blocks[0].dtype)
    assert gram_error(orthonormalize(blocks[0] * lengths)) < TOLERANCE[blocks[0].dtype]


def test_dependent_columns_come_back_as_exact_zeros(blocks):
    block = blocks[0].clone()
    block[..., 3] = block[..., 0] - 2 * block[..., 1]
    block[1] = 0
    basis = orthonormalize(block)
    alive = (basis != 0).any(1)
    assert alive.sum(-1).tolist() == [5, 0, 5]
    torch.testing.assert_close(basis @ (basis.mT @ block), block)
    assert not orthonormalize(block, orthonormalize(blocks[0])).any()
