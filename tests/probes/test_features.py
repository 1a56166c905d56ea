"""Features keep what the probe needs besides them exactly as long as that still belongs to them."""

import pytest
import torch

import pullback as pb
from helpers.families import images_for, model_of, random_normal
from pullback.errors import ShapeError
from pullback.operators import differentiable_attention
from pullback.probes import Features
from pullback.tokens import TokenLayout, between


@pytest.fixture
def probe():
    """Depth read from layers 0, 1, 3, 4 and probed at 2: layers 0 and 1 must come along."""
    return pb.load_probe(model_of("depth-v2"), "depth", 2)


@pytest.fixture
def features(probe):
    return probe.features(images_for("depth-v2", (2, 3), batch=3))


KEEP = {
    "a step": lambda f: f + 1e-3 * random_normal(*f.shape),
    "a step from the left": lambda f: random_normal(*f.shape) + f,
    "a difference": lambda f: f - 0.5 * f,
    "an interpolation": lambda f: torch.lerp(f, f + 1, 0.3),
    "scaling": lambda f: 2 * f / 3,
    "negation": lambda f: -f,
    "a copy": lambda f: f.clone(),
    "detaching": lambda f: f.detach(),
    "a gradient": lambda f: f.clone().requires_grad_(),
    "an addition in place": lambda f: f.clone().add_(1),
    "an augmented assignment": lambda f: f.clone().__iadd__(1),
    "the same dtype": lambda f: f.double(),
    "the same device": lambda f: f.to("cpu"),
}


@pytest.mark.parametrize("change", KEEP.values(), ids=KEEP.keys())
def test_arithmetic_keeps_the_constants(probe, features, change):
    changed = change(features)
    assert isinstance(changed, Features) and changed.token_layout == TokenLayout(1, (2, 3))
    assert sorted(changed.below) == [0, 1]
    for layer in (0, 1):
        torch.testing.assert_close(changed.below[layer], features.below[layer])
    assert torch.isfinite(probe(changed)).all()


def test_on_the_way_to_other_features_the_constants_of_the_first_stay(probe, features):
    other = probe.features(images_for("depth-v2", (2, 3), batch=3, seed=1))
    between = features + 0.3 * (other - features)
    assert torch.equal(between.below[0], features.below[0])


PICKS = {
    "a slice": (lambda f: f[:1], [0]),
    "a list": (lambda f: f[[1, 0]], [1, 0]),
    "a tensor": (lambda f: f[torch.tensor([2, 2, 0])], [2, 2, 0]),
    "a mask": (lambda f: f[torch.tensor([True, False, True])], [0, 2]),
    "a slice with the other axes whole": (lambda f: f[1:, :, :], [1, 2]),
    "everything": (lambda f: f[:], [0, 1, 2]),
    "a slice of a slice": (lambda f: f[1:][:1], [1]),
}


@pytest.mark.parametrize(("pick", "rows"), PICKS.values(), ids=PICKS.keys())
def test_picking_samples_picks_their_constants(probe, features, pick, rows):
    picked = pick(features)
    for layer in (0, 1):
        assert torch.equal(picked.below[layer], features.below[layer][rows])
    torch.testing.assert_close(probe(picked), probe(features)[rows])


def test_another_dtype_takes_the_constants_along(features):
    for single in (features.float(), features.to(torch.float32), features.to(dtype=torch.float32)):
        assert single.dtype == single.below[0].dtype == torch.float32
    assert features.below[0].dtype == torch.float64


LOSE = {
    "a mean over tokens": lambda f: f.mean(1),
    "fewer tokens": lambda f: f[:, :5],
    "permuted tokens": lambda f: f[:, torch.arange(7).flip(0)],
    "one token": lambda f: f[:, 0],
    "one sample without its axis": lambda f: f[0],
    "flipped samples": lambda f: f.flip(0),
    "rolled tokens": lambda f: f.roll(1, 1),
    "sorted tokens": lambda f: f.sort(1).values,
    "samples by index_select": lambda f: f.index_select(0, torch.tensor([2, 1, 0])),
    "samples side by side": lambda f: torch.cat([f, f]),
    "flattening": lambda f: f.flatten(1),
    "a question": lambda f: torch.isfinite(f),
}


@pytest.mark.parametrize("change", LOSE.values(), ids=LOSE.keys())
def test_anything_else_gives_a_plain_tensor(features, change):
    assert type(change(features)) is torch.Tensor


