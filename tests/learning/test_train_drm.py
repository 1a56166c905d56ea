"""Training of a Distilled Riemannian Metric: the parts of its loss, what it learns, how it goes on, and what it
refuses."""

import json
import math
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
import torch

import pullback as pb
from helpers.families import model_of, randomized
from helpers.pictures import encoded, write_pictures
from helpers.toys import DIM, TOKENS, normal, rule, seeded
from pullback.errors import ImageError, ModelError, PullbackError, RankError
from pullback.evaluation.distances import output_distances
from pullback.learning import fit as fitting
from pullback.learning.distilled_metric import DistilledMetric, MetricItems, pairwise_distances
from pullback.learning.fit import FitConfig, Share
from pullback.learning.losses import conformal_loss
from pullback.learning.train_drm import (
    MetricExamples,
    MetricOptions,
    MetricTask,
    averaged_output,
    constant_scores,
    drm_config,
    fit_drm,
    items_of,
    metric_scores,
    train_drm,
    varied_features,
)
from pullback.learning.train_head import HeadExamples
from pullback.probes import ProbeMap
from pullback.targets.compute import compute_targets

SMALL = {"rank": 4, "width": 16, "heads": 2}
OPTIONS = MetricOptions(**SMALL, reference="relative_l2")
SHORT = FitConfig(steps=6, batch=4, warmup=2, validate_every=2, learning_rate=1e-2, ema=0.9)


@lru_cache
def probe_of(decoder: str = "depth-2x2", layer: int | str = 1) -> ProbeMap:
    return pb.load_probe(model_of("depth-v2"), decoder, layer)


@lru_cache
def toy(count: int = 48, seed: int = 0) -> MetricExamples:
    """Features whose outputs are weighted sums over tokens, with weights that differ from image to image."""
    features = normal(count, TOKENS, DIM, seed=seed, dtype=torch.float32)
    mixed = torch.einsum("nt,ntd->nd", weights_of(features), features)
    return MetricExamples.of(features, 50 + mixed @ normal(DIM, 3, seed=9, dtype=torch.float32))


def weights_of(features: torch.Tensor) -> torch.Tensor:
    """Positive scores [n, N] of tokens, of which single ones count most."""
    return rule(features).sqrt()


def importance(count: int = 20) -> HeadExamples:
    """Importance of other images, of another number of tokens."""
    features = normal(count, TOKENS + 3, DIM, seed=3, dtype=torch.float32)
    return HeadExamples.kept(features, weights_of(features))


def toy_task(**changes) -> MetricTask:
    return replace(MetricTask(toy(), toy(12, 1), "relative_l2", importance(), 0.5), **changes)


def fitted(config: FitConfig = SHORT, **more) -> DistilledMetric:
    return fit_drm(probe_of(), toy(48), toy(12, 1), importance(), OPTIONS, config=config, **more)


def fresh(seed: int = 0) -> DistilledMetric:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return DistilledMetric(DIM, 4, 16, 2)


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


# ---- the loss and the scores


def test_the_loss_compares_all_pairs_of_a_batch_and_adds_the_distillation():
    metric, task = fresh(), toy_task()
    loss, numbers = task.loss(metric, 3, Share(5), seeded(7))
    generator = seeded(7)  # the same draws again, in the same order
    rows = torch.randperm(len(task.train), generator=generator)[:5]
    features, outputs = task.train.features(rows), task.train.outputs[rows]
    found, wanted = [], []
    for i in range(5):
        for j in range(i):
            found.append(metric.distance(features[i : i + 1], features[j : j + 1]).item())
            wanted.append(output_distances(outputs[i : i + 1], outputs[j : j + 1]).item())
    found, wanted = torch.tensor(found, dtype=torch.float64), torch.tensor(wanted, dtype=torch.float64)
    regression = (found - wanted).square().mean() / (wanted - wanted.mean()).square().mean()
    assert numbers["regression_loss"] == pytest.approx(regression.item(), rel=1e-4)
    chosen = torch.randint(len(task.importance), (5,), generator=generator)
    scores = metric.importance(task.importance.features(chosen)) / metric.level
    distilled = conformal_loss(scores, task.importance.target[chosen], generator=generator).item()
    assert numbers["distillation_loss"] == pytest.approx(distilled, rel=1e-5)
    assert loss.item() == pytest.approx(regression.item() + 0.5 * distilled, rel=1e-4)


