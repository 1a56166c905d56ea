"""Probes of VGGT: what of a tap follows, whose derivative the cameras have, and what does not fit.

That decoding their features is the network's own forward, and that products are derivatives, is in
tests/probes/test_law.py.
"""

from dataclasses import replace

import pytest
import torch

import pullback as pb
from helpers.vggt_models import REFERENCES, scenes, tiny
from pullback.decoders import Decoder
from pullback.errors import DecoderError, ImageError, ModelError, ShapeError
from pullback.operators import JacobianOperator
from pullback.vggt.decoders import point_pixels

HEIGHT, WIDTH, VIEWS = 28, 42, 2
# the network's own hooks are (0, 1, 2, 3); here layer 1 is none of them, and layers repeat
SPARSE = dict(depth=4, hook_layers=(0, 2, 2, 3))


@pytest.fixture(scope="module")
def model():
    return tiny().requires_grad_(False)


@pytest.fixture(scope="module")
def sparse():
    return tiny(**SPARSE).requires_grad_(False)


@pytest.fixture(scope="module")
def images():
    return scenes(2, VIEWS, 3, HEIGHT, WIDTH, seed=1)


def close(got, expected, tolerance=1e-9):
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


def noise(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def construction(model, images, layer, decoder):
    """F^layer and the decoder's output as a function of it, with the network's own seams."""
    trunk = model.aggregator
    state = trunk.advance(trunk.embed(images), layer)

    def function(tokens):
        return REFERENCES[decoder](model.decode(trunk.taps(replace(state, tokens=tokens)), state.layout))

    return state.tokens, function


@pytest.mark.parametrize("decoder", ["camera", "points", "depth-2x3"])
def test_taps_above_the_layer_follow_and_those_below_stay(sparse, images, decoder):
    for layer in range(4):
        tokens, function = construction(sparse, images, layer, decoder)
        probe = pb.load_probe(sparse, decoder, layer)
        features = probe.features(images)
        step = 0.1 * noise(*tokens.shape, seed=layer)
        close(features.as_subclass(torch.Tensor), tokens)
        close(probe(features + step), function(tokens + step))
        assert (probe(features + step) - probe(features)).norm() > 1e-3


def test_a_tap_of_the_probe_layer_follows_by_half_or_not_at_all(model, images):
    """Depth at the last layer: by default the global half of its tap follows, without `read_probe_layer` nothing."""
    step = noise(2, VIEWS * 9, 32)
    follows, stays = (pb.load_probe(model, "depth", 2, read_probe_layer=read) for read in (True, False))
    halves, wholes = follows.features(images), stays.features(images)
    assert halves.below[2].shape[-1] == 32 and wholes.below[2].shape[-1] == 64
    close(follows(halves), stays(wholes))
    assert (follows(halves + step) - stays(wholes + step)).norm() > 1e-3
    with pytest.raises(
        DecoderError, match=r"follows a change at layer 3\. Probe a lower layer, or set read_probe_layer"
    ):
        pb.load_probe(model, "depth", 3, read_probe_layer=False)
    with pytest.raises(DecoderError, match=r"follows a change at layer 3\. Probe a lower layer\.$"):
        pb.load_probe(tiny(hook_layers=(0, 1, 1, 2)), "depth", 3)


def probes_of(model, decoder):
    return [pb.load_probe(model, decoder, 1), pb.load_probe(model, decoder, 2), pb.multi_layer_probe(model, decoder)]


@pytest.mark.parametrize("decoder", ["camera", "points", "depth", "depth-2x3"])
def test_products_are_those_of_finite_differences_and_of_each_other(sparse, images, decoder):
    for probe in probes_of(sparse, decoder):
        features = probe.features(images)
        operator = JacobianOperator(probe, features)
        v, w = noise(2, operator.cols, 2, seed=1), noise(2, operator.rows, 2, seed=2)
        forward, reverse = operator @ v, operator.T @ w
        step = 1e-6 * v[..., 0].view(features.shape)
        difference = (probe(features + step) - probe(features - step)).flatten(1) / 2e-6
        assert (forward[..., 0] - difference).norm() < 1e-6 * difference.norm()
        close(w.mT @ forward, reverse.mT @ v)
        in_pieces = JacobianOperator(probe, features, chunk_size=1)
        close(in_pieces @ v, forward)
        close(in_pieces.T @ w, reverse)


def test_the_refinement_of_the_camera_has_the_derivative_that_was_chosen(model, images):
    """Same values; the exact one is that of finite differences (above), the official one that of the published code."""
    exact, official = (pb.load_probe(model, "camera", 1, pose_derivative=kind) for kind in ("exact", "official"))
    assert (exact.decoder.name, official.decoder.name) == ("camera", "camera (official derivative)")
    features = exact.features(images)
    close(official(features), exact(features), 1e-12)
    state = model.aggregator.advance(model.aggregator.embed(images), 1)

    def published(tokens):
        taps = model.aggregator.taps(replace(state, tokens=tokens))
        return model.decode(taps, state.layout, pose_derivative="official").pose_enc

    v = noise(2, features[0].numel(), 2)
    products = [JacobianOperator(probe, features) @ v for probe in (exact, official)]
    close(products[1], JacobianOperator(published, state.tokens) @ v)
    assert (products[0] - products[1]).norm() > 0.1 * products[0].norm()
    at_the_head = pb.multi_layer_probe(model, "camera", pose_derivative="official")
    assert at_the_head.name == "VGGT camera (official derivative) taps [3]"


def test_scenes_do_not_mix_and_a_scene_alone_is_a_batch_of_one(model, images):
    probe = pb.load_probe(model, "camera", 1)
    both, alone = probe.features(images), probe.features(images[1])
    assert alone.shape == (1, *both.shape[1:])
    close(alone.as_subclass(torch.Tensor), both[1:].as_subclass(torch.Tensor))
    close(probe(both[[1, 0]]), probe(both).flip(0))
    dense = JacobianOperator(probe, both).dense()
    close(JacobianOperator(probe, alone).dense(), dense[1:])


def test_points_are_read_in_turn_from_all_views_and_spread_over_each():
    assert torch.equal(point_pixels(64, 2, 28, 42), point_pixels(64, 2, 28, 42))
    for views in (1, 2, 3, 5):
        pixels = point_pixels(64, views, 224, 224)
        view, row, column = pixels // 224**2, pixels % 224**2 // 224, pixels % 224
        assert len(set(pixels.tolist())) == 64 and pixels.max() < views * 224**2
        assert torch.equal(view, torch.arange(64) % views)
        quarters = torch.bincount(4 * view + 2 * (row >= 112) + (column >= 112), minlength=4 * views)
        assert quarters.min() >= 64 // views // 4 - 3, "every quarter of every view has about its share"


def test_a_metric_of_the_output_stands_in_front_of_the_jacobian(model, images):
    plain = pb.load_probe(model, "camera", 1)
    features = plain.features(images)
    jacobian = JacobianOperator(plain, features)
    factor = noise(18, 5, seed=3)
    for probe in (plain, pb.multi_layer_probe(model, "camera")):
        at = probe.features(images)
        dense = JacobianOperator(probe, at).dense()
        weighted = JacobianOperator(replace(probe, output_metric=factor), at)
        close(weighted.dense(), factor.mT @ dense)
        close(weighted @ noise(2, weighted.cols, 1), factor.mT @ dense @ noise(2, weighted.cols, 1))
    assert torch.equal(replace(plain, output_metric=factor)(features), plain(features))
    assert jacobian.output.shape == (2, 18)


def test_a_task_distance_comes_before_the_derivative(model, images):
    plain, silog = (pb.load_probe(model, "depth-2x3", 1, distance=distance) for distance in (None, "silog"))
    logs = plain(plain.features(images)).flatten(1).log()
    close(silog(silog.features(images)), (logs - logs.mean(1, keepdim=True)) / logs.shape[1] ** 0.5)


def test_a_decoder_of_ones_own_reads_the_taps(model, images):
    own = Decoder("mean tap", (1, 3), lambda taps, layout: torch.cat([tap.mean(1) for tap in taps], -1), normed=False)
    probe = pb.load_probe(model, own, 1)
    taps = model.aggregator(images)
    expected = torch.cat([taps[layer].flatten(1, 2).mean(1) for layer in (1, 3)], -1)
    close(probe(probe.features(images)), expected)


def test_the_same_probe_from_a_folder_a_file_and_the_module(model, images, tmp_path):
    folder = model.save_pretrained(tmp_path / "small")
    expected = pb.load_probe(model, "camera", 1)
    for where in (folder, str(folder), folder / "model.safetensors"):
        probe = pb.load_probe(where, "camera", 1, device="cpu", dtype=torch.float64)
        assert isinstance(probe, pb.ProbeMap) and probe.backbone.family == "vggt"
        close(probe(probe.features(images)), expected(expected.features(images)))
    assert pb.multi_layer_probe(folder, device="cpu").at == "inputs"
    assert pb.load_probe(model).name == "VGGT camera L02", "cameras by default, at the last but one"


def test_views_are_loaded_as_the_network_wants_them(model, tmp_path):
    from PIL import Image

    for index in range(3):
        Image.new("RGB", (56, 42), (index, 0, 0)).save(tmp_path / f"{index}.png")
    loaded = pb.load_probe(model, "camera", 1).load_views(tmp_path)
    assert loaded.shape == (1, 3, 3, 42, 56)
    assert pb.load_probe(model, "camera", 1).load_views(tmp_path, size=28).shape == (1, 3, 3, 28, 28)


def test_memory_is_planned_for_the_widest_moment_of_a_product(model, images):
    def planned(decoder, scenes):
        probe = pb.load_probe(model, decoder, 1)
        return JacobianOperator(probe, probe.features(scenes)).linearization.bytes_per_tangent

    assert planned("camera", images) == 2 * planned("camera", images[:1])
    assert planned("depth", images) == planned("points", images) > 4 * planned("camera", images)


def test_no_tensor_inside_a_product_outgrows_the_kernels(model, images, monkeypatch):
    probe = pb.load_probe(model, "depth", 1)
    features = probe.features(images)
    whole = JacobianOperator(probe, features)
    largest = 2 * 2 * 6 * 16 * 14**2 // 2  # scenes, views, patches, channels, pixels of a patch (half the channels)
    monkeypatch.setattr("pullback.vggt.backbone.MAX_ELEMENTS", 2 * largest)
    limited = JacobianOperator(probe, features)
    assert limited.linearization._most == 2
    v, w = noise(2, whole.cols, 5), noise(2, whole.rows, 5)
    close(limited @ v, whole @ v)
    close(limited.T @ w, whole.T @ w)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(decoder="cls"), r"decoder: expected one of camera, .* or a Decoder of the taps, for VGGT, got 'cls'"),
        (dict(decoder="depth-0x3"), "decoder: expected one of"),
        (dict(decoder="points-0"), "decoder: expected one of"),
        (dict(decoder="camera", pose_derivative="detached"), "pose_derivative: expected 'exact' .* got 'detached'"),
    ],
)
def test_unknown_choices_are_refused(model, options, message):
    with pytest.raises(DecoderError, match=message):
        pb.load_probe(model, **options)


