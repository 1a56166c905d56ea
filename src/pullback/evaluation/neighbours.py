"""k-nearest-neighbour classification of embeddings."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def neighbour_accuracy(
    bank: Tensor, bank_labels: Tensor, queries: Tensor, labels: Tensor, *, k: int = 20, temperature: float = 0.07
) -> float:
    """Top-1 accuracy of cosine k-NN with votes exp(cos / temperature): bank [n, D], queries [m, D]."""
    classes = int(bank_labels.max()) + 1
    similarity = F.normalize(queries, dim=1) @ F.normalize(bank, dim=1).T
    nearest = similarity.topk(min(k, len(bank)), dim=1)
    votes = F.one_hot(bank_labels[nearest.indices], classes) * (nearest.values / temperature).exp()[..., None]
    return (votes.sum(1).argmax(1) == labels).double().mean().item()
