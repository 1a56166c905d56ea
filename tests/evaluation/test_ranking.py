"""Rank correlation against scipy, row by row."""

import warnings
from functools import partial

import numpy as np
import pytest
import torch
from scipy.stats import ConstantInputWarning, kendalltau, rankdata, spearmanr

from pullback.errors import ShapeError
from pullback.evaluation import kendall, ranking, spearman
from pullback.evaluation.ranking import ranks


def rows(count: int = 6, length: int = 41, *, levels: int | None = None, seed: int = 0) -> torch.Tensor:
    """Normal numbers, or whole ones out of ``levels``, which have ties."""
    generator = torch.Generator().manual_seed(seed)
    if levels is None:
        return torch.randn(count, length, generator=generator, dtype=torch.float64)
    return torch.randint(levels, (count, length), generator=generator)


def by_scipy(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConstantInputWarning)
        rho = [spearmanr(x.numpy(), y.numpy()).statistic for x, y in zip(a, b, strict=True)]
    return torch.tensor(np.array(rho), dtype=torch.float64)


@pytest.mark.parametrize("levels", [None, 30, 3], ids=["no ties", "few ties", "many ties"])
def test_it_is_that_of_scipy(levels):
    a, b = rows(levels=levels), rows(levels=levels, seed=1)
    related = a + b  # neither far from 0 nor from 1
    for other in (b, related, -related):
        torch.testing.assert_close(spearman(a, other), by_scipy(a, other))


def test_ranks_are_those_of_scipy_from_zero():
    values = rows(levels=5)
    torch.testing.assert_close(ranks(values), torch.from_numpy(rankdata(values.numpy(), axis=-1)) - 1)


def test_only_the_order_counts():
    a, b = rows(), rows(seed=1)
    torch.testing.assert_close(spearman(a.exp(), b**3), spearman(a, b))
    torch.testing.assert_close(spearman(a, a.exp()), torch.ones(6, dtype=torch.float64))
    torch.testing.assert_close(spearman(a, -a.exp()), -torch.ones(6, dtype=torch.float64))


def test_a_constant_row_has_no_correlation_where_a_mean_is_rounded(monkeypatch):
    """As on a GPU, whose mean of a constant may be its neighbour."""
    monkeypatch.setattr(ranking, "_centred", lambda own: own - own.mean(-1, keepdim=True) * (1 + 2**-52))
    varied, constant = rows(2), torch.ones(2, 41)
    assert spearman(varied, constant).isnan().all() and spearman(constant, varied).isnan().all()
    assert spearman(varied, varied).tolist() == pytest.approx([1.0, 1.0])


def test_a_constant_row_has_no_correlation_and_leaves_the_others_alone():
    a, b = rows(), rows(seed=1)
    a[2], b[4] = 0.1, -7.0
    rho = spearman(a, b)
    assert rho.isnan().tolist() == [False, False, True, False, True, False]
    torch.testing.assert_close(rho, by_scipy(a, b), equal_nan=True)


def test_a_nan_is_not_taken_for_the_largest_value():
    a, b = rows(), rows(seed=1)
    expected = spearman(a, b)
    a[1, 5], b[3, 0] = torch.nan, torch.nan
    rho = spearman(a, b)
    assert rho.isnan().tolist() == [False, True, False, True, False, False]
    torch.testing.assert_close(rho[[0, 2, 4, 5]], expected[[0, 2, 4, 5]])


def test_it_takes_every_dtype_and_memory_layout_without_a_warning(request):
    a, b = rows(levels=50), rows(levels=50, seed=1)  # whole numbers that bfloat16 has too
    expected = spearman(a, b)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        request.addfinalizer(partial(torch.set_warn_always, torch.is_warn_always_enabled()))
        torch.set_warn_always(True)  # torch says most things once per process
        assert torch.equal(spearman(a.T.contiguous().T, b.double().T.contiguous().T), expected)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        rho = spearman(a.to(dtype), b)
        assert rho.dtype == torch.float64
        assert torch.equal(rho, expected)


def tau_by_scipy(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    tau = [kendalltau(x.numpy(), y.numpy(), variant="b").statistic for x, y in zip(a, b, strict=True)]
    return torch.tensor(np.array(tau), dtype=torch.float64)


@pytest.mark.parametrize("length", [2, 3, 32, 41])
@pytest.mark.parametrize("levels", [None, 30, 3], ids=["no ties", "few ties", "many ties"])
def test_kendalls_tau_is_that_of_scipy(levels, length):
    a, b = rows(length=length, levels=levels), rows(length=length, levels=levels, seed=1)
    for other in (b, a + b, -(a + b), a, -a):
        torch.testing.assert_close(kendall(a, other), tau_by_scipy(a, other), equal_nan=True)


def test_kendalls_tau_of_the_same_and_the_reversed_order_is_exactly_one():
    a = rows(count=3, length=2000)
    assert kendall(a, a.exp()).tolist() == [1.0] * 3 and kendall(a, -a).tolist() == [-1.0] * 3
    swapped = a.argsort(dim=-1).argsort(dim=-1)
    swapped[:, [0, 1]] = swapped[:, [1, 0]]
    torch.testing.assert_close(kendall(a, swapped), tau_by_scipy(a, swapped), rtol=1e-12, atol=0)


def test_kendalls_tau_needs_no_matrix_of_pairs():
    a, b = rows(count=2, length=20_000), rows(count=2, length=20_000, seed=1)  # 3 GB each as a matrix
    torch.testing.assert_close(kendall(a, a + b), tau_by_scipy(a, a + b), rtol=1e-12, atol=0)


def test_kendalls_tau_of_rows_without_an_order_is_unknown():
    a, b = rows(), rows(seed=1)
    expected = kendall(a, b)
    a[1, 5], b[3, 0], a[5], b[0] = torch.nan, torch.nan, 0.1, -7.0
    tau = kendall(a, b)
    assert tau.isnan().tolist() == [True, True, False, True, False, True]
    assert torch.equal(tau[[2, 4]], expected[[2, 4]])
    assert kendall(torch.zeros(2, 1), torch.zeros(2, 1)).isnan().all()
    assert kendall(torch.zeros(2, 0), torch.zeros(2, 0)).isnan().all()


@pytest.mark.parametrize("measure", [spearman, kendall])
@pytest.mark.parametrize("other", [(6, 40), (1, 41), (41,)], ids=str)
def test_scores_of_another_shape_are_refused(measure, other):
    with pytest.raises(ShapeError, match=r"a, b: expected one shape \[B, N\], got \[6, 41\] and \["):
        measure(rows(), torch.zeros(other))
