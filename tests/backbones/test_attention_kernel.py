"""Attention with sizes as a kernel does what fused attention with a mask does, on a GPU or in Triton's interpreter."""

import importlib
import math

import pytest
import torch

from helpers.triton_kernels import DEVICE, ON_GPU, why_not
from pullback.backbones import attention

pytest.importorskip("triton")


@pytest.fixture
def kernel():
    if reason := why_not():
        pytest.skip(reason)
    return importlib.import_module("pullback.backbones.attention_kernel")


def inputs(batch, heads, rows, count, width, dtype=torch.float32):
    """Views of one product, as a block has them."""
    packed = torch.randn(batch, max(rows, count), 3 * heads * width).to(DEVICE, dtype)
    q, k, v = (part.unflatten(-1, (heads, width)).transpose(1, 2) for part in packed.chunk(3, -1))
    log_sizes = torch.randint(1, 21, (batch, count), device=DEVICE).float().log()
    return q[:, :, :rows], k[:, :, :count], v[:, :, :count], log_sizes


def exactly(q, k, v, log_sizes):
    logits = q.double() @ k.double().mT / math.sqrt(q.shape[-1])
    return (logits + log_sizes[:, None, None].double()).softmax(-1) @ v.double()


SHAPES = [(2, 3, 37, 37, 32), (1, 2, 1, 61, 64), (2, 2, 129, 129, 64), (1, 1, 70, 257, 16), (2, 1, 16, 16, 16)]


@pytest.mark.parametrize("shape", [*SHAPES, (1, 2, 9, 7, 64)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_any_number_of_queries_and_keys(kernel, shape, dtype):
    torch.manual_seed(0)
    q, k, v, log_sizes = inputs(*shape, dtype)
    for sizes in (log_sizes, None):
        powers = None if sizes is None else kernel.in_powers_of_two(sizes)
        out = kernel.attention(q, k, v, powers).transpose(1, 2)
        wanted = exactly(q, k, v, torch.zeros_like(log_sizes) if sizes is None else sizes)
        error = (out.double() - wanted).norm() / wanted.norm()
        assert error < (1e-6 if dtype == torch.float32 else 2e-3)


@pytest.mark.parametrize("sharp", [1, 60])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_reference_that_stays_is_as_good(kernel, dtype, sharp):
    """Also where sums go beyond what numbers hold, so that programs start again."""
    torch.manual_seed(0)
    q, k, v, log_sizes = inputs(2, 1, 70, 70, 32, dtype)
    q, tiles = q * sharp, kernel.Tiles(64, 32, 4, 2, steady=True)
    out = kernel.attention(q, k, v, kernel.in_powers_of_two(log_sizes), tiles).transpose(1, 2)
    wanted = exactly(q, k, v, log_sizes)
    assert (out.double() - wanted).norm() / wanted.norm() < (1e-5 if dtype == torch.float32 else 4e-3)


def test_the_operator_is_the_masked_way(kernel):
    """Also through a compiler that traces it by its fake."""
    torch.manual_seed(0)
    q, k, v, log_sizes = inputs(2, 2, 50, 50, 16)
    wanted = attention.masked(q, k, v, log_sizes)
    powers = kernel.in_powers_of_two(log_sizes)
    call = torch.compile(lambda *x: torch.ops.pullback.attend(*x) * 1, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(call(q, k, v, powers).transpose(1, 2), wanted)
    torch.library.opcheck(torch.ops.pullback.attend, (q, k, v, powers), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.skipif(not ON_GPU, reason="no GPU")
def test_which_way_a_gpu_goes():
    q, k, v, log_sizes = inputs(2, 2, 50, 50, 64, torch.bfloat16)
    assert attention.way(q, k, v, None) == "plain"
    assert attention.way(q, k, v, log_sizes) == "kernel"
    assert attention.way(q.float(), k.float(), v.float(), log_sizes) == "masked"
    q, k, v, log_sizes = inputs(2, 2, 50, 50, 24, torch.bfloat16)
    assert attention.way(q, k, v, log_sizes) == "masked", "a head of 24 channels"
    q, k, v, log_sizes = inputs(2, 2, 50, 50, 64, torch.bfloat16)
    assert attention.way(q.requires_grad_(), k, v, log_sizes) == "masked", "a gradient is asked for"


def test_a_cpu_goes_the_masked_way():
    q, k, v = (torch.randn(1, 2, 5, 16, dtype=torch.bfloat16) for _ in range(3))
    assert attention.way(q, k, v, torch.zeros(1, 5)) == "masked"
