"""Which models are pruned, how their copies are called, and whose weights they use."""

import copy
import math

import pytest
import torch
import transformers as tf
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import pullback as pb
from helpers.families import SMALL_MODELS, images_for, model_of
from pullback.errors import ImageError, ModelError, PullbackError, ShapeError
from pullback.models.dinov2 import Dinov2, Dinov2Config
from pullback.registry import BACKBONES

# All that take images; SigLIP 2, which takes patches, is in test_siglip2.py.
MODELS = [name for name, small in SMALL_MODELS.items() if BACKBONES[small.family].assemble and "siglip2" not in name]
FIXED_SIZE = {name for name in MODELS if SMALL_MODELS[name].family in ("vit", "deit", "clip", "siglip")}
SIZES = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 3, "image_size": 42, "patch_size": 14}


def pruned(model, **options):
    return pb.prune(model, "norm", **{"ratio": 0.5, "stages": [1], **options})


def fresh(name):
    """A copy of its own, for tests that change it."""
    return copy.deepcopy(model_of(name))


def first_tensor(output):
    if isinstance(output, torch.Tensor):
        return output
    return output[0] if isinstance(output, tuple) or not hasattr(output, "embedding") else output.embedding


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: tf.Dinov2Backbone(tf.Dinov2Config(**SIZES)),
            r"Dinov2Backbone returns .* Load the weights with one of",
        ),
        (
            lambda: tf.Dinov2WithRegistersBackbone(tf.Dinov2WithRegistersConfig(**SIZES)),
            r"Dinov2WithRegistersBackbone returns .* expected one of Dinov2Model, Dinov2WithRegistersModel",
        ),
        (
            lambda: tf.ViTForMaskedImageModeling(tf.ViTConfig(**SIZES)),
            r"ViTForMaskedImageModeling returns .* Pass model\.vit, its ViTModel, with dense=True if",
        ),
        (
            lambda: tf.CLIPModel(tf.CLIPConfig(vision_config=SIZES, text_config=TEXT)),
            r"CLIPModel returns .* Pass model\.vision_model, its CLIPVisionModel",
        ),
    ],
)
def test_a_model_with_another_output_is_refused(make, message):
    with pytest.raises(ModelError, match=f"model: {message}"):
        pruned(make().eval())


TEXT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 9}


def test_a_class_of_ones_own_that_is_a_known_model():
    class Mine(tf.Dinov2Model):
        pass

    assert pruned(Mine(tf.Dinov2Config(**SIZES)).eval())(torch.zeros(1, 3, 42, 42)).pooler_output.shape == (1, 24)


def test_what_is_no_model_is_named(tmp_path):
    with pytest.raises(
        ModelError, match=r"got the name 'tiny-scenes'. .*: pb.load_probe\('tiny-scenes'\).backbone.model"
    ):
        pruned("tiny-scenes")
    with pytest.raises(ModelError, match="model: expected a module, got the name"):
        pruned(tmp_path)
    with pytest.raises(
        ModelError, match=r"model: expected a module, got Backbone. Of a probe it is probe.backbone.model"
    ):
        pruned(pb.load_probe(model_of("dinov2")).backbone)
    with pytest.raises(ModelError, match=r"model: it is pruned already. .*pb.restore\(model\)"):
        pruned(pruned(model_of("dinov2")))


@pytest.mark.parametrize("name", ["bool_masked_pos", "labels", "attention_mask"])
def test_options_that_are_tensors_are_refused(name):
    fast, images = pruned(model_of("dinov2")), images_for("dinov2", (3, 3))
    with pytest.raises(ModelError, match=f"{name}: a pruned model gives its output alone"):
        fast(images, **{name: torch.ones(2, 9)})
    fast(images, **{name: None})


@pytest.mark.parametrize("name", MODELS)
def test_the_configuration_decides_whether_the_output_is_a_tuple(name):
    model, images = fresh(name), images_for(name, (3, 3))
    expected = first_tensor(pruned(model)(images))
    if not hasattr(getattr(model, "config", None), "return_dict"):
        with pytest.raises(ModelError, match=r"return_dict: (TinyScenes|TimmViT) has one form of output"):
            pruned(model)(images, return_dict=False)
        return
    model.config.return_dict = False
    output = pruned(model)(images)
    assert type(output) is tuple and torch.equal(output[0], expected)
    assert not isinstance(pruned(model)(images, return_dict=True), tuple)


@pytest.mark.parametrize("option", ["output_hidden_states", "output_attentions"])
def test_inner_tokens_are_refused_also_where_the_configuration_asks_for_them(option):
    model, images = fresh("depth-v2"), images_for("depth-v2", (3, 3))
    setattr(model.config, option, True)
    with pytest.raises(ModelError, match=f"{option}: the model's configuration asks for it"):
        pruned(model)(images)
    pruned(model)(images, **{option: False})
    with pytest.raises(ModelError, match=f"{option}: a pruned model gives its output alone"):
        pruned(model)(images, **{option: True})


@pytest.mark.parametrize("name", sorted(FIXED_SIZE))
def test_another_size_needs_the_option_that_the_model_needs(name):
    model, images = model_of(name), images_for(name, (2, 3))
    with pytest.raises((ValueError, RuntimeError), match=r"16|size of tensor"):  # the latter is SigLIP's
        model(images)
    with pytest.raises(
        PullbackError, match=r"pixel_values: .* expects 24x24 pixels, got 16x24.*interpolate_pos_encoding"
    ):
        pruned(model)(images)
    pruned(model)(images, interpolate_pos_encoding=True)


