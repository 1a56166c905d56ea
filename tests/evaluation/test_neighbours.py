"""k-NN accuracy on embeddings whose answer is known."""

import torch

from pullback.evaluation import neighbour_accuracy


def clusters(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 4
    return torch.eye(8)[labels] + 0.05 * torch.randn(count, 8, generator=generator), labels


def test_separated_classes_are_all_found():
    assert neighbour_accuracy(*clusters(80, 0), *clusters(40, 1)) == 1.0


def test_labels_unrelated_to_the_embeddings_give_chance():
    bank, labels = clusters(400, 0)
    queries, truth = clusters(400, 1)
    shuffled = labels[torch.randperm(400, generator=torch.Generator().manual_seed(2))]
    assert abs(neighbour_accuracy(bank, shuffled, queries, truth) - 0.25) < 0.15


def test_nearer_neighbours_weigh_more():
    bank = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    labels = torch.tensor([0, 1, 1])
    assert neighbour_accuracy(bank, labels, torch.tensor([[1.0, 0.1]]), torch.tensor([0]), k=3) == 1.0
