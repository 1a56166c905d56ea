"""Who goes, into whom, and that one decision applies to any tensor and can be undone."""

import math
import shutil

import pytest
import torch

from helpers.families import random_normal
from pullback.pruning import matching
from pullback.pruning.matching import (
    Matching,
    _median,
    _ranks_by_pairs,
    artifacts,
    cosines,
    leftover,
    lowest,
    match_by_cosine,
    match_by_task,
    ranks,
    reinserted,
    rows,
    stored,
)

MATCHING = Matching(
    kept=torch.tensor([[0, 2, 4], [0, 1, 3]]),
    removed=torch.tensor([[3, 1], [2, 4]]),
    destination=torch.tensor([[1, 1], [2, 1]]),
    merged=torch.tensor([[True, True], [True, False]]),
)


def test_a_merge_is_the_weighted_mean():
    x, weights = random_normal(2, 5, 4), random_normal(2, 5, seed=1).abs()
    merged = MATCHING.merge(x, weights)
    w = weights[0]
    expected = (w[2] * x[0, 2] + w[3] * x[0, 3] + w[1] * x[0, 1]) / (w[1] + w[2] + w[3])
    torch.testing.assert_close(merged[0, 1], expected)
    torch.testing.assert_close(
        merged[1, 2], (weights[1, 3] * x[1, 3] + weights[1, 2] * x[1, 2]) / weights[1, 2:4].sum()
    )


def test_a_token_that_takes_in_nothing_keeps_its_bits():
    x, weights = random_normal(2, 5, 4).float(), random_normal(2, 5, seed=1).abs()
    merged = MATCHING.merge(x, weights)
    assert torch.equal(merged[0, [0, 2]], x[0, [0, 4]])
    assert torch.equal(merged[1, :2], x[1, :2]), "a dropped token leaves no trace in its partner"


def test_merging_equals_changes_nothing():
    x = random_normal(2, 5, 4).float()
    x[0, 1] = x[0, 3] = x[0, 2]
    assert torch.equal(MATCHING.merge(x, torch.rand(2, 5))[0, 1], x[0, 2])


def test_sizes_add_up_and_what_is_dropped_is_lost():
    sizes = torch.tensor([[1.0, 2, 3, 4, 5], [1, 1, 1, 1, 1]])
    assert MATCHING.add(sizes).tolist() == [[1, 9, 5], [1, 1, 2]]


@pytest.mark.parametrize("shape", [(2, 5), (2, 5, 3), (2, 5, 3, 2)])
def test_kept_and_removed_go_back_to_their_places(shape):
    x = random_normal(*shape)
    assert torch.equal(MATCHING.place(MATCHING.keep(x), MATCHING.take(x)), x)


def test_unmerging_copies_the_partner():
    y = random_normal(2, 3, 4)
    full = MATCHING.unmerge(y)
    assert torch.equal(full[0], y[0, [0, 1, 1, 1, 2]])
    assert torch.equal(full[1], y[1, [0, 1, 2, 2, 1]])


def test_merge_then_unmerge_is_a_projection():
    x, weights = random_normal(2, 5, 4), random_normal(2, 5, seed=1).abs()
    once = MATCHING.unmerge(MATCHING.merge(x, weights))
    torch.testing.assert_close(MATCHING.unmerge(MATCHING.merge(once, weights)), once)


def test_the_lowest_patches_go_and_the_prefix_never():
    scores = torch.tensor([[-9.0, -8.0, 5.0, 1.0, 3.0, 2.0]])
    kept, removed = lowest(scores, 2, prefix=2)
    assert kept.tolist() == [[0, 1, 2, 4]]
    assert removed.tolist() == [[3, 5]]


@pytest.mark.parametrize("score", [math.inf, math.nan])
def test_no_score_of_a_patch_can_remove_the_prefix(score):
    scores = torch.full((1, 6), score)
    scores[0, :3] = 1.0
    kept, removed = lowest(scores, 3, prefix=2)
    assert kept[0, :2].tolist() == [0, 1] and len({*kept[0].tolist(), *removed[0].tolist()}) == 6


def test_ranks_are_places_in_descending_order():
    assert ranks(torch.tensor([[0.5, 3.0, -1.0, 2.0]])).tolist() == [[2, 0, 3, 1]]


def test_comparing_all_pairs_ranks_as_sorting_does():
    """The one that GPUs use for few tokens, when compiled; with equal ones, and what is not a number."""
    scores = random_normal(3, 50).float()
    assert torch.equal(_ranks_by_pairs(scores), ranks(scores))
    scores[1, 10:30] = 0.25
    scores[2, [4, 9]] = torch.tensor([math.nan, math.inf])
    for found in (ranks(scores), _ranks_by_pairs(scores)):
        assert torch.equal(found.sort(1).values, torch.arange(50, dtype=torch.int32).expand(3, -1))
        assert {*found[2, [4, 9]].tolist()} == {0, 1}


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler, which torch.compile calls")
def test_what_is_stored_may_start_anywhere_in_its_base(monkeypatch):
    monkeypatch.setattr(matching, "_compiled_for_gpu", lambda x: torch.compiler.is_compiling())
    x = random_normal(2, 6, 2).float()

    def second(x):
        return stored(x.softmax(-1)[..., 1]) + 1

    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(second, fullgraph=True)(x), second(x))


