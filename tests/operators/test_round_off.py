"""Which relative error an operator's products leave: by dtype, by precision, and the worst part of a composition."""

import pytest
import torch

import pullback as pb
from helpers.families import images_for, model_of, random_normal
from pullback.operators import DenseOperator, JacobianOperator
from pullback.operators.execution import PRECISIONS, ROUND_OFF, round_off_of


def test_coarser_arithmetic_leaves_larger_errors():
    errors = [round_off_of(torch.float64), *(round_off_of(torch.float32, precision) for precision in PRECISIONS)]
    assert errors == sorted(errors) == list(ROUND_OFF.values())
    units = [torch.finfo(torch.float64).eps, torch.finfo(torch.float32).eps, 2.0**-10, 2.0**-8]
    assert all(0.1 * unit < error for error, unit in zip(errors, units, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits_are_no_better_than_bf16(dtype):
    assert round_off_of(dtype) == round_off_of(torch.float32, "bf16")


def test_tf32_leaves_float64_alone_and_bf16_does_not():
    assert round_off_of(torch.float64, "tf32") == round_off_of(torch.float64)
    assert round_off_of(torch.float64, "bf16") == round_off_of(torch.float32, "bf16")


def test_a_jacobian_has_the_round_off_of_its_precision():
    probe = pb.load_probe(model_of("dinov2"), "cls", 0)
    features = probe.features(images_for("dinov2", (2, 3)))
    assert JacobianOperator(probe, features, precision="bf16").round_off == ROUND_OFF["bf16"]
    function, single = torch.sin, random_normal(2, 3).float()
    assert JacobianOperator(function, single).round_off == ROUND_OFF["float32"]
    assert JacobianOperator(function, single, precision="tf32").round_off == ROUND_OFF["tf32"]
    assert JacobianOperator(function, single.double(), precision="tf32").round_off == ROUND_OFF["float64"]


def test_transposed_and_composed_operators_inherit_the_coarsest():
    double, coarse = DenseOperator(random_normal(3, 3)), JacobianOperator(torch.sin, torch.ones(1, 3), precision="tf32")
    assert double.round_off == double.T.round_off == (double.T @ double).round_off == ROUND_OFF["float64"]
    assert coarse.T.round_off == (coarse.T @ coarse).round_off == ROUND_OFF["tf32"]
    assert (double @ coarse).round_off == (coarse @ double).T.round_off == ROUND_OFF["tf32"]