@pytest.mark.parametrize("name", MODELS)
def test_pixels_that_fill_no_patch_are_passed_over_as_the_model_does(name):
    model, options = model_of(name), {"interpolate_pos_encoding": True} if name in FIXED_SIZE else {}
    height, width = (side * SMALL_MODELS[name].patch_size for side in (2, 3))
    images = torch.randn(2, 3, height + 3, width + 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    fast = pruned(model)
    output = fast(images, **options)
    assert torch.equal(first_tensor(output), first_tensor(fast(images[..., :height, :width], **options)))
    forced = first_tensor(pruned(model, ratio=0.0).pruned(images))
    torch.testing.assert_close(forced, first_tensor(model(images, **options)), rtol=1e-6, atol=1e-6)
    with pytest.raises(ImageError, match="not divisible by the patch size"):
        fast.pruned(images[..., :5, :])


def test_crops_compile_into_one_graph():
    fast = pruned(fresh("dinov2").float())
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(fast, backend=counter, fullgraph=True, dynamic=False)
    images = torch.randn(2, 3, 45, 47)
    with torch.no_grad():
        torch.testing.assert_close(compiled(images).pooler_output, fast(images).pooler_output, rtol=1e-4, atol=1e-4)
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", ["dinov2", "dinov2-swiglu", "dinov3", "clip", "vit", "depth-v2", "tiny-scenes"])
def test_replaced_weights_are_used(name):
    model, images = fresh(name), images_for(name, (3, 3))
    fast = pruned(model)
    before = first_tensor(fast(images))
    other = {key: value * 0.9 if value.is_floating_point() else value for key, value in model.state_dict().items()}
    model.load_state_dict(other, assign=True)
    after = first_tensor(fast(images))
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, first_tensor(pruned(model)(images)))


def test_a_parameter_replaced_by_hand_is_used():
    model, images = fresh("dinov2"), images_for("dinov2", (3, 3))
    fast = pruned(model)
    fast(images)
    model.layernorm.bias = nn.Parameter(torch.full((24,), 7.0, dtype=torch.float64))
    torch.testing.assert_close(fast(images).pooler_output, pruned(model)(images).pooler_output)


def test_a_compiled_copy_follows_after_one_call_without_the_compiler():
    """The check stays out of the graph."""
    model = fresh("dinov2").float()
    fast, images = pruned(model), images_for("dinov2", (3, 3)).float()
    torch._dynamo.reset()
    compiled = torch.compile(fast, backend="eager", fullgraph=True)
    with torch.no_grad():
        compiled(images)
        model.load_state_dict({key: value * 0.9 for key, value in model.state_dict().items()}, assign=True)
        fast(images)
        expected = pruned(model)(images).pooler_output
        torch.testing.assert_close(compiled(images).pooler_output, expected, rtol=1e-4, atol=1e-4)


def test_a_copy_follows_weights_that_are_views():
    """Gate and value of our own SwiGLU are halves of one matrix; a deep copy of them would be no view of its copy."""
    torch.manual_seed(0)
    config = Dinov2Config(
        hidden_size=24, num_hidden_layers=3, num_attention_heads=3, image_size=42, use_swiglu_ffn=True
    )
    fast = copy.deepcopy(pruned(Dinov2(config).eval().requires_grad_(False)))
    images = torch.randn(2, 3, 42, 42)
    for parameter in fast.model.parameters():
        parameter.mul_(0.9)
    torch.testing.assert_close(fast(images).pooler_output, pruned(fast.model)(images).pooler_output)


def test_where_and_what_it_is_can_be_asked_as_of_the_model():
    fast = pruned(model_of("dinov2"))
    assert fast.device == torch.device("cpu") and fast.dtype == torch.float64 and fast.main_input_name == "pixel_values"


def test_training_around_it_does_not_wake_the_frozen_model():
    model = fresh("dinov2")
    network = nn.Sequential(pruned(model)).train()
    assert network.training and not network[0].training and not model.training


def test_a_layer_that_is_replaced_counts():
    model = fresh("dinov2")
    fast, images = pruned(model), images_for("dinov2", (3, 3))
    with torch.no_grad():
        before = fast(images).pooler_output
        layer = model.encoder.layer[0].mlp.fc1
        other = nn.Linear(layer.in_features, layer.out_features).to(layer.weight).eval()
        model.encoder.layer[0].mlp.fc1 = other
        after = fast(images).pooler_output
        expected = pruned(model)(images).pooler_output
    assert not torch.allclose(before, after) and torch.equal(after, expected)


@pytest.mark.parametrize("strange", [math.nan, math.inf])
def test_a_score_that_is_no_number_leaves_the_output_one(strange):
    def score(tokens, context):
        scores = tokens.norm(dim=-1)
        return scores.index_fill(1, torch.tensor([3]), strange)

    with torch.no_grad():
        output, run = pb.prune(model_of("dinov2"), score, ratio=0.4, stages=[1]).with_record(
            images_for("dinov2", (3, 3))
        )
    assert output.pooler_output.isfinite().all()
    assert (run.records[0].kept == 3).any(1).all()


def test_images_that_are_none_and_scores_that_are_none():
    fast = pb.prune(model_of("dinov2"), lambda tokens, context: None, ratio=0.4, stages=[1])
    with pytest.raises(ShapeError, match=r"pixel_values: expected images .* got NoneType"):
        fast(None)
    with pytest.raises(PullbackError, match=r"score: expected one number per token, .* got NoneType"):
        fast(images_for("dinov2", (3, 3)))
