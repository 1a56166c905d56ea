import torch

from pullback.randnla import Streams


def test_a_sample_draws_the_same_numbers_in_any_batch():
    together = Streams.from_seed(3, 4, "cpu")
    halves = [Streams.from_seed(3, 2, "cpu", first=first) for first in (0, 2)]
    for draw in ("gaussian", "rademacher", "gaussian"):
        expected = getattr(together, draw)(5, 3, torch.float64)
        assert torch.equal(expected, torch.cat([getattr(half, draw)(5, 3, torch.float64) for half in halves]))


def test_the_same_seed_gives_the_same_numbers_and_another_seed_others():
    first, again, other = (Streams.from_seed(seed, 2, "cpu").gaussian(6, 2, torch.float32) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.isclose(first, other).any()


def test_samples_and_neighbouring_seeds_are_uncorrelated():
    draws = torch.cat([Streams.from_seed(seed, 3, "cpu").gaussian(4000, 1, torch.float64) for seed in (0, 1)])[..., 0]
    assert (torch.corrcoef(draws) - torch.eye(6)).abs().max() < 0.06


def test_rademacher_draws_balanced_signs():
    signs = Streams.from_seed(0, 2, "cpu").rademacher(5000, 2, torch.float32)
    assert signs.dtype == torch.float32
    assert torch.equal(signs.abs(), torch.ones_like(signs))
    assert signs.mean().abs() < 0.03


def test_samples_outside_the_mask_do_not_advance():
    streams, untouched = (Streams.from_seed(0, 2, "cpu") for _ in range(2))
    drawn = streams.gaussian(3, 1, torch.float64, only=torch.tensor([True, False]))
    assert torch.equal(drawn[1], torch.zeros(3, 1, dtype=torch.float64))
    assert torch.equal(streams.gaussian(3, 1, torch.float64)[1], untouched.gaussian(3, 1, torch.float64)[1])


def test_streams_with_seeds_of_their_own_do_not_know_their_neighbours():
    together = Streams.from_seeds([7, 2**64 - 1, 9]).gaussian(5, 3, torch.float64)
    turned = Streams.from_seeds([9, 7, 2**64 - 1]).gaussian(5, 3, torch.float64)
    assert torch.equal(together, turned[[1, 2, 0]])
    assert not torch.isclose(together[0], together[2]).any()
