"""Blocks take views, scenes and tokens in parts: the values stay, and never more exists at once than was asked for."""

import pytest
import torch
import torch.nn.functional as F

from helpers.vggt_models import scenes, tiny
from pullback.vggt.network import block
from pullback.vggt.network.rope import Rope

TENSORS = ("pose_enc", "depth", "depth_conf", "world_points", "world_points_conf")
WHOLE = 1 << 60


def outputs(model, images, tokens, monkeypatch):
    monkeypatch.setattr(block, "CHUNK_TOKENS", tokens)
    with torch.no_grad():
        return model(images)


@pytest.mark.parametrize("changes", [{}, dict(patch_embed="dinov2_vitl14_reg")], ids=["conv", "vit"])
@pytest.mark.parametrize("tokens", [1, 10, 20])  # less than a view of 9, one view, two views; a scene has 27
def test_parts_of_any_size_change_no_value(changes, tokens, monkeypatch):
    model, images = tiny(**changes), scenes(3, 3, 3, 28, 42)
    whole, parts = (outputs(model, images, size, monkeypatch) for size in (WHOLE, tokens))
    for name in TENSORS:
        torch.testing.assert_close(parts[name], whole[name], rtol=1e-12, atol=1e-12)


def test_under_autocast_parts_are_the_whole_up_to_its_rounding(monkeypatch):
    model, images = tiny(torch.float32), scenes(2, 3, 3, 28, 42, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        whole, parts = (outputs(model, images, size, monkeypatch) for size in (WHOLE, 10))
    for name in TENSORS:
        assert parts[name].dtype == torch.float32
        assert (parts[name] - whole[name]).norm() < 1e-2 * whole[name].norm()


def widths(model, images, *, grad):
    """[samples, tokens] that the MLPs of the aggregator saw at once."""
    seen = []
    hooks = [
        own.mlp.register_forward_hook(lambda _, x, __: seen.append(tuple(x[0].shape[:2])))
        for own in (*model.aggregator.frame_blocks, *model.aggregator.global_blocks)
    ]
    with torch.set_grad_enabled(grad):
        model.aggregator(images)
    for hook in hooks:
        hook.remove()
    return set(seen)


def test_without_gradients_no_more_tokens_than_that_are_there_at_once(monkeypatch):
    model, images = tiny(), scenes(2, 3, 3, 28, 42)  # 3 views of 9 tokens
    monkeypatch.setattr(block, "CHUNK_TOKENS", 20)
    assert widths(model, images, grad=False) == {(2, 9), (1, 20), (1, 7)}  # two views at once, and parts of a scene
    assert widths(model, images, grad=True) == {(6, 9), (2, 27)}
    monkeypatch.setattr(block, "CHUNK_TOKENS", 54)
    assert widths(model, images, grad=False) == {(6, 9), (2, 27)}


@pytest.mark.parametrize("shared", [True, False])
def test_tables_and_sizes_of_samples_go_with_them(shared, monkeypatch):
    """Tokens chosen per sample have tables [B, 1, N, 2, F/2] of their own."""
    generator = torch.Generator().manual_seed(0)

    def noise(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    own = tiny().aggregator.global_blocks[0]
    angles = noise(6, 2, 4) if shared else noise(5, 1, 6, 2, 4)
    x, rope, log_sizes = noise(5, 6, 32), Rope(angles.cos(), angles.sin()), noise(5, 6).abs()
    with torch.no_grad():
        whole = own(x, rope, log_sizes)
        monkeypatch.setattr(block, "CHUNK_TOKENS", 13)
        kept = x.clone()
        torch.testing.assert_close(own(x, rope, log_sizes), whole, rtol=1e-12, atol=1e-12)
    assert torch.equal(x, kept)
    torch.testing.assert_close(own(x, rope, log_sizes), whole, rtol=0, atol=0)  # with gradients: not in parts


def test_attention_has_queries_and_keys_in_the_type_of_the_values(monkeypatch):
    """Under autocast too, where norms and rotations give float32; without it, nothing is converted."""
    own = tiny(torch.float32).aggregator.global_blocks[0].attn
    x, angles = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(0)), torch.arange(48.0).view(6, 2, 4)
    rope, seen = Rope(angles.cos(), angles.sin()), []
    attention = F.scaled_dot_product_attention

    def spied(q, k, v, **options):
        seen.append({q.dtype, k.dtype, v.dtype})
        return attention(q, k, v, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spied)
    plain = own(x, rope)
    with torch.autocast("cpu", torch.bfloat16):
        own(x, rope)
    assert seen == [{torch.float32}, {torch.bfloat16}]
    q, k, v = own.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
    mixed = attention(rope.rotate(own.q_norm(q)), rope.rotate(own.k_norm(k)), v)
    assert torch.equal(plain, own.proj(mixed.transpose(1, 2).flatten(2)))
