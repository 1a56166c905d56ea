"""Budgets on small models: what is promised is what comes, and simpler rules are compared fairly."""

import math

import numpy as np
import pytest
import torch

import pullback as pb
from helpers.families import images_for, model_of, random_normal
from helpers.pictures import write_pictures
from helpers.timm_names import TimmViT
from pullback.backbones import load_backbone
from pullback.errors import ModelError, PullbackError
from pullback.evaluation import degradation
from pullback.evaluation.cost import Timing
from pullback.evaluation.cost import flops as count_flops
from pullback.evaluation.statistics import bootstrap_mean, compare_paired
from pullback.pruning import contest
from pullback.pruning.budget import TuneOptions, picture_sizes, plan_pruning
from pullback.pruning.contest import Calibration, Planner, WithinTime, halves
from pullback.pruning.plan import BlockPlan, PrunePlan
from pullback.runs.progress import Progress
from pullback.scenes.render import normalised, render


@pytest.fixture(scope="module")
def model():
    return load_backbone("tiny-scenes", device="cpu").model


@pytest.fixture(scope="module")
def images():
    return normalised(render(range(3), size=84).rgb[:, 0])


@pytest.fixture(scope="module")
def vit():
    """A small network of class tokens, in float32, with quiet random weights."""
    from transformers import Dinov2Config, Dinov2Model

    torch.manual_seed(0)
    config = Dinov2Config(hidden_size=48, num_hidden_layers=4, num_attention_heads=3, image_size=112)
    return Dinov2Model(config).eval().requires_grad_(False)


def pictures(count, side=84):
    return random_normal(count, 3, side, side).float()


def quick(model, heads, images, **options):
    return plan_pruning(model, heads, images, **{"rounds": 1, **options})


# What is promised is what comes


def test_a_share_of_the_operations(model, images):
    forecast = quick(model, {4: "norm"}, images, flops=0.9, sizes=())
    fast = pb.prune(model, "norm", ratio=forecast.plan.ratio, stages=forecast.plan.stages)
    assert forecast.flops == forecast.cost == pytest.approx(pb.operations(fast, images)) and forecast.cost <= 0.9
    assert forecast.cost > 0.89, "the smallest ratio that is within the budget"
    values = Calibration(model, images, 64).degradation(fast)
    assert forecast.degradation == pytest.approx(float(values.mean()), rel=1e-4)
    assert forecast.plan == fast.plan == forecast.model.plan
    with torch.no_grad():
        assert torch.equal(forecast.model(images).predicted_depth, fast(images).predicted_depth)


@pytest.mark.parametrize("limit", [0.3, 0.45, 0.6])
def test_the_budget_is_met_by_the_real_count_with_pictures_of_any_size(vit, limit):
    forecast = quick(vit, {0: "norm", 1: "norm"}, pictures(6), flops=limit, output="cls")
    assert pb.operations(forecast.model, pictures(1)) == pytest.approx(forecast.flops)
    assert 0.8 * limit < forecast.flops <= limit
    assert forecast.plan.class_row and forecast.plan.size in (None, 70, 56, 42)
    for other in forecast.alternatives:
        assert other.flops <= limit and other.plan.class_row
    if limit == 0.6:
        assert {trial.size for trial in forecast.trials} == {None, 70}, "70 px are within the budget as they are"
        assert len({trial.shares for trial in forecast.trials}) > 3, "the ratio is split in several ways"


def test_an_allowed_degradation(vit):
    forecast = quick(vit, {0: "norm", 1: "norm"}, pictures(3), degradation=2.0, stages=1)
    assert 0 < forecast.degradation <= 2.0 and forecast.flops < 1
    assert forecast.budget == "degradation"
    for other in forecast.alternatives:
        assert other.degradation.mean <= 2.0
    dearer = [trial for trial in forecast.trials if trial.degradation <= 2.0 and trial.images == 3]
    assert forecast.flops <= min(trial.cost for trial in dearer) + 0.01


def test_what_costs_nothing_is_not_removed(vit):
    for budget in ({"flops": 1.0}, {"milliseconds": 1e6}, {"degradation": 1e-9}):
        forecast = quick(vit, {1: "norm"}, pictures(2), **budget)
        assert forecast.plan.idle and forecast.degradation == 0 and str(forecast).startswith("remove nothing: ")


