"""The draft of a merge in one kernel does what `Matching.merge` and `Matching.add` do."""

import importlib
from pathlib import Path

import pytest
import torch

from helpers.triton_kernels import DEVICE, why_not
from pullback.pruning.matching import Matching

pytest.importorskip("triton")

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.parametrize("width", [40, 64])
def test_merging_in_one_kernel(monkeypatch, width):
    if reason := why_not():
        pytest.skip(reason)
    monkeypatch.syspath_prepend(BENCHMARKS)
    stage_kernel = importlib.import_module("stage_kernel")
    torch.manual_seed(0)
    order = torch.stack([torch.randperm(21) for _ in range(3)])
    kept, removed = order[:, :9].sort(1).values, order[:, 9:].sort(1).values
    destination = torch.randint(0, 4, removed.shape)  # several go to one, and nothing to most
    matching = Matching(*(x.to(DEVICE) for x in (kept, removed, destination, torch.rand(removed.shape) < 0.7)))
    x, weights = torch.randn(3, 21, width, device=DEVICE), torch.rand(3, 21, device=DEVICE)
    weights[0] = 0
    sizes = torch.randint(1, 5, (3, 21), device=DEVICE).float()
    mean, total = stage_kernel.merge_in_one(matching, x, weights, sizes)
    torch.testing.assert_close(mean, matching.merge(x, weights))
    assert torch.equal(total, matching.add(sizes))
    alone = ~((destination[:, None] == torch.arange(9)[:, None]) & matching.merged.cpu()[:, None]).any(-1)
    assert torch.equal(mean[alone], matching.keep(x)[alone]), "a token into which nothing is merged stays"