def test_without_importance_the_loss_is_that_of_distances_alone():
    metric = fresh()
    alone, numbers = toy_task(importance=None).loss(metric, 3, Share(5), seeded(7))
    both, parts = toy_task().loss(metric, 3, Share(5), seeded(7))
    assert numbers == {} and alone.item() == pytest.approx(parts["regression_loss"], rel=1e-6) != both.item()
    assert toy_task(distill_weight=0.0).loss(metric, 3, Share(5), seeded(7))[0].item() == alone.item()


def test_each_process_makes_pairs_of_its_own_images():
    metric, task = fresh(), toy_task(importance=None)
    seen = []

    def watched(features):
        seen.append(features)
        return metric(features)

    for rank in (0, 1):
        task.loss(watched, 3, Share(6, rank, 2), seeded(7))
    rows = torch.randperm(len(task.train), generator=seeded(7))[:6]
    assert all(torch.equal(own, task.train.features(rows[rank::2])) for rank, own in enumerate(seen))


def test_scores_rank_the_other_images_for_each_one_and_all_pairs_at_once():
    predicted, reference = (values @ values.T for values in (normal(6, 6), normal(6, 6, seed=1)))
    scores = metric_scores(predicted, reference)
    rows = []
    for i in range(6):
        others = [j for j in range(6) if j != i]
        rows.append(pb.spearman(predicted[i, others][None], reference[i, others][None]).item())
    rows = torch.tensor(rows)
    assert scores["rho"] == pytest.approx(rows.mean().item())
    assert scores["rho_se"] == pytest.approx(rows.std().item() / math.sqrt(6))
    upper = torch.triu_indices(6, 6, 1)
    one, other = (values[upper[0], upper[1]][None] for values in (predicted, reference))
    assert scores["rho_pairs"] == pytest.approx(pb.spearman(one, other).item())
    away = (predicted - reference).abs()
    assert scores["mae"] == pytest.approx(((away.sum() - away.diagonal().sum()) / 30).item())


def test_in_bfloat16_an_image_is_at_distance_0_from_itself():
    metric = fresh()
    with torch.autocast("cpu", torch.bfloat16):
        items = metric(toy().features(torch.arange(8)))
    assert items.projected.dtype is torch.bfloat16
    assert pairwise_distances(items.full(), items.full()).diagonal().max() < 1e-5


def test_maps_are_averaged_down_and_vectors_and_small_maps_stay():
    maps = normal(2, 4, 6)
    expected = maps.reshape(2, 2, 2, 2, 3).mean((2, 4)).float()
    torch.testing.assert_close(averaged_output(maps, 2)[:, 0], expected)
    for small, cells in ((maps, 6), (maps, None), (maps[:, 0], 2)):
        assert torch.equal(averaged_output(small, cells), small.float())


# ---- training


