"""Decoders that read several layers: those above the probe follow, those below stay; and the multi-layer probe."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import pullback as pb
from helpers.families import DOWNSAMPLED, images_for, model_of, random_normal
from pullback.decoders import Decoder
from pullback.errors import DecoderError, ShapeError
from pullback.operators import JacobianOperator
from pullback.probes import ProbeMap

GRID = (2, 3)


def close(actual, expected) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9 * float(expected.abs().max()))


def dense_by_autograd(function, point: torch.Tensor) -> torch.Tensor:
    """[B, M, n] from one backward pass per output."""
    point = point.clone().requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):
        output = function(point).flatten(1)
        rows = [torch.autograd.grad(output[:, i].sum(), point, retain_graph=True)[0] for i in range(output.shape[1])]
    return torch.stack(rows, 1).flatten(2)


def construction(name: str, images: torch.Tensor, layer: int, read_probe_layer: bool):
    """F^layer and the averaged depth map as a function of it, written with the model's own neck and head."""
    model = model_of(name)
    backbone = pb.load_probe(model, "depth", 0).backbone
    hooks = [index - 1 for index in model.backbone.config.out_indices]
    normed = backbone.norm if model.backbone.config.apply_layernorm else (lambda tokens: tokens)
    fixed = {at: backbone.features(images, [at])[at].detach() for at in (*hooks, layer)}

    def function(tokens: torch.Tensor) -> torch.Tensor:
        read = []
        for hook in hooks:
            if hook > layer:
                read.append(backbone.run(tokens, layer + 1, hook + 1))
            elif hook == layer and read_probe_layer:
                read.append(tokens)
            else:
                read.append(fixed[hook])
        depth = model.head(model.neck([normed(tokens) for tokens in read], *GRID), *GRID)
        return F.adaptive_avg_pool2d(depth, (3, 4))

    return fixed[layer], function


@pytest.mark.parametrize("read_probe_layer", [True, False])
@pytest.mark.parametrize("name", ["depth-v1", "depth-v2", "depth-raw-hooks"])
def test_layers_above_the_probe_follow_and_layers_below_stay(name, read_probe_layer):
    images = images_for(name, GRID)
    for layer in range(5 if read_probe_layer else 4):
        tokens, function = construction(name, images, layer, read_probe_layer)
        probe = pb.load_probe(model_of(name), DOWNSAMPLED, layer, read_probe_layer=read_probe_layer)
        features = probe.features(images)
        close(features.as_subclass(torch.Tensor), tokens)
        close(probe(features), function(tokens))
        operator, expected = JacobianOperator(probe, features), dense_by_autograd(function, tokens)
        v, w = random_normal(2, operator.cols, 3), random_normal(2, operator.rows, 3)
        close(operator @ v, expected @ v)
        close(operator.T @ w, expected.mT @ w)


def test_the_probe_layer_is_read_unless_told_otherwise():
    probe = pb.load_probe(model_of("depth-v2"), DOWNSAMPLED, 1)
    assert probe.read_probe_layer
    features = probe.features(images_for("depth-v2", GRID))
    without = pb.load_probe(model_of("depth-v2"), DOWNSAMPLED, 1, read_probe_layer=False)
    kept = without.features(images_for("depth-v2", GRID))
    assert sorted(features.below) == [0] and sorted(kept.below) == [0, 1]
    step = random_normal(*features.shape)
    assert not torch.allclose(probe(features + step), without(kept + step))


def test_a_probe_that_nothing_follows_is_refused():
    message = r"layer: nothing that decoder 'depth' reads \(layers \[0, 1, 3, 4\]\) follows a change at layer 4"
    with pytest.raises(DecoderError, match=message + ".*or set read_probe_layer=True"):
        pb.load_probe(model_of("depth-v2"), "depth", 4, read_probe_layer=False)
    early = Decoder("early", (0, 1), lambda taps, layout: taps[0] + taps[1])
    with pytest.raises(DecoderError, match=r"nothing that decoder 'early' reads .* Probe a lower layer\.$"):
        ProbeMap(pb.load_probe(model_of("dinov2"), "cls", 0).backbone, early, 2)


