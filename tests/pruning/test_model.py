"""A pruned model is called like the model, returns what the model returns, and leaves the model alone."""

import copy

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import pullback as pb
from helpers.families import GRIDS, SMALL_MODELS, images_for, model_of
from pullback.backbones import load_backbone
from pullback.backbones.outputs import FIXED_SIZE
from pullback.errors import ModelError, PullbackError
from pullback.learning.head import ImportanceHead
from pullback.models.dinov2 import Dinov2, Dinov2Config
from pullback.pruning import matching
from pullback.registry import BACKBONES
from pullback.scenes.render import normalised, render

# All that take images; SigLIP 2, which takes patches, is in test_siglip2.py.
MODELS = [name for name, small in SMALL_MODELS.items() if BACKBONES[small.family].assemble and "siglip2" not in name]
# Their own forward wants to be asked for other sizes.
ANY_SIZE = {name for name in MODELS if SMALL_MODELS[name].family in FIXED_SIZE}


def tensors(output):
    """Every tensor of an output, by name."""
    if isinstance(output, torch.Tensor):
        return {"output": output}
    fields = output._asdict() if isinstance(output, tuple) else dict(vars(output))
    return {name: value for name, value in fields.items() if isinstance(value, torch.Tensor)}


def options_for(name):
    return {"interpolate_pos_encoding": True} if name in ANY_SIZE else {}


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("name", MODELS)
def test_with_the_machinery_on_and_nothing_removed_the_output_is_the_models(name, grid):
    model, images = model_of(name), images_for(name, grid)
    full = model(images, **options_for(name))
    forced = pb.prune(model, "norm", ratio=0.0, stages=[0, 1]).pruned(images)
    assert type(forced) is type(full)
    ours, theirs = tensors(forced), tensors(full)
    assert ours.keys() == theirs.keys() and theirs
    for key in theirs:
        torch.testing.assert_close(ours[key], theirs[key], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_a_ratio_of_zero_is_the_model_to_the_bit(name):
    model, images = model_of(name), images_for(name, (3, 3))
    fast = pb.prune(model, "norm", ratio=0.0, stages=[1])
    ours, theirs = tensors(fast(images)), tensors(model(images))
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize("name", MODELS)
def test_called_as_the_model_is_called(name):
    model, images = model_of(name), images_for(name, (2, 3))
    fast = pb.prune(model, "norm", ratio=0.5, stages=[0, 1])
    output = fast(pixel_values=images, **options_for(name))
    assert type(output) is type(model(images, **options_for(name)))
    hidden = tensors(output).get("last_hidden_state")
    assert "classifier" not in name or output.logits.shape == (2, 5)
    assert "timm" not in name or output.shape == (2, 5)
    if hidden is not None:
        assert hidden.shape[1] == fast.backbone.prefix + 3
    if not isinstance(output, tuple) and hasattr(output, "to_tuple"):
        plain = fast(images, return_dict=False, **options_for(name))
        assert isinstance(plain, tuple) and torch.equal(plain[0], output[0])


def test_dense_gives_the_whole_grid_back():
    images = images_for("dinov2", (3, 3))
    fast = pb.prune(model_of("dinov2"), "norm", ratio=0.5, stages=[0], dense=True)
    assert fast(images).last_hidden_state.shape == (2, 10, 24)
    depth = pb.prune(model_of("depth-v2"), "norm", ratio=0.5, stages=[1])
    assert depth(images).predicted_depth.shape == (2, 42, 42)


def test_our_own_networks():
    torch.manual_seed(0)
    model = Dinov2(Dinov2Config(hidden_size=24, num_hidden_layers=3, num_attention_heads=3, image_size=42)).eval()
    images = torch.randn(2, 3, 42, 42)
    fast = pb.prune(model, "norm", ratio=0.5, stages=[0])
    assert type(fast(images)) is type(model(images))
    assert fast(images).pooler_output.shape == (2, 24)


def test_two_copies_live_side_by_side_and_the_model_stays_as_it_was():
    model, images = model_of("dinov2"), images_for("dinov2", (3, 3))
    before = model(images).pooler_output
    state = {name: value.clone() for name, value in model.state_dict().items()}
    methods = {name: type(module).forward for name, module in model.named_modules()}
    light = pb.prune(model, "norm", ratio=0.2, stages=[0])
    alone = light(images).pooler_output
    heavy = pb.prune(model, "class-attention", ratio=0.7, stages=[0, 1])
    outputs = heavy(images).pooler_output, light(images).pooler_output
    assert torch.equal(outputs[1], alone) and not torch.equal(*outputs)
    assert pb.restore(light) is model and pb.restore(heavy) is model
    assert torch.equal(model(images).pooler_output, before)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert methods == {name: type(module).forward for name, module in model.named_modules()}
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_restoring_something_else_is_an_error():
    with pytest.raises(ModelError, match=r"pruned: expected what pb.prune or pb.prune_views returned, got Dinov2Model"):
        pb.restore(model_of("dinov2"))


def test_a_change_of_dtype_reaches_weights_that_are_views():
    """Gate and value of our own SwiGLU are two halves of one matrix: the backbone must be taken apart anew."""
    torch.manual_seed(0)
    config = Dinov2Config(
        hidden_size=24, num_hidden_layers=3, num_attention_heads=3, image_size=42, use_swiglu_ffn=True
    )
    fast = pb.prune(Dinov2(config).eval(), "norm", ratio=0.4, stages=[1])
    images = torch.randn(2, 3, 42, 42)
    narrow = fast(images).pooler_output
    wide = fast.double()(images.double()).pooler_output
    torch.testing.assert_close(narrow.double(), wide, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["dinov2", "dinov2-swiglu", "clip", "depth-v2"])
def test_a_change_of_dtype_reaches_every_weight(name):
    model = copy.deepcopy(model_of(name))
    images = images_for(name, (3, 3))
    fast = pb.prune(model, ImportanceHead(24, 16, 4), ratio=0.4, stages=[1]).double()
    wide = tensors(fast(images))
    narrow = tensors(fast.float()(images.float()))
    for key, value in narrow.items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), wide[key], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.bfloat16, 0.03), (torch.float16, 0.005)])
