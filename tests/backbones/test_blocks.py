"""Blocks: the forward against transformers' own layers on any token subset, and the hand-written linearisation."""

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from helpers.families import SMALL_MODELS, model_of, random_normal
from pullback.backbones import Block, LinearizedBlock, Rope, linearized, load_backbone
from pullback.errors import ShapeError
from pullback.tokens import TokenLayout

GRID = (2, 3)
KEPT = torch.tensor([[0, 2, 3, 5], [4, 1, 0, 3]])  # two samples keep different tokens, in different orders


def own_layers(name: str) -> nn.ModuleList:
    depth = SMALL_MODELS[name].depth
    lists = (part for part in model_of(name).modules() if isinstance(part, (nn.ModuleList, nn.Sequential)))
    return next(part for part in lists if len(part) == depth)


def own_rope(name: str, positions: torch.Tensor) -> dict:
    """transformers' rotary tables of a subset, token by token; prefix tokens are not rotated."""
    model, prefix = model_of(name), load_backbone(model_of(name)).prefix
    if not hasattr(model, "rope_embeddings"):
        return {}
    size = [side * SMALL_MODELS[name].patch_size for side in GRID]
    tables = model.rope_embeddings(torch.zeros(1, 3, *size, dtype=torch.float64))
    unrotated = (torch.ones_like(tables[0][0]), torch.zeros_like(tables[1][0]))
    gathered = [
        torch.stack([torch.stack([table[i - prefix] if i >= prefix else rest for i in row]) for row in positions])
        for table, rest in zip(tables, unrotated, strict=True)
    ]
    return {"position_embeddings": tuple(table[:, None] for table in gathered)}


def run_own_layers(name: str, tokens: torch.Tensor, start: int, stop: int, positions: torch.Tensor) -> torch.Tensor:
    wants_mask = SMALL_MODELS[name].family in ("clip", "siglip", "siglip2")
    options = own_rope(name, positions) | ({"attention_mask": None} if wants_mask else {})
    for layer in own_layers(name)[start:stop]:
        out = layer(tokens, **options)
        tokens = out[0] if isinstance(out, tuple) else out
    return tokens


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_any_subset_of_tokens_runs_as_in_transformers_own_layers(name):
    backbone, layout = load_backbone(model_of(name)), TokenLayout(load_backbone(model_of(name)).prefix, GRID)
    tokens = random_normal(2, layout.tokens, backbone.dim)
    everything = torch.arange(layout.tokens).expand(2, -1)
    for positions, start, stop in ((KEPT, 0, backbone.depth), (KEPT, 1, 2), (everything, 1, backbone.depth)):
        subset = tokens.gather(1, positions[..., None].expand(-1, -1, backbone.dim))
        with torch.no_grad():
            expected = run_own_layers(name, subset, start, stop, positions)
        got = backbone.run(subset, start, stop, layout=layout, positions=positions)
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


def test_running_no_blocks_changes_nothing():
    tokens = random_normal(2, 7, 24)
    assert load_backbone(model_of("dinov2")).run(tokens, 2, 2) is tokens


def test_rotary_positions_need_a_layout():
    backbone = load_backbone(model_of("dinov3"))
    with pytest.raises(ShapeError, match="layout: needed with positions, because rotary positions depend on the patch"):
        backbone.run(random_normal(2, 4, 24), 0, 1, positions=KEPT)
    with pytest.raises(ShapeError, match=r"7 tokens with 3 prefix tokens do not make a square grid|must come along"):
        backbone.run(random_normal(2, 8, 24), 0, 1)


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_the_first_rows_alone_equal_those_of_the_whole_block(name):
    backbone = load_backbone(model_of(name))
    layout = TokenLayout(backbone.prefix, GRID)
    block, rope = backbone.blocks[1], backbone.rope(layout)
    tokens = random_normal(2, layout.tokens, backbone.dim)
    for rows in (1, 3):
        torch.testing.assert_close(block(tokens, rope, rows), block(tokens, rope)[:, :rows], rtol=1e-12, atol=1e-12)