def fake_clock(monkeypatch, whole, bias=None):
    """A clock that counts operations, so that times are known: the whole model takes 10 ms."""
    races = []

    def clock(functions, device, rounds):
        races.append((len(functions), rounds))
        times = [10 * count_flops(function) / whole for function in functions]
        return [Timing(time, time, time, rounds) for time in times]

    monkeypatch.setattr(contest, "race", clock)
    return races


BUDGETS = {"flops": 0.9, "milliseconds": 9.0, "degradation": 5.0}


@pytest.mark.parametrize("name", BUDGETS)
def test_operations_time_and_degradation_are_forecast_whatever_the_budget_is(vit, name, monkeypatch):
    images = pictures(3)
    whole = count_flops(lambda: vit(images))
    races = fake_clock(monkeypatch, whole)
    heads = {0: "norm", 1: "norm"}
    forecast = plan_pruning(vit, heads, images, rounds=7, stages=1, **{name: BUDGETS[name]})
    fast = forecast.model
    assert forecast.flops == pytest.approx(pb.operations(fast, images))
    assert forecast.milliseconds == pytest.approx(10 * count_flops(lambda: fast(images)) / whole)
    assert forecast.whole_milliseconds == pytest.approx(10)
    assert forecast.degradation == pytest.approx(float(Calibration(vit, images, 64).degradation(fast).mean()))
    assert forecast.cost == (forecast.milliseconds if name == "milliseconds" else forecast.flops)
    assert forecast.cost <= BUDGETS[name] and {rounds for _, rounds in races} == {7}
    if name == "milliseconds":
        assert 8.5 < forecast.milliseconds <= 9.0, "the budget is used"
        assert all(other.milliseconds <= 9.0 for other in forecast.alternatives) and forecast.alternatives
        assert sum(count for count, _ in races) < forecast.measured + 40, "a few plans are timed, not all"
    else:
        assert len(races) == 1, "only the plan that was chosen is timed"


@pytest.mark.parametrize("factor", [0.8, 1.3, 3.0])
def test_a_plan_whose_time_was_predicted_wrong_is_changed_until_it_just_fits(vit, monkeypatch, factor):
    images = pictures(2)
    fake_clock(monkeypatch, count_flops(lambda: vit(images)))
    honest = WithinTime.predicted
    monkeypatch.setattr(WithinTime, "predicted", lambda self, plan: factor * honest(self, plan))
    forecast = quick(vit, {0: "norm"}, images, milliseconds=7.0, sizes=())
    assert 6.5 < forecast.milliseconds <= 7.0
    assert [other.name.split(" (")[0] for other in forecast.alternatives] == ["ToMe"]
    assert 6.0 < forecast.alternatives[0].milliseconds <= 7.0


# Sizes


def test_sizes_to_consider(vit):
    backbone = load_backbone(vit)
    assert picture_sizes(backbone, pictures(1, 112), None) == ([None, 98, 84, 70, 56], [])
    assert picture_sizes(backbone, pictures(1, 112)[..., :70], None)[0] == [None, 56, 42]
    assert picture_sizes(backbone, pictures(1, 112), [70, 112, 98])[0] == [None, 98, 70]
    assert picture_sizes(backbone, pictures(1, 112), ())[0] == [None]
    assert picture_sizes(backbone, pictures(1, 28), None)[0] == [None, 14]
    many, _ = picture_sizes(backbone, pictures(1, 518), None)
    assert len(many) <= 9 and many[1] == 504 and 259 <= many[-1] < 300


def test_a_model_of_one_size(vit):
    fixed = TimmViT("token", dynamic=False).eval()
    patches = load_backbone(fixed)
    side = 8 * math.isqrt(fixed.pos_embed.shape[1] - 1)
    images = random_normal(1, 3, side, side).float()
    found, notes = picture_sizes(patches, images, None)
    assert found == [None] and "smaller pictures were not tried: " in notes[0]
    with pytest.raises(ModelError, match=r"sizes: .* takes no pictures of another size than .* Plan with sizes=\(\)"):
        picture_sizes(patches, images, [side - 8])
    forecast = quick(fixed, {0: "norm"}, images, flops=0.9)
    assert forecast.plan.size is None and "smaller pictures were not tried" in str(forecast)