def test_half_precision_is_near_full_precision(dtype, allowed):
    """On trained weights. Tokens whose scores are close may change places, which costs little."""
    model = load_backbone("tiny-scenes", device="cpu").model
    images = normalised(render(range(2), size=224).rgb[:, 0])
    fast = pb.prune(model, "class-attention", ratio=0.3, stages=[4])
    wide = fast(images).predicted_depth
    with torch.autocast("cpu", dtype):
        narrow = fast(images).predicted_depth
    assert (narrow.float() - wide).norm() / wide.norm() < allowed
    whole = copy.deepcopy(fast).to(dtype)(images.to(dtype)).predicted_depth
    assert whole.dtype == dtype
    assert (whole.float() - wide).norm() / wide.norm() < allowed


@pytest.mark.parametrize("name", ["dinov2", "dinov3", "clip", "depth-v2", "tiny-scenes"])
def test_compiles_into_one_graph_for_each_image_size(name):
    model = copy.deepcopy(model_of(name)).float()
    fast = pb.prune(model, ImportanceHead(24, 16, 4), ratio=0.4, stages=[0, 1])
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(fast, backend=counter, fullgraph=True, dynamic=False)
    for grid, frames in (((3, 3), 1), ((3, 3), 1), ((2, 3), 2), ((3, 3), 2)):
        images = images_for(name, grid).float()
        with torch.no_grad():
            ours, theirs = tensors(compiled(images, **options_for(name))), tensors(fast(images, **options_for(name)))
        assert counter.frame_count == frames
        for key in theirs:
            torch.testing.assert_close(ours[key], theirs[key], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", ["dinov2", "tiny-scenes"])
def test_what_a_gpu_compiles_chooses_the_same_tokens(name, batch, monkeypatch):
    """Ranks from pairs, and tensors that are kept in memory: here without the GPU."""
    monkeypatch.setattr(matching, "_compiled_for_gpu", lambda x: torch.compiler.is_compiling())
    by_pairs = []
    monkeypatch.setattr(
        matching, "_ranks_by_pairs", lambda scores, real=matching._ranks_by_pairs: by_pairs.append(1) or real(scores)
    )
    fast = pb.prune(copy.deepcopy(model_of(name)).float(), ImportanceHead(24, 16, 4), ratio=0.4, stages=[0, 1])
    images = images_for(name, (3, 3), batch=batch).float()
    torch._dynamo.reset()
    with torch.no_grad():
        ours = torch.compile(fast.with_record, backend="aot_eager", fullgraph=True)(images)[1]
        assert bool(by_pairs) == (batch == 1)
        theirs = fast.with_record(images)[1]
    for a, b in zip(ours.records, theirs.records, strict=True):
        assert torch.equal(a.kept, b.kept) and torch.equal(a.partner, b.partner)
    torch.testing.assert_close(ours.taps[0], theirs.taps[0], rtol=1e-4, atol=1e-4)


def test_a_copy_of_a_pruned_model_stands_alone():
    fast = pb.prune(copy.deepcopy(model_of("dinov2")), ImportanceHead(24, 16, 4).double(), ratio=0.4, stages=[1])
    images = images_for("dinov2", (3, 3))
    twin = copy.deepcopy(fast)
    expected = fast(images).pooler_output
    with torch.no_grad():
        for parameter in fast.parameters():
            parameter.zero_()
    assert torch.equal(twin(images).pooler_output, expected)


def test_gradients_reach_the_pixels():
    images = images_for("dinov2", (3, 3)).requires_grad_()
    pb.prune(model_of("dinov2"), "norm", ratio=0.4, stages=[1])(images).pooler_output.sum().backward()
    assert images.grad.abs().sum() > 0


def test_bad_input():
    model, images = model_of("dinov2"), images_for("dinov2", (3, 3))
    with pytest.raises(ModelError, match="no adapter for transformers' model type 'bert'"):
        import transformers

        pb.prune(
            transformers.BertModel(transformers.BertConfig(num_hidden_layers=1)).eval(), "norm", ratio=0.5, stages=[1]
        )
    with pytest.raises(PullbackError, match=r"ratio: expected a share .* got 1"):
        pb.prune(model, "norm", ratio=1.0, stages=[1])
    with pytest.raises(PullbackError, match="stages: expected ascending"):
        pb.prune(model, "norm", ratio=0.5, stages=[1, 0])
    with pytest.raises(PullbackError, match="stages: expected blocks from 0 to 1"):
        pb.prune(model, "norm", ratio=0.5, stages=[2])
    with pytest.raises(PullbackError, match=r"dense: the decoder of .* reads all patch tokens"):
        pb.prune(model_of("depth-v2"), "norm", ratio=0.5, stages=[1], dense=False)
    with pytest.raises(ModelError, match="output_hidden_states: a pruned model gives its output alone"):
        pb.prune(model, "norm", ratio=0.5, stages=[1])(images, output_hidden_states=True)
    with pytest.raises(ModelError, match="expected evaluation mode"):
        pb.prune(copy.deepcopy(model).train(), "norm", ratio=0.5, stages=[1])


def test_a_stage_that_changes_nothing_is_named(caplog):
    """Last-Layer Fusion after the last but one block: allowed, as in the schedule [1, 4, 7, 10], and useless."""
    fast = pb.prune(model_of("depth-v2"), "norm", ratio=0.5, stages=[1, 3])
    assert "block 3 is the last but one" in caplog.text
    assert fast(images_for("depth-v2", (3, 3))).predicted_depth.shape == (2, 42, 42)