def test_a_metric_learns_the_distances_of_outputs_and_writes_how_it_went(tmp_path):
    config = replace(SHORT, steps=160, validate_every=40, batch=16)
    metric = fitted(config, out=tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [40, 80, 120, 160]
    names = {"loss", "regression_loss", "distillation_loss", "rho", "rho_se", "rho_pairs", "mae"}
    assert all(names <= set(row) for row in rows)
    still = fitted(replace(SHORT, steps=1, learning_rate=0.0))
    scores, start = metric.config.scores, still.config.scores
    assert rows[-1]["regression_loss"] < 0.5 * rows[0]["regression_loss"]
    assert scores["rho"] > start["rho"] + 0.15 and scores["mae"] < start["mae"]
    assert scores["rho"] == max(row["rho"] for row in rows)
    again = DistilledMetric.from_pretrained(metric.save_pretrained(tmp_path / "run" / "model").parent)
    assert same(again, metric) and again.config == metric.config and not metric.training


def test_weights_of_tokens_follow_the_importance_they_are_distilled_to():
    config = replace(SHORT, steps=150, batch=16)
    found = {}
    for weight in (0.0, 1.0):
        options = replace(OPTIONS, distill_weight=weight)
        metric = fit_drm(probe_of(), toy(), toy(12, 1), importance() if weight else None, options, config=config)
        features = normal(16, TOKENS, DIM, seed=5, dtype=torch.float32)
        found[weight] = pb.spearman(metric.importance(features).detach(), weights_of(features)).mean().item()
    assert found[1.0] > max(0.6, found[0.0])


def test_a_run_starts_at_the_scale_of_the_distances():
    metric = fitted(replace(SHORT, steps=1, learning_rate=0.0))
    items, rows = items_of(metric, toy()), torch.triu_indices(48, 48, 1)
    found = pairwise_distances(items, items)[rows[0], rows[1]].mean()
    wanted = output_distances(toy().outputs, toy().outputs)[rows[0], rows[1]].mean()
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=0)


def test_the_constant_metric_is_that_of_the_training_images_and_is_scored():
    metric = fitted()
    weights = metric(toy().features(torch.arange(48))).weights.detach().double()
    moment = torch.einsum("nt,ns->ts", weights, weights) / 48
    torch.testing.assert_close(metric.second_moment.double(), moment, rtol=1e-5, atol=1e-6)
    assert metric.config.tokens == TOKENS
    scores = constant_scores(metric, toy(12, 1))
    assert scores["constant_rho"] == metric.config.scores["constant_rho"]
    change = (toy(12, 1).features(torch.arange(2))).double().diff(dim=0)[0]
    factor = (metric.scale * metric.level * metric.factor.weight).detach().double()
    length = torch.einsum("td,ts,kd,ke,se->", change, moment, factor, factor, change).sqrt()
    embedded = metric.embed(toy(12, 1).features(torch.arange(2)), share=1.0).detach().double()
    torch.testing.assert_close((embedded[0] - embedded[1]).norm(), length, rtol=1e-4, atol=0)


def test_bf16_trains_too():
    config = replace(SHORT, precision="bf16")
    metric = fitted(config)
    assert all(value.dtype is torch.float32 and value.isfinite().all() for value in metric.state_dict().values())


# ---- images


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> tuple[Path, Path]:
    """A folder to learn from, with a file that is no picture, and other pictures."""
    root = tmp_path_factory.mktemp("photos")
    train = write_pictures(root / "train", 8)
    judges = write_pictures(root / "judges", 12, broken=False)
    for number in range(8):
        (judges / f"{number:02d}.png").unlink()
    return train, judges


def trained(photos, probe: ProbeMap | None = None, **options) -> DistilledMetric:
    return train_drm(probe or probe_of(), *photos, **({"size": 28, "config": SHORT} | SMALL | options))


@pytest.fixture(scope="module")
def whole(photos) -> DistilledMetric:
    return trained(photos)


def test_a_metric_of_images_knows_what_it_was_made_for_and_how_well_it_does(whole):
    origin, scores = whole.config.origin, whole.config.scores
    assert (origin.family, origin.decoder, origin.layer, origin.rank) == ("depth-anything", "depth-2x2", 1, None)
    assert origin.resolutions == ((28, 28),) and origin.blocks and whole.layer == 1
    assert whole.config.reference == "relative_l1" and whole.config.tokens == 5
    assert (scores["training_images"], scores["held_out_images"], scores["steps"]) == (8, 4, 6)
    assert -1 <= scores["rho"] <= 1 and {"constant_rho", "embedding", "mae", "rho_se", "best_step"} <= set(scores)


