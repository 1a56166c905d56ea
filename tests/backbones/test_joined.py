"""Queries, keys and values in one product are those of three, and follow the model's own parameters."""

import copy
import gc

import pytest
import torch

import pullback as pb
from helpers.families import SMALL_MODELS, model_of
from pullback.backbones import load_backbone
from pullback.backbones.joined import JoinedBlock, fresh, joined, wanted
from pullback.backbones.weights import block_hashes


def of_dinov2():
    model = copy.deepcopy(model_of("dinov2"))
    return model.requires_grad_(False), load_backbone(model)


@pytest.mark.parametrize("name", sorted(SMALL_MODELS))
def test_every_family_gives_the_same(name):
    own = load_backbone(model_of(name))
    other, x = joined(own), torch.randn(2, own.prefix + 9, own.dim, dtype=torch.float64)
    layout = own.layout_of(x)
    rope = own.rope_of(x, layout, None)
    for block, one in zip(own.blocks, other.blocks, strict=True):
        assert isinstance(one, JoinedBlock)
        torch.testing.assert_close(one(x, rope), block(x, rope), rtol=0, atol=1e-12)
        torch.testing.assert_close(one(x, rope, 2), block(x, rope, 2), rtol=0, atol=1e-12)


def test_a_gradient_of_the_input_passes_through_it():
    _, own = of_dinov2()
    x = torch.randn(1, 10, own.dim, dtype=torch.float64, requires_grad=True)
    found = [torch.autograd.grad(backbone.run(x, 0, 2).square().sum(), x)[0] for backbone in (own, joined(own))]
    torch.testing.assert_close(*found)


def test_trained_weights_are_not_joined():
    _, own = of_dinov2()
    own.blocks[1].key.bias.requires_grad_(True)
    kinds = [isinstance(block, JoinedBlock) for block in joined(own).blocks]
    assert kinds == [True, False, True]


def test_one_copy_for_all_pruned_models():
    model, own = of_dinov2()
    first, second = (pb.prune(model, "norm", ratio=ratio, stages=[0]) for ratio in (0.2, 0.5))
    one, two = (pruned._running.blocks[0].joined.weight for pruned in (first, second))
    assert one is two and len(one) == 3 * own.dim
    own_hash = block_hashes(first.backbone)
    assert own_hash == block_hashes(own)
    assert not any("joined" in name for name in first.state_dict())


def test_a_copy_goes_with_the_last_pruned_model():
    from weakref import ref

    model, _ = of_dinov2()
    pruned = pb.prune(model, "norm", ratio=0.2, stages=[0])
    matrix = ref(pruned._running.blocks[0].matrix)
    del pruned
    gc.collect()
    assert matrix() is None


@pytest.mark.parametrize("part", ["weight", "bias"])
def test_what_was_written_to_is_joined_anew(part):
    """By load_state_dict, in place; by a change of `.data` that moves it; by a move of the original alone."""
    model, own = of_dinov2()
    pruned, images = pb.prune(model, "norm", ratio=0.5, stages=[0]), torch.randn(1, 3, 42, 42, dtype=torch.float64)
    parameter = getattr(own.blocks[1].value, part)
    for change in (lambda: parameter.mul_(-1), lambda: setattr(parameter, "data", parameter.data * 2)):
        with torch.no_grad():
            change()
            assert not fresh(pruned._running)
            again = pb.prune(copy.deepcopy(model), "norm", ratio=0.5, stages=[0])
            torch.testing.assert_close(pruned(images).pooler_output, again(images).pooler_output)
        assert fresh(pruned._running)


def test_weights_that_are_trained_later_get_their_gradient():
    model, own = of_dinov2()
    pruned, images = pb.prune(model, "norm", ratio=0.5, stages=[0]), torch.randn(1, 3, 42, 42, dtype=torch.float64)
    weight = own.blocks[2].query.weight.requires_grad_(True)
    assert not wanted(own)
    pruned(images).pooler_output.sum().backward()
    assert weight.grad.abs().sum() > 0
    with torch.no_grad():
        assert wanted(own)


def test_compilers_see_the_joined_matrices_and_exported_files_do_not():
    model, own = of_dinov2()
    pruned, images = pb.prune(model, "norm", ratio=0.5, stages=[0]), torch.randn(2, 3, 42, 42, dtype=torch.float64)
    wide = (3 * own.dim, own.dim)
    seen = []

    def backend(graph, inputs):
        seen.extend(tuple(one.shape) for one in inputs if isinstance(one, torch.Tensor))
        return graph

    with torch.no_grad():
        wanted_output = pruned(images).pooler_output
        compiled = torch.compile(lambda x: pruned(x).pooler_output, fullgraph=True, dynamic=False, backend=backend)
        torch.testing.assert_close(compiled(images), wanted_output)
        assert seen.count(wide) == len(own.blocks)
        program = torch.export.export(pruned, (images,), strict=False)
    assert all(tuple(one.shape) != wide for one in [*program.constants.values(), *program.state_dict.values()])