def test_what_does_not_fit_is_refused_with_the_reason(model, images):
    with pytest.raises(ModelError, match=r"layer: expected a layer of the aggregator from 0 to 3 .* got 4"):
        pb.load_probe(model, "camera", 4)
    with pytest.raises(DecoderError, match="was built without its point head"):
        pb.load_probe(tiny(heads=("camera",)), "points", 1)
    with pytest.raises(ModelError, match="model: expected evaluation mode"):
        pb.load_probe(tiny().train(), "camera", 1)
    for other, decoder in (("tiny-scenes", "cls"), (model, "depth"), (model, pb.load_probe(model).decoder)):
        with pytest.raises(DecoderError, match="pose_derivative: only the cameras of a VGGT have a choice"):
            pb.load_probe(other, decoder, pose_derivative="official", device="cpu")
    points = pb.load_probe(model, "points-9999", 1)
    with pytest.raises(
        DecoderError, match=r"decoder: 'points-9999' asks for more points than the \d views have pixels"
    ):
        points(points.features(images))
    cells = pb.load_probe(model, "depth-99x3", 1)
    with pytest.raises(DecoderError, match=r"decoder: 'depth-99x3' averages a depth map down .* Use 'depth'"):
        cells(cells.features(images))
    probe = pb.load_probe(model, "camera", 1)
    with pytest.raises(pb.PullbackError, match=r"whose samples are scenes of several views\. Take targets_of"):
        pb.compute_targets(probe, [__file__], out="targets")
    with pytest.raises(ImageError, match=r"one scene \[S, 3, H, W\] or several"):
        probe.features(images[0, 0])
    features = probe.features(images)
    with pytest.raises(ShapeError, match="keep the layout of the views"):
        probe(features.as_subclass(torch.Tensor))
    with pytest.raises(ShapeError, match=r"features: expected \[B, N, 32\], got \[2, 18, 31\]"):
        probe(features[..., :31])
    with pytest.raises(ShapeError, match=r"decoder 'depth' also reads layers \[0, 1\]"):
        pb.load_probe(model, "depth", 1)(features)
    with pytest.raises(DecoderError, match="'camera-5' needs at least 6 views, got scenes of 2"):
        pb.load_probe(model, "camera-5", 1)(features)


