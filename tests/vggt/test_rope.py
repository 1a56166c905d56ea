"""Rotary positions on a grid, against the formula written out pair by pair with complex numbers."""

import torch

from pullback.tokens import TokenLayout
from pullback.vggt.network.rope import rope_tables, token_positions

LAYOUT = TokenLayout(prefix=3, grid=(2, 4))
HEAD_DIM, BASE = 16, 100.0


def tables(layout=LAYOUT):
    return rope_tables(token_positions(layout, torch.device("cpu")), HEAD_DIM, BASE, torch.float64)


def heads(tokens, seed=0):
    return torch.randn(2, 3, tokens, HEAD_DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_patches_start_at_one_and_the_tokens_before_them_are_at_zero():
    positions = token_positions(LAYOUT, torch.device("cpu")).tolist()
    assert positions[:3] == [[0, 0]] * 3
    assert positions[3:] == [[row, column] for row in (1, 2) for column in (1, 2, 3, 4)]


def test_each_pair_of_features_is_a_complex_number_that_turns_by_its_angle():
    x, axis, pairs = heads(LAYOUT.tokens), HEAD_DIM // 2, HEAD_DIM // 4
    expected = torch.empty_like(x)
    for token, position in enumerate(token_positions(LAYOUT, torch.device("cpu")).tolist()):
        for half in (0, 1):
            for j in range(pairs):
                one, other = half * axis + j, half * axis + j + pairs
                turn = torch.polar(
                    torch.ones((), dtype=torch.float64),
                    torch.tensor(position[half] * BASE ** (-2 * j / axis), dtype=torch.float64),
                )
                turned = torch.complex(x[:, :, token, one], x[:, :, token, other]) * turn
                expected[:, :, token, one], expected[:, :, token, other] = turned.real, turned.imag
    torch.testing.assert_close(tables().rotate(x), expected, rtol=1e-12, atol=1e-12)


def test_rotation_keeps_lengths_and_leaves_special_tokens_alone():
    x = heads(LAYOUT.tokens)
    turned = tables().rotate(x)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(turned[:, :, :3], x[:, :, :3])
    assert (turned[:, :, 3:] - x[:, :, 3:]).norm(dim=-1).min() > 0.1


def test_products_of_queries_and_keys_depend_on_relative_positions_only():
    positions = token_positions(LAYOUT, torch.device("cpu"))
    shifted = positions + torch.tensor([5, 2])
    q, k = heads(LAYOUT.tokens, 1), heads(LAYOUT.tokens, 2)
    scores = []
    for where in (positions, shifted):
        rope = rope_tables(where, HEAD_DIM, BASE, torch.float64)
        scores.append(rope.rotate(q) @ rope.rotate(k).mT)
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-12, atol=1e-12)


def test_tables_of_several_views_repeat_and_those_of_a_choice_follow_it():
    rope, views = tables(), 2
    x = heads(views * LAYOUT.tokens)
    turned = rope.repeat(views).rotate(x)
    for own, expected in zip(turned.split(LAYOUT.tokens, 2), x.split(LAYOUT.tokens, 2), strict=True):
        torch.testing.assert_close(own, rope.rotate(expected))

    choice = torch.tensor([[4, 0, 9], [7, 8, 1]])  # other tokens in each sample
    chosen = torch.stack([x[sample, :, choice[sample]] for sample in (0, 1)])
    expected = torch.stack([turned[sample, :, choice[sample]] for sample in (0, 1)])
    torch.testing.assert_close(rope.repeat(views).at(choice).rotate(chosen), expected)


def test_half_precision_tables_are_rounded_not_computed_in_half_precision():
    """Angles rounded to bfloat16 before the cosine would be off by up to 0.1 at row 37."""
    positions = torch.tensor([[37, 37]])
    coarse = rope_tables(positions, HEAD_DIM, BASE, torch.bfloat16)
    exact = rope_tables(positions, HEAD_DIM, BASE, torch.float64)
    assert coarse.cos.dtype == torch.bfloat16
    assert (coarse.cos.double() - exact.cos).abs().max() < 2**-8
