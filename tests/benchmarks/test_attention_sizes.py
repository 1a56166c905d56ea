"""The kernels of the benchmark of attention with sizes compute that: in Triton's interpreter, or on a GPU."""

import importlib
import math
from pathlib import Path

import pytest
import torch

from helpers.triton_kernels import DEVICE, ON_GPU, why_not

pytest.importorskip("triton")

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
HALF = torch.bfloat16 if ON_GPU else torch.float16  # the interpreter multiplies the bits of bfloat16 as integers
TOLERANCE = {torch.float32: 3e-5, torch.float16: 5e-3, torch.bfloat16: 1.5e-2}
EVERY = [
    {"form": "online"},
    {"form": "steady"},
    {"form": "ahead"},
    {"form": "short"},
    {"form": "online", "tma": True},
    {"form": "steady", "tma": True},
    {"form": "ahead", "tma": True},
]


@pytest.fixture(scope="module")
def kernels():
    if reason := why_not():
        pytest.skip(reason)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield importlib.import_module("attention_kernels")


def named(options):
    return " ".join(str(name if value is True else value) for name, value in options.items())


def off(kernels, options, count, width, dtype, *, rows=None, sharp=1.0, padded=False):
    """The relative error of a kernel with blocks of 64 queries and 32 keys on two images, two heads."""
    torch.manual_seed(count + width)
    packed = torch.randn(2, count, 3 * 2 * width + (16 if padded else 0), device=DEVICE).to(dtype)
    parts = packed[..., : 6 * width].chunk(3, -1)
    q, k, v = (part.unflatten(-1, (2, width)).transpose(1, 2) for part in parts)
    q = q.mul_(sharp)[:, :, :rows]
    sizes = torch.randint(1, 21, (2, count), device=DEVICE)
    logits = q.double() @ k.double().mT / math.sqrt(width) + sizes.double().log()[:, None, None]
    reference = (logits.softmax(-1) @ v.double()).transpose(1, 2).flatten(2)
    out = kernels.Kernel(queries=64, keys=32, **options)(q, k, v, kernels.in_powers_of_two(sizes.log()))
    assert out.shape == reference.shape and out.is_contiguous() and out.dtype == dtype
    return ((out.double() - reference).norm() / reference.norm()).item()


@pytest.mark.parametrize("options", EVERY, ids=named)
@pytest.mark.parametrize("count", [37, 64, 129])
def test_in_float32_with_tokens_that_fill_no_block(kernels, options, count):
    assert off(kernels, options, count, 32, torch.float32) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("options", EVERY, ids=named)
def test_in_half_precision_as_views_of_one_product(kernels, options):
    assert off(kernels, options, 70, 64, HALF, padded=True) < TOLERANCE[HALF]


@pytest.mark.parametrize("options", EVERY[:4], ids=named)
def test_widths_that_are_no_power_of_two(kernels, options):
    assert off(kernels, options, 45, 80, torch.float32) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("options", EVERY, ids=named)
def test_one_query(kernels, options):
    assert off(kernels, options, 40, 32, torch.float32, rows=1) < TOLERANCE[torch.float32]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # sums that overflow, before a program starts again
@pytest.mark.parametrize("dtype", [HALF, torch.float32])
@pytest.mark.parametrize("options", EVERY, ids=named)
def test_logits_far_above_the_reference(kernels, options, dtype):
    assert off(kernels, options, 70, 64, dtype, sharp=60.0) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("share", [2, 4])
@pytest.mark.parametrize("form", ["online", "steady", "ahead"])
def test_exponentials_by_polynomial(kernels, form, share):
    assert off(kernels, {"form": form, "polynomial": share}, 70, 64, torch.float32) < 1e-4


@pytest.mark.parametrize("count", range(1, 305, 7))
def test_steps_cover_all_keys_and_little_more(kernels, count):
    for block in (32, 64, 128):
        first, second = kernels.tail(count, block)
        rest = count % block
        assert rest <= first + second <= max(16, 2 * rest) and (first or not second)
        assert all(size & (size - 1) == 0 and size <= block for size in (first, second))
    one, two, three = kernels.pieces(count)
    assert count <= one + two + three < count + 48 and one + two <= 32 + count


def test_sizes_reach_beyond_the_last_key(kernels):
    powers = kernels.in_powers_of_two(torch.tensor([[1.0, 2.0, 8.0]]).log())
    assert powers.shape == (1, 256) and powers.dtype == torch.float32
    torch.testing.assert_close(powers[0, :3], torch.tensor([0.0, 1.0, 3.0]))
    assert (powers[0, 3:] == -math.inf).all()


def test_what_a_kernel_cannot_do_is_refused(kernels):
    q = torch.zeros(1, 1, 20, 24, device=DEVICE)
    powers = kernels.in_powers_of_two(torch.zeros(1, 20, device=DEVICE))
    with pytest.raises(ValueError, match=r"expected 16, 32, \.\.\., 128 channels"):
        kernels.Kernel()(q, q, q, powers)
    q = torch.zeros(1, 1, 20, 32, device=DEVICE)
    with pytest.raises(ValueError, match="expected at least 64 keys, got 20"):
        kernels.Kernel("ahead", keys=64)(q, q, q, powers)
    with pytest.raises(ValueError, match="expected adjacent channels"):
        kernels.Kernel()(q.mT, q.mT, q.mT, powers)
