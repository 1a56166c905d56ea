"""Gradients of a step: those of autograd, anew at every call, and the same from a CUDA graph."""

import pytest
import torch
from torch import nn

from recipes.step_gradients import GraphedGradients, eager_gradients


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