def autodiff_products(block: Block, x, rope, rows, tangents, cotangents):
    """The two products column by column, by torch.func."""

    def function(tokens):
        return block(tokens, rope, rows)

    with sdpa_kernel(SDPBackend.MATH):
        pushed = [torch.func.jvp(function, (x,), (tangents[:, i],))[1] for i in range(tangents.shape[1])]
        _, vjp = torch.func.vjp(function, x)
        pulled = [vjp(cotangents[:, i])[0] for i in range(cotangents.shape[1])]
    return torch.stack(pushed, 1), torch.stack(pulled, 1)


def ropes_of(name: str) -> list[Rope | None]:
    backbone = load_backbone(model_of(name))
    rope = backbone.rope(TokenLayout(backbone.prefix, GRID))
    return [None] if rope is None else [rope, rope.gather(KEPT)]


@pytest.mark.parametrize("rows", [None, 1, 3])
@pytest.mark.parametrize("name", SMALL_MODELS)
def test_the_linearised_block_has_the_products_of_autodiff(name, rows):
    block = load_backbone(model_of(name)).blocks[1]
    for rope in ropes_of(name):
        count = 6 if rope is None else rope.cos.shape[2]
        x, tangents = random_normal(2, count, 24), random_normal(2, 5, count, 24, seed=1)
        cotangents = random_normal(2, 4, rows or count, 24, seed=2)
        linear = LinearizedBlock(block, x, rope, rows)
        torch.testing.assert_close(linear.output, block(x, rope, rows), rtol=1e-9, atol=1e-9)
        pushed, pulled = autodiff_products(block, x, rope, rows, tangents, cotangents)
        kept = tangents.clone(), cotangents.clone()
        torch.testing.assert_close(linear.jvp(tangents), pushed, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(linear.vjp(cotangents), pulled, rtol=1e-9, atol=1e-9)
        assert torch.equal(tangents, kept[0]) and torch.equal(cotangents, kept[1]), "products must not write on inputs"


@pytest.mark.parametrize("heads_at_a_time", [1, 4])
def test_products_do_not_depend_on_how_many_heads_are_processed_together(heads_at_a_time, monkeypatch):
    """Large models are processed in groups of heads that fit into the cache; small ones, as elsewhere here, in one."""
    block = load_backbone(model_of("dinov2")).blocks[0]
    x, v, c = (random_normal(*shape, seed=i) for i, shape in enumerate([(2, 7, 24), (2, 5, 7, 24), (2, 5, 7, 24)]))
    linear = LinearizedBlock(block, x)
    together = linear.jvp(v), linear.vjp(c)
    monkeypatch.setattr(linearized, "CACHE_BYTES", heads_at_a_time * 7 * 5 * 7 * 8)
    groups = linear.attention._groups(5, v)
    assert len(groups) == (6 if heads_at_a_time == 1 else 2)
    torch.testing.assert_close((linear.jvp(v), linear.vjp(c)), together)


def test_a_large_norm_epsilon_is_part_of_the_derivative():
    block = load_backbone(model_of("dinov2")).blocks[0]
    block = Block(**{**vars(block), "norm1": block.norm1._replace(eps=0.7), "norm2": block.norm2._replace(eps=2.0)})
    x, tangents = random_normal(2, 5, 24), random_normal(2, 3, 5, 24, seed=1)
    pushed, pulled = autodiff_products(block, x, None, None, tangents, tangents)
    linear = LinearizedBlock(block, x)
    torch.testing.assert_close(linear.jvp(tangents), pushed, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(linear.vjp(tangents), pulled, rtol=1e-9, atol=1e-9)


def test_the_rotation_of_tangents_is_that_of_queries_and_its_adjoint_undoes_it():
    angles = random_normal(1, 1, 6, 4).tile(2)
    rope = Rope(angles.cos(), angles.sin())
    x = random_normal(2, 3, 6, 5, 8, seed=1)  # [B, K, rows, heads, d]
    turned = rope.rotate_tangents(x, 6)
    for k in range(3):
        torch.testing.assert_close(turned[:, k].transpose(1, 2), rope.rotate(x[:, k].transpose(1, 2), 6))
    torch.testing.assert_close(rope.rotate_cotangents(turned, 6), x)
