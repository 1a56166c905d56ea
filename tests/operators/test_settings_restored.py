"""Products choose AD-safe attention and the arithmetic asked for, and leave both as they found them."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import pullback as pb
from helpers.families import images_for, model_of, random_normal
from pullback.operators import JacobianOperator
from pullback.operators.execution import matmul_precision


def attention_backends() -> dict[str, bool]:
    cuda = torch.backends.cuda
    return {
        "flash": cuda.flash_sdp_enabled(),
        "memory-efficient": cuda.mem_efficient_sdp_enabled(),
        "math": cuda.math_sdp_enabled(),
        "cudnn": cuda.cudnn_sdp_enabled(),
    }


class Watched:
    """An attention function that records the settings it runs under, and fails on demand."""

    def __init__(self) -> None:
        self.fails = False
        self.seen: list[tuple[dict[str, bool], str]] = []

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append((attention_backends(), torch.get_float32_matmul_precision()))
        if self.fails:
            raise RuntimeError("inside the product")
        return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None]).flatten(1)


@pytest.fixture
def matmul_setting():
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def test_fused_attention_is_off_inside_a_product_and_on_again_after_it():
    before, function = attention_backends(), Watched()
    assert before["flash"] and before["memory-efficient"]
    operator = JacobianOperator(function, random_normal(2, 4, 6))
    _ = operator @ random_normal(2, 24, 2), operator.T @ random_normal(2, 24, 2)
    assert attention_backends() == before
    assert all(backends["math"] and not backends["flash"] for backends, _ in function.seen)


def test_a_users_own_choice_of_attention_survives():
    operator = JacobianOperator(Watched(), random_normal(2, 4, 6))
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        chosen = attention_backends()
        _ = operator @ random_normal(2, 24, 2)
        assert attention_backends() == chosen


def test_fused_attention_is_on_again_after_a_failure():
    before, function = attention_backends(), Watched()
    operator = JacobianOperator(function, random_normal(2, 4, 6))
    function.fails = True
    with pytest.raises(RuntimeError, match="inside the product"):
        operator @ random_normal(2, 24, 2)
    assert attention_backends() == before
    with pytest.raises(RuntimeError, match="inside the product"):
        JacobianOperator(function, random_normal(2, 4, 6))
    assert attention_backends() == before


def test_products_of_a_probe_leave_fused_attention_on():
    before = attention_backends()
    probe = pb.load_probe(model_of("siglip"), "pool", 0)
    operator = JacobianOperator(probe, probe.features(images_for("siglip", (2, 2))))
    _ = operator @ random_normal(2, operator.cols, 2), operator.T @ random_normal(2, operator.rows, 2)
    assert attention_backends() == before


@pytest.mark.parametrize("outside", ["highest", "high", "medium"])
@pytest.mark.parametrize(("precision", "inside"), [("float32", "highest"), ("tf32", "high")])
def test_matrix_products_use_the_precision_asked_for_and_no_other(matmul_setting, outside, precision, inside):
    torch.set_float32_matmul_precision(outside)
    function = Watched()
    operator = JacobianOperator(function, random_normal(2, 4, 6), precision=precision)
    assert {setting for _, setting in function.seen} == {"highest"}, "the base point is always exact"
    function.seen.clear()
    _ = operator @ random_normal(2, 24, 2)
    assert {setting for _, setting in function.seen} == {inside}
    assert torch.get_float32_matmul_precision() == outside
    function.fails = True
    with pytest.raises(RuntimeError, match="inside the product"):
        operator @ random_normal(2, 24, 2)
    assert torch.get_float32_matmul_precision() == outside


def test_other_cudnn_settings_are_left_alone(monkeypatch):
    cudnn = torch.backends.cudnn
    monkeypatch.setattr(cudnn, "is_available", lambda: True)
    with cudnn.flags(enabled=False, benchmark=True, deterministic=True, allow_tf32=True):
        for precision, tf32 in (("float32", False), ("tf32", True)):
            with matmul_precision(precision):
                assert (cudnn.enabled, cudnn.benchmark, cudnn.deterministic) == (False, True, True)
                assert cudnn.allow_tf32 == tf32
            assert cudnn.allow_tf32
