"""What every linear operator must obey. A new operator is added to OPERATORS and inherits all of it."""

import pytest
import torch

import pullback as pb
from helpers.families import images_for, model_of, random_normal
from pullback.errors import ShapeError
from pullback.operators import DenseOperator, JacobianOperator, LinearOperator, ProductCount, Transposed


def dense(rows: int, cols: int, batch: int = 2, seed: int = 0) -> DenseOperator:
    return DenseOperator(random_normal(batch, rows, cols, seed=seed))


MIXING = random_normal(12, 5, seed=1)


def curved(x: torch.Tensor) -> torch.Tensor:
    """[B, 3, 4] -> [B, 5], every output depending on every input of its sample."""
    return torch.sin(x.flatten(1) @ MIXING) * x.mean((1, 2))[:, None]


def jacobian_of_function(batch: int = 2) -> JacobianOperator:
    return JacobianOperator(curved, random_normal(batch, 3, 4, seed=2))


def jacobian_of_probe(name: str, decoder: str, layer: int, batch: int = 2, **options) -> JacobianOperator:
    probe = pb.load_probe(model_of(name), decoder, layer, **options)
    return JacobianOperator(probe, probe.features(images_for(name, (2, 3), batch)))


OPERATORS = {
    "dense, wide": lambda: dense(4, 6),
    "dense, tall": lambda: dense(6, 4),
    "dense, one sample": lambda: DenseOperator(random_normal(4, 6)),
    "transposed": lambda: Transposed(dense(4, 6)),
    "composed": lambda: dense(4, 6) @ dense(6, 3, seed=1),
    "composed of composed": lambda: (dense(4, 6) @ dense(6, 3, seed=1)) @ dense(4, 3, seed=2).T,
    "gram": lambda: (lambda a: a.T @ a)(dense(4, 6)),
    "jacobian of a function": jacobian_of_function,
    "jacobian of a function, one sample": lambda: jacobian_of_function(batch=1),
    "gram of a function": lambda: (lambda a: a.T @ a)(jacobian_of_function()),
    "jacobian of a probe": lambda: jacobian_of_probe("dinov2", "cls", 0),
    "jacobian of a probe, one sample": lambda: jacobian_of_probe("clip", "projection", 1, batch=1),
    "jacobian of a rotary probe": lambda: jacobian_of_probe("dinov3-gated", "mean", 1),
    "jacobian of a dense decoder": lambda: jacobian_of_probe("depth-v2", "depth-2x2", 2),
    "jacobian under an output metric": lambda: jacobian_of_probe(
        "vit", "pool", 1, distance="cosine", output_metric=random_normal(10, 3)
    ),
}


@pytest.fixture(params=OPERATORS.values(), ids=OPERATORS.keys())
def operator(request) -> LinearOperator:
    return request.param()


def columns(operator: LinearOperator, side: str, count: int = 3, seed: int = 7) -> torch.Tensor:
    size = operator.cols if side == "cols" else operator.rows
    return random_normal(operator.batch, size, count, seed=seed)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9 * float(expected.abs().max()))


def test_products_are_those_of_the_dense_matrix(operator):
    matrix = operator.dense()
    assert matrix.shape == operator.shape
    v, w = columns(operator, "cols"), columns(operator, "rows")
    close(operator @ v, matrix @ v)
    close(operator.T @ w, matrix.mT @ w)


def test_the_two_products_are_adjoint(operator):
    v, w = columns(operator, "cols"), columns(operator, "rows", seed=8)
    close((w * (operator @ v)).sum((1, 2)), ((operator.T @ w) * v).sum((1, 2)))


def test_products_are_linear(operator):
    for side, map_ in (("cols", operator), ("rows", operator.T)):
        a, b = columns(operator, side), columns(operator, side, seed=9)
        close(map_ @ (2 * a - 3 * b), 2 * (map_ @ a) - 3 * (map_ @ b))


def test_columns_do_not_mix(operator):
    v = columns(operator, "cols")
    close((operator @ v)[..., 1:2], operator @ v[..., 1:2])


def test_transposing_twice_gives_the_operator_back(operator):
    assert operator.T.shape == (operator.batch, operator.cols, operator.rows)
    v = columns(operator, "cols")
    close(operator.T.T @ v, operator @ v)


