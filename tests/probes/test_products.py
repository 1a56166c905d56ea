"""Products of a probe's Jacobian against the dense Jacobian of the same map, for every family."""

import copy
from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import pullback as pb
import pullback.probes.probe as probe_module
from helpers.families import DOWNSAMPLED, SMALL_MODELS, images_for, model_of, random_normal
from pullback.backbones import LinearizedBlock
from pullback.operators import JacobianOperator, ProductCount

GRID = (2, 3)
# the full depth map has a thousand outputs; its average stands for it, and finite differences check the map itself
MATRIX = [(name, decoder) for name, small in SMALL_MODELS.items() for decoder in small.references if decoder != "depth"]


def dense_jacobian(probe, features) -> torch.Tensor:
    """[B, M, N*D], sample by sample, by reverse mode through the blocks' forward."""
    rows = []
    with sdpa_kernel(SDPBackend.MATH):
        for index in range(len(features)):
            sample = features[index : index + 1]
            function = probe.bind(sample)
            tokens = sample.as_subclass(torch.Tensor)
            rows.append(torch.func.jacrev(lambda x, function=function: function(x).flatten())(tokens).flatten(1))
    return torch.stack(rows)


def close(actual, expected) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9 * float(expected.abs().max()))


@pytest.mark.parametrize(("name", "decoder"), MATRIX)
def test_both_products_are_those_of_the_dense_jacobian(name, decoder):
    depth = SMALL_MODELS[name].depth
    for layer in sorted({0, depth // 2, depth - 1}):
        probe = pb.load_probe(model_of(name), decoder, layer)
        features = probe.features(images_for(name, GRID))
        operator, expected = JacobianOperator(probe, features), dense_jacobian(probe, features)
        assert operator.shape == expected.shape
        v, w = random_normal(2, operator.cols, 3), random_normal(2, operator.rows, 3)
        close(operator @ v, expected @ v)
        close(operator.T @ w, expected.mT @ w)
        close((w * (operator @ v)).sum((1, 2)), ((operator.T @ w) * v).sum((1, 2)))
        close(operator.output, probe(features).flatten(1))


@pytest.mark.parametrize("name", [name for name, small in SMALL_MODELS.items() if "depth" in small.references])
@pytest.mark.parametrize("layer", [0, 2, 4])
def test_the_full_depth_map_moves_as_finite_differences_say(name, layer):
    probe = pb.load_probe(model_of(name), "depth", layer)
    features = probe.features(images_for(name, GRID))
    operator = JacobianOperator(probe, features)
    direction, step = random_normal(*features.shape), 1e-6
    moved = (probe(features + step * direction) - probe(features - step * direction)).flatten(1) / (2 * step)
    product = (operator @ direction.flatten(1)[..., None])[..., 0]
    assert product.abs().max() > 1e-3
    torch.testing.assert_close(product, moved, rtol=1e-5, atol=1e-6 * float(product.abs().max()))


CASES = [("dinov2", "cls", 0), ("dinov3", "mean", 1), ("siglip", "pool", 0), ("depth-v1", DOWNSAMPLED, 2)]


@pytest.fixture(params=CASES, ids=lambda case: "-".join(map(str, case)))
def case(request):
    name, decoder, layer = request.param
    probe = pb.load_probe(model_of(name), decoder, layer)
    return probe, probe.features(images_for(name, GRID))


def test_a_batch_equals_its_samples_one_by_one(case):
    probe, features = case
    both = JacobianOperator(probe, features)
    v, w = random_normal(2, both.cols, 3), random_normal(2, both.rows, 3)
    for index in range(2):
        single = JacobianOperator(probe, features[index : index + 1])
        close(single @ v[index], (both @ v)[index])
        close(single.T @ w[index], (both.T @ w)[index])
        close(single @ v[index, :, 0], (both @ v)[index, :, 0])


def test_any_chunk_size_gives_the_same_products(case):
    probe, features = case
    whole = JacobianOperator(probe, features, chunk_size=1000)
    v, w = random_normal(2, whole.cols, 5), random_normal(2, whole.rows, 5)
    for size in (1, 2, None):
        chunked = JacobianOperator(probe, features, chunk_size=size)
        close(chunked @ v, whole @ v)
        close(chunked.T @ w, whole.T @ w)
        assert chunked.products == ProductCount(5, 5)


def test_no_product_carries_a_graph(case):
    probe, features = case
    operator = JacobianOperator(probe, features)
    assert not features.requires_grad and not operator.output.requires_grad
    assert not (operator @ random_normal(2, operator.cols, 1)).requires_grad
    assert not (operator.T @ random_normal(2, operator.rows, 1)).requires_grad


@pytest.mark.parametrize(("name", "decoder"), [("clip", "projection"), ("dinov2", "mean"), ("vit", "pool")])
def test_no_product_carries_a_graph_when_the_model_is_not_frozen(name, decoder):
    model = copy.deepcopy(model_of(name)).requires_grad_(True)
    probe = pb.load_probe(model, decoder, 0)
    features = probe.features(images_for(name, GRID))
    frozen = JacobianOperator(pb.load_probe(model_of(name), decoder, 0), features)
    operator = JacobianOperator(probe, features)
    v, w = random_normal(2, operator.cols, 2), random_normal(2, operator.rows, 2)
    assert not operator.output.requires_grad
    for got, expected in ((operator @ v, frozen @ v), (operator.T @ w, frozen.T @ w)):
        assert not got.requires_grad
        close(got, expected)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_features_of_inference_mode_can_be_probed(case):
    probe, features = case
    with torch.inference_mode():
        frozen = features + 0
    operator, expected = JacobianOperator(probe, frozen), JacobianOperator(probe, features)
    v, w = random_normal(2, operator.cols, 2), random_normal(2, operator.rows, 2)
    close(operator @ v, expected @ v)
    close(operator.T @ w, expected.T @ w)


def test_products_are_plain_tensors(case):
    probe, features = case
    operator = JacobianOperator(probe, features)
    tangent = (features * 1.5).flatten(1)[..., None]
    assert type(operator @ tangent) is torch.Tensor
    assert type(operator.T @ operator.output[..., None]) is torch.Tensor
    assert type(operator.output) is type(probe(features)) is torch.Tensor


@pytest.mark.parametrize(
    ("name", "decoder"), [("dinov2", "cls"), ("dinov3", "cls"), ("clip", "projection"), ("vit", "pool")]
)
def test_a_class_token_decoder_computes_one_row_of_the_last_block_and_loses_nothing(name, decoder, monkeypatch):
    built = []

    class Recorded(LinearizedBlock):
        def __init__(self, *arguments) -> None:
            super().__init__(*arguments)
            built.append(self.output.shape[1])

    monkeypatch.setattr(probe_module, "LinearizedBlock", Recorded)
    probe = pb.load_probe(model_of(name), decoder, 0)
    features = probe.features(images_for(name, GRID))
    restricted = JacobianOperator(probe, features)
    tokens = features.shape[1]
    assert built == [tokens, 1], "all tokens are keys of the last block, one is a query"
    full = JacobianOperator(replace(probe, decoder=replace(probe.decoder, rows=None)), features)
    assert built[2:] == [tokens, tokens]
    v, w = random_normal(2, full.cols, 3), random_normal(2, full.rows, 3)
    close(restricted @ v, full @ v)
    close(restricted.T @ w, full.T @ w)
    close(probe(features), full.output)


def test_a_user_may_choose_float32(case):
    probe, features = case
    model = probe.backbone.model
    single = pb.load_probe(type(model)(model.config).eval(), probe.decoder.name, probe.layer)
    single.backbone.model.load_state_dict(model.state_dict())
    low, high = JacobianOperator(single, features.float()), JacobianOperator(probe, features)
    v = random_normal(2, high.cols, 3)
    assert (low @ v).dtype == torch.float32
    error = ((low @ v).double() - high @ v).norm() / (high @ v).norm()
    assert 0 < error < 1e-5