def test_held_out_scores_are_those_of_the_probes_own_outputs(photos, whole):
    probe = probe_of()
    images = probe.load_images(photos[1], size=28)
    features = probe.features(images)
    outputs = output_distances(probe(features), probe(features), "relative_l1").double()
    items = whole(features.as_subclass(torch.Tensor).half().float())
    with torch.no_grad():
        expected = metric_scores(pairwise_distances(items, items).double(), outputs)
    assert whole.config.scores["rho"] == pytest.approx(expected["rho"], abs=1e-6)
    assert whole.config.scores["mae"] == pytest.approx(expected["mae"], rel=1e-3)


def test_a_run_that_stops_goes_on_exactly(photos, whole, tmp_path, monkeypatch):
    advance, taken = fitting._Run.advance, []

    def stop(self):
        taken.append(self.step)
        if len(taken) == 4:
            raise KeyboardInterrupt
        return advance(self)

    with monkeypatch.context() as patched:
        patched.setattr(fitting._Run, "advance", stop)
        with pytest.raises(KeyboardInterrupt):
            trained(photos, out=tmp_path)
    again = trained(photos, out=tmp_path)
    assert same(again, whole) and again.config == whole.config
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [2, 4, 6]


def test_a_run_may_be_given_a_time_and_goes_on_from_there(photos, whole, tmp_path):
    first = trained(photos, out=tmp_path, seconds=0.0)
    assert first.config.scores["steps"] == 0 and (tmp_path / "checkpoint.pt").is_file()
    assert same(trained(photos, out=tmp_path), whole)