@pytest.mark.parametrize("change", ["permuted tokens", "flipped samples", "samples side by side"])
def test_a_probe_says_when_the_constants_are_lost(probe, features, change):
    message = r"features: decoder 'depth' also reads layers \[0, 1\], which these features do not carry"
    for use in (probe, probe.bind, probe.linearize):
        with pytest.raises(ShapeError, match=message):
            use(LOSE[change](features))


@pytest.mark.parametrize("change", ["a mean over tokens", "one sample without its axis"])
def test_a_probe_says_when_the_shape_is_wrong(probe, features, change):
    with pytest.raises(ShapeError, match=r"features: expected \[B, N, 24\], got"):
        probe(LOSE[change](features))


def test_a_plain_square_map_needs_nothing_attached():
    probe = pb.load_probe(model_of("dinov2"), "cls", 1)
    features = probe.features(images_for("dinov2", (3, 3)))
    assert type(features) is torch.Tensor
    assert probe.token_layout(features) == TokenLayout(1, (3, 3))


def test_a_plain_map_of_unknown_shape_is_refused():
    probe = pb.load_probe(model_of("dinov2"), "mean", 1)
    features = probe.features(images_for("dinov2", (2, 3)))
    assert probe.token_layout(features) == TokenLayout(1, (2, 3))
    with pytest.raises(ShapeError, match="features: 7 tokens with 1 prefix tokens do not make a square grid"):
        probe(features.as_subclass(torch.Tensor))


def test_many_images_are_embedded_in_batches(monkeypatch):
    import pullback.probes.probe as module

    probe, images = pb.load_probe(model_of("depth-v2"), "depth", 2), images_for("depth-v2", (2, 3), batch=5)
    whole = probe.features(images)
    monkeypatch.setattr(module, "FEATURE_BATCH", 2)
    parts = probe.features(images)
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(parts.below[0], whole.below[0])


def test_a_gradient_reaches_the_features(probe, features):
    leaf = features.clone().requires_grad_()
    probe(leaf).sum().backward()
    assert leaf.is_leaf and leaf.grad.abs().max() > 0


def test_the_ends_of_a_segment_give_the_outputs_of_the_two_images(probe, features):
    other = probe.features(images_for("depth-v2", (2, 3), batch=3, seed=1))
    assert torch.equal(probe(between(features, other, 0.0)), probe(features))
    assert torch.equal(probe(between(features, other, 1.0)), probe(other))
    middle = between(features, other, torch.tensor([0.0, 0.5, 1.0]))
    torch.testing.assert_close(middle.below[1][1], (features.below[1][1] + other.below[1][1]) / 2)
    torch.testing.assert_close(probe(middle)[[0, 2]], torch.stack([probe(features)[0], probe(other)[2]]))


def test_the_output_along_a_segment_is_differentiable_in_its_parameter(probe, features):
    other = probe.features(images_for("depth-v2", (2, 3), batch=3, seed=1))

    def output(t: torch.Tensor) -> torch.Tensor:
        return probe(between(features, other, t))

    t, step = torch.tensor([0.2, 0.5, 0.9], dtype=torch.float64), 1e-6
    with differentiable_attention():
        slope = torch.func.jvp(output, (t,), (torch.ones_like(t),))[1]
    torch.testing.assert_close(slope, (output(t + step) - output(t - step)) / (2 * step), rtol=1e-5, atol=1e-7)


def test_plain_features_have_a_plain_point_between_them():
    first, second = random_normal(2, 3, 4, 5)
    point = between(first, second, torch.tensor([0.25, 1.0, 0.0]))
    assert type(point) is torch.Tensor
    torch.testing.assert_close(point[0], 0.75 * first[0] + 0.25 * second[0])
    assert torch.equal(point[1], second[1]) and torch.equal(point[2], first[2])


def test_a_segment_between_features_that_carry_different_things_is_refused(probe, features):
    with pytest.raises(ShapeError, match=r"first, second: expected features of one shape \[B, N, D\], got \[3, 7, "):
        between(features, features[:2], 0.5)
    with pytest.raises(ShapeError, match=r"first, second: expected features of one probe .* carry the same layers"):
        between(features, features.as_subclass(torch.Tensor), 0.5)
    turned = probe.features(images_for("depth-v2", (3, 2), batch=3))
    with pytest.raises(ShapeError, match=r"first, second: expected features of one probe and one size of images"):
        between(features, turned, 0.5)
