"""Distances between outputs: their formulas, their bounds, and what is refused."""

import pytest
import torch

from pullback.errors import PullbackError, ShapeError
from pullback.evaluation.distances import RELATIVE, default_reference, output_distances


def maps(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 3, 4, generator=torch.Generator().manual_seed(seed))


def by_loop(first: torch.Tensor, second: torch.Tensor, kind: str) -> torch.Tensor:
    def one(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if kind == "relative_l1":
            return (a - b).abs().mean() / ((a.abs().mean() + b.abs().mean()) / 2)
        return (a - b).norm() / ((a.norm() + b.norm()) / 2)

    return torch.stack([torch.stack([one(a, b) for b in second]) for a in first])


@pytest.mark.parametrize("kind", RELATIVE)
def test_they_are_those_of_a_loop_over_pairs(kind):
    first, second = maps(5), maps(3, seed=1)
    torch.testing.assert_close(output_distances(first, second, kind), by_loop(first, second, kind))


@pytest.mark.parametrize("kind", RELATIVE)
def test_they_are_symmetric_zero_on_the_diagonal_and_at_most_two(kind):
    some = maps(6)
    images = torch.cat([some, -some[:2], torch.zeros(1, 3, 4)])
    found = output_distances(images, images, kind)
    torch.testing.assert_close(found, found.T)
    assert found.diagonal().tolist() == [0.0] * 9
    assert found.max() <= 2 * (1 + 1e-6)
    torch.testing.assert_close(found[0, 6], torch.tensor(2.0))  # of an output and its negative
    torch.testing.assert_close(found[8, :8], torch.full((8,), 2.0))  # of nothing and something


@pytest.mark.parametrize("kind", RELATIVE)
def test_the_unit_of_the_outputs_does_not_matter(kind):
    first, second = maps(3), maps(4, seed=1)
    found = output_distances(first, second, kind)
    torch.testing.assert_close(output_distances(1e3 * first, 1e3 * second, kind), found)


@pytest.mark.parametrize("kind", RELATIVE)
def test_near_outputs_keep_their_digits(kind):
    one = 100 + maps(1)
    near = one + 1e-3 * maps(2, seed=1)
    found, expected = output_distances(one, near, kind), by_loop(one.double(), near.double(), kind)
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=0)


def test_half_precision_and_vectors_are_taken():
    first, second = maps(3)[:, 0].half(), maps(2, seed=1)[:, 0].half()
    found = output_distances(first, second)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, by_loop(first.float(), second.float(), "relative_l2"))


@pytest.mark.parametrize(
    ("decoder", "kind"),
    [
        ("depth", "relative_l1"),
        ("depth-8x8", "relative_l1"),
        ("depth@abc", "relative_l1"),
        ("saliency", "relative_l2"),
        ("cls", "relative_l2"),
        ("deepth", "relative_l2"),
        ("depths", "relative_l2"),
    ],
)
def test_depth_is_compared_by_absolute_differences_and_all_else_by_squares(decoder, kind):
    assert default_reference(decoder) == kind


def test_other_kinds_and_sizes_are_refused():
    with pytest.raises(PullbackError, match="kind: expected one of relative_l1, relative_l2, got 'cosine'"):
        output_distances(maps(2), maps(2), "cosine")
    with pytest.raises(ShapeError, match=r"first, second: expected outputs .* one size, got \[2, 3, 4\] and \[2, 4\]"):
        output_distances(maps(2), maps(2)[:, 0])
    with pytest.raises(ShapeError, match=r"first, second: expected outputs \[n, ...\] and \[m, ...\], got \[1, 2\]"):
        output_distances(maps(2), [1, 2])
