"""Training of a bottleneck: the parts of its loss, what it learns, how it goes on, and what it refuses."""

import json
import math
from copy import deepcopy
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from torch.distributions import Independent, Normal

import pullback as pb
from helpers.families import model_of, randomized
from helpers.pictures import write_pictures
from helpers.vggt_models import scenes, tiny
from pullback.data.crops import Variation
from pullback.errors import DecoderError, ImageError, ModelError, PullbackError
from pullback.evaluation.fidelity import depth_errors
from pullback.learning.fit import FitConfig, Share
from pullback.learning.pretrained import Origin
from pullback.learning.s2vae import DETERMINISTIC, GAUSSIAN, POSTERIORS, S2VAE
from pullback.learning.train_bottleneck import (
    BottleneckOptions,
    BottleneckTask,
    FeatureSet,
    bottleneck_config,
    bottleneck_scores,
    check_output,
    drawn_rows,
    fit_bottleneck,
    task_loss,
    task_metric,
    train_bottleneck,
    unexplained,
)
from pullback.probes import ProbeMap

SMALL = {"registers": 3, "latent": 6, "width": 16, "heads": 2, "blocks": 1}
OPTIONS = BottleneckOptions(**SMALL, kl_warmup=4)
SHORT = FitConfig(steps=6, batch=4, warmup=2, validate_every=2, learning_rate=1e-2, ema=0.9)


@lru_cache
def probe_of(decoder: str = "depth-2x2", distance: str | None = None) -> ProbeMap:
    return pb.multi_layer_probe(model_of("depth-v2"), decoder, distance=distance)


def features_of(count: int, probe: ProbeMap | None = None, seed: int = 0, side: int = 28) -> torch.Tensor:
    """Features of smooth random pictures."""
    generator = torch.Generator().manual_seed(seed)
    small = torch.randn(count, 3, 2, 2, generator=generator, dtype=torch.float64)
    images = torch.nn.functional.interpolate(small, (side, side), mode="bilinear", align_corners=True)
    return (probe or probe_of()).features(images, normalized=True)


def fitted(probe: ProbeMap | None = None, options: BottleneckOptions = OPTIONS, config: FitConfig = SHORT, **more):
    probe = probe or probe_of()
    train, held_out = features_of(64, probe), features_of(5, probe, seed=1)
    return fit_bottleneck(
        probe, drawn_rows(FeatureSet.of(train)), FeatureSet.of(held_out), options, config=config, **more
    )


def task_of(options: BottleneckOptions = OPTIONS, probe: ProbeMap | None = None) -> BottleneckTask:
    probe = probe or probe_of()
    x = features_of(4, probe)
    torch.manual_seed(0)
    vae = S2VAE.from_config(options.network(probe, probe.token_layout(x).grid)).start_from(x, probe.token_layout(x))
    return BottleneckTask(vae, probe, drawn_rows(FeatureSet.of(x)), FeatureSet.of(x), options)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def same(one: S2VAE, other: S2VAE) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


# ---- the parts of the loss


def test_the_share_unexplained_is_that_of_each_layer_over_patches():
    task = task_of()
    x = features_of(3)
    other = x.as_subclass(torch.Tensor) + torch.randn(x.shape, generator=generator(), dtype=x.dtype)
    mean, spread = task.vae.mean.double(), task.vae.spread.double()
    expected = []
    for layer in range(4):
        own = slice(24 * layer, 24 * (layer + 1))
        truth = (x.as_subclass(torch.Tensor)[:, 1:, own] - mean[own]) / spread[own]
        lost = (other[:, 1:, own] - x.as_subclass(torch.Tensor)[:, 1:, own]) / spread[own]
        expected.append(lost.square().sum() / truth.square().sum())
    torch.testing.assert_close(unexplained(task.vae, x, other).double(), torch.stack(expected), rtol=1e-4, atol=0)