@pytest.mark.parametrize("name", ["clip", "vit", "dinov3", "depth-v2"])
def test_every_family_is_planned_with_smaller_pictures(name):
    images = images_for(name, (3, 3), batch=2)
    model = model_of(name)
    side = images.shape[-1] * 2 // 3
    forecast = quick(model, {0: "norm"}, images, flops=0.6, sizes=[side])
    assert pb.operations(forecast.model, images) <= 0.6
    assert any(trial.size == side for trial in forecast.trials)


# Halves, intervals, alternatives


def test_every_second_image_chooses():
    images = torch.arange(17.0)[:, None, None, None]
    again, numbers, choosing = halves(images)
    assert numbers == [*range(0, 17, 2), *range(1, 17, 2)] and choosing == 9
    assert again.flatten().tolist() == numbers
    assert halves(images[:15])[1:] == (list(range(15)), 15)


def marked(harm, numbers=16):
    """Images whose first pixel is their number, and a measure that knows it: ``harm`` (kind of plan, number)."""
    images = pictures(numbers)
    images[:, 0, 0, 0] = torch.arange(numbers) / 4 - 2
    seen = {}

    def spy(self, pruned, start=0, stop=None):
        stop = len(self.images) if stop is None else stop
        places = (4 * (self.images[start:stop, 0, 0, 0] + 2)).round().int().tolist()
        seen.setdefault(pruned.plan, set()).update(places)
        return torch.tensor([harm(pruned.plan, place) for place in places], dtype=torch.float64)

    return images, spy, seen


def test_the_expectation_comes_from_images_that_did_not_choose(vit, monkeypatch):
    def harm(plan, place):  # the plans differ on the images that choose, and all are worse on the others
        return (1.0 if plan.size == 56 and not plan.stages else 2.0) + (5.0 + place if place % 2 else 0.0)

    images, spy, seen = marked(harm)
    monkeypatch.setattr(Calibration, "degradation", spy)
    forecast = quick(vit, {0: "norm", 1: "norm"}, images, flops=0.6, sizes=[70, 56])
    assert forecast.plan == PrunePlan((), (), size=56)
    assert seen[forecast.plan] == set(range(16))
    tried = [plan for plan in seen if isinstance(plan, PrunePlan) and plan != forecast.plan]
    assert tried and all(places <= set(range(0, 16, 2)) for plan, places in seen.items() if plan in tried)
    expected = np.array([harm(forecast.plan, place) for place in range(1, 16, 2)])
    interval = bootstrap_mean(expected, generator=np.random.default_rng(0))
    assert forecast.degradation == pytest.approx(expected.mean()) and forecast.notes == ()
    assert forecast.interval == (interval.low, interval.high)
    assert forecast.degradation_se == pytest.approx(expected.std(ddof=1) / 8**0.5)
    (tome,) = forecast.alternatives  # the smaller picture alone is the plan itself
    own = np.array([harm(tome.plan, place) for place in range(1, 16, 2)])
    assert tome.difference == compare_paired(own, expected, generator=np.random.default_rng(0)).difference


@pytest.mark.parametrize(("tome", "words"), [(0.5, "is better by 1.5"), (2.0, "is as good"), (9.0, "beats ")])
def test_the_forecast_says_when_tome_is_better(vit, monkeypatch, tome, words):
    def harm(plan, place):
        return tome if isinstance(plan, BlockPlan) else 2.0 if plan.stages == (1,) else 4.0 if plan.size else 3.0

    images, spy, _ = marked(harm)
    monkeypatch.setattr(Calibration, "degradation", spy)
    forecast = quick(vit, {0: "norm", 1: "norm"}, images, flops=0.7, stages=1)
    smaller, other = forecast.alternatives
    assert forecast.plan.stages == (1,) and smaller.name == "a smaller picture (70 px)" and smaller.verdict == "worse"
    assert other.name.startswith("ToMe (r = ") and other.plan.rule == "tome"
    assert other.verdict == {0.5: "better", 2.0: "equal", 9.0: "worse"}[tome]
    assert words in str(forecast) and "beats a smaller picture (70 px) by 2" in str(forecast)


