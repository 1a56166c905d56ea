"""The rows of the taxonomy on a small random VGGT, and networks that learn from its scenes."""

import pytest
import torch

import pullback as pb
from helpers.vggt_models import scenes, tiny

HEIGHT, WIDTH, VIEWS = 28, 42, 2


@pytest.fixture(scope="module")
def model():
    return tiny().requires_grad_(False)


@pytest.fixture(scope="module")
def images():
    return scenes(2, VIEWS, 3, HEIGHT, WIDTH, seed=1)


@pytest.mark.parametrize("views", [1, 2, 3])
def test_the_camera_is_rank_bounded_by_nine_numbers_a_view(model, views):
    images = scenes(1, views, 3, HEIGHT, WIDTH, seed=views)
    probe = pb.load_probe(model, "camera", 1)
    joint = pb.spectrum(probe, images, rank=9 * views, method="exact")
    assert joint.full.shape == (1, 9 * views), "no more singular values than outputs"
    torch.testing.assert_close(joint.kappa.value[:, -1], torch.ones(1, dtype=torch.float64))
    report = pb.diagnose(probe, images, rank=20, convergence_samples=0)
    assert report.output_size == 9 * views and report.r_eff_slq.mean <= 9 * views and report.r90[0] <= 9 * views
    bounded = 9 * views <= 20
    assert (report.regime.label == "iv") == bounded and (abs(report.kappa.mean - 1) < 1e-9) == bounded
    one = pb.load_probe(model, f"camera-{views - 1}", 1)
    single = pb.diagnose(one, images, rank=20, convergence_samples=0)
    assert (single.output_size, single.regime.label) == (9, "iv") and abs(single.kappa.mean - 1) < 1e-9


def test_points_and_depth_are_diagnosed_at_a_layer_and_at_the_input_of_the_head(model, images):
    """The single-layer versus multi-layer comparison runs: K_eff counts how many of the four taps are independent."""
    for decoder, size in (("points", 192), ("depth-2x3", 12)):
        single, several = (
            pb.diagnose(probe, images[:1], rank=5, convergence_samples=0)
            for probe in (pb.load_probe(model, decoder, 1), pb.multi_layer_probe(model, decoder))
        )
        assert single.output_size == several.output_size == size
        assert (single.layer, several.layer) == (1, "hooks")
        assert single.input_shape == (18, 32) and several.input_shape == (18, 256)
        assert 0 < single.kappa.mean <= 1 and 0 < several.kappa.mean <= 1
        assert single.importance.shape == (1, 18) and single.token_layout.views == VIEWS
    multiplicity = pb.layer_multiplicity(pb.multi_layer_probe(model, "depth-2x3"), images, num_probes=4)
    assert ((multiplicity.value >= 1) & (multiplicity.value <= 4)).all()


def test_at_the_input_of_a_dense_head_the_special_tokens_of_a_view_do_not_count(model, images):
    """DPT heads read patches alone, so only through blocks can a camera token matter to them."""
    at_the_head, before = (
        pb.token_importance(pb.spectrum(probe, images[:1], rank=4))
        for probe in (pb.multi_layer_probe(model, "depth-2x3"), pb.load_probe(model, "depth-2x3", 1))
    )
    patches = pb.load_probe(model, "depth", 1).backbone.token_layout(images).patch_mask()
    assert not at_the_head[:, ~patches].any() and (at_the_head[:, patches] > 0).all()
    assert (before > 0).all()


def test_a_spectral_pullback_network_learns_from_the_camera_of_scenes():
    """The paper's controlled case: rank 9, on features that carry their layout through the training loop."""
    from pullback.learning.fit import FitConfig, fit
    from pullback.learning.spn import SpectralPullbackNetwork
    from pullback.learning.train_spn import RandNLA, SpnExamples, SpnTask
    from pullback.targets.recipe import targets_of

    torch.manual_seed(0)
    probe = pb.load_probe(tiny(torch.float32).requires_grad_(False), "camera-1", 1)
    features = probe.features(scenes(4, VIEWS, 3, HEIGHT, WIDTH, dtype=torch.float32))
    targets = targets_of(probe, features, rank=9, keep_modes=True)
    assert targets.importance.shape == (4, 18) and torch.allclose(targets.kappa.value, torch.ones(4).double())
    network = SpectralPullbackNetwork(32, rank=9, width=32, heads=2).start_from(features, targets.singular_values)
    judge = SpnExamples(lambda rows: features[rows], targets.modes, targets.singular_values, targets.total.value)
    task = SpnTask(lambda rows: features[rows], 4, RandNLA(probe, signal_probes=0), judge, probe=probe)
    before = task.validate(network)["v1"]
    fitted = fit(network, task, FitConfig(steps=8, batch=4, learning_rate=1e-2, warmup=1, ema=0.1, validate_every=8))
    assert fitted.scores["v1"] > 2 * before


def test_an_importance_head_learns_from_the_camera_of_scenes():
    from pullback.learning.fit import FitConfig, fit
    from pullback.learning.train_head import HeadExamples, HeadTask, new_head
    from pullback.targets.recipe import targets_of

    probe = pb.load_probe(tiny(torch.float32).requires_grad_(False), "camera", 1)
    features = probe.features(scenes(4, VIEWS, 3, HEIGHT, WIDTH, dtype=torch.float32))
    importance = targets_of(probe, features, rank=17).importance
    examples = HeadExamples.kept(features, importance, prefix=probe.backbone.prefix)
    task = HeadTask([examples], examples)
    head = new_head(examples, width=32, heads=2)
    before = task.validate(head)["score"]
    fitted = fit(head, task, FitConfig(steps=30, batch=4, warmup=5, ema=0.5, validate_every=30))
    assert fitted.scores["score"] > max(before, 0.7)
