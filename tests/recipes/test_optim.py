"""Matrices taken together move as `torch.optim.Muon` moves them one by one; gradients are autograd's, also replayed."""

import pytest
import torch
from torch import nn

from recipes.optim import GraphedGradients, StackedMuon, eager_gradients, orthogonalised

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


def setting(device: str):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 3)).to(device)

    def losses(x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        error = (net(x) - y).square().mean()
        return {"loss": 2 * error, "error": error}

    examples = [
        (torch.randn(n, 5, device=device), torch.randn(n, 3, device=device)) for n in (4, 6, 4)
    ]  # two shapes, one of them twice
    return losses, list(net.parameters()), examples


def test_every_call_fills_the_gradients_anew_in_the_same_memory():
    losses, parameters, examples = setting("cpu")
    places = []
    for example in examples:
        parts = eager_gradients(losses, parameters, example)
        assert not parts["loss"].requires_grad and parts["loss"] == 2 * parts["error"]
        expected = torch.autograd.grad(losses(*example)["loss"], parameters)
        torch.testing.assert_close([p.grad for p in parameters], list(expected))
        places.append([p.grad.data_ptr() for p in parameters])
    assert places[0] == places[1] == places[2]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: CUDA graphs")
def test_a_graph_gives_the_same_losses_and_gradients_for_every_shape():
    losses, parameters, examples = setting("cuda")
    graphed = GraphedGradients()
    for example in examples:
        found = {name: float(part) for name, part in graphed(losses, parameters, example).items()}
        gradients = [p.grad.clone() for p in parameters]
        expected = eager_gradients(losses, parameters, example)
        assert found == pytest.approx({name: float(part) for name, part in expected.items()}, rel=1e-5)
        torch.testing.assert_close(gradients, [p.grad for p in parameters])
