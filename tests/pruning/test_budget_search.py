"""The search against tables in which the answer can be looked up."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from pullback.errors import PullbackError
from pullback.evaluation.statistics import Interval
from pullback.pruning.forecast import Alternative, Forecast, name_of
from pullback.pruning.plan import BlockPlan, PrunePlan, preset
from pullback.pruning.search import (
    FEWEST,
    FINALISTS,
    RATIOS,
    Found,
    Ladder,
    Tries,
    best_within_cost,
    cheapest_within_degradation,
    first_within,
    last_within,
    rounds_of,
    splits,
    stage_choices,
    stage_ladders,
)
from pullback.runs.progress import Progress

LAYERS, SIZES, OWN = [2, 3, 5, 6, 8, 9], [None, 196, 168, 140], 224
IMAGES = 60


def side(plan):
    return (plan.size or OWN) / OWN


def cost(plan):
    """Token-blocks of 12 blocks, as a share: early stages save more, and so do smaller pictures."""
    removed = sum(share * (11 - stage) for stage, share in zip(plan.stages, plan.shares, strict=True))
    return side(plan) ** 2 * (12 - removed) / 12


def harm(plan):
    """Early stages hurt more, and smaller pictures, too."""
    hurt = sum(share**2 * (12 - stage) ** 2 for stage, share in zip(plan.stages, plan.shares, strict=True))
    return hurt + 300 * (1 - side(plan)) ** 2


def planted(best):
    """A table of degradations in which plans of this (size, stages, split) do little harm. Images differ by factors
    that are the same for all plans, and by noise that is not, but is the same in every run."""

    def degradations(plan, start, stop):
        places = torch.arange(start, stop, dtype=torch.float64)
        factor = 1 + 0.5 * torch.sin(places)
        seed = hash((plan.size or 0, plan.stages, plan.shares)) % 1000
        noise = 1 + 0.02 * torch.sin(7.0 * places + seed)
        shares = tuple(share / plan.ratio for share in plan.shares) if plan.stages else ()
        same = (plan.size, plan.stages) == best[:2] and torch.allclose(torch.tensor(shares), torch.tensor(best[2]))
        return (0.05 if same else 1.0) * harm(plan) * factor * noise

    return degradations


def ladders():
    templates = [preset("best", 0.5, stages) for stages in stage_choices(LAYERS)]
    smaller = Ladder(len(SIZES), lambda step: PrunePlan((), (), size=SIZES[step]), stays=True)
    return [smaller, *(ladder for size in SIZES for ladder in stage_ladders(size, templates))]


PLANTS = [(None, (2, 5), (0.25, 0.75)), (196, (5,), (1.0,)), (168, (3, 8), (0.75, 0.25)), (196, (2, 9), (0.5, 0.5))]


def kind(plan):
    return plan.size, plan.stages, tuple(round(share / plan.ratio, 6) for share in plan.shares)


@pytest.mark.parametrize("best", PLANTS)
def test_the_planted_kind_of_plan_is_found_within_a_cost(best):
    everything, tries = ladders(), Tries(planted(best), IMAGES)
    found = best_within_cost(everything, cost, tries, 0.6, Progress())
    assert kind(found[0].plan) == best and cost(found[0].plan) <= 0.6
    steps = [(ladder, first_within(ladder, cost, 0.6)) for ladder in everything]
    plans = [ladder.plan(step) for ladder, step in steps if step is not None]
    assert found[0].value == min(float(planted(best)(plan, 0, IMAGES).mean()) for plan in plans)
    spent = sum(len(values) for values in tries.all().values())
    assert spent < IMAGES * len(everything) / 4, "most plans have seen a few images"
    assert {len(values) for values in tries.all().values()} <= set(rounds_of(IMAGES, len(everything)))


@pytest.mark.parametrize("best", PLANTS)
@pytest.mark.parametrize("limit", [2.0, 6.0])
def test_the_cheapest_plan_within_a_degradation_is_found(best, limit):
    everything, tries = ladders(), Tries(planted(best), IMAGES)
    found = cheapest_within_degradation(everything, cost, tries, limit, Progress())

    def mean(plan):
        return float(planted(best)(plan, 0, IMAGES).mean())

    climbed = [ladder for ladder in everything if mean(ladder.plan(0)) <= limit]
    least = min(cost(ladder.plan(last_within(ladder, mean, limit))) for ladder in climbed)
    assert mean(found[0].plan) <= limit and found[0].value == cost(found[0].plan)
    assert found[0].value == pytest.approx(least, abs=0.01)
    assert sum(map(len, tries.all().values())) < IMAGES * len(everything) * 7 / 4


def test_the_search_is_the_same_again():
    once, again = (
        [one.plan for one in best_within_cost(ladders(), cost, Tries(planted(PLANTS[0]), IMAGES), 0.6, Progress())]
        for _ in range(2)
    )
    assert once == again


def test_a_ladder_that_stays_is_compared_at_the_end_however_bad_it_is():
    found = best_within_cost(ladders(), cost, Tries(planted(PLANTS[0]), IMAGES), 0.6, Progress())
    assert [one.ladder.stays for one in found].count(True) == 1 and len(found) <= FINALISTS + 1


def test_a_smaller_picture_alone_wins_where_it_is_better():
    def degradations(plan, start, stop):
        return torch.full((stop - start,), 1.0 if not plan.stages else 2.0)

    found = best_within_cost(ladders(), cost, Tries(degradations, IMAGES), 0.6, Progress())
    assert found[0].plan == PrunePlan((), (), size=168)


@pytest.mark.parametrize("limit", [0.3, 0.61, 0.95])
def test_the_first_step_within_a_cost_and_the_last_within_a_degradation(limit):
    ladder = stage_ladders(None, [preset("best", 0.5, (3,))])[0]
    plans = [ladder.plan(step) for step in range(ladder.steps)]
    within = [step for step, plan in enumerate(plans) if cost(plan) <= limit]
    assert first_within(ladder, cost, limit) == (within[0] if within else None)
    mild = [step for step, plan in enumerate(plans) if harm(plan) <= 20 * limit]
    assert last_within(ladder, harm, 20 * limit) == mild[-1]


@pytest.mark.parametrize(("images", "ladders"), list(itertools.product((1, 3, 16, 64, 500), (1, 12, 100, 1500))))
def test_rounds_grow_to_all_images(images, ladders):
    rounds = rounds_of(images, ladders)
    assert rounds[-1] == images and rounds == sorted(set(rounds))
    assert all(count >= min(FEWEST, images) for count in rounds)
    if ladders <= 12:
        assert rounds == [images]


def test_progress_is_told_of_every_plan():
    told = []

    class Listener(Progress):
        def work(self, what, total, unit, done=0):
            told.append([what, total, 0])

        def advance(self, count):
            told[-1][2] += count

    everything = ladders()
    best_within_cost(everything, cost, Tries(planted(PLANTS[0]), IMAGES), 0.6, Listener())
    assert told[0][0] == "trying plans on 4 images" and told[-1][0] == "trying plans on 60 images"
    assert all(total == done for _, total, done in told)


def test_ways_to_split_a_ratio():
    assert splits(1) == [(1.0,)]
    assert splits(2) == [(0.25, 0.75), (0.5, 0.5), (0.75, 0.25)]
    assert splits(3) == [(0.25, 0.25, 0.5), (0.25, 0.5, 0.25), (0.5, 0.25, 0.25), (1 / 3, 1 / 3, 1 / 3)]
    assert splits(4) == [(0.25,) * 4] and splits(5) == [(0.2,) * 5]


def test_stage_choices():
    assert stage_choices([6, 3]) == [(3,), (6,), (3, 6)]
    assert stage_choices([3, 6, 9], most=1) == [(3,), (6,), (9,)]
    for most in (0, -1, 1.5, True):
        with pytest.raises(PullbackError, match="stages: expected how many stages a plan may have, 1 or more, got"):
            stage_choices([3, 6], most)


def test_a_step_of_a_stage_ladder():
    ladder = stage_ladders(196, [preset("best", 0.5, (3, 6))])[2]
    plan = ladder.plan(39)
    assert (plan.size, plan.stages, plan.shares) == (196, (3, 6), pytest.approx((0.3, 0.1)))
    assert plan.ratio == pytest.approx(RATIOS[39]) and Found(ladder, 39, 0.0).plan == plan


def test_a_degradation_that_is_no_number_is_not_within_any_limit():
    def lost(plan, start, stop):
        return torch.tensor([1.0, math.nan, 1.0])[start:stop]

    for search in (best_within_cost, cheapest_within_degradation):
        with pytest.raises(PullbackError, match=r"degradation of 1 of 3 is not a number \(the first is image 5\)"):
            search(ladders(), cost, Tries(lost, 3, [3, 5, 7]), 0.6, Progress())


# What is said

COSTS = {"flops": 0.75, "milliseconds": 8.0, "whole_milliseconds": 10.0}


def forecast(ratio=0.475, stages=(4,), **options):
    return Forecast(preset("best", ratio, stages), 1.0, 0.5, 0.1, 3, **options)


def test_a_forecast_reads_as_a_sentence():
    assert str(forecast()) == "remove 47.5% of the patch tokens after block 4: cost 1, degradation 0.5 ± 0.1"
    told = str(forecast(**COSTS, interval=(0.4, 0.7), notes=("few images",)))
    assert "0.75 of the operations, 8 ms instead of 10 ms a batch, degradation 0.5 ± 0.1 (95 %: 0.4 to 0.7)" in told
    assert told.endswith("; few images")


@pytest.mark.parametrize(
    ("stages", "ratio", "words"),
    [
        ((4,), 0.475, "remove 47.5% of the patch tokens after block 4: "),
        ((3, 6), 0.475, "remove 47.5% of the patch tokens in all, after blocks 3 and 6 (23.75% each): "),
        ((3, 6, 9), 0.3, "remove 30.0% of the patch tokens in all, after blocks 3, 6 and 9 (10% each): "),
        ((3, 6), (0.1, 0.3), "remove 40.0% of the patch tokens in all, after blocks 3 and 6 (10%, 30%): "),
    ],
)
def test_a_forecast_says_whether_the_share_is_of_each_stage_or_of_all(stages, ratio, words):
    assert str(forecast(ratio, stages)).startswith(words)


def test_a_forecast_says_what_becomes_of_the_picture():
    both = replace(forecast(), plan=replace(forecast().plan, size=196), tuning={"steps": 2})
    assert str(both).startswith("shrink pictures to 196 px and remove 47.5% of the patch tokens after block 4, tuned: ")
    alone = replace(forecast(), plan=PrunePlan((), (), size=182))
    assert str(alone).startswith("shrink pictures to 182 px: cost")
    assert str(replace(alone, plan=PrunePlan((), ()))).startswith("remove nothing: cost")
    assert str(replace(alone, plan=PrunePlan((), (), class_row=True))).startswith("remove nothing but the patches of")


def rival(name, mean, low, high, flops=0.75):
    plan = PrunePlan((), (), size=182)
    return Alternative(name, plan, flops, Interval(0.5 + mean, 0.4, 0.6), Interval(mean, low, high))


def test_a_forecast_says_what_it_beats_and_what_it_does_not():
    beaten = [rival("a smaller picture (182 px)", 0.82, 0.7, 0.9), rival("ToMe (r = 14)", 1.5, 1.2, 2)]
    told = str(forecast(**COSTS, alternatives=tuple(beaten)))
    assert "; beats a smaller picture (182 px) by 0.82 (95 %: 0.7 to 0.9) and ToMe (r = 14) by 1.5 (95 %: 1.2" in told
    told = str(forecast(**COSTS, alternatives=(rival("ToMe (r = 4)", -0.2, -0.3, -0.1), beaten[0])))
    assert "; beats a smaller picture (182 px) by 0.82" in told
    assert "; ToMe (r = 4) is better by 0.2 (95 %: 0.1 to 0.3)" in told
    told = str(forecast(**COSTS, alternatives=(rival("ToMe (r = 4)", 0.1, -0.1, 0.3),)))
    assert "; ToMe (r = 4) is as good within the error (difference 0.1, 95 %: -0.1 to 0.3)" in told


def test_under_a_limit_of_the_degradation_operations_are_compared():
    others = (rival("a smaller picture (182 px)", 0.1, 0.05, 0.2, 0.8), rival("ToMe (r = 4)", 0.1, 0.05, 0.2, 0.7))
    told = str(forecast(**COSTS, alternatives=others, budget="degradation"))
    assert "beats a smaller picture (182 px) by 0.05 of the operations" in told
    assert "ToMe (r = 4) is better by 0.05 of the operations" in told


def test_names_of_alternatives():
    assert name_of(BlockPlan("tome", merged=(4, 4, 4))) == "ToMe (r = 4)"
    assert name_of(BlockPlan("tome", merged=(8, 4, 0))) == "ToMe (r = 8 to 0)"
    assert name_of(PrunePlan((), (), size=182)) == "a smaller picture (182 px)"
