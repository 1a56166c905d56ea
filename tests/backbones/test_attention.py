"""A key that stands for s tokens counts as s equal keys would."""

import torch
import torch.nn.functional as F

from helpers.families import random_normal
from pullback.backbones.attention import attend


def inputs(tokens=7, dim=16):
    return [random_normal(2, 3, tokens, dim, seed=seed) for seed in range(3)]


def test_a_size_of_three_equals_the_key_three_times():
    q, k, v = inputs()
    sizes = torch.tensor([[1, 3, 1, 1, 2, 1, 1], [1, 1, 1, 5, 1, 1, 1]])
    out = attend(q, k, v, sizes.double().log())
    for image in range(2):
        repeated = [t[image].repeat_interleave(sizes[image], dim=1) for t in (k, v)]
        torch.testing.assert_close(out[image], F.scaled_dot_product_attention(q[image], *repeated))


def test_without_sizes_it_is_plain_attention():
    q, k, v = inputs()
    assert torch.equal(attend(q, k, v), F.scaled_dot_product_attention(q, k, v))