def test_nothing_is_unexplained_of_the_features_and_everything_of_their_mean():
    task = task_of()
    x = features_of(4)
    torch.testing.assert_close(unexplained(task.vae, x, x), torch.zeros(4), atol=0, rtol=0)
    mean = task.vae.mean.expand(x.shape)
    torch.testing.assert_close(unexplained(task.vae, x, mean), torch.ones(4))


def test_the_task_loss_is_the_share_of_the_outputs_variance_where_errors_are_small():
    probe, x = probe_of(), features_of(4)
    near = x + 1e-3 * torch.randn(x.shape, generator=generator(), dtype=x.dtype)
    truth, found = probe(x), probe(near)
    expected = (found - truth).square().mean() / truth.var(correction=0)
    assert 0 < float(expected) < 0.01
    torch.testing.assert_close(task_loss(probe, x, near), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("cells", [True, False])
def test_a_run_starts_at_its_cells(cells):
    options = replace(OPTIONS, cells=cells)
    scores = fitted(options=options, config=replace(SHORT, steps=1, learning_rate=1e-9)).config.scores
    assert (scores["unexplained"] < 0.5) == cells


def test_wild_outputs_count_by_their_size_and_not_its_square():
    def decode(taps, layout):
        return layout.patch_map(taps[0])[:, 0, :, :, 0]

    probe = ProbeMap(probe_of().backbone, pb.Decoder("one channel", (2,), decode), "inputs")
    x = features_of(4, probe)
    spread = probe(x).std(correction=0)
    far = x.as_subclass(torch.Tensor) + 10 * spread
    torch.testing.assert_close(task_loss(probe, x, far), torch.tensor(19.0).double())  # 2 |e| - 1


def test_the_metric_of_the_task_is_the_second_order_of_its_loss():
    """Small errors of all patches, drawn at random: the task loss is the mean of e^T T e over them."""

    def decode(taps, layout):  # mixtures of the channels of two layers, averaged over pairs of patches
        maps = layout.patch_map(torch.cat(list(taps), -1))[:, 0]
        return (maps + maps.flip(1)) @ mixture

    mixture = torch.randn(48, 2, generator=generator(1), dtype=torch.float64)
    probe = ProbeMap(probe_of().backbone, pb.Decoder("mixtures", (1, 2), decode), "inputs")
    parts = [features_of(4, probe, seed) for seed in range(300)]
    found = task_metric(probe, parts)
    losses, expected = [], []
    for seed, part in enumerate(parts[:100]):
        error = 1e-4 * torch.randn(part.shape, generator=generator(seed), dtype=part.dtype)
        losses.append(task_loss(probe, part, part.as_subclass(torch.Tensor) + error) * probe(part).var(correction=0))
        expected.append(torch.einsum("btd,de,bte->bt", error[:, 1:], found, error[:, 1:]).mean())
    every = torch.cat([probe(part) for part in parts]).var(correction=0)
    torch.testing.assert_close(torch.stack(losses).mean() / every, torch.stack(expected).mean(), rtol=0.1, atol=0)


def test_a_decoder_that_does_not_depend_on_its_inputs_has_no_metric():
    def decode(taps, layout):
        return torch.zeros_like(taps[0][:, :, 0])

    probe = ProbeMap(probe_of().backbone, pb.Decoder("none", (2,), decode), "inputs")
    assert not task_metric(probe, [features_of(2, probe)]).any()


def test_the_metric_of_an_output_that_hardly_varies_is_finite():
    def decode(taps, layout):
        return 100 + 1e-30 * layout.patch_map(taps[0]).mean((1, 2, 3))[:, :1]

    probe = ProbeMap(probe_of().backbone, pb.Decoder("constant", (2,), decode), "inputs")
    assert task_metric(probe, [features_of(1, probe)]).isfinite().all()


def test_an_output_that_never_varies_gives_a_finite_task_loss():
    probe = ProbeMap(probe_of().backbone, pb.Decoder("none", (2,), lambda taps, layout: 0 * taps[0][:, :, 0]), "inputs")
    x = features_of(2, probe)
    assert float(task_loss(probe, x, 2 * x)) == 0


def test_the_task_loss_sees_the_output_behind_the_task_distance():
    probe = probe_of(distance="log")
    x = features_of(4)
    near = 1.001 * x
    truth, found = (probe_of()(values).flatten(1).log() for values in (x, near))
    expected = (found - truth).square().mean() / truth.var(correction=0)
    torch.testing.assert_close(task_loss(probe, x, near), expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("posterior", POSTERIORS)
def test_the_loss_is_the_weighted_sum_of_its_parts(posterior):
    options = replace(OPTIONS, posterior=posterior, task_weight=0.5, kl_weight=0.2, kl_warmup=10)
    task = task_of(options)
    loss, parts = task.loss(task.vae.train(), 3, Share(4), generator())
    expected = parts["reconstruction_loss"] + 0.5 * parts["task_loss"]
    if posterior == DETERMINISTIC:
        assert "kl_loss" not in parts
    else:
        expected += 0.2 * 0.4 * parts["kl_loss"]  # the fourth of ten steps of warm-up
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in task.vae.parameters() if p.requires_grad)


def test_the_kl_is_per_latent_number_and_counts_in_full_after_its_warmup():
    options = replace(OPTIONS, posterior=GAUSSIAN, kl_weight=1.0, task_weight=0.0, kl_warmup=5)
    task = task_of(options)
    loss, parts = task.loss(task.vae.train(), 7, Share(4), generator())
    x = drawn_rows(task.held_out)(7, Share(4), generator())
    posterior = task.vae.posterior(x, task.probe.token_layout(x))
    mean, deviation = posterior.base_dist.mean, posterior.base_dist.stddev
    kl = 0.5 * (deviation.square() + mean.square() - 1) - deviation.log()
    assert isinstance(posterior, Independent) and isinstance(posterior.base_dist, Normal)
    assert parts["kl_loss"] == pytest.approx(kl.mean().item(), rel=1e-4)
    assert loss.item() == pytest.approx(parts["reconstruction_loss"] + parts["kl_loss"], rel=1e-5)
    assert "task_loss" not in parts


def test_samples_in_training_follow_from_the_step_and_leave_torchs_generator_alone():
    task = task_of()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first, again, other = (task.loss(task.vae.train(), 0, Share(4), generator(seed))[0] for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)
    with torch.no_grad():
        scores = [bottleneck_scores(task.vae.eval(), task.vae, task.probe, task.held_out) for _ in range(2)]
    assert scores[0] == scores[1]  # the location, which is not drawn


# ---- what is measured


def test_scores_of_depth_are_those_of_its_own_measure():
    task = task_of(probe=probe_of(distance="log"))
    x = task.held_out.features(torch.arange(4))
    with torch.no_grad():
        scores = bottleneck_scores(task.vae.eval(), task.vae, task.probe, task.held_out, batch=3)
        found = task.vae(x)
        depth, truth = probe_of()(found.features.double()), probe_of()(x)
    expected = depth_errors(depth, truth, truth > 0, median_scaling=False)
    assert scores["delta1"] == pytest.approx(expected.delta1.mean().item())
    assert scores["abs_rel"] == pytest.approx(expected.abs_rel.mean().item(), rel=1e-4)
    shares = [scores[f"unexplained_L{layer:02d}"] for layer in task.vae.config.layers]
    assert shares == pytest.approx(unexplained(task.vae, x, found.features).tolist(), rel=1e-4)
    assert scores["unexplained"] == pytest.approx(sum(shares) / 4)
    assert scores["log10_concentration"] == pytest.approx(math.log10(found.posterior.concentration.mean()), rel=1e-4)
    assert "relative_l2" not in scores


def test_scores_of_other_outputs_are_their_relative_error():
    probe = probe_of("mean")
    task = task_of(probe=probe)
    x = task.held_out.features(torch.arange(4))
    with torch.no_grad():
        scores = bottleneck_scores(task.vae.eval(), task.vae, probe, task.held_out)
        found, truth = probe(task.vae(x).features.double()), probe(x)
    assert scores["relative_l2"] == pytest.approx(((found - truth).norm(dim=1) / truth.norm(dim=1)).mean().item())
    assert "delta1" not in scores and scores[f"unexplained_L{task.vae.config.layers[0]:02d}"] == scores["unexplained"]


# ---- training


@pytest.mark.parametrize(("cells", "share"), [(False, 0.75), (True, 0.95)])  # cells know much at the start
def test_a_bottleneck_learns_features_and_task_and_comes_back_from_its_folder(tmp_path, cells, share):
    config = replace(SHORT, steps=120, validate_every=40, batch=16, learning_rate=5e-3)
    options = replace(OPTIONS, cells=cells, task_weight=1.0)
    vae = fitted(probe_of("mean"), options, config, out=tmp_path / "run")
    start = fitted(probe_of("mean"), options, replace(config, steps=1, learning_rate=0.0)).config.scores
    learned = vae.config.scores
    assert learned["unexplained"] < min(0.9, share * start["unexplained"])  # 1: the mean of every channel
    assert learned["task_unexplained"] < 0.75 * start["task_unexplained"]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [40, 80, 120]
    assert all({"reconstruction_loss", "task_loss", "kl_loss", "relative_l2", "kl"} <= set(row) for row in rows)
    again = S2VAE.from_pretrained(vae.save_pretrained(tmp_path / "model"))
    assert same(again, vae) and again.config == vae.config and not vae.training


def test_the_network_knows_what_it_was_made_for():
    origin = fitted().config.origin
    assert (origin.family, origin.decoder, origin.layer, origin.rank) == ("depth-anything", "depth-2x2", None, None)
    assert origin.resolutions == ((28, 28),) and origin.blocks
    free = fitted(options=replace(OPTIONS, task_weight=0.0)).config.origin
    assert free.family == "depth-anything" and free.decoder is free.decoder_identity is None


def test_a_run_that_goes_on_does_not_start_again(tmp_path):
    probe, drawn = probe_of(), []
    rows, held = drawn_rows(FeatureSet.of(features_of(64, probe))), FeatureSet.of(features_of(5, probe, seed=1))

    def train(step, share, generator):
        drawn.append(step)
        return rows(step, share, generator)

    fit_bottleneck(probe, train, held, OPTIONS, config=SHORT, out=tmp_path, seconds=0.0)
    assert drawn and set(drawn) == {0}
    drawn.clear()
    fit_bottleneck(probe, train, held, OPTIONS, config=SHORT, out=tmp_path)
    assert drawn == list(range(SHORT.steps))


@pytest.mark.parametrize("posterior", POSTERIORS)
def test_a_stopped_run_goes_on_to_the_same_bits(posterior, tmp_path):
    options = replace(OPTIONS, posterior=posterior)
    whole = fitted(options=options)

    class Stopped(Exception):
        pass

    def stop(step, numbers):
        if step == 3:
            raise Stopped

    with pytest.raises(Stopped):
        fitted(options=options, out=tmp_path, on_step=stop)
    assert same(fitted(options=options, out=tmp_path), whole)


def test_a_run_may_be_given_a_time_and_goes_on_from_there(tmp_path):
    first = fitted(out=tmp_path, seconds=0.0)
    assert first.config.scores["steps"] == 0 and (tmp_path / "checkpoint.pt").is_file()
    assert same(fitted(out=tmp_path), fitted())


def test_bf16_trains_too():
    vae = fitted(config=replace(SHORT, precision="bf16"))
    assert all(value.dtype is torch.float32 and value.isfinite().all() for value in vae.state_dict().values())
    assert not same(vae, fitted())


def test_views_are_encoded_each_on_their_own():
    model = tiny(torch.float32)
    probe = pb.multi_layer_probe(model, "depth-2x2", distance="log")
    train, held_out = (probe.features(scenes(3, 2, 3, 28, 42, seed=seed, dtype=torch.float32)) for seed in (0, 1))
    config = replace(SHORT, batch=2, steps=2)
    vae = fit_bottleneck(probe, drawn_rows(FeatureSet.of(train)), FeatureSet.of(held_out), OPTIONS, config=config)
    assert vae.config.dims == (64,) * 4 and vae.config.layers == (0, 1, 2, 3) and vae.config.prefix == 3
    assert vae.encode(train, probe.token_layout(train)).shape == (3, 2 * 3, 6)
    assert vae.config.origin.resolutions == ((28, 42),) and 0 <= vae.config.scores["delta1"] <= 1


# ---- images


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> tuple[Path, Path]:
    """A folder to learn from, and other pictures."""
    root = tmp_path_factory.mktemp("photos")
    train = write_pictures(root / "train", 6)
    judges = write_pictures(root / "judges", 9, broken=False)
    for number in range(6):
        (judges / f"{number:02d}.png").unlink()
    return train, judges


def trained(photos, **options) -> S2VAE:
    return train_bottleneck(probe_of(), *photos, **({"size": 28, "config": SHORT, "kl_warmup": 4} | SMALL | options))


@pytest.mark.parametrize("variation", [Variation(), None], ids=["varied", "plain"])
def test_images_train_varied_or_as_they_are_and_go_on_exactly(photos, variation, tmp_path):
    whole = trained(photos, variation=variation)
    assert whole.config.scores["steps"] == 6 and whole.config.origin.decoder == "depth-2x2"
    trained(photos, variation=variation, out=tmp_path, seconds=0.0)
    assert same(trained(photos, variation=variation, out=tmp_path), whole)


def test_oblong_images_train_as_they_are(photos):
    vae = trained(photos, size=(28, 42), variation=None, config=replace(SHORT, steps=2))
    assert vae.config.origin.resolutions == ((28, 42),)
    with pytest.raises(PullbackError, match=r"size: expected a square, .* got 28x42\. Use a square size, or vari"):
        trained(photos, size=(28, 42))


@pytest.mark.parametrize(
    "change", [{"registers": 4}, {"kl_weight": 0.5}, {"task_weight": 0.0}, {"size": 42}, {"variation": None}], ids=str
)
def test_other_settings_do_not_go_on(photos, change, tmp_path):
    trained(photos, out=tmp_path, seconds=0.0)
    name = next(iter(change))
    with pytest.raises(PullbackError, match=f"holds a training run with other settings .*{name}"):
        trained(photos, out=tmp_path, **change)


def test_images_that_are_trained_on_cannot_judge(photos):
    with pytest.raises(ImageError, match="held_out: expected images that the network is not trained on"):
        trained((photos[0], photos[0]))


@pytest.mark.parametrize("weight", [0.0, 3.0])
def test_the_best_weights_are_those_that_lose_least_of_features_and_task(weight):
    task = task_of(replace(OPTIONS, task_weight=weight))
    found = task.validate(task.vae.eval())
    assert found["score"] == pytest.approx(-found["unexplained"] - weight * found["task_unexplained"], rel=1e-6)


def test_every_process_draws_its_own_sample_of_the_posterior():
    task = task_of()
    x = features_of(2)
    task = replace(task, train=lambda *_: x)
    task.vae.train()
    first, again, second = (
        float(task.loss(task.vae, 3, Share(4, rank, 2), generator())[0].detach()) for rank in (0, 0, 1)
    )
    assert first == again != second


# ---- where a bottleneck meets a probe


def test_a_bottleneck_fits_its_own_probe_with_any_number_of_cells_and_in_any_precision():
    vae = fitted()
    for decoder in ("depth-2x2", "depth-3x3", "depth"):
        vae.check(probe_of(decoder))
    vae.check(pb.load_probe(model_of("depth-v2"), "depth", 1))  # wherever the probe sits
    vae.check(pb.multi_layer_probe(deepcopy(model_of("depth-v2")).float(), "depth"))


def test_a_bottleneck_of_something_else_is_refused():
    vae = fitted()
    other = randomized(deepcopy(model_of("depth-v2")), seed=5)
    with pytest.raises(ModelError, match=r"vae: it was trained for other weights than those of"):
        vae.check(pb.multi_layer_probe(other, "depth"))
    with pytest.raises(
        ModelError, match=r"vae: expected one of the layers \[4\], which decoder 'mean' reads, got one of"
    ):
        vae.check(probe_of("mean"))
    with pytest.raises(ModelError, match=r"bottleneck: it was trained for family depth-anything, .* family tiny"):
        vae.check(pb.multi_layer_probe("tiny-scenes", "depth", device="cpu"), "bottleneck")
    wide = pb.multi_layer_probe(tiny(torch.float32), "depth")
    with pytest.raises(ModelError, match=r"vae: it was trained for .* family vggt"):
        vae.check(wide)
    unknown = S2VAE.from_config(replace(vae.config, origin=Origin(), layers=(0, 1, 2, 3)))
    with pytest.raises(ModelError, match=r"vae: expected one of layers that are 64 wide, .* got \[24, 24, 24, 24\]"):
        unknown.check(wide)
    with pytest.raises(PullbackError, match=r"probe: expected a probe map, .* got 'tiny-scenes'"):
        vae.check("tiny-scenes")


def test_a_bottleneck_that_was_trained_for_one_task_is_not_used_for_another():
    points = pb.multi_layer_probe(tiny(torch.float32), "points-5")
    depth = pb.multi_layer_probe(tiny(torch.float32), "depth-2x2")
    x = depth.features(scenes(2, 2, 3, 28, 28, dtype=torch.float32))
    held, config = FeatureSet.of(x), replace(SHORT, batch=2, steps=1)
    own, free = (
        fit_bottleneck(depth, drawn_rows(held), held, replace(OPTIONS, task_weight=weight), config=config)
        for weight in (1.0, 0.0)
    )
    with pytest.raises(ModelError, match=r"vae: it was trained for decoder depth, and is used with decoder points-5"):
        own.check(points)
    free.check(points)


def function_probe(factor: float, dtype: torch.dtype = torch.float32, **choices) -> ProbeMap:
    model = deepcopy(model_of("dinov2")).to(dtype)

    def decode(taps, layout):
        return factor * layout.patch_map(taps[0])[..., 0]

    return ProbeMap(pb.load_probe(model).backbone, pb.Decoder("own", (2,), decode, **choices), "inputs")


def test_two_decoders_of_one_name_are_told_apart():
    vae = fitted(function_probe(2.0), config=replace(SHORT, steps=1))
    vae.check(function_probe(2.0))
    with pytest.raises(ModelError, match=r"vae: it was trained for decoder layers 2, code .* used with decoder layers"):
        vae.check(function_probe(3.0))
    free = S2VAE.from_config(replace(vae.config, origin=replace(vae.config.origin, decoder_identity=None)))
    free.check(function_probe(3.0))


def test_features_behind_the_norm_are_not_those_before_it():
    vae = fitted(function_probe(2.0), replace(OPTIONS, task_weight=0.0), replace(SHORT, steps=1))
    vae.check(function_probe(3.0))
    with pytest.raises(ModelError, match=r"vae: expected one of features before the final norm, as decoder 'own' .*"):
        vae.check(function_probe(3.0, normed=False))
    raw = fitted(function_probe(2.0, normed=False), replace(OPTIONS, task_weight=0.0), replace(SHORT, steps=1))
    raw.check(function_probe(3.0, normed=False))
    with pytest.raises(ModelError, match=r"got one of features before the final norm\. Train one for this decoder"):
        raw.check(function_probe(3.0))


# ---- bad input


def test_a_decoder_behind_a_bottleneck_is_refused():
    compressed = pb.compressed_probe(probe_of(), fitted(config=replace(SHORT, steps=1)))
    with pytest.raises(DecoderError, match=r"decoder: expected one without a bottleneck, got 'depth-2x2@3x6'"):
        fitted(compressed)


def test_a_decoder_of_the_class_token_is_refused():
    probe = pb.multi_layer_probe(model_of("depth-v2"), "cls")
    with pytest.raises(DecoderError, match=r"decoder: 'cls' reads class or register tokens, .* patch tokens only"):
        fitted(probe)
    check_output(probe_of(), features_of(1))


def test_a_logarithm_of_what_is_negative_is_refused():
    probe = pb.multi_layer_probe(model_of("depth-v2"), lambda tokens: tokens[:, 1:].mean(1) - 1, distance="log")
    with pytest.raises(DecoderError, match=r"distance: 'log' takes the logarithm .* expected none below 0"):
        fitted(probe)


def test_a_probe_elsewhere_is_refused():
    at_layer = pb.load_probe(model_of("depth-v2"), "depth-2x2", 1)
    for probe in (at_layer, replace(probe_of(), after_norm=False)):
        with pytest.raises(PullbackError, match=r"probe: .* expected a probe at its inputs, .* Use pb\.multi_layer"):
            fit_bottleneck(probe, lambda *_: None, FeatureSet.of(torch.zeros(0, 5, 96)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task_weight": -1.0}, "task_weight: expected a number that is not negative, got -1.0"),
        ({"kl_weight": -1e-3}, "kl_weight: expected a number that is not negative, got -0.001"),
        ({"kl_weight": math.nan}, "kl_weight: expected a number that is not negative, got nan"),
        ({"kl_warmup": 1.5}, "kl_warmup: expected a whole number of at least 0, got 1.5"),
        ({"registers": 0}, "registers: expected a whole number of at least 1, got 0"),
        ({"latent": 1}, "latent: expected at least 2 numbers a register"),
        ({"width": 30}, "width, heads: expected width to be a multiple"),
        ({"posterior": "cauchy"}, "posterior: expected one of power-spherical, gaussian, deterministic, got 'cauchy'"),
    ],
    ids=str,
)
def test_sizes_and_weights_are_checked_before_images_are_read(change, message, tmp_path):
    with pytest.raises((ModelError, PullbackError), match=message):
        train_bottleneck(probe_of(), tmp_path / "nowhere", tmp_path / "nowhere", **(SMALL | change))


def test_a_loss_that_overflows_stops_the_run_with_advice():
    task = task_of(replace(OPTIONS, posterior=GAUSSIAN))
    with torch.no_grad():
        task.vae.precision.bias.fill_(200.0)
    with pytest.raises(
        PullbackError, match=r"learning_rate: the loss \(.*kl\) is NaN or infinite after 7 steps\. Lower the"
    ):
        task.loss(task.vae.train(), 7, Share(4), generator())
    spherical = task_of()
    with torch.no_grad():
        spherical.vae.precision.bias.fill_(math.nan)
    with pytest.raises(PullbackError, match=r"after 0 steps \(the largest concentration is nan\)\. Lower the"):
        spherical.loss(spherical.vae.train(), 0, Share(4), generator())


def test_no_samples_are_refused():
    empty = FeatureSet.of(features_of(1)[:0])
    with pytest.raises(PullbackError, match="train: expected features of at least one sample"):
        drawn_rows(empty)
    with pytest.raises(PullbackError, match="held_out: expected features of at least one sample"):
        fit_bottleneck(probe_of(), drawn_rows(FeatureSet.of(features_of(1))), empty, OPTIONS)


def test_the_settings_of_the_loop_may_be_changed():
    assert bottleneck_config(steps=7).steps == 7 and bottleneck_config().validate_every == 100
