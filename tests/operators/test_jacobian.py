"""The Jacobian of a plain function: products against the dense Jacobian, and input that cannot be used."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers.families import random_normal, randomized
from pullback.errors import DecoderError, NumericsError, PullbackError, ShapeError
from pullback.operators import JacobianOperator, check_sensitive, differentiable_attention


def attention(x: torch.Tensor) -> torch.Tensor:
    """[B, N, D] -> [B, N, D]: what forward mode cannot do with fused kernels."""
    return F.scaled_dot_product_attention(x[:, None], x[:, None] * 2, torch.tanh(x)[:, None])[:, 0]


def convolutional_head() -> nn.Module:
    return randomized(
        nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=False),
            nn.ConvTranspose2d(4, 1, 2, stride=2),
        )
    )


FUNCTIONS = {
    "elementwise": (lambda x: x.sin() * x.flip(1), (5, 3)),
    "attention": (attention, (4, 6)),
    "one number per sample": (lambda x: x.square().sum((1, 2)), (4, 3)),
    "an image of a vector": (lambda x: (x[:, :, None] * x[:, None].exp())[:, None], (3,)),
    "convolutional module": (convolutional_head(), (2, 3, 4)),
    "layer norm and gelu": (lambda x: F.gelu(F.layer_norm(x, (4,), eps=1e-2)), (3, 4)),
}


@pytest.fixture(params=FUNCTIONS.values(), ids=FUNCTIONS.keys())
def case(request):
    function, shape = request.param
    return function, random_normal(2, *shape, seed=3)


def dense_jacobian(function, point: torch.Tensor) -> torch.Tensor:
    """[B, M, n], sample by sample, by reverse mode."""
    with differentiable_attention():
        rows = [torch.func.jacrev(lambda x: function(x[None]).flatten())(sample) for sample in point]
    return torch.stack([row.flatten(1) for row in rows])


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


def test_both_products_are_those_of_the_dense_jacobian(case):
    function, point = case
    operator, expected = JacobianOperator(function, point), dense_jacobian(function, point)
    assert operator.shape == expected.shape
    eye = torch.eye(operator.cols, dtype=torch.float64).expand(2, -1, -1)
    close(operator @ eye, expected)
    eye = torch.eye(operator.rows, dtype=torch.float64).expand(2, -1, -1)
    close(operator.T @ eye, expected.mT)


def test_the_output_is_the_functions_value(case):
    function, point = case
    close(JacobianOperator(function, point).output, function(point).reshape(2, -1))


def test_any_chunk_size_gives_the_same_products(case):
    function, point = case
    whole = JacobianOperator(function, point, chunk_size=1000)
    v, w = random_normal(2, whole.cols, 5), random_normal(2, whole.rows, 5)
    for size in (1, 2, None):
        chunked = JacobianOperator(function, point, chunk_size=size)
        close(chunked @ v, whole @ v)
        close(chunked.T @ w, whole.T @ w)


def test_a_batch_equals_its_samples_one_by_one(case):
    function, point = case
    both = JacobianOperator(function, point)
    v, w = random_normal(2, both.cols, 3), random_normal(2, both.rows, 3)
    for index in range(2):
        single = JacobianOperator(function, point[index : index + 1])
        close(single @ v[index], (both @ v)[index])
        close(single.T @ w[index], (both.T @ w)[index])


def test_products_carry_no_graph_even_when_the_parameters_do():
    function = convolutional_head().requires_grad_(True)
    operator = JacobianOperator(function, random_normal(2, 2, 3, 4, seed=3).requires_grad_())
    v, w = random_normal(2, operator.cols, 2), random_normal(2, operator.rows, 2)
    assert not (operator @ v).requires_grad and not (operator.T @ w).requires_grad
    assert not operator.output.requires_grad


def test_features_from_inference_mode_can_be_differentiated():
    with torch.inference_mode():
        point = random_normal(2, 4, 6)
    operator = JacobianOperator(attention, point)
    v = random_normal(2, operator.cols, 2)
    close(operator @ v, dense_jacobian(attention, point.clone()) @ v)


def test_products_inside_inference_mode_are_the_same():
    point = random_normal(2, 4, 6)
    operator = JacobianOperator(attention, point)
    v, w = random_normal(2, operator.cols, 2), random_normal(2, operator.rows, 2)
    expected = operator @ v, operator.T @ w
    with torch.inference_mode():
        close(operator @ v, expected[0])
        close(operator.T @ w, expected[1])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_features_that_are_not_finite_are_refused(bad):
    point = random_normal(2, 3, 4)
    point[1, 2, 3] = bad
    with pytest.raises(NumericsError, match="features: expected finite numbers, got NaN or infinity"):
        JacobianOperator(torch.sin, point)


def test_features_need_a_batch_axis():
    with pytest.raises(ShapeError, match=r"features: expected \[B, N, D\] \(the batch axis first\), got \[4\]"):
        JacobianOperator(torch.sin, random_normal(4))


def test_an_output_that_is_not_finite_is_refused():
    with pytest.raises(NumericsError, match="decoder: its output holds NaN or infinity"):
        JacobianOperator(lambda x: x.sum(1).sub(100).log(), random_normal(2, 3, 4))


@pytest.mark.parametrize(
    ("returned", "kind"), [(lambda x: (x, x), "tuple"), (lambda x: {"y": x}, "dict"), (lambda x: None, "NoneType")]
)
def test_a_function_must_return_one_tensor(returned, kind):
    with pytest.raises(DecoderError, match=f"decoder: expected it to return one tensor .* got {kind}"):
        JacobianOperator(returned, random_normal(2, 3, 4))


@pytest.mark.parametrize("returned", [lambda x: x.sum(), lambda x: x.sum(0), lambda x: x[:1]])
def test_a_function_must_keep_the_batch_axis_first(returned):
    with pytest.raises(DecoderError, match=r"decoder: expected an output with the batch axis first, \[2, \.\.\.\]"):
        JacobianOperator(returned, random_normal(2, 3, 4))


def test_a_function_must_return_real_numbers():
    with pytest.raises(DecoderError, match=r"decoder: expected a floating-point output, got torch.int64"):
        JacobianOperator(lambda x: x.argmax(-1), random_normal(2, 3, 4))


DEAD = {
    "detaches": lambda x: x.detach() * 2,
    "stops the gradient": torch.no_grad()(torch.sin),  # forward mode alone would not notice
    "returns a constant": lambda x: torch.ones(len(x), 3, dtype=x.dtype),
    "rounds": lambda x: x.round(),
}


@pytest.mark.parametrize("function", DEAD.values(), ids=DEAD.keys())
def test_a_function_cut_off_from_its_input_is_named(function):
    operator = JacobianOperator(function, random_normal(2, 3, 4))
    product = operator @ random_normal(2, 12, 3)
    assert product.count_nonzero() == 0 and (operator.T @ random_normal(2, operator.rows, 1)).count_nonzero() == 0
    with pytest.raises(DecoderError, match=r"does not depend on the features \(zero Jacobian, samples \[0, 1\]\)"):
        check_sensitive(product.square().sum((1, 2)))


def test_only_the_dead_samples_are_named():
    with pytest.raises(DecoderError, match=r"samples \[1\]"):
        check_sensitive(torch.tensor([1.0, 0.0, 2.0]))
    check_sensitive(torch.tensor([1.0, 2.0]))


def test_products_that_are_not_finite_are_named():
    operator = JacobianOperator(torch.sqrt, torch.zeros(2, 3, dtype=torch.float64))  # infinite slope at zero
    with pytest.raises(NumericsError, match="J: its products hold NaN or infinity"):
        check_sensitive((operator @ torch.ones(2, 3, 1)).square().sum((1, 2)))


def test_an_unknown_precision_is_refused():
    with pytest.raises(PullbackError, match="precision: expected one of float32, tf32, bf16, got 'fp8'"):
        JacobianOperator(torch.sin, random_normal(2, 3), precision="fp8")


def test_bf16_needs_a_probe():
    with pytest.raises(PullbackError, match="precision: 'bf16' needs a probe with its own linearisation"):
        JacobianOperator(torch.sin, random_normal(2, 3), precision="bf16")


@pytest.mark.parametrize("size", [0, -1, 1.5, True])
def test_a_chunk_size_is_a_positive_whole_number(size):
    with pytest.raises(PullbackError, match=f"chunk_size: expected a whole number of at least 1, got {size}"):
        JacobianOperator(torch.sin, random_normal(2, 3), chunk_size=size)