@pytest.mark.parametrize(
    "change",
    [
        {"rank": 3},
        {"distill_weight": 0.0},
        {"reference": "relative_l2"},
        {"target": "block-norm"},
        {"target_images": 5},
        {"size": 42},
        {"crops": 1},
        {"limit": 7},
        {"config": replace(SHORT, seed=1)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_other_settings_do_not_go_on(photos, change, tmp_path):
    trained(photos, out=tmp_path, seconds=0.0)
    name = {"target_images": "targets", "limit": "images", "config": "seed"}.get(next(iter(change)), next(iter(change)))
    with pytest.raises(PullbackError, match=f"holds a training run with other settings .*{name}"):
        trained(photos, out=tmp_path, **change)


# ---- importance


@pytest.fixture(scope="module")
def store(photos, tmp_path_factory) -> pb.TargetStore:
    return compute_targets(probe_of(), photos[0], out=tmp_path_factory.mktemp("store"), rank=4, size=28)


def test_importance_is_computed_where_none_is_given_as_a_store_would_have_it(photos, whole, store, tmp_path):
    assert same(trained(photos, targets=store), whole)
    assert same(trained(photos, out=tmp_path), whole)
    own = pb.TargetStore.open(tmp_path / "targets")
    assert len(own) == 8 and own.config["source"] == store.config["source"]
    other = trained(photos, target_images=4)
    assert not same(other, whole)
    # a folder that knows more already: of an earlier call, stopped before it trained
    compute_targets(probe_of(), photos[0], out=tmp_path / "more" / "targets", rank=4, size=28)
    assert same(trained(photos, target_images=4, out=tmp_path / "more"), other)


def test_importance_that_was_stopped_goes_on(photos, whole, tmp_path, monkeypatch):
    compute = pb.targets.compute.targets_in_batches
    calls = []

    def stop(*arguments, **options):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return compute(*arguments, **options)

    monkeypatch.setattr(pb.targets.compute, "targets_in_batches", stop)
    with pytest.raises(KeyboardInterrupt):
        trained(photos, out=tmp_path)
    assert len(pb.TargetStore.open(tmp_path / "targets")) == 3
    assert same(trained(photos, out=tmp_path), whole) and len(calls) == 4 + 5


def test_crops_are_more_images_to_train_on_the_same_for_the_same_seed(photos, whole, tmp_path):
    first, second = (trained(photos, crops=2, out=tmp_path / name) for name in "ab")
    assert same(first, second) and not same(first, whole)
    assert first.config.scores["training_images"] == 3 * whole.config.scores["training_images"]


def test_crops_of_images_come_after_the_images_and_show_a_part_of_them():
    probe = probe_of()
    flat = torch.full((3, 3, 32, 32), 90, dtype=torch.uint8)  # of a picture of one colour every crop is that colour
    first, second = varied_features(probe, flat, 28, 2, seed=0)
    assert first.shape == (3, 5, probe.backbone.dim) and torch.allclose(first, second, atol=1e-4)
    drawn = torch.randint(256, (1, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    one, other = varied_features(probe, drawn, 28, 2, seed=0)
    assert not torch.allclose(one, other, atol=1e-2)


def test_crops_of_pictures_that_are_no_squares_are_refused(photos):
    with pytest.raises(PullbackError, match=r"size: expected a square, of which crops are taken, got 28x42"):
        trained(photos, crops=1, size=(28, 42))
    with pytest.raises(PullbackError, match="crops: expected a whole number of at least 0, got -1"):
        trained(photos, crops=-1)


def test_without_distillation_no_importance_is_computed(photos, tmp_path, monkeypatch):
    monkeypatch.setattr("pullback.learning.train_drm.compute_targets", None)
    monkeypatch.setattr("pullback.learning.train_drm.compute_table", None)
    trained(photos, distill_weight=0.0, out=tmp_path)
    assert not (tmp_path / "targets").exists()


def test_block_norms_may_take_the_place_of_importance(photos, store, tmp_path):
    found = trained(photos, target="block-norm")
    assert same(found, trained(photos, targets=store, target="block-norm"))
    # two of the four directions: imp* of all four is the block norm, up to rounding at most
    half = compute_targets(probe_of(), photos[0], out=tmp_path / "half", rank=2, size=28)
    assert not same(trained(photos, targets=half), trained(photos, targets=half, target="block-norm"))


def test_importance_of_a_picture_that_was_exchanged_is_refused(photos, tmp_path):
    train = write_pictures(tmp_path / "train", 4, broken=False)
    compute_targets(probe_of(), train, out=tmp_path / "run" / "targets", rank=4, size=28)
    (train / "01.png").write_bytes(encoded(77))
    with pytest.raises(ImageError, match=r"images: 1 image, such as '01\.png', changed since .* Delete .*targets"):
        trained((train, photos[1]), out=tmp_path / "run")


def test_targets_of_another_probe_are_refused(photos, store):
    other = randomized(model_of("depth-v2").__class__(model_of("depth-v2").config), seed=5)
    for probe in (probe_of(layer=2), probe_of("depth-3x3"), pb.load_probe(other, "depth-2x2", 1)):
        with pytest.raises(ModelError, match="holds targets of another one"):
            trained(photos, probe, targets=store)


def test_targets_that_would_not_be_used_are_refused(photos, store):
    with pytest.raises(PullbackError, match="targets: given, but distill_weight is 0"):
        trained(photos, targets=store, distill_weight=0.0)


# ---- bad input


def test_held_out_images_that_are_trained_on_are_recorded_and_all_of_them_refused(photos, tmp_path, caplog):
    with pytest.raises(ImageError, match="held_out: expected images that the network is not trained on"):
        trained((photos[0], photos[0]), distill_weight=0.0)
    for path in (photos[1] / "08.png", photos[1] / "09.png", photos[0] / "00.png"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    metric = trained((photos[0], tmp_path), distill_weight=0.0)
    assert metric.config.scores["held_out_images_trained_on"] == 1
    assert "1 of 3 images are also training images, such as '00.png'" in caplog.text


def test_outputs_that_are_all_the_same_are_refused():
    flat = MetricExamples.of(toy().features(torch.arange(12)), torch.ones(12, 3))
    with pytest.raises(PullbackError, match="held_out: expected images with different outputs"):
        fit_drm(probe_of(), toy(), flat, importance(), OPTIONS, config=SHORT)
    with pytest.raises(PullbackError, match="images: expected images with different features and outputs"):
        fit_drm(probe_of(), flat, toy(12, 1), importance(), OPTIONS, config=SHORT)
    broken = MetricExamples.of(toy().features(torch.arange(12)), torch.full((12, 3), math.nan))
    with pytest.raises(PullbackError, match="train: expected finite outputs, got NaN"):
        fit_drm(probe_of(), broken, toy(12, 1), importance(), OPTIONS, config=SHORT)


def test_too_few_images_are_refused(photos, tmp_path):
    few = write_pictures(tmp_path / "few", 2, broken=False)
    with pytest.raises(PullbackError, match="held_out: expected at least three images, since they are ranked, got 2"):
        trained((photos[1], few))
    with pytest.raises(PullbackError, match="images: expected at least two, since pairs of them are compared, got 1"):
        trained((photos[0], photos[1]), limit=1)
    for train, held_out in ((1, 3), (2, 2)):
        with pytest.raises(PullbackError, match=r"expected at least [23] images, got [12]"):
            MetricTask(*(MetricExamples.of(normal(n, 3, 2), normal(n, 2)) for n in (train, held_out)), "relative_l2")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"rank": 0}, RankError, "rank: expected a whole number of at least 1, got 0"),
        ({"rank": 25}, RankError, "rank: expected at most the width of the features, 24, got 25"),
        ({"width": 30}, ModelError, "width, heads: expected width / 4 to be a multiple of heads"),
        ({"distill_weight": -1}, PullbackError, "distill_weight: expected a number that is not negative, got -1"),
        ({"distill_weight": math.nan}, PullbackError, "distill_weight: expected a number"),
        ({"reference": "cosine"}, PullbackError, "reference: expected one of relative_l1, .* got 'cosine'"),
        ({"target": "depth"}, PullbackError, "target: expected one of importance, block-norm, got 'depth'"),
        ({"target_images": 0}, PullbackError, "target_images: expected a positive number of images, .* got 0"),
        ({"targets": "store"}, PullbackError, "targets: expected a store of targets, .* got 'store'"),
        ({"config": {"steps": 1}}, PullbackError, "config: expected a FitConfig, or None, got"),
        ({"config": replace(SHORT, batch=1)}, PullbackError, "batch: pairs of images .* expected at least 2, got 1"),
        ({"probe": probe_of(layer="hooks")}, ModelError, r"probe: expected one at a layer, such as pb\.load_probe"),
        ({"probe": "tiny-scenes"}, PullbackError, "probe: expected a probe map"),
    ],
    ids=str,
)  # fmt: skip
def test_options_are_checked_before_importance_is_computed(photos, change, error, message, monkeypatch):
    monkeypatch.setattr("pullback.learning.train_drm.compute_table", None)
    with pytest.raises(error, match=message):
        trained(photos, **change)


def test_importance_is_not_computed_by_several_processes(photos, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(PullbackError, match=r"targets: expected a store where several .* Run `pullback targets` first"):
        trained(photos)
    with pytest.raises(PullbackError, match=r"batch: pairs .* expected at least 2 a process, got 3"):
        trained(photos, config=replace(SHORT, batch=3))


def test_features_and_outputs_must_be_of_the_same_images():
    with pytest.raises(PullbackError, match="outputs: expected one for each of 3 images, got 2"):
        MetricExamples.of(normal(3, 2, 2), normal(2, 2))
    with pytest.raises(PullbackError, match=r"importance: expected features with their importance, .* got None"):
        fit_drm(probe_of(), toy(), toy(12, 1), None, OPTIONS, config=SHORT)


def test_the_settings_of_the_loop_may_be_changed():
    assert drm_config(steps=7).steps == 7 and drm_config().validate_every == 100


def test_items_in_full_keep_the_distances():
    items = fresh()(toy().features(torch.arange(6)))
    assert isinstance(items.full(), MetricItems)
    torch.testing.assert_close(pairwise_distances(items.full(), items.full()), pairwise_distances(items, items))