def test_a_median_is_the_upper_one_of_two():
    values = random_normal(4, 9).float()
    assert torch.equal(_median(values)[:, 0], values.median(1).values)
    assert _median(torch.tensor([[4.0, 1.0, 3.0, 2.0]])).tolist() == [[3.0]]


def test_nothing_to_remove():
    kept, removed = lowest(torch.rand(2, 5), 0, prefix=1)
    assert kept.tolist() == [[0, 1, 2, 3, 4]] * 2
    empty = Matching(kept, removed, removed, removed.bool())
    x = random_normal(2, 5, 3)
    assert torch.equal(empty.merge(x, torch.rand(2, 5)), x)
    assert torch.equal(empty.unmerge(x), x)


def test_artifacts_are_patches_of_unusual_norm():
    tokens = random_normal(1, 60, 32)
    tokens[0, 0] *= 30  # the class token is judged too, but does not count in the median
    tokens[0, 17] *= 10
    assert artifacts(tokens, prefix=1)[0].nonzero().flatten().tolist() == [0, 17]


def test_cosine_matching_finds_the_most_similar_allowed_token():
    tokens = random_normal(2, 9, 5)
    kept, removed = lowest(random_normal(2, 9, seed=1), 4, prefix=1)
    allowed = torch.ones(2, 9, dtype=torch.bool)
    allowed[:, 0] = False
    allowed[0, kept[0, 2]] = False
    destination, merged = match_by_cosine(cosines(tokens), kept, removed, allowed, gate=0.1)
    for image in range(2):
        for number, a in enumerate(removed[image]):
            cosine = torch.cosine_similarity(tokens[image, a][None], tokens[image, kept[image]], dim=1)
            cosine[~allowed[image, kept[image]]] = -2
            assert destination[image, number] == cosine.argmax()
            assert merged[image, number] == (cosine.max() > 0.1)


def test_between_gate_and_fade_a_share_is_merged_that_weighs_and_counts_as_much():
    tokens, weights = random_normal(2, 9, 5), random_normal(2, 9, seed=2).abs()
    kept, removed = lowest(random_normal(2, 9, seed=1), 4, prefix=1)
    allowed = (torch.arange(9) > 0).expand(2, -1)
    destination, shares = match_by_cosine(cosines(tokens), kept, removed, allowed, gate=-0.2, fade=0.6)
    matching = Matching(kept, removed, destination, shares)
    merged, counts = matching.merge(tokens, weights), matching.add(torch.ones(2, 9).to(tokens))
    partly = 0
    for image in range(2):
        for place, b in enumerate(kept[image]):
            content, weight, count = weights[image, b] * tokens[image, b], weights[image, b], 1.0
            for number, a in enumerate(removed[image]):
                if destination[image, number] == place:
                    cosine = torch.cosine_similarity(tokens[image, a], tokens[image, b], dim=0)
                    share = min(1.0, max(0.0, (float(cosine) + 0.2) / 0.8))
                    partly += 0 < share < 1
                    content = content + share * weights[image, a] * tokens[image, a]
                    weight, count = weight + share * weights[image, a], count + share
            torch.testing.assert_close(merged[image, place], content / weight)
            torch.testing.assert_close(counts[image, place], torch.tensor(count).to(counts))
    assert partly


def test_without_any_allowed_token_nothing_is_merged():
    tokens = random_normal(1, 4, 3)
    nobody = torch.zeros(1, 4, dtype=torch.bool)
    kept, removed = torch.tensor([[0, 1]]), torch.tensor([[2, 3]])
    _, merged = match_by_cosine(cosines(tokens), kept, removed, nobody, gate=-1.0)
    assert not merged.any()


def test_task_matching_is_the_quadratic_form_of_the_paper():
    """d_task(a, b)^2 = (F_a - F_b)^T Q_a (F_a - F_b), Q_a = sum_j sigma_j^2 v_j^(a) v_j^(a)T, formed densely."""
    tokens, modes = random_normal(2, 8, 6), random_normal(2, 3, 8, 6, seed=1)
    kept, removed = lowest(random_normal(2, 8, seed=2), 3, prefix=1)
    destination, merged = match_by_task(tokens, modes, kept, removed, prefix=1)
    for image in range(2):
        for number, a in enumerate(removed[image]):
            metric = torch.einsum("jd,je->de", modes[image, :, a], modes[image, :, a])
            gaps = tokens[image, a] - tokens[image, kept[image]]
            distances = torch.einsum("kd,de,ke->k", gaps, metric, gaps)
            assert destination[image, number] == distances.argmin()
            assert merged[image, number] == (distances.argmin() != 0), "merged into the class token it would be lost"


def test_rows_takes_rows_of_any_tensor():
    x = random_normal(2, 5, 3, 2)
    index = torch.tensor([[4, 0], [1, 1]])
    assert torch.equal(rows(x, index), torch.stack([x[0, [4, 0]], x[1, [1, 1]]]))


# Removed tokens come back as they were, as copies, or moved with their partner.

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