def test_a_probe_of_the_taps_takes_what_a_probe_of_a_layer_does(model, images):
    metric = pb.CameraMetric()
    probe = pb.multi_layer_probe(model, "camera", output_metric=metric, pose_derivative="official")
    assert probe == pb.multi_layer_probe(model, probe.decoder, output_metric=metric)
    assert probe.decoder.name == "camera (official derivative)"
    assert JacobianOperator(probe, probe.features(images)).rows == 8 * VIEWS
    for options, message in (
        (dict(pose_derivative="official"), "pose_derivative: only the cameras of a VGGT have a choice"),
        (dict(output_metric=metric), "output_metric: CameraMetric is about pose encodings, .* got decoder 'depth'"),
    ):
        with pytest.raises(DecoderError, match=message):
            pb.multi_layer_probe("tiny-scenes", "depth", device="cpu", **options)


def test_layers_are_counted_of_probes_of_several_layers_alone(model, images):
    with pytest.raises(
        pb.PullbackError, match=r"got VGGT camera L01, whose features are of one layer\. Use multi_layer"
    ):
        pb.layer_multiplicity(pb.load_probe(model, "camera", 1), images)


@pytest.fixture(scope="module")
def single():
    return tiny(torch.float32).requires_grad_(False)


@pytest.mark.parametrize("decoder", ["camera", "points-5", "depth-2x3"])
def test_autocast_reaches_neither_heads_nor_products(single, images, decoder):
    """Features may be made in half precision; what is done with them is that of their own, and J^T that of J."""
    views = images.float()
    for probe in (pb.load_probe(single, decoder, 1), pb.multi_layer_probe(single, decoder)):
        exact, features = pb.spectrum(probe, views, rank=3), probe.features(views)
        operator = JacobianOperator(probe, features)
        v, w = noise(2, operator.cols, 2).float(), noise(2, operator.rows, 2).float()
        value, forward, reverse = probe(features), operator @ v, operator.T @ w
        with torch.autocast("cpu", torch.bfloat16):
            rounded = probe.features(views)
            assert 1e-5 < (rounded - features).norm() / features.norm() < 0.05
            found = probe(features)
            assert found.dtype == torch.float32 and torch.equal(found, value)
            operator = JacobianOperator(probe, features)
            assert torch.equal(operator @ v, forward) and torch.equal(operator.T @ w, reverse)
            close(pb.spectrum(probe, views, rank=3).singular_values, exact.singular_values, 0.05)
    taps = [tap.flatten(1, 2) for tap in single.aggregator(views).values()]
    with torch.autocast("cpu", torch.bfloat16):
        own = probe.decoder
        read = [taps[layer] for layer in own.layers]
        assert own.decode(read, single.aggregator.token_layout(views)).dtype == torch.float32