def test_a_planted_kind_of_plan_is_chosen(vit, monkeypatch):
    def harm(plan, place):
        if isinstance(plan, BlockPlan):
            return 9.0
        planted = plan.size == 70 and plan.stages == (0, 2) and plan.shares[1] == pytest.approx(3 * plan.shares[0])
        return (1.0 if planted else 2.0) + 0.1 * math.sin(place)

    images, spy, _ = marked(harm, 40)
    monkeypatch.setattr(Calibration, "degradation", spy)
    forecast = quick(vit, dict.fromkeys((0, 1, 2), "norm"), images, flops=0.5)
    assert (forecast.plan.size, forecast.plan.stages) == (70, (0, 2)) and forecast.flops <= 0.5
    assert forecast.plan.shares[0] == pytest.approx(forecast.plan.ratio / 4)
    assert {trial.images for trial in forecast.trials} != {20}, "most plans saw a few images"


def test_few_images_choose_and_estimate(vit):
    forecast = quick(vit, {0: "norm"}, pictures(15), flops=0.9, sizes=())
    assert "with fewer than 16 images the same ones choose" in str(forecast)
    forecast = quick(vit, {0: "norm"}, pictures(16), flops=0.9, sizes=())
    assert forecast.notes == ()
    alone = quick(vit, {0: "norm"}, pictures(1), flops=0.9, sizes=())
    assert math.isnan(alone.degradation_se), "one image says nothing of its error"


def test_a_rival_that_cannot_meet_the_budget_is_named(vit):
    forecast = quick(vit, {0: "norm"}, pictures(2), flops=0.3, sizes=[70])
    assert "a smaller picture alone cannot meet the budget" in forecast.notes


def test_the_unpruned_model_runs_once_for_each_image(vit, monkeypatch):
    runs = []
    images = pictures(6)
    handle = vit.register_forward_pre_hook(lambda module, given: runs.append(len(given[0])))
    try:
        planner = Planner(Calibration(vit, images, 4), {}, None, 6, range(6), Progress())
        for size in (70, 56):
            planner.tries.values(PrunePlan((), (), size=size), 3)
            planner.tries.values(PrunePlan((), (), size=size), 6)
    finally:
        handle.remove()
    assert runs == [4, 2]


def test_progress_is_told(vit):
    told = []

    class Listener(Progress):
        def stage(self, text):
            told.append(text)

        def work(self, what, total, unit, done=0):
            told.append(what)

    quick(vit, {0: "norm"}, pictures(2), flops=0.9, progress=Listener())
    assert told[0] == "trying plans on 2 images" and told[-1] == "measuring what to expect"


# Tuning


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return write_pictures(tmp_path_factory.mktemp("photos"), 8, broken=False)


@pytest.mark.parametrize("budget", [{"flops": 0.6}, {"degradation": 1.0}])
def test_the_best_plans_are_tuned(vit, photos, budget):
    options = TuneOptions(photos, best=2, held_out=0.25, steps=2, batch=2, validate_every=1)
    images = pb.load_backbone(vit).read_images(photos, 84).pixels
    forecast = quick(vit, {0: "norm", 1: "norm"}, images, stages=1, sizes=[70], tune=options, **budget)
    assert forecast.tuning["steps"] == 2 and forecast.model.vectors and ", tuned: " in str(forecast)
    assert forecast.tuning["size"] == [84, 84] and forecast.model.plan == forecast.plan
    values = Calibration(vit, images, 64).degradation(forecast.model)
    assert forecast.degradation == pytest.approx(float(values.mean()))
    assert all("not tuned" in other.name for other in forecast.alternatives)
    if "degradation" in budget:
        assert forecast.degradation <= 1.0


def test_what_cannot_be_tuned(vit, photos, tmp_path):
    with pytest.raises(PullbackError, match=r"tune.*no image"):
        quick(vit, {0: "norm"}, pictures(2), flops=0.9, sizes=(), tune=tmp_path)
    with pytest.raises(PullbackError, match="tune: the budget allows the model as it is"):
        quick(vit, {0: "norm"}, pictures(2), flops=1.0, sizes=(), tune=photos)
    with pytest.raises(PullbackError, match="best: expected a whole number of at least 1, got 0"):
        TuneOptions(photos, best=0)
    with pytest.raises(PullbackError, match="tune: expected at least the 128 images of a batch"):
        quick(vit, {0: "norm"}, pictures(2), flops=0.9, sizes=(), tune=photos)


