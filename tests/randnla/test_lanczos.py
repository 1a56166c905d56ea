import torch

from pullback.randnla.slq import gauss_quadrature, lanczos

GENERATOR = torch.Generator().manual_seed(0)


def symmetric(values):
    basis = torch.linalg.qr(torch.randn(2, len(values), len(values), dtype=torch.float64, generator=GENERATOR)).Q
    return (basis * values) @ basis.mT


def test_all_steps_recover_the_quadratic_form_of_any_function():
    dense = symmetric(torch.linspace(0.1, 2.0, 12, dtype=torch.float64))
    start = torch.randn(2, 12, 3, dtype=torch.float64, generator=GENERATOR)
    start = start / start.norm(dim=1, keepdim=True)
    nodes, weights = gauss_quadrature(*lanczos(lambda columns: dense @ columns, start, 50))
    values, vectors = torch.linalg.eigh(dense)
    expected = ((vectors.mT @ start).square() * values.log()[..., None]).sum(1)
    torch.testing.assert_close((weights * nodes.log()).sum(-1), expected)


def test_s_steps_are_exact_up_to_degree_2s_minus_1():
    dense = symmetric(torch.rand(40, dtype=torch.float64, generator=GENERATOR))
    start = torch.randn(2, 40, 4, dtype=torch.float64, generator=GENERATOR)
    start = start / start.norm(dim=1, keepdim=True)
    nodes, weights = gauss_quadrature(*lanczos(lambda columns: dense @ columns, start, 4))
    expected = (start * (torch.linalg.matrix_power(dense, 7) @ start)).sum(1)
    torch.testing.assert_close((weights * nodes**7).sum(-1), expected)


def test_breakdown_ends_a_column_without_nan():
    dense = symmetric(torch.tensor([3.0] * 4 + [1.0] * 6, dtype=torch.float64))
    start = torch.randn(2, 10, 3, dtype=torch.float64, generator=GENERATOR)
    start[1, :, 2] = 0
    alpha, beta = lanczos(lambda columns: dense @ columns, start, 6)
    assert alpha.isfinite().all() and not beta[..., 2:].any() and not alpha[..., 3:].any()
    nodes, weights = gauss_quadrature(alpha, beta)
    unit = start[0] / start[0].norm(dim=0)
    torch.testing.assert_close((weights * nodes).sum(-1)[0], (unit * (dense[0] @ unit)).sum(0))
