"""Derivatives of the heads with respect to the tokens of a layer, in float64, against finite differences.

The camera head refines its pose in rounds. With ``derivative="exact"`` autograd goes through all of them; with
"official" it sees the last correction alone, as the published code that detaches the pose in between: the same values,
and a Jacobian that is not the derivative of the output.
"""

from dataclasses import replace

import pytest
import torch

from helpers.vggt_models import scenes, tiny
from pullback.errors import ModelError
from pullback.operators import JacobianOperator
from pullback.operators.linearization import differentiable_attention

LAYER = 1


@pytest.fixture(scope="module")
def model():
    return tiny().requires_grad_(False)


@pytest.fixture(scope="module")
def state(model):
    return model.aggregator.advance(model.aggregator.embed(scenes(1, 2, 3, 28, 28, seed=3)), LAYER)


@pytest.fixture(scope="module")
def tap(model, state):
    return model.aggregator.taps(state)[3]


def direction(like, seed=0):
    return torch.randn(like.shape, dtype=like.dtype, generator=torch.Generator().manual_seed(seed))


def jvp(function, point, tangent):
    with differentiable_attention():
        return torch.func.jvp(function, (point,), (tangent,))[1]


def vjp(function, point, cotangent):
    with differentiable_attention():
        return torch.func.vjp(function, point)[1](cotangent)[0]


def finite_difference(function, point, tangent, step=1e-6):
    return (function(point + step * tangent) - function(point - step * tangent)) / (2 * step)


def relative(got, expected):
    return ((got - expected).norm() / expected.norm()).item()


def test_the_exact_derivative_of_the_camera_is_that_of_finite_differences(model, tap):
    for index in range(model.config.camera_iterations):

        def pose(x, index=index):
            return model.camera_head(x, derivative="exact")[index]

        v = direction(tap, index)
        assert relative(jvp(pose, tap, v), finite_difference(pose, tap, v)) < 1e-7


def test_the_official_derivative_is_that_of_the_last_correction_alone(model, tap):
    head, v = model.camera_head, direction(tap)
    exact, official = (lambda x, kind=kind: head.rounds(x, derivative=kind)[-1] for kind in ("exact", "official"))
    torch.testing.assert_close(official(tap), exact(tap), rtol=0, atol=0)

    before = head.rounds(tap)[-2]
    correction = jvp(lambda x: head._correction(head.token_norm(x[:, :, 0]), before), tap, v)
    truth = finite_difference(exact, tap, v)
    assert relative(jvp(official, tap, v), correction) < 1e-12
    assert relative(jvp(official, tap, v), truth) > 0.1, "not the derivative of the output"
    # the first round has nothing before it
    first = [jvp(lambda x, kind=kind: head.rounds(x, derivative=kind)[0], tap, v) for kind in ("exact", "official")]
    torch.testing.assert_close(*first)


@pytest.mark.parametrize("kind", ["exact", "official"])
def test_forward_and_reverse_mode_agree_on_either_choice(model, tap, kind):
    def pose(x):
        return model.camera_head(x, derivative=kind)[-1]

    v, w = direction(tap, 1), direction(pose(tap), 2)
    torch.testing.assert_close((w * jvp(pose, tap, v)).sum(), (v * vjp(pose, tap, w)).sum(), rtol=1e-10, atol=1e-10)


def test_the_camera_depends_on_the_camera_tokens_of_all_views_and_on_nothing_else_of_the_tap(model, tap):
    def pose(x):
        return model.camera_head(x)[-1][:, 1]

    gradient = vjp(pose, tap, torch.ones_like(pose(tap)))
    assert (gradient[:, :, 0].abs().amax((0, 2)) > 1e-8).all()
    assert not gradient[:, :, 1:].any()


def test_an_unknown_choice_is_refused(model, tap):
    with pytest.raises(ModelError, match=r"derivative: expected 'exact' .* or 'official' .*, got 'detached'"):
        model.camera_head(tap, derivative="detached")


def probe(model, state, output):
    """One output of the network as a function of the tokens [B, N, C] of a layer."""
    return lambda x: model.decode(model.aggregator.taps(replace(state, tokens=x)), state.layout)[output]


OUTPUTS = ["pose_enc", "depth", "depth_conf", "world_points", "world_points_conf"]


@pytest.mark.parametrize("output", OUTPUTS)
def test_products_through_the_remaining_blocks_and_a_head_are_those_of_finite_differences(model, state, output):
    function, v = probe(model, state, output), direction(state.tokens, 4)
    product = jvp(function, state.tokens, v)
    assert product.norm() > 1e-3
    assert relative(product, finite_difference(function, state.tokens, v)) < 1e-6
    w = direction(product, 5)
    back = vjp(function, state.tokens, w)
    torch.testing.assert_close((w * product).sum(), (v * back).sum(), rtol=1e-9, atol=1e-9)


def test_the_jacobian_operator_multiplies_with_a_block_of_directions(model, state):
    """Through vmap, and with the camera's rank of at most 9 per view."""
    function = probe(model, state, "pose_enc")
    operator = JacobianOperator(function, state.tokens)
    assert (operator.rows, operator.cols) == (18, state.tokens[0].numel())
    v = torch.randn(1, operator.cols, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    columns = [jvp(function, state.tokens, v[..., k].view_as(state.tokens)).flatten(1) for k in range(3)]
    torch.testing.assert_close(operator @ v, torch.stack(columns, -1), rtol=1e-9, atol=1e-9)
    dense = operator.T @ torch.eye(18, dtype=torch.float64)[None]
    torch.testing.assert_close(dense.mT @ v, operator @ v, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("output", ["depth", "world_points"])
def test_dense_heads_multiply_with_a_block_of_directions_too(model, state, output):
    function = probe(model, state, output)
    operator = JacobianOperator(function, state.tokens)
    v = torch.randn(1, operator.cols, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    columns = [jvp(function, state.tokens, v[..., k].view_as(state.tokens)).flatten(1) for k in range(2)]
    torch.testing.assert_close(operator @ v, torch.stack(columns, -1), rtol=1e-9, atol=1e-9)
    w = torch.randn(1, operator.rows, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
    torch.testing.assert_close(w.mT @ (operator @ v), (operator.T @ w).mT @ v, rtol=1e-9, atol=1e-9)
