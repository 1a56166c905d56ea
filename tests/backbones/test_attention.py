"""Which way attention goes; the kernel itself has a test of its own."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pullback.backbones import attention
from pullback.evaluation.cost import flops


def test_operations_are_counted_without_kernels_which_hide_them(monkeypatch):
    monkeypatch.setattr(attention, "_compiles_for", lambda device: True)
    with FakeTensorMode():
        q, log_sizes = torch.empty(1, 2, 5, 64, dtype=torch.bfloat16, device="cuda"), torch.empty(1, 5, device="cuda")
    ways = []
    flops(lambda: ways.append(attention.way(q, q, q, log_sizes)))
    assert ways == ["masked"]
    assert attention.way(q, q, q, log_sizes) == "kernel", "and only while they are counted"
