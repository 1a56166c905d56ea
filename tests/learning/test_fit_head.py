"""Learning the importance head: its batches, its scores against scipy, its baseline, and that it learns a rule."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from helpers.toys import DIM, RANK, TOKENS, head_task, normal, rule, seeded, tiny_head, tiny_spn
from pullback.errors import ModelError, PullbackError, ShapeError
from pullback.learning.fit import FitConfig, Share, fit
from pullback.learning.losses import conformal_loss
from pullback.learning.train_head import HeadExamples, HeadTask, distilled_examples, head_scores, mean_map_scores


def random_examples(images: int = 7, tokens: int = TOKENS, seed: int = 0, prefix: int = 1) -> HeadExamples:
    features = normal(images, tokens, DIM, seed=seed, dtype=torch.float32)
    return HeadExamples.kept(features, normal(images, tokens, seed=seed + 50, dtype=torch.float32).exp(), prefix)


def numbered(images: int, tokens: int, first: int) -> HeadExamples:
    """Features and target of image i are i + ``first`` everywhere."""
    numbers = torch.arange(first, first + images).float()[:, None].expand(images, tokens)
    return HeadExamples.kept(numbers[..., None].expand(-1, -1, DIM), numbers)


# ---- batches


def test_steps_take_one_token_count_each_as_often_as_there_are_images_of_it():
    shapes = []

    def network(features: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(features.shape))
        return features.exp().mean(-1)

    task = HeadTask([random_examples(60, TOKENS), random_examples(20, TOKENS + 5, seed=1)], random_examples())
    for step in range(400):
        task.loss(network, step, Share(8), seeded(step))
    assert set(shapes) == {(8, TOKENS, DIM), (8, TOKENS + 5, DIM)}
    assert shapes.count((8, TOKENS, DIM)) == pytest.approx(300, abs=30)


def test_every_image_is_drawn_and_compared_with_its_own_target():
    drawn = set()

    def network(features: torch.Tensor) -> torch.Tensor:
        drawn.update(features[:, 0, 0].tolist())
        return 2 * features[..., 0]

    task = HeadTask([numbered(9, TOKENS, 1), numbered(5, TOKENS + 1, 101)], random_examples(), rank_weight=0.0)
    losses = [task.loss(network, step, Share(8), seeded(step))[0].item() for step in range(100)]
    assert losses == pytest.approx([math.log(2) ** 2] * 100, rel=1e-5)
    assert drawn == {*range(1, 10), *range(101, 106)}


def test_the_loss_is_the_conformal_loss_with_the_weight_of_the_task():
    examples, scores = random_examples(1), normal(1, TOKENS, seed=9, dtype=torch.float32).exp()
    for weight in (0.0, 0.5, 2.0):
        task = HeadTask([examples], examples, rank_weight=weight)
        loss, _ = task.loss(lambda features: scores.expand(4, -1), 0, Share(4), seeded())
        generator = seeded()
        torch.multinomial(task.sizes, 1, generator=generator)
        torch.randint(1, (4,), generator=generator)
        target = examples.target.expand(4, -1)
        torch.testing.assert_close(
            loss, conformal_loss(scores.expand(4, -1), target, rank_weight=weight, generator=generator)
        )


def test_the_mean_loss_of_all_shares_is_the_loss_of_the_batch():
    task, network = head_task(), tiny_head()
    for step in range(4):
        whole, _ = task.loss(network, step, Share(6), seeded(step))
        parts = [task.loss(network, step, Share(6, rank, 3), seeded(step))[0] for rank in range(3)]
        torch.testing.assert_close(torch.stack(parts).mean(), whole)
        assert len({round(part.item(), 6) for part in parts}) == 3


def test_kept_features_of_half_precision_reach_the_network_in_the_precision_of_the_target():
    features = normal(3, TOKENS, DIM).half()
    examples = HeadExamples.kept(features, torch.ones(3, TOKENS))
    rows = torch.tensor([2, 0])
    assert examples.features(rows).dtype == torch.float32
    assert torch.equal(examples.features(rows), features[rows].float()) and len(examples) == 3


@pytest.mark.parametrize(
    ("train", "held_out", "message"),
    [
        ([], 2, "train: expected at least one example in every set"),
        ([3, 0], 2, "train: expected at least one example in every set"),
        ([3], 0, "held_out: expected at least one example in every set"),
    ],
)
def test_sets_without_examples_are_refused(train, held_out, message):
    with pytest.raises(PullbackError, match=message):
        HeadTask([random_examples(count) for count in train], random_examples(held_out))


@pytest.mark.parametrize("name", ["train", "held_out"])
def test_targets_that_are_not_finite_are_refused(name):
    parts = {"train": random_examples(), "held_out": random_examples(seed=1)}
    parts[name].target[3, 2] = torch.nan
    with pytest.raises(PullbackError, match=f"{name}: expected finite targets, got NaN or infinity"):
        HeadTask([parts["train"]], parts["held_out"])


# ---- scores


def by_scipy(scores: np.ndarray, target: np.ndarray, prefix: int) -> dict[str, float]:
    rho = [spearmanr(a, b).statistic for a, b in zip(scores, target, strict=True)]
    patches = [spearmanr(a[prefix:], b[prefix:]).statistic for a, b in zip(scores, target, strict=True)]
    mean = sum(rho) / len(rho)
    error = math.sqrt(sum((value - mean) ** 2 for value in rho) / (len(rho) - 1) / len(rho))
    return {"score": mean, "rho": mean, "rho_se": error, "rho_patches": sum(patches) / len(patches)}


@pytest.mark.parametrize("prefix", [0, 1, 3])
@pytest.mark.parametrize("batch", [1, 3, 64])
def test_the_scores_are_those_of_scipy_whatever_the_batch(prefix, batch):
    examples, head = random_examples(7, 12, prefix=prefix), tiny_head()
    found = head_scores(head, examples, batch=batch)
    scores = head(examples.features(torch.arange(7))).detach().numpy()
    assert found == pytest.approx(by_scipy(scores, examples.target.numpy(), prefix), abs=1e-9)


def test_validation_gives_the_scores_of_the_held_out_images():
    task, head = head_task(), tiny_head()
    assert task.validate(head) == head_scores(head, task.held_out)


def test_a_single_image_has_no_standard_error():
    assert head_scores(tiny_head(), random_examples(1))["rho_se"] == 0


def test_scores_keep_no_graph():
    seen = []

    def network(features: torch.Tensor) -> torch.Tensor:
        seen.append(tiny_head()(features))
        return seen[-1]

    head_scores(network, random_examples())
    assert not seen[0].requires_grad


# ---- the baseline


def test_the_mean_map_weighs_every_training_image_alike():
    train, held_out = random_examples(5, 12, seed=1), random_examples(6, 12, seed=2, prefix=2)
    train.target[0] *= 1000
    maps = train.target.double().numpy()
    guess = (maps / maps.mean(1, keepdims=True)).mean(0)
    expected = by_scipy(np.broadcast_to(guess, (6, 12)), held_out.target.numpy(), 2)
    assert mean_map_scores(train, held_out) == pytest.approx(expected, abs=1e-9)


def test_the_mean_map_is_perfect_when_all_images_have_one_map():
    one = normal(1, TOKENS, dtype=torch.float32).exp().expand(4, -1)
    examples = HeadExamples.kept(normal(4, TOKENS, DIM), one)
    assert mean_map_scores(examples, examples)["rho"] == pytest.approx(1)


def test_a_mean_map_of_another_grid_is_refused():
    with pytest.raises(ShapeError, match="held_out: expected the 6 tokens of the training maps, got 9"):
        mean_map_scores(random_examples(tokens=6), random_examples(tokens=9))


# ---- learning


def test_the_head_learns_a_rule_that_no_mean_map_knows():
    sets = []
    for number, (images, tokens) in enumerate([(300, 12), (150, 17), (40, 12)]):
        features = normal(images, tokens, DIM, seed=number, dtype=torch.float32)
        sets.append(HeadExamples.kept(features, rule(features)))
    head, task = tiny_head(width=32), HeadTask(sets[:2], sets[2])
    config = FitConfig(steps=250, batch=32, learning_rate=1e-2, warmup=20, validate_every=50)
    before, fitted = head_scores(head, sets[2]), fit(head, task, config)
    assert fitted.scores["rho"] > 0.95 and fitted.scores["rho_patches"] > 0.95
    assert before["rho"] < 0.6 and abs(mean_map_scores(sets[0], sets[2])["rho"]) < 0.3
    assert head_scores(head, sets[2]) == pytest.approx(dict(fitted.scores))


# ---- from a Spectral Pullback Network


@pytest.mark.parametrize("batch", [1, 2, 64])
def test_distilled_targets_are_the_importance_that_the_spn_predicts(batch):
    spn, features = tiny_spn(), normal(5, TOKENS, DIM, dtype=torch.float32)
    examples = distilled_examples(spn, lambda rows: features[rows], 5, prefix=2, batch=batch)
    with torch.no_grad():
        metric = spn(features)
    for i in range(5):
        for token in range(TOKENS):
            squares = [metric.energies[i, j] * metric.modes[i, j, token].square().sum() for j in range(RANK)]
            assert examples.target[i, token].item() == pytest.approx(math.sqrt(sum(squares)), rel=1e-5)
    assert examples.target.shape == (5, TOKENS) and not examples.target.requires_grad
    assert examples.prefix == 2 and torch.equal(examples.features(torch.tensor([3])), features[3:4])


def test_a_head_learns_from_distilled_targets():
    spn, features = tiny_spn(), normal(120, TOKENS, DIM, dtype=torch.float32)
    examples = distilled_examples(spn, lambda rows: features[rows], 100)
    held_out = distilled_examples(spn, lambda rows: features[100 + rows], 20)
    assert torch.equal(held_out.target, spn(features[100:]).importance().detach())
    head = tiny_head(width=32)
    before = head_scores(head, held_out)["rho"]
    fit(head, HeadTask([examples], held_out), FitConfig(steps=120, batch=32, warmup=10, learning_rate=1e-2))
    assert head_scores(head, held_out)["rho"] > max(0.6, before + 0.2)


def test_modes_of_a_latent_space_give_no_targets():
    spn, features = tiny_spn(latent=(4, 5)), normal(3, TOKENS, DIM, dtype=torch.float32)
    with pytest.raises(ModelError, match="spn: expected modes on the 6 tokens of the features, got 4"):
        distilled_examples(spn, lambda rows: features[rows], 3)


def test_no_examples_to_distil_is_an_error():
    with pytest.raises(PullbackError, match="count: expected at least one example, got 0"):
        distilled_examples(tiny_spn(), lambda rows: normal(1, TOKENS, DIM)[rows], 0)
