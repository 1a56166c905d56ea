import pytest
import torch

from pullback.randnla.orthonormal import cholesky_qr, orthonormalize, qr_basis

TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-6}
# Of a QR with 6 columns: rounding of Householder reflections, some ten units of it, with room for other machines' sums.
# A basis in the wrong order is off by much more.
ORDERED = {torch.float64: 1e-12, torch.float32: 1e-5}


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


def dependent_columns(dependence, *, seed=1, dtype=torch.float64, batch=2):
    """Columns of which the fourth is the first but for ``dependence``, and the fifth is short."""
    columns = torch.randn(batch, 200, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    columns[..., 3] = columns[..., 0] + dependence * columns[..., 3]
    columns[..., 4] *= 1e-6
    return columns.to(dtype)


def departures(basis, columns):
    """How far each sample of Q is from an orthonormal basis, in order, with a positive diagonal of R.

    The largest of what is left of Q^T Q - I, of the lower triangle of Q^T X, of X - Q R, and of R's diagonal below 0.
    """
    basis, columns = basis.double(), columns.double()
    unit = columns / torch.linalg.vector_norm(columns, dim=1, keepdim=True)
    upper = basis.mT @ unit
    eye = torch.eye(basis.shape[-1], dtype=basis.dtype)
    parts = (basis.mT @ basis - eye, upper.tril(-1), unit - basis @ upper.triu(), upper.diagonal(dim1=1, dim2=2))
    parts = (*parts[:3], parts[3].clamp_max(0)[:, None])
    return torch.stack([part.abs().amax((1, 2)) for part in parts]).amax(0)


@pytest.fixture
def another_lapack(monkeypatch):
    """A Cholesky factorisation as another machine might have it: other rounding, and no matrix is refused."""
    generator = torch.Generator().manual_seed(5)

    def factor(products):
        noise = torch.randn(products.shape, dtype=products.dtype, generator=generator)
        values, vectors = torch.linalg.eigh(products + torch.finfo(products.dtype).eps * (noise + noise.mT))
        upper = torch.linalg.qr(values.clamp_min(1e-17).sqrt()[:, :, None] * vectors.mT).R
        signs = upper.diagonal(dim1=1, dim2=2).sign()
        refused = torch.zeros(len(products), dtype=torch.int32)
        return torch.return_types.linalg_cholesky_ex(((upper * signs[:, :, None]).mT.contiguous(), refused))

    monkeypatch.setattr(torch.linalg, "cholesky_ex", factor)


@pytest.mark.parametrize("dependence", [1.0, 1e-4, 1e-7, 1e-8, 1e-9, 0.0])
def test_the_basis_of_a_qr_keeps_the_order_however_dependent_the_columns_are(dependence):
    columns = dependent_columns(dependence)
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


DEPENDENCES = [1.0, 1e-2, 1e-4, 1e-5, 1e-6, 1e-7, 3e-8, 1e-8, 1e-9, 1e-12, 0.0]


@pytest.mark.parametrize("dependence", DEPENDENCES)
def test_the_basis_of_a_qr_does_not_depend_on_whose_cholesky_factor_it_comes_from(dependence, another_lapack):
    for seed in range(4):
        columns = dependent_columns(dependence, seed=seed)
        assert (departures(qr_basis(columns), columns) <= ORDERED[torch.float64]).all(), f"seed {seed}"
        columns = columns.float()
        assert (departures(qr_basis(columns), columns) <= ORDERED[torch.float32]).all(), f"seed {seed}, float32"


@pytest.mark.parametrize("lapack", ["this machine's", "another"])
def test_what_a_cholesky_qr_trusts_keeps_its_promise(lapack, request):
    if lapack == "another":
        request.getfixturevalue("another_lapack")
    for tolerance in (1e-12, 1e-9, 1e-6):
        shares = []
        for dependence in DEPENDENCES:
            columns = dependent_columns(dependence, batch=10)
            basis, trusted = cholesky_qr(columns, tolerance=tolerance)
            assert (departures(basis, columns)[trusted] <= tolerance).all()
            shares.append(trusted.double().mean().item())
        assert shares[0] == 1 and shares[-1] == 0


@pytest.mark.parametrize(("dtype", "dependence"), [(torch.float64, 1e-2), (torch.float32, 1e-5)], ids=str)
def test_columns_that_depend_little_on_each_other_need_no_householder_qr(dtype, dependence, monkeypatch):
    monkeypatch.setattr(torch.linalg, "qr", lambda columns: pytest.fail("columns went to Householder reflections"))
    columns = dependent_columns(dependence, dtype=dtype)
    assert (departures(qr_basis(columns), columns) <= ORDERED[dtype]).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_one_dependent_sample_does_not_spoil_the_others(dtype):
    columns = torch.cat([dependent_columns(dependence, dtype=dtype) for dependence in (1.0, 0.0)])
    columns[3, :, 2] = 0
    basis = qr_basis(columns)
    assert (departures(basis[:3], columns[:3]) <= ORDERED[dtype]).all()
    assert gram_error(basis.double()) < ORDERED[dtype]
