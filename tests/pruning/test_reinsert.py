"""Removed tokens come back as they were, as copies, or moved with their partner."""

import torch

from helpers.families import random_normal
from pullback.pruning.matching import Matching, leftover, reinserted

FIRST = Matching(
    kept=torch.tensor([[0, 2, 3, 4]]),
    removed=torch.tensor([[1, 5]]),
    destination=torch.tensor([[1, 2]]),  # 1 -> 2, 5 -> 3
    merged=torch.tensor([[True, True]]),
)
SECOND = Matching(  # of the four that are left, place 3 goes into place 4
    kept=torch.tensor([[0, 1, 3]]),
    removed=torch.tensor([[2]]),
    destination=torch.tensor([[2]]),
    merged=torch.tensor([[True]]),
)


def two_stages(how):
    before = random_normal(1, 6, 3)
    weights = random_normal(1, 6, seed=1).abs()
    after = FIRST.merge(before, weights)
    later = after + random_normal(1, 4, 3, seed=2)  # what the blocks do
    end = SECOND.merge(later, FIRST.keep(weights))
    last = end + random_normal(1, 3, 3, seed=3)
    leftovers = [leftover(how, FIRST, before, after), leftover(how, SECOND, later, end)]
    return before, after, later, end, last, reinserted(last, leftovers)


def test_frozen_tokens_are_what_they_were():
    before, _, later, _, last, full = two_stages("frozen")
    assert torch.equal(full[0, [0, 2, 4]], last[0])
    assert torch.equal(full[0, [1, 5]], before[0, [1, 5]])
    assert torch.equal(full[0, 3], later[0, 2])


def test_copies_are_their_partners_and_the_partners_of_those():
    *_, last, full = two_stages("copy")
    assert torch.equal(full[0], last[0, [0, 1, 1, 2, 2, 2]])


def test_drift_is_measured_from_the_partner_after_the_merge():
    before, after, _, _, last, full = two_stages("drift")
    torch.testing.assert_close(full[0, 1], before[0, 1] + (last[0, 1] - after[0, 1]))


def test_a_partner_that_was_removed_later_is_followed_through_its_reconstruction():
    before, after, later, end, last, full = two_stages("drift")
    three = later[0, 2] + (last[0, 2] - end[0, 2])
    torch.testing.assert_close(full[0, 3], before[0, 3] + (three - after[0, 2]))
    torch.testing.assert_close(full[0, 5], before[0, 5] + (three - after[0, 2]))


def test_a_partner_comes_back_from_the_mean_that_it_stood_for():
    before, after, _, _, last, full = two_stages("drift")
    torch.testing.assert_close(full[0, 2], before[0, 2] + (last[0, 1] - after[0, 1]))
    assert torch.equal(full[0, 0], last[0, 0])  # took in nothing


def test_where_nothing_moves_everything_is_as_it_was():
    before = random_normal(1, 6, 3)
    after = FIRST.merge(before, torch.ones(1, 6))
    torch.testing.assert_close(reinserted(after, [leftover("drift", FIRST, before, after)]), before)


def test_a_token_equal_to_its_partner_is_reconstructed_exactly():
    before = random_normal(1, 6, 3)
    before[0, 1], before[0, 5] = before[0, 2], before[0, 3]
    after = FIRST.merge(before, torch.rand(1, 6).double())
    now = after + random_normal(1, 4, 3, seed=4)
    full = reinserted(now, [leftover("drift", FIRST, before, after)])
    assert torch.equal(full[0, 1], now[0, 1])
    assert torch.equal(full[0, 5], now[0, 2])