def test_composition_multiplies_in_turn(operator):
    v = columns(operator, "cols")
    gram = operator.T @ operator
    assert gram.shape == (operator.batch, operator.cols, operator.cols)
    close(gram @ v, operator.T @ (operator @ v))
    close(gram.T @ v, gram @ v)


def test_a_product_leaves_its_input_as_it_was(operator):
    v, w = columns(operator, "cols"), columns(operator, "rows")
    kept = v.clone(), w.clone()
    _ = operator @ v, operator.T @ w
    assert torch.equal(v, kept[0]) and torch.equal(w, kept[1])


def test_products_do_not_depend_on_the_memory_layout_of_the_columns(operator):
    v, w = columns(operator, "cols"), columns(operator, "rows")
    close(operator @ v.mT.contiguous().mT, operator @ v)
    close(operator.T @ w.mT.contiguous().mT, operator.T @ w)


def test_columns_of_another_dtype_are_converted(operator):
    product = operator @ columns(operator, "cols").float()
    assert product.dtype == operator.dtype == torch.float64


def test_no_columns_give_no_columns(operator):
    assert (operator @ columns(operator, "cols", 0)).shape == (operator.batch, operator.rows, 0)
    assert (operator.T @ columns(operator, "rows", 0)).shape == (operator.batch, operator.cols, 0)


def test_one_sample_may_drop_the_batch_axis_and_only_one(operator):
    v = columns(operator, "cols")
    if operator.batch == 1:
        close(operator @ v[0], (operator @ v)[0])
        close(operator @ v[0, :, 0], (operator @ v)[0, :, 0])
    else:
        for short in (v[0], v[0, :, 0]):
            with pytest.raises(ShapeError, match=rf"expected shape \[{operator.batch}, {operator.cols}, k\], got"):
                operator @ short


def test_wrong_shapes_are_named(operator):
    v = columns(operator, "cols")
    for wrong in (v[:, :-1], torch.cat([v, v]), v[None]):
        with pytest.raises(ShapeError, match="V in A @ V: expected shape"):
            operator @ wrong
        with pytest.raises(ShapeError, match=r"W in A\.T @ W: expected shape"):
            operator.rmatmat(wrong)


def test_products_are_counted_per_sample():
    for operator in (dense(4, 6), jacobian_of_function(), jacobian_of_probe("dinov2", "cls", 1)):
        assert operator.products == ProductCount(0, 0)
        _ = operator @ columns(operator, "cols", 3), operator.T @ columns(operator, "rows", 2)
        assert operator.products == ProductCount(jvp=3, vjp=2)
        assert operator.T.products == operator.products
        assert operator.products.pairs == 2.5 and operator.products.total == 5


def test_compositions_count_each_operator_once():
    a, b = dense(4, 6), dense(6, 6, seed=1)
    gram = a.T @ a
    _ = gram @ columns(gram, "cols", 2)
    assert a.products == gram.products == ProductCount(2, 2)
    nested = gram @ (b @ gram)
    _ = nested @ columns(nested, "cols", 1)
    assert a.products == ProductCount(4, 4) and b.products == ProductCount(1, 0)
    assert nested.products == nested.T.products == ProductCount(5, 4)


def test_counts_add_and_subtract():
    assert ProductCount(5, 3) - ProductCount(1, 1) + ProductCount(0, 2) == ProductCount(4, 4)


def test_a_composition_needs_matching_sizes():
    with pytest.raises(ShapeError, match="A @ B: expected B with batch 2 and 6 rows, got batch 2 and 4 rows"):
        dense(4, 6) @ dense(4, 6)


def test_a_dense_operator_needs_a_matrix():
    with pytest.raises(ShapeError, match=r"matrix: expected \[m, n\] or \[B, m, n\], got \[3\]"):
        DenseOperator(torch.zeros(3))


def test_a_subclass_without_products_says_so():
    bare = LinearOperator(1, 2, 2, dtype=torch.float64, device=torch.device("cpu"))
    with pytest.raises(TypeError, match="LinearOperator must define _matmat"):
        bare @ torch.zeros(2)
    with pytest.raises(TypeError, match="LinearOperator must define _rmatmat"):
        bare.T @ torch.zeros(2)
