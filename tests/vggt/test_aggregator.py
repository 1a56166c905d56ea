"""Entering the trunk at any layer: states, taps, and what is held when a probe changes the tokens of a layer."""

from dataclasses import replace

import pytest
import torch

from helpers.vggt_models import scenes, tiny
from pullback.errors import ModelError, ShapeError
from pullback.tokens import TokenLayout


@pytest.fixture(scope="module")
def trunk():
    return tiny(depth=5, hook_layers=(1, 2, 3, 3)).aggregator.requires_grad_(False)


@pytest.fixture(scope="module")
def images():
    return scenes(2, 3, 3, 28, 42)


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_the_embedded_state_is_camera_registers_and_patches_of_each_view(trunk, images):
    state = trunk.embed(images)
    assert state.layer == -1 and state.frame is None and not state.held
    assert state.layout == TokenLayout(prefix=3, grid=(2, 3), views=3)
    views = state.tokens.unflatten(1, (3, 9))
    for scene in range(2):  # the first view of every scene is the reference, not only that of the first scene
        close(views[scene, 0, :1], trunk.camera_token[0, 0])
        close(views[scene, 0, 1:3], trunk.register_token[0, 0])
        for view in (1, 2):
            close(views[scene, view, :1], trunk.camera_token[0, 1])
            close(views[scene, view, 1:3], trunk.register_token[0, 1])


@pytest.mark.parametrize("layer", [-1, 0, 1, 2, 3, 4])
def test_taps_from_any_layer_on_are_those_of_the_whole_forward(trunk, images, layer):
    expected = trunk(images)
    assert sorted(expected) == [1, 2, 3, 4]  # the hooks, and the last layer for the camera
    state = trunk.advance(trunk.embed(images), layer)
    assert state.layer == layer
    assert sorted(state.held) == [hook for hook in (1, 2, 3) if hook < layer]
    taps = trunk.taps(state)
    for hook, tap in expected.items():
        assert tap.shape == (2, 3, 9, 64)
        close(taps[hook], tap)


def test_running_blocks_by_index_gives_the_same_tokens(trunk, images):
    start = trunk.embed(images)
    state = trunk.advance(start, 3)
    close(trunk.run(start.tokens, 0, 4, start.layout), state.tokens)
    halfway = trunk.run(start.tokens, 0, 2, start.layout)
    close(trunk.run(halfway, 2, 4, start.layout), state.tokens)
    assert trunk.run(halfway, 2, 2, start.layout) is halfway


def test_a_tap_is_the_frame_output_beside_the_global_output(trunk, images):
    state = trunk.advance(trunk.embed(images), 2)
    frame, tokens = state.tap().flatten(1, 2).chunk(2, -1)
    close(frame, state.frame)
    close(tokens, state.tokens)
    before = trunk.advance(trunk.embed(images), 1)
    one_view, all_views = trunk.ropes(before.layout, before.tokens)
    alone = trunk.frame_blocks[2](before.tokens[:, 9:18], one_view)  # a view attends to itself only
    close(frame[:, 9:18], alone)
    close(tokens, trunk.global_blocks[2](frame, all_views))


def test_a_change_at_a_layer_reaches_its_own_global_half_and_all_above_but_nothing_below(trunk, images):
    state = trunk.advance(trunk.embed(images), 2)
    old, new = trunk.taps(state), trunk.taps(replace(state, tokens=state.tokens + 0.1))
    close(new[1], old[1])
    close(new[2][..., :32], old[2][..., :32])
    close(new[2][..., 32:], old[2][..., 32:] + 0.1)
    for layer in (3, 4):
        assert (new[layer] - old[layer]).abs().amin((0, 1, 3)).min() > 1e-6


def test_blocks_take_any_choice_of_tokens_with_its_rotary_tables(trunk, images):
    """Attention over all tokens in another order is the same: the seam for pruning the global tokens."""
    state = trunk.embed(images)
    _, all_views = trunk.ropes(state.layout, state.tokens)
    order = torch.stack([torch.randperm(27, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)])
    chosen = state.tokens.gather(1, order[..., None].expand(-1, -1, 32))
    expected = trunk.global_blocks[0](state.tokens, all_views).gather(1, order[..., None].expand(-1, -1, 32))
    close(trunk.global_blocks[0](chosen, all_views.at(order)), expected)


def test_wrong_layers_and_tokens_are_refused(trunk, images):
    state = trunk.embed(images)
    with pytest.raises(ModelError, match="expected blocks in ascending order from 0 to 4, got 0 to 5"):
        trunk.advance(state, 5)
    with pytest.raises(ModelError, match="blocks run only forwards"):
        trunk.advance(trunk.advance(state, 2), 1)
    with pytest.raises(ModelError, match="before block 0 has no tap"):
        state.tap()
    with pytest.raises(ShapeError, match=r"tokens: expected \[B, 27, 32\] \(3 views of 3 \+ 6 tokens\)"):
        trunk.run(state.tokens[:, :-1], 0, 1, state.layout)
    with pytest.raises(ShapeError, match=r"got \[2, 3, 9, 32\]"):
        trunk.taps(replace(state, tokens=state.tokens.unflatten(1, (3, 9))))