# Measures and bad input


def test_a_measure_of_ones_own(vit):
    def twice(pruned, full):
        return 2 * degradation(pruned, full).value

    own, usual = (quick(vit, {0: "norm"}, pictures(3), flops=0.7, degrade=how) for how in (twice, None))
    assert own.degradation == pytest.approx(2 * usual.degradation)


def test_bad_budgets(model, images):
    for budgets in ({}, {"flops": 0.5, "degradation": 1.0}):
        with pytest.raises(PullbackError, match="budget: expected one of flops, milliseconds and degradation, got"):
            plan_pruning(model, {4: "norm"}, images, **budgets)
    with pytest.raises(PullbackError, match="heads: expected a score for at least one block"):
        plan_pruning(model, {}, images, flops=0.5)


def test_a_budget_that_nothing_meets_names_the_least(vit):
    images = pictures(2)
    with pytest.raises(
        PullbackError, match=r"at most 0.01 of the operations; the least that is possible here is 0\.[01]"
    ):
        quick(vit, {0: "norm"}, images, flops=0.01)
    with pytest.raises(PullbackError, match=r"at most 1e-06 milliseconds a batch; the least .* is .* milliseconds"):
        quick(vit, {0: "norm"}, images, milliseconds=1e-6)
    with pytest.raises(
        PullbackError, match=r"pictures of 42 pixels and 90% of the patch tokens removed after blocks 0"
    ):
        quick(vit, {0: "norm"}, images, flops=0.01)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"flops": float("nan")},
            "flops: expected a share of the model's own operations, above 0 and up to 1, got nan",
        ),
        ({"flops": 1.5}, "flops: expected a share .* got 1.5"),
        ({"flops": 0.0}, "flops: expected a share .* got 0.0"),
        ({"flops": "0.5"}, "flops: expected a share .* got '0.5'"),
        (
            {"milliseconds": float("inf")},
            "milliseconds: expected milliseconds for one batch, a number above 0, got inf",
        ),
        ({"degradation": -1}, "degradation: expected a mean degradation of the output, a number above 0, got -1"),
        ({"batch": 0}, "batch: expected how many images run at a time, 1 or more, got 0"),
        ({"images": torch.zeros(0, 3, 112, 112)}, r"images: expected \[n, 3, H, W\] with at least one image, got \[0"),
        ({"images": "photos"}, r"images: expected a tensor \[n, 3, H, W\] as the model takes it, got str"),
        ({"heads": "norm"}, "heads: expected the score to use after each block, such as .* got 'norm'"),
        ({"stages": 0}, "stages: expected how many stages a plan may have, 1 or more, got 0"),
        ({"sizes": [75]}, "sizes: expected multiples of the patch size 14 of .*, got 75. The nearest is 70"),
        ({"sizes": [98]}, "sizes: expected at most the 84 pixels of the pictures' shorter side, got 98"),
        ({"sizes": "98,84"}, "sizes: expected a list of pixels such as .* got '98,84'"),
        ({"sizes": 98}, "sizes: expected a list of pixels such as .* got 98"),
        ({"sizes": [0]}, "sizes: expected pixels such as 210, got 0"),
        ({"output": "cls"}, 'output: "cls" is for outputs of the class token alone'),
        ({"output": "pool"}, 'output: expected "model" or "cls", got \'pool\''),
    ],
)
def test_bad_input_is_named(model, images, options, message):
    budget = {} if {"flops", "milliseconds", "degradation"} & options.keys() else {"flops": 0.9}
    given = {"heads": {4: "norm"}, "images": images} | budget | options
    with pytest.raises(PullbackError, match=message):
        plan_pruning(model, given.pop("heads"), given.pop("images"), **given)


def test_a_share_and_sizes_from_numpy(vit):
    forecast = quick(vit, {0: "norm"}, pictures(2), flops=np.float32(0.9), sizes=tuple(np.array([70, 56])))
    assert forecast.cost <= 0.9


def test_useless_stages_are_not_warned_of(model, images, caplog):
    """Block 10 of 12 with Last-Layer Fusion: a stage that changes nothing, in many of the plans that were tried."""
    quick(model, {4: "norm", 10: "norm"}, images, flops=0.9, stages=1, sizes=())
    assert "last but one" not in caplog.text, "block 4 was chosen"
