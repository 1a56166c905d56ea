import pytest
import torch

from pullback.randnla.orthonormal import orthonormalize, qr_basis

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


@pytest.mark.parametrize("dependence", [1.0, 1e-4, 1e-8, 1e-9, 0.0])
def test_the_basis_of_a_qr_keeps_the_order_however_dependent_the_columns_are(dependence):
    columns = torch.randn(2, 200, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    columns[..., 3] = columns[..., 0] + dependence * columns[..., 3]
    columns[..., 4] *= 1e-6
    basis = qr_basis(columns)
    torch.testing.assert_close(basis.mT @ basis, torch.eye(6, dtype=basis.dtype).expand(2, -1, -1), rtol=0, atol=1e-12)
    upper = basis.mT @ columns
    lengths = torch.linalg.vector_norm(columns, dim=1)
    assert (upper.tril(-1).abs() <= 1e-12 * lengths[:, None]).all(), "the first j span what the first j did"
    assert (upper.diagonal(dim1=1, dim2=2) >= -1e-12 * lengths).all()
    if dependence:  # otherwise the direction of what is left is anybody's
        expected, upper = torch.linalg.qr(columns)
        signs = upper.diagonal(dim1=1, dim2=2).sign()[:, None]
        torch.testing.assert_close(basis, expected * signs, rtol=0, atol=1e-5)