@pytest.mark.parametrize("layers", [(2, 0, 1), (2, 2, 1), (1, 0)])
def test_a_decoder_may_read_layers_in_any_order_and_twice(layers):
    mixing = [random_normal(24, 3, seed=seed) for seed in range(len(layers))]

    def decode(taps, layout):
        return sum((tap.sin() @ mix).sum(1) for tap, mix in zip(taps, mixing, strict=True))

    backbone, images = pb.load_probe(model_of("dinov2"), "cls", 0).backbone, images_for("dinov2", GRID)
    tokens = backbone.features(images, [0, 1, 2])
    expected = decode([backbone.norm(tokens[layer]) for layer in layers], None)
    for layer in range(max(layers) + 1):
        probe = ProbeMap(backbone, Decoder("mixed", layers, decode), layer)
        features = probe.features(images)
        close(probe(features), expected)
        operator = JacobianOperator(probe, features)
        close(operator.output, expected)
        dense = dense_by_autograd(probe.bind(features), features.as_subclass(torch.Tensor))
        close(operator.dense(), dense)


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("rows", [1, None])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_linear_decoder_of_several_layers_keeps_those_below_out_of_the_products(layer, rows, samples):
    def decode(taps, layout):
        return taps[0][:, 0] + 2 * taps[1][:, 0]

    backbone, images = pb.load_probe(model_of("dinov2"), "cls", 0).backbone, images_for("dinov2", GRID)[:samples]
    probe = ProbeMap(backbone, Decoder("sum", (0, 2), decode, rows=rows, linear=True), layer)
    features = probe.features(images)
    operator = JacobianOperator(probe, features)
    expected = dense_by_autograd(probe.bind(features), features.as_subclass(torch.Tensor))
    v, w = random_normal(samples, operator.cols, 3), random_normal(samples, operator.rows, 3)
    close(operator @ v, expected @ v)
    close(operator.T @ w, expected.mT @ w)


def test_a_decoder_of_layers_that_the_backbone_does_not_have_is_refused():
    backbone = pb.load_probe(model_of("dinov2"), "cls", 0).backbone
    message = r"decoder: 'far' reads a layer that is not there. layer: expected a block index from 0 to 2 .* got 7"
    with pytest.raises(DecoderError, match=message):
        ProbeMap(backbone, Decoder("far", (1, 7), lambda taps, layout: taps[0]), 0)


@pytest.mark.parametrize("after_norm", [True, False])
@pytest.mark.parametrize("grid", [GRID, (3, 3)], ids=lambda grid: f"{grid[0]}x{grid[1]}")
@pytest.mark.parametrize("name", ["depth-v1", "depth-v2-metric", "depth-raw-hooks"])
def test_the_multi_layer_probe_decodes_to_the_models_own_forward(name, grid, after_norm):
    probe, images = pb.multi_layer_probe(model_of(name), after_norm=after_norm), images_for(name, grid)
    features = probe.features(images)
    assert features.shape == (2, 1 + grid[0] * grid[1], 4 * 24)
    with torch.no_grad():
        expected = model_of(name)(images).predicted_depth
    close(probe(features), expected)
    close(probe(features[1:]), expected[1:])


@pytest.mark.parametrize("after_norm", [True, False])
@pytest.mark.parametrize("name", ["depth-v2", "depth-raw-hooks"])
def test_the_multi_layer_probe_has_the_jacobian_of_neck_and_head(name, after_norm):
    model = model_of(name)
    probe = pb.multi_layer_probe(model, DOWNSAMPLED, after_norm=after_norm)
    features = probe.features(images_for(name, GRID))
    inside = probe.backbone.norm if probe.backbone.hooks_normed and not after_norm else (lambda tokens: tokens)

    def function(joined: torch.Tensor) -> torch.Tensor:
        taps = [inside(joined[..., 24 * i : 24 * (i + 1)]) for i in range(4)]
        return F.adaptive_avg_pool2d(model.head(model.neck(taps, *GRID), *GRID), (3, 4))

    operator = JacobianOperator(probe, features)
    expected = dense_by_autograd(function, features.as_subclass(torch.Tensor))
    v, w = random_normal(2, operator.cols, 3), random_normal(2, operator.rows, 3)
    close(operator @ v, expected @ v)
    close(operator.T @ w, expected.mT @ w)


def test_where_the_multi_layer_probe_sits_is_in_its_name():
    probe = pb.multi_layer_probe(model_of("depth-v2"))
    assert probe.layers == (0, 1, 3, 4) and probe.layer == "hooks"
    assert probe.name == "DepthAnythingForDepthEstimation depth layers [0, 1, 3, 4] after the norm"
    assert "before the norm" in pb.multi_layer_probe(model_of("depth-v2"), after_norm=False).name


def test_the_multi_layer_probe_takes_a_task_distance():
    plain, silog = (pb.multi_layer_probe(model_of("depth-v2-metric"), distance=d) for d in (None, "silog"))
    features = plain.features(images_for("depth-v2", GRID))
    logs = plain(features).flatten(1).log()
    torch.testing.assert_close(silog(features), (logs - logs.mean(1, keepdim=True)) / logs.shape[1] ** 0.5)


def test_the_multi_layer_probe_names_a_wrong_shape():
    probe = pb.multi_layer_probe(model_of("depth-v2"))
    features = probe.features(images_for("depth-v2", GRID))
    for wrong in (features[..., :24], features[0]):
        with pytest.raises(ShapeError, match=r"features: expected \[B, N, 96\], got"):
            probe(wrong)
