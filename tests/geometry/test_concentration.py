"""CV by hand, and what a random direction shows."""

import math

import pytest
import torch

from helpers.truth import normal
from pullback.geometry import coefficient_of_variation, null_cv
from pullback.geometry.diagnosis import change_of_cv
from pullback.geometry.regimes import looks_random


def test_cv_by_hand():
    """Token norms 5, 1, 0 and 2, 2, 2: std with n-1 is sqrt(7) and 0, the means are 2 and 2."""
    first = torch.tensor([[3.0, 4.0], [0.0, 1.0], [0.0, 0.0]], dtype=torch.float64)
    second = torch.tensor([[2.0, 0.0], [0.0, -2.0], [2.0, 0.0]], dtype=torch.float64)
    cv = coefficient_of_variation(torch.stack([first, second])[None])
    torch.testing.assert_close(cv, torch.tensor([math.sqrt(7) / 2 / 2], dtype=torch.float64))


def test_cv_over_patch_tokens_leaves_the_class_token_out():
    modes = normal(2, 3, 5, 4)
    modes[:, :, 0] *= 100
    patches = torch.tensor([False, True, True, True, True])
    torch.testing.assert_close(coefficient_of_variation(modes, patches), coefficient_of_variation(modes[:, :, 1:]))
    assert (coefficient_of_variation(modes) > 1.5).all()
    assert (coefficient_of_variation(modes, patches) < 1).all()


def test_cv_does_not_depend_on_the_length_of_a_mode():
    modes = normal(1, 3, 6, 4)
    scale = torch.tensor([1e-6, 1.0, 1e6], dtype=torch.float64)[None, :, None, None]
    torch.testing.assert_close(coefficient_of_variation(modes * scale), coefficient_of_variation(modes))


def test_modes_of_vanishing_singular_values_do_not_count():
    modes = normal(2, 3, 6, 4)
    modes[0, 2] = 0
    expected = torch.cat([coefficient_of_variation(modes[:1, :2]), coefficient_of_variation(modes[1:])])
    torch.testing.assert_close(coefficient_of_variation(modes), expected)
    assert coefficient_of_variation(torch.zeros(1, 2, 6, 4)).item() == 0


def test_one_token_does_not_vary():
    assert coefficient_of_variation(normal(2, 3, 1, 4)).tolist() == [0, 0]


def test_changes_of_opposite_sign_do_not_cancel():
    """Token norms (5, 1, 0) and (2, 2, 2) exchanged: the CV of each mode changes by sqrt(7) / 2, the mean does not."""
    norms = torch.tensor([[5.0, 1.0, 0.0], [2.0, 2.0, 2.0]], dtype=torch.float64)
    modes, earlier = norms[None, :, :, None], norms.flip(0)[None, :, :, None]
    assert coefficient_of_variation(modes) == coefficient_of_variation(earlier)
    torch.testing.assert_close(change_of_cv(modes, earlier), torch.tensor([math.sqrt(2 * 7 / 4) / 2]).double())
    assert change_of_cv(modes, modes).item() == 0
    last = torch.tensor([False, True, True])
    torch.testing.assert_close(
        change_of_cv(modes, earlier, last), change_of_cv(modes[:, :, 1:], earlier[:, :, 1:]), rtol=1e-12, atol=0
    )


@pytest.mark.parametrize("dim", [1, 2, 16, 64, 384, 768])
def test_the_null_is_what_random_directions_show(dim):
    tokens = 2000  # std / mean over so many tokens is that of their distribution
    samples = coefficient_of_variation(normal(1, 4, tokens, dim, seed=dim))
    assert samples.item() == pytest.approx(null_cv(dim), rel=0.03)


@pytest.mark.parametrize("dim", [64, 384, 768, 3072])
def test_the_null_is_about_one_over_the_root_of_twice_the_width(dim):
    assert null_cv(dim) == pytest.approx(1 / math.sqrt(2 * dim), rel=0.3 / dim)


def test_the_paper_s_delocalized_rows_sit_on_the_null():
    assert round(null_cv(768), 3) == 0.026 and round(null_cv(384), 3) == 0.036


def test_a_random_subspace_of_a_vit_looks_random():
    """257 tokens of width 64: the CV of 20 random orthonormal modes is the null up to sampling."""
    modes = torch.linalg.qr(normal(257 * 64, 20)).Q.T.reshape(1, 20, 257, 64)
    cv = coefficient_of_variation(modes).item()
    assert cv == pytest.approx(null_cv(64), rel=0.05)
    assert looks_random(cv, null_cv(64))
