"""Attention whose keys stand for several tokens, by whichever way is fastest where it runs.

`attend` is the one entrance. `way` says which way it goes, so that nobody has to guess:

    "plain"    no sizes: PyTorch's fused attention
    "masked"   PyTorch's fused attention with log s as a mask. On any device, in any dtype, with gradients.
    "kernel"   `attention_kernel.py`, where Triton is installed: on GPUs from Ampere on, in bfloat16 and float16, for
               heads of 16, 32, 64 or 128 channels, where no gradient is wanted. Heads of 16 channels, which
               importance heads have, go this way without sizes, too

The kernel is an operator of PyTorch, `torch.ops.pullback.attend`, which torch.compile and CUDA graphs take as it is.
Files for other runtimes (torch.export, ONNX) never hold it.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode

Way = Literal["plain", "masked", "kernel"]
WIDTHS = (16, 32, 64, 128)  # of heads that the kernel takes
NARROW = (16,)  # heads for which it is faster even without sizes
MOST_PROGRAMS = 65535  # of the second and third axis of a grid


def attend(q: Tensor, k: Tensor, v: Tensor, log_sizes: Tensor | None = None) -> Tensor:
    """softmax(q k^T / sqrt(d) + log_sizes) v: queries [B, h, n, d], keys and values [B, h, N, d], log_sizes [B, N].

    A key that stands for s equal tokens weighs as much as they did (proportional attention, Bolya et al. 2023).
    """
    if way(q, k, v, log_sizes) == "kernel":
        powers = None if log_sizes is None else attention_kernel.in_powers_of_two(log_sizes)
        out: Tensor = torch.ops.pullback.attend(q, k, v, powers)
        return out.transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v) if log_sizes is None else masked(q, k, v, log_sizes)


def way(q: Tensor, k: Tensor, v: Tensor, log_sizes: Tensor | None) -> Way:
    """Return the way that `attend` goes with these tensors."""
    if log_sizes is None and q.shape[-1] not in NARROW:
        return "plain"
    fits = q.shape[-1] in WIDTHS and q.shape[-1] == v.shape[-1] and q.dtype == k.dtype == v.dtype
    few = max(q.shape[:2]) <= MOST_PROGRAMS and min(*q.shape, k.shape[2]) > 0
    lower = q.dtype in (torch.bfloat16, torch.float16)
    sizes = [] if log_sizes is None else [log_sizes]
    if fits and few and lower and kernels_run(q, k, v, *sizes):
        return "kernel"
    return "plain" if log_sizes is None else "masked"


def masked(q: Tensor, k: Tensor, v: Tensor, log_sizes: Tensor) -> Tensor:
    """Attend with log sizes as a mask. Fused kernels want its rows at multiples of 16 bytes, and read one row again and
    again if it is a view."""
    # Measured on an H200 with 685 keys: 0.47 ms, without this 0.89 ms, as one more channel of q and k 0.55 ms, with no
    # sizes at all 0.31 ms.
    count = k.shape[2]
    row = F.pad(log_sizes.to(q.dtype), (0, -count % 8))[:, None, None, :count]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=row.expand(-1, q.shape[1], q.shape[2], -1))


def kernels_run(*tensors: Tensor) -> bool:
    """Whether kernels of our own may read these tensors: on a GPU that Triton compiles for, without gradients, outside
    of torch.func, in no file for other runtimes, and not where operations are counted."""
    if not all(x.is_cuda for x in tensors) or exporting():
        return False
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return False
    if not torch.compiler.is_compiling() and (_differentiating() or _counting()):
        return False
    return _compiles_for(tensors[0].get_device())


def _differentiating() -> bool:
    """Whether torch.func or forward-mode derivatives are at work."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def _counting() -> bool:
    """Whether torch's counter of operations looks on. It does not see into kernels, and would take them for nothing."""
    return any(type(mode).__module__ == FlopCounterMode.__module__ for mode in _get_current_dispatch_mode_stack())


@torch.compiler.assume_constant_result  # torch.compile of PyTorch 2.11 would take is_exporting() for true everywhere
def exporting() -> bool:
    """Whether a file for other runtimes is made."""
    return torch.compiler.is_exporting()


@torch.compiler.assume_constant_result
def _compiles_for(device: int) -> bool:
    return HAS_TRITON and torch.cuda.get_device_capability(device) >= (8, 0)


# Triton comes with PyTorch for CUDA. Without a GPU nothing here needs it, so that it is not imported then.
HAS_TRITON = torch.version.cuda is not None and find_spec("triton") is not None
if HAS_TRITON:
    from pullback.backbones import attention_kernel
