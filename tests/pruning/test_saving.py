"""Saved with its heads, loaded as it was."""

import json

import pytest
import torch

import pullback as pb
from families import images_for, model_of
from pullback.errors import ModelError
from pullback.learning.head import ImportanceHead
from pullback.models.dinov2 import Dinov2, Dinov2Config


def pruned(model, **options):
    torch.manual_seed(0)
    heads = [ImportanceHead(24, 16, 4).double(), "evit"]
    return pb.prune(model, heads, **{"ratio": 0.5, "stages": [0, 1], **options})


@pytest.mark.parametrize("name", ["dinov2", "clip", "vit", "depth-v2", "tiny-scenes"])
def test_a_folder_gives_back_the_model_with_its_heads(name, tmp_path):
    fast, images = pruned(model_of(name)), images_for(name, (3, 3))
    again = pb.PrunedModel.from_pretrained(fast.save_pretrained(tmp_path)).double()
    assert again.plan == fast.plan
    assert type(again.model) is type(fast.model)
    for ours, theirs in zip(_values(again(images)), _values(fast(images)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def _values(output):
    fields = vars(output) if not isinstance(output, tuple) else output._asdict()
    return [value for value in fields.values() if isinstance(value, torch.Tensor)]


def test_our_own_network(tmp_path):
    config = Dinov2Config(hidden_size=24, num_hidden_layers=3, num_attention_heads=3, image_size=42)
    fast, images = pruned(Dinov2(config).eval()).float(), torch.randn(2, 3, 42, 42)
    again = pb.PrunedModel.from_pretrained(fast.save_pretrained(tmp_path))
    torch.testing.assert_close(again(images).pooler_output, fast(images).pooler_output)


def test_a_model_that_is_there_already(tmp_path):
    model, images = model_of("dinov2"), images_for("dinov2", (3, 3))
    fast = pruned(model)
    again = pb.PrunedModel.from_pretrained(fast.save_pretrained(tmp_path), model=model)
    assert again.model is model
    again.double()
    torch.testing.assert_close(again(images).pooler_output, fast(images).pooler_output, rtol=1e-5, atol=1e-5)


def test_what_cannot_be_saved_is_refused(tmp_path):
    model = model_of("dinov2")
    own = pb.prune(model, lambda tokens, context: tokens.norm(dim=-1), ratio=0.5, stages=[0])
    with pytest.raises(ModelError, match="score: stage 0 uses a function of your own"):
        own.save_pretrained(tmp_path)
    by_task = pb.prune(model, "norm", ratio=0.5, stages=[0], preset="paper", modes=lambda t, c: t[:, None])
    with pytest.raises(ModelError, match="the modes of d_task are a function"):
        by_task.save_pretrained(tmp_path)


def test_a_folder_that_holds_something_else(tmp_path):
    with pytest.raises(ModelError, match="holds no pruned model that can be read"):
        pb.PrunedModel.from_pretrained(tmp_path)
    fast = pruned(model_of("dinov2"))
    fast.save_pretrained(tmp_path)
    document = json.loads((tmp_path / "pruned.json").read_text())
    document["class"] = "subprocess:Popen"
    (tmp_path / "pruned.json").write_text(json.dumps(document))
    with pytest.raises(ModelError, match=r"names the class subprocess:Popen, which is neither"):
        pb.PrunedModel.from_pretrained(tmp_path)
