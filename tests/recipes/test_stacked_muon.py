"""Matrices taken together move as `torch.optim.Muon` moves them one by one."""

import pytest
import torch

from recipes.stacked_muon import StackedMuon, orthogonalised

SHAPES = [(6, 4), (4, 6), (6, 4), (5, 5)]


def moved(optimizer_of) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    matrices = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    optimizer = optimizer_of(matrices)
    for step in range(4):
        for matrix in matrices:
            matrix.grad = torch.randn(matrix.shape, generator=generator)
        matrices[1].grad = None if step == 2 else matrices[1].grad  # a part that took no part in a step
        optimizer.step()
    return [matrix.detach() for matrix in matrices]


def test_steps_are_those_of_torch():
    one_by_one = moved(
        lambda m: torch.optim.Muon(m, lr=0.03, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    )
    together = moved(lambda m: StackedMuon(m, 0.03, weight_decay=0.1, momentum=0.9))
    for found, expected in zip(together, one_by_one, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-3)  # both orthogonalise in bfloat16


def test_singular_values_come_near_one():
    matrices = torch.randn(3, 20, 8, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(orthogonalised(matrices).float())
    assert values.min() > 0.5 and values.max() < 1.3


def test_a_closure_is_refused():
    with pytest.raises(ValueError, match="closure: expected none"):
        StackedMuon([torch.nn.Parameter(torch.ones(2, 2))], 0.1, weight_decay=0.0).step(lambda: None)
